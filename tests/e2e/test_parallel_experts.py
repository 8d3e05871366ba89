"""Experts kept by several ranks of gloo: the same results, and the bytes that docs/experts.md says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from ranks import on_ranks
from small_experts import HIDDEN, Case, assert_same, on_one_rank, on_this_rank, output_here, together
from torch import Tensor

from ostinato.parallel.collectives import Collectives
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh

pytestmark = pytest.mark.slow

CASES = (
    Case(rows=(5, 3, 0, 6), num=8, top_k=3, ranks=4),
    Case(rows=(4, 4, 4, 4), num=8, top_k=2, ranks=4, scheme="per_expert", skewed=True),
    Case(rows=(2, 7, 1, 3), num=4, top_k=2, ranks=4, scheme="none", dtype=torch.float32),
)


def of_ranks(
    rank: int, world: int, layout: str, given: Sequence[Case]
) -> list[tuple[dict[str, Tensor], int, int]]:
    """Of every case the results, and the bytes sent forward and in all."""
    mesh = Mesh(Layout.parse(layout))
    links, found = Collectives(mesh), []
    for case in given:
        with torch.no_grad():
            output_here(case, links, rank, mesh.layout.expert_tensor)  # as a pass that only scores
        forward = links.traffic.taken().bytes["all_to_all", "e"]
        part = on_this_rank(case, links, rank, mesh.layout.expert_tensor)
        found.append((part, forward, links.traffic.taken().bytes["all_to_all", "e"]))
    return found


@pytest.mark.parametrize("layout", ["d4e4", "d2t2e4"])
def test_four_ranks_of_gloo(layout: str) -> None:
    ranks = on_ranks(4, of_ranks, layout, CASES)
    for n, case in enumerate(CASES):
        within = 1e-12 if case.dtype == torch.float64 else 5e-6
        assert_same(together([parts[n][0] for parts in ranks]), on_one_rank(case), within)
        for rank, parts in enumerate(ranks):
            assert parts[n][1:] == sent_bytes(case, rank)


def sent_bytes(case: Case, rank: int) -> tuple[int, int]:
    """(forward, forward and backward): what the module says that a rank sends."""
    owner, starts = case.owner()[0], np.cumsum([0, *case.rows])
    homes = [set(owner[row].tolist()) for row in case.ids().numpy()]

    def rows(source: int, to: int) -> int:
        return sum(to in homes[row] for row in range(starts[source], starts[source + 1]))

    others = [other for other in range(case.ranks) if other != rank]
    out, back = sum(rows(rank, one) for one in others), sum(rows(one, rank) for one in others)
    size = torch.empty(0, dtype=case.dtype).itemsize
    row, weights = HIDDEN * size, case.top_k * size
    forward = 8 * len(others) + out * (row + 4 * case.top_k + weights) + back * row
    return forward, forward + out * row + back * (row + weights)


def test_two_ranks_of_gloo_with_replicas_and_cut_widths() -> None:
    """Four ranks as two expert ranks: two replicas of each; widths cut over two tensor ranks."""
    replicas = Case(rows=(5, 3, 2, 4), num=4, top_k=2, ranks=2)
    cut = Case(rows=(3, 3, 5, 5), num=4, top_k=2, ranks=2)
    for layout, case in (("d4e2", replicas), ("d2t2e2x2", cut)):
        ranks = on_ranks(4, of_ranks, layout, (case,))
        assert_same(together([parts[0][0] for parts in ranks]), on_one_rank(case), 1e-12)
