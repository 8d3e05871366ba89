"""The drafter: what it proposes, how much of it, and that the compiled one decides as its plain twin."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_blocks import PlainStore
from reference.plain_drafter import LEAST_GAIN, Node, PlainDrafter
from reference.plain_estimate import Estimator
from reference.plain_lookup import Candidate
from small_drafts import FREE, compiled, emitted, past, request, running

from ostinato.algo.noise import key, uniform
from ostinato.history.drafter import FEATURES, HistoryDrafter, Rules, Source
from ostinato.history.store import History

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler here")


def only(*sources: Source, **rules: Any) -> Rules:
    return replace(Rules(), sources=frozenset(sources), **rules)


# ---- what is proposed


CONTEXT = [7, 8, 9, 10]


def test_the_token_whose_interval_holds_the_uniform_is_drafted() -> None:
    """Two answers, told apart by the uniform alone: [0, 0.5) was 20 and [0.5, 1) was 30."""
    history = History()
    history.add("p", 1, [past(CONTEXT, [20], probs=0.5), past(CONTEXT, [30], probs=0.5, edges=0.5)])
    for seed in range(20):
        drafter = HistoryDrafter(history, only(Source.HISTORY))
        drafts = drafter.propose(running(drafter.open(request(CONTEXT, seed=(seed,)))))
        assert drafts.tokens.tolist() == [20 if uniform(key((seed,)), len(CONTEXT)) < 0.5 else 30]


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
    handle, said = drafter.open(request(CONTEXT)), 0
    while said < len(text):
        drafts = drafter.propose(running(handle)).tokens.tolist()
        assert drafts[: len(text) - said] == text[said : said + len(drafts)]
        assert drafts
        drafter.observe(emitted(handle, drafts))
        said += len(drafts)


def test_a_draft_has_at_most_32_tokens_and_no_more_than_the_pass_may_hold() -> None:
    history = History()
    history.add("p", 1, [past(CONTEXT, list(range(20, 90)))])
    drafter = HistoryDrafter(history)
    handle = drafter.open(request(CONTEXT))
    assert len(drafter.propose(running(handle, room=60)).tokens) == 32
    assert len(drafter.propose(running(handle, room=60, seconds=FREE[:8])).tokens) == 7
    assert len(drafter.propose(running(handle, room=60, seconds=FREE[:1])).tokens) == 0
    assert len(drafter.propose(running(handle, room=0)).tokens) == 0


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


def test_text_of_another_prompt_is_no_sibling_and_nobody_shares_with_nobody() -> None:
    for uids in (("a", "b"), ("", "")):
        drafter = HistoryDrafter(None, only(Source.SIBLING, Source.OWN))
        first, second = (drafter.open(request(CONTEXT, seed=(n,), uid=uid)) for n, uid in enumerate(uids))
        drafter.observe(emitted(first, [20, 21, 22]))
        assert drafter.propose(running(first, second)).tokens.tolist() == []
        drafter.observe(emitted(first, [1], ended=True))
        drafter.observe(emitted(second, [], ended=True))  # given up
        assert drafter.stats().sequences == 0


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
    """A greedy token comes whatever the uniform is, and is stored as [0, 1) whatever is said of it."""
    for seed in range(10):
        drafter = HistoryDrafter(None, only(Source.SIBLING))
        first, second = (drafter.open(request(CONTEXT, seed=(seed, n), temperature=0)) for n in (0, 1))
        drafter.observe(emitted(first, [20, 21, 22], prob=0.01, edge=0.99))
        drafts = drafter.propose(running(first, second))
        assert (drafts.counts.tolist(), drafts.tokens.tolist()) == ([0, 3], [20, 21, 22])


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


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.06, 1.0), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12),
    st.integers(1, 12),
)
def test_the_budget_is_where_tokens_per_second_are_the_most(
    survivals: list[float], steps: list[float], most: int
) -> None:
    """Against trying every number of tokens; costs rise in any way, stairs and all."""
    seconds = [1.0]
    for step in steps[:most]:
        seconds.append(seconds[-1] + (step if step > 0.1 else 0.0))
    drafter = PlainDrafter(History(store=PlainStore()))
    handle = drafter.open(request(CONTEXT))
    sequence = drafter._at(handle)
    sequence.deepest = 1  # no look-ups behind these
    nodes = [root(sequence, survival) for survival in survivals]
    heap: list[Any] = []
    drafter._offer(heap, nodes)
    worth = float(len(survivals))
    best = drafter._take(heap, worth, seconds, leaves=len(nodes))
    gains = np.cumsum([0.0, *sorted(survivals, reverse=True)])[: len(seconds)]
    rates = [(worth + gain) / second for gain, second in zip(gains, seconds, strict=False)]
    assert rates[best] == pytest.approx(max(rates) if max(rates) >= LEAST_GAIN * rates[0] else rates[0])


def root(sequence: Any, survival: float) -> Any:
    candidate = Candidate(token=1, source=Source.OWN, estimate=survival, x=[0.0] * FEATURES)
    return Node(sequence=sequence, parent=None, depth=1, survival=survival, candidate=candidate)


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


def test_estimates_become_calibrated_online() -> None:
    """Candidates that are right with a chance the initial weights know nothing of."""
    rng, estimator = random.Random(0), Estimator([0.0] * FEATURES)
    errors = []
    for _ in range(1500):
        x = [1.0] + [0.0] * (FEATURES - 1)
        x[3], x[10] = float(rng.random() < 0.5), rng.uniform(-1, 1)
        truth = 1 / (1 + np.exp(-(0.5 + 2 * x[3] - 1.5 * x[10])))
        estimate = estimator.probability(x)
        estimator.learn(x, estimate, rng.random() < truth)
        errors.append(abs(estimate - truth))
    assert np.mean(errors[-300:]) < 0.05 < np.mean(errors[:64])


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


def test_rules_are_checked() -> None:
    for wrong in ({"length": 33}, {"least": 0}, {"epochs": 5}, {"live": (3, 6)}, {"walk": 0}, {"ring": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(Rules(), **wrong)
