"""The fused decode step against its twin, the decoder op by op: the same bits, in fp32 and bf16, for every
family that it knows, with and without adapters, whatever stands in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, make_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import DEEPSEEK, VOCAB, adapters_of, tiny_dense

from ostinato.engine.paged import BLOCK, KVStore, NativePaged, Rows
from ostinato.model.config import _DEFAULTS, ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Prepared
from ostinato.model.native import FusedStep, Kernels
from ostinato.model.native.fused import has_only_read_fields
from ostinato.model.quantise import Weights, quantise
from ostinato.model.shapes import ROLES, ExpertScheme

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [*((dtype, None) for dtype in DTYPES), (torch.float32, torch.bfloat16)]  # dtype, storage of matrices
COMMON = tiny_dense(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    intermediate_size=56,
    max_position_embeddings=2048,
    initializer_range=0.2,
)
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
SHARED = (
    "shared"  # the width of an expert that every token goes through: no family of plain attention has one yet
)
OLMOE = {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 64},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {
        "model_type": "mistral",
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {**QWEN_MOE, "norm_topk_prob": True},
    "qwen3_moe_raw": {**QWEN_MOE, "norm_topk_prob": False, "num_key_value_heads": 1, "head_dim": 128},
    "shared": {**QWEN_MOE, SHARED: 40},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": OLMOE,
}
LATENT = {**DEEPSEEK, "num_key_value_heads": 6, "n_group": 1, "topk_group": 1}


def model(
    family: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    storage: torch.dtype | None = None,
) -> Decoder:
    config = parse_config({**COMMON, **{key: value for key, value in family.items() if key != SHARED}})
    if SHARED in family:
        assert config.moe is not None
        config = replace(config, moe=replace(config.moe, shared_intermediate_size=family[SHARED]))
    decoder = Decoder(config, dtype=dtype, storage=storage).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # biases and norms that show
        for name, parameter in decoder.named_parameters():
            if name.endswith(("bias", "norm")):
                parameter += torch.randn(parameter.shape, generator=generator) * 0.2
    return decoder


def adapters(decoder: Decoder, scheme: ExpertScheme, targets: tuple[str, ...], rank: int) -> Prepared:
    found = adapters_of(decoder, 1, 0.3, rank=rank, targets=targets, expert_scheme=scheme)
    return found.detach_copy().prepare(decoder.dtype)


def test_a_family_that_is_added_is_not_computed_without_what_is_new_in_it() -> None:
    """What the step does not know was a list: a field that it had never heard of counted as known, and the
    sampler was another model than the trainer, without a word."""
    config = parse_config({**COMMON, **FAMILIES["qwen3"]})
    assert has_only_read_fields(config, ModelConfig)
    later = make_dataclass(
        "Later", [("unrotated", tuple[int, ...], ())], bases=(ModelConfig,), frozen=True, kw_only=True
    )
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    assert has_only_read_fields(later(**values), ModelConfig) and not has_only_read_fields(
        later(**values, unrotated=(1,)), ModelConfig
    )
    compared = {family["model_type"] for family in FAMILIES.values()}
    others = {"gemma3_text", "deepseek_v3"}  # which the decoder computes
    assert compared | others == set(_DEFAULTS), (
        "a new family is compared here, or is one that the step refuses"
    )


class Twins:
    """The step and its twin, each with its own cache of the same sequences."""

    def __init__(
        self, kernels: Kernels, decoder: Decoder, prepared: Prepared | None, sequences: int, blocks: int
    ) -> None:
        step = kernels.fused(decoder, [prepared])
        assert step is not None
        self.kernels, self.decoder, self.prepared, self.step = kernels, decoder, prepared, step
        self.tables = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(2))
        self.tables = self.tables.view(sequences, blocks).int()
        layers, count = decoder.config.num_layers, sequences * blocks
        self.ours, self.twin = (
            KVStore.allocate(layers, count, decoder.kv_shape, decoder.dtype, torch.device("cpu"))
            for _ in range(2)
        )

    def rows(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Rows]:
        """Positions and places of counts[s] rows of sequence s, from position starts[s] on."""
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slots = self.tables[owner.long(), positions // BLOCK].long() * BLOCK + positions % BLOCK
        return positions, Rows(slots, self.tables, owner, (positions + 1).int())

    def check(self, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Both paths give the same bits; the hidden states."""
        attend = NativePaged(self.kernels, self.twin, rows)
        with torch.inference_mode():
            hidden, routing = self.decoder.forward(
                tokens, positions, attend, adapters=self.prepared, ops=self.kernels.ops
            )
            ours, routes = self.step.forward(tokens, positions, rows, self.ours.keys, self.ours.values)
        assert torch.isfinite(hidden).all() and torch.equal(ours, hidden)
        assert torch.equal(self.ours.keys, self.twin.keys)
        assert torch.equal(self.ours.values, self.twin.values)
        assert (routes is None) == (routing is None)
        assert routes is None or routing is None or torch.equal(routes, routing)
        return ours


def draw_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def check_decoding(kernels: Kernels, decoder: Decoder, adapted: ExpertScheme | None) -> None:
    """Prompts, then drafts, then single tokens: 25, 12 and 3 rows take different forms of products."""
    prepared = adapters(decoder, adapted, ROLES, 4) if adapted is not None else None
    twins = Twins(kernels, decoder, prepared, sequences=3, blocks=4)
    starts = [0, 0, 0]
    for counts in ([3, 21, 1], [1, 10, 1], [1, 1, 1]):
        positions, rows = twins.rows(starts, counts)
        twins.check(draw_tokens(sum(counts)), positions, rows)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapted", [None, *ExpertScheme])
