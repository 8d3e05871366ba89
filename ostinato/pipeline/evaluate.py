"""Evaluation: play without training, on the same prompts with the same noise every time.

Common random numbers: two evaluations of one run differ by the policy alone, so their difference is known
better than each of them. There are two standard errors. ``stderr`` treats the prompts as independent draws
(answers to one prompt are not): use it to generalise to other prompts. ``answer_stderr`` treats the prompts
as fixed and only their answers as random: use it for a curve over one set.

When a set is scored follows from the rows of eval.jsonl and what training has spent: nothing else is kept.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostinato.every import NEVER, Every, spent_in_steps
from ostinato.pipeline.account import evaluation_work
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.forgetting import Forgetting
from ostinato.pipeline.recorder import StepRecorder
from ostinato.pipeline.state import LoopState
from ostinato.rollout.health import counters, groups_by_task, length_figures, logged_figures, pass_at_k
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, RolloutResult, play, verdicts
from ostinato.run import MAIN_SET, to_json
from ostinato.types import Group, Prompt, Sampling

SHOWN = 4  # prompts of the main set whose first answers are in a row
SHOWN_CHARACTERS = 2000  # of each prompt and answer
EVAL_STEP = 0  # training steps count from 1, so no training token shares its noise with an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A held-out measurement: ``samples`` answers to each prompt, scored as pass@1 and pass@k.

    Before training each prompt is answered ``start_factor`` times as often; the first answers share their
    noise with those of later evaluations.
    """

    split: str
    name: str = MAIN_SET  # of the set
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples: int = 1
    k: int = 1
    solved_at: float = 1.0  # a reward from here on is a solution
    seed: int = 0
    weights: str = "model"  # those of the base that the engine samples with (engine.weights)
    every: Every = NEVER  # in addition to before and after training
    budget: Every = NEVER  # of the run
    shares: Sequence[float] = ()  # of the budget: once at each of them
    start_factor: int = 1
    rules: str = ""  # whatever else affects a policy's score: rewards, tools, interruption


def digest_evaluation(evaluation: Evaluation) -> str:
    """Hash (twelve hex digits) of the prompts and of how they are answered and judged. Scores with different
    hashes are not comparable: even for one policy their expectations differ. The number of answers, their
    noise and the ids of a tokenizer are not in it."""
    sampling = evaluation.sampling
    prompts = _prompts(evaluation)
    drawn = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.stop_strings]
    length = [sampling.max_tokens, sampling.min_tokens]
    rules = [evaluation.k, evaluation.solved_at, evaluation.rules]
    return _digest({"prompts": prompts, "drawn": drawn, "length": length, "rules": rules})


def digest_prompts(evaluation: Evaluation) -> str:
    """Hash (twelve hex digits) of the prompts alone, with the columns that rewards read: it is equal for
    policies that sample or answer by different rules on the same prompts."""
    return _digest(_prompts(evaluation))


def _prompts(evaluation: Evaluation) -> list[Any]:
    return [
        [prompt.uid, prompt.text, prompt.messages, prompt.columns] for prompt in evaluation.prompts
    ]  # a task is in uids


def _digest(tree: Any) -> str:
    return hashlib.sha256(to_json(tree).encode()).hexdigest()[:12]


def is_due(
    evaluation: Evaluation, now: Mapping[str, float], last: Mapping[str, Any] | None, *, ended: bool
) -> bool:
    """Whether to score the set now. ``now``: what the run has spent (``spent_in_steps``); ``last``: the set's
    last row of eval.jsonl.

    Before training, when the run has ``ended``, and whenever another ``evaluation.every`` or one more of its
    ``shares`` was spent since ``last``: a score that a signal prevented is made up for, none is made twice.
    """
    if last is not None and last["step"] == now["steps"]:
        return False
    before = {} if last is None else last.get("spent", {})
    passed = [
        sum(evaluation.budget.share(spent) >= share for share in evaluation.shares) for spent in (before, now)
    ]
    again = evaluation.every.times(now) > evaluation.every.times(before) or passed[1] > passed[0]
    return ended or not now["steps"] or again


async def evaluate_groups(
    stage: RolloutContext,
    evaluation: Evaluation,
    step: int,
    on_group: Callable[[int, RolloutResult], None] = lambda index, played: None,
) -> tuple[dict[str, Any], list[Group]]:
    """(row of eval.jsonl, what was played for it) for the policy that the engine serves now, after ``step``
    training steps; ``on_group`` sees each group as it ends.

    ``n`` prompts count; those with fewer than k verdicts do not and are reported as ``excluded``.
    """
    started = time.perf_counter()
    samples = evaluation.samples * (1 if step else evaluation.start_factor)
    lane = () if evaluation.name == MAIN_SET else (zlib.crc32(evaluation.name.encode()),)
    asks = [
        RolloutRequest(
            prompt=prompt, seed=(evaluation.seed, EVAL_STEP, *lane, i), group_size=samples, step=step
        )
        for i, prompt in enumerate(evaluation.prompts)
    ]
    played = await play(replace(stage, sampling=evaluation.sampling), asks, on_group)
    seconds = time.perf_counter() - started
    about = {"step": step, "set": evaluation.name, "split": evaluation.split}
    about |= {"held_out": digest_evaluation(evaluation), "prompts": digest_prompts(evaluation)}
    about |= {"weights": evaluation.weights, "samples": samples, "solved_at": evaluation.solved_at}
    groups = [item.group for item in played]
    judged = [values[np.isfinite(values)] for values in map(verdicts, groups)]
    about["each"] = [[len(one), int((one >= evaluation.solved_at).sum())] for one in judged]
    if evaluation.name == MAIN_SET:
        about["answers"] = [first_answer(group) for group in groups[:SHOWN]]
    by_task = {name: task_score(score(own, evaluation)) for name, own in groups_by_task(groups).items()}
    about |= {"tasks": by_task} if by_task else {}
    return {**about, **score(groups, evaluation), "seconds": seconds}, groups


