"""Is the layout of a run still the right one for what the run has become?

    plan.json of the run ---> the world it was planned for
    its last steps ---------> answer lengths, imbalance of experts      moved? --no--> stay
                                                                         |yes
    search anew, and the running layouts priced in the same world ------> advice, printed and kept

``ostinato plan ... --against RUN`` prints the advice. With ``parallel.replan`` a run takes it after its
checkpoints: it ends there, and says the command that resumes it under the better layout. Adapters are saved
as logical tensors and load under any layout: a switch costs a checkpoint, a start and loading the base.

Advice has hysteresis on both sides: the world must have moved before anything is planned anew, and the gain
must beat the cost by a margin that covers what a plan does not know. The world of the last search is what the
next one is compared with, so nothing is searched twice. An imbalance is compared where it was measured over
as many expert ranks as the plan has, and carried over to other numbers of them by the spread of popularity
that explains it (``sigma_of``).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.inputs import parse_json, parse_toml
from ostinato.parallel.layout import Layout
from ostinato.plan.asked import Asked, asked_again
from ostinato.plan.engines import LOCAL, engine_layout
from ostinato.plan.imbalance import sigma_of
from ostinato.plan.launch import lacking, sections
from ostinato.plan.problem import Imbalance, Placement, Problem
from ostinato.plan.record import FILE, record, write
from ostinato.plan.search import Plan, search
from ostinato.plan.traffic import step_traffic
from ostinato.run import RunFolder

STEPS = 10  # the last ones, which say what the run has become
SWITCH_S = 300.0  # of a checkpoint, a start, and loading the base: assumed
LENGTHS = 512  # of the answers are enough to plan by
LONGER = 0.15  # relative change of the mean, the 90 % quantile or the longest answer that counts
UNEVEN = 0.10  # relative change of the imbalance that counts
GAIN = 0.05  # of a step: smaller gains are within what a plan knows
PAYBACK = 2.0  # times the cost of the switch that the gain must come to by the end of the run
Can = Callable[[Plan], bool]  # could the run go on by it, where it is?


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a plan depends on and training changes."""

    answers: tuple[int, ...]  # a sample of answer lengths
    imbalance: float = 1.0  # max / mean load of expert ranks, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Whether to switch, and why or why not in one sentence. ``world``: that was searched in, None where it
    has not moved; ``asked`` and ``plan`` are there where the advice is to switch."""

    switch: bool
    reason: str
    saved_s: float = 0.0  # over the rest of the run, the switch paid
    world: World | None = None
    asked: Asked | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a switch has to pay for itself in. ``step_s``: measured, 0 where it is not; what is planned to be
    gained of a step is gained of that."""

    steps: int
    step_s: float
    switch_s: float = SWITCH_S


@dataclass
class Replanner:
    """The hook of the loop after every checkpoint but the last, in a thread: is the run to end here? Then
    plan.json is the better plan, and ``command`` resumes the run by it. Where the recipe is not of the plan
    the run stays: so does one that is resumed as it was."""

    run: RunFolder
    command: str = ""

    def __call__(self, step: int) -> bool:
        said: Mapping[str, Any] = {}
        try:
            plan = plan_of(self.run)
            said = plan["asked"]
            asked = asked_again(said)
            _refuse_other_runs(self.run, plan, asked.problem)
            asked = replace(asked, allowed=replace(asked.allowed, train_layout=None, rollout_layout=None))
            advice = weigh(asked, self.run, lambda found: _can(asked.problem, plan, found))
        except (
            ValueError,
            TypeError,
            OSError,
            KeyError,
        ) as error:  # a file that is gone, another layout: no reason to end
            advice = Advice(switch=False, reason=f"nothing could be weighed ({error}); stay")
        note(self.run, step, advice)
        if advice.plan is None or advice.asked is None:
            return False
        write(self.run.path / FILE, recorded(advice.asked, advice.plan, said) | {"step": step})
        self.command = _resume(self.run.path, advice.asked.problem, advice.plan)
        return True


def _refuse_other_runs(run: RunFolder, plan: Mapping[str, Any], problem: Problem) -> None:
    """Raise ValueError, in one sentence, where the plan is not of the run as it is."""
    recipe = parse_toml(run.recipe.read_text(encoding="utf-8"))
    planned, running = plan["layouts"]["train"], recipe["parallel"]["layout"] or "1"
    if Layout.parse(planned) != Layout.parse(running):
        raise ValueError(f"the run trains under {running} and its plan is of {planned}")
    said = (problem.work.prompts, problem.work.group)
    mine = (recipe["rollout"]["prompts_per_step"], recipe["rollout"]["group_size"])
    if said != mine:
        raise ValueError(
            f"the run has {mine[0]} prompts of {mine[1]} answers, its plan {said[0]} of {said[1]}"
        )


def _can(problem: Problem, plan: Mapping[str, Any], found: Plan) -> bool:
    """Could the run go on by ``found``: with the sampler as it is, in its place, and with nothing that
    Ostinato lacks but for what the plan of the run had already?"""
    chosen, layouts = found.arrangement, plan["layouts"]
    if (str(chosen.rollout.layout), str(chosen.placement)) != (layouts["rollout"], plan["placement"]):
        return False
    return set(lacking(problem, chosen)) <= set(plan["lacking"])


