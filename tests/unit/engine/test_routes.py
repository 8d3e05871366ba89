"""Routes live with keys and values: turns get those of a reused prefix without running it, and none gets
another policy's. What is right comes from ``ran``: the decoder itself, piece by piece, policy by policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.naive_cache import NaiveCache
from reference.scripted import ScriptedDrafter
from worlds import DRAFTS_PAY, KERNELS, NATIVE, VOCAB, adapters_of, answers, tiny_decoder

from ostinato.engine.cache import BLOCK, KVCache
from ostinato.engine.local import LocalEngine
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.rollout.convert import make_samples
from ostinato.types import (
    NO_EXPERT,
    Completion,
    Emitted,
    Group,
    Prompt,
    Request,
    Sampling,
    Stop,
    Trajectory,
    Turn,
)

# dense first: routes have 2 layers where the model has 3
DECODER = tiny_decoder(
    num_hidden_layers=3, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, mlp_only_layers=[0]
)


POLICIES = [None, *(adapters_of(DECODER, seed, 0.3) for seed in (1, 2))]


def engine(kernels: Kernels | None = NATIVE, *, blocks: int = 0, **options: Any) -> LocalEngine:
    ours = LocalEngine(DECODER, kernels=kernels, **{"kv_memory_mb": 4, "context_limit": 400, **options})
    if blocks:
        ours._scheduler.cache = KVCache(blocks)
    return ours


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def request(tokens: np.ndarray, answer: int = 8, index: int = 0, routes_from: int = 0) -> Request:
    sampling = Sampling(max_tokens=answer)
    return Request(tokens=tokens, sampling=sampling, seed=(7, index), routes_from=routes_from)


def run(engine: LocalEngine, *requests: Request, on_tokens: Any = None) -> list[Completion]:
    return answers(engine, requests, *([on_tokens] if on_tokens else []))


def ran(tokens: np.ndarray, *pieces: tuple[int, Adapters | None]) -> np.ndarray:
    """Routes of all tokens but the last, run up to each (stop, policy) with what came before it cached."""
    cache, routes, start = NaiveCache(), [], 0
    with torch.inference_mode():
        for stop, adapters in pieces:
            row = torch.from_numpy(tokens[start:stop]).long()
            _, routing = DECODER(row, torch.arange(start, stop), cache, adapters=adapters)
            assert routing is not None
            routes.append(routing.numpy())
            start = stop
    assert start == len(tokens) - 1
    return np.concatenate(routes)


def whole(asking: Request, done: Completion) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, routes of all but the last, which has none)."""
    assert done.experts is not None and done.prompt_experts is not None
    routes = np.concatenate([done.prompt_experts, done.experts])
    assert routes.dtype == np.int8 and (routes[-1] == NO_EXPERT).all()
    return np.concatenate([asking.tokens, done.tokens]), routes[:-1]


class Talk:
    """An episode by hand: every turn re-sends the whole history, as agents do."""

    def __init__(self, engine: LocalEngine, seed: int = 0) -> None:
        self.engine, self.seed, self.turns, self.history = engine, seed, [], text(0)

    def say(self, context: int, answer: int, *others: Request, on_tokens: Any = None) -> Completion:
        heard = text(context, 1000 * self.seed + len(self.turns))
        tokens = np.concatenate([self.history, heard])
        asking = request(tokens, answer, self.seed, max(0, len(self.history) - 1))
        done = run(self.engine, asking, *others, on_tokens=on_tokens)[0]
        self.turns.append(Turn(context=heard, completion=done))
        self.history = np.concatenate([tokens, done.tokens])
        return done

    def routes(self) -> np.ndarray:
        """As they are trained on: merged over the turns, without the last token, which has none."""
        trajectory = Trajectory(turns=tuple(self.turns), stop=Stop.EOS, seed=(7,))
        group = Group(prompt=Prompt(uid="p", text="p"), trajectories=(trajectory,), step=1)
        (sample,) = make_samples(group, 0, np.ones(1))
        assert sample.experts is not None, "a gap"
        return sample.experts[:-1]


# ---- turns

