"""Validated request bodies: OpenAI's chat and completions with vLLM's additions, and what all dialects share.

An unsupported field that would change the answer is refused by name; any other unknown field is ignored, as
clients send many that are about accounts and billing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ostinato.serve.calls import ApiError, Call, json_of
from ostinato.serve.grammar import call_grammar, json_grammar

REFUSED = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "best_of", "suffix"),
    *("functions", "function_call", "audio", "prediction", "use_beam_search", "length_penalty", "bad_words"),
    *("prompt_logprobs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    "structured_outputs",
)
_NEUTRAL: tuple[Any, ...] = (None, 0, False, "", [], {})  # values with which a refused field has no effect
_ONE = ("repetition_penalty", "length_penalty", "best_of")  # for these 1 has no effect, too
Body = TypeVar("Body", bound=BaseModel)
MOST_MESSAGES = 10_000  # of a chat, in any dialect
Id = Annotated[int, Field(ge=0, lt=2**31)]  # of a token
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="allow")


class Options(Lenient):
    """``stream_options``."""

    include_usage: bool = False


class Format(Lenient):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class Sampled(Lenient):
    """What chat and completions share."""

    model: str = ""
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | Stops | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: Options | None = None
    return_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    response_format: Format | None = None

    def call(self, **prompt: Any) -> Call:
        """The call; ``prompt``: its prompt, and fields that only one dialect has."""
        format_ = {} if self.response_format is None else self.response_format.model_dump()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Call(
            model=self.model,
            n=self.n,
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k and max(self.top_k, 0),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop=tuple(stop for stop in stops if stop),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            **{"grammar": json_grammar(format_, "response_format"), **prompt},
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


class Called(Lenient):
    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledTool(Lenient):
    """A call in a message that the assistant has written, it says."""

    function: Called


class ChatMessage(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[CalledTool] | None = None

    def plain(self) -> dict[str, Any]:
        """The message in the format of chat templates."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        role = "system" if self.role == "developer" else self.role
        calls = [call.model_dump() for call in self.tool_calls or ()]
        return {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = 0
    tools: list[Tool] | None = None
    tool_choice: Any = None

    def to_call(self) -> Call:
        tools = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
        forced = call_grammar(self.tool_choice, tools)
        return self.call(
            messages=tuple(message.plain() for message in self.messages),
            tools=tools,
            tool_choice="none" if self.tool_choice == "none" else "auto",
            **({"grammar": forced} if forced else {}),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )


class CompletionBody(Sampled):
    """POST /v1/completions: a text, token ids, or a list of either."""

    prompt: str | list[Id] | list[str] | list[list[Id]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None  # vLLM's
    echo: bool | None = False

    @property
    def num_answers(self) -> int:
        """Sequences that it needs."""
        many = isinstance(self.prompt, list) and not _is_ids(self.prompt)
        return self.n * (len(self.prompt) if many else 1)

    def to_calls(self) -> list[Call]:
        """One call for each prompt. The default of max_tokens is 16, as at OpenAI."""
        if self.echo:
            raise ApiError("echo is not done here; put the prompt before the answer yourself", param="echo")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs come with a whole answer; leave stream out", param="stream")
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
                prompt_logprobs=self.prompt_logprobs,
            )
            for one in prompts
        ]


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def parsed(kind: type[Body], data: bytes) -> Body:
    """The validated body. Raises ApiError 400 for an invalid one."""
    tree = json_of(data, surrogates=True)
    if not isinstance(tree, dict):
        raise ApiError(f"the body is a {type(tree).__name__}; send a JSON object")
    for name in REFUSED:
        if name in kind.model_fields or (name in _ONE and tree.get(name) == 1):
            continue
        if tree.get(name) not in _NEUTRAL:
            raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
    return checked(kind, tree)


def checked(kind: type[Body], tree: Mapping[str, Any]) -> Body:
    """``tree`` as a body. Raises ApiError 400, which names the first invalid field."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{where}: {first['msg']}", param=where or None) from error
