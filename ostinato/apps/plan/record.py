"""A plan as plan.json of a run folder: what it predicted, so that a report can put it beside what was
measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.apps.plan.problem import Phase, Problem
from ostinato.apps.plan.search import Plan
from ostinato.apps.plan.traffic import step_traffic
from ostinato.inputs import parse_json
from ostinato.run import RunFolder, atomic_write

FILE = "plan.json"


def record(problem: Problem, plan: Plan, *, factors: Mapping[str, float]) -> dict[str, Any]:
    """The JSON object. ``factors``: of phases, with which the seconds were made."""
    cluster, chosen, times = problem.cluster, plan.arrangement, plan.times
    traffic = step_traffic(problem, chosen)
    return {
        "model": problem.model.name,
        "cluster": f"{cluster.nodes}x{cluster.per_node}x{cluster.gpu.name}",
        "layouts": {phase.value: str(chosen.setup(phase).layout) for phase in Phase},
        "tokens": problem.work.trained_tokens,  # sampled in a step
        "device": cluster.gpu.name,
        "factors": dict(factors),
        "placement": str(chosen.placement),
        "sampler": problem.sampler.name,
        "base": str(chosen.base),
        "seconds": {phase: dict(terms) for phase, terms in times.terms.items()},
        "total": times.total,
        "low": times.low,
        "high": times.high,
        "memory": {phase.value: dict(found.terms) for phase, found in plan.memory.items()},
        "traffic": {f"{operation}/{axis}": sent.bytes for (operation, axis), sent in traffic.items()},
    }


def write(path: Path, plan: Mapping[str, Any]) -> None:
    """To ``path``, which is ``FILE`` of a run folder."""
    atomic_write(path, json.dumps(plan, indent=1).encode())


def plan_of(run: RunFolder) -> Mapping[str, Any]:
    """plan.json of the run. Raises ValueError where it has none that can be read."""
    path = run.path / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; plan the run first, with --record {run.path}")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); plan the run anew, with --record {run.path}"
        ) from error
