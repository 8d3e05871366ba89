"""``parallel.replan``: a run asks itself, at its checkpoints, whether another layout is better now.

    checkpoint -> answer lengths, expert loads of the last steps -> plan_again.weigh, else place.moved
               -> Switch(overrides): the loop ends, and a session that resumes under them goes on

The layout of a run that has a plan, else which expert rank keeps which experts. What is gained has to come to
twice what the switch costs by the end of the run; its cost is what this session took to begin. Whatever fails
in weighing is told, and the run stays as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.cli.place import Found, moved, read
from ostinato.cli.place import write as write_placement
from ostinato.cli.plan_again import STEPS, Weighed, note, plan_of, recorded, weigh
from ostinato.cli.plan_asked import Asked, asked_again
from ostinato.config import Recipe
from ostinato.inputs import parse_json
from ostinato.parallel.follow import ShardedTrainer
from ostinato.parallel.launch import Place
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expert_loads
from ostinato.parallel.placement import contiguous, owner_of, placed_experts
from ostinato.plan.launch import lacking, sections
from ostinato.plan.problem import Placement
from ostinato.plan.record import FILE, write
from ostinato.plan.replan import Advice, Hysteresis
from ostinato.plan.search import Plan
from ostinato.run import RunFolder, recorded_routes

if TYPE_CHECKING:
    from ostinato.cli.parts import Say
    from ostinato.model.config import ModelConfig
    from ostinato.observe.ledger import SteadyClock

LINK_GB_S = 1.0  # over which experts are loaded anew: of a disk
SIZES = ("num_layers", "hidden_size", "vocab_size")  # that tell one model from another
Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """How the run goes on after step ``step``; ``plan``: its plan.json from there on, where it has one;
    ``rests``: nothing is weighed any more until it is resumed."""

    step: int
    overrides: tuple[str, ...]
    reason: str
    plan: Mapping[str, Any] | None = None
    rests: bool = False

    @property
    def told(self) -> str:
        return (
            f"step {self.step}: {self.reason}; on with {', '.join(self.overrides) or 'the recipe as it was'}"
        )

    def back(self, run: RunFolder) -> Switch:
        """To where ``run`` is before the switch, in case that it fails."""
        plan = plan_of(run) if (run.path / FILE).is_file() else None
        return Switch(step=self.step, overrides=(), reason="", plan=plan, rests=True)

    def refused(self, run: RunFolder, error: Exception) -> Switch:
        """With the reason that the other way failed for, which is kept in the run folder."""
        reason = f"the other layout could not begin ({type(error).__name__}: {error})"
        run.replan.append({"step": self.step, **asdict(Advice(switch=False, reason=reason)), "world": None})
        return replace(self, reason=reason)


@dataclass
class Replanner:
    """Asked after every checkpoint but the last, in a thread of its own; ``switch`` is its answer."""

    recipe: Recipe
    run: RunFolder
    config: ModelConfig
    clock: SteadyClock  # of this session
    switch_s: float | None = None  # what it took to begin, once its first step is done
    switch: Switch | None = field(default=None, init=False)

    def watching(self, on_step: Callable[[Row], None]) -> Callable[[Row], None]:
        """``on_step``, by which the first step tells how long this session took to begin."""

        def seen(row: Row) -> None:
            if self.switch_s is None:
                self.switch_s = max(0.0, self.clock() - self.clock.started - row.get("step_time", 0.0))
            on_step(row)

        return seen

    def __call__(self, step: int) -> bool:
        if self.switch_s is None:
            return False
        try:
            planned = (self.run.path / FILE).is_file()
            self.switch = (self._layouts if planned else self._experts)(step, self.switch_s)
        except (ValueError, OSError) as error:  # a file that is gone, a damaged row: no reason to end for
            self._stay(step, f"nothing could be weighed ({error}); stay")
        return self.switch is not None

    def _stay(self, step: int, reason: str) -> None:
        self.run.replan.append({"step": step, **asdict(Advice(switch=False, reason=reason)), "world": None})

    def _layouts(self, step: int, switch_s: float) -> Switch | None:
        plan = plan_of(self.run)
        asked = free(asked_again(plan["asked"]))
        weighed = weigh(asked, self.run, switch_s, lambda found: self._can(asked, plan, found))
        if weighed.advice.switch and weighed.advice.saved_s <= 0:  # its layout does not fit by the plan
            reason = f"{weighed.advice.reason}; but the run goes, so it stays"
            weighed = Weighed(
                step=weighed.step, advice=Advice(switch=False, reason=reason), world=weighed.world
            )
        note(self.run, weighed)
        if weighed.plan is None or weighed.asked is None:
            return None
        return Switch(
            step=step,
            overrides=overrides(self.recipe, asked, weighed.plan),
            reason=weighed.advice.reason,
            plan=recorded(weighed.asked, weighed.plan, plan["asked"]) | {"step": step},
        )

    def _can(self, asked: Asked, plan: Mapping[str, Any], found: Plan) -> bool:
        """Could the run go on by ``found``? Of ranks that torchrun has started there are no more and no
        fewer; the sampler stays as it is; and nothing may be asked of
        Ostinato that it has not, but for what the plan of the run had asked already."""
        chosen, ranks = found.arrangement, world_of_torchrun()
        if ranks not in (None, chosen.train.layout.world):
            return False
        if str(chosen.rollout.layout) != plan["layouts"]["rollout"]:
            return False
        if not set(lacking(asked.problem, chosen)) <= set(plan["lacking"]):
            return False
        from ostinato.cli.parts import check as check_parts  # torch

        try:
            after = Recipe.load(self.run.recipe, *overrides(self.recipe, asked, found))
            Layout.parse(after.parallel.layout).refuse(self.config)
            check_parts(after)
        except ValueError:
            return False
        return True

    def _experts(self, step: int, switch_s: float) -> Switch | None:
        moe, layout = self.config.moe, Layout.parse(self.recipe.parallel.layout)
        routes = list(recorded_routes(self.run, since=step - STEPS + 1).values())
        if moe is None or layout.expert == 1 or len(routes) < 2:
            return None
        windows = np.stack([expert_loads(one, moe.num_experts) for one in routes])
        (_, layers, experts), ranks = windows.shape, layout.expert
        placement = self.recipe.parallel.placement
        neighbours = contiguous(layers, experts, ranks)
        before = owner_of(read(Path(placement), ranks)) if placement else neighbours
        found = Found(before=before, windows=windows, ranks=ranks, measured=ranks * layout.expert_tensor)
        move = moved(found, self.recipe, self.config, list(self.run.metrics.rows()), LINK_GB_S).move
        advice = worth(move.gain_s, move.cost_s + switch_s, move.moved)
        self.run.replan.append({"step": step, **asdict(advice), "world": None})
        if not advice.switch:
            return None
        file = (self.run.path / f"placement-{step:08d}.json").resolve()
        write_placement(file, placed_experts(move.owner, ranks))
        return Switch(step=step, overrides=(f"parallel.placement={_toml(str(file))}",), reason=advice.reason)


def free(asked: Asked) -> Asked:
    """The question without a layout that the plan was held to, and of trainer and sampler on one place: what
    a run can change by itself."""
    allowed = replace(
        asked.allowed, train_layout=None, rollout_layout=None, placements=(Placement.COLOCATED,)
    )
    return replace(asked, allowed=allowed)


def worth(gain_s: float, cost_s: float, moved: int, bounds: Hysteresis | None = None) -> Advice:
    """Do ``moved`` experts that save ``gain_s`` by the end of the run pay for ``cost_s``?"""
    need = (bounds or Hysteresis()).payback
    told = f"{moved} experts on other ranks would save {gain_s:.3g} s by the end of the run"
    if gain_s <= need * cost_s:
        reason = f"{told}, less than {need:g} times the {cost_s:.3g} s of moving; stay"
        return Advice(switch=False, reason=reason)
    return Advice(switch=True, reason=f"{told}, moving costs {cost_s:.3g} s", saved_s=gain_s - cost_s)


def overrides(recipe: Recipe, asked: Asked, plan: Plan) -> tuple[str, ...]:
    """What ``plan`` changes in the recipe: layouts, microbatches, recomputing."""
    said = sections(asked.problem, plan.arrangement)
    chosen, trainer = str(said["parallel"]["layout"]), said["trainer"]
    found = {
        "parallel.layout": chosen,
        "trainer.tokens_per_microbatch": trainer["tokens_per_microbatch"],
        "trainer.recompute": trainer["recompute"],
    }
    if Layout.parse(chosen).expert != Layout.parse(recipe.parallel.layout).expert:
        found["parallel.placement"] = ""
    return tuple(f"{name}={_toml(value)}" for name, value in found.items())


def _toml(value: object) -> str:
    return json.dumps(value)  # of words, numbers and truths it is the same


def world_of_torchrun() -> int | None:
    """The ranks that there are, and no others; None where the run starts its own."""
    place = Place.of(os.environ)
    return None if place is None else place.world


def plan_for(recipe: Recipe, folder: Path | None, switched: Switch | None) -> Mapping[str, Any] | None:
    """By which the run goes on: the one that it has switched to; else one that the recipe names and its run
    folder does not know yet; else the one in there, where it is asked for anything. ``folder``: of a run that
    is resumed, whose recipe is not written anew yet. Raises ValueError for a file that is no plan."""
    if switched is not None and switched.plan is not None:
        return switched.plan
    named = recipe.parallel.plan
    if folder is not None and (folder / FILE).is_file():
        before = Recipe.load(RunFolder(folder).recipe).parallel.plan
        if not named or named == before:
            return plan_of(RunFolder(folder)) if recipe.parallel.replan else None
    return read_plan(named) if named else None


def write_plan(run: RunFolder, plan: Mapping[str, Any]) -> None:
    write(run.path / FILE, plan)


def meet_again(trainer: Any, *, again: bool) -> None:
    """Are ranks that torchrun has started those of the next session, too? Until a session has begun they are
    (``cli.ranks``), for another one may have to take its place."""
    if Place.of(os.environ) is not None and isinstance(trainer, ShardedTrainer):
        trainer.again = again


def check(
    recipe: Recipe, config: ModelConfig, plan: Mapping[str, Any] | None, say: Say | None = None
) -> bool:
    """Is anything to be weighed? Raises ValueError, in one sentence, for ``plan`` where it is not this run's,
    or where there is nothing to weigh; a run that goes on (``say``) is told, and goes on without."""
    section = recipe.parallel
    if not section.replan:
        return False
    _check_ranks()
    try:
        if plan is not None:
            _check_plan(recipe, config, plan)
        else:
            _check_experts(recipe, config)
    except ValueError as error:
        if say is None:
            raise
        say(f"parallel.replan rests: {error}")
        return False
    return True


def _check_ranks() -> None:
    place = Place.of(os.environ)
    if place is not None and not place.agent:
        raise ValueError(
            "parallel.replan is true, but these ranks were not started by torchrun, whose agent keeps the "
            "store at which they would meet again; start them with it, or set parallel.replan=false"
        )


def _check_experts(recipe: Recipe, config: ModelConfig) -> None:
    if config.moe is None or Layout.parse(recipe.parallel.layout).expert == 1:
        raise ValueError(
            "parallel.replan is true with nothing to weigh: no experts are spread over ranks, and no plan "
            "says what else there is; make one with ostinato plan ... --record plan.json, and name it in "
            "parallel.plan"
        )
    if not (recipe.log.trajectories_every == 1 and recipe.trainer.replay):
        raise ValueError(
            "parallel.replan is true, and experts are placed by recorded routes; set "
            "log.trajectories_every=1 and trainer.replay=true, or parallel.replan=false"
        )


def _check_plan(recipe: Recipe, config: ModelConfig, plan: Mapping[str, Any]) -> None:
    if not plan.get("asked") or "lacking" not in plan:
        raise ValueError(
            "parallel.replan is true with a plan that does not say what was asked; make it anew with "
            "ostinato plan ... --record"
        )
    planned, running = plan["layouts"]["train"], recipe.parallel.layout or "1"
    if Layout.parse(planned) != Layout.parse(running):
        raise ValueError(
            f'parallel.layout is "{running}" and the plan of the run says "{planned}"; set '
            f"parallel.layout={planned}, or plan this one with --train-layout {running}"
        )
    if plan["placement"] != Placement.COLOCATED:
        raise ValueError(
            f"parallel.replan is true with a plan of trainer and sampler {plan['placement']}, which no run "
            "changes by itself; plan with --placement colocated, or set parallel.replan=false"
        )
    _check_question(recipe, config, asked_again(plan["asked"]))


def _check_question(recipe: Recipe, config: ModelConfig, asked: Asked) -> None:
    """Was it asked about this run?"""
    work, model = asked.problem.work, asked.problem.config
    mine = {"prompts": recipe.rollout.prompts_per_step, "group": recipe.rollout.group_size}
    said = {"prompts": work.prompts, "group": work.group}
    mine |= {name: getattr(config, name) for name in SIZES}
    said |= {name: getattr(model, name) for name in SIZES}
    if odd := [name for name, value in mine.items() if said[name] != value]:
        raise ValueError(
            f"the plan of the run is of {odd[0]} {said[odd[0]]}, and the run has {mine[odd[0]]}; make it "
            "anew with ostinato plan, the model and the --prompts and --group of the run"
        )


def read_plan(path: str) -> Mapping[str, Any]:
    """A file of ``ostinato plan --record``. Raises ValueError where it is none."""
    try:
        found = parse_json(Path(path).expanduser().read_bytes())
        Layout.parse(found["layouts"]["train"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"parallel.plan is {path!r}, which is no plan ({error}); make one with ostinato plan ... "
            "--record plan.json"
        ) from None
    return found


__all__ = [
    "Replanner",
    "Switch",
    "check",
    "free",
    "meet_again",
    "overrides",
    "plan_for",
    "read_plan",
    "world_of_torchrun",
    "worth",
    "write_plan",
]
