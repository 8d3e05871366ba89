"""The plots of sampler against trainer: over the steps, and of the last full measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ostinato.observe.report.arms import (
    ARMS,
    DIRECTION,
    arm,
    gate,
    last_arm,
    layers,
    points,
    routers,
    stretches,
)
from ostinato.observe.report.charts import Chart, Series, banded, figure, lines, plotted
from ostinato.observe.report.facts import figure_text
from ostinato.observe.report.reading import Row, RunData, number


def every_step(data: RunData) -> Iterator[Chart]:
    rows, gap = data.metrics, "sampling/sampling_logp_difference"
    gaps = {
        f"{gap}/max": ("max |Δ log p|", "--orange"),
        f"{gap}/mean": ("mean |Δ log p|", "--blue"),
        "sampling/kl_k3": ("KL (k3)", "--purple"),
    }
    note = "Trainer minus sampler, per token in nats; 0 is exact agreement."
    yield figure(rows, "Log-probability gap", note, "", gaps, log=True)
    ratio = banded(rows, "sampling/importance_sampling_ratio/{}", "mean")
    note = "Trainer over sampler; band: smallest to largest token."
    yield figure(rows, "Importance ratio", note, "", [ratio], low=0.9, high=1.1, mark=(1.0, ""))
    ess = {"sampling/ess": ("effective share", "--teal")}
    note = "Share of tokens that count after weighting; 100 % is on-policy."
    yield figure(rows, "Effective sample size", note, "%", ess, low=0.9, high=1.0)
    if any("routing/overlap" in row for row in rows):
        overlap = {
            "routing/overlap": ("mean", "--teal"),
            "routing/lowest_sequence": ("lowest sequence", "--orange"),
        }
        mark = (gate(data), "gate") if gate(data) else None
        refuses = "; the gate refuses less" if gate(data) else ""
        note = f"Share of expert ids that trainer and sampler have in common{refuses}."
        yield figure(rows, "Routes in common", note, "%", overlap, high=1.0, mark=mark)
        note = "Share of routers, one for each token and layer, that chose another set of experts."
        yield figure(rows, "Routers that differ", note, "%", {"routing/differ": ("differ", "--red")}, low=0.0)


def courses(rows: Sequence[Row]) -> Iterator[Chart]:
    """k3 of the measured steps. The floor, many decades below, is left to the table."""
    if not rows:
        return
    series = [
        Series(
            label=name,
            values=[number(arm(row, name), "k3") for row in rows],
            low=[number(arm(row, name), "k3_low") for row in rows],
            high=[number(arm(row, name), "k3_high") for row in rows],
            color=color,
        )
        for name, (_, color, _) in ARMS.items()
        if name != "floor"
    ]
    note = f"k3 of {DIRECTION}, nats per token; band: 95 % over sequences."
    yield figure(rows, "KL native and replayed", note, "", series, log=True)


def ratios(rows: Sequence[Row]) -> Iterator[Chart]:
    """Of the last measurement: F(tau), and the same information as a distribution."""
    if not rows:
        return
    where = _where(rows)
    tails = {name: points(last_arm(rows, name), "tails") for name in ARMS}
    taus = [tau for tau, _ in tails["native"]]
    yield plotted(
        "Tokens far apart",
        f"F(τ): share of tokens with a ratio beyond τ or 1/τ; 0 lies on the axis. {where}",
        "",
        _curves(tails, len(taus)),
        key="tails",
        steps=[math.log(tau) for tau in taus],
        labels=[f"{tau:g}" for tau in taus],
        log=True,
        log_x=True,
        along="τ = #",
    )
    cdf = {name: points(last_arm(rows, name), "cdf") for name in ARMS}
    note = f"Share of tokens whose |log ratio| is at most that, in nats. {where}"
    series, steps = _curves(cdf, len(cdf["native"])), [at for at, _ in cdf["native"]]
    options = {"key": "gap-distribution", "log_x": True, "along": "≤ #", "low": 0.0, "high": 1.0}
    yield plotted("Distribution of the gap", note, "%", series, steps=steps, **options)


def _curves(curves: Mapping[str, Sequence[tuple[float, float]]], size: int) -> list[Series]:
    """One line for each arm, over the same places."""
    return [
        Series(label=name, values=[share for _, share in curve], color=ARMS[name][1])
        for name, curve in curves.items()
        if size and len(curve) == size
    ]


def disagreement(rows: Sequence[Row]) -> Iterator[Chart]:
    """Of the last measurement: where in model and sequence the routers differ, and how narrowly."""
    choice = routers(rows[-1]) if rows else {}
    parts, bins = layers(choice), stretches(choice)
    if not parts:
        return
    where = _where(rows[-1:])
    names = [f"{one.get('layer', i)}" for i, one in enumerate(parts)]
    note = f"Share of tokens for which it chose another set of experts; layers of the decoder. {where}"
    yield _bars("Routers by layer", note, [number(one, "differ") for one in parts], names, "layer #")
    note = f"Share of routers that chose another set, by place in the sequence, prompt included. {where}"
    ranges = [f"{first}-{last}" if last > first else f"{first}" for first, last, _ in bins]
    yield _bars("Routers by position", note, [share for _, _, share in bins], ranges, "position #")
    median, flip, p95 = (number(choice, f"margin_{name}") for name in ("median", "flip_median", "flip_p95"))
    margins = lines(parts, {"margin": ("all", "--grey"), "margin_flip": ("where they differ", "--red")})
    note = (
        f"Last expert chosen minus first left out, in logits; medians, {figure_text(median)} over all, "
        f"{figure_text(flip)} (95 %: {figure_text(p95)}) where the two differ. {where}"
    )
    options = {"key": "margins", "labels": names, "log": True, "along": "layer #"}
    yield plotted("Margins of routers", note, "", margins, steps=list(range(len(names))), **options)


def _bars(title: str, note: str, values: list[float | None], names: list[str], along: str) -> Chart:
    most = max((value for value in values if value is not None), default=0.0)
    return plotted(
        title,
        note,
        "%",
        [Series(label="differ", values=values, color="--red")],
        steps=list(range(len(values))),
        labels=names,
        stacked=True,
        high=most or 0.01,  # no difference at all still needs an axis
        along=along,
    )


def _where(rows: Sequence[Row]) -> str:
    """The step of what is shown, and of the arms that were last measured in another."""
    last = rows[-1]["step"]
    steps = {name: next((row["step"] for row in reversed(rows) if arm(row, name)), last) for name in ARMS}
    others = "".join(f"; {ARMS[name][0]}: step {step}" for name, step in steps.items() if step != last)
    return f"Step {last}{others}."
