"""Factors of a kind of device from runs that have a plan.

    a plan's terms / factors it was made with * factors kept now    what a plan says of the run today
    measured seconds of rollout, train, refit                       corrections of terms, by ``calibrate``
    kept factors * corrections                                      the new ones; other terms keep theirs

Parts that share no term are fitted by themselves, so that each has a scale of its own: of a single run all
terms of a part move alike, and it is met. What a plan does not price (drafts, other programs on the device)
is learned as if it were the device. Runs of another layout or of other numbers of tokens than planned are
refused, and so are those that sample on the devices that train meanwhile. With what is left of the errors
the same runs teach a little more when they are fitted again, and their steps count again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.parallel.layout import Layout
from ostinato.plan.calibrate import Calibration, Observation, calibrate, errors, parsed
from ostinato.plan.engines import LOCAL, vllm_flags
from ostinato.plan.problem import Placement
from ostinato.plan.record import FILE, observations, overlaps
from ostinato.plan.roofline import Efficiency
from ostinato.plan.time import BYTES, CALLS

TOKENS = 0.15  # a step may sample so much more or less than planned: what replan calls unmoved


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a run teaches of a kind of device: ``parts`` with terms in seconds as its plan has them, which was
    made with ``calibration``. ``note``: what it does not teach, in one sentence."""

    name: str
    device: str
    calibration: Calibration | None
    parts: Sequence[Observation]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of a part of a run's step: as its plan said, as they were measured, as the new factors say."""

    name: str
    planned: float
    measured: float
    fitted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was found, and how well it tells the parts that it was found from."""

    device: str
    calibration: Calibration
    parts: Sequence[Part]


def lesson(
    name: str,
    plan: Any,
    metrics: Iterable[Mapping[str, Any]],
    layout: str = "",
    sampler: tuple[str, Sequence[str]] | None = None,
) -> Lesson:
    """Of the run called ``name``, with its plan.json, its rows of metrics, the layout that it trained under
    ("": one rank), and the backend and server arguments of its sampler, where they are known. Of a plan that
    a run went on by after a "step", later rows count. Raises ValueError, in one sentence, for a run that
    teaches nothing.
    """
    if not isinstance(plan, Mapping) or "device" not in plan:
        raise ValueError(f"{FILE} of {name} does not name its kind of device; {_anew(name)}")
    try:
        device, planned = str(plan["device"]), str(Layout.parse(plan["layouts"]["train"]))
        rows = [row for row in metrics if row.get("step", math.inf) > plan.get("step", 0)]
        parts = observations(name, plan, rows)
        made = plan["calibration"]
        calibration = None if made is None else parsed(made)
        tokens, placement = float(plan["tokens"]), Placement(plan["placement"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{FILE} of {name} cannot be read ({error!r}); {_anew(name)}") from error
    if not parts:
        raise ValueError(f"{name} has no seconds of a step behind its first, which warms up; let it go on")
    if (trained := str(Layout.parse(layout))) != planned:
        raise ValueError(
            f"{name} trains under layout {trained} and its plan is of {planned}; {_anew(name)} and "
            f"--train-layout {trained}"
        )
    _refuse_other_work(name, tokens, rows)
    note = ""
    if overlaps(rows):
        if placement == Placement.COLOCATED:
            raise ValueError(
                f"{name} samples while it trains, and by its plan on the same devices, so that no seconds "
                "are those of one part; fit runs without pipeline.overlap"
            )
        note = f"rollouts of {name} teach nothing: with pipeline.overlap nobody measures them alone"
    elif sampler is not None and plan.get("sampler") and not _as_planned(plan["sampler"], *sampler):
        parts = [part for part in parts if not part.name.endswith(" rollout")]
        note = f"rollouts of {name} teach nothing: its sampler is not the one that was planned"
    return Lesson(name=name, device=device, calibration=calibration, parts=parts, note=note)


def _as_planned(said: Mapping[str, Any], backend: str, server_args: Sequence[str]) -> bool:
    """Is a run's sampler that of its plan?"""
    layout = Layout.parse(str(said.get("layout", "")))
    runs = layout.world == 1 if backend == LOCAL else {*vllm_flags(layout)} <= {*server_args}
    return said.get("backend") == backend and runs


def _anew(name: str) -> str:
    return f"plan it anew with --record {name}"


def _refuse_other_work(name: str, tokens: float, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a run that samples other numbers of tokens in a step than its plan is of."""
    told = [row["tokens/sampled"] for row in rows[1:] if row.get("tokens/sampled")]
    if told and abs(statistics.median(told) / tokens - 1) > TOKENS:
        raise ValueError(
            f"{name} samples {statistics.median(told):,.0f} tokens a step and its plan is of {tokens:,.0f}; "
            f"{_anew(name)} and its own --prompts, --group, --answer-tokens and --max-answer"
        )


def fit(lessons: Sequence[Lesson], kept: Calibration | None) -> Fit:
    """``kept`` with what the runs teach. Steps are counted on, errors are those of the new ones.

    Raises ValueError, in one sentence, for no runs, for devices of several kinds, and for a plan that was
    made with other efficiencies than are kept, whose seconds no factor turns into today's.
    """
    devices = sorted({one.device for one in lessons})
    if len(devices) != 1:
        told = f"the runs were planned for {' and '.join(devices)}" if devices else "no run is named"
        raise ValueError(f"{told}; fit the runs of one kind of device at a time")
    for one in lessons:
        if _apart(one.calibration) != _apart(kept):
            raise ValueError(
                f"{one.name} was planned with other efficiencies than are kept for {devices[0]} now; "
                f"{_anew(one.name)}"
            )
    before = {} if kept is None else kept.factors
    today = [_today(part, one, before) for one in lessons for part in one.parts]
    corrections: dict[str, float] = {}
    for some in _sharing(today):
        corrections |= calibrate(some).factors
    median, worst = errors(today, corrections)
    found = Calibration(
        factors={**before, **{term: before.get(term, 1.0) * times for term, times in corrections.items()}},
        median=median,
        worst=worst,
        observations=len(today) + (0 if kept is None else kept.observations),
        efficiency={} if kept is None else kept.efficiency,
    )
    said = [part.predicted for one in lessons for part in one.parts]
    parts = [
        Part(name=part.name, planned=planned, measured=part.seconds, fitted=part.under(corrections))
        for part, planned in zip(today, said, strict=True)
    ]
    return Fit(device=devices[0], calibration=found, parts=parts)


def _apart(made: Calibration | None) -> tuple[Efficiency, float, float]:
    """What a calibration changes and no factor of a term tells."""
    if made is None:
        return Efficiency(), 1.0, 1.0
    return (
        replace(Efficiency(), **made.efficiency),
        made.factors.get(CALLS, 1.0),
        made.factors.get(BYTES, 1.0),
    )


def _today(part: Observation, of: Lesson, kept: Mapping[str, float]) -> Observation:
    """With the terms of a plan that is made with the factors that are kept."""
    before = {} if of.calibration is None else of.calibration.factors
    terms = {
        term: seconds * kept.get(term, 1.0) / before.get(term, 1.0) for term, seconds in part.terms.items()
    }
    return replace(part, terms=terms)


def _sharing(parts: Iterable[Observation]) -> list[list[Observation]]:
    """In groups: parts of two groups have no term in common."""
    groups: list[list[Observation]] = []
    for part in parts:
        near = [group for group in groups if any(part.terms.keys() & one.terms.keys() for one in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(one for group in near for one in group), part])
    return groups


__all__ = ["Fit", "Lesson", "Part", "fit", "lesson"]
