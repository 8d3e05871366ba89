"""``engine.backend = "vllm"``: what a recipe may ask of it, and the engine that it asks for."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ostinato.cli.failure import RunFailed
from ostinato.config import Recipe
from ostinato.engine.vllm import COLDEST, VllmEngine
from ostinato.engine.vllm_server import KEY, Serve, Server, VllmAt, VllmChild, VllmFailed
from ostinato.model.decoder import Decoder
from ostinato.render import Renderer

MASKS, ROUTES = "--return-sampling-mask", "--enable-return-routed-experts"
PROBE_TOKENS = 48  # of the prompt that policies are proven on


def check_vllm(recipe: Recipe) -> None:
    """Raises ValueError for what cannot be had with vLLM, with one sentence."""
    engine, rollout = recipe.engine, recipe.rollout
    if recipe.adapter.kind == "full":
        raise ValueError(
            'engine.backend is "vllm" with adapter.kind "full"; vLLM is sent adapters: use "lora"'
        )
    if engine.weights != "model":
        raise ValueError(
            f'engine.weights is "{engine.weights}" with engine.backend "vllm", which has weights of its own; '
            "leave it at model, and say what vLLM is to quantise in engine.server_args"
        )
    filters = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    if (used := [name for name, on in filters.items() if on]) and MASKS not in engine.server_args:
        raise ValueError(
            f"rollout.{used[0]} cuts what is sampled from, and training has to know what was kept; add "
            f'"{MASKS}" to engine.server_args (a GPU build of vLLM), or switch it off'
        )
    for name, temperature in (("rollout", rollout.temperature), ("eval", recipe.eval.temperature)):
        if 0 < temperature < COLDEST:
            raise ValueError(
                f"{name}.temperature is {temperature}; vLLM takes 0 (greedy) or {COLDEST} and more"
            )


def check_model(recipe: Recipe, decoder: Decoder) -> None:
    """The same, of what the model has to be known for."""
    if decoder.num_moe_layers == 0:
        return
    if recipe.trainer.replay is not False and ROUTES not in recipe.engine.server_args:
        raise ValueError(
            f"trainer.replay is {recipe.trainer.replay!r}, but vLLM tells no experts unless it is asked to; "
            f'add "{ROUTES}" to engine.server_args (a GPU build of vLLM), or set it to false'
        )
    others = [target for target in recipe.adapter.targets if not target.startswith("attn")]
    if others:
        raise ValueError(
            f'adapter.targets has "{others[0]}", and vLLM reads adapters of a mixture of experts in a format '
            'that is not written; use adapter.targets=["attn"]'
        )


def notes(recipe: Recipe) -> Iterator[str]:
    """What is not as with the engine in this process, one sentence each."""
    yield "vLLM's noise is its own: the same run samples other tokens the next time"
    if recipe.draft.enabled:
        yield "draft.enabled changes nothing: vLLM drafts as engine.server_args say (docs/vllm_drafter.md)"
    if recipe.model.fp32_head and recipe.model.dtype != "float32":
        yield "model.fp32_head is of the trainer alone: vLLM computes logits in model.dtype"


@contextlib.contextmanager
def vllm_engine(
    recipe: Recipe,
    decoder: Decoder,
    renderer: Renderer,
    *,
    model: Path,
    prompt: np.ndarray,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[VllmEngine]:
    """The engine on a server that is started in, or found, and left with the context. ``model`` is the base's
    folder, ``prompt`` ([P] token ids) any of the run's, ``folder`` where adapters and the log go.

    Raises ValueError for a server that cannot do it, and RunFailed for one that is not there.
    """
    check_model(recipe, decoder)
    cluster, server = recipe.cluster, _server(recipe, decoder, model, folder)
    where = recipe.engine.address or f"started here, its log {folder / 'server.log'}"
    say(f"vLLM         {where}; waited for {cluster.start_s:g} s at most")
    try:
        engine = VllmEngine(
            server,
            decoder,
            folder=folder,
            decode=renderer.decode,
            probe=prompt[:PROBE_TOKENS],
            silence_s=cluster.silence_s,
            max_restarts=cluster.max_restarts,
            max_quarantined=cluster.max_quarantined,
            say=say,
        )
    except VllmFailed as error:
        raise RunFailed(f"{error}; no run was begun") from error
    try:
        yield engine
    finally:
        engine.close()


def _server(recipe: Recipe, decoder: Decoder, model: Path, folder: Path) -> Server:
    settings, start_s, key = recipe.engine, recipe.cluster.start_s, os.environ.get(KEY, "")
    if settings.address:
        return VllmAt(settings.address, start_s=start_s, key=key)
    serve = Serve(
        python=_python(settings.python),
        model=model,
        dtype=recipe.model.dtype,
        context=decoder.config.max_positions,
        max_batch=settings.max_batch,
        kv_memory_mb=settings.kv_memory_mb,
        rank=recipe.adapter.rank,
        args=settings.server_args,
    )
    return VllmChild(serve, folder / "server.log", start_s=start_s, key=key)


def _python(given: str) -> str:
    """The interpreter that has vLLM. Raises ValueError where there is none."""
    python = shutil.which(str(Path(given).expanduser())) if given else sys.executable
    if python is None:
        raise ValueError(f"engine.python is {given!r}, which is no program; name the python that has vLLM")
    asked = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", asked], capture_output=True, timeout=60, check=False).returncode:
        what = f"engine.python {given!r}" if given else "this Python"
        raise ValueError(
            f'engine.backend is "vllm", which {what} does not have; name the one in engine.python'
        )
    return python


__all__ = ["check_model", "check_vllm", "notes", "vllm_engine"]
