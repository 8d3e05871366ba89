"""The drafter: what it proposes, how much of it, and what it learns."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_drafts import Game, Speaker, compiled, emitted, past, request, running

from ostinato.algo.noise import key, uniform
from ostinato.history.drafter import FEATURES, INITIAL_WEIGHTS, HistoryDrafter, Rules, Source
from ostinato.history.native.library import load_library
from ostinato.history.rules import MOST_DEPTH
from ostinato.history.store import History
from ostinato.types import Request

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler here")
FAINT, LEAST_GAIN = 0.05, 1.01  # of drafter.cpp and budget.h: chances and gains below are not worth a draft


def only(*sources: Source, **rules: Any) -> Rules:
    return replace(Rules(), sources=frozenset(sources), **rules)


# ---- what is proposed


CONTEXT = [7, 8, 9, 10]


@pytest.mark.parametrize("count", [2, 50])  # more than 32 are looked at around the uniform only
def test_the_token_whose_interval_holds_the_uniform_is_drafted(count: int) -> None:
    """Answers distinguished by the uniform alone: of two [0, 0.5) was 20 and [0.5, 1) was 21."""
    history = History()
    history.add("p", 1, [past(CONTEXT, [20 + n], probs=1 / count, edges=n / count) for n in range(count)])
    for seed in range(20):
        drafter = HistoryDrafter(history, only(Source.HISTORY))
        drafts = drafter.propose(running(drafter.open(request(CONTEXT, seed=(seed,)))))
        assert drafts.tokens.tolist() == [20 + int(uniform(key((seed,)), len(CONTEXT)) * count)]


def test_no_row_is_spent_where_no_stored_interval_holds_the_uniform() -> None:
    history = History()
    history.add("p", 1, [past(CONTEXT, [20], probs=0.1)] * 8)  # 20 eight times, and yet it is not likely now
    seed = next(seed for seed in range(100) if uniform(key((seed,)), len(CONTEXT)) > 0.8)
    with_noise, without = (
        HistoryDrafter(history, only(Source.HISTORY, use_noise=use)) for use in (True, False)
    )
    costs = 1e-3 + 5e-4 * np.arange(9)
    for drafter, expected in ((with_noise, []), (without, [20])):
        handle = drafter.open(request(CONTEXT, seed=(seed,)))
        assert drafter.propose(running(handle, seconds=costs)).tokens.tolist() == expected


def test_a_draft_follows_history_to_its_end_and_no_further() -> None:
    history = History()
    history.add("p", 1, [past(CONTEXT, list(range(20, 40)))])
    drafter = HistoryDrafter(history)
    handle = drafter.open(request(CONTEXT))
    assert drafter.propose(running(handle)).tokens.tolist() == list(range(20, 40))
    assert drafter.propose(running(handle, room=3)).tokens.tolist() == [20, 21, 22]
    drafter.observe(emitted(handle, range(20, 25)))
    assert drafter.propose(running(handle)).tokens.tolist() == list(range(25, 40))
    drafter.observe(emitted(handle, [99]))  # off the path: nothing is known after it
    assert drafter.propose(running(handle)).tokens.tolist() == []
    drafter.observe(emitted(handle, [30, 31, 32]))  # and back on it
    assert drafter.propose(running(handle)).tokens.tolist() == list(range(33, 40))


def test_matches_longer_than_the_order_of_a_suffix_array_are_followed() -> None:
    """Suffixes are sorted by 64 tokens; two documents that agree in 200 are followed all the same."""
    history = History()
    text = [10 + n % 90 for n in range(200)]
    history.add("p", 1, [past(CONTEXT, text), past(CONTEXT, [*text, 5])])
    drafter = HistoryDrafter(history)
    handle, generated = drafter.open(request(CONTEXT)), 0
    while generated < len(text):
        drafts = drafter.propose(running(handle)).tokens.tolist()
        assert drafts[: len(text) - generated] == text[generated : generated + len(drafts)]
        assert drafts
        drafter.observe(emitted(handle, drafts))
        generated += len(drafts)


def test_siblings_are_drafted_from_while_they_run_and_until_they_are_forgotten() -> None:
    drafter = HistoryDrafter(None, only(Source.SIBLING))
    first, second = (drafter.open(request(CONTEXT, seed=(seed,))) for seed in (1, 2))
    drafter.observe(emitted(first, [20, 21, 22, 23]))
    assert drafter.propose(running(first, second)).tokens.tolist() == [20, 21, 22, 23]
    drafter.observe(emitted(first, [24, 25], ended=True))
    assert drafter.propose(running(second)).tokens.tolist() == [20, 21, 22, 23, 24, 25]
    drafter.forget()  # the second one still runs: its group stays
    assert len(drafter.propose(running(second)).tokens) == 6
    drafter.observe(emitted(second, [1], ended=True))
    drafter.forget(["p"])
    assert drafter.stats().groups == 0
    assert drafter.propose(running(drafter.open(request(CONTEXT)))).tokens.tolist() == []


def test_other_prompts_help_those_that_have_no_history() -> None:
    history = History()
    history.add("old", 1, [past([1, 1, 1], [2, 2])])
    drafter = HistoryDrafter(history, only(Source.OTHER, Source.HISTORY))
    teller = drafter.open(request([1, 2], uid="a"))
    drafter.observe(emitted(teller, [20, 21, 22, 23, 24, 25, 26], ended=True))
    new, old = (
        drafter.open(request([20, 21, 22, 23], uid="new")),
        drafter.open(request([20, 21, 22, 23], uid="old")),
    )
    assert drafter.propose(running(new)).tokens.tolist() == [24, 25, 26]
    assert drafter.propose(running(old)).tokens.tolist() == []


def test_greedy_sequences_do_not_look_at_the_noise() -> None:
    """A greedy token comes whatever the uniform is, and is stored as [0, 1) whatever is recorded of it."""
    for seed in range(10):
        drafter = HistoryDrafter(None, only(Source.SIBLING))
        first, second = (drafter.open(request(CONTEXT, seed=(seed, n), temperature=0)) for n in (0, 1))
        drafter.observe(emitted(first, [20, 21, 22], prob=0.01, edge=0.99))
        drafts = drafter.propose(running(first, second))
        assert (drafts.counts.tolist(), drafts.tokens.tolist()) == ([0, 3], [20, 21, 22])
    history = History()
    history.add("p", 1, [past(CONTEXT, [20], probs=0.3, edges=0.35)])  # holds 1/2
    for seed in range(10):
        drafter = HistoryDrafter(history, only(Source.HISTORY))
        handle = drafter.open(request(CONTEXT, seed=(seed,), temperature=0))
        assert drafter.propose(running(handle)).tokens.tolist() == [20]


def test_history_may_change_while_a_drafter_follows_it() -> None:
    history = History(epochs=1)
    history.add("p", 1, [past(CONTEXT, [20, 21, 22])])
    drafter = HistoryDrafter(history)
    handle = drafter.open(request(CONTEXT))
    assert drafter.propose(running(handle)).tokens.tolist() == [20, 21, 22]
    history.add("p", 2, [past(CONTEXT, [20, 31, 32])])  # and the old block is gone, memory and all
    drafter.observe(emitted(handle, [20]))
    assert drafter.propose(running(handle)).tokens.tolist() == [31, 32]


# ---- how much


def chance(history: History, asking: Request) -> float:
    """What a drafter gives its best token for the first place of a request, by its accounts."""
    drafter = HistoryDrafter(history, only(Source.HISTORY))
    handle = drafter.open(asking)
    drafter.propose(running(handle, room=1))
    drafter.observe(emitted(handle, [1]))
    return sum(drafter.stats().predicted)


@settings(max_examples=25, deadline=None)
@given(
    pasts=st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(0.0, 0.9)), min_size=1, max_size=8),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=8, max_size=8),
    steps=st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12),
    most=st.integers(1, 12),
)
def test_the_budget_is_where_tokens_per_second_are_the_most(
    pasts: list[tuple[float, float]], weights: list[float], steps: list[float], most: int
) -> None:
    """Against trying every number of tokens; costs rise in any way, stairs and all."""
    seconds = np.cumsum([1.0, *(step if step > 0.1 else 0.0 for step in steps[:most])])
    history = History()
    for number, (prob, edge) in enumerate(pasts):
        history.add(f"p{number}", 1, [past(CONTEXT, [20], probs=prob, edges=edge)])
    asking = [request(CONTEXT, seed=(number,), uid=f"p{number}") for number in range(len(pasts))]
    gains = np.array([chance(history, one) for one in asking]) * weights[: len(asking)]
    drafter = HistoryDrafter(history, only(Source.HISTORY))
    query = running(*map(drafter.open, asking), room=1, seconds=seconds)
    drafts = drafter.propose(replace(query, weights=np.array(weights[: len(asking)], np.float32)))
    worth, offered = sum(weights[: len(asking)]), gains[gains >= FAINT * np.array(weights[: len(asking)])]
    best = np.cumsum([worth, *sorted(offered, reverse=True)])[: len(seconds)]
    rates = best / seconds[: len(best)]
    kept = (worth + gains[drafts.counts > 0].sum()) / seconds[drafts.counts.sum()]
    assert kept == pytest.approx(max(rates) if max(rates) >= LEAST_GAIN * rates[0] else rates[0])


def test_drafts_shrink_as_passes_grow_dearer() -> None:
    history = History()
    history.add("p", 1, [past(CONTEXT, list(range(20, 50)), probs=0.97)])
    lengths = []
    for cost in (0.0, 0.3, 0.9, 2.0):  # of a draft token, relative to the pass without
        drafter = HistoryDrafter(history)
        handle = drafter.open(request(CONTEXT))
        lengths.append(len(drafter.propose(running(handle, seconds=1.0 + cost * np.arange(31))).tokens))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 30 and lengths[-1] == 0


def test_where_there_is_nothing_to_find_the_drafter_sleeps_and_a_new_sequence_wakes_it() -> None:
    drafter = HistoryDrafter(None)
    handle = drafter.open(request(CONTEXT))
    for token in range(100, 200):  # never twice the same
        assert drafter.propose(running(handle)).tokens.tolist() == []
        drafter.observe(emitted(handle, [token]))
    stats = drafter.stats()
    assert stats.looked < 25
    assert stats.naps + stats.slept + stats.looked == stats.passes == 100
    other = drafter.open(request(list(range(105, 110))))
    assert drafter.propose(running(other)).tokens.tolist()[:4] == [110, 111, 112, 113]


def test_a_sequence_that_met_the_end_of_history_is_not_punished() -> None:
    """A draft that is short because the store ended is no miss."""
    history = History()
    history.add("p", 1, [past(CONTEXT, [20, 21])])
    drafter = HistoryDrafter(history, only(Source.HISTORY))
    handle = drafter.open(request(CONTEXT))
    drafter.propose(running(handle))
    drafter.observe(emitted(handle, [20, 21]))
    for _ in range(12):
        assert drafter.propose(running(handle)).tokens.tolist() == []
    assert drafter.stats().slept == 0


# ---- learning


def rewarded_and_not() -> HistoryDrafter:
    """Of two prompts that were answered with 20; only the answer to "good" had more than its sibling."""
    history = History()
    for uid, reward in (("good", 1.0), ("bad", 0.0)):
        history.add(uid, 1, [past(CONTEXT, [20], reward=reward), past([1], [2], reward=1.0 - reward)])
    return HistoryDrafter(history, only(Source.HISTORY, use_noise=False))


def label(drafter: HistoryDrafter, uid: str, comes: bool) -> None:
    handle = drafter.open(request(CONTEXT, uid=uid))
    drafter.propose(running(handle, room=1))
    drafter.observe(emitted(handle, [20 if comes else 99], ended=True))


def test_the_estimator_makes_a_damped_newton_step_every_64_labels() -> None:
    """Of the log loss; features as in native/estimate.h: of a match, its interval unknown."""
    drafter, weights = rewarded_and_not(), np.array(INITIAL_WEIGHTS)
    curvature, gradient = 8.0 * np.eye(FEATURES), np.zeros(FEATURES)
    length, share = np.log2(1 + len(CONTEXT)) / 4, np.log(1 / 0.5) / 4
    for n in range(64):
        x = np.zeros(FEATURES)
        x[[0, 5, 11, 12, 13, 14]] = 1, length, 1 if n % 2 else -1, 1, share, length
        p = 1 / (1 + np.exp(-weights @ x))
        gradient += ((n % 3 == 0) - p) * x
        curvature += p * (1 - p) * np.outer(x, x)
        assert (drafter.weights() == weights).all()
        label(drafter, "good" if n % 2 else "bad", n % 3 == 0)
    np.testing.assert_allclose(drafter.weights(), weights + np.linalg.solve(curvature, gradient), rtol=1e-9)


def test_estimates_become_calibrated_online() -> None:
    """What was rewarded comes true seldom, what was not often: against what the initial weights say."""
    rng, drafter, estimates = (
        random.Random(0),
        rewarded_and_not(),
        {"good": list[float](), "bad": list[float]()},
    )
    for _ in range(1000):
        for uid, chance in (("good", 0.2), ("bad", 0.8)):
            before = sum(drafter.stats().predicted)
            label(drafter, uid, rng.random() < chance)
            estimates[uid].append(sum(drafter.stats().predicted) - before)
    assert np.mean(estimates["good"][-300:]) == pytest.approx(0.2, abs=0.07)
    assert np.mean(estimates["bad"][-300:]) == pytest.approx(0.8, abs=0.07)


# ---- games: an engine that samples by a policy which drifts from step to step


TIGHT = replace(
    Rules(), ring=16, group=8, total=40, walk=3, length=5, least=2, ladder=(4, 2), live=(5, 2), shared=(3,)
)
GAMES = st.builds(partial, st.just(Game), seed=st.integers(0, 10**6), temperature=st.sampled_from([1.0, 0.0]))


@settings(max_examples=30, deadline=None)
@given(GAMES, st.sampled_from([Rules(), only(Source.SIBLING), only(Source.HISTORY, use_noise=False), TIGHT]))
def test_the_books_are_those_of_the_engine(game: Any, rules: Rules) -> None:
    """Whatever is drafted is well formed, which the game checks, and counted once, by source and by depth."""
    history = History()
    drafter = HistoryDrafter(history, rules)
    seen, stats = game(drafter=drafter, history=history).play(), drafter.stats()
    assert (stats.passes, stats.emitted, stats.sequences) == (seen["passes"], seen["emitted"], 0)
    for what, by_source, by_depth in (
        ("drafted", stats.drafted, stats.drafted_at),
        ("accepted", stats.accepted, stats.accepted_at),
    ):
        assert sum(by_source.values()) == sum(by_depth) == seen[what]
        assert {source for source, n in by_source.items() if n} <= rules.sources
        assert by_depth == tuple(seen[f"{what} {depth} deep"] for depth in range(1, MOST_DEPTH + 1))
    assert seen["accepted"] <= sum(stats.hits) <= sum(stats.labels)
    assert all(0 <= p <= n for p, n in zip(stats.predicted, stats.labels, strict=True))


@settings(max_examples=40, deadline=None)
@given(GAMES, st.sampled_from(Source))
def test_what_is_drafted_was_said_after_the_same_words(game: Any, source: Source) -> None:
    """In closed answers to the same prompt, by its siblings, by the sequence itself, or by anybody."""
    history, rules = History(), only(source)
    words = 1 + (rules.shared[-1] if source is Source.OTHER else rules.least)

    def check(speaker: Speaker, path: list[int]) -> None:
        uid = speaker.request.uid
        generated = {
            Source.HISTORY: lambda: [block.text.tolist() for block in history.blocks(uid)],
            Source.SIBLING: lambda: [
                one.text for one in played.speakers if one.request.uid == uid and one is not speaker
            ],
            Source.OWN: lambda: [speaker.text],
            Source.OTHER: lambda: [one.text for one in played.speakers],
        }[source]()
        wanted = [*speaker.text, *path][-words:]
        assert any(wanted == one[n : n + words] for one in generated for n in range(len(one))), (uid, path)

    drafter = HistoryDrafter(history, rules)
    played = game(drafter=drafter, history=history, free=True, on_draft=check)
    played.play()


def test_in_a_world_that_stays_as_it_is_most_drafts_are_taken() -> None:
    """The figures of these games, with a margin: a drafter that looks elsewhere, or too seldom, is below."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        history = History()
        seen += Game(drafter=HistoryDrafter(history), history=history, seed=seed, drift=0.0, free=True).play()
    assert seen["accepted"] > 0.27 * seen["emitted"]
    assert seen["accepted"] > 0.8 * seen["drafted"]


