"""``ostinato bench plan``: what the planner says of small trainings on this machine, and what they take.

    bytes     weights, adapters, gradients and optimizer of every rank, and the peak of live tensors
    seconds   of a step; efficiencies are fitted on one half of the configurations, errors told of the other
    pick      of all layouts of four ranks that the planner enumerates, the one that it finds fastest, against
              the one that is

A rank is a process with one thread; ranks talk over gloo. Where there are more ranks than cores, they take
turns: every rank's work takes as many times longer, and who waits in a pipeline's bubble leaves its core to
others (``on_cores``). So figures of more ranks than cores are of the planner's arithmetic, not of a cluster.
Cores share their memory's bandwidth, and few rows of each expert read its whole weights: a rank that has the
machine to itself is faster there, which a term of its own tells (``BESIDE``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.layouts import on_ranks
from lab.plan_runs import Run, configurations, measured, of_ranks
from lab.settings import Clock, machine
from ostinato.engine.threads import logical_cores
from ostinato.parallel.layout import Layout
from ostinato.plan.calibrate import Calibration, Observation, calibrate, errors, keep, kept_file
from ostinato.plan.cluster import gpu_named
from ostinato.plan.layouts import layouts
from ostinato.plan.memory import trainer_terms
from ostinato.plan.problem import (
    GB,
    Cluster,
    DType,
    Imbalance,
    Model,
    Phase,
    Precision,
    Problem,
    Recompute,
    Setup,
    Work,
)
from ostinato.plan.roofline import Efficiency
from ostinato.plan.time import BYTES, CALLS, Roofline
from ostinato.plan.traffic import traffic

Say = Callable[[str], None]
EXPERTS, BESIDE = "train/experts", "train/experts beside other ranks"
EXACT = ("weights", "adapters", "gradients", "optimizer")
# A core and its links before anything is fitted: orders of magnitude.
CORE = Efficiency(
    products=1.0,
    grouped=0.7,
    attention=0.5,
    memory=1.0,
    links=1.0,
    network=1.0,
    exchange=1.0,
    latency=300e-6,
    far_latency=300e-6,
    layer=1.5e-3,
    ahead=False,
)
MESSAGES = {"tensor", "context", "expert exchange", "weight gather", "pipeline", "gradients"}
TOGETHER = 8  # configurations that the same processes measure: an answer has to come in time
BAR_PEAK, BAR_TIME, BAR_PICK = 0.10, 0.25, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``steps`` timed of each configuration. By the ``clock`` of processors, where others use the machine:
    then a rank's own work is compared, without waiting, and nothing is picked."""

    runs: tuple[Run, ...] = field(default_factory=configurations)
    swept: Run = field(default_factory=lambda: Run(model="moe", way="shared_outer", layout="d4"))
    steps: int = 5
    sweep: bool = True
    clock: Clock = Clock.WALL
    keep: bool = True  # the factors, for later plans of this machine

    def shortened(self) -> Plan:
        """Fewer steps, no sweep, and nothing is kept: factors of 2 steps are no better than those of 5."""
        return replace(self, steps=2, sweep=False, keep=False)


def run(plan: Plan, say: Say = print) -> dict[str, Any]:
    """Measure, compare, fit, and (``plan.keep``) leave the factors where later plans of this machine look."""
    before, started = machine(), time.time()
    rows = [row(one, found, plan.clock) for one, found in measure(plan.runs, plan, say)]
    half = [rows[0::2], rows[1::2]]
    fitted = calibrate([_observation(one) for one in half[0]])
    held = errors([_observation(one) for one in half[1]], fitted.factors)
    result = {
        "clock": str(plan.clock),
        "machine": before,
        "rows": [one | {"fitted_s": _observation(one).under(fitted.factors)} for one in rows],
        "fit": asdict(fitted) | {"factors": dict(fitted.factors)},
        "held_out": dict(zip(("median", "worst"), held, strict=True)),
    }
    if plan.keep and plan.clock is Clock.WALL:
        whole = calibrate([_observation(one) for one in rows])
        factors = for_plans(whole.factors)
        keep(replace(whole, factors=factors, efficiency=asdict(CORE)), kept_file("cpu"))
    if plan.sweep and plan.clock is Clock.WALL:
        result["pick"] = picked(plan, fitted, say)
    return result | {"seconds": round(time.time() - started, 1)}