LENGTHS = st.integers(1, 2 * BLOCK + 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_eight_turns_run_every_token_once(kernels: Kernels | None) -> None:
    """Of a turn's context all is prefilled but the last token, whose row gives the first token of the answer;
    and before it the last token of the answer before, which had been sampled and not run: as many as the
    context has tokens."""
    ours = engine(kernels)
    talk = Talk(ours)
    lengths = [(17, 9), (1, 1), (16, 16), (5, 12), (32, 3), (2, 30), (15, 1), (7, 8)]
    for turn, (context, answer) in enumerate(lengths):
        known, before = max(0, len(talk.history) - 1), ours.counters.prefilled
        done = talk.say(context, answer)
        assert done.cached_tokens == known
        assert ours.counters.prefilled - before == (context if turn else context - 1)
        assert done.prompt_experts is not None
        assert len(done.prompt_experts) == context + (turn > 0)  # and no more than that is handed out
    rows = len(talk.history) - 1
    np.testing.assert_array_equal(talk.routes(), ran(talk.history, (rows, None)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_turns_merged_are_one_capture(lengths: list[tuple[int, int]], seed: int) -> None:
    ours = engine()
    talk = Talk(ours, seed)
    for context, answer in lengths:
        known = max(0, len(talk.history) - 1)
        assert talk.say(context, answer).cached_tokens == known
    once = request(talk.history, 1)
    _, captured = whole(once, run(engine(), once)[0])
    np.testing.assert_array_equal(talk.routes(), captured[:-1])
    assert ours.counters.prefilled + ours.counters.decoded == len(talk.history) - 1  # every row once


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(shared=st.integers(0, 40), own=st.tuples(LENGTHS, LENGTHS), answer=st.integers(1, 20))
def test_a_hit_is_a_miss(shared: int, own: tuple[int, int], answer: int) -> None:
    """A prefix that another request has run (whole blocks shared, part of one copied) gives the routes of one
    that no sequence has; and the other one keeps its own."""
    prefix = text(shared, 1)
    first, second = (
        request(np.concatenate([prefix, text(length, 2 + i)]), answer, i) for i, length in enumerate(own)
    )
    ours = engine()
    (before,), (hit,) = run(ours, first), run(ours, second)
    (miss,) = run(engine(), second)
    assert hit.cached_tokens >= min(shared, len(second.tokens) - 1) and miss.cached_tokens == 0
    np.testing.assert_array_equal(whole(second, hit)[1], whole(second, miss)[1])
    (again,) = run(ours, first)
    np.testing.assert_array_equal(whole(first, again)[1], whole(first, before)[1])


def test_drafts_that_failed_leave_no_route_behind() -> None:
    """Their rows stand behind the end of the answer, in a block whose beginning the next turn copies."""
    rng = np.random.default_rng(0)
    drafter = ScriptedDrafter(lambda asking, tokens: rng.integers(0, VOCAB, 9), length=9)
    talk, plain = Talk(engine(drafter=drafter, cost=DRAFTS_PAY)), Talk(engine())
    for context, answer in [(17, 9), (1, 12), (20, 20)]:
        assert talk.say(context, answer).drafted > 0
        plain.say(context, answer)
    np.testing.assert_array_equal(talk.history, plain.history)
    np.testing.assert_array_equal(talk.routes(), plain.routes())


def test_only_what_the_caller_lacks_is_handed_out() -> None:
    tokens = text(40)
    (everything,) = run(engine(), request(tokens))
    for start in (0, 1, 16, 31, 32, 39):
        (rest,) = run(engine(), request(tokens, routes_from=start))
        np.testing.assert_array_equal(rest.prompt_experts, everything.prompt_experts[start:])  # type: ignore[index]
        np.testing.assert_array_equal(rest.experts, everything.experts)  # type: ignore[arg-type]
    for start in (-1, 40):
        with pytest.raises(ValueError, match=f"routes_from is {start}; a prompt of 40 tokens allows 0 to 39"):
            run(engine(), request(tokens, routes_from=start))


# ---- memory that runs out


def test_routes_that_were_evicted_are_recorded_again() -> None:
    ours = engine(blocks=8)
    talk = Talk(ours)
    for turn in range(4):
        known = max(0, len(talk.history) - 1)
        assert talk.say(10, 9).cached_tokens < max(1, known)
        run(ours, request(text(100, 50 + turn)))  # takes all but one of the blocks
    assert ours._scheduler.cache.evicted > 0
    np.testing.assert_array_equal(talk.routes(), ran(talk.history, (len(talk.history) - 1, None)))


class Publisher:
    """Publishes another policy after some tokens, and notes how many tokens each request had by then."""

    def __init__(self, engine: LocalEngine, after: Any, adapters: Adapters | None, version: int) -> None:
        self.engine, self.after, self.policy, self.version = engine, after, adapters, version
        self.heard = 0

    def __call__(self, index: int, emitted: Emitted) -> None:
        self.heard += len(emitted.tokens)
        if self.after is not None and self.after(self.heard):
            self.after = None
            self.engine.publish(self.policy, self.version)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_publish_in_flight_leaves_the_rows_that_have_run(kernels: Kernels | None) -> None:
    """Keys, values and routes of the old policy stay, the rows to come see them under the new one."""
    ours = engine(kernels)
    asking = request(text(20), 24)
    (done,) = run(ours, asking, on_tokens=Publisher(ours, lambda heard: heard == 9, POLICIES[1], 1))
    assert done.versions.tolist() == [0] * 9 + [1] * 15
    tokens, routes = whole(asking, done)
    # the ninth token was sampled by the old policy and has run under the new one
    np.testing.assert_array_equal(routes, ran(tokens, (20 + 9 - 1, None), (len(tokens) - 1, POLICIES[1])))


def test_a_preempted_sequence_keeps_the_routes_that_it_was_sampled_through() -> None:
    """After a publish all of it is computed again under the new policy. Its old rows were recorded anew too:
    in training, tokens of the old policy went through the experts of the new one."""
    ours = engine(blocks=9)  # 144 positions for three sequences that want 198
    publish = Publisher(ours, lambda heard: ours.counters.preempted > 0, POLICIES[1], 1)
    asking = [request(text(5 + i, i), 60, i) for i in range(3)]
    mixed = 0
    for one, done in zip(asking, run(ours, *asking, on_tokens=publish), strict=True):
        tokens, routes = whole(one, done)
        assert set(done.versions.tolist()) == {0, 1}
        old = len(one.tokens) + int((done.versions == 0).sum()) - 1  # rows up to its last token's
        np.testing.assert_array_equal(routes[:old], ran(tokens[: old + 1], (old, None)))
        in_place = ran(tokens, (old, None), (len(tokens) - 1, POLICIES[1]))[old:]
        anew = ran(tokens, (len(tokens) - 1, POLICIES[1]))[old:]
        assert np.array_equal(routes[old:], in_place) or np.array_equal(routes[old:], anew)
        mixed += not np.array_equal(routes[old:], in_place)
    assert mixed, "nothing was computed again"


# ---- policies


def test_a_policy_may_be_published_under_the_number_of_the_last_one() -> None:
    """The tree took in what was begun under the same number: keys, values and routes of other weights."""
    ours = engine()
    asking = request(text(30), 20)
    run(ours, asking, on_tokens=Publisher(ours, lambda heard: heard == 5, POLICIES[1], 0))
    (done,) = run(ours, asking)
    assert done.cached_tokens == 0
    tokens, routes = whole(asking, done)
    np.testing.assert_array_equal(routes, ran(tokens, (len(tokens) - 1, POLICIES[1])))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_nobody_is_handed_the_routes_of_another_policy(data: st.DataObject) -> None:
    """Publishes between and amid requests that share prefixes, in a pool that evicts and preempts."""
    ours = engine(blocks=data.draw(st.integers(6, 14)), step_tokens=data.draw(st.sampled_from([11, 256])))
    family, serving = text(40, 3), 0
    for number in range(data.draw(st.integers(2, 4))):
        asking = [
            request(np.concatenate([family[:shared], text(own, 10 * number + i)]), 14, i)
            for i, (shared, own) in enumerate(
                data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=4))
            )
        ]
        then, when = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 60))
        publish = Publisher(ours, lambda heard, when=when: heard == when, POLICIES[then], number + 1)
        for one, done in zip(asking, run(ours, *asking, on_tokens=publish), strict=True):
            _check_policy(one, done, serving, number)
        serving = then if publish.after is None else serving
        if data.draw(st.booleans()):
            serving = data.draw(st.integers(0, 2))
            ours.publish(POLICIES[serving], number + 1)


def _check_policy(asking: Request, done: Completion, serving: int, number: int) -> None:
    """All rows up to those that gave a token of the policy of the start, versions up to ``number``, are its
    own: all there are, unless it was overtaken by a publish."""
    tokens, routes = whole(asking, done)
    if old := int((done.versions <= number).sum()):
        rows = len(asking.tokens) + old - 1
        np.testing.assert_array_equal(routes[:rows], ran(tokens[: rows + 1], (rows, POLICIES[serving])))
