"""Episodes: dialogues with tools and environments of one's own; when they end, what is replied."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion

import ostinato
from ostinato.config import Recipe
from ostinato.env.custom import MAX_CHARS, EnvEpisode, make_factory, make_seed_prompts
from ostinato.env.dialogue import Dialogue
from ostinato.env.games import GuessNumber, PriceList
from ostinato.env.tools import calculator, make_schema, resolve_tools
from ostinato.objects import load_named
from ostinato.render import Renderer
from ostinato.tool_calls import parse_calls
from ostinato.types import Completion, NewRow, Prompt, Stop

ASK = Prompt(uid="p", messages=({"role": "user", "content": "2*3?"},))


class Letters:
    """A renderer of one token per character; remembers what it rendered."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.turns: list[tuple[list[Any], list[Any], list[int]]] = []

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return "".join(map(chr, tokens))

    def prompt(self, prompt: Prompt) -> np.ndarray:
        self.prompts.append(prompt)
        return np.array([1, 2, 3], np.int32)

    def after_turn(
        self,
        messages: Sequence[Any],
        new_messages: Sequence[Any],
        answer: Any = (),
        tools: Any = (),
        template_kwargs: Any = None,
        *,
        prefill: str | None = None,
    ) -> np.ndarray:
        self.turns.append((list(messages), list(new_messages), list(answer)))
        return np.array([ord(letter) for message in new_messages for letter in message["content"]], np.int32)


def says(text: str, stop: Stop = Stop.EOS) -> Completion:
    return completion([ord(letter) for letter in text], stop=stop, text=text)