def measure(runs: Sequence[Run], plan: Plan, say: Say) -> list[tuple[Run, dict[str, Any]]]:
    """What ranks found, in the order of ``runs``. Some of one number of ranks share their processes."""
    found: dict[Run, dict[str, Any]] = {}
    for ranks, group in of_ranks(runs).items():
        say(f"{len(group)} configurations on {ranks} rank{'s' * (ranks > 1)}")
        for first in range(0, len(group), TOGETHER):
            some = group[first : first + TOGETHER]
            results, *_ = on_ranks(ranks, measured, some, plan.steps, plan.clock)
            found |= dict(zip(some, results, strict=True))
    return [(one, found[one]) for one in runs]


def problem_of(run: Run) -> Problem:
    """A run as the planner is asked: fp32 on as many cores as it has ranks."""
    shape, core = run.shape, gpu_named("cpu")
    wide = DType.FP32
    return Problem(
        model=Model(name=run.model, config=run.config),
        adapter=run.adapter,
        precision=Precision(base=wide, sampler=wide, compute=wide, kv=wide),
        work=Work(
            prompts=shape.prompts,
            group=shape.group,
            prompt_tokens=shape.prompt_tokens - shape.group,  # the last token of an answer is no row
            answers=(shape.answer_tokens,),
            max_answer=shape.answer_tokens,
        ),
        cluster=Cluster(gpu=core, nodes=1, per_node=run.ranks, host_memory=run.ranks * 8 * GB),
        imbalance=Imbalance(sigma=0.0),
    )


