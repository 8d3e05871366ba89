"""Tokenizers of folders that have a vocabulary of tiktoken alone (Kimi K2, the first Qwen), without its code.

The vocabulary is a line per token, its bytes in base64 and its rank. The regular expression that splits a
text before bytes are merged is in the folder's Python (``tokenization_*.py``), which is read, never run."""

from __future__ import annotations

import ast
import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.inputs import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def find_vocabulary_file(folder: Path) -> Path | None:
    """The vocabulary of tiktoken in ``folder``, if it has one."""
    return next(iter([*folder.glob("tiktoken.model"), *sorted(folder.glob("*.tiktoken"))]), None)


def read_tiktoken(folder: Path) -> Tokenizer:
    """A tokenizer of byte-pair encoding by ranks, as in tiktoken, with the added tokens of
    tokenizer_config.json; an unnamed number among them is ``<|reserved_token_N|>``, as in Kimi.

    Raises ValueError for a broken vocabulary or configuration, and if no expression is found.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    file = find_vocabulary_file(folder)
    assert file is not None
    try:
        lines = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{file} is no vocabulary of tiktoken ({error}); download it again") from error
    if sorted(ranks.values()) != [*range(len(ranks))]:
        raise ValueError(f"{file} leaves ranks out; download it again")
    characters = _list_byte_characters()
    spelling_by_token = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [(spelling_by_token[left], spelling_by_token[right]) for left, right in _list_merges(ranks)]
    vocabulary = {spelling_by_token[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_find_expression(folder)), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added_tokens = _read_added_tokens(folder)
    for number in range(len(ranks), max(added_tokens, default=-1) + 1):
        entry = added_tokens.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        token = AddedToken(entry["content"], special=bool(entry.get("special")), normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def _list_merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield pairs in the order of merging: by the rank of the merged token, then by the ranks of the
    halves."""
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = (pair for pair in halves if pair[0] in ranks and pair[1] in ranks)
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _list_byte_characters() -> list[str]:
    """The printable character of each byte, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + unprintable.index(byte)) for byte in range(256)]


def _read_added_tokens(folder: Path) -> dict[int, Any]:
    """Added tokens of tokenizer_config.json by id."""
    file = folder / "tokenizer_config.json"
    config = parse_json(file.read_bytes()) if file.is_file() else {}
    return {int(number): entry for number, entry in (config.get("added_tokens_decoder") or {}).items()}


def _find_expression(folder: Path) -> str:
    """The regular expression ``pat_str`` in the folder's Python: a string, or strings joined by a string.
    Raises ValueError if there is none, or if it is made of anything else."""
    for file in sorted(folder.glob("tokenization_*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [target for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign) and any(name.id.lower() == "pat_str" for name in names):
                value = node.value
                try:
                    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                        return str(ast.literal_eval(value.func.value)).join(ast.literal_eval(value.args[0]))
                    return str(ast.literal_eval(value))
                except (ValueError, IndexError, TypeError) as error:
                    raise ValueError(
                        f"pat_str in {file} is not made of strings alone; save a tokenizer.json"
                    ) from error
    raise ValueError(
        f"{folder} has a vocabulary of tiktoken, and no tokenization_*.py with a pat_str that splits texts; "
        "add the model's, or save a tokenizer.json"
    )
