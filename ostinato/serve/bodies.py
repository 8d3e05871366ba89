"""Request bodies, checked: OpenAI's chat and completions with vLLM's additions, and what all dialects share.

A field that would change the answer and that is not computed here is refused by name; any other unknown field
is ignored, as clients send many that are about accounts and billing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ostinato.inputs import parse_json
from ostinato.serve.calls import ApiError, Call

REFUSED = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "best_of", "suffix"),
    *("functions", "function_call", "audio", "prediction", "use_beam_search", "length_penalty", "bad_words"),
    *(
        "prompt_logprobs",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "guided_choice",
        "structured_outputs",
    ),
)
_NEUTRAL: tuple[Any, ...] = (
    None,
    0,
    1.0,
    False,
    "",
    [],
    {},
)  # values under which a refused field does nothing
Body = TypeVar("Body", bound=BaseModel)
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="allow")


class Options(Lenient):
    """``stream_options``."""

    include_usage: bool = False


class Format(Lenient):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class Sampled(Lenient):
    """What chat and completions share."""

    model: str = ""
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | Stops | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: Options | None = None
    return_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    response_format: Format | None = None

    def call(self, **prompt: Any) -> Call:
        """The call, without its prompt and what only one dialect has."""
        if self.response_format is not None and self.response_format.type != "text":
            raise ApiError(
                f"response_format {self.response_format.type!r} is not enforced here; leave it out",
                param="response_format",
            )
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Call(
            model=self.model,
            n=self.n,
            seed=self.seed,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens,
            stop=tuple(stop for stop in stops if stop),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            **prompt,
        )


class Function(Lenient):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    type: Literal["function"] = "function"
    function: Function


class Part(Lenient):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str = ""


class ChatMessage(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = 0
    tools: list[Tool] | None = None
    tool_choice: Any = None

    def to_call(self) -> Call:
        chosen = self.tool_choice if self.tool_choice in ("none", "auto") else None
        if self.tool_choice is not None and chosen is None:
            raise ApiError(
                f"tool_choice {self.tool_choice!r} cannot be enforced; use 'auto' or 'none'",
                param="tool_choice",
            )
        return self.call(
            messages=tuple(message.plain() for message in self.messages),
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ()),
            tool_choice=chosen or "auto",
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )


class CompletionBody(Sampled):
    """POST /v1/completions: a text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False

    def to_calls(self) -> list[Call]:
        """One for each prompt. Without max_tokens it gives 16 tokens, as OpenAI does."""
        if self.echo:
            raise ApiError("echo is not done here; put the prompt before the answer yourself", param="echo")
        prompt, many = self.prompt, isinstance(self.prompt, list) and not _is_ids(self.prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        if not prompts:
            raise ApiError("prompt is an empty list; give at least one prompt", param="prompt")
        return [
            self.call(
                **({"text": one} if isinstance(one, str) else {"tokens": tuple(one)}),
                max_tokens=16 if self.max_tokens is None else self.max_tokens,
                logprobs=self.logprobs is not None,
                top_logprobs=self.logprobs or 0,
            )
            for one in prompts
        ]


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def parsed(kind: type[Body], data: bytes) -> Body:
    """The body, checked. ApiError 400 in one sentence."""
    try:
        tree = parse_json(data, surrogates=True)
    except ValueError as error:
        raise ApiError(f"the body is no JSON ({error})") from error
    if not isinstance(tree, dict):
        raise ApiError(f"the body is a {type(tree).__name__}; send a JSON object")
    for name in REFUSED:
        if tree.get(name) not in _NEUTRAL:
            raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
    return checked(kind, tree)


def checked(kind: type[Body], tree: Mapping[str, Any]) -> Body:
    """``tree`` as a body. ApiError 400 naming the field."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{where}: {first['msg']}", param=where or None) from error


__all__ = ["ChatBody", "CompletionBody", "Lenient", "Tool", "checked", "parsed"]
