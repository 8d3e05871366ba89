"""The account of a step: where tokens, seconds and FLOPs went. Pure, but for the clock.

FLOPs are a formula of the model's shapes (``model.flops``) and of the tokens: a token at position p of its
sequence is one row, which sees p + 1 positions. Waste is counted in sampled tokens, by reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ostinato.algo.pack import count_split_prompts
from ostinato.every import MONEY
from ostinato.model.flops import FlopModel, Work
from ostinato.observe.ledger import Terms
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.pipeline.credit import Credit
from ostinato.rollout.health import injected_tokens, prefilled_tokens, sampled_tokens
from ostinato.rollout.rollout import RolloutResult
from ostinato.routes import route_bytes
from ostinato.types import Batch, Completion, Group, StepReport

BUSY = {"rollout": "sample", "reward": "grade", "train": "train", "measure": "measure"}  # in the ledger
OF_KIND = {  # parts of the ledger; publishing and saving count as held, not busy, as in one process
    Kind.PREFILL: "sample",
    Kind.DECODE: "sample",
    Kind.GRADE: "grade",
    Kind.PACK: "train",
    Kind.TRAIN: "train",
}
TOOL_FAILURES = ("unreadable", "unknown", "raised", "timeout")
FREE = Terms()
SUMMED = {
    "total/seconds": ("step_time",),
    "total/device_seconds": ("device_seconds",),
    "total/sampled_tokens": ("tokens/played",),  # during the step, for whichever step
    "total/trained_tokens": ("tokens/trained",),
    "total/flops": ("flops/rollout", "flops/train", "flops/measure"),
    "total/compute_flops": ("flops/rollout", "flops/train"),
    "num_tokens": ("tokens/context", "tokens/sampled"),  # TRL's: all that was read and sampled
}


# ---- seconds


class Clock:
    """Wall seconds of one step, split so that the parts add up to the whole; also records timeline spans as
    ``worker``, with times from ``unix``, a clock of Unix seconds.

    Grading overlaps with generation; only what is left of it after the last token counts as "reward".
    Passes that measure the mismatch and train nothing are "measure". Where rollouts overlap with training,
    "rollout" is the time that the trainer waited for them, and "publish" is a part of its own.
    """

    def __init__(self, step: int = 0, unix: Callable[[], float] = time.time, worker: str = "trainer") -> None:
        self.start = time.perf_counter()
        self.spans: list[Span] = []
        self.step, self._unix, self._worker = step, unix, worker
        self.seconds = {"rollout": 0.0, "reward": 0.0, "train": 0.0, "measure": 0.0}

    def rollouts(self, played: Sequence[RolloutResult]) -> None:
        generated = max((item.generated_at for item in played), default=self.start)
        graded = max((item.graded_at for item in played), default=self.start)
        self.seconds["rollout"] = generated - self.start
        self.seconds["reward"] = max(0.0, graded - generated)

    @contextmanager
    def doing(self, part: str, kind: Kind) -> Iterator[None]:
        """Counts the time of the block as ``part`` (empty: as "other"), and records it as one span."""
        started, at = time.perf_counter(), self._unix()
        try:
            yield
        finally:
            if part:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started
            self.spans.append(
                Span(worker=self._worker, kind=kind, start=at, stop=self._unix(), step=self.step)
            )

    def measured(self, seconds: float) -> None:
        """Move ``seconds`` from "train" to "measure"."""
        self.seconds["train"] -= seconds
        self.seconds["measure"] += seconds

    @property
    def waited_s(self) -> float:
        """Seconds waited for the batch."""
        return self.seconds["rollout"] + self.seconds["reward"]

    def read(self) -> tuple[float, dict[str, float]]:
        """(seconds so far, seconds by part)."""
        total = time.perf_counter() - self.start
        return total, {**self.seconds, "other": total - sum(self.seconds.values())}

    def busy(self) -> dict[str, float]:
        """Seconds by part, as the ledger names them; what is left of the step is idle."""
        return {name: self.seconds[part] for part, name in BUSY.items()}


def busy_by_pool(
    spans: Iterable[Span], over: Mapping[str, Mapping[str, float]], pools: Mapping[str, int], seconds: float
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """(busy seconds by pool and part, at most ``seconds`` for each pool; the rest, carried over to the next
    step).

    ``pools`` maps a pool to its number of devices; a second of a pool is one on each of its devices. Spans
    are reported when they end, so they may add up to more than this step has; ``over`` is what the step
    before carried over. Nothing is counted twice or lost."""
    spent = {pool: dict(over.get(pool, {})) for pool in pools}
    for span in spans:
        part, pool = OF_KIND.get(span.kind), pool_of(span.worker)
        if part and pool in spent:
            spent[pool][part] = spent[pool].get(part, 0.0) + span.seconds / pools[pool]
    shares = {pool: min(1.0, seconds / (sum(parts.values()) or 1.0)) for pool, parts in spent.items()}
    busy, rest = (
        {pool: {part: n * share[pool] for part, n in parts.items()} for pool, parts in spent.items()}
        for share in (shares, {pool: 1 - share for pool, share in shares.items()})
    )
    return busy, rest


def share_seconds(busy: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Seconds by part of threads that share a pool: what they did at the same time counts once, as that of
    the first part."""
    left, counted = seconds, dict[str, float]()
    for part, spent in sorted(busy.items(), key=lambda item: (item[0] == "sample", item[0])):
        counted[part] = min(spent, left)
        left -= counted[part]
    return counted


