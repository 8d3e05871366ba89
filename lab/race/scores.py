"""Held-out scores of many adapters of one base by one scorer, our engine: a process of its own.

argv: JSON with recipe (a name or file), overrides, run (a run folder whose checkpoints are scored, or
empty), steps, and peft (a folder of folders step-N as TRL leaves them, or empty). Prints {"rows":
[...]} as of eval.jsonl, of the base first.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.launch.machine import configure_threads, resolve_auto
from ostinato.launch.models import load_recipe

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.config import Recipe
    from ostinato.model.config import ModelConfig
    from ostinato.model.decoder import Decoder
    from ostinato.model.lora import Adapters


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"rows": list(rows(json.loads(sys.argv[1])))}) + "\n")


def rows(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    recipe, _ = load_recipe(task["recipe"], *task["overrides"])
    configure_threads(recipe)
    recipe = resolve_auto(recipe)
    from ostinato.launch.engine import new_engine
    from ostinato.launch.inputs import new_stage, prepare_inputs
    from ostinato.launch.loop import new_evaluations
    from ostinato.pipeline.evaluate import evaluate_groups

    with prepare_inputs(recipe, training=False) as inputs:
        engine = new_engine(recipe, inputs.decoder, inputs.renderer)
        stage, evaluation = new_stage(inputs, engine, inputs.grader), new_evaluations(inputs)[0]
        policies = ours(recipe, inputs.decoder, task) if task["run"] else theirs(inputs.decoder, task)
        for version, (step, adapters) in enumerate([(0, None), *policies]):
            engine.publish(adapters, version)
            yield asyncio.run(evaluate_groups(stage, evaluation, step))[0]


def ours(recipe: Recipe, decoder: Decoder, task: Mapping[str, Any]) -> Iterator[tuple[int, Adapters]]:
    from safetensors.torch import load_file

    from ostinato.launch.trainer import new_adapters
    from ostinato.run import RunFolder
    from ostinato.train.checkpoint import TENSORS

    folder = RunFolder.open(Path(task["run"])).checkpoints
    for step in task["steps"]:
        adapters = new_adapters(recipe, decoder)
        assert adapters is not None
        tensors = load_file(folder / f"step-{step:08d}" / TENSORS)
        names = {name: f"parameters.{name}" for name in adapters.state_dict()}
        fill(adapters, {name: tensors[saved] for name, saved in names.items()})
        yield step, adapters


def fill(adapters: Adapters, tensors: Mapping[str, Tensor]) -> None:
    import torch

    with torch.no_grad():
        adapters.load_state_dict(tensors)


def theirs(decoder: Decoder, task: Mapping[str, Any]) -> Iterator[tuple[int, Adapters]]:
    for step in task["steps"]:
        yield step, from_peft(Path(task["peft"]) / f"step-{step}", decoder.config)


def from_peft(folder: Path, shape: ModelConfig) -> Adapters:
    """What PEFT has trained, as an adapter of ours: of the experts its gate_up_proj is a gate and an up with
    one A between them (``ostinato.model.peft_io``). Raises ValueError where tensors do not fit."""
    from safetensors.torch import load_file

    from ostinato.model.hf_names import name_hf_module
    from ostinato.model.lora import init_adapters
    from ostinato.model.peft_io import PEFT_CONFIG, PEFT_TENSORS
    from ostinato.model.shapes import AdapterSpec, ExpertScheme, compute_linear_shapes

    config, tensors = json.loads((folder / PEFT_CONFIG).read_text()), load_file(folder / PEFT_TENSORS)
    found: dict[str, Tensor] = {}
    for name, (*experts, out, _) in compute_linear_shapes(shape).items():
        layer, role = name.split(".")[1], name.rpartition(".")[2]
        module, rank = name_hf_module(name, "qwen3_moe"), config["r"]
        if experts:
            nested = ".base_layer" if role != "down" else ""
            module = f"model.layers.{layer}.mlp.experts{nested}"
        if (a := tensors.get(f"base_model.model.{module}.lora_A.weight")) is None:
            continue
        b = tensors[f"base_model.model.{module}.lora_B.weight"]
        if experts:
            a, b = a.unflatten(0, (*experts, rank)), b.unflatten(1, (rank, *experts)).permute(2, 0, 1)
            b = b[:, out:] if role == "up" else b[:, :out]
        found |= {f"{name}.A": a, f"{name}.B": b}
    targets = tuple({name.split(".", 2)[2][:-2] for name in found})
    spec = AdapterSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=targets,
        expert_scheme=ExpertScheme.PER_EXPERT,
    )
    adapters = init_adapters(shape, spec)
    fill(adapters, found)
    return adapters


if __name__ == "__main__":
    main()