def call(expression: str = "2*3", name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def play(
    tools: dict[str, Callable[..., Any]], *texts: str, **options: Any
) -> tuple[list[str | None], Letters]:
    """The replies to each of ``texts``, None where the episode is over."""
    letters = Letters()
    dialogue = Dialogue(ASK, letters, tools, **{"max_turns": 9, **options})
    dialogue.start()

    async def replies() -> list[str | None]:
        found = list[str | None]()
        for text in texts:
            context = await dialogue.step(says(text))
            assert not isinstance(context, NewRow), "no context is shortened here"
            found.append(None if context is None else letters.decode(context))
        return found

    return asyncio.run(replies()), letters


def test_a_single_turn_is_one_answer() -> None:
    letters = Letters()
    dialogue = Dialogue(ASK, letters)
    assert dialogue.start().tolist() == [1, 2, 3]
    assert letters.prompts == [ASK]
    assert asyncio.run(dialogue.step(says(call()))) is None


def test_a_call_is_answered_and_the_answer_without_a_call_ends_it() -> None:
    replies, letters = play({"calculator": calculator}, f"Let me see. {call()}", "It is 6.")
    assert replies == ["6", None]
    (messages, new, answer) = letters.turns[0]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert new == [{"role": "tool", "content": "6"}]
    assert "".join(map(chr, answer)) == f"Let me see. {call()}", "the tokens that were sampled, as they are"


def test_the_history_grows_by_answers_and_replies() -> None:
    _, letters = play({"calculator": calculator}, call("1+1"), call("2+2") + call("3+3"), "done")
    roles = [message["role"] for message in letters.turns[1][0]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert [message["content"] for message in letters.turns[1][1]] == ["4", "6"]


@pytest.mark.parametrize("stop", [Stop.LENGTH, Stop.ABORT, Stop.ERROR])
def test_half_an_answer_ends_the_episode(stop: Stop) -> None:
    dialogue = Dialogue(ASK, Letters(), {"calculator": calculator}, 3)
    assert asyncio.run(dialogue.step(says(call(), stop))) is None


def test_the_tools_of_a_dialogue_are_those_of_its_prompt() -> None:
    letters = Letters()
    Dialogue(ASK, letters, {"calculator": calculator}, 2).start()
    (prompt,) = letters.prompts
    assert prompt.messages == ASK.messages
    assert prompt.tools == (make_schema("calculator", calculator),)


def described(
    item: str,
    count: int = 1,
    sizes: list[float] | None = None,
    kind: Literal["a", "b"] = "a",
    more: Any = None,
) -> bool:
    """Look an item
    up.

    Further words.

    Args:
        item: its name, as printed
        count (int): how many

    Returns:
        yes: or no
    """
    return bool(item and count and sizes and kind and more)


def test_a_schema_says_what_signature_and_docstring_say() -> None:
    """Descriptions of arguments were lost."""
    function = make_schema("look", described)["function"]
    assert (function["name"], function["description"]) == ("look", "Look an item up.")
    fields = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["item"]
    assert fields["item"] == {"type": "string", "description": "its name, as printed"}
    assert fields["count"] == {"type": "integer", "description": "how many"}
    assert fields["sizes"]["anyOf"] == [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]
    assert (fields["kind"], fields["more"]) == ({"enum": ["a", "b"]}, {})


def test_a_call_without_tags_or_in_a_fence_is_counted_as_unreadable() -> None:
    """The run ended with nothing to learn from, and nothing said that 11 of 16 answers had tried to call."""
    plain = '{"name": "calculator", "arguments": {"expression": "2*3"}}'
    for text in (
        plain,
        f"```json\n{plain}\n```",
        '{ "name":"calculator",\n"parameters": {}}',
        '```json\n{"arguments": {"expression": "2*3"}, "name": "calculator"}\n```',
        '{"function": "calculator", "arguments": {}}',
        '{"name": "calculator", "args": {}}',
        "<function=calculator><parameter=expression>2*3</parameter></function>",
        '```python\ncalculator(expression="2*3")\n```',
        '{"name": "calculate", "arguments": {}}',  # of no tool that there is
    ):
        counters: Counter[str] = Counter()
        (reply, over), _ = play({"calculator": calculator}, text, "6", counters=counters)
        assert reply is not None and "<tool_call>" in reply and over is None
        assert counters == {"tools/calls": 1, "tools/unreadable": 1}
    for text in (
        '{"name": "Bob", "arguments": 3}',
        '{"name": "calculator"}',
        f"<think>{plain}</think> 6",
        f"[THINK]{plain}[/THINK] 6",
        "calculator(x)",
    ):
        assert play({"calculator": calculator}, text)[0] == [None]


def hangs() -> str:
    time.sleep(5)
    return ""


def breaks() -> str:
    raise RuntimeError("out of ink")


def leaves() -> str:
    raise SystemExit


def stops() -> str:
    raise StopIteration


@pytest.mark.parametrize(
    ("text", "reply", "kind"),
    [
        ("<tool_call>not json</tool_call>", "Error: the call is not JSON", "unreadable"),
        ("<tool_call>[1]</tool_call>", 'Error: the call has no "name"', "unreadable"),
        ('<tool_call>{"name": "hangs", "arguments": 3}</tool_call>', 'Error: "arguments" of', "unreadable"),
        (call(name="calc"), "Error: there is no function 'calc', only", "unknown"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "Error: calculator: missing", "unreadable"),
        (call("2+"), "Error: calculator: SyntaxError", "raised"),
        ('<tool_call>{"name": "breaks"}</tool_call>', "Error: breaks: RuntimeError: out of ink", "raised"),
        ('<tool_call>{"name": "leaves"}</tool_call>', "Error: leaves: RuntimeError: SystemExit", "raised"),
        ('<tool_call>{"name": "stops"}</tool_call>', "Error: stops: RuntimeError: StopIteration", "raised"),
        ('<tool_call>{"name": "hangs"}</tool_call>', "Error: hangs gave no result in 1 s", "timeout"),
        ('<tool_call>{"name": "floods"}</tool_call>', "xxxx", "cut"),
    ],
)
def test_whatever_goes_wrong_is_an_ordinary_reply_and_counted(text: str, reply: str, kind: str) -> None:
    tools: dict[str, Callable[..., Any]] = {
        tool.__name__: tool for tool in (hangs, breaks, leaves, stops, calculator)
    }
    tools["floods"] = lambda: "x" * 10_000_000
    counters: Counter[str] = Counter()
    (done_, over), _ = play(tools, text, "done", tool_timeout_s=1.0, counters=counters)
    assert done_ is not None
    assert done_.startswith(reply)
    assert len(done_) < 5000
    assert over is None
    assert counters == {"tools/calls": 1, f"tools/{kind}": 1}


def test_a_tool_that_is_out_of_time_no_longer_takes_the_interpreter() -> None:
    """A loop in Python that was given up went on beside the run, which stood still for want of the lock."""
    threads = list[threading.Thread]()

    def spins() -> None:
        threads.append(threading.current_thread())
        while True:
            pass

    play({"spins": spins}, '<tool_call>{"name": "spins"}</tool_call>', tool_timeout_s=0.2)
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_reply_that_is_no_unicode_is_made_readable_and_counted() -> None:
    """A policy that wrote half of a surrogate pair into a call got it back, which no tokenizer takes."""
    counters: Counter[str] = Counter()
    text = '<tool_call>{"name": "echo", "arguments": {"text": "a\\ud83d"}}</tool_call>'
    (done_, _), _ = play({"echo": lambda text: text}, text, "done", counters=counters)
    assert done_ == "a\ufffd"
    assert counters == {"tools/calls": 1, "tools/replaced": 1}


def test_a_flood_of_calls_is_cut_and_counted() -> None:
    counters: Counter[str] = Counter()
    (done_, _), _ = play({"calculator": calculator}, call() * 50, "done", counters=counters)
    assert done_ is not None
    assert done_.endswith("Error: only the first 8 calls of an answer are made.")
    assert counters == {"tools/calls": 8, "tools/refused": 42}


def test_bad_settings_are_refused() -> None:
    text = Prompt(uid="p", text="2*3?")
    with pytest.raises(ValueError, match="plain text"):
        Dialogue(text, Letters(), {"calculator": calculator}, 2)


def test_calls_are_read_outside_of_thoughts_and_without_the_stop_string() -> None:
    assert parse_calls(f"<think>{call()}</think> no") == []
    assert parse_calls(f"<think>{call()}") == []
    (first, second) = parse_calls(f"<think>hm</think>{call('1')}{call('2')[: -len('</tool_call>')]}")
    assert [first.arguments, second.arguments] == [{"expression": "1"}, {"expression": "2"}]
    assert "nested deeper" in parse_calls("<tool_call>" + "[" * 100_000)[0].error


@given(st.text(alphabet='<tool_call>/think{}"name: arguments[]', max_size=200))
def test_any_text_parses(text: str) -> None:
    for found in parse_calls(text):
        assert found.error or found.name


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*3", "6"), ("-(1 + 2) ** 2", "-9"), ("7 // 2 + 7 % 4", "6"), ("1/4", "0.25"), (" 2e3 ", "2000.0")],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**99999",
        "(-8)**0.5",
        "__import__('os')",
        "x",
        "True",
        "'a'*9",
        "1" * 300,
        "1/0",
        "[1]",
        "",
        "a.b",
    ],
)
def test_calculator_refuses_what_is_no_bounded_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError, SyntaxError)):
        calculator(expression)


