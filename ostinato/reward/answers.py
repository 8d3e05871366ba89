"""What a completion answers: the text after its thoughts, a marked answer, the last line, a number.

The standard library and what imports no more: every worker process loads this file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ostinato.control_tokens import after_thinking

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
_SCALE = r"(?:hundred|thousand|million|billion|trillion|dozen)(?:s|ths?)?(?![a-z])"
_CURRENCY_CODE = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Z]{1,3}(?=\\?\$[0-9.])|(?:USD|EUR|GBP|JPY|CNY|INR|AUD|CAD|CHF)\s?(?=[0-9.]))"
)
_MORE_BEFORE = re.compile(  # a number behind this is a part of something: a power, a date, a pair, a sum
    rf"""(?: [A-Za-z0-9√^] | [A-Za-z0-9)}}\]]_{{1,3}} | [\^_]\{{ | \}}\{{ | [0-9](?:[-\u2013:/.]|[ ]:[ ])
           | \\(?!boxed|fbox|text|math|bold|bm|underline)[a-z]+ (?:\[[^][]*\])? \{{
           | (?:(?<![A-Za-z])(?:sqrt|log|ln|exp|sin|cos|tan)|[√^])[ ]?(?:\\left)?\(?[ ]?
           | [(\[{{][^][(){{}}\n]*,\s*
           | (?:[0-9)}}\]π]|(?<![A-Za-z])(?:[A-Za-z]|pi))[ ]*{_OPERATOR}[ ]* | [0-9)}}\]]\*\*
           | (?:\s[<>]=?|[A-Za-z0-9)]<=?|(?<![A-Za-z</])[A-Za-z]>=?|[≤≥≠±∓]
              |\\(?:leq?|geq?|lt|gt|neq?|pm|mp))\s*
        )\Z""",
    re.VERBOSE,
)
_LABEL = re.compile(  # behind this a dash or a colon is punctuation
    r"""(?: (?i:step|part|case|day|question|problem|exercise|option|answer)[ ][0-9]{1,4}
          | [A-Za-z]{2}[ ]\([A-Za-z ]{1,20}\) )[ ][-\u2013:][ ]\Z""",
    re.VERBOSE,
)
_MORE_BEHIND = re.compile(  # and so is one in front of this; units are not
    rf"""\s?[πi√](?![a-z]|\.[a-z]) | \s*\^(?!\s*\{{?\s*\\circ) | _(?=[A-Za-z0-9{{])
      | (?![mshgdlLCFVNWJ]\b)[A-Za-z]\b | [ ]?{_SCALE}
      | \s*\\(?:text|mathrm|mbox)\{{\s*{_SCALE} | (?:[ ]?[-+*/\u00d7\u00b7\u00f7][ ]?)?(?:pi|sqrt)\b
      | \s*\\(?:pi|sqrt|[dt]?frac|left|leq?|geq?|lt|gt|in)(?![a-z])
      | (?!/[hs]\b|\*[ ])[ ]?[+*/\u00d7\u00b7\u00f7][ ]?[A-Za-z\\](?![A-Za-z])
      | [ ]?-[ ]?[b-zB-HJ-Z](?![A-Za-z'\u2019.)])""",
    re.VERBOSE,
)
_EMPHASIS = re.compile(r"(?<!\S)(\*{1,3}|_{1,3}|`{1,3})(?=[^\s*_`])(.{1,200}?)(?<=\S)\1(?![^\s.,:])")
_TEXT_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{([A-Za-z. ]{1,40})\}(?:\^\{?[23]\}?)?")
_WRAPPER = re.compile(
    r"\\(?:boxed|fbox|mbox|text(?:bf|it|rm)?|math(?:bf|rm)|boldsymbol|bm)\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_NAME = re.compile(  # what stands before the number: x =, Answer:, The answer is
    r"""(?:[A-Za-z'\u2019\\{}()\s]|_\{?[0-9]){0,60}(?:=|:|(?<![A-Za-z])(?:is|are)(?![A-Za-z]))\s*""",
    re.VERBOSE,
)
_UNIT_WORD = (
    rf"(?!(?i:{_SCALE}|(?:half|halves|thirds?|quarters?|lakh|crore|bn|mn|mln|pi|sqrt|sin|cos|tan|log|ln|exp|mod"
    r"|xy|yz|xz|xyz|ab|bc|ac|abc|or|and|plus|minus|not|wrong|squared|cubed|factorial)(?![a-z])))"
    r"(?:[A-Za-z\u00b5\u00c0-\u00ff]{2,20}|[mshgdlLCFVNWJ](?![A-Za-z]))"
    r"(?:\u00b2|\u00b3|(?<=[cdkm]m|ft|in)\^\{?[23]\}?)?"
)
_UNIT = re.compile(
    rf"""\s*(?:\^?\{{?\\(?:circ|degree)\}}?|\u00b0)?\s*
         (?:(?:/(?![mgdlLCFVNWJ]\b))?{_UNIT_WORD}(?:(?:\s{{1,3}}|\s?/\s?|-){_UNIT_WORD}){{0,5}})?\s*""",
    re.VERBOSE,
)
_MAX_MARKED = 600  # characters of a marked answer that may have words around its number
_LOOK_BACK = 80  # characters before a number that may make it a part of something
_OF_NUMBERS = frozenset("\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT PLUS SIGN}\N{SUPERSCRIPT LATIN SMALL LETTER N}")


def text_of(completion: str | Sequence[dict[str, str]]) -> str:
    """The text that is graded: the string itself, or the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else ""


def answer_texts(completions: Sequence[Any], in_thought: Sequence[bool] | None = None) -> list[str]:
    """What each completion says after thinking. ``in_thought``: which of them end inside a thought, also one
    that the prompt had opened; these say nothing."""
    inside = in_thought or [False] * len(completions)
    pairs = zip(completions, inside, strict=True)
    return ["" if unfinished else after_thinking(text_of(one)) for one, unfinished in pairs]


def marked_answer(text: str) -> str | None:
    r"""The last ``<answer>..</answer>``, else the last ``\boxed{..}``, else the rest of a ``####`` line.

    Empty where all there is is a box that is never closed.
    """
    opened, _, tail = text.rpartition("</answer>")
    if tail != text and "<answer>" in opened:
        return opened.rpartition("<answer>")[2].strip()
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip()
    _, marker, tail = text.rpartition("####")
    if marker:
        return tail.strip().partition("\n")[0].strip()
    return "" if "\\boxed{" in text else None


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
    text = _ascii(text).strip().removesuffix(".")
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("$", ""), ("\\$", "")):
        if text.startswith(opening) and text.endswith(closing):
            text = text.removeprefix(opening).removesuffix(closing).strip()
    found = _NUMBER.fullmatch(text.removeprefix("+"))
    return () if found is None or len(text) > MAX_DIGITS else _readings(found)


def answered_number(text: str) -> tuple[Fraction, ...]:
    r"""The readings of a completion's marked text: of one number, which may have a name, a unit or emphasis.

    Reads ``x = 42``, ``The answer is 42.``, ``**42**``, ``(42)``, ``42 km``, ``42\text{ apples}``,
    ``42^\circ``; not ``42x``, ``42 million``, ``x = 41 or 42``.
    """
    if (readings := whole_number(text)) or len(text) > _MAX_MARKED:
        return readings
    text = _ascii(text).replace("\\left(", "(").replace("\\right)", ")")
    text = re.sub(r"\\[!,;: ]|~|\\[()]|</?answer>|####", " ", text)
    for _ in range(3):  # wrappers in wrappers
        text = _WRAPPER.sub(r" \1 ", _TEXT_UNIT.sub(r" \1 ", text))
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    text = _CURRENCY_CODE.sub("", without_emphasis(text.strip().strip("\"',;")))
    text = without_emphasis(text[name.end() :] if (name := _NAME.match(text)) else text)
    if (inside := re.fullmatch(r"\(([^(),]*)\)", text)) is not None:
        text = inside[1].strip()
    text = re.sub(r"\s*percent(?![a-z])", "%", text.removeprefix("+"))
    number = _NUMBER.match(text)
    if number is None or len(number.group()) > MAX_DIGITS or not _UNIT.fullmatch(text, number.end()):
        return ()
    return _readings(number)


def without_emphasis(text: str) -> str:
    """Without Markdown's marks of emphasis and without a final full stop."""
    return _EMPHASIS.sub(r"\2", text.strip().removesuffix(".")).strip().removesuffix(".")


def last_number(text: str) -> tuple[Fraction, ...]:
    r"""The readings of the last number of a text: none, one, or two for a percentage (50 and 1/2).

    Reads ``-3``, ``1,234.5``, ``.5``, ``2e-3``, ``3/4``, ``3 1/2``, ``\frac{3}{4}``, ``$20``, ``50%``.
    Digits are 0 to 9; a number next to other numerals (``5²``, ``1½``, ``10⁻³``, ``5千``) is not read,
    nor one that is a part of something: ``10^6``, ``2k + 2``, ``3\pi``, ``12:30``, ``0x1F``, ``(2, 3)``.
    """
    found = last_number_match(text)
    return () if found is None else _readings(found)


def _ascii(text: str) -> str:
    r"""With the minus, the comma in thousands and the blanks that numbers are read with. A thin space groups
    digits (``1\,000``, ``1,\!000``), any other space of LaTeX is a blank (``3\ 1/2``)."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    return re.sub(r"\\[!, ]", " ", re.sub(r"(?<=[0-9,])\\[!,](?=[0-9]{3}(?![0-9]))", "", text))


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
    text = _CURRENCY_CODE.sub("", _ascii(text))
    found = deque(_NUMBER.finditer(text), maxlen=1)
    if not found or len(found[0].group()) > MAX_DIGITS:
        return None
    start, end = found[0].span()
    beside = text[max(0, start - 1) : start] + text[end : end + 1]
    if any(one in _OF_NUMBERS or (one.isnumeric() and not one.isascii()) for one in beside):
        return None
    before = text[max(0, start - _LOOK_BACK) : start]
    is_part = _MORE_BEFORE.search(before) and not _LABEL.search(before)
    return None if is_part or _MORE_BEHIND.match(text, end) else found[0]
