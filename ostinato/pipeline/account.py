"""The account of a step: its tokens, seconds and FLOPs by part. Pure, but for the clock.

FLOPs are a formula of the model's shapes (``model.flops``) and of the tokens: a token at position p of its
sequence is one row, which sees p + 1 positions. Sampled tokens that are not trained on are counted by reason.
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
from ostinato.rollout.health import count_injected_tokens, count_prefilled_tokens, count_sampled_tokens
from ostinato.rollout.rollout import RolloutResult
from ostinato.routes import route_bytes
from ostinato.types import Batch, Completion, Group, StepReport

BUSY = {"rollout": "sample", "reward": "grade", "train": "train", "measure": "measure"}  # clock to ledger
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
    "total/sampled_tokens": ("tokens/played",),  # during the step, for this or a later step
    "total/trained_tokens": ("tokens/trained",),
    "total/flops": ("flops/rollout", "flops/train", "flops/measure"),
    "total/compute_flops": ("flops/rollout", "flops/train"),
    "num_tokens": ("tokens/context", "tokens/sampled"),  # TRL's: all tokens that were read and sampled
}


# ---- seconds


class Clock:
    """Wall seconds of a step, split so that the parts add up to the total; also records timeline spans as
    ``worker``, with times from ``unix``, a clock of Unix seconds.

    Grading overlaps with generation; only its time after the last token counts as "reward". Passes that
    measure the mismatch and train nothing are "measure". Where rollouts overlap with training, "rollout" is
    the time that the trainer waited for them, and "publish" is a part of its own.
    """

    def __init__(self, step: int = 0, unix: Callable[[], float] = time.time, worker: str = "trainer") -> None:
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        self.spans: list[Span] = []
        self.step, self._unix, self._worker = step, unix, worker
        self.seconds = {"rollout": 0.0, "reward": 0.0, "train": 0.0, "measure": 0.0}

    def record_rollouts(self, results: Sequence[RolloutResult]) -> None:
        """Set the seconds of "rollout" and "reward" by the last token and the last verdict of ``results``."""
        last_token = max((item.generated_at for item in results), default=self.start)
        last_verdict = max((item.graded_at for item in results), default=self.start)
        self.seconds["rollout"] = last_token - self.start
        self.seconds["reward"] = max(0.0, last_verdict - last_token)

    @contextmanager
    def track(self, part: str, kind: Kind) -> Iterator[None]:
        """Add the time of the block to ``part`` (empty: to "other"), and record it as a span, also after an
        error."""
        start, unix_start = time.perf_counter(), self._unix()
        try:
            yield
        finally:
            if part:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
            self.spans.append(
                Span(worker=self._worker, kind=kind, start=unix_start, stop=self._unix(), step=self.step)
            )

    def move_measuring(self, seconds: float) -> None:
        """Move ``seconds`` from "train" to "measure"."""
        self.seconds["train"] -= seconds
        self.seconds["measure"] += seconds

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the batch."""
        return self.seconds["rollout"] + self.seconds["reward"]

    def read(self) -> tuple[float, dict[str, float]]:
        """Return (seconds so far, seconds by part)."""
        total = time.perf_counter() - self.start
        return total, {**self.seconds, "other": total - sum(self.seconds.values())}

    def busy(self) -> dict[str, float]:
        """Return seconds by part, as the ledger names them; the other seconds of the step are idle."""
        return {name: self.seconds[part] for part, name in BUSY.items()}


