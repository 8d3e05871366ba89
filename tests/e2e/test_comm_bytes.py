"""Bytes and calls that ranks count in real steps, against those that the planner says, collective by
collective.

Where rows go to experts follows from the routes that the batches carry: every row of them is replayed.
Layouts with e are such that no row is padding, whose experts are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layout_runs import MODELS, Case, batch_of, new_trainer, whole_model
from ranks import on_ranks

from ostinato.apps.plan.comm import Sent, total
from ostinato.apps.plan.leaves import gradient_sizes
from ostinato.apps.plan.traffic import Microbatch, Steps
from ostinato.model.config import parse_config
from ostinato.parallel.layout import Layout
from ostinato.types import Microbatch as Packed

pytestmark = pytest.mark.slow

Counted = dict[str, float]


def counted(rank: int, world: int, layout: str, case: Case) -> list[Counted]:
    """comm/bytes and comm/calls of each step, of this rank."""
    trainer = new_trainer(layout, case)
    rows = [trainer.step(batch_of(case, step)).metrics for step in range(case.steps)]
    kept = ("comm/bytes", "comm/calls")
    return [{name: n for name, n in row.items() if name.startswith(kept)} for row in rows]


def output(layout: Layout, rank: int, case: Case, step: int) -> dict[tuple[str, str], Sent]:
    """What the planner says of one step of ``layout_runs``: each minibatch but the first is scored
    beforehand."""
    decoder, adapters = whole_model(case)
    steps = Steps(
        config=decoder.config,
        adapter=adapters.spec if adapters else None,
        layout=layout,
        rank=rank,
        recompute=bool(case.options.get("recompute")) or layout.shard > 1,
    )
    found = []
    for number, minibatch in enumerate(batch_of(case, step).minibatches):
        parts = [planned(minibatch, index, layout, rank, case) for index in range(len(minibatch))]
        found += steps.scored(parts) if number else []
        found += steps.step(parts)
    return total(found)


def planned(minibatch: tuple[Packed, ...], index: int, layout: Layout, rank: int, case: Case) -> Microbatch:
    """A microbatch as the planner takes it."""
    part, at = minibatch[index], layout.coords(rank)
    padded = -(-len(part.tokens) // layout.row_shards) * layout.row_shards
    width = padded // layout.context
    here = ((part.rows >= at.context * width) & (part.rows < (at.context + 1) * width)).sum()
    copies = None
    if layout.expert > 1 and index % layout.data == at.data:
        assert padded == len(part.tokens)
        copies = exchanged(minibatch, index, layout, rank, case)
    return Microbatch(
        rows=len(part.tokens), targets=len(part.rows), here=int(here), carried=True, remote=copies
    )


def exchanged(
    minibatch: tuple[Packed, ...], index: int, layout: Layout, rank: int, case: Case
) -> Mapping[int, tuple[float, float]]:
    """By layer: copies of own rows that go to other expert ranks, and of their rows that come from there."""
    config = parse_config(MODELS[case.model])
    assert config.moe is not None
    kept, group = config.moe.num_experts // layout.expert, layout.group("e", rank)
    round_ = index // layout.data
    found = {}
    for place, layer in enumerate(config.moe.layers):
        matrix = np.zeros((len(group), len(group)))
        for row, member in enumerate(group):
            at = layout.coords(member)
            number = round_ * layout.data + at.data
            if number >= len(minibatch):
                raise AssertionError("a rank passes padding: its choices are not known")
            experts = minibatch[number].experts
            assert experts is not None
            size = len(experts) // layout.row_shards
            start = (at.context * layout.tensor + at.tensor) * size
            rows = experts[start : start + size, place]
            if layout.expert_tensor > 1:
                size = len(experts) // layout.context
                rows = experts[at.context * size : (at.context + 1) * size, place]
            for ids in rows:
                matrix[row, np.unique(ids // kept)] += 1
        me = group.index(rank)
        out, back = matrix[me].sum() - matrix[me, me], matrix[:, me].sum() - matrix[me, me]
        found[layer] = (float(out), float(back))
    return found


MANY = Case(steps=1)  # two minibatches, of which the second is scored beforehand; rows that need padding
WHOLE = {2: Case(steps=1, minibatches=1, microbatch=62), 4: Case(steps=1, minibatches=1, microbatch=38)}
LONG = Case(steps=1, minibatches=1, microbatch=124)


@pytest.mark.parametrize(
    ("layout", "case", "changes"),
    [
        *((layout, MANY, {}) for layout in ("t2", "t2c2", "d2t2", "p2v2")),
        *((layout, MANY, {"way": "full"}) for layout in ("t2p2", "d2f2")),
        *((layout, WHOLE[2], {"way": "per_expert"}) for layout in ("d2t2e4", "d2t2e2x2")),
        ("d4e4", WHOLE[4], {"way": "per_expert"}),
        ("t2c2e2", LONG, {"way": "per_expert"}),
        ("d2p2e2", WHOLE[2], {"model": "mla"}),
        ("t2p2", MANY, {"options": {"recompute": True}}),
    ],
)
def test_calls_and_bytes_are_those_of_the_planner(layout: str, case: Case, changes: dict[str, Any]) -> None:
    case = replace(case, **changes)
    plan = Layout.parse(layout)
    for rank, rows in enumerate(on_ranks(plan.world, counted, layout, case, timeout_s=120)):
        for step, row in enumerate(rows):
            expected = output(plan, rank, case, step)
            names = {"/".join(key) for key, sent in expected.items() if sent.bytes} | {
                name.split("/", 2)[2] for name in row
            }
            for name in sorted(names):
                operation, axis = name.split("/")
                sent = expected.get((operation, axis), Sent(0, 0))
                where = f"{layout} {case}, rank {rank}, step {step}: {name}"
                assert row.get(f"comm/calls/{name}", 0) == sent.calls, where
                # counters round every call down to a whole byte
                assert 0 <= sent.bytes - row.get(f"comm/bytes/{name}", 0) <= sent.calls, where


def published(rank: int, world: int, layout: str, case: Case) -> float:
    """Bytes that this rank sends when all adapters are gathered."""
    trainer = new_trainer(layout, case)
    trainer.adapters()
    return trainer.step(batch_of(case, 0)).metrics.get("comm/bytes/send_recv/all", 0.0)


@pytest.mark.parametrize("layout", ["t2p2", "d2t2e4"])
def test_a_publish_sends_every_part_once(layout: str) -> None:
    case = WHOLE[2]
    decoder, adapters = whole_model(case)
    assert adapters is not None
    own = replace(Layout.parse(layout), shard=1)
    whole, kept = (
        sum(gradient_sizes(decoder.config, adapters.spec, one, 0).values()) for one in (Layout(), own)
    )
    assert sum(on_ranks(4, published, layout, case, timeout_s=120)) == 4 * (whole - kept)
