"""Forced interruption on the packaged model: what is continued is one request bit for bit, and what is put in
runs once, with its routes, behind a prefix that is not run again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from worlds import DRAFTS_PAY, KERNELS, NATIVE

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import alignment
from ostinato.engine.local import LocalEngine
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.store import History
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.named import find_model_folder
from ostinato.model.native import Kernels
from ostinato.pipeline.draft_metrics import collect_answers
from ostinato.render import Renderer
from ostinato.rollout.convert import make_samples
from ostinato.rollout.health import count_prefilled_tokens, count_sampled_tokens
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play_groups
from ostinato.types import Completion, Group, Prompt, Reward, Sampling, Stop

SIBLINGS = 4
ASKS = [
    RolloutRequest(prompt=Prompt(uid=f"p{i}", text=text), seed=(0, 1, i), group_size=SIBLINGS, step=1)
    for i, text in enumerate(["(81 - 3) * 2 = ?", "Q: 17 mod 5\nA: ", "compute 44 % 7 + 90"])
]


@cache
def model(dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(find_model_folder("asset:seed-moe"), dtype=dtype)


@cache
def renderer() -> Renderer:
    return Renderer(find_model_folder("asset:seed-moe"))


class Turns:
    """An agent of ``turns`` turns with the same reply to all."""

    def __init__(self, prompt: Prompt, turns: int) -> None:
        self._prompt, self._left = prompt, turns

    def start(self) -> np.ndarray:
        return renderer().prompt(self._prompt)

    async def step(self, completion: Completion) -> np.ndarray | None:
        self._left -= 1
        return renderer().encode("\nand again: ") if self._left else None


class Parity:
    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=float(k % 2)) for k in range(len(group.trajectories))]


def rule(shortest: int, longest: int, answer: int) -> Interruption:
    return Interruption(
        shortest=shortest,
        longest=longest,
        answer_tokens=answer,
        phrase=renderer().encode(" time's up\n####"),
        think_end="",
        words=renderer(),
    )


def engine(**options: Any) -> LocalEngine:
    return LocalEngine(
        model(), kernels=NATIVE, decode=renderer().decode, kv_memory_mb=32, context_limit=400, **options
    )


def played(
    ours: LocalEngine, interruption: Interruption | None, *, turns: int = 1, **sampling: Any
) -> list[Group]:
    usual: dict[str, Any] = {"stop_tokens": renderer().stop_tokens}
    setting = RolloutContext(
        engine=ours,
        env=lambda prompt: Turns(prompt, turns),
        grader=Parity(),
        sampling=Sampling(**usual | sampling),
        context_limit=400,
        interruption=interruption,
    )
    return [item.group for item in asyncio.run(play_groups(setting, ASKS))]


def answers(groups: list[Group]) -> list[Completion]:
    return [turn.completion for group in groups for one in group.trajectories for turn in one.turns]


@pytest.mark.skipif(NATIVE is None, reason="only row-wise kernels give the same bits in any batch")
@pytest.mark.parametrize("strings", [(), ("=1", "#"), ("7 ", " 1", "6%7")])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "temperature": 0.8, "min_tokens": 9}])
def test_a_closed_thought_goes_on_as_one_request_bit_for_bit(strings: Any, filters: dict[str, Any]) -> None:
    """Every array, the text (of a byte-level vocabulary: characters break at the seam), and every count."""
    longest = {"max_tokens": 7 + 9, "stop_strings": strings, "stop_tokens": (1, 2)} | filters
    one = answers(played(engine(), None, **longest))
    two = answers(played(engine(), always_closed(rule(7, 7, 9)), **longest))
    assert any(len(answer.tokens) > 7 for answer in one)
    for ours, theirs in zip(one, two, strict=True):
        assert (ours.text, ours.stop, theirs.injected) == (theirs.text, theirs.stop, None)
        for name in ("tokens", "logprobs", "edges", "versions", "experts", "prompt_experts"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        assert (ours.support is None) == (theirs.support is None) == (not filters)
        if ours.support is not None and theirs.support is not None:
            np.testing.assert_array_equal(ours.support.counts, theirs.support.counts)
            np.testing.assert_array_equal(ours.support.ids, theirs.support.ids)
        assert ours.cached_tokens == theirs.cached_tokens


def always_closed(interruption: Interruption) -> Interruption:
    """Every thought holds the end of thinking: a renderer whose text begins with it."""

    class Closed:
        encode = staticmethod(renderer().encode)

        @staticmethod
        def decode(tokens: Any, skip_special: bool = True) -> str:
            return renderer().decode(tokens) if skip_special else "</think>"

    return replace(interruption, think_end="</think>", words=Closed())


def chosen(tokens: np.ndarray) -> np.ndarray:
    """Routes by the model itself in fp32, of all tokens but the last."""
    row = torch.from_numpy(tokens[:-1]).long()
    with torch.inference_mode():
        _, routing = model()(row, torch.arange(len(row)), CausalAttention())
    assert routing is not None
    return routing.numpy()


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_interrupted_agent_runs_every_token_once_and_trains_on_its_own_routes(
    kernels: Kernels | None,
) -> None:
    ours = LocalEngine(model(), kernels=kernels, decode=renderer().decode, kv_memory_mb=32, context_limit=400)
    groups = played(ours, rule(4, 9, 6), turns=3, stop_tokens=(1, *range(20, 60)))
    reported = [answer for answer in answers(groups) if answer.injected is not None]
    assert len(reported) > 8 and {answer.stop for answer in reported} >= {Stop.LENGTH, Stop.EOS}
    for answer in reported:
        assert answer.text == renderer().decode(answer.tokens[: -1 if answer.stop is Stop.EOS else None])
        assert " time's up\n####" in answer.text
    sequences = [one for i, group in enumerate(groups) for one in make_samples(group, i, np.ones(SIBLINGS))]
    trajectories = [one for group in groups for one in group.trajectories]
    turns = sum(len(one.turns) for one in trajectories)
    counted = sum(count_prefilled_tokens(one) + count_sampled_tokens(one) for one in trajectories) - turns
    assert ours.counters.prefilled + ours.counters.decoded == counted
    prompts = sum((SIBLINGS - 1) * (len(g.trajectories[0].turns[0].context) - 1) for g in groups)
    assert counted <= sum(len(one.tokens) - 1 for one in sequences) - prompts  # siblings share what is equal
    for sample in sequences:
        assert sample.experts is not None
        np.testing.assert_array_equal(sample.experts[:-1], chosen(sample.tokens))
    batch = pack(sequences, aggregation_weights(sequences, Aggregation.TOKEN), tokens_per_microbatch=1024)
    assert batch.num_tokens == sum(map(count_sampled_tokens, trajectories))


def test_in_bf16_the_trainer_chooses_nearly_the_same() -> None:
    """Flips of near-ties only, turn after turn: what the gate of the trainer lets pass."""
    ours = LocalEngine(model(torch.bfloat16), kernels=NATIVE, kv_memory_mb=32, context_limit=400)
    groups = played(ours, None, turns=3, max_tokens=30, stop_tokens=tuple(range(0, 295, 6)))
    for group in groups:
        for sample in make_samples(group, 0, np.ones(SIBLINGS)):
            assert sample.experts is not None
            assert alignment([chosen(sample.tokens)], [sample.experts[:-1]]).min() > 0.95


@pytest.mark.skipif(NATIVE is None, reason="drafts need the compiler")
def test_drafts_from_interrupted_pasts_change_no_token_and_are_taken() -> None:
    """The second epoch, with the same noise, finds thought and answer in the history, each behind what stood
    before it; the phrase is in neither."""
    interruption = rule(5, 8, 6)
    plain = played(engine(), interruption)
    history = History()
    drafter = HistoryDrafter(history)
    kept, skipped = collect_answers(plain)
    assert skipped == 0 and sum(map(len, kept.values())) > len(answers(plain))
    for uid, reported in kept.items():
        history.add(uid, 1, reported)
    ours = engine(drafter=drafter, cost=DRAFTS_PAY)
    again = played(ours, interruption)
    for one, two in zip(answers(plain), answers(again), strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.injected, two.injected)
        assert two.accepted <= two.drafted and two.passes <= one.passes == len(one.tokens) - one.num_injected
    assert (
        sum(answer.accepted for answer in answers(again))
        > sum(map(count_sampled_tokens, [one for group in plain for one in group.trajectories])) / 2
    )
