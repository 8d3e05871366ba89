"""Forced interruption: one answer out of two requests, and nothing that was not sampled is learned from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference.fake_engine import FakeEngine, draw, scripted

from ostinato.algo.noise import key, uniform
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.pipeline.draft_metrics import collect_answers, count_drafts
from ostinato.rollout.convert import make_samples
from ostinato.rollout.health import (
    compute_health,
    count_injected_tokens,
    count_prefilled_tokens,
    count_sampled_tokens,
)
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext, play_episode
from ostinato.types import Completion, Group, Prompt, Request, Reward, Sampling, Stop, Trajectory

LETTERS = "abcdefgh"
END = LETTERS.index("h")  # ends an answer
PROMPT = Prompt(uid="p", text="p")
SEED = (0, 1, 2, 3)


class Letters:
    """A token is a letter; the last one is special, and left out of texts."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([LETTERS.index(letter) for letter in text], np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return "".join(LETTERS[token] for token in tokens if token != END or not skip_special)


WORDS = Letters()


def interruption(
    shortest: int = 3, longest: int = 5, answer: int = 4, phrase: str = "fg", end: str = "g"
) -> Any:
    return Interruption(
        shortest=shortest,
        longest=longest,
        answer_tokens=answer,
        phrase=WORDS.encode(phrase),
        think_end=end,
        words=WORDS,
    )


class Talk:
    """An agent's environment: ``replies`` after its answers, whose texts it keeps in ``heard``."""

    def __init__(self, *replies: str, start: str = "abc") -> None:
        self._start, self._replies, self.heard = start, list(replies), list[str]()

    def start(self) -> np.ndarray:
        return WORDS.encode(self._start)

    async def step(self, completion: Completion) -> np.ndarray | None:
        self.heard.append(completion.text)
        return WORDS.encode(self._replies.pop(0)) if self._replies else None


class Parity:
    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=float(k % 2)) for k in range(len(group.trajectories))]


def markov(seed: int, moe: tuple[int, int] | None = None) -> FakeEngine:
    """A policy that looks at the last token alone, wherever a request begins."""
    table = np.random.default_rng(seed).normal(0, 1.5, (len(LETTERS), len(LETTERS)))
    return FakeEngine(
        lambda _, request, sampled: table[[*request.tokens, *sampled][-1]], decode=WORDS.decode, moe=moe
    )


def says(*answers: str) -> FakeEngine:
    """Says ``answers`` one after the other: one for each request."""
    reported = iter(answers)
    scripts: dict[int, list[int]] = {}  # by the length of the prompt

    def answer(request: Request) -> list[int]:
        if len(request.tokens) not in scripts:
            scripts[len(request.tokens)] = WORDS.encode(next(reported)).tolist()
        return scripts[len(request.tokens)]

    return FakeEngine(scripted(answer, len(LETTERS)), decode=WORDS.decode, moe=(2, 1))


def stage(engine: Any, env: Talk | None = None, **options: Any) -> RolloutContext:
    chosen = {"sampling": Sampling(max_tokens=1, stop_tokens=(END,)), "context_limit": 64} | options
    chosen.setdefault("interruption", interruption())
    return RolloutContext(engine=engine, env=lambda prompt: env or Talk(), grader=Parity(), **chosen)


def episode(setting: RolloutContext, seed: tuple[int, ...] = SEED) -> Trajectory:
    return asyncio.run(play_episode(setting, PROMPT, seed))


def only_answer(setting: RolloutContext, seed: tuple[int, ...] = SEED) -> Completion:
    (turn,) = episode(setting, seed).turns
    return turn.completion


def group_of(*trajectories: Trajectory) -> Group:
    return Group(prompt=PROMPT, trajectories=trajectories, step=1)


def by_hand(
    table: np.ndarray, rule: Interruption, seed: tuple[int, ...], sampling: Sampling
) -> dict[str, Any]:
    """The slow twin: one token after the other, with the rule of the recipe's page."""
    context, sampled, put_in = WORDS.encode("abc").tolist(), [], []
    logprobs: list[float] = []

    def go_on(most: int, since: int) -> tuple[Stop, str]:
        for _ in range(most):
            tokens = [*context, *sampled]
            noise = float(uniform(key(seed), len(tokens)))
            banned = sampling.stop_tokens if len(sampled) - sum(put_in) < sampling.min_tokens else ()
            token, logprob = draw(table[tokens[-1]], 1.0, noise, banned)
            sampled.append(token)
            put_in.append(False)
            logprobs.append(logprob)
            text = WORDS.decode(sampled[since:])
            if token in sampling.stop_tokens:
                return Stop.EOS, text
            if cuts := [text.index(string) for string in sampling.stop_strings if string in text]:
                return Stop.STRING, text[: min(cuts)]
        return Stop.LENGTH, WORDS.decode(sampled[since:])

    stop, text = go_on(rule.draw_budget(seed, len(context)), 0)
    if stop is Stop.LENGTH:
        before = ""
        if not (rule.think_end and rule.think_end in text):
            sampled += rule.phrase.tolist()
            put_in += [True] * len(rule.phrase)
            logprobs += [0.0] * len(rule.phrase)
            before = WORDS.decode(sampled)
        stop, text = go_on(rule.answer_tokens, len(sampled) if before else 0)
        text = before + text
    return {"tokens": sampled, "put_in": put_in, "logprobs": logprobs, "stop": stop, "text": text}


