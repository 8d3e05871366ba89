"""The state of a run, the ten numbers that page and terminal begin with, and tables of its results.

Functions of a ``RunRows``; every number is a text with its unit and its baseline.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from ostinato.every import Every, spent_in_steps
from ostinato.lock import is_held
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
from ostinato.observe.stats import Z95, Estimate, difference, estimate, number
from ostinato.observe.timeline import Kind, Usage, pool_of
from ostinato.tables import NONE, Line, Table, format_figure, format_seconds, format_si

NOT_MEASURED = "not measured"
K3_NATS = 1e-3  # per token; exact arithmetic gives 0, bf16 rounding about 1e-4


class Figure(NamedTuple):
    """A named value; ``note``: its unit and baseline; ``tone``: "good", "bad" or empty."""

    name: str
    value: str
    note: str
    tone: str = ""


# ---- the first screen


def figures(data: RunRows, cost: Summary | None = None) -> list[Figure]:
    """The ten numbers, in the same order for every run; "-" for what is not known. ``cost``: the sums of its
    ledger."""
    rows, cost = data.metrics, cost or summary(data.logs["ledger"])
    parts = sorted(cost.wall.items(), key=lambda item: -item[1])
    wall = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value >= 0.05)
    sampled, trained = (cost.tokens.get(name, 0) for name in ("sampled", "trained"))
    share = f"; {trained / sampled:.0%} of them trained on" if sampled else ""
    return [
        _summarize_held_out(data, "pass@1", "Held-out pass@1", "share of prompts"),
        _summarize_held_out(data, "reward", "Held-out reward", "mean per answer"),
        _training(rows, "reward", "Training reward", "mean per answer", ".3f"),
        _measure_teaching(rows),
        _gap(rows),
        _steps(data, cost),
        Figure(
            "Time",
            format_seconds(sum(cost.wall.values())),
            f"wall clock of all processes: {wall}" if wall else "wall clock; no row in ledger.jsonl",
        ),
        Figure("Tokens", format_si(sampled), f"sampled{share}"),
        _training(rows, "tokens_per_s", "Speed", "sampled tokens per second of whole steps", ",.0f"),
        _cost(cost),
    ]


def tabulate(first: RunRows, *others: RunRows) -> Table:
    """The ten numbers for a terminal; of several runs a column each, with the units that they share."""
    if others:
        runs = (first, *others)
        lines = []
        for same in zip(*map(figures, runs), strict=True):
            units = {figure.note.partition(";")[0].partition(":")[0] for figure in same}
            unit = units.pop() if len(units) == 1 else ""
            lines.append((f"{same[0].name}\n{unit}", *(figure.value for figure in same)))
        return Table(title="runs", head=[run.name for run in runs], rows=lines)
    lines = [(figure.name, figure.value, figure.note) for figure in figures(first)]
    note = "unit; what it is compared with"
    return Table(title=first.name, head=("", note), rows=lines, words=(note,))


def subtract_runs(runs: Sequence[RunRows]) -> Iterator[str]:
    """Yield, for each run but the first, its last pass@1 less the first one's, with a 95 % interval that is
    paired by prompt; or why there is none."""
    for run in runs[1:]:
        names = f"{run.name} less {runs[0].name}"
        last, first = ((data.evals or [{}])[-1] for data in (run, runs[0]))
        if "prompts" not in last or last["prompts"] != first.get("prompts"):
            yield f"{names}: they were not scored on the same held-out prompts, so nothing is subtracted."
            continue
        least = number(last, "k") or 1
        pairs = zip(last["each"], first["each"], strict=True)
        changes = np.array([c / n - d / m for (n, c), (m, d) in pairs if min(n, m) >= least])
        error = Z95 * changes.std(ddof=1) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0
        change = float(changes.mean()) if len(changes) else math.nan
        paired = Estimate(value=change, interval=(change - error, change + error) if error else None)
        rules = "" if last["held_out"] == first["held_out"] else "; answered or judged by other rules"
        steps = f"after steps {last['step']} and {first['step']}"
        yield (
            f"{names}, pass@1 {steps}: {paired.text('+.3f')} (paired by {len(changes)} prompts, 95 %{rules})."
        )


def _summarize_held_out(data: RunRows, key: str, name: str, unit: str) -> Figure:
    """The last held-out estimate under ``key``, with that before training and the change between them."""
    rows = data.evals
    before, after = (None if row is None else estimate(row, key) for row in ends(rows))
    if key == "reward" and after is not None and has_one_score(rows):
        return Figure(name, "as pass@1", f"{unit}; the same number, for every reward is 0 or 1")
    if after is None:
        baseline = f"; before training {before.text()}" if before else ""
        return Figure(name, NONE, f"{unit}; {'not measured yet' if before else NOT_MEASURED}{baseline}")
    unit = f"{unit}, {number(rows[-1], 'n') or 0:.0f} prompts, step {rows[-1]['step']}, 95 %"
    if before is None:
        return Figure(name, after.text(), f"{unit}; {BASELINE}")
    change = difference(before, after)
    note = f"{unit}; before training {before.text()}, change {change.text('+.3f')}"
    baseline, latest = (None if row is None else estimate(row, key) for row in ends(data.scores["greedy"]))
    if baseline and latest:  # one answer at temperature 0
        note += f"; greedy {baseline.value:.3f} before, {latest.value:.3f} now"
    return Figure(name, after.text(), note, _judge_change(change))


def has_one_score(rows: Sequence[Row]) -> bool:
    """Whether pass@1 and mean reward are the same number in every evaluation, as of rewards of 0 and 1."""
    pairs = [(row, *names) for row in rows for names in (("pass@1", "reward"), ("stderr", "reward_stderr"))]
    return all(
        math.isclose(number(row, one) or 0.0, number(row, other) or 0.0, abs_tol=1e-9)
        for row, one, other in pairs
    )


BASELINE = "the model before training was not measured (eval.at_start), so no gain can be stated"


def _judge_change(change: Estimate) -> str:
    """ "good" or "bad" where the interval of ``change`` lies above or below 0; empty otherwise."""
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
    return words[_judge_change(change)], _judge_change(change)


def tenth(rows: Sequence[Row], *, first: bool = False) -> Sequence[Row]:
    """The first or last tenth of a run, at least one step."""
    count = max(1, len(rows) // 10)
    return rows[:count] if first else rows[-count:]


def _training(rows: Sequence[Row], key: str, name: str, unit: str, form: str) -> Figure:
    """Mean of ``key`` over the last tenth of the steps, with that of the first tenth in the note."""
    last, first = mean(tenth(rows), key), mean(tenth(rows, first=True), key)
    if last is None:
        return Figure(name, NONE, f"{unit}; no step has it")
    baseline = "" if first is None else f"; in the first tenth {first:{form}}"
    return Figure(name, f"{last:{form}}", f"{unit}, last tenth of the steps{baseline}")


def _measure_teaching(rows: Sequence[Row]) -> Figure:
    name, unit = "Groups that teach", "of prompts, whose answers got different rewards"
    last, first = (mean(steps, "frac_reward_zero_std") for steps in (tenth(rows), tenth(rows, first=True)))
    if last is None or first is None:
        return Figure(name, NONE, unit)
    note = f"{unit}, last tenth of the steps; in the first tenth {1 - first:.0%}"
    return Figure(name, f"{1 - last:.0%}", note, "bad" if last > 0.5 else "")


def _gap(rows: Sequence[Row]) -> Figure:
    value = mean(tenth(rows), "sampling/kl_k3")
    unit = f"nats per token (k3), last tenth of the steps; 0 is exact, up to {K3_NATS:g} is rounding"
    tone = "bad" if value is not None and value > K3_NATS else ""
    return Figure("Sampler against trainer", format_figure(value), unit, tone)


def _steps(data: RunRows, cost: Summary) -> Figure:
    planned, rows = planned_steps(data), data.metrics
    finished = int(rows[-1]["step"]) if rows else 0
    repeated = f"; {cost.repeated} done twice" if cost.repeated else ""
    restarts = f"; started {cost.sessions} times" if cost.restarts else ""
    target = "until the budget is spent" if planned is None else f"of {planned} planned"
    target = "of a client's loop" if "tinker" in data.recipe else target
    pace = "" if (seconds := mean(rows, "step_time")) is None else f"; {format_seconds(seconds)} a step"
    cpu = (
        ""
        if (seconds := mean(rows, "time/cpu_s")) is None
        else f", with {seconds:.3g} CPU seconds of its process"
    )
    return Figure("Steps", f"{finished:,}", f"{target}{restarts}{repeated}{pace}{cpu}")


def _cost(cost: Summary) -> Figure:
    hours = sum(pool.total for pool in cost.pools.values()) / 3600
    scope = "idle ones, restarts and evaluation too"
    if cost.money is None:
        return Figure("Cost", f"{hours:.3g} device-hours", f"{scope}; no price is set")
    return Figure("Cost", f"{cost.money:,.4g} {cost.currency}", f"for {hours:.3g} device-hours, {scope}")


def commands(data: RunRows) -> list[tuple[str, str]]:
    """(purpose, command) of each command that makes sense next."""
    path, state = data.run.path, status(data)
    episodes = data.run.trajectories.path.is_file()
    show = [("read episodes", f"ostinato show {path}")] if episodes else []
    if state["tone"] == "live":
        return [("follow it", f"ostinato report --live {path}"), *show]
    if "tinker" in data.recipe:  # its adapter is in the state of its server
        return show
    suggestions = [] if finish(data) else [("go on with it", f"ostinato resume {path}")]
    if data.metrics:
        suggestions += [("talk to it", f"ostinato serve {path}"), *show]
        suggestions += [("score it with more prompts", f"ostinato eval {path} eval.n=1000")]
        scores = [score for score in column(data.evals, "pass@1") if score is not None]
        is_rising = verdict(data)[1] == "good" and scores[-1] == max(scores)
        if is_rising and finish(data) == "done" and (steps := planned_steps(data)):
            going_on = f"ostinato resume {path} trainer.steps={2 * steps}"
            suggestions.append(("train on, for its score was still rising", going_on))
        suggestions += (
            [("see where it would end", f"ostinato scale fit {path}")]
            if len(data.evals) > 5
            else []  # a curve takes 5 after step 0
        )
    return suggestions


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
    """The reason why the run is complete: "done" or a key of FINISHES; empty for a run that can go on."""
    planned, rows = planned_steps(data), data.logs["metrics"]
    if planned is not None and rows and rows[-1].get("step", 0) >= planned:
        return "done"
    session = next(
        (row for row in reversed(data.logs["ledger"]) if row["event"] in (Event.START, Event.END)), {}
    )
    reason = str(session.get("why", ""))
    return reason if reason in FINISHES or (planned is None and reason == "done") else ""


def planned_steps(data: RunRows) -> int | None:
    """``trainer.steps`` of the recipe; None where ``trainer.budget`` ends the run instead."""
    return None if data.setting("trainer.budget") else data.setting("trainer.steps")


def status(data: RunRows) -> dict[str, str]:
    """State of the run, {"tone": "good", "live", "open" or "bad", "text": a sentence}."""
    last_row = data.logs["ledger"][-1] if data.logs["ledger"] else {}
    step = int(data.logs["metrics"][-1].get("step", 0)) if data.logs["metrics"] else 0
    if last_row.get("event") == Event.END:
        reason = str(last_row.get("why", ""))
        tone = "bad" if reason.startswith("failed") or reason in ("collapsed", "forgot") else "good"
        return {"tone": tone, "text": f"{ENDS.get(reason, reason)}, after step {step}"}
    path = data.run.path
    locked = is_held(path)
    if locked is None and "tinker" in data.recipe:  # a server locks the folder of its state
        locked = is_held(path.resolve().parents[1])
    if locked:
        return {"tone": "live", "text": "running" if step else "running, the first step"}
    if not last_row:
        return {"tone": "open", "text": f"step {step}" if step else "has not begun yet"}
    times = [end for name in ("at", "ended_at") if (end := number(last_row, name)) is not None]
    ago = format_seconds(max(0.0, time.time() - max(times, default=time.time())))
    if locked is None:
        text = f"no process of this machine after step {step}; its last row came {ago} ago"
        return {"tone": "open", "text": text}
    command = f"ostinato resume {path}" if "tinker" not in data.recipe else "ostinato tinker"
    return {"tone": "bad", "text": f"it was killed; its last row came {ago} ago. {command} goes on with it"}


def progress(data: RunRows) -> dict[str, Any]:
    """{"step": finished steps, "of": planned steps (None if a budget ends the run before), "share": finished
    share of the run, "left": estimated time left as a text, or None}."""
    rows, planned = data.logs["metrics"], data.setting("trainer.steps")
    last = rows[-1] if rows else {}
    step = int(number(last, "step") or 0)
    share = min(1.0, step / planned) if isinstance(planned, int) and planned else 0.0
    if budget := data.setting("trainer.budget"):
        until = Every.parse(budget, "trainer.budget").part(data.setting("trainer.until", 1.0))
        if (spent := min(1.0, until.share(spent_in_steps(step, last)))) > share:
            planned, share = None, spent
    lengths = [stop - start for _, start, stop in steps_of(data.logs["ledger"][-60:])][-20:]
    seconds_left = statistics.median(lengths) * step * (1 / share - 1) if lengths and share else 0.0
    return {
        "step": step,
        "of": planned,
        "share": share,
        "left": format_seconds(seconds_left) if seconds_left else None,
    }


def steps_of(ledger: Sequence[Row]) -> list[tuple[int, float, float]]:
    """(step, begin, end) of each step row of a ledger, in Unix seconds, ordered and without overlap; a
    repeated step occurs twice."""
    spans: list[tuple[int, float, float]] = []
    for row in ledger:
        step, stop, seconds = (number(row, name) for name in ("step", "ended_at", "seconds"))
        if row.get("event") != Event.STEP or step is None or stop is None or seconds is None:
            continue
        start = max(stop - seconds, spans[-1][2] if spans else float("-inf"))
        if start < stop:
            spans.append((int(step), start, stop))
    return spans


def describe(data: RunRows) -> list[Figure]:
    """Settings of the run: model, algorithm, task, seed, period, machine and versions."""
    adapter = data.setting("adapter.kind", "?")
    if adapter == "lora":
        targets = ", ".join(data.setting("adapter.targets", ()))
        adapter = f"LoRA rank {data.setting('adapter.rank', '?')} on {targets}"
    adapter = "all parameters" if adapter == "full" else adapter
    prompts_of_step = (
        f"{data.setting('rollout.prompts_per_step', '?')} prompts x {data.setting('rollout.group_size', '?')}"
    )
    algo = data.setting("algo", {}).items()
    overrides = ", ".join(f"{k}={v}" for k, v in algo if k != "name" and v not in ("", [], {}))
    rewards = ", ".join(data.setting("reward.functions", ()))
    mixture = [
        f"{task_mix['name']} x {task_mix.get('weight', 1):g}" for task_mix in data.setting("task.mix", ())
    ]
    task = ", ".join(mixture) or str(data.setting("task.source", "?"))
    limit = f"at most {data.setting('rollout.max_tokens', '?')} tokens each"
    if interrupt := data.setting("rollout.interrupt_after"):
        answer = data.setting("rollout.answer_tokens", "?")
        limit = f"at most {interrupt[1]} tokens of thinking and {answer} behind them"
    starts = data.logs["starts"]
    machine = str(starts[-1].get("machine", "?")) if starts else "not recorded by this run"
    return [
        Figure("Model", str(data.setting("model.path", "?")), str(data.setting("model.dtype", ""))),
        Figure("Trained", adapter, ""),
        Figure("Algorithm", str(data.setting("algo.name", "?")), overrides),
        Figure("Task", task, f"reward: {rewards}" if rewards else ""),
        Figure("Step", f"{prompts_of_step} answers", limit),
        Figure("Seed", str(data.setting("seed", "?")), ""),
        Figure("When", *_date_run(data)),
        Figure("Machine", machine, str(starts[-1].get("versions", "")) if starts else ""),
    ]


def _date_run(data: RunRows) -> tuple[str, str]:
    """(start and end of the run, time zone) as texts."""
    ledger = data.logs["ledger"]
    ends_of_steps = [stop for _, _, stop in steps_of(ledger)]
    first = number(ledger[0], "process_started") if ledger else None
    if not ends_of_steps or first is None:
        return "no step has ended yet", ""
    start, end = (datetime.fromtimestamp(seconds, UTC) for seconds in (first, ends_of_steps[-1]))
    return f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}", "UTC"


# ---- tables


def compare_scores(data: RunRows) -> Table:
    """Held-out scores beside those of the model at step 0 on the same prompts."""
    rows = data.evals
    step = f"step {rows[-1]['step']}" if ends(rows)[1] else "not yet"
    head = ("before\nstep 0, the baseline", f"after\n{step}", "change")
    lines = [*(_compare_main_set(data) if rows else ()), *_compare_tasks(data), *_compare_downstream(data)]
    if (abilities := abilities_left(data.metrics)) is not None:
        name = "abilities kept\nprobability of what it could do and is not trained on (docs/forgetting.md)"
        lines.append((name, "1", abilities.text(), f"{abilities.value - 1:+.3f}"))
    return Table(title="held out", head=head, rows=lines, note=_describe_protocol(data))


def _compare_main_set(data: RunRows) -> Iterator[Line]:
    """Lines of the main held-out set: pass rates, rewards, answer length and truncation."""
    rows, greedy = data.evals, data.scores["greedy"]
    before, after = ends(rows)
    yield _compare_line("pass@1\nshare of prompts", before, after, "pass@1")
    if (k := number(rows[-1], "k") or 1) > 1:
        yield _compare_line(f"pass@{k:.0f}\nshare of prompts", before, after, "pass@k")
    if not has_one_score(rows):
        yield _compare_line("mean reward\nper answer", before, after, "reward")
    if greedy:
        first, last = ends(greedy)
        yield _compare_line(
            "pass@1, greedy\nshare of prompts, one answer at temperature 0", first, last, "pass@1"
        )
        if not has_one_score(greedy):
            yield _compare_line("mean reward, greedy\nper answer, at temperature 0", first, last, "reward")
    for name, key, form in (
        ("answer length\ntokens, mean", "completions/mean_length", ".1f"),
        ("truncated\nshare of answers", "completions/clipped_ratio", ".3f"),
    ):
        old, new = (None if value is None else number(value, key) for value in (before, after))
        change = "" if old is None or new is None else format(new - old, f"+{form}")
        yield name, *(NOT_MEASURED if value is None else format(value, form) for value in (old, new)), change


def _compare_line(name: str, before: Row | None, after: Row | None, key: str) -> Line:
    """The line of a held-out estimate: its name, before, after, and the change."""
    old, new = (None if row is None else estimate(row, key) for row in (before, after))
    change = difference(old, new).text("+.3f") if old and new else ""
    return name, *(value.text() if value else NOT_MEASURED for value in (old, new)), change


def _compare_tasks(data: RunRows) -> Iterator[Line]:
    """Lines of pass@1 for each task of a mixture, with its share of the groups of training."""
    evals, metrics = data.evals, data.metrics
    for name, last in (evals[-1].get("tasks", {}) if evals else {}).items():
        rows = [{**row.get("tasks", {}).get(name, {}), "step": row["step"]} for row in evals]
        share = total(metrics, f"tasks/{name}/share") / max(1, len(metrics))
        note = f"{number(last, 'n') or 0:.0f} prompts; {share:.0%} of all groups of training"
        yield _compare_line(f"{name}, pass@1\n{note}", *ends(rows), "pass@1")


def _compare_downstream(data: RunRows) -> Iterator[Line]:
    """Lines of pass@1 and, where recorded, mean reward for each downstream set."""
    for name, rows in data.downstream.items():
        size = f"{number(rows[-1], 'n') or 0:.0f} prompts; after step {rows[-1]['step']}"
        for key, kind in (("pass@1", "pass@1"), ("reward", "mean reward")):
            if any(key in row for row in rows):
                yield _compare_line(f"{name}, {kind}\n{size}", *ends(rows), key)


def _describe_protocol(data: RunRows) -> str:
    """Description of how the held-out score was measured; empty without an evaluation."""
    scores = data.scores
    if not scores["evals"]:
        return ""
    row, exported = scores["evals"][-1], scores["exported"]
    samples, temperature = number(row, "samples") or 1, data.setting("eval.temperature")
    mode = (
        "" if temperature is None else " greedily" if temperature == 0 else f" at temperature {temperature:g}"
    )
    excluded = number(row, "excluded") or 0
    note = (
        f"{number(row, 'n') or 0:.0f} held-out prompts (split {row.get('split', '?')}), {samples:.0f} "
        f"{'answer' if samples == 1 else 'answers'} each{mode}; the same prompts and the same noise at every "
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


LINES = 16  # workers with a line of their own; more are averaged by pool


def count_work(whole: Usage) -> Table:
    """Seconds by kind of work: a line per worker, or means per pool for more than LINES workers."""
    kinds = [kind for kind in Kind if any(kinds.get(kind) for kinds in whole.seconds.values())]
    groups: dict[str, list[str]] = {name: [name] for name in whole.seconds}
    if len(groups) > LINES:
        pools: dict[str, list[str]] = {}
        for name in whole.seconds:
            pools.setdefault(pool_of(name), []).append(name)
        groups = {f"{name} x {len(workers)}": workers for name, workers in pools.items()}
    lines = []
    for name, workers in groups.items():
        sums: Counter[Kind] = Counter()
        for worker in workers:
            sums.update(whole.seconds[worker])
        used = sum(map(whole.utilisation, workers)) / len(workers)
        work = (format_seconds(sums[kind] / len(workers)) if sums[kind] else "" for kind in kinds)
        lines.append((name, f"{used:.1%}", *work, format_seconds((1 - used) * (whole.stop - whole.start))))
    note = f"Of {format_seconds(whole.stop - whole.start)}; to wait or to load is to be idle."
    return Table(title="Workers", head=("worked", *map(str, kinds), "idle"), rows=lines, note=note)


# ---- a plan beside the run

# part of a step -> (its metric, its phases in ``plan.record``). In turns the train time includes publishing;
# with overlap there is no separate rollout time.
PUBLISH = "time/publish_s"
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}
SENT = "comm/bytes/"  # by collective and axis


def compare_plan(data: RunRows) -> Table | None:
    """Seconds and bytes of a step, planned (plan.json) beside the run's medians; None without a plan."""
    rows, phases = data.metrics[1:], mapping(data.plan.get("seconds"))  # without the warm-up step
    if not data.plan:
        return None
    lines: list[Line] = []

    def add(name: str, planned: float, key: str, form: str, ratio: str) -> None:
        values = [value for value in column(rows, key) if value is not None]
        measured = statistics.median(values) if values else None
        if planned or measured is not None:
            text = NOT_MEASURED if measured is None else format(measured, form)
            quotient = f"{measured / planned:{ratio}}" if measured and planned else ""
            lines.append((name, f"{planned:{form}}", text, quotient))

    parts = OVERLAPPED if any(PUBLISH in row for row in data.metrics) else IN_TURNS
    for part, (key, names) in parts.items():
        terms = Counter[str]()
        for name in names:
            terms.update(
                {
                    k: seconds
                    for k in mapping(phases.get(name))
                    if (seconds := number(phases[name], k)) is not None
                }
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
