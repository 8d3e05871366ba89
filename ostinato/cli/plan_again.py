"""``ostinato plan ... --against RUN``: is the layout of a run still the right one for what the run has
become?

    plan.json of the run ---> the world it was planned for
    its last steps ---------> answer lengths, imbalance of experts      moved? --no--> stay
                                                                         |yes
    search anew, and the running layouts priced in the same world ------> advice, printed and kept

Somebody asks, at a checkpoint: no run does so by itself. Adapters are saved as logical tensors, and resume
under any layout. An imbalance is compared where it was measured over as many expert ranks as the plan has,
and carried over to other numbers of them by the spread of popularity that explains it (``sigma_of``).
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ostinato.cli.plan_asked import Asked
from ostinato.parallel.layout import Layout
from ostinato.plan.imbalance import sigma_of
from ostinato.plan.problem import Imbalance, Placement, Problem
from ostinato.plan.record import FILE
from ostinato.plan.replan import Advice, Hysteresis, World, advise, moved
from ostinato.plan.search import Plan, search
from ostinato.run import Jsonl, RunFolder

STEPS = 10  # the last ones, which say what the run has become
SWITCH_S = 300.0  # of a checkpoint, a start, and loading the base: assumed
JOURNAL = "replan.jsonl"


def again(asked: Asked, folder: Path, switch_s: float = SWITCH_S) -> Advice:
    """The advice, kept in the run folder. Raises ValueError for a run without a plan or without steps."""
    run = RunFolder.open(folder)
    plan = _plan_of(run)
    rows = list(run.metrics.rows())
    if not rows:
        raise ValueError(f"run folder {folder} has no step yet, so nothing has moved; ask at a checkpoint")
    step = rows[-1]["step"]
    left = max(0, steps_of(run, asked.problem.work.steps) - step)
    now = world_now(run, rows, _world_of(plan), Layout.parse(plan["layouts"]["train"]).expert)
    what = moved(_world_of(plan), now, Hysteresis())
    if not what:
        advice = Advice(switch=False, reason="lengths and expert loads are still those of the plan")
    else:
        advice = _weighed(asked, plan, now, what, left, switch_s)
    Jsonl(run.path / JOURNAL).append({"step": step, **asdict(advice)})
    return advice


def _weighed(
    asked: Asked, plan: Mapping[str, Any], now: World, what: str, left: int, switch_s: float
) -> Advice:
    problem = problem_now(asked.problem, plan, now)
    layouts = plan["layouts"]
    kept = replace(
        asked.allowed,
        placements=(Placement(plan["placement"]),),
        train_layout=Layout.parse(layouts["train"]),
        rollout_layout=Layout.parse(layouts["rollout"]),
    )
    current, best = (search(problem, asked.clock, allowed).plans for allowed in (kept, asked.allowed))
    if not current or not best:
        reason = f"{what}: {_named(layouts)} does not fit any more" if best else f"{what}: nothing fits now"
        return Advice(switch=bool(best), reason=reason)
    found = advise(
        current=_named(layouts),
        current_s=current[0].times.total,
        best=_label(best[0]),
        best_s=best[0].times.total,
        switch_s=switch_s,
        steps_left=left,
    )
    return replace(found, reason=f"{what}; {found.reason}")


def problem_now(problem: Problem, plan: Mapping[str, Any], now: World) -> Problem:
    """The question, with the lengths and the imbalance that the run has come to."""
    longest = max(problem.work.max_answer, *now.answers)
    changed = replace(problem, work=replace(problem.work, answers=now.answers, max_answer=longest))
    moe, ranks = problem.config.moe, Layout.parse(plan["layouts"]["train"]).expert
    given = problem.imbalance.loads is not None or now.imbalance == _world_of(plan).imbalance
    if moe is None or ranks == 1 or given:
        return changed
    return replace(changed, imbalance=Imbalance(sigma=sigma_of(now.imbalance, moe.num_experts, ranks)))


def steps_of(run: RunFolder, otherwise: int) -> int:
    """Of the whole run, by its recipe."""
    recipe = tomllib.loads(run.recipe.read_text(encoding="utf-8"))
    return int(recipe.get("trainer", {}).get("steps", otherwise))


def world_now(run: RunFolder, rows: list[dict[str, Any]], planned: World, ranks: int) -> World:
    """Answer lengths of the trajectories that the last steps have kept, and their imbalance of experts where
    it was measured over ``ranks``, as many as the plan has; what the run does not tell is as planned."""
    first = rows[-STEPS:][0]["step"]
    answers = tuple(
        sum(len(turn["tokens"]) for turn in row["turns"])
        for row in run.trajectories.rows()
        if row["step"] >= first and row["turns"]
    )
    alike = (row for row in rows[-STEPS:] if row.get("routing/straggler_ranks") == ranks)
    uneven = [row["routing/straggler"] for row in alike if "routing/straggler" in row]
    return World(
        answers=tuple(n for n in answers if n) or planned.answers,
        imbalance=statistics.median(uneven) if uneven else planned.imbalance,
    )


def _plan_of(run: RunFolder) -> Mapping[str, Any]:
    path = run.path / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; plan the run first, with --record {run.path}")
    return json.loads(path.read_bytes())


def _world_of(plan: Mapping[str, Any]) -> World:
    world = plan["world"]
    return World(answers=tuple(world["answers"]), imbalance=float(world["imbalance"]))


def _named(layouts: Mapping[str, str]) -> str:
    return f"train {layouts['train']}, rollout {layouts['rollout']}"


def _label(plan: Plan) -> str:
    a = plan.arrangement
    return _named({"train": str(a.train.layout), "rollout": str(a.rollout.layout)})


__all__ = ["again", "problem_now", "steps_of", "world_now"]
