"""A device that is full: microbatches are computed by halves, and only rounding tells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_options import trainer_options
from worlds import tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.config import TrainerSection
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, Factors, init_adapters, pad_rank
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention, check_segments
from ostinato.model.shapes import AdapterSpec
from ostinato.train.halve import halve
from ostinato.train.inputs import as_inputs
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Sample, Segment, Support

DENSE, MOE = tiny_dense(max_position_embeddings=64), tiny_moe(head_dim=8, max_position_embeddings=64)
CPU = torch.device("cpu")
LR = TrainerSection(lr=1e-2)


def samples(vocab: int, moe: Any = None, support: bool = False) -> list[Sample]:
    """Two groups of three, of which one shares a prompt of 6 and one a prompt of 2; one answer is a token."""
    rng, found = np.random.default_rng(0), []
    for group, before in enumerate((6, 2)):
        prompt = rng.integers(4, vocab, before)
        routes = None if moe is None else routes_of(rng, before, moe)
        for member, behind in enumerate((5, 1, 9)):
            tokens = np.concatenate([prompt, rng.integers(4, vocab, behind)]).astype(np.int32)
            mask = np.arange(before + behind) >= before
            own = None if routes is None else np.concatenate([routes, routes_of(rng, behind, moe)])
            kept = [np.unique([*rng.integers(4, vocab, 5), t]) for t in tokens]
            kept = [np.array(ids if m else [], np.int32) for ids, m in zip(kept, mask, strict=True)]
            found.append(
                Sample(
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, -3, 0).astype(np.float32),
                    advantages=np.where(mask, rng.standard_normal(), 0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    group=group,
                    prompt_len=before,
                    uid=f"{group}/{member}",
                    experts=own,
                    support=Support.of(kept) if support else None,
                )
            )
    return found


def routes_of(rng: np.random.Generator, rows: int, moe: Any) -> np.ndarray:
    shape = (rows, len(moe.layers), moe.num_experts)
    return rng.random(shape).argsort(axis=-1)[..., : moe.top_k].astype(np.int16)


def batch_of(some: list[Sample]) -> Batch:
    weights = [one.loss_mask / 30 for one in some]
    return pack(some, weights, tokens_per_microbatch=200)


def too_small(most: int, calls: list[int]) -> Ops:
    """Of a device with room for ``most`` rows."""

    def attention(segments: tuple[Segment, ...]) -> PackedAttention:
        calls.append(segments[-1].stop)
        if segments[-1].stop > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")
        return PackedAttention(segments)

    return replace(TORCH_OPS, attention=attention)


def trained(raw: dict[str, Any], ops: Ops, steps: int = 1, **changes: Any) -> tuple[Adapters, list[dict]]:
    decoder = Decoder(parse_config(raw)).init_weights(0)
    targets = ("attn", "experts") if decoder.num_moe_layers else ("attn", "mlp")
    adapters = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8, targets=targets), seed=1)
    options = trainer_options(settings=LR, ops=ops, replay_threshold=0.0)
    trainer = PolicyTrainer(decoder, adapters, algorithm("grpo"), **options)
    batch = batch_of(samples(decoder.config.vocab_size, decoder.config.moe, **changes))
    return adapters, [dict(trainer.step(batch).metrics) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "mixture"])
def test_a_step_by_halves_is_the_step(raw: dict[str, Any], support: bool) -> None:
    """Losses, metrics and gradients, of replayed experts and restricted vocabularies too."""
    calls: list[int] = []
    ours, (found, again) = trained(raw, too_small(14, calls), steps=2, support=support)
    twin, (wanted, _) = trained(raw, TORCH_OPS, steps=2, support=support)
    assert found.pop("halved_microbatches") >= 2
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    for (name, one), other in zip(ours.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4, msg=name)
    assert again["halved_microbatches"] >= 1
    assert sum(rows > 14 for rows in calls) <= 4, "what did not fit once is not tried again"


@pytest.mark.slow
def test_a_sequence_alone_that_does_not_fit_ends_the_step() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trained(DENSE, too_small(10, []))


def test_what_the_halves_have() -> None:
    vocab = parse_config(DENSE).vocab_size
    whole = as_inputs(batch_of(samples(vocab, support=True)).microbatches[0], CPU, moe=False, replay=False)
    pair = halve(whole)
    assert pair is not None
    assert torch.equal(torch.cat([half.inputs.targets for half in pair]), whole.targets)
    assert sum((half.inputs.source.uids for half in pair), ()) == whole.source.uids
    assert set(torch.cat([half.rows for half in pair]).tolist()) == set(range(len(whole.tokens)))
    for half in pair:
        part = half.inputs
        check_segments(part.segments)
        assert part.segments[-1].stop == len(part.tokens) == len(half.rows) < len(whole.tokens)
        assert torch.equal(part.tokens, whole.tokens[half.rows])
        assert torch.equal(part.positions, whole.positions[half.rows])
        assert torch.equal(part.rows, torch.from_numpy(part.source.rows.astype(np.int64)))
        assert part.source.support is not None
        assert part.source.support.holds(part.source.targets).all()
    single = as_inputs(batch_of(samples(vocab)[:1]).microbatches[0], CPU, moe=False, replay=False)
    assert halve(single) is None


# factors that are prepared once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "mixture"])
def test_factors_prepared_once_have_the_same_gradients_to_the_bit(
    raw: dict[str, Any], dtype: torch.dtype
) -> None:
    """As when each of three microbatches prepares its own."""
    decoder = Decoder(parse_config(raw), dtype=dtype).init_weights(0)
    targets = ("attn", "experts") if decoder.num_moe_layers else ("attn", "mlp")
    spec = AdapterSpec(rank=4, alpha=8, targets=targets)
    segment = (Segment(start=0, stop=7),)

    def backward(adapters: Any, number: int) -> None:
        ids = torch.arange(7) + number
        hidden, _ = decoder.forward(ids, torch.arange(7), PackedAttention(segment), adapters=adapters)
        (hidden.float() * (number + torch.arange(7.0)[:, None])).sum().backward()

    def gradients(work: Callable[[Adapters], None]) -> dict[str, torch.Tensor | None]:
        adapters = init_adapters(decoder.config, spec, 3)
        work(adapters)
        return {name: leaf.grad for name, leaf in adapters.list_leaves().items()}

    def apart(adapters: Adapters) -> None:
        for number in range(3):
            backward(adapters, number)

    def once(adapters: Adapters) -> None:
        factors = Factors(adapters, dtype)
        backward(factors.prepared, 9)
        factors.drop()  # of a microbatch that did not fit
        for number in range(3):
            backward(factors.prepared, number)
            factors.add()
        factors.backward()

    ours, theirs = gradients(once), gradients(apart)
    for name, wanted in theirs.items():
        found = ours[name]
        assert wanted is not None and found is not None and torch.equal(found, wanted), name


def test_the_gradients_of_factors_import_no_compiler() -> None:
    """torch.autograd.backward with gradients imports sympy to compare their shapes: a second and 50 MB."""
    program = (
        "import sys, torch; from worlds import tiny_dense; from ostinato.model.config import parse_config;"
        "from ostinato.model.lora import Factors, init_adapters;"
        "from ostinato.model.shapes import AdapterSpec;"
        "adapters = init_adapters(parse_config(tiny_dense()), AdapterSpec(rank=2, targets=('attn',)), 0);"
        "factors = Factors(adapters, torch.float32);"
        "sum(leaf.sum() for leaf in factors._leaves).backward(); factors.add(); factors.backward();"
        "assert all(leaf.grad is not None for leaf in adapters.list_leaves().values());"
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_ranks_of_a_multiple_give_the_same_update() -> None:
    a, b = torch.randn(5, 6, 3), torch.randn(5, 4, 6)
    wide_a, wide_b = pad_rank(a, b)
    assert wide_a.shape == (5, 8, 3) and wide_b.shape == (5, 4, 8)
    torch.testing.assert_close(wide_b @ wide_a, b @ a)
    assert pad_rank(wide_a, wide_b)[0] is wide_a
