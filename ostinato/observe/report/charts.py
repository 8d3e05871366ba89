"""Plots over the steps: charts as data, drawn by page/charts.js. A sentence replaces a chart without data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ostinato.observe.report.facts import Fact, Table, estimate
from ostinato.observe.report.reading import Row, RunData, column, names_under, number

COLORS = ("--blue", "--teal", "--orange", "--purple", "--red", "--grey", "--gold", "--pink") * 3

Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, or a layer of a stack. ``color`` is a CSS variable; ``low`` and ``high`` draw a band."""

    label: str
    values: Values
    color: str
    low: Values | None = None
    high: Values | None = None
    marker: str = ""  # "dot": its points are drawn however many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure. ``note`` says what the lines are, in plain words; ``empty`` replaces it when set.

    ``steps`` are the x values. ``along`` is the text for one of them, in which "#" stands for its number, or
    for its label if ``labels`` has one for each.
    """

    key: str
    title: str
    note: str
    unit: str  # of the values, for axis and read-out; "%" shows shares as percent
    steps: Sequence[float]
    series: list[Series]
    stacked: bool = False
    log: bool = False
    log_x: bool = False
    labels: Sequence[str] = ()
    low: float | None = None  # the axis covers at least [low, high]
    high: float | None = None
    mark: tuple[float, str] | None = None  # a dashed line and its name
    along: str = "step #"
    empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a summary of a sentence or two (``lead``), and its charts, facts and tables."""

    title: str
    charts: Sequence[Chart] = ()
    lead: str = ""
    anchor: str = ""  # for links to it
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()


Lines = Mapping[str, str | tuple[str, str]]  # label, or label and color, by metric


def lines(rows: Sequence[Row], named: Lines, *, missing: float | None = None) -> list[Series]:
    """One series over the rows for each metric; ``missing`` replaces values that a row does not have."""
    pairs = [
        (key, (name, color) if isinstance(name, str) else name)
        for (key, name), color in zip(named.items(), COLORS, strict=False)
    ]
    return [
        Series(label=label, color=color, values=[missing if v is None else v for v in column(rows, key)])
        for key, (label, color) in pairs
    ]


def plotted(
    title: str, note: str, unit: str, series: list[Series], *, steps: Sequence[float], **options: Any
) -> Chart:
    """A chart of the series that have values, or with a sentence if there are none; its key is made from
    its title."""
    options = {"key": title.lower().replace(" ", "-"), "empty": "", **options}
    drawn = [one for one in series if any(v is not None for v in (*one.values, *(one.low or ())))]
    if drawn:
        options["empty"] = ""
    else:
        options["empty"] = options["empty"] or (
            "Not recorded in this run." if steps else "No step has been finished yet."
        )
        options, steps = {**options, "labels": ()}, ()
    return Chart(title=title, note=note, unit=unit, series=drawn, steps=steps, **options)


def figure(
    rows: Sequence[Row], title: str, note: str, unit: str, series: Lines | list[Series], **options: Any
) -> Chart:
    """A chart over the steps of ``rows``."""
    drawn = series if isinstance(series, list) else lines(rows, series)
    return plotted(title, note, unit, drawn, steps=[int(row["step"]) for row in rows], **options)


def scored(rows: Sequence[Row], key: str, label: str, color: str, marker: str = "") -> Series:
    """The held-out score ``key`` of evaluations, with its 95 % interval."""
    found = [estimate(row, key) for row in rows]
    low, high = (
        [None if one is None or one.interval is None else one.interval[end] for one in found]
        for end in (0, 1)
    )
    values = [None if one is None else one.value for one in found]
    return Series(label=label, values=values, color=color, low=low, high=high, marker=marker)


def sections(data: RunData) -> list[Section]:
    """The plots over steps that every run has, except held-out score and sampler against trainer."""
    rows = data.metrics
    return [
        Section(title="Signal", charts=_signal(rows)),
        Section(title="Policy", charts=_policy(data)),
        Section(title="Cost", charts=_cost(rows)),
    ]


