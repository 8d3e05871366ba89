"""``ostinato bench draft --never-slower``: what drafts cost where they cannot help, and gain where they can.

A cell is a model, a temperature, a batch size and a history. Without and with drafts, the same requests are
rolled out in turn (A B A B), each turn under fresh noise, until the ratio is known or the time is over.

    useful    answers to the same prompts by the same policy: an epoch ago, nothing learned since
    useless   another prompt's answers, and the intervals of their tokens drawn at random: they match and lie
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

import numpy as np
from rich.table import Table

from lab.arms import Pair, Rollout
from lab.epochs import Model
from lab.harness import Bench, Result, Say, option
from lab.settings import Clock
from ostinato.env.tasks import load_tasks
from ostinato.history.blocks import CONTEXT
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.store import History
from ostinato.model.named import model_folder
from ostinato.render import Renderer
from ostinato.types import Completion, HistoryEntry, Request, Sampling

GROUP = 16  # siblings of a prompt, in the history and in a batch of 16 or more
LEAST_TURNS = 3  # of a cell, however long they are
KNOWN_FROM = 10
ALLOWED = 0.97  # the least ratio that counts as never slower


class Kind(StrEnum):
    """Of history."""

    USEFUL = "useful"
    USELESS = "useless"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverSlower(Bench):
    """``batches`` are sequences that begin together, with nothing waiting, as a step of as many does; each
    has at most ``new_tokens`` tokens. A cell ends when the standard error of its ratio is below
    ``precision``, or after ``cell_s``."""

    models: tuple[str, ...] = ("asset:seed-moe", "smollm2-135m")
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = option(
        (1, 4, 16, 64, 256), "Sequences that begin together, with commas.", "batch"
    )
    temperatures: tuple[float, ...] = (0.6, 1.0)
    new_tokens: int = 48
    precision: float = 0.005
    cell_s: float = 14.0
    clock: Clock = option(Clock.WALL, "cpu is for one thread on a machine that others use too.")

    def quick(self) -> NeverSlower:
        return replace(self, batches=(1, 16), temperatures=(1.0,), cell_s=3.0)

    def measure(self, say: Say) -> dict[str, Any]:
        cells: list[dict[str, Any]] = []
        skipped: list[str] = []
        for name in self.models:
            try:
                folder = str(model_folder(name))
            except ValueError as error:
                skipped.append(f"{name} was skipped: {error}")
                say(skipped[-1])
                continue
            for cell in _cells(self, name, folder, say):
                cells.append(cell)
                say(_line(cell))
        return summary(self, cells, skipped)

    @staticmethod
    def table(result: Result) -> Table:
        settings = result["settings"]
        worst = result["worst"]
        caption = "no cell was measured"
        if worst is not None:
            caption = (
                f"the worst is {worst['ratio']:.3f} +- {worst['error']:.3f} ({_name(worst)}); "
                f"{result['below']} of {len(result['cells'])} are below {ALLOWED}; "
                f"{result['mismatches']} answers differ"
            )
        title = f"{settings['clock']} seconds without drafts / with (1 is equally fast, more is faster)"
        out = Table(
            "model", "temperature", "history", title=title, caption="\n".join([caption, *result["skipped"]])
        )
        for batch in settings["batches"]:
            out.add_column(f"batch {batch}", justify="right")
        places = {(c["model"], c["temperature"], c["history"], c["batch"]): c for c in result["cells"]}
        for model in dict.fromkeys(cell["model"] for cell in result["cells"]):
            for temperature, kind in product(settings["temperatures"], Kind):
                row = [places.get((model, temperature, str(kind), batch)) for batch in settings["batches"]]
                out.add_row(model, str(temperature), str(kind), *[_ratio(cell) for cell in row])
            out.add_section()
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Seconds without and with drafts of the same requests, turn by turn."""

    plain: tuple[float, ...] = ()
    drafts: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Median over turns of plain / drafts: 1 is equally fast, below 1 drafts are slower."""
        return statistics.median(a / b for a, b in zip(self.plain, self.drafts, strict=True))

    @property
    def error(self) -> float:
        """Standard error of the ratio, robust: from the median absolute deviation over turns."""
        if len(self.plain) < 2:
            return math.inf
        ratios = [a / b for a, b in zip(self.plain, self.drafts, strict=True)]
        middle = statistics.median(ratios)
        deviation = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
        return 1.2533 * deviation / math.sqrt(len(ratios))  # of a median, for normal noise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What is measured of one model."""

    prompts: Mapping[str, np.ndarray]  # tokens by uid
    stop_tokens: tuple[int, ...]

    @classmethod
    def of(cls, folder: str, count: int) -> Work:
        renderer = Renderer(model_folder(folder))
        rows = load_tasks("arithmetic", "train", 0, count)
        prompts = {prompt.uid: renderer.prompt(prompt) for prompt in rows}
        return cls(prompts=prompts, stop_tokens=renderer.stop_tokens)


