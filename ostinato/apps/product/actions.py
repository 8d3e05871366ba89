"""Classify an answer by its text and its calls alone. Every answer has exactly one ``Action``.

A published rule can be gamed, so ``Action`` only decides which reward applies; it is no reward itself.
Refusals and questions are found in English; in another language such an answer counts as an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.apps.product.events import Action
from ostinato.control_tokens import strip_thinking

CALL_MARKS = ("<tool_call>", "</tool_call>", "<function=", "[TOOL_CALLS]")
_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_SENTENCE = re.compile(r"[^.!?…\n]+[.!?…]*")
_REFUSAL = re.compile(
    r"^\W*(?:(?:i'?m|i am) (?:very |so |really )?sorry\b|sorry\b|unfortunately\b|apologies\b"
    r"|as an ai\b[^.]*?)?\W*(?:but )?(?:i (?:can't|cannot|can not|won't|will not|must decline"
    r"|am unable|am not able)"
    r"|i'm (?:unable|not able)|(?:this|that) is (?:something )?i (?:can't|cannot))\b",
    re.IGNORECASE,
)
_QUOTE = "\N{RIGHT SINGLE QUOTATION MARK}"


def classify_answer(
    text: str, calls: Sequence[tuple[str, str]] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> Action:
    """Return the action of an answer: ``text`` as decoded, without the ``calls`` that were read from it.

    calls: (name, arguments as JSON text). tools: as a request has them, with name and parameters. A call that
    could not be read is still in the text, behind its mark. Text inside of a thought does not count.
    """
    if any(not _matches_tool(name, arguments, tools) for name, arguments in calls):
        return Action.INVALID
    reply = strip_thinking(text).strip()  # empty where the thought has no end
    if reply.startswith(CALL_MARKS) or (tools and any(mark in reply for mark in CALL_MARKS)):
        return Action.INVALID
    if calls:
        return Action.ANSWER
    if not reply:
        return Action.EMPTY
    if _REFUSAL.match(reply.replace(_QUOTE, "'")):
        return Action.REFUSAL
    return Action.QUESTION if _is_question(reply) else Action.ANSWER


def _matches_tool(name: str, arguments: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool has this name and takes these arguments, a JSON object. They need every required field.
    An unknown field is refused if the schema lists properties and allows no others."""
    functions = {
        function.get("name"): function for function in (tool.get("function", tool) for tool in tools)
    }
    if name not in functions:
        return False
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    schema = functions[name].get("parameters") or {}
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(values, dict) or not all(field in values for field in required):
        return False
    return (
        not properties
        or bool(schema.get("additionalProperties", False))
        or all(key in properties for key in values)
    )


def _is_question(text: str) -> bool:
    """Whether the text ends with a question, at least half of its sentences are questions, and it has no
    code."""
    if _CODE.search(text):
        return False
    sentences = [sentence for match in _SENTENCE.findall(text) if (sentence := match.strip())]
    questions = [sentence.endswith("?") for sentence in sentences]
    return bool(questions) and questions[-1] and 2 * sum(questions) >= len(questions)
