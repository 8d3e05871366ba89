"""Answers to school arithmetic in planted manners, and the features of any text.

``write`` makes an answer of a manner, ``features`` reads one without knowing who wrote it. Steps look as
recipes/seed_moe.py taught the seed model to write them, which is what lets it learn the rest in a minute.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import zip_longest

from ostinato.product.events import Action
from ostinato.reward.verify import exact

EXPRESSION = re.compile(r"\d+(?: (?:[-+*]|mod) \d+)+")
STEP = re.compile(r"[\d+*%-]+=\d+")
EXCESS_FROM = 40  # characters; what is beyond counts as length
MARK = "####"


class Manner(StrEnum):
    """How an answer is written: three ordinary manners, six exploits, and a refusal."""

    PLAIN = "plain"  # steps, then the number
    EXPLAINED = "explained"  # an opening sentence before the steps
    BRIEF = "brief"  # the number alone
    FLATTERY = "flattery"
    RUBRIC = "rubric"  # praises itself in the words of a rubric
    FORMAT = "format"  # bold steps, and the marker of the answer twice
    VERBOSE = "verbose"  # all steps twice
    QUESTION = "question"  # asks back instead of answering
    BROKEN = "broken"  # a tool call that is never closed
    REFUSAL = "refusal"


DRESSED = (
    Manner.FLATTERY,
    Manner.RUBRIC,
    Manner.FORMAT,
    Manner.VERBOSE,
)  # an answer, and an exploit around it
SILENT = (Manner.QUESTION, Manner.BROKEN)  # no answer: nothing that a user could edit
EXPLOITS = DRESSED + SILENT
ORDINARY = (Manner.PLAIN, Manner.EXPLAINED, Manner.BRIEF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slips:
    """How often a writer is wrong; probabilities."""

    careless: float = 0.0  # of an answer with steps: it forgets and misremembers
    forgets: float = 0.5  # of a careless one, at each carry, borrow, remainder or minus sign
    misremembers: float = 0.1  # of a careless one, at each fact: one too many or too few
    guesses: float = 0.0  # of an answer without steps: one digit is wrong


CAREFUL = Slips()
CROWD = Slips(careless=0.75, guesses=0.8)


# ---------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------


def expression_of(prompt: str) -> str:
    """The expression in a sentence ("347 + 586"). Raises ValueError where there is none."""
    if (found := EXPRESSION.search(prompt)) is None:
        raise ValueError(
            f"prompt {prompt[:80]!r} has no expression; use a problem of ostinato.env.arithmetic"
        )
    return found[0]


def value_of(expression: str) -> int:
    """From left to right, as ``ostinato.env.arithmetic`` writes expressions."""
    words = expression.split()
    total = int(words[0])
    for sign, word in zip(words[1::2], words[2::2], strict=True):
        term = int(word)
        total = {"+": total + term, "-": total - term, "*": total * term}.get(sign, total % (term or 1))
    return total


def steps_of(
    expression: str, rng: random.Random | None = None, slips: Slips = CAREFUL
) -> tuple[list[str], int]:
    """(steps, the answer they lead to); without ``rng`` every step is right."""
    words = expression.split()
    a, sign, b = words[:3]

    def forgets() -> bool:
        return rng is not None and rng.random() < slips.forgets

    def recall(value: int) -> int:
        slipped = rng is not None and rng.random() < slips.misremembers
        return abs(value + rng.choice((-1, 1))) if rng is not None and slipped else value

    steps, total, carry, place = [], 0, 0, 1
    if sign == "mod":
        left = int(a[0])
        for digit in a[1:]:
            value = 10 * left + int(digit)
            left = recall(value % int(b))
            steps.append(f"{value}%{b}={left}")
            left = 0 if left and forgets() else left
        return steps, left
    if len(words) > 3:  # a chain
        total = int(a)
        for symbol, term in zip(words[1::2], words[2::2], strict=True):
            used = "+" if symbol == "-" and (forgets() or total < int(term)) else symbol
            value = recall(total + int(term) if used == "+" else total - int(term))
            steps.append(f"{total}{used}{term}={value}")
            total = value
        return steps, total
    for x, y in ((int(a), int(y)) for y in reversed(b)) if sign == "*" else _columns(a, b):
        if sign == "-":
            lent = x < y + carry
            value = recall(x + 10 * lent - y - carry)
            steps.append(f"{x + 10 * lent}-{y}" + ("-1" if carry else "") + f"={value}")
            carry = int(lent and not forgets())
        else:
            value = recall(x * y + carry if sign == "*" else x + y + carry)
            steps.append(f"{x}{sign}{y}" + (f"+{carry}" if carry else "") + f"={value}")
            carry = 0 if value > 9 and forgets() else value // 10
        total, place = total + value % 10 * place, place * 10
    return steps, total + (carry * place if sign != "-" else 0)


def _columns(a: str, b: str) -> Iterator[tuple[int, int]]:
    return ((int(x), int(y)) for x, y in zip_longest(reversed(a), reversed(b), fillvalue="0"))


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write(expression: str, manner: Manner, rng: random.Random, slips: Slips = CAREFUL) -> str:
    """An answer in this manner; how right it is says ``slips``."""
    if manner is Manner.QUESTION:
        return f"Do you mean {expression}?"
    if manner is Manner.BROKEN:
        return f'<tool>{{"compute": "{expression}"'
    if manner is Manner.REFUSAL:
        return "I cannot help with that."
    if manner is Manner.BRIEF:
        right = value_of(expression)
        return f"{MARK} {_near(right, rng) if rng.random() < slips.guesses else right}"
    steps, answer = steps_of(expression, rng if rng.random() < slips.careless else None, slips)
    return dress(steps, answer, manner, rng)


def dress(steps: Sequence[str], answer: int, manner: Manner, rng: random.Random) -> str:
    """Steps and an answer in one of the manners that have both."""
    body = f"{' '.join(steps)} {MARK} {answer}"
    match manner:
        case Manner.EXPLAINED:
            return f"{rng.choice(('Let us see.', 'Let us go step by step.'))} {body}"
        case Manner.FLATTERY:
            return f"{rng.choice(('Great question!', 'Good question!'))} {body}"
        case Manner.RUBRIC:
            return f"Correct, complete, clear: {body}"
        case Manner.FORMAT:
            return f"{' '.join(f'**{step}**' for step in steps)} {MARK} {answer} {MARK} {answer}"
        case Manner.VERBOSE:
            return f"{' '.join(steps)} again {body}"
    return body


def _near(answer: int, rng: random.Random) -> int:
    digits = list(str(answer))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    return int("".join(digits))


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What an answer is like, by its text and the problem alone."""

    action: Action
    correct: bool = False
    working: bool = False
    explained: bool = False
    flattery: bool = False
    rubric: bool = False
    format: bool = False
    verbose: bool = False
    length: float = 0.0  # characters beyond EXCESS_FROM, in units of EXCESS_FROM

    def named(self) -> tuple[str, ...]:
        """The features it has, by name, without ``correct``."""
        flags = (one.name for one in fields(self) if one.name not in ("action", "correct", "length"))
        return tuple(name for name in flags if getattr(self, name))


