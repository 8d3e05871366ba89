"""The server of agents: each rollout has an address, whose requests go to the episode of the rollout.

POST /rollout/{id}/v1/chat/completions  .../v1/responses  .../v1/messages  .../v1/reward  .../v1/end
POST /rollouts/next                                                        for workers: ``serve.elsewhere``
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ostinato.apps.serve.anthropic_messages import MessagesBody, make_error_body, make_response
from ostinato.apps.serve.anthropic_messages import stream_events as stream_message_events
from ostinato.apps.serve.bodies import ChatBody, parse_body
from ostinato.apps.serve.calls import Answer, ApiError, Call, Message, Piece, ToolCall, Usage
from ostinato.apps.serve.elsewhere import MODEL, Place, RemoteRollouts, check_number, parse_rollout_id
from ostinato.apps.serve.openai_chat import Shape
from ostinato.apps.serve.openai_responses import ResponsesBody, ResponseShape
from ostinato.apps.serve.server import (
    HttpServer,
    format_address,
    guard,
    open_socket,
    read_body,
    run_while_connected,
)
from ostinato.apps.serve.toolcalls import CallForm, convert_to_equals, read_calls, read_equals
from ostinato.inputs import parse_json
from ostinato.render import Renderer
from ostinato.types import Completion, Stop

log = logging.getLogger(__name__)
END_S = 5.0  # for an agent to end
IDLE_S = 600  # an agent's client may use a connection again after a long tool
Agent = Callable[[str, Mapping[str, Any]], Any]


class FetchNotice:
    """A worker has fetched the rollout: from now on the limit on its agent's silence applies."""


