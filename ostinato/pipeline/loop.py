"""The loop: one policy, one stream of prompts, everything that happens between them.

    tasks -> feed: play -> credit -> pack -> trainer.step -> engine.publish      (a step)
               |                                                |
        spool, drafting                         metrics, ledger, trajectories; every k steps evaluate and save

Steps are numbered from 1; ``LoopState.step`` counts the finished ones and is all the history there is.
Randomness is addressed by (seed, round, index of the prompt in the stream, sample), so a run resumed from
``LoopState`` draws what the interrupted one would have drawn; groups that it had already finished are read
back from the spool. The loop prints nothing: it logs, and calls its ``Observer``.

With ``pipeline.overlap`` a step trains in a thread while groups play on, and what it learned is published
while they do: PipelineRL (arXiv 2509.19128, algorithm 2). The buffer decides what is admitted and trained on.
Every admitted group is trained on once, dropped by a rule that counts it, or still in flight, even after a
kill; every step asserts this.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.routing import Misaligned
from ostinato.every import spent_in_steps
from ostinato.observe.ledger import Ledger
from ostinato.observe.timeline import Kind
from ostinato.pipeline.account import Clock, add_totals
from ostinato.pipeline.buffer import AdmissionRule, RolloutBuffer, Rounds, TrainBatch, find_solved
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.evaluate import Evaluation, Scores
from ostinato.pipeline.failed import RewardFails
from ostinato.pipeline.forgetting import Forgetting
from ostinato.pipeline.recorder import Learned, StepRecorder, check_ages, prepare
from ostinato.pipeline.signals import Abandoned, StopSignals, Watchdog
from ostinato.pipeline.spool import Spool
from ostinato.pipeline.state import (
    Finish,
    Finished,
    InProcess,
    LoopState,
    Observer,
    Plan,
    Silent,
    Workers,
    nothing_to_learn,
)
from ostinato.protocols import MetricWriter, Tasks, Timed, Trainer
from ostinato.rollout.rollout import RolloutContext, RolloutResult
from ostinato.run import RunFolder
from ostinato.threads import in_thread
from ostinato.types import Group

logger = logging.getLogger(__name__)
EVERYTHING_SOLVED = (
    "every prompt is solved for good, so nothing is left to sample; more or harder tasks would go on, or "
    "rollout.solved_for_good = 0"
)
TRAINER = "trainer"  # the worker that the loop is where it trains itself


@dataclass(kw_only=True)
class Loop:
    """A run, assembled. ``await loop.run()`` trains until ``trainer.steps`` are done or a signal stops it.

    ``save`` writes a checkpoint of the trainer and of the state it is given, and returns the step of the
    oldest one that is kept: the spool has what came after it. It is called every ``checkpoint_every`` steps
    and whenever the loop ends in a way that it can foresee.
    """

    plan: Plan
    stage: RolloutContext
    tasks: Tasks
    trainer: Trainer
    algorithm: Algorithm
    folder: RunFolder
    state: LoopState = field(default_factory=LoopState)
    evaluations: Sequence[Evaluation] = ()
    observer: Observer = field(default_factory=Silent)
    workers: Workers = field(default_factory=InProcess)
    writers: Sequence[MetricWriter] = ()  # beside metrics.jsonl
    ledger: Ledger | None = None  # None: one without price and devices
    counters: Sequence[Counter[str]] = ()  # of the grader, the tools ...: a row has what a step added
    span_sources: Sequence[Timed] = ()  # beside the loop itself, whose spans are those of ``worker``
    worker: str = TRAINER  # another name: the trainer is elsewhere, and has its own
    forgetting: Forgetting | None = None  # what the policy could do before, looked at while it trains
    drafting: Drafting | None = None  # where the engine verifies drafts from what was sampled before
    save: Callable[[LoopState], int] = lambda state: state.step
    keep: Callable[[int], None] = lambda step: None  # keeps the weights that were scored after a step

    def __post_init__(self) -> None:
        check_group_size(self.plan.recipe.rollout.group_size, self.algorithm.baseline, self.algorithm.scale)

    async def run(self) -> Finished:
        """Raises NoTrainableSamples when ``max_empty_steps`` steps in a row had nothing to learn from,
        RewardFails when a reward function has never worked, and Stalled when there was no progress for
        ``watch_s``. What the engine and the trainer raise passes through, after a checkpoint unless the
        trainer is between two steps. A batch that the trainer refuses as ``Misaligned`` is removed from the
        spool, so a resumed run plays it again; mostly it has not changed the trainer."""
        self._ledger = self.ledger or Ledger(folder=self.folder)
        with self._ledger.session(self.state.step):
            finished = await self._run()
            self._ledger.why = finished.why
        return finished

    def _open(self) -> None:
        """Create what lives as long as the run."""
        self.folder.truncate_after(self.state.step)
        self._spool = Spool(self.folder.path / "inflight.jsonl.zst", self._ledger, self.state.step)
        self._feed = new_buffer(
            self.plan,
            self.state,
            tasks=self.tasks,
            stage=self.stage,
            spool=self._spool,
            on_progress=lambda: self._dog.on_progress(),
        )
        if changed := recall(self._feed, self.state, self._spool):
            logger.info(changed)
        if self.forgetting is not None:
            self.forgetting.open()
        self._saved_step, self._between_steps = self.state.step, False
        self._recorder = StepRecorder(
            plan=self.plan,
            folder=self.folder,
            ledger=self._ledger,
            observer=self.observer,
            workers=self.workers,
            writers=self.writers,
            counters=self.counters,
            span_sources=self.span_sources,
        )
        self._scores = Scores(
            stage=self.stage,
            evaluations=self.evaluations,
            recorder=self._recorder,
            drafting=self.drafting,
            keep=self.keep,
            on_progress=lambda: self._dog.on_progress(),
        )
        self._why = self._at_its_end()

    async def _run(self) -> Finished:
        self._open()
        self.stage.engine.publish(self.trainer.adapters(), self.state.version)
        with StopSignals(self.plan.grace_s) as self._signals, self._watchdog():
            try:
                await self._train(self._signals)
            except Abandoned:
                self._ledger.lose()
                logger.warning(
                    f"what followed step {self.state.step} was abandoned: "
                    f"it was not done {self.plan.grace_s:g} s after SIGTERM"
                )
            except Misaligned as refused:
                self._spool.reject(self._feed.addresses)
                if not (refused.steps_taken and self._between_steps):  # else some weights have changed
                    self._save_what_there_is()
                raise
            except RewardFails:  # fixed, it judges these groups anew
                self._spool.reject(self._feed.addresses)
                raise
            except OSError:  # a row may be missing, which a checkpoint must not be ahead of
                raise
            except Exception:
                if not self._between_steps:
                    self._save_what_there_is()
                raise
            finally:
                await self._feed.close()
            self._checkpoint()
        ended = Finish.DONE if self.state.step >= self.plan.recipe.trainer.steps else self._why
        return Finished(state=self.state, why=ended or Finish.of(self._signals.received))

    async def _train(self, signals: StopSignals) -> None:
        if self.plan.recipe.pipeline.overlap and self.drafting is not None:
            self.drafting.begin()
        if self.plan.recipe.eval.at_start or self.state.step:
            await signals.bounded(self._evaluate())
        if self.forgetting is not None and not self.state.step:
            await signals.bounded(self._scores.remember(self.forgetting))
        while self._goes_on:
            await signals.bounded(self._step())
            if signals.received is None:
                await signals.bounded(self._evaluate())
            if self._due(self.plan.recipe.trainer.checkpoint_every):
                self._checkpoint()
            if self.state.empty_in_a_row >= self.plan.max_empty_steps:
                counted = sum(self.counters, Counter[str]())
                raise nothing_to_learn(self.state, self.folder.metrics.path, counted)
        if signals.limited:
            self._doing = f"what is on its way after step {self.state.step} may end"
            await signals.bounded(self._feed.drain())

    @property
    def _goes_on(self) -> bool:
        return (
            self.state.step < self.plan.recipe.trainer.steps
            and self._signals.received is None
            and self._why is None
        )

    async def _step(self) -> None:
        """Play, learn, publish, report. Nothing after the training awaits: a step happens or it does not."""
        step, overlap = self.state.step + 1, self.plan.recipe.pipeline.overlap
        clock = Clock(step, self._ledger.clock, self.worker)
        self._doing = f"step {step} waits for its groups"
        if self.drafting is not None and not overlap:
            self.drafting.begin()
        with clock.doing("rollout" if overlap else "", Kind.WAIT):
            due = await self._feed.batch(self.state.step, self.state.version)
        groups = [set_step(step, item.group) for item in due.batch]
        failures = self._recorder.failures
        failures.see(step, groups, first=step == 1)
        failures.check_graded(groups, step, self.plan.recipe.trainer.steps, self.algorithm.reward_coef)
        learned = await self._learned(groups, clock)
        version = self.state.version
        if learned.report is not None:
            version += 1
            with clock.doing("publish" if overlap else "train", Kind.PUBLISH):
                self.stage.engine.publish(self.trainer.adapters(), version)
        fresh = self._feed.fresh()
        if not overlap:
            clock.rollouts(fresh)
        drafted = self._drafted(fresh, clock)
        row = self._recorder.record(clock, self._feed, groups, fresh, due, learned, drafted)
        self._end_step(step, version, due, learned, row)
        row |= self.state.totals
        ended = self._why is not None
        self._why = self._recorder.report(step, row, groups, learned, ended) or self._why
        self._why = self._why or self._at_its_end()
        if overlap and self._goes_on:
            self._feed.admit(step, version)
        self._dog.on_progress()

    def _drafted(self, ended: Sequence[RolloutResult], clock: Clock) -> dict[str, float]:
        """The draft metrics of the step; answers that have ended are stored for later drafts."""
        if self.drafting is None:
            return {}
        # where rollouts go on all the time a drafter has the whole step to work in
        seconds = clock.read()[0] if self.plan.recipe.pipeline.overlap else clock.seconds["rollout"]
        drafted = self.drafting.end([item.group for item in ended], self.state.step + 1, seconds)
        if self.plan.recipe.pipeline.overlap:
            self.drafting.begin()
        return drafted

    async def _learned(self, groups: Sequence[Group], clock: Clock) -> Learned:
        """Train on the groups: in a thread where workers need the event loop meanwhile."""
        self._doing = f"step {self.state.step + 1} is training"
        if self.plan.recipe.pipeline.overlap or self._ledger.terms.pools:
            with self._signals.finishing():
                return await in_thread(lambda: self._learn(groups, clock))
        with self._signals.blocking():
            return self._learn(groups, clock)

    def _learn(self, groups: Sequence[Group], clock: Clock) -> Learned:
        learned = prepare(groups, self.plan, self.algorithm, clock, self.state.version)
        if learned.batch is None:
            return learned
        check_ages(learned.batch, self.state.step + 1, self.plan.recipe.pipeline.staleness)
        self._between_steps = True
        with clock.doing("train", Kind.TRAIN if self.worker == TRAINER else Kind.WAIT):
            try:
                report = self.trainer.step(learned.batch)
            except Exception:
                self._between_steps = not self.workers.trainer_consistent()
                raise
        if report.mismatch is not None:
            clock.measured(report.mismatch["seconds"])
        watch, step = self.forgetting, self.state.step + 1
        if (look := watch and watch.look(step, self.state.totals, learned.batch)) is not None:
            clock.seconds["measure"] += look.cost["seconds"]
        return replace(learned, report=report, look=look)

    def _end_step(
        self, step: int, version: int, due: TrainBatch, learned: Learned, row: dict[str, float]
    ) -> None:
        """Advance the state by the finished step, and add the new state's metrics to ``row``."""
        self._feed.trained()
        before, gone = self.state, learned.credit.dropped_groups
        dropped = Counter(before.dropped) + gone
        self.state = replace(
            before,
            step=step,
            version=version,
            cursor=self._feed.cursor,
            retired=self._feed.retired,
            empty_in_a_row=0 if learned.credit.samples else before.empty_in_a_row + 1,
            ahead=self._feed.ahead,
            admitted=before.admitted + due.num_admitted,
            trained=before.trained + len(due.batch) - gone.total(),
            dropped=dict(sorted(dropped.items())),
            totals=add_totals(before.totals, row, self._ledger.terms),
        )
        self._between_steps = False
        row |= self.state.left(before, len(self.tasks)) if self.plan.recipe.rollout.solved_for_good else {}
        row |= self.state.accounted()
        if due.num_anew:
            row["groups/played_anew"] = float(due.num_anew)

    def _at_its_end(self) -> Finish | None:
        """Why the run ends now (SPENT, or SOLVED: every prompt has left the stream); None: it goes on."""
        if self.plan.budget.share(spent_in_steps(self.state.step, self.state.totals)) >= 1:
            return Finish.SPENT
        if not self._feed.is_dry:
            return None
        logger.info(f"step {self.state.step}: {EVERYTHING_SOLVED}")
        return Finish.SOLVED

    @contextmanager
    def _watchdog(self) -> Iterator[None]:
        """In here a wait without progress ends with ``Stalled``."""
        self._doing = "nothing has begun"
        self._dog = Watchdog(
            self.plan.recipe.pipeline.watch_s,
            self._signals,
            self.workers.progress,
            lambda: f"{self._doing}; on the way for longest: {self._feed.waiting()}",
        )
        watching = asyncio.create_task(self._dog.watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _evaluate(self) -> None:
        """Score the sets that are due: all of them at the end of a run. After a score of the main set, ask
        the observer whether to stop."""
        self._doing = f"the evaluation after step {self.state.step}"
        await self._scores.score(self.state, ended=self._due(0))
        if not self.state.step or not self._scores.is_new(self.state.step):
            return
        if self.observer.should_stop(self.state.step) and self._why is None:
            self._why = Finish.ENOUGH
            await self._scores.score(self.state, ended=self._due(0))

    def _due(self, every: int) -> bool:
        ended = self.state.step == self.plan.recipe.trainer.steps or self._why is not None
        return ended or (every > 0 and self.state.step % every == 0)

    def _checkpoint(self) -> None:
        if self.state.step > self._saved_step:
            clock = Clock(self.state.step, self._ledger.clock, self.worker)
            with clock.doing("", Kind.SAVE):
                oldest = self.save(self.state)
            self._recorder.spans += clock.spans
            self._saved_step = self.state.step
            self._spool.forget(oldest)
            self._dog.on_progress()

    def _save_what_there_is(self) -> None:
        """Checkpoint after an error. A failure to save is only logged: the first error is to be raised."""
        try:
            self._checkpoint()
        except (OSError, RuntimeError) as error:
            logger.warning(f"step {self.state.step} could not be saved: {error}")


def set_step(step: int, group: Group) -> Group:
    """The group, with ``step`` set to the step that trains on it."""
    return group if group.step == step else replace(group, step=step)


def new_buffer(
    plan: Plan,
    state: LoopState,
    *,
    tasks: Tasks,
    stage: RolloutContext,
    spool: Spool,
    on_progress: Callable[[], None],
) -> RolloutBuffer:
    """The buffer of a run that stands at ``state``."""

    def leaving(groups: Sequence[Group], retired: Sequence[str]) -> Sequence[str]:
        rule = {"share": plan.recipe.rollout.solved_for_good, "solved_at": plan.solved_at}
        return find_solved(groups, **rule, retired=frozenset(retired))

    rounds = Rounds(
        tasks=tasks,
        stage=stage,
        spool=spool,
        prompts=plan.recipe.rollout.prompts_per_step,
        group_size=plan.recipe.rollout.group_size,
        seed=plan.recipe.seed,
        staleness=plan.recipe.pipeline.staleness,
    )
    return RolloutBuffer(
        rule=AdmissionRule(
            prompts=plan.recipe.rollout.prompts_per_step,
            staleness=plan.recipe.pipeline.staleness,
            steps=plan.recipe.trainer.steps,
            overlap=plan.recipe.pipeline.overlap,
        ),
        rounds=rounds,
        cursor=state.cursor,
        retired=state.retired,
        leaving=leaving if plan.recipe.rollout.solved_for_good else None,
        on_progress=on_progress,
    )


def recall(buffer: RolloutBuffer, state: LoopState, spool: Spool) -> str:
    """Restore the groups that an earlier process had in flight. Those that the spool does not have are played
    again in their places by the current policy; prompts that lost groups had retired stay retired. Returns a
    sentence where that changes the run, else ""."""
    lost = [one.version for one in buffer.recall(state.ahead, state.step, state.version)]
    if not (gone := sorted({version for version in lost if version != state.version})):
        return ""
    who = f"policy {gone[0]}" if len(gone) == 1 else f"policies {gone[0]} to {gone[-1]}"
    return (
        f"step {state.step}: of {len(state.ahead)} groups that were on their way "
        f"{spool.path.name} does not have {len(lost)}, which {who} sampled; policy "
        f"{state.version} plays them anew, so this is not quite the run that was interrupted"
    )
