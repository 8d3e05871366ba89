"""Grammars of answers: JSON, JSON of a schema, a forced tool call.

A grammar is a text in the Lark dialect of llguidance, which is imported when the first grammar is requested
(extra ``grammar``). The tokens that it allows next are a mask over the vocabulary (``types.Constraint``),
applied before a token is drawn: log-probabilities are those of the masked distribution. An answer can end
only where its grammar can.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.apps.serve.calls import ApiError
from ostinato.render import Renderer
from ostinato.tool_calls import CLOSE, OPEN

MAX_GRAMMAR_BYTES = 64 << 10  # of a grammar
MAX_MATCHERS = 64  # built grammars in the cache
_TAGS = {"open": OPEN, "close": CLOSE}  # the tags of a call, by their rules
BLANKS = r"[ \t\n\r]{1,16}"  # between two tokens of JSON: bounded, as weak policies would write only blanks
_COMBINED = {"allOf", "anyOf", "oneOf", "if", "not", "$ref"}  # they combine with the keys beside them
_LITERAL = {"allOf", "not", "if", "then", "else", "const", "enum", "default", "examples"}
# Of the parser: about 20 ms and 40 MB at the start, and 15 ms per token. Grammars beyond them are refused.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
}
# These bound steps, not the whole construction (multiples of a large prime take minutes), so it is first
# tried in a process with resource limits, over single bytes.
TRIAL_S = 2
_TRIAL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
import llguidance as g
limits = g.LLParserLimits(**{limits}, verbose_errors=False)
matcher = g.LLMatcher(g.LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
sys.exit(matcher.get_error()[:999] or None)
"""


def make_json_grammar(format_: Mapping[str, Any], param: str) -> str:
    """The grammar of OpenAI's ``response_format``, or of ``text.format`` in its responses API; "" for text.

    Raises ApiError 400 if it has no schema.
    """
    kind = format_.get("type", "text")
    if kind == "text":
        return ""
    if kind == "json_object":
        return f"start: {_make_block({'type': 'object'})}"
    schema = (format_.get("json_schema") or format_).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(f"{param} is of type {kind!r} without a JSON schema; give one", param=param)
    return f"start: {_make_block(schema)}"