def test_the_step_is_the_decoder(
    kernels: Kernels, family: str, adapted: ExpertScheme | None, kind: tuple[torch.dtype, torch.dtype | None]
) -> None:
    check_decoding(kernels, model(FAMILIES[family], kind[0], storage=kind[1]), adapted)


@pytest.mark.parametrize("kind", [Weights.INT8, Weights.FP8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "shared", "mixtral"])
@pytest.mark.parametrize("adapted", [None, *ExpertScheme])
def test_the_step_is_the_decoder_with_quantised_weights(
    kernels: Kernels, family: str, adapted: ExpertScheme | None, kind: Weights
) -> None:
    check_decoding(kernels, quantise(model(FAMILIES[family]), kind), adapted)


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen3_moe"]),
    dtype=st.sampled_from(DTYPES),
    starts=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 24), min_size=5, max_size=5),
    threads=st.integers(1, 3),
    rank=st.sampled_from([0, 3, 8]),
)
def test_any_rows_at_any_context_by_any_threads(
    kernels: Kernels,
    family: str,
    dtype: torch.dtype,
    starts: list[int],
    counts: list[int],
    threads: int,
    rank: int,
) -> None:
    decoder = model(FAMILIES[family], dtype)
    prepared = adapters(decoder, ExpertScheme.SHARED_OUTER, ROLES, rank) if rank else None
    twins = Twins(kernels, decoder, prepared, len(starts), blocks=6)
    for store in (twins.ours, twins.twin):  # a past that neither has computed
        generator = torch.Generator().manual_seed(3)
        store.keys.copy_(torch.randn(store.keys.shape, generator=generator))
        store.values.copy_(torch.randn(store.values.shape, generator=generator))
    counts = counts[: len(starts)]
    positions, rows = twins.rows(starts, counts)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        twins.check(draw_tokens(sum(counts)), positions, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    """The law that the engine's exactness rests on, here for whole passes of 1 to 150 rows."""
    decoder = model(FAMILIES["qwen3_moe"], dtype)
    prepared = adapters(decoder, ExpertScheme.SHARED_OUTER, ("attn", "mlp", "experts"), 4)
    twins = Twins(kernels, decoder, prepared, sequences=150, blocks=1)
    tokens = draw_tokens(150)
    whole = None
    for count in (150, 1, 2, 5, 8, 9, 17, 40, 64, 65, 100):
        positions, rows = twins.rows([0] * count, [1] * count)
        with torch.inference_mode():
            ours, _ = twins.step.forward(tokens[:count], positions, rows, twins.ours.keys, twins.ours.values)
        whole = ours if whole is None else whole
        assert torch.equal(ours, whole[:count])


def test_steps_alternate_and_grow_without_sharing_state(kernels: Kernels) -> None:
    """Two models in turn, with passes that grow and shrink, and a table of rotations that has to grow."""
    pairs = [
        Twins(kernels, model(FAMILIES[name], seed=seed), None, sequences=2, blocks=44)
        for seed, name in enumerate(("qwen3_moe", "qwen2"))
    ]
    starts = [0, 0]
    for counts in ([2, 1], [40, 33], [1, 1], [600, 2], [1, 30]):
        for twins in pairs:
            positions, rows = twins.rows(starts, counts)
            twins.check(draw_tokens(sum(counts)), positions, rows)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize(
    "unknown",
    [LATENT, {**OLMOE, "clip_qkv": 5.0}, {"model_type": "gemma3_text"}],
    ids=["latent attention", "clipped", "gemma"],
)
def test_what_the_step_does_not_know_it_leaves_to_the_twin(kernels: Kernels, unknown: dict[str, Any]) -> None:
    assert kernels.fused(model(unknown), [None]) is None
    assert isinstance(kernels.fused(model(OLMOE), [None]), FusedStep)


@pytest.mark.parametrize("fp32_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_decoder(kernels: Kernels, dtype: torch.dtype, fp32_head: bool) -> None:
    decoder = Decoder(parse_config({**COMMON, **FAMILIES["qwen2"]}), dtype=dtype, fp32_head=fp32_head)
    step = kernels.fused(decoder.init_weights(0), [None])
    assert step is not None
    for count in (3, 70, 1):
        hidden = torch.randn(count, 48, generator=torch.Generator().manual_seed(count)).to(dtype)
        ours, twin = step.logits(hidden), decoder.logits(hidden, ops=kernels.ops)
        assert ours.dtype == twin.dtype and torch.equal(ours, twin)


def test_rotations_of_a_table_are_those_of_any_row() -> None:
    """The step looks cos and sin up by position; torch must give a position the same bits in any tensor."""
    for dtype in DTYPES:
        decoder = model(FAMILIES["llama"], dtype)
        cos, sin = decoder.compute_rotations(torch.arange(3000))
        for positions in (torch.tensor([7]), torch.tensor([2999, 3, 11]), torch.arange(100, 117)):
            assert torch.equal(decoder.compute_rotations(positions)[0], cos[positions])
            assert torch.equal(decoder.compute_rotations(positions)[1], sin[positions])
