"""``ostinato bench simulate``: placements on 16 to 4,096 simulated samplers.

Lengths are recorded from runs of ours (docs/data/simulator-*.json, with the cost table of one core of the
machine that they ran on) or log-normal on a roofline. A step has two prompts of 16 answers for each sampler,
and the trainer takes TRAIN_SHARE of the time that the samplers would need at their best, so that these are
what a step waits for. The first line of a world is synchronous and static, as most frameworks are by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.harness import Bench, Result, Say, option
from lab.simulator.events import Mode, Outcome, Setup, simulate
from lab.simulator.policies import Policy
from lab.simulator.sampler import Cost
from lab.simulator.traces import H100_7B, Stream, Trace, log_normal, read_cost

DATA = Path(__file__).parents[1] / "docs" / "data"
TRAIN_SHARE = 0.85
PROMPTS_PER_WORKER = 2
LOG_NORMAL = "log-normal"
RECORDED = ("quickstart", "scalerl", "smollm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(Bench):
    traces: tuple[str, ...] = (*RECORDED, LOG_NORMAL)
    workers: tuple[int, ...] = option((16, 128, 1024), "Samplers, with commas.")
    staleness: tuple[int, ...] = option((4,), "Of the arms that overlap, with commas.")
    slots: int = option(64, "Sequences that a sampler decodes together.")
    counted: int = 16  # steps
    seed: int = 0

    def quick(self) -> Simulate:
        return replace(self, workers=(16,), staleness=self.staleness[:1])

    def measure(self, say: Say) -> dict[str, Any]:
        rows, began = [], time.process_time()
        for world in worlds(self):
            say(f"{world['trace']}: {world['workers']} samplers, staleness {world['staleness']}")
            rows += simulate_rows(world, ARMS)
        return {
            "self": asdict(self),
            "train_share": TRAIN_SHARE,
            "prompts_per_worker": PROMPTS_PER_WORKER,
            "rows": rows,
            "cpu_s": time.process_time() - began,
        }

    @staticmethod
    def table(result: Result) -> Table:
        shown = Table(title="simulated pipelines")
        for name in ("lengths", "samplers", "staleness", "schedule"):
            shown.add_column(name)
        for name in (
            "s per step",
            "x synchronous",
            "x static",
            "above bound",
            "samplers idle",
            "trainer idle",
        ):
            shown.add_column(name, justify="right")
        before = None
        for row in result["rows"]:
            world = (row["trace"], str(row["workers"]), str(row["staleness"]))
            shown.add_row(
                *(world if world != before else ("", "", "")),
                row["arm"],
                f"{row['step_s']:.3g}",
                f"{row['gain_synchronous']:.2f}",
                f"{row['gain_static']:.2f}",
                f"{row['above_bound']:.0%}",
                f"{row['bubble_share']:.1%}",
                f"{row['trainer_idle_share']:.1%}",
            )
            before = world
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run it."""

    name: str
    policy: Policy
    mode: Mode = Mode.PIPELINE
    oracle: bool = False


SYNCHRONOUS = Arm(name="synchronous, static", policy=Policy.STATIC, mode=Mode.LOCKSTEP)
STATIC = Arm(name="static", policy=Policy.STATIC)
ARMS = (
    SYNCHRONOUS,
    Arm(name="one round ahead, static", policy=Policy.STATIC, mode=Mode.ROUNDS),
    Arm(name="partial rollouts, least-loaded", policy=Policy.LEAST_LOADED, mode=Mode.PARTIAL),
    STATIC,
    Arm(name="histopipe", policy=Policy.HISTOPIPE),
    Arm(name="least-loaded", policy=Policy.LEAST_LOADED),
    Arm(name="longest-first", policy=Policy.LONGEST_FIRST),
    Arm(name="longest-first, lengths known", policy=Policy.LONGEST_FIRST, oracle=True),
)


