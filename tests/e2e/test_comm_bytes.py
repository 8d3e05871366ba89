"""Bytes that ranks count in real steps, against those that the planner says, collective by collective."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from layout_runs import Case, batch_of, new_trainer, whole_model
from ranks import on_ranks

from ostinato.apps.plan.traffic import Talk, added
from ostinato.parallel.elements import gradient_sums
from ostinato.parallel.layout import Layout

pytestmark = pytest.mark.slow

SENT = "comm/bytes/"
BAR = 0.05  # uneven routing, a short last microbatch; most is equal

Counted = dict[str, float]


def counted(rank: int, world: int, layout: str, case: Case) -> list[Counted]:
    """comm/bytes of each step, of this rank."""
    trainer = new_trainer(layout, case)
    rows = [trainer.step(batch_of(case, step)).metrics for step in range(case.steps)]
    return [{name.removeprefix(SENT): n for name, n in row.items() if name.startswith(SENT)} for row in rows]


def expected(layout: Layout, rank: int, case: Case, step: int) -> dict[str, float]:
    """Bytes by "operation/axis" of one step of ``layout_runs`` by the planner, whose microbatches are alike:
    each minibatch but the first is scored beforehand."""
    decoder, adapters = whole_model(case)
    talk = Talk(
        config=decoder.config, adapter=adapters.spec if adapters else None, layout=layout, width=4, weight=4
    )
    stage, parts = layout.coords(rank).pipeline, []
    recompute = bool(case.options.get("recompute")) or layout.shard > 1
    for number, minibatch in enumerate(batch_of(case, step).minibatches):
        rows, targets = (sum(len(getattr(one, name)) for one in minibatch) for name in ("tokens", "rows"))
        each, cuts = -(-len(minibatch) // layout.data), layout.row_shards
        padded = sum(-(-len(one.tokens) // cuts) * cuts for one in minibatch)
        for backward in (False, True) if number else (True,):
            one = talk.microbatch(
                padded / layout.data / each,
                targets / layout.data / each,
                stage=stage,
                backward=backward,
                recompute=recompute,
            )
            parts += [added([one], each), talk.scores(rows, targets, backward=backward)]
        parts.append(talk.update(stage))
    return {"/".join(key): sent.bytes for key, sent in added(parts).items()}


MANY = Case(steps=1)  # two minibatches, of which the second is scored beforehand; rows that need padding
WHOLE = {2: Case(steps=1, minibatches=1, microbatch=62), 4: Case(steps=1, minibatches=1, microbatch=38)}
LONG = Case(steps=1, minibatches=1, microbatch=124)


@pytest.mark.parametrize(
    ("layout", "case", "changes"),
    [
        *((layout, MANY, {}) for layout in ("t2c2", "p2v2")),
        *((layout, MANY, {"way": "full"}) for layout in ("t2p2", "d2f2")),
        *((layout, WHOLE[2], {"way": "per_expert"}) for layout in ("d2t2e4", "d2t2e2x2")),
        pytest.param("d4e4", WHOLE[4], {"way": "per_expert"}, marks=pytest.mark.lab),
        ("t2c2e2", LONG, {"way": "per_expert"}),
        ("d2p2e2", WHOLE[2], {"model": "mla"}),
        ("t2p2", MANY, {"options": {"recompute": True}}),
    ],
)
def test_bytes_are_those_of_the_planner(layout: str, case: Case, changes: dict[str, Any]) -> None:
    """Of all ranks together: which expert a row goes to differs between them."""
    case = replace(case, **changes)
    plan = Layout.parse(layout)
    real, planned = Counter[str](), Counter[str]()
    for rank, rows in enumerate(on_ranks(plan.world, counted, layout, case, timeout_s=120)):
        for step, row in enumerate(rows):
            planned.update(expected(plan, rank, case, step))
            real.update(row)
    for name in sorted({*real, *planned}):
        assert planned[name] == pytest.approx(real[name], rel=BAR), name


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
        sum(gradient_sums(decoder.config, adapters.spec, one, 0).values()) for one in (Layout(), own)
    )
    assert sum(on_ranks(4, published, layout, case, timeout_s=120)) == 4 * (whole - kept)
