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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import pack
from ostinato.algo.routing import Misaligned
from ostinato.pipeline.account import Clock, add_totals, ledger_row, step_row, tool_rates
from ostinato.pipeline.credit import Credit, assign
from ostinato.pipeline.evaluate import Evaluation, evaluate
from ostinato.pipeline.remember import Drafted, Drafting
from ostinato.pipeline.signals import Abandoned, StopSignals
from ostinato.pipeline.spool import Spool, address
from ostinato.pipeline.watch import watch_after
from ostinato.protocols import MetricWriter, Tasks, Trainer
from ostinato.rollout.health import failure
from ostinato.rollout.play import Ask, Played, Stage, fault_name, first_request, play
from ostinato.run import RunFolder, group_rows
from ostinato.types import Batch, Group, Request, StepReport


class NoSignal(RuntimeError):
    """Too many steps in a row had nothing to learn from."""


class Finish(StrEnum):
    """Why the loop came back."""

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C: the step was finished
    TERMINATED = "terminated"  # SIGTERM: the step was finished or abandoned
    COLLAPSED = "collapsed"  # the stability watch said so, and the plan was to stop then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything. ``*_every`` counts steps, 0 is never (checkpoints: only at the end)."""

    steps: int
    prompts_per_step: int
    group_size: int
    answer_tokens: int  # longest answer allowed, all turns together
    tokens_per_microbatch: int
    minibatches: int = 1  # the trainer's optimizer steps per batch: no fewer microbatches are packed
    seed: int = 0
    solved_at: float = 1.0  # a reward from here on is a solution
    eval_every: int = 0
    eval_at_start: bool = True
    checkpoint_every: int = 0
    trajectories_every: int = 0
    max_empty_steps: int = 10  # in a row without anything to learn from
    stop_on_collapse: bool = False  # end after the step in which the stability watch first tells of one
    grace_s: float = 20.0  # for a step to end after SIGTERM
    forward_flops_per_token: float = 0.0  # 0: unknown, no FLOPs are reported
    backward_ratio: float = 2.0  # FLOPs of backward over forward; about 1 where the base is frozen

    def __post_init__(self) -> None:
        names = ("steps", "prompts_per_step", "group_size", "answer_tokens", "tokens_per_microbatch")
        for name in (*names, "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name} is {getattr(self, name)}; use at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a run stands; a checkpoint carries it as JSON (``asdict``, ``LoopState(**d)``)."""

    step: int = 0  # finished
    cursor: int = 0  # prompts taken from the stream
    version: int = 0  # of the policy that the engine serves
    empty_in_a_row: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)  # sums over the whole run

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    state: LoopState
    why: Finish


