"""The engine on the kernels of a card gives what it gives in torch, whatever runs beside a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import CONTRACT, Subject
from launches import Recorded
from torch import Tensor
from worlds import adapters_of, answers, decode, same, tiny, tiny_dense

from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.model.attention import CausalAttention
from ostinato.model.config import MoEConfig, parse_config
from ostinato.model.cuda import CUDA_OPS, CudaKernels
from ostinato.model.cuda.graphs import make_graph_factory
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS
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


def elsewhere(logits: Tensor, moe: MoEConfig, bias: Tensor | None, given: None) -> tuple[Tensor, ...]:
    """A router whose choice is another's: that of its own logits, each taken for its neighbour's."""
    ids, _, _ = CUDA_OPS.route(logits.roll(1, -1), moe, bias, None)
    return *TORCH_OPS.route(logits, moe, bias, ids)[:2], ids


def test_routes_that_were_recorded_are_replayed_by_torch() -> None:
    """The engine is made to choose other experts than its router would: only a replay can agree."""
    decoder = tiny("softmax-renormalised").to(DEVICE)
    made = LocalEngine(decoder, kernels=CudaKernels(ops=replace(CUDA_OPS, route=elsewhere)))
    asked = requests(2, 4)
    for request, done in zip(asked, answers(made, asked), strict=True):
        whole = torch.from_numpy(np.concatenate([request.tokens, done.tokens])).long().to(DEVICE)
        assert done.experts is not None and done.prompt_experts is not None
        routes = torch.from_numpy(np.concatenate([done.prompt_experts, done.experts]).astype(np.int64))
        places = torch.arange(len(whole), device=DEVICE)
        with torch.no_grad():
            for routing, agrees in ((routes.to(DEVICE), True), (None, False)):
                hidden, _ = decoder(whole, places, CausalAttention(), routing=routing)
                logits = decoder.logits(hidden[len(request.tokens) - 1 : -1]).log_softmax(-1)
                found = logits.gather(1, whole[len(request.tokens) :, None])[:, 0].cpu().numpy()
                assert (np.abs(found - done.logprobs).max() < 1e-4) == agrees


SMALL = {"head_dim": 8, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 13, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
DENSE = Decoder(parse_config(tiny_dense(model_type="qwen3", **SMALL, **HEADS))).init_weights(0).to(DEVICE)


def score(adapters: Adapters, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64)).to(DEVICE)
    with torch.no_grad():
        hidden, _ = DENSE(ids, torch.arange(len(ids), device=DEVICE), CausalAttention(), adapters=adapters)
        logprobs = DENSE.logits(hidden[:-1]).log_softmax(-1).gather(1, ids[1:, None])
    return logprobs[:, 0].cpu().numpy()


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_it_keeps_the_promises_of_every_engine(promise: Callable[[Subject], None]) -> None:
    """With graphs, which a stand-in replays where there is no card."""
    graph = make_graph_factory() if DEVICE == "cuda" else Recorded
    kernels = CudaKernels(graph=graph)
    made = LocalEngine(DENSE, kernels=kernels, decode=decode, kv_memory_mb=1, context_limit=64)
    promise(
        Subject(
            engine=made,
            vocab=DENSE.config.vocab_size,
            policies=(adapters_of(DENSE, 1), adapters_of(DENSE, 2)),
            prompt_tokens=5,
            answer_tokens=6,
            decode=decode,
            score=score,
        )
    )
