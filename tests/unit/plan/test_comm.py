"""Bytes that a plan says a rank sends: nothing alone, and the laws by which they grow."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import LORA, problem, setup

from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.plan.comm import Talk, layers_of, remote_copies, total
from ostinato.plan.counts import adapter_counts
from ostinato.plan.leaves import gathered_values, gradient_sizes
from ostinato.plan.named import find_model
from ostinato.plan.problem import Phase
from ostinato.plan.traffic import Microbatch, Steps, traffic

MOE = find_model("qwen3-30b-a3b").config
DENSE = find_model("qwen3-8b").config
LATENT = find_model("kimi-k2").config


def sent(layout: str, config: object = MOE, adapter: AdapterSpec | None = LORA, rows: float = 4096) -> dict:
    one = Steps(config=config, adapter=adapter, layout=Layout.parse(layout))  # type: ignore[arg-type]
    parts = [Microbatch(rows=rows, targets=rows / 2)] * one.layout.data
    return {key: found.bytes for key, found in total(one.step(parts)).items()}


@pytest.mark.parametrize("config", [MOE, DENSE, LATENT])
@pytest.mark.parametrize("adapter", [LORA, None])
def test_one_rank_says_nothing(config: object, adapter: AdapterSpec | None) -> None:
    assert sent("1", config, adapter) == {}


def test_tensor_ranks_gather_and_scatter_twice_a_layer_each_way() -> None:
    """Forward: attention and MLP enter and leave; backward the same the other way round. The input of the
    first layer needs no gradient, so one scatter less; the embedding scatters, the head gathers and
    scatters."""
    found = total(
        Steps(config=DENSE, adapter=LORA, layout=Layout.parse("t2")).microbatch(
            Microbatch(rows=64, targets=8)
        )
    )
    layers, whole = DENSE.num_layers, 64 * DENSE.hidden_size * 4 / 2
    assert found["all_gather", "t"] == (4 * layers + 1, (4 * layers + 1) * whole)
    assert found["reduce_scatter", "t"] == (4 * layers - 1 + 2, (4 * layers + 1) * whole)


def test_recomputing_says_the_forward_again() -> None:
    plain = Steps(config=DENSE, adapter=LORA, layout=Layout.parse("t2"))
    again = Steps(config=DENSE, adapter=LORA, layout=Layout.parse("t2"), recompute=True)
    part = Microbatch(rows=64, targets=8)
    more = (
        total(again.microbatch(part))["all_gather", "t"].calls
        - total(plain.microbatch(part))["all_gather", "t"].calls
    )
    assert more == 2 * DENSE.num_layers


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1024.0, 4096.0]))
def test_rows_between_tensor_ranks_grow_with_rows_and_ranks(ranks: int, rows: float) -> None:
    alone = Talk(config=DENSE, layout=Layout(tensor=ranks), width=2.0)
    layer = layers_of(DENSE, LORA)[3]
    size = sum(one.sent for one in alone.forward(layer, rows))
    assert size == pytest.approx(4 * rows * DENSE.hidden_size * 2.0 * (ranks - 1) / ranks)


def test_expert_exchange_sends_a_row_once_to_each_rank() -> None:
    assert remote_copies(8, 8, 8) == pytest.approx(7.0)  # every expert is chosen: all other ranks
    assert remote_copies(128, 1, 8) == pytest.approx(7 / 8)
    assert remote_copies(128, 8, 1) == 0
    for ranks in (2, 4, 8, 16):
        assert remote_copies(128, 8, ranks) < min(ranks - 1, 8) + 1e-9
    layer = next(one for one in layers_of(MOE, LORA) if one.mixture)
    talk = Talk(config=MOE, layout=Layout(data=4, expert=4), width=2.0)
    assert sum(one.axis == "e" for one in talk.forward(layer, 64.0)) == 5
    assert sum(one.axis == "e" for one in talk.backward(layer, 64.0)) == 3


def test_known_copies_stand_for_the_expected_ones() -> None:
    talk = Talk(config=MOE, layout=Layout(data=4, expert=4), width=4.0)
    layer = layers_of(MOE, LORA)[1]
    none = total(talk.forward(layer, 64.0, (0.0, 0.0)))
    assert none["all_to_all", "e"].bytes == 3 * 8  # counts, which everybody sends


@pytest.mark.parametrize(
    ("layout", "axis"), [("d4", "s"), ("d4e4", "s"), ("t4", "s"), ("d2t2", "s"), ("d2t2", "dc")]
)
def test_gradients_are_summed_where_leaves_are_alike(layout: str, axis: str) -> None:
    assert sent(layout)["all_reduce", axis] > 0


def test_gradient_sizes_are_those_of_the_adapter() -> None:
    """Cut leaves over their ranks, replicated ones once, and the experts' where they are: together the
    adapter."""
    whole = sum(adapter_counts(MOE, LORA).values())
    for layout in map(Layout.parse, ("1", "d4e4", "t2d2", "t2d2e4", "p2d2e2", "t4e2x1")):
        sizes = [gradient_sizes(MOE, LORA, layout, stage) for stage in range(layout.pipeline)]
        found = sum(
            one["dc",] * layout.tensor + one["s",] + one["r",] * layout.expert * layout.expert_tensor
            for one in sizes
        )
        assert found == whole, str(layout)


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


def test_only_stages_pass_on_and_only_those_that_have_a_next() -> None:
    part = Microbatch(rows=64, targets=8)
    for layout, rank, calls in (("p3", 0, 1), ("p3", 1, 2), ("p3", 2, 1), ("p2v2", 0, 3), ("p2v2", 1, 3)):
        one = Steps(config=DENSE, adapter=LORA, layout=Layout.parse(layout), rank=rank)
        assert total(one.microbatch(part))["send_recv", "p"].calls == calls, (layout, rank)


def test_padding_is_passed_when_microbatches_do_not_come_out_even() -> None:
    def calls(layout: str, number: int) -> float:
        one = Steps(config=MOE, adapter=LORA, layout=Layout.parse(layout), rank=1)
        found = total(one.step([Microbatch(rows=64, targets=8)] * number))
        return found["all_to_all", "e"].calls if ("all_to_all", "e") in found else 0

    assert calls("d2e2", 3) == calls("d2e2", 4) == 2 * calls("d2e2", 2)


def test_old_logprobs_of_one_update_are_free() -> None:
    assert traffic(problem(), Phase.LOGPROBS, setup("d4t2")) == {}
    assert traffic(problem(), Phase.TRAIN, setup("d4t2"))


def test_no_layout_of_the_small_ones_is_forgotten() -> None:
    """Every product of axes has messages without an error, and some wherever there is more than one rank."""
    for d, t, p, c, e in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2)):
        if d * c * t % e:
            continue
        layout = Layout(data=d, tensor=t, pipeline=p, context=c, expert=e)
        found = sent(str(layout), rows=4096)
        assert bool(found) == (layout.world > 1), str(layout)
        assert all(size >= 0 for size in found.values())
