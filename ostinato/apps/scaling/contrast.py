"""Curves beside one reference: the tables and the JSON of an ``Ablation``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ostinato.apps.scaling.ablation import ENOUGH, FAMILY, FLOOR, Ablation, Arm, Verdict
from ostinato.apps.scaling.gates import REPORTED, Assessment
from ostinato.apps.scaling.views import both, span
from ostinato.observe.report.facts import NONE, Table, compute_text


def verdict(arm: Arm) -> str:
    """ "moves A (down)", "moves only B (up) and C_mid (down)", "no difference seen"."""
    if not arm.moves:
        return str(arm.verdict)
    ways = [f"{name} ({'down' if arm.lower[name] > 0.5 else 'up'})" for name in arm.moves]
    return f"moves {'only ' if arm.verdict is Verdict.MOVES_EFFICIENCY else ''}{' and '.join(ways)}"


def sentences(found: Ablation) -> list[str]:
    """Who is not ranked, and how far runs differ by their seed alone."""
    tau, freedom = found.spread["A"], sum(len(arm.seeds) - 1 for arm in found.arms if arm.ranked)
    others = ", so the three runs of the paper are counted too" if freedom < ENOUGH else ""
    return [
        *(f"{arm.name} is not ranked: {arm.reason}." for arm in found.arms if arm.reason),
        f"From seed to seed A has a standard deviation of {tau.median:.3f} {span(tau)}, by {freedom} degrees"
        f" of freedom of all arms together{others}.",
    ]


def rule(found: Ablation) -> str:
    """How a verdict is come to, in words."""
    return (
        f"Intervals: 90 %, of the mean over seeds, the spread between seeds in them. A choice moves A where"
        f" P(A lower) is below {found.tail:.2%} or above {1 - found.tail:.2%}: the chance that any of"
        f" {len(found.arms) - 1} arms is reported to move A where none does is {FAMILY:.0%} at most. Where it"
        f" does not, and the medians of A are within {FLOOR:g}, B and C_mid are tested in the same way with A"
        f" held at that of {found.arms[0].name}, each by half of these tails, so that the chance of both"
        " together is as large again. B is not known where the first evaluations are already at the ceiling."
        " No difference seen is not none: the interval says how large it may be."
    )


def tables(found: Ablation, unit: str) -> list[Table]:
    known = any(arm.steep for arm in found.arms)
    return [_ceilings(found, unit), *([_efficiency(found, unit)] if known else [])]


def _chance(arm: Arm, name: str) -> str:
    """Draws are finite: they show no probability beyond 0.1 %."""
    p = arm.lower.get(name)
    return NONE if p is None else "<0.1%" if p < 0.001 else ">99.9%" if p > 0.999 else f"{p:.1%}"


def _score(arm: Arm, common: float) -> str:
    """Where a run of the arm did not get as far as the others, its own compute stands with it."""
    return both(arm.reached) + (f" at {compute_text(arm.reached_at)}" if arm.reached_at < common else "")


def _ceilings(found: Ablation, unit: str) -> Table:
    lines = [
        (
            arm.name,
            str(len(arm.seeds)),
            both(arm.A),
            both(arm.A_less, "{:+.3f}"),
            _chance(arm, "A"),
            _score(arm, found.common),
            verdict(arm),
        )
        for arm in found.arms
    ]
    less = f"less that of {found.arms[0].name}"
    columns = ("runs", "A", less, "P(A lower)", f"score at {compute_text(found.common)}", "verdict")
    note = (
        f"{rule(found)} Score at {compute_text(found.common)} {unit}, which all runs that ended and are"
        " ranked have reached: as measured just before, no curve."
    )
    return Table(title="Arm", head=columns, rows=lines, note=note)


def _efficiency(found: Ablation, unit: str) -> Table:
    held = "" if found.shared_A is None else f" at A = {found.shared_A:.3f}"
    lines = [
        (
            arm.name,
            both(arm.B, "{:.2f}"),
            both(arm.B_shared, "{:.2f}"),
            _chance(arm, "B"),
            both(arm.C_mid, ""),
            both(arm.C_mid_ratio, "{:.2f}"),
            _chance(arm, "C_mid"),
        )
        for arm in found.arms
    ]
    over = f"over that of {found.arms[0].name}"
    columns = ("B", f"B{held}", "P(B lower)", "C_mid", over, "P(C_mid lower)")
    note = (
        f"C_mid in {unit}: compute of half of the gain; its ratio too is at that A. A dash: A is further than"
        f" {FLOOR:g} from that of {found.arms[0].name}, or B is not known."
    )
    return Table(title="Arm", head=columns, rows=lines, note=note)


def as_json(found: Ablation) -> dict[str, Any]:
    return {
        "common_compute": found.common,
        "shared_A": found.shared_A,
        "tail": found.tail,
        "seed_spread": {name: asdict(each) for name, each in found.spread.items()},
        "rule": rule(found),
        "arms": [_arm_json(arm) for arm in found.arms],
    }


def _arm_json(arm: Arm) -> dict[str, Any]:
    intervals = ("A", "B", "C_mid", "B_shared", "C_mid_ratio", "A_less", "reached")
    return {
        "arm": arm.name,
        "seeds": arm.seeds,
        "standing": arm.standing,
        "reason": arm.reason,
        **{name: None if (one := getattr(arm, name)) is None else asdict(one) for name in intervals},
        "reached_at": arm.reached_at,
        "lower": dict(arm.lower),
        "verdict": verdict(arm),
        "runs": [_run_json(seed, one) for seed, one in zip(arm.seeds, arm.assessments, strict=True)],
    }


def _run_json(seed: int, found: Assessment) -> dict[str, Any]:
    ratio = found.ratio if found.standing in REPORTED else None
    return {"seed": seed, "standing": found.standing, "C_max_over_C_mid": ratio, "flags": found.flags}
