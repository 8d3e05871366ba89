"""The ``ostinato`` command: arguments in, exit codes out.

0 done; 1 a failure while running; 2 something the user wrote, reported in one sentence before work starts, or
at the first evaluation or step where a reward function has never worked; 75 a process or a machine was lost,
and the run may be resumed as it is;
130 and 143 a run that was saved and stopped by Ctrl-C or SIGTERM; 141 the reader of the output was gone.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato import isa
from ostinato.cli.restarts import LOST
from ostinato.failure import Lost
from ostinato.launch import RunFailed
from ostinato.options import Hosts, Origins, make_access
from ostinato.other_names import key_hint

if TYPE_CHECKING:
    from ostinato.apps.serve.served import Additions, OpenAdditions, RunningService

app = typer.Typer(
    name="ostinato",
    help="Frugal RL for LLMs, dense and mixture-of-experts, from a laptop CPU to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PASSED_ON: dict[str, Any] = {  # a command with commands or options of its own
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
RecipePath = Annotated[
    str, typer.Argument(help="A TOML recipe, or the name of a packaged one.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="e.g. trainer.steps=10 algo.name=dapo", show_default=False),
]
Restarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="Resume it by itself after a loss, at most N times.")
]
RunPath = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
ModelOrRun = Annotated[
    str,
    typer.Argument(
        help="A run folder, a recipe, a Hugging Face folder, or a model name.", show_default=False
    ),
]
AdapterPath = Annotated[
    str, typer.Option("--adapter", metavar="FOLDER", help="On the model: a run, or an adapter of one.")
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of user errors too.")] = False,
) -> None:
    del debug  # taken out of the arguments by main, so that it may stand anywhere
    if version:
        from ostinato import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    restarts: Restarts = 0,
    shares: Annotated[
        str, typer.Option(metavar="N,N,...", help="Of several recipes: of the sampler's slots; equal.")
    ] = "",
) -> None:
    """Train a policy: sample, grade, learn; evaluate before and after; write a run folder.

    More recipes of the same model (a.toml b.toml KEY=VALUE) are trained side by side."""
    from ostinato.cli.train import train_all

    raise typer.Exit(train_all([recipe, *(overrides or [])], restarts, shares))


@app.command()
def new(
    recipe: Annotated[Path, typer.Argument(help="The file to write, e.g. mine.toml.", show_default=False)],
    task: Annotated[
        str, typer.Option(help="rows: judged by their answers; own: by a function of yours; env: a game.")
    ] = "",
    rows: Annotated[str, typer.Option(help="A .jsonl or .parquet file, hf:NAME, gym:NAME, arithmetic.")] = "",
    model: Annotated[str, typer.Option(help="A folder, a hub name, smollm2-135m, asset:seed-moe.")] = "",
    machine: Annotated[str, typer.Option(help="laptop, gpu or cluster.")] = "",
) -> None:
    """Write a commented recipe to start from; what is not given is asked."""
    from ostinato.cli.new import new as command

    command(recipe, task=task, model=model, machine=machine, rows=rows)


@app.command()
def keys(pattern: Annotated[str, typer.Argument(help="Part of a key or of its description.")] = "") -> None:
    """All keys of a recipe, with types, defaults and what they do."""
    from ostinato.config.reference import find_keys

    for line in find_keys(pattern):
        typer.echo(line)


@app.command()
def data(
    target: Annotated[
        str, typer.Argument(help="A recipe, or a file of rows (.jsonl, .parquet).", show_default=False)
    ],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="Whose template and tokens; the recipe's by default.")] = "",
    row: Annotated[int, typer.Option(min=1, help="Which prompt is shown.")] = 1,
) -> None:
    """What will be trained on: rows, lengths, a prompt as the model reads it, rewards of the own answers."""
    from ostinato.cli.data import data as command

    command(target, overrides or [], model=model, row=row)


@app.command()
def sft(
    target: Annotated[
        str, typer.Argument(help="A recipe, or a model (then give task.source).", show_default=False)
    ],
    overrides: Overrides = None,
    preference: Annotated[
        bool, typer.Option("--preference", help="DPO, on rows with prompt, chosen and rejected.")
    ] = False,
) -> None:
    """Train on rows with answers, before RL or instead of it; write a run folder."""
    from ostinato.cli.train import sft as command

    raise typer.Exit(command(target, overrides or [], preference=preference))


@app.command()
def resume(run: RunPath, overrides: Overrides = None, restarts: Restarts = 0) -> None:
    """Go on with a run from its last good checkpoint."""
    from ostinato.cli.train import resume as command

    raise typer.Exit(command(run, overrides or [], restarts))


@app.command(hidden=True)
def session(run: RunPath, overrides: Overrides = None, recipe: Annotated[str, typer.Option()] = "") -> None:
    """A session of ``--restarts``: resume the run, or begin it with the recipe."""
    from ostinato.cli.restarts import end_with_supervisor
    from ostinato.cli.train import resume as go_on
    from ostinato.cli.train import train as begin
    from ostinato.run import RunFolder

    end_with_supervisor()
    begun = not recipe or RunFolder(run).recipe.exists()
    code = go_on(run, overrides or []) if begun else begin(recipe, overrides or [], folder=run)
    raise typer.Exit(code)


@app.command("eval")
def evaluate(target: ModelOrRun, overrides: Overrides = None, adapter: AdapterPath = "") -> None:
    """Held-out pass@1 and pass@k of a run's last policy, or of a recipe's model before training."""
    from ostinato.cli.evaluate import evaluate as command

    command(target, overrides or [], adapter)


@app.command()
def generate(
    target: ModelOrRun,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="One prompt; without it, lines of stdin.")
    ] = "",
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; by default the model's, or 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="By default the model's, or 1.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    adapter: AdapterPath = "",
) -> None:
    """Talk to a model or to a trained policy; the answer streams."""
    from ostinato.cli.generate import SamplingOptions
    from ostinato.cli.generate import generate as command

    options = SamplingOptions(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    command(target, prompt=prompt, system=system, options=options, adapter=adapter)


@app.command()
def serve(
    target: ModelOrRun,
    overrides: Overrides = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=PATH", help="A run, or an adapter of one, of the same base."),
    ] = None,
    name: Annotated[str, typer.Option(help="What clients call the model; its own name by default.")] = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str, typer.Option(help="What clients send; also $OSTINATO_API_KEY.")] = "",
    allowed_hosts: Hosts = None,
    origins: Origins = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="At once; more get 429.")] = 1024,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at most.")] = 4096,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of a request.")] = 600.0,
    feedback: Annotated[
        str, typer.Option(metavar="FILE|URL", help="Keep answers and what users do (docs/feedback.md).")
    ] = "",
    product: Annotated[
        Path | None, typer.Option(help="The folder of a product's loop, whose policy is served first.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option(help="Further policies, loaded when they are asked for (docs/catalog.md).")
    ] = None,
    catalog_mb: Annotated[int, typer.Option(min=1, help="Of the catalog's policies in memory.")] = 1024,
    memory: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Keep chats of a session within (docs/memory.md).")
    ] = 0,
    memory_file: Annotated[Path, typer.Option(help="Where these are kept.")] = Path("runs/memory.sqlite"),
    memory_refill: Annotated[
        str, typer.Option(metavar="extract|model|diffusion:FOLDER", help="Who shortens: docs/memory.md.")
    ] = "extract",
) -> None:
    """Serve a policy at an OpenAI-compatible address, with a chat page; a run's while it learns."""
    from ostinato.apps.serve.command import Address, parse_adapters
    from ostinato.apps.serve.command import serve as command

    command(
        target,
        overrides or [],
        parse_adapters(adapters or []),
        Address(host=host, port=port, key=api_key, access=make_access(allowed_hosts, origins)),
        name=name,
        limits={"sequences": max_sequences, "max_tokens": max_tokens, "timeout_s": timeout_s},
        feedback=feedback,
        product=product,
        catalog=(catalog, catalog_mb) if catalog else None,
        additions=additions(feedback, memory, memory_file, memory_refill) if feedback or memory else None,
    )