# ---- the noise


@settings(max_examples=50, deadline=None)
@given(seed=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), position=st.integers(0, 2**40))
def test_the_compiled_noise_is_that_of_the_sampler(seed: list[int], position: int) -> None:
    function = load_library().drafter_uniform
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_long, ctypes.c_int64)
    raw = (ctypes.c_int64 * len(seed))(*seed)
    assert function(raw, len(seed), position) == uniform(key(seed), position)


# ---- bounds and misuse


def test_live_text_is_bounded() -> None:
    drafter = HistoryDrafter(None, replace(Rules(), ring=256, group=256, total=512))
    rng = np.random.default_rng(0)
    sizes = []
    for uid in range(30):
        handle = drafter.open(request(rng.integers(0, 1000, 50).tolist(), uid=str(uid)))
        drafter.observe(emitted(handle, rng.integers(0, 1000, 400).tolist(), ended=True))
        sizes.append(drafter.stats().live_bytes)
    assert max(sizes) <= 64 * (256 + 512 + 256)  # the ring, all groups, and the one that crosses the line
    assert drafter.stats().groups <= 3


def test_handles_that_are_not_open_are_refused() -> None:
    drafter = HistoryDrafter(None)
    handle = drafter.open(request(CONTEXT))
    drafter.observe(emitted(handle, [1], ended=True))
    for wrong in (handle, -1, 77):
        with pytest.raises(ValueError, match="not open"):
            drafter.propose(running(wrong))
        with pytest.raises(ValueError, match="not open"):
            drafter.observe(emitted(wrong, [1]))
