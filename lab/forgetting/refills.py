"""Refills by two models of one size that learn from the same rows: ``ostinato bench memory --refills``.

     by the way, I moved to Oslo<|q|> 4<|a|> moved Oslo<|end|><|end|>     an original, a budget, a canvas

The autoregressive one writes the canvas a token after the other, up to an end. The masked-diffusion one sees
both sides. It learns to restore tokens of the canvas that were masked with probability t, weighted by 1 / t
(LLaDA, arXiv 2502.09992), and fills a canvas of masks, the tokens that it is surest of first. Its text is the
canvas without the ends, so the budget holds by construction. The mask is ``<|pad|>``, which no text has.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from lab.forgetting.contenders import Count
from lab.forgetting.policy import offered
from lab.forgetting.tokens import counter, tokenizer
from lab.forgetting.world import SMALL, History, Turn, history, words_of
from ostinato.apps.memory.diffusion import infilled
from ostinato.apps.memory.facts import unsupported
from ostinato.apps.memory.refill import Refiller, extract
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder

MASK, END = 0, 3  # <|pad|> and <|end|> of the tokenizer
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
HIDDEN = 64
LEAST_MASKED = 0.05  # t: a smaller one masks nothing of a short canvas, and weighs much where it does
ROWS = 64  # of a step
FACTS = 0.7  # of the rows; the others are of any turn
Lessons = list[tuple[Tensor, Tensor]]  # of one length each: [N, T] tokens, [N] where the canvas begins
Loss = Callable[[Decoder, Tensor, Tensor, Generator], Tensor]


def prompted(made: Any, original: str, budget: int) -> list[int]:
    return made.encode(f" {original}<|q|> {budget}<|a|>", add_special_tokens=False).ids


def size(made: Any, text: str) -> int:
    return len(made.encode(f" {text}", add_special_tokens=False).ids) if text else 0


def target(turn: Turn, fits: Callable[[str], bool]) -> str:
    """The words that say the fact of a turn, of another those that say something: each that fits, from the
    front."""
    kept: list[str] = []
    for word in words_of(turn.text):
        needed = word in turn.fact.words if turn.fact else word not in SMALL
        if needed and fits(" ".join([*kept, word])):
            kept.append(word)
    return " ".join(kept)


def lessons(seed: int, histories: int, rows: int) -> Lessons:
    """Of training histories, with budgets as a memory has them."""
    made, rng = tokenizer(), random.Random(f"refills/{seed}")
    count, end = counter(made), made.token_to_id("<|end|>")
    found = [history(1_000_000 * (seed + 1) + at, "train", count=count) for at in range(histories)]
    turns = [turn for one in found for turn in one.turns]
    facts = [turn for turn in turns if turn.fact is not None]
    by_length: dict[int, list[tuple[list[int], int]]] = {}
    for _ in range(rows):
        turn = rng.choice(facts if rng.random() < FACTS else turns)
        budget = max(1, round(rng.uniform(0.2, 0.7) * size(made, turn.text)))
        text = target(turn, lambda text, budget=budget: size(made, text) <= budget)
        canvas = made.encode(f" {text}", add_special_tokens=False).ids if text else []
        prompt = prompted(made, turn.text, budget)
        row = [*prompt, *canvas, *[end] * (budget - len(canvas))]
        by_length.setdefault(len(row), []).append((row, len(prompt)))
    return [
        (torch.tensor([row for row, _ in some], dtype=torch.int32), torch.tensor([at for _, at in some]))
        for some in by_length.values()
    ]


class Rows:
    """Attention within each of ``number`` rows of one length."""

    def __init__(self, number: int, causal: bool) -> None:
        self.number, self.causal = number, causal

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (one.unflatten(0, (self.number, -1)).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def ran(decoder: Decoder, tokens: Tensor, causal: bool) -> Tensor:
    """[R, T, D] of rows [R, T]."""
    rows, length = tokens.shape
    positions = torch.arange(length, dtype=torch.int32).repeat(rows)
    return decoder(tokens.flatten(), positions, Rows(rows, causal))[0].unflatten(0, (rows, length))


def autoregressive_loss(decoder: Decoder, tokens: Tensor, starts: Tensor, noise: Generator) -> Tensor:
    """Of the tokens of each canvas up to its first end."""
    counts = (torch.arange(1, tokens.shape[1]) >= starts[:, None]) & (tokens[:, :-1] != END)
    hidden = ran(decoder, tokens[:, :-1], causal=True)
    return F.cross_entropy(decoder.logits(hidden[counts]), tokens[:, 1:][counts].long())


def diffusion_loss(decoder: Decoder, tokens: Tensor, starts: Tensor, noise: Generator) -> Tensor:
    """Of the masked tokens of each canvas, each weighted by 1 / t; a row has its own part of 0 < t < 1."""
    rows, length = tokens.shape
    canvas = torch.arange(length) >= starts[:, None]
    t = (torch.arange(rows) + torch.rand(1, generator=noise)) / rows
    t = t.clamp_min(LEAST_MASKED)[:, None]
    masked = canvas & (torch.rand(rows, length, generator=noise) < t)
    hidden = ran(decoder, tokens.masked_fill(masked, MASK), causal=False)
    each = F.cross_entropy(decoder.logits(hidden[masked]), tokens[masked].long(), reduction="none")
    return (each / (t * canvas.sum(1, keepdim=True)).expand(rows, length)[masked]).sum() / rows


def learn(
    decoder: Decoder, loss: Loss, found: Lessons, steps: int, rows: int, seed: int, lr: float = 3e-3
) -> list[float]:
    """The mean loss of each tenth of the steps. The same seed gives both losses the same rows."""
    draw, noise = Generator().manual_seed(seed), Generator().manual_seed(seed + 1)
    parameters = list(decoder.trainable(True).parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)
    shares, values = torch.tensor([float(len(tokens)) for tokens, _ in found]), []
    for step in range(1, steps + 1):
        tokens, starts = found[int(torch.multinomial(shares, 1, generator=draw))]
        at = torch.randint(len(tokens), (rows,), generator=draw)
        value = loss(decoder, tokens[at], starts[at], noise)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 50) * (1 - step / (steps + 1))
        optimizer.step()
        values.append(value.item())
    decoder.trainable(False)
    tenth = max(1, steps // 10)
    return [round(sum(values[at : at + tenth]) / tenth, 4) for at in range(0, tenth * 10, tenth)]


class Cached:
    """Attention of one row that goes on: keys and values of what came before are kept."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        whole = len(q) == len(k)
        assert whole or len(q) == 1
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=whole, scale=scale).transpose(0, 1)


