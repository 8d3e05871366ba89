"""Mixture layers on several ranks of this machine, with the experts kept in one way and in another.

Every rank is a process with one thread, and they speak gloo. A step is all layers, each forward and backward:
a frozen base with adapters, gradients to the rows, as in training. Ranks begin a layer together, and it ends
when the last one has ended; so the seconds of a step are the sum over layers of those of the slowest rank, by
the clock on the wall or, where others use the machine too, by processor time, in which waiting is nothing.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.contender import ContenderFailed
from lab.paired import Paired
from lab.settings import Clock
from ostinato.parallel.load import expert_loads, imbalance
from ostinato.parallel.placement import contiguous, slots

LORA_RANK = 16
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """``routes`` [T, L, K] of rows that ranks share equally, to ``experts`` of ``width``; ``placed`` [L, E]:
    the other way to keep them, beside neighbours together."""

    name: str
    routes: np.ndarray
    experts: int
    ranks: int
    hidden: int
    width: int
    placed: np.ndarray


def timed(case: Case, rounds: int, limit_s: float, clock: Clock = Clock.WALL) -> dict[str, Any]:
    """A row of the JSON: straggler factors, and seconds of both ways in turn (``base`` is as they come),
    those of the slowest rank. Raises ContenderFailed where ranks do not end well, or not within
    ``limit_s``."""
    loads = expert_loads(case.routes, case.experts)
    neighbours = contiguous(len(loads), case.experts, case.ranks)
    before, after = (imbalance(loads, owner, case.ranks) for owner in (neighbours, case.placed))
    found = _on_ranks(case, rounds, limit_s, clock)
    slowest = np.max([seconds for seconds, _ in found], axis=0).sum(axis=-1)  # [rounds, ways]
    paired = Paired(base=tuple(slowest[:, 0].tolist()), other=tuple(slowest[:, 1].tolist()))
    waited = np.array([waits for _, waits in found])  # [ranks, ways]
    return {
        "name": case.name,
        "rows": len(case.routes),
        "layers": len(loads),
        "hidden": case.hidden,
        "width": case.width,
        "experts": case.experts,
        "ranks": case.ranks,
        "straggler": before.straggler,
        "straggler_placed": after.straggler,
        "time": paired.figures(),
        "exchange_s": (waited.mean(0) / rounds).tolist(),  # on the wall, waiting for the slower rank included
    }


def _on_ranks(case: Case, rounds: int, limit_s: float, clock: Clock) -> list[Any]:
    """What every rank has measured, by rank."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=_rank, args=(rank, case, rounds, store, limit_s, clock, answers), daemon=True
            )
            for rank in range(case.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            found = dict(_answer(answers, ranks, limit_s) for _ in ranks)
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
    return [found[rank] for rank in range(case.ranks)]


def _answer(answers: Any, ranks: list[Any], limit_s: float) -> tuple[int, Any]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            dead = [number for number, process in enumerate(ranks) if process.exitcode]
            if dead:
                raise ContenderFailed(f"rank {dead[0]} of the timed layers died") from None
    raise ContenderFailed(f"the timed layers took longer than {limit_s:.0f} s")


def _rank(rank: int, case: Case, rounds: int, store: str, limit_s: float, clock: Clock, answers: Any) -> None:
    """One rank's life: (rank, (seconds [rounds, 2, layers], seconds in exchanges by way)) into
    ``answers``."""
    import torch
    import torch.distributed as dist

    from ostinato.parallel.layout import Layout
    from ostinato.parallel.links import Links
    from ostinato.parallel.mesh import Mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=limit_s),
    )
    links = Links(Mesh(Layout(data=case.ranks, expert=case.ranks)))
    neighbours = contiguous(case.routes.shape[1], case.experts, case.ranks)
    ways = [_layers(case, owner, links, rank) for owner in (neighbours, case.placed)]
    seconds, waited = [], [0.0, 0.0]
    for number in range(WARM_UP + rounds):
        row: list[list[float]] = [[], []]
        for way in (0, 1) if number % 2 else (1, 0):
            links.traffic.taken()
            for layer in ways[way]:
                dist.barrier()
                started = clock.read()
                layer()
                row[way].append(clock.read() - started)
            if number >= WARM_UP:
                waited[way] += sum(links.traffic.taken().seconds.values())
        if number >= WARM_UP:
            seconds.append(row)
    answers.put((rank, (np.array(seconds), waited)))
    dist.barrier()
    dist.destroy_process_group()


def _layers(case: Case, owner: np.ndarray, links: Any, rank: int) -> list[Callable[[], None]]:
    """Each layer forward and backward, on this rank's part of the rows."""
    import torch

    from ostinato.model.moe import ExpertLora
    from ostinato.parallel.experts import ExpertParallel

    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    kept, hidden, width = case.experts // case.ranks, case.hidden, case.width
    own = torch.from_numpy(case.routes[rank :: case.ranks].astype(np.int64))
    routes = [torch.from_numpy(table)[own[:, layer]] for layer, table in enumerate(slots(owner))]
    x = normal(len(own), hidden).requires_grad_()
    weights = torch.full(own.shape[::2], 1 / own.shape[2])
    gate_up, down = normal(kept, 2 * width, hidden), normal(kept, hidden, width)
    factors = [normal(2 * LORA_RANK, hidden), normal(kept, 2 * width, 2 * LORA_RANK)]
    factors += [normal(kept, LORA_RANK, width), normal(hidden, LORA_RANK)]
    lora = ExpertLora(*(factor.requires_grad_() for factor in factors), scale=1.0)
    experts = ExpertParallel(links=links)

    def run(layer: Any) -> None:
        experts(x, layer, weights, gate_up, down, lora).sum().backward()
        for leaf in (x, *lora[:4]):
            leaf.grad = None

    return [partial(run, layer) for layer in routes]


__all__ = ["Case", "timed"]
