"""The objective of ScaleRL (arXiv 2510.13786, eq. 4 to 8 and section 4) by hand, from rewards to gradients.

The policy is four logits, so every derivative is plain arithmetic: d log p(y) / d logits = e_y - p. A batch
has two prompts that count, and one whose answers are all right. ``ours`` is the whole path of a training step
but the model: groups -> credit -> pack -> policy_loss -> backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from nouns import completion, episode, group_of

from ostinato.algo.algorithms import algorithm, policy_loss
from ostinato.algo.pack import pack
from ostinato.pipeline.credit import assign_credit
from ostinato.types import Group

UNIFORM = math.log(1 / 4)
EPS = 1e-4  # beside every deviation, as TRL has it
CAP = 5.0


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, the ratio of trainer over sampler at each (None: put there, not sampled)."""

    reward: float
    tokens: tuple[int, ...]
    ratios: tuple[float | None, ...]

    @property
    def trained(self) -> list[tuple[int, float]]:
        return [(y, rho) for y, rho in zip(self.tokens, self.ratios, strict=True) if rho is not None]


# rewards are +1 and -1, as the paper's are; the trained tokens of the prompts are 4 and 5
FIRST = (Answer(1, (0, 1), (8.0, 1.0)), Answer(-1, (2, 3, 0), (0.5, None, 1.0)))
SECOND = (Answer(-1, (3,), (2.0,)), Answer(1, (1, 1, 2, 0), (1.0, 1.5, 0.25, 1.0)))
EASY = (Answer(1, (0, 0), (1.0, 1.0)), Answer(1, (1,), (1.0,)))
LOGITS = (0.0, 0.0, 0.0, 0.0)


def log_p(logits: Sequence[float], token: int) -> float:
    return logits[token] - math.log(sum(math.exp(x) for x in logits))


def group(name: str, answers: Sequence[Answer], logits: Sequence[float] = LOGITS) -> Group:
    """As the engine leaves it: each sampled token with the sampler's own log-probability."""
    members = []
    for number, answer in enumerate(answers):
        sampled = np.array([rho is not None for rho in answer.ratios])
        logprobs = [
            0.0 if rho is None else log_p(logits, y) - math.log(rho)
            for y, rho in zip(answer.tokens, answer.ratios, strict=True)
        ]
        done_ = completion(
            answer.tokens,
            logprobs=np.array(logprobs, np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            injected=None if sampled.all() else ~sampled,
        )
        members.append(episode(done_, 2, answer.reward, seed=(number,)))
    return group_of(*members, uid=name)


def ours(
    prompts: Sequence[Sequence[Answer]], name: str, logits: Sequence[float] = LOGITS, **choices: Any
) -> list[float]:
    """The gradient of J, four numbers."""
    chosen = algorithm(name, **choices)
    groups = [group(f"p{n}", answers, logits) for n, answers in enumerate(prompts)]
    credit = assign_credit(groups, chosen, min_verdicts=2, answer_tokens=8)
    batch = pack(credit.samples, credit.weights, tokens_per_microbatch=8)
    policy = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    for part in batch.microbatches:
        new = torch.log_softmax(policy, -1)[torch.from_numpy(part.targets).long()]
        arrays = (part.logprobs, part.advantages, part.weights)
        old, advantages, weights = (torch.from_numpy(array).double() for array in arrays)
        index = torch.from_numpy(part.sample_idx)
        terms = policy_loss(chosen, new, old, advantages, weights, index, num_samples=batch.num_samples)
        (-terms.total).backward()
    assert policy.grad is not None
    return policy.grad.tolist()


def test_what_was_put_into_an_answer_is_nowhere() -> None:
    """Not in the ratio, not in the denominator: another token in its place changes nothing. The same token,
    had it been sampled, would."""
    other = Answer(-1, (2, 1, 0), (0.5, None, 1.0))
    sampled = Answer(-1, (2, 3, 0), (0.5, 1.0, 1.0))
    gradient = ours([FIRST, SECOND], "cispo")
    assert ours([(FIRST[0], other), SECOND], "cispo") == gradient
    assert ours([(FIRST[0], sampled), SECOND], "cispo") != pytest.approx(gradient, rel=0.01)


# -- the losses that the paper compares with, in the terms of its section 3


Objective = Callable[[Sequence[float]], float]


def objective(
    prompts: Sequence[Sequence[Answer]],
    term: Callable[[Sequence[float], Answer, float], Sequence[float]],
    scales: Sequence[float],
    aggregation: str,
) -> Objective:
    """J of the logits: ``term`` gives the value of each trained token of an answer with its advantage."""

    def value(logits: Sequence[float]) -> float:
        total = 0.0
        answers = sum(len(prompt) for prompt in prompts)
        tokens = sum(len(answer.trained) for prompt in prompts for answer in prompt)
        for prompt, scale in zip(prompts, scales, strict=True):
            mean = sum(answer.reward for answer in prompt) / len(prompt)
            own = sum(len(answer.trained) for answer in prompt)
            for answer in prompt:
                terms = term(logits, answer, (answer.reward - mean) / scale)
                weight = {
                    "sample": 1 / answers / len(answer.trained),
                    "prompt": 1 / len(prompts) / own,
                    "token": 1 / tokens,
                }[aggregation]
                total += weight * sum(terms)
        return total

    return value


def ratios(logits: Sequence[float], answer: Answer) -> list[float]:
    """Trainer over sampler, where the sampler was ``ratio`` away from the uniform policy."""
    return [math.exp(log_p(logits, y) - (UNIFORM - math.log(rho))) for y, rho in answer.trained]


def clip(low: float, high: float) -> Callable[[Sequence[float], Answer, float], list[float]]:
    def term(logits: Sequence[float], answer: Answer, advantage: float) -> list[float]:
        found = ratios(logits, answer)
        return [min(rho * advantage, min(max(rho, 1 - low), 1 + high) * advantage) for rho in found]

    return term


def sequence_clip(low: float, high: float) -> Callable[[Sequence[float], Answer, float], list[float]]:
    def term(logits: Sequence[float], answer: Answer, advantage: float) -> list[float]:
        found = ratios(logits, answer)
        s = math.exp(sum(map(math.log, found)) / len(found))
        return [min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage)] * len(found)

    return term


