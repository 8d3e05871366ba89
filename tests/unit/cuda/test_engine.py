"""The engine on the kernels of a card gives what it gives in torch, whatever runs beside a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from worlds import adapters_of, answers, same, tiny

from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.model.cuda import CudaKernels
from ostinato.model.decoder import Decoder
from ostinato.types import Completion, Request, Sampling

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def engine(decoder: Decoder, *, cuda: bool, **changes: Any) -> LocalEngine:
    made = LocalEngine(decoder, kernels=CudaKernels() if cuda else None, **changes)
    made.publish(adapters_of(decoder), 1)
    return made


def requests(count: int, tokens: int, **sampling: Any) -> list[Request]:
    """Prompts of several lengths, of which two share one each."""
    prompts = [
        np.random.default_rng(k // 2).integers(4, 30, 5 + k // 2).astype(np.int32) for k in range(count)
    ]
    return [
        Request(tokens=prompt, sampling=Sampling(max_tokens=tokens, **sampling), seed=(3, k), uid=str(k))
        for k, prompt in enumerate(prompts)
    ]


def check(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        same(one, other, bits=False)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(("family", "sampling"), [("softmax", {}), ("sigmoid-bias-groups", FILTERS)])
def test_answers_are_those_of_torch(family: str, sampling: dict[str, Any]) -> None:
    """Of a mixture with grouped queries, and of one with latent attention."""
    decoder = tiny(family).to(DEVICE)
    asked = requests(4, 4, **sampling)
    check(answers(engine(decoder, cuda=True), asked), answers(engine(decoder, cuda=False), asked))


def test_a_preempted_answer_is_the_one_that_was_not() -> None:
    """Blocks for less than two sequences: one is computed again as a prompt, with what it had said."""
    decoder = tiny("softmax").to(DEVICE)
    asked = requests(2, 14)
    small = engine(decoder, cuda=True)
    small._scheduler.cache = KVCache(3)
    ours = answers(small, asked)
    assert small.counters.preempted > 0
    check(ours, answers(engine(decoder, cuda=False), asked))
