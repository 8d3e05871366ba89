"""Bytes that a plan says a rank sends: nothing alone, and the laws by which they grow."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import LORA

from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.plan.comm import Talk, layers_of, total
from ostinato.plan.leaves import gathered_values
from ostinato.plan.named import find_model
from ostinato.plan.traffic import Microbatch, Steps

MOE = find_model("qwen3-30b-a3b").config
DENSE = find_model("qwen3-8b").config


def sent(layout: str, config: object = MOE, adapter: AdapterSpec | None = LORA, rows: float = 4096) -> dict:
    one = Steps(config=config, adapter=adapter, layout=Layout.parse(layout))  # type: ignore[arg-type]
    parts = [Microbatch(rows=rows, targets=rows / 2)] * one.layout.data
    return {key: found.bytes for key, found in total(one.step(parts)).items()}


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1024.0, 4096.0]))
def test_rows_between_tensor_ranks_grow_with_rows_and_ranks(ranks: int, rows: float) -> None:
    alone = Talk(config=DENSE, layout=Layout(tensor=ranks), width=2.0)
    layer = layers_of(DENSE, LORA)[3]
    size = sum(one.sent for one in alone.forward(layer, rows))
    assert size == pytest.approx(4 * rows * DENSE.hidden_size * 2.0 * (ranks - 1) / ranks)


@given(st.sampled_from([1, 2, 3, 4, 5, 8]), st.sampled_from([1, 2, 4]))
def test_gathered_weights_are_the_matrices_and_padding(shard: int, tensor: int) -> None:
    layout = Layout(data=shard, shard=shard, tensor=tensor)
    whole = Layout(data=2, shard=2, tensor=tensor)
    found = gathered_values(MOE, layout, moe=True)
    assert found % shard == 0
    assert shard == 1 or 0 <= found - gathered_values(MOE, whole, moe=True) <= 4 * shard


def test_adapters_move_less_than_all_weights() -> None:
    """Acceptance 5: gradients of LoRA against those of full-parameter training."""
    lora, full = (sent("d8", adapter=adapter)["all_reduce", "s"] for adapter in (LORA, None))
    assert 20 < full / lora < 200


@pytest.mark.parametrize(
    "layout", ["d2t2", "d4e4", "d2c2", "p2d2", "d2t2e4", "d2t2p2e2", "d2f2", "t2e2x1", "t2x2"]
)
def test_what_is_said_is_linear_in_microbatches(layout: str) -> None:
    one = Steps(config=MOE, adapter=LORA, layout=Layout.parse(layout))
    part = Microbatch(rows=4096, targets=100)
    update = {key: found.bytes for key, found in total(one.update()).items()}
    several = {
        n: {
            key: found.bytes - update.get(key, 0.0)
            for key, found in total(one.step([part] * n * one.layout.data)).items()
        }
        for n in (1, 3)
    }
    for key, size in several[1].items():
        assert several[3][key] == pytest.approx(3 * size)


def test_no_layout_of_the_small_ones_is_forgotten() -> None:
    """Every product of axes has messages without an error, and some wherever there is more than one rank."""
    for d, t, p, c, e in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2)):
        if d * c * t % e:
            continue
        layout = Layout(data=d, tensor=t, pipeline=p, context=c, expert=e)
        found = sent(str(layout), rows=4096)
        assert bool(found) == (layout.world > 1), str(layout)
        assert all(size >= 0 for size in found.values())
