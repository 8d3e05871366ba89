"""What a decode pass asks of a card, counted on a CPU, and graphs that find stale memory there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import collected
from launches import Launches, Recorded
from reference.scripted import ScriptedDrafter
from torch import Tensor
from worlds import DRAFTS_PAY, adapters_of, answers, same, tiny_dense, tiny_moe

from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import KVStore, Places, TritonPaged
from ostinato.engine.pass_graphs import SEVERAL, PassGraphs, Stack
from ostinato.engine.runner import Runner
from ostinato.model.config import parse_config
from ostinato.model.cuda import CUDA_OPS, CudaKernels
from ostinato.model.decoder import Decoder
from ostinato.types import Completion, Request, Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counted in Triton's interpreter")
SIZES: dict[str, Any] = {"head_dim": 8, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
DENSE = tiny_dense(model_type="qwen3", intermediate_size=24, initializer_range=0.3, **SIZES)
EXPERTS = tiny_moe(moe_intermediate_size=8, initializer_range=0.3, **SIZES)


def made(raw: dict[str, Any], layers: int) -> Decoder:
    return Decoder(parse_config({**raw, "num_hidden_layers": layers})).init_weights(0)


def places(seen: list[int], counts: list[int], order: int = 0) -> Places:
    """The last ``counts[s]`` rows of sequences of ``seen[s]`` positions, in blocks of any order."""
    tables = np.random.default_rng(order).permutation(16)[: 4 * len(seen)].reshape(-1, 4).astype(np.int32)
    owners = np.repeat(np.arange(len(seen), dtype=np.int32), counts)
    ends = np.concatenate([np.arange(s - n, s) for s, n in zip(seen, counts, strict=True)]) + 1
    slots = tables[owners, (ends - 1) // 16].astype(np.int64) * 16 + (ends - 1) % 16
    return Places(slots, tables, owners, ends.astype(np.int32))


def launched_of_two(raw: dict[str, Any], layers: int) -> Launches:
    """Of a pass with rows of two policies, by a graph that runs anew."""
    ours = runner(raw, Again, layers)
    for number in (0, 1):
        ours.serve(adapters_of(ours.decoder, number), number)
    where = places([20, 3, 41], [1, 1, 1])

    def pass_() -> None:
        ours.forward(np.arange(3), where.seen.astype(np.int64) - 1, where, [(1, 0, 1), (0, 1, 3)])

    pass_()  # stacks the factors
    with Launches() as launches:
        pass_()
    return launches


def launched(raw: dict[str, Any], layers: int, adapted: bool) -> Launches:
    decoder, device = made(raw, layers), torch.device("cpu")
    store = KVStore.allocate(layers, 16, decoder.kv_shape, decoder.dtype, device, by_position=True)
    where = places([20, 3, 41], [1, 1, 1])
    attend = TritonPaged(store, where.move_to(device))
    prepared = adapters_of(decoder).prepare(decoder.dtype) if adapted else None
    ids = torch.from_numpy(where.seen.astype(np.int64))
    with torch.inference_mode(), Launches() as launches:
        decoder.forward(ids, ids - 1, attend, adapters=prepared, ops=CUDA_OPS)
    return launches


@pytest.mark.parametrize(
    ("raw", "adapted", "most"),
    [(DENSE, False, 10), (DENSE, True, 18), (EXPERTS, False, 13), (EXPERTS, True, 19)],
    ids=["dense", "dense with adapters", "mixture", "mixture with adapters"],
)
def test_launches_of_a_layer_and_nothing_is_read_back(raw: dict[str, Any], adapted: bool, most: int) -> None:
    """With the first kernels 14, 22, 32 and 49; with none of them 99 and 132, of which every layer waited."""
    few, many = (launched(raw, layers, adapted) for layers in (1, 2))
    assert len(many.names) - len(few.names) == most
    assert not many.reads


@pytest.mark.parametrize(("raw", "reads"), [(DENSE, 1), (EXPERTS, 2)], ids=["dense", "mixture"])
def test_a_step_reads_its_tokens_and_routes_alone(raw: dict[str, Any], reads: int) -> None:
    """Schedule, pass, draw by a filter and what comes after, of a prompt and then of a token. What a filter
    left, where it is recorded, is read too."""
    options: dict[str, Any] = {"kv_memory_mb": 1, "context_limit": 64, "record_support": False}
    engine, seen = LocalEngine(made(raw, 1), kernels=CudaKernels(), **options), []
    engine.publish(adapters_of(engine.decoder), 1)
    step = engine.driver._step

    def counted() -> None:
        with Launches() as launches:
            step()
        seen.append(launches.reads)

    engine.driver._step = counted
    tokens = np.arange(5, dtype=np.int32)
    answers(engine, [Request(tokens=tokens, sampling=Sampling(max_tokens=2, top_k=3), seed=(0,))])
    assert seen == [["cpu"] * reads] * 2


@pytest.mark.parametrize(("raw", "most"), [(DENSE, 18), (EXPERTS, 20)], ids=["dense", "mixture"])
def test_two_policies_are_one_pass(raw: dict[str, Any], most: int) -> None:
    """Passes of their own were 36 and 38 launches a layer, and two graphs."""
    few, many = (launched_of_two(raw, layers) for layers in (1, 2))
    assert len(many.names) - len(few.names) == most
    assert not many.reads


# graphs


class Again:
    """A ``Graph`` that calls Python anew."""

    def capture(self, work: Callable[[], None]) -> None:
        self.replay = work


def anew(ours: Runner) -> Runner:
    """Nothing of a pass is kept for the next one: buffers, graphs and prepared adapters are new each time."""
    forward = ours.forward

    def fresh(*args: Any) -> tuple[Tensor, Tensor | None]:
        ours._graphs = PassGraphs(ours.decoder, ours.store, CudaKernels(), Again)  # type: ignore[arg-type]
        ours._stack = Stack(ours.decoder.config, ours.decoder.dtype)
        for served in ours._policies.values():
            if served.adapters is not None:
                served.prepared = served.adapters.prepare(ours.decoder.dtype)
        return forward(*args)

    ours.forward = fresh  # type: ignore[method-assign]
    return ours


def runner(raw: dict[str, Any], graph: Callable[[], Any], layers: int = 1) -> Runner:
    decoder = made(raw, layers)
    store = KVStore.allocate(layers, 16, decoder.kv_shape, decoder.dtype, decoder.device, by_position=True)
    return Runner(decoder, CudaKernels(graph=graph), store)


# positions of the sequences, and how many of the last are rows
BATCHES = [([20, 3, 41], [1, 1, 1]), ([9, 60], [3, 1]), ([5, 6, 7, 8], [1, 1, 1, 1])]


def passes(ours: Runner) -> list[Tensor]:
    """Passes that one graph serves, with other tokens, lengths, blocks, sequences, drafts and adapters."""
    found = []
    for number, (seen, counts) in enumerate(
        [([20, 3, 41], [1, 1, 1]), ([9, 60], [3, 1]), ([5, 6, 7, 8], [1] * 4)]
    ):
        ours.serve(adapters_of(ours.decoder, number))
        where = places(seen, counts, number)
        tokens = np.arange(len(where.slots)) * 7 + number
        found += [x for x in ours.forward(tokens, where.seen.astype(np.int64) - 1, where) if x is not None]
    return [*found, ours.store.keys.clone(), ours.store.values.clone()]


@pytest.mark.slow
@pytest.mark.parametrize("raw", [DENSE, EXPERTS], ids=["dense", "mixture"])
def test_a_replay_is_the_pass_itself_to_the_bit(raw: dict[str, Any]) -> None:
    graphs: list[Recorded] = []

    def recorded() -> Recorded:
        graphs.append(Recorded())
        return graphs[-1]

    for ours, theirs in zip(passes(runner(raw, recorded)), passes(anew(runner(raw, Again))), strict=True):
        assert torch.equal(ours, theirs)
    assert [graph.replays for graph in graphs] == [3]


@pytest.mark.slow
def test_a_captured_pass_is_the_one_that_is_not_captured() -> None:
    """Rows that fill up the batch change nothing, and the keys that were stored are the same."""
    for ours, theirs in zip(passes(runner(DENSE, Again)), passes(runner(DENSE, None)), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [DENSE, EXPERTS], ids=["dense", "mixture"])
def test_a_pass_of_several_policies_is_a_pass_of_each(raw: dict[str, Any]) -> None:
    """By one graph, whatever is published between: adapters of a smaller rank and of fewer targets, the base,
    and another policy in the place of one that has gone; for a third one there has to be room for four."""
    graphs: list[Recorded] = []

    def recorded() -> Recorded:
        graphs.append(Recorded())
        return graphs[-1]

    ours, theirs = runner(raw, recorded), runner(raw, None)  # type: ignore[arg-type]
    attention = adapters_of(ours.decoder, 2, rank=2, targets=("attn",))
    steps = [
        (
            {0: adapters_of(ours.decoder, 1), 1: attention},
            [3, 1],
        ),
        ({0: adapters_of(ours.decoder, 3)}, [1, 2]),
        ({1: None}, [2, 2]),
        ({2: adapters_of(ours.decoder, 4)}, [1, 1, 1]),
        ({1: attention}, [2, 1, 1]),
    ]
    for number, (published, counts) in enumerate(steps):
        for one in (ours, theirs) if number == 4 else ():
            one.retire(1)
        for policy, adapters in published.items():
            ours.serve(adapters, policy)
            theirs.serve(adapters, policy)
        where = places([20, 9, 41][: len(counts)], counts, number)
        ends = np.cumsum(counts).tolist()
        spans = [(len(counts) - 1 - i, a, b) for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
        tokens, positions = np.arange(ends[-1]) * 7 + number, where.seen.astype(np.int64) - 1
        found, wanted = (one.forward(tokens, positions, where, spans) for one in (ours, theirs))
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
        assert found[1] is None or (wanted[1] is not None and torch.equal(found[1], wanted[1]))
    assert [graph.replays for graph in graphs] == [3, 2]


def answered(graph: Callable[[], Any]) -> tuple[list[Completion], LocalEngine]:
    """Of two policies, with drafts of which some come true, a publish in flight, and blocks for too few."""
    decoder, noise = made({**EXPERTS, "vocab_size": 5}, 1), np.random.default_rng(5)
    ours = LocalEngine(
        decoder,
        kernels=CudaKernels(graph=graph),
        context_limit=64,
        drafter=ScriptedDrafter(lambda request, tokens: tokens[-2:]),
        cost=DRAFTS_PAY,
    )
    ours._scheduler.cache = KVCache(4)
    if graph is Again:
        anew(ours._runner)
    ours.publish(adapters_of(decoder, 1), 1)
    ours.publish(adapters_of(decoder, 2, rank=2, targets=("attn",)), 7, "other")
    asked = [
        Request(
            tokens=noise.integers(0, 5, 14 + index).astype(np.int32),
            sampling=Sampling(max_tokens=5, top_k=0 if index else 3),
            seed=(3, index),
            policy="other" if index == 1 else "",
        )
        for index in range(3)
    ]

    async def collect() -> list[Completion]:
        answers = asyncio.create_task(collected(ours.generate(asked), len(asked)))
        while ours.counters.decoded < 3:
            await asyncio.sleep(0)
        ours.publish(adapters_of(decoder, 3), 2)
        return await answers

    return asyncio.run(collect()), ours


@pytest.mark.slow
def test_answers_by_graphs_are_those_of_passes_of_which_nothing_is_kept() -> None:
    """To the bit, whatever comes between a capture and its replays."""
    done, ours = answered(Recorded)
    twins, _ = answered(Again)
    for one, other in zip(done, twins, strict=True):
        same(one, other)
    assert {1, 2} <= {*np.concatenate([one.versions for one in done]).tolist()}
    assert ours.counters.preempted and 0 < ours.counters.accepted < ours.counters.drafted
    assert ours._runner._graphs is not None
    assert any(key[0] == SEVERAL for key in ours._runner._graphs._passes)
