"""What a run has come to: the ten numbers that page and terminal begin with, its state, and tables of it.

Functions of a ``RunRows``; every number is a text with its unit and what it is compared with.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ostinato.every import Every, spent_in_steps
from ostinato.lock import is_held
from ostinato.observe.costs import WASTE
from ostinato.observe.ledger import Event, Summary, summary
from ostinato.observe.rows import (
    Row,
    RunRows,
    abilities_left,
    column,
    ends,
    mapping,
    mean,
    names_under,
    total,
)
from ostinato.observe.stats import Estimate, difference, estimate, number
from ostinato.observe.timeline import Kind, Usage, pool_of
from ostinato.tables import NONE, Line, Table, figure_text, seconds_text, si

NOT_MEASURED = "not measured"
K3_NATS = 1e-3  # per token; exact arithmetic gives 0, bf16 rounding about 1e-4


class Figure(NamedTuple):
    """``note``: its unit, and what it is compared with; ``tone``: good, bad or empty."""

    name: str
    value: str
    note: str
    tone: str = ""


# ---- the first screen


def figures(data: RunRows, cost: Summary | None = None) -> list[Figure]:
    """The ten numbers, in the same order for every run; "-" for what is not known. ``cost``: the sums of its
    ledger."""
    rows, cost = data.metrics, cost or summary(data.logs["ledger"])
    return [
        _held_out(data, "pass@1", "Held-out pass@1", "share of prompts"),
        _held_out(data, "reward", "Held-out reward", "mean per answer"),
        _training(rows, "reward", "Training reward", "mean per answer", ".3f"),
        _teaching(rows),
        _gap(rows),
        _steps(data, cost),
        Figure("Time", seconds_text(sum(cost.wall.values())), _wall_note(cost)),
        _tokens(cost),
        _training(rows, "tokens_per_s", "Speed", "sampled tokens per second of whole steps", ",.0f"),
        _cost(cost),
    ]


def tabulate(data: RunRows) -> Table:
    """The ten numbers for a terminal."""
    lines = [(figure.name, figure.value, figure.note) for figure in figures(data)]
    note = "unit; what it is compared with"
    return Table(title=data.name, head=("", note), rows=lines, words=(note,))


def _held_out(data: RunRows, key: str, name: str, unit: str) -> Figure:
    rows = data.evals
    before, after = (None if row is None else estimate(row, key) for row in ends(rows))
    if after is None:
        was = f"; before training {before.text()}" if before else ""
        return Figure(name, NONE, f"{unit}; {'not measured yet' if before else NOT_MEASURED}{was}")
    unit = f"{unit}, {number(rows[-1], 'n') or 0:.0f} prompts, step {rows[-1]['step']}, 95 %"
    if before is None:
        return Figure(name, after.text(), f"{unit}; {BASELINE}")
    change = difference(before, after)
    note = f"{unit}; before training {before.text()}, change {change.text('+.3f')}"
    was, now = (None if row is None else estimate(row, key) for row in ends(data.scores["greedy"]))
    if was and now:  # one answer at temperature 0
        note += f"; greedy {was.value:.3f} before, {now.value:.3f} now"
    return Figure(name, after.text(), note, _tone(change))


BASELINE = "the model before training was not measured (eval.at_start), so no gain can be stated"


def _tone(change: Estimate) -> str:
    low, high = change.interval or (0.0, 0.0)
    return "good" if low > 0 else "bad" if high < 0 else ""


def verdict(data: RunRows) -> tuple[str, str]:
    """(one sentence on the held-out change, its tone)."""
    before, after = (None if row is None else estimate(row, "pass@1") for row in ends(data.evals))
    if before is None and after is None:
        return "No held-out score has been measured in this run (eval.jsonl has none).", ""
    if after is None:
        return "Only the model before training has been measured so far.", ""
    if before is None:
        return f"There is nothing to compare with: {BASELINE}.", ""
    change = difference(before, after)
    if change.interval is None:
        return "The change has no interval: too few prompts were judged.", ""
    words = {
        "good": "The policy improved: the 95 % interval of the change lies above 0.",
        "bad": "The policy got worse: the 95 % interval of the change lies below 0.",
        "": "No change beyond chance: the 95 % interval of the change contains 0.",
    }
    return words[_tone(change)], _tone(change)


def tenth(rows: Sequence[Row], *, first: bool = False) -> Sequence[Row]:
    """The first or last tenth of a run, at least one step."""
    count = max(1, len(rows) // 10)
    return rows[:count] if first else rows[-count:]


def _training(rows: Sequence[Row], key: str, name: str, unit: str, form: str) -> Figure:
    """The mean of the last tenth of the steps, beside that of the first."""
    now, first = mean(tenth(rows), key), mean(tenth(rows, first=True), key)
    if now is None:
        return Figure(name, NONE, f"{unit}; no step has it")
    was = "" if first is None else f"; in the first {first:{form}}"
    return Figure(name, f"{now:{form}}", f"{unit}, last tenth of the steps{was}")


def _teaching(rows: Sequence[Row]) -> Figure:
    name, unit = "Groups that teach", "of prompts, whose answers got different rewards"
    now, first = (mean(some, "frac_reward_zero_std") for some in (tenth(rows), tenth(rows, first=True)))
    if now is None or first is None:
        return Figure(name, NONE, unit)
    note = f"{unit}, last tenth of the steps; in the first {1 - first:.0%}"
    return Figure(name, f"{1 - now:.0%}", note, "bad" if now > 0.5 else "")


def _gap(rows: Sequence[Row]) -> Figure:
    value = mean(tenth(rows), "sampling/kl_k3")
    unit = f"nats per token (k3), last tenth of the steps; 0 is exact, up to {K3_NATS:g} is rounding"
    tone = "bad" if value is not None and value > K3_NATS else ""
    return Figure("Sampler against trainer", figure_text(value), unit, tone)


def _steps(data: RunRows, cost: Summary) -> Figure:
    planned, rows = planned_steps(data), data.metrics
    done = int(rows[-1]["step"]) if rows else 0
    again = f"; {cost.repeated} done twice" if cost.repeated else ""
    restarts = f"; started {cost.sessions} times" if cost.restarts else ""
    of = "until the budget is spent" if planned is None else f"of {planned} planned"
    return Figure("Steps", f"{done:,}", f"{of}{restarts}{again}")


def _wall_note(cost: Summary) -> str:
    parts = sorted(cost.wall.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts if value >= 0.05)
    return f"wall clock of all processes: {shown}" if shown else "wall clock; no row in ledger.jsonl"


def _tokens(cost: Summary) -> Figure:
    sampled, trained = (cost.tokens.get(name, 0) for name in ("sampled", "trained"))
    share = f"; {trained / sampled:.0%} of them trained on" if sampled else ""
    return Figure("Tokens", si(sampled), f"sampled{share}")


def _cost(cost: Summary) -> Figure:
    hours = sum(pool.total for pool in cost.pools.values()) / 3600
    what = "idle ones, restarts and evaluation too"
    if cost.money is None:
        return Figure("Cost", f"{hours:.3g} device-hours", f"{what}; no price is set")
    return Figure("Cost", f"{cost.money:,.4g} {cost.currency}", f"for {hours:.3g} device-hours, {what}")


def commands(data: RunRows) -> list[tuple[str, str]]:
    """(what for, the command): what a reader may do next."""
    path, state = data.run.path, status(data)
    if "tinker" in data.recipe:
        return [("read episodes as text", f"ostinato show {path}")]
    if state["tone"] == "live":
        return [("follow it", f"ostinato report --live {path}"), ("read episodes", f"ostinato show {path}")]
    found = [] if finish(data) else [("go on with it", f"ostinato resume {path}")]
    if data.metrics:
        found += [("talk to it", f"ostinato serve {path}"), ("read episodes", f"ostinato show {path}")]
        found += [("score it with more prompts", f"ostinato eval {path} eval.n=1000")]
        found += [("see where it would end", f"ostinato scale fit {path}")] if len(data.evals) > 3 else []
    return found


# ---- its state

FINISHES = {
    "spent": "its budget is spent",
    "enough": "the rest was not worth its compute",
    "solved": "every prompt is solved",
    "callback": "on_step ended it",
}
ENDS = {
    "done": "finished",
    "interrupted": "interrupted by Ctrl-C",
    "terminated": "stopped by SIGTERM",
    "collapsed": "stopped: the policy collapsed",
    "forgot": "stopped: the policy was losing what it could do before",
    **{why: f"ended: {words}" for why, words in FINISHES.items()},
}


def finish(data: RunRows) -> str:
    """Why the run is at its end: "done", or one of FINISHES; empty for one that is not."""
    planned, rows = planned_steps(data), data.logs["metrics"]
    if planned is not None and rows and rows[-1].get("step", 0) >= planned:
        return "done"
    last = next((r for r in reversed(data.logs["ledger"]) if r["event"] in (Event.START, Event.END)), {})
    why = str(last.get("why", ""))
    return why if why in FINISHES or (planned is None and why == "done") else ""


def planned_steps(data: RunRows) -> int | None:
    """The steps of the recipe; None where a budget ends the run before any number of steps."""
    return None if data.setting("trainer.budget") else data.setting("trainer.steps")


def status(data: RunRows) -> dict[str, str]:
    """Whether the run is alive or has ended: {"tone": good, live, open or bad, "text"}."""
    last = data.logs["ledger"][-1] if data.logs["ledger"] else {}
    step = int(data.logs["metrics"][-1].get("step", 0)) if data.logs["metrics"] else 0
    if last.get("event") == Event.END:
        why = str(last.get("why", ""))
        tone = "bad" if why.startswith("failed") or why in ("collapsed", "forgot") else "good"
        return {"tone": tone, "text": f"{ENDS.get(why, why)}, after step {step}"}
    path = data.run.path
    held = is_held(path)
    if held is None and "tinker" in data.recipe:  # a server's, which holds the folder of its state
        held = is_held(path.resolve().parents[1])
    if held:
        return {"tone": "live", "text": "running" if step else "running, the first step"}
    if not last:
        return {"tone": "open", "text": f"step {step}" if step else "has not begun yet"}
    at = [end for name in ("at", "ended_at") if (end := number(last, name)) is not None]
    ago = seconds_text(max(0.0, time.time() - max(at, default=time.time())))
    if held is None:
        text = f"no process of this machine after step {step}; its last row came {ago} ago"
        return {"tone": "open", "text": text}
    again = f"ostinato resume {path}" if "tinker" not in data.recipe else "ostinato tinker"
    return {"tone": "bad", "text": f"it was killed; its last row came {ago} ago. {again} goes on with it"}


def progress(data: RunRows) -> dict[str, Any]:
    """Finished steps, planned steps (None if a budget will end the run before them), the share of the run
    that is done, and an estimate of the time left."""
    rows, planned = data.logs["metrics"], data.setting("trainer.steps")
    last = rows[-1] if rows else {}
    step = int(number(last, "step") or 0)
    share = min(1.0, step / planned) if isinstance(planned, int) and planned else 0.0
    if budget := data.setting("trainer.budget"):
        until = Every.parse(budget, "trainer.budget").part(data.setting("trainer.until", 1.0))
        if (spent := min(1.0, until.share(spent_in_steps(step, last)))) > share:
            planned, share = None, spent
    lengths = [stop - start for _, start, stop in steps_of(data.logs["ledger"][-60:])][-20:]
    left = statistics.median(lengths) * step * (1 / share - 1) if lengths and share else 0.0
    return {"step": step, "of": planned, "share": share, "left": seconds_text(left) if left else None}


def steps_of(ledger: Sequence[Row]) -> list[tuple[int, float, float]]:
    """(step, begin, end in Unix seconds) of the step rows of a ledger, in order of time, without overlap; a
    repeated step is in there twice."""
    found: list[tuple[int, float, float]] = []
    for row in ledger:
        step, stop, seconds = (number(row, name) for name in ("step", "ended_at", "seconds"))
        if row.get("event") != Event.STEP or step is None or stop is None or seconds is None:
            continue
        start = max(stop - seconds, found[-1][2] if found else float("-inf"))
        if start < stop:
            found.append((int(step), start, stop))
    return found


def describe(data: RunRows) -> list[Figure]:
    """What was run: model, algorithm, task, when, where, with which versions."""
    adapter = data.setting("adapter.kind", "?")
    if adapter == "lora":
        targets = ", ".join(data.setting("adapter.targets", ()))
        adapter = f"LoRA rank {data.setting('adapter.rank', '?')} on {targets}"
    adapter = "all parameters" if adapter == "full" else adapter
    of_step = (
        f"{data.setting('rollout.prompts_per_step', '?')} prompts x {data.setting('rollout.group_size', '?')}"
    )
    overrides = ", ".join(f"{k}={v}" for k, v in data.setting("algo", {}).items() if k != "name")
    rewards = ", ".join(data.setting("reward.functions", ()))
    mixed = [f"{one['name']} x {one.get('weight', 1):g}" for one in data.setting("task.mix", ())]
    task = ", ".join(mixed) or str(data.setting("task.source", "?"))
    limit = f"at most {data.setting('rollout.max_tokens', '?')} tokens each"
    if after := data.setting("rollout.interrupt_after"):
        answer = data.setting("rollout.answer_tokens", "?")
        limit = f"at most {after[1]} tokens of thinking and {answer} behind them"
    starts = data.logs["starts"]
    machine = str(starts[-1].get("machine", "?")) if starts else "not recorded by this run"
    return [
        Figure("Model", str(data.setting("model.path", "?")), str(data.setting("model.dtype", ""))),
        Figure("Trained", adapter, ""),
        Figure("Algorithm", str(data.setting("algo.name", "?")), overrides),
        Figure("Task", task, f"reward: {rewards}" if rewards else ""),
        Figure("Step", f"{of_step} answers", limit),
        Figure("Seed", str(data.setting("seed", "?")), ""),
        Figure("When", *_when(data)),
        Figure("Machine", machine, str(starts[-1].get("versions", "")) if starts else ""),
    ]


def _when(data: RunRows) -> tuple[str, str]:
    ledger = data.logs["ledger"]
    stops = [stop for _, _, stop in steps_of(ledger)]
    first = number(ledger[0], "process_started") if ledger else None
    if not stops or first is None:
        return "no step has ended yet", ""
    start, end = (datetime.fromtimestamp(at, UTC) for at in (first, stops[-1]))
    return f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}", "UTC"


# ---- tables


def compare_scores(data: RunRows) -> Table:
    """Held-out scores next to those of the baseline: the model at step 0, on the same prompts."""
    rows = data.evals
    step = f"step {rows[-1]['step']}" if ends(rows)[1] else "not yet"
    head = ("before\nstep 0, the baseline", f"after\n{step}", "change")
    lines = [*(_compared(data) if rows else ()), *_mixed(data), *_downstream(data)]
    if (left := abilities_left(data.metrics)) is not None:
        name = "abilities kept\nprobability of what it could do and is not trained on (docs/forgetting.md)"
        lines.append((name, "1", left.text(), f"{left.value - 1:+.3f}"))
    return Table(title="held out", head=head, rows=lines, note=_protocol(data))


def _compared(data: RunRows) -> Iterator[Line]:
    rows, greedy = data.evals, data.scores["greedy"]
    before, after = ends(rows)
    yield _change("pass@1\nshare of prompts", before, after, "pass@1")
    if (k := number(rows[-1], "k") or 1) > 1:
        yield _change(f"pass@{k:.0f}\nshare of prompts", before, after, "pass@k")
    yield _change("mean reward\nper answer", before, after, "reward")
    if greedy:
        was, now = ends(greedy)
        yield _change("pass@1, greedy\nshare of prompts, one answer at temperature 0", was, now, "pass@1")
        yield _change("mean reward, greedy\nper answer, at temperature 0", was, now, "reward")
    for name, key, form in (
        ("answer length\ntokens, mean", "completions/mean_length", ".1f"),
        ("truncated\nshare of answers", "completions/clipped_ratio", ".3f"),
    ):
        old, new = (None if one is None else number(one, key) for one in (before, after))
        change = "" if old is None or new is None else format(new - old, f"+{form}")
        yield name, *(NOT_MEASURED if one is None else format(one, form) for one in (old, new)), change


def _change(name: str, before: Row | None, after: Row | None, key: str) -> Line:
    """A held-out figure before and after, and its change."""
    old, new = (None if row is None else estimate(row, key) for row in (before, after))
    change = difference(old, new).text("+.3f") if old and new else ""
    return name, *(one.text() if one else NOT_MEASURED for one in (old, new)), change


def _mixed(data: RunRows) -> Iterator[Line]:
    """pass@1 of each task of a mixture, in the main set, and how much of the run was spent on it."""
    evals, metrics = data.evals, data.metrics
    for name, last in (evals[-1].get("tasks", {}) if evals else {}).items():
        rows = [{**row.get("tasks", {}).get(name, {}), "step": row["step"]} for row in evals]
        share = total(metrics, f"tasks/{name}/share") / max(1, len(metrics))
        note = f"{number(last, 'n') or 0:.0f} prompts; {share:.0%} of all groups of training"
        yield _change(f"{name}, pass@1\n{note}", *ends(rows), "pass@1")


def _downstream(data: RunRows) -> Iterator[Line]:
    """pass@1 of the sets that are not trained on, and their mean reward if their rows have one."""
    for name, rows in data.downstream.items():
        size = f"{number(rows[-1], 'n') or 0:.0f} prompts; after step {rows[-1]['step']}"
        for key, kind in (("pass@1", "pass@1"), ("reward", "mean reward")):
            if any(key in row for row in rows):
                yield _change(f"{name}, {kind}\n{size}", *ends(rows), key)


def _protocol(data: RunRows) -> str:
    """How the held-out score was measured, in one sentence; empty without an evaluation."""
    scores = data.scores
    if not scores["evals"]:
        return ""
    row, exported = scores["evals"][-1], scores["exported"]
    samples, heat = number(row, "samples") or 1, data.setting("eval.temperature")
    how = "" if heat is None else " greedily" if heat == 0 else f" at temperature {heat:g}"
    excluded = number(row, "excluded") or 0
    note = (
        f"{number(row, 'n') or 0:.0f} held-out prompts (split {row.get('split', '?')}), {samples:.0f} "
        f"{'answer' if samples == 1 else 'answers'} each{how}; the same prompts and the same noise at every "
        "step. Brackets are 95 % intervals over prompts; that of a change treats the two as independent, "
        "which overstates it."
    )
    note += f" {excluded:.0f} prompts without enough verdicts are left out." if excluded else ""
    if exported is not None and (score := estimate(exported, "pass@1")):
        note += (
            f" These are scores of the sampler, whose weights are {row.get('weights')}; with the model's "
            f"own, as it is exported, the policy of step {exported.get('step')} has pass@1 {score.text()}."
        )
    return note


EVENTS = {
    "reward_workers": "in the processes that run rewards",
    "rewards": "in one reward function, by answers",
    "tools": "in the tools of episodes",
}


def count_faults(data: RunRows) -> Table:
    """Counts of what went wrong, by name, including zeros."""
    rows = data.metrics
    answers, groups = total(rows, "rollout/trajectories"), total(rows, "rollout/groups")
    keys = sorted(key for key in set[str]().union(*rows) if key.partition("/")[0] in EVENTS)
    counted = [
        ("rollout/failed", "episodes failed", "ended in an error, not trained on", answers),
        ("rollout/no_verdict", "answers without a verdict", "never scored as 0", answers),
        *((f"faults/{name}", f"fault: {name}", "", answers) for name in names_under(rows, "faults/")),
        *(
            (key, f"event: {key}", EVENTS[key.partition("/")[0]], 0)
            for key in keys
            if key.rpartition("/")[2] not in ("mean", "std", "calls")  # of rewards, which are no counts
        ),
        ("groups/dropped", "groups dropped", "not trained on", groups),
        *(
            (f"groups/dropped/{name}", f"dropped: {name}", WASTE.get(name, ""), groups)
            for name in names_under(rows, "groups/dropped/")
        ),
        ("refused_step", "steps refused", "a loss or gradient was not finite", len(rows)),
        ("empty_step", "steps with nothing to learn", "no sample was left", len(rows)),
    ]
    lines = [_count(rows, *one) for one in counted] if rows else []
    return Table(title="Faults", head=("count", "share", "in step"), rows=lines, words=("in step",))


def _count(rows: Sequence[Row], key: str, name: str, meaning: str, of: float) -> Line:
    count = total(rows, key)
    when = [int(row["step"]) for row, value in zip(rows, column(rows, key), strict=True) if value]
    share = "" if not of else "< 0.1 %" if 0 < count / of < 0.001 else f"{100 * count / of:.1f} %"
    return f"{name}\n{meaning}", f"{count:,.0f}", share, steps_text(when) or NONE


def steps_text(steps: Sequence[int], most: int = 3) -> str:
    """ "3, 7, 9 to 12 and 4 more up to 61"; empty without steps."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1].append(step)
        else:
            spans.append([step])
    shown = ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans[:most])
    more = sum(len(span) for span in spans[most:])
    return f"{shown} and {more} more up to {steps[-1]}" if more else shown


