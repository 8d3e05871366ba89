"""The texts that fill gaps. A ``Refiller`` gets the original, and a little of the text before and behind it.
``keep.Memory`` checks the text that it writes, and replaces a bad one by an extract of the original."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.apps.memory.facts import MONTHS, PLAIN, find_dates, find_names, find_numbers, split_words
from ostinato.control_tokens import strip_thinking

_SENTENCE = re.compile(r"[^.!?\n]*(?:[.!?](?=\S)[^.!?\n]*)*[.!?]*\n*\s*")
FILLER = frozenset(
    split_words(
        """
        a an the well really just so very quite hey oh wow um uh actually basically literally that there
        is are was were am be been being do does did have has had to also then it's i'm you know like of
        course kind sort pretty totally absolutely definitely anyway okay ok yeah
        """
    )
)  # no negations, which would change the meaning


MIN_WORDS = 3  # of an extract that is less than a sentence


class Refiller(Protocol):
    """Writes a shortened text into a gap. ``budget``: tokens of the answer at most. The same arguments give
    the same text."""

    def __call__(self, left: str, original: str, right: str, budget: int) -> str: ...


def make_extract(original: str, fits: Callable[[str], bool]) -> str:
    """Return a part of ``original`` that fits, in its order: the sentences with the most facts for their
    length, complete or without fillers. If the best sentence fits in neither form, its most important words
    stand for it. Returns "" if nothing fits."""
    sentences = [piece.strip() for piece in _SENTENCE.findall(original) if piece.strip()]
    order = sorted(range(len(sentences)), key=lambda k: (-_measure_density(sentences[k]), k))
    pieces: dict[int, str] = {}

    def join_pieces(extra: int, text: str) -> str:
        return " ".join(piece for _, piece in sorted({**pieces, extra: text}.items()))

    for rank, k in enumerate(order):
        words = () if rank else (_choose_words(sentences[k], fits),)  # of the best sentence alone
        for text in (sentences[k], drop_fillers(sentences[k]), *words):
            if text and fits(join_pieces(k, text)):
                pieces[k] = text
                break
    return " ".join(pieces[k] for k in sorted(pieces))


def _choose_words(sentence: str, fits: Callable[[str], bool]) -> str:
    """Return the most important words, as many as fit, in their order; "" for fewer than ``MIN_WORDS``."""
    parts = sentence.split()
    ranks = [_rank_word(part, is_first=not k) for k, part in enumerate(parts)]
    for k, part in enumerate(parts):
        if part.casefold().strip(",.") in MONTHS:  # with the day before or behind the month
            ranks[max(0, k - 1) : k + 2] = [min(rank, 1) for rank in ranks[max(0, k - 1) : k + 2]]
    order = sorted((k for k, rank in enumerate(ranks) if rank), key=lambda k: (-ranks[k], k))
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        text = " ".join(parts[k] for k in sorted(order[:middle]))
        low, high = (middle, high) if fits(text) else (low, middle - 1)
    return " ".join(parts[k] for k in sorted(order[:low])) if low >= MIN_WORDS else ""


def _rank_word(word: str, is_first: bool) -> int:
    """Rank a word: 3 for names, numbers and negations, 2 for other content, 1 for months and years, 0 for
    fillers."""
    bare_word = word.casefold().strip(",.!?;:\"'()")
    if bare_word in MONTHS or re.fullmatch(r"(?:19|20)\d\d", bare_word):
        return 1
    if (
        any(char.isdecimal() for char in word)
        or bare_word in ("no", "not", "never", "none")
        or bare_word.endswith("n't")
    ):
        return 3
    if bare_word in PLAIN or bare_word in FILLER:
        return 0
    return 3 if word[:1].isupper() and not is_first else 2


def _measure_density(sentence: str) -> float:
    """Estimate the facts per word of a sentence; a question counts less."""
    facts = len(find_numbers(sentence)) + len(find_dates(sentence)) + len(find_names(sentence))
    return (facts + 0.5) / (3 + len(sentence.split())) * (0.7 if sentence.endswith("?") else 1.0)


def drop_fillers(sentence: str) -> str:
    """Return a sentence without fillers, except those beside a number."""
    parts = sentence.split()
    has_digit = [any(char.isdecimal() for char in part) for part in parts]
    content_words = [
        part
        for k, part in enumerate(parts)
        if part.casefold().strip(",.!?\"'") not in FILLER or any(has_digit[max(0, k - 1) : k + 2])
    ]
    return " ".join(content_words)


INSTRUCTION = (
    "Shorten the passage between the lines of dashes to at most {words} words. Keep who it is about, dates, "
    "names, numbers and decisions exactly as they are. Add nothing that it does not say. Write the shortened "
    "passage and nothing else."
)


def build_messages(left: str, original: str, right: str, budget: int) -> list[dict[str, str]]:
    """Return the request to a chat model. Its system message is the same for every gap, so that the prefix
    can be shared."""
    words = max(3, math.floor(0.7 * budget))
    context = "".join(
        f"{name}: {text}\n" for name, text in (("Before it", left), ("After it", right)) if text
    )
    return [
        {"role": "system", "content": INSTRUCTION.format(words="the stated number of")},
        {"role": "user", "content": f"{context}----\n{original}\n----\nAt most {words} words."},
    ]


def clean_answer(answer: str) -> str:
    """Strip an answer of a chat model: a thought, the dashes, quotation marks around it, and blanks."""
    text = strip_thinking(answer).strip().strip("-").strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == '"' else text


@dataclass(frozen=True, slots=True)
class ByModel:
    """A refiller by a chat model, with greedy sampling. A failure of the model is counted (``memory/failed``)
    and gives no text, so that the gap gets an extract."""

    chat: Callable[[list[dict[str, str]], int], str]  # messages, tokens of the answer at most
    counters: Counter[str]

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        try:
            return clean_answer(self.chat(build_messages(left, original, right, budget), budget))
        except (OSError, ValueError, LookupError, TypeError):  # no network, or an answer in another form
            self.counters["memory/failed"] += 1
            return ""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The chat model at ``url`` (".../v1"). A call returns its answer, and raises OSError, ValueError,
    LookupError or TypeError without one. An empty ``model`` or ``key`` is not sent."""

    url: str
    model: str = ""
    key: str = ""
    timeout_s: float = 60.0

    def __call__(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        body: dict[str, Any] = {"messages": messages, "max_tokens": max(1, max_tokens), "temperature": 0}
        body |= {"model": self.model} if self.model else {}
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self.timeout_s) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])
