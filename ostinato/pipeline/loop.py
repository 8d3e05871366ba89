"""The loop: one policy, one stream of prompts, everything that happens between them.

    tasks -> play -> credit -> pack -> trainer.step -> engine.publish      (a step)
               |                                            |
        spool, drafting                     metrics, ledger, trajectories; every k steps evaluate and save

Steps are numbered from 1; ``LoopState.step`` counts the finished ones and is all the history there is.
Randomness is addressed by (seed, step, index of the prompt in the stream, sample), so a run resumed from
``LoopState`` draws what the interrupted one would have drawn; groups that it had already finished are read
back from the spool. The loop prints nothing: it calls ``on_step``, ``on_eval`` and ``on_note``.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import pack
from ostinato.algo.routing import Misaligned
from ostinato.ledger import Ledger
from ostinato.model.flops import FlopModel
from ostinato.pipeline.account import (
    NO_WORK,
    Clock,
    add_totals,
    evaluation_work,
    step_costs,
    step_row,
    step_work,
    tool_rates,
)
from ostinato.pipeline.credit import Credit, assign
from ostinato.pipeline.evaluate import Evaluation, due, evaluate_groups, spent_in_steps
from ostinato.pipeline.remember import Drafted, Drafting
from ostinato.pipeline.rounds import Round, Rounds
from ostinato.pipeline.signals import Abandoned, StopSignals
from ostinato.pipeline.spool import Spool
from ostinato.pipeline.stream import solved_for_good
from ostinato.pipeline.watch import watch_after
from ostinato.protocols import MetricWriter, Tasks, Trainer
from ostinato.rollout.health import failure
from ostinato.rollout.play import Played, Stage, fault_name
from ostinato.run import MAIN_SET, RunFolder, group_rows
from ostinato.types import Batch, Group, Request, StepReport


class NoSignal(RuntimeError):
    """Too many steps in a row had nothing to learn from."""


class Finish(StrEnum):
    """Why the loop came back."""

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C: the step was finished
    TERMINATED = "terminated"  # SIGTERM: the step was finished or abandoned
    COLLAPSED = "collapsed"  # the stability watch said so, and the plan was to stop then
    SOLVED = "solved"  # every prompt is solved for good: nothing is left to sample
    ENOUGH = "enough"  # the rest is not worth its compute, and the plan was to stop then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything. ``*_every`` counts steps, 0 is never (checkpoints: only at the end)."""

    steps: int
    prompts_per_step: int
    group_size: int
    answer_tokens: int  # longest answer allowed, all turns together
    tokens_per_microbatch: int
    minibatches: int = 1  # optimizer steps per batch, as long as there are as many groups
    staleness: int = 0  # steps between the policy that samples a batch and the one that trains on it
    seed: int = 0
    solved_at: float = 1.0  # a reward from here on is a solution
    solved_for_good: float = 0.0  # share of a group's solutions at which its prompt leaves; 0: none ever does
    eval_at_start: bool = True
    checkpoint_every: int = 0
    trajectories_every: int = 0
    max_empty_steps: int = 10  # in a row without anything to learn from
    stop_on_collapse: bool = False  # end after the step in which the stability watch first tells of one
    grace_s: float = 20.0  # for a step to end after SIGTERM
    flops: FlopModel | None = None  # None: unknown, no FLOPs are reported

    def __post_init__(self) -> None:
        names = ("steps", "prompts_per_step", "group_size", "answer_tokens", "tokens_per_microbatch")
        for name in (*names, "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name} is {getattr(self, name)}; use at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a run stands; a checkpoint carries it as JSON (``asdict``, ``LoopState(**d)``)."""

    step: int = 0  # finished
    cursor: int = 0  # place in the stream from which the next round is taken
    version: int = 0  # of the policy that the engine serves
    empty_in_a_row: int = 0
    retired: Sequence[str] = ()  # uids of prompts that have left the stream for good, as they left
    ahead: Sequence[Round] = ()  # played and not trained on yet; their groups are in the spool
    totals: Mapping[str, float] = field(default_factory=dict)  # sums over the whole run

    def __post_init__(self) -> None:
        told = (one if isinstance(one, Round) else Round(**one) for one in self.ahead)
        object.__setattr__(self, "ahead", tuple(told))  # JSON has no Round and no tuple
        object.__setattr__(self, "retired", tuple(self.retired))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    state: LoopState
    why: Finish


@dataclass(kw_only=True)
class Loop:
    """A run, assembled. ``await loop.run()`` trains until ``plan.steps`` are done or a signal asks to stop.

    ``save`` writes a checkpoint of the trainer and of the state it is given, and returns the step of the
    oldest one that is kept: the spool has what came after it. It is called every ``checkpoint_every`` steps
    and whenever the loop ends in a way that it can foresee.
    """

    plan: Plan
    stage: Stage
    tasks: Tasks
    trainer: Trainer
    algorithm: Algorithm
    folder: RunFolder
    state: LoopState = LoopState()
    evaluations: Sequence[Evaluation] = ()
    foresee: Callable[[int], bool] | None = None  # after a score of the main set: is the rest not worth it?
    writers: Sequence[MetricWriter] = ()  # beside metrics.jsonl
    ledger: Ledger | None = None  # None: one that knows neither price nor devices
    counters: Sequence[Counter[str]] = ()  # of the grader, the tools ...: a row has what a step added
    drafting: Drafting | None = None  # where the engine verifies drafts from what was sampled before
    run_ahead: Callable[[Sequence[Request]], None] | None = None  # the next step's, to an engine that can
    save: Callable[[LoopState], int] = lambda state: state.step
    on_step: Callable[[Mapping[str, float]], None] = lambda row: None
    on_eval: Callable[[Mapping[str, Any]], None] = lambda row: None
    on_note: Callable[[str], None] = lambda sentence: None  # what a person should know, in one sentence

    def __post_init__(self) -> None:
        check_group_size(self.plan.group_size, self.algorithm.baseline, self.algorithm.scale)

    async def run(self) -> Finished:
        """Raises NoSignal when ``max_empty_steps`` steps in a row had nothing to learn from. What the engine
        and the trainer raise passes through, after a checkpoint unless the trainer is between two steps. A
        batch that it refuses as ``Misaligned`` is not spooled any more, so a resumed run plays it anew, and
        has mostly not changed the trainer."""
        self._books = self.ledger or Ledger(folder=self.folder)
        with self._books.session(self.state.step):
            finished = await self._run()
            self._books.why = finished.why
        return finished

    async def _run(self) -> Finished:
        self.folder.truncate_after(self.state.step)
        self._scored = {row.get("set"): row for row in self.folder.eval.rows()}  # the last of each set
        self._spool = Spool(self.folder.path / "inflight.jsonl.zst", self._books, self.state.step)
        self._rounds = self._new_rounds()
        self._queue = self._recalled()
        self._saved_step, self._between_steps = self.state.step, False
        self._counted, self._told = sum(self.counters, Counter()), set[str]()
        self._watch, self._why = watch_after(self.folder.metrics.rows()), self._nobody_left()
        self.stage.engine.publish(self.trainer.adapters(), self.state.version)
        with StopSignals(self.plan.grace_s) as self._signals:
            try:
                with self._books.work():
                    await self._train(self._signals)
            except Abandoned:
                self.on_note(
                    f"what followed step {self.state.step} was abandoned: "
                    f"it was not done {self.plan.grace_s:g} s after SIGTERM"
                )
            except Misaligned as refused:
                if not refused.steps_taken:  # between two steps, but no weight has changed
                    self._checkpoint()
                self._spool.reject(self.state.step + 1)
                raise
            except RuntimeError:
                if not self._between_steps:
                    self._checkpoint()
                raise
            self._checkpoint()
        if self.state.step == self.plan.steps:
            return Finished(state=self.state, why=Finish.DONE)
        if self._why is not None:
            return Finished(state=self.state, why=self._why)
        why = Finish.TERMINATED if self._signals.received is signal.SIGTERM else Finish.INTERRUPTED
        return Finished(state=self.state, why=why)

    async def _train(self, signals: StopSignals) -> None:
        if self.plan.eval_at_start or self.state.step:
            await signals.bounded(self._evaluate())
        while self.state.step < self.plan.steps and signals.received is None and self._why is None:
            await signals.bounded(self._step())
            if signals.received is None:
                await signals.bounded(self._evaluate())
            if self._due(self.plan.checkpoint_every):
                self._checkpoint()
            if self.state.empty_in_a_row >= self.plan.max_empty_steps:
                raise NoSignal(self._no_signal())

    async def _step(self) -> None:
        """Play, learn, publish, report. Nothing after the rollouts awaits: a step happens or it does not."""
        clock = Clock()
        step = self.state.step + 1
        if self.drafting is not None:
            self.drafting.begin()
        state, now = await self._play(step, clock)
        clock.rollouts(now)
        played = self._queue.pop(step)
        groups, fresh = ([item.group for item in items] for items in (played, now))
        drafted = None
        if self.drafting is not None:
            drafted = self.drafting.end(fresh, step, clock.rollout_s)
        credit = self._assign(groups)
        version, batch, report = self.state.version, None, None
        if credit.samples:
            self._between_steps = True
            with clock.training(), self._signals.blocking():
                batch = self._pack(credit)
                report = self.trainer.step(batch)
                version += 1
                self.stage.engine.publish(self.trainer.adapters(), version)
            if report.mismatch is not None:
                clock.measured(report.mismatch["seconds"])
        model, ahead = self.plan.flops, drafted.ahead if drafted else NO_WORK
        costs = None if model is None else step_costs(model, groups, credit, batch, report, fresh, ahead)
        row = step_row(
            groups,
            credit,
            batch,
            report,
            clock,
            fresh=fresh,
            solved_at=self.plan.solved_at,
            costs=costs,
            drafts=drafted.row if drafted else {},
        )
        reused = [item.group for item in now if item.paid]
        work = step_work(groups, credit, batch, report, costs, fresh, reused, model)
        self._books.step(step, row["step_time"], clock.busy(), work)
        counts = self._new_counts()
        row |= {"rollout/from_spool": float(sum(item.spooled for item in played)), **counts}
        row |= self._left(state)
        row |= tool_rates(counts, sum(len(group.trajectories) for group in fresh))
        self.state = replace(
            state,
            step=step,
            version=version,
            empty_in_a_row=0 if credit.samples else self.state.empty_in_a_row + 1,
            ahead=state.ahead[1:],
            totals=add_totals(self.state.totals, row, self._books.terms),
        )
        self._between_steps = False
        self._report({**row, **self.state.totals}, groups, report, drafted)
        self._why = self._why or self._nobody_left()

    async def _play(self, step: int, clock: Clock) -> tuple[LoopState, list[Played]]:
        """Play until the round of ``step`` and those that ``staleness`` has the policy play ahead are there:
        (where that leaves the stream, what was played now). Most often this is one round."""
        plan, state, played = self.plan, self.state, list[Played]()
        for lost in (one for one in state.ahead if one.step not in self._queue):
            items = self._queue[lost.step] = await self._rounds.play(lost, state.retired, since=clock.start)
            played += items
            state = self._without(state, items)
        for number in range(step + len(state.ahead), min(step + plan.staleness, plan.steps) + 1):
            now = self._round(state, number)
            places = self._rounds.places(now, state.retired)
            if not places:
                break
            after = replace(state, cursor=places[-1] + 1, ahead=(*state.ahead, now))
            coming = self._round(after, number + 1) if number < plan.steps else None
            items = await self._rounds.play(now, state.retired, since=clock.start, coming=coming)
            self._queue[number] = items
            played += items
            state = self._without(after, items)
        return state, played

    def _round(self, state: LoopState, step: int) -> Round:
        """The next round, whose groups ``step`` trains on."""
        retired = len(state.retired) if self.plan.solved_for_good else 0  # 0: all may come again
        return Round(step=step, cursor=state.cursor, retired=retired, version=state.version)

    def _new_rounds(self) -> Rounds:
        return Rounds(
            tasks=self.tasks,
            stage=self.stage,
            spool=self._spool,
            prompts=self.plan.prompts_per_step,
            group_size=self.plan.group_size,
            seed=self.plan.seed,
            run_ahead=self.run_ahead,
        )

    def _recalled(self) -> dict[int, list[Played]]:
        """What an earlier process had played ahead, by step. A round that the spool does not have is one of
        the policy of now, which plays the same prompts anew; who had left by what is lost does not return."""
        found, ahead, version = dict[int, list[Played]](), list[Round](), self.state.version
        for one in self.state.ahead:
            played = self._rounds.recall(one, self.state.retired, since=time.perf_counter())
            if played is not None:
                found[one.step] = played
            elif one.version != version:
                self.on_note(
                    f"step {self.state.step}: {self._spool.path.name} does not have all groups for step "
                    f"{one.step}, which policy {one.version} sampled; policy {version} plays them anew, so "
                    "this is not quite the run that was interrupted"
                )
            ahead.append(one if played is not None else replace(one, version=version))
        self.state = replace(self.state, ahead=ahead)
        return found

    def _without(self, state: LoopState, played: Sequence[Played]) -> LoopState:
        """The state when the prompts have left the stream that these groups solve for good."""
        plan = self.plan
        if not plan.solved_for_good:
            return state
        groups = [item.group for item in played]
        rule = {"share": plan.solved_for_good, "solved_at": plan.solved_at}
        leaving = solved_for_good(groups, **rule, retired=frozenset(state.retired))
        return replace(state, retired=(*state.retired, *leaving))

    def _left(self, state: LoopState) -> dict[str, float]:
        """What the row tells of the prompts that have left."""
        if not self.plan.solved_for_good:
            return {}
        total = len(state.retired)
        return {
            "groups/retired": float(total - len(self.state.retired)),
            "groups/retired_total": float(total),
            "groups/left_share": 1 - total / len(self.tasks),
        }

    def _nobody_left(self) -> Finish | None:
        """Is this the end, because every prompt has left the stream?"""
        coming = self._round(self.state, self.state.step + 1)
        if self.state.ahead or self._rounds.places(coming, self.state.retired):
            return None
        self.on_note(
            f"step {self.state.step}: every prompt is solved for good, so nothing is left to sample; more or "
            "harder tasks would go on, or rollout.solved_for_good = 0"
        )
        return Finish.SOLVED

    def _assign(self, groups: Sequence[Group]) -> Credit:
        return assign(
            groups,
            self.algorithm,
            min_verdicts=min(2, self.plan.group_size),
            answer_tokens=self.plan.answer_tokens,
            solved_at=self.plan.solved_at,
        )

    def _pack(self, credit: Credit) -> Batch:
        return pack(
            credit.samples,
            credit.weights,
            tokens_per_microbatch=self.plan.tokens_per_microbatch,
            minibatches=self.plan.minibatches,
            version=self.state.version,
        )

    def _report(
        self,
        row: dict[str, float],
        groups: Sequence[Group],
        report: StepReport | None,
        drafted: Drafted | None,
    ) -> None:
        step = self.state.step
        row = self._watched(row)
        for writer in (self.folder, *self.writers):
            writer.write(step, row)
        if drafted is not None:
            self.folder.drafts.append(drafted.detail)
        if self.plan.trajectories_every and (step == 1 or self._due(self.plan.trajectories_every)):
            self.folder.trajectories.append(*(line for group in groups for line in group_rows(group)))
        if report is not None and report.mismatch is not None:
            self.folder.mismatch.append({"step": step, **report.mismatch})
        if report is not None and report.note:
            self.on_note(f"step {step}: {report.note}")
        if report is not None and report.skipped:
            self.on_note(f"step {step} was refused: {report.skipped} ({', '.join(report.uids)})")
        self._tell_faults(groups)
        self.on_step({"step": step, **row})

    def _watched(self, row: dict[str, float]) -> dict[str, float]:
        """The row with ``watch/collapsed``; alarms are kept and told the moment they are met."""
        before = self._watch.collapsed
        for alarm in self._watch.see({"step": self.state.step, **row}):
            self.folder.watch.append(alarm.to_json())
            what = "collapse" if alarm.collapse else "look"
            self.on_note(f"step {alarm.step}: {what}: {alarm.sentence}, since step {alarm.since}")
        if self.plan.stop_on_collapse and self._watch.collapsed and not before:
            self._why = Finish.COLLAPSED
        return row | {"watch/collapsed": float(self._watch.collapsed)}

    def _tell_faults(self, groups: Sequence[Group]) -> None:
        """Each kind of failure once, in its own words (a skip has none); the rows count them all."""
        for sentence in (failure(trajectory) for group in groups for trajectory in group.trajectories):
            if (kind := fault_name(sentence)) != sentence and kind not in self._told:
                self._told.add(kind)
                self.on_note(f"step {self.state.step}: {sentence} (told once; faults/{kind} counts them)")

    def _new_counts(self) -> dict[str, float]:
        """What the counters have counted since they were last asked."""
        now = sum(self.counters, Counter[str]())
        new, self._counted = now - self._counted, now
        return {name: float(count) for name, count in sorted(new.items())}

    async def _evaluate(self) -> None:
        """Score what is due, and hear what the scores of the main set foretell. The end of a run is due for
        every set."""
        await self._score()
        main = self._scored.get(MAIN_SET, {})
        if self.foresee is None or not self.state.step or main.get("step") != self.state.step:
            return
        if self.foresee(self.state.step) and self._why is None:
            self._why = Finish.ENOUGH
            await self._score()

    async def _score(self) -> None:
        now = spent_in_steps(self.state.step, self.state.totals)
        for evaluation in self.evaluations:
            if due(evaluation, now, self._scored.get(evaluation.name), ended=self._due(0)):
                with self._books.evaluating():
                    row, groups = await evaluate_groups(self.stage, evaluation, self.state.step)
                row |= {"spent": now, **self._new_counts()}
                work = evaluation_work(groups, self.plan.flops)
                self._books.evaluation(self.state.step, evaluation.name, row["seconds"], work)
                if self.drafting is not None:
                    self.drafting.forget(evaluation.prompts)
                self.folder.eval.append(row)
                self._scored[evaluation.name] = row
                self.on_eval(row)

    def _due(self, every: int) -> bool:
        ended = self.state.step == self.plan.steps or self._why is not None
        return ended or (every > 0 and self.state.step % every == 0)

    def _checkpoint(self) -> None:
        if self.state.step > self._saved_step:
            started = time.perf_counter()
            oldest = self.save(self.state)
            self._books.saved(self.state.step, time.perf_counter() - started)
            self._saved_step = self.state.step
            self._spool.forget(oldest)

    def _no_signal(self) -> str:
        return (
            f"{self.state.empty_in_a_row} steps in a row had nothing to learn from; see groups/dropped and "
            f"faults in {self.folder.metrics.path.name}, then change the task's difficulty or mend the reward"
        )
