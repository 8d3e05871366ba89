"""The answer of a completion: the text after its thoughts, a marked answer, the last line, a number.

This file imports only the standard library and modules that do the same: every worker process loads it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ostinato.control_tokens import strip_thinking

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
_TERM_BEFORE = re.compile(  # a number behind this is part of a larger term: a power, a date, a pair, a sum
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
_TERM_AFTER = re.compile(  # and so is a number in front of this, unless it is a unit
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
_NAME = re.compile(  # the words before the number: x =, Answer:, The answer is
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
_MAX_MARKED_CHARS = 600  # characters of a marked answer that may have words around its number
_MAX_CHARS_BEFORE = 80  # characters before a number that may make it part of a larger term
_NUM_SIGNS = frozenset("\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT PLUS SIGN}\N{SUPERSCRIPT LATIN SMALL LETTER N}")


def get_text(completion: str | Sequence[dict[str, str]]) -> str:
    """Return the text that is graded: the string itself, or the text of the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else ""


def extract_texts(completions: Sequence[Any], in_thought: Sequence[bool] | None = None) -> list[str]:
    """Return the text of each completion after thinking. ``in_thought``: whether a completion ends inside a
    thought, also one that the prompt had opened; its text is then ""."""
    thought_flags = in_thought or [False] * len(completions)
    pairs = zip(completions, thought_flags, strict=True)
    return [
        "" if is_unfinished else strip_thinking(get_text(completion)) for completion, is_unfinished in pairs
    ]


def extract_marked_answer(text: str) -> str | None:
    r"""Return the last ``<answer>..</answer>``, else the last ``\boxed{..}``, else the rest of the last
    ``####`` line.

    Returns "" if the only mark is a box that is never closed, and None if there is no mark.
    """
    head, _, tail = text.rpartition("</answer>")
    if tail != text and "<answer>" in head:
        return head.rpartition("<answer>")[2].strip()
    if (box := _find_last_box(text)) is not None:
        return box.strip()
    _, marker, tail = text.rpartition("####")
    if marker:
        return tail.strip().partition("\n")[0].strip()
    return "" if "\\boxed{" in text else None


def _find_last_box(text: str) -> str | None:
    """Return the content of the last box; None if there is none or it is never closed."""
    start = text.rfind("\\boxed{")
    return next(iter(find_boxes(text[start:])), None) if start >= 0 else None


def find_boxes(text: str) -> list[str]:
    r"""Return the content of each ``\boxed{..}``, in order, up to a box that is never closed."""
    contents, start = [], text.find("\\boxed{")
    while start >= 0 and (end := _find_closing_brace(text, start + len("\\boxed"))) is not None:
        contents.append(text[start + len("\\boxed{") : end])
        start = text.find("\\boxed{", end)
    return contents


def _find_closing_brace(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one at ``start``; None if there is none."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def extract_final_answer(text: str) -> str:
    """Return the marked answer after thinking, else the last line that is not blank."""
    text = strip_thinking(text)
    mark = extract_marked_answer(text)
    return mark if mark is not None else text.strip().rpartition("\n")[2].strip()


def read_whole_number(text: str) -> tuple[Fraction, ...]:
    r"""Return the readings of a text that is one number and nothing else; () for any other text.

    Numbers are read as in ``read_last_number``. The number may be in ``$..$`` or ``\(..\)`` and end in a
    point.
    """
    text = _normalise(text).strip().removesuffix(".")
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("$", ""), ("\\$", "")):
        if text.startswith(opening) and text.endswith(closing):
            text = text.removeprefix(opening).removesuffix(closing).strip()
    match = _NUMBER.fullmatch(text.removeprefix("+"))
    return () if match is None or len(text) > MAX_DIGITS else _list_readings(match)


