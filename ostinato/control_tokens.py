"""Control tokens (``<|im_start|>``) come from the chat template alone: in a message they are letters.

Before a chat is rendered, every control token that its contents spell is replaced by a placeholder, so all
control tokens in the rendered text are the template's own. The text is encoded by a second tokenizer, in
which control tokens have secret spellings. Those of the template are replaced by the secret spellings, and
those of contents are put back as plain letters. A chat without such spellings has the tokens of a plain
encoding.
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
THOUGHTS = (  # (opening, end) of thoughts, as templates and models write them
    (THINK, END_THINK),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
LONG_CHARS = 10_000  # letters of a text that takes milliseconds


def is_in_thought(text: str) -> bool | None:
    """Whether a text ends inside a thought; None if it has no tag of a thought."""
    for opening, end in THOUGHTS:
        if opening in text or end in text:
            return text.rfind(opening) > text.rfind(end)
    return None


def strip_thinking(text: str) -> str:
    """The text after the last thought (``</think>``, ``[/THINK]``, ..); empty if a thought is open. In a text
    of gpt-oss, whose tags are not decoded, the part after ``assistantfinal``."""
    if text.startswith("analysis") and "assistantfinal" in text:
        text = text.partition("assistantfinal")[2]
    for _, end in THOUGHTS:
        text = text.rpartition(end)[2]
    return "" if any(opening in text for opening, _ in THOUGHTS) else text


def is_thought_open(text: str, is_turn: bool) -> bool:
    """Whether the last turn of a context leaves a thought open. In a text without turns (not ``is_turn``)
    only a tag at the end of its line opens one."""
    for opening, end in THOUGHTS:
        _, tag, rest = text.rpartition(opening)
        if tag and end not in rest and (is_turn or not rest.partition("\n")[0].strip()):
            return True
    return False


def encode_text(tokenizer: Tokenizer, text: str, *, add_special: bool = False) -> list[int]:
    """Ids of a text. For a long one, a call of the library that releases the GIL."""
    if len(text) > LONG_CHARS:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return tokenizer.encode(text, add_special_tokens=add_special).ids


# Tags that answers contain: no control tokens, even if a tokenizer calls them special.
_ANSWER_TAGS = {*sum(THOUGHTS, ()), "<tool_call>", "</tool_call>"}
_BARRED_TOKEN = re.compile(
    "<[|\uff5c].*[|\uff5c]>"
)  # DeepSeek's, which its tokenizer does not call special, are wide


class ControlTokens:
    """The control tokens of ``tokenizer``: its special tokens, and added ones of the form ``<|..|>``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = {
            token.content: id_
            for id_, token in tokenizer.get_added_tokens_decoder().items()
            if token.content not in _ANSWER_TAGS | {""}
            and (token.special or _BARRED_TOKEN.fullmatch(token.content))
        }
        secret = secrets.randbelow(10**20)  # digits: templates and JSON write them as they are
        self._placeholders = {text: f"{secret:020}{id_:08}" for text, id_ in self.ids.items()}
        self._texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._placeholder = re.compile(f"{secret:020}[0-9]{{8}}")

    @cached_property
    def _spelling_pattern(self) -> re.Pattern[str]:
        return re.compile(_make_words_pattern(self.ids) if self.ids else r"(?!)")

    def find_spelled(self, value: Any) -> str:
        """The first control token that a text in ``value`` (lists and mappings too) spells, or ""."""
        if isinstance(value, str):
            match = self._spelling_pattern.search(value)
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
            return self._spelling_pattern.sub(lambda match: self._placeholders[match.group()], value)
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
        tokenizer, spellings, original_ids = self._renaming
        text, num_control = self._spelling_pattern.subn(lambda match: spellings[match.group()], text)
        raw_tokens = encode_text(tokenizer, self.show(text))
        tokens = [original_ids.get(token, token) for token in raw_tokens]
        if sum(token in self._control_ids for token in tokens) != num_control:
            raise ValueError(
                "a message spells a control token, and the tokenizer has no tokens for its letters; spell it "
                "otherwise"
            )
        return tokens

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    @cached_property
    def _renaming(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """(tokenizer with secret spellings of control tokens; {control token: secret spelling}; {its id of an
        added token: original id}). Both tokenizers share one vocabulary in memory."""
        from tokenizers import AddedToken, Tokenizer

        secret, original = secrets.token_hex(8), self._tokenizer
        spellings = {text: f"\ue000{secret}{id_}\ue001" for text, id_ in self.ids.items()}
        renamed, original_ids = Tokenizer(original.model), dict[int, int]()
        for attribute in ("normalizer", "pre_tokenizer"):
            if (value := getattr(original, attribute)) is not None:
                setattr(renamed, attribute, value)
        added_tokens = sorted(original.get_added_tokens_decoder().items())
        tokens = [
            AddedToken(
                spellings.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for _, token in added_tokens
        ]
        for (id_, _), token in zip(added_tokens, tokens, strict=True):
            (renamed.add_special_tokens if token.special else renamed.add_tokens)([token])
            original_ids[int(renamed.token_to_id(token.content) or 0)] = id_
        return renamed, spellings, original_ids


def _make_words_pattern(words: Iterable[str]) -> str:
    """A regular expression for the longest matching word, with common prefixes written once, as there can be
    thousands of words."""
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word)
    alternatives = [_make_group_pattern(group) for first_letter, group in groups.items() if first_letter]
    return f"(?:{'|'.join(alternatives)}){'?' if '' in groups else ''}" if alternatives else ""


def _make_group_pattern(words: Sequence[str]) -> str:
    """``_make_words_pattern`` for words with the same first letter."""
    min_word, max_word = min(words), max(words)
    length = next(
        (index for index, (a, b) in enumerate(zip(min_word, max_word, strict=False)) if a != b), len(min_word)
    )
    return re.escape(min_word[:length]) + _make_words_pattern(word[length:] for word in words)
