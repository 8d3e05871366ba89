"""Routes of our engine, replayed by our decoder and by transformers: the same log-probabilities.

The engine is made to choose other experts than its router would, so that nothing but a replay of what it
recorded can agree. Then laws that need a compiler or a GPU. Numbers are those of docs/replay.md.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import KINDS, VOCAB, random_routes, tiny

from ostinato.engine.local import LocalEngine
from ostinato.hf.replay import Routes, attach_replay
from ostinato.model.attention import CausalAttention
from ostinato.model.config import MoEConfig
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.model.native import BuildError, Kernels, load_kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.types import Completion, Request, Sampling

transformers = pytest.importorskip("transformers", minversion="5.0")

FAMILIES = [kind for kind in KINDS if "moe_layer_freq" not in KINDS[kind]]  # which transformers ignores


def kernels_of(name: str) -> Kernels | None:
    if name == "torch":
        return None
    try:
        return load_kernels()
    except BuildError as error:
        pytest.skip(str(error))


def elsewhere(logits: Tensor, moe: MoEConfig, bias: Tensor | None, given: None) -> tuple[Tensor, ...]:
    """A router whose choice is another's: that of its own logits, each taken for its neighbour's."""
    ids, _, _ = TORCH_OPS.route(logits.roll(1, -1), moe, bias, None)
    return *TORCH_OPS.route(logits, moe, bias, ids)[:2], ids


def answers(engine: LocalEngine) -> list[tuple[np.ndarray, Completion]]:
    """(prompt, completion) of a few requests, in their order."""
    prompts = [np.random.default_rng(n).integers(3, VOCAB, n).astype(np.int32) for n in (5, 17, 18)]
    requests = [
        Request(tokens=prompt, sampling=Sampling(max_tokens=20), seed=(3, i))
        for i, prompt in enumerate(prompts)
    ]

    async def collect() -> list[tuple[int, Completion]]:
        return [one async for one in engine.generate(requests)]

    found = dict(asyncio.run(collect()))
    return [(prompt, found[i]) for i, prompt in enumerate(prompts)]


def logprobs(logits: Tensor, whole: Tensor, prompt: int) -> Tensor:
    """Of the answer [T], from logits [P + T, V] of the whole sequence."""
    return logits[prompt - 1 : -1].log_softmax(-1).gather(1, whole[prompt:, None])[:, 0]


def exported(decoder: Decoder, folder: Path) -> Any:
    save_model(decoder, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kernels", ["torch", "native", "torch, forced"])
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_both_trainers_replay_what_our_engine_did(kind: str, kernels: str, tmp_path: Path) -> None:
    """[4, 5, 10, 11] One recording, two trainers: the engine's log-probabilities to rounding. Where the
    engine was forced elsewhere, native log-probabilities are others."""
    decoder, forced = tiny(kind), "forced" in kernels
    engine = LocalEngine(decoder, kernels=kernels_of(kernels.partition(",")[0]), kv_memory_mb=4)
    if forced:
        engine._runner._ops = replace(TORCH_OPS, route=elsewhere)
    theirs = exported(decoder, tmp_path)
    with attach_replay(theirs) as replay:
        assert replay.layers == decoder.config.moe.layers  # type: ignore[union-attr]
        for prompt, done in answers(engine):
            whole = torch.from_numpy(np.concatenate([prompt, done.tokens])).long()
            routes = Routes.from_completion(done, replay.num_experts)
            assert routes.known.tolist() == [True] * (len(whole) - 1) + [False]
            ours, native = decoder(
                whole, torch.arange(len(whole)), CausalAttention(), routing=torch.from_numpy(routes.dense())
            )
            with replay.using(routes) as tape:
                logits = theirs(whole[None]).logits[0]
            sampled = torch.from_numpy(done.logprobs)
            for one in (decoder.logits(ours), logits):
                torch.testing.assert_close(logprobs(one, whole, len(prompt)), sampled, rtol=0, atol=3e-5)
            off = (logprobs(theirs(whole[None]).logits[0], whole, len(prompt)) - sampled).abs().max()
            assert off > 0.1 if forced else off < 3e-5
            assert np.nanmean(tape.overlap()) < 0.9 if forced else np.nanmin(tape.overlap()) == 1
            assert native is not None
            np.testing.assert_array_equal(np.sort(tape.native().dense()), np.sort(native.numpy()))


@pytest.mark.parametrize("kind", ["softmax-renormalised", "sigmoid-bias-groups"])
def test_both_trainers_have_the_gradient_of_the_same_router(kind: str, tmp_path: Path) -> None:
    """[6] Under routes that neither would choose."""
    decoder = tiny(kind)
    theirs = exported(decoder, tmp_path)
    decoder.set_trainable(True)
    tokens = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(2))
    with attach_replay(theirs) as replay:
        routing = random_routes(decoder, 24)
        hidden, _ = decoder(tokens, torch.arange(24), CausalAttention(), routing=routing)
        decoder.logits(hidden).log_softmax(-1).square().mean().backward()
        with replay.using(Routes.of(routing, replay.num_experts)):
            theirs(tokens[None]).logits[0].log_softmax(-1).square().mean().backward()
        for site in replay.sites:
            expected = decoder.get_parameter(f"layers.{site.layer}.moe.router").grad
            assert expected is not None and expected.abs().max() > 1e-6
            torch.testing.assert_close(site.module.weight.grad, expected, rtol=1e-3, atol=1e-6)


def test_a_detached_model_has_no_hook_left(tmp_path: Path) -> None:
    """[1] Not only none that does anything: a hook would still cost a graph break when compiled."""
    theirs = exported(tiny("softmax"), tmp_path)

    def hooks() -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in theirs.modules())

    before = hooks()
    with attach_replay(theirs) as replay:
        assert hooks() >= before + len(replay.sites)
    assert hooks() == before


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_the_order_of_columns_is_only_an_order_of_sums(kind: str, tmp_path: Path) -> None:
    """[8] On the interop path, for every formula."""
    decoder, tokens = tiny(kind), torch.arange(20)[None]
    theirs, routing = exported(decoder, tmp_path), random_routes(decoder, 20)
    with attach_replay(theirs) as replay:
        with replay.using(Routes.of(routing, replay.num_experts)):
            one = theirs(tokens).logits
        with replay.using(Routes.of(routing.flip(-1), replay.num_experts)):
            torch.testing.assert_close(theirs(tokens).logits, one, rtol=1e-5, atol=2e-5)


# compiled, and on a GPU


def test_a_compiled_forward_replays_what_it_is_given() -> None:
    """[25] Routes are inputs of the graph: compiled under one routing, it obeys another, or none. In bf16,
    because torch 2.13 traces no grouped product of fp32."""
    decoder, tokens, places = tiny("sigmoid-bias-groups", torch.bfloat16), torch.arange(20), torch.arange(20)

    def logits(routing: Tensor | None) -> Tensor:
        return decoder.logits(decoder(tokens, places, CausalAttention(), routing=routing)[0])

    compiled = torch.compile(logits, backend="eager")
    with torch.no_grad():
        for seed in range(3):
            routing = random_routes(decoder, 20, seed)
            torch.testing.assert_close(compiled(routing), logits(routing))
        torch.testing.assert_close(compiled(None), logits(None))


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_transformers_model_replays_what_it_is_given(tmp_path: Path) -> None:
    """[25] Other routes each time, and remembered anew: inside a graph both would be constants."""
    decoder, tokens = tiny("softmax-renormalised"), torch.arange(20)[None]
    theirs = exported(decoder, tmp_path)
    with attach_replay(theirs) as replay:
        compiled = torch.compile(theirs, backend="eager")
        for seed in range(3):
            routes = Routes.of(random_routes(decoder, 20, seed), replay.num_experts)
            with replay.using(routes) as eager:
                expected = theirs(tokens).logits
            with replay.using(routes) as tape:
                torch.testing.assert_close(compiled(tokens).logits, expected)
            np.testing.assert_array_equal(tape.native().ids, eager.native().ids)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_replay_on_a_gpu_is_replay(kind: str, dtype: torch.dtype) -> None:
    """[25] Identity bit for bit, forced routes as on a CPU, checkpoints with the same gradients."""
    decoder, tokens = tiny(kind, dtype), torch.arange(24)
    forced = random_routes(decoder, 24)
    expected, _ = decoder(tokens, tokens, CausalAttention(), routing=forced)
    decoder, tokens = decoder.to("cuda").set_trainable(True), tokens.cuda()

    def run(routing: Tensor | None, recompute: bool = False) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        hidden, native = decoder(tokens, tokens, CausalAttention(), routing=routing, recompute=recompute)
        leaves = [leaf for leaf in decoder.parameters() if leaf.requires_grad]
        loss = decoder.logits(hidden).float().square().mean()
        return hidden, native, list(torch.autograd.grad(loss, leaves))

    off = 1e-3 if dtype == torch.float32 else 0.1
    hidden, native, _ = run(None)
    again, same, _ = run(native)
    assert native is not None and same is not None
    assert torch.equal(again, hidden) and torch.equal(same, native)
    found, _, kept = run(forced.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=off, atol=off)
    torch.testing.assert_close(run(forced.cuda(), recompute=True)[2], kept, rtol=off, atol=off)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softmax-renormalised", "sigmoid-bias-groups"])
def test_transformers_on_a_gpu_compiled_and_not(kind: str, tmp_path: Path) -> None:
    """[25] The interop path, with inductor between the routers."""
    decoder, tokens = tiny(kind), torch.arange(24, device="cuda")[None]
    theirs = exported(decoder, tmp_path).cuda()
    with attach_replay(theirs) as replay, torch.no_grad():
        with replay.record() as tape:
            plain = theirs(tokens).logits
        with replay.using(tape.native()):
            assert torch.equal(theirs(tokens).logits, plain)
        routes = Routes.of(random_routes(decoder, 24), replay.num_experts)
        with replay.using(routes):
            eager = theirs(tokens).logits
        compiled = torch.compile(theirs)
        for _ in range(2):
            with replay.using(routes):
                torch.testing.assert_close(compiled(tokens).logits, eager, rtol=1e-3, atol=1e-3)
