"""The loop: one policy, one stream of prompts, everything that happens between them.

    tasks -> feed: play -> credit -> pack -> trainer.step -> engine.publish      (a step)
               |                                                |
        spool, drafting                         metrics, ledger, trajectories; every k steps evaluate and save

Steps are numbered from 1; ``LoopState.step`` counts the finished ones and is all the history there is.
Randomness is addressed by (seed, round, index of the prompt in the stream, sample), so a run resumed from
``LoopState`` draws what the interrupted one would have drawn; groups that it had already finished are read
back from the spool. The loop prints nothing: it calls its ``Observer``.

With ``Plan.overlap`` a step trains in a thread while groups play on, and what it learned is published while
they do: PipelineRL (arXiv 2509.19128, algorithm 2). The feed says who is admitted and who is trained on. A
group that was admitted is trained on once, dropped by a rule that is counted, or on its way: also after a
kill, and asserted in every step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import pack
from ostinato.algo.routing import Misaligned
from ostinato.observe.ledger import POOL, Ledger
from ostinato.observe.stability import watch_after
from ostinato.observe.timeline import Kind, Span, kept, pool_of
from ostinato.pipeline.buffer import AdmissionRule, RolloutBuffer, TrainBatch
from ostinato.pipeline.credit import Credit, assign
from ostinato.pipeline.draft_metrics import Drafted, Drafting
from ostinato.pipeline.evaluate import Evaluation, due, evaluate_groups, spent_in_steps
from ostinato.pipeline.failed import Failures, RewardFails
from ostinato.pipeline.observer import InProcess, Observer, Silent, Workers
from ostinato.pipeline.rounds import Rounds
from ostinato.pipeline.signals import Abandoned, StopSignals, Watchdog, in_thread
from ostinato.pipeline.spool import Spool
from ostinato.pipeline.state import Finish, Finished, LoopState, NoTrainableSamples, Plan, StalenessViolation
from ostinato.pipeline.step_metrics import (
    Clock,
    add_totals,
    ages,
    busy_by_pool,
    evaluation_work,
    in_turn,
    pipeline_row,
    step_costs,
    step_row,
    step_work,
    token_counts,
    tool_rates,
    with_stale,
)
from ostinato.pipeline.stream import solved_for_good
from ostinato.protocols import MetricWriter, Tasks, Timed, Trainer
from ostinato.rollout.rollout import RolloutContext, RolloutResult
from ostinato.run import MAIN_SET, RunFolder, group_rows
from ostinato.types import Batch, Group, StepReport

TRAINER = "trainer"  # the worker that the loop is where it trains itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a step did with its groups; ``batch`` and ``report`` are None when there was nothing to learn
    from."""

    credit: Credit
    batch: Batch | None = None
    report: StepReport | None = None


