"""Chats within a budget: the form of their messages, sessions in a file, episodes whose rows begin anew."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion

from ostinato.apps.memory.blocks import Kept, MemoryState
from ostinato.apps.memory.chat import (
    NOTE,
    Chat,
    Message,
    ShorteningRenderer,
    chat_sizes,
    extract_text,
    format_state,
)
from ostinato.apps.memory.keep import Memory
from ostinato.apps.memory.refill import ByModel
from ostinato.apps.memory.sessions import Sessions
from ostinato.env.dialogue import Dialogue
from ostinato.types import NewRow, Prompt

BUDGET = 500


def measure(messages: Sequence[Message]) -> int:
    return 10 + sum(8 + len(extract_text(message)) for message in messages)


def new_chat(budget: int = BUDGET, **options: Any) -> Chat:
    sizes = chat_sizes(budget, 0, measure)
    memory = Memory(sizes=sizes, count=len, originals=Kept(), **options)
    return Chat(memory=memory, budget=budget, measure=measure)


def history(turns: int, system: str = "Be kind.") -> list[dict[str, Any]]:
    draw, messages = random.Random(3), [{"role": "system", "content": system}] if system else []
    for k in range(turns):
        place = draw.choice(["Oslo", "Bergen", "Rome"])
        messages.append(
            {"role": "user", "content": f"Note {k}: I saw {draw.randrange(9, 99)} boats in {place}."}
        )
        messages.append({"role": "assistant", "content": f"All right, that is number {k} of them."})
    return messages


def test_a_chat_within_the_budget_is_left_as_it_is() -> None:
    messages = history(4)
    assert new_chat().shorten(messages) == messages


sizes_of = st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(0, 900))


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(sizes_of, min_size=1, max_size=8), system=st.sampled_from(["", "Be kind."]))
def test_whatever_the_messages_they_come_out_within_the_budget(
    sizes: list[tuple[str, int]], system: str
) -> None:
    chat, messages = new_chat(), history(0, system)
    for k, (role, size) in enumerate(sizes):
        messages.append({"role": role, "content": f"{k} of many words. " * (size // 18)})
        out = chat.shorten(messages)
        assert measure(out) <= BUDGET
        if out != messages and len(out) > 1:
            assert out[0]["role"] == "system" and out[0]["content"].startswith(system)
            assert out[1]["role"] in ("user", role)


def test_a_long_chat_keeps_the_system_message_a_note_and_the_newest_messages() -> None:
    chat, messages = new_chat(), history(60)
    out = chat.shorten(messages)
    content = out[0]["content"]
    assert content.startswith("Be kind.\n\n" + NOTE) and "Note 0: 84" in content
    assert out[1]["role"] == "user" and out[1:] == messages[-len(out[1:]) :]
    tools = [*messages, {"role": "tool", "content": "result: 42. " * 200}]
    last = chat.shorten(tools)[-1]
    assert last["role"] == "user" and "result: 42." in last["content"]


def test_asked_turn_by_turn_or_at_once_the_memory_is_the_same() -> None:
    messages, one, all_ = history(40), new_chat(), new_chat()
    for k in range(2, len(messages) + 1, 2):
        out = one.shorten(messages[:k])
    assert one.state == all_.state or all_.shorten(messages[:-1]) is not None
    assert all_.shorten(messages) and out


def test_between_two_shortenings_the_messages_only_grow() -> None:
    """So that what a server has computed of them is found again."""
    chat, messages, before, grown = new_chat(1000), history(60), list[Message](), 0
    for k in range(2, len(messages) + 1, 2):
        out = chat.shorten(messages[:k])
        grown += out[: len(before)] == before
        before = out
    assert grown >= 25


def test_an_edited_chat_is_remembered_anew_with_its_pins() -> None:
    chat, messages = new_chat(), history(30)
    chat.shorten(messages)
    target = chat.state.blocks[-3]
    chat.state = chat.memory.pin(chat.state, target.id)
    edited = [*messages[:-1], {"role": "assistant", "content": "Something else."}]
    chat.shorten(edited)
    assert [one.source for one in chat.state.blocks if one.pinned][-1] == target.source
    assert chat.state.turns == len(edited)


def test_a_system_message_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="pin less"):
        new_chat().shorten(history(1, system="Be very kind indeed. " * 30))
    with pytest.raises(ValueError, match=r"memory\.budget is"):
        new_chat(budget=20)


def test_a_session_outlives_its_store_and_originals_are_byte_for_byte(tmp_path: Path) -> None:
    file, messages = tmp_path / "deep" / "memory.sqlite", history(40)
    messages[3]["content"] = "odd \ud800 \r\n text"
    store = Sessions(file)
    memory = Memory(
        sizes=chat_sizes(BUDGET, 0, measure),
        count=len,
        originals=store,
        on_block=lambda block: store.add("ann", block),
    )
    chat = Chat(memory=memory, budget=BUDGET, measure=measure)
    chat.shorten(messages[:60])
    store.save("ann", chat.digest, chat.state)
    store.close()

    again = Sessions(file)
    found = again.load("ann")
    assert found == (chat.state, chat.digest) and again.load("bob") is None
    assert again.find_best_match(["", chat.digest]) == "ann" and again.find_best_match(["x"]) == ""
    gone = again.list_gone("ann", chat.state)
    assert gone and {one.id for one in gone} | {one.id for one in chat.state.blocks} == set(
        range(chat.state.next_id)
    )
    turn = [one for one in [*gone, *chat.state.blocks] if one.turn == 3]
    assert (
        "".join(again.get(one.source) for one in sorted(turn, key=lambda one: one.id))
        == messages[3]["content"]
    )
    assert (block := again.load_block("ann", gone[0].id)) and block.source == gone[0].source
    with pytest.raises(KeyError):
        again.get("nothing")
    (tmp_path / "text").write_text("no database at all, " * 100)
    with pytest.raises(ValueError, match="as a store of memories"):
        Sessions(tmp_path / "text")


class Letters:
    """A renderer of one token for each character."""

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return "".join(map(chr, tokens))

    def chat_text(self, messages: Sequence[Message]) -> str:
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"

    def chat(self, messages: Sequence[Message], *_: Any, **__: Any) -> np.ndarray:
        return np.array([ord(char) for char in self.chat_text(messages)], np.int32)

    def prompt(self, prompt: Prompt) -> np.ndarray:
        return self.chat(prompt.messages or ())

    def after_turn(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        answer: Any = (),
        tools: Any = (),
        template_kwargs: Any = None,
        *,
        prefill: str | None = None,
    ) -> np.ndarray:
        return np.array([ord(char) for char in "\n" + self.chat_text(new_messages)], np.int32)


def lookup(n: int) -> str:
    """Give a line of a log."""
    return f"entry {n} of the log has the code {n * 37} and some more words that matter little. " * 2


def test_an_episode_with_a_memory_begins_rows_and_stays_within_the_budget() -> None:
    counters, letters = Counter[str](), Letters()
    by = lambda messages: len(letters.chat(messages))  # noqa: E731
    memory = Memory(sizes=chat_sizes(900, 0, by), count=len, originals=Kept(), counters=counters)
    task = {"role": "user", "content": "Find the code of entry 3."}
    words = ShorteningRenderer(letters, Chat(memory=memory, budget=900, measure=by))
    dialogue = Dialogue(Prompt(uid="p", messages=(task,)), words, tools={"lookup": lookup}, max_turns=20)

    async def play() -> list[np.ndarray]:
        context, contexts = dialogue.start(), []
        for n in range(15):
            contexts.append(context)
            text = f'<tool_call>{{"name": "lookup", "arguments": {{"n": {n}}}}}</tool_call>'
            answer = completion([ord(char) for char in text], text=text)
            reply = await dialogue.step(answer)
            if isinstance(reply, NewRow):
                context = reply.tokens
                seen = letters.decode(context)
                assert "Find the code of entry 3." in seen and NOTE in seen
            else:
                assert reply is not None
                context = np.concatenate([context, answer.tokens, reply])
            assert len(context) <= 900
        return contexts

    first, second = asyncio.run(play()), counters["memory/rows"]
    assert second >= 2 and counters["memory/gone"] + counters["memory/rewritten"] > 0
    assert len(first) == 15


def test_a_model_that_fails_leaves_gaps_to_extracts() -> None:
    counters = Counter[str]()

    def answers(messages: list[dict[str, str]], max_tokens: int) -> str:
        raise OSError("no answer")

    chat = new_chat(refiller=ByModel(answers, counters))
    chat.shorten(history(30))
    assert counters["memory/failed"] > 0 and any(one.level for one in chat.state.blocks)
    assert ByModel(lambda messages, most: ' "Ann is 7." ', counters)("", "x", "", 9) == "Ann is 7."


def test_the_form_of_a_state_without_blocks_is_the_newest_message_alone() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert format_state(MemoryState(turns=2, next_id=2), messages, 0) == [
        {"role": "assistant", "content": ""}
    ]
