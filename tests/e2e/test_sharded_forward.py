"""The law of every layout: hidden states, log-probabilities' gradients and routes are those of one rank.

In fp64, so that what differs is a mistake and not rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from small_shards import model_of
from torch import Tensor

from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, ExpertScheme, init_adapters
from ostinato.model.ops import TORCH_OPS
from ostinato.model.packed import PackedAttention
from ostinato.model.share import is_cut, is_expert, placed
from ostinato.parallel.experts import ExpertParallel
from ostinato.parallel.fsdp import Pieces
from ostinato.parallel.layout import Layout
from ostinato.parallel.links import Links
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.pieces import cut, own_adapters, put
from ostinato.parallel.rows import Ulysses, sequence_ops
from ostinato.parallel.shares import shares_of
from ostinato.types import Segment

pytestmark = pytest.mark.slow

# one microbatch for each data rank: two siblings behind a prompt, and another answer
SEGMENTS = (
    Segment(start=0, stop=5),
    Segment(start=5, stop=8, prefix_start=0, prefix_stop=5),
    Segment(start=8, stop=10, prefix_start=0, prefix_stop=5),
    Segment(start=10, stop=16),
)
ROWS = 16


def world(family: str) -> tuple[Decoder, Tensor]:
    decoder = model_of(family, torch.float64, num_hidden_layers=2)
    return decoder, torch.randint(0, 64, (4, ROWS), generator=torch.Generator().manual_seed(9))


def shaken(decoder: Decoder, scheme: ExpertScheme) -> Any:
    spec = AdapterSpec(
        rank=3, alpha=5.0, expert_scheme=scheme, targets=("attn", "mlp", "shared", "experts", "router")
    )
    adapters = init_adapters(decoder.config, spec, seed=2)
    for name, (a, b) in adapters.tensors.items():
        with torch.no_grad():
            b.normal_(0, 0.1, generator=torch.Generator().manual_seed(b.numel()))
        adapters.tensors[name] = (a.detach().double().requires_grad_(), b.detach().double().requires_grad_())
    return adapters


def positions() -> Tensor:
    return torch.tensor([*range(5), *range(5, 8), *range(5, 7), *range(6)])


def probe(hidden: Tensor) -> Tensor:
    """A loss in which every element of the hidden states counts differently."""
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    return (hidden * weights).sum()


def alone(family: str, full: bool, scheme: ExpertScheme, microbatches: int) -> dict[str, Any]:
    decoder, tokens = world(family)
    decoder.trainable(full)
    adapters = None if full else shaken(decoder, scheme)
    hidden, native = zip(
        *[
            decoder(row, positions(), PackedAttention(SEGMENTS), adapters=adapters)
            for row in tokens[:microbatches]
        ],
        strict=True,
    )
    torch.stack([probe(one) for one in hidden]).sum().backward()
    leaves = dict(decoder.named_parameters()) if full else leaves_of(adapters)
    return {
        "hidden": torch.stack(hidden).detach(),
        "native": None if native[0] is None else torch.stack(native),
        "gradients": {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    }


def leaves_of(adapters: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": leaf
        for name, pair in adapters.tensors.items()
        for part, leaf in zip("AB", pair, strict=True)
    }


def sharded(rank: int, _: int, family: str, text: str, full: bool, scheme: ExpertScheme) -> dict[str, Any]:
    """Own hidden rows and routes; own gradients, summed over those who keep the same, and where they lie."""
    layout = Layout.parse(text)
    mesh = Mesh(layout)
    links = Links(mesh)
    whole, tokens = world(family)
    config = whole.config
    (share,) = shares_of(layout, config, rank)
    decoder = Decoder(config, dtype=torch.float64, share=share)
    for name, parameter in decoder.named_parameters():
        source = whole.get_parameter(name)
        parameter.data.copy_(cut(source, placed(config, share, name, source.shape)))
    decoder.trainable(full)
    pieces = Pieces(links)
    if layout.shard > 1:
        pieces.take(decoder)
    adapters = None if full else own_double(whole, share, scheme)
    experts = None
    if layout.expert * layout.expert_tensor > 1:
        experts = ExpertParallel(links=links, tensor=layout.expert_tensor)
    ops = sequence_ops(TORCH_OPS, links, rows=experts, pieces=pieces if layout.shard > 1 else None)
    at, context = mesh.coords, ROWS // layout.context
    mine = slice(at.context * context, (at.context + 1) * context)
    hidden, native = decoder(
        tokens[at.data][mine],
        positions()[mine],
        Ulysses(PackedAttention(SEGMENTS), links),
        adapters=adapters,
        ops=ops,
        recompute=layout.shard > 1,
    )
    # the loss of the whole microbatch has weights by row
    start = at.context * context + at.tensor * len(hidden)
    weights = torch.linspace(-1, 1, ROWS * 32, dtype=torch.float64).view(ROWS, 32)[
        start : start + len(hidden)
    ]
    (hidden * weights).sum().backward()
    leaves = dict(decoder.named_parameters()) if full else leaves_of(adapters)
    gradients = {}
    for name, leaf in leaves.items():
        if not leaf.requires_grad:
            continue
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        shape = shape_of(whole, adapters, name)
        if pieces.shape(leaf) is not None:
            grad = pieces.joined(leaf, links.sum_(grad, "dcf"))
        elif is_expert(name, shape):
            grad = links.sum_(grad, "r")
        else:
            grad = links.sum_(grad, "dc")
        uncut = not is_cut(share, name, shape)
        if uncut and (not is_expert(name, shape) or layout.expert_tensor > 1):
            grad = links.sum_(grad, "t")
        gradients[name] = (placed(config, share, name, shape), grad)
    return {"at": at, "start": start, "hidden": hidden, "native": native, "gradients": gradients}


def own_double(whole: Decoder, share: Any, scheme: ExpertScheme) -> Any:
    adapters = shaken(whole, scheme)
    own = own_adapters(whole.config, (share,), adapters.spec, adapters.state_dict())
    return own


def shape_of(whole: Decoder, adapters: Any, name: str) -> tuple[int, ...]:
    if adapters is None:
        return tuple(whole.get_parameter(name).shape)
    return tuple(shaken(whole, adapters.spec.expert_scheme).state_dict()[name].shape)


DENSE = ["t2", "c2", "d2f2", "t2c2", "d2t2f2"]
MOE = ["d2e2", "t2e2", "d2t2e4", "d2t2e2", "d2t2e2x2", "t2x2", "c2e2", "c2t2e4"]
CASES = [("llama", text) for text in DENSE]
CASES += [("qwen3_moe", text) for text in ["t4", *MOE]] + [
    ("deepseek_v3", text) for text in ["t2", "d2t2e4", "c2e2", "d2f2"]
]


@pytest.mark.parametrize("mode", ["full", "shared_outer", "per_expert"])
@pytest.mark.parametrize(("family", "text"), CASES)
def test_every_layout_computes_the_same(family: str, text: str, mode: str) -> None:
    full, layout = mode == "full", Layout.parse(text)
    scheme = ExpertScheme.SHARED_OUTER if full else ExpertScheme(mode)
    one = alone(family, full, scheme, layout.data)
    many = on_ranks(layout.world, sharded, family, text, full, scheme, timeout_s=60)
    gradients = {name: torch.full_like(grad, torch.nan) for name, grad in one["gradients"].items()}
    for rank in many:
        rows = slice(rank["start"], rank["start"] + len(rank["hidden"]))
        torch.testing.assert_close(
            rank["hidden"], one["hidden"][rank["at"].data][rows], rtol=1e-10, atol=1e-10
        )
        if one["native"] is not None:
            assert torch.equal(rank["native"], one["native"][rank["at"].data][rows])
        for name, (spans, grad) in rank["gradients"].items():
            if name in gradients:
                put(gradients[name], spans, grad)
            else:  # the head, which these hidden states have not been through
                assert not grad.any()
    for name, grad in one["gradients"].items():
        torch.testing.assert_close(
            gradients[name], grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