@app.command()
def proxy(
    target: ModelOrRun,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Rollouts are added to it.")] = Path("rollouts.jsonl.zst"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8100,
    allowed_hosts: Hosts = None,
    origins: Origins = None,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Without a call, which ends a rollout.")] = 600.0,
) -> None:
    """Record what agents do with a policy: an OpenAI address for each rollout, without training."""
    from ostinato.apps.serve.command import Address
    from ostinato.apps.serve.command import proxy as command

    where = Address(host=host, port=port, access=make_access(allowed_hosts, origins))
    command(target, overrides or [], out, where, idle_s)


@app.command()
def tinker(
    target: ModelOrRun,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8001,
    api_key: Annotated[str, typer.Option(help="What clients send; also $OSTINATO_API_KEY.")] = "",
    allowed_hosts: Hosts = None,
    origins: Origins = None,
    state: Annotated[Path, typer.Option(help="Where what clients make is kept.")] = Path("runs/tinker"),
    models_mb: Annotated[
        int, typer.Option(min=1, help="Of models in memory; idle ones are saved and freed.")
    ] = 4096,
    name: Annotated[
        str, typer.Option(help="What clients call the base, beside its path; e.g. meta-llama/Llama-3.2-1B.")
    ] = "",
) -> None:
    """Serve the Tinker SDK: training and sampling of adapters of a model, by loops that clients write."""
    from ostinato.apps.serve.command import Address
    from ostinato.apps.tinker.command import tinker as command

    allowed = make_access(allowed_hosts, origins)
    where = Address(host=host, port=port, key=api_key, access=allowed, drain_s=3.0)
    command(target, overrides or [], where, state, name, models_mb)


