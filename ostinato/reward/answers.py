"""What a completion answers: the text after its thoughts, a marked answer, the last line, a number.

Standard library only: every worker process loads this file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

MAX_DIGITS = 300  # of a number; longer ones do not count as answers: parsing takes quadratic time

_NUMBER = re.compile(
    r"""(?P<minus>(?<![\w)}\]])-)?(?:\\?\$|[€£¥])?
        (?: (?:(?P<whole>[0-9]{1,300})\ ?)?\\[dt]?frac\{\s*(?P<over>-?[0-9]{1,300})\s*\}
              \{\s*(?P<under>[0-9]{1,300})\s*\}
          | (?P<units>[0-9]{1,300})\ (?P<part>[0-9]{1,300})/(?P<parts>[0-9]{1,300})(?![0-9./])
          | (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)
            (?: [eE](?P<exponent>[+-]?[0-9]{1,3})(?!\w) | \s?/\s?(?P<denominator>[0-9]+(?!\.[0-9])) )?
        ) (?P<percent>\s?\\?%)?""",
    re.VERBOSE,
)
_OPERATOR = r"(?:[-+*/\u00d7\u00b7\u00f7\u2013]|\\(?:times|cdot|div|pm)(?![a-z]))"
_MORE_BEFORE = re.compile(  # a number behind this is a part of something: a power, a date, a pair, a sum
    rf"""(?: [A-Za-z_0-9√^] | [\^_]\{{ | \}}\{{ | [0-9][-\u2013:/.]
           | \\(?!boxed|fbox|text|math|bold|bm|underline)[a-z]+ (?:\[[^][]*\])? \{{
           | [(\[{{][^][(){{}}\n]*,\s*
           | (?:[0-9)}}\]]|(?<![A-Za-z])[A-Za-z])[ ]*{_OPERATOR}[ ]*
           | (?:\s[<>]=?|[≤≥≠]|\\(?:leq?|geq?|lt|gt|neq?))\s*
        )\Z""",
    re.VERBOSE,
)
_MORE_BEHIND = re.compile(  # and so is one in front of this; units are not
    r"""\s?[πi√](?![a-z]) | \s*\^(?!\s*\{?\s*\\circ) | _ | (?![mshgdlLCF]\b)[A-Za-z]\b
      | \s*\\(?:pi|sqrt|[dt]?frac|left|leq?|geq?|lt|gt|in)(?![a-z])
      | [ ]?[+*/\u00d7\u00b7\u00f7][ ]?[A-Za-z\\](?![A-Za-z])""",
    re.VERBOSE,
)
_LOOK_BACK = 80  # characters before a number that may make it a part of something
_OF_NUMBERS = frozenset("\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT PLUS SIGN}\N{SUPERSCRIPT LATIN SMALL LETTER N}")


def text_of(completion: str | Sequence[dict[str, str]]) -> str:
    """The text that is graded: the string itself, or the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else ""


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``; empty when thinking was opened and never closed."""
    _, closed, rest = text.rpartition("</think>")
    return "" if "<think>" in rest else rest if closed else text


def answer_texts(completions: Sequence[Any], in_thought: Sequence[bool] | None = None) -> list[str]:
    """What each completion says after thinking. ``in_thought``: which of them end inside a thought, also one
    that the prompt had opened; these say nothing."""
    inside = in_thought or [False] * len(completions)
    pairs = zip(completions, inside, strict=True)
    return ["" if unfinished else after_thinking(text_of(one)) for one, unfinished in pairs]


def marked_answer(text: str) -> str | None:
    r"""The last ``<answer>..</answer>``, else the last ``\boxed{..}``, else the rest of a ``####`` line."""
    opened, _, tail = text.rpartition("</answer>")
    if tail != text and "<answer>" in opened:
        return opened.rpartition("<answer>")[2].strip()
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip()
    _, marker, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].strip() if marker else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    return next(iter(boxed(text[start:])), None) if start >= 0 else None


def boxed(text: str) -> list[str]:
    r"""What stands in each ``\boxed{..}``, in order, up to one that is never closed."""
    found, start = [], text.find("\\boxed{")
    while start >= 0 and (end := _closing(text, start + len("\\boxed"))) is not None:
        found.append(text[start + len("\\boxed{") : end])
        start = text.find("\\boxed{", end)
    return found


def _closing(text: str, opening: int) -> int | None:
    """Where the brace that opens at ``opening`` is closed."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return None


def final_answer(text: str) -> str:
    """The marked answer after thinking, else the last line that is not blank."""
    text = after_thinking(text)
    marked = marked_answer(text)
    return marked if marked is not None else text.strip().rpartition("\n")[2].strip()


def whole_number(text: str) -> tuple[Fraction, ...]:
    r"""The readings of a text that is one number and nothing else; none where it is more, or no number.

    Read as in ``last_number``; may stand in ``$..$`` or ``\(..\)`` and end in a full stop.
    """
    for spacing in ("\\!", "\\,", "\\ "):
        text = text.replace(spacing, "")
    text = _ascii(text).strip().removesuffix(".")
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("$", ""), ("\\$", "")):
        if text.startswith(opening) and text.endswith(closing):
            text = text.removeprefix(opening).removesuffix(closing).strip()
    found = _NUMBER.fullmatch(text.removeprefix("+"))
    return () if found is None or len(text) > MAX_DIGITS else _readings(found)


def last_number(text: str) -> tuple[Fraction, ...]:
    r"""The readings of the last number of a text: none, one, or two for a percentage (50 and 1/2).

    Reads ``-3``, ``1,234.5``, ``.5``, ``2e-3``, ``3/4``, ``3 1/2``, ``\frac{3}{4}``, ``$20``, ``50%``.
    Digits are 0 to 9; a number next to other numerals (``5²``, ``1½``, ``10⁻³``, ``5千``) is not read,
    nor one that is a part of something: ``10^6``, ``2k + 2``, ``3\pi``, ``12:30``, ``0x1F``, ``(2, 3)``.
    """
    found = last_number_match(text)
    return () if found is None else _readings(found)


def _ascii(text: str) -> str:
    """With the minus and the comma in thousands that numbers are read with."""
    return text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")


def _readings(found: re.Match[str]) -> tuple[Fraction, ...]:
    over, under = found["over"] or found["part"], found["under"] or found["parts"]
    if found["digits"] is not None:
        over, under = found["digits"].replace(",", ""), found["denominator"] or "1"
    if int(under) == 0:
        return ()
    value = Fraction(over) / int(under) * Fraction(10) ** int(found["exponent"] or 0)
    value += int(found["whole"] or found["units"] or 0)
    value = -value if found["minus"] else value
    return (value, value / 100) if found["percent"] else (value,)


def last_number_match(text: str) -> re.Match[str] | None:
    """The last number of a text, where it stands by itself."""
    text = _ascii(text)
    found = deque(_NUMBER.finditer(text), maxlen=1)
    if not found or len(found[0].group()) > MAX_DIGITS:
        return None
    start, end = found[0].span()
    beside = text[max(0, start - 1) : start] + text[end : end + 1]
    if any(one in _OF_NUMBERS or (one.isnumeric() and not one.isascii()) for one in beside):
        return None
    before = text[max(0, start - _LOOK_BACK) : start]
    is_part = _MORE_BEFORE.search(before) or _MORE_BEHIND.match(text, end)
    return None if is_part else found[0]
