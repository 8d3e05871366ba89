"""``ostinato export``: the last policy of a run as a PEFT adapter, a merged Hugging Face model, or GGUF."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import Recipe
from ostinato.launch import RunFailed
from ostinato.launch.policy import load_policy, write_policy
from ostinato.run import RunFolder
from ostinato.terminal import say

if TYPE_CHECKING:
    from ostinato.launch.policy import Policy

CONVERTER = "convert_hf_to_gguf.py"  # a program of llama.cpp


def export(run: Path, to: Path, *, merged: bool, gguf: bool = False, float32: bool = False) -> None:
    """Write the policy of ``run`` into ``to``, which must be empty or not exist; print how to serve it.

    ``float32``: dtype of merged weights, whatever the dtype of the run. Raises ValueError for options that
    exclude each other, and for a missing run or converter.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} exists and is not empty; name another folder")
    if not (run / "recipe.toml").is_file():
        raise ValueError(f"run folder {run} holds no recipe.toml; name the folder of a started run")
    converter = _find_converter() if gguf else []
    merged = merged or gguf
    if float32 and not merged:
        raise ValueError("--float32 is for merged weights; add --merged, or drop it")
    # 8-bit codes cannot hold an update, so it is merged into the weights as published
    coded = merged and Recipe.load(RunFolder.open(run).recipe).model.storage == "int8"
    policy = load_policy(str(run), *(["model.storage=same"] if coded else []))
    if merged and policy.adapters is not None:
        from ostinato.model.decoder import Decoder
        from ostinato.model.peft_io import export_merged

        if not isinstance(policy.decoder, Decoder):
            raise ValueError(
                'model.backend is "transformers", of which the adapter alone is exported; merge it by peft '
                "(merge_and_unload)"
            )
        decoder = policy.decoder.float() if float32 else policy.decoder  # widening is exact
        error = export_merged(decoder, policy.adapters, to, tokenizer_from=policy.folder)
        print(_explain_rounding(error, str(decoder.storage).removeprefix("torch.")))
    else:
        write_policy(policy.decoder, policy.adapters, policy.folder, to, policy.recipe.model.path)
    if gguf:
        _convert(converter, to)
    say(f"wrote {to}: the policy after {policy.step} steps")
    say(*_list_servers(policy, run.resolve().name, to.resolve(), merged=merged, gguf=gguf))


def _explain_rounding(error: float, dtype: str) -> str:
    """Sentence on the rounding error of merged weights: at small learning rates most of an update can be
    below half a unit in the last place of a 16-bit weight."""
    advice = "" if dtype == "float32" else "; the adapter alone has none, --float32 next to none"
    return f"merged in {dtype}: rounding error {100 * error:.2g} % of the update{advice}"


def _find_converter() -> list[str]:
    """The command of llama.cpp's converter. Raises ValueError if it is not installed."""
    path = shutil.which(CONVERTER)
    if path is None:
        raise ValueError(f"--gguf needs llama.cpp's {CONVERTER} on the PATH; install it, or use --merged")
    return [path] if os.access(path, os.X_OK) else [sys.executable, path]


def _convert(converter: list[str], folder: Path) -> None:
    """Write model.gguf and a Modelfile beside the merged model. Raises RunFailed if the converter fails."""
    command = [*converter, str(folder), "--outfile", str(folder / "model.gguf"), "--outtype", "f16"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise RunFailed(
            f"{CONVERTER} ended with {result.returncode}: {last_line}; the merged model is in {folder}"
        )
    (folder / "Modelfile").write_text("FROM ./model.gguf\n", encoding="utf-8")


def _list_servers(policy: Policy, name: str, to: Path, *, merged: bool, gguf: bool) -> Iterator[str]:
    """Yield commands that serve the export with other programs."""
    if merged or policy.adapters is None:
        yield f"vLLM    vllm serve {to} --served-model-name {name}"
    else:
        rank = policy.adapters.spec.rank
        lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {name}={to}"
        yield f"vLLM    vllm serve {policy.folder} {lora}"
    if gguf:
        yield f"Ollama  ollama create {name} -f {to / 'Modelfile'}"
