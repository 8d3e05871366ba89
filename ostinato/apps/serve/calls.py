"""The common form of requests in all dialects, and of the engine's answers.

request body --parse--> Call --Service.answer_call--> Piece, Piece, ..., Answer --write--> response or events
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ostinato.inputs import parse_json
from ostinato.types import Completion, Emitted, Stop

Message = Mapping[str, Any]  # in the form of chat templates: role, content, tool_calls, ...


class ApiError(Exception):
    """A request that gets no answer: HTTP status, a sentence, and OpenAI's type, parameter and code."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,  # seconds
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after = retry_after

    def make_body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def make_rate_error(sentence: str) -> ApiError:
    """An error 429, after which the client may try again in a second."""
    return ApiError(sentence, status=429, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=1)


def read_json(body: bytes, *, surrogates: bool = False) -> Any:
    """Return the value of a request's body, see ``parse_json``. Raises ApiError 400 if it is not JSON."""
    try:
        return parse_json(body, surrogates=surrogates)
    except ValueError as error:
        raise ApiError(f"the body is no JSON ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request for ``n`` answers. Exactly one of ``messages``, ``text`` and ``tokens`` is the prompt."""

    model: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    tools: tuple[
        Mapping[str, Any], ...
    ] = ()  # {"type": "function", "function": {name, description, parameters}}
    tool_choice: str = "auto"  # or "none"
    parallel_calls: bool = True  # False: of several tool calls in an answer the first
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further names that templates read
    add_generation_prompt: bool = True
    continue_final: bool = False  # the last message is the beginning of the answer
    n: int = 1
    seed: int | None = None  # None: drawn by the server
    temperature: float | None = None  # None, for this and the next three: the model's default
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None  # 0: the prompt alone; None: as many as the context and the server allow
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()  # in addition to the model's own
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # score the prompt, with this many top tokens per position
    salt: str = ""  # the call uses cached prefixes of the same salt: see ``Request``
    grammar: str = ""  # the grammar of the answer (``serve.grammar``); "": any text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A streamed part of answer ``index``: text that has become final, and the tokens since the last."""

    index: int
    text: str
    emitted: Emitted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The complete answer ``index``. ``content``: no tool calls; ``rest``: the part that no Piece had."""

    index: int
    content: str
    rest: str
    tool_calls: tuple[ToolCall, ...]
    completion: Completion
    emitted: tuple[Emitted, ...]
    prompt: np.ndarray  # [P] int32
    seed: tuple[int, ...]

    @property
    def version(self) -> int | None:
        """The version of the policy that sampled the answer; None where nothing was sampled."""
        versions = self.completion.versions
        return int(versions[-1]) if len(versions) else None

    @property
    def finish_reason(self) -> str:
        """OpenAI's ``finish_reason`` of the answer."""
        if self.completion.stop in (Stop.LENGTH, Stop.ABORT):
            return "length"
        return "tool_calls" if self.tool_calls else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a call: its prompt, the prompt's part in the prefix cache, and sampled tokens."""

    prompt: int
    cached: int
    sampled: int

    @classmethod
    def count(cls, answers: Sequence[Answer]) -> Usage:
        """Return the usage of all answers to a prompt."""
        return cls(
            prompt=len(answers[0].prompt) if answers else 0,
            cached=max((answer.completion.cached_tokens for answer in answers), default=0),
            sampled=sum(len(answer.completion.tokens) for answer in answers),
        )

    def make_body(self) -> dict[str, Any]:
        """Return the usage in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.sampled,
            "total_tokens": self.prompt + self.sampled,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


MAX_ID = 128
# Without control characters, which not every database stores.
Name = Annotated[str, Field(max_length=MAX_ID, pattern=r"^[^\x00-\x1f\x7f]*$")]
_NAME = TypeAdapter(Name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """The sender of a request, according to its body."""

    user: str = ""
    session: str = ""
    tenant: str = ""
    record: bool = True  # False: "store": false
    cache_salt: str = ""  # vLLM's

    @property
    def salt(self) -> str:
        """The key that keeps the sender's prompts in the cache apart from others: all fields but the session,
        since a user has several sessions."""
        parts = (self.tenant, self.user, self.cache_salt)
        return json.dumps(parts) if any(parts) else ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Asker:
        """Read OpenAI's ``user``, ``safety_identifier``, ``store`` and ``metadata``, and Anthropic's
        ``metadata.user_id``."""
        metadata_field = fields.get("metadata")
        metadata = metadata_field if isinstance(metadata_field, dict) else {}
        users = (fields.get("user"), fields.get("safety_identifier"), metadata.get("user_id"))
        return cls(
            user=next((_to_name(user) for user in users if user), ""),
            session=_to_name(metadata.get("session_id", "")),
            tenant=_to_name(metadata.get("tenant", "")),
            record=fields.get("store") is not False,
            cache_salt=_to_name(fields.get("cache_salt") or ""),
        )


def _to_name(value: Any) -> str:
    """Return ``value`` if it is a name that events allow, else its hash."""
    try:
        return _NAME.validate_python(value, strict=True)
    except ValidationError:
        return hashlib.sha256(repr(value).encode()).hexdigest()


def choose_arm(user: str, round: int, share: float) -> tuple[str, float]:
    """Return ("canary" or "control", the arm's probability). A user stays in the same arm for a round."""
    digest = hashlib.sha256(f"{round}/{user}".encode()).digest()
    is_canary = int.from_bytes(digest[:7]) / 2**56 < share
    return ("canary", share) if is_canary else ("control", 1 - share)
