"""A microbatch of training on the kernels of a card: what it launches, and that it is that of torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launches import Launches
from torch import Tensor
from worlds import adapters_of, tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.config import Recipe
from ostinato.launch.engine import choose_training_ops
from ostinato.model.config import parse_config
from ostinato.model.cuda import CUDA_OPS, scoring
from ostinato.model.cuda.proof import prove_ops
from ostinato.model.cuda.varlen import Blocks, Shape
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, Factors, Prepared
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.local import LocalPasses
from ostinato.train.passes import batch_objective
from ostinato.types import Sample, Support

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counted in Triton's interpreter"),
]
SIZES: dict[str, Any] = {"head_dim": 8, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
DENSE = tiny_dense(model_type="qwen3", intermediate_size=24, initializer_range=0.3, **SIZES)
EXPERTS = tiny_moe(moe_intermediate_size=8, initializer_range=0.3, **SIZES)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "of", lambda *_: Shape(*[Blocks(32, 32, 4)] * 3))
    monkeypatch.setattr(scoring, "CHUNK", 64)


def made(raw: dict[str, Any], layers: int) -> Decoder:
    return Decoder(parse_config({**raw, "num_hidden_layers": layers})).init_weights(0)


def part_of(vocab: int, answers: int, support: bool = False) -> Inputs:
    """A prompt of 3 tokens with answers of different lengths."""
    rng, found = np.random.default_rng(0), []
    prompt = rng.integers(4, vocab, 3)
    for member in range(answers):
        tokens = np.concatenate([prompt, rng.integers(4, vocab, 2 + member)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= 3
        kept = [
            np.unique([*rng.integers(4, vocab, 5), t] if m else []) for t, m in zip(tokens, mask, strict=True)
        ]
        found.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, -3, 0).astype(np.float32),
                advantages=np.where(mask, member - 1, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                group=0,
                prompt_len=3,
                uid=str(member),
                support=Support.of([ids.astype(np.int32) for ids in kept]) if support else None,
            )
        )
    batch = pack(found, [one.loss_mask / 30 for one in found], tokens_per_microbatch=100)
    return as_inputs(batch.microbatches[0], torch.device("cpu"), moe=False, replay=False)


def forward(raw: dict[str, Any], layers: int, answers: int, ops: Ops) -> tuple[Launches, Launches]:
    """Launches of the forward of a microbatch, and of its backward."""
    decoder = made(raw, layers)
    passes = LocalPasses(
        decoder, adapters_of(decoder), ops=ops, temperature=1.0, recompute=False, entropy_grad=False
    )
    prepared = Factors(adapters_of(decoder), torch.float32).prepared
    part = part_of(decoder.config.vocab_size, answers)
    with Launches() as ahead:
        hidden, _ = passes.forward(part, prepared)
    with Launches() as behind:
        hidden.sum().backward()
    return ahead, behind


@pytest.mark.parametrize(
    ("raw", "ahead", "behind"), [(DENSE, 24, 39), (EXPERTS, 47, 66)], ids=["dense", "mixture"]
)
def test_launches_of_a_layer_and_nothing_is_read_back(raw: dict[str, Any], ahead: int, behind: int) -> None:
    """With adapters, for three answers. By torch 79 and 99, and 100 and 126, more with every answer; and 23 a
    layer and microbatch to prepare the factors."""
    few, many = (forward(raw, layers, 3, CUDA_OPS) for layers in (1, 2))
    counts = [len(more.names) - len(less.names) for less, more in zip(few, many, strict=True)]
    assert counts == [ahead, behind]
    assert not many[0].reads and not many[1].reads


@pytest.mark.parametrize("raw", [DENSE, EXPERTS], ids=["dense", "mixture"])
def test_a_step_reads_nothing_back_and_prepares_factors_once(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, statistics and recomputing included, for two microbatches."""
    decoder, prepared = made(raw, 1), list[Adapters]()
    adapters, prepare = adapters_of(decoder), Adapters.prepare

    def counted(ours: Adapters, dtype: torch.dtype) -> Prepared:
        prepared.append(ours)
        return prepare(ours, dtype)

    monkeypatch.setattr(Adapters, "prepare", counted)
    for leaf in adapters.list_leaves().values():
        leaf.requires_grad_()
    passes = LocalPasses(decoder, adapters, ops=CUDA_OPS, temperature=0.8, recompute=True, entropy_grad=False)
    parts = [part_of(decoder.config.vocab_size, answers) for answers in (1, 2)]
    with Launches() as launches:
        passes.train(parts, batch_objective(algorithm("grpo"), 3), 1.0)
    assert launches.reads == [] and prepared == [adapters]


@pytest.mark.parametrize("answers", [1, 5])
def test_attention_is_one_launch_forward_and_two_backward_for_any_answers(answers: int) -> None:
    ahead, behind = forward(DENSE, 1, answers, CUDA_OPS)
    assert [name for name in ahead.names if "forward_kernel" in name] == ["_forward_kernel"]
    ours = [name for name in behind.names if name in ("_queries_kernel", "_keys_kernel")]
    assert ours == ["_queries_kernel", "_keys_kernel"]


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("raw", [DENSE, EXPERTS], ids=["dense", "mixture"])
def test_a_microbatch_is_that_of_torch(raw: dict[str, Any], support: bool) -> None:
    """Loss, statistics and gradients, at a temperature."""
    decoder = made(raw, 2)
    part = part_of(decoder.config.vocab_size, 3, support)

    def trained(ops: Ops) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        adapters = adapters_of(decoder)
        for leaf in adapters.list_leaves().values():
            leaf.requires_grad_()
        passes = LocalPasses(decoder, adapters, ops=ops, temperature=0.8, recompute=True, entropy_grad=False)
        (outcome,) = passes.train([part], batch_objective(algorithm("grpo"), 3), 1.0)
        gradients = {
            name: leaf.grad for name, leaf in adapters.list_leaves().items() if leaf.grad is not None
        }
        return {"loss": outcome.loss, **outcome.stats}, gradients

    (ours, found), (theirs, wanted) = trained(CUDA_OPS), trained(TORCH_OPS)
    for name, value in theirs.items():
        assert float(ours[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max().clamp_min(1e-4), name


def test_every_kernel_is_proven_before_it_is_used() -> None:
    decoder = made(DENSE, 1)
    assert prove_ops(decoder, CUDA_OPS) == (CUDA_OPS, [])

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("PTXAS error")

    def wrong(gate_up: Tensor) -> Tensor:
        return 1.1 * TORCH_OPS.silu_mul(gate_up)

    ops, said = prove_ops(decoder, replace(CUDA_OPS, rope=broken, silu_mul=wrong))
    assert ops == replace(CUDA_OPS, rope=TORCH_OPS.rope, silu_mul=TORCH_OPS.silu_mul)
    assert ["PTXAS error" in said[0], "differs" in said[1]] == [True, True]


def test_a_recipe_without_kernels_trains_by_torch() -> None:
    card: Any = SimpleNamespace(device=torch.device("cuda", 0))
    assert choose_training_ops(Recipe.model_validate({"engine": {"native": False}}), card) is TORCH_OPS
