"""``ostinato bench pipeline``: what a pipeline of workers is worth here, each on a core of its own.

    one thread     one process samples, then trains                              1 core
    two threads    the same with both cores for either                           2 cores
    colocated      one process, sampling while a second thread trains            2 cores, staleness k
    synchronous    a sampler and a trainer, which wait for each other            1 core each, staleness 0
    pipelined      the same two, neither of which waits                          1 core each, staleness k

All train the same recipe on the same prompts for the same number of steps, so of the same number of samples;
the seeds are rounds, in each of which every arm runs once, and who runs first goes round. Ratios are taken
within a round.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from lab.harness import Bench, Result, Say, option, seeds
from lab.paired import Paired
from lab.pipeline_work import SMOLLM2, Window, Work, figures, write_prompts
from lab.settings import machine
from lab.whole_runs import allowed_cores, trained
from ostinato.apps.scaling.curve import student_90
from ostinato.observe.timeline import pool_of

Trained = Callable[["Pipeline", Say], list[dict[str, Any]]]
RUN_LIMIT_S = 1200.0  # ten steps take 150 s on one kind of core, and 450 s on another
AS_FAST = 0.97  # of the fastest: what is simpler is preferred from here on
BAR_RATIO, BAR_IDLE = 1.6, 0.10  # pipelined / synchronous; idle share of each worker


class Arm(StrEnum):
    """A way to use two cores, the simplest first."""

    ALONE = "one thread"
    THREADS = "two threads"
    COLOCATED = "colocated"
    SYNCHRONOUS = "synchronous"
    PIPELINED = "pipelined"


ON_RAY = (Arm.SYNCHRONOUS, Arm.PIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Bench):
    """``steps`` of each run, the first ``warm_up`` and the last ``drain`` of them not measured."""

    work: Work = SMOLLM2
    arms: tuple[Arm, ...] = option(tuple(Arm), "Some of the arms, with commas.")
    seeds: tuple[int, ...] = option((0, 1, 2), "Rounds: how many, or FIRST:END.", parse=seeds)
    staleness: int = option(2, "Of the arms that overlap.")
    steps: int = option(10, "Training steps of every run.")
    slots: int = option(0, "Of the sampler; 0: as many as keep it as busy as the trainer.")
    warm_up: int = 3
    drain: int = 3
    balance: int = 3  # at most so many short runs to find slots with which both sides have as much to do

    def __post_init__(self) -> None:
        if self.staleness < 1:
            raise ValueError(
                f"staleness is {self.staleness}, at which nothing is sampled while the trainer learns; use 1"
                " or more"
            )
        if self.drain <= self.staleness:
            raise ValueError(
                f"drain is {self.drain} with staleness {self.staleness}: nothing is admitted in the last "
                f"{self.staleness} steps; use at least {self.staleness + 1}"
            )
        _ = self.window

    @property
    def window(self) -> Window:
        return Window(steps=self.steps, warm_up=self.warm_up, drain=self.drain)

    def settled(self) -> Pipeline:
        """With the slots that are requested."""
        if not self.slots:
            return self
        return replace(self, work=replace(self.work, slots=self.slots), balance=0)

    def quick(self) -> Pipeline:
        """One round: the ratios, and nothing about rewards."""
        return replace(self, seeds=self.seeds[:1], steps=12, balance=0)

    def measure(self, say: Say) -> dict[str, Any]:
        before, started = machine(), time.time()
        bench = balanced(as_possible(self, say), say)
        result = summary(bench, trained_arms(bench, say)) | {"machine": before}
        return result | {"seconds": round(time.time() - started, 1)}

    @staticmethod
    def table(result: Result) -> RenderableType:
        return table(result)


def overrides(arm: Arm, staleness: int) -> tuple[str, ...]:
    """What an arm changes of the recipe, to be repeated elsewhere."""
    overlap = ("pipeline.overlap=true", f"pipeline.staleness={staleness}")
    workers = ("engine.threads=1", "cluster.samplers=1", "cluster.remote_trainer=true", "cluster.pin=true")
    return {
        Arm.ALONE: ("engine.threads=1",),
        Arm.THREADS: ("engine.threads=2",),
        Arm.COLOCATED: ("engine.threads=1", *overlap),
        Arm.SYNCHRONOUS: workers,
        Arm.PIPELINED: (*workers, *overlap),
    }[arm]


def cores(arm: Arm) -> tuple[int, ...]:
    """Those that an arm may use: one for what is one worker, two for all others."""
    allowed = allowed_cores()
    if len(allowed) < 2:
        raise ValueError("ostinato bench pipeline gives a core to each worker, and this machine has one only")
    return allowed[: 1 if arm is Arm.ALONE else 2]


def as_possible(bench: Pipeline, say: Say) -> Pipeline:
    """Without the arms that need Ray, where there is none."""
    if find_spec("ray") is not None:
        return bench
    say('workers in processes of their own are not measured: pip install "ostinato[ray]"')
    return replace(bench, arms=tuple(arm for arm in bench.arms if arm not in ON_RAY))


def balanced(bench: Pipeline, say: Say, trained: Trained | None = None) -> Pipeline:
    """With as many slots as make a sampler as busy as the trainer, within 5 %: where overlap can win most, on
    this machine too. Found by short runs of another seed, before anything is compared. ``trained``: what runs
    them; ``trained_arms`` unless a test has no time."""
    tried: dict[int, float] = {}
    while Arm.PIPELINED in bench.arms and len(tried) < bench.balance and bench.work.slots not in tried:
        say(f"{bench.work.slots} slots:")
        steps = bench.warm_up + bench.drain + 2
        short = replace(bench, arms=(Arm.PIPELINED,), seeds=(max(bench.seeds) + 1,), steps=steps)
        (found,) = (trained or trained_arms)(short, say)
        busy = {pool_of(name): share for name, share in found["utilisation"].items()}
        ratio = tried[bench.work.slots] = busy["samplers"] / busy["trainer"]
        if abs(ratio - 1) <= 0.05:
            break
        bench = replace(bench, work=replace(bench.work, slots=max(1, round(bench.work.slots * ratio))))
    if tried:
        slots = min(tried, key=lambda slots: abs(tried[slots] - 1))
        bench = replace(bench, work=replace(bench.work, slots=slots))
    return bench


def trained_arms(bench: Pipeline, say: Say) -> list[dict[str, Any]]:
    """A row for each run."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
        prompts = write_prompts(bench.work, Path(root) / "prompts.jsonl")
        for seed, arm in turns(bench):
            keys = (
                *bench.work.overrides(prompts),
                f"seed={seed}",
                f"trainer.steps={bench.steps}",
                *overrides(arm, bench.staleness),
            )
            name = f"{arm}, seed {seed}"
            logs = Path(root) / f"{arm.name.lower()}-{seed}"
            folder = trained(bench.work.recipe, keys, logs, name, cores=cores(arm), limit_s=RUN_LIMIT_S)
            runs.append({"arm": str(arm), "seed": seed} | figures(folder, bench.window))
            say(_line(runs[-1]))
    return runs


