"""The books of a step: where seconds, tokens and FLOPs went, useful and wasted. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ostinato.algo.pack import prompts_apart
from ostinato.pipeline.credit import Credit
from ostinato.rollout.health import health
from ostinato.rollout.play import Played
from ostinato.routes import route_bytes
from ostinato.types import Batch, Group, StepReport

PARTS = ("rollout", "reward", "train", "measure", "other")


class Clock:
    """Wall seconds of one step, split so that the parts add up to the whole.

    Grading overlaps with generation; only what is left of it after the last token counts as "reward".
    Passes that measure the mismatch and train nothing are "measure".
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._seconds = {"rollout": 0.0, "reward": 0.0, "train": 0.0, "measure": 0.0}

    def rollouts(self, played: Sequence[Played]) -> None:
        generated = max((item.generated_at for item in played), default=self.start)
        graded = max((item.graded_at for item in played), default=self.start)
        self._seconds["rollout"] = generated - self.start
        self._seconds["reward"] = max(0.0, graded - generated)

    @contextmanager
    def training(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds["train"] = time.perf_counter() - started

    def measured(self, seconds: float) -> None:
        """So much of "train" was spent on measuring."""
        self._seconds["train"] -= seconds
        self._seconds["measure"] += seconds

    @property
    def rollout_s(self) -> float:
        return self._seconds["rollout"]

    def read(self) -> tuple[float, dict[str, float]]:
        """(seconds so far, seconds by part)."""
        total = time.perf_counter() - self.start
        return total, {**self._seconds, "other": total - sum(self._seconds.values())}


def step_row(
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None,
    report: StepReport | None,
    clock: Clock,
    *,
    solved_at: float,
    forward_flops: float,
    backward_ratio: float,
    drafts: Mapping[str, float],
) -> dict[str, float]:
    """The metrics of one step; ``batch`` and ``report`` are None when there was nothing to learn from, and
    ``drafts`` is empty where nothing is drafted."""
    row = health(groups, solved_at=solved_at) | dict(drafts)
    row |= {f"groups/dropped/{name}": float(count) for name, count in sorted(credit.dropped_groups.items())}
    row |= {f"tokens/wasted/{name}": float(count) for name, count in sorted(credit.wasted_tokens.items())}
    row["groups/dropped"] = float(credit.dropped_groups.total())
    row["tokens/wasted"] = float(credit.wasted_tokens.total())
    row["tokens/trained"] = float(batch.num_tokens if batch else 0)
    row["tokens/trained_context"] = float(batch.num_context_tokens if batch else 0)
    row |= route_sizes(batch) if batch else {}
    if batch and any(sample.experts is not None for sample in credit.samples):
        row["routing/prompts_apart"] = float(prompts_apart(credit.samples))
    row["empty_step"] = float(batch is None)
    row["refused_step"] = float(report is not None and bool(report.skipped))
    row |= dict(report.metrics) if report else {}
    if forward_flops:
        measured = len(report.mismatch.get("arms", ())) if report and report.mismatch else 0
        row |= flops(row, forward_flops, backward_ratio, measured)
    total, parts = clock.read()
    row["step_time"] = total
    row["tokens_per_s"] = row["tokens/sampled"] / total
    for name in PARTS:
        row[f"time/{name}_s"] = parts[name]
        row[f"time/{name}_share"] = parts[name] / total
    return row


def route_sizes(batch: Batch) -> dict[str, float]:
    """Bytes that a token's routes take in memory and packed (as the spool has them); empty without routes."""
    parts = [part.experts for part in batch.microbatches if part.experts is not None]
    if not parts:
        return {}
    _, layers, top_k = parts[0].shape
    _, packed = route_bytes(layers, top_k, 1 + max(int(part.max(initial=0)) for part in parts))
    memory = parts[0].itemsize * layers * top_k
    return {"routing/bytes_per_token": float(memory), "routing/packed_bytes_per_token": packed}


TOOL_FAILURES = ("unreadable", "unknown", "raised", "timeout")


def tool_rates(counts: Mapping[str, float], num_trajectories: float) -> dict[str, float]:
    """TRL's figures from what the tools counted in a step: calls per trajectory, share of calls that failed.
    Empty where nothing was called."""
    calls = counts.get("tools/calls", 0.0)
    if not calls:
        return {}
    failures = sum(counts.get(f"tools/{name}", 0.0) for name in TOOL_FAILURES)
    return {"tools/call_frequency": calls / num_trajectories, "tools/failure_frequency": failures / calls}


def flops(
    row: Mapping[str, float], forward: float, backward_ratio: float, measured: int = 0
) -> dict[str, float]:
    """Estimated FLOPs of a step from its token counts; ``forward`` is per token (2 x active parameters),
    ``measured`` the passes over the batch that compared sampler and trainer.

    Generation is useful in proportion to the sampled tokens that were trained on, training unless refused;
    what was run for drafts that failed, or to measure, is wasted.
    """
    generation = forward * (row["tokens/prefilled"] + row["tokens/sampled"])
    failed = forward * (row.get("tokens/drafted", 0.0) - row.get("tokens/accepted", 0.0))
    batch = forward * (row["tokens/trained"] + row["tokens/trained_context"])
    training, measuring = (1 + backward_ratio) * batch, measured * batch
    share = row["tokens/trained"] / row["tokens/sampled"] if row["tokens/sampled"] else 0.0
    useful = 0.0 if row["refused_step"] else generation * share + training
    return {
        "flops/rollout": generation + failed,
        "flops/train": training,
        "flops/measure": measuring,
        "flops/useful": useful,
        "flops/wasted": generation + failed + training + measuring - useful,
    }


SUMMED = {
    "step_time": "total/seconds",
    "tokens/sampled": "total/sampled_tokens",
    "tokens/trained": "total/trained_tokens",
    "flops/useful": "total/useful_flops",
    "flops/wasted": "total/wasted_flops",
}


def add_totals(totals: Mapping[str, float], row: Mapping[str, float]) -> dict[str, float]:
    """Sums over the run, this step included. ``num_tokens`` is TRL's: all that was read and sampled."""
    added = {total: row[name] for name, total in SUMMED.items() if name in row}
    added["num_tokens"] = row["tokens/context"] + row["tokens/sampled"]
    return {total: totals.get(total, 0.0) + value for total, value in added.items()}


def ledger_row(step: int, row: Mapping[str, float]) -> dict[str, Any]:
    """One line of ledger.jsonl: seconds, tokens and FLOPs of a step by pool."""
    picked = {"seconds": "time/", "tokens": "tokens/", "flops": "flops/"}
    entry: dict[str, Any] = {"step": step, "wall_s": row["step_time"], "ended_at": time.time()}
    for key, prefix in picked.items():
        names = [name for name in row if name.startswith(prefix) and not name.endswith("_share")]
        entry[key] = {name.removeprefix(prefix).removesuffix("_s"): row[name] for name in names}
    return entry