LINES = 16  # of workers in the table; more are joined by pool


def count_work(whole: Usage) -> Table:
    """Seconds by kind of work: a line for each worker, or the means of each pool if there are many."""
    kinds = [kind for kind in Kind if any(kinds.get(kind) for kinds in whole.seconds.values())]
    groups: dict[str, list[str]] = {name: [name] for name in whole.seconds}
    if len(groups) > LINES:
        pools: dict[str, list[str]] = {}
        for name in whole.seconds:
            pools.setdefault(pool_of(name), []).append(name)
        groups = {f"{name} x {len(own)}": own for name, own in pools.items()}
    lines = []
    for name, own in groups.items():
        sums: Counter[Kind] = Counter()
        for worker in own:
            sums.update(whole.seconds[worker])
        used = sum(map(whole.utilisation, own)) / len(own)
        work = (seconds_text(sums[kind] / len(own)) if sums[kind] else "" for kind in kinds)
        lines.append((name, f"{used:.1%}", *work, seconds_text((1 - used) * (whole.stop - whole.start))))
    note = f"Of {seconds_text(whole.stop - whole.start)}; to wait or to load is to be idle."
    return Table(title="Workers", head=("worked", *map(str, kinds), "idle"), rows=lines, note=note)


# ---- a plan beside the run

