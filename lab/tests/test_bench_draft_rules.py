"""Published drafting methods as rules of the compiled drafter."""

from __future__ import annotations

import pytest
from small_drafts import Game, compiled, emitted, past, request, running

from lab.draft import RULES, Arm
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.store import History

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler here")
CONTEXT = [7, 8, 9, 10]


@pytest.mark.parametrize("arm", [Arm.SIBLINGS, Arm.NGRAM, Arm.RHYME, Arm.SUFFIX])
def test_every_method_plays_a_game_without_error(arm: Arm) -> None:
    history = History()
    Game(drafter=HistoryDrafter(history, RULES[arm]), history=history, seed=3).play()


def test_prompt_look_up_repeats_four_tokens_after_the_last_occurrence() -> None:
    drafter = HistoryDrafter(None, RULES[Arm.NGRAM])
    handle = drafter.open(request([1, 2, 30, 31, 32, 33, 34, 9, 1, 2, 40, 41, 42, 43, 44, 9, 1, 2]))
    assert drafter.propose(running(handle)).tokens.tolist() == [40, 41, 42, 43]


def test_rhyme_takes_the_rewarded_branch_and_adds_two_to_its_window() -> None:
    """The frequent branch was not rewarded. The window is 2, then 4, and 2 again after a rejection."""
    history = History()
    good = past(CONTEXT, [20, *range(30, 50)], reward=1.0)
    history.add("p", 1, [good, past(CONTEXT, [20, 60]), past(CONTEXT, [20, 60])])
    drafter = HistoryDrafter(history, RULES[Arm.RHYME])
    handle = drafter.open(request(CONTEXT))
    assert drafter.propose(running(handle)).tokens.tolist() == [20, 30]
    drafter.observe(emitted(handle, [20, 30, 31]))
    assert drafter.propose(running(handle)).tokens.tolist() == [32, 33, 34, 35]
    drafter.observe(emitted(handle, [32, 99]))
    drafter.propose(running(handle))
    drafter.observe(emitted(handle, [40, 41, 42]))
    assert drafter.propose(running(handle)).tokens.tolist() == [43, 44]


def test_rhyme_looks_at_the_newest_epoch_only() -> None:
    history = History()
    history.add("p", 1, [past(CONTEXT, [20, 21])])
    history.add("p", 2, [past(CONTEXT, [30, 31])])
    drafter = HistoryDrafter(history, RULES[Arm.RHYME])
    assert drafter.propose(running(drafter.open(request(CONTEXT)))).tokens.tolist() == [30, 31]


def test_suffix_drafts_as_many_tokens_as_agree_over_all_prompts() -> None:
    drafter = HistoryDrafter(None, RULES[Arm.SUFFIX])
    teller = drafter.open(request([1], uid="a"))
    drafter.observe(emitted(teller, list(range(20, 60)), ended=True))
    short, long = (drafter.open(request(text, uid="b")) for text in ([5, 20, 21, 22], list(range(20, 30))))
    assert drafter.propose(running(short)).tokens.tolist() == [23, 24, 25]
    assert len(drafter.propose(running(long)).tokens) == 8  # the longest context length of ten that agree
