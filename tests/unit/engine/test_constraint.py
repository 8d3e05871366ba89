"""Constraints of answers: drawn from what they leave, scored under it, and no other answer's matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference.scripted import ScriptedDrafter
from worlds import DRAFTS_PAY, KERNELS, VOCAB, answers, same, tiny_decoder

from ostinato.algo.noise import key, uniform
from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.engine.requests import Limits
from ostinato.engine.sampler import sample_torch
from ostinato.engine.sequences import Settings
from ostinato.engine.vllm_answers import check_vllm_request
from ostinato.model.attention import CausalAttention
from ostinato.model.native import Kernels
from ostinato.types import Request, Sampling, Stop

DECODER = tiny_decoder()
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 5, "stop_tokens": (3, 6), "min_tokens": 4},
]


def thirds(answer: np.ndarray) -> np.ndarray:
    """A third of the vocabulary may come, which one depends on all that was answered."""
    return np.arange(VOCAB) % 3 != int(answer.sum()) % 3


def engine(kernels: Kernels | None, **options: Any) -> LocalEngine:
    given = {"kv_memory_mb": 4, "context_limit": 256, "cost": DRAFTS_PAY, **options}
    return LocalEngine(DECODER, kernels=kernels, **given)


def requests(max_tokens: int = 24) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            tokens=rng.integers(0, VOCAB, 5 + 7 * i).astype(np.int32),
            sampling=Sampling(**{"max_tokens": max_tokens, **sampling}),
            seed=(4, i),
            constraint=thirds,
        )
        for i, sampling in enumerate(SAMPLINGS)
    ]


def naive(request: Request) -> tuple[list[int], list[float]]:
    """The slow twin: the whole sequence for every token, and the mask on its logits."""
    tokens, logprobs, first = [int(t) for t in request.tokens], [], len(request.tokens)
    for n in range(request.sampling.max_tokens):
        with torch.inference_mode():
            row = torch.tensor(tokens)
            hidden, _ = DECODER(row, torch.arange(len(tokens)), CausalAttention())
            logits = DECODER.logits(hidden[-1:]).clone()
            logits[0, torch.from_numpy(thirds(np.array(tokens[first:], np.int32)))] = -torch.inf
            logits[
                0, list(request.sampling.stop_tokens) if n < request.sampling.min_tokens else []
            ] = -torch.inf
        u = np.array([uniform(key(request.seed), len(tokens))])
        token, logprob, *_ = sample_torch(logits, Settings.of([request.sampling]), u)
        tokens.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        if tokens[-1] in request.sampling.stop_tokens:
            break
    return tokens[first:], logprobs


@pytest.mark.parametrize("kernels", KERNELS)
def test_constrained_answers_are_those_of_the_naive_generator_under_the_mask(kernels: Kernels | None) -> None:
    for asking, done in zip(requests(), answers(engine(kernels), requests()), strict=True):
        tokens, logprobs = naive(asking)
        assert done.tokens.tolist() == tokens
        assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
        free = [not thirds(done.tokens[:n])[token] for n, token in enumerate(done.tokens.tolist())]
        assert all(free)
        if asking.sampling.filtered:
            assert done.support is not None and int(done.support.counts.max()) <= VOCAB // 3 + 1


@pytest.mark.parametrize("kernels", [p for p in KERNELS if p.id == "native"])
def test_nobody_beside_a_constraint_is_touched_nor_it_by_batch_preemption_or_drafts(kernels: Kernels) -> None:
    constrained, free = (
        requests(48),
        [replace(r, constraint=None, seed=(9, i)) for i, r in enumerate(requests(48))],
    )
    alone = [answers(engine(kernels), [one])[0] for one in (*constrained, *free)]
    for a, b in zip(alone, answers(engine(kernels), [*constrained, *free]), strict=True):
        same(a, b)
    tight = engine(kernels, step_tokens=9)
    tight._scheduler.cache = KVCache(14)
    for a, b in zip(alone, answers(tight, [*constrained, *free]), strict=True):
        same(a, b)
    assert tight.counters.preempted > 0
    whole = {
        one.seed: np.concatenate([one.tokens, done.tokens])
        for one, done in zip((*constrained, *free), alone, strict=True)
    }
    drafter = ScriptedDrafter(lambda request, tokens: whole[request.seed][len(tokens) :], length=7)
    drafting = engine(kernels, drafter=drafter)
    for a, b in zip(alone, answers(drafting, [*constrained, *free]), strict=True):
        same(a, b)
    assert drafting.counters.accepted > 0  # of those that have no constraint


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_constraint_that_leaves_nothing_ends_its_own_answer_only(kernels: Kernels | None) -> None:
    def three(answer: np.ndarray) -> np.ndarray:
        return np.full(VOCAB, len(answer) >= 3)

    free = [replace(one, constraint=None) for one in requests()]
    alone = answers(engine(kernels), free)
    stuck, *others = answers(engine(kernels), [replace(requests()[0], constraint=three), *free])
    assert stuck.stop is Stop.ERROR and len(stuck.tokens) == 3
    for a, b in zip(alone, others, strict=True):
        same(a, b, bits=kernels is not None)


def test_an_engine_elsewhere_refuses_a_constraint() -> None:
    limits = Limits(context=99, vocab_size=VOCAB, blocks=9, has_text=True, policies={"": 0})
    with pytest.raises(ValueError, match="has a constraint"):
        check_vllm_request(requests()[0], limits)
