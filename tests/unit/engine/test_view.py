"""Several loops on one engine, each in a thread of its own: the same bits as on an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import NATIVE, VOCAB, adapters_of, same, tiny_decoder

from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.engine.scheduler import share_queue
from ostinato.engine.view import PolicyView
from ostinato.protocols import Engine
from ostinato.types import Completion, Request, Sampling

DECODER = tiny_decoder()
ADAPTERS = [adapters_of(DECODER, seed, 0.3) for seed in range(4)]
NEEDS_KERNELS = pytest.mark.skipif(NATIVE is None, reason="rows depend on others without native kernels")


def new_engine() -> LocalEngine:
    return LocalEngine(DECODER, kernels=NATIVE, kv_memory_mb=4, context_limit=256, max_batch=6)


def ask(engine: Engine, seed: int) -> list[Completion]:
    """Three rounds of siblings, each under a new version, as a run asks for them."""

    async def rounds() -> list[Completion]:
        output: list[Completion] = []
        for version in range(3):
            engine.publish(ADAPTERS[(seed + version) % len(ADAPTERS)], version)
            tokens = np.random.default_rng(version).integers(0, VOCAB, 20).astype(np.int32)
            requests = [
                Request(tokens=tokens, sampling=Sampling(max_tokens=12), seed=(seed, k)) for k in range(4)
            ]
            answers = {index: answer async for index, answer in engine.generate(requests)}
            output += [answers[index] for index in range(4)]
        return output

    return asyncio.run(rounds())


def test_the_share_of_a_view_is_that_of_its_policy_in_the_engine() -> None:
    with contextlib.closing(EngineThread(new_engine)) as thread:
        with contextlib.closing(PolicyView(thread, "run", share=3.0)) as view:
            view.publish(ADAPTERS[0], 0)
            assert thread.engine.shares == {"run": 3.0}
        assert thread.engine.shares == {}


@NEEDS_KERNELS
def test_loops_in_threads_get_the_answers_that_they_get_alone() -> None:
    together: dict[int, list[Completion]] = {}
    with contextlib.closing(EngineThread(new_engine)) as thread:

        def run(seed: int) -> None:
            with contextlib.closing(PolicyView(thread, f"run {seed}")) as view:
                together[seed] = ask(view, seed)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert thread.engine.policies.numbers == {"": 0} and thread.engine.shares == {}
        free = thread.run(lambda engine: engine._scheduler.cache.num_free)
        assert free == thread.engine._scheduler.cache.num_blocks  # nothing of them is left in the tree
    for seed, answers in together.items():
        for alone, answer in zip(ask(new_engine(), seed), answers, strict=True):
            same(alone, answer)


@NEEDS_KERNELS
def test_an_error_of_one_loop_is_not_the_others() -> None:
    with contextlib.closing(EngineThread(new_engine)) as thread:
        view = PolicyView(thread, "a")
        view.publish(ADAPTERS[0], 0)
        too_long = Request(tokens=np.zeros(300, np.int32), sampling=Sampling(max_tokens=4), seed=(0,))

        async def fail() -> None:
            async for _ in view.generate([too_long]):
                pass

        with pytest.raises(ValueError, match="300 tokens and the context 256"):
            asyncio.run(fail())
        assert len(ask(PolicyView(thread, "b"), 1)) == 12


@given(st.lists(st.sampled_from("abc"), max_size=30), st.lists(st.sampled_from("abc"), max_size=10))
def test_every_policy_gets_slots_in_proportion_to_its_share(waiting: list[str], running: list[str]) -> None:
    shares = {"a": 2.0, "b": 0.5}

    def sequence(policy: str, index: int) -> Any:
        request = Request(tokens=np.zeros(1, np.int32), sampling=Sampling(), seed=(index,), policy=policy)
        return type("Waiting", (), {"request": request})()

    queue = deque(sequence(name, index) for index, name in enumerate(waiting))
    order = list(share_queue(cast(Any, queue), [sequence(name, -1) for name in running], shares))
    assert sorted(map(id, order)) == sorted(map(id, queue))
    for name in "abc":  # the order of a policy stays
        seeds = [one.request.seed for one in order if one.request.policy == name]
        assert seeds == sorted(seeds)
    count = {name: float(running.count(name)) for name in "abc"}
    left = {name: waiting.count(name) for name in "abc"}
    if len({*waiting}) < 2:
        return
    for one in order:  # slow, obvious twin: who has least for its share is next
        turns = {name: (count[name] + 1) / shares.get(name, 1.0) for name in "abc" if left[name]}
        name = one.request.policy
        assert turns[name] == min(turns.values())
        count[name] += 1
        left[name] -= 1
