"""Is the layout of a run still the right one for what the run has become?

    plan.json of the run ---> the answer lengths it was planned for
    its last steps ---------> the lengths it has now                    moved? --no--> stay
                                                                         |yes
    search anew, and the running layouts priced in the same world ------> advice, kept in replan.jsonl

With ``parallel.replan`` a run weighs this after its checkpoints: it ends where another layout is better, and
says the command that resumes it there. Adapters are saved as logical tensors and load under any layout: a
switch costs a checkpoint, a start and loading the base.

Advice has hysteresis on both sides: lengths must have moved before anything is planned anew, and the gain
must beat the cost by a margin that covers what a plan does not know. The lengths of the last search are what
the next ones are compared with, so nothing is searched twice.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostinato.inputs import parse_toml
from ostinato.parallel.layout import Layout
from ostinato.plan.asked import Asked, asked_again
from ostinato.plan.launch import lacking, sections
from ostinato.plan.problem import Placement, Problem
from ostinato.plan.record import FILE, plan_of, record, write
from ostinato.plan.search import Plan, search
from ostinato.run import RunFolder

STEPS = 10  # the last ones, which say what the run has become
SWITCH_S = 300.0  # of a checkpoint, a start, and loading the base: assumed
LENGTHS = 512  # of the answers are enough to plan by
LONGER = 0.15  # relative change of the mean, the 90 % quantile or the longest answer that counts
GAIN = 0.05  # of a step: smaller gains are within what a plan knows
PAYBACK = 2.0  # times the cost of the switch that the gain must come to by the end of the run
Lengths = tuple[int, ...]  # a sample of answer lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Why to switch, or why not, in one sentence. ``answers``: that were searched with, empty where they have
    not moved; ``asked`` and ``plan`` are there where the advice is to switch."""

    reason: str
    answers: Lengths = ()
    asked: Asked | None = None
    plan: Plan | None = None


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
            advice = self._weigh(plan, asked_again(said))
        except (ValueError, TypeError, OSError, KeyError) as error:  # a file that is gone, another layout
            advice = Advice(reason=f"nothing could be weighed ({error}); stay")
        asked, better = advice.asked, advice.plan
        row = {"step": step, "switch": better is not None, "reason": advice.reason}
        self.run.replan.append(row | {"answers": list(advice.answers)})
        if better is None or asked is None:
            return False
        found = record(asked.problem, better, asked=said, factors=asked.clock.factors)
        write(self.run.path / FILE, found | {"step": step})
        self.command = _resume(self.run, asked.problem, better)
        return True

    def _weigh(self, plan: Mapping[str, Any], asked: Asked) -> Advice:
        """The layouts of the run against those that are best now. Raises ValueError where the plan is not of
        the run as it is."""
        recipe = parse_toml(self.run.recipe.read_text(encoding="utf-8"))
        _refuse_other_runs(recipe, plan, asked.problem)
        rows = list(self.run.metrics.rows())
        answers = _answers(self.run, rows[-STEPS:])
        what = moved(_reference(self.run, plan), answers)
        if not what:
            return Advice(reason="answer lengths are still those of the plan")
        longest = max(asked.problem.work.max_answer, *answers)
        work = replace(asked.problem.work, answers=answers, max_answer=longest)
        asked = replace(asked, problem=replace(asked.problem, work=work))
        own = [row for row in rows if row["step"] > plan.get("step", 0)]  # under the layout that is weighed
        left = max(0, int(recipe["trainer"]["steps"]) - rows[-1]["step"])
        found = _weighed(asked, plan, left, _step_seconds(own))
        return replace(found, reason=f"{what}; {found.reason}", answers=answers, asked=asked)


def _refuse_other_runs(recipe: Mapping[str, Any], plan: Mapping[str, Any], problem: Problem) -> None:
    """Raise ValueError, in one sentence, where the plan is not of the run as it is."""
    planned, running = plan["layouts"]["train"], recipe["parallel"]["layout"] or "1"
    if Layout.parse(planned) != Layout.parse(running):
        raise ValueError(f"the run trains under {running} and its plan is of {planned}")
    said = (problem.work.prompts, problem.work.group)
    mine = (recipe["rollout"]["prompts_per_step"], recipe["rollout"]["group_size"])
    if said != mine:
        raise ValueError(
            f"the run has {mine[0]} prompts of {mine[1]} answers, its plan {said[0]} of {said[1]}"
        )


def _resume(run: RunFolder, problem: Problem, plan: Plan) -> str:
    """The command by which the run goes on."""
    said = sections(problem, plan.arrangement)
    words = {"parallel.layout": said["parallel"]["layout"]}
    words |= {f"trainer.{name}": said["trainer"][name] for name in ("tokens_per_microbatch", "recompute")}
    told = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in words.items()
    )
    return " ".join([f"ostinato resume {run.path}", *told])