def held_out(data: RunData) -> Chart:
    """pass@1, and pass@k if k > 1, with their 95 % intervals; the mean reward if it differs from pass@1, and
    the greedy score if there is one."""
    rows = data.evals
    series = [scored(rows, "pass@1", "pass@1", "--blue")]
    k = max((number(row, "k") or 1 for row in rows), default=1)
    if k > 1:
        series.append(scored(rows, "pass@k", f"pass@{k:.0f}", "--teal"))
    rewards = [value for value in column(rows, "reward") if value is not None]
    if any(number(row, "reward") != number(row, "pass@1") for row in rows if "reward" in row):
        (mean,) = lines(rows, {"reward": ("mean reward", "--orange")})
        series.append(replace(mean, marker="dot"))
    if data.greedy:
        greedy = {row["step"]: row for row in data.greedy}
        of_steps = [greedy.get(row["step"], {}) for row in rows]
        series.append(scored(of_steps, "pass@1", "greedy pass@1", "--purple", "dot"))
    note = (
        "Share of held-out prompts solved by one answer (pass@1), or any of k; band: 95 % interval. "
        "Greedy: one answer at temperature 0."
    )
    empty = "" if rows else "No evaluation has been made: eval.jsonl has no rows."
    ends = {"low": min([0.0, *rewards]), "high": max([1.0, *rewards])}
    return figure(rows, "Held-out score", note, "", series, empty=empty, key="held-out", **ends)


def downstream_sections(data: RunData) -> list[Section]:
    """pass@1 of each set that is not trained on; empty for a run that has none."""
    if not data.downstream:
        return []
    steps = sorted({int(row["step"]) for rows in data.downstream.values() for row in rows})
    series = []
    for (name, rows), color in zip(data.downstream.items(), COLORS * len(data.downstream), strict=False):
        of_step = {int(row["step"]): row for row in rows}
        series.append(scored([of_step.get(step, {}) for step in steps], "pass@1", name, color, "dot"))
    note = "pass@1 of sets that are not trained on; band: 95 % interval."
    at = [{"step": step} for step in steps]
    chart = figure(at, "Downstream scores", note, "", series, low=0.0, high=1.0)
    return [Section(title="Downstream", anchor="downstream", charts=[chart])]


def _signal(rows: Sequence[Row]) -> list[Chart]:
    solved_note = "Share of prompts solved by none, some or all of their answers; only “some” teaches."
    solved = {
        "solved_none": ("none", "--red"),
        "solved_some": ("some", "--blue"),
        "solved_all": ("all", "--teal"),
    }
    lost = {
        "completions/clipped_ratio": ("truncated answers", "--orange"),
        "frac_reward_zero_std": ("groups of equal reward", "--purple"),
    }
    lost_note = "Answers cut off, and groups whose answers all got one reward."
    if any(column(rows, "interrupt/rate")):
        lost |= {"interrupt/rate": ("interrupted answers", "--blue")}
        lost_note += " Interrupted answers were cut by a phrase (rollout.interrupt_after)."
    mean, low, high = (column(rows, f"completions/{name}_length") for name in ("mean", "min", "max"))
    length = [Series(label="mean", values=mean, color="--blue", low=low, high=high)]
    length_note = "Sampled tokens per answer; band: shortest to longest."
    return [
        _reward(rows),
        figure(rows, "Prompts solved", solved_note, "%", solved, stacked=True),
        figure(rows, "Lost signal", lost_note, "%", lost, low=0.0),
        figure(rows, "Answer length", length_note, "tokens", length, low=0.0),
    ]


def _reward(rows: Sequence[Row]) -> Chart:
    """The total reward with its spread, and each reward function if there are several."""
    means, spread = column(rows, "reward"), column(rows, "reward_std")
    low, high = (
        [None if m is None or s is None else m + sign * s for m, s in zip(means, spread, strict=True)]
        for sign in (-1, 1)
    )
    whole = Series(label="reward", values=means, color="--blue", low=low, high=high)
    keys = [key for key in names_under(rows, "rewards/") if key.endswith("/mean")]
    named = zip(keys, COLORS[1:], strict=False)
    functions = {f"rewards/{key}": (key.removesuffix("/mean"), color) for key, color in named}
    note = "Mean of training answers; band: ± their standard deviation."
    return figure(rows, "Reward", note, "", [whole, *lines(rows, functions if len(keys) > 1 else {})])