def make_call_grammar(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the grammar of a call: of any tool for "required", of the named tool for {"name": ..}; else "".

    Raises ApiError 400 if there is no such tool.
    """
    if choice in (None, "auto", "none"):
        return ""
    name = choice.get("function", choice).get("name") if isinstance(choice, Mapping) else None
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions or (name is None and choice != "required"):
        raise ApiError(
            f"tool_choice is {choice!r}; use 'auto', 'none', 'required' or a function of tools",
            param="tool_choice",
        )
    rules = [f"call{n}: {_make_call_rule(function)}" for n, function in enumerate(functions)]
    alternatives = " | ".join(f"call{n}" for n in range(len(functions)))
    tags = [f"{rule}: {json.dumps(tag)}" for rule, tag in _TAGS.items()]
    return "\n".join([f'start: open "\\n" ({alternatives}) "\\n" close', *tags, *rules])


def _make_call_rule(function: Mapping[str, Any]) -> str:
    head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    parameters = close_objects({"type": "object", **(function.get("parameters") or {})})
    return f'{json.dumps(head)} {_make_block(parameters)} "}}"'


def close_objects(schema: Any) -> Any:
    """Close the objects of a JSON schema: they take the properties that they name and no others, unless the
    schema says otherwise. vLLM reads the parameters of tools in this way, since clients refuse other
    arguments. Where several schemas describe the same object (``_COMBINED``), they stay as they are, since
    each would forbid the properties of the others."""
    if isinstance(schema, list):
        return [close_objects(member) for member in schema]
    if not isinstance(schema, dict) or (set(schema) & _COMBINED and "properties" in schema):
        return schema
    closed_schema = {key: value if key in _LITERAL else close_objects(value) for key, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict):  # its keys are the user's names, not keywords of JSON schema
        closed_schema["properties"] = {name: close_objects(value) for name, value in properties.items()}
        if not {"patternProperties", "unevaluatedProperties"} & set(schema):
            closed_schema.setdefault("additionalProperties", False)
    return closed_schema


def _make_block(schema: Mapping[str, Any]) -> str:
    options = {"whitespace_pattern": BLANKS, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class Guides:
    """Builds grammars and keeps them, to guide answers of a model with ``vocab_size`` logits."""

    def __init__(self, renderer: Renderer, vocab_size: int) -> None:
        self._renderer, self._vocab_size, self._tokenizer = renderer, vocab_size, None
        self._matchers: dict[str, Any] = {}  # matchers by grammar
        self._build_lock = asyncio.Lock()

    async def make_guides(self, grammar: str, n: int) -> list[Guide]:
        """Return ``n`` guides, one per answer. Raises ApiError 400 without the library, and for a grammar
        that is invalid, too large or takes too long to build."""
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(
                "response_format and a forced tool_choice need a grammar; install it: "
                'pip install "ostinato[grammar]"',
                code="grammar_missing",
            )
        stops = self._renderer.stop_tokens
        if not stops:
            raise ApiError("the model has no stop token, so nothing could end an answer of a grammar")
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise ApiError(
                f"the schema makes {len(grammar)} bytes; this server takes {MAX_GRAMMAR_BYTES}, shorten it"
            )
        async with self._build_lock:
            if grammar not in self._matchers:
                await _try_build(grammar)
                self._matchers[grammar] = await asyncio.to_thread(self._build, grammar, stops[0])
            matcher = self._matchers[grammar]
            while len(self._matchers) > MAX_MATCHERS:
                del self._matchers[next(iter(self._matchers))]
        return [Guide(matcher.deep_copy(), self._vocab_size, stops) for _ in range(n)]

    def _build(self, grammar: str, eos: int) -> Any:
        """Build the matcher of a grammar. Raises ApiError 400 where that fails."""
        import llguidance

        tokenizer = self._renderer.tokenizer
        if self._tokenizer is None:
            text = _rename_spelled_tokens(tokenizer.to_str())
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        tagged_grammar = _insert_tag_tokens(grammar, tokenizer)
        matcher = llguidance.LLMatcher(self._tokenizer, tagged_grammar, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()
        if probe.is_error():
            raise _make_refusal(probe.get_error())
        return matcher


def _insert_tag_tokens(grammar: str, tokenizer: Any) -> str:
    """Write the tags of a call as tokens in the grammar, where they are added tokens (Qwen): the model has
    learned no other spelling."""
    ids = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
    for rule, tag in _TAGS.items():
        if tag in ids:
            grammar = grammar.replace(f"\n{rule}: {json.dumps(tag)}\n", f"\n{rule}: <[{ids[tag]}]>\n")
    return grammar


def _rename_spelled_tokens(tokenizer: str) -> str:
    """Rename added tokens like <think> in a tokenizer's JSON, so that no text spells them. llguidance
    tokenises the text that a schema forces and would get that token, which it does not accept in place of the
    text."""
    tree = json.loads(tokenizer)
    names = {}
    for token in tree["added_tokens"]:
        if token["special"] or re.fullmatch("<.*>", token["content"]):
            names[token["content"]] = f"<\u2402{token['id']}>"
            token |= {"content": names[token["content"]], "special": True}
    vocab = tree["model"].get("vocab")
    if isinstance(vocab, dict):
        tree["model"]["vocab"] = {names.get(text, text): id_ for text, id_ in vocab.items()}
    elif isinstance(vocab, list):  # pairs of text and score
        tree["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    return json.dumps(tree)


async def _try_build(grammar: str) -> None:
    """Build a grammar in a process that can be killed. Raises ApiError 400 if that fails or takes ``TRIAL_S``
    s of CPU time."""
    program = _TRIAL.format(seconds=TRIAL_S, limits=LIMITS)
    trial = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", program), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        _, error = await trial.communicate(grammar.encode())
    finally:
        if trial.returncode is None:
            trial.kill()
    if trial.returncode:
        was_killed = trial.returncode < 0
        raise _make_refusal(
            f"it takes over {TRIAL_S} s or 1 GiB to build" if was_killed else error.decode(errors="replace")
        )


def _make_refusal(error: str) -> ApiError:
    return ApiError(f"the schema cannot be enforced: {_cut_sentence(error)}", code="grammar_refused")


class Guide:
    """Computes the tokens that must not come next (``types.Constraint``) in an answer that grows from call to
    call. ``error``: why all tokens are banned, or ""."""

    def __init__(self, matcher: Any, vocab_size: int, stops: Sequence[int]) -> None:
        self.error = ""
        self._matcher, self._vocab_size, self._stops, self._num_consumed = matcher, vocab_size, list(stops), 0

    def __call__(self, answer: np.ndarray) -> np.ndarray:
        """Return the mask of banned tokens [vocabulary] bool."""
        matcher = self._matcher
        matcher.consume_tokens(answer[self._num_consumed :].tolist())
        self._num_consumed = len(answer)
        is_banned = np.ones(self._vocab_size, bool)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            is_banned = ~np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        if matcher.is_error():
            self.error = f"the grammar is too much at this place: {_cut_sentence(matcher.get_error())}"
            return np.ones(self._vocab_size, bool)
        is_banned[self._stops] = not matcher.is_accepting()
        return is_banned


def _cut_sentence(error: str) -> str:
    return error.strip().partition("\n")[0][:300]
