"""The compiled drafter decides as its plain twin, in a small world whose policy drifts from step to step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_blocks import PlainStore
from reference.plain_drafter import PlainDrafter
from small_drafts import compiled, play

from ostinato.algo.noise import key, uniform
from ostinato.history.drafter import HistoryDrafter, Rules, Source
from ostinato.history.native.library import load_library
from ostinato.history.store import History

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler here")


# ---- the noise


@pytest.fixture(scope="module")
def native_uniform() -> Callable[..., float]:
    function = load_library().drafter_uniform
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int64)
    return function


@settings(max_examples=50, deadline=None)
@given(seed=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), position=st.integers(0, 2**40))
def test_the_compiled_noise_is_that_of_the_sampler(
    native_uniform: Callable[..., float], seed: list[int], position: int
) -> None:
    raw = (ctypes.c_int64 * len(seed))(*seed)
    assert native_uniform(raw, len(seed), position) == uniform(key(seed), position)


# ---- decisions


SIBLINGS = Rules(sources=frozenset({Source.SIBLING, Source.OWN}))
TIGHT = replace(
    Rules(),
    ring=16,
    group=8,
    total=40,
    walk=3,
    length=5,
    least=2,
    ladder=(4, 2),
    live=(5, 2),
    shared=(3,),
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            Rules(),
            Rules(sources=frozenset({Source.SIBLING, Source.OWN})),
            replace(Rules(), use_noise=False),
            TIGHT,
        ]
    ),
    st.sampled_from([1, 3]),
    st.sampled_from([1.0, 0.0]),
)
def test_the_compiled_drafter_decides_as_its_plain_twin(
    seed: int, rules: Rules, leaves: int, temperature: float
) -> None:
    """Not only the drafts: what is learnt and counted is equal to the last bit."""
    histories = [History(), History(store=PlainStore())]
    twins = [HistoryDrafter(histories[0], rules), PlainDrafter(histories[1], rules)]
    play(twins, histories, seed, leaves=leaves, temperature=temperature)
    fast, plain = (replace(twin.stats(), open_s=0, propose_s=0, observe_s=0, live_bytes=0) for twin in twins)
    assert fast == plain
    assert (twins[0].weights() == twins[1].weights()).all()


def test_a_game_ends_without_error() -> None:
    history = History()
    drafter = HistoryDrafter(history)
    play([drafter], [history], 3, leaves=1, temperature=1.0)
    assert sum(drafter.stats().labels) > 0