def _policy(data: RunData) -> list[Chart]:
    """Loss, entropy, gradient norm, learning rate, and the charts that only some algorithms have."""
    rows, limit = data.metrics, data.setting("trainer.max_grad_norm")
    clip = (float(limit), "clip") if isinstance(limit, int | float) and math.isfinite(limit) else None
    note = "Mean over trained tokens, at the sampling temperature."
    clipped = {f"clip_ratio/{key}": key.removesuffix("_mean") for key in names_under(rows, "clip_ratio/")}
    clipped |= {"cispo_clip_ratio": "capped"}
    share, kl = "Share of tokens beyond the trust region.", {"kl": ("KL", "--teal")}
    taught = {"opd/reverse_kl": ("reverse KL", "--teal")}
    own = [
        figure(rows, "Clipped tokens", share, "%", clipped, low=0.0),
        figure(rows, "KL to the base", "Estimate per trained token.", "nats", kl, low=0.0),
        figure(rows, "Reverse KL to the teacher", "Per trained token.", "nats", taught),
    ]
    left, low, high = (column(rows, f"forgetting/kept{end}") for end in ("", "_low", "_high"))
    able = [Series(label="kept", values=left, color="--blue", low=low, high=high, marker="dot")]
    able += lines(rows, {"forgetting/kl_k3": ("KL to the start, nats per token", "--orange")})
    what = "Probability left of what the policy could do and is not trained on; 95 % over rows."
    own.append(figure(rows, "Abilities kept", what, "", able, low=0.0, mark=(1.0, "all")))
    return [
        figure(rows, "Loss", "Of each step's batch.", "", {"loss": "loss"}),
        figure(rows, "Entropy", note, "nats", {"entropy": ("entropy", "--purple")}, low=0.0),
        figure(rows, "Gradient norm", "Before clipping.", "", {"grad_norm": "norm"}, low=0.0, mark=clip),
        figure(rows, "Learning rate", "Of each step's update.", "", {"learning_rate": "lr"}, low=0.0),
        *(chart for chart in own if not chart.empty),
    ]


TIMES = {
    "time/rollout_s": ("rollout", "--blue"),
    "time/reward_s": ("reward", "--orange"),
    "time/train_s": ("train", "--teal"),
    "time/measure_s": ("measure", "--purple"),
    "time/other_s": ("other", "--grey"),
}


def _cost(rows: Sequence[Row]) -> list[Chart]:
    palette = ("--red", "--orange", "--purple", "--grey", "--teal", "--gold", "--pink") * 3
    reasons = zip(names_under(rows, "tokens/wasted/"), palette, strict=False)
    wasted = {f"tokens/wasted/{name}": (name.replace("_", " "), color) for name, color in reasons}
    tokens = [*lines(rows, {"tokens/trained": "trained on"}), *lines(rows, wasted, missing=0.0)]
    flops = {
        "flops/rollout": ("rollout", "--blue"),
        "flops/train": ("train", "--teal"),
        "flops/measure": ("measure", "--purple"),
    }
    seconds = "Where they went; rewards only where training waited; measure: sampler against trainer."
    speed = "Sampled tokens per second of the whole step."
    work = "By the model's shapes and the rows that ran."
    return [
        figure(rows, "Time per step", seconds, "s", TIMES, stacked=True),
        figure(rows, "Throughput", speed, "tokens/s", {"tokens_per_s": "speed"}, low=0.0),
        figure(rows, "Sampled tokens", "Trained on, or wasted and why.", "tokens", tokens, stacked=True),
        figure(rows, "FLOPs", work, "FLOP", flops, stacked=True),
    ]


def to_plain(chart: Chart) -> dict[str, Any]:
    """The chart as charts.js reads it, rounded to five significant digits, more than a screen shows."""
    plain: dict[str, Any] = asdict(chart)
    for one in plain["series"]:
        one |= {key: one[key] and _short(one[key]) for key in ("values", "low", "high")}
    return plain | {"steps": _short(chart.steps)}


def _short(values: Sequence[float | None]) -> Values:
    return [v if v is None or isinstance(v, int) else float(f"{v:.5g}") for v in values]
