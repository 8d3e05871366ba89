"""Chat and text completions in OpenAI's format, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ostinato.apps.serve.bodies import ACCOUNTS, CompletionBody, Id, Sampled, Strict
from ostinato.apps.serve.calls import Answer, Call, Piece, ToolCall, Usage
from ostinato.render import Renderer
from ostinato.types import Emitted

UNLIKELY = -9999.0  # OpenAI's number for a token of probability 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one response is written."""

    id: str
    model: str
    fingerprint: Callable[[int | None], str]  # of the version that sampled an answer
    renderer: Renderer
    call: Call
    body: Sampled
    chat: bool

    def head(self, chunk: bool, version: int | None) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint(version),
        }

    def whole(
        self, answers: Sequence[Answer], usage: Usage, scores: Sequence[Emitted | None] = ()
    ) -> dict[str, Any]:
        """The response to a request that does not stream. ``scores``: of each answer's prompt."""
        scores = scores or [None] * len(answers)
        choices = [self._choice(*each, index) for index, each in enumerate(zip(answers, scores, strict=True))]
        return self.head(False, answers[0].version) | {"choices": choices, "usage": usage.body()}

    def _choice(self, answer: Answer, scores: Emitted | None, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        if self.chat:
            choice["message"] = message_of(answer)
            choice["logprobs"] = self._chat_logprobs(answer.emitted)
        else:
            choice["text"] = answer.content
            choice["logprobs"] = self._text_logprobs(answer.emitted, 0)
            assert isinstance(self.body, CompletionBody)
            if self.body.echo:
                choice |= self._echoed(answer, scores, choice["logprobs"])
            if scores is not None and self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(answer, scores, self.body.prompt_logprobs)
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

    # ---- the prompt, in completions

    def _echoed(self, answer: Answer, scores: Emitted | None, logprobs: Any) -> dict[str, Any]:
        """The text with the prompt before it, and log-probabilities for both; the first token has none."""
        was_text = self.call.text is not None  # which has no special tokens; what stands before it has
        prompt = self.renderer.decode(answer.prompt, skip_special=was_text)
        if logprobs is None or scores is None:
            return {"text": prompt + answer.content}
        first = int(answer.prompt[0])
        length = len(self.renderer.decode([first], skip_special=was_text))
        before = self._text_logprobs([scores], length, drawn=False)
        joined: dict[str, Any] = {"tokens": [self._text(first)], "text_offset": [0]}
        joined |= {"token_logprobs": [None], "top_logprobs": [None]}
        assert before is not None
        after = logprobs["text_offset"]
        logprobs = logprobs | {"text_offset": [len(prompt) + offset for offset in after]}
        for name, values in joined.items():
            joined[name] = None if before[name] is None else [*values, *before[name], *logprobs[name]]
        return {"text": prompt + answer.content, "logprobs": joined}

    def _prompt_logprobs(
        self, answer: Answer, scores: Emitted, most: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's: for each token but the first its log-probability, and those of the ``most`` likeliest."""
        places: list[dict[str, dict[str, Any]] | None] = [None]
        for token, logprob, (ids, logprobs) in tokens_of([scores], greedy=False):
            known = {token: logprob, **dict(list(zip(ids, logprobs, strict=True))[:most])}
            texts = {id_: self.renderer.decode([id_], skip_special=False) for id_ in known}
            places.append({str(id_): {"logprob": p, "decoded_token": texts[id_]} for id_, p in known.items()})
        return places

    # ---- streaming

    async def events(self, parts: AsyncIterator[tuple[int, Piece | Answer]]) -> AsyncIterator[str]:
        """Lines of the event stream; ``parts`` come with the number of their choice."""
        answers: list[Answer] = []
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        version: int | None = None
        async for index, part in parts:
            version = part.emitted.version if isinstance(part, Piece) else part.version
            if index not in begun and self.chat:
                yield self._chunk(index, {"role": "assistant", "content": ""}, version)
            begun.add(index)
            if isinstance(part, Piece):
                if part.text or self.call.logprobs:
                    offset = offsets.get(index, 0)
                    offsets[index] = offset + len(part.text)
                    yield self._part(index, part.text, [part.emitted], offset, version)
                continue
            answers.append(part)
            for event in self._end(index, part):
                yield event
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield sse(self.head(True, version) | {"choices": [], "usage": Usage.of(answers).body()})
        yield "data: [DONE]\n\n"

    def _part(
        self, index: int, text: str, emitted: Sequence[Emitted], offset: int, version: int | None
    ) -> str:
        if self.chat:
            return self._chunk(index, {"content": text}, version, logprobs=self._chat_logprobs(emitted))
        return self._chunk(index, text, version, logprobs=self._text_logprobs(emitted, offset))

    def _end(self, index: int, answer: Answer) -> Iterator[str]:
        if answer.rest:
            yield self._part(index, answer.rest, [], len(answer.content) - len(answer.rest), answer.version)
        if answer.tool_calls:
            calls = [{"index": n, **tool_call(call)} for n, call in enumerate(answer.tool_calls)]
            yield self._chunk(index, {"tool_calls": calls}, answer.version)
        last: Any = {} if self.chat else ""
        more = {"finish_reason": answer.finish_reason, **self._extra(answer)}
        yield self._chunk(index, last, answer.version, **more)

    def _chunk(self, index: int, content: Any, version: int | None, **more: Any) -> str:
        choice = {"index": index, "delta" if self.chat else "text": content, "finish_reason": None}
        return sse(self.head(True, version) | {"choices": [choice | {"logprobs": None} | more]})

    # ---- log-probabilities

    def _chat_logprobs(self, emitted: Sequence[Emitted]) -> dict[str, Any] | None:
        if not self.call.logprobs:
            return None
        return {"content": logprob_entries(self.call, emitted, self._text), "refusal": None}

    def _text(self, token: int) -> str:
        as_id = self.body.return_tokens_as_token_ids
        return f"token_id:{token}" if as_id else self.renderer.decode([token], skip_special=False)

    def _text_logprobs(
        self, emitted: Sequence[Emitted], offset: int, *, drawn: bool = True
    ) -> dict[str, Any] | None:
        """In the format of completions; not ``drawn`` are tokens of the prompt."""
        if not self.call.logprobs:
            return None
        known = list(tokens_of(emitted, greedy=drawn and self.call.temperature == 0))
        lengths = [len(self.renderer.decode([token], skip_special=False)) for token, *_ in known]
        most = self.call.top_logprobs
        tops = [
            {
                self._text(id_): max(float(p), UNLIKELY)
                for id_, p in reversed(list(zip(*top, strict=True))[:most])
            }
            for *_, top in known
        ]  # reversed: of tokens with one text, such as halves of characters, the likelier one stays
        return {
            "tokens": [self._text(token) for token, *_ in known],
            "token_logprobs": [max(float(logprob), UNLIKELY) for _, logprob, _ in known],
            "top_logprobs": tops if most else None,
            "text_offset": np.cumsum([offset, *lengths])[:-1].tolist(),
        }


def logprob_entries(
    call: Call, emitted: Sequence[Emitted], text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """The log-probabilities of tokens in the format of chats and responses; ``text`` of a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        written = text(token)
        return {"token": written, "logprob": max(float(logprob), UNLIKELY), "bytes": list(written.encode())}

    return [
        entry(token, logprob)
        | {"top_logprobs": [entry(*pair) for pair in list(zip(*top, strict=True))[: call.top_logprobs]]}
        for token, logprob, top in tokens_of(emitted, greedy=call.temperature == 0)
    ]


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


# ---- tokens in, tokens out: vLLM's /inference/v1/generate, which other trainers call (verifiers, prime-rl)


class GenerateParams(Sampled):
    """``sampling_params``."""

    harmless = frozenset({"skip_special_tokens", "detokenize", "output_kind"})  # of a text, which is not sent
    logprobs: Annotated[int, Field(ge=0)] | None = None


class GenerateBody(Strict):
    """POST /inference/v1/generate."""

    harmless = ACCOUNTS
    model: str = ""
    token_ids: Annotated[list[Id], Field(min_length=1)]
    sampling_params: GenerateParams
    stream: Literal[False] | None = False

    def to_call(self) -> Call:
        params = self.sampling_params
        call = params.call(
            tokens=tuple(self.token_ids),
            max_tokens=16 if params.max_tokens is None else params.max_tokens,
            logprobs=params.logprobs is not None,
            top_logprobs=params.logprobs or 0,
        )
        return replace(call, model=self.model)


def generation(id_: str, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """The response; in log-probabilities tokens have the text ``token_id:42``."""
    choices = []
    for index, answer in enumerate(answers):
        entries = logprob_entries(call, answer.emitted, lambda token: f"token_id:{token}")
        choices.append(
            {
                "index": index,
                "finish_reason": answer.finish_reason,
                "token_ids": answer.completion.tokens.tolist(),
                "logprobs": {"content": entries} if call.logprobs else None,
            }
        )
    return {"request_id": id_, "choices": choices, "usage": Usage.of(answers).body()}
