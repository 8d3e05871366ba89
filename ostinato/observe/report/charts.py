"""What is plotted over the steps: charts as data, drawn by page/charts.js.

A chart without data carries a sentence instead. More than ``MAX_POINTS`` steps are joined into buckets (mean,
or the extreme where a series is one) and the chart says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.observe.report.facts import Fact, Table, estimate
from ostinato.observe.report.reading import Row, RunData, column, names_under, number

MAX_POINTS = 400

Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, or a layer of a stack. ``color`` is a CSS variable; ``low`` and ``high`` draw a band."""

    label: str
    values: Values
    color: str
    low: Values | None = None
    high: Values | None = None
    join: Callable[[Sequence[float]], float] | None = None  # of a bucket; None: its mean
    marker: str = ""  # of its points: "dot", "ring" or "cross", to be told apart without colour
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure. ``note`` says what the lines are, in the reader's words; ``empty`` replaces it when set.

    ``steps`` are the places on the horizontal axis. ``along`` names one, "#" being its number, or its label
    where ``labels`` has one for each place.
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
    edges: Sequence[tuple[float, str]] = ()  # upright dashed lines: place along the axis, name
    along: str = "step #"
    empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, what it comes to in a sentence or two, and what shows it."""

    title: str
    charts: list[Chart]
    lead: str = ""
    anchor: str = ""  # for links to it
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()


def sections(data: RunData) -> list[Section]:
    """What every run shows over its steps, the held-out score and sampler against trainer apart."""
    rows = data.metrics
    groups = [
        ("Signal", _signal(rows)),
        ("Policy", _policy(data)),
        ("Cost", _cost(rows)),
    ]
    return [Section(title=title, charts=[ready(chart) for chart in charts]) for title, charts in groups]


def held_out(data: RunData) -> Chart:
    """pass@1, and pass@k where k > 1, with their 95 % intervals; the mean reward where it is another number,
    and the greedy score where there is one."""
    rows = data.evals
    series = [_score(rows, "pass@1", "pass@1", "--blue")]
    k = max((number(row, "k") or 1 for row in rows), default=1)
    if k > 1:
        series.append(_score(rows, "pass@k", f"pass@{k:.0f}", "--teal"))
    rewards = [value for value in column(rows, "reward") if value is not None]
    if any(number(row, "reward") != number(row, "pass@1") for row in rows if "reward" in row):
        series.append(replace(line(rows, "reward", "mean reward", "--orange"), marker="dot"))
    if data.greedy:
        greedy = {row["step"]: row for row in data.greedy}
        of_steps = [greedy.get(row["step"], {}) for row in rows]
        series.append(replace(_score(of_steps, "pass@1", "greedy pass@1", "--purple"), marker="dot"))
    chart = Chart(
        key="held-out",
        title="Held-out score",
        note="Share of held-out prompts solved by one answer (pass@1), or any of k; band: 95 % interval. "
        "Greedy: one answer at temperature 0.",
        unit="",
        steps=_steps(rows),
        series=series,
        low=min([0.0, *rewards]),
        high=max([1.0, *rewards]),
        empty="" if rows else "No evaluation has been made: eval.jsonl has no rows.",
    )
    return ready(chart)


def _score(rows: Sequence[Row], key: str, label: str, color: str) -> Series:
    estimates = [estimate(row, key) for row in rows]
    intervals = [None if value is None else value.interval for value in estimates]
    return Series(
        label=label,
        values=[None if value is None else value.value for value in estimates],
        color=color,
        low=[None if interval is None else interval[0] for interval in intervals],
        high=[None if interval is None else interval[1] for interval in intervals],
    )


def _signal(rows: Sequence[Row]) -> list[Chart]:
    solved_note = "Share of prompts solved by none, some or all of their answers; only “some” teaches."
    solved = [
        line(rows, f"solved_{name}", name, color)
        for name, color in (("none", "--red"), ("some", "--blue"), ("all", "--teal"))
    ]
    lost = [
        line(rows, "completions/clipped_ratio", "truncated answers", "--orange"),
        line(rows, "frac_reward_zero_std", "groups of equal reward", "--purple"),
    ]
    lost_note = "Answers cut off, and groups whose answers all got one reward."
    if any(column(rows, "interrupt/rate")):
        lost.append(line(rows, "interrupt/rate", "interrupted answers", "--blue"))
        lost_note += " Interrupted answers were told to end (rollout.interrupt_after)."
    length = banded(rows, "completions/{}_length", "mean")
    length_note = "Sampled tokens per answer; band: shortest to longest."
    return [
        _reward(rows),
        figure(rows, "Prompts solved", solved_note, "%", solved, stacked=True),
        figure(rows, "Lost signal", lost_note, "%", lost, low=0.0),
        figure(rows, "Answer length", length_note, "tokens", [length], low=0.0),
    ]


def _reward(rows: Sequence[Row]) -> Chart:
    """The total with its spread, and each function where there are several."""
    reward, spread = column(rows, "reward"), column(rows, "reward_std")
    pairs = list(zip(reward, spread, strict=True))
    low, high = (
        [None if mean is None or std is None else mean + sign * std for mean, std in pairs]
        for sign in (-1, 1)
    )
    keys = [key for key in names_under(rows, "rewards/") if key.endswith("/mean")]
    functions = [
        line(rows, f"rewards/{key}", key.removesuffix("/mean"), color)
        for key, color in zip(keys if len(keys) > 1 else [], _colors(), strict=False)
    ]
    whole = Series(label="reward", values=reward, color="--blue", low=low, high=high)
    note = "Mean of training answers; band: ± their standard deviation."
    return figure(rows, "Reward", note, "", [whole, *functions])


def _policy(data: RunData) -> list[Chart]:
    rows = data.metrics
    entropy = line(rows, "entropy", "entropy", "--purple")
    entropy_note = "Mean over trained tokens, at the sampling temperature."
    norm = line(rows, "grad_norm", "norm", "--blue")
    limit = data.setting("trainer.max_grad_norm")
    clip = (float(limit), "clip") if isinstance(limit, int | float) and math.isfinite(limit) else None
    lr = line(rows, "learning_rate", "lr", "--blue")
    charts = [
        figure(rows, "Entropy", entropy_note, "nats", [entropy], low=0.0),
        figure(rows, "Gradient norm", "Before clipping.", "", [norm], low=0.0, mark=clip),
        figure(rows, "Learning rate", "Of each step's optimizer update.", "", [lr], low=0.0),
    ]
    clipped = [
        line(rows, f"clip_ratio/{key}", key.removesuffix("_mean"), color)
        for key, color in zip(names_under(rows, "clip_ratio/"), _colors(), strict=False)
    ]
    if any("cispo_clip_ratio" in row for row in rows):
        clipped.append(line(rows, "cispo_clip_ratio", "capped", "--blue"))
    if clipped:
        note = "Share of tokens beyond the trust region."
        charts.append(figure(rows, "Clipped tokens", note, "%", clipped, low=0.0))
    if any("kl" in row for row in rows):
        kl = line(rows, "kl", "KL", "--teal")
        charts.append(figure(rows, "KL to the base", "Estimate per trained token.", "nats", [kl], low=0.0))
    return charts


def _cost(rows: Sequence[Row]) -> list[Chart]:
    colors = {"rollout": "blue", "reward": "orange", "train": "teal", "measure": "purple", "other": "grey"}
    times = [line(rows, f"time/{name}_s", name, f"--{color}") for name, color in colors.items()]
    time_note = (
        "Where the seconds went; rewards only where training waited; measure: sampler against trainer."
    )
    speed = line(rows, "tokens_per_s", "speed", "--blue")
    speed_note = "Sampled tokens per second of the whole step."
    lost = [
        line(rows, f"tokens/wasted/{name}", name.replace("_", " "), color, missing=0.0)
        for name, color in zip(names_under(rows, "tokens/wasted/"), _colors("--red"), strict=False)
    ]
    tokens = [line(rows, "tokens/trained", "trained on", "--blue"), *lost]
    pools = (("useful", "--blue"), ("wasted", "--red"))
    flops = [line(rows, f"flops/{name}", name, color) for name, color in pools]
    flops_note = "By the model's shapes; wasted: not trained on, failed drafts, measuring, refused steps."
    return [
        figure(rows, "Time per step", time_note, "s", times, stacked=True),
        figure(rows, "Throughput", speed_note, "tokens/s", [speed], low=0.0),
        figure(rows, "Sampled tokens", "Trained on, or wasted and why.", "tokens", tokens, stacked=True),
        figure(rows, "FLOPs", flops_note, "FLOP", flops, stacked=True),
    ]


def figure(
    rows: Sequence[Row], title: str, note: str, unit: str, series: list[Series], **options: Any
) -> Chart:
    """A chart over the steps of ``rows``."""
    key = title.lower().replace(" ", "-")
    return Chart(key=key, title=title, note=note, unit=unit, steps=_steps(rows), series=series, **options)


def banded(rows: Sequence[Row], keys: str, label: str) -> Series:
    """The mean in a band from the minimum to the maximum; ``keys`` has a place for "mean", "min", "max"."""
    mean, low, high = (column(rows, keys.format(name)) for name in ("mean", "min", "max"))
    return Series(label=label, values=mean, color="--blue", low=low, high=high)


def line(
    rows: Sequence[Row],
    key: str,
    label: str,
    color: str,
    *,
    missing: float | None = None,
    join: Callable[[Sequence[float]], float] | None = None,
) -> Series:
    """A metric over the rows; ``missing`` stands where a row has none."""
    values = [missing if value is None else value for value in column(rows, key)]
    return Series(label=label, values=values, color=color, join=join)


def _steps(rows: Sequence[Row]) -> list[int]:
    return [int(row["step"]) for row in rows]


def _colors(first: str = "--teal") -> list[str]:
    return [first, "--orange", "--purple", "--grey", "--teal", "--red", "--blue"] * 4


def ready(chart: Chart) -> Chart:
    """Without series that have no value, with a sentence when none is left, and with few enough points."""
    series = [one for one in chart.series if any(value is not None for value in one.values)]
    if not series:
        sentence = "Not recorded in this run." if chart.steps else "No step has been finished yet."
        return replace(chart, series=[], steps=[], labels=[], empty=chart.empty or sentence)
    size = math.ceil(len(chart.steps) / MAX_POINTS)
    if size <= 1:
        return replace(chart, series=series)
    return replace(
        chart,
        note=f"{chart.note} Each point joins {size} steps.",
        steps=[bucket[-1] for bucket in _buckets(chart.steps, size)],
        labels=[bucket[-1] for bucket in _buckets(chart.labels, size)],
        series=[_joined(one, size) for one in series],
    )


def _joined(series: Series, size: int) -> Series:
    def joined(values: Values | None, how: Callable[[Sequence[float]], float] | None) -> Values | None:
        return None if values is None else [_join(bucket, how) for bucket in _buckets(values, size)]

    return replace(
        series,
        values=joined(series.values, series.join) or [],
        low=joined(series.low, min),
        high=joined(series.high, max),
    )


def _join(bucket: Sequence[float | None], how: Callable[[Sequence[float]], float] | None) -> float | None:
    known = [value for value in bucket if value is not None]
    if not known:
        return None
    return how(known) if how else sum(known) / len(known)


def _buckets(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def to_plain(chart: Chart) -> dict[str, Any]:
    """What charts.js reads: five significant digits are more than a screen shows."""

    def short(values: Values | None) -> Values | None:
        return None if values is None else [None if v is None else float(f"{v:.5g}") for v in values]

    series = [
        {
            "label": one.label,
            "color": one.color,
            "values": short(one.values),
            "low": short(one.low),
            "high": short(one.high),
            "marker": one.marker,
            "dashed": one.dashed,
        }
        for one in chart.series
    ]
    keys = ("key", "title", "unit", "labels", "stacked", "log", "log_x", "low", "high", "mark", "along")
    plain = {key: getattr(chart, key) for key in (*keys, "edges")}
    steps = [step if isinstance(step, int) else float(f"{step:.5g}") for step in chart.steps]
    return {**plain, "steps": steps, "series": series}