def read_marked_number(text: str) -> tuple[Fraction, ...]:
    r"""Return the readings of a completion's marked text, if it is a number, perhaps with a name, a unit or
    emphasis; () for any other text.

    Reads ``x = 42``, ``The answer is 42.``, ``**42**``, ``(42)``, ``42 km``, ``42\text{ apples}``,
    ``42^\circ``; not ``42x``, ``42 million``, ``x = 41 or 42``.
    """
    if (readings := read_whole_number(text)) or len(text) > _MAX_MARKED_CHARS:
        return readings
    text = _normalise(text).replace("\\left(", "(").replace("\\right)", ")")
    text = re.sub(r"\\[!,;: ]|~|\\[()]|</?answer>|####", " ", text)
    for _ in range(3):  # wrappers in wrappers
        text = _WRAPPER.sub(r" \1 ", _TEXT_UNIT.sub(r" \1 ", text))
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    text = _CURRENCY_CODE.sub("", strip_emphasis(text.strip().strip("\"',;")))
    text = strip_emphasis(text[name.end() :] if (name := _NAME.match(text)) else text)
    if (group := re.fullmatch(r"\(([^(),]*)\)", text)) is not None:
        text = group[1].strip()
    text = re.sub(r"\s*percent(?![a-z])", "%", text.removeprefix("+"))
    number = _NUMBER.match(text)
    if number is None or len(number.group()) > MAX_DIGITS or not _UNIT.fullmatch(text, number.end()):
        return ()
    return _list_readings(number)


def strip_emphasis(text: str) -> str:
    """Remove Markdown's marks of emphasis and a final full stop."""
    return _EMPHASIS.sub(r"\2", text.strip().removesuffix(".")).strip().removesuffix(".")


def read_last_number(text: str) -> tuple[Fraction, ...]:
    r"""Return the readings of the last number of a text: none, one, or two for a percentage (50 and 1/2).

    Reads ``-3``, ``1,234.5``, ``.5``, ``2e-3``, ``3/4``, ``3 1/2``, ``\frac{3}{4}``, ``$20``, ``50%``. Digits
    are 0 to 9; a number next to other numerals (``5²``, ``1½``, ``10⁻³``, ``5千``) is not read, nor a number
    that is part of a larger term: ``10^6``, ``2k + 2``, ``3\pi``, ``12:30``, ``0x1F``, ``(2, 3)``.
    """
    match = find_last_number(text)
    return () if match is None else _list_readings(match)


def _normalise(text: str) -> str:
    r"""Replace the minus sign, LaTeX's comma in thousands and its spaces by the characters that numbers are
    read with. A thin space groups digits (``1\,000``, ``1,\!000``), any other space of LaTeX is a blank
    (``3\ 1/2``)."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    return re.sub(r"\\[!, ]", " ", re.sub(r"(?<=[0-9,])\\[!,](?=[0-9]{3}(?![0-9]))", "", text))


def _list_readings(match: re.Match[str]) -> tuple[Fraction, ...]:
    """Return the value of a number; of a percentage also the hundredth part; () for a denominator of 0."""
    numerator, denominator = match["over"] or match["part"], match["under"] or match["parts"]
    if match["digits"] is not None:
        numerator, denominator = match["digits"].replace(",", ""), match["denominator"] or "1"
    if int(denominator) == 0:
        return ()
    value = Fraction(numerator) / int(denominator) * Fraction(10) ** int(match["exponent"] or 0)
    value += int(match["whole"] or match["units"] or 0)
    value = -value if match["minus"] else value
    return (value, value / 100) if match["percent"] else (value,)


def find_last_number(text: str) -> re.Match[str] | None:
    """Return the match of the last number of a text, in which some characters have been replaced. Return None
    if there is no number, or if the last one is too long, next to other numerals, or part of a larger
    term."""
    text = _CURRENCY_CODE.sub("", _normalise(text))
    matches = deque(_NUMBER.finditer(text), maxlen=1)
    if not matches or len(matches[0].group()) > MAX_DIGITS:
        return None
    start, end = matches[0].span()
    neighbours = text[max(0, start - 1) : start] + text[end : end + 1]
    if any(char in _NUM_SIGNS or (char.isnumeric() and not char.isascii()) for char in neighbours):
        return None
    text_before = text[max(0, start - _MAX_CHARS_BEFORE) : start]
    is_part = _TERM_BEFORE.search(text_before) and not _LABEL.search(text_before)
    return None if is_part or _TERM_AFTER.match(text, end) else matches[0]