@dataclass(slots=True)
class ModelRefiller:
    """A ``Refiller``. ``passes``: in which a canvas is filled, at most one for each token; 0: a token after
    the other from the left. ``ran``: blocks, passes of the model, tokens that went through it."""

    decoder: Decoder
    passes: int
    ran: Counter[str] = field(default_factory=Counter)
    made: Any = field(default_factory=tokenizer)

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        if budget < 1:
            return ""
        self.ran["blocks"] += 1
        prompt = prompted(self.made, original, budget)
        with torch.inference_mode():
            canvas = self._infilled(prompt, budget) if self.passes else self._continued(prompt, budget)
        return self.made.decode(canvas).strip()  # without ends, which are special

    def per_block(self) -> dict[str, float]:
        return {name: round(self.ran[name] / self.ran["blocks"], 2) for name in ("passes", "tokens")}

    def _continued(self, prompt: list[int], budget: int) -> list[int]:
        attend, canvas, new = Cached(), [], prompt
        while len(canvas) < budget:
            best = int(self._logits(new, len(prompt) + len(canvas) - len(new), attend, 1).argmax())
            if best == END:
                break
            canvas.append(best)
            new = [best]
        return canvas

    def _infilled(self, prompt: list[int], budget: int) -> list[int]:
        def logits(canvas: list[int]) -> Tensor:
            return self._logits([*prompt, *canvas], 0, Rows(1, causal=False), budget)

        return infilled(logits, [MASK] * budget, MASK, self.passes)

    def _logits(self, tokens: list[int], at: int, attend: Any, last: int) -> Tensor:
        """[last, V], the mask never."""
        self.ran.update(passes=1, tokens=len(tokens))
        positions = torch.arange(at, at + len(tokens), dtype=torch.int32)
        hidden, _ = self.decoder(torch.tensor(tokens, dtype=torch.int32), positions, attend)
        logits = self.decoder.logits(hidden[-last:])
        logits[:, MASK] = -math.inf
        return logits