@app.command("memory", **PASSED_ON)
def memory_(ctx: typer.Context) -> None:
    """Chats of any program within a budget of tokens: memory serve URL (see memory --help)."""
    from ostinato.apps.memory.command import app as memory_app

    memory_app(args=ctx.args, prog_name="ostinato memory")


@app.command("catalog", **PASSED_ON)
def catalog_(ctx: typer.Context) -> None:
    """Many policies of one base: catalog add | list | promote | roll-back | delete | key."""
    from ostinato.apps.serve.catalog_command import app as catalog_app

    catalog_app(args=ctx.args, prog_name="ostinato catalog")


@app.command(**PASSED_ON)
def judge(ctx: typer.Context) -> None:
    """A judge of answers: judge train | eval | serve (see judge --help)."""
    from ostinato.apps.product.judge_command import app as judge_app

    judge_app(args=ctx.args, prog_name="ostinato judge")


@app.command(**PASSED_ON)
def product(ctx: typer.Context) -> None:
    """The continual loop of a product: product run | status (see product --help)."""
    from ostinato.apps.product.command import app as product_app

    product_app(args=ctx.args, prog_name="ostinato product")


@app.command()
def place(
    run: RunPath,
    ranks: Annotated[int, typer.Option(min=1, help="Expert ranks: e of the layout.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; placement.json in the run folder.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="On so many nodes, which are made even first.")] = 1,
    current: Annotated[
        Path | None, typer.Option("--against", help="A placement in use, to compare with.")
    ] = None,
) -> None:
    """Which expert rank keeps which experts, from the routes that a run has recorded."""
    from ostinato.apps.plan.commands import place_experts

    place_experts(run, ranks, out or run / "placement.json", nodes=nodes, current=current)


@app.command()
def export(
    run: RunPath,
    to: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    merged: Annotated[
        bool, typer.Option("--merged", help="A whole Hugging Face model, adapter merged.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Merged, and as GGUF by llama.cpp's converter, for Ollama.")
    ] = False,
    gguf_adapter: Annotated[
        bool, typer.Option("--gguf-adapter", help="The adapter alone as GGUF, by llama.cpp's converter.")
    ] = False,
    llama_cpp: Annotated[
        Path | None, typer.Option("--llama-cpp", help="llama.cpp's folder, if it is not on the PATH.")
    ] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Merged weights in float32: 16 bits round an update.")
    ] = False,
) -> None:
    """Write a run's last policy as a PEFT adapter, merged as a Hugging Face model, or as GGUF."""
    from ostinato.cli.export import export as command

    command(
        run, to, merged=merged, gguf=gguf, gguf_adapter=gguf_adapter, llama_cpp=llama_cpp, float32=float32
    )


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN..", help="Run folders, side by side.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write it there, not into the run folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    mismatch: Annotated[
        bool, typer.Option("--mismatch", help="Print sampler against trainer; write nothing.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with --mismatch of that; write nothing.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="Serve it; it grows with the run.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the first free one from 7321 on.")] = 0,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    allowed_hosts: Hosts = None,
) -> None:
    """What runs have come to: ten numbers here, all of it in report.html, which opens offline; or --live."""
    from ostinato.cli import report as commands

    if (json or mismatch) and (out or show or live):
        raise ValueError("--json and --mismatch print and write no file; drop --out, --open and --live")
    if (mismatch or live) and len(runs) > 1:
        raise ValueError(f"--mismatch and --live are for one run; {len(runs)} are named")
    if live and out:
        raise ValueError("--live serves the page and writes no file; drop --out or --live")
    if mismatch:
        commands.print_mismatch(runs[0], as_json=json)
    elif live:
        commands.serve(runs[0], host, port, make_access(allowed_hosts, None), show=show)
    else:
        commands.report(runs, out, show=show, as_json=json)


@app.command()
def show(
    run: RunPath,
    step: Annotated[int, typer.Option(min=-1, help="-1: the last one that was recorded.")] = -1,
    prompts: Annotated[int, typer.Option(min=1, help="Of the step.")] = 4,
    answers: Annotated[int, typer.Option(min=1, help="To each prompt.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, without tokens.")] = False,
) -> None:
    """Print episodes of a run: prompt, turns, rewards by function, why each ended."""
    from ostinato.cli.show import show as command

    command(run, step, prompts=prompts, answers=answers, as_json=json)


@app.command(**PASSED_ON)
def bench(ctx: typer.Context) -> None:
    """Measure this machine: bench rollouts | bench train (see bench --help)."""
    try:
        from lab import app as benches
    except ModuleNotFoundError as error:
        if error.name != "lab":
            raise
        raise ValueError("benches are not in the installed package; run ostinato bench in a clone") from None
    raise typer.Exit(benches.run(ctx.args))


@app.command(**PASSED_ON)
def scale(ctx: typer.Context) -> None:
    """Where a run will end and whether to go on: scale fit | forecast | decide ... (see scale --help)."""
    from ostinato.apps.scaling.commands import app as scale_app

    scale_app(args=ctx.args, prog_name="ostinato scale")


@app.command(**PASSED_ON)
def plan(ctx: typer.Context) -> None:
    """Which layouts of a model fit a cluster, how fast they are, what they cost (see plan --help)."""
    from ostinato.apps.plan.commands import command

    command(ctx.args)


@app.command("ablate", hidden=True)
@app.command()
def compare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ARMS.toml|RECIPE|DIR|FILE",
            help="Models and methods (with --budget); a recipe with arms (ablate.arms); or its runs, to fit "
            "only: a folder, a --collect file.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    budget: Annotated[
        str, typer.Option(help='Of each run of ARMS.toml: "2e14 flops", interactions or seconds.')
    ] = "",
    against: Annotated[
        str, typer.Option(metavar="ARM", help="Of ARMS.toml: others less it; by default the first.")
    ] = "",
    leave_one_out: Annotated[
        bool,
        typer.Option("--leave-one-out", help="Run the recipe, and each arm with its one choice changed."),
    ] = False,
    arms: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of a recipe: only this arm; may be repeated.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each arm; by default 3, of a recipe 2.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at once; they share the threads.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; by default runs/<arms>-compare.")
    ] = None,
    axis: Annotated[str, typer.Option(help="What compute is counted in, e.g. tokens.")] = "flops",
    cut: Annotated[str, typer.Option(metavar="C", help="Leave out evaluations before this compute.")] = "",
    split: Annotated[str, typer.Option(help="Of eval.jsonl.")] = "eval",
    metric: Annotated[str, typer.Option(help="Of eval.jsonl.")] = "pass@1",
    low: Annotated[float, typer.Option(help="The lowest score; -1 for rewards from -1 to 1.")] = 0.0,
    high: Annotated[float, typer.Option(help="The highest score.")] = 1.0,
    collect: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the runs, a line each.")] = None,
    page: Annotated[Path | None, typer.Option(help="Of ARMS.toml: by default compare.html in --out.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="One JSON object into this file, - for standard output.")
    ] = None,
) -> None:
    """Arms x seeds: models and methods under one budget, or which choice of a recipe moves its ceiling."""
    from ostinato.apps.scaling.arms.commands import Output, Study, run_command
    from ostinato.apps.scaling.arms.kept import Measure

    study = Study(
        arms=arms or (), seeds=seeds, workers=workers, out=out, leave_one_out=leave_one_out, budget=budget
    )
    measure = Measure(split=split, metric=metric, low=low, high=high)
    output = Output(
        axis=axis, cut=cut, measure=measure, kept=collect, json_file=json_file, against=against, page=page
    )
    raise typer.Exit(run_command(source, overrides or [], study, output))


