"""An episode of text: one answer, or answers with tool calls between them. Implements protocols.Env.

    start()        the prompt's tokens (with tools, their signatures are in the system message)
    step(answer)   no tool call, or the last turn   -> None: the episode is over
                   <tool_call>{"name": .., "arguments": {..}}</tool_call> ...
                                                    -> the tools' replies, as the chat template writes them

Tokens in, tokens out: an answer keeps the tokens that were sampled. A call that cannot be parsed, an unknown
tool, or a tool that raises or takes too long gives an ordinary reply that says so: the policy can learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ostinato.env.tools import Message, Tool, Toolbox
from ostinato.types import Completion, NewRow, Prompt, Stop


class ChatRenderer(Protocol):
    """The methods of ``render.Renderer`` that a dialogue uses. A class that keeps its contexts within a
    budget implements them too."""

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str: ...

    def prompt(self, prompt: Prompt) -> np.ndarray: ...

    def after_turn(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        answer: Sequence[int] | np.ndarray = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = ...,
        *,
        prefill: str | None = None,
    ) -> np.ndarray | NewRow: ...


def append_answer(messages: Sequence[Message], text: str) -> tuple[list[Message], str | None]:
    """Return (the chat with the policy's answer, the prefill). The prefill is the text of an assistant
    message at the end of the chat, which the answer continues; None if there is no such message."""
    *earlier_messages, last_message = messages
    if last_message["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": text}], None
    prefill = str(last_message.get("content") or "")
    return [*earlier_messages, {**last_message, "content": f"{prefill}{text}"}], prefill


def continue_chat(
    renderer: ChatRenderer,
    prompt: Prompt,
    messages: Sequence[Message],
    completion: Completion,
    replies: Sequence[Message],
) -> tuple[list[Message], np.ndarray | NewRow]:
    """Return (the chat with the answer and the replies to it, the context [C] int32 of the next answer)."""
    chat, prefill = append_answer(messages, completion.text)
    context = renderer.after_turn(
        chat, replies, completion.tokens, prompt.tools, prompt.template_kwargs, prefill=prefill
    )
    return [*chat, *replies], context


class Dialogue:
    """One episode on ``prompt``, of at most ``max_turns`` answers.

    ``counters`` may be shared by many episodes: ``tools/{calls,unreadable,unknown,raised,timeout,
    cut,replaced,refused}``. Raises ValueError for tools on a plain text prompt.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: ChatRenderer,
        tools: Mapping[str, Tool] | None = None,
        max_turns: int = 1,
        *,
        tool_timeout_s: float = 5.0,
        counters: Counter[str] | None = None,
    ) -> None:
        self._tools = Toolbox(tools or {}, tool_timeout_s, Counter() if counters is None else counters)
        if tools and prompt.messages is None:
            raise ValueError(f"task.tools are set but {prompt.where} is plain text; use chat rows")
        if tools:
            prompt = replace(prompt, tools=(*prompt.tools, *self._tools.schemas))
        self._prompt, self._renderer, self._turns_left = prompt, renderer, max_turns
        self._messages: list[Message] = list(prompt.messages or ())

    @property
    def counters(self) -> Counter[str]:
        return self._tools.counters

    def start(self) -> np.ndarray:
        """Return the context of turn 0 [P] int32."""
        return self._renderer.prompt(self._prompt)

    async def step(self, completion: Completion) -> np.ndarray | NewRow | None:
        """Run the answer's tool calls and return the next context [C] int32. Return None when the episode is
        over: after the last turn, an answer that was cut off, or an answer without calls."""
        self._turns_left -= 1
        if not self._turns_left or completion.stop not in (Stop.EOS, Stop.STRING):
            return None
        replies = await self._tools.run_calls(completion.text)
        if not replies:
            return None
        self._messages, context = continue_chat(
            self._renderer, self._prompt, self._messages, completion, replies
        )
        return context
