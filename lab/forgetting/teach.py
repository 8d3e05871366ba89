"""Teach the reader: ``python -m lab.forgetting.teach FOLDER``; it goes on where it was stopped.

Rows are drawn as they are needed. Every token is learnt, those of answers with their full weight:
predicting the second syllable of a name that was there before is what first makes a model look back.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lab.forgetting.reader import counter, drill, lesson, write_folder
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.render import Renderer

OTHERS = 0.2  # weight of a token that is no answer


class Rows:
    """Attention within each of ``number`` rows of one length, padded at their ends where it is causal."""

    def __init__(self, number: int, causal: bool = True) -> None:
        self.number, self.causal = number, causal

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (one.unflatten(0, (self.number, -1)).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def encoded(made: Any, found: dict[str, Any], others: float) -> tuple[list[int], list[float]]:
    """Tokens of a lesson, as the template of the folder writes it, and the weight of each."""
    tokens: list[int] = []
    weights: list[float] = []
    for message in found["messages"]:
        text, answers = message["content"], message["role"] == "assistant"
        text = {"system": text, "user": f"<|q|> {text}<|a|>", "assistant": f"{text}<|end|>"}[message["role"]]
        ids = made.encode(text, add_special_tokens=False).ids
        tokens += ids
        weights += [1.0 if answers else others] * len(ids)
    return tokens, weights


def padded(rows: Sequence[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    """([R, T] tokens, [R, T] weights), zero after the end of a row."""
    tokens = torch.zeros(len(rows), max(len(ids) for ids, _ in rows), dtype=torch.int32)
    weights = torch.zeros(tokens.shape)
    for at, (ids, some) in enumerate(rows):
        tokens[at, : len(ids)], weights[at, : len(ids)] = (
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor(some),
        )
    return tokens, weights


def batches(
    rng: random.Random, rows: list[tuple[list[int], list[float]]], size: int
) -> list[tuple[Tensor, Tensor]]:
    """Rows of about one length together, in any order."""
    rows = sorted(rows, key=lambda one: len(one[0]))
    found = [padded(rows[at : at + size]) for at in range(0, len(rows), size)]
    rng.shuffle(found)
    return found


def losses(decoder: Decoder, tokens: Tensor) -> Tensor:
    """[R, T - 1]: of each token but the first, minus its log-probability."""
    number, length = tokens[:, :-1].shape
    positions = torch.arange(length, dtype=torch.int32).repeat(number)
    hidden, _ = decoder(tokens[:, :-1].flatten(), positions, Rows(number))
    logits, targets = decoder.logits(hidden), tokens[:, 1:].flatten().long()
    return F.cross_entropy(logits, targets, reduction="none").view(number, length)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--least", type=int, default=40)
    parser.add_argument("--most", type=int, default=120)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--end", type=float, default=1.0, help="the share of lr at the last step, linear")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--others", type=float, default=OTHERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drill", type=float, default=0.0, help="share of rows of the first lesson")
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not (args.folder / "config.json").exists():
        heads = args.hidden // 16
        write_folder(
            args.folder, args.seed, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
            num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
    renderer, decoder = Renderer(args.folder), load_model(args.folder, dtype=torch.float32)
    learn(renderer, decoder, args)


def learn(renderer: Renderer, decoder: Decoder, args: argparse.Namespace) -> None:
    parameters = list(decoder.trainable(True).parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)
    rng, made = random.Random(f"teach/{args.seed}/{args.most}/{time.time()}"), renderer.tokenizer
    count, began, sums = counter(made), time.process_time(), np.zeros(4)
    ready: list[tuple[Tensor, Tensor]] = []
    with (args.folder / "log.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        for step in range(1, args.steps + 1):
            if not ready:
                drawn = [
                    drill(rng, count, args.questions)
                    if rng.random() < args.drill
                    else lesson(rng, count, args.least, args.most, args.questions)
                    for _ in range(8 * args.rows)
                ]
                ready = batches(rng, [encoded(made, one, args.others) for one in drawn], args.rows)
            tokens, weights = ready.pop()
            weights = weights[:, 1:]
            each = losses(decoder, tokens)
            loss = (each * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * args.end ** (step / args.steps) * min(1.0, step / args.warmup)
            optimizer.step()
            flat = each.detach()[weights == 1.0]
            sums += [
                loss.item(),
                flat.mean().item(),
                (flat < 0.5).float().mean().item(),
                weights.gt(0).sum().item(),
            ]
            if step % 50 == 0:
                mean = (sums[:3] / 50).round(4).tolist()
                named = dict(zip(("loss", "answers", "sure"), mean, strict=True))
                took = round(time.process_time() - began, 1)
                line = {"step": step, "most": args.most, **named, "tokens": int(sums[3]), "cpu_s": took}
                log.write(json.dumps(line) + "\n")
                sums[:] = 0
            if step % 200 == 0 or step == args.steps:
                save_model(decoder, args.folder)


if __name__ == "__main__":
    main()