def test_tools_by_name(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def shout(text: str) -> str:\n    return text.upper()\n")
    tools = resolve_tools(["calculator", f"{tmp_path}/mine.py:shout", "json:dumps"])
    assert list(tools) == ["calculator", "shout", "dumps"]
    assert tools["shout"]("a") == "A"
    for spec, sentence in [
        ("calculater", "use 'calculator'"),
        ("no.py:f", "there is no file no.py"),
        ("no_module:f", "there is no module 'no_module'"),
        ("json:nothing", "json has no 'nothing'; define it"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            resolve_tools([spec])


# ---- an environment of a user's class: gymnasium's methods on text, tools as methods, faults counted


RENDERER = Renderer(Path(ostinato.__file__).parent / "assets" / "seed-moe")
ROW = Prompt(uid="p", messages=({"role": "user", "content": "2 + 3 = ?"},), columns={"answer": "5"})


def done_(text: str, stop: Stop = Stop.EOS) -> Completion:
    return completion(RENDERER.encode(text), stop=stop, text=text)


def opened(episode: EnvEpisode) -> np.ndarray:
    """The first context."""
    asyncio.run(episode.open())
    return episode.start()


def heard_of(episode: EnvEpisode, *answers: str) -> list[str]:
    """What the policy reads, turn by turn, as far as the episode goes."""
    heard = [RENDERER.decode(opened(episode))]
    for answer in answers:
        context = asyncio.run(episode.step(done_(answer)))
        if context is None:
            break
        assert isinstance(context, np.ndarray)
        heard.append(RENDERER.decode(context))
    asyncio.run(episode.close())
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
    (prompt,) = make_seed_prompts(GuessNumber, "g", "eval", 0, 1)
    game = GuessNumber()
    game.reset(seed=prompt.columns["seed"], options={})
    secret = game._secret
    episode = EnvEpisode(prompt, RENDERER, GuessNumber, 4)
    heard = heard_of(episode, f"#### {secret - 1}", "no idea", f"{secret + 1}?", f"it is {secret}")
    assert heard[0].endswith("Guess a number from 1 to 10.\nassistant\n".replace("\n", heard[0][-1]))
    assert ["higher" in heard[1], "no number" in heard[2], "lower" in heard[3]] == [True] * 3
    assert episode.reward == 1.0 and len(heard) == 4 and episode.ended == "terminated" and episode.last_reply
    cut = EnvEpisode(prompt, RENDERER, GuessNumber, 1)
    heard_of(cut, f"#### {secret - 1}")
    assert cut.ended == "max_turns" and "higher" in cut.last_reply


def test_seeds_of_the_splits_differ_and_give_the_same_rows_again() -> None:
    train, again = (make_seed_prompts(GuessNumber, "g", "train", 3, 20) for _ in range(2))
    held_out = make_seed_prompts(GuessNumber, "g", "eval", 3, 20)
    assert [p.uid for p in train] == [p.uid for p in again]
    assert not {p.columns["seed"] for p in train} & {p.columns["seed"] for p in held_out}


def test_a_lookup_is_made_at_its_stop_string_and_the_right_price_is_worth_1() -> None:
    (prompt,) = make_seed_prompts(PriceList, "g", "eval", 0, 1)
    shop = PriceList()
    shop.reset(seed=prompt.columns["seed"], options={})
    price = str(shop.lookup(shop._item))
    episode = EnvEpisode(prompt, RENDERER, PriceList, 3)
    assert f"price of {shop._item}?" in RENDERER.decode(opened(episode))
    reply = asyncio.run(episode.step(done_(f"{shop._item}=", Stop.STRING)))
    assert (
        isinstance(reply, np.ndarray)
        and price in RENDERER.decode(reply)
        and episode.reward == pytest.approx(0.3)
    )
    assert asyncio.run(episode.step(done_(f"#### {price}"))) is None and episode.reward == pytest.approx(1.0)
    guess = EnvEpisode(prompt, RENDERER, PriceList, 3)
    assert len(heard_of(guess, price)) == 1 and guess.reward == 0.0


def test_a_row_without_a_first_text_is_read_as_it_is() -> None:
    class Quiz(Shop):
        def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
            self.answer = options["answer"]
            return "", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", float(action == self.answer), True, False, {}

    episode = EnvEpisode(ROW, RENDERER, Quiz, 3)
    assert "2 + 3 = ?" in heard_of(episode, "5")[0] and episode.reward == 1.0


def test_words_of_the_assistant_in_a_row_are_the_beginning_of_its_answer() -> None:
    """They were closed as an answer of their own, and another begun behind them; TRL goes on after them."""
    chat = (*ASK.messages, {"role": "assistant", "content": "It is "})  # type: ignore[misc]
    row, tools = Prompt(uid="p", messages=chat), {"calculator": calculator}
    start = RENDERER.decode(Dialogue(row, RENDERER).start(), skip_special=False)
    assert start == RENDERER.decode(RENDERER.prompt(ASK), skip_special=False) + "It is "
    letters = Letters()
    dialogue = Dialogue(row, letters, tools, max_turns=3)
    asyncio.run(dialogue.step(says(call())))
    ((messages, _, _),) = letters.turns
    assert [one["role"] for one in messages] == ["user", "assistant"]
    assert messages[-1]["content"] == "It is " + call()
    episode = EnvEpisode(row, RENDERER, Shop, 3)
    assert RENDERER.decode(opened(episode), skip_special=False).endswith("It is ")


def test_tools_and_calls_of_a_row_reach_a_template_that_knows_none() -> None:
    called = {"type": "function", "function": {"name": "stock", "arguments": '{"item": "cup"}'}}
    chat = (
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "7"},
    )
    row = Prompt(uid="p", messages=chat, tools=({"function": {"name": "stock"}},))
    text = RENDERER.decode(Dialogue(row, RENDERER).start(), skip_special=False)
    assert '{"name": "stock"}' in text and '{"name": "stock", "arguments": {"item": "cup"}}' in text


def test_methods_are_tools_and_the_environment_is_closed_once() -> None:
    counters: Counter[str] = Counter()
    prompt = Prompt(uid="s", messages=({"role": "user", "content": ""},), columns={"seed": 7})
    episode = EnvEpisode(prompt, RENDERER, Shop, 3, counters=counters)
    before = Shop.closed
    heard = heard_of(episode, '<tool_call>{"name": "price", "arguments": {"thing": "tea"}}</tool_call>', "10")
    asyncio.run(episode.close())
    assert '"description": "The price of a thing."' in heard[0] and "10" in heard[1]
    assert (
        episode.reward == 1.0 and counters == {"tools/calls": 1, "env/steps": 1} and Shop.closed == before + 1
    )


def test_what_an_environment_raises_is_raised_and_a_cut_answer_never_reaches_it() -> None:
    prompt = Prompt(uid="s", messages=({"role": "user", "content": ""},), columns={"seed": 7})
    episode = EnvEpisode(prompt, RENDERER, Shop, 3)
    opened(episode)
    with pytest.raises(RuntimeError, match="the shop burns"):
        asyncio.run(episode.step(done_("broken")))
    assert asyncio.run(episode.step(done_("10", Stop.LENGTH))) is None and episode.reward == 0.0


class Hangs(Shop):
    """In the method that it is named for, until it is let go."""

    let_go = threading.Event()

    def __init__(self, method: str = "") -> None:
        self.method = method
        self.wait("__init__")

    def wait(self, method: str) -> None:
        if method == self.method:
            Hangs.let_go.wait()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.wait("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.wait("step")
        return super().step(action)

    def close(self) -> None:
        self.wait("close")


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "close"])
def test_an_environment_that_hangs_is_named_and_holds_nothing_up(method: str) -> None:
    """Only step had a limit of time: a reset that waited for a server held the run for ever."""
    make = partial(Hangs, method)
    episode = EnvEpisode(ROW, RENDERER, make, 3, timeout_s=0.5)
    try:
        with pytest.raises(TimeoutError, match=re.escape(f"{method}()")):
            heard_of(episode, "10")
        if method != "step":
            with pytest.raises(ValueError, match=re.escape("task.env 'mine:Hangs'") + f".*{method}"):
                make_seed_prompts(make, "mine:Hangs", "train", 0, 1, timeout_s=0.5)
    finally:
        Hangs.let_go.set()
        Hangs.let_go = threading.Event()


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (None, "NoneType"),
        (("\ud83d", {}), "surrogate"),
        (("a" * (MAX_CHARS + 1), {}), "1,000,001 characters"),
    ],
)
def test_a_first_text_that_is_none_is_named_before_any_work(first: Any, sentence: str) -> None:
    class Odd(Shop):
        def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
            return first

    with pytest.raises(ValueError, match=rf"task\.env 'mine:Odd'.*reset\(\).*{sentence}"):
        make_seed_prompts(Odd, "mine:Odd", "train", 0, 1)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (("", "1", True, False, {}), "the reward '1', a str"),
        (("", None, True, False, {}), "the reward None"),
        (("a" * (MAX_CHARS + 1), 1.0, False, False, {}), "1,000,001 characters"),
        ((5, 1.0, True, False, {}), "a int"),
    ],
)
def test_what_a_step_returns_wrongly_is_named(returned: Any, sentence: str) -> None:
    """A reward of text was taken for its number, and a reply of 50 MB was tokenised for minutes."""

    class Odd(Shop):
        def step(self, action: str) -> Any:
            return returned

    with pytest.raises((TypeError, ValueError), match=rf"step\(\).*{sentence}"):
        heard_of(EnvEpisode(ROW, RENDERER, Odd, 3), "10")