# part of a step -> (its metric, the phases of the plan in it, named as in ``plan.record``). In turns the
# train time includes publishing; with overlap there is no separate rollout time.
PUBLISH = "time/publish_s"
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}
SENT = "comm/bytes/"  # by collective and axis


def compare_plan(data: RunRows) -> Table | None:
    """Seconds and bytes of a step, as plan.json has them and as medians of the run; None without a plan."""
    rows, phases = data.metrics[1:], mapping(data.plan.get("seconds"))  # the first step warms up
    if not data.plan:
        return None
    lines: list[Line] = []

    def add(name: str, planned: float, key: str, form: str, ratio: str) -> None:
        values = [value for value in column(rows, key) if value is not None]
        measured = statistics.median(values) if values else None
        if planned or measured is not None:
            text = NOT_MEASURED if measured is None else format(measured, form)
            over = f"{measured / planned:{ratio}}" if measured and planned else ""
            lines.append((name, f"{planned:{form}}", text, over))

    parts = OVERLAPPED if any(PUBLISH in row for row in data.metrics) else IN_TURNS
    for part, (key, names) in parts.items():
        terms = Counter[str]()
        for name in names:
            terms.update(
                {k: v for k in mapping(phases.get(name)) if (v := number(phases[name], k)) is not None}
            )
        add(
            f"{part}\n{f's; mostly {max(terms, key=terms.__getitem__)}' if terms else 's'}",
            terms.total(),
            key,
            ".3g",
            ".2f",
        )
    add("step\ns", number(data.plan, "total") or 0.0, "step_time", ".3g", ".2f")
    planned = mapping(data.plan.get("traffic"))
    for name in sorted({*planned, *names_under(data.metrics[-1:], SENT)}):
        add(f"{name}\nbytes sent", number(planned, name) or 0.0, SENT + name, ",.0f", ".3f")
    low, high = (number(data.plan, end) or 1 for end in ("low", "high"))
    layouts = ", ".join(f"{phase} {layout}" for phase, layout in mapping(data.plan.get("layouts")).items())
    note = (
        f"Planned for {data.plan.get('cluster', 'an unknown cluster')}: {layouts}. Medians over steps, the "
        f"first left out; a plan's own band is {low:.2f} to {high:.2f} of its total. Bytes: planned for "
        "training and old log-probabilities, counted with publishes, checkpoints and measurements."
    )
    return Table(title="Of a step", head=("planned", "measured", "measured / planned"), rows=lines, note=note)
