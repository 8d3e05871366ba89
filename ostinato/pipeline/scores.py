"""The evaluations of a run: each when it is due, recorded in eval.jsonl and in the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.every import spent_in_steps
from ostinato.observe.ledger import Ledger
from ostinato.pipeline.account import evaluation_work
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.evaluate import Evaluation, evaluate_groups, is_due
from ostinato.pipeline.failed import Failures
from ostinato.pipeline.forgetting import Forgetting
from ostinato.pipeline.recorder import StepRecorder
from ostinato.pipeline.state import LoopState, Observer, Plan
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import MAIN_SET, RunFolder

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Scores:
    """Runs the evaluations of one run; the last score of each set is read from ``folder``."""

    plan: Plan
    stage: RolloutContext
    evaluations: Sequence[Evaluation]
    folder: RunFolder
    ledger: Ledger
    recorder: StepRecorder
    failures: Failures
    observer: Observer
    drafting: Drafting | None
    keep: Callable[[int], None]
    on_progress: Callable[[], None]

    def __post_init__(self) -> None:
        self._last = {row.get("set"): row for row in self.folder.eval.rows()}

    def is_new(self, step: int) -> bool:
        """Was the main set scored after this step?"""
        return self._last.get(MAIN_SET, {}).get("step") == step

    async def score(self, state: LoopState, *, ended: bool) -> None:
        """Score the sets that are due; at the end of a run that is every set."""
        now = spent_in_steps(state.step, state.totals)
        for evaluation in self.evaluations:
            if is_due(evaluation, now, self._last.get(evaluation.name), ended=ended):
                await self._score(evaluation, state.step, now)

    async def remember(self, forgetting: Forgetting) -> None:
        """Before training: record what the policy can do that it is not trained on."""
        self.recorder.spans = self.recorder.new_spans()
        with self.ledger.evaluating():
            line = await forgetting.begin(self.stage.engine)
        if line is not None:
            tokens = {"sampled": sum(len(row["logprobs"]) for row in line["rows"])}
            work = {"tokens": tokens, "flops": {"eval": round(line["flops"])}}
            self.ledger.evaluation(0, "forgetting", line["seconds"], work)
            self.recorder.draw(1, self.recorder.new_spans(kept=False))
            right = "" if line["right"] is None else f", {line['right']:.0%} right"
            logger.info(
                f"forgetting: {len(line['rows'])} answers to {line['about']} are kept, "
                f"of {line['questions']} questions{right}"
            )

    async def _score(self, evaluation: Evaluation, step: int, now: dict[str, float]) -> None:
        recorder = self.recorder
        recorder.spans = recorder.new_spans()  # of the step before
        with self.ledger.evaluating():
            row, groups = await evaluate_groups(
                self.stage, evaluation, step, lambda *ended: self.on_progress()
            )
            if step and evaluation.name == MAIN_SET:
                self.keep(step)  # before the row: a score that is there is not made again
        row |= {"spent": now, **recorder.new_counts()}
        self.ledger.evaluation(
            step, evaluation.name, row["seconds"], evaluation_work(groups, self.plan.flops)
        )
        if self.drafting is not None:
            self.drafting.forget(evaluation.prompts)
            if self.plan.recipe.pipeline.overlap:
                self.drafting.begin()
        recorder.draw(step + 1, recorder.new_spans(kept=False))  # no time of a step
        self.failures.see(step, groups, evaluation.name, first=not step)
        self.folder.eval.append(row)
        self._last[evaluation.name] = row
        self.observer.on_eval(row)