@pytest.mark.parametrize(
    ("spec", "params", "sentence"),
    [
        ("GuessNumber", {}, "is unknown; use 'ostinato.env.games:GuessNumber'"),
        ("nowhere.py:Game", {}, "there is no file nowhere.py"),
        ("ostinato.env.games:Guess", {}, "has no 'Guess'; did you mean GuessNumber?"),
        ("ostinato.env.games:GuessNumber", {"low": 9, "high": 1}, "low is 9, high 1"),
        ("ostinato.env.games:GuessNumber", {"most": 1}, "unexpected keyword argument 'most'"),
        ("ostinato.env.tools:calculator", {"expression": "1"}, "has no method reset()"),
    ],
)
def test_a_wrong_class_is_named_before_any_work(spec: str, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_factory(spec, params)
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


def test_a_file_that_is_named_as_a_module_is_named_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden_game.py").write_text("class Hidden: ...\n")
    with pytest.raises(ValueError, match=r"no module 'hidden_game'; write hidden_game.py:Hidden"):
        load_named("hidden_game:Hidden", "task.env", nearest="")
    with pytest.raises(ValueError, match=r"has no 'Hiden'; did you mean Hidden\?"):
        load_named("hidden_game.py:Hiden", "task.env", nearest="")


def test_a_file_may_have_dataclasses(tmp_path: Path) -> None:
    """Their annotations are looked up in sys.modules, where a file that was run by itself was not."""
    file = tmp_path / "shop.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Shop:\n    items: int = 9\n"
    )
    assert load_named(f"{file}:Shop", "task.env", nearest="")().items == 9