def first_answer(group: Group) -> dict[str, Any]:
    """What a row of eval.jsonl shows of a prompt: what is asked, and the first answer with its reward."""
    prompt, trajectory = group.prompt, group.trajectories[0]
    asked = prompt.text if prompt.messages is None else prompt.messages[-1].get("content")
    text = "\n".join(turn.completion.text for turn in trajectory.turns)
    reward = None if trajectory.reward is None else trajectory.reward.value
    return {
        "uid": prompt.uid,
        "prompt": str(asked or "")[:SHOWN_CHARACTERS],
        "text": text[:SHOWN_CHARACTERS],
        "reward": reward,
        "stop": str(trajectory.stop),
    }


def task_score(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of eval.jsonl has of each task of a mixture."""
    names = ("n", "pass@1", "stderr", "answer_stderr", "reward", "reward_stderr")
    return {name: row[name] for name in names}


def score(groups: Sequence[Group], evaluation: Evaluation) -> dict[str, Any]:
    """pass@1, pass@k and mean reward with their standard errors, the highest reward, lengths and counters."""
    judged = [values[np.isfinite(values)] for values in map(verdicts, groups)]
    counted = [values for values in judged if len(values) >= evaluation.k]
    solutions = [values >= evaluation.solved_at for values in counted]
    solved = [(len(values), int(values.sum())) for values in solutions]
    first, first_error = mean_and_error([c / n for n, c in solved])
    best, best_error = mean_and_error([pass_at_k(n, c, evaluation.k) for n, c in solved])
    reward, reward_error = mean_and_error([float(values.mean()) for values in counted])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        "n": len(counted),
        "excluded": len(groups) - len(counted),
        "pass@1": first,
        "stderr": first_error,
        "answer_stderr": answer_error(solutions),
        "pass@k": best,
        "k": evaluation.k,
        "pass@k_stderr": best_error,
        "reward": reward,
        "reward_stderr": reward_error,
        "reward_answer_stderr": answer_error(counted),
        "reward_max": max((float(values.max()) for values in counted), default=math.nan),
        **length_figures(trajectories),
        **logged_figures(groups),
        **counters(groups),
    }


def answer_error(answers: Sequence[np.ndarray]) -> float:
    """Standard error, for these very prompts, of the mean over prompts of their mean answer.

    ``answers`` are the values [m_i] of each of n prompts, independent draws: sqrt(sum of s_i^2 / m_i) / n,
    with s_i^2 the unbiased variance within prompt i. NaN where a prompt has fewer than 2.
    """
    if not answers or min(map(len, answers)) < 2:
        return math.nan
    of_means = [float(np.var(values, ddof=1)) / len(values) for values in answers]
    return math.sqrt(sum(of_means)) / len(answers)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error); NaN where there is too little data."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Scores:
    """Runs the evaluations of one run; the last score of each set is read from its folder."""

    stage: RolloutContext
    evaluations: Sequence[Evaluation]
    recorder: StepRecorder
    drafting: Drafting | None
    keep: Callable[[int], None]
    on_progress: Callable[[], None]

    def __post_init__(self) -> None:
        self._last = {row.get("set"): row for row in self.recorder.folder.eval.rows()}

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
        with self.recorder.ledger.evaluating():
            line = await forgetting.begin(self.stage.engine)
        if line is not None:
            tokens = {"sampled": sum(len(row["logprobs"]) for row in line["rows"])}
            work = {"tokens": tokens, "flops": {"eval": round(line["flops"])}}
            self.recorder.ledger.evaluation(0, "forgetting", line["seconds"], work)
            self.recorder.draw(1, self.recorder.new_spans(kept=False))
            right = "" if line["right"] is None else f", {line['right']:.0%} right"
            logger.info(
                f"forgetting: {len(line['rows'])} answers to {line['about']} are kept, "
                f"of {line['questions']} questions{right}"
            )

    async def _score(self, evaluation: Evaluation, step: int, now: dict[str, float]) -> None:
        recorder = self.recorder
        recorder.spans = recorder.new_spans()  # of the step before
        with recorder.ledger.evaluating():
            row, groups = await evaluate_groups(
                self.stage, evaluation, step, lambda *ended: self.on_progress()
            )
            if step and evaluation.name == MAIN_SET:
                self.keep(step)  # before the row: a score that is there is not made again
        row |= {"spent": now, **recorder.new_counts()}
        recorder.ledger.evaluation(
            step, evaluation.name, row["seconds"], evaluation_work(groups, recorder.plan.flops)
        )
        if self.drafting is not None:
            self.drafting.forget(evaluation.prompts)
            if recorder.plan.recipe.pipeline.overlap:
                self.drafting.begin()
        recorder.draw(step + 1, recorder.new_spans(kept=False))  # no time of a step
        recorder.failures.see(step, groups, evaluation.name, first=not step)
        recorder.folder.eval.append(row)
        self._last[evaluation.name] = row
        recorder.observer.on_eval(row)
