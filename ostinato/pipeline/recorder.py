"""Records a step: its row of metrics, its spans, its costs in the ledger, its answers.

record(...)   makes the row of a finished step, without sums over the run; writes ledger and timeline
report(...)   writes the row to all writers, and watches it for signs of a collapse
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import pack
from ostinato.observe.ledger import POOL, Ledger
from ostinato.observe.stability import watch_after
from ostinato.observe.timeline import Kind, Span, pool_of, select_spans
from ostinato.pipeline.account import (
    Clock,
    compute_pipeline_row,
    compute_sampling_flops,
    compute_step_flops,
    compute_token_metrics,
    compute_tool_rates,
    compute_utilisation,
    convert_flops,
    count_ages,
    count_tokens,
    list_recomputed_spans,
    make_step_work,
    share_seconds,
    split_busy_seconds,
)
from ostinato.pipeline.buffer import RolloutBuffer, TrainBatch
from ostinato.pipeline.credit import Credit, assign_credit
from ostinato.pipeline.failed import Failures
from ostinato.pipeline.forgetting import Look
from ostinato.pipeline.state import Finish, Observer, Plan, StalenessViolation, Workers
from ostinato.protocols import MetricWriter, Timed
from ostinato.rollout.health import compute_health, compute_task_metrics
from ostinato.rollout.rollout import RolloutResult
from ostinato.run import RunFolder, group_rows
from ostinato.types import Batch, Group, StepReport

logger = logging.getLogger(__name__)
JUDGE = "judge/"  # counters of the costs of judges, seconds and tokens; in the ledger too


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a step's training; without samples to train on ``batch`` and ``report`` are None."""

    credit: Credit
    batch: Batch | None = None
    report: StepReport | None = None
    look: Look | None = None  # of the forgetting watch


def prepare_training(
    groups: Sequence[Group], plan: Plan, algorithm: Algorithm, clock: Clock, version: int
) -> TrainResult:
    """Assign the groups' credit, and pack the samples to train on, for the trainer of ``version``, in the
    time of ``clock``; without samples there is no batch."""
    credit = assign_credit(
        groups,
        algorithm,
        min_verdicts=min(2, plan.recipe.rollout.group_size),
        answer_tokens=plan.answer_tokens,
        solved_at=plan.solved_at,
        reward_weights=plan.recipe.reward.by_name,
    )
    if not credit.samples:
        return TrainResult(credit=credit)
    with clock.track("train", Kind.PACK):
        batch = pack(
            credit.samples,
            credit.weights,
            tokens_per_microbatch=plan.recipe.trainer.tokens_per_microbatch,
            minibatches=plan.recipe.trainer.minibatches,
            version=version,
        )
    return TrainResult(credit=credit, batch=batch)


def check_ages(batch: Batch, step: int, staleness: int) -> None:
    """Check the buffer's bound of staleness on the tokens themselves. Raises StalenessViolation."""
    counts = {age: n for age, n in count_ages(batch).items() if not 0 <= age <= staleness}
    if counts:
        raise StalenessViolation(
            f"step {step} has {sum(counts.values())} tokens that are {sorted(counts)} versions old where "
            f"pipeline.staleness is {staleness}; nothing was trained on them"
        )


