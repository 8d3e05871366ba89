"""The tokens that budgets of the world are counted in: one for each word, two for a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lab.forgetting.world import syllables, words

SPECIAL = ("<|pad|>", "<|q|>", "<|a|>", "<|end|>")


def tokenizer() -> Any:
    """A token for each word of the world and each syllable of a name; any other text in bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    first, second = syllables()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet]
    merges: list[tuple[str, str]] = []
    for letters, lead in [(one, "Ġ") for one in first] + [(one, "") for one in second]:
        for end in range(1, len(letters) + (1 if lead else 0)):
            left, right = lead + letters[: end - (1 if lead else 0)], letters[end - (1 if lead else 0) :][:1]
            if (left, right) not in merges:
                merges.append((left, right))
                pieces.append(left + right)
    pieces += [f"Ġ{word}" for word in ["/", *words(), ":", ",", "?", "!"]]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    return made


def counter(made: Any) -> Callable[[str], int]:
    """Tokens of lines of a memory, their borders included."""

    @lru_cache(maxsize=1 << 18)
    def line(text: str) -> int:
        return len(made.encode(f" / {text.rstrip()}", add_special_tokens=False).ids)

    return lambda text: sum(map(line, text.splitlines()))
