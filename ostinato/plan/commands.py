"""``ostinato plan``: what fits, what is fastest, what it costs; from a config.json alone, without torch.

options -> Problem, Allowed (asked) -> plan.search -> tables here, or one JSON object
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import rich.box
import typer
from rich.console import Console
from rich.table import Table

from ostinato.plan import launch
from ostinato.plan.again import note, recorded, weigh
from ostinato.plan.asked import Asked, Options, ask, asked_json, plan_options
from ostinato.plan.fit_command import app as fit_app
from ostinato.plan.memory import limit, margin
from ostinato.plan.money import cost
from ostinato.plan.named import known_models
from ostinato.plan.problem import GB, Arrangement, Memory, Phase, Placement, Problem, Recompute
from ostinato.plan.record import FILE, write
from ostinato.plan.search import (
    Candidate,
    Found,
    Plan,
    binding,
    distinct,
    resized,
    search,
    smallest,
    why_lost,
)
from ostinato.plan.time import refit_bytes
from ostinato.plan.traffic import step_traffic
from ostinato.plan.words import UNMAPPED, needs_mapping, question
from ostinato.run import RunFolder, atomic_write, to_json

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def command(arguments: Sequence[str]) -> None:
    """``ostinato plan fit`` learns from runs, anything else plans a model."""
    if list(arguments[:1]) == ["fit"]:
        fit_app(args=list(arguments[1:]), prog_name="ostinato plan fit")
    app(args=list(arguments), prog_name="ostinato plan")


@app.command()
@plan_options
def plan(
    model: Annotated[
        str, typer.Argument(help=f"A folder, a config.json, or one of {', '.join(known_models())}.")
    ],
    gpus: Annotated[str, typer.Option(help="64xH800-80 (nodes of 8), 8x8xH100-80, 4xRTX4090-24.")],
    options: Options,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    least: Annotated[bool, typer.Option("--smallest", help="The fewest GPUs of the kind that fit.")] = False,
    start: Annotated[bool, typer.Option("--launch", help="Print the first plan as a recipe.")] = False,
    run: Annotated[
        Path | None, typer.Option("--record", help="A run folder, or a file: keep the best plan there.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="A run that was planned: is its layout still right?")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="One JSON object into this file, - for standard output.")
    ] = None,
) -> None:
    """Rank parallel layouts for each phase of RL by memory and time. Figures are for one RL step."""
    started = time.perf_counter()
    _refuse_together(start=start, against=against, run=run, json_file=json_file, least=least)
    if against is not None:
        weighed = RunFolder.open(against)
        advice = weigh(ask(model, gpus, options), weighed)
        note(weighed, [*weighed.metrics.rows()][-1]["step"], advice)
        typer.echo(f"{'switch' if advice.switch else 'stay'}: {advice.reason}")
        return
    found, asked = _answer(ask(model, gpus, options), least=least)
    if run is not None:
        said = asked_json(model, gpus, options)
        write(_file_of(run), recorded(asked, found.plans[0], said))
    seconds = time.perf_counter() - started
    if json_file is not None:
        text = to_json(as_json(asked, found, top) | {"plan_seconds": round(seconds, 3)})
        if str(json_file) == "-":
            typer.echo(text)
            return
        atomic_write(json_file, text.encode())
    if start:
        typer.echo(launch.ostinato(asked.problem, found.plans[0].arrangement), nl=False)
        return
    tell(Console(), asked, found, top, seconds)


def _file_of(run: Path) -> Path:
    """plan.json of a run folder, or the file itself."""
    return run if run.suffix == ".json" else RunFolder.open(run).path / FILE


def _refuse_together(
    *, start: bool, against: Path | None, run: Path | None, json_file: Path | None, least: bool
) -> None:
    """Raise ValueError, in one sentence, for options of which one would be left out."""
    given = {"--launch": start, "--record": run, "--json": json_file, "--smallest": least}
    beside = [name for name, value in given.items() if value]
    if against is not None and beside:
        raise ValueError(f"--against and {beside[0]} are two questions; ask one, then the other")
    if start and str(json_file) == "-":
        raise ValueError("--launch and --json - both write to standard output; give --json a file")


def _answer(asked: Asked, *, least: bool) -> tuple[Found, Asked]:
    """What was found, and the question with the cluster that it was found on. Raises ValueError where nothing
    fits."""
    problem = asked.problem
    if not least:
        found = search(problem, asked.clock, asked.allowed)
        if not found.plans:
            raise ValueError(nothing_fits(problem, found))
        return found, asked
    fewest = smallest(problem, asked.clock, asked.allowed)
    if fewest is None:
        raise ValueError(f"{problem.model.name} fits on no cluster of up to 1024 {problem.cluster.gpu.name}")
    cluster = resized(problem.cluster, fewest.plans[0].arrangement.num_gpus)
    return fewest, replace(asked, problem=replace(problem, cluster=cluster))


def nothing_fits(problem: Problem, found: Found) -> str:
    """One sentence: which phase misses by how much, and what would help."""
    told = []
    for phase, near in found.near.items():
        if not found.phases.get(phase):
            over = near.memory.total - limit(problem)
            term = max(near.memory.terms, key=lambda name: near.memory.terms[name])
            told.append(
                f"{phase} misses by {over / GB:.1f} GB at best ({near.setup.layout}, mostly {term} "
                f"{near.memory.terms[term] / GB:.1f})"
            )
    told += [f"{base}: {why}" for base, why in found.reasons.items()] if not told else []
    what = f"{problem.model.name} on {problem.cluster.num_gpus} x {problem.cluster.gpu.name}"
    mend = "use more GPUs (--smallest finds how many), fewer bytes (--base fp8) or --optimizer-on-host"
    return f"{what} does not fit: {'; '.join(told) or 'no layout divides the model'}; {mend}"


# ---- what is told


def tell(console: Console, asked: Asked, found: Found, top: int, seconds: float) -> None:
    """Tables: what was asked, the plans, memory and time of the first, each phase by itself."""
    problem, plans = asked.problem, distinct(found.plans, top)
    console.print(_question(asked))
    console.print(_plans(problem, plans))
    for number, plan in enumerate(plans[1:], start=2):
        console.print(f"{number} is {why_lost(plans[0], plan)}")
    console.print(f"[bold]binding[/bold] {binding(problem, plans[0])}")
    if any(needs_mapping(problem, plan.arrangement) for plan in plans):
        console.print(f"* {UNMAPPED}")
    for base, why in found.reasons.items():
        console.print(f"[bold]{base}[/bold] is not possible: {why}")
    console.print(_memory(problem, plans[0]))
    console.print(_time(plans[0]))
    for phase, candidates in found.phases.items():
        if candidates and sum(candidates[0].seconds.values()):
            console.print(_phase(problem, phase, candidates[:top], found))
    console.print(f"searched {sum(found.tried.values())} setups in {seconds:.1f} s on one CPU core")


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, title_justify="left"
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _question(asked: Asked) -> Table:
    problem = asked.problem
    table = Table("", "", show_header=False, box=None)
    for name, value in question(problem).items():
        table.add_row(name, value)
    table.add_row("efficiency", asked.measured)
    return table


def _plans(problem: Problem, plans: Sequence[Plan]) -> Table:
    table = _table("plans", "", "train", "rollout", "base", "rows", "seq", "GB", "left", "s/step", "$/step")
    for number, plan in enumerate(plans, start=1):
        a, worst = plan.arrangement, max(plan.memory.values(), key=lambda one: one.total)
        again = ", recompute" if a.train.recompute == Recompute.FULL else ""
        table.add_row(
            str(number),
            str(a.train.layout),
            str(a.rollout.layout),
            _held(problem, a),
            f"{a.train.microbatch}{again}",
            str(a.rollout.sequences),
            f"{worst.total / GB:.1f}",
            f"{margin(problem, worst) / GB:.1f}",
            f"{plan.times.total:.1f}",
            f"{cost(problem, a, plan.times).step:.2f}",
        )
    return table


def _held(problem: Problem, a: Arrangement) -> str:
    """How the base is."""
    if a.placement == Placement.APART:
        return "apart"
    return f"{a.base}{'*' if needs_mapping(problem, a) else ''}{', asleep' if a.slept else ''}"


def _memory(problem: Problem, plan: Plan) -> Table:
    table = _table("GB on the fullest GPU", "term", *(str(phase) for phase in plan.memory))
    names = dict.fromkeys(name for one in plan.memory.values() for name in one.terms)
    for name in names:
        sizes = [one.terms.get(name, 0.0) for one in plan.memory.values()]
        if any(sizes):
            table.add_row(name, *(f"{size / GB:.2f}" if size else "" for size in sizes))
    table.add_row("total", *(f"{one.total / GB:.2f}" for one in plan.memory.values()))
    table.add_row("left", *(f"{margin(problem, one) / GB:.2f}" for one in plan.memory.values()))
    table.add_row("host, a node", *(f"{one.host / GB:.1f}" for one in plan.memory.values()))
    return table


def _time(plan: Plan) -> Table:
    times = plan.times
    low, high = times.total * times.low, times.total * times.high
    title = f"seconds of a step: {times.total:.1f} ({low:.1f} to {high:.1f})"
    table = _table(title, "phase", "term", "s")
    for part, terms in times.terms.items():
        for term, seconds in sorted(terms.items(), key=lambda one: -one[1]):
            if seconds >= 0.0005:
                table.add_row(part, term, f"{seconds:.3f}")
    if times.overlapped:
        table.add_row("", "overlapped", f"-{times.overlapped:.3f}")
    return table


def _phase(problem: Problem, phase: Phase, candidates: Sequence[Candidate], found: Found) -> Table:
    lost = sum(found.refused[phase].values())
    title = f"{phase} alone: {found.tried[phase]} setups, {lost} do not fit"
    table = _table(title, "layout", "rows", "recompute", "seq", "GB", "s")
    for one in candidates:
        table.add_row(
            str(one.setup.layout),
            str(one.setup.microbatch or ""),
            str(one.setup.recompute),
            str(one.setup.sequences or ""),
            f"{one.memory.total / GB:.1f}",
            f"{one.total:.2f}",
        )
    return table


def as_json(asked: Asked, found: Found, top: int) -> dict[str, Any]:
    """Everything that the tables say, in bytes and seconds."""
    problem, plans = asked.problem, distinct(found.plans, top)
    return {
        "question": question(problem),
        "efficiency": asked.measured,
        "gpu_bytes": limit(problem),
        "plans": [
            _plan_json(problem, plan) | {"why_not": "" if plan is plans[0] else why_lost(plans[0], plan)}
            for plan in plans
        ],
        "binding": binding(problem, plans[0]),
        "not_possible": {str(base): why for base, why in found.reasons.items()},
        "phases": {
            str(phase): [
                {**_setup_json(one), "memory": _memory_json(one.memory), "seconds": dict(one.seconds)}
                for one in candidates[:top]
            ]
            for phase, candidates in found.phases.items()
        },
        "tried": {str(phase): number for phase, number in found.tried.items()},
        "refused": {str(phase): dict(terms) for phase, terms in found.refused.items()},
    }


def _plan_json(problem: Problem, plan: Plan) -> dict[str, Any]:
    a = plan.arrangement
    money = cost(problem, a, plan.times)
    return {
        "train": str(a.train.layout),
        "logprobs": str(a.logprobs.layout),
        "rollout": str(a.rollout.layout),
        "placement": str(a.placement),
        "base": str(a.base),
        "needs": UNMAPPED if needs_mapping(problem, a) else "",
        "slept": sorted(a.slept),
        "microbatch": a.train.microbatch,
        "recompute": a.train.recompute == Recompute.FULL,
        "sequences": a.rollout.sequences,
        "memory": {str(phase): _memory_json(one) for phase, one in plan.memory.items()},
        "seconds": {part: dict(terms) for part, terms in plan.times.terms.items()},
        "seconds_total": plan.times.total,
        "seconds_band": [plan.times.total * plan.times.low, plan.times.total * plan.times.high],
        "price_per_gpu_hour": money.price,
        "cost_per_step": money.step,
        "cost_of_run": money.run,
        "sent_by_a_rank": {"/".join(key): sent.bytes for key, sent in step_traffic(problem, a).items()},
        "refit_bytes": refit_bytes(problem, a),
    }


def _setup_json(one: Candidate) -> dict[str, Any]:
    setup = one.setup
    return {
        "layout": str(setup.layout),
        "microbatch": setup.microbatch,
        "recompute": setup.recompute == Recompute.FULL,
        "sequences": setup.sequences,
    }


def _memory_json(memory: Memory) -> Mapping[str, Any]:
    return {"terms": dict(memory.terms), "total": memory.total, "stage": memory.stage, "host": memory.host}