@dataclass(kw_only=True)
class StepRecorder:
    """Records the steps of a run. ``counters`` (grader, tools ...): a row has their increments in a step."""

    plan: Plan
    folder: RunFolder
    ledger: Ledger
    observer: Observer
    workers: Workers
    writers: Sequence[MetricWriter]
    counters: Sequence[Counter[str]]
    span_sources: Sequence[Timed]

    def __post_init__(self) -> None:
        self.spans = list[Span]()  # of the loop itself, for the next row
        self.failures = Failures(self.folder)
        self._last_row_at = time.perf_counter()
        self._old_totals = sum(self.counters, Counter())
        self._carried_seconds = dict[str, dict[str, float]]()
        self._watch = watch_after(self.folder.metrics.rows())

    def record(
        self,
        clock: Clock,
        feed: RolloutBuffer,
        groups: Sequence[Group],
        ended: Sequence[RolloutResult],
        train_batch: TrainBatch,
        learned: TrainResult,
        drafted: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the row of the step, without sums over the run; write the ledger and the timeline, and take
        the counts and spans. ``groups`` were trained on or dropped in the step; the cost of ``ended`` is
        charged to the row, without what an earlier process has paid."""
        new_groups, model = [item.group for item in ended], self.plan.flops
        credit, batch, report, look = learned.credit, learned.batch, learned.report, learned.look
        flop_groups = groups if self.plan.recipe.pipeline.overlap else new_groups
        flops = {} if model is None else compute_step_flops(model, flop_groups, batch, report)
        if flops and look is not None:
            flops["measure"] += round(look.cost["flops"])
        row = compute_health(groups, solved_at=self.plan.solved_at) | compute_task_metrics(
            groups, self.plan.solved_at
        )
        row |= {**drafted, **compute_token_metrics(credit, batch, report)}
        row |= {"empty_step": float(batch is None)}
        row |= {"refused_step": float(report is not None and bool(report.skipped))}
        row |= {**(report.metrics if report else {}), **(look.metrics if look else {})}
        row |= convert_flops(flops) | self._make_time_metrics(clock, new_groups)
        row |= compute_utilisation(row, self.plan.peak_flops)
        if self.plan.recipe.pipeline.overlap:  # all that has ended since the last row was played since then
            now, last_row_at = time.perf_counter(), self._last_row_at
            row["tokens_per_s"] = row["tokens/played"] / (now - last_row_at)
            self._last_row_at = now
        spans = [*clock.spans, *self.take_spans()]
        by_pool = self._split_by_pool(feed, spans, row, clock.waited_s)
        charged_groups = [item.group for item in ended if not item.paid]
        charged_flops = (
            {} if model is None else flops | {"sample": compute_sampling_flops(model, charged_groups)}
        )
        work = make_step_work(credit, batch, report, charged_flops, charged_groups)
        counts = self.take_counts()
        if judge_counts := {key.removeprefix(JUDGE): n for key, n in counts.items() if key.startswith(JUDGE)}:
            work["judge"] = judge_counts
        if look is not None:
            work["forgetting"] = dict(look.cost)
        self.ledger.step(clock.step, row["step_time"], clock.busy(), work, by_pool)
        self.draw(clock.step, spans)
        row |= {"rollout/from_spool": float(sum(item.spooled for item in train_batch.batch)), **counts}
        row |= compute_tool_rates(counts, sum(len(group.trajectories) for group in new_groups))
        if batch is not None and (self.plan.recipe.pipeline.staleness or self.plan.recipe.pipeline.overlap):
            row |= {f"staleness/hist/{age}": float(n) for age, n in sorted(count_ages(batch).items())}
        return row | {**self.workers.extra_metrics(), **counts}  # these have a 0 for every possible counter

    def _make_time_metrics(self, clock: Clock, groups: Sequence[Group]) -> dict[str, float]:
        """Make metrics of the time of a step in which ``groups`` were played."""
        total, parts = clock.read()
        row = {"rollout/preempted": float(sum(map(len, list_recomputed_spans(groups)))), "step_time": total}
        row["time/cpu_s"] = time.process_time() - clock.cpu_start  # of all threads of this process
        row["tokens/played"] = float(count_tokens(groups)["sampled"])
        row["tokens_per_s"] = row["tokens/played"] / total
        for name, seconds in parts.items():
            row |= {f"time/{name}_s": seconds, f"time/{name}_share": seconds / total}
        return row

    def _split_by_pool(
        self, feed: RolloutBuffer, spans: Sequence[Span], row: dict[str, float], waited_s: float
    ) -> dict[str, dict[str, float]] | None:
        """Add the pipeline metrics to ``row``, and return busy seconds by pool and part, for the ledger.
        With a single pool and without overlap return None and add nothing. Seconds above the step's are
        carried over to the next step."""
        known_pools, seconds = self.ledger.terms.pools, row["step_time"]
        if not (known_pools or self.plan.recipe.pipeline.overlap):
            return None
        pools = known_pools or Counter(pool_of(worker) for worker in {span.worker for span in spans})
        by_pool, self._carried_seconds = split_busy_seconds(spans, self._carried_seconds, pools, seconds)
        row |= compute_pipeline_row(by_pool, pools, seconds) | {"pipeline/wait_s": waited_s}
        row |= {"queue/running": float(feed.running), "queue/ready": float(feed.ready)}
        if known_pools:
            return by_pool
        all_busy = sum(map(Counter, by_pool.values()), Counter[str]())
        return {POOL: share_seconds(all_busy, seconds)}

    def take_spans(self, *, with_kept: bool = True) -> list[Span]:
        """Return the spans of all workers since the last call; ``with_kept``: after those kept for the row,
        which are cleared."""
        new_spans = [span for worker in self.span_sources for span in worker.take_spans()]
        if not with_kept:
            return new_spans
        spans, self.spans = self.spans, []
        return [*spans, *new_spans]

    def draw(self, step: int, spans: Sequence[Span]) -> None:
        """Append a selection of the spans to the timeline, which depends on its size so far."""
        path = self.folder.timeline.path
        size = path.stat().st_size if path.exists() else 0
        if rows := [span.to_json() for span in select_spans(spans, step=step, file_bytes=size)]:
            self.folder.timeline.append(*rows)

    def report(
        self, step: int, row: dict[str, float], groups: Sequence[Group], learned: TrainResult, ended: bool
    ) -> Finish | None:
        """Write the row to all writers, and samples, mismatch and notes if they are due; tell the observer.
        Returns why the run has to end now, or None; ``ended``: this is the last step."""
        report, (row, finish) = learned.report, self._watch_row(step, row, learned.look)
        for writer in (self.folder, *self.writers):
            writer.write(step, row)
        every = self.plan.recipe.log.trajectories_every
        is_last = ended or step == self.plan.recipe.trainer.steps or finish is not None
        if every and (step == 1 or is_last or step % every == 0):
            graded = zip(groups, learned.credit.advantages, strict=True)
            self.folder.trajectories.append(*(line for pair in graded for line in group_rows(*pair)))
        if report is not None and report.mismatch is not None:
            self.folder.mismatch.append({"step": step, **report.mismatch})
        if report is not None and report.note:
            logger.info(f"step {step}: {report.note}")
        if report is not None and report.skipped:
            logger.warning(f"step {step} was refused: {report.skipped} ({', '.join(report.uids)})")
        must_stop = self.observer.on_step({"step": step, **row})
        return finish or (Finish.CALLBACK if must_stop else None)

    def _watch_row(
        self, step: int, row: dict[str, float], look: Look | None
    ) -> tuple[dict[str, float], Finish | None]:
        """Return (the row with ``watch/collapsed``, why the run has to end now); alarms are recorded and
        logged at once."""
        was_collapsed, forgetting_alarms = self._watch.collapsed, [look.alarm] if look and look.alarm else []
        for alarm in (*self._watch.see({"step": step, **row}), *forgetting_alarms):
            self.folder.watch.append(alarm.to_json())
            kind = "collapse" if alarm.collapse else "look"
            logger.warning(f"step {alarm.step}: {kind}: {alarm.sentence}, since step {alarm.since}")
        is_collapsed = (
            self._watch.collapsed and not was_collapsed and self.plan.recipe.trainer.stop_on_collapse
        )
        finish = Finish.FORGOT if forgetting_alarms and self.plan.recipe.trainer.stop_on_forgetting else None
        row |= {"watch/collapsed": float(self._watch.collapsed)}
        return row, Finish.COLLAPSED if is_collapsed else finish

    def take_counts(self) -> dict[str, float]:
        """Return the increments of all counters since the last call; counters that did not grow are left
        out."""
        totals = sum(self.counters, Counter[str]())
        counts, self._old_totals = totals - self._old_totals, totals
        return {name: float(count) for name, count in sorted(counts.items())}
