"""Weights on the wire: exact in the last bit, refused in words, named by their fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as library_load
from safetensors.torch import save as library_save
from worlds import KINDS, NATIVE, answers, generator, tiny

from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.tensor_file import ALIGNMENT, iterate_parts, list_shapes, plan_layout, read_tensors
from ostinato.model.wire import (
    NotFinite,
    fingerprint_adapters,
    fingerprint_weights,
    load_weights,
    pack_adapters,
    pack_weights,
    unpack_adapters,
)
from ostinato.types import Request, Sampling
from ostinato.workers.remote import seal, unseal

DECODERS = {kind: tiny(kind) for kind in KINDS}
QWEN = DECODERS["softmax"]


def random_adapters(decoder: Decoder, spec: AdapterSpec, seed: int = 0) -> Adapters:
    adapters = init_adapters(decoder.config, spec, seed)
    with torch.no_grad():
        for leaf in adapters.parameters():
            leaf.normal_(0, 0.3, generator=generator(seed))
    return adapters


def adapters(seed: int = 0, **spec: Any) -> Adapters:
    return random_adapters(QWEN, AdapterSpec(**{"rank": 2, **spec}), seed)


specs = st.builds(
    AdapterSpec,
    rank=st.integers(1, 5),
    alpha=st.floats(1e-3, 1e3),
    targets=st.sets(st.sampled_from(["mlp", "shared", "experts", "router"])).map(
        lambda more: ("attn", *sorted(more))
    ),
    expert_scheme=st.sampled_from(ExpertScheme),
    expert_rank=st.none() | st.integers(1, 3),
)


# ---- the format


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
            st.lists(st.integers(0, 9), min_size=1, max_size=3),
        ),
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_files_are_those_of_the_safetensors_library(shapes: list[Any], seed: int) -> None:
    tensors = {
        f"t{i}": torch.randn(shape, generator=generator(seed)).to(dtype)
        for i, (dtype, shape) in enumerate(shapes)
    }
    metadata = {"a": 'words, "quoted"'}
    ours = bytearray(b"".join(iterate_parts(tensors, metadata)))
    theirs = bytearray(library_save(tensors, metadata))
    for state in (library_load(bytes(ours)), read_tensors(ours)[1], read_tensors(theirs)[1]):
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor)
    assert read_tensors(ours)[0] == read_tensors(theirs)[0] == metadata


@pytest.mark.parametrize("kind", KINDS)
def test_whole_cache_lines_lie_on_cache_lines(kind: str) -> None:
    """What is mapped is computed with where it lies: a tensor may not straddle lines that it need not."""
    plan = plan_layout(list_shapes(dict(DECODERS[kind].named_parameters())), {})
    for name, start in plan.starts.items():
        assert start % ALIGNMENT == 0 or plan.tensors[name].nbytes % ALIGNMENT
    assert max(start + plan.tensors[name].nbytes for name, start in plan.starts.items()) == plan.num_bytes


# ---- adapters


@given(kind=st.sampled_from(sorted(KINDS)), spec=specs, seed=st.integers(0, 99))
def test_adapters_arrive_bit_for_bit(kind: str, spec: AdapterSpec, seed: int) -> None:
    sent = random_adapters(DECODERS[kind], spec, seed)
    got = unpack_adapters(unseal(seal(pack_adapters(sent))), DECODERS[kind].config)
    assert got is not None and got.spec == spec and list(got.tensors) == list(sent.tensors)
    for name, tensor in sent.state_dict().items():
        assert torch.equal(got.state_dict()[name].view(torch.int32), tensor.view(torch.int32))
    assert fingerprint_adapters(got) == fingerprint_adapters(sent)


def test_what_is_packed_does_not_change_with_the_adapters() -> None:
    """The trainer goes on while its policy is on the way."""
    sent = adapters()
    packed = pack_adapters(sent)
    assert packed is not None and packed.num_bytes == sum(one.nbytes for one in sent.parameters())
    next(sent.parameters()).detach().zero_()
    assert fingerprint_adapters(unpack_adapters(packed, QWEN.config)) == fingerprint_adapters(adapters())
    assert pack_adapters(None) is None and unpack_adapters(None, QWEN.config) is None


@given(data=st.data())
def test_a_fingerprint_changes_with_every_bit(data: st.DataObject) -> None:
    """Any bit of any factor, which also distinguishes 0.0 from -0.0; and it is 16 hex digits."""
    changed = adapters()
    leaf = data.draw(st.sampled_from(list(changed.parameters()))).detach()
    place, bit = data.draw(st.integers(0, leaf.numel() - 1)), data.draw(st.integers(0, 31))
    leaf.view(torch.int32).view(-1)[place] ^= int(np.uint32(1 << bit).astype(np.int32))
    assert fingerprint_adapters(changed) != fingerprint_adapters(adapters())
    assert len(fingerprint_adapters(changed)) == 16 and int(fingerprint_adapters(changed), 16) >= 0


def test_a_fingerprint_is_the_plain_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: leaves one after another, of a tensor that is hashed in several threads."""
    monkeypatch.setattr("ostinato.model.wire._LEAF_BYTES", 64)
    one = adapters()
    state, names = one.state_dict(), sorted(one.state_dict())
    spec = {"rank": 2, "alpha": 32.0, "targets": ["attn", "mlp", "shared", "experts"]}
    spec |= {"expert_scheme": "shared_outer", "expert_rank": None}
    rows = [[name, "torch.float32", list(state[name].shape)] for name in names]
    root = hashlib.blake2b(json.dumps([spec, rows], sort_keys=True).encode(), digest_size=8)
    for name in names:
        content = state[name].numpy().tobytes()
        for start in range(0, len(content), 64):
            root.update(hashlib.blake2b(content[start : start + 64], digest_size=32).digest())
    assert fingerprint_adapters(one) == root.hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name_at_both_ends(value: float) -> None:
    """A policy that broke is never sent; and who gets one from elsewhere does not take it."""
    broken = adapters()
    broken.tensors["layers.1.attn.o"][1].detach()[3, 1] = value
    with pytest.raises(NotFinite, match=r"layers\.1\.attn\.o\.B is not finite"):
        pack_adapters(broken)
    packed = pack_adapters(adapters())
    assert packed is not None
    packed.factors["layers.1.attn.o.B"][3, 1] = value
    with pytest.raises(NotFinite, match=r"layers\.1\.attn\.o\.B is not finite"):
        unpack_adapters(packed, QWEN.config)


