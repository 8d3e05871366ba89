"""The account of a step: where seconds, tokens and FLOPs went, useful and wasted. Pure, but for the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.algo.pack import prompts_apart
from ostinato.every import MONEY
from ostinato.model.flops import FlopModel
from ostinato.observe.ledger import Terms
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.pipeline.credit import Credit
from ostinato.pipeline.state import StalenessViolation
from ostinato.pipeline.work import batch_work, needed_work, rollout_work, step_flops
from ostinato.rollout.health import health, injected_tokens, prefilled_tokens, sampled_tokens, task_figures
from ostinato.rollout.rollout import RolloutResult
from ostinato.routes import route_bytes
from ostinato.types import Batch, Group, StepReport

BUSY = {"rollout": "sample", "reward": "grade", "train": "train", "measure": "measure"}  # in the ledger
UNEVEN = ("routing/straggler", "routing/straggler_ranks", "routing/capacity_factor")  # in the ledger too
OF_KIND = {  # parts of the ledger; publishing and saving count as held, not busy, as in one process
    Kind.PREFILL: "sample",
    Kind.DECODE: "sample",
    Kind.GRADE: "grade",
    Kind.PACK: "train",
    Kind.TRAIN: "train",
}


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
        self._seconds = {"rollout": 0.0, "reward": 0.0, "train": 0.0, "measure": 0.0}

    def rollouts(self, played: Sequence[RolloutResult]) -> None:
        generated = max((item.generated_at for item in played), default=self.start)
        graded = max((item.graded_at for item in played), default=self.start)
        self._seconds["rollout"] = generated - self.start
        self._seconds["reward"] = max(0.0, graded - generated)

    @contextmanager
    def doing(self, part: str, kind: Kind) -> Iterator[None]:
        """Counts the time of the block as ``part`` (empty: as "other"), and records it as one span."""
        started, at = time.perf_counter(), self._unix()
        try:
            yield
        finally:
            if part:
                seconds = time.perf_counter() - started
                self._seconds[part] = self._seconds.get(part, 0.0) + seconds
            self.spans.append(
                Span(worker=self._worker, kind=kind, start=at, stop=self._unix(), step=self.step)
            )

    def add(self, part: str, seconds: float) -> None:
        """Add ``seconds``, counted nowhere else, to a part."""
        self._seconds[part] += seconds

    def measured(self, seconds: float) -> None:
        """Move ``seconds`` from "train" to "measure"."""
        self._seconds["train"] -= seconds
        self._seconds["measure"] += seconds

    @property
    def rollout_s(self) -> float:
        return self._seconds["rollout"]

    @property
    def waited_s(self) -> float:
        """Seconds waited for the batch."""
        return self._seconds["rollout"] + self._seconds["reward"]

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
    fresh: Sequence[Group],
    solved_at: float,
    costs: Costs | None,
    drafts: Mapping[str, float],
) -> dict[str, float]:
    """The metrics of one step that trained on ``groups`` and played ``fresh``; ``batch`` and ``report`` are
    None when there was nothing to learn from, ``costs`` where FLOPs are not known, and ``drafts`` is empty
    where nothing is drafted."""
    row = health(groups, solved_at=solved_at) | task_figures(groups, solved_at) | dict(drafts)
    row |= {f"groups/dropped/{name}": float(count) for name, count in sorted(credit.dropped_groups.items())}
    trained, dropped = trained_tokens(credit, batch, report)
    row |= {f"tokens/wasted/{name}": float(count) for name, count in sorted(dropped.items())}
    row["groups/dropped"] = float(credit.dropped_groups.total())
    row["tokens/wasted"] = float(dropped.total())
    row["tokens/trained"] = float(trained)
    row["tokens/trained_context"] = float(batch.num_context_tokens if batch else 0)
    row |= route_sizes(batch) if batch else {}
    if batch and any(sample.experts is not None for sample in credit.samples):
        row["routing/prompts_apart"] = float(prompts_apart(credit.samples))
    row["empty_step"] = float(batch is None)
    row["refused_step"] = float(report is not None and bool(report.skipped))
    row |= dict(report.metrics) if report else {}
    row |= costs.figures() if costs else {}
    row["rollout/preempted"] = float(sum(map(len, recomputed(fresh))))
    total, parts = clock.read()
    row["step_time"] = total
    if ahead := pending_tokens(groups, fresh):
        row["tokens/pending"] = float(ahead)
    row["tokens_per_s"] = (row["tokens/sampled"] + ahead) / total
    for name, seconds in parts.items():
        row[f"time/{name}_s"] = seconds
        row[f"time/{name}_share"] = seconds / total
    return row


def utilisation(row: Mapping[str, float], peak_flops: float) -> dict[str, float]:
    """``train/mfu``: FLOPs of training over those that the device has in that time; empty where a part of it
    is not known."""
    flops, seconds = row.get("flops/train", 0.0), row["time/train_s"]
    return {"train/mfu": flops / (seconds * peak_flops)} if peak_flops and flops and seconds else {}


def ages(batch: Batch) -> Counter[int]:
    """Trained tokens by how many versions the trainer is ahead of the policy that sampled them."""
    ages = [part.staleness for part in batch.microbatches]
    found, counts = np.unique(np.concatenate([np.empty(0, np.int32), *ages]), return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def check_ages(batch: Batch, step: int, staleness: int) -> None:
    """The bound of the buffer once more, on the tokens themselves. Raises StalenessViolation."""
    wrong = {age: n for age, n in ages(batch).items() if not 0 <= age <= staleness}
    if wrong:
        raise StalenessViolation(
            f"step {step} has {sum(wrong.values())} tokens that are {sorted(wrong)} versions old where "
            f"pipeline.staleness is {staleness}; nothing was trained on them"
        )


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


def in_turn(busy: Mapping[str, float], seconds: float) -> dict[str, float]:
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
    Empty where nothing was called, or no sequence has ended."""
    calls = counts.get("tools/calls", 0.0)
    if not calls or not num_trajectories:  # of episodes that have not ended yet
        return {}
    failures = sum(counts.get(f"tools/{name}", 0.0) for name in TOOL_FAILURES)
    return {"tools/call_frequency": calls / num_trajectories, "tools/failure_frequency": failures / calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """FLOPs of a step in whole numbers: ``useful``, all of ``wasted`` and ``pending`` add up to all of
    ``flops``.

    ``compute`` is not what was paid but the C of a scaling curve: ``work.needed_work`` of what the step
    played, and its training. It is a function of the recipe and the seed, and of no cache, drafter, clock
    or restart.
    """

    flops: Mapping[str, int]  # sample, train, measure
    useful: int
    wasted: Mapping[str, int]  # by reason
    compute: int
    pending: int = 0  # sampled for later steps, less what was trained on and an earlier step has paid for

    def figures(self) -> dict[str, float]:
        """The metrics."""
        parts = {"rollout": "sample", "train": "train", "measure": "measure"}
        found = {f"flops/{name}": float(self.flops[part]) for name, part in parts.items()}
        found |= {"flops/useful": float(self.useful), "flops/wasted": float(sum(self.wasted.values()))}
        found |= {"flops/compute": float(self.compute)}
        return found | ({"flops/pending": float(self.pending)} if self.pending else {})


def step_costs(
    model: FlopModel,
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None = None,
    report: StepReport | None = None,
    fresh: Sequence[Group] | None = None,
    counted: Sequence[Group] | None = None,
) -> Costs:
    """The FLOPs of a step, and which of them were wasted.

    A step is charged for what it played (``fresh``; None: ``groups``). The step that trains on that decides
    what was useful; in between it is pending. Sampling FLOPs are split by tokens: the trained share is
    useful, and each reason of ``wasted_tokens`` gets its share. Refused drafts, rows recomputed after a
    preemption and passes that only measure are wasted, and so is everything that led to a refused optimizer
    step. ``compute`` is that of ``counted`` (None: of what was played) and of training; where timing decides
    what has ended by now, ``counted`` are the groups that have left.
    """
    played = groups if fresh is None else fresh
    paid, vain = sampling_flops(model, played)
    sampling = paid if fresh is None or fresh == groups else sampling_flops(model, groups)[0]
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
        failed, steps = _refused(report)
        refused = (kept + once) * failed // steps + train - once
    wasted += vain + Counter(measurement=measure, refused_step=refused)
    flops = {"sample": paid + vain.total(), "train": train, "measure": measure}
    useful = sampling + vain.total() + train + measure - wasted.total()
    needed = needed_work(played if counted is None else counted)
    compute = round(model.forward(needed)) + train
    return Costs(flops=flops, useful=useful, wasted=dict(+wasted), compute=compute, pending=paid - sampling)


def sampling_flops(model: FlopModel, groups: Sequence[Group]) -> tuple[int, Counter[str]]:
    """(FLOPs of reading prompts and sampling answers, what the engine computed in vain beside, by reason)."""
    work = rollout_work(groups)
    vain = {"refused_drafts": work.refused, "recomputed": work.recomputed}
    sampling = max(0, round(model.forward(work.prefill + work.decode)))
    return sampling, Counter({reason: round(model.forward(part)) for reason, part in vain.items()})


def all_sampling_flops(model: FlopModel, groups: Sequence[Group]) -> int:
    sampling, vain = sampling_flops(model, groups)
    return sampling + vain.total()


def trained_tokens(
    credit: Credit, batch: Batch | None, report: StepReport | None
) -> tuple[int, Counter[str]]:
    """(sampled tokens that changed the policy, those that did not, by reason)."""
    if batch is None or report is None:
        return 0, +credit.wasted_tokens
    vain, steps = _refused(report)
    refused = batch.num_tokens * vain // steps
    return batch.num_tokens - refused, credit.wasted_tokens + Counter(refused_step=refused)


def _refused(report: StepReport) -> tuple[int, int]:
    """(optimizer steps that were refused, all that were tried)."""
    refused = int(report.metrics.get("refused_steps", bool(report.skipped)))
    return refused, max(1, refused + int(report.metrics.get("optimizer_steps", not report.skipped)))


def step_work(
    groups: Sequence[Group],
    credit: Credit,
    batch: Batch | None,
    report: StepReport | None,
    costs: Costs | None,
    fresh: Sequence[Group],
    reused: Sequence[Group] = (),
    model: FlopModel | None = None,
) -> dict[str, Any]:
    """What a step's row of the ledger has beside its time. ``fresh``: what it has played, and of that
    ``reused``: groups that another process sampled and has a row for."""
    trained, dropped = trained_tokens(credit, batch, report)
    context = batch.num_context_tokens if batch else 0
    used = {"trained": trained, "trained_context": context, "dropped": dict(dropped)}
    row: dict[str, Any] = {"tokens": token_counts(fresh) | used}
    if costs is not None:
        row |= {"flops": costs.flops, "useful": costs.useful, "wasted": costs.wasted}
    measured = {} if report is None else report.metrics
    if uneven := {name.removeprefix("routing/"): measured[name] for name in UNEVEN if name in measured}:
        row["routing"] = uneven
    pending = {"sampled": pending_tokens(groups, fresh), "flops": costs.pending if costs else 0}
    if any(pending.values()):
        row["pending"] = pending
    if reused:
        row["reused"] = token_counts(reused) | ({"flops": all_sampling_flops(model, reused)} if model else {})
    return row


def pending_tokens(groups: Sequence[Group], fresh: Sequence[Group]) -> int:
    """Sampled tokens of ``fresh``, which a step has played, less those of ``groups``, which it trains on."""
    if fresh == groups:
        return 0
    played, trained = (
        sum(sampled_tokens(t) for one in some for t in one.trajectories) for some in (fresh, groups)
    )
    return played - trained


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
        "recomputed": sum(int(np.diff(spans).sum()) for spans in recomputed(groups)),
    }


def recomputed(groups: Sequence[Group]) -> list[np.ndarray]:
    """For each answer that was preempted, the spans [n, 2] of positions that were recomputed."""
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    return [spans for turn in turns if (spans := turn.completion.recomputed) is not None]


def evaluation_work(groups: Sequence[Group], model: FlopModel | None) -> dict[str, Any]:
    """What an evaluation's row of the ledger has beside its time."""
    flops = {} if model is None else {"flops": {"eval": all_sampling_flops(model, groups)}}
    return {"tokens": token_counts(groups), **flops}


FREE = Terms()
SUMMED = {
    "total/seconds": ("step_time",),
    "total/device_seconds": ("device_seconds",),
    "total/sampled_tokens": ("tokens/sampled", "tokens/pending"),  # in the step that played them
    "total/trained_tokens": ("tokens/trained",),
    "total/useful_flops": ("flops/useful",),
    "total/wasted_flops": ("flops/wasted",),
    "total/pending_flops": ("flops/pending",),
    "total/compute_flops": ("flops/compute",),
    "num_tokens": ("tokens/context", "tokens/sampled"),  # TRL's: all that was read and sampled
}


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