def moved(planned: Lengths, now: Lengths) -> str:
    """What has moved since the plan was made, in words; empty where nothing has: then no plan is made."""
    pairs = zip(("mean", "90 %", "longest"), _lengths(planned), _lengths(now), strict=True)
    return ", ".join(
        f"{name} answer {before:.0f} -> {after:.0f} tokens"
        for name, before, after in pairs
        if abs(after / before - 1) > LONGER
    )


def _lengths(answers: Lengths) -> Sequence[float]:
    values = np.asarray(answers, np.float64)
    return float(values.mean()), float(np.quantile(values, 0.9)), float(values.max())


def _reference(run: RunFolder, plan: Mapping[str, Any]) -> Lengths:
    """What was searched with last: by the plan, or when it was weighed anew since and the run stayed. A
    switch that came about has a plan of its own."""
    since = [
        row["answers"]
        for row in run.replan.rows()
        if row.get("answers") and not row["switch"] and row["step"] > plan.get("step", 0)
    ]
    return tuple(since[-1] if since else plan["answers"])


def _answers(run: RunFolder, rows: Sequence[Mapping[str, Any]]) -> Lengths:
    """At most ``LENGTHS`` of the trajectories that the last steps have kept, sorted and evenly spread, the
    longest among them. Raises ValueError where there are none."""
    if not rows:
        raise ValueError("the run has no step yet")
    found = sorted(
        length
        for row in run.trajectories.since(rows[0]["step"])
        if (length := sum(len(turn["tokens"]) for turn in row["turns"]))
    )
    if not found:
        raise ValueError("the last steps have kept no answers; set log.trajectories_every")
    number = min(LENGTHS, len(found))
    return tuple(found[(index + 1) * len(found) // number - 1] for index in range(number))


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """The median of the last steps; 0 without any."""
    return statistics.median([row["step_time"] for row in rows[-STEPS:] if "step_time" in row] or [0.0])


def _weighed(asked: Asked, plan: Mapping[str, Any], left: int, step_s: float) -> Advice:
    """``step_s``: measured, 0 where it is not; what is planned to be gained of a step is gained of that."""
    problem, layouts = asked.problem, plan["layouts"]
    free = replace(asked.allowed, train_layout=None, rollout_layout=None)
    kept = replace(
        free,
        placements=(Placement(plan["placement"]),),
        train_layout=Layout.parse(layouts["train"]),
        rollout_layout=Layout.parse(layouts["rollout"]),
    )
    current, best = (search(problem, asked.clock, allowed).plans for allowed in (kept, free))
    best = [one for one in best if _can(problem, plan, one)]
    if not best:
        return Advice(reason="nothing that could be gone on by fits now")
    name = str(best[0].arrangement.train.layout)
    if not current:
        return Advice(reason=f"{layouts['train']} does not fit any more, {name} does", plan=best[0])
    told = current[0].times.total
    now_s = step_s or told
    switch, reason = advise(layouts["train"], now_s, name, best[0].times.total * now_s / told, left)
    return Advice(reason=reason, plan=best[0] if switch else None)


def _can(problem: Problem, plan: Mapping[str, Any], found: Plan) -> bool:
    """Could the run go on by ``found``: with the sampler as it is, in its place, and with nothing that
    Ostinato lacks but for what the plan of the run had already?"""
    chosen, layouts = found.arrangement, plan["layouts"]
    if (str(chosen.rollout.layout), str(chosen.placement)) != (layouts["rollout"], plan["placement"]):
        return False
    return set(lacking(problem, chosen)) <= set(plan["lacking"])


def advise(
    current: str, current_s: float, best: str, best_s: float, steps: int, switch_s: float = SWITCH_S
) -> tuple[bool, str]:
    """Should a run that takes ``current_s`` a step under ``current`` go on under ``best``, with ``steps`` to
    come? And why. Seconds of a step are for the lengths as they are now, under either layout."""
    if best == current:
        return False, f"{current} is still the best layout"
    gain = current_s - best_s
    if gain <= GAIN * current_s:
        return (
            False,
            f"{best} would gain {gain / current_s:.1%} a step, within what a plan knows ({GAIN:.0%})",
        )
    all_s = gain * steps
    told = f"{best} for {current}: {gain:.3g} s a step for {steps} steps is {all_s:.3g} s"
    if all_s <= PAYBACK * switch_s:
        return False, f"{told}, less than {PAYBACK:g} times the {switch_s:.3g} s of the switch; stay"
    return True, f"{told}, and the switch costs {switch_s:.3g} s"


__all__ = ["Advice", "Replanner", "advise", "moved"]
