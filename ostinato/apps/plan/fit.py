"""``ostinato plan fit RUN [RUN ...]``: how many times longer a kind of device takes than data sheets say.

    plan.json, metrics.jsonl of every run ---> measured over planned seconds of each phase, medians over runs
                                          ---> plan-<hash>.json in the cache, where later plans look

A plan was made with the factors that were kept then; they are divided out, so what is learned does not depend
on them. What a plan does not price (drafts, other programs on the device) is learned as if it were the
device. Runs of another layout or of other numbers of tokens than planned are refused, and so are those that
sample on the devices that train meanwhile.
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

FILE = "plan.json"  # of a run folder: what was predicted (``commands.plan_json``)
TOKENS = 0.15  # a step may sample so much more or less than planned
PUBLISH = "time/publish_s"  # in metrics.jsonl where rollouts go on while the trainer learns, and only there
# Part -> what metrics.jsonl measures, phases of the plan in it. The trainer scores old log-probabilities
# within its own time. In turns it publishes in it, too; with overlap time/rollout_s is only its waiting.
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Seconds of a phase over what data sheets say, of one kind of device."""

    phases: Mapping[str, float]
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a run's step in seconds: ``planned`` by data sheets alone."""

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
    words = ", ".join(f"{phase} {factor:.2f}" for phase, factor in factors.phases.items())
    typer.echo(f"kept for later plans of {devices[0]}: {words}")


def parts_of(run: RunFolder) -> list[Part]:
    """What a run teaches. Raises ValueError, in one sentence, for one that teaches nothing."""
    plan, name = plan_of(run), str(run.path)
    rows = list(run.metrics.rows())
    try:
        _refuse_other_runs(name, plan, parse_toml(run.recipe.read_text(encoding="utf-8")), rows)
        parts = list(_parts(name, plan, rows))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{FILE} of {name} cannot be read ({error!r}); {_anew(name)}") from error
    if not parts:
        raise ValueError(f"{name} has no seconds of a step behind its first, which warms up; let it go on")
    return parts


def _parts(name: str, plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Medians over steps; the first warms up, and a step without a part says nothing of it."""
    for part, (key, phases) in (OVERLAPPED if _overlaps(rows) else IN_TURNS).items():
        planned = sum(
            sum(plan["seconds"].get(phase, {}).values()) / plan["factors"].get(phase, 1.0) for phase in phases
        )
        seconds = [row[key] for row in rows[1:] if row.get(key, 0.0) > 0]
        if seconds and planned > 0:
            yield Part(
                run=name, name=part, phases=phases, planned=planned, measured=statistics.median(seconds)
            )


def plan_of(run: RunFolder) -> Mapping[str, Any]:
    """plan.json of the run. Raises ValueError where it has none that can be read."""
    path = run.path / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; plan the run first, with --record {run.path}")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); {_anew(str(run.path))}") from error


def _overlaps(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Did the run sample while it trained (``pipeline.overlap``)?"""
    return any(PUBLISH in row for row in rows)


def _refuse_other_runs(
    name: str, plan: Mapping[str, Any], recipe: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError where the plan is not of the run as it is."""
    trained = str(Layout.parse(str(recipe.get("parallel", {}).get("layout", ""))))
    planned = str(Layout.parse(plan["layouts"]["train"]))
    if trained != planned:
        raise ValueError(
            f"{name} trains under layout {trained} and its plan is of {planned}; {_anew(name)} and "
            f"--train-layout {trained}"
        )
    sampler = recipe.get("engine", {}).get("backend", plan["sampler"])
    if sampler != plan["sampler"]:
        raise ValueError(f"{name} samples by {sampler} and its plan is of {plan['sampler']}; {_anew(name)}")
    sampled = [row["tokens/sampled"] for row in rows[1:] if row.get("tokens/sampled")]
    if sampled and abs(statistics.median(sampled) / plan["tokens"] - 1) > TOKENS:
        raise ValueError(
            f"{name} samples {statistics.median(sampled):,.0f} tokens a step and its plan is of "
            f"{plan['tokens']:,.0f}; {_anew(name)} and its own --prompts, --group, --answer-tokens and "
            "--max-answer"
        )
    if _overlaps(rows) and plan["placement"] == "colocated":
        raise ValueError(
            f"{name} samples while it trains, and by its plan on the same devices, so that no seconds are "
            "those of one part; fit runs without pipeline.overlap"
        )


def _anew(name: str) -> str:
    return f"plan the run anew, with --record {name}"


def fit(parts: Sequence[Part]) -> Factors:
    """The median factor of every phase over runs."""
    ratios: dict[str, list[float]] = {}
    for part in parts:
        for phase in part.phases:
            ratios.setdefault(phase, []).append(part.measured / part.planned)
    phases = {phase: statistics.median(each) for phase, each in ratios.items()}
    return Factors(phases=phases, runs=len({part.run for part in parts}))


def factors_file(device: str) -> Path:
    """Of a kind of device: ``~/.cache/ostinato/plan-<hash>.json``; XDG_CACHE_HOME is honoured."""
    return cache_folder() / f"plan-{hashlib.sha256(device.encode()).hexdigest()[:12]}.json"


def write_factors(factors: Factors, file: Path) -> None:
    atomic_write(file, json.dumps(asdict(factors), indent=2))


def read_factors(file: Path) -> Factors | None:
    """What ``write_factors`` wrote; None where there is nothing that can be read."""

    def parsed(read: Mapping[str, Any]) -> Factors:
        phases = {str(name): float(factor) for name, factor in read["phases"].items()}
        if not all(0 < factor < math.inf for factor in phases.values()):
            raise ValueError("a factor is not positive and finite")
        return Factors(phases=phases, runs=int(read["runs"]))

    return read_cached(file, parsed)
