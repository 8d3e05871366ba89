"""Evaluation: plays without training, on the same prompts with the same noise every time.

With common random numbers two evaluations of a run differ by the policy alone, so their difference has a
smaller error than each of them. There are two standard errors. ``stderr`` treats the prompts as independent
draws (answers to one prompt are not): use it to generalise to other prompts. ``answer_stderr`` treats the
prompts as fixed and only their answers as random: use it for a curve over a single set.

The times of evaluations follow from the rows of eval.jsonl and the budget that training has spent: no other
state is kept.
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
from ostinato.pipeline.account import make_evaluation_work
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.forgetting import Forgetting
from ostinato.pipeline.recorder import StepRecorder
from ostinato.pipeline.state import LoopState
from ostinato.rollout.health import (
    compute_length_metrics,
    compute_logged_metrics,
    compute_pass_at_k,
    count_rollouts,
    sort_by_task,
)
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, RolloutResult, list_verdicts, play_groups
from ostinato.run import MAIN_SET, to_json
from ostinato.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

SHOWN = 4  # prompts of the main set whose first answers are in a row
SHOWN_CHARACTERS = 2000  # of each prompt and answer
PROGRESS_S = 30.0  # between two lines that say how far an evaluation is
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
    solved_at: float = 1.0  # the least reward of a solution
    seed: int = 0
    weights: str = "model"  # the base weights that the engine samples with (engine.weights)
    every: Every = NEVER  # in addition to before and after training
    budget: Every = NEVER  # of the run
    shares: Sequence[float] = ()  # of the budget: an evaluation at each
    start_factor: int = 1
    rules: str = ""  # other settings that affect a policy's score: rewards, tools, interruption


def digest_evaluation(evaluation: Evaluation) -> str:
    """Hash (twelve hex digits) the prompts and the rules by which they are answered and judged. Scores with
    different hashes are not comparable: even for one policy their expectations differ. The number of answers,
    their noise and the ids of a tokenizer are not in it."""
    sampling = evaluation.sampling
    prompts = _list_prompts(evaluation)
    draw = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.stop_strings]
    length = [sampling.max_tokens, sampling.min_tokens]
    rules = [evaluation.k, evaluation.solved_at, evaluation.rules]
    return _hash_tree({"prompts": prompts, "drawn": draw, "length": length, "rules": rules})


def digest_prompts(evaluation: Evaluation) -> str:
    """Hash (twelve hex digits) the prompts alone, with the columns that rewards read: it is equal for
    policies that sample or answer by different rules on the same prompts."""
    return _hash_tree(_list_prompts(evaluation))


def _list_prompts(evaluation: Evaluation) -> list[Any]:
    return [
        [prompt.uid, prompt.text, prompt.messages, prompt.columns] for prompt in evaluation.prompts
    ]  # a task is in uids


def _hash_tree(tree: Any) -> str:
    return hashlib.sha256(to_json(tree).encode()).hexdigest()[:12]


def is_due(
    evaluation: Evaluation, now: Mapping[str, float], last_row: Mapping[str, Any] | None, *, ended: bool
) -> bool:
    """Return whether to score the set now. ``now``: the steps and budget that the run has spent
    (``spent_in_steps``); ``last_row``: the set's last row of eval.jsonl.

    A set is due before training, when the run has ``ended``, and whenever another ``evaluation.every`` or
    another of its ``shares`` was spent since ``last_row``. So a score that a signal prevented is made later.
    No set is due twice after the same step.
    """
    if last_row is not None and last_row["step"] == now["steps"]:
        return False
    spent_before = {} if last_row is None else last_row.get("spent", {})
    num_shares = [
        sum(evaluation.budget.share(spent) >= share for share in evaluation.shares)
        for spent in (spent_before, now)
    ]
    is_next = (
        evaluation.every.times(now) > evaluation.every.times(spent_before) or num_shares[1] > num_shares[0]
    )
    return ended or not now["steps"] or is_next


async def evaluate_groups(
    stage: RolloutContext,
    evaluation: Evaluation,
    step: int,
    on_group: Callable[[int, RolloutResult], None] = lambda index, result: None,
) -> tuple[dict[str, Any], list[Group]]:
    """Play and score the set under the policy that the engine serves now, after ``step`` training steps;
    return (row of eval.jsonl, groups). ``on_group`` is called with each group as it ends. Every PROGRESS_S
    seconds the number of scored prompts is logged.

    ``n`` prompts count; those with fewer than k verdicts are reported as ``excluded``. The row of the main
    set shows first answers, and that of a mixture has scores by task.
    """
    start = time.perf_counter()
    samples = evaluation.samples * (1 if step else evaluation.start_factor)
    set_key = () if evaluation.name == MAIN_SET else (zlib.crc32(evaluation.name.encode()),)
    requests = [
        RolloutRequest(
            prompt=prompt, seed=(evaluation.seed, EVAL_STEP, *set_key, i), group_size=samples, step=step
        )
        for i, prompt in enumerate(evaluation.prompts)
    ]
    shown_s, num_scored = start, 0

    def count_group(index: int, result: RolloutResult) -> None:
        nonlocal shown_s, num_scored
        num_scored += 1
        if (now := time.perf_counter()) - shown_s >= PROGRESS_S:
            logger.info(f"scored {num_scored} of {len(requests)} prompts in {now - start:,.0f} s")
            shown_s = now
        on_group(index, result)

    results = await play_groups(replace(stage, sampling=evaluation.sampling), requests, count_group)
    seconds = time.perf_counter() - start
    row = {"step": step, "set": evaluation.name, "split": evaluation.split}
    row |= {"held_out": digest_evaluation(evaluation), "prompts": digest_prompts(evaluation)}
    row |= {"weights": evaluation.weights, "samples": samples, "solved_at": evaluation.solved_at}
    groups = [item.group for item in results]
    rewards = [values[np.isfinite(values)] for values in map(list_verdicts, groups)]
    row["each"] = [[len(values), int((values >= evaluation.solved_at).sum())] for values in rewards]
    if evaluation.name == MAIN_SET:
        row["answers"] = [show_first_answer(group) for group in groups[:SHOWN]]
    by_task = {
        name: select_task_scores(compute_scores(members, evaluation))
        for name, members in sort_by_task(groups).items()
    }
    row |= {"tasks": by_task} if by_task else {}
    return {**row, **compute_scores(groups, evaluation), "seconds": seconds}, groups


def show_first_answer(group: Group) -> dict[str, Any]:
    """Return what a row of eval.jsonl shows of a prompt: question, right answer if the prompt's row has one,
    and the policy's first answer with its reward."""
    prompt, trajectory = group.prompt, group.trajectories[0]
    question = prompt.text if prompt.messages is None else prompt.messages[-1].get("content")
    text = "\n".join(turn.completion.text for turn in trajectory.turns)
    reward = None if trajectory.reward is None else trajectory.reward.value
    right = {"answer": str(prompt.columns["answer"])[:SHOWN_CHARACTERS]} if "answer" in prompt.columns else {}
    return {
        "uid": prompt.uid,
        "prompt": str(question or "")[:SHOWN_CHARACTERS],
        **right,
        "text": text[:SHOWN_CHARACTERS],
        "reward": reward,
        "stop": str(trajectory.stop),
    }


