"""Control tokens (``<|im_start|>``) come from the chat template alone: in a message they are letters.

What a chat holds is rendered with a placeholder wherever it spells a control token, so that of the text that
the template writes it is known what it says itself. This text is encoded by a second tokenizer, in which
control tokens have secret spellings: those of the template are given them, and those of contents are letters
like any others. A chat without such spellings has the tokens of a plain encoding.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

THINK, END_THINK = "<think>", "</think>"
THOUGHTS = (  # with what templates and models open a thought, and what ends it
    (THINK, END_THINK),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
LONG = 10_000  # letters of a text that takes milliseconds


def is_in_thought(text: str) -> bool | None:
    """Whether a text ends inside a thought; None if it has no tag of one."""
    for opening, end in THOUGHTS:
        if opening in text or end in text:
            return text.rfind(opening) > text.rfind(end)
    return None


def after_thinking(text: str) -> str:
    """The text after the last thought (``</think>``, ``[/THINK]``, ..); empty when one was opened and never
    closed. Of gpt-oss, whose tags are no text, what follows ``assistantfinal``."""
    if text.startswith("analysis") and "assistantfinal" in text:
        text = text.partition("assistantfinal")[2]
    for _, end in THOUGHTS:
        text = text.rpartition(end)[2]
    return "" if any(opening in text for opening, _ in THOUGHTS) else text


def opens_thought(text: str, is_turn: bool) -> bool:
    """Whether the last turn of a context leaves a thought open; in a text without turns, only a tag that ends
    its line does."""
    for opening, end in THOUGHTS:
        _, is_open, rest = text.rpartition(opening)
        if is_open and end not in rest and (is_turn or not rest.partition("\n")[0].strip()):
            return True
    return False


def encode_text(tokenizer: Tokenizer, text: str, *, add_special: bool = False) -> list[int]:
    """Ids of a text. For a long one, a call of the library that releases the GIL."""
    if len(text) > LONG:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return tokenizer.encode(text, add_special_tokens=add_special).ids


# Tags of answers, which are no control tokens even if a tokenizer calls them special.
_OF_ANSWERS = {*sum(THOUGHTS, ()), "<tool_call>", "</tool_call>"}
_BARS = re.compile(
    "<[|\uff5c].*[|\uff5c]>"
)  # DeepSeek's, which its tokenizer does not call special, are wide


class ControlTokens:
    """The control tokens of ``tokenizer``: its special tokens, and added ones of the form ``<|..|>``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = {
            token.content: id_
            for id_, token in tokenizer.get_added_tokens_decoder().items()
            if token.content not in _OF_ANSWERS | {""} and (token.special or _BARS.fullmatch(token.content))
        }
        secret = secrets.randbelow(10**20)  # digits: templates and JSON write them as they are
        self._placeholders = {text: f"{secret:020}{id_:08}" for text, id_ in self.ids.items()}
        self._texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._placeholder = re.compile(f"{secret:020}[0-9]{{8}}")

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return re.compile(_match_words(self.ids) if self.ids else r"(?!)")

    def find_spelled(self, value: Any) -> str:
        """The first control token that a text in ``value`` (lists and mappings too) spells, or ""."""
        if isinstance(value, str):
            match = self._spelling.search(value)
            return match.group() if match else ""
        parts: Iterable[Any] = ()
        if isinstance(value, Mapping):
            parts = (part for item in value.items() for part in item)
        elif isinstance(value, list | tuple):
            parts = value
        return next(filter(None, map(self.find_spelled, parts)), "")

    def hide(self, value: Any) -> Any:
        """``value`` with a placeholder wherever one of its texts spells a control token."""
        if isinstance(value, str):
            return self._spelling.sub(lambda match: self._placeholders[match.group()], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        return [self.hide(part) for part in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """The text with the spellings that ``hide`` has replaced."""
        return self._placeholder.sub(lambda match: self._texts.get(match.group(), match.group()), text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which ``hide`` has replaced spelled control tokens, which are encoded as plain
        letters. Raises ValueError where the tokenizer has no tokens for these letters."""
        if not self._placeholder.search(text):
            return encode_text(self._tokenizer, text)
        tokenizer, spellings, original_ids = self._rename_tokens
        text, num_control = self._spelling.subn(lambda match: spellings[match.group()], text)
        raw_tokens = encode_text(tokenizer, self.show(text))
        tokens = [original_ids.get(token, token) for token in raw_tokens]
        if sum(token in self._numbers for token in tokens) != num_control:
            raise ValueError(
                "a message spells a control token, and the tokenizer has no tokens for its letters; spell it "
                "otherwise"
            )
        return tokens

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    @cached_property
    def _rename_tokens(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """(tokenizer with secret spellings of control tokens; {control token: secret spelling}; {its id of an
        added token: original id}). Both tokenizers share one vocabulary in memory."""
        from tokenizers import AddedToken, Tokenizer

        secret, original = secrets.token_hex(8), self._tokenizer
        spellings = {text: f"\ue000{secret}{id_}\ue001" for text, id_ in self.ids.items()}
        renamed, original_ids = Tokenizer(original.model), dict[int, int]()
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(original, part)) is not None:
                setattr(renamed, part, value)
        added = sorted(original.get_added_tokens_decoder().items())
        tokens = [
            AddedToken(
                spellings.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for _, token in added
        ]
        for (id_, _), token in zip(added, tokens, strict=True):
            (renamed.add_special_tokens if token.special else renamed.add_tokens)([token])
            original_ids[int(renamed.token_to_id(token.content) or 0)] = id_
        return renamed, spellings, original_ids


def _match_words(words: Iterable[str]) -> str:
    """A regular expression for the longest matching word, with common prefixes written once, as there can be
    thousands of words."""
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word)
    alternatives = [_match_group(group) for first, group in groups.items() if first]
    return f"(?:{'|'.join(alternatives)}){'?' if '' in groups else ''}" if alternatives else ""


def _match_group(words: Sequence[str]) -> str:
    """``_match_words`` for words with the same first letter."""
    first, last = min(words), max(words)
    length = next(
        (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return re.escape(first[:length]) + _match_words(word[length:] for word in words)