def split_busy_seconds(
    spans: Iterable[Span], over: Mapping[str, Mapping[str, float]], pools: Mapping[str, int], seconds: float
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return (busy seconds by pool and part, at most ``seconds`` for each pool; the seconds above that,
    carried over to the next step).

    ``pools`` maps a pool to its number of devices; a second of a pool is one on each of its devices. Spans
    are reported when they end, so they may add up to more than this step has; ``over`` has the seconds that
    the step before carried over. Nothing is counted twice or lost, but spans of other pools, and of kinds
    that are not in OF_KIND, are not counted.
    """
    seconds_by_pool = {pool: dict(over.get(pool, {})) for pool in pools}
    for span in spans:
        part, pool = OF_KIND.get(span.kind), pool_of(span.worker)
        if part and pool in seconds_by_pool:
            seconds_by_pool[pool][part] = seconds_by_pool[pool].get(part, 0.0) + span.seconds / pools[pool]
    shares = {
        pool: min(1.0, seconds / (sum(parts.values()) or 1.0)) for pool, parts in seconds_by_pool.items()
    }
    busy, carried = (
        {
            pool: {part: n * share[pool] for part, n in parts.items()}
            for pool, parts in seconds_by_pool.items()
        }
        for share in (shares, {pool: 1 - share for pool, share in shares.items()})
    )
    return busy, carried


def share_seconds(busy: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return seconds by part of threads that share a pool, ``seconds`` at most in all. Seconds in which
    several parts work count for one of them: other parts come first by name, and sampling last."""
    remaining, shares = seconds, dict[str, float]()
    for part, part_s in sorted(busy.items(), key=lambda item: (item[0] == "sample", item[0])):
        shares[part] = min(part_s, remaining)
        remaining -= shares[part]
    return shares


def compute_pipeline_row(
    by_pool: Mapping[str, Mapping[str, float]], pools: Mapping[str, int], seconds: float
) -> dict[str, float]:
    """Compute the busy and idle shares of ``seconds``: of all devices, and of each pool."""
    busy = {pool: min(1.0, sum(by_pool[pool].values()) / seconds) for pool in pools}
    utilisation = sum(pools[pool] * share for pool, share in busy.items()) / (sum(pools.values()) or 1)
    return {
        "pipeline/utilisation": utilisation,
        "pipeline/bubble_share": 1 - utilisation,
        **{f"pipeline/bubble_share/{pool}": 1 - share for pool, share in busy.items()},
    }


# ---- tokens


def count_tokens(groups: Sequence[Group]) -> dict[str, int]:
    """Count the tokens of the rollouts by their use in the engine."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    completions = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
    return {
        "prefilled": sum(map(count_prefilled_tokens, trajectories)),
        "sampled": sum(map(count_sampled_tokens, trajectories)),
        "drafted": sum(completion.drafted for completion in completions),
        "accepted": sum(completion.accepted for completion in completions),
        "injected": sum(map(count_injected_tokens, trajectories)),
        "recomputed": sum(int(np.diff(spans).sum()) for spans in list_recomputed_spans(groups)),
    }


def list_recomputed_spans(groups: Sequence[Group]) -> list[np.ndarray]:
    """Return, for each answer that was preempted, the spans [n, 2] of positions that were recomputed."""
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    return [spans for turn in turns if (spans := turn.completion.recomputed) is not None]


def count_trained_tokens(
    credit: Credit, batch: Batch | None, report: StepReport | None
) -> tuple[int, Counter[str]]:
    """Return (number of sampled tokens that changed the policy, numbers of those that did not, by reason).
    Tokens of minibatches that the trainer refused are estimated as equal shares of the batch."""
    if batch is None or report is None:
        return 0, +credit.wasted_tokens
    num_refused = int(report.metrics.get("refused_steps", bool(report.skipped)))
    num_steps = num_refused + int(report.metrics.get("optimizer_steps", not report.skipped))
    refused_tokens = batch.num_tokens * num_refused // max(1, num_steps)
    return batch.num_tokens - refused_tokens, credit.wasted_tokens + Counter(refused_step=refused_tokens)


def compute_token_metrics(credit: Credit, batch: Batch | None, report: StepReport | None) -> dict[str, float]:
    """Compute metrics of trained tokens, of the other tokens by reason, of dropped groups, and of routes if
    there are any."""
    num_trained, waste = count_trained_tokens(credit, batch, report)
    row = {f"groups/dropped/{name}": float(count) for name, count in sorted(credit.dropped_groups.items())}
    row |= {f"tokens/wasted/{name}": float(count) for name, count in sorted(waste.items())}
    row |= {
        "groups/dropped": float(credit.dropped_groups.total()),
        "tokens/wasted": float(waste.total()),
        "tokens/trained": float(num_trained),
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
    """Count trained tokens by the number of versions between the trainer and the policy that sampled them."""
    ages = [part.staleness for part in batch.microbatches]
    values, counts = np.unique(np.concatenate([np.empty(0, np.int32), *ages]), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def compute_tool_rates(counts: Mapping[str, float], num_trajectories: float) -> dict[str, float]:
    """Compute TRL's metrics from the counters of tools in a step: calls per trajectory, share of calls that
    failed. Empty if nothing was called, or no sequence has ended."""
    calls = counts.get("tools/calls", 0.0)
    if not calls or not num_trajectories:  # calls may be of episodes that have not ended yet
        return {}
    failures = sum(counts.get(f"tools/{name}", 0.0) for name in TOOL_FAILURES)
    return {"tools/call_frequency": calls / num_trajectories, "tools/failure_frequency": failures / calls}


# ---- FLOPs


def compute_answer_work(prompt: int, cached: int, answer: Completion) -> Work:
    """Compute the work of an answer to ``prompt`` tokens, of which ``cached`` are in the cache. The last row
    of the prompt gives the logits of the first token, and the last token is never a row; injected tokens need
    no logits."""
    rows = prompt + max(0, len(answer.tokens) - 1)
    return Work(
        rows - cached,
        _count_causal_pairs(rows) - _count_causal_pairs(cached),
        len(answer.tokens) - answer.num_injected,
    )


def compute_rollout_work(groups: Iterable[Group]) -> Work:
    """Compute the work of ``groups`` on an engine that computes nothing twice or for nothing: a prompt is
    prefilled once for its group, except for the last token, from which every answer begins, and a later turn
    prefills new tokens only. It follows from the tokens alone, so it is the same for every engine, cache
    and drafter."""
    total = Work()
    for group in groups:
        first_context: np.ndarray | None = None  # the first context of an earlier answer
        for turns in (trajectory.turns for trajectory in group.trajectories if trajectory.turns):
            num_cached = (
                0 if first_context is None else _count_common_tokens(first_context, turns[0].context[:-1])
            )
            first_context, history = (turns[0].context if first_context is None else first_context), 0
            for turn in turns:
                if turn.new_row:
                    num_cached = history = 0
                history += len(turn.context)
                total += compute_answer_work(history, num_cached, turn.completion)
                length = len(turn.completion.tokens)
                num_cached, history = history + max(0, length - 1), history + length
    return total


def _count_common_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading tokens that are equal in both."""
    size = min(len(a), len(b))
    return int(np.append(a[:size] == b[:size], False).argmin())  # the first that differs, or the end


def _count_causal_pairs(rows: int) -> int:
    """Count the pairs of a causal sequence; negative for -rows that were run once more than needed."""
    return rows * (abs(rows) + 1) // 2


def compute_batch_work(batch: Batch) -> Work:
    """Compute the work of a forward of ``batch``."""
    return sum((Work.from_segments(part.segments, len(part.rows)) for part in batch.microbatches), Work())


def compute_training_flops(model: FlopModel, batch: Work, passes: Mapping[str, float]) -> dict[str, int]:
    """Compute the FLOPs of a training step on ``batch``, with the extra passes that the trainer's metrics
    count: "train" has the passes that training needs, "measure" those for metrics only."""
    forward, backward = model.forward(batch), model.backward(batch)
    repeated, extra, measure = (
        passes.get(f"passes/{name}", 0.0) for name in ("repeated", "extra", "measure")
    )
    train = (1 + repeated) * (forward + backward) + extra * forward
    return {"train": round(train), "measure": round(measure * forward)}


def compute_step_flops(
    model: FlopModel, played: Sequence[Group], batch: Batch | None = None, report: StepReport | None = None
) -> dict[str, int]:
    """Compute the FLOPs of a step as integers, by part: of the groups ``played``, of training, of measuring.
    The last two are 0 without a batch or a report.

    The first two are the C of a scaling curve: a function of the recipe and the seed, and of no cache,
    drafter, clock or restart.
    """
    flops = {"sample": compute_sampling_flops(model, played), "train": 0, "measure": 0}
    return flops | (
        compute_training_flops(model, compute_batch_work(batch), report.metrics) if batch and report else {}
    )


def compute_sampling_flops(model: FlopModel, groups: Sequence[Group]) -> int:
    return round(model.forward(compute_rollout_work(groups)))


def convert_flops(flops: Mapping[str, int]) -> dict[str, float]:
    """Convert a step's ``flops`` to metrics."""
    return {f"flops/{'rollout' if part == 'sample' else part}": float(n) for part, n in flops.items()}


def compute_utilisation(row: Mapping[str, float], peak_flops: float) -> dict[str, float]:
    """Compute ``train/mfu``, FLOPs of training over the peak FLOPs of the device in that time; empty if
    FLOPs, peak or time are unknown or 0."""
    flops, seconds = row.get("flops/train", 0.0), row["time/train_s"]
    return {"train/mfu": flops / (seconds * peak_flops)} if peak_flops and flops and seconds else {}


# ---- the ledger, and sums over the run


def make_step_work(
    credit: Credit,
    batch: Batch | None,
    report: StepReport | None,
    flops: Mapping[str, int],
    sampled: Sequence[Group],
) -> dict[str, Any]:
    """Make a step's row of the ledger, without its time. ``sampled``: groups of any step that were sampled
    during this step; ``flops``: of these groups and of training, empty if unknown. Metrics of stragglers and
    of expert capacity are copied from the report if it has them."""
    num_trained, waste = count_trained_tokens(credit, batch, report)
    context = batch.num_context_tokens if batch else 0
    counts = {"trained": num_trained, "trained_context": context, "dropped": dict(waste)}
    row: dict[str, Any] = {"tokens": count_tokens(sampled) | counts} | (
        {"flops": dict(flops)} if flops else {}
    )
    metrics = {} if report is None else report.metrics
    names = ("straggler", "straggler_ranks", "capacity_factor")
    if routing := {name: metrics[f"routing/{name}"] for name in names if f"routing/{name}" in metrics}:
        row["routing"] = routing
    return row


def make_evaluation_work(groups: Sequence[Group], model: FlopModel | None) -> dict[str, Any]:
    """Make an evaluation's row of the ledger, without its time."""
    flops = {} if model is None else {"flops": {"eval": compute_sampling_flops(model, groups)}}
    return {"tokens": count_tokens(groups), **flops}


def add_totals(
    totals: Mapping[str, float], row: Mapping[str, float], terms: Terms = FREE
) -> dict[str, float]:
    """Return sums over the run including this step, whose devices and price are ``terms``; earlier steps
    keep the cost that they had. ``total/money/CURRENCY`` is dropped at the first step that was not paid in
    that currency, and does not come back."""
    seconds = terms.devices * row["step_time"]
    row = {**row, "device_seconds": seconds}
    money = f"{MONEY}{terms.currency}"
    if terms.price_per_device_hour and (money in totals or not totals):
        row[money] = terms.price_per_device_hour * seconds / 3600
    sums = {
        total: totals.get(total, 0.0) + sum(row.get(name, 0.0) for name in names)
        for total, names in {**SUMMED, money: (money,)}.items()
        if any(name in row for name in names)
    }
    return {name: n for name, n in totals.items() if not name.startswith(MONEY)} | sums