def select_task_scores(row: Mapping[str, Any]) -> dict[str, Any]:
    """Select the scores that a row of eval.jsonl has for each task of a mixture."""
    names = ("n", "pass@1", "stderr", "answer_stderr", "reward", "reward_stderr")
    return {name: row[name] for name in names}


def compute_scores(groups: Sequence[Group], evaluation: Evaluation) -> dict[str, Any]:
    """Compute pass@1, pass@k and mean reward with standard errors over the prompts with at least k verdicts,
    the highest reward, and lengths and counters of all groups."""
    rewards = [values[np.isfinite(values)] for values in map(list_verdicts, groups)]
    scored = [values for values in rewards if len(values) >= evaluation.k]
    solutions = [values >= evaluation.solved_at for values in scored]
    outcomes = [(len(values), int(values.sum())) for values in solutions]
    at_1, at_1_error = compute_mean_and_error([c / n for n, c in outcomes])
    at_k, at_k_error = compute_mean_and_error([compute_pass_at_k(n, c, evaluation.k) for n, c in outcomes])
    reward, reward_error = compute_mean_and_error([float(values.mean()) for values in scored])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        "n": len(scored),
        "excluded": len(groups) - len(scored),
        "pass@1": at_1,
        "stderr": at_1_error,
        "answer_stderr": compute_answer_error(solutions),
        "pass@k": at_k,
        "k": evaluation.k,
        "pass@k_stderr": at_k_error,
        "reward": reward,
        "reward_stderr": reward_error,
        "reward_answer_stderr": compute_answer_error(scored),
        "reward_max": max((float(values.max()) for values in scored), default=math.nan),
        **compute_length_metrics(trajectories),
        **compute_logged_metrics(groups),
        **count_rollouts(groups),
    }


