"""Unmodified agents: programs with an OpenAI client. Each of their rollouts has an address of its own.

    agent --/rollout/{id}/v1/chat/completions--> AgentServer --> AgentEpisode <-- step(answer) -- the rollout

The episode is an environment (``protocols.Env``) turned inside out: the agent's next request is the next
context. A request that continues the conversation is answered on the tokens of the earlier turns, exactly as
sampled; any other request (a subagent, a compacted context, a retry) begins a new row of tokens. The requests
of an agent are answered one after the other. Sampling, seeds and the model are the run's, whatever the agent
requests.

An agent is a function ``agent(base_url, row)``, a coroutine function, a command that gets the address in
OPENAI_BASE_URL and the row as JSON on its standard input, or a remote program (``serve.elsewhere``). The
reward of the episode is the number that the agent returns, or posts to ``{base_url}/reward``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ostinato.apps.serve.agent_server import Agent, AgentServer, Event, FetchNotice, PendingRequest
from ostinato.apps.serve.calls import Answer, ApiError, Call, Message
from ostinato.apps.serve.elsewhere import MODEL
from ostinato.apps.serve.openai_chat import make_message
from ostinato.apps.serve.verifiers import VerifiersAgent
from ostinato.config.tasks import VERIFIERS
from ostinato.env.rows import to_chat
from ostinato.objects import load_named
from ostinato.tool_calls import parse_arguments, parse_calls
from ostinato.types import Completion, Emitted, NewRow, Prompt


def load_agent(spec: str, command: Sequence[str], params: Mapping[str, Any] = MappingProxyType({})) -> Agent:
    """Return the agent that a recipe names: a function ("module:function", "file.py:function"),
    "verifiers:ID" with its ``params``, or a command.

    Raises ValueError if there is no such function.
    """
    if command:
        return lambda base_url, row: _run_command(command, base_url, row)
    if spec.startswith(VERIFIERS):
        return VerifiersAgent(spec, params).play
    return load_named(spec, "task.agent", nearest="agent.py:agent")


async def _run_command(command: Sequence[str], base_url: str, row: Mapping[str, Any]) -> None:
    """Run the command in its own process group, then kill the group. Raises RuntimeError if it fails."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        _, errors = await process.communicate(json.dumps(dict(row), default=str).encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {last_line[:500]}")


class ChatMemory(Protocol):
    """Keeps the messages of a chat within ``budget`` tokens by ``measure``; the first ``pinned`` messages
    stay as they are."""

    budget: int
    pinned: int | None
    measure: Callable[[Sequence[Message]], int]

    def shorten(self, messages: Sequence[Message]) -> list[Message]: ...


