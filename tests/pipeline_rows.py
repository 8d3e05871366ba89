"""What a pipelined run leaves in its folder, made up: spans of its workers, metrics, workers.json."""

from __future__ import annotations

import random
from typing import Any

from ostinato.observe.timeline import Kind, Span

SAMPLERS = ("sampler-0", "sampler-1", "sampler-2")
STEP_S = 6.0


def step_spans(step: int, began: float = 1.76e9) -> list[Span]:
    """A step of six seconds: samplers read and sample with a gap here and there and take up new weights, the
    trainer waits, packs and trains, the grader follows; in order, each worker's."""
    dice = random.Random(step)
    at = began + (step - 1) * STEP_S
    spans = [one for worker in SAMPLERS for one in _sampler(worker, step, at, dice)]
    ready = at + 1.2 + dice.random()
    parts = ((Kind.WAIT, at, ready), (Kind.PACK, ready, ready + 0.1), (Kind.TRAIN, ready + 0.1, at + 5.9))
    spans += [_span("trainer", kind, start, stop, step=step) for kind, start, stop in parts]
    for i in range(4):
        start = at + i * 1.4 + dice.random()
        spans.append(_span("grader-0", Kind.GRADE, start, start + 0.35, amount=8))
    if step == 1:
        loading = [_span(worker, Kind.START, began - 4.0, began) for worker in SAMPLERS]
        spans = [*loading, *spans]
    return spans


def _sampler(worker: str, step: int, at: float, dice: random.Random) -> list[Span]:
    end, found = at + STEP_S, []
    publish = at + 0.4 + 0.1 * dice.random()
    found.append(_span(worker, Kind.DECODE, at, publish, amount=40))
    found.append(_span(worker, Kind.PUBLISH, publish, publish + 0.25, step=step, amount=2_400_000))
    at = publish + 0.25
    while at < end - 0.3:
        read = at + 0.05 + 0.15 * dice.random()
        stop = min(end, read + 0.3 + 1.2 * dice.random())
        found.append(_span(worker, Kind.PREFILL, at, read, amount=300))
        found.append(_span(worker, Kind.DECODE, read, stop, amount=round(400 * (stop - read))))
        at = stop + (0.25 if dice.random() < 0.15 else 0.0)
    return found


def _span(worker: str, kind: Kind, start: float, stop: float, **more: int) -> Span:
    return Span(worker=worker, kind=kind, start=start, stop=stop, **more)


def step_row(step: int, began: float = 1.76e9) -> dict[str, Any]:
    """The step's row of the ledger, as far as the timeline reads it."""
    busy = {"samplers": {"sample": 5.0}, "trainer": {"train": 4.4}, "graders": {"grade": 1.4}}
    return {
        "event": "step",
        "session": 1,
        "step": step,
        "seconds": STEP_S,
        "ended_at": began + step * STEP_S,
        "pools": {name: {"devices": 1, "busy": parts, "idle": 1.0} for name, parts in busy.items()},
        "tokens": {"sampled": 4000, "trained": 4000},
    }


def pipeline_metrics(step: int, staleness: int = 2) -> dict[str, float]:
    """What a pipelined step says beside the usual."""
    dice = random.Random(step)
    ages = [900.0 * dice.random() + 2000.0 / (age + 1) for age in range(staleness + 1)]
    return {
        **{f"staleness/hist/{age}": round(count) for age, count in enumerate(ages)},
        "staleness/mean": sum(age * count for age, count in enumerate(ages)) / sum(ages),
        "staleness/max": float(staleness),
        "pipeline/wait_s": 0.3 + dice.random(),
        "pipeline/bubble_share": 0.1,
        "pipeline/utilisation": 0.9,
        "publish/bytes": 2_400_000.0,
        "publish/seconds": 0.2 + 0.1 * dice.random(),
        "publish/count": 1.0,
        "workers/alive": 3.0 - (step == 7),
        "workers/restarts": float(step == 7),
        "workers/redispatched": 4.0 * (step == 7),
        "workers/quarantined": 0.0,
        "workers/migrated": 0.0,
        "queue/running": 20.0 + dice.random() * 10,
        "queue/ready": 3.0,
        "groups/admitted_total": 16.0 * (step + 2),
        "groups/trained_total": 16.0 * step - 1,
        "groups/dropped_total/zero_variance": 1.0,
        "groups/outstanding": 32.0,
    }


def worker_rows(now: float) -> list[dict[str, Any]]:
    """workers.json: one samples, one was lost and is loading again, one trains."""
    alive = {"state": "alive", "since": now - 300, "version": 11, "running": 12, "sampled": 48210}
    return [
        {"worker": "sampler-0", **alive, "heard": now - 0.4, "cause": ""},
        {"worker": "sampler-1", **alive, "state": "starting", "since": now - 3, "running": 0, "sampled": 0}
        | {"heard": now - 3, "cause": "no sign of life for 60 s: <b>killed</b>"},
        {"worker": "trainer", "state": "alive", "since": now - 310, "heard": now - 1, "cause": ""},
    ]
