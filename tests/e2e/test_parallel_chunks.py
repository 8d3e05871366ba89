"""The decoder over pipeline stages: losses, gradients and experts are those of one rank, bit for bit.

The twin is the loop of the trainer over the whole model, which knows no chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from worlds import siblings, tiny

from ostinato.algo.logprobs import chunked_logprobs, linear_logprobs
from ostinato.algo.pack import pack
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, AdapterSpec, ExpertScheme, init_adapters
from ostinato.model.packed import PackedAttention
from ostinato.model.share import placed
from ostinato.parallel.chunks import Rows, decoder_chunks
from ostinato.parallel.collectives import Collectives
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.pieces import cut, own_adapters
from ostinato.parallel.shares import shares_of
from ostinato.parallel.stages import Stages
from ostinato.types import Microbatch

pytestmark = pytest.mark.slow

LAYERS = 5  # over four chunks, so that one has two


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str = "softmax-renormalised"  # the first layer is dense: a chunk without experts
    scheme: str | None = "shared_outer"  # of adapters; None: all parameters are trained
    replay: bool = False
    recompute: bool = False

    def model(self) -> Decoder:
        return tiny(self.kind, num_hidden_layers=LAYERS)

    def adapters(self, decoder: Decoder) -> Adapters | None:
        if self.scheme is None:
            return None
        targets = ("attn", "mlp", "shared", "experts", "router")
        scheme = ExpertScheme(self.scheme)
        spec = AdapterSpec(rank=3, alpha=6.0, expert_scheme=scheme, targets=targets)
        adapters, draw = init_adapters(decoder.config, spec, seed=4), torch.Generator().manual_seed(9)
        for _, b in adapters.tensors.values():
            b.data.normal_(0, 0.2, generator=draw)
        return adapters


def microbatches(decoder: Decoder) -> tuple[Microbatch, ...]:
    """Five of unequal lengths, with shared prompts and routes."""
    samples = [one for seed, shape in enumerate(SHAPES) for one in siblings(decoder, *shape, seed=seed)]
    weights = [np.full(len(one.tokens), 0.1, np.float32) for one in samples]
    return pack(samples, weights, tokens_per_microbatch=16).microbatches


SHAPES: list[tuple[int, list[int]]] = [(4, [3, 5]), (6, [7]), (2, [4, 4, 5]), (5, [9]), (3, [2, 6])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    native: list[list[Tensor | None]]  # by own chunk, by microbatch


def rows_of(case: Case, one: Microbatch) -> Rows:
    assert one.experts is not None
    return Rows(
        tokens=torch.from_numpy(one.tokens).long(),
        positions=torch.from_numpy(one.positions).long(),
        attend=PackedAttention(one.segments),
        routing=torch.from_numpy(one.experts).to(torch.int16) if case.replay else None,
    )


def loss_of(decoder: Decoder, one: Microbatch, hidden: Tensor) -> Tensor:
    targets, rows = torch.from_numpy(one.targets).long(), torch.from_numpy(one.rows).long()
    if decoder.head_weight.requires_grad:
        logprobs, _ = chunked_logprobs(hidden[rows], targets, decoder.logits)
    else:
        logprobs, _ = linear_logprobs(hidden[rows], decoder.head_weight, targets)
    return (logprobs * torch.arange(len(targets)).cos()).sum()


def gradients(decoders: list[Decoder], adapters: Adapters | None) -> dict[str, Tensor]:
    if adapters is not None:
        pairs = adapters.tensors.items()
        named = [(f"{name}.{n}", leaf) for name, pair in pairs for n, leaf in enumerate(pair)]
    else:
        named = [pair for decoder in decoders for pair in decoder.named_parameters()]
    return {name: leaf.grad for name, leaf in named if leaf.grad is not None}


def plain_loops(rank: int, world: int, cases: list[Case]) -> list[Answer]:
    """The twin of every case."""
    return [plain_loop(case) for case in cases]


def plain_loop(case: Case) -> Answer:
    decoder = case.model()
    adapters, losses, natives = case.adapters(decoder), [], []
    decoder.trainable(adapters is None)
    for one in microbatches(decoder):
        taken = rows_of(case, one)
        hidden, native = decoder(
            taken.tokens,
            taken.positions,
            taken.attend,
            adapters=adapters,
            routing=taken.routing,
            recompute=case.recompute,
        )
        loss = loss_of(decoder, one, hidden)
        loss.backward()
        losses.append(loss.detach())
        natives.append(native)
    return Answer(losses=losses, gradients=gradients([decoder], adapters), native=[natives])


def part_of(whole: Decoder, share: Any) -> Decoder:
    decoder, weights = Decoder(whole.config, share=share), dict(whole.named_parameters())
    for name, own in decoder.named_parameters():
        own.data.copy_(cut(weights[name], placed(whole.config, share, name, weights[name].shape)))
    return decoder


def pipelined(
    rank: int, world: int, layouts: list[str], cases: list[Case]
) -> list[list[tuple[Answer, list[Tensor]]]]:
    """By case, by layout: what training gives, and the hidden states that scoring gives."""
    return [[on_layout(Layout.parse(layout), rank, case) for layout in layouts] for case in cases]


def on_layout(layout: Layout, rank: int, case: Case) -> tuple[Answer, list[Tensor]]:
    whole, mesh = case.model(), Mesh(layout)
    shares = shares_of(layout, whole.config, rank)
    own = zip(layout.chunks_of(mesh.coords.pipeline), shares, strict=True)
    decoders = {chunk: part_of(whole, share) for chunk, share in own}
    adapters = case.adapters(whole)
    if adapters is not None:
        adapters = own_adapters(whole.config, shares, adapters.spec, adapters.state_dict())
    for decoder in decoders.values():
        decoder.trainable(adapters is None)
    links, parts = Collectives(mesh), microbatches(whole)
    stages = Stages.at(
        mesh, links, shape=lambda one: (len(one.tokens), whole.config.hidden_size), dtype=whole.dtype
    )
    rows = partial(rows_of, case)
    run: Callable[..., Any] = decoder_chunks(decoders, adapters, rows, recompute=case.recompute)
    losses, states, last = list[Tensor](), list[Tensor](), decoders[max(decoders)]

    def loss(one: Microbatch, hidden: Tensor, extras: Any) -> Tensor:
        found = loss_of(last, one, hidden)
        losses.append(found.detach())
        return found

    stages.score(parts, run, lambda one, hidden, _: states.append(hidden))
    native = stages.train(parts, run, loss)
    return Answer(losses=losses, gradients=gradients([*decoders.values()], adapters), native=native), states


CASES = {
    "lora, shared outer": Case(),
    "lora, per expert, replay": Case(scheme="per_expert", replay=True),
    "latent attention, recompute": Case(kind="sigmoid-bias-groups", recompute=True, replay=True),
    "every second layer, per expert, recompute": Case(
        kind="every-second-layer", scheme="per_expert", recompute=True
    ),
    "all parameters": Case(kind="olmoe", scheme=None),
}


@pytest.fixture(scope="module")
def twins() -> list[Answer]:
    (found,) = on_ranks(1, plain_loops, list(CASES.values()), timeout_s=120)
    assert all(len(twin.losses) >= 4 and twin.gradients for twin in found)
    return found


@pytest.mark.parametrize(("world", "layouts"), [(1, ["1"]), (2, ["p2", "p2v2"]), (4, ["p4"])])
def test_a_mixture_over_stages_is_the_one_of_one_rank_bit_for_bit(twins, world, layouts):
    by_rank = on_ranks(world, pipelined, layouts, list(CASES.values()), timeout_s=120)
    for at, (name, twin) in enumerate(zip(CASES, twins, strict=True)):
        for n, layout in enumerate(layouts):
            found = [answers[at][n] for answers in by_rank]
            check_equal(f"{name}, {layout}", twin, [answer for answer, _ in found])
            assert [len(states) for _, states in found] == [0] * (world - 1) + [len(twin.losses)]


def check_equal(what: str, twin: Answer, found: list[Answer]) -> None:
    """The stages' answers together are the twin's, bit for bit."""
    assert torch.equal(torch.stack(found[-1].losses), torch.stack(twin.losses)), what
    merged: dict[str, Tensor] = {}
    for answer in found:
        assert not answer.gradients.keys() & merged.keys(), what
        merged |= answer.gradients
    assert merged.keys() == twin.gradients.keys(), what
    for name, gradient in twin.gradients.items():
        assert torch.equal(merged[name], gradient), f"{what}: {name}"
    by_depth = [native for layer in zip_longest(*(answer.native for answer in found)) for native in layer]
    for n, whole in enumerate(twin.native[0]):
        pieces = [native[n] for native in by_depth if native is not None]
        chosen = torch.cat([one for one in pieces if one is not None], dim=1)
        assert whole is not None and torch.equal(chosen, whole), what
