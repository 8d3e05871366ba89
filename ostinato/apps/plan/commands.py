"""``ostinato plan``: what fits, what is fastest, what it costs; from a config.json alone, without torch.

options -> Problem, Allowed (request) -> plan.search -> tables here, or one JSON object
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import rich.box
import typer
from rich.console import Console
from rich.table import Table

from ostinato.apps.plan import launch
from ostinato.apps.plan.cluster import ON_GPUS
from ostinato.apps.plan.counts import adapter_counts, counts, kv_values
from ostinato.apps.plan.fit import app as fit_app
from ostinato.apps.plan.imbalance import SIGMA
from ostinato.apps.plan.memory import limit, margin
from ostinato.apps.plan.problem import GB, Placement, Problem, Recompute, known_models
from ostinato.apps.plan.record import FILE, record, write
from ostinato.apps.plan.request import Options, PlanRequest, ask, plan_options
from ostinato.apps.plan.search import Found, Plan, binding, distinct, resized, search, smallest, why_lost
from ostinato.apps.plan.time import refit_bytes
from ostinato.apps.plan.traffic import step_traffic
from ostinato.run import RunFolder, atomic_write, to_json
from ostinato.terminal import Screen

HOUR = 3600.0

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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="One JSON object into this file, - for standard output.")
    ] = None,
) -> None:
    """Rank parallel layouts of trainer and sampler by memory and time. Figures are for one RL step."""
    started = time.perf_counter()
    if start and str(json_file) == "-":
        raise ValueError("--launch and --json - both write to standard output; give --json a file")
    found, request = _answer(ask(model, gpus, options), least=least)
    problem, best = request.problem, found.plans[0]
    if run is not None:
        file = run if run.suffix == ".json" else RunFolder.open(run).path / FILE
        write(file, record(problem, best, factors=request.clock.factors))
    seconds = time.perf_counter() - started
    if json_file is not None:
        text = to_json(as_json(request, found, top) | {"plan_seconds": round(seconds, 3)})
        if str(json_file) == "-":
            typer.echo(text)
            return
        atomic_write(json_file, text.encode())
    if start:
        typer.echo(launch.ostinato(problem, best.arrangement), nl=False)
        return
    print_tables(Screen(), request, found, top, seconds)


def _answer(request: PlanRequest, *, least: bool) -> tuple[Found, PlanRequest]:
    """What was found, and the question with the cluster that it was found on. Raises ValueError where nothing
    fits."""
    problem = request.problem
    if not least:
        found = search(problem, request.clock, request.allowed)
        if not found.plans:
            raise ValueError(nothing_fits(problem, found))
        return _startable_first(problem, found), request
    fewest = smallest(problem, request.clock, request.allowed)
    if fewest is None:
        raise ValueError(f"{problem.model.name} fits on no cluster of up to 1024 {problem.cluster.gpu.name}")
    cluster = resized(problem.cluster, fewest.plans[0].arrangement.num_gpus)
    problem = replace(problem, cluster=cluster)
    return _startable_first(problem, fewest), replace(request, problem=problem)


def _startable_first(problem: Problem, found: Found) -> Found:
    """Plans that Ostinato can start, fastest first, then the others alike."""
    return replace(found, plans=tuple(sorted(found.plans, key=lambda one: not startable(problem, one))))


def startable(problem: Problem, plan: Plan) -> bool:
    """Does Ostinato have all that the plan has?"""
    return not launch.lacking(problem, plan.arrangement)


def nothing_fits(problem: Problem, found: Found) -> str:
    """One sentence: which phase misses by how much, and what would help."""
    reasons = []
    for phase, near in found.near.items():
        over = near.memory.total - limit(problem)
        term = max(near.memory.terms, key=lambda name: near.memory.terms[name])
        reasons.append(
            f"{phase} misses by {over / GB:.1f} GB at best ({near.setup.layout}, mostly {term} "
            f"{near.memory.terms[term] / GB:.1f})"
        )
    reasons += [f"{base}: {why}" for base, why in found.reasons.items()] if not reasons else []
    what = f"{problem.model.name} on {problem.cluster.num_gpus} x {problem.cluster.gpu.name}"
    fix = "use more GPUs (--smallest finds how many), a smaller --max-answer or --lora-rank"
    return f"{what} does not fit: {'; '.join(reasons) or 'no layout divides the model'}; {fix}"


def question(problem: Problem) -> dict[str, str]:
    """Everything that a plan depends on, defaults as well, in words."""
    work, precision, cluster, found = problem.work, problem.precision, problem.cluster, counts(problem.config)
    gpu, kv = (
        cluster.gpu,
        kv_values(problem.config, latent=problem.sampler.latent_kv) * precision.kv.num_bytes,
    )
    return {
        "model": f"{problem.model.name}: {found.total / 1e9:,.2f}B parameters, "
        f"{found.active / 1e9:,.2f}B active",
        "trained": _trained(problem),
        "precision": f"base {precision.base}, sampler {precision.sampler}, compute {precision.compute}, "
        f"gradients {precision.gradient}, master {precision.master}, moments {precision.moments}",
        "work": f"{work.prompts} prompts x {work.group} answers, prompt {work.prompt_tokens}, answers mean "
        f"{work.mean_answer:,.0f} up to {work.max_answer:,} tokens, {work.updates} optimizer steps",
        "cluster": f"{cluster.nodes} x {cluster.per_node} {gpu.name}, host "
        f"{cluster.host_memory / GB:,.0f} GB a node; per GPU and direction "
        f"{gpu.link / GB:g} GB/s in the node, {gpu.nic / GB:g} between nodes",
        "sampler": f"{problem.sampler.name}, cache {kv / 1e3:,.1f} kB a token, "
        f"up to {problem.sampler.sequences} sequences a replica",
        "reserve": f"context and NCCL {problem.context / GB:g} GB, "
        f"fragmentation {problem.reserve.fragmentation:.0%} of activations",
        "imbalance": f"lognormal popularity, sigma {SIGMA}",
        "price": f"{gpu.price:g} per GPU and hour, assumed; {work.steps:,} steps",
    }


def _trained(problem: Problem) -> str:
    spec = problem.adapter
    if spec is None:
        return "all parameters"
    number = sum(adapter_counts(problem.config, spec).values())
    scheme = f", experts {spec.expert_scheme}" if problem.config.moe else ""
    return f"LoRA r={spec.rank} on {', '.join(spec.targets)}{scheme}: {number / 1e6:,.1f}M parameters"


def cost(problem: Problem, plan: Plan) -> float:
    """Of one RL step, in the currency of the price."""
    return plan.arrangement.num_gpus * problem.cluster.gpu.price * plan.times.total / HOUR


# ---- what is printed


def print_tables(console: Console, request: PlanRequest, found: Found, top: int, seconds: float) -> None:
    """Tables: what was requested, the plans, memory and time of the first. Plans that Ostinato cannot start
    have a heading of their own, with what it lacks."""
    problem, plans = request.problem, shown(request.problem, found, top)
    ready = sum(startable(problem, plan) for plan in plans)
    reasons = [f"{number} is {why_lost(plans[0], plan)}" for number, plan in enumerate(plans[1:], start=2)]
    asked = Table("", "", show_header=False, box=None)
    for name, value in [*question(problem).items(), ("efficiency", request.measured)]:
        asked.add_row(name, value)
    console.print(asked)
    if ready:
        console.print(_plans(problem, "plans", plans[:ready]))
    else:
        console.print("Ostinato can start none of these plans.")
    for line in reasons[: max(0, ready - 1)]:
        console.print(line)
    if plans[ready:]:
        console.print(_plans(problem, "what Ostinato cannot start yet", plans[ready:], first=ready + 1))
    for line in [*([] if ready else reasons), *_lacking(problem, plans, ready)]:
        console.print(line)
    console.print(f"[bold]binding[/bold] {binding(problem, plans[0])}")
    for base, why in found.reasons.items():
        console.print(f"[bold]{base}[/bold] is not possible: {why}")
    console.print(_memory(problem, plans[0]))
    console.print(_time(plans[0]))
    console.print(f"searched {found.tried} setups in {seconds:.1f} s on one CPU core")
    console.print(f"{ON_GPUS}.")


def _lacking(problem: Problem, plans: Sequence[Plan], ready: int) -> Iterator[str]:
    """What keeps Ostinato from the plans behind the first ``ready``, a line for each reason."""
    numbers: dict[str, list[str]] = {}
    for number, plan in enumerate(plans[ready:], start=ready + 1):
        for reason in launch.lacking(problem, plan.arrangement):
            numbers.setdefault(reason, []).append(str(number))
    yield from (f"{', '.join(of)}: Ostinato lacks {reason}" for reason, of in numbers.items())


def shown(problem: Problem, found: Found, top: int) -> list[Plan]:
    """``top`` plans that Ostinato can start, and as many of the others."""
    ready = [plan for plan in found.plans if startable(problem, plan)]
    return distinct(ready, top) + distinct(found.plans[len(ready) :], top)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, title_justify="left"
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _plans(problem: Problem, title: str, plans: Sequence[Plan], first: int = 1) -> Table:
    table = _table(title, "", "train", "rollout", "base", "rows", "seq", "GB", "left", "s/step", "$/step")
    for number, plan in enumerate(plans, start=first):
        a, worst = plan.arrangement, max(plan.memory.values(), key=lambda one: one.total)
        again = ", recompute" if a.train.recompute == Recompute.FULL else ""
        table.add_row(
            str(number),
            str(a.train.layout),
            str(a.rollout.layout),
            "apart" if a.placement == Placement.APART else str(a.base),
            f"{a.train.microbatch}{again}",
            str(a.rollout.sequences),
            f"{worst.total / GB:.1f}",
            f"{margin(problem, worst) / GB:.1f}",
            f"{plan.times.total:.1f}",
            f"{cost(problem, plan):.2f}",
        )
    return table


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


def as_json(request: PlanRequest, found: Found, top: int) -> dict[str, Any]:
    """Everything that the tables say, in bytes and seconds."""
    problem, plans = request.problem, shown(request.problem, found, top)
    return {
        "question": question(problem),
        "efficiency": request.measured,
        "gpu_bytes": limit(problem),
        "plans": [
            _plan_json(problem, plan) | {"why_not": "" if plan is plans[0] else why_lost(plans[0], plan)}
            for plan in plans
        ],
        "binding": binding(problem, plans[0]),
        "not_possible": {str(base): why for base, why in found.reasons.items()},
        "tried": found.tried,
    }


def _plan_json(problem: Problem, plan: Plan) -> dict[str, Any]:
    a = plan.arrangement
    return {
        "train": str(a.train.layout),
        "logprobs": str(a.logprobs.layout),
        "rollout": str(a.rollout.layout),
        "placement": str(a.placement),
        "base": str(a.base),
        "lacks": launch.lacking(problem, a),
        "microbatch": a.train.microbatch,
        "recompute": a.train.recompute == Recompute.FULL,
        "sequences": a.rollout.sequences,
        "memory": {
            str(phase): {"terms": dict(one.terms), "total": one.total, "stage": one.stage, "host": one.host}
            for phase, one in plan.memory.items()
        },
        "seconds": {part: dict(terms) for part, terms in plan.times.terms.items()},
        "seconds_total": plan.times.total,
        "seconds_band": [plan.times.total * plan.times.low, plan.times.total * plan.times.high],
        "price_per_gpu_hour": problem.cluster.gpu.price,
        "cost_per_step": cost(problem, plan),
        "cost_of_run": cost(problem, plan) * problem.work.steps,
        "sent_by_a_rank": {"/".join(key): sent.bytes for key, sent in step_traffic(problem, a).items()},
        "refit_bytes": refit_bytes(problem, a),
    }
