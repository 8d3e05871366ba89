"""The numbers of the page other than plots: header, held-out comparison, totals, waste, faults.

Pure functions of a ``RunData``; every number is returned as text with its unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from ostinato.observe.ledger import Event
from ostinato.observe.report.reading import Row, RunData, column, last_step, names_under, number, total

Z95 = 1.959964  # two-sided 95 % of the normal distribution
NOT_MEASURED = "not measured"
NONE = "-"  # shown for unknown values


class Fact(NamedTuple):
    name: str
    value: str
    note: str = ""


Line = Sequence[str]  # its name, then a cell for each column; text after a line end is a note in small type


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """``head`` names the columns after the first one, which is named by the title."""

    title: str
    head: Line
    rows: Sequence[Line]
    note: str = ""
    words: Sequence[str] = ()  # columns of text: left-aligned, with line breaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval; the interval is None if there is too little data for one."""

    value: float
    interval: tuple[float, float] | None


class Headline(NamedTuple):
    """The big number before and after training, with its interval, or "not measured"."""

    before: str
    after: str
    after_step: int
    change: str
    verdict: str  # one sentence
    tone: str  # good, bad or plain
    beside: Sequence[str]  # the other held-out figures, before and after


def estimate(row: Row, name: str) -> Estimate | None:
    """``pass@1``, ``pass@k`` or ``reward`` of a row of eval.jsonl."""
    value = number(row, name)
    error = number(row, "stderr" if name == "pass@1" else f"{name}_stderr")
    if value is None or error is None:
        return None if value is None else Estimate(value=value, interval=None)
    if name == "reward":
        return Estimate(value=value, interval=(value - Z95 * error, value + Z95 * error))
    return Estimate(value=value, interval=wilson(value, error, number(row, "n") or 0))


