"""Chat and text completions in OpenAI's format, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.render import Renderer
from ostinato.serve.bodies import Sampled
from ostinato.serve.calls import Answer, Call, Piece, ToolCall, Usage
from ostinato.types import Emitted

UNLIKELY = -9999.0  # OpenAI's number for a token of probability 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one response is written."""

    id: str
    model: str
    fingerprint: str
    renderer: Renderer
    call: Call
    body: Sampled
    chat: bool

    def head(self, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The response to a request that does not stream."""
        choices = [self._choice(answer, index) for index, answer in enumerate(answers)]
        return self.head(False) | {"choices": choices, "usage": usage.body()}

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        if self.chat:
            choice["message"] = message_of(answer)
            choice["logprobs"] = self._chat_logprobs(answer.emitted)
        else:
            choice["text"] = answer.content
            choice["logprobs"] = self._text_logprobs(answer.emitted, 0)
        return choice | self._extra(answer)

    def _extra(self, answer: Answer) -> dict[str, Any]:
        """vLLM's token ids, and fields that only this server has."""
        extra: dict[str, Any] = {}
        done = answer.completion
        if self.body.return_token_ids:
            extra |= {
                "prompt_token_ids": answer.prompt.tolist(),
                "token_ids": done.tokens.tolist(),
                "versions": done.versions.tolist(),
                "seed": list(answer.seed),
            }
        if self.body.return_routed_experts and done.experts is not None:
            extra["routed_experts"] = done.experts.tolist()
        return extra

    # ---- streaming

    async def events(self, parts: AsyncIterator[tuple[int, Piece | Answer]]) -> AsyncIterator[str]:
        """Lines of the event stream; ``parts`` come with the number of their choice."""
        answers: list[Answer] = []
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        async for index, part in parts:
            if index not in begun and self.chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            begun.add(index)
            if isinstance(part, Piece):
                if part.text or self.call.logprobs:
                    offset = offsets.get(index, 0)
                    offsets[index] = offset + len(part.text)
                    yield self._part(index, part.text, [part.emitted], offset)
                continue
            answers.append(part)
            for event in self._end(index, part):
                yield event
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield sse(self.head(True) | {"choices": [], "usage": Usage.of(answers).body()})
        yield "data: [DONE]\n\n"

    def _part(self, index: int, text: str, emitted: Sequence[Emitted], offset: int) -> str:
        if self.chat:
            return self._chunk(index, {"content": text}, logprobs=self._chat_logprobs(emitted))
        return self._chunk(index, text, logprobs=self._text_logprobs(emitted, offset))

    def _end(self, index: int, answer: Answer) -> Iterator[str]:
        if answer.rest:
            yield self._part(index, answer.rest, [], len(answer.content) - len(answer.rest))
        if answer.tool_calls:
            calls = [{"index": n, **tool_call(call)} for n, call in enumerate(answer.tool_calls)]
            yield self._chunk(index, {"tool_calls": calls})
        last: Any = {} if self.chat else ""
        yield self._chunk(index, last, finish_reason=answer.finish_reason, **self._extra(answer))

    def _chunk(self, index: int, content: Any, finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta" if self.chat else "text": content, "finish_reason": finish_reason}
        return sse(self.head(True) | {"choices": [choice | {"logprobs": None} | more]})

    # ---- log-probabilities

    def _chat_logprobs(self, emitted: Sequence[Emitted]) -> dict[str, Any] | None:
        if not self.call.logprobs:
            return None
        entries = [
            self._entry(token, logprob)
            | {
                "top_logprobs": [self._entry(*pair) for pair in zip(*top, strict=True)][
                    : self.call.top_logprobs
                ]
            }
            for token, logprob, top in tokens_of(emitted, greedy=self.call.temperature == 0)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.renderer.decode([token], skip_special=False)
        return {"token": text, "logprob": max(float(logprob), UNLIKELY), "bytes": list(text.encode())}

    def _text_logprobs(self, emitted: Sequence[Emitted], offset: int) -> dict[str, Any] | None:
        if not self.call.logprobs:
            return None
        found = list(tokens_of(emitted, greedy=self.call.temperature == 0))
        texts = [self.renderer.decode([token], skip_special=False) for token, *_ in found]
        starts = np.cumsum([offset, *map(len, texts)])[:-1].tolist()
        most = self.call.top_logprobs
        tops = [
            {(e := self._entry(*pair))["token"]: e["logprob"] for pair in list(zip(*top, strict=True))[:most]}
            for *_, top in found
        ]
        return {
            "tokens": texts,
            "token_logprobs": [max(float(logprob), UNLIKELY) for _, logprob, _ in found],
            "top_logprobs": tops if most else None,
            "text_offset": starts,
        }


def tokens_of(
    emitted: Sequence[Emitted], *, greedy: bool
) -> Iterator[tuple[int, float, tuple[Sequence[int], Sequence[float]]]]:
    """(token, log-probability, (top tokens, their log-probabilities)) of every token. A ``greedy`` token was
    not drawn: its log-probability is that of the distribution whose argmax it was."""
    for part in emitted:
        tops = part.top or [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * len(part.tokens)
        for token, logprob, (ids, logprobs) in zip(part.tokens.tolist(), part.logprobs, tops, strict=True):
            own = float(logprobs[0]) if greedy and len(logprobs) else float(logprob)
            yield token, own, (ids.tolist(), logprobs.tolist())


def message_of(answer: Answer) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = [tool_call(call) for call in answer.tool_calls]
        message["content"] = answer.content or None
    return message


def tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def sse(data: Mapping[str, Any], event: str = "") -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"