def worlds(bench: Simulate) -> Iterator[dict[str, Any]]:
    """What is simulated: names, a Setup without an arm, and a Stream."""
    for name in bench.traces:
        for workers in bench.workers:
            for staleness in bench.staleness:
                setup, stream = world(name, workers, staleness, bench)
                yield {
                    "trace": name,
                    "workers": workers,
                    "staleness": staleness,
                    "setup": setup,
                    "stream": stream,
                }


def world(name: str, workers: int, staleness: int, bench: Simulate) -> tuple[Setup, Stream]:
    warmup = 2 * staleness + 4
    steps, prompts = warmup + bench.counted + staleness, PROMPTS_PER_WORKER * workers
    if name == LOG_NORMAL:
        trace = log_normal(name, epochs=4, prompts=max(512, prompts), seed=bench.seed)
        cost = H100_7B.cost(bench.slots)
    else:
        path = DATA / f"simulator-{name}.json"
        trace, cost = Trace.read(path), read_cost(path, bench.slots)
    stream = trace.stream(steps * prompts, bench.seed)
    best_s = work_s(cost, stream) / workers / steps
    setup = Setup(
        workers=workers,
        cost=cost,
        prompts=prompts,
        steps=steps,
        staleness=staleness,
        train_s=TRAIN_SHARE * best_s,
        publish_s=0.01 * best_s,
        grade_s=0.01 * best_s,
        warmup=warmup,
    )
    return setup, stream


def simulate_rows(world: dict[str, Any], arms: Sequence[Arm] = ARMS) -> list[dict[str, Any]]:
    """A row for each arm. ``gain_synchronous`` and ``gain_static``: how many times as fast as static
    placement, synchronous and with the same staleness; ``above_bound``: over what no schedule undercuts."""
    setup, stream = world["setup"], world["stream"]
    found: dict[str, tuple[Outcome, float]] = {}
    for arm in arms:
        own = replace(setup, policy=arm.policy, mode=arm.mode, oracle=arm.oracle)
        began = time.process_time()
        found[arm.name] = simulate(own, stream), time.process_time() - began
    bound = bound_s(setup, stream)
    reported = {name: world[name] for name in ("trace", "workers", "staleness")}
    return [
        reported
        | {
            "arm": name,
            "step_s": outcome.step_s,
            "gain_synchronous": found[SYNCHRONOUS.name][0].step_s / outcome.step_s,
            "gain_static": found[STATIC.name][0].step_s / outcome.step_s,
            "above_bound": outcome.step_s / bound - 1,
            "bubble_share": outcome.bubble_share,
            "trainer_idle_share": outcome.trainer_idle_share,
            "tokens_per_s": outcome.tokens_per_s,
            "batch_mean": outcome.batch_mean,
            "staleness_mean": outcome.staleness_mean,
            "staleness_max": outcome.staleness_max,
            "cpu_s": cpu_s,
        }
        for name, (outcome, cpu_s) in found.items()
    ]


def work_s(cost: Cost, stream: Stream) -> float:
    """Seconds of one sampler for all of it, if its batch were always the best one and every prompt were read
    once: no schedule spends less."""
    lengths = stream.lengths.astype(np.float64)
    attended = (lengths * (stream.prompts[:, None] + 1) + lengths * (lengths - 1) / 2).sum()
    best = min(cost.base[batch] / batch for batch in range(1, cost.slots + 1))
    return float(lengths.sum() * best + attended * cost.attended_s + stream.prompts.sum() * cost.prefill_s)


def bound_s(setup: Setup, stream: Stream) -> float:
    """Seconds that a step takes at least, whatever the schedule: the work of the samplers, the trainer's, and
    the longest answer of a round alone on a sampler, in the staleness + 1 steps that it may take."""
    work = work_s(setup.cost, stream) / setup.workers / setup.steps
    rounds = stream.lengths.reshape(setup.steps, -1)
    prompts = np.repeat(stream.prompts, stream.lengths.shape[1]).reshape(setup.steps, -1)
    longest = [
        setup.cost.span(1, float(prompts[i, at] + 1), int(rounds[i, at]))
        for i, at in enumerate(rounds.argmax(axis=1))
    ]
    return max(work, setup.train_s, float(np.mean(longest)) / (setup.staleness + 1))
