"""From layout to layout: nothing is lost, and nothing is sent twice or without need."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_shards import config_of, layouts_of

from ostinato.model.config import ModelConfig
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.share import Share, placed, size_of
from ostinato.parallel.layout import Layout
from ostinato.parallel.reshard import Reshard, factor_shapes, holdings, same_base

SPECS = {
    "shared_outer": AdapterSpec(rank=2, targets=("attn", "mlp", "shared", "experts", "router")),
    "per_expert": AdapterSpec(rank=2, expert_scheme=ExpertScheme.PER_EXPERT),
}
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str, str, int, str]:
    family = draw(st.sampled_from(FAMILIES))
    layouts = st.sampled_from(layouts_of(family))
    return family, draw(layouts), draw(layouts), draw(st.integers(0, 4)), draw(st.sampled_from(list(SPECS)))


@pytest.mark.slow
@given(pairs())
@settings(max_examples=60)
def test_plans_move_what_is_lacking_and_no_more(case: tuple[str, str, str, int, str]) -> None:
    family, before, after, first, scheme = case
    config, spec = config_of(family), SPECS[scheme]
    shapes = factor_shapes(config, spec)
    held, wanted = holdings(Layout.parse(before), config), holdings(Layout.parse(after), config, first)
    plan = Reshard.plan(config, shapes, held, wanted)
    lacking = 0
    for rank, shares in wanted.items():
        for share in shares:
            for name, shape in shapes.items():
                if int(name.split(".")[1]) not in share.layers:
                    continue
                needed = marked(config, share, name, shape)
                own = torch.zeros(shape, dtype=torch.bool)
                for one in held.get(rank, ()):
                    if int(name.split(".")[1]) in one.layers:
                        own |= marked(config, one, name, shape)
                lacking += int((needed & ~own).sum())
                got = torch.zeros(shape, dtype=torch.int64)  # how often each element comes
                for move in plan.moves:
                    if (move.name, move.target) == (name, rank):
                        got += mask(move.part, shape)
                assert torch.equal(got > 0, needed) and int(got.max()) == 1
    assert sum(plan.sent(itemsize=1).values()) == lacking
    if before == after and first == 0:
        assert lacking == 0 and len(same_base(held, wanted)) == Layout.parse(before).world


def mask(part: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Ones where a part is."""
    found = torch.ones(shape, dtype=torch.int64)
    for dim, kept in enumerate(part):
        line = torch.zeros(shape[dim], dtype=torch.int64)
        for span in kept:
            line[span.start : span.stop] += 1
        found *= line.view([-1 if d == dim else 1 for d in range(len(shape))])
    return found


def marked(config: ModelConfig, share: Share, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return mask(placed(config, share, name, shape), shape) > 0


def test_replicas_take_turns() -> None:
    """What one sends could have been sent by any of the four that hold it."""
    config = config_of("llama")
    held, wanted = holdings(Layout(data=4), config), holdings(Layout(data=4), config, 4)
    sent = Reshard.plan(config, factor_shapes(config, SPECS["shared_outer"]), held, wanted).sent()
    by_source = [sum(size for (source, _), size in sent.items() if source == rank) for rank in range(4)]
    assert max(by_source) < 1.2 * min(by_source)


def test_nothing_can_come_from_nowhere() -> None:
    config = config_of("llama")
    shapes = factor_shapes(config, SPECS["shared_outer"])
    stages = holdings(Layout.parse("p2"), config)
    with pytest.raises(ValueError, match=r"rank 5 is to have \d+ elements of layers\.2\.attn\.q\.A"):
        Reshard.plan(config, shapes, {0: stages[0]}, {5: (Share.all(config),)})


def test_a_checkpoint_is_a_plan() -> None:
    """All of it to rank 0: what it does not hold, once."""
    config = config_of("qwen3_moe")
    shapes = factor_shapes(config, SPECS["per_expert"])
    held = holdings(Layout.parse("p2d2e2"), config)
    plan = Reshard.plan(config, shapes, held, {0: (Share.all(config),)})
    own = sum(
        size_of(placed(config, share, name, shape))
        for name, shape in shapes.items()
        for share in held[0]
        if int(name.split(".")[1]) in share.layers
    )
    assert sum(plan.sent().values()) == 4 * (sum(map(prod, shapes.values())) - own)
