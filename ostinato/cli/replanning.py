"""``parallel.replan``: a run asks itself, at its checkpoints, whether another layout is better now.

    checkpoint -> answer lengths, expert loads of the last steps -> plan_again.weigh, else place.moved
               -> Switch(overrides): the loop ends, and a session that resumes under them goes on

The layout of a run that has a plan, else which expert rank keeps which experts. What is gained has to come to
twice what the switch costs by the end of the run; its cost is what this session took to begin, and to save.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.cli.place import Found, moved, read
from ostinato.cli.place import write as write_placement
from ostinato.cli.plan_again import STEPS, note, plan_of, recorded, weigh
from ostinato.cli.plan_asked import Asked, asked_again
from ostinato.config import Recipe
from ostinato.parallel.follow import ShardedTrainer
from ostinato.parallel.launch import Place
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expert_loads
from ostinato.parallel.placement import contiguous, owner_of, placed_experts
from ostinato.plan.launch import sections
from ostinato.plan.problem import Placement
from ostinato.plan.record import FILE, write
from ostinato.plan.replan import Advice, Hysteresis
from ostinato.plan.search import Plan
from ostinato.run import RunFolder, recorded_routes

if TYPE_CHECKING:
    from ostinato.model.config import ModelConfig

LINK_GB_S = 1.0  # over which experts are loaded anew: of a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """How the run goes on after step ``step``; ``plan``: its plan.json from there on, where it has one."""

    step: int
    overrides: tuple[str, ...]
    reason: str
    plan: Mapping[str, Any] | None = None

    @property
    def told(self) -> str:
        return f"step {self.step}: {self.reason}; on with {', '.join(self.overrides)}"


@dataclass(kw_only=True)
class Replanner:
    """Asked after every checkpoint but the last, in a thread of its own; ``switch`` is its answer."""

    recipe: Recipe
    run: RunFolder
    config: ModelConfig
    switch_s: float  # a session's beginning, measured
    switch: Switch | None = field(default=None, init=False)

    def __call__(self, step: int) -> bool:
        planned = (self.run.path / FILE).is_file()
        self.switch = self._layouts(step) if planned else self._experts(step)
        return self.switch is not None

    def _layouts(self, step: int) -> Switch | None:
        plan = plan_of(self.run)
        asked = asked_again(plan["asked"])
        world = world_of_torchrun()

        def can(found: Plan) -> bool:
            ranks = found.arrangement.train.layout.world
            return world in (None, ranks) and self._accepted(overrides(self.recipe, asked, found))

        weighed = weigh(asked, self.run, self.switch_s, can)
        note(self.run, weighed)
        if weighed.plan is None or weighed.asked is None:
            return None
        return Switch(
            step=step,
            overrides=overrides(self.recipe, asked, weighed.plan),
            reason=weighed.advice.reason,
            plan=recorded(weighed.asked, weighed.plan, plan["asked"]) | {"step": step},
        )

    def _accepted(self, words: tuple[str, ...]) -> bool:
        """Is the recipe one, with these?"""
        try:
            Layout.parse(Recipe.load(self.run.recipe, *words).parallel.layout).refuse(self.config)
        except ValueError:
            return False
        return True

    def _experts(self, step: int) -> Switch | None:
        moe, layout = self.config.moe, Layout.parse(self.recipe.parallel.layout)
        routes = list(recorded_routes(self.run).values())[-STEPS:]
        if moe is None or layout.expert == 1 or len(routes) < 2:
            return None
        windows = np.stack([expert_loads(one, moe.num_experts) for one in routes])
        (_, layers, experts), ranks = windows.shape, layout.expert
        placement = self.recipe.parallel.placement
        neighbours = contiguous(layers, experts, ranks)
        before = owner_of(read(Path(placement), ranks)) if placement else neighbours
        found = Found(before=before, windows=windows, ranks=ranks, measured=ranks * layout.expert_tensor)
        move = moved(found, self.recipe, self.config, list(self.run.metrics.rows()), LINK_GB_S).move
        advice = worth(move.gain_s, move.cost_s + self.switch_s, move.moved)
        self.run.replan.append({"step": step, **asdict(advice), "world": None})
        if not advice.switch:
            return None
        file = self.run.path / f"placement-{step:08d}.json"
        write_placement(file, placed_experts(move.owner, ranks))
        return Switch(step=step, overrides=(f"parallel.placement={_toml(str(file))}",), reason=advice.reason)


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
    if recipe.engine.backend == asked.problem.sampler.name and not recipe.engine.address:
        found["engine.layout"] = said["engine"].get("layout", "")
    return tuple(f"{name}={_toml(value)}" for name, value in found.items())


def _toml(value: object) -> str:
    return json.dumps(value)  # of words, numbers and truths it is the same


def world_of_torchrun() -> int | None:
    """The ranks that there are, and no others; None where the run starts its own."""
    place = Place.of(os.environ)
    return None if place is None else place.world


def plan_for(recipe: Recipe, folder: Path | None, switched: Switch | None) -> Mapping[str, Any] | None:
    """By which the run goes on: the one that it has switched to, else the one that ``folder`` has (of a run
    that is resumed), else the one that the recipe names. Raises ValueError for a file that is no plan."""
    if switched is not None and switched.plan is not None:
        return switched.plan
    if folder is not None and (folder / FILE).is_file():
        return plan_of(RunFolder(folder))
    return read_plan(recipe.parallel.plan) if recipe.parallel.plan else None


def write_plan(run: RunFolder, plan: Mapping[str, Any]) -> None:
    write(run.path / FILE, plan)


def new_replanner(recipe: Recipe, run: RunFolder, config: ModelConfig, switch_s: float) -> Replanner | None:
    """Where the recipe wants one; ``switch_s``: what this session has taken to begin."""
    if not recipe.parallel.replan:
        return None
    return Replanner(recipe=recipe, run=run, config=config, switch_s=switch_s)


def meet_again(trainer: Any) -> None:
    """Ranks that torchrun has started are those of the next session too."""
    if Place.of(os.environ) is not None and isinstance(trainer, ShardedTrainer):
        trainer.again = True


def check(recipe: Recipe, config: ModelConfig, plan: Mapping[str, Any] | None) -> None:
    """Raises ValueError, in one sentence, for ``plan`` where it is not this run's, or nothing to weigh."""
    section = recipe.parallel
    if not section.replan:
        return
    if plan is not None:
        _check_plan(recipe, plan)
    place, layout = Place.of(os.environ), Layout.parse(section.layout)
    if place is not None and not place.agent:
        raise ValueError(
            "parallel.replan is true, but these ranks were not started by torchrun, whose agent keeps the "
            "store at which they would meet again; start them with it, or set parallel.replan=false"
        )
    if plan is None and (config.moe is None or layout.expert == 1):
        raise ValueError(
            "parallel.replan is true with nothing to weigh: no experts are spread over ranks, and no plan "
            "says what else there is; make one with ostinato plan ... --record plan.json, and name it in "
            "parallel.plan"
        )
    if plan is None and not (recipe.log.trajectories_every == 1 and recipe.trainer.replay):
        raise ValueError(
            "parallel.replan is true, and experts are placed by recorded routes; set "
            "log.trajectories_every=1 and trainer.replay=true, or parallel.replan=false"
        )


def _check_plan(recipe: Recipe, plan: Mapping[str, Any]) -> None:
    planned, running = plan["layouts"]["train"], recipe.parallel.layout or "1"
    if not plan.get("asked"):
        raise ValueError(
            "parallel.replan is true with a plan that does not say what was asked; make it anew with "
            "ostinato plan ... --record"
        )
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


def read_plan(path: str) -> Mapping[str, Any]:
    """A file of ``ostinato plan --record``. Raises ValueError where it is none."""
    try:
        found = json.loads(Path(path).expanduser().read_bytes())
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
    "meet_again",
    "new_replanner",
    "overrides",
    "plan_for",
    "read_plan",
    "world_of_torchrun",
    "worth",
    "write_plan",
]