@dataclass(kw_only=True)
class Loop:
    """A run, assembled. ``await loop.run()`` trains until ``plan.steps`` are done or a signal asks to stop.

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
    ledger: Ledger | None = None  # None: one that knows neither price nor devices
    counters: Sequence[Counter[str]] = ()  # of the grader, the tools ...: a row has what a step added
    span_sources: Sequence[Timed] = ()  # beside the loop itself, whose spans are those of ``worker``
    worker: str = TRAINER  # another name: the trainer is elsewhere, and tells its own
    drafting: Drafting | None = None  # where the engine verifies drafts from what was sampled before
    save: Callable[[LoopState], int] = lambda state: state.step

    def __post_init__(self) -> None:
        check_group_size(self.plan.group_size, self.algorithm.baseline, self.algorithm.scale)

    async def run(self) -> Finished:
        """Raises NoTrainableSamples when ``max_empty_steps`` steps in a row had nothing to learn from,
        RewardFails when a reward function has never worked, and Stalled when nothing has got on for
        ``watch_s``. What the engine and the trainer raise passes through, after a checkpoint unless the
        trainer is between two steps. A batch that it refuses as ``Misaligned`` is not spooled any more, so
        a resumed run plays it anew, and has mostly not changed the trainer."""
        self._books = self.ledger or Ledger(folder=self.folder)
        with self._books.session(self.state.step):
            finished = await self._run()
            self._books.why = finished.why
        return finished

    async def _run(self) -> Finished:
        self.folder.truncate_after(self.state.step)
        self._scored = {row.get("set"): row for row in self.folder.eval.rows()}  # the last of each set
        self._spool = Spool(self.folder.path / "inflight.jsonl.zst", self._books, self.state.step)
        self._feed = self._new_feed()
        self._recall()
        self._saved_step, self._between_steps = self.state.step, False
        self._row_at = time.perf_counter()
        self._counted = sum(self.counters, Counter())
        self._failures = Failures(self.folder, self.observer.on_note)
        self._spans, self._over = list[Span](), dict[str, dict[str, float]]()
        self._watch, self._why = watch_after(self.folder.metrics.rows()), self._nobody_left()
        self.stage.engine.publish(self.trainer.adapters(), self.state.version)
        with StopSignals(self.plan.grace_s) as self._signals, self._watchdog():
            try:
                with self._books.work():
                    await self._train(self._signals)
            except Abandoned:
                self.observer.on_note(
                    f"what followed step {self.state.step} was abandoned: "
                    f"it was not done {self.plan.grace_s:g} s after {self._signals.name}"
                )
            except Misaligned as refused:
                self._spool.reject(self._feed.addresses)
                if not (refused.steps_taken and self._between_steps):  # else some weights have changed
                    self._save_what_there_is()
                raise
            except RewardFails:  # mended, it judges these groups anew
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
        if self.state.step == self.plan.steps:
            return Finished(state=self.state, why=Finish.DONE)
        if self._why is not None and (self._why is not Finish.REPLANNED or self._signals.received is None):
            return Finished(state=self.state, why=self._why)
        return Finished(state=self.state, why=Finish.of(self._signals.received))

    async def _train(self, signals: StopSignals) -> None:
        if self.plan.overlap and self.drafting is not None:
            self.drafting.begin()
        if self.plan.eval_at_start or self.state.step:
            await signals.bounded(self._evaluate())
        while self._goes_on:
            await signals.bounded(self._step())
            if signals.received is None:
                await signals.bounded(self._evaluate())
            if self._due(self.plan.checkpoint_every):
                self._checkpoint()
                await signals.bounded(self._replan())
            if self.state.empty_in_a_row >= self.plan.max_empty_steps:
                raise NoTrainableSamples(self._no_signal())
        if signals.limited or self._why is Finish.REPLANNED:
            self._doing = f"what is on its way after step {self.state.step} may end"
            await signals.bounded(self._feed.drain())

    @property
    def _goes_on(self) -> bool:
        return self.state.step < self.plan.steps and self._signals.received is None and self._why is None

    async def _step(self) -> None:
        """Play, learn, publish, report. Nothing after the training awaits: a step happens or it does not."""
        step, overlap = self.state.step + 1, self.plan.overlap
        clock = Clock(step, self._books.clock, self.worker)
        self._doing = f"step {step} waits for its groups"
        if self.drafting is not None and not overlap:
            self.drafting.begin()
        with clock.doing("rollout" if overlap else "", Kind.WAIT):
            taken = await self._feed.batch(self.state.step, self.state.version)
        groups, stale = ([self._of(step, item.group) for item in some] for some in (taken.batch, taken.stale))
        self._failures.see(step, groups, first=step == 1)
        learned = await self._learned(groups, clock)
        version = self.state.version
        if learned.report is not None:
            version += 1
            with clock.doing("publish" if overlap else "train", Kind.PUBLISH):
                self.stage.engine.publish(self.trainer.adapters(), version)
        learned = replace(learned, credit=with_stale(learned.credit, stale, taken.num_stale))
        fresh = self._feed.fresh()
        if not overlap:
            clock.rollouts(fresh)
        drafted = self._drafted(fresh, clock)
        row = self._booked(clock, [*groups, *stale], fresh, taken, learned, drafted)
        self._end_step(step, version, taken, learned, row)
        self._report({**row, **self.state.totals}, groups, learned.report, drafted)
        self._why = self._why or self._nobody_left()
        if overlap and self._goes_on:
            self._feed.admit(step, version)
        self._dog.on_progress()

    def _drafted(self, ended: Sequence[RolloutResult], clock: Clock) -> Drafted | None:
        """The books of drafts, and what has ended is remembered."""
        if self.drafting is None:
            return None
        # where rollouts go on all the time a drafter has the whole step to work in
        seconds = clock.read()[0] if self.plan.overlap else clock.rollout_s
        drafted = self.drafting.end([item.group for item in ended], self.state.step + 1, seconds)
        if self.plan.overlap:
            self.drafting.begin()
        return drafted

    async def _learned(self, groups: Sequence[Group], clock: Clock) -> Learned:
        """Train on the groups: in a thread where workers need the event loop meanwhile."""
        self._doing = f"step {self.state.step + 1} is training"
        if self.plan.overlap or self._books.terms.pools:
            with self._signals.finishing():
                return await in_thread(lambda: self._learn(groups, clock))
        with self._signals.blocking():
            return self._learn(groups, clock)

    def _learn(self, groups: Sequence[Group], clock: Clock) -> Learned:
        credit = assign(
            groups,
            self.algorithm,
            min_verdicts=min(2, self.plan.group_size),
            answer_tokens=self.plan.answer_tokens,
            solved_at=self.plan.solved_at,
        )
        if not credit.samples:
            return Learned(credit=credit)
        with clock.doing("train", Kind.PACK):
            batch = pack(
                credit.samples,
                credit.weights,
                tokens_per_microbatch=self.plan.tokens_per_microbatch,
                minibatches=self.plan.minibatches,
                version=self.state.version,
            )
        self._check_ages(batch)
        self._between_steps = True
        with clock.doing("train", Kind.TRAIN if self.worker == TRAINER else Kind.WAIT):
            try:
                report = self.trainer.step(batch)
            except Exception:
                self._between_steps = not self.workers.trainer_consistent()
                raise
        if report.mismatch is not None:
            clock.measured(report.mismatch["seconds"])
        return Learned(credit=credit, batch=batch, report=report)

    def _check_ages(self, batch: Batch) -> None:
        """The bound of the feed once more, on the tokens themselves."""
        wrong = {age: n for age, n in ages(batch).items() if not 0 <= age <= self.plan.staleness}
        if wrong:
            raise StalenessViolation(
                f"step {self.state.step + 1} has {sum(wrong.values())} tokens that are {sorted(wrong)} "
                f"versions old where pipeline.staleness is {self.plan.staleness}; nothing was trained on them"
            )

    @staticmethod
    def _of(step: int, group: Group) -> Group:
        """As that of the step that trains on it."""
        return group if group.step == step else replace(group, step=step)

    def _booked(
        self,
        clock: Clock,
        groups: Sequence[Group],
        ended: Sequence[RolloutResult],
        taken: TrainBatch,
        learned: Learned,
        drafted: Drafted | None,
    ) -> dict[str, float]:
        """The row of the step, but for sums over the run; the ledger and the timeline have theirs then.
        ``groups`` are those that have left: trained on or dropped. ``ended`` is what the row pays for."""
        fresh = [item.group for item in ended]
        credit, batch, report = learned.credit, learned.batch, learned.report
        model = self.plan.flops
        counted = groups if self.plan.overlap else None
        costs = model and step_costs(model, groups, credit, batch, report, fresh, counted)
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
        if self.plan.overlap:  # what has ended since the last row was played since then too
            now, before = time.perf_counter(), self._row_at
            row["tokens_per_s"] = token_counts(fresh)["sampled"] / (now - before)
            self._row_at = now
        spans = [*clock.spans, *self._new_spans()]
        by_pool = self._by_pool(spans, row, clock.waited_s)
        reused = [item.group for item in ended if item.paid]
        work = step_work(groups, credit, batch, report, costs, fresh, reused, model)
        self._books.step(self.state.step + 1, row["step_time"], clock.busy(), work, by_pool)
        self._draw(spans)
        counts = self._new_counts()
        row |= {"rollout/from_spool": float(sum(item.spooled for item in taken.batch)), **counts}
        row |= tool_rates(counts, sum(len(group.trajectories) for group in fresh))
        if batch is not None and (self.plan.staleness or self.plan.overlap):
            row |= {f"staleness/hist/{age}": float(n) for age, n in sorted(ages(batch).items())}
        return row | {**self.workers.extra_metrics(), **counts}  # these have a 0 for what may be counted

    def _by_pool(
        self, spans: Sequence[Span], row: dict[str, float], waited_s: float
    ) -> dict[str, dict[str, float]] | None:
        """What each pool was busy with, for the ledger; None where everything is one pool. ``row`` gets what
        it says of the pipeline, where there is one."""
        told, seconds = self._books.terms.pools, row["step_time"]
        if not (told or self.plan.overlap):
            return None
        pools = told or Counter(pool_of(worker) for worker in {span.worker for span in spans})
        by_pool, self._over = busy_by_pool(spans, self._over, pools, seconds)
        row |= pipeline_row(by_pool, pools, seconds) | {"pipeline/wait_s": waited_s}
        row |= {"queue/running": float(self._feed.running), "queue/ready": float(self._feed.ready)}
        if told:
            return by_pool
        together = sum(map(Counter, by_pool.values()), Counter[str]())
        return {POOL: in_turn(together, seconds)}

    def _end_step(
        self, step: int, version: int, taken: TrainBatch, learned: Learned, row: dict[str, float]
    ) -> None:
        """The step has happened; ``row`` gets what the new state says."""
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
            admitted=before.admitted + taken.num_admitted,
            trained=before.trained + len(taken.batch) + taken.num_stale - gone.total(),
            dropped=dict(sorted(dropped.items())),
            totals=add_totals(before.totals, row, self._books.terms),
        )
        self._between_steps = False
        row |= self._left(before) | self._accounted()
        if taken.num_anew:
            row["groups/played_anew"] = float(taken.num_anew)

    def _accounted(self) -> dict[str, float]:
        """Exactly once: where all the groups are that were ever admitted."""
        state, dropped = self.state, sum(self.state.dropped.values())
        assert state.admitted == state.trained + dropped + len(state.ahead), (
            f"step {state.step}: of {state.admitted} groups {state.trained} were trained on, {dropped} "
            f"dropped and {len(state.ahead)} are on their way"
        )
        return {
            "groups/admitted_total": float(state.admitted),
            "groups/trained_total": float(state.trained),
            **{f"groups/dropped_total/{rule}": float(n) for rule, n in state.dropped.items()},
            "groups/outstanding": float(len(state.ahead)),
        }

    def _new_feed(self) -> RolloutBuffer:
        plan = self.plan
        rounds = Rounds(
            tasks=self.tasks,
            stage=self.stage,
            spool=self._spool,
            prompts=plan.prompts_per_step,
            group_size=plan.group_size,
            seed=plan.seed,
            staleness=plan.staleness,
        )
        return RolloutBuffer(
            rule=AdmissionRule(
                prompts=plan.prompts_per_step,
                staleness=plan.staleness,
                steps=plan.steps,
                overlap=plan.overlap,
                late=plan.late,
            ),
            rounds=rounds,
            cursor=self.state.cursor,
            retired=self.state.retired,
            leaving=self._leaving if plan.solved_for_good else None,
            on_progress=lambda: self._dog.on_progress(),
        )

    def _recall(self) -> None:
        """Take up what an earlier process had on its way. What the spool does not have is played anew, by the
        policy of now, in its place; who had left by what is lost does not return."""
        state = self.state
        lost = [one.version for one in self._feed.recall(state.ahead, state.step, state.version)]
        if gone := sorted({version for version in lost if version != state.version}):
            who = f"policy {gone[0]}" if len(gone) == 1 else f"policies {gone[0]} to {gone[-1]}"
            self.observer.on_note(
                f"step {state.step}: of {len(state.ahead)} groups that were on their way "
                f"{self._spool.path.name} does not have {len(lost)}, which {who} sampled; policy "
                f"{state.version} plays them anew, so this is not quite the run that was interrupted"
            )

    def _leaving(self, groups: Sequence[Group], retired: Sequence[str]) -> Sequence[str]:
        rule = {"share": self.plan.solved_for_good, "solved_at": self.plan.solved_at}
        return solved_for_good(groups, **rule, retired=frozenset(retired))

    def _left(self, before: LoopState) -> dict[str, float]:
        """What the row tells of the prompts that have left."""
        if not self.plan.solved_for_good:
            return {}
        total = len(self.state.retired)
        return {
            "groups/retired": float(total - len(before.retired)),
            "groups/retired_total": float(total),
            "groups/left_share": 1 - total / len(self.tasks),
        }

    def _nobody_left(self) -> Finish | None:
        """Is this the end, because every prompt has left the stream?"""
        if not self._feed.is_dry:
            return None
        self.observer.on_note(
            f"step {self.state.step}: every prompt is solved for good, so nothing is left to sample; more or "
            "harder tasks would go on, or rollout.solved_for_good = 0"
        )
        return Finish.SOLVED

    @contextmanager
    def _watchdog(self) -> Iterator[None]:
        """In here a wait without progress ends with ``Stalled``."""
        self._doing = "nothing has begun"
        self._dog = Watchdog(
            self.plan.watch_s,
            self._signals,
            self.workers.progress,
            lambda: f"{self._doing}; on the way for longest: {self._feed.waiting()}",
        )
        watching = asyncio.create_task(self._dog.watch())
        try:
            yield
        finally:
            watching.cancel()

    def _new_spans(self, *, kept: bool = True) -> list[Span]:
        """What everybody was busy with since this was last asked, behind what was ``kept`` for the row."""
        new = [span for worker in self.span_sources for span in worker.take_spans()]
        if not kept:
            return new
        spans, self._spans = self._spans, []
        return [*spans, *new]

    def _draw(self, spans: Sequence[Span]) -> None:
        path = self.folder.timeline.path
        size = path.stat().st_size if path.exists() else 0
        if rows := [span.to_json() for span in kept(spans, step=self.state.step + 1, file_bytes=size)]:
            self.folder.timeline.append(*rows)

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
            self.observer.on_note(f"step {step}: {report.note}")
        if report is not None and report.skipped:
            self.observer.on_note(f"step {step} was refused: {report.skipped} ({', '.join(report.uids)})")
        self.observer.on_step({"step": step, **row})

    def _watched(self, row: dict[str, float]) -> dict[str, float]:
        """The row with ``watch/collapsed``; alarms are kept and told the moment they are met."""
        before = self._watch.collapsed
        for alarm in self._watch.see({"step": self.state.step, **row}):
            self.folder.watch.append(alarm.to_json())
            what = "collapse" if alarm.collapse else "look"
            self.observer.on_note(f"step {alarm.step}: {what}: {alarm.sentence}, since step {alarm.since}")
        if self.plan.stop_on_collapse and self._watch.collapsed and not before:
            self._why = Finish.COLLAPSED
        return row | {"watch/collapsed": float(self._watch.collapsed)}

    def _new_counts(self) -> dict[str, float]:
        """What the counters have counted since they were last asked."""
        now = sum(self.counters, Counter[str]())
        new, self._counted = now - self._counted, now
        return {name: float(count) for name, count in sorted(new.items())}

    async def _evaluate(self) -> None:
        """Score what is due, and hear what the scores of the main set foretell. The end of a run is due for
        every set."""
        self._doing = f"the evaluation after step {self.state.step}"
        await self._score()
        main = self._scored.get(MAIN_SET, {})
        if not self.state.step or main.get("step") != self.state.step:
            return
        if self.observer.should_stop(self.state.step) and self._why is None:
            self._why = Finish.ENOUGH
            await self._score()

    async def _score(self) -> None:
        now = spent_in_steps(self.state.step, self.state.totals)
        for evaluation in self.evaluations:
            if due(evaluation, now, self._scored.get(evaluation.name), ended=self._due(0)):
                self._spans = self._new_spans()  # of the step before
                with self._books.evaluating():
                    row, groups = await evaluate_groups(
                        self.stage, evaluation, self.state.step, lambda *ended: self._dog.on_progress()
                    )
                row |= {"spent": now, **self._new_counts()}
                work = evaluation_work(groups, self.plan.flops)
                self._books.evaluation(self.state.step, evaluation.name, row["seconds"], work)
                if self.drafting is not None:
                    self.drafting.forget(evaluation.prompts)
                    if self.plan.overlap:
                        self.drafting.begin()
                self._draw(self._new_spans(kept=False))  # no time of a step
                at_start = not self.state.step
                self._failures.see(self.state.step, groups, evaluation.name, first=at_start)
                self.folder.eval.append(row)
                self._scored[evaluation.name] = row
                self.observer.on_eval(row)

    def _due(self, every: int) -> bool:
        ended = self.state.step == self.plan.steps or self._why is not None
        return ended or (every > 0 and self.state.step % every == 0)

    def _checkpoint(self) -> None:
        if self.state.step > self._saved_step:
            clock = Clock(self.state.step, self._books.clock, self.worker)
            with clock.doing("", Kind.SAVE):
                oldest = self.save(self.state)
            self._books.saved(self.state.step, clock.spans[0].seconds)
            self._spans += clock.spans
            self._saved_step = self.state.step
            self._spool.forget(oldest)
            self._dog.on_progress()

    async def _replan(self) -> None:
        """While groups play on. The rest of the run goes on from the checkpoint, as a resumed one does."""
        if self._goes_on:
            self._doing = f"whether another layout is better from step {self.state.step} on"
            if await self.observer.should_replan(self.state.step) and self._goes_on:
                self._why = Finish.REPLANNED
            self._dog.on_progress()

    def _save_what_there_is(self) -> None:
        """After an error, which is the one to be raised."""
        try:
            self._checkpoint()
        except (OSError, RuntimeError) as error:
            self.observer.on_note(f"step {self.state.step} could not be saved: {error}")

    def _no_signal(self) -> str:
        return (
            f"{self.state.empty_in_a_row} steps in a row had nothing to learn from; see groups/dropped and "
            f"faults in {self.folder.metrics.path.name}, then change the task's difficulty or mend the reward"
        )
