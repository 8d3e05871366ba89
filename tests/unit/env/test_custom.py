"""An environment of a user's class: gymnasium's methods on text, tools as methods, faults counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato
from ostinato.config import Recipe
from ostinato.env.custom import EnvEpisode, factory, seeds
from ostinato.env.games import GuessNumber, PriceList
from ostinato.render import Renderer
from ostinato.types import Completion, Prompt, Stop

RENDERER = Renderer(Path(ostinato.__file__).parent / "assets" / "seed-moe")
ROW = Prompt(uid="p", messages=({"role": "user", "content": "2 + 3 = ?"},), columns={"answer": "5"})


def said(text: str, stop: Stop = Stop.EOS) -> Completion:
    tokens = RENDERER.encode(text)
    zeros = np.zeros(len(tokens))
    return Completion(
        tokens=tokens,
        logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32),
        stop=stop,
        text=text,
    )


def play(episode: EnvEpisode, *answers: str) -> list[str]:
    """What the policy reads, turn by turn, as far as the episode goes."""
    heard = [RENDERER.decode(episode.start())]
    for answer in answers:
        context = asyncio.run(episode.step(said(answer)))
        if context is None:
            break
        heard.append(RENDERER.decode(context))
    episode.close()
    return heard


class Shop:
    """Prices by a tool; closed once."""

    tools = ("price",)
    closed = 0

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"What is the price of {options.get('thing', 'tea')}?", {}

    def price(self, thing: str) -> int:
        """The price of a thing."""
        return len(thing) + self.seed

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "broken":
            raise RuntimeError("the shop burns")
        return "", float(action == str(3 + self.seed)), True, False, {}

    def close(self) -> None:
        Shop.closed += 1


def test_a_game_keeps_its_state_over_turns() -> None:
    (prompt,) = seeds(GuessNumber, "g", "eval", 0, 1)
    game = GuessNumber()
    game.reset(seed=prompt.columns["seed"], options={})
    secret = game._secret
    episode = EnvEpisode(prompt, RENDERER, GuessNumber, 4)
    heard = play(episode, f"#### {secret - 1}", "no idea", f"{secret + 1}?", f"it is {secret}")
    assert heard[0].endswith("Guess a number from 1 to 10.\nassistant\n".replace("\n", heard[0][-1]))
    assert ["higher" in heard[1], "no number" in heard[2], "lower" in heard[3]] == [True] * 3
    assert episode.reward == 1.0 and len(heard) == 4


def test_seeds_of_the_splits_differ_and_give_the_same_rows_again() -> None:
    train, again = (seeds(GuessNumber, "g", "train", 3, 20) for _ in range(2))
    held_out = seeds(GuessNumber, "g", "eval", 3, 20)
    assert [p.uid for p in train] == [p.uid for p in again]
    assert not {p.columns["seed"] for p in train} & {p.columns["seed"] for p in held_out}


def test_a_lookup_is_made_at_its_stop_string_and_the_right_price_is_worth_1() -> None:
    (prompt,) = seeds(PriceList, "g", "eval", 0, 1)
    shop = PriceList()
    shop.reset(seed=prompt.columns["seed"], options={})
    price = str(shop.lookup(shop._item))
    episode = EnvEpisode(prompt, RENDERER, PriceList, 3)
    assert f"price of {shop._item}?" in RENDERER.decode(episode.start())
    reply = asyncio.run(episode.step(said(f"{shop._item}=", Stop.STRING)))
    assert reply is not None and price in RENDERER.decode(reply) and episode.reward == pytest.approx(0.3)
    assert asyncio.run(episode.step(said(f"#### {price}"))) is None and episode.reward == pytest.approx(1.0)
    guess = EnvEpisode(prompt, RENDERER, PriceList, 3)
    assert len(play(guess, price)) == 1 and guess.reward == 0.0


def test_a_row_without_a_first_text_is_read_as_it_is() -> None:
    class Quiz(Shop):
        def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
            self.answer = options["answer"]
            return "", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", float(action == self.answer), True, False, {}

    episode = EnvEpisode(ROW, RENDERER, Quiz, 3)
    assert "2 + 3 = ?" in play(episode, "5")[0] and episode.reward == 1.0


def test_methods_are_tools_and_the_environment_is_closed_once() -> None:
    counters: Counter[str] = Counter()
    prompt = Prompt(uid="s", messages=({"role": "user", "content": ""},), columns={"seed": 7})
    episode = EnvEpisode(prompt, RENDERER, Shop, 3, counters=counters)
    before = Shop.closed
    heard = play(episode, '<tool_call>{"name": "price", "arguments": {"thing": "tea"}}</tool_call>', "10")
    episode.close()
    assert "price(thing: str) -> int: The price of a thing." in heard[0] and "10" in heard[1]
    assert (
        episode.reward == 1.0 and counters == {"tools/calls": 1, "env/steps": 1} and Shop.closed == before + 1
    )


def test_what_an_environment_raises_is_raised_and_a_cut_answer_never_reaches_it() -> None:
    prompt = Prompt(uid="s", messages=({"role": "user", "content": ""},), columns={"seed": 7})
    episode = EnvEpisode(prompt, RENDERER, Shop, 3)
    episode.start()
    with pytest.raises(RuntimeError, match="the shop burns"):
        asyncio.run(episode.step(said("broken")))
    assert asyncio.run(episode.step(said("10", Stop.LENGTH))) is None and episode.reward == 0.0


@pytest.mark.parametrize(
    ("spec", "params", "sentence"),
    [
        ("GuessNumber", {}, "is unknown; use 'ostinato.env.games:GuessNumber'"),
        ("nowhere.py:Game", {}, "there is no file nowhere.py"),
        ("ostinato.env.games:Guess", {}, "has no function 'Guess'"),
        ("ostinato.env.games:GuessNumber", {"low": 9, "high": 1}, "low is 9, high 1"),
        ("ostinato.env.games:GuessNumber", {"most": 1}, "unexpected keyword argument 'most'"),
        ("ostinato.env.tools:calculator", {"expression": "1"}, "has no method reset()"),
    ],
)
def test_a_wrong_class_is_named_before_any_work(spec: str, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        factory(spec, params)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("task.source=seeds", "task.source is for an environment"),
        ('reward.functions=["env"]', "reward.functions is for an environment"),
        ("task.max_turns=3", "task.tools is empty"),
    ],
)
def test_keys_of_an_environment_need_one(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Recipe.load("quickstart", override)