def test_adapters_of_others_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"q\.A is \S+ \[2, 16\], this model needs \S+ \[2, 32\]"):
        unpack_adapters(pack_adapters(adapters()), tiny("softmax", hidden_size=32).config)
    with pytest.raises(ValueError, match=r"layers\.3\.attn\.k\.A is missing"):
        unpack_adapters(pack_adapters(adapters()), tiny("softmax", num_hidden_layers=4).config)
    with pytest.raises(ValueError, match=r"layers\.2\.attn\.k\.A is unknown to this model"):
        unpack_adapters(pack_adapters(adapters()), tiny("softmax", num_hidden_layers=2).config)


# ---- all weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_arrive_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sent, got = tiny(kind, dtype), tiny(kind, dtype).init_weights(9)
    places = [weight.data_ptr() for weight in got.parameters()]
    pack_weights(sent, tmp_path / "weights")
    assert fingerprint_weights(sent) != fingerprint_weights(got)
    load_weights(got, tmp_path / "weights")
    assert fingerprint_weights(sent) == fingerprint_weights(got)
    assert places == [weight.data_ptr() for weight in got.parameters()]
    for (name, one), (_, other) in zip(sent.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    """Another dtype, another shape, a value that is not finite, a file that ends early: refused before the
    first tensor is written."""
    path, own = tmp_path / "weights", tiny("softmax")
    before = fingerprint_weights(own)
    pack_weights(tiny("softmax", torch.bfloat16), path)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16 .* needs torch\.float32"):
        load_weights(own, path)
    pack_weights(tiny("softmax", num_hidden_layers=2), path)
    with pytest.raises(ValueError, match=r"weight layers\.2\.\S+ is missing"):
        load_weights(own, path)
    pack_weights(QWEN, path)
    content = bytearray(path.read_bytes())
    read_tensors(content)[1]["norm"][3] = math.nan
    path.write_bytes(content)
    with pytest.raises(NotFinite, match="weight norm is not finite"):
        load_weights(own, path)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="cut off"):
        load_weights(own, path)
    path.write_bytes(library_save(QWEN.state_dict()))
    with pytest.raises(ValueError, match="none of ours"):
        load_weights(own, path)
    assert fingerprint_weights(own) == before


# ---- an engine


def sampled(engine: LocalEngine) -> list[int]:
    request = Request(tokens=np.arange(9, dtype=np.int32), sampling=Sampling(max_tokens=8), seed=(1,))
    return answers(engine, [request])[0].tokens.tolist()


def engine(decoder: Decoder) -> LocalEngine:
    return LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=1, context_limit=64)


def test_an_engine_says_what_it_serves() -> None:
    """A copy: the trainer's own tensors may move on after they were published."""
    one, served = adapters(), engine(QWEN)
    assert served.served == (0, "")
    served.publish(one, 3)
    published = fingerprint_adapters(one)
    next(one.parameters()).detach().add_(1)
    assert served.served == (3, published) != (3, fingerprint_adapters(one))
    served.publish(None, 4)
    assert served.served == (4, "")


def test_an_engine_takes_all_weights_of_a_policy(tmp_path: Path) -> None:
    policy, served = tiny("softmax").init_weights(5), engine(tiny("softmax"))
    assert sampled(served) != sampled(engine(policy))
    pack_weights(policy, tmp_path / "weights")
    served.publish_weights(tmp_path / "weights", 7)
    assert served.served == (7, fingerprint_weights(policy)) and sampled(served) == sampled(engine(policy))
