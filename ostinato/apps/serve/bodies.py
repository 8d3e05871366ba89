"""Validated request bodies: OpenAI's chat and completions with vLLM's additions, and common parts.

A field that a body does not have is refused by name, as it could change the answer, unless its value has no
effect or the field is about accounts and billing (``harmless``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ostinato.apps.serve.calls import ApiError, Call, read_json
from ostinato.apps.serve.grammar import make_call_grammar, make_json_grammar

_EMPTY: tuple[Any, ...] = (None, "", [], {})  # no field has an effect with these values
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # these fields have no effect with these values
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output", "background"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning"), (True,)),
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
ACCOUNT_FIELDS = frozenset(
    {"user", "safety_identifier", "metadata", "store", "service_tier", "priority", "request_id"}
    | {"prompt_cache_key", "prompt_cache_retention", "cache_salt"}
)
Body = TypeVar("Body", bound=BaseModel)
MAX_MESSAGES = 10_000  # of a chat, in any dialect
MAX_TOOLS = 512  # of a request, in any dialect; OpenAI takes 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # of a token
StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class LenientBody(BaseModel):
    """A part of a request whose other fields are passed on, or have no effect."""

    model_config = ConfigDict(extra="allow")


class StrictBody(LenientBody):
    """A part of a request whose other fields are refused, unless they are ``harmless``."""

    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        """Drop fields that are null, since clients send all fields that they know."""
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _refuse_unknown(self) -> StrictBody:
        for name, value in (self.model_extra or {}).items():
            if name in self.harmless or value in (*_EMPTY, *_WITHOUT_EFFECT.get(name, ())):
                continue
            raise PydanticCustomError("unsupported", "leave it out", {"name": name})
        return self


class StreamOptions(StrictBody):
    """``stream_options``."""

    harmless = frozenset({"include_obfuscation"})
    include_usage: bool = False


class Format(LenientBody):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class SamplingBody(StrictBody):
    """The fields that chat and completions share."""

    harmless = ACCOUNT_FIELDS
    model: str = ""
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False  # in log-probabilities: "token_id:42"
    return_routed_experts: bool | None = False
    response_format: Format | None = None

    def make_call(self, **prompt: Any) -> Call:
        """Return the call; ``prompt``: its prompt, and fields that only one dialect has."""
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
            **{"grammar": make_json_grammar(format_, "response_format"), **prompt},
        )


class Function(LenientBody):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(LenientBody):
    type: Literal["function"] = "function"
    function: Function


class Part(StrictBody):
    """A part of a message's content."""

    harmless = frozenset({"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"})
    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str = ""
    refusal: str = ""


def join_text(content: str | list[Part] | None) -> str:
    """Return the text of a message's content."""
    if isinstance(content, list):
        return "".join(part.text or part.refusal for part in content)
    return content or ""


class CalledFunction(LenientBody):
    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledTool(LenientBody):
    """A tool call in a message that the request gives as the assistant's."""

    function: CalledFunction


class ChatMessage(StrictBody):
    harmless = frozenset({"annotations", "provider_specific_fields", "id", "status", "type"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[CalledTool] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name of reasoning_content in vLLM

    def to_template(self) -> dict[str, Any]:
        """Return the message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        optional_fields = {
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        extra_fields = {name: value for name, value in optional_fields.items() if value}
        return {"role": role, "content": join_text(self.content), **extra_fields}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = 0
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None  # from here on vLLM's fields
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] | None = False  # the template writes them

    def to_call(self) -> Call:
        options = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        template_options = {name: value for name, value in options.items() if value}
        tools = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
        tool_grammar = make_call_grammar(self.tool_choice, tools)
        return self.make_call(
            messages=tuple(message.to_template() for message in self.messages),
            tools=tools,
            tool_choice="none" if self.tool_choice == "none" else "auto",
            parallel_calls=self.parallel_tool_calls is not False,
            template_kwargs={**template_options, **(self.chat_template_kwargs or {})},
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final=self.continue_final_message,
            **({"grammar": tool_grammar} if tool_grammar else {}),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )


class CompletionBody(SamplingBody):
    """POST /v1/completions: a text, token ids, or a list of either."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None  # vLLM's
    echo: bool | None = False  # the prompt comes before the answer, with its log-probabilities
    add_special_tokens: Literal[True] | None = True

    @property
    def num_answers(self) -> int:
        """The number of sequences that the body needs."""
        is_list = isinstance(self.prompt, list) and not _is_ids(self.prompt)
        return self.n * (len(self.prompt) if is_list else 1)

    def to_calls(self) -> list[Call]:
        """Return a call for each prompt. The default of max_tokens is 16, as at OpenAI."""
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ApiError(
                "echo and prompt_logprobs come with a whole answer; leave stream out", param="stream"
            )
        top_counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        prompt, is_list = self.prompt, isinstance(self.prompt, list) and not _is_ids(self.prompt)
        prompts: list[Any] = list(prompt) if is_list else [prompt]
        if not prompts:
            raise ApiError("prompt is an empty list; give at least one prompt", param="prompt")
        return [
            self.make_call(
                **({"text": prompt} if isinstance(prompt, str) else {"tokens": tuple(prompt)}),
                max_tokens=16 if self.max_tokens is None else self.max_tokens,
                logprobs=self.logprobs is not None,
                top_logprobs=self.logprobs or 0,
                prompt_logprobs=max((top for top in top_counts if top is not None), default=None),
            )
            for prompt in prompts
        ]


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Return the validated body. Raises ApiError 400 for an invalid body."""
    tree = read_json(data, surrogates=True)
    if not isinstance(tree, dict):
        raise ApiError(f"the body is a {type(tree).__name__}; send a JSON object")
    return check_body(kind, tree)


def check_body(kind: type[Body], tree: Mapping[str, Any], *within: str) -> Body:
    """Validate ``tree``, a part ``within`` a body. Raises ApiError 400, which names an invalid field."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        deepest = max(errors, key=lambda item: len(item["loc"]))  # of a union's errors, that of the best fit
        names = [*within, *(str(name) for name in deepest["loc"] if not (name == "str" or "[" in str(name)))]
        if deepest["type"] == "unsupported":
            field_name = ".".join([*names, deepest.get("ctx", {})["name"]])
            raise ApiError(
                f"{field_name} is not supported by this server; leave it out", param=field_name
            ) from error
        field_name = ".".join(names)
        raise ApiError(f"{field_name}: {deepest['msg']}", param=field_name or None) from error