def cispo(logits: Sequence[float], answer: Answer, advantage: float) -> list[float]:
    """The weight is a constant: that of the policy as it stands."""
    frozen = [min(rho, CAP) for rho in ratios(LOGITS, answer)]
    return [w * advantage * log_p(logits, y) for w, (y, _) in zip(frozen, answer.trained, strict=True)]


def slope(value: Objective) -> list[float]:
    """By central differences at the uniform policy."""
    step = 1e-6
    moved = [[step * (i == j) for j in range(4)] for i in range(4)]
    return [(value(up) - value([-x for x in up])) / (2 * step) for up in moved]


GROUP = math.sqrt(2) + EPS  # of +1 and -1, n - 1
BATCH = math.sqrt(4 / 3) + EPS


@pytest.mark.parametrize(
    ("name", "choices", "term", "scale", "aggregation"),
    [
        ("grpo", {}, clip(0.2, 0.2), GROUP, "sample"),  # eq. 7
        ("dapo", {"overlong_buffer": 0.0}, clip(0.2, 0.28), GROUP, "token"),  # as DAPO has it
        (  # eq. 8: the paper's DAPO arm takes the mean over prompts
            "dapo",
            {"overlong_buffer": 0.0, "aggregation": "prompt", "clip_high": 0.26},
            clip(0.2, 0.26),
            GROUP,
            "prompt",
        ),
        ("gspo", {}, sequence_clip(3e-3, 4e-3), GROUP, "sample"),
        ("gspo", {"clip_low": 0.9, "clip_high": 3.0}, sequence_clip(0.9, 3.0), GROUP, "sample"),
        ("cispo", {}, cispo, BATCH, "prompt"),  # eq. 4
        ("cispo", {"scale": "none"}, cispo, 1.0, "prompt"),
        ("cispo", {"aggregation": "sample"}, cispo, BATCH, "sample"),
    ],
)
def test_every_loss_has_the_gradient_of_its_equation(
    name: str, choices: dict[str, Any], term: Any, scale: float, aggregation: str
) -> None:
    wanted = slope(objective([FIRST, SECOND], term, [scale, scale], aggregation))
    assert ours([FIRST, SECOND], name, **choices) == pytest.approx(wanted, rel=1e-5, abs=1e-8)
    if name == "cispo":  # ScaleRL: a prompt that all have solved is not there
        assert ours([FIRST, SECOND, EASY], name, **choices) == pytest.approx(wanted, rel=1e-5)
