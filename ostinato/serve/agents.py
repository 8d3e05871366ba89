"""Agents as they are: programs with an OpenAI client, each rollout of which has an address of its own.

    agent --/rollout/{id}/v1/chat/completions--> AgentServer --> AgentEpisode <-- step(answer) -- the rollout

The episode is an environment (``protocols.Env``) turned inside out: what the agent requests next is the next
context. A request that continues the conversation is answered on the tokens of the turns before, as they were
sampled; any other (a subagent, a compacted context, a retry) begins a new row of tokens. The requests of an
agent are answered one after the other. Sampling, seeds and the model are the run's, whatever it requests.

An agent is a function ``agent(base_url, row)``, a coroutine function, a command that finds the address in
OPENAI_BASE_URL and the row as JSON on its standard input, or a program elsewhere (``serve.elsewhere``). What
it returns, or posts to ``{base_url}/reward``, is the reward of the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ostinato.env.tools import imported
from ostinato.inputs import parse_json
from ostinato.memory.chat import Chat
from ostinato.render import Renderer
from ostinato.serve.anthropic_messages import MessagesBody, error_body, message
from ostinato.serve.anthropic_messages import events as message_events
from ostinato.serve.bodies import ChatBody, parsed
from ostinato.serve.calls import Answer, ApiError, Call, Message, Piece, ToolCall, Usage
from ostinato.serve.elsewhere import MODEL, Elsewhere, Place, id_of, number
from ostinato.serve.openai_chat import Shape, message_of
from ostinato.serve.openai_responses import ResponsesBody, response
from ostinato.serve.openai_responses import events as response_events
from ostinato.serve.server import address, bound, check_key, unless_gone
from ostinato.serve.toolcalls import CallForm, arguments_of, for_equals, for_template, read_calls, read_equals
from ostinato.types import Completion, Emitted, NewRow, Prompt, Stop

log = logging.getLogger(__name__)
END_S = 5.0  # for an agent to end by itself
Agent = Callable[[str, Mapping[str, Any]], Any]


def agent_of(spec: str, command: Sequence[str]) -> Agent:
    """The agent that a recipe names: a function ("module:function", "file.py:function"), or a command.

    Raises ValueError where there is none.
    """
    if command:
        return lambda base_url, row: _run(command, base_url, row)
    return imported(spec, "task.agent", nearest="agent.py:agent")


async def _run(command: Sequence[str], base_url: str, row: Mapping[str, Any]) -> None:
    """The command in a process group of its own, which is killed as a whole. RuntimeError for a failure."""
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
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {last[:500]}")


class _Begun:
    """A worker has fetched the rollout: from now on its agent is not silent."""


class Waiting:
    """A request of an agent that has no answer yet. Made and answered in different threads."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.left = asyncio.Event()  # of the episode's loop: the agent has hung up
        self._loop, self._answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer | ApiError) -> None:
        def settle() -> None:
            if self._answer.done():
                return  # the agent has hung up
            if isinstance(answer, ApiError):
                self._answer.set_exception(answer)
            else:
                self._answer.set_result(answer)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

    async def answer(self) -> Answer:
        return await self._answer