@given(
    seed=st.integers(0, 10_000),
    budget=st.tuples(st.integers(1, 6), st.integers(0, 4)),
    answer=st.integers(1, 6),
    phrase=st.sampled_from(["f", "fg", "efg"]),
    end=st.sampled_from(["", "g", "ab", "cde"]),
    strings=st.sampled_from([(), ("dd",), ("bc", "cab"), ("e", "ce")]),
    min_tokens=st.integers(0, 8),
)
def test_an_answer_is_what_the_slow_twin_says_token_by_token(
    seed: int, budget: tuple[int, int], answer: int, phrase: str, end: str, strings: Any, min_tokens: int
) -> None:
    rule = interruption(budget[0], sum(budget), answer, phrase, end)
    sampling = Sampling(max_tokens=8, stop_tokens=(END,), stop_strings=strings, min_tokens=min_tokens)
    table = np.random.default_rng(seed).normal(0, 1.5, (len(LETTERS), len(LETTERS)))
    ours = only_answer(stage(markov(seed), interruption=rule, sampling=sampling), (seed, 1, 0, 0))
    twin = by_hand(table, rule, (seed, 1, 0, 0), sampling)
    assert ours.tokens.tolist() == twin["tokens"]
    assert (ours.stop, ours.text) == (twin["stop"], twin["text"])
    put_in = np.zeros(len(ours.tokens), bool) if ours.injected is None else ours.injected
    assert put_in.tolist() == twin["put_in"]
    assert ours.injected is None or ours.injected.any()
    np.testing.assert_allclose(ours.logprobs, twin["logprobs"], rtol=1e-6)
    assert ours.versions.tolist() == np.where(put_in, -1, 0).tolist()


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 8),
    answer=st.integers(1, 8),
    strings=st.sampled_from([(), ("bc",), ("aba", "cc"), ("eb", "e")]),
)
def test_an_answer_whose_thought_is_closed_is_that_of_one_request(
    seed: int, budget: int, answer: int, strings: Any
) -> None:
    """Token for token with all that belongs to them, also where a stop string lies across the seam: there the
    engine, which sees the thought as a prompt, goes on, and the answer is cut where one request would end."""
    rule = interruption(budget, budget, answer, end="a")
    sampling = Sampling(max_tokens=budget + answer, stop_tokens=(END,), stop_strings=strings)
    engine = markov(seed, moe=(2, 1))
    one = only_answer(stage(engine, interruption=None, sampling=sampling))
    assume("a" in WORDS.decode(one.tokens[:budget], skip_special=False) or len(one.tokens) < budget)
    two = only_answer(stage(engine, interruption=rule, sampling=replace(sampling, max_tokens=1)))
    assert (one.stop, one.text, two.injected) == (two.stop, two.text, None)
    for name in ("tokens", "logprobs", "versions", "experts", "prompt_experts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)


@given(
    shortest=st.integers(1, 50),
    more=st.integers(0, 50),
    seed=st.integers(0, 2**40),
    place=st.integers(0, 9999),
)
def test_budgets_are_addressed_and_within_their_range(
    shortest: int, more: int, seed: int, place: int
) -> None:
    rule = interruption(shortest, shortest + more)
    budget = rule.draw_budget((seed, 1, 2, 3), place)
    assert shortest <= budget <= shortest + more
    assert budget == rule.draw_budget((seed, 1, 2, 3), place)


def interrupted_twice(engine: FakeEngine | None = None) -> tuple[Trajectory, Talk]:
    """Two turns of an agent, both interrupted: "ddd" "fg" "aah", a reply "bb", "eee" "fg" "bh"."""
    env = Talk("bb")
    rule = interruption(3, 3, 4)
    return episode(stage(engine or says("ddd", "aah", "eee", "bh"), env, interruption=rule)), env


def test_every_turn_of_an_agent_is_interrupted_and_the_environment_hears_the_whole_answer() -> None:
    played, env = interrupted_twice()
    assert env.heard == ["dddfgaa", "eeefgb"]
    assert [WORDS.decode(t.context) for t in played.turns] == ["abc", "bb"]
    assert [WORDS.decode(t.completion.tokens, skip_special=False) for t in played.turns] == [
        "dddfgaah",
        "eeefgbh",
    ]
    assert played.stop is Stop.EOS
    assert count_sampled_tokens(played) == 11 and count_injected_tokens(played) == 4


def test_nothing_that_was_put_in_is_learned_from_on_any_turn() -> None:
    """The one law of masks, up to the rows of the loss; routes of both requests are all there."""
    played, _ = interrupted_twice()
    (sample,) = make_samples(group_of(played), 0, np.array([0.5]))
    #                             a b c|d d d f g a a h|b b|e e e f g b h
    learned = np.array([c == "1" for c in "00011100111001110011"])
    assert sample.loss_mask.tolist() == learned.tolist()
    np.testing.assert_array_equal(sample.advantages, np.where(learned, np.float32(0.5), 0))
    np.testing.assert_array_equal(sample.logprobs != 0, np.zeros(20, bool))  # a script is certain of itself
    np.testing.assert_array_equal(sample.versions, np.where(learned, 0, -1))
    assert sample.experts is not None
    whole = says()._routes(sample.tokens)
    assert whole is not None
    np.testing.assert_array_equal(sample.experts[:-1], whole[:-1])
    weights = aggregation_weights([sample], Aggregation.TOKEN)
    batch = pack([sample], weights, tokens_per_microbatch=64)
    assert batch.num_tokens == count_sampled_tokens(played) == 11
    (part,) = batch.microbatches
    assert WORDS.decode(part.targets, skip_special=False) == "dddaaheeebh"
    assert (part.staleness == 0).all() and part.weights.sum() == pytest.approx(1)


def test_the_phrase_runs_as_a_prompt_and_is_counted_there() -> None:
    """An engine without a cache computes a thought again; all but its last token, which had not run."""
    played, _ = interrupted_twice()
    first, second = played.turns
    thought, again = 3, 3 + 3 - 1 + 2  # prompt | prompt and thought without its last token, and the phrase
    assert count_prefilled_tokens(replace(played, turns=(first,))) == thought + again
    assert second.completion.cached_tokens == -(3 + 8 + 2 + 3 - 1)


def test_a_thought_makes_room_for_its_answer_in_a_narrow_context() -> None:
    """A context of 12: 3 of prompt, 2 of phrase, 4 of answer leave 3 for a thought with a budget of 9."""
    rule = interruption(9, 9, 4)
    narrow = says("ddd", "aaaa")
    answer = only_answer(stage(narrow, interruption=rule, context_limit=12))
    assert [call[0].sampling.max_tokens for call in narrow.calls] == [3, 4]
    assert len(answer.tokens) == 9 and answer.stop is Stop.LENGTH
    narrower = says("dddddd")
    answer = only_answer(stage(narrower, interruption=rule, context_limit=9))
    assert len(narrower.calls) == 1 and len(answer.tokens) == 6 and answer.injected is None


def test_a_fault_behind_the_phrase_is_the_episodes() -> None:
    class Breaks(FakeEngine):
        async def generate(self, requests: Sequence[Request]):
            none = np.zeros(0, np.int32)
            if len(self.calls) == 1:
                yield (
                    0,
                    Completion(tokens=none, logprobs=none, versions=none, stop=Stop.ERROR, error="no power"),
                )
                return
            async for item in super().generate(requests):
                yield item

    broken = episode(stage(Breaks(scripted(lambda request: [3] * 9, 8), decode=WORDS.decode, moe=(2, 1))))
    assert (broken.stop, broken.error) == (Stop.ERROR, "engine: no power")
    assert count_sampled_tokens(broken) >= 3  # what was sampled is kept: it was paid for


def test_a_phrase_is_no_past_of_anybody() -> None:
    """History keeps what was sampled, each stretch behind what really stood before it: a drafter that had
    learned the phrase would propose it to a policy that never says it."""
    played, _ = interrupted_twice()
    turns = tuple(
        replace(turn, completion=replace(turn.completion, edges=np.arange(len(turn.completion.tokens)) / 64))
        for turn in played.turns
    )
    kept, skipped = collect_answers([group_of(replace(played, turns=turns))])
    reported = [
        (WORDS.decode(one.context), WORDS.decode(one.tokens, skip_special=False)) for one in kept["p"]
    ]
    assert skipped == 0 and reported == [
        ("abc", "ddd"),
        ("abcdddfg", "aah"),
        ("dfgaabb", "eee"),
        ("bbeeefg", "bh"),
    ]
    assert [one.edges.tolist() for one in kept["p"]][1] == [5 / 64, 6 / 64, 7 / 64]
    passed = tuple(replace(t, completion=replace(t.completion, passes=5)) for t in played.turns)
    assert count_drafts([group_of(replace(played, turns=passed))])["draft/tokens_per_pass"] == 11 / 10


def test_health_says_how_many_were_told_and_what_came_of_it() -> None:
    reported, _ = interrupted_twice()
    ended = episode(stage(says("dh"), interruption=interruption(3, 3)))
    cut = episode(stage(says("ddd", "aa"), interruption=interruption(3, 3, 2)))
    row = compute_health([group_of(reported, ended, cut)])
    assert row["interrupt/rate"] == 3 / 4  # of four answers
    assert row["interrupt/answered"] == pytest.approx(2 / 3)
    assert row["interrupt/answer_length"] == pytest.approx((3 + 2 + 2) / 3)
    assert (row["tokens/injected"], row["tokens/sampled"]) == (6, 11 + 2 + 5)
    assert row["completions/clipped_ratio"] == pytest.approx(1 / 3)
    calm = compute_health([group_of(ended)])
    assert (calm["interrupt/rate"], calm["tokens/injected"]) == (0, 0) and "interrupt/answered" not in calm
