"""Chat and text completions in OpenAI's format, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ostinato.apps.serve.bodies import ACCOUNT_FIELDS, CompletionBody, SamplingBody, StrictBody, TokenId
from ostinato.apps.serve.calls import Answer, Call, Piece, ToolCall, Usage
from ostinato.render import Renderer
from ostinato.types import Emitted

MIN_LOGPROB = -9999.0  # OpenAI's number for a token of probability 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The settings of a response, and the methods that write it."""

    id: str
    model: str
    fingerprint: Callable[[int | None], str]  # of the version that sampled an answer
    renderer: Renderer
    call: Call
    body: SamplingBody
    is_chat: bool

    def make_head(self, chunk: bool, version: int | None) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.is_chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint(version),
        }

    def make_response(
        self, answers: Sequence[Answer], usage: Usage, scores: Sequence[Emitted | None] = ()
    ) -> dict[str, Any]:
        """Return the response to a request that does not stream. ``scores``: of each answer's prompt."""
        scores = scores or [None] * len(answers)
        choices = [
            self._make_choice(*pair, index) for index, pair in enumerate(zip(answers, scores, strict=True))
        ]
        return self.make_head(False, answers[0].version) | {"choices": choices, "usage": usage.make_body()}

    def _make_choice(self, answer: Answer, scores: Emitted | None, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        if self.is_chat:
            choice["message"] = make_message(answer)
            choice["logprobs"] = self._format_chat_logprobs(answer.emitted)
        else:
            choice["text"] = answer.content
            choice["logprobs"] = self._format_text_logprobs(answer.emitted, 0)
            assert isinstance(self.body, CompletionBody)
            if self.body.echo:
                choice |= self._echo_prompt(answer, scores, choice["logprobs"])
            if scores is not None and self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._format_prompt_logprobs(
                    answer, scores, self.body.prompt_logprobs
                )
        return choice | self._make_extra(answer)

    def _make_extra(self, answer: Answer) -> dict[str, Any]:
        """Return vLLM's token ids, and fields that only this server has."""
        extra: dict[str, Any] = {}
        completion = answer.completion
        if self.body.return_token_ids:
            extra |= {
                "prompt_token_ids": answer.prompt.tolist(),
                "token_ids": completion.tokens.tolist(),
                "versions": completion.versions.tolist(),
                "seed": list(answer.seed),
            }
        if self.body.return_routed_experts and completion.experts is not None:
            extra["routed_experts"] = completion.experts.tolist()
        return extra

    # ---- the prompt, in completions

    def _echo_prompt(self, answer: Answer, scores: Emitted | None, logprobs: Any) -> dict[str, Any]:
        """The text with the prompt before it, and log-probabilities of both; the first token has none."""
        is_text = self.call.text is not None  # a text has no special tokens, but they may be added before it
        prompt = self.renderer.decode(answer.prompt, skip_special=is_text)
        if logprobs is None or scores is None:
            return {"text": prompt + answer.content}
        first_token = int(answer.prompt[0])
        length = len(self.renderer.decode([first_token], skip_special=is_text))
        prompt_logprobs = self._format_text_logprobs([scores], length, is_sampled=False)
        columns: dict[str, Any] = {"tokens": [self._decode_token(first_token)], "text_offset": [0]}
        columns |= {"token_logprobs": [None], "top_logprobs": [None]}
        assert prompt_logprobs is not None
        offsets = logprobs["text_offset"]
        logprobs = logprobs | {"text_offset": [len(prompt) + offset for offset in offsets]}
        for name, values in columns.items():
            columns[name] = (
                None if prompt_logprobs[name] is None else [*values, *prompt_logprobs[name], *logprobs[name]]
            )
        return {"text": prompt + answer.content, "logprobs": columns}

    def _format_prompt_logprobs(
        self, answer: Answer, scores: Emitted, top_n: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Return, as vLLM does, the log-probability of each token but the first, and those of the ``top_n``
        likeliest."""
        places: list[dict[str, dict[str, Any]] | None] = [None]
        for token, logprob, (ids, logprobs) in iterate_tokens([scores], greedy=False):
            logprob_by_id = {token: logprob, **dict(list(zip(ids, logprobs, strict=True))[:top_n])}
            texts = {id_: self.renderer.decode([id_], skip_special=False) for id_ in logprob_by_id}
            places.append(
                {str(id_): {"logprob": p, "decoded_token": texts[id_]} for id_, p in logprob_by_id.items()}
            )
        return places

    # ---- streaming

    async def stream_events(self, parts: AsyncIterator[tuple[int, Piece | Answer]]) -> AsyncIterator[str]:
        """Yield the lines of the event stream; ``parts`` come with the number of their choice."""
        answers: list[Answer] = []
        open_indices: set[int] = set()
        offsets: dict[int, int] = {}
        version: int | None = None
        async for index, part in parts:
            version = part.emitted.version if isinstance(part, Piece) else part.version
            if index not in open_indices and self.is_chat:
                yield self._make_chunk(index, {"role": "assistant", "content": ""}, version)
            open_indices.add(index)
            if isinstance(part, Piece):
                if part.text or self.call.logprobs:
                    offset = offsets.get(index, 0)
                    offsets[index] = offset + len(part.text)
                    yield self._make_part_event(index, part.text, [part.emitted], offset, version)
                continue
            answers.append(part)
            for event in self._make_end_events(index, part):
                yield event
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield format_event(
                self.make_head(True, version) | {"choices": [], "usage": Usage.count(answers).make_body()}
            )
        yield "data: [DONE]\n\n"

    def _make_part_event(
        self, index: int, text: str, emitted: Sequence[Emitted], offset: int, version: int | None
    ) -> str:
        if self.is_chat:
            return self._make_chunk(
                index, {"content": text}, version, logprobs=self._format_chat_logprobs(emitted)
            )
        return self._make_chunk(index, text, version, logprobs=self._format_text_logprobs(emitted, offset))

    def _make_end_events(self, index: int, answer: Answer) -> Iterator[str]:
        if answer.rest:
            yield self._make_part_event(
                index, answer.rest, [], len(answer.content) - len(answer.rest), answer.version
            )
        if answer.tool_calls:
            calls = [{"index": n, **format_tool_call(call)} for n, call in enumerate(answer.tool_calls)]
            yield self._make_chunk(index, {"tool_calls": calls}, answer.version)
        content: Any = {} if self.is_chat else ""
        fields = {"finish_reason": answer.finish_reason, **self._make_extra(answer)}
        yield self._make_chunk(index, content, answer.version, **fields)

    def _make_chunk(self, index: int, content: Any, version: int | None, **fields: Any) -> str:
        choice = {"index": index, "delta" if self.is_chat else "text": content, "finish_reason": None}
        return format_event(
            self.make_head(True, version) | {"choices": [choice | {"logprobs": None} | fields]}
        )

    # ---- log-probabilities

    def _format_chat_logprobs(self, emitted: Sequence[Emitted]) -> dict[str, Any] | None:
        if not self.call.logprobs:
            return None
        return {"content": format_logprobs(self.call, emitted, self._decode_token), "refusal": None}

    def _decode_token(self, token: int) -> str:
        as_id = self.body.return_tokens_as_token_ids
        return f"token_id:{token}" if as_id else self.renderer.decode([token], skip_special=False)

    def _format_text_logprobs(
        self, emitted: Sequence[Emitted], offset: int, *, is_sampled: bool = True
    ) -> dict[str, Any] | None:
        """Return log-probabilities in the format of completions. Prompt tokens are not ``is_sampled``."""
        if not self.call.logprobs:
            return None
        entries = list(iterate_tokens(emitted, greedy=is_sampled and self.call.temperature == 0))
        lengths = [len(self.renderer.decode([token], skip_special=False)) for token, *_ in entries]
        top_n = self.call.top_logprobs
        tops = [
            {
                self._decode_token(id_): max(float(p), MIN_LOGPROB)
                for id_, p in reversed(list(zip(*top, strict=True))[:top_n])
            }
            for *_, top in entries
        ]  # reversed: of tokens with the same text, such as halves of characters, the likeliest stays
        return {
            "tokens": [self._decode_token(token) for token, *_ in entries],
            "token_logprobs": [max(float(logprob), MIN_LOGPROB) for _, logprob, _ in entries],
            "top_logprobs": tops if top_n else None,
            "text_offset": np.cumsum([offset, *lengths])[:-1].tolist(),
        }


def format_logprobs(
    call: Call, emitted: Sequence[Emitted], text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of chats and responses; ``text`` decodes a token."""

    def make_entry(token: int, logprob: float) -> dict[str, Any]:
        token_text = text(token)
        return {
            "token": token_text,
            "logprob": max(float(logprob), MIN_LOGPROB),
            "bytes": list(token_text.encode()),
        }

    return [
        make_entry(token, logprob)
        | {"top_logprobs": [make_entry(*pair) for pair in list(zip(*top, strict=True))[: call.top_logprobs]]}
        for token, logprob, top in iterate_tokens(emitted, greedy=call.temperature == 0)
    ]


def iterate_tokens(
    emitted: Sequence[Emitted], *, greedy: bool
) -> Iterator[tuple[int, float, tuple[Sequence[int], Sequence[float]]]]:
    """Yield (token, log-probability, (top tokens, their log-probabilities)) of every token. A ``greedy``
    token was not drawn: its log-probability is that of the distribution whose argmax it was."""
    for part in emitted:
        tops = part.top or [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * len(part.tokens)
        for token, logprob, (ids, logprobs) in zip(part.tokens.tolist(), part.logprobs, tops, strict=True):
            token_logprob = float(logprobs[0]) if greedy and len(logprobs) else float(logprob)
            yield token, token_logprob, (ids.tolist(), logprobs.tolist())


def make_message(answer: Answer) -> dict[str, Any]:
    """Return the assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = [format_tool_call(call) for call in answer.tool_calls]
        message["content"] = answer.content or None
    return message


def format_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def format_event(data: Mapping[str, Any], event: str = "") -> str:
    """Return a server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"


# ---- tokens in, tokens out: vLLM's /inference/v1/generate, which other trainers call (verifiers, prime-rl)


class GenerateParams(SamplingBody):
    """``sampling_params``."""

    harmless = frozenset({"skip_special_tokens", "detokenize", "output_kind"})  # no text is sent
    logprobs: Annotated[int, Field(ge=0)] | None = None


class GenerateBody(StrictBody):
    """POST /inference/v1/generate."""

    harmless = ACCOUNT_FIELDS
    model: str = ""
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: GenerateParams
    stream: Literal[False] | None = False

    def to_call(self) -> Call:
        params = self.sampling_params
        call = params.make_call(
            tokens=tuple(self.token_ids),
            max_tokens=16 if params.max_tokens is None else params.max_tokens,
            logprobs=params.logprobs is not None,
            top_logprobs=params.logprobs or 0,
        )
        return replace(call, model=self.model)


def format_generation(id_: str, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the response. In log-probabilities, tokens have the text ``token_id:42``."""
    choices = []
    for index, answer in enumerate(answers):
        entries = format_logprobs(call, answer.emitted, lambda token: f"token_id:{token}")
        choices.append(
            {
                "index": index,
                "finish_reason": answer.finish_reason,
                "token_ids": answer.completion.tokens.tolist(),
                "logprobs": {"content": entries} if call.logprobs else None,
            }
        )
    return {"request_id": id_, "choices": choices, "usage": Usage.count(answers).make_body()}