def compute_answer_error(answers: Sequence[np.ndarray]) -> float:
    """Return the standard error, with the prompts fixed, of the mean over prompts of their mean answer.

    ``answers`` are the values [m_i] of each of n prompts, independent draws: sqrt(sum of s_i^2 / m_i) / n,
    with s_i^2 the unbiased variance within prompt i. NaN if a prompt has fewer than 2 values, or there is
    none.
    """
    if not answers or min(map(len, answers)) < 2:
        return math.nan
    mean_variances = [float(np.var(values, ddof=1)) / len(values) for values in answers]
    return math.sqrt(sum(mean_variances)) / len(answers)


def compute_mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, its standard error); both are NaN without values, and the error of a single value too."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


@dataclass(kw_only=True)
class Scores:
    """Runs the evaluations of a run; the last score of each set is read from the run's folder."""

    stage: RolloutContext
    evaluations: Sequence[Evaluation]
    recorder: StepRecorder
    drafting: Drafting | None
    keep: Callable[[int], None]
    on_progress: Callable[[], None]

    def __post_init__(self) -> None:
        self._last = {row.get("set"): row for row in self.recorder.folder.eval.rows()}

    def is_new(self, step: int) -> bool:
        """Return whether the main set was scored after this step."""
        return self._last.get(MAIN_SET, {}).get("step") == step

    async def score(self, state: LoopState, *, ended: bool) -> None:
        """Score the sets that are due; at the end of a run (``ended``) every set that was not scored after
        this step."""
        now = spent_in_steps(state.step, state.totals)
        for evaluation in self.evaluations:
            if is_due(evaluation, now, self._last.get(evaluation.name), ended=ended):
                await self._score(evaluation, state.step, now)

    async def remember(self, forgetting: Forgetting) -> None:
        """Ask the questions of ``forgetting`` before training, unless that was done, and record their costs
        and spans."""
        self.recorder.spans = self.recorder.take_spans()
        with self.recorder.ledger.mark_evaluation():
            line = await forgetting.begin(self.stage.engine)
        if line is not None:
            tokens = {"sampled": sum(len(row["logprobs"]) for row in line["rows"])}
            work = {"tokens": tokens, "flops": {"eval": round(line["flops"])}}
            self.recorder.ledger.evaluation(0, "forgetting", line["seconds"], work)
            self.recorder.draw(1, self.recorder.take_spans(with_kept=False))
            right = "" if line["right"] is None else f"; {line['right']:.0%} of the answers were right"
            logger.info(
                f"forgetting: the model was asked {line['questions']} questions of {line['about']}{right}. "
                f"Training is watched by {len(line['rows'])} of its answers, which are scored again"
            )

    async def _score(self, evaluation: Evaluation, step: int, now: dict[str, float]) -> None:
        """Score a set, keep the weights of a main score, and write its row, costs, spans and failures."""
        recorder = self.recorder
        recorder.spans = recorder.take_spans()  # of the step before
        with recorder.ledger.mark_evaluation():
            row, groups = await evaluate_groups(
                self.stage, evaluation, step, lambda *ended: self.on_progress()
            )
            if step and evaluation.name == MAIN_SET:
                self.keep(step)  # before the row: a score with a row is not made again
        row |= {"spent": now, **recorder.take_counts()}
        recorder.ledger.evaluation(
            step, evaluation.name, row["seconds"], make_evaluation_work(groups, recorder.plan.flops)
        )
        if self.drafting is not None:
            self.drafting.forget(evaluation.prompts)
            if recorder.plan.recipe.pipeline.overlap:
                self.drafting.begin()
        recorder.draw(step + 1, recorder.take_spans(with_kept=False))  # their time is not a step's
        recorder.failures.see(step, groups, evaluation.name, is_first=not step)
        recorder.folder.eval.append(row)
        self._last[evaluation.name] = row
        recorder.observer.on_eval(row)