class AgentEpisode:
    """One rollout of an agent, as a ``protocols.Env`` in the event loop of the run.

    ``reward`` is what the agent gave, None for nothing. Counters: ``agent/{calls,rows,refused,after_end}``,
    and ``agent/left``, calls that the agent hung up on.
    Raises RuntimeError for an agent that never calls, fails, or lets ``silence_s`` pass between two calls.
    """

    takes_half = True  # an answer that was cut off is answered as such

    def __init__(
        self,
        server: AgentServer,
        agent: Agent,
        prompt: Prompt,
        *,
        max_calls: float,
        silence_s: float | None,
        counters: Counter[str],
        queued: bool = False,
        id_: str = "",
        chat: Chat | None = None,
        budget: float = math.inf,
    ) -> None:
        self.reward: float | None = None
        self._heard_at = time.monotonic()
        self._server, self._agent, self._prompt = server, agent, prompt
        self._calls_left, self._silence_s, self._counters = max_calls, silence_s, counters
        self._queued, self._id = queued, id_
        self._memory, self._budget = chat, budget  # of a context
        self._events: asyncio.Queue[Waiting | BaseException | _Begun | None] = asyncio.Queue()
        self._now: Waiting | None = None
        self._context = np.zeros(0, np.int32)
        self._chat: list[dict[str, Any]] = []  # as the template takes it, the last answer included
        self._said: list[Message] = []  # as the agent has it
        self._answer_tokens = np.zeros(0, np.int32)
        self._ended = self._answered_any = False

    async def start(self) -> np.ndarray:
        """[P] int32: what the agent's first request is."""
        self._loop = asyncio.get_running_loop()
        self.base_url = self._server.begin(self, self._agent, self._row(), self._id)
        waiting = await self._next()
        if waiting is None:
            raise RuntimeError("the agent ended without a call; its base_url is the first argument")
        return self._whole(waiting.call)

    async def step(self, completion: Completion) -> np.ndarray | NewRow | None:
        """What the agent requests next, given the answer to the request before; None when it has ended."""
        assert self._now is not None
        answer = self._answered(self._now.call, completion)
        message = message_of(answer)
        self._said.append({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
        self._chat.append({"role": "assistant", "content": completion.text})
        self._answer_tokens = completion.tokens
        self._context = np.concatenate([self._context, completion.tokens])
        self._now.settle(answer)
        self._now, self._answered_any, self._heard_at = None, True, time.monotonic()
        self._calls_left -= 1
        waiting = await self._next()
        if waiting is None:
            return None
        return self._continued(waiting.call)

    @property
    def silent_s(self) -> float:
        """Seconds since its agent was heard or answered; 0 while an answer is computed."""
        return 0.0 if self._now is not None else time.monotonic() - self._heard_at

    async def left(self) -> None:
        """Until the agent hangs up on the request that is to be answered."""
        assert self._now is not None
        await self._now.left.wait()

    async def instead(self) -> NewRow | None:
        """What the agent requests after it has hung up: a row of its own. None when it has ended."""
        self._now, self._heard_at = None, time.monotonic()
        self._calls_left -= 1
        self._counters["agent/left"] += 1
        waiting = await self._next()
        if waiting is None and not self._answered_any:
            raise RuntimeError("the agent hung up on every call; give its client a longer timeout")
        return None if waiting is None else NewRow(self._whole(waiting.call))

    def close(self) -> None:
        """End the agent, and refuse what it still requests."""
        self._ended = True
        waiting: list[Any] = [self._now]
        while not self._events.empty():  # requests that came while another one was answered
            waiting.append(self._events.get_nowait())
        for one in waiting:
            if isinstance(one, Waiting):
                one.settle(ApiError("the rollout has ended", status=410, code="rollout_ended"))
        if hasattr(self, "base_url"):
            self._server.end(self)

    # ---- in the event loop of the run

    def _row(self) -> dict[str, Any]:
        messages = [dict(message) for message in self._prompt.messages or ()]
        prompt = {"messages": messages} if messages else {"text": self._prompt.text}
        return {"uid": self._prompt.uid, **prompt, **self._prompt.columns}

    async def _next(self) -> Waiting | None:
        """The agent's next request, which is then the one to answer; None when it has ended."""
        try:
            event = await asyncio.wait_for(self._events.get(), None if self._queued else self._silence_s)
        except TimeoutError:
            raise RuntimeError(f"the agent made no call for {self._silence_s:g} s") from None
        if isinstance(event, _Begun):
            self._queued = False
            return await self._next()
        if isinstance(event, Waiting) and event.left.is_set():  # while another call was answered
            self._counters["agent/left"] += 1
            return await self._next()
        if isinstance(event, BaseException):
            raise RuntimeError(f"the agent raised {type(event).__name__}: {event}") from event
        if event is None:
            return None
        if not self._calls_left:
            self._counters["agent/refused"] += 1
            event.settle(ApiError("no more calls: task.max_turns is used up", status=429, code="max_turns"))
            return None
        self._counters["agent/calls"] += 1
        self._now = event
        return event

    def _whole(self, call: Call) -> np.ndarray:
        """The prompt of a request by itself."""
        assert call.messages is not None
        messages: Sequence[Message] = call.messages
        if self._memory is not None:
            self._memory.measure = partial(self._server.measure, tools=call.tools)
            messages = self._memory.shortened(messages)
        chat, native = self._server.for_template(messages, call.tools)
        self._chat, self._said, self._native = list(chat), [*call.messages], native
        self._tools, self._context = call.tools, self._server.renderer.chat(chat, tools=native)
        self._counters["agent/rows"] += 1
        return self._context

    def _continued(self, call: Call) -> np.ndarray | NewRow:
        """What comes behind the last answer, where the request goes on from there; else a new row."""
        assert call.messages is not None
        before = len(self._said)
        if call.tools == self._tools and _same(call.messages[:before], self._said):
            new = call.messages[before:]
            chat, _ = self._server.for_template(new, ())
            try:
                bridge = self._server.renderer.after_turn(
                    self._chat, chat, self._answer_tokens, tools=self._native
                )
            except ValueError:
                return NewRow(self._whole(call))
            if len(self._context) + len(bridge) > self._budget:
                return NewRow(self._whole(call))
            self._chat += chat
            self._said += new
            self._context = np.concatenate([self._context, bridge])
            return bridge
        return NewRow(self._whole(call))

    def _answered(self, call: Call, completion: Completion) -> Answer:
        number = f"{len(self._said):04x}"
        content, calls = self._server.read(completion, call, number) if call.tools else (completion.text, ())
        emitted = Emitted(tokens=completion.tokens, logprobs=completion.logprobs)
        return Answer(
            index=0,
            content=content,
            rest=content,
            tool_calls=calls,
            completion=completion,
            emitted=(emitted,),
            prompt=self._context,
            seed=(),
        )

    # ---- from the thread of the server

    def put(self, event: Waiting | BaseException | _Begun | None) -> None:
        """A request, or the agent's end."""
        self._heard_at = time.monotonic()
        if self._ended:
            self._counters["agent/after_end"] += 1
            if isinstance(event, Waiting):
                event.settle(ApiError("the rollout has ended", status=410, code="rollout_ended"))
            return
        self._soon(self._events.put_nowait, event)

    def leave(self, waiting: Waiting) -> None:
        """The agent has hung up on this request."""
        self._soon(waiting.left.set)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the run's loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)


def _same(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Are these messages those, whatever ids and empty fields a client adds?"""
    return len(new) == len(old) and all(map(_same_message, new, old))


def _same_message(new: Message, old: Message) -> bool:
    """Arguments of tools as values: some clients write their JSON anew."""
    calls = [
        [(call["function"]["name"], arguments_of(call)) for call in one.get("tool_calls") or ()]
        for one in (new, old)
    ]
    texts = [(one["role"], one.get("content") or "") for one in (new, old)]
    return texts[0] == texts[1] and calls[0] == calls[1]


class AgentServer:
    """The addresses of all rollouts, in a thread with an event loop of its own, in which agents run too."""

    def __init__(
        self,
        renderer: Renderer,
        place: Place | None = None,
        *,
        calls: CallForm = "json",
        wait_s: float = 600.0,
        opened: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.renderer, self._calls, self._opened = renderer, calls, opened
        self._place = place = place or Place()
        self.elsewhere = Elsewhere(place.key, self._begun, wait_s)
        self._episodes: dict[str, AgentEpisode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ids, self._told = 0, False
        self._listening = bound(place.host, place.port)
        self.address = place.address.rstrip("/") or address(self._listening)
        self._loop = asyncio.new_event_loop()
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off", timeout_keep_alive=600)
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # the run has its own
        self._loop.run_until_complete(self._http._serve(sockets=[self._listening]))
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        """Agents, and requests that are not answered any more."""
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.wait([*tasks, asyncio.create_task(self.elsewhere.close())], timeout=END_S)

    def for_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
        """(messages, tools) as the chat template takes them, with tool calls in the form of this server."""
        if self._calls == "equals":
            return for_equals(messages, tools), []
        return for_template(self.renderer, messages, tools)

    def measure(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a prompt."""
        chat, native = self.for_template(messages, tools)
        return len(self.renderer.chat(chat, tools=native))

    def read(self, completion: Completion, call: Call, number: str) -> tuple[str, tuple[ToolCall, ...]]:
        """(content, tool calls) of an answer; ``number`` begins the ids of the calls."""
        if self._calls == "json":
            return read_calls(completion.text, number)
        ended = completion.stop is Stop.STRING  # with a string that is a part of the call
        text = self.renderer.decode(completion.tokens) if ended else completion.text
        content, calls = read_equals(text, call.tools, number)
        return (content, calls) if calls else (completion.text, ())

    def begin(self, episode: AgentEpisode, agent: Agent, row: Mapping[str, Any], id_: str = "") -> str:
        """Start the agent of an episode; the address that it gets."""
        self._ids += 1
        id_ = id_ or f"{self._ids:x}"
        base_url = f"{self.address}/rollout/{id_}/v1"
        self._episodes[id_] = episode
        self._loop.call_soon_threadsafe(self._start, id_, episode, agent, base_url, row)
        return base_url

    def _start(
        self, id_: str, episode: AgentEpisode, agent: Agent, base_url: str, row: Mapping[str, Any]
    ) -> None:
        async def run() -> None:
            try:
                if inspect.iscoroutinefunction(agent):
                    given = await agent(base_url, row)
                else:
                    given = await asyncio.to_thread(agent, base_url, row)
                    given = await given if inspect.isawaitable(given) else given
                if isinstance(given, int | float) and episode.reward is None:
                    episode.reward = float(given)
            except Exception as error:  # a user's code
                if not self._told:
                    log.warning("an agent failed, the first of this run: %s: %s", type(error).__name__, error)
                self._told = True
                episode.put(error)
            else:
                episode.put(None)

        self._tasks[id_] = self._loop.create_task(run())

    def end(self, episode: AgentEpisode) -> None:
        """Cancel an episode's agent and forget its address."""
        id_ = id_of(episode.base_url)

        def end() -> None:
            self._episodes.pop(id_, None)
            if task := self._tasks.pop(id_, None):
                task.cancel()

        with suppress(RuntimeError):  # the server is closed, and all agents are
            self._loop.call_soon_threadsafe(end)

    def close(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        self._thread.join(END_S)
        self._listening.close()

    # ---- HTTP

    def _app(self) -> Starlette:
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/reward": self._reward,
            "/v1/end": self.elsewhere.end,
        }
        key = self._place.key
        routes = [
            Route("/rollout/{id}" + path, _guarded(handler, path, key), methods=["POST"])
            for path, handler in handlers.items()
        ]
        fetch = Route("/rollouts/next", _guarded(self.elsewhere.next, "", key), methods=["GET", "POST"])
        return Starlette(routes=[*routes, fetch])

    def has(self, id_: str) -> bool:
        """Is there a rollout of this id?"""
        return id_ in self._episodes

    def finish(self, id_: str) -> None:
        """End a rollout as if its agent had ended."""
        if episode := self._episodes.get(id_):
            episode.put(None)

    def _begun(self, id_: str) -> None:
        if id_ in self._episodes:
            self._episodes[id_].put(_Begun())

    def _episode(self, request: Request) -> AgentEpisode:
        id_ = request.path_params["id"]
        if id_ not in self._episodes:
            raise ApiError(
                f"there is no rollout {id_!r}, or it has ended", status=404, code="rollout_not_found"
            )
        return self._episodes[id_]

    async def _answer(self, request: Request, call: Call) -> Answer:
        if call.model not in ("", MODEL):
            raise ApiError(
                f"the model {call.model!r} is not served to agents; use {MODEL!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if call.n != 1:
            raise ApiError(f"n is {call.n}; a rollout has one answer to a request", param="n")
        if self._calls == "equals":
            for_equals((), call.tools)  # a fault of the request, not of the run
        if self._opened is not None and (id_ := request.path_params["id"]) not in self._episodes:
            await self._opened(id_)
        if call.grammar:
            raise ApiError("a rollout is sampled as its run says; leave response_format and tool_choice out")
        waiting, episode = Waiting(call), self._episode(request)
        episode.put(waiting)
        try:
            return await unless_gone(request, waiting.answer())
        except ClientDisconnect:
            episode.leave(waiting)
            raise

    async def _chat(self, request: Request) -> Response:
        body = parsed(ChatBody, await request.body())
        call = body.to_call()
        answer = await self._answer(request, call)
        shape = Shape(
            id="chatcmpl-rollout",
            model=MODEL,
            fingerprint=_version(answer),
            renderer=self.renderer,
            call=call,
            body=body,
            chat=True,
        )
        if body.stream:
            return await _whole_stream(answer, shape.events)
        return JSONResponse(shape.whole([answer], Usage.of([answer])))

    async def _responses(self, request: Request) -> Response:
        body = parsed(ResponsesBody, await request.body())
        answer = await self._answer(request, body.to_call())
        if body.stream:
            return await _whole_stream(answer, lambda parts: response_events("rollout", MODEL, parts))
        return JSONResponse(response("rollout", MODEL, [answer]))

    async def _messages(self, request: Request) -> Response:
        body = parsed(MessagesBody, await request.body())
        answer = await self._answer(request, body.to_call())
        if body.stream:
            return await _whole_stream(answer, lambda parts: message_events("rollout", MODEL, parts))
        return JSONResponse(message("rollout", MODEL, [answer]))

    async def _reward(self, request: Request) -> Response:
        """Once for each rollout; 409 for a second one."""
        try:
            value = parse_json(await request.body())["value"]
        except (ValueError, TypeError, KeyError) as error:
            raise ApiError('send {"value": number}', param="value") from error
        reward, episode = number(value, "value"), self._episode(request)
        if episode.reward is not None:
            raise ApiError(f"the rollout has its reward, {episode.reward:g}", status=409, code="reward_given")
        episode.reward = reward
        return JSONResponse({"reward": episode.reward})


def _version(answer: Answer) -> str:
    versions = answer.completion.versions
    return f"{MODEL}@{int(versions[-1]) if len(versions) else 0}"


async def _whole_stream(answer: Answer, events: Callable[[Any], Any]) -> Response:
    """An answer that is there already, as events."""

    async def parts() -> Any:
        yield 0, Piece(index=0, text="", emitted=answer.emitted[0])
        yield 0, answer

    return StreamingResponse(events(parts()), media_type="text/event-stream")


def _guarded(
    handler: Callable[[Request], Awaitable[Response]], path: str, key: str
) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        try:
            check_key(request, key)
            return await handler(request)
        except ApiError as error:
            body = error_body(error) if path == "/v1/messages" else error.body()
            return JSONResponse(body, status_code=error.status)
        except ClientDisconnect:
            return Response(status_code=499)

    return guarded
