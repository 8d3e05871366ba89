"""The net before a run: what rewards give to the answers that the rows have themselves.

A reward that compares answers gives them full marks; where it does not, it would pay for other answers or for
none. Which functions compare is known of the built-in ones alone: one of a user's own may judge the form, so
it is never refused for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.reward.answers import marked_answer
from ostinato.reward.worker import Fault, Verdict
from ostinato.types import Prompt

ROWS = 8  # that are tried, of each task and set
COMPARING = frozenset(
    {"exact", "numeric", "math_verify", "gym_score", "code_tests"}
)  # built-in; full marks are 1
OTHERS = frozenset(
    {"answer_tags", "regex", "json_schema", "length", "env", "none"}
)  # built-in, and judge no answer by the row's
FULL = 1 - 1e-6
SOLUTIONS = ("code", "canonical_solution")  # columns of MBPP and HumanEval with code that passes the tests
SHOWN = 80  # characters of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVerdict:
    """What a function gives to a row's own answer: ``value`` None where it raised or has no opinion."""

    row: str  # "row 3 of rows.jsonl"
    answer: str
    value: float | None
    fault: str = ""
    detail: str = ""

    @classmethod
    def of(cls, prompt: Prompt, answer: str, verdict: Verdict) -> OwnVerdict:
        value, fault, detail = verdict
        return cls(row=prompt.where, answer=answer, value=value, fault=fault, detail=detail)


def own_answer(prompt: Prompt, function: str = "") -> str | None:
    """The row's own answer as a completion; None where there is none that is a text or a number.

    It is what a policy is expected to write: for ``exact`` the final answer and not the solution that has it,
    which nobody writes to the letter; for ``math_verify``, which reads plain text as a number, a bare answer
    in a box; for ``code_tests`` the code that comes with the tests.
    """
    names = (*SOLUTIONS, "answer") if function == "code_tests" else ("answer",)
    answer = next((prompt.columns[name] for name in names if prompt.columns.get(name) is not None), None)
    if not isinstance(answer, str | int | float):
        return None
    text = str(answer)
    marked = marked_answer(text)
    if function == "exact" and marked is not None:
        return marked
    return rf"\boxed{{{text}}}" if function == "math_verify" and marked is None and "$" not in text else text


def spread(prompts: Sequence[Prompt], count: int = ROWS) -> list[Prompt]:
    """At most ``count`` different prompts that have an own answer, from the first to the last."""
    having = [
        prompt
        for prompt in prompts
        if any(own_answer(prompt, function) is not None for function in ("", "code_tests"))
    ]
    last, steps = len(having) - 1, max(1, count - 1)
    places = dict.fromkeys(round(k * last / steps) for k in range(count)) if having else {}
    return [having[place] for place in places]


def warnings_of(verdicts: Iterable[tuple[str, str, Sequence[OwnVerdict]]]) -> list[str]:
    """A warning for each function that gives less than it should: of (function, its name, its verdicts).

    Raises ValueError for a built-in function that gives 0 to all own answers, or cannot read one of them.
    """
    return [found for function, name, given in verdicts if (found := _warning(function, name, given))]


def _warning(function: str, name: str, given: Sequence[OwnVerdict]) -> str:
    compares = function in COMPARING
    unread = [one for one in given if one.fault == Fault.RAISED]
    if compares and unread:
        raise ValueError(f"{unread[0].row}: reward {name} cannot judge by this answer: {unread[0].detail}")
    valued = [(one, one.value) for one in given if one.value is not None]
    low = _low([value for _, value in valued], compares)
    if not any(low):
        return ""
    rows = [one for one, is_low in zip(valued, low, strict=True) if is_low]
    first, value = rows[0]
    lines = [f"  {one.row}: {amount:g} for {one.answer[:SHOWN]!r}" for one, amount in rows]
    what = f"the own answer of {first.row} ({len(rows)} of {len(valued)} rows tried)"
    if compares and not any(value for _, value in valued):
        refused = ValueError(
            f"reward {name} gives 0 to {what}, so it would pay for no answer that the rows call right; "
            "choose another in reward.functions, or the answer's column in task.params.answer_column"
        )
        refused.add_note("\n".join(lines))
        raise refused
    why = "" if compares else "; that is as it should be where it judges the form of an answer only"
    return "\n".join([f"reward {name} gives {value:g} to {what}, where full marks are 1{why}", *lines])


def _low(values: Sequence[float], compares: bool) -> list[bool]:
    """Which values are less than they should be. The scale of a user's function is not known: it is thought
    to judge answers where it pays for some of them, or gives to all the same that is no payment."""
    if compares:
        return [value < FULL for value in values]
    unpaid = [value <= 0 for value in values]
    varies = len(set(values)) > 1
    return [False] * len(values) if all(unpaid) and varies else unpaid