@dataclass(kw_only=True)
class Loop:
    """A run, assembled. ``await loop.run()`` trains until ``plan.steps`` are done or a signal asks to stop.

    ``save`` writes a checkpoint of the trainer and of the state it is given; it is called every
    ``checkpoint_every`` steps and whenever the loop ends in a way that it can foresee.
    """

    plan: Plan
    stage: Stage
    tasks: Tasks
    trainer: Trainer
    algorithm: Algorithm
    folder: RunFolder
    state: LoopState = LoopState()
    evaluations: Sequence[Evaluation] = ()
    writers: Sequence[MetricWriter] = ()  # beside metrics.jsonl
    counters: Sequence[Counter[str]] = ()  # of the grader, the tools ...: a row has what a step added
    drafting: Drafting | None = None  # where the engine verifies drafts from what was sampled before
    run_ahead: Callable[[Sequence[Request]], None] | None = None  # the next step's, to an engine that can
    save: Callable[[LoopState], None] = lambda state: None
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
        self.folder.truncate_after(self.state.step)
        self._evaluated = {(row["step"], row["split"]) for row in self.folder.eval.rows()}
        self._spool = Spool(self.folder.path / "inflight.jsonl.zst")
        self._saved_step, self._between_steps = self.state.step, False
        self._counted, self._told = sum(self.counters, Counter()), set[str]()
        self._watch, self._given_up = watch_after(self.folder.metrics.rows()), False
        self.stage.engine.publish(self.trainer.adapters(), self.state.version)
        with StopSignals(self.plan.grace_s) as self._signals:
            try:
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
        if self._given_up:
            return Finished(state=self.state, why=Finish.COLLAPSED)
        why = Finish.TERMINATED if self._signals.received is signal.SIGTERM else Finish.INTERRUPTED
        return Finished(state=self.state, why=why)

    async def _train(self, signals: StopSignals) -> None:
        if self.plan.eval_at_start and self.state.step == 0:
            await signals.bounded(self._evaluate())
        while self.state.step < self.plan.steps and signals.received is None and not self._given_up:
            await signals.bounded(self._step())
            if self._due(self.plan.eval_every) and signals.received is None:
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
        played, num_spooled = await self._play(step, clock)
        groups = [item.group for item in played]
        clock.rollouts(played)
        drafted = None if self.drafting is None else self.drafting.end(groups, step, clock.rollout_s)
        credit = assign(
            groups,
            self.algorithm,
            min_verdicts=min(2, self.plan.group_size),
            answer_tokens=self.plan.answer_tokens,
        )
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
        row = step_row(
            groups,
            credit,
            batch,
            report,
            clock,
            solved_at=self.plan.solved_at,
            forward_flops=self.plan.forward_flops_per_token,
            backward_ratio=self.plan.backward_ratio,
            drafts=drafted.row if drafted else {},
        )
        counts = self._new_counts()
        row |= {"rollout/from_spool": float(num_spooled), **counts}
        row |= tool_rates(counts, row["rollout/trajectories"])
        self.state = replace(
            self.state,
            step=step,
            cursor=self.state.cursor + self.plan.prompts_per_step,
            version=version,
            empty_in_a_row=0 if credit.samples else self.state.empty_in_a_row + 1,
            totals=add_totals(self.state.totals, row),
        )
        self._between_steps = False
        self._report({**row, **self.state.totals}, groups, report, drafted)

    async def _play(self, step: int, clock: Clock) -> tuple[list[Played], int]:
        """The groups of the step in the order of the stream, and how many of them the spool had."""
        asks = self._asks(step, self.state.cursor)
        places = [address(ask, self.stage, self.state.version) for ask in asks]
        found = {
            i: group for i, ask in enumerate(asks) if (group := self._spool.take(places[i], ask)) is not None
        }
        missing = [i for i in range(len(asks)) if i not in found]

        def keep(index: int, item: Played) -> None:
            self._spool.put(places[missing[index]], item.group)

        if self.run_ahead is not None and step < self.plan.steps:
            self.run_ahead(self._next_requests(step))
        fresh = await play(self.stage, [asks[i] for i in missing], keep)
        played = dict(zip(missing, fresh, strict=True)) | {
            i: Played(group=group, generated_at=clock.start, graded_at=clock.start)
            for i, group in found.items()
        }
        return [played[i] for i in range(len(asks))], len(found)

    def _asks(self, step: int, first: int) -> list[Ask]:
        """The groups of ``step``, whose prompts begin at ``first`` in the stream."""
        return [
            Ask(
                prompt=self.tasks.prompt(index),
                seed=(self.plan.seed, step, index),
                group_size=self.plan.group_size,
                step=step,
            )
            for index in range(first, first + self.plan.prompts_per_step)
        ]

    def _next_requests(self, step: int) -> list[Request]:
        """What the first turns of the step after ``step`` will ask of the engine; others are not known."""
        coming = self._asks(step + 1, self.state.cursor + self.plan.prompts_per_step)
        made = (
            first_request(self.stage, ask.prompt, (*ask.seed, member))
            for ask in coming
            for member in range(ask.group_size)
        )
        return [request for request in made if request is not None]

    def _pack(self, credit: Credit) -> Batch:
        return pack(
            credit.samples,
            credit.weights,
            tokens_per_microbatch=self.plan.tokens_per_microbatch,
            min_microbatches=self.plan.minibatches,
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
        self.folder.ledger.append(ledger_row(step, row))
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
        self._given_up = self.plan.stop_on_collapse and self._watch.collapsed and not before
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
        for evaluation in self.evaluations:
            if (self.state.step, evaluation.split) not in self._evaluated:
                row = await evaluate(self.stage, evaluation, self.state.step)
                row |= self._new_counts()
                if self.drafting is not None:
                    self.drafting.forget(evaluation.prompts)
                self.folder.eval.append(row)
                self.on_eval(row)

    def _due(self, every: int) -> bool:
        return self.state.step == self.plan.steps or (every > 0 and self.state.step % every == 0)

    def _checkpoint(self) -> None:
        if self.state.step > self._saved_step:
            self.save(self.state)
            self._saved_step = self.state.step
            self._spool.forget(self.state.step)

    def _no_signal(self) -> str:
        return (
            f"{self.state.empty_in_a_row} steps in a row had nothing to learn from; see groups/dropped and "
            f"faults in {self.folder.metrics.path.name}, then change the task's difficulty or mend the reward"
        )
