"""The reader: a small model that answers questions from a memory and nothing else, its folder and its
lessons.

/ Karo: moved Oslo / Mira: Karo adopted a cat <q> where is the home of Karo? <a> Oslo <end>
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lab.forgetting.world import (
    MARKS,
    RELATIONS,
    UNKNOWN,
    History,
    Turn,
    history,
    reply,
    supported,
    syllables,
    words,
)

SPECIAL = ("<|pad|>", "<|q|>", "<|a|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|q|> ' + message['content'] + '<|a|>' }}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
)
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


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


def write_folder(folder: Path, seed: int = 0, **changed: Any) -> None:
    """A model that has learnt nothing yet, as a Hugging Face folder."""
    import torch

    from ostinato.model.config import read_config
    from ostinato.model.decoder import Decoder
    from ostinato.model.hf import save_model

    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    end, pad = made.token_to_id("<|end|>"), made.token_to_id("<|pad|>")
    named = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ids = {"eos_token_id": end, "pad_token_id": pad, "vocab_size": made.get_vocab_size(), "dtype": "float32"}
    for name, content in (("tokenizer_config.json", named), ("config.json", ARCHITECTURE | changed | ids)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    decoder = Decoder(read_config(folder), dtype=torch.float32).init_weights(seed)
    save_model(decoder, folder)


def counter(made: Any) -> Callable[[str], int]:
    """Tokens of lines of a memory, their borders included."""

    @lru_cache(maxsize=1 << 18)
    def line(text: str) -> int:
        return len(made.encode(f" / {text.rstrip()}", add_special_tokens=False).ids)

    return lambda text: sum(map(line, text.splitlines()))


def shown(texts: Sequence[str]) -> str:
    """A memory as the reader sees it."""
    return "".join(f" / {text}" for text in texts)


def shortened(rng: random.Random, turn: Turn) -> str:
    """A turn with few of its words: of a fact those that say it, and some others by chance."""
    said = turn.text.split()
    keep = turn.fact.words if turn.fact else frozenset(word for word in said if rng.random() < 0.4)
    loose = rng.choice((0.0, 0.2, 0.7))
    rest = [word for word in said if word.strip(MARKS) in keep or rng.random() < loose]
    if turn.fact is not None and rng.random() < 0.05:  # a fact that lost its value or its verb
        rest.remove(rng.choice(rest))
    return f"{turn.speaker}: {' '.join(rest)}"


def view(
    rng: random.Random, found: History, count: Callable[[str], int], most: int
) -> list[tuple[Turn, str]]:
    """Some memory of a history: turns dropped and shortened by chance, at most ``most`` tokens."""
    short, facts = rng.choice((0.0, 0.5, 1.0)), rng.choice((0.5, 0.9, 1.0))
    turns = [turn for turn in found.turns if turn.fact is None or rng.random() < facts]
    lines = [(one, shortened(rng, one) if rng.random() < short else one.line) for one in turns]
    sizes = {one.idx: count(text) for one, text in lines}
    of_facts = rng.random()  # how much sooner noise goes
    order = sorted(lines, key=lambda line: rng.random() + of_facts * (line[0].fact is None), reverse=True)
    total, gone = sum(sizes.values()), set()
    for one, _ in order:
        if total <= most:
            break
        total -= sizes[one.idx]
        gone.add(one.idx)
    return [line for line in lines if line[0].idx not in gone]


def lesson(
    rng: random.Random, count: Callable[[str], int], least: int, most: int, questions: int
) -> dict[str, Any]:
    """One row: a memory of ``least`` to ``most`` tokens and questions, answered by what the memory still
    says."""
    size = int(least * (most / least) ** rng.random())
    people = rng.randint(3, 6) if most > 200 else 3
    found = history(
        rng.getrandbits(48), tokens=int(size * rng.choice((1, 1, 2, 4))), count=count, people=people,
        stated=rng.uniform(0.3, 0.9), changes=rng.uniform(0.1, 0.9), questions=10 * questions,
    )  # fmt: skip
    memory = view(rng, found, count, size)
    asked = [(one.text, reply(one.chain, supported(memory, one.chain))) for one in found.questions]
    known = [one for one in asked if one[1] != UNKNOWN]
    unknown = [one for one in asked if one[1] == UNKNOWN]
    rng.shuffle(known)
    rng.shuffle(unknown)
    chosen = known[: questions - questions // 4]
    chosen += unknown[: max(1, len(chosen) // 4)]
    rng.shuffle(chosen)
    messages = [{"role": "system", "content": shown([text for _, text in memory])}]
    for text, answer in chosen:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f" {answer}"}]
    return {"messages": messages}


def drill(rng: random.Random, count: Callable[[str], int], questions: int) -> dict[str, Any]:
    """One row of the first lesson, which is whose value is whose: facts of one or two relations of
    several people, in few words, and a question about each."""
    relations = rng.sample([*RELATIONS, "date"], rng.choice((1, 1, 2)))
    found = history(
        rng.getrandbits(48), tokens=0, count=count, people=rng.randint(3, 6), stated=1.0, changes=0.0,
        questions=10 * questions, relations=relations,
    )  # fmt: skip
    turns = [turn for turn in found.turns if turn.speaker != "tool"]
    lines = [(turn, shortened(rng, turn) if rng.random() < 0.8 else turn.line) for turn in turns]
    asked = [
        (one.text, reply(one.chain, supported(lines, one.chain)))
        for one in found.questions
        if len(one.chain) == 1
    ]
    asked = [one for one in asked if one[1] != UNKNOWN or rng.random() < 0.02][:questions]
    rng.shuffle(asked)
    messages = [{"role": "system", "content": shown([text for _, text in lines])}]
    for text, answer in asked:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f" {answer}"}]
    return {"messages": messages}


def lessons(seed: int, number: int, least: int, most: int, questions: int = 24) -> Iterator[dict[str, Any]]:
    rng, count = random.Random(f"lessons/{seed}/{most}"), counter(tokenizer())
    for _ in range(number):
        yield lesson(rng, count, least, most, questions)