def _cells(bench: NeverSlower, name: str, folder: str, say: Say) -> Any:
    """Every cell of one model."""
    model = Model.load(folder, dtype=bench.dtype, fp32_head=True, say=say)
    work = Work.of(folder, -(-max(bench.batches) // GROUP))
    context = max(len(tokens) for tokens in work.prompts.values()) + bench.new_tokens + 1
    pair = Pair(
        model,
        kv_memory_mb=_kv_memory_mb(model, max(bench.batches), context),
        max_batch=max(bench.batches),
        context_limit=min(context, model.decoder.config.max_positions),
        clock=bench.clock,
    )
    pair.warm_up(_requests(bench, work, 1.0, min(4, max(bench.batches)), seed=-1))
    for temperature in bench.temperatures:
        answers = _past_answers(bench, pair, work, temperature)
        for batch, kind in product(bench.batches, Kind):
            history = History()
            for uid, pasts in (answers if kind is Kind.USEFUL else misleading(answers)).items():
                history.add(uid, 1, pasts)
            history.build_now()
            turns = _measure(bench, pair, history, work, temperature, batch)
            yield {"model": name, "temperature": temperature, "batch": batch, "history": str(kind)} | turns


def _measure(
    bench: NeverSlower, pair: Pair, history: History, work: Work, temperature: float, batch: int
) -> dict[str, Any]:
    """The figures of one cell: who begins alternates, so that neither always follows the other's waste."""
    drafter = HistoryDrafter(history)
    pairs, wrong, last = Pairs(), 0, None
    deadline = time.perf_counter() + bench.cell_s
    turn = 0
    while turn < LEAST_TURNS or (time.perf_counter() < deadline and not _known(pairs, bench.precision)):
        requests = _requests(bench, work, temperature, batch, seed=turn)
        if turn % 2:
            last, plain = pair.rollout(drafter, requests), pair.rollout(None, requests)
        else:
            plain, last = pair.rollout(None, requests), pair.rollout(drafter, requests)
        drafter.forget()  # the next turn is another step: only its history is known to it
        wrong += _differ(plain, last)
        pairs = Pairs(plain=(*pairs.plain, plain.seconds), drafts=(*pairs.drafts, last.seconds))
        turn += 1
    assert last is not None
    return {
        "ratio": round(pairs.ratio, 4),
        "error": round(pairs.error, 4),
        "first_ratio": round(pairs.plain[0] / pairs.drafts[0], 4),  # before the drafter has learned anything
        "turns": turn,
        "plain_s": round(statistics.median(pairs.plain), 4),
        "tokens_per_pass": round(last.tokens / max(1, last.passes), 3),
        "acceptance": round(last.accepted / last.drafted, 3) if last.drafted else None,
        "drafting_share": round(last.drafting_s / last.seconds, 5),
        "mismatches": wrong,
    }


def _known(pairs: Pairs, precision: float) -> bool:
    """An error estimated from a few turns can be small by chance, so it counts from KNOWN_FROM turns on."""
    return len(pairs.plain) >= KNOWN_FROM and pairs.error <= precision


def _differ(plain: Rollout, drafts: Rollout) -> int:
    pairs = zip(plain.answers, drafts.answers, strict=True)
    return sum(not np.array_equal(one.tokens, other.tokens) for one, other in pairs)


def _requests(bench: NeverSlower, work: Work, temperature: float, batch: int, seed: int) -> list[Request]:
    """``batch`` of them, in groups of siblings; the next seed begins with the next prompt."""
    sampling = Sampling(temperature=temperature, max_tokens=bench.new_tokens, stop_tokens=work.stop_tokens)
    names = list(work.prompts)
    return [
        Request(tokens=work.prompts[uid], sampling=sampling, seed=(seed, batch, member), uid=uid)
        for member in range(batch)
        for uid in (names[(seed + member // GROUP) % len(names)],)
    ]


def _past_answers(
    bench: NeverSlower, pair: Pair, work: Work, temperature: float
) -> dict[str, tuple[HistoryEntry, ...]]:
    """A group of answers to every prompt by the policy itself, of other noise than any turn's."""
    requests = _requests(bench, work, temperature, GROUP * len(work.prompts), seed=-2)
    answers = pair.rollout(None, requests).answers
    by_uid: dict[str, list[HistoryEntry]] = {uid: [] for uid in work.prompts}
    for request, answer in zip(requests, answers, strict=True):
        by_uid[request.uid].append(past(request.tokens, answer))
    return {uid: tuple(pasts) for uid, pasts in by_uid.items()}


def past(context: np.ndarray, answer: Completion) -> HistoryEntry:
    """An answer as history keeps it."""
    assert answer.edges is not None  # our engine's completions have them
    return HistoryEntry(
        context=context[-CONTEXT:], tokens=answer.tokens, probs=np.exp(answer.logprobs), edges=answer.edges
    )


def misleading(answers: Mapping[str, Sequence[HistoryEntry]]) -> dict[str, tuple[HistoryEntry, ...]]:
    """The answers of every prompt under the next prompt's uid, their intervals put at random places."""
    rng = np.random.default_rng(0)
    uids = list(answers)

    def moved(one: HistoryEntry) -> HistoryEntry:
        edges = (rng.random(len(one.tokens)) * (1.0 - one.probs)).astype(np.float32)
        return replace(one, edges=edges)

    return {
        uid: tuple(moved(one) for one in answers[other])
        for uid, other in zip(uids, [*uids[1:], uids[0]], strict=True)
    }


def _kv_memory_mb(model: Model, batch: int, context: int) -> int:
    """For ``batch`` sequences of ``context`` positions, and a third more for the branches of drafts."""
    from ostinato.engine.cache import BLOCK
    from ostinato.engine.paged import block_bytes

    decoder = model.decoder
    each = block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype)
    blocks = batch * (context // BLOCK + 2)
    return max(16, math.ceil(1.33 * blocks * each / 2**20))


def summary(bench: NeverSlower, cells: Sequence[Mapping[str, Any]], skipped: Sequence[str]) -> dict[str, Any]:
    """The JSON of the command: ``worst`` is the cell with the least ratio."""
    worst = min(cells, key=lambda cell: cell["ratio"], default=None)
    return {
        "cells": list(cells),
        "worst": worst,
        "below": sum(cell["ratio"] < ALLOWED for cell in cells),
        "mismatches": sum(cell["mismatches"] for cell in cells),
        "skipped": list(skipped),
        "settings": asdict(bench) | {"allowed": ALLOWED},
    }


def _line(cell: Mapping[str, Any]) -> str:
    return (
        f"{cell['model']} batch {cell['batch']} temperature {cell['temperature']} {cell['history']} history: "
        f"{cell['ratio']:.3f} +- {cell['error']:.3f} ({cell['turns']} turns, {cell['plain_s']:.2f} s without)"
    )


def _ratio(cell: Mapping[str, Any] | None) -> str:
    return f"{cell['ratio']:.3f} ± {cell['error']:.3f}" if cell else "-"


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['model']}, {cell['history']}, temperature {cell['temperature']}, batch {cell['batch']}"
