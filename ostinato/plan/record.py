"""A plan as plan.json of a run folder: what it said, so that a report can put it beside what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ostinato.plan.calibrate import Calibration, Observation, as_json
from ostinato.plan.comm import Traffic
from ostinato.plan.imbalance import straggler
from ostinato.plan.problem import Arrangement, Memory, Phase, Problem, Times
from ostinato.run import atomic_write

FILE = "plan.json"
PUBLISH = "time/publish_s"  # in metrics.jsonl where rollouts go on while the trainer learns, and only there
# Part -> what metrics.jsonl measures, phases of the plan in it. The trainer scores old log-probabilities
# within its own time. In turns it publishes in it, too; with overlap time/rollout_s is only its waiting.
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}


def record(
    problem: Problem,
    arrangement: Arrangement,
    times: Times,
    memory: Mapping[Phase, Memory],
    traffic: Traffic,
    *,
    asked: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """The JSON object. ``traffic``: of one RL step, of the first rank (``traffic.step_traffic``). ``asked``:
    the question, in the words of whoever can ask it again; ``calibration``: what ``times`` were made with."""
    cluster = problem.cluster
    return {
        "model": problem.model.name,
        "cluster": f"{cluster.nodes}x{cluster.per_node}x{cluster.gpu.name}",
        "layouts": {phase.value: str(arrangement.setup(phase).layout) for phase in Phase},
        "world": {"answers": list(problem.work.answers), "imbalance": _imbalance(problem, arrangement)},
        "tokens": problem.work.trained_tokens,  # sampled in a step
        "asked": dict(asked or {}),
        "device": cluster.gpu.name,
        "calibration": None if calibration is None else as_json(calibration),
        "placement": str(arrangement.placement),
        "base": str(arrangement.base),
        "seconds": {phase: dict(terms) for phase, terms in times.terms.items()},
        "total": times.total,
        "low": times.low,
        "high": times.high,
        "memory": {phase.value: dict(found.terms) for phase, found in memory.items()},
        "traffic": {f"{operation}/{axis}": sent.bytes for (operation, axis), sent in traffic.items()},
    }


def _imbalance(problem: Problem, arrangement: Arrangement) -> float:
    moe, ranks = problem.config.moe, arrangement.train.layout.expert
    return 1.0 if moe is None else straggler(problem.imbalance, moe.num_experts, ranks).mean


def write(path: Path, plan: Mapping[str, Any]) -> None:
    """To ``path``, which is ``FILE`` of a run folder."""
    atomic_write(path, json.dumps(plan, indent=1).encode())


def overlaps(metrics: Iterable[Mapping[str, Any]]) -> bool:
    """Did the run sample while it trained (``pipeline.overlap``)?"""
    return any(PUBLISH in row for row in metrics)


def observations(
    name: str, plan: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]], skip: int = 1
) -> list[Observation]:
    """What ``calibrate`` can learn from a run: the median seconds of each part of a step, "NAME train", with
    the plan's terms of it, "phase/term". The first ``skip`` steps are left out, for they warm up, and of a
    part those that had none of it. Empty where nothing was measured or planned. Of a run that overlaps there
    is no rollout: nobody measured it alone. ``plan.fit`` multiplies what is found onto the factors that the
    plan was made with."""
    rows = list(metrics)
    found = []
    for part, (key, phases) in (OVERLAPPED if overlaps(rows) else IN_TURNS).items():
        terms = {
            f"{phase}/{term}": float(seconds)
            for phase in phases
            for term, seconds in plan["seconds"].get(phase, {}).items()
        }
        taken = [row[key] for row in rows[skip:] if row.get(key, 0.0) > 0]
        if taken and sum(terms.values()) > 0:
            found.append(Observation(name=f"{name} {part}", terms=terms, seconds=statistics.median(taken)))
    return found


__all__ = ["FILE", "observations", "overlaps", "record", "write"]
