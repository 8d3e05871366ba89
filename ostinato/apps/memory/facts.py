"""Find numbers, dates and names of a text, which a shortened text may contain; resolve relative dates.

    find_unsupported(refill, original)  the facts of ``refill`` that ``original`` lacks, normalised
    absolute(text, day)                 "yesterday", of a chat of 8 May 2023, becomes "7 May 2023"

Names are words with a capital letter. A script without capitals has none, so there the check is of numbers
and dates alone. A false relation between facts that all occur is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, timedelta


def split_words(text: str) -> list[str]:
    return text.split()


MONTHS = split_words("january february march april may june july august september october november december")
DAYS = split_words("monday tuesday wednesday thursday friday saturday sunday")
_UNITS = split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = split_words("twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = split_words(
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
)
SPELLED = {word: n for n, word in enumerate(_UNITS)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
SPELLED |= {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_ORDINAL_VALUES = {
    word: n for n, word in enumerate(_ORDINALS) if n > 3
}  # "second" and "third": other meanings too

# Words that begin a sentence, or always have a capital letter, and are no names.
PLAIN = frozenset(
    split_words(
        """
        a about after again all also although always am an and another any are as ask at be because before
        both but by can could did do does each either else even every everyone everything few finally
        first for from had has have he hello her here hers hey hi him his how however i i'd i'll i'm i've
        if in instead is it its it's just last later let like many maybe me might more most much must my
        never new next nice no nobody none nor not nothing now of off oh ok okay on once one only or other
        our out over perhaps please really she should since so some somebody someone something sometimes
        soon sorry still such sure thank thanks that that's the their them then there these they thing
        this those though three through thus to today together tomorrow tonight too two under until up us
        very was we we'll we're we've well were what when where which while who whom whose why will with
        without would wow yes yesterday yet you you'll you're your yours don't didn't doesn't can't won't
        isn't wasn't let's there's what's he's she's they're
        """
    )
)

_WORD = re.compile(r"[^\W_]+(?:['\u2019.\-&][^\W_]+)*", re.UNICODE)
_TOKEN = re.compile(r"[^\W_]+(?:['\u2019.,:\-&][^\W_]+)*", re.UNICODE)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_MONTH = rf"(?P<month>{'|'.join(MONTHS)}|{'|'.join(m[:3] for m in MONTHS)}|sept)\.?"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(?P<year>\d{4})-(?P<number>\d\d?)(?:-(?P<day>\d\d?))?\b",
        rf"\b(?P<day>\d\d?)(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}\b(?:,?\s+(?P<year>\d{{4}})\b)?",
        rf"\b{_MONTH}\s+(?P<day>\d\d?)(?:st|nd|rd|th)?\b(?!\d|[:.,]\d)(?:,?\s+(?P<year>\d{{4}})\b)?",
        rf"\b{_MONTH},?\s+(?:of\s+)?(?P<year>\d{{4}})\b",
    )
)
Date = tuple[int, int, int]  # year, month, day; 0 for what is not given


def find_numbers(text: str) -> set[str]:
    """Return the numbers of a text in a normal form: "1,000.50" is 1000.5, "seven" and "7th" are 7, "B12" is
    b12."""
    normal_forms = set()
    for match in _TOKEN.finditer(text):
        word, sign = match[0].casefold(), "-" if text[: match.start()].endswith(("-", "\u2212")) else ""
        if sign and text[: match.start() - 1][-1:].strip():
            sign = ""  # it is a hyphen, or the dash of a range
        if any(char.isdecimal() for char in word):
            normal_forms |= {sign + numeral for numeral in _extract_numerals(word)}
        else:
            normal_forms |= {str(n) for n in _parse_spelled(word)}
    return normal_forms


def _extract_numerals(word: str) -> Iterator[str]:
    for part in re.split(r"['\u2019\-&]", word):
        core = re.sub(r"(?<=\d)(?:st|nd|rd|th|s|k|m|am|pm|km|kg|cm|mm|h|g|%)$", "", part)
        if _NUMBER.fullmatch(core):
            yield _normalise_number(core)
        elif any(char.isdecimal() for char in part):
            yield part  # a code, which stays as it is


def _normalise_number(text: str) -> str:
    """Remove separators of thousands, trailing zeros behind the point and leading zeros."""
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    integer, point, decimals = text.partition(".")
    if point and "." not in decimals and "," not in text and ":" not in text:
        decimals = decimals.rstrip("0")
        text = integer + ("." + decimals if decimals else "")
    return re.sub(r"^0+(?=\d)", "", text)


def _parse_spelled(word: str) -> Iterator[int]:
    tens, hyphen, unit = word.partition("-")
    if hyphen and SPELLED.get(tens, 0) in range(20, 100) and (unit in _UNITS or unit in _ORDINALS):
        yield SPELLED[tens] + (_UNITS if unit in _UNITS else _ORDINALS).index(unit)
        return
    for part in re.split(r"[-.,:'\u2019&]", word):
        yield from (table[part] for table in (SPELLED, _ORDINAL_VALUES) if part in table)


def find_dates(text: str) -> set[Date]:
    """Return the valid dates of a text that have a month."""
    all_dates = set()
    for pattern in _DATES:
        for match in pattern.finditer(text):
            fields = match.groupdict()
            month = int(fields["number"]) if fields.get("number") else _parse_month(fields["month"])
            day, year = int(fields.get("day") or 0), int(fields.get("year") or 0)
            if 1 <= month <= 12 and day <= 31 and (day or year):
                all_dates.add((year, month, day))
    return all_dates


def _parse_month(name: str) -> int:
    return next(n for n, month in enumerate(MONTHS, 1) if month.startswith(name.lower()[:3]))


def find_names(text: str) -> set[str]:
    """Return the parts of words with a capital letter, in lower case. Numbers in words are left out, and so
    are ordinary words (``PLAIN``), which have a capital letter at the beginning of a sentence only."""
    parts = set()
    for match in _WORD.finditer(text):
        word = match[0]
        if any(char.isupper() for char in word) and word.casefold().replace("\u2019", "'") not in PLAIN:
            parts |= {part for part in _split_word(word) if part not in PLAIN and part not in SPELLED}
    return parts


def words(text: str) -> set[str]:
    """Return the parts of all words, in the form of ``find_names``."""
    return {part for match in _WORD.finditer(text) for part in _split_word(match[0])}


def _split_word(word: str) -> Iterator[str]:
    word = re.sub(r"['\u2019]s$", "", word.casefold())
    yield from (part for part in re.split(r"['\u2019.\-&]", word) if part and not part.isdecimal())


def find_unsupported(refill: str, original: str, context: str = "") -> list[str]:
    """Return numbers, dates and names of ``refill`` that occur neither in ``original`` nor in ``context`` (a
    speaker, a resolved date), sorted. A date is supported by a date that agrees with it and may be more
    exact."""
    source = f"{original}\n{context}"
    source_dates = find_dates(source)
    false_dates = (
        "-".join(map(str, refill_date))
        for refill_date in find_dates(refill)
        if not any(
            all(a in (0, b) for a, b in zip(refill_date, source_date, strict=True))
            for source_date in source_dates
        )
    )
    return sorted(
        {*(find_numbers(refill) - find_numbers(source)), *false_dates, *(find_names(refill) - words(source))}
    )


_COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
_COUNTS |= {"eight": 8, "nine": 9, "ten": 10, "couple of": 2, "a couple of": 2, "few": 0, "a few": 0}
_COUNT = r"(?P<count>\d{1,3}|" + "|".join(sorted(_COUNTS, key=len, reverse=True)) + ")"
_WEEKDAYS = "|".join(DAYS)
_RELATIVE = re.compile(
    rf"\b(?:(?P<yester>(?:the\s+)?day\s+before\s+yesterday|yesterday(?:\s+(?:morning|afternoon|evening))?"
    rf"|last\s+night|today|tonight|this\s+(?:morning|afternoon|evening)|(?:the\s+)?day\s+after\s+tomorrow"
    rf"|tomorrow(?:\s+(?:morning|afternoon|evening|night))?)"
    rf"|{_COUNT}\s+(?P<unit>day|week|month|year)s?\s+ago"
    rf"|in\s+(?P<ahead>\d{{1,3}}|{'|'.join(sorted(_COUNTS, key=len, reverse=True))})\s+"
    rf"(?P<later>day|week|month|year)s?(?:'\s+time)?"
    rf"|(?P<side>last|next|this)\s+(?P<what>week(?:end)?|month|year|{_WEEKDAYS}))\b",
    re.IGNORECASE,
)


def parse_day(text: str) -> date | None:
    """Parse the first ten characters ("2023-05-08") as a date; None for "". Raises ValueError for others."""
    try:
        return date.fromisoformat(text[:10]) if text else None
    except ValueError:
        raise ValueError(f"the date of a turn is {text!r}; write it as 2023-05-08") from None


def format_day(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1].capitalize()} {day.year}"


def resolve_dates(text: str, day: date | None) -> str:
    """Return ``text`` with dates that are relative to ``day`` written out; unchanged without a day.

    A period of several days is given relative to the day: "last week" becomes "the week before 8 May 2023".
    """
    return text if day is None else _RELATIVE.sub(lambda match: _resolve_match(match, day), text)


def _resolve_match(match: re.Match[str], day: date) -> str:
    """Return the replacement of a relative date; the phrase itself if the years 1 to 9999 do not have the
    date."""
    fields, day_text = match.groupdict(), format_day(day)
    try:
        if fields["yester"]:
            return _resolve_phrase(fields["yester"].lower(), day)
        if fields["count"]:
            return _shift_day(fields["count"], fields["unit"].lower(), day, -1) or match[0]
        if fields["ahead"]:
            return _shift_day(fields["ahead"], fields["later"].lower(), day, 1) or match[0]
    except OverflowError:  # before the year 1, or after 9999
        return match[0]
    side, unit = fields["side"].lower(), fields["what"].lower()
    if unit == "year":
        return str(day.year + {"last": -1, "this": 0, "next": 1}[side])
    if unit == "month":
        months = 12 * day.year + day.month - 1 + {"last": -1, "this": 0, "next": 1}[side]
        return f"{MONTHS[months % 12].capitalize()} {months // 12}"
    unit = unit.capitalize() if unit in DAYS else unit
    return f"the {unit} {({'last': 'before', 'this': 'of', 'next': 'after'})[side]} {day_text}"


def _resolve_phrase(phrase: str, day: date) -> str:
    phrase = " ".join(phrase.split()).removeprefix("the ")
    steps = {"day before yesterday": -2, "day after tomorrow": 2, "last night": -1}
    step = steps.get(phrase, {"yesterday": -1, "tomorrow": 1}.get(phrase.split()[0], 0))
    part = "night" if phrase in ("last night", "tonight") else phrase.rpartition(" ")[2]
    part = part if part in ("morning", "afternoon", "evening", "night") else ""
    return f"the {part} of {format_day(day + timedelta(step))}" if part else format_day(day + timedelta(step))


def _shift_day(count: str, unit: str, day: date, sign: int) -> str:
    """Format the day that is ``count`` days before (``sign`` < 0) or after ``day``. Other units, and "a few
    days", give a phrase relative to ``day``. Raises OverflowError for a day that ``date`` cannot hold."""
    count = " ".join(count.lower().split())
    n = int(count) if count.isdecimal() else _COUNTS[count]
    if n and unit == "day":
        return format_day(day + timedelta(sign * n))
    count_text = count if n != 1 else "one"
    if sign < 0:
        return f"{count_text} {unit}{'s' * (n != 1)} before {format_day(day)}"
    return f"{count_text} {unit}{'s' * (n != 1)} after {format_day(day)}"
