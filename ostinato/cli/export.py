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

# programs of llama.cpp
MODEL_CONVERTER = "convert_hf_to_gguf.py"
ADAPTER_CONVERTER = "convert_lora_to_gguf.py"


def export(
    run: Path,
    to: Path,
    *,
    merged: bool,
    gguf: bool = False,
    gguf_adapter: bool = False,
    llama_cpp: Path | None = None,
    float32: bool = False,
) -> None:
    """Write the policy of ``run`` into ``to``, which must be empty or not exist; print how to serve it.

    ``gguf``: merged, and as GGUF; ``gguf_adapter``: the adapter alone as GGUF. ``llama_cpp``: the folder of
    its converters, None: on the PATH. ``float32``: dtype of merged weights, whatever the dtype of the run.
    Raises ValueError for options that exclude each other, and for a missing run or converter, and RunFailed
    if a converter fails.
    """
    merged = merged or gguf
    _check_arguments(run, to, merged, gguf, gguf_adapter, llama_cpp, float32)
    converter = (
        _find_converter(MODEL_CONVERTER if gguf else ADAPTER_CONVERTER, llama_cpp)
        if gguf or gguf_adapter
        else []
    )
    # 8-bit codes cannot hold an update, so it is merged into the weights as published
    coded = merged and Recipe.load(RunFolder.open(run).recipe).model.storage == "int8"
    policy = load_policy(str(run), *(["model.storage=same"] if coded else []))
    if gguf_adapter and policy.adapters is None:
        raise ValueError(
            '--gguf-adapter needs a run with adapter.kind "lora"; this one trains all: use --gguf'
        )
    if gguf_adapter and policy.adapters and any(".experts." in name for name in policy.adapters.tensors):
        raise ValueError("llama.cpp's converter takes no adapter of experts; use --gguf, which merges it")
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
        _convert([*converter, str(to), "--outtype", "f16"], to, "model.gguf", "FROM ./model.gguf\n")
    if gguf_adapter:
        options = ["--base", str(policy.folder), "--outtype", "f32"]
        modelfile = f"FROM {policy.folder.resolve()}\nADAPTER ./adapter.gguf\n"
        _convert([*converter, str(to), *options], to, "adapter.gguf", modelfile)
    say(f"wrote {to}: the policy after {policy.step} steps")
    say(*_list_servers(policy, run.resolve().name, to.resolve(), merged=merged, gguf=gguf or gguf_adapter))


def _check_arguments(
    run: Path,
    to: Path,
    merged: bool,
    gguf: bool,
    gguf_adapter: bool,
    llama_cpp: Path | None,
    float32: bool,
) -> None:
    """Raises ValueError for a missing run, a folder that is not empty, and options that exclude each
    other."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} exists and is not empty; name another folder")
    if not (run / "recipe.toml").is_file():
        raise ValueError(f"run folder {run} holds no recipe.toml; name the folder of a started run")
    if gguf_adapter and merged:
        raise ValueError("--gguf-adapter is for the adapter alone; drop it, or drop --merged and --gguf")
    if llama_cpp is not None and not (gguf or gguf_adapter):
        raise ValueError("--llama-cpp names converters to GGUF; add --gguf or --gguf-adapter, or drop it")
    if float32 and not merged:
        raise ValueError("--float32 is for merged weights; add --merged, or drop it")


def _explain_rounding(error: float, dtype: str) -> str:
    """Sentence on the rounding error of merged weights: at small learning rates most of an update can be
    below half a unit in the last place of a 16-bit weight."""
    advice = "" if dtype == "float32" else "; the adapter alone has none, --float32 next to none"
    return f"merged in {dtype}: rounding error {100 * error:.2g} % of the update{advice}"


def _find_converter(name: str, llama_cpp: Path | None) -> list[str]:
    """The command of llama.cpp's converter ``name``, in the folder ``llama_cpp`` or (None) on the PATH.
    Raises ValueError if it is not there."""
    path = shutil.which(name) if llama_cpp is None else str(llama_cpp.expanduser() / name)
    if path is None or not Path(path).is_file():
        place = "on the PATH" if llama_cpp is None else f"in {llama_cpp}"
        raise ValueError(
            f"{name} of llama.cpp, which writes GGUF, is not {place}; clone llama.cpp, and give its "
            "folder by --llama-cpp"
        )
    # the converters of a checkout need torch, which this Python has
    return [path] if llama_cpp is None and os.access(path, os.X_OK) else [sys.executable, path]


def _convert(command: list[str], folder: Path, name: str, modelfile: str) -> None:
    """Run a converter that writes the file ``name`` into ``folder``, and write the Modelfile beside it.
    Raises RunFailed if the converter fails."""
    command = [*command, "--outfile", str(folder / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode or not (folder / name).is_file():
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise RunFailed(
            f"llama.cpp's converter ended with {result.returncode} and without {name}: {last_line}; what it "
            f"was given is in {folder}"
        )
    (folder / "Modelfile").write_text(modelfile, encoding="utf-8")


def _list_servers(policy: Policy, name: str, to: Path, *, merged: bool, gguf: bool) -> Iterator[str]:
    """Yield commands that serve the export with other programs."""
    if merged or policy.adapters is None:
        yield f"vLLM    vllm serve {to} --served-model-name {name}"
    else:
        rank = policy.adapters.spec.rank
        lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {name}={to}"
        yield f"vLLM    vllm serve {policy.folder} {lora}"
    if gguf:
        if not merged:
            yield f"llama   llama-server -m BASE.gguf --lora {to / 'adapter.gguf'}"
        yield f"Ollama  ollama create {name} -f {to / 'Modelfile'}"