def wilson(value: float, error: float, n: float) -> tuple[float, float] | None:
    """95 % score interval of a share (Wilson 1927), which holds at 0 and 1 too.

    The standard error is over prompts: it is converted to the number of independent answers that would have
    it. If it is 0, as all prompts have the same score, that number is ``n``.
    """
    spread, variance = value * (1 - value), error**2
    trials = max(1.0, spread / variance) if spread and variance else n
    if trials <= 0:
        return None
    scale = 1 + Z95**2 / trials
    middle = (value + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(spread / trials + (Z95 / (2 * trials)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference(before: Estimate, after: Estimate) -> Estimate:
    """after - before; its interval from the two (Newcombe 1998, method 10) as if they were independent.

    Both are measured on the same prompts with the same noise, so the true interval is usually narrower.
    """
    change = after.value - before.value
    if before.interval is None or after.interval is None:
        return Estimate(value=change, interval=None)
    (low, high), (new_low, new_high) = before.interval, after.interval
    down = math.hypot(after.value - new_low, high - before.value)
    up = math.hypot(new_high - after.value, before.value - low)
    return Estimate(value=change, interval=(change - down, change + up))


def ends(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """The held-out rows of step 0 and of the last evaluated step after it; None for a missing one."""
    before = next((row for row in rows if row["step"] == 0), None)
    after = rows[-1] if rows and rows[-1]["step"] > 0 else None
    return before, after


def headline(data: RunData) -> Headline:
    """Held-out pass@1 before and after, with a verdict on the change."""
    lines = {name.partition("\n")[0]: cells for name, *cells in comparisons(data).rows}
    before, after, change = lines.get("pass@1", (NOT_MEASURED, NOT_MEASURED, ""))
    old, new = (None if row is None else estimate(row, "pass@1") for row in ends(data.evals))
    verdict, tone = _verdict(old, new)
    shown = [name for name in ("mean reward", "pass@1, greedy") if name in lines]
    beside = [f"{name} {lines[name][0]} → {lines[name][1]}" for name in shown]
    return Headline(before, after, last_step(data.evals), change, verdict, tone, beside)


def _verdict(before: Estimate | None, after: Estimate | None) -> tuple[str, str]:
    if before is None and after is None:
        return "No held-out score has been measured in this run (eval.jsonl has none).", "plain"
    if after is None:
        return "Only the model before training has been measured so far.", "plain"
    if before is None:
        missing = "the model before training was not measured (eval.at_start)"
        return f"There is nothing to compare with: {missing}.", "plain"
    if (interval := difference(before, after).interval) is None:
        return "The change has no interval: too few prompts were judged.", "plain"
    if interval[0] > 0:
        return "The policy improved: the 95 % interval of the change lies above 0.", "good"
    if interval[1] < 0:
        return "The policy got worse: the 95 % interval of the change lies below 0.", "bad"
    return "No change beyond chance: the 95 % interval of the change contains 0.", "plain"


def comparisons(data: RunData) -> Table:
    """Held-out scores next to those of the baseline: the model at step 0, on the same prompts."""
    step = f"step {last_step(data.evals)}" if ends(data.evals)[1] else "not yet"
    head = ("before\nstep 0, the baseline", f"after\n{step}", "change")
    rows = [*(_compared(data) if data.evals else ()), *_mixed(data), *_downstream(data), *_kept(data)]
    return Table(title="held out", head=head, rows=rows, note=protocol(data))


def _compared(data: RunData) -> Iterator[Line]:
    before, after = ends(data.evals)
    yield change_line("pass@1\nshare of prompts", before, after, "pass@1")
    if (k := number(data.evals[-1], "k") or 1) > 1:
        yield change_line(f"pass@{k:.0f}\nshare of prompts", before, after, "pass@k")
    yield change_line("mean reward\nper answer", before, after, "reward")
    if data.greedy:
        greedy = ends(data.greedy)
        yield change_line("pass@1, greedy\nshare of prompts, one answer at temperature 0", *greedy, "pass@1")
        yield change_line("mean reward, greedy\nper answer, at temperature 0", *greedy, "reward")
    for name, key, form in (
        ("answer length\ntokens, mean", "completions/mean_length", ".1f"),
        ("truncated\nshare of answers", "completions/clipped_ratio", ".3f"),
    ):
        old, new = (None if one is None else number(one, key) for one in (before, after))
        change = "" if old is None or new is None else format(new - old, f"+{form}")
        yield name, *(NOT_MEASURED if one is None else format(one, form) for one in (old, new)), change


def _mixed(data: RunData) -> Iterator[Line]:
    """pass@1 of each task of a mixture, in the main set, and how much of the run was spent on it."""
    for name, last in (data.evals[-1].get("tasks", {}) if data.evals else {}).items():
        rows = [{**row.get("tasks", {}).get(name, {}), "step": row["step"]} for row in data.evals]
        share = total(data.metrics, f"tasks/{name}/share") / max(1, len(data.metrics))
        note = f"{number(last, 'n') or 0:.0f} prompts; {share:.0%} of all groups of training"
        yield change_line(f"{name}, pass@1\n{note}", *ends(rows), "pass@1")


def _downstream(data: RunData) -> Iterator[Line]:
    """pass@1 of the sets that are not trained on, and their mean reward if their rows have one."""
    for name, rows in data.downstream.items():
        size = f"{number(rows[-1], 'n') or 0:.0f} prompts; after step {rows[-1]['step']}"
        for key, kind in (("pass@1", "pass@1"), ("reward", "mean reward")):
            if any(key in row for row in rows):
                yield change_line(f"{name}, {kind}\n{size}", *ends(rows), key)


def kept(rows: Sequence[Row]) -> Estimate | None:
    """The share of earlier abilities kept, as last measured by the forgetting watch, from rows of metrics."""
    row = next((row for row in reversed(rows) if number(row, "forgetting/kept") is not None), {})
    value, low, high = (number(row, f"forgetting/kept{end}") for end in ("", "_low", "_high"))
    interval = None if low is None or high is None else (low, high)
    return None if value is None else Estimate(value=value, interval=interval)


def _kept(data: RunData) -> Iterator[Line]:
    if (left := kept(data.metrics)) is not None:
        name = "abilities kept\nprobability of what it could do and is not trained on (docs/forgetting.md)"
        yield name, "1", score_text(left), f"{left.value - 1:+.3f}"


def change_line(name: str, before: Row | None, after: Row | None, key: str) -> Line:
    """A held-out figure before and after, and its change."""
    old, new = (None if row is None else estimate(row, key) for row in (before, after))
    change = score_text(difference(old, new), "+.3f") if old and new else ""
    return name, score_text(old) or NOT_MEASURED, score_text(new) or NOT_MEASURED, change


def score_text(value: Estimate | None, form: str = ".3f") -> str:
    """ "0.300 [0.245, 0.362]"; empty for None."""
    return "" if value is None else f"{value.value:{form}} {interval_text(value, form)}".strip()


def interval_text(value: Estimate | None, form: str = ".3f") -> str:
    if value is None or value.interval is None:
        return ""
    low, high = value.interval
    return f"[{low:{form}}, {high:{form}}]"


def protocol(data: RunData) -> str:
    """How the held-out score was measured, in one sentence; empty without an evaluation."""
    if not data.evals:
        return ""
    row = data.evals[-1]
    samples = number(row, "samples") or 1
    temperature = data.setting("eval.temperature")
    how = (
        "" if temperature is None else " greedily" if temperature == 0 else f" at temperature {temperature:g}"
    )
    excluded = number(row, "excluded") or 0
    left_out = f" {excluded:.0f} prompts without enough verdicts are left out." if excluded else ""
    return (
        f"{number(row, 'n') or 0:.0f} held-out prompts (split {row.get('split', '?')}), "
        f"{samples:.0f} {'answer' if samples == 1 else 'answers'} each{how}; the same prompts and the same "
        "noise at every step. Brackets are 95 % intervals over prompts; that of a change treats the two as "
        f"independent, which overstates it.{left_out}{_exported(data)}"
    )


def _exported(data: RunData) -> str:
    """The score with the model's own weights, as exported, if the sampler's weights differ."""
    if data.exported is None:
        return ""
    score, step = score_text(estimate(data.exported, "pass@1")), data.exported.get("step")
    return (
        f" These are scores of the sampler, whose weights are {data.evals[-1].get('weights')}; with the "
        f"model's own, as it is exported, the policy of step {step} has pass@1 {score}."
    )


FINISHES = {
    "spent": "its budget is spent",
    "enough": "the rest was not worth its compute",
    "solved": "every prompt is solved",
    "stopped": "on_step ended it",
}


def finish(data: RunData) -> str:
    """Why the run is at its end: "done", or one of FINISHES; empty for one that is not."""
    planned = planned_steps(data)
    if planned is not None and last_step(data.metrics) >= planned:
        return "done"
    last = next((row for row in reversed(data.ledger) if row["event"] in (Event.START, Event.END)), {})
    why = str(last.get("why", ""))
    return why if why in FINISHES or (planned is None and why == "done") else ""


def planned_steps(data: RunData) -> int | None:
    """The steps of the recipe; None where a budget ends the run before any number of steps."""
    return None if data.setting("trainer.budget") else data.setting("trainer.steps")


def status(data: RunData, now: datetime) -> tuple[str, str]:
    """(how far the run got, tone). The files cannot tell whether an unfinished run is still going."""
    planned, done = planned_steps(data), last_step(data.metrics)
    if why := finish(data):
        return f"finished, {done} steps{'' if why == 'done' else f': {FINISHES[why]}'}", "good"
    of = f" of {planned}" if planned is not None else ""
    ended = _ended_at(data)
    ago = (
        f"; the last one ended {seconds_text((now - ended).total_seconds())} before this report"
        if ended
        else ""
    )
    return (f"{done}{of} steps{ago}" if done else f"no step of {planned or '?'} done yet"), "open"


def _ended_at(data: RunData) -> datetime | None:
    ends = [number(row, "ended_at") for row in data.ledger if row["event"] == Event.STEP]
    at = ends[-1] if ends else None
    return None if at is None else datetime.fromtimestamp(at, UTC)


def header(data: RunData) -> list[Fact]:
    """What was run: model, algorithm, task, when, where, with which versions."""
    adapter = data.setting("adapter.kind", "?")
    if adapter == "lora":
        targets = ", ".join(data.setting("adapter.targets", ()))
        adapter = f"LoRA rank {data.setting('adapter.rank', '?')} on {targets}"
    elif adapter == "full":
        adapter = "all parameters"
    sizes = (
        f"{data.setting('rollout.prompts_per_step', '?')} prompts x {data.setting('rollout.group_size', '?')}"
    )
    overrides = ", ".join(
        f"{key}={value}" for key, value in data.setting("algo", {}).items() if key != "name"
    )
    rewards = ", ".join(data.setting("reward.functions", ()))
    return [
        Fact("Model", str(data.setting("model.path", "?")), str(data.setting("model.dtype", ""))),
        Fact("Trained", adapter),
        Fact("Algorithm", str(data.setting("algo.name", "?")), overrides),
        Fact("Task", _task(data), f"reward: {rewards}" if rewards else ""),
        Fact("Step", f"{sizes} answers", f"≤ {data.longest_answer} each"),
        Fact("Seed", str(data.setting("seed", "?"))),
        Fact("When", _when(data)),
        *_machine(data),
    ]


def _task(data: RunData) -> str:
    mixed = [f"{one['name']} x {one.get('weight', 1):g}" for one in data.setting("task.mix", ())]
    return ", ".join(mixed) or str(data.setting("task.source", "?"))


def _when(data: RunData) -> str:
    ended = _ended_at(data)
    first = number(data.ledger[0], "process_started") if data.ledger else None
    if ended is None or first is None:
        return "no step has ended yet"
    started = datetime.fromtimestamp(first, UTC)
    same_day = started.date() == ended.date()
    return f"{started:%Y-%m-%d %H:%M} to {ended:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}} UTC"


def _machine(data: RunData) -> list[Fact]:
    if not data.starts:
        return [Fact("Machine", "not recorded by this run")]
    last = data.starts[-1]
    resumed = f"started {len(data.starts)} times" if len(data.starts) > 1 else ""
    return [
        Fact("Machine", str(last.get("machine", "?")), resumed),
        Fact("Versions", str(last.get("versions", "?"))),
    ]


def totals(data: RunData) -> list[Fact]:
    """What the run cost, from the totals in the last row (which continue across a resume)."""
    if not data.metrics:
        return []
    names = ("sampled_tokens", "trained_tokens", "seconds", "flops")
    sampled, trained, seconds, flops = (number(data.metrics[-1], f"total/{name}") for name in names)
    facts = [Fact("steps", f"{last_step(data.metrics)}")]
    if seconds is not None:
        facts.append(Fact("in steps", seconds_text(seconds), "wall time, evaluations not counted"))
    if sampled is not None:
        facts.append(Fact("tokens sampled", si(sampled)))
    if sampled and trained is not None:
        facts.append(Fact("of them trained on", f"{trained / sampled:.0%}"))
    if flops:
        facts.append(Fact("FLOPs", si(flops), "by the model's shapes"))
    if seconds and sampled is not None:
        facts.append(Fact("tokens/s", si(sampled / seconds), "sampled, over whole steps"))
    return facts


def best_score(data: RunData) -> tuple[int, Estimate] | None:
    """The step with the highest held-out pass@1; the first one of a tie."""
    scores = [(int(row["step"]), score) for row in data.evals if (score := estimate(row, "pass@1"))]
    return max(scores, key=lambda item: item[1].value, default=None)


def collapse(data: RunData) -> Row | None:
    """The first alarm of the stability watch that is a collapse."""
    return next((alarm for alarm in data.alarms if alarm.get("collapse")), None)


def milestones(data: RunData) -> list[Fact]:
    """The best step, and the one in which the run collapsed, if it did."""
    found = []
    if (best := best_score(data)) is not None:
        found.append(Fact("best score", f"step {best[0]}", f"pass@1 {score_text(best[1])}"))
    if (alarm := collapse(data)) is not None:
        note = f"{alarm.get('rule', '?')}, since step {alarm.get('since', '?')}"
        found.append(Fact("collapse", f"step {alarm['step']:.0f}", note))
    return found


def marked_steps(data: RunData) -> list[tuple[int, str]]:
    """(step, label) of the marks in plots over steps; no mark for a best step that is the last one."""
    best, alarm = best_score(data), collapse(data)
    found = [(best[0], "best")] if best is not None and 0 < best[0] < last_step(data.metrics) else []
    return [*found, *([(int(alarm["step"]), "collapse")] if alarm else [])]


WASTE = {
    "zero_variance": "all siblings got the same reward, so the group was dropped",
    "zero_advantage": "the reward equals its baseline: no gradient",
    "truncated": "cut off at the length limit and masked by the algorithm",
    "failed": "the episode ended in an error",
    "no_verdict": "the reward gave no verdict",
    "prompt_too_long": "the prompt left no room for an answer",
    "too_few_episodes": "too many siblings ended in an error",
    "too_few_verdicts": "too few siblings got a verdict",
    "no_routes": "recorded no expert routes, while others did",
}


def waste(data: RunData) -> Table:
    """Sampled tokens that no step trained on, by reason; "trained on" comes first."""
    rows = data.metrics
    sampled = total(rows, "tokens/sampled")
    reasons = sorted(
        names_under(rows, "tokens/wasted/"), key=lambda name: -total(rows, f"tokens/wasted/{name}")
    )
    lines = [_count(rows, "tokens/trained", "trained on", "took part in a gradient", sampled)]
    lines += [_count(rows, f"tokens/wasted/{name}", name, WASTE.get(name, ""), sampled) for name in reasons]
    return _counters("of sampled", lines if sampled else [])


def _counters(of: str, rows: Sequence[Line]) -> Table:
    return Table(title="what", head=("count", of, "in step"), rows=rows, words=("in step",))


EVENTS = {
    "reward_workers": "in the processes that run rewards",
    "rewards": "in one reward function, by answers",
    "tools": "in the tools of episodes",
}


def _events(rows: Sequence[Row]) -> list[str]:
    """Keys of the counters of graders and tools; the same prefixes also hold the means of rewards."""
    keys = {key for row in rows for key in row if key.partition("/")[0] in EVENTS}
    return sorted(key for key in keys if key.rpartition("/")[2] not in ("mean", "std", "calls"))


def faults(data: RunData) -> Table:
    """Counts of what went wrong, by name, including zeros."""
    rows = data.metrics
    answers, groups = total(rows, "rollout/trajectories"), total(rows, "rollout/groups")
    counted = [
        ("rollout/failed", "episodes failed", "ended in an error, not trained on", answers),
        ("rollout/no_verdict", "answers without a verdict", "never scored as 0", answers),
        *((f"faults/{name}", f"fault: {name}", "", answers) for name in names_under(rows, "faults/")),
        *((key, f"event: {key}", EVENTS[key.partition("/")[0]], 0) for key in _events(rows)),
        ("groups/dropped", "groups dropped", "not trained on", groups),
        *(
            (f"groups/dropped/{name}", f"dropped: {name}", WASTE.get(name, ""), groups)
            for name in names_under(rows, "groups/dropped/")
        ),
        ("refused_step", "steps refused", "a loss or gradient was not finite", len(rows)),
        ("empty_step", "steps with nothing to learn", "no sample was left", len(rows)),
    ]
    return _counters("share", [_count(rows, *one) for one in counted] if rows else [])


def _count(rows: Sequence[Row], key: str, name: str, meaning: str, of: float) -> Line:
    count = total(rows, key)
    when = [int(row["step"]) for row, value in zip(rows, column(rows, key), strict=True) if value]
    return f"{name}\n{meaning}", f"{count:,.0f}", _share(count, of), steps_text(when) or "-"


def _share(count: float, of: float) -> str:
    """In percent; a small share is shown as "< 0.1 %", never as 0."""
    if not of:
        return ""
    return "< 0.1 %" if 0 < count / of < 0.001 else f"{100 * count / of:.1f} %"


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


def seconds_text(seconds: float) -> str:
    """ "8.2 s", "4 min 05 s", "3 h 20 min", "2 d 04 h"."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def figure_text(value: float | None) -> str:
    """Three digits: "1.79e-5", "0.0121", "1,240"; "-" for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}" if not 0.9 < size < 1 else f"{value:.5f}".rstrip("0").rstrip(".")


def si(value: float) -> str:
    """Three digits and an SI letter: "812", "81.2 k", "1.23 P"."""
    for letter, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def compute_text(C: float) -> str:
    """Four digits: "30,200", "0.125", "4.051e18"; "never" for infinity, "-" for NaN (not identified)."""
    if math.isnan(C):
        return NONE
    if math.isinf(C):
        return "never"
    if C == 0 or 1e-3 <= C < 1e7:
        return f"{float(f'{C:.4g}'):,.0f}" if C >= 1000 else f"{C:.4g}"
    digits, _, power = f"{C:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
