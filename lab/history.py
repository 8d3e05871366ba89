"""``ostinato bench history``: what ten million tokens cost: to index, to hold, to search, to draft from.

The text is synthetic and repeats itself as siblings do: every answer of a prompt follows the prompt's common
answer, leaves it at random places and comes back. Drafting is timed alone, on one thread, on sequences that
go on as such an answer would, and compared with the pass of the engine without drafts at the same batch size.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.arms import Holder
from lab.epochs import Model, answers_of
from lab.harness import Bench, Result, Say, option
from ostinato.algo.noise import key, uniform
from ostinato.engine.local import LocalEngine
from ostinato.history.blocks import CONTEXT
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.native.library import Span, load_library
from ostinato.history.store import History, prompt_key
from ostinato.model.named import model_folder
from ostinato.protocols import Drafter
from ostinato.types import DraftQuery, Drafts, HistoryEntry, Request, SampledTokens, Sampling

COMMON = 0.97  # probability of the next token of the common answer
AWAY = 20  # most tokens between leaving it and coming back
ALLOWED = {"build_tokens_per_s": 1e6, "bytes_per_token": 12.0, "drafting_share": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCost(Bench):
    """``prompts`` x ``group`` answers of about ``length`` tokens; drafting at ``batches`` on ``models``."""

    prompts: int = option(512, "16 answers of some 1,220 tokens to each.")
    group: int = 16
    length: int = 1220
    vocab: int = 49152
    models: tuple[str, ...] = ("asset:seed-moe", "smollm2-135m")
    batches: tuple[int, ...] = (16, 64)
    passes: int = 300  # of drafting, timed
    dtype: str = "bfloat16"

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.group * self.length

    def quick(self) -> HistoryCost:
        return replace(self, prompts=16, passes=100)

    def measure(self, say: Say) -> dict[str, Any]:
        history, store = _store(self, say)
        result: dict[str, Any] = {"store": store, "drafting": [], "skipped": []}
        for batch in self.batches:
            drafting = drafting_us(self, history, batch)
            say(f"batch {batch}: drafting takes {drafting:.2f} us of CPU per sequence and pass")
            result["drafting"].append(
                {"batch": batch, "us_per_sequence_pass": round(drafting, 3), "passes": {}}
            )
        for name in self.models:
            try:
                folder = str(model_folder(name))
            except ValueError as error:
                result["skipped"].append(f"{name} was skipped: {error}")
                say(result["skipped"][-1])
                continue
            model = Model.load(folder, dtype=self.dtype, fp32_head=True, say=say)
            for entry in result["drafting"]:
                seconds = pass_s(model, entry["batch"])
                share = entry["us_per_sequence_pass"] * 1e-6 * entry["batch"] / seconds
                entry["passes"][name] = {
                    "pass_ms": round(1e3 * seconds, 3),
                    "drafting_share": round(share, 5),
                }
                say(f"{name}, batch {entry['batch']}: {1e3 * seconds:.2f} ms per pass, drafting {share:.1%}")
        return result | {"settings": asdict(self) | {"allowed": ALLOWED}}

    @staticmethod
    def table(result: Result) -> Table:
        store, allowed = result["store"], result["settings"]["allowed"]
        out = Table("figure", title=f"history of {store['tokens'] / 1e6:.1f} M tokens, one thread")
        out.add_column("measured", justify="right")
        out.add_column("limit", justify="right")
        speed, size = store["build_tokens_per_s"] / 1e6, store["bytes_per_token"]
        out.add_row(
            "index built", f"{speed:.2f} M tokens/s", f"at least {allowed['build_tokens_per_s'] / 1e6:g}"
        )
        out.add_row("memory", f"{size:.2f} B per token", f"at most {allowed['bytes_per_token']:g}")
        out.add_row("memory, as the process grew", f"{store['resident_bytes_per_token']:.2f} B per token")
        if store["find_us"] is not None:
            out.add_row("longest match found", f"{store['find_us']:.2f} us")
        for entry in result["drafting"]:
            batch = entry["batch"]
            out.add_section()
            out.add_row(
                f"drafting at batch {batch}", f"{entry['us_per_sequence_pass']:.2f} us of CPU per sequence"
            )
            for name, one in entry["passes"].items():
                limit = f"at most {allowed['drafting_share']:.0%}"
                out.add_row(
                    f"  of a pass of {name}", f"{one['drafting_share']:.2%} of {one['pass_ms']:.2f} ms", limit
                )
        for sentence in result["skipped"]:
            out.add_row(sentence)
        return out


# ---- the store


def _store(bench: HistoryCost, say: Say) -> tuple[History, dict[str, float | None]]:
    """The history of the bench, and what it took: seconds without those of making the text up."""
    history = History(memory_mb=4096, epochs=1)
    before, add_s, tokens = resident_bytes(), 0.0, 0
    for prompt in range(bench.prompts):
        pasts = answers(bench, prompt)
        start = time.perf_counter()
        history.add(uid(prompt), 1, pasts)
        add_s += time.perf_counter() - start
        tokens += sum(len(one.tokens) for one in pasts)
    start = time.perf_counter()
    history.build_now()
    build_s = time.perf_counter() - start
    store = {
        "tokens": tokens,
        "add_s": round(add_s, 3),
        "index_s": round(build_s, 3),
        "build_tokens_per_s": round(tokens / (add_s + build_s)),
        "bytes_per_token": round(history.bytes_per_token, 3),
        "resident_bytes_per_token": round((resident_bytes() - before) / tokens, 3),
        "find_us": find_us(bench, history),
    }
    say(
        f"{tokens / 1e6:.2f} M tokens added and indexed, {store['build_tokens_per_s'] / 1e6:.2f} M tokens/s, "
        f"{store['bytes_per_token']:.1f} bytes per token ({store['resident_bytes_per_token']:.1f} resident)"
    )
    return history, store


def find_us(bench: HistoryCost, history: History, finds: int = 2000, context: int = 32) -> float:
    """Microseconds to find the longest match of the last ``context`` tokens of an answer that is not stored,
    without what a call from Python costs."""
    library, span = load_library(), Span()
    rng, seconds = np.random.default_rng(3), 0.0
    for index in range(finds):
        prompt = index % bench.prompts
        said = World.of(bench, prompt).answer(rng.random(bench.length), rng).tokens
        end = int(rng.integers(context, bench.length))
        asked = np.ascontiguousarray(said[end - context : end], np.int32)
        block = library.history_block(history.native, prompt_key(uid(prompt)), 1)
        place = asked.ctypes.data
        start = time.perf_counter()
        library.history_longest(block, place, context, 1, span)
        middle = time.perf_counter()
        library.history_generation(history.native)
        seconds += 2 * middle - start - time.perf_counter()
    return round(1e6 * seconds / finds, 3)


def uid(prompt: int) -> str:
    return f"prompt {prompt}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """A policy on one prompt: its common answer with probability COMMON at every token."""

    tokens: np.ndarray  # [length] int32
    edges: np.ndarray  # [length] float64

    @classmethod
    def of(cls, bench: HistoryCost, prompt: int) -> World:
        rng = np.random.default_rng((prompt, 0))
        tokens = (rng.zipf(1.3, bench.length) % bench.vocab).astype(np.int32)
        return cls(tokens=tokens, edges=rng.random(bench.length) * (1 - COMMON))

    def answer(self, u: np.ndarray, rng: np.random.Generator) -> HistoryEntry:
        """What the uniforms u [length] draw: where one leaves the common answer, up to AWAY tokens of
        anything follow, and then the common answer again."""
        tokens, edges, probs = self.tokens.copy(), self.edges.copy(), np.full(len(u), COMMON)
        back = 0
        for place in np.flatnonzero((u < self.edges) | (u >= self.edges + COMMON)).tolist():
            if place >= back:
                back = min(len(u), place + int(rng.integers(1, AWAY + 1)))
                away = slice(place, back)
                tokens[away] = rng.permutation(self.tokens)[: back - place]
                probs[away], edges[away] = 0.1, np.clip(u[away] - 0.05, 0.0, 0.9)
        return HistoryEntry(
            context=self.tokens[:CONTEXT],
            tokens=tokens,
            probs=probs.astype(np.float32),
            edges=edges.astype(np.float32),
            reward=float(rng.integers(2)),
        )


def answers(bench: HistoryCost, prompt: int) -> list[HistoryEntry]:
    """A group of answers to one prompt."""
    world, rng = World.of(bench, prompt), np.random.default_rng((prompt, 1))
    return [world.answer(rng.random(bench.length), rng) for _ in range(bench.group)]


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---- drafting


@dataclass(slots=True)
class Follower:
    """A running sequence of the synthetic world: what it will say is settled by its noise."""

    handle: int
    will_say: HistoryEntry
    said: int = 0

    @property
    def left(self) -> int:
        return len(self.will_say.tokens) - self.said


def drafting_us(bench: HistoryCost, history: History, batch: int) -> float:
    """Microseconds of CPU per (sequence, pass) inside the drafter: opening, proposing and observing, with
    ``batch`` sequences of as many prompts running; a sequence that ends is followed by another."""
    drafter = Holder(HistoryDrafter(history), clock=time.thread_time)
    table = 1e-3 + 1e-5 * (batch + np.arange(8 * batch + 1))  # seconds of a pass of a small model
    running: list[Follower] = []
    opened = 0
    for _ in range(bench.passes):
        while len(running) < batch:
            running.append(_follower(bench, drafter, opened))
            opened += 1
        asked = DraftQuery(
            handles=np.array([one.handle for one in running], np.int64),
            room=np.array([one.left - 1 for one in running], np.int32),
            weights=np.ones(batch, np.float32),
            seconds=table,
        )
        drafter.observe(verified(running, drafter.propose(asked)))
        running = [one for one in running if one.left]
    return 1e6 * drafter.seconds / (batch * bench.passes)


def _follower(bench: HistoryCost, drafter: Drafter, index: int) -> Follower:
    world = World.of(bench, index % bench.prompts)
    request = Request(
        tokens=world.tokens[:CONTEXT],
        sampling=Sampling(max_tokens=bench.length),
        seed=(0, 2, index),
        uid=uid(index % bench.prompts),
    )
    u = uniform(key(request.seed), CONTEXT + np.arange(bench.length))
    return Follower(drafter.open(request), world.answer(u, np.random.default_rng((index, 2))))


def verified(running: Sequence[Follower], drafts: Drafts) -> SampledTokens:
    """Sample, then match: what each says next, up to one token beyond the drafts that it agrees with."""
    counts: list[int] = []
    parts: list[tuple[np.ndarray, ...]] = []
    first = 0
    for one, drafted in zip(running, drafts.counts.tolist(), strict=True):
        said = one.will_say
        coming = said.tokens[one.said : one.said + drafted]
        missed = coming != drafts.tokens[first : first + len(coming)]
        count = min(one.left, (int(missed.argmax()) if missed.any() else len(coming)) + 1)
        place = slice(one.said, one.said + count)
        parts.append((said.tokens[place], said.probs[place], said.edges[place]))
        counts.append(count)
        one.said += count
        first += drafted
    tokens, probs, edges = (np.concatenate(column) for column in zip(*parts, strict=True))
    return SampledTokens(
        handles=np.array([one.handle for one in running], np.int64),
        counts=np.array(counts, np.int32),
        tokens=tokens,
        probs=probs,
        edges=edges,
        ended=np.array([one.left == 0 for one in running]),
    )


def pass_s(model: Model, batch: int, rounds: int = 3, new_tokens: int = 48, prompt_tokens: int = 32) -> float:
    """Median seconds of a pass of the engine without drafts while ``batch`` sequences run."""
    vocab = model.decoder.config.vocab_size
    engine = LocalEngine(
        model.decoder,
        kernels=model.kernels,
        kv_memory_mb=256,
        max_batch=batch,
        context_limit=prompt_tokens + new_tokens,
    )
    times = []
    for round_ in range(rounds + 1):
        prompts = np.random.default_rng(round_).integers(0, vocab, (batch, prompt_tokens), np.int32)
        requests = [
            Request(tokens=tokens, sampling=Sampling(max_tokens=new_tokens), seed=(round_, row))
            for row, tokens in enumerate(prompts)
        ]
        before, start = engine.counters.steps, time.perf_counter()
        asyncio.run(answers_of(engine, requests))
        times.append((time.perf_counter() - start) / (engine.counters.steps - before))
    return statistics.median(times[1:])  # the first warms up


# ---- for people
