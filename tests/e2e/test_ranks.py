"""The helper that every test of several ranks stands on: results, errors, bounds, and nothing left behind."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, on_ranks

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    first: Any
    second: Any


def summed(rank: int, world: int, factor: float) -> dict[str, Any]:
    mine = torch.full((3,), (rank + 1) * factor, requires_grad=True)
    total = mine.detach().clone()
    dist.all_reduce(total)
    return {"total": total, "mine": [mine * 2], "pair": Pair(rank, (total[:1],)), "world": world}


def raising(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hanging(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def leftovers() -> list[psutil.Process]:
    """Processes below the fork server, which is a child of this process."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    mine = [child for child in alive if "forkserver" in " ".join(child.cmdline())]
    assert mine
    return [below for server in mine for below in server.children(recursive=True)]


def test_results_by_rank() -> None:
    for n in (1, 2, 4):
        results = on_ranks(n, summed, 0.5)
        assert [found["pair"].first for found in results] == list(range(n))
        for rank, found in enumerate(results):
            assert torch.equal(found["total"], torch.full((3,), 0.25 * n * (n + 1)))
            assert torch.equal(found["mine"][0], torch.full((3,), float(rank + 1)))
            assert not found["mine"][0].requires_grad
            assert isinstance(found["pair"], Pair)
            assert found["world"] == n
    assert not leftovers()


def test_a_rank_that_raises_ends_all_and_its_traceback_is_told() -> None:
    with pytest.raises(RanksFailed) as caught:
        on_ranks(3, raising, 2, timeout_s=900)  # of a call that ends at once
    text = str(caught.value)
    assert text.startswith("rank 2 of 3 raised after")
    assert "ValueError: rank 2 has had enough" in text
    assert "in raising" in text
    assert not leftovers()


def test_a_rank_that_hangs_is_told_with_its_stack() -> None:
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, hanging, timeout_s=2)
    assert "rank 1 of 2 had not ended" in str(caught.value)
    assert "in hanging" in str(caught.value)
    assert not leftovers()