def pipeline_row(
    by_pool: Mapping[str, Mapping[str, float]], pools: Mapping[str, int], seconds: float
) -> dict[str, float]:
    """How busy the pools were in ``seconds``: shares of all their devices, and of each pool."""
    busy = {pool: min(1.0, sum(by_pool[pool].values()) / seconds) for pool in pools}
    utilisation = sum(pools[pool] * share for pool, share in busy.items()) / (sum(pools.values()) or 1)
    return {
        "pipeline/utilisation": utilisation,
        "pipeline/bubble_share": 1 - utilisation,
        **{f"pipeline/bubble_share/{pool}": 1 - share for pool, share in busy.items()},
    }


# ---- tokens


def token_counts(groups: Sequence[Group]) -> dict[str, int]:
    """Tokens of the rollouts by what the engine did with them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    completions = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
    return {
        "prefilled": sum(map(prefilled_tokens, trajectories)),
        "sampled": sum(map(sampled_tokens, trajectories)),
        "drafted": sum(completion.drafted for completion in completions),
        "accepted": sum(completion.accepted for completion in completions),
        "injected": sum(map(injected_tokens, trajectories)),
        "recomputed": sum(int(np.diff(spans).sum()) for spans in recomputed_spans(groups)),
    }


def recomputed_spans(groups: Sequence[Group]) -> list[np.ndarray]:
    """For each answer that was preempted, the spans [n, 2] of positions that were recomputed."""
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    return [spans for turn in turns if (spans := turn.completion.recomputed) is not None]


def trained_tokens(
    credit: Credit, batch: Batch | None, report: StepReport | None
) -> tuple[int, Counter[str]]:
    """(sampled tokens that changed the policy, those that did not, by reason)."""
    if batch is None or report is None:
        return 0, +credit.wasted_tokens
    refused = int(report.metrics.get("refused_steps", bool(report.skipped)))
    steps = refused + int(report.metrics.get("optimizer_steps", not report.skipped))
    vain = batch.num_tokens * refused // max(1, steps)
    return batch.num_tokens - vain, credit.wasted_tokens + Counter(refused_step=vain)


def token_figures(credit: Credit, batch: Batch | None, report: StepReport | None) -> dict[str, float]:
    """Metrics of the tokens that were trained on, of those that were not by reason, and of their routes."""
    trained, dropped = trained_tokens(credit, batch, report)
    row = {f"groups/dropped/{name}": float(count) for name, count in sorted(credit.dropped_groups.items())}
    row |= {f"tokens/wasted/{name}": float(count) for name, count in sorted(dropped.items())}
    row |= {
        "groups/dropped": float(credit.dropped_groups.total()),
        "tokens/wasted": float(dropped.total()),
        "tokens/trained": float(trained),
        "tokens/trained_context": float(batch.num_context_tokens if batch else 0),
    }
    parts = [part.experts for part in batch.microbatches if part.experts is not None] if batch else []
    if parts:  # bytes of a token's routes in memory, and packed as the spool has them
        _, layers, top_k = parts[0].shape
        _, packed = route_bytes(layers, top_k, 1 + max(int(part.max(initial=0)) for part in parts))
        row["routing/bytes_per_token"] = float(parts[0].itemsize * layers * top_k)
        row["routing/packed_bytes_per_token"] = packed
        row["routing/prompts_apart"] = float(count_split_prompts(credit.samples))
    return row


def count_ages(batch: Batch) -> Counter[int]:
    """Trained tokens by how many versions the trainer is ahead of the policy that sampled them."""
    ages = [part.staleness for part in batch.microbatches]
    values, counts = np.unique(np.concatenate([np.empty(0, np.int32), *ages]), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def tool_rates(counts: Mapping[str, float], num_trajectories: float) -> dict[str, float]:
    """TRL's figures from what the tools counted in a step: calls per trajectory, share of calls that failed.
    Empty where nothing was called, or no sequence has ended."""
    calls = counts.get("tools/calls", 0.0)
    if not calls or not num_trajectories:  # of episodes that have not ended yet
        return {}
    failures = sum(counts.get(f"tools/{name}", 0.0) for name in TOOL_FAILURES)
    return {"tools/call_frequency": calls / num_trajectories, "tools/failure_frequency": failures / calls}


# ---- FLOPs


def answer_work(prompt: int, cached: int, answer: Completion) -> Work:
    """Of the answer to ``prompt`` tokens, of which ``cached`` are there already. The last row of the prompt
    gives the logits of the first token, and the last token is never a row; injected tokens need no logits."""
    rows = prompt + max(0, len(answer.tokens) - 1)
    return Work(
        rows - cached, _causal_pairs(rows) - _causal_pairs(cached), len(answer.tokens) - answer.num_injected
    )


def rollout_work(groups: Iterable[Group]) -> Work:
    """The work of ``groups`` on an engine that does nothing twice and nothing in vain: a prompt is prefilled
    once for its group, except for the last token, from which every answer begins, and a later turn prefills
    new tokens only. It follows from the tokens alone, so every engine, cache and drafter has the same."""
    total = Work()
    for group in groups:
        begun: np.ndarray | None = None  # the first context of an earlier answer
        for turns in (trajectory.turns for trajectory in group.trajectories if trajectory.turns):
            there = 0 if begun is None else _prefix_length(begun, turns[0].context[:-1])
            begun, history = (turns[0].context if begun is None else begun), 0
            for turn in turns:
                if turn.new_row:
                    there = history = 0
                history += len(turn.context)
                total += answer_work(history, there, turn.completion)
                length = len(turn.completion.tokens)
                there, history = history + max(0, length - 1), history + length
    return total


def _prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    return int(np.append(a[:size] == b[:size], False).argmin())


def _causal_pairs(rows: int) -> int:
    """Pairs of a sequence that sees itself; below 0 for -rows that were run once more than needed."""
    return rows * (abs(rows) + 1) // 2


def batch_work(batch: Batch) -> Work:
    """The work of one forward of ``batch``."""
    return sum((Work.packed(part.segments, len(part.rows)) for part in batch.microbatches), Work())


def training_flops(model: FlopModel, batch: Work, passes: Mapping[str, float]) -> dict[str, int]:
    """FLOPs of one training step on ``batch``, with the extra passes that the trainer's metrics count:
    "train" with all that it needs, "measure" for figures only."""
    forward, backward = model.forward(batch), model.backward(batch)
    repeated, extra, measure = (
        passes.get(f"passes/{name}", 0.0) for name in ("repeated", "extra", "measure")
    )
    train = (1 + repeated) * (forward + backward) + extra * forward
    return {"train": round(train), "measure": round(measure * forward)}


def step_flops(
    model: FlopModel, played: Sequence[Group], batch: Batch | None = None, report: StepReport | None = None
) -> dict[str, int]:
    """The FLOPs of a step in whole numbers, by part: of what it ``played``, of training, of measuring.

    The first two are the C of a scaling curve: a function of the recipe and the seed, and of no cache,
    drafter, clock or restart.
    """
    flops = {"sample": sampling_flops(model, played), "train": 0, "measure": 0}
    return flops | (training_flops(model, batch_work(batch), report.metrics) if batch and report else {})


def sampling_flops(model: FlopModel, groups: Sequence[Group]) -> int:
    return round(model.forward(rollout_work(groups)))


def flop_figures(flops: Mapping[str, int]) -> dict[str, float]:
    """Metrics of a step's ``flops``."""
    return {f"flops/{'rollout' if part == 'sample' else part}": float(n) for part, n in flops.items()}