@app.command(hidden=True)
def rank() -> None:
    """A further rank of the run that has started this process; ends with it."""
    from ostinato.launch.ranks import find_follower, follow_run

    if (place := find_follower()) is None:
        raise ValueError("this process was not started as a rank of a run; use ostinato train")
    raise typer.Exit(follow_run(place, child=True))


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Threads are chosen by its products.")] = "asset:seed-moe",
    measure: Annotated[bool, typer.Option("--measure", help="Time thread settings again.")] = False,
) -> None:
    """What this machine has, what is missing, and a short self-test."""
    from ostinato.cli.doctor import doctor as command

    raise typer.Exit(command(model, measure=measure))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Errors that have a name are one sentence on stderr, under the notes of
    the exception (the traceback of a user's own function).

    A ValueError is the user's (exit code 2), RunFailed a run's and OSError the machine's (1); the rest is
    ours and keeps its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text that the terminal cannot show must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    kept = [argument for argument in given if argument != "--debug"]
    try:
        for option in kept[1:] if kept[:1] and kept[0] in ("train", "sft", "resume") else ():
            name = option.removeprefix("--").partition("=")[0].replace("-", "_")
            if option.startswith("--") and ("." in name or key_hint(name)):
                hint = f" ({key_hint(name)})" if key_hint(name) else ""
                raise ValueError(
                    f"{option} is no option; write keys as trainer.lr=2e-4, without dashes{hint}"
                )
        isa.apply()  # before anything imports torch
        app(kept, prog_name="ostinato")
    except BrokenPipeError:  # the reader of the output is gone, and there is nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (ValueError, RunFailed, OSError) as error:
        if len(kept) < len(given):
            raise
        from ostinato.terminal import say

        say(*getattr(error, "__notes__", ()), f"ostinato: {' '.join(str(error).splitlines())}", error=True)
        lost = isinstance(error.__cause__, Lost)
        sys.exit(2 if isinstance(error, ValueError) else LOST if lost else 1)


def additions(feedback: str, budget: int, file: Path, refill: str) -> OpenAdditions:
    """``feedback``: the store, "" for none; ``budget``: tokens of a session's messages, 0 for no memory,
    which ``file`` keeps and ``refill`` shortens (docs/memory.md)."""

    @contextmanager
    def opened(served: RunningService, address: str, key: str) -> Iterator[Additions]:
        from ostinato.apps.memory.conversations import Keeping, open_memory
        from ostinato.apps.memory.refill import ChatModel
        from ostinato.apps.product.feedback import open_feedback
        from ostinato.apps.serve.served import Additions

        keeping = Keeping(budget=budget, file=file, refill=refill) if budget else None
        itself = ChatModel(f"{address}/v1", key=key)
        with (
            open_feedback(feedback, served.service) as store,
            open_memory(keeping, served.service.renderer, itself) as memory,
        ):
            yield Additions(feedback=store, memory=memory)

    return opened
