"""The loop of a run: a policy, a stream of prompts, and all steps between them.

    tasks -> feed: play -> credit -> pack -> trainer.step -> engine.publish      (a step)
               |                                                |
        spool, drafting                         metrics, ledger, trajectories; every k steps evaluate and save

Steps are numbered from 1; ``LoopState.step`` counts the finished ones, and no other history is used.
Randomness is addressed by (seed, round, index of the prompt in the stream, sample), so a run resumed from
``LoopState`` draws the same noise as the interrupted run; groups that this run had finished are read back
from the spool. The loop prints nothing: it logs, and calls its ``Observer``.

With ``pipeline.overlap`` a step trains in a thread while groups are played, and its policy is published
during their play: PipelineRL (arXiv 2509.19128, algorithm 2). The buffer decides which groups are admitted
and trained on. Every admitted group is trained on once, dropped by a rule that counts it, or still in flight,
even after a kill; every step asserts this.
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
from ostinato.pipeline.recorder import StepRecorder, TrainResult, check_ages, prepare_training
from ostinato.pipeline.signals import Abandoned, SignalRelay, StopSignals, Watchdog
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
    make_untrainable_error,
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
TRAINER = "trainer"  # name of the loop as a worker, where it trains itself


@dataclass(kw_only=True)
class Loop:
    """An assembled run. ``await loop.run()`` trains until the steps are done, or something else ends it
    (Finish).

    ``save`` writes a checkpoint of the trainer and of a state, and returns the step of the oldest checkpoint
    that is kept: the spool has the groups after it. It is called every ``checkpoint_every`` steps and
    whenever the loop ends in a way that it can foresee.
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
    relay: SignalRelay | None = None  # of signals, where the loop is not in the main thread
    writers: Sequence[MetricWriter] = ()  # beside metrics.jsonl
    ledger: Ledger | None = None  # None: a ledger without price and devices
    counters: Sequence[Counter[str]] = ()  # of grader, tools ...: a row has their increments in a step
    span_sources: Sequence[Timed] = ()  # besides the loop itself, whose spans are those of ``worker``
    worker: str = TRAINER  # another name: the trainer is elsewhere, and has its own spans
    forgetting: Forgetting | None = None  # tests old abilities of the policy during training
    drafting: Drafting | None = None  # where the engine verifies drafts from earlier answers
    save: Callable[[LoopState], int] = lambda state: state.step
    keep: Callable[[int], None] = lambda step: None  # stores the weights that were scored after a step

    def __post_init__(self) -> None:
        check_group_size(self.plan.recipe.rollout.group_size, self.algorithm.baseline, self.algorithm.scale)

    async def run(self) -> Finished:
        """Train until the run ends. Raises NoTrainableSamples when ``max_empty_steps`` steps in a row had
        nothing to learn from, RewardFails when a reward function has never worked, StalenessViolation, and
        Stalled when there was no progress for ``watch_s``. Errors of engine and trainer are raised
        unchanged, after a checkpoint unless the trainer is within a step. A batch that the trainer refuses
        as ``Misaligned`` is removed from the spool, so a resumed run plays it again; mostly it has not
        changed the trainer."""
        self._ledger = self.ledger or Ledger(folder=self.folder)
        with self._ledger.session(self.state.step):
            finished = await self._run()
            self._ledger.why = finished.why
        return finished

    def _create_parts(self) -> None:
        """Delete rows of later steps, recall the groups in flight, and create what is used until the end."""
        self.folder.truncate_after(self.state.step)
        self._spool = Spool(self.folder.path / "inflight.jsonl.zst", self._ledger, self.state.step)
        self._buffer = new_buffer(
            self.plan,
            self.state,
            tasks=self.tasks,
            stage=self.stage,
            spool=self._spool,
            on_progress=lambda: self._watchdog.on_progress(),  # a lambda: ``_watch_progress`` makes it later
        )
        if message := recall_groups(self._buffer, self.state, self._spool):
            logger.info(message)
        if self.forgetting is not None:
            self.forgetting.open()
        self._saved_step, self._is_training = self.state.step, False
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
            on_progress=lambda: self._watchdog.on_progress(),
        )
        self._finish = self._check_end()

    async def _run(self) -> Finished:
        self._create_parts()
        self.stage.engine.publish(self.trainer.adapters(), self.state.version)
        with StopSignals(self.plan.grace_s, relay=self.relay) as self._signals, self._watch_progress():
            try:
                await self._train(self._signals)
            except Abandoned:
                self._ledger.lose()
                logger.warning(
                    f"what followed step {self.state.step} was abandoned: "
                    f"it was not done {self.plan.grace_s:g} s after SIGTERM"
                )
            except Misaligned as error:
                self._spool.reject(self._buffer.addresses)
                if not (error.steps_taken and self._is_training):  # else some weights have changed
                    self._try_checkpoint()
                raise
            except RewardFails:  # after a fix these groups are judged again
                self._spool.reject(self._buffer.addresses)
                raise
            except OSError:  # a row may be missing, and a checkpoint must not be ahead of the rows
                raise
            except Exception:
                if not self._is_training:
                    self._try_checkpoint()
                raise
            finally:
                await self._buffer.close()
            self._checkpoint()
        finish = Finish.DONE if self.state.step >= self.plan.recipe.trainer.steps else self._finish
        return Finished(state=self.state, why=finish or Finish.of(self._signals.received))

    async def _train(self, signals: StopSignals) -> None:
        if self.plan.recipe.pipeline.overlap and self.drafting is not None:
            self.drafting.begin()
        if self.plan.recipe.eval.at_start or self.state.step:
            await signals.run_bounded(self._evaluate())
        if self.forgetting is not None and not self.state.step:
            await signals.run_bounded(self._scores.remember(self.forgetting))
        while self._has_next:
            await signals.run_bounded(self._step())
            if signals.received is None:
                await signals.run_bounded(self._evaluate())
            if self._is_due(self.plan.recipe.trainer.checkpoint_every):
                self._checkpoint()
            if self.state.empty_in_a_row >= self.plan.max_empty_steps:
                counts = sum(self.counters, Counter[str]())
                raise make_untrainable_error(self.state, self.folder.metrics.path, counts)
        if signals.is_limited:
            self._activity = f"what is on its way after step {self.state.step} may end"
            await signals.run_bounded(self._buffer.drain())

    @property
    def _has_next(self) -> bool:
        return (
            self.state.step < self.plan.recipe.trainer.steps
            and self._signals.received is None
            and self._finish is None
        )

    async def _step(self) -> None:
        """Play, train, publish, report, admit. Nothing awaits after the training: a step is done or not at
        all."""
        step, overlap = self.state.step + 1, self.plan.recipe.pipeline.overlap
        clock = Clock(step, self._ledger.clock, self.worker)
        self._activity = f"step {step} waits for its groups"
        if self.drafting is not None and not overlap:
            self.drafting.begin()
        with clock.track("rollout" if overlap else "", Kind.WAIT):
            train_batch = await self._buffer.batch(self.state.step, self.state.version)
        groups = [set_step(step, item.group) for item in train_batch.batch]
        failures = self._recorder.failures
        failures.see(step, groups, is_first=step == 1)
        failures.check_graded(groups, step, self.plan.recipe.trainer.steps, self.algorithm.reward_coef)
        outcome = await self._run_training(groups, clock)
        version = self.state.version
        if outcome.report is not None:
            version += 1
            with clock.track("publish" if overlap else "train", Kind.PUBLISH):
                self.stage.engine.publish(self.trainer.adapters(), version)
        results = self._buffer.take_fresh()
        if not overlap:
            clock.record_rollouts(results)
        draft_metrics = self._make_draft_metrics(results, clock)
        row = self._recorder.record(clock, self._buffer, groups, results, train_batch, outcome, draft_metrics)
        self._end_step(step, version, train_batch, outcome, row)
        row |= self.state.totals
        has_ended = self._finish is not None
        self._finish = self._recorder.report(step, row, groups, outcome, has_ended) or self._finish
        self._finish = self._finish or self._check_end()
        if overlap and self._has_next:
            self._buffer.admit(step, version)
        self._watchdog.on_progress()

    def _make_draft_metrics(self, results: Sequence[RolloutResult], clock: Clock) -> dict[str, float]:
        """Return the draft metrics of the step, and store its answers; with overlap the next counts begin."""
        if self.drafting is None:
            return {}
        # where rollouts overlap with training a drafter works during the whole step
        seconds = clock.read()[0] if self.plan.recipe.pipeline.overlap else clock.seconds["rollout"]
        metrics = self.drafting.end([item.group for item in results], self.state.step + 1, seconds)
        if self.plan.recipe.pipeline.overlap:
            self.drafting.begin()
        return metrics

    async def _run_training(self, groups: Sequence[Group], clock: Clock) -> TrainResult:
        """Train on the groups, in a thread if workers need the event loop meanwhile."""
        self._activity = f"step {self.state.step + 1} is training"
        if self.plan.recipe.pipeline.overlap or self._ledger.terms.pools:
            with self._signals.mark_finishing():
                return await in_thread(lambda: self._train_on(groups, clock))
        with self._signals.mark_blocking():
            return self._train_on(groups, clock)

    def _train_on(self, groups: Sequence[Group], clock: Clock) -> TrainResult:
        outcome = prepare_training(groups, self.plan, self.algorithm, clock, self.state.version)
        if outcome.batch is None:
            return outcome
        check_ages(outcome.batch, self.state.step + 1, self.plan.recipe.pipeline.staleness)
        self._is_training = True
        with clock.track("train", Kind.TRAIN if self.worker == TRAINER else Kind.WAIT):
            try:
                report = self.trainer.step(outcome.batch)
            except Exception:
                self._is_training = not self.workers.trainer_consistent()
                raise
        if report.mismatch is not None:
            clock.move_measuring(report.mismatch["seconds"])
        watch, step = self.forgetting, self.state.step + 1
        if (look := watch and watch.look(step, self.state.totals, outcome.batch)) is not None:
            clock.seconds["measure"] += look.cost["seconds"]
        return replace(outcome, report=report, look=look)

    def _end_step(
        self, step: int, version: int, train_batch: TrainBatch, outcome: TrainResult, row: dict[str, float]
    ) -> None:
        """Free the step's groups, advance the state, and add the new state's metrics to ``row``."""
        self._buffer.end_step()
        old, drops = self.state, outcome.credit.dropped_groups
        dropped = Counter(old.dropped) + drops
        self.state = replace(
            old,
            step=step,
            version=version,
            cursor=self._buffer.cursor,
            retired=self._buffer.retired,
            empty_in_a_row=0 if outcome.credit.samples else old.empty_in_a_row + 1,
            ahead=self._buffer.ahead,
            admitted=old.admitted + train_batch.num_admitted,
            trained=old.trained + len(train_batch.batch) - drops.total(),
            dropped=dict(sorted(dropped.items())),
            totals=add_totals(old.totals, row, self._ledger.terms),
        )
        self._is_training = False
        row |= (
            self.state.count_retired(old, len(self.tasks)) if self.plan.recipe.rollout.solved_for_good else {}
        )
        row |= self.state.account_groups()
        if train_batch.num_anew:
            row["groups/played_anew"] = float(train_batch.num_anew)

    def _check_end(self) -> Finish | None:
        """Return why the run ends now, or None: SPENT, or SOLVED, if all prompts have left."""
        if self.plan.budget.share(spent_in_steps(self.state.step, self.state.totals)) >= 1:
            return Finish.SPENT
        if not self._buffer.is_dry:
            return None
        logger.info(f"step {self.state.step}: {EVERYTHING_SOLVED}")
        return Finish.SOLVED

    @contextmanager
    def _watch_progress(self) -> Iterator[None]:
        """Run a watchdog within the context, which ends a wait without progress with ``Stalled``."""
        self._activity = "nothing has begun"
        self._watchdog = Watchdog(
            self.plan.recipe.pipeline.watch_s,
            self._signals,
            self.workers.progress,
            lambda: f"{self._activity}; on the way for longest: {self._buffer.describe_waiting()}",
        )
        task = asyncio.create_task(self._watchdog.watch())
        try:
            yield
        finally:
            task.cancel()

    async def _evaluate(self) -> None:
        """Score the sets that are due, at the end of a run all. After a score of the main set the observer
        may stop the run, and all sets are scored."""
        self._activity = f"the evaluation after step {self.state.step}"
        await self._scores.score(self.state, ended=self._is_due(0))
        if not self.state.step or not self._scores.is_new(self.state.step):
            return
        if self.observer.should_stop(self.state.step) and self._finish is None:
            self._finish = Finish.ENOUGH
            await self._scores.score(self.state, ended=self._is_due(0))

    def _is_due(self, every: int) -> bool:
        is_end = self.state.step == self.plan.recipe.trainer.steps or self._finish is not None
        return is_end or (every > 0 and self.state.step % every == 0)

    def _checkpoint(self) -> None:
        if self.state.step > self._saved_step:
            clock = Clock(self.state.step, self._ledger.clock, self.worker)
            with clock.track("", Kind.SAVE):
                oldest = self.save(self.state)
            self._recorder.spans += clock.spans
            self._saved_step = self.state.step
            self._spool.forget(oldest)
            self._watchdog.on_progress()

    def _try_checkpoint(self) -> None:
        """Checkpoint after an error; an OSError or RuntimeError of that is logged, and not raised."""
        try:
            self._checkpoint()
        except (OSError, RuntimeError) as error:
            logger.warning(f"step {self.state.step} could not be saved: {error}")


def set_step(step: int, group: Group) -> Group:
    """Return the group with ``step`` set to the step that trains on it."""
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
    """Make the buffer of a run at ``state``."""

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


def recall_groups(buffer: RolloutBuffer, state: LoopState, spool: Spool) -> str:
    """Restore the groups that an earlier process had in flight. Groups that the spool does not have are
    played again in their places by the current policy; prompts that lost groups had retired stay retired.
    Returns a sentence if another policy plays some of them, which changes the run; else ""."""
    lost_versions = [admission.version for admission in buffer.recall(state.ahead, state.step, state.version)]
    if not (versions := sorted({version for version in lost_versions if version != state.version})):
        return ""
    policies = f"policy {versions[0]}" if len(versions) == 1 else f"policies {versions[0]} to {versions[-1]}"
    return (
        f"step {state.step}: of {len(state.ahead)} groups that were on their way "
        f"{spool.path.name} does not have {len(lost_versions)}, which {policies} sampled; policy "
        f"{state.version} plays them anew, so this is not quite the run that was interrupted"
    )