def utilisation(row: Mapping[str, float], peak_flops: float) -> dict[str, float]:
    """``train/mfu``: FLOPs of training over those that the device has in that time; empty where a part of it
    is not known."""
    flops, seconds = row.get("flops/train", 0.0), row["time/train_s"]
    return {"train/mfu": flops / (seconds * peak_flops)} if peak_flops and flops and seconds else {}


# ---- the ledger, and sums over the run


def step_work(
    credit: Credit,
    batch: Batch | None,
    report: StepReport | None,
    flops: Mapping[str, int],
    sampled: Sequence[Group],
) -> dict[str, Any]:
    """What a step's row of the ledger has beside its time. ``sampled``: during the step, for whichever step;
    ``flops``: of these groups and of training."""
    trained, dropped = trained_tokens(credit, batch, report)
    context = batch.num_context_tokens if batch else 0
    used = {"trained": trained, "trained_context": context, "dropped": dict(dropped)}
    row: dict[str, Any] = {"tokens": token_counts(sampled) | used} | ({"flops": dict(flops)} if flops else {})
    measured = {} if report is None else report.metrics
    uneven = ("straggler", "straggler_ranks", "capacity_factor")
    if routing := {name: measured[f"routing/{name}"] for name in uneven if f"routing/{name}" in measured}:
        row["routing"] = routing
    return row


def evaluation_work(groups: Sequence[Group], model: FlopModel | None) -> dict[str, Any]:
    """What an evaluation's row of the ledger has beside its time."""
    flops = {} if model is None else {"flops": {"eval": sampling_flops(model, groups)}}
    return {"tokens": token_counts(groups), **flops}


def add_totals(
    totals: Mapping[str, float], row: Mapping[str, float], terms: Terms = FREE
) -> dict[str, float]:
    """Sums over the run including this step, whose devices and price are ``terms``; earlier steps keep the
    cost that they had. ``total/money/CURRENCY`` is there while every step was paid in that currency."""
    seconds = terms.devices * row["step_time"]
    row = {**row, "device_seconds": seconds}
    money = f"{MONEY}{terms.currency}"
    if terms.price_per_device_hour and (money in totals or not totals):
        row[money] = terms.price_per_device_hour * seconds / 3600
    added = {
        total: totals.get(total, 0.0) + sum(row.get(name, 0.0) for name in names)
        for total, names in {**SUMMED, money: (money,)}.items()
        if any(name in row for name in names)
    }
    return {name: n for name, n in totals.items() if not name.startswith(MONEY)} | added
