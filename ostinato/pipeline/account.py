"""The books of a step: where seconds, tokens and FLOPs went, useful and wasted. Pure, but for the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ostinato.algo.pack import prompts_apart
from ostinato.model.flops import FlopModel
from ostinato.pipeline.credit import Credit
from ostinato.pipeline.work import batch_work, rollout_work, step_flops
from ostinato.rollout.health import health, injected_tokens, prefilled_tokens, sampled_tokens
from ostinato.rollout.play import Played
from ostinato.routes import route_bytes
from ostinato.types import Batch, Group, StepReport

PARTS = ("rollout", "reward", "train", "measure", "other")
BUSY = {"rollout": "sample", "reward": "grade", "train": "train", "measure": "measure"}  # in the ledger


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

    def busy(self) -> dict[str, float]:
        """Seconds by part, as the ledger names them; what is left of the step is idle."""
        return {name: self._seconds[part] for part, name in BUSY.items()}


def step_row(
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None,
    report: StepReport | None,
    clock: Clock,
    *,
    solved_at: float,
    costs: Costs | None,
    drafts: Mapping[str, float],
) -> dict[str, float]:
    """The metrics of one step; ``batch`` and ``report`` are None when there was nothing to learn from,
    ``costs`` where FLOPs are not known, and ``drafts`` is empty where nothing is drafted."""
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
    row |= costs.figures() if costs else {}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """FLOPs of a step in whole numbers: ``useful`` and all of ``wasted`` add up to all of ``flops``."""

    flops: Mapping[str, int]  # sample, train, measure
    useful: int
    wasted: Mapping[str, int]  # by reason

    def figures(self) -> dict[str, float]:
        """The metrics."""
        parts = {"rollout": "sample", "train": "train", "measure": "measure"}
        found = {f"flops/{name}": float(self.flops[part]) for name, part in parts.items()}
        return found | {"flops/useful": float(self.useful), "flops/wasted": float(sum(self.wasted.values()))}


def step_costs(
    model: FlopModel,
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None = None,
    report: StepReport | None = None,
) -> Costs:
    """What a step has computed, and what of it was in vain.

    Sampling is useful as the share of its tokens that was trained on, and each reason of ``wasted_tokens``
    has its share; drafts that failed and passes that only measure are wasted, and so is everything that led
    to an optimizer step that was refused.
    """
    sampling, drafts = sampling_flops(model, groups)
    sampled = sum(sampled_tokens(trajectory) for group in groups for trajectory in group.trajectories)
    wasted = Counter({name: sampling * n // sampled for name, n in credit.wasted_tokens.items() if sampled})
    if batch is None:  # all was in vain, prompts that got no answer and what rounding has left too
        wasted[max(wasted, key=wasted.__getitem__, default="failed")] += sampling - wasted.total()
    kept = sampling - wasted.total()
    train = measure = refused = 0
    if batch is not None and report is not None:
        work, passes = batch_work(batch), report.metrics
        found = step_flops(model, work, passes)
        once = round(step_flops(model, work, {**passes, "passes/repeated": 0.0}).train)
        train, measure = round(found.train), round(found.measure)
        vain, steps = _refused(report)
        refused = (kept + once) * vain // steps + train - once
    wasted += Counter(refused_drafts=drafts, measurement=measure, refused_step=refused)
    flops = {"sample": sampling + drafts, "train": train, "measure": measure}
    return Costs(flops=flops, useful=sum(flops.values()) - wasted.total(), wasted=dict(+wasted))


def sampling_flops(model: FlopModel, groups: Sequence[Group]) -> tuple[int, int]:
    """(FLOPs of reading prompts and sampling answers, FLOPs of drafts verified in vain)."""
    work = rollout_work(groups)
    return max(0, round(model.forward(work.prefill + work.decode))), round(model.forward(work.refused))


def _refused(report: StepReport) -> tuple[int, int]:
    """(optimizer steps that were refused, all that were tried)."""
    refused = int(report.metrics.get("refused_steps", bool(report.skipped)))
    return refused, max(1, refused + int(report.metrics.get("optimizer_steps", not report.skipped)))


def step_work(
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None,
    costs: Costs | None,
    reused: Sequence[Group] = (),
    model: FlopModel | None = None,
) -> dict[str, Any]:
    """What a step's row of the ledger says beside its time. ``reused``: groups that another process sampled
    and has a row for."""
    trained = {
        "trained": batch.num_tokens if batch else 0,
        "trained_context": batch.num_context_tokens if batch else 0,
    }
    row: dict[str, Any] = {
        "tokens": {**token_counts(groups), **trained, "dropped": dict(+credit.wasted_tokens)}
    }
    if costs is not None:
        row |= {"flops": costs.flops, "useful": costs.useful, "wasted": costs.wasted}
    if reused:
        row["reused"] = token_counts(reused) | (
            {"flops": sum(sampling_flops(model, reused))} if model else {}
        )
    return row


def token_counts(groups: Sequence[Group]) -> dict[str, int]:
    """Tokens of the rollouts by what the engine did with them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    said = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
    return {
        "prefilled": sum(map(prefilled_tokens, trajectories)),
        "sampled": sum(map(sampled_tokens, trajectories)),
        "drafted": sum(completion.drafted for completion in said),
        "accepted": sum(completion.accepted for completion in said),
        "injected": sum(map(injected_tokens, trajectories)),
    }


def evaluation_work(groups: Sequence[Group], model: FlopModel | None) -> dict[str, Any]:
    """What an evaluation's row of the ledger says beside its time."""
    flops = {} if model is None else {"flops": {"eval": sum(sampling_flops(model, groups))}}
    return {"tokens": token_counts(groups), **flops}


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
