"""``ostinato plan ... --against RUN``: is the layout of a run still the right one for what the run has
become?

    plan.json of the run ---> the world it was planned for
    its last steps ---------> answer lengths, imbalance of experts      moved? --no--> stay
                                                                         |yes
    search anew, and the running layouts priced in the same world ------> advice, printed and kept

Somebody asks, or the run itself at its checkpoints (``parallel.replan``). Adapters are saved as logical
tensors, and resume under any layout. What was weighed once is the world that later ones are compared with, so
that nothing is searched for twice. An imbalance is compared where it was measured over as many expert ranks
as the plan has, and carried over to other numbers of them by the spread of popularity that explains it
(``sigma_of``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.cli.plan_asked import Asked
from ostinato.inputs import parse_json, parse_toml
from ostinato.parallel.layout import Layout
from ostinato.plan.engines import LOCAL, engine_layout
from ostinato.plan.imbalance import sigma_of
from ostinato.plan.launch import lacking
from ostinato.plan.problem import Imbalance, Placement, Problem
from ostinato.plan.record import FILE, record
from ostinato.plan.replan import Advice, Hysteresis, World, advise, moved
from ostinato.plan.search import Plan, search
from ostinato.plan.traffic import step_traffic
from ostinato.run import RunFolder

STEPS = 10  # the last ones, which say what the run has become
SWITCH_S = 300.0  # of a checkpoint, a start, and loading the base: assumed where nobody has measured it
LENGTHS = 512  # of the answers are enough to plan by
Can = Callable[[Plan], bool]  # could the run go on by it, where it is?


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """``plan``, of the world ``asked`` has, is there where ``advice`` is to switch."""

    step: int
    advice: Advice
    world: World | None = None  # that was searched in; None: it has not moved
    asked: Asked | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a switch has to pay for itself in. ``step_s``: measured, 0 where it is not; what is planned to be
    gained of a step is gained of that."""

    steps: int
    switch_s: float
    step_s: float


def again(asked: Asked, folder: Path, switch_s: float = SWITCH_S) -> Advice:
    """The advice, kept in the run folder. Raises ValueError for a run without a plan or without steps."""
    run = RunFolder.open(folder)
    found = weigh(asked, run, switch_s)
    note(run, found)
    return found.advice


def note(run: RunFolder, found: Weighed) -> None:
    """Keep what was weighed, in the run folder."""
    world = None if found.world is None else asdict(found.world)
    run.replan.append({"step": found.step, **asdict(found.advice), "world": world})


def weigh(asked: Asked, run: RunFolder, switch_s: float, can: Can = lambda plan: True) -> Weighed:
    """The layouts of ``run`` against those that are best now. Raises as ``again`` does."""
    plan = plan_of(run)
    rows = list(run.metrics.rows())
    if not rows:
        raise ValueError(f"run folder {run.path} has no step yet, so nothing has moved; ask at a checkpoint")
    step = rows[-1]["step"]
    left = max(0, steps_of(run, asked.problem.work.steps) - step)
    before = _reference(run, plan)
    now = world_now(run, rows, before, Layout.parse(plan["layouts"]["train"]).expert)
    what = moved(before, now, Hysteresis())
    if not what:
        advice = Advice(switch=False, reason="lengths and expert loads are still those of the plan")
        return Weighed(step=step, advice=advice)
    asked = replace(asked, problem=problem_now(asked.problem, plan, now))
    own = [row for row in rows if row["step"] > plan.get("step", 0)]  # under the layout that is weighed
    rest = Rest(steps=left, switch_s=switch_s, step_s=_step_seconds(own))
    advice, best = _weighed(asked, plan, what, rest, can)
    return Weighed(step=step, advice=advice, world=now, asked=asked, plan=best if advice.switch else None)


