"""LoCoMo's own scores: F1 of stemmed words with its rules for each category (task_eval/evaluation.py of its
repository, as described in the digest of the field: nothing of it is copied)."""

from __future__ import annotations

import re
import string
from collections import Counter

ABSENT = ("no information available", "not mentioned")
_VOWELS = "aeiou"


def score(category: int, prediction: str, answer: str) -> float:
    """Of one question. 1, multi-hop: the answer is a list with commas, each part of which takes its best F1.
    3, open-domain: the answer ends at a semicolon. 5, adversarial: right if it says that it is not there."""
    if category == 5:
        return float(any(phrase in prediction.lower() for phrase in ABSENT))
    if category == 3:
        answer = answer.split(";")[0].strip()
    if category != 1:
        return f1(prediction, answer)
    given = [part.strip() for part in prediction.split(",")]
    expected = [part.strip() for part in answer.split(",")]
    return sum(max(f1(one, part) for one in given) for part in expected) / len(expected)


def f1(prediction: str, answer: str) -> float:
    mine, its = (Counter(map(stem, normal(text).split())) for text in (prediction, answer))
    common = sum((mine & its).values())
    return 2 * common / (sum(mine.values()) + sum(its.values())) if common else 0.0


def normal(text: str) -> str:
    """Small, without commas and punctuation, without a, an, the and "and"."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the|and)\b", " ", text).split())


def stem(word: str) -> str:
    """Porter's stemmer (1980), as it was published; NLTK's default has a few more rules."""
    if len(word) <= 2:
        return word
    for step in (_plural, _past, _y, _double, _long, _last, _e):
        word = step(word)
    return word


def _consonant(word: str, at: int) -> bool:
    if word[at] in _VOWELS:
        return False
    return word[at] != "y" or at == 0 or not _consonant(word, at - 1)


def _measure(word: str) -> int:
    """Of vowels followed by consonants: m in [C](VC)^m[V]."""
    kinds = "".join("c" if _consonant(word, at) else "v" for at in range(len(word)))
    return len(re.findall("v+c+", kinds))


def _vowel(word: str) -> bool:
    return any(not _consonant(word, at) for at in range(len(word)))


def _short(word: str) -> bool:
    """Ends consonant, vowel, consonant, the last no w, x or y."""
    kinds = [_consonant(word, at) for at in range(len(word))][-3:]
    return kinds == [True, False, True] and word[-1] not in "wxy"


def _plural(word: str) -> str:
    for end, new in (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")):
        if word.endswith(end):
            return word[: len(word) - len(end)] + new
    return word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for end in ("ed", "ing"):
        if word.endswith(end):
            root = word[: len(word) - len(end)]
            return _mended(root) if _vowel(root) else word
    return word


def _mended(root: str) -> str:
    if root.endswith(("at", "bl", "iz")):
        return root + "e"
    if (
        root[-2:-1] == root[-1:]
        and len(root) > 1
        and _consonant(root, len(root) - 1)
        and root[-1] not in "lsz"
    ):
        return root[:-1]
    return root + "e" if _measure(root) == 1 and _short(root) else root


def _y(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and _vowel(word[:-1]) else word


_DOUBLE = (
    "ational:ate tional:tion enci:ence anci:ance izer:ize abli:able alli:al entli:ent eli:e ousli:ous "
    "ization:ize ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous aliti:al iviti:ive "
    "biliti:ble"
)
_LONG = "icate:ic ative: alize:al iciti:ic ical:ic ful: ness:"
_LAST = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize"


def _replaced(word: str, table: str) -> str:
    pairs = [pair.split(":") for pair in table.split()]
    for end, new in sorted(pairs, key=lambda pair: -len(pair[0])):
        if word.endswith(end):
            root = word[: len(word) - len(end)]
            return root + new if _measure(root) > 0 else word
    return word


def _double(word: str) -> str:
    return _replaced(word, _DOUBLE)


def _long(word: str) -> str:
    return _replaced(word, _LONG)


def _last(word: str) -> str:
    for end in sorted(_LAST.split(), key=len, reverse=True):
        if word.endswith(end):
            root = word[: len(word) - len(end)]
            return root if _measure(root) > 1 and (end != "ion" or root[-1:] in ("s", "t")) else word
    return word


def _e(word: str) -> str:
    if word.endswith("e"):
        m = _measure(word[:-1])
        word = word[:-1] if m > 1 or (m == 1 and not _short(word[:-1])) else word
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


__all__ = ["f1", "normal", "score", "stem"]
