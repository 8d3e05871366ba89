"""A check before a run: the rewards of the answers that the rows have themselves.

A reward that compares answers should give them full marks. Where it does not, it would pay for other answers
or for none. It is known only of the built-in functions whether they compare. A user's function may judge the
form of an answer, so it is never refused for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.reward.answers import extract_marked_answer
from ostinato.reward.worker import Fault
from ostinato.types import Prompt

ROWS = 8  # tried rows of each task and set
COMPARING = frozenset(
    {"exact", "numeric", "math_verify", "gym_score", "code_tests"}
)  # built-in functions whose full marks are 1
OTHERS = frozenset(
    {"answer_tags", "regex", "json_schema", "length", "env", "none"}
)  # built-in functions that do not use the row's answer
FULL = 1 - 1e-6
SOLUTIONS = ("code", "canonical_solution")  # columns of MBPP and HumanEval with code that passes the tests
SHOWN = 80  # characters of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVerdict:
    """The reward of a row's own answer. ``value`` is None if the function raised or has no opinion."""

    row: str  # "row 3 of rows.jsonl"
    answer: str
    value: float | None
    fault: str = ""
    detail: str = ""
    is_chat: bool = False  # the function was given the answer as a list of messages


def find_own_answer(prompt: Prompt, function: str = "") -> str | None:
    """Return the row's own answer as a completion; None if it has none that is a text or a number.

    The completion is what a policy is expected to write. For ``exact`` it is the final answer, since no
    policy would repeat the solution around it word for word; for ``math_verify``, which reads plain text as a
    number, a bare answer in a box; for ``code_tests`` the code that comes with the tests.
    """
    names = (*SOLUTIONS, "answer") if function == "code_tests" else ("answer",)
    answer = next((prompt.columns[name] for name in names if prompt.columns.get(name) is not None), None)
    if not isinstance(answer, str | int | float):
        return None
    text = str(answer)
    mark = extract_marked_answer(text)
    if function == "exact" and mark is not None:
        return mark
    return rf"\boxed{{{text}}}" if function == "math_verify" and mark is None and "$" not in text else text


def spread_prompts(prompts: Sequence[Prompt], count: int = ROWS) -> list[Prompt]:
    """Choose at most ``count`` different prompts that have an own answer, evenly from the first to the
    last."""
    candidates = [
        prompt
        for prompt in prompts
        if any(find_own_answer(prompt, function) is not None for function in ("", "code_tests"))
    ]
    last_index, steps = len(candidates) - 1, max(1, count - 1)
    indices = (
        dict.fromkeys(round(number * last_index / steps) for number in range(count)) if candidates else {}
    )
    return [candidates[index] for index in indices]


def make_warnings(verdicts: Iterable[tuple[str, str, Sequence[OwnVerdict]]]) -> list[str]:
    """Return a warning for each function that gives too little. ``verdicts``: (function, its name, its
    verdicts).

    Raises ValueError for a built-in function that gives 0 to all own answers, or cannot read one of them.
    """
    return [
        warning
        for function, name, own_verdicts in verdicts
        if (warning := _make_warning(function, name, own_verdicts))
    ]


def _make_warning(function: str, name: str, own_verdicts: Sequence[OwnVerdict]) -> str:
    """Return the warning on a function's values, or "". Raises ValueError as ``make_warnings`` does."""
    is_comparing = function in COMPARING
    failures = [verdict for verdict in own_verdicts if verdict.fault == Fault.RAISED]
    if is_comparing and failures:
        raise ValueError(
            f"{failures[0].row}: reward {name} cannot judge by this answer: {failures[0].detail}"
        )
    pairs = [(verdict, verdict.value) for verdict in own_verdicts if verdict.value is not None]
    low_flags = _find_low([value for _, value in pairs], is_comparing)
    if not any(low_flags):
        return ""
    low_pairs = [verdict for verdict, is_low in zip(pairs, low_flags, strict=True) if is_low]
    first_verdict, value = low_pairs[0]
    lines = [f"  {verdict.row}: {amount:g} for {verdict.answer[:SHOWN]!r}" for verdict, amount in low_pairs]
    subject = f"the own answer of {first_verdict.row} ({len(low_pairs)} of {len(pairs)} rows tried)"
    if is_comparing and not any(value for _, value in pairs):
        error = ValueError(
            f"reward {name} gives 0 to {subject}, so it would pay for no answer that the rows call right; "
            "choose another in reward.functions, or the answer's column in task.params.answer_column"
        )
        error.add_note("\n".join(lines))
        raise error
    hint = "" if is_comparing else "; that is as it should be where it judges the form of an answer only"
    if hint and first_verdict.is_chat:
        hint += ". A completion is a list of messages here: its text is completion[-1]['content']"
    return "\n".join([f"reward {name} gives {value:g} to {subject}, where full marks are 1{hint}", *lines])


def _find_low(values: Sequence[float], is_comparing: bool) -> list[bool]:
    """Return for each value whether it is too low. The scale of a user's function is not known: it is assumed
    to judge answers if some values are above 0, or if all have the same value of at most 0."""
    if is_comparing:
        return [value < FULL for value in values]
    is_unpaid = [value <= 0 for value in values]
    has_variation = len(set(values)) > 1
    return [False] * len(values) if all(is_unpaid) and has_variation else is_unpaid