class AgentEpisode:
    """A rollout of an agent, as a ``protocols.Env`` in the event loop of the run.

    ``reward``: the agent's reward, None if it gave none. Counters: ``agent/{calls,rows,refused,after_end}``,
    and ``agent/left``, the calls on which the agent hung up.
    Raises RuntimeError for an agent that never calls, fails, or lets ``silence_s`` pass between two calls.
    """

    takes_half = True  # the agent also gets answers that were cut off

    def __init__(
        self,
        server: AgentServer,
        agent: Agent,
        prompt: Prompt,
        *,
        max_calls: float,
        silence_s: float | None,
        counters: Counter[str],
        is_queued: bool = False,
        id_: str = "",
        chat: ChatMemory | None = None,
    ) -> None:
        self.reward: float | None = None
        self._active_at = time.monotonic()
        self._server, self._agent, self._prompt = server, agent, prompt
        self._calls_left, self._silence_s, self._counters = max_calls, silence_s, counters
        self._is_queued, self._id = is_queued, id_
        self._memory = chat
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._current: PendingRequest | None = None
        self._context = np.zeros(0, np.int32)
        self._chat: list[dict[str, Any]] = []  # in the template's form, with the last answer
        self._history: list[Message] = []  # in the agent's form
        self._answer_tokens = np.zeros(0, np.int32)
        self._has_ended = self._has_answered = False

    async def start(self) -> np.ndarray:
        """Return the prompt of the agent's first request [P] int32."""
        self._loop = asyncio.get_running_loop()
        self.base_url = self._server.begin_episode(self, self._agent, self._make_row(), self._id)
        waiting = await self._take_request()
        if waiting is None:
            raise RuntimeError("the agent ended without a call; its base_url is the first argument")
        return self._begin_row(waiting.call)

    async def step(self, completion: Completion) -> np.ndarray | NewRow | None:
        """Answer the current request with ``completion`` and return the next context [C] int32; None when the
        agent has ended."""
        assert self._current is not None
        answer = self._make_answer(self._current.call, completion)
        message = make_message(answer)
        self._history.append(
            {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        )
        self._chat.append({"role": "assistant", "content": completion.text})
        self._answer_tokens = completion.tokens
        self._context = np.concatenate([self._context, completion.tokens])
        self._current.settle(answer)
        self._current, self._has_answered, self._active_at = None, True, time.monotonic()
        self._calls_left -= 1
        waiting = await self._take_request()
        if waiting is None:
            return None
        return self._continue_row(waiting.call)

    @property
    def silent_s(self) -> float:
        """Seconds since the agent's last request or its answer; 0 while an answer is computed."""
        return 0.0 if self._current is not None else time.monotonic() - self._active_at

    async def left(self) -> None:
        """Wait until the agent hangs up on the request that is being answered."""
        assert self._current is not None
        await self._current.hangup.wait()

    async def instead(self) -> NewRow | None:
        """Return the agent's next request after it has hung up, as a new row. None when it has ended."""
        self._current, self._active_at = None, time.monotonic()
        self._calls_left -= 1
        self._counters["agent/left"] += 1
        waiting = await self._take_request()
        if waiting is None and not self._has_answered:
            raise RuntimeError("the agent hung up on every call; give its client a longer timeout")
        return None if waiting is None else NewRow(self._begin_row(waiting.call))

    def close(self) -> None:
        """End the agent, and refuse its pending requests."""
        self._has_ended = True
        pending: list[Any] = [self._current]
        while not self._events.empty():  # requests that came while another was answered
            pending.append(self._events.get_nowait())
        for request in pending:
            if isinstance(request, PendingRequest):
                request.settle(ApiError("the rollout has ended", status=410, code="rollout_ended"))
        if hasattr(self, "base_url"):
            self._server.end_episode(self)

    # ---- in the event loop of the run

    def _make_row(self) -> dict[str, Any]:
        messages = [dict(message) for message in to_chat(self._prompt).messages or ()]
        prompt = {"prompt": self._prompt.text or messages, "messages": messages}
        return {"uid": self._prompt.uid, **prompt, **self._prompt.columns}

    async def _take_request(self) -> PendingRequest | None:
        """Wait for the agent's next request, which becomes the current one; None when the agent has ended."""
        try:
            event = await asyncio.wait_for(self._events.get(), None if self._is_queued else self._silence_s)
        except TimeoutError:
            raise RuntimeError(f"the agent made no call for {self._silence_s:g} s") from None
        if isinstance(event, FetchNotice):
            self._is_queued = False
            return await self._take_request()
        if isinstance(event, PendingRequest) and event.hangup.is_set():  # while another call was answered
            self._counters["agent/left"] += 1
            return await self._take_request()
        if isinstance(event, BaseException):
            raise RuntimeError(f"the agent raised {type(event).__name__}: {event}") from event
        if event is None:
            return None
        if not self._calls_left:
            self._counters["agent/refused"] += 1
            event.settle(ApiError("no more calls: task.max_turns is used up", status=429, code="max_turns"))
            return None
        self._counters["agent/calls"] += 1
        self._current = event
        return event

    def _begin_row(self, call: Call) -> np.ndarray:
        """Begin a new row with a request, and return the request's whole prompt [P] int32."""
        assert call.messages is not None
        messages: Sequence[Message] = call.messages
        if self._memory is not None:
            user_counts = (k for k, message in enumerate(messages, 1) if message["role"] == "user")
            self._memory.pinned = next(user_counts, None)  # and all messages before it
            self._memory.measure = partial(self._server.count_tokens, tools=call.tools)
            messages = self._memory.shorten(messages)
            self._counters["memory/rows"] += [*messages] != [*call.messages]
        chat, template_tools = self._server.convert_chat(messages, call.tools)
        self._chat, self._history, self._rendered_tools = list(chat), [*call.messages], template_tools
        self._tools, self._context = call.tools, self._server.renderer.chat(chat, tools=template_tools)
        self._counters["agent/rows"] += 1
        return self._context

    def _continue_row(self, call: Call) -> np.ndarray | NewRow:
        """Return the tokens after the last answer if the request continues from there; else a new row."""
        assert call.messages is not None
        num_known = len(self._history)
        if call.tools == self._tools and _are_same(call.messages[:num_known], self._history):
            new_messages = call.messages[num_known:]
            chat, _ = self._server.convert_chat(new_messages, ())
            try:
                bridge = self._server.renderer.after_turn(
                    self._chat, chat, self._answer_tokens, tools=self._rendered_tools
                )
            except ValueError:
                return NewRow(self._begin_row(call))
            if isinstance(bridge, NewRow):  # the template drops thoughts
                return NewRow(self._begin_row(call))
            if self._memory is not None and len(self._context) + len(bridge) > self._memory.budget:
                return NewRow(self._begin_row(call))
            self._chat += chat
            self._history += new_messages
            self._context = np.concatenate([self._context, bridge])
            return bridge
        return NewRow(self._begin_row(call))

    def _make_answer(self, call: Call, completion: Completion) -> Answer:
        number = f"{len(self._history):04x}"
        content, calls = (
            self._server.read_answer(completion, call, number) if call.tools else (completion.text, ())
        )
        if call.tools and not calls:
            names = {tool.get("function", tool)["name"] for tool in call.tools}
            self._counters["agent/unreadable"] += len(parse_calls(completion.text, names))
        version = int(completion.versions[-1]) if len(completion.versions) else 0
        emitted = Emitted(tokens=completion.tokens, logprobs=completion.logprobs, version=version)
        return Answer(
            index=0,
            content=content,
            rest=content,
            tool_calls=calls if call.parallel_calls else calls[:1],
            completion=completion,
            emitted=(emitted,),
            prompt=self._context,
            seed=(),
        )

    # ---- from the thread of the server

    def put_event(self, event: Event) -> None:
        """Queue a request, or the agent's end."""
        self._active_at = time.monotonic()
        if self._has_ended:
            self._counters["agent/after_end"] += 1
            if isinstance(event, PendingRequest):
                event.settle(ApiError("the rollout has ended", status=410, code="rollout_ended"))
            return
        self._call_soon(self._events.put_nowait, event)

    def report_hangup(self, waiting: PendingRequest) -> None:
        """Tell the episode that the agent has hung up on this request."""
        self._call_soon(waiting.hangup.set)

    def _call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the run's loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)


def _are_same(messages: Sequence[Message], history: Sequence[Message]) -> bool:
    """Return whether the messages are the same, apart from ids and empty fields that a client adds."""
    return len(messages) == len(history) and all(map(_is_same_message, messages, history))


def _is_same_message(new: Message, old: Message) -> bool:
    """Compare two messages, with arguments of tools as values, since some clients reformat their JSON."""
    calls = [
        [(call["function"]["name"], parse_arguments(call)) for call in message.get("tool_calls") or ()]
        for message in (new, old)
    ]
    texts = [(message["role"], message.get("content") or "") for message in (new, old)]
    return texts[0] == texts[1] and calls[0] == calls[1]
