"""Cutting a microbatch into the shares of ranks: every row and every target is exactly one rank's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.parallel.collectives import Collectives
from ostinato.parallel.layout import Coords, Layout
from ostinato.train.inputs import Inputs
from ostinato.train.slices import Slice, idle, padding, sliced
from ostinato.types import NO_EXPERT, Microbatch, Segment


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is, without ranks around it: what slicing asks a mesh."""

    layout: Layout
    coords: Coords
    device: str = "cpu"

    def size(self, axis: str) -> int:
        return 1


def part_of(rows: int, targets: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    none = np.zeros(targets, "f4")
    source = Microbatch(
        tokens=rng.integers(0, 50, rows).astype(np.int32),
        positions=np.arange(rows, dtype=np.int32),
        segments=(Segment(start=0, stop=rows),),
        rows=rng.integers(0, rows, targets).astype(np.int32),
        targets=rng.integers(0, 50, targets).astype(np.int32),
        logprobs=none,
        advantages=none,
        weights=none,
        sample_idx=np.zeros(targets, np.int32),
        staleness=np.zeros(targets, np.int32),
        uids=("0#0",),
    )
    routes = torch.from_numpy(rng.integers(0, 8, (rows, 2, 2)).astype(np.int16))
    ids = {
        name: torch.from_numpy(getattr(source, name)).long()
        for name in ("tokens", "positions", "rows", "targets")
    }
    zeros = torch.zeros(targets)
    return Inputs(
        source=source,
        segments=source.segments,
        behaviour=zeros,
        advantages=zeros,
        weights=zeros,
        sample_idx=zeros.long(),
        carried=routes,
        routing=routes,
        **ids,
    )


def all_ranks(layout: Layout, part: Inputs) -> list[Slice]:
    """Of the ranks of one data rank, in order of context and tensor."""
    seats = [Seat(layout, layout.coords(rank)) for rank in range(layout.row_shards)]
    return [sliced(part, 0, seat, Collectives(seat)) for seat in seats]  # type: ignore[arg-type]


LAYOUTS = st.sampled_from(["1", "t2", "c2", "t2c2", "t3c2", "c4t2"])


@given(LAYOUTS, st.integers(1, 30), st.integers(1, 40), st.integers(0, 99))
def test_every_row_and_every_target_is_one_ranks(text: str, rows: int, targets: int, seed: int) -> None:
    layout, part = Layout.parse(text), part_of(rows, targets, seed)
    slices = all_ranks(layout, part)
    total = rows + padding(rows, layout)
    assert total % layout.row_shards == 0 and total - rows < layout.row_shards
    assert [row for one in slices for row in one.own] == list(range(total))
    assert sum(one.real for one in slices) == rows
    for one in slices:
        assert len(one.own) == total // layout.row_shards
        assert one.carried is not None and one.rows.routing is not None
        own = torch.tensor([row for row in one.own if row < rows], dtype=torch.long)
        assert part.carried is not None
        assert torch.equal(one.carried[: one.real], part.carried[own])
        assert (one.carried[one.real :] == NO_EXPERT).all()
    firsts = slices[:: layout.tensor]  # tensor ranks of a context slice share its targets
    for n, one in enumerate(firsts):
        start = n * total // layout.context
        assert torch.equal(part.rows[one.places], one.predictors + start)
        real = min(rows, start + len(one.rows.tokens)) - start
        assert torch.equal(one.rows.tokens[: max(0, real)], part.tokens[start : start + max(0, real)])
    assert sorted(int(place) for one in firsts for place in one.places) == list(range(targets))


@given(LAYOUTS)
def test_an_idle_pass_is_padding_alone(text: str) -> None:
    layout = Layout.parse(text)
    for rank in range(layout.row_shards):
        seat = Seat(layout, layout.coords(rank))
        one = idle(seat, Collectives(seat))  # type: ignore[arg-type]
        assert one.source is None and one.real == 0 and not len(one.predictors) and not len(one.places)
        assert len(one.own) == 1 and len(one.rows.tokens) == layout.tensor
