"""Pipelines on several ranks: the bits of the plain loop, what is in flight, how a lost rank ends the others.

The model is a small stack of residual layers in fp64 with an embedding before and a head behind; the twin is
a loop over the microbatches that knows no stages. The decoder itself: ``test_layouts.py``.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.layout import Layout
from ostinato.parallel.ranks import is_connection_error
from ostinato.parallel.schedule import Schedule, count_in_flight
from ostinato.parallel.stages import PipelineBroken, Stages

pytestmark = pytest.mark.slow

WIDTH, VOCAB, DEPTH = 6, 11, 9
ROWS = (3, 1, 7, 2, 5, 4, 1, 6, 3, 8)  # of microbatches: no two shapes alike next to each other


@dataclass(frozen=True)
class Toy:
    """Leaves by name: a table [VOCAB, WIDTH], layers [WIDTH, WIDTH], a head [WIDTH, VOCAB]."""

    leaves: dict[str, Tensor]
    spans: tuple[range, ...]  # layers of every chunk

    @classmethod
    def fresh(cls, layout: Layout) -> Toy:
        draw = torch.Generator().manual_seed(3)
        shapes = {"table": (VOCAB, WIDTH), "head": (WIDTH, VOCAB)}
        shapes |= {f"layers.{n}": (WIDTH, WIDTH) for n in range(DEPTH)}
        like = {"generator": draw, "dtype": torch.float64, "requires_grad": True}
        leaves = {name: torch.randn(shape, **like) for name, shape in shapes.items()}
        return cls(leaves, layout.chunk_layers(DEPTH))

    def forward(self, chunk: int, part: Tensor, x: Tensor | None) -> tuple[Tensor, Any]:
        x = self.leaves["table"][part] if x is None else x
        for n in self.spans[chunk]:
            x = x + torch.tanh(x @ self.leaves[f"layers.{n}"])
        return x, (chunk, len(part))

    def loss(self, part: Tensor, hidden: Tensor) -> Tensor:
        return -(hidden @ self.leaves["head"]).log_softmax(-1).gather(1, part.unsqueeze(1)).mean()

    def gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


def microbatches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(count)
    return [torch.randint(VOCAB, (ROWS[n % len(ROWS)],), generator=draw) for n in range(count)]


def plain_loop(parts: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """The twin: (gradients, losses, hidden states)."""
    toy, losses, states = Toy.fresh(Layout()), [], []
    for part in parts:
        hidden, _ = toy.forward(0, part, None)
        loss = toy.loss(part, hidden)
        loss.backward()
        losses.append(loss.detach())
        states.append(hidden.detach())
    return toy.gradients(), losses, states


def shape_of(part: Tensor) -> tuple[int, int]:
    return len(part), WIDTH


def stage_of(layout: Layout) -> tuple[Stages[Tensor], Collectives]:
    mesh = Mesh(layout)
    links = Collectives(mesh)
    return Stages.at(mesh, links, shape=shape_of, dtype=torch.float64), links


def step(stages: Stages[Tensor], toy: Toy, parts: list[Tensor]) -> tuple[list[Tensor], Any]:
    """(losses, extras) of an optimizer step."""
    losses = list[Tensor]()

    def loss(part: Tensor, hidden: Tensor, extras: Any) -> Tensor:
        assert extras == (len(toy.spans) - 1, len(part))
        one = toy.loss(part, hidden)
        losses.append(one.detach())
        return one

    extras = stages.train(parts, toy.forward, loss)
    return losses, extras


def trained(rank: int, world: int, layouts: list[str], counts: list[int]) -> list[Any]:
    """By layout, by number of microbatches: (gradients, losses, extras, bytes sent)."""
    found = []
    for layout in map(Layout.parse, layouts):
        stages, links = stage_of(layout)
        for count in counts:
            toy = Toy.fresh(layout)
            losses, extras = step(stages, toy, microbatches(count))
            sent = links.traffic.take().bytes["send_recv", "p"]
            found.append((toy.gradients(), losses, extras, sent))
    return found


@pytest.mark.parametrize(
    ("world", "layouts", "counts"),
    [
        (1, ["1"], [0, 1, 5]),
        (2, ["p2", "p2v2", "p2v3", "p2v4"], [1, 2, 3, 5, 8]),
        (3, ["p3", "p3v3"], [2, 7]),
        (4, ["p4", "p4v2"], [1, 3, 4, 5, 7, 10]),
    ],
)
def test_gradients_are_those_of_the_plain_loop_bit_for_bit(world, layouts, counts):
    by_rank = on_ranks(world, trained, layouts, counts)
    cases = [(Layout.parse(layout), count) for layout in layouts for count in counts]
    for n, (layout, count) in enumerate(cases):
        parts = microbatches(count)
        gradients, losses, _ = plain_loop(parts)
        found = [results[n] for results in by_rank]
        merged: dict[str, Tensor] = {}
        for rank, (own, _, extras, sent) in enumerate(found):
            assert not own.keys() & merged.keys()  # every leaf is trained on one stage
            merged |= own
            chunks = list(layout.chunks_of(rank)) if world > 1 else [0]
            assert extras == [[(chunk, len(part)) for part in parts] for chunk in chunks]
            ends = sum(chunk > 0 for chunk in chunks) + sum(chunk < layout.chunks - 1 for chunk in chunks)
            assert sent == ends * sum(map(len, parts)) * WIDTH * 8  # a stream forward, its gradient backward
        assert merged.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(merged[name], gradient), (str(layout), count, name)
        assert torch.equal(torch.tensor(found[-1][1]), torch.tensor(losses))
        assert all(not one[1] for one in found[:-1])


class Token:
    """Lives as long as the graph that it was put into."""


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def most_graphs(rank: int, world: int, layout: str, count: int) -> int:
    stages, toy = stage_of(Layout.parse(layout))[0], Toy.fresh(Layout.parse(layout))
    alive, most = weakref.WeakSet[Token](), 0

    def forward(chunk: int, part: Tensor, x: Tensor | None) -> tuple[Tensor, Any]:
        nonlocal most
        alive.add(token := Token())
        out, extras = toy.forward(chunk, part, x)
        out = Mark.apply(out, token)
        del token
        most = max(most, len(alive))
        return out, extras  # type: ignore[return-value]

    stages.train(microbatches(count), forward, lambda part, hidden, _: toy.loss(part, hidden))
    assert not alive
    return most


@pytest.mark.parametrize(("layout", "count"), [("p2", 5), ("p2v2", 6), ("p4", 9), ("p4v2", 9)])
def test_what_is_in_flight_is_kept_and_nothing_else(layout, count):
    shape = Layout.parse(layout)
    sizes = {"ranks": shape.pipeline, "virtual": shape.virtual, "parts": count}
    found = on_ranks(shape.world, most_graphs, layout, count)
    name = Schedule.training(shape.virtual)
    assert found == [count_in_flight(name, rank=rank, **sizes) for rank in range(shape.world)]


TIMEOUT_S = 4.0


def loses(rank: int, world: int, layout: str, lost: int, dies: bool) -> str:
    """What a rank says whose pipeline loses a rank in its third forward."""
    shape = Layout.parse(layout)
    toy, calls = Toy.fresh(shape), Counter[str]()
    mesh = Mesh(shape, timeout_s=TIMEOUT_S)
    stages = Stages.at(mesh, Collectives(mesh), shape=shape_of, dtype=torch.float64)

    def forward(chunk: int, part: Tensor, x: Tensor | None) -> tuple[Tensor, Any]:
        calls["forward"] += 1
        if rank == lost and calls["forward"] == 3:
            if dies:
                os._exit(3)
            time.sleep(100)
        return toy.forward(chunk, part, x)

    with pytest.raises(PipelineBroken) as broken:
        stages.train(microbatches(8), forward, lambda part, hidden, _: toy.loss(part, hidden))
    assert is_connection_error(broken.value)  # so it is distinguished from what a rank does wrong itself
    return str(broken.value)


@pytest.mark.parametrize(("layout", "lost", "dies"), [("p2v2", 0, True), ("p4", 2, False)])
def test_a_lost_rank_ends_the_others_with_a_named_error_in_time(layout, lost, dies):
    world = Layout.parse(layout).world
    output = on_ranks(world, loses, layout, lost, dies, timeout_s=15 * TIMEOUT_S, lost=[lost])
    del output[lost]  # it says nothing; on a busy machine, that others gave up before it came to that
    for rank, sentence in zip((n for n in range(world) if n != lost), output, strict=True):
        assert re.match(rf"stage {rank} waited \d+\.\d s for .*microbatch \d.*, in vain: ", sentence)