def turns(bench: Pipeline) -> Iterator[tuple[int, Arm]]:
    """Every arm once in every round; another one begins each time, so that none always follows the same."""
    for round_, seed in enumerate(bench.seeds):
        shift = round_ * 2 % len(bench.arms)
        yield from ((seed, arm) for arm in (*bench.arms[shift:], *bench.arms[:shift]))


# ---- what the runs come to


def summary(bench: Pipeline, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the pipelined arm on top, then every arm, what it gains and what it costs."""
    by_arm = {arm: [one for one in runs if one["arm"] == arm] for arm in bench.arms}
    arms = {str(arm): _medians(found) for arm, found in by_arm.items() if found}
    head = arms.get(Arm.PIPELINED, {})
    ratios = {
        f"ratio_vs_{name}": against(by_arm, Arm.PIPELINED, other)
        for name, other in (("sync", Arm.SYNCHRONOUS), ("colocated", Arm.COLOCATED), ("alone", Arm.ALONE))
        if other in by_arm and Arm.PIPELINED in by_arm
    }
    names = ("bubble_share", "utilisation", "steps_per_s", "staleness_mean")
    return {
        **{name: head.get(name) for name in names},
        **{name: found["ratio"] for name, found in ratios.items()},
        "ratios": ratios,
        "reward": {str(arm): reward_against(by_arm, arm, Arm.SYNCHRONOUS) for arm in by_arm},
        "arms": arms,
        "best": best(bench, arms),
        "runs": list(runs),
        "settings": asdict(bench),
    }


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of an arm's runs; utilisation worker by worker."""
    names = ("steps_per_s", "bubble_share", "staleness_mean", "tokens_per_s", "tail", "reward", "held_out")
    middle = {name: _median([one[name] for one in runs]) for name in names}
    workers = runs[0]["utilisation"]
    used = {name: _median([one["utilisation"].get(name) for one in runs]) for name in workers}
    seconds = [second for one in runs for second in one["train_s"]]
    return middle | {"utilisation": used, "train_s": _median(seconds)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def against(by_arm: Mapping[Arm, Sequence[Mapping[str, Any]]], one: Arm, other: Arm) -> dict[str, Any]:
    """How many times as many steps per second ``one`` does as ``other``, round by round."""
    pairs = Paired(base=_step_seconds(by_arm[one]), other=_step_seconds(by_arm[other]))
    return pairs.figures()


def _step_seconds(runs: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(1 / one["steps_per_s"] for one in sorted(runs, key=lambda one: one["seed"]))


def reward_against(
    by_arm: Mapping[Arm, Sequence[Mapping[str, Any]]], one: Arm, other: Arm
) -> dict[str, dict[str, float | None]]:
    """Mean difference from ``other`` at the same number of samples, seed by seed, with half of its 90 %
    interval (Student's): of the training reward over all steps, and of the held-out score at the end."""
    found: dict[str, dict[str, float | None]] = {}
    for name in ("reward", "held_out"):
        mine, theirs = ({run["seed"]: run[name] for run in by_arm.get(arm, ())} for arm in (one, other))
        gaps = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
        n = len(gaps)
        half = student_90(n - 1) * statistics.stdev(gaps) / math.sqrt(n) if n > 1 else None
        found[name] = {"difference": statistics.fmean(gaps) if gaps else None, "half_90": half}
    return found


def best(bench: Pipeline, arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The simplest arm that is about as fast as the fastest, and how a recipe sets it."""
    speeds = {arm: arms[arm]["steps_per_s"] for arm in Arm if arm in arms}
    fastest = max(speeds.values())
    chosen = next(arm for arm, speed in speeds.items() if speed >= AS_FAST * fastest)
    reported = overrides(chosen, bench.staleness)  # all of them: it was measured so, and pinned
    return {"arm": str(chosen), "steps_per_s": speeds[chosen], "overrides": reported}


# ---- for people


def _line(one: Mapping[str, Any]) -> str:
    used = ", ".join(f"{name} {share:.0%}" for name, share in one["utilisation"].items())
    return (
        f"{one['arm']}, seed {one['seed']}: {one['steps_per_s']:.3f} steps/s, "
        f"reward {one['reward']:.3f}, staleness {one['staleness_mean']:.2f}" + (f", {used}" if used else "")
    )


def table(result: Mapping[str, Any]) -> Table:
    """The arms, one a row."""
    ratios = result["ratios"]
    lines = [
        f"pipelined / {name.removeprefix('ratio_vs_')}: {found['ratio']:.2f}x "
        f"({found['low']:.2f} to {found['high']:.2f} over {found['rounds']} rounds)"
        for name, found in ratios.items()
    ]
    chosen = result["best"]
    lines.append(f"best here: {chosen['arm']} ({' '.join(chosen['overrides'])})")
    out = Table(title="One sampler and one trainer, real training", caption="\n".join(lines))
    for column in ("", "steps/s", "busy", "staleness", "reward", "against synchronous", "held out", "tail"):
        out.add_column(column, justify="left" if not column else "right")
    for name, arm in result["arms"].items():
        gap = result["reward"][name]["reward"]
        out.add_row(
            name,
            f"{arm['steps_per_s']:.3f}",
            " ".join(f"{worker} {share:.0%}" for worker, share in arm["utilisation"].items()) or "-",
            f"{arm['staleness_mean']:.2f}",
            f"{arm['reward']:.3f}",
            _interval(gap["difference"], gap["half_90"]),
            "-" if arm["held_out"] is None else f"{arm['held_out']:.3f}",
            f"{arm['tail']:.1f}x",
        )
    return out


def _interval(middle: float | None, half: float | None) -> str:
    if middle is None:
        return "-"
    return f"{middle:+.3f}" + ("" if half is None else f" ± {half:.3f}")
