"""``ostinato plan``: the layouts that fit, their speed and their cost, from a config.json and without torch.

options -> PlanRequest (request) -> plan.search -> the answer and tables here, or one JSON object
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rich.box
import typer
from rich.console import Console
from rich.table import Table

from ostinato.apps.plan import launch
from ostinato.apps.plan.cluster import ON_GPUS, PER_NODE
from ostinato.apps.plan.fit import FILE
from ostinato.apps.plan.fit import app as fit_app
from ostinato.apps.plan.layouts import divisors
from ostinato.apps.plan.memory import cache_bytes, kv_values, limit, margin
from ostinato.apps.plan.problem import Phase, Placement, Problem, known_models
from ostinato.apps.plan.request import Options, PlanRequest, ask, plan_options
from ostinato.apps.plan.search import (
    Plan,
    Ranking,
    describe_limit,
    distinct,
    list_worlds,
    refuse_layouts,
    search,
    why_lost,
)
from ostinato.apps.plan.time import SPREAD, refit_bytes, step_traffic
from ostinato.parallel.elements import stage_elements
from ostinato.parallel.gpus import GB
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import SIGMA, expert_loads, measure_imbalance
from ostinato.parallel.memory import FRAGMENTATION
from ostinato.parallel.placement import (
    owner_of,
    place_by_load,
    place_contiguously,
    placed_experts,
    read_placement,
    write_placement,
)
from ostinato.run import RunFolder, atomic_write, read_routes, to_json
from ostinato.terminal import Screen, announce_work, show_log

HOUR = 3600.0
MOST = 1024  # GPUs that are looked at

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def command(arguments: Sequence[str]) -> None:
    """Run ``ostinato plan fit``, which learns from runs, or plan a model."""
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
    least: Annotated[
        bool, typer.Option("--smallest", help="The fewest GPUs that fit; --gpus gives their kind and nodes.")
    ] = False,
    start: Annotated[bool, typer.Option("--launch", help="Print the first plan as a recipe.")] = False,
    run: Annotated[
        Path | None, typer.Option("--record", help="A run folder, or a file: keep the best plan there.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="One JSON object into this file, - for standard output.")
    ] = None,
) -> None:
    """Rank parallel layouts of trainer and sampler by memory and time."""
    start_time = time.perf_counter()
    if start and str(json_file) == "-":
        raise ValueError("--launch and --json - both write to standard output; give --json a file")
    request, sizes = ask(model, gpus, options), dict[str, Any]()
    with (
        show_log(error=True),
        announce_work(f"looking for plans of {request.problem.model.name}, up to a minute"),
    ):
        if least:
            ranking, request, sizes = _find_smallest(request, model, options)
        elif not (ranking := _rank_plans(request)).plans:
            raise ValueError(nothing_fits(request, ranking, model, options))
    best = ranking.plans[0]
    if run is not None:
        file = run if run.suffix == ".json" else RunFolder.open(run).path / FILE
        atomic_write(file, json.dumps(plan_json(request, best), indent=1).encode())
    seconds = time.perf_counter() - start_time
    if json_file is not None:
        text = to_json(as_json(request, ranking, top) | sizes | {"plan_seconds": round(seconds, 3)})
        if str(json_file) == "-":
            typer.echo(text)
            return
        atomic_write(json_file, text.encode())
    if start:
        typer.echo(launch.ostinato(request.problem, best.arrangement), nl=False)
        return
    if sizes:
        started = sizes["smallest_started"] or "none in one node, and over nodes it starts no sampler"
        typer.echo(f"Fewest that fit: {sizes['smallest']}; fewest that Ostinato can start today: {started}.")
        typer.echo(f"Of --gpus {gpus} the kind is used, not the number.")
    print_answer(Screen(), request, ranking, top)
    typer.echo(f"Searched {ranking.tried} setups in {seconds:.1f} s on one CPU core. {ON_GPUS}.")


def _rank_plans(request: PlanRequest) -> Ranking:
    """Rank the plans: those that Ostinato can start come first, then the others, each fastest first."""
    problem = request.problem
    ranking = search(problem, request.clock, request.allowed)
    plans = sorted(ranking.plans, key=lambda plan: bool(launch.list_lacks(problem, plan.arrangement)))
    return replace(ranking, plans=tuple(plans))


def fitting(
    request: PlanRequest, model: str, options: Options, within: range
) -> Iterator[tuple[Ranking, PlanRequest]]:
    """Yield the ranking of each number of the GPUs on which anything fits, in the order of ``within``:
    divisors of a node, then whole nodes. A part of a node has its share of host memory."""
    cluster = request.problem.cluster
    width = cluster.per_node if cluster.nodes > 1 else max(PER_NODE, cluster.per_node)
    nodes = (*range(2, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
    refuse_layouts(request.problem, request.allowed)
    elements = stage_elements(request.problem.config, None, Layout(), 0)
    weights = (elements.trainable + elements.untrained) * request.problem.precision.base.num_bytes
    sizes = {*divisors(width), *(width * count for count in nodes)} & set(within)
    for number in sorted(sizes, reverse=within.step < 0):
        if weights > number * limit(request.problem):
            continue  # not even the evenly cut weights fit
        per_node = min(number, width)
        own_options = replace(options, host_memory=options.host_memory / cluster.per_node * per_node)
        resized = ask(model, f"{number // per_node}x{per_node}x{cluster.gpu.name}", own_options)
        if any(list_worlds(resized.problem, resized.allowed)) and (ranking := _rank_plans(resized)).plans:
            yield ranking, resized


def _find_smallest(
    request: PlanRequest, model: str, options: Options
) -> tuple[Ranking, PlanRequest, dict[str, Any]]:
    """Return the plans on the fewest GPUs that fit, and how many these are, beside the fewest on which
    Ostinato can start a plan (None: on no part of a node; over nodes it starts none). Raises ValueError."""
    found, started = list[tuple[Ranking, PlanRequest]](), None
    for ranking, resized in fitting(request, model, options, range(1, MOST + 1)):
        found.append((ranking, resized))
        cluster = resized.problem.cluster
        if not launch.list_lacks(resized.problem, ranking.plans[0].arrangement):
            started = cluster.num_gpus
        if started or cluster.nodes > 1:
            break
    if not found:
        gpu = request.problem.cluster.gpu.name
        raise ValueError(f"{model} fits on no cluster of up to {MOST} {gpu}; use a smaller --max-answer")
    fits = found[0][1].problem.cluster.num_gpus
    return *found[0], {"smallest": fits, "smallest_started": started}


def nothing_fits(request: PlanRequest, ranking: Ranking, model: str, options: Options) -> str:
    """Describe in a sentence which phase misses by how much, and what would help: the nearest numbers of GPUs
    that fit, which may be smaller (384 experts are not divided by 40)."""
    problem, reasons = request.problem, list[str]()
    for phase, candidate in ranking.near.items():
        excess = candidate.memory.total - limit(problem)
        term = max(candidate.memory.terms, key=lambda name: candidate.memory.terms[name])
        reasons.append(
            f"{phase} misses by {excess / GB:.1f} GB at best ({candidate.setup.layout}, mostly {term} "
            f"{candidate.memory.terms[term] / GB:.1f})"
        )
    reasons = reasons or [f"{base}: {reason}" for base, reason in ranking.reasons.items()]
    count, gpu = problem.cluster.num_gpus, problem.cluster.gpu.name
    most = min(MOST, max(64, 4 * count))
    nearest = [
        next(fitting(request, model, options, within), None)
        for within in (range(count - 1, 0, -1), range(count + 1, most + 1))
    ]
    sizes = " or ".join(str(found[1].problem.cluster.num_gpus) for found in nearest if found is not None)
    fix = f"use {sizes} of them" if sizes else f"no number up to {most} does: use another GPU"
    trained = "--lora-rank" if problem.adapter else "adapters (without --full)"
    fix += f", a smaller --max-answer or {trained}"
    subject = f"{problem.model.name} on {count} x {gpu}"
    return f"{subject} does not fit: {'; '.join(reasons) or 'no layout divides the model'}; {fix}"


def question(request: PlanRequest) -> dict[str, str]:
    """Return everything that a plan depends on, with defaults, in words."""
    problem = request.problem
    config, work, precision, cluster = problem.config, problem.work, problem.precision, problem.cluster
    gpu, spec, elements = cluster.gpu, problem.adapter, stage_elements(config, problem.adapter, Layout(), 0)
    total, moe = elements.trainable + elements.untrained, config.moe
    idle = elements.experts * (1 - moe.top_k / moe.num_experts) if moe else 0.0
    cache = kv_values(config, latent=problem.sampler.latent_kv) * precision.kv.num_bytes
    target = "all parameters"
    if spec is not None:
        scheme = f", experts {spec.expert_scheme}" if moe else ""
        target = f"LoRA r={spec.rank} on {', '.join(spec.targets)}{scheme}: {elements.adapters / 1e6:,.1f}M"
    return {
        "model": f"{problem.model.name}: {total / 1e9:,.2f}B parameters, {(total - idle) / 1e9:,.2f}B active",
        "trained": target,
        "precision": f"base {precision.base}, sampler {precision.sampler}, compute {precision.compute}, "
        f"gradients {precision.gradient}, master {precision.master}, moments {precision.moments}",
        "work": f"{work.prompts} prompts x {work.group} answers, prompt {work.prompt_tokens}, answers mean "
        f"{work.mean_answer:,.0f} up to {work.max_answer:,} tokens, {work.updates} optimizer steps",
        "cluster": f"{cluster.nodes} x {cluster.per_node} {gpu.name} of {gpu.memory / GB:g} GB, host "
        f"{cluster.host_memory / GB:,.0f} GB a node, {cluster.usable_host:.0%} of it used; per GPU and "
        f"direction {gpu.link / GB:g} GB/s in the node, {gpu.nic / GB:g} between nodes",
        "sampler": f"{problem.sampler.name}, cache {cache / 1e3:,.1f} kB a token, "
        f"up to {problem.sampler.sequences} sequences a replica",
        "reserve": f"context and NCCL {problem.context / GB:g} GB, "
        f"fragmentation {FRAGMENTATION:.0%} of activations",
        "context": f"{work.longest:,} tokens at most of {config.max_positions:,} that the model takes",
        "imbalance": f"lognormal popularity, sigma {SIGMA}",
        "price": f"{gpu.price:g} per GPU and hour, assumed; {work.steps:,} steps",
        "efficiency": request.measured,
        "assumed": "shares of peaks, seconds of calls: "
        + ", ".join(f"{name} {value:g}" for name, value in asdict(request.clock.efficiency).items()),
        "range": "one standard deviation of the seconds, assumed: "
        + ", ".join(f"{phase} {spread:.0%}" for phase, spread in SPREAD.items()),
    }


def cost(problem: Problem, plan: Plan) -> float:
    """Return the cost of an RL step, in the currency of the price."""
    return plan.arrangement.num_gpus * problem.cluster.gpu.price * plan.times.total / HOUR


def shown(problem: Problem, ranking: Ranking, top: int) -> tuple[list[Plan], int]:
    """Return (``top`` plans that Ostinato can start and as many of the others, how many can be started)."""
    startable = [plan for plan in ranking.plans if not launch.list_lacks(problem, plan.arrangement)]
    first_plans = distinct(startable, top)
    return first_plans + distinct(ranking.plans[len(startable) :], top), len(first_plans)


# ---- output


def answer(problem: Problem, plan: Plan) -> Iterator[str]:
    """Yield the plan in sentences: layouts and GPUs, hours and money of the run, memory."""
    a, times, work = plan.arrangement, plan.times, problem.work
    base = "on GPUs of their own" if a.placement == Placement.APART else f"colocated, base {a.base}"
    recompute = ", recomputed" if a.train.recompute else ""
    train, rollout, gpu = a.train.layout, a.rollout.layout, problem.cluster.gpu.name
    each = f" on each of {rollout.data} data ranks" if rollout.data > 1 else ""
    yield f"[bold]{a.num_gpus} x {gpu}[/bold], {base}"
    yield f"train {train}: {in_words(train)}"
    yield f"sample {rollout}: {in_words(rollout)}"
    yield (
        f"microbatches of {a.train.microbatch:,} tokens{recompute}; samples {a.rollout.sequences} sequences "
        f"at once{each}"
    )
    hours, dollars = times.total * work.steps / HOUR, cost(problem, plan) * work.steps
    low, high = times.low * hours, times.high * hours
    yield (
        f"[bold]{hours:,.1f} hours[/bold] ({low:,.1f} to {high:,.1f}) and [bold]${dollars:,.0f}[/bold] for "
        f"{work.steps:,} steps of {times.total:.1f} s, at ${problem.cluster.gpu.price:g} per GPU and hour"
    )
    memory = plan.memory[plan.fullest()]
    text = (
        f"[bold]{memory.total / GB:.1f} of {limit(problem) / GB:.1f} GB[/bold] of the fullest GPU, "
        f"{margin(problem, memory) / GB:.1f} left"
    )
    if cache := memory.terms.get("KV cache"):
        least = cache_bytes(problem, replace(a.rollout, sequences=0))
        text += f"; the KV cache takes {cache / GB:.1f} of what is free and needs {least / GB:.1f} at least"
    yield text
    if work.longest > (most := problem.config.max_positions):
        yield (
            f"[bold]warning[/bold] prompt and answer may be {work.longest:,} tokens and {problem.model.name} "
            f"takes {most:,}: a run refuses longer ones, so use a smaller --max-answer"
        )
    if lacks := launch.list_lacks(problem, a):
        yield "Ostinato can start none of these plans:"
        yield from (f"  it lacks {lack}" for lack in lacks)


def in_words(layout: Layout) -> str:
    """Return "8 data x 2 tensor, experts over 16"."""
    sizes = {"data": layout.data, "tensor": layout.tensor, "context": layout.context}
    sizes |= {"pipeline": layout.pipeline}
    words = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1) or "one rank"
    words += f", experts over {layout.expert}" if layout.expert > 1 else ""
    words += f", width of experts over {layout.expert_tensor}" if layout.expert_tensor > 1 else ""
    words += f", weights in {layout.shard} pieces" if layout.shard > 1 else ""
    return words + (f", {layout.virtual} virtual stages each" if layout.virtual > 1 else "")


def print_answer(console: Console, request: PlanRequest, ranking: Ranking, top: int) -> None:
    """Print the first plan in sentences, then the table of plans (those that Ostinato cannot start under a
    heading of their own, with what it lacks), memory and time of the first plan, and the request."""
    problem, (plans, count) = request.problem, shown(request.problem, ranking, top)
    for line in answer(problem, plans[0]):
        console.print(line)
    console.print(f"[bold]binding[/bold] {describe_limit(problem, plans[0])}")
    if count:
        console.print(_make_plan_table(problem, "plans", plans[:count]))
    if plans[count:]:
        console.print(
            _make_plan_table(
                problem,
                "what Ostinato cannot start yet",
                plans[count:],
                start=count + 1,
            )
        )
    numbers: dict[str, list[str]] = {}
    for number, plan in enumerate(plans[1:], start=2):
        console.print(f"{number} is {why_lost(plans[0], plan)}")
        for reason in launch.list_lacks(problem, plan.arrangement):
            numbers.setdefault(reason, []).append(str(number))
    for reason, plan_numbers in numbers.items():
        console.print(f"{', '.join(plan_numbers)}: Ostinato lacks {reason}")
    for base, base_reason in ranking.reasons.items():
        console.print(f"[bold]{base}[/bold] is not possible: {base_reason}")
    console.print(_make_memory_table(problem, plans[0]), _make_time_table(plans[0]))
    question_table = Table("", "", title="for", show_header=False, box=None, title_justify="left")
    for name, value in question(request).items():
        question_table.add_row(name, value)
    console.print(question_table)


def _make_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, title_justify="left"
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _make_plan_table(problem: Problem, title: str, plans: Sequence[Plan], start: int = 1) -> Table:
    table = _make_table(
        title, "", "train", "rollout", "base", "tokens", "seq", "GB", "left", "s/step", "$/step"
    )
    for number, plan in enumerate(plans, start=start):
        a, worst = plan.arrangement, plan.memory[plan.fullest()]
        table.add_row(
            str(number),
            str(a.train.layout),
            str(a.rollout.layout),
            "apart" if a.placement == Placement.APART else str(a.base),
            f"{a.train.microbatch}{', recompute' if a.train.recompute else ''}",
            str(a.rollout.sequences),
            f"{worst.total / GB:.1f}",
            f"{margin(problem, worst) / GB:.1f}",
            f"{plan.times.total:.1f}",
            f"{cost(problem, plan):.2f}",
        )
    return table


def _make_memory_table(problem: Problem, plan: Plan) -> Table:
    table = _make_table("GB on the fullest GPU", "term", *(str(phase) for phase in plan.memory))
    phases = plan.memory.values()
    for name in dict.fromkeys(name for phase in phases for name in phase.terms):
        sizes = [phase.terms.get(name, 0.0) for phase in phases]
        if any(sizes):
            table.add_row(name, *(f"{size / GB:.2f}" if size else "" for size in sizes))
    table.add_row("total", *(f"{phase.total / GB:.2f}" for phase in phases))
    table.add_row("left", *(f"{margin(problem, phase) / GB:.2f}" for phase in phases))
    table.add_row("host, a node", *(f"{phase.host / GB:.1f}" for phase in phases))
    return table


def _make_time_table(plan: Plan) -> Table:
    times = plan.times
    low, high = times.total * times.low, times.total * times.high
    title = f"a step: {times.total:.1f} s ({low:.1f} to {high:.1f})"
    table = _make_table(title, "phase", "term", "s")
    for part, terms in times.terms.items():
        for term, seconds in sorted(terms.items(), key=lambda item: -item[1]):
            if seconds >= 0.0005:
                table.add_row(part, term, f"{seconds:.3f}")
    if times.overlapped:
        table.add_row("", "overlapped", f"-{times.overlapped:.3f}")
    return table


def as_json(request: PlanRequest, ranking: Ranking, top: int) -> dict[str, Any]:
    """Return everything that is printed, in bytes and seconds."""
    problem, (plans, _) = request.problem, shown(request.problem, ranking, top)
    return {
        "question": question(request),
        "gpu_bytes": limit(problem),
        "plans": [
            plan_json(request, plan) | {"why_not": "" if plan is plans[0] else why_lost(plans[0], plan)}
            for plan in plans
        ],
        "binding": describe_limit(problem, plans[0]),
        "not_possible": {str(base): reason for base, reason in ranking.reasons.items()},
        "tried": ranking.tried,
    }


def plan_json(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """Return a plan as ``--json`` prints it and a run folder keeps it (``fit.FILE``), where a report compares
    it with the measurements."""
    problem, a, times = request.problem, plan.arrangement, plan.times
    cluster = problem.cluster
    return {
        "model": problem.model.name,
        "cluster": f"{cluster.nodes}x{cluster.per_node}x{cluster.gpu.name}",
        "device": cluster.gpu.name,
        "sampler": problem.sampler.name,
        "layouts": {phase.value: str(a.setup(phase).layout) for phase in Phase},
        "placement": str(a.placement),
        "base": str(a.base),
        "lacks": launch.list_lacks(problem, a),
        "microbatch": a.train.microbatch,
        "recompute": a.train.recompute,
        "sequences": a.rollout.sequences,
        "tokens": problem.work.trained_tokens,  # sampled in a step
        "memory": {
            str(phase): {
                "terms": dict(memory.terms),
                "total": memory.total,
                "stage": memory.stage,
                "host": memory.host,
            }
            for phase, memory in plan.memory.items()
        },
        "seconds": {part: dict(terms) for part, terms in times.terms.items()},
        "factors": dict(request.clock.factors),  # of phases, with which the seconds were made
        "total": times.total,
        "low": times.low,
        "high": times.high,
        "price_per_gpu_hour": cluster.gpu.price,
        "cost_per_step": cost(problem, plan),
        "cost_of_run": cost(problem, plan) * problem.work.steps,
        "traffic": {"/".join(key): message.bytes for key, message in step_traffic(problem, a).items()},
        "refit_bytes": refit_bytes(problem, a),
    }


def place_experts(run: Path, ranks: int, out: Path, *, nodes: int = 1, current: Path | None = None) -> None:
    """Place the experts of a run by its routes, write and print the placement. Raises ValueError for a run
    without routes, or ranks that do not fit."""
    from ostinato.config import Recipe
    from ostinato.model.hf import read_config
    from ostinato.model.named import find_model_folder

    folder = RunFolder.open(run)
    recipe = Recipe.load(folder.recipe)
    config = read_config(find_model_folder(recipe.model.path))
    if config.moe is None:
        raise ValueError(f"{recipe.model.path} has no experts to place; name a run of a mixture of experts")
    routes = list(read_routes(folder).values())
    if len(routes) < 2:
        raise ValueError(
            f"{run} has kept routes of {len(routes)} steps; two at least are needed, so train with "
            "log.trajectories_every=1 and trainer.replay on"
        )
    windows = np.stack([expert_loads(route, config.moe.num_experts) for route in routes])
    layers, experts = windows.shape[1:]
    neighbours = place_contiguously(layers, experts, ranks)
    placement = place_by_load(windows[::2].sum(0), ranks, nodes=nodes)
    owners = {"neighbours": neighbours, "placed": placement}
    if current is not None:
        owners["current"] = owner_of(read_placement(current, ranks))
    _print_imbalance(windows[1::2].sum(0), owners, ranks)
    write_placement(out, placed_experts(placement, ranks))
    print(f"wrote {out}: use it with parallel.placement={out}")


def _print_imbalance(loads: np.ndarray, owners: Mapping[str, np.ndarray], ranks: int) -> None:
    print(f"straggler factor (largest load of a rank / mean) under {ranks} expert ranks, judged by steps")
    print("that had no say in the placement:")
    for name, owner in owners.items():
        result = measure_imbalance(loads, owner, ranks)
        print(f"  {name:<11} {result.straggler:.3f}, worst layer {result.worst_straggler:.3f}")
