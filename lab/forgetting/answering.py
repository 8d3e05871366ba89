"""The trained reader as a function: contexts and questions in, greedy answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lab.forgetting.contenders import Lines
from lab.forgetting.reader import shown
from lab.forgetting.teach import Rows
from lab.forgetting.world import Question
from ostinato.model.hf import load_model
from ostinato.render import Renderer

LONGEST = 8  # tokens of an answer, its end included
TOGETHER = 8192  # tokens of a pass


@dataclass
class ModelReader:
    """Greedy. Answers of one context and question are computed once."""

    folder: Path
    known: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._renderer = Renderer(self.folder)
        self._decoder = load_model(self.folder, dtype=torch.float32)
        self._encode = self._renderer.tokenizer.encode
        self._end = self._encode("<|end|>", add_special_tokens=False).ids[0]

    def __call__(self, asked: Sequence[tuple[Lines, Question]]) -> list[str]:
        keys = [(shown([text for _, text in lines]), question.text) for lines, question in asked]
        new = [key for key in dict.fromkeys(keys) if key not in self.known]
        rows = {
            key: self._encode(f"{key[0]}<|q|> {key[1]}<|a|>", add_special_tokens=False).ids for key in new
        }
        part: list[tuple[str, str]] = []
        for key in sorted(new, key=lambda key: len(rows[key])):
            if part and (len(part) + 1) * (len(rows[key]) + LONGEST) > TOGETHER:
                self._answer(part, [rows[one] for one in part])
                part = []
            part.append(key)
        if part:
            self._answer(part, [rows[one] for one in part])
        return [self.known[key] for key in keys]

    def _answer(self, keys: Sequence[tuple[str, str]], rows: Sequence[list[int]]) -> None:
        texts = [list(row) for row in rows]
        open_ = list(range(len(rows)))
        for _ in range(LONGEST):
            best = self._next([texts[at] for at in open_])
            for at, token in zip(open_, best, strict=True):
                texts[at].append(token)
            open_ = [at for at, token in zip(open_, best, strict=True) if token != self._end]
            if not open_:
                break
        for key, row, text in zip(keys, rows, texts, strict=True):
            self.known[key] = self._renderer.decode(text[len(row) :]).strip()

    def _next(self, rows: Sequence[list[int]]) -> list[int]:
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
        for at, row in enumerate(rows):
            tokens[at, : len(row)] = torch.tensor(row, dtype=torch.int32)
        length = tokens.shape[1]
        positions = torch.arange(length, dtype=torch.int32).repeat(len(rows))
        with torch.inference_mode():
            hidden, _ = self._decoder(tokens.flatten(), positions, Rows(len(rows)))
            last = torch.tensor([at * length + len(row) - 1 for at, row in enumerate(rows)])
            logits: Tensor = self._decoder.logits(hidden[last])
        return logits.argmax(-1).tolist()


__all__ = ["ModelReader"]