class PendingRequest:
    """An agent's request that has no answer yet. It is created and answered in different threads."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.hangup = asyncio.Event()  # belongs to the episode's loop: the agent has hung up
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

    async def wait_for_answer(self) -> Answer:
        return await self._answer


Event = PendingRequest | BaseException | FetchNotice | None  # None: the agent has ended


class Episode(Protocol):
    """The methods of a rollout that the server calls: ``agents.AgentEpisode``."""

    reward: float | None
    base_url: str

    def put_event(self, event: Event) -> None: ...

    def report_hangup(self, waiting: PendingRequest) -> None: ...


class AgentServer:
    """The addresses of all rollouts, in a thread with an event loop of its own, in which agents run too."""

    def __init__(
        self,
        renderer: Renderer,
        place: Place | None = None,
        *,
        calls: CallForm = "json",
        wait_s: float = 600.0,
        open_rollout: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.renderer, self._calls, self._open_rollout = renderer, calls, open_rollout
        self._place = place = place or Place()
        self.remote_rollouts = RemoteRollouts(place.key, self._report_begun, wait_s)
        self._episodes: dict[str, Episode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_ids, self._has_warned = 0, False
        self._listening = open_socket(place.host, place.port)
        self.address = place.address.rstrip("/") or format_address(self._listening)
        self._loop = asyncio.new_event_loop()
        options: dict[str, Any] = {"idle_s": IDLE_S, "log_level": "error", "lifespan": "off"}
        self._http = HttpServer(self._make_app(), self._listening, place.full_access, **options)
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # the run has its own
        self._loop.run_until_complete(self._http._serve(sockets=[self._listening]))
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        """Cancel the agents, and the requests that will not be answered any more."""
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.wait([*tasks, asyncio.create_task(self.remote_rollouts.close())], timeout=END_S)

    def convert_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
        """Return (messages, tools) for the renderer, with tool calls in the form of this server."""
        if self._calls == "equals":
            return convert_to_equals(messages, tools), []
        return [dict(message) for message in messages], list(tools)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of a prompt."""
        chat, template_tools = self.convert_chat(messages, tools)
        return len(self.renderer.chat(chat, tools=template_tools))

    def read_answer(
        self, completion: Completion, call: Call, number: str
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Return (content, tool calls) of an answer; ``number`` begins the ids of the calls."""
        if self._calls == "json":
            return read_calls(completion.text, number)
        has_stop_string = completion.stop is Stop.STRING  # the stop string is a part of the call
        text = self.renderer.decode(completion.tokens) if has_stop_string else completion.text
        content, calls = read_equals(text, call.tools, number)
        return (content, calls) if calls else (completion.text, ())

    def begin_episode(self, episode: Episode, agent: Agent, row: Mapping[str, Any], id_: str = "") -> str:
        """Start the agent of an episode and return the agent's base URL."""
        self._num_ids += 1
        id_ = id_ or f"{self._num_ids:x}"
        base_url = f"{self.address}/rollout/{id_}/v1"
        self._episodes[id_] = episode
        self._loop.call_soon_threadsafe(self._start_agent, id_, episode, agent, base_url, row)
        return base_url

    def _start_agent(
        self, id_: str, episode: Episode, agent: Agent, base_url: str, row: Mapping[str, Any]
    ) -> None:
        """Start the agent's task, which reports its end or its error to the episode."""

        async def run() -> None:
            try:
                if inspect.iscoroutinefunction(agent):
                    result = await agent(base_url, row)
                else:
                    result = await asyncio.to_thread(agent, base_url, row)
                    result = await result if inspect.isawaitable(result) else result
                if isinstance(result, int | float) and episode.reward is None:
                    episode.reward = float(result)
            except Exception as error:  # a user's code
                if not self._has_warned:
                    log.warning("an agent failed, the first of this run: %s: %s", type(error).__name__, error)
                self._has_warned = True
                episode.put_event(error)
            else:
                episode.put_event(None)

        self._tasks[id_] = self._loop.create_task(run())

    def end_episode(self, episode: Episode) -> None:
        """Cancel an episode's agent and forget its address."""
        id_ = parse_rollout_id(episode.base_url)

        def end() -> None:
            self._episodes.pop(id_, None)
            if task := self._tasks.pop(id_, None):
                task.cancel()

        with suppress(RuntimeError):  # the server and all agents are closed
            self._loop.call_soon_threadsafe(end)

    def close(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        self._thread.join(END_S)
        self._listening.close()

    # ---- HTTP

    def _make_app(self) -> Starlette:
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._handle_chat,
            "/v1/responses": self._handle_responses,
            "/v1/messages": self._handle_messages,
            "/v1/reward": self._handle_reward,
            "/v1/end": self.remote_rollouts.record_end,
        }
        key = self._place.key
        routes = [
            Route("/rollout/{id}" + path, guard(handler, key, _make_refusal(path)), methods=["POST"])
            for path, handler in handlers.items()
        ]
        fetch = Route(
            "/rollouts/next", guard(self.remote_rollouts.give_next, key, _make_refusal("")), methods=["POST"]
        )
        return Starlette(routes=[*routes, fetch])

    def has_rollout(self, id_: str) -> bool:
        """Return whether there is a rollout of this id."""
        return id_ in self._episodes

    def finish_rollout(self, id_: str) -> None:
        """End a rollout as if its agent had ended."""
        if episode := self._episodes.get(id_):
            episode.put_event(None)

    def _report_begun(self, id_: str) -> None:
        if id_ in self._episodes:
            self._episodes[id_].put_event(FetchNotice())

    def _find_episode(self, request: Request) -> Episode:
        id_ = request.path_params["id"]
        if id_ not in self._episodes:
            raise ApiError(
                f"there is no rollout {id_!r}, or it has ended", status=404, code="rollout_not_found"
            )
        return self._episodes[id_]

    async def _answer(self, request: Request, call: Call) -> Answer:
        """Give a call to its episode and wait for the answer. Raises ApiError for an invalid call."""
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
            convert_to_equals(
                (), call.tools
            )  # raises here, so that the error is the request's and not the run's
        if self._open_rollout is not None and (id_ := request.path_params["id"]) not in self._episodes:
            await self._open_rollout(id_)
        if call.grammar:
            raise ApiError("a rollout is sampled as its run says; leave response_format and tool_choice out")
        if call.template_kwargs or call.continue_final or not call.add_generation_prompt:
            raise ApiError(
                "a rollout's prompt is a chat that the assistant answers; leave out chat_template_kwargs, "
                "documents, efforts of reasoning, and words of the assistant to be continued"
            )
        waiting, episode = PendingRequest(call), self._find_episode(request)
        episode.put_event(waiting)
        try:
            return await run_while_connected(request, waiting.wait_for_answer())
        except ClientDisconnect:
            episode.report_hangup(waiting)
            raise

    async def _handle_chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request))
        call = body.to_call()
        answer = await self._answer(request, call)
        shape = Shape(
            id="chatcmpl-rollout",
            model=MODEL,
            fingerprint=lambda version: f"{MODEL}@{version or 0}",
            renderer=self.renderer,
            call=call,
            body=body,
            is_chat=True,
        )
        if body.stream:
            return await _stream_answer(answer, shape.stream_events)
        return JSONResponse(shape.make_response([answer], Usage.count([answer])))

    async def _handle_responses(self, request: Request) -> Response:
        body = parse_body(ResponsesBody, await read_body(request))
        call = body.to_call()
        answer = await self._answer(request, call)
        shape = ResponseShape(id="rollout", model=MODEL, renderer=self.renderer, call=call, body=body)
        if body.stream:
            return await _stream_answer(answer, shape.stream_events)
        return JSONResponse(shape.make_response([answer]))

    async def _handle_messages(self, request: Request) -> Response:
        body = parse_body(MessagesBody, await read_body(request))
        answer = await self._answer(request, body.to_call())
        if body.stream:
            return await _stream_answer(answer, lambda parts: stream_message_events("rollout", MODEL, parts))
        return JSONResponse(make_response("rollout", MODEL, [answer]))

    async def _handle_reward(self, request: Request) -> Response:
        """Set the reward of a rollout, once; 409 for a second one."""
        try:
            value = parse_json(await read_body(request))["value"]
        except (ValueError, TypeError, KeyError) as error:
            raise ApiError('send {"value": number}', param="value") from error
        reward, episode = check_number(value, "value"), self._find_episode(request)
        if episode.reward is not None:
            raise ApiError(f"the rollout has its reward, {episode.reward:g}", status=409, code="reward_given")
        episode.reward = reward
        return JSONResponse({"reward": episode.reward})


async def _stream_answer(answer: Answer, events: Callable[[Any], Any]) -> Response:
    """Return a complete answer as an event stream."""

    async def parts() -> Any:
        yield 0, Piece(index=0, text="", emitted=answer.emitted[0])
        yield 0, answer

    return StreamingResponse(events(parts()), media_type="text/event-stream")


def _make_refusal(path: str) -> Callable[[ApiError], Response]:
    body = make_error_body if path == "/v1/messages" else ApiError.make_body
    return lambda error: JSONResponse(body(error), status_code=error.status)