def setup_of(run: Run) -> Setup:
    layout = Layout.parse(run.layout)
    again = run.recompute or layout.shard > 1
    recompute = Recompute.FULL if again else Recompute.NONE
    rows = -(-run.shape.microbatch // layout.row_shards) * layout.row_shards
    return Setup(layout=layout, microbatch=rows, recompute=recompute)


def row(run: Run, found: Mapping[str, Any], clock: Clock = Clock.WALL) -> dict[str, Any]:
    """A configuration: bytes of the fullest rank, measured and planned, and the terms of its seconds."""
    problem, setup = problem_of(run), setup_of(run)
    ranks, layout = found["ranks"], setup.layout
    planned = [_planned_bytes(problem, setup, stage) for stage in range(layout.pipeline)]
    exact = max(
        abs(planned[layout.coords(rank).pipeline][name] / one[name] - 1)
        for rank, one in enumerate(ranks)
        for name in EXACT
        if one[name]
    )
    return {
        "name": str(run),
        "ranks": run.ranks,
        "exact": exact,
        "peak": max(one["peak"] for one in ranks),
        "planned_peak": max(one["peak"] for one in planned),
        "measured_s": max(one["seconds"] for one in ranks),
        "terms": seconds_of(run, clock),
    }


def _planned_bytes(problem: Problem, setup: Setup, stage: int) -> dict[str, float]:
    """Of a rank of a stage, by the names of what is measured."""
    terms, _ = trainer_terms(problem, Phase.TRAIN, setup, stage)
    return {
        "weights": terms["base weights"],
        "adapters": terms.get("adapters", 0.0),
        "gradients": terms["gradients"],
        "optimizer": terms["optimizer"],
        "peak": sum(terms.values()),
    }


def seconds_of(run: Run, clock: Clock = Clock.WALL) -> dict[str, float]:
    """Unfitted seconds of a step by term, messages as "calls" and "bytes" of all axes together."""
    problem, setup = problem_of(run), setup_of(run)
    terms = dict(Roofline(efficiency=CORE).phase(problem, Phase.TRAIN, setup))
    for name in MESSAGES & terms.keys():
        del terms[name]
    sent = traffic(problem, Phase.TRAIN, setup).values()
    terms[CALLS.partition("/")[2]] = CORE.latency * sum(one.calls for one in sent)
    terms[BYTES.partition("/")[2]] = sum(one.bytes for one in sent) / problem.cluster.gpu.link
    named = {f"train/{term}": seconds for term, seconds in terms.items() if seconds}
    if run.ranks > 1 and EXPERTS in named:
        named[BESIDE] = named[EXPERTS]
    if clock is Clock.CPU:
        return {term: seconds for term, seconds in named.items() if term != "train/bubble"}
    return on_cores(named, run.ranks, logical_cores())


def on_cores(terms: Mapping[str, float], ranks: int, cores: int) -> dict[str, float]:
    """Seconds where ``ranks`` take turns on ``cores``: work takes ranks / cores times as long, and of a
    bubble is left what the others' work does not fill."""
    times = max(1.0, ranks / cores)
    busy = sum(seconds for term, seconds in terms.items() if term != "train/bubble")
    bubble = max(0.0, terms.get("train/bubble", 0.0) - busy * (times - 1))
    found = {term: seconds * times for term, seconds in terms.items() if term != "train/bubble"}
    return found | ({"train/bubble": bubble} if bubble else {})


def for_plans(factors: Mapping[str, float]) -> dict[str, float]:
    """Factors of a plan's terms, which know nothing of neighbours: a plan is of several ranks."""
    found = dict(factors)
    beside = found.pop(BESIDE, 0.0)
    return found | ({EXPERTS: found.get(EXPERTS, 1.0) + beside} if beside else {})


def _observation(row: Mapping[str, Any]) -> Observation:
    return Observation(name=row["name"], terms=row["terms"], seconds=row["measured_s"])


def picked(plan: Plan, fitted: Calibration, say: Say) -> dict[str, Any]:
    """The planner's layout of four ranks against all others, every one of them run."""
    asked = problem_of(plan.swept)
    runs = [replace(plan.swept, layout=str(one)) for one in layouts(asked, plan.swept.ranks, Phase.TRAIN)]
    rows = [row(one, found) for one, found in measure(runs, plan, say)]
    said = {one["name"]: _observation(one).under(fitted.factors) for one in rows}
    took = {one["name"]: one["measured_s"] for one in rows}
    pick, best = min(said, key=said.__getitem__), min(took, key=took.__getitem__)
    ranked = sorted(took.values())
    return {
        "layouts": len(rows),
        "pick": pick,
        "pick_s": took[pick],
        "best": best,
        "best_s": took[best],
        "regret": took[pick] / took[best] - 1,
        "median_s": statistics.median(ranked),
        "worst_s": ranked[-1],
        "rows": [{"name": name, "said_s": said[name], "took_s": took[name]} for name in took],
    }


def table(result: Mapping[str, Any]) -> RenderableType:
    """For a terminal."""
    shown = Table(title="Planned against measured")
    for name in ("configuration", "exact terms off", "peak MB", "off", "step s", "fitted off", ""):
        shown.add_column(name, justify="left" if name in ("configuration", "") else "right")
    for number, one in enumerate(result["rows"]):
        shown.add_row(
            one["name"],
            f"{one['exact']:.2%}",
            f"{one['peak'] / 1e6:.1f}",
            f"{one['planned_peak'] / one['peak'] - 1:+.1%}",
            f"{one['measured_s']:.2f}",
            f"{one['fitted_s'] / one['measured_s'] - 1:+.0%}",
            "fitted on" if number % 2 == 0 else "held out",
        )
    return Stack(shown, *verdict(result))


def verdict(result: Mapping[str, Any]) -> list[str]:
    """In sentences, with the bars of the acceptance list."""
    rows, held = result["rows"], result["held_out"]
    peaks = [abs(one["planned_peak"] / one["peak"] - 1) for one in rows]
    lines = [
        "weights, adapters, gradients, optimizer: off by "
        f"{max(one['exact'] for one in rows):.3%} at most (bar 0.1 %)",
        f"peak of live tensors: off by {statistics.median(peaks):.1%} in the median, {max(peaks):.1%} at "
        f"most, {sum(peak <= BAR_PEAK for peak in peaks)} of {len(rows)} within {BAR_PEAK:.0%}",
        f"{result['clock']} seconds of held-out configurations: off by {held['median']:.1%} in the median, "
        f"{held['worst']:.1%} at most (bar {BAR_TIME:.0%})",
    ]
    if pick := result.get("pick"):
        lines.append(
            f"of {pick['layouts']} layouts of 4 ranks the planner picks {pick['pick']}: "
            f"{pick['pick_s']:.2f} s, {pick['regret']:.1%} behind the best ({pick['best']}, "
            f"{pick['best_s']:.2f} s; bar {BAR_PICK:.0%})"
        )
    return lines


__all__ = ["Plan", "on_cores", "problem_of", "row", "run", "seconds_of", "setup_of", "table", "verdict"]