def recorded(asked: Asked, plan: Plan, said: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json of a run that is to go by ``plan``; ``said``: the question (``asked_json``). Beside it the
    backend and layout of one sampler, and what Ostinato has not."""
    problem, chosen = asked.problem, plan.arrangement
    beside: dict[str, Any] = {"asked": said, "calibration": asked.calibration}
    found = record(problem, chosen, plan.times, plan.memory, step_traffic(problem, chosen), **beside)
    layout, local = chosen.rollout.layout, problem.sampler.name == LOCAL
    one = layout if local else engine_layout(problem.config, layout)[0]
    sampler = {"backend": problem.sampler.name, "layout": str(one) if one.world > 1 else ""}
    return found | {"sampler": sampler, "lacking": lacking(problem, chosen)}


def _reference(run: RunFolder, plan: Mapping[str, Any]) -> World:
    """What was searched in last: by the plan, or by whoever weighed it anew since and stayed. A switch that
    came about has a plan of its own."""
    since = [
        row
        for row in run.replan.rows()
        if row.get("world") and not row["switch"] and row["step"] > plan.get("step", 0)
    ]
    return _world_of(since[-1] if since else plan)


def _weighed(
    asked: Asked, plan: Mapping[str, Any], what: str, rest: Rest, can: Can
) -> tuple[Advice, Plan | None]:
    problem = asked.problem
    layouts = plan["layouts"]
    kept = replace(
        asked.allowed,
        placements=(Placement(plan["placement"]),),
        train_layout=Layout.parse(layouts["train"]),
        rollout_layout=Layout.parse(layouts["rollout"]),
    )
    current, best = (search(problem, asked.clock, allowed).plans for allowed in (kept, asked.allowed))
    best = [one for one in best if can(one)]
    if not best:
        return Advice(switch=False, reason=f"{what}: nothing that could be gone on by fits now"), None
    if not current:
        reason = f"{what}: {_named(layouts)} does not fit any more, {_label(best[0])} does"
        return Advice(switch=True, reason=reason), best[0]
    told = current[0].times.total
    found = advise(
        current=_named(layouts),
        current_s=rest.step_s or told,
        best=_label(best[0]),
        best_s=best[0].times.total * (rest.step_s or told) / told,
        switch_s=rest.switch_s,
        steps_left=rest.steps,
    )
    return replace(found, reason=f"{what}; {found.reason}"), best[0]


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
    recipe = parse_toml(run.recipe.read_text(encoding="utf-8"))
    return int(recipe.get("trainer", {}).get("steps", otherwise))


def world_now(run: RunFolder, rows: list[dict[str, Any]], planned: World, ranks: int) -> World:
    """Answer lengths of the trajectories that the last steps have kept, and their imbalance of experts where
    it was measured over ``ranks``, as many as the plan has; what the run does not tell is as planned."""
    first = rows[-STEPS:][0]["step"]
    answers = sorted(
        sum(len(turn["tokens"]) for turn in row["turns"])
        for row in run.trajectories.since(first)
        if row["turns"]
    )
    alike = (row for row in rows[-STEPS:] if row.get("routing/straggler_ranks") == ranks)
    uneven = [row["routing/straggler"] for row in alike if "routing/straggler" in row]
    return World(
        answers=_some([n for n in answers if n]) or planned.answers,
        imbalance=statistics.median(uneven) if uneven else planned.imbalance,
    )


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """The median of the last steps."""
    return statistics.median([row["step_time"] for row in rows[-STEPS:] if "step_time" in row] or [0.0])


def _some(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most ``LENGTHS`` of sorted ones, evenly spread, the longest among them."""
    number = min(LENGTHS, len(lengths))
    return tuple(lengths[(index + 1) * len(lengths) // number - 1] for index in range(number))


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


def _world_of(plan: Mapping[str, Any]) -> World:
    world = plan["world"]
    return World(answers=tuple(world["answers"]), imbalance=float(world["imbalance"]))


def _named(layouts: Mapping[str, str]) -> str:
    return f"train {layouts['train']}, rollout {layouts['rollout']}"


def _label(plan: Plan) -> str:
    a = plan.arrangement
    return _named({"train": str(a.train.layout), "rollout": str(a.rollout.layout)})


__all__ = ["Weighed", "again", "note", "plan_of", "problem_now", "recorded", "steps_of", "weigh", "world_now"]
