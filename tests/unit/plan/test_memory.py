"""What the planner says a rank keeps, against what our sharded model allocates and autograd saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import KIMI_LAYOUTS, kimi
from worlds import KINDS, SIZES

from ostinato.apps.plan import memory
from ostinato.apps.plan.problem import Arrangement, Base, Phase, Problem, Setup, find_model
from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.packed import PackedAttention
from ostinato.model.shapes import ROLES, AdapterSpec, ExpertScheme
from ostinato.model.share import find_spans
from ostinato.parallel.activations import Rows, count_ends, count_rotary, saved_bytes, slots_of
from ostinato.parallel.elements import is_moe, layer_tensors, stage_elements
from ostinato.parallel.gpus import GB
from ostinato.parallel.layout import Coords, Layout
from ostinato.parallel.memory import DType, Precision, Training, weight_bytes
from ostinato.parallel.pieces import fresh_adapters
from ostinato.parallel.shares import shares_of
from ostinato.types import Segment

WIDE = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {**WIDE, "model_type": "llama"},
    "tied": {**WIDE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen": {**WIDE, **KINDS["softmax"]},
    "latent": {**WIDE, **KINDS["sigmoid-bias-groups"], "q_lora_rank": 8, "num_hidden_layers": 4},
    "direct": {**WIDE, **KINDS["sigmoid-bias"], "num_hidden_layers": 4},
    "normed over heads": {**WIDE, **KINDS["olmoe"]},
    "clipped": {**WIDE, **KINDS["olmoe"], "clip_qkv": 3.0},
}
CUTS = ("1", "d2", "t2", "p2", "d2t2p2e2", "t2e2", "t2e1x2", "d4e4", "p2v1d2e2", "d2c2t2e4", "d2f2", "t4e2")


def config_of(family: str) -> ModelConfig:
    return parse_config(FAMILIES[family])


def layouts_of(config: ModelConfig) -> list[Layout]:
    found = []
    for text in CUTS:
        layout = Layout.parse(text)
        try:
            layout.refuse(config)
        except ValueError:
            continue
        found.append(layout)
    return found


# ---- weights and adapters


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_every_rank_allocates(family: str) -> None:
    config = config_of(family)
    for layout in layouts_of(config):
        for rank in range(layout.world):
            parts = [Decoder(config, share=share, device="meta") for share in shares_of(layout, config, rank)]
            real = sum(p.numel() for part in parts for p in part.parameters())
            planned = stage_elements(config, None, layout, layout.coords(rank).pipeline)
            assert planned.trainable + planned.untrained == real, (family, str(layout), rank)


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    targets=st.sets(st.sampled_from(ROLES), min_size=1),
    scheme=st.sampled_from(ExpertScheme),
    expert_rank=st.sampled_from([None, 3]),
)
def test_adapters_are_those_that_every_rank_trains(
    family: str, targets: set[str], scheme: ExpertScheme, expert_rank: int | None
) -> None:
    config = config_of(family)
    spec = AdapterSpec(
        rank=2, targets=tuple(targets | {"attn"}), expert_scheme=scheme, expert_rank=expert_rank
    )
    for layout in layouts_of(config):
        for stage in range(layout.pipeline):
            last = Coords(stage, layout.data - 1, layout.context - 1, layout.tensor - 1)
            rank = next(one for one in range(layout.world) if layout.coords(one) == last)
            own = fresh_adapters(config, shares_of(layout, config, rank), spec)
            planned = stage_elements(config, spec, layout, stage)
            assert planned.adapters == own.num_parameters, str(layout)
            assert planned.copies == sum(copied(own.prepare(torch.float32))), str(layout)


def copied(prepared: Any) -> Iterator[int]:
    """Elements of all tensors in prepared adapters."""
    for layer in prepared.layers:
        for slot in layer.__slots__:
            held = getattr(layer, slot)
            if held is not None:
                fields = held if isinstance(held, tuple) else (held.a, held.b)
                yield sum(part.numel() for part in fields if isinstance(part, torch.Tensor))


@pytest.mark.parametrize(("text", "published"), KIMI_LAYOUTS.items())
def test_the_published_table_of_kimi_k2_layouts(text: str, published: float) -> None:
    """Ours by hand, stage by stage. The published formula puts ceil(61 / p) MoE layers and an embedding on
    one stage, which no stage has, cuts the down-projections to latents by tensor ranks, which keep them
    whole, and leaves out routers and norms."""
    layout, config = Layout.parse(text), find_model("kimi-k2").config
    expert, attention, embedding = 3 * 7168 * 2048, 101_122_048, 163_840 * 7168
    whole, t = 7168 * (1536 + 576), layout.tensor
    each = whole + (attention - whole) // t + 1536 + 512 + 2 * 7168  # with norms
    for stage, layers in enumerate(layout.chunk_layers(61)):
        first, last, mixtures = stage == 0, stage == layout.pipeline - 1, len(layers) - (stage == 0)
        values = len(layers) * each + first * 3 * 7168 * 18432 // t + last * 7168
        values += (first + last) * embedding // t
        values += mixtures * (384 * 7168 + expert // t + expert * 384 // layout.expert)
        ours = weight_bytes(stage_elements(config, None, layout, stage), DType.BF16)
        assert ours == 2 * values + 4 * 384 * mixtures
        assert ours / GB < published + 1.6


# ---- optimizer


def test_states_of_adapters_and_of_all_parameters() -> None:
    """16 bytes a factor beside the copies; 18 a parameter in BF16, 16 in fp32."""
    case = kimi()
    setup = Setup(layout=Layout.parse("d64e64"))
    elements = stage_elements(case.config, case.adapter, setup.layout, 0)
    terms = memory.training(case, setup).state()
    assert sum(terms.values()) - terms["base weights"] == 16 * elements.adapters
    for base, each in ((DType.BF16, 18), (DType.FP32, 16)):
        full = kimi(None, base=base)
        terms = memory.training(full, setup).state()
        assert sum(terms.values()) == each * elements.trainable + 4 * elements.untrained


@pytest.mark.parametrize("shard", [1, 2, 4])
def test_pieces_cut_matrices_of_layers_only(shard: int) -> None:
    config = config_of("qwen")
    layout, fp32 = Layout(data=4, shard=shard), Precision(base=DType.FP32)
    elements = stage_elements(config, None, layout, 0)
    terms = Training(config=config, adapter=None, precision=fp32, layout=layout).state()
    cut = elements.matrices + elements.routers
    assert sum(terms.values()) == 16 * (elements.trainable - cut + cut / shard) + 4 * elements.untrained


# ---- activations


@contextmanager
def counting(skip: set[int]) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd saves, by address, but for those of ``skip``."""
    found: dict[int, int] = {}
    keep: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            found[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def really_saved(config: ModelConfig, spec: AdapterSpec | None, rows: int, dtype: torch.dtype) -> float:
    decoder = Decoder(config, dtype=dtype).init_weights(0)
    adapters = None if spec is None else init_adapters(config, spec)
    skip = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    prepared = None
    if adapters is None:
        decoder.set_trainable(True)
    else:
        prepared = adapters.prepare(dtype)
        for layer in prepared.layers:
            for slot in layer.__slots__:
                held = getattr(layer, slot)
                if held is not None:
                    parts = held if isinstance(held, tuple) else (held.a, held.b)
                    skip |= {p.untyped_storage().data_ptr() for p in parts if isinstance(p, torch.Tensor)}
    tokens = torch.randint(config.vocab_size, (rows,), generator=torch.Generator().manual_seed(0))
    attend = PackedAttention((Segment(start=0, stop=rows, prefix_start=0, prefix_stop=0),))
    with counting(skip) as found:
        hidden, _ = decoder(tokens, torch.arange(rows), attend, adapters=prepared)
    assert hidden.requires_grad
    return float(sum(found.values()))


def planned_saved(config: ModelConfig, spec: AdapterSpec | None, rows: int, dtype: DType) -> float:
    copies = rows * config.moe.top_k if config.moe else 0
    here = Rows(slice=rows, own=rows, received=rows, copies=copies, loss=rows)
    layers = [
        saved_bytes(config, slots_of(config, spec, layer), here, dtype.num_bytes, moe=is_moe(config, layer))
        for layer in range(config.num_layers)
    ]
    beside = count_ends(config, here, dtype.num_bytes, is_first=True, is_last=True, is_full=spec is None)
    return sum(layers) + count_rotary(config, here, dtype.num_bytes) + beside


TARGETS = {
    "attention": ("attn",),
    "all roles": ("attn", "mlp", "shared", "experts", "router"),
    "one side": ("attn", "experts.up"),
    "the other": ("attn", "experts.down"),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", ExpertScheme)
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_autograd_saves(
    family: str, targets: str, scheme: ExpertScheme, dtype: str
) -> None:
    """To the byte."""
    config, rows = config_of(family), 96
    if config.moe is None and "." in "".join(TARGETS[targets]):
        return
    spec = AdapterSpec(rank=2, targets=TARGETS[targets], expert_scheme=scheme)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert planned_saved(config, spec, rows, DType(dtype)) == really_saved(config, spec, rows, kind)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_full_training_are_what_autograd_saves(family: str, dtype: str) -> None:
    config, kind = config_of(family), torch.float32 if dtype == "fp32" else torch.bfloat16
    assert planned_saved(config, None, 96, DType(dtype)) == really_saved(config, None, 96, kind)


# ---- phases


def arrangement(train: str, rollout: str, base: Base, **more: Any) -> Arrangement:
    setup = Setup(layout=Layout.parse(train), microbatch=17408, recompute=True)
    return Arrangement(
        train=setup,
        rollout=Setup(layout=Layout.parse(rollout), sequences=8),
        base=base,
        **more,
    )


def test_one_base_or_two() -> None:
    """Two copies take one more, a swapped base moves it to the host, and neither touches the adapters."""
    case = kimi()
    shared, two, swapped = (
        {phase: memory.memory(case, arrangement("d8t8e64", "d8t8e64", base), phase) for phase in Phase}
        for base in (Base.SHARED, Base.TWO, Base.SWAPPED)
    )
    copy = shared[Phase.ROLLOUT].terms["base weights"]
    for phase in Phase:
        assert two[phase].total - shared[phase].total == pytest.approx(copy)
        assert swapped[phase].total == pytest.approx(shared[phase].total)
        assert swapped[phase].host - shared[phase].host == pytest.approx(2 * copy * 8)


@pytest.mark.parametrize(
    ("train", "rollout", "possible"),
    [
        ("d8t8e64", "d8t8e64", True),
        ("d64e64", "d8t8e64", True),  # dense weights whole in the trainer: the sampler reads a part of them
        ("d8t8e64", "d64e64", False),
        ("d8t8p1e32", "d8t8e64", False),
        ("d8p8e8", "d64e64", False),
        ("d64e64f64", "d64e64", False),
        ("d8t2c4e64", "d32t2e64", True),
    ],
)
def test_where_one_base_serves_both(train: str, rollout: str, possible: bool) -> None:
    """By the words of ``shares_base``, and by the tensors: every index that a sampler's rank needs of what it
    shares is among those that the trainer's rank keeps."""
    case = kimi()
    a, b = Layout.parse(train), Layout.parse(rollout)
    reason = memory.shares_base(case, Setup(layout=a), Setup(layout=b))
    assert (reason == "") == possible
    if possible:
        for rank in range(0, 64, 7):
            assert contained(case.config, a, b, rank)


def contained(config: ModelConfig, train: Layout, rollout: Layout, rank: int) -> bool:
    (mine,), (theirs,) = (shares_of(layout, config, rank) for layout in (train, rollout))
    for name, shape in layer_tensors(config, 1).items():
        kept = find_spans(config, mine, f"layers.1.{name}", shape)
        needed = find_spans(config, theirs, f"layers.1.{name}", shape)
        for have, want in zip(kept, needed, strict=True):
            if not {i for span in want for i in span} <= {i for span in have for i in span}:
                return False
    return True


def test_the_cache_of_latents_is_not_cut_by_tensor_ranks() -> None:
    case = kimi()
    one, eight = (Setup(layout=Layout.parse(text)) for text in ("d64e64", "d8t8e64"))
    assert memory.kv_bytes(case, one) == memory.kv_bytes(case, eight) == 70_272
    dense = Problem(
        model=find_model("llama-3.1-8b"),
        adapter=case.adapter,
        precision=case.precision,
        work=case.work,
        cluster=case.cluster,
    )
    assert memory.kv_bytes(dense, Setup(layout=Layout(tensor=4))) == 32 * 8 * 2 * 128 * 2 / 4