def _resume(run: Path, problem: Problem, plan: Plan) -> str:
    """The command by which the run goes on."""
    said = sections(problem, plan.arrangement)
    words = {"parallel.layout": said["parallel"]["layout"]}
    words |= {f"trainer.{name}": said["trainer"][name] for name in ("tokens_per_microbatch", "recompute")}
    told = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in words.items()
    )
    return " ".join([f"ostinato resume {run}", *told])


def note(run: RunFolder, step: int, advice: Advice) -> None:
    """Keep what was weighed, in the run folder."""
    world = None if advice.world is None else asdict(advice.world)
    said = {"switch": advice.switch, "reason": advice.reason, "saved_s": advice.saved_s}
    run.replan.append({"step": step, **said, "world": world})


def weigh(asked: Asked, run: RunFolder, can: Can = lambda plan: True) -> Advice:
    """The layouts of ``run`` against those that are best now. Raises ValueError for a run without a plan or
    without steps."""
    plan = plan_of(run)
    rows = list(run.metrics.rows())
    if not rows:
        raise ValueError(f"run folder {run.path} has no step yet, so nothing has moved; ask at a checkpoint")
    before = _reference(run, plan)
    now = world_now(run, rows, before, Layout.parse(plan["layouts"]["train"]).expert)
    what = moved(before, now)
    if not what:
        return Advice(switch=False, reason="lengths and expert loads are still those of the plan")
    asked = replace(asked, problem=problem_now(asked.problem, plan, now))
    own = [row for row in rows if row["step"] > plan.get("step", 0)]  # under the layout that is weighed
    left = max(0, steps_of(run, asked.problem.work.steps) - rows[-1]["step"])
    found = _weighed(asked, plan, what, Rest(steps=left, step_s=_step_seconds(own)), can)
    return replace(found, world=now, asked=asked)


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


def moved(planned: World, now: World) -> str:
    """What has moved since the plan was made, in words; empty where nothing has: then no plan is made."""
    told = []
    for name, before, after in zip(
        ("mean", "90 %", "longest"), _lengths(planned), _lengths(now), strict=True
    ):
        if abs(after / before - 1) > LONGER:
            told.append(f"{name} answer {before:.0f} -> {after:.0f} tokens")
    if abs(now.imbalance / planned.imbalance - 1) > UNEVEN:
        told.append(f"expert load max/mean {planned.imbalance:.2f} -> {now.imbalance:.2f}")
    return ", ".join(told)


def advise(current: str, current_s: float, best: str, best_s: float, rest: Rest) -> Advice:
    """Should a run that takes ``current_s`` a step under the plan named ``current`` go on under ``best``?
    Seconds of a step are for the world as it is now, under either plan."""
    if best == current:
        return Advice(switch=False, reason=f"{current} is still the best layout")
    gain = current_s - best_s
    if gain <= GAIN * current_s:
        share = gain / current_s
        reason = f"{best} would gain {share:.1%} a step, within what a plan knows ({GAIN:.0%})"
        return Advice(switch=False, reason=reason)
    all_s = gain * rest.steps
    told = f"{best} for {current}: {gain:.3g} s a step for {rest.steps} steps is {all_s:.3g} s"
    if all_s <= PAYBACK * rest.switch_s:
        reason = f"{told}, less than {PAYBACK:g} times the {rest.switch_s:.3g} s of the switch; stay"
        return Advice(switch=False, reason=reason)
    reason = f"{told}, and the switch costs {rest.switch_s:.3g} s"
    return Advice(switch=True, reason=reason, saved_s=all_s - rest.switch_s)


def _lengths(world: World) -> Sequence[float]:
    answers = np.asarray(world.answers, np.float64)
    return float(answers.mean()), float(np.quantile(answers, 0.9)), float(answers.max())


def _reference(run: RunFolder, plan: Mapping[str, Any]) -> World:
    """What was searched in last: by the plan, or by whoever weighed it anew since and stayed. A switch that
    came about has a plan of its own."""
    since = [
        row
        for row in run.replan.rows()
        if row.get("world") and not row["switch"] and row["step"] > plan.get("step", 0)
    ]
    return _world_of(since[-1] if since else plan)


def _weighed(asked: Asked, plan: Mapping[str, Any], what: str, rest: Rest, can: Can) -> Advice:
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
        return Advice(switch=False, reason=f"{what}: nothing that could be gone on by fits now")
    if not current:
        reason = f"{what}: {_named(layouts)} does not fit any more by the plan, {_label(best[0])} does"
        return Advice(switch=True, reason=reason, plan=best[0])
    told = current[0].times.total
    now_s = rest.step_s or told
    found = advise(_named(layouts), now_s, _label(best[0]), best[0].times.total * now_s / told, rest)
    return replace(found, reason=f"{what}; {found.reason}", plan=best[0] if found.switch else None)


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


__all__ = [
    "Advice",
    "Replanner",
    "Rest",
    "World",
    "advise",
    "moved",
    "plan_of",
    "problem_now",
    "recorded",
    "steps_of",
    "weigh",
]
