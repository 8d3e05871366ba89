"""The cost of runs, from their ledgers: time, tokens, FLOPs and money, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ostinato.every import Axis
from ostinato.observe.ledger import Summary
from ostinato.run import RunFolder
from ostinato.tables import NONE, Table, format_seconds, format_si

Books = Mapping[str, Summary]  # by the name of the run
Form = Callable[[float], str]

MEANING = {  # parts of device time, wall clock and FLOPs
    "sample": "sampling",
    "grade": "where training waited for it",
    "train": "forward and backward",
    "measure": "sampler against trainer",
    "eval": "held-out sets; in no compute",
    "idle": "held and not busy: loading, saving, between steps",
    "lost": "given up: an exception or a signal ended it",
    "loading": "until a process is ready, each time",
    "between": "what has no row",
}
WASTE = {  # reasons why sampled tokens were not trained on
    "zero_variance": "all siblings got the same reward, so the group was dropped",
    "zero_advantage": "the reward equals its baseline: no gradient",
    "truncated": "cut off at the length limit and masked by the algorithm",
    "failed": "the episode ended in an error",
    "no_verdict": "the reward gave no verdict",
    "prompt_too_long": "the prompt left no room for an answer",
    "too_few_episodes": "too many siblings ended in an error",
    "too_few_verdicts": "too few siblings got a verdict",
    "unused": "sampled for steps to come, or for steps that were done again",
    "no_routes": "recorded no expert routes, while others did",
}
DEVICE = ("sample", "grade", "train", "measure", "eval", "idle", "lost")
AXES: Mapping[Axis, tuple[str, Form | None]] = {
    Axis.DEVICE_HOURS: ("devices x wall clock, idle ones too", "{:.4g}".format),
    Axis.HOURS: ("wall clock", "{:.4g}".format),
    Axis.FLOPS: ("FLOP", format_si),
    Axis.TOKENS: ("sampled", format_si),
    Axis.STEPS: ("that count", "{:.0f}".format),
    Axis.MONEY: ("price x device-hours", None),
}


def is_torn(run: RunFolder) -> bool:
    """Whether ledger.jsonl ends in the middle of a line, as after a kill."""
    path = run.ledger.path
    return path.exists() and bool(content := path.read_bytes()) and not content.endswith(b"\n")


def cost_tables(accounts: Books) -> list[Table]:
    """Tables with a column per run, values with their shares. Lines without any value are left out; sums come
    last."""
    cells_of: dict[str, dict[str, dict[str, str]]] = {}  # by title, line and run
    for run, account in accounts.items():
        for title, name, value, whole, form in _list_entries(account):
            cells = cells_of.setdefault(title, {}).setdefault(name, {})
            if value is not None:
                share = f"{value / whole:.1%}" if whole else NONE
                cells[run] = form(value) if title == "Compute" else f"{form(value)}  {share:>6}"
    tables = []
    for title, lines in cells_of.items():
        ordered_lines = sorted(lines.items(), key=lambda line: line[0].partition("\n")[0] == "all")
        rows = [(name, *(cells.get(run, "") for run in accounts)) for name, cells in ordered_lines if cells]
        tables.append(Table(title=title, head=list(accounts), rows=rows, note=NOTES.get(title, "")))
    return [table for table in tables if table.rows]


NOTES = {
    "Compute": "Of training: with idle devices, restarts and repeated work, without evaluation.",
    "FLOPs of training": "From tokens and the model's shapes; those of lost work are not known.",
}
Entry = tuple[str, str, float | None, float | None, Form]  # table, line, value, its whole, format


def _list_entries(account: Summary) -> Iterator[Entry]:
    """Yield all entries of a run's tables."""
    yield from _list_compute(account)
    wall, devices = sum(account.wall.values()), sum(pool.total for pool in account.pools.values())
    for name, seconds in {**account.wall, "all": wall}.items():
        yield "Wall clock", _part(name), seconds, wall, format_seconds
    for pool, pool_seconds in account.pools.items():
        parts = {
            **dict.fromkeys(DEVICE),
            **pool_seconds.busy,
            "idle": pool_seconds.idle,
            "lost": pool_seconds.lost,
            "all": pool_seconds.total,
        }
        for part, seconds in parts.items():
            yield f"Device time, pool {pool}", _part(part), seconds, pool_seconds.total, format_seconds
    sampled = account.tokens.get("sampled")
    yield "Tokens", "sampled", sampled, sampled, format_si
    yield "Tokens", "trained\nof them", account.tokens.get("trained"), sampled, format_si
    yield from _list_waste("Tokens", "not trained", account.dropped, sampled)
    for name in ("prefilled", "injected", "drafted", "accepted", "recomputed"):
        yield "Tokens", name, account.tokens.get(name), None, format_si
    yield "Tokens", "context rows of training", account.tokens.get("trained_context"), None, format_si
    flops = sum(account.flops.values()) if account.flops else None
    for part, count in account.flops.items():
        yield "FLOPs of training", _part(part), count, flops, format_si
    yield "FLOPs of training", "all\nFLOP", flops, flops, format_si
    for name, form in (("rows", format_si), ("flops", format_si), ("seconds", format_seconds)):
        total = {"flops": flops, "seconds": wall}.get(name)
        yield "Forgetting watch", name, account.forgetting.get(name), total, form
    evaluation, title = account.evaluation, "Evaluation, in no compute"
    yield title, "evaluations", evaluation.times, None, "{:.0f}".format
    yield title, "device time\nshare of all", evaluation.device_seconds, devices, format_seconds
    yield title, "sampled tokens", evaluation.tokens, None, format_si
    yield title, "FLOPs", evaluation.flops, None, format_si


def _list_compute(account: Summary) -> Iterator[Entry]:
    """Yield the entries of the table "Compute": every axis, speed, bill, restarts, repeated steps."""

    def money(value: float) -> str:
        return f"{value:,.4g} {account.currency}"

    for axis, (note, form) in AXES.items():
        yield "Compute", f"{axis}\n{note}", account.compute.get(axis), None, form or money
    seconds, flops = 3600 * account.compute.get("hours", 0.0), account.compute.get("flops")
    speed = flops / seconds if seconds and flops is not None else None
    yield "Compute", "speed\nFLOP/s over all of these hours", speed, None, format_si
    yield "Compute", "bill\nof all device hours, evaluation too", account.money, None, money
    yield "Compute", "restarts", account.restarts, None, "{:.0f}".format
    yield "Compute", "repeated steps", account.repeated, None, "{:.0f}".format


def _part(name: str) -> str:
    """The label of a part of the work: its name and meaning."""
    return f"{name}\n{MEANING.get(name, '')}"


def _list_waste(title: str, what: str, counts: Mapping[str, int], whole: float | None) -> Iterator[Entry]:
    """Yield an entry per reason for waste, the most frequent first."""
    for name, count in Counter(counts).most_common():
        line = f"{what}: {name.replace('_', ' ')}\n{WASTE.get(name, '')}"
        yield title, line, count, whole, format_si