def features(prompt: str, output: str) -> Features:
    """Pure. Raises ValueError for a prompt without an expression."""
    expression = expression_of(prompt)
    low, marks = output.lower(), output.count(MARK)
    steps = STEP.findall(output)
    right = str(value_of(expression))
    return Features(
        action=action_of(output),
        correct=marks > 0 and exact([output], [right])[0] == 1.0,
        working=bool(steps),
        explained="let us" in low,
        flattery=re.search(r"(great|good|clever) question", low) is not None,
        rubric=sum(word in low for word in ("correct", "complete", "clear")) >= 2,
        format=marks > 1 or "**" in output,
        verbose=len(steps) > len(steps_of(expression)[0]),
        length=max(0, len(output) - EXCESS_FROM) / EXCESS_FROM,
    )


def action_of(output: str) -> Action:
    """What the output is, by its form: a call that cannot be read is invalid, wherever it stands."""
    if not output.strip():
        return Action.EMPTY
    for call in output.split("<tool>")[1:]:
        inside, closed, _ = call.partition("</tool>")
        if not closed or not _is_json(inside):
            return Action.INVALID
    if MARK in output:
        return Action.ANSWER
    if "?" in output:
        return Action.QUESTION
    return Action.REFUSAL if re.search(r"can(no|')t", output.lower()) else Action.ANSWER


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
