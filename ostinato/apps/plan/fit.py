"""``ostinato plan fit RUN [RUN ...]``: learn by which factor a kind of device is slower than by data sheets.

    plan.json, metrics.jsonl of every run ---> measured over planned seconds of each phase, medians over runs
                                          ---> plan-<hash>.json in the cache, where later plans look

A plan was made with the factors that were kept then. They are divided out, so the new factors do not depend
on them. Effects that a plan does not price (drafts, other programs on the device) become part of the factors.
Runs of another layout or of other numbers of tokens than planned are refused, and so are runs that sample on
the devices that train meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.files import cache_folder, read_cached
from ostinato.inputs import parse_json, parse_toml
from ostinato.parallel.layout import Layout
from ostinato.run import RunFolder, atomic_write

FILE = "plan.json"  # of a run folder: the prediction (``commands.plan_json``)
TOKENS = 0.15  # the relative difference that a step's tokens may have from the plan
PUBLISH = "time/publish_s"  # in metrics.jsonl where rollouts go on while the trainer learns, and only there
# Part -> the key in metrics.jsonl, and the phases of the plan in it. The trainer's time includes scoring old
# log-probabilities, and in turns also publishing; with overlap time/rollout_s is only the wait for rollouts.
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Seconds of a phase divided by those of data sheets, for a kind of device."""

    phases: Mapping[str, float]
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The seconds of a part of a run's step; ``planned`` by data sheets alone."""

    run: str
    name: str
    phases: tuple[str, ...]
    planned: float
    measured: float


@app.command()
def fit_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders that have a plan.")],
) -> None:
    """Learn from runs how fast a kind of device is, for later plans."""
    folders = [RunFolder.open(path) for path in dict.fromkeys(path.resolve() for path in runs)]
    devices = sorted({str(plan_of(run).get("device")) for run in folders})
    if len(devices) > 1:
        raise ValueError(
            f"the runs were planned for {' and '.join(devices)}; fit the runs of one kind of device at a time"
        )
    parts = [part for run in folders for part in parts_of(run)]
    factors = fit(parts)
    for part in parts:
        typer.echo(
            f"{part.run} {part.name}: {part.planned:.3g} s by data sheets, {part.measured:.3g} s measured, "
            f"{part.measured / part.planned:.2f} times"
        )
    write_factors(factors, factors_file(devices[0]))
    text = ", ".join(f"{phase} {factor:.2f}" for phase, factor in factors.phases.items())
    typer.echo(f"kept for later plans of {devices[0]}: {text}")


def parts_of(run: RunFolder) -> list[Part]:
    """The planned and measured parts of a run. Raises ValueError, in a sentence, for a run without any."""
    plan, name = plan_of(run), str(run.path)
    rows = list(run.metrics.rows())
    try:
        _refuse_other_runs(name, plan, parse_toml(run.recipe.read_text(encoding="utf-8")), rows)
        parts = list(_measure_parts(name, plan, rows))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{FILE} of {name} cannot be read ({error!r}); {_advise(name)}") from error
    if not parts:
        raise ValueError(f"{name} has no seconds of a step behind its first, which warms up; let it go on")
    return parts


def _measure_parts(name: str, plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield medians over steps, without the first, which warms up, and steps that lack the part."""
    for part, (key, phases) in (OVERLAPPED if _has_overlap(rows) else IN_TURNS).items():
        planned_s = sum(
            sum(plan["seconds"].get(phase, {}).values()) / plan["factors"].get(phase, 1.0) for phase in phases
        )
        seconds = [row[key] for row in rows[1:] if row.get(key, 0.0) > 0]
        if seconds and planned_s > 0:
            yield Part(
                run=name, name=part, phases=phases, planned=planned_s, measured=statistics.median(seconds)
            )


def plan_of(run: RunFolder) -> Mapping[str, Any]:
    """Read plan.json of the run. Raises ValueError where it is missing or cannot be read."""
    path = run.path / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; plan the run first, with --record {run.path}")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); {_advise(str(run.path))}") from error


def _has_overlap(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the run sampled while it trained (``pipeline.overlap``)."""
    return any(PUBLISH in row for row in rows)


def _refuse_other_runs(
    name: str, plan: Mapping[str, Any], recipe: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError where the run is not the one that was planned."""
    run_layout = str(Layout.parse(str(recipe.get("parallel", {}).get("layout", ""))))
    plan_layout = str(Layout.parse(plan["layouts"]["train"]))
    if run_layout != plan_layout:
        raise ValueError(
            f"{name} trains under layout {run_layout} and its plan is of {plan_layout}; {_advise(name)} and "
            f"--train-layout {run_layout}"
        )
    sampler = recipe.get("engine", {}).get("backend", plan["sampler"])
    if sampler != plan["sampler"]:
        raise ValueError(f"{name} samples by {sampler} and its plan is of {plan['sampler']}; {_advise(name)}")
    token_counts = [row["tokens/sampled"] for row in rows[1:] if row.get("tokens/sampled")]
    if token_counts and abs(statistics.median(token_counts) / plan["tokens"] - 1) > TOKENS:
        raise ValueError(
            f"{name} samples {statistics.median(token_counts):,.0f} tokens a step and its plan is of "
            f"{plan['tokens']:,.0f}; {_advise(name)} and its own --prompts, --group, --answer-tokens and "
            "--max-answer"
        )
    if _has_overlap(rows) and plan["placement"] == "colocated":
        raise ValueError(
            f"{name} samples while it trains, and by its plan on the same devices, so that no seconds are "
            "those of one part; fit runs without pipeline.overlap"
        )


def _advise(name: str) -> str:
    return f"plan the run anew, with --record {name}"


def fit(parts: Sequence[Part]) -> Factors:
    """Return the median factor of every phase over runs."""
    ratios: dict[str, list[float]] = {}
    for part in parts:
        for phase in part.phases:
            ratios.setdefault(phase, []).append(part.measured / part.planned)
    phases = {phase: statistics.median(values) for phase, values in ratios.items()}
    return Factors(phases=phases, runs=len({part.run for part in parts}))


def factors_file(device: str) -> Path:
    """The file of a kind of device: ``~/.cache/ostinato/plan-<hash>.json``; XDG_CACHE_HOME is honoured."""
    return cache_folder() / f"plan-{hashlib.sha256(device.encode()).hexdigest()[:12]}.json"


def write_factors(factors: Factors, file: Path) -> None:
    atomic_write(file, json.dumps(asdict(factors), indent=2))


def read_factors(file: Path) -> Factors | None:
    """Read the file of ``write_factors``; None where it is missing or cannot be read."""

    def parse_factors(fields: Mapping[str, Any]) -> Factors:
        phases = {str(name): float(factor) for name, factor in fields["phases"].items()}
        if not all(0 < factor < math.inf for factor in phases.values()):
            raise ValueError("a factor is not positive and finite")
        return Factors(phases=phases, runs=int(fields["runs"]))

    return read_cached(file, parse_factors)
