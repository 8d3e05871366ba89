"""A plan as plan.json of a run folder: what it said, so that a report can put it beside what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ostinato.plan.calibrate import Observation
from ostinato.plan.comm import Traffic
from ostinato.plan.imbalance import straggler
from ostinato.plan.problem import Arrangement, Memory, Phase, Problem, Times
from ostinato.run import atomic_write

FILE = "plan.json"
# metrics.jsonl measures these; the trainer scores old log-probabilities within its own time
MEASURED = {"rollout": ("time/rollout_s",), "train": ("time/train_s",), "refit": ("time/publish_s",)}
PLANNED = {"rollout": ("rollout",), "train": ("train", "logprobs"), "refit": ("refit",)}


def record(
    problem: Problem, arrangement: Arrangement, times: Times, memory: Mapping[Phase, Memory], traffic: Traffic
) -> dict[str, Any]:
    """The JSON object. ``traffic``: of one RL step, of the first rank (``traffic.step_traffic``)."""
    cluster = problem.cluster
    return {
        "model": problem.model.name,
        "cluster": f"{cluster.nodes}x{cluster.per_node}x{cluster.gpu.name}",
        "layouts": {phase.value: str(arrangement.setup(phase).layout) for phase in Phase},
        "world": {"answers": list(problem.work.answers), "imbalance": _imbalance(problem, arrangement)},
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
    """Into a run folder."""
    atomic_write(path / FILE, json.dumps(plan, indent=1).encode())


def observations(
    name: str, plan: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]], skip: int = 1
) -> list[Observation]:
    """What ``calibrate`` can learn from a run: the median seconds of each part of a step, the first ``skip``
    steps left out, for they warm up. Empty where nothing was measured or planned. No command fits factors to
    runs yet; one that does has to multiply them onto those that the plan was made with."""
    rows = list(metrics)[skip:]
    found = []
    for part, names in MEASURED.items():
        terms = {
            f"{phase}/{term}": float(seconds)
            for phase in PLANNED[part]
            for term, seconds in plan["seconds"].get(phase, {}).items()
        }
        taken = [sum(row[key] for key in names) for row in rows if all(key in row for key in names)]
        seconds = statistics.median(taken) if taken else 0.0
        if seconds > 0 and sum(terms.values()) > 0:
            found.append(Observation(name=f"{name} {part}", terms=terms, seconds=seconds))
    return found


__all__ = ["FILE", "observations", "record", "write"]