def taught(
    seed: int, steps: int, histories: int, say: Callable[[str], None]
) -> tuple[dict[str, ModelRefiller], list[dict[str, Any]]]:
    """(the refillers of a seed by name, how each model learnt)."""
    found, log = lessons(seed, histories, 200 * histories), []
    models: dict[str, Decoder] = {}
    for name, loss in (("autoregressive", autoregressive_loss), ("masked diffusion", diffusion_loss)):
        models[name], began = fresh(seed), time.process_time()
        values = learn(models[name], loss, found, steps, ROWS, seed)
        took = round(time.process_time() - began, 1)
        number = sum(one.numel() for one in models[name].parameters())
        log.append({"model": name, "seed": seed, "parameters": number, "losses": values, "cpu_s": took})
        say(f"seed {seed}: {name} learnt in {took} s, losses {values[0]} to {values[-1]}")
    diffusion = models["masked diffusion"]
    refillers = {"autoregressive": ModelRefiller(models["autoregressive"], 0)}
    for passes, name in ((1, "1 pass"), (2, "2 passes"), (1000, "a pass a token")):
        refillers[f"diffusion, {name}"] = ModelRefiller(diffusion, passes)
    return refillers, log


def fresh(seed: int, hidden: int = HIDDEN) -> Decoder:
    """A model that has learnt nothing."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "vocab_size": tokenizer().get_vocab_size(),
    }
    heads = {"num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 16}
    return Decoder(parse_config(ARCHITECTURE | sizes | heads), dtype=torch.float32).init_weights(seed)


def extracts() -> Refiller:
    """What a memory takes without a refiller, as one."""
    made = tokenizer()
    return lambda left, original, right, budget: extract(original, lambda text: size(made, text) <= budget)


def judged(histories: Sequence[History], refiller: Refiller, count: Count, least: int) -> dict[str, Any]:
    """Of every block at every level that a memory offers: the share that the gate lets through, that of
    these with a word which the original lacks, and of the facts that can be said in so many tokens those that
    what was let through still says."""
    seen: Counter[str] = Counter()
    spots = [
        (turn, room)
        for one in histories
        for turn in one.turns
        for room in offered(turn.speaker, turn.text, count(turn.line), count, least)[1:]
        if room
    ]
    began = time.process_time()
    texts = [refiller("", turn.text, "", max(0, room - count(f"{turn.speaker}: "))) for turn, room in spots]
    took = time.process_time() - began
    for (turn, room), text in zip(spots, texts, strict=True):
        false = unsupported(text, turn.text, turn.speaker)
        passed = bool(text) and not false and count(f"{turn.speaker}: {text}") <= room
        seen.update(blocks=1, empty=not text, unsupported=bool(false), passed=passed)
        seen["new"] += passed and not {*words_of(text)} <= {*words_of(turn.line)}
        if turn.fact is not None:
            short = target(turn, lambda part: True)
            if (
                turn.fact.words <= {*words_of(short), turn.speaker}
                and count(f"{turn.speaker}: {short}") <= room
            ):
                seen.update(sayable=1, kept=passed and turn.fact.words <= {*words_of(text), turn.speaker})
    n = seen["blocks"]
    row = {name: round(seen[name] / n, 4) for name in ("passed", "unsupported", "empty")}
    row |= {"new_words": round(seen["new"] / max(1, seen["passed"]), 4)}
    row |= {"kept": round(seen["kept"] / max(1, seen["sayable"]), 4), "facts": seen["sayable"], "blocks": n}
    return row | {"ms_per_block": round(1e3 * took / n, 3)}


__all__ = ["ModelRefiller", "extracts", "judged", "learn", "lessons", "taught"]
