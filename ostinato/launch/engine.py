"""The engine of a recipe: in this process, or on a vLLM server that is started or joined."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ostinato.config import EngineSection, Recipe
from ostinato.engine.local import LocalEngine
from ostinato.engine.vllm import MOST_OPEN, SLOTS, VllmEngine
from ostinato.engine.vllm_adapters import list_expert_kinds
from ostinato.engine.vllm_server import KEY, Serve, Server, VllmAt, VllmChild
from ostinato.hf.model import TransformersModel
from ostinato.hf.sampler import TransformersEngine
from ostinato.launch import RunFailed
from ostinato.launch.checks import check_exact, check_model
from ostinato.launch.device_memory import (
    Need,
    choose_kv_memory_mb,
    choose_vllm_kv_memory_mb,
    lends_memory,
    measure_free_share,
)
from ostinato.launch.drafts import Memory
from ostinato.launch.models import make_adapter_spec
from ostinato.model.base import Base
from ostinato.model.config import Activation
from ostinato.model.decoder import Decoder
from ostinato.model.native import Kernels, load_kernels
from ostinato.model.native.build import BuildError
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.quantise import Weights, count_own_bytes, quantise
from ostinato.model.shapes import ExpertScheme
from ostinato.render import Renderer
from ostinato.workers.remote import WorkerLost

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

logger = logging.getLogger(__name__)
AnyEngine = LocalEngine | TransformersEngine
PROBE_TOKENS = 48  # longest prompt on which published policies are checked


@contextlib.contextmanager
def open_vllm_engine(
    recipe: Recipe,
    decoder: Decoder,
    renderer: Renderer,
    *,
    model: Path,
    prompt: np.ndarray,
    folder: Path,
    need: Need | None = None,
) -> Iterator[VllmEngine]:
    """Start a vLLM server, or join the one at engine.address, wait for it, and yield the engine on it; a
    server that was started ends with the context. ``model``: folder of the base; ``prompt``: token ids [P] of
    any prompt of the run; ``folder``: for adapters and the log; ``need``: of the KV cache, None if unknown.

    Raises ValueError for a model, a recipe, a Python or a server that does not suit, and RunFailed if the
    server is lost or does not answer in time.
    """
    check_model(recipe.adapter, decoder)
    cluster, outputs = recipe.cluster, _select_outputs(recipe, decoder)
    server = _new_server(recipe, decoder, model, folder, need)
    location = recipe.engine.address or f"started here, its log {folder / 'server.log'}"
    logger.info(f"vLLM         {location}; waited for {cluster.start_s:g} s at most")
    try:
        engine = VllmEngine(
            server,
            decoder,
            folder=folder,
            decode=renderer.decode,
            probe=prompt[:PROBE_TOKENS],
            spec=make_adapter_spec(recipe.adapter),
            routes=outputs["routes"],
            supports=outputs["supports"],
            silence_s=cluster.silence_s,
            slots=min(SLOTS if recipe.engine.address else MOST_OPEN, recipe.engine.max_batch),
        )
    except WorkerLost as error:
        raise RunFailed(f"{error}; no run was begun") from error
    try:
        yield engine
    finally:
        engine.close()


def _new_server(recipe: Recipe, decoder: Decoder, model: Path, folder: Path, need: Need | None) -> Server:
    """Make the object of the server at engine.address, or of a child to start. Raises ValueError, for a
    child, if its Python has no vLLM or if the recipe needs outputs that vLLM has only on a GPU."""
    settings, start_s, key = recipe.engine, recipe.cluster.start_s, os.environ.get(KEY, "")
    if settings.address:
        return VllmAt(settings.address, start_s=start_s, key=key)
    spec, config = make_adapter_spec(recipe.adapter), decoder.config
    experts, outputs = list_expert_kinds(config, spec), _select_outputs(recipe, decoder)
    if decoder.device.type == "cpu" and any(outputs.values()):
        key = "trainer.replay" if outputs["routes"] else "rollout.top_k, top_p or min_p"
        raise ValueError(f"{key} needs what vLLM returns on a GPU alone; switch it off")
    serve = Serve(
        python=_find_python(settings.python),
        model=model,
        dtype=recipe.model.dtype,
        context=decoder.config.max_positions,
        max_batch=settings.max_batch,
        kv_memory_mb=choose_vllm_kv_memory_mb(recipe, decoder, need),
        memory_share=measure_free_share(decoder),
        lends=lends_memory(recipe, decoder),
        rank=max(spec.rank, spec.expert_rank or 0) if experts else spec.rank,
        shared_experts=bool(experts) and spec.expert_scheme == ExpertScheme.SHARED_OUTER,
        **outputs,
        args=settings.server_args,
    )
    return VllmChild(serve, folder / "server.log", start_s=start_s, key=key)


def _select_outputs(recipe: Recipe, decoder: Decoder) -> dict[str, bool]:
    """Choose whether the server returns expert routes, for replay, and the supports of filtered
    distributions; by the names of ``Serve``'s fields."""
    rollout = recipe.rollout
    return {
        "routes": decoder.num_moe_layers > 0 and recipe.trainer.replay is not False,
        "supports": rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0,
    }


def _find_python(path: str) -> str:
    """Find the interpreter ``path``, or this one if that is empty, and run it to look for vLLM. Raises
    ValueError if it is no program or has no vLLM."""
    python = shutil.which(str(Path(path).expanduser())) if path else sys.executable
    if python is None:
        raise ValueError(f"engine.python is {path!r}, which is no program; name the python that has vLLM")
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", probe], capture_output=True, timeout=60, check=False).returncode:
        name = f"engine.python {path!r}" if path else "this Python"
        raise ValueError(
            f'engine.backend is "vllm", which {name} does not have; name the one in engine.python'
        )
    return python


def new_engine(
    recipe: Recipe,
    decoder: Decoder,
    renderer: Renderer,
    memory: Memory | None = None,
    *,
    need: Need | None = None,
    name: str = "sampler-0",
) -> LocalEngine:
    """Make the in-process engine of the base, on the decoder's own tensors or a copy (``engine.weights``),
    with drafts from ``memory``. ``need``: of the KV cache, None if unknown. ``name``: of the worker in the
    timeline. Raises ValueError for a model of transformers, and if model.exact is not possible here."""
    if not isinstance(decoder, Decoder):
        raise ValueError('model.backend is "transformers", and this needs our own decoder: "native"')
    sampler = make_sampler_decoder(recipe.engine, decoder, choose_kernels(recipe.engine, decoder))
    return LocalEngine(
        sampler,
        kernels=choose_sampler_kernels(recipe, sampler),
        decode=renderer.decode,
        kv_memory_mb=choose_kv_memory_mb(recipe, sampler, need),
        max_batch=recipe.engine.max_batch,
        context_limit=decoder.config.max_positions,
        drafter=memory.drafter if memory else None,
        expect=memory.expect if memory else None,
        name=name,
    )


def new_any_engine(
    recipe: Recipe,
    decoder: Base,
    renderer: Renderer,
    memory: Memory | None = None,
    *,
    need: Need | None = None,
) -> AnyEngine:
    """Make the engine as ``new_engine``, or for a model of transformers its own engine, without drafts and
    ``need``."""
    if isinstance(decoder, TransformersModel):
        return TransformersEngine(
            decoder,
            decode=renderer.decode,
            max_batch=recipe.engine.max_batch,
            context_limit=decoder.config.max_positions,
            kernels=choose_kernels(recipe.engine, decoder),
        )
    assert isinstance(decoder, Decoder)
    return new_engine(recipe, decoder, renderer, memory, need=need)


def make_sampler_decoder(section: EngineSection, decoder: Decoder, kernels: Kernels | None) -> Decoder:
    """Return the decoder that the engine samples from: ``decoder`` itself, or a copy with ``engine.weights``,
    whose size is logged."""
    weights = Weights(section.weights)
    sampler = quantise(decoder, weights)
    if sampler is not decoder:
        copy_mb, model_mb = (
            size / 1e6 for size in (count_own_bytes(sampler, decoder), count_own_bytes(decoder))
        )
        is_fast = kernels is not None and (kernels.fast_codes or weights is Weights.INT8)
        note = "" if is_fast else "; on this machine they save memory and cost time"
        logger.info(
            f"engine weights {weights}: {copy_mb:,.0f} MB beside the model's {model_mb:,.0f} MB{note}"
        )
    return sampler


def choose_kernels(section: EngineSection, decoder: Decoder | TransformersModel) -> Kernels | None:
    """Return the native kernels, built if they are not yet. Returns None if engine.native is false, for a
    decoder that is not on a CPU, and, with a warning, if they cannot be built."""
    if not section.native or decoder.device.type != "cpu":
        return None
    try:
        return load_kernels()
    except BuildError as error:
        _warn_once(f"native kernels are not used: {error}")
        return None


def choose_sampler_kernels(recipe: Recipe, decoder: Decoder) -> Kernels | CudaKernels | None:
    """Return the kernels of the engine: those of ``choose_kernels``, or on a GPU those in Triton, compared
    with torch here. None if they cannot run or, with a warning, if their numbers are not torch's; a fault of
    CUDA graphs or of mixed policies switches off only these. Raises ValueError for model.exact without
    kernels."""
    if decoder.device.type != "cuda":
        return choose_kernels(recipe.engine, decoder)
    if not _can_run_triton(recipe.engine, decoder):
        return None
    from ostinato.engine.proof import prove_kernels
    from ostinato.model.cuda import CUDA_OPS, EXACT_OPS, CudaKernels
    from ostinato.model.cuda.graphs import make_graph_factory

    exact = recipe.model.exact
    proven, reason = prove_kernels(
        decoder, CudaKernels(EXACT_OPS if exact else CUDA_OPS, make_graph_factory(), exact)
    )
    if proven is None and exact:
        raise ValueError(f"model.exact is true, but {reason}; set it to false")
    if reason:
        _warn_once(reason)
    return proven


def choose_training_ops(recipe: Recipe, decoder: Base) -> Ops:
    """Return the arithmetic of the trainer. Raises ValueError for a ``model.exact`` that is not possible on
    this machine, with this model, or with the recipe's other keys."""
    if isinstance(decoder, TransformersModel):
        return TORCH_OPS
    decoder = cast(Decoder, decoder)  # the only other Base
    native = choose_kernels(recipe.engine, decoder)
    if not recipe.model.exact:
        return native.training if native else choose_card_ops(recipe.engine, decoder) or TORCH_OPS
    check_exact(recipe)
    if decoder.config.window is not None:
        raise ValueError("model.exact is true, but layers of this model have a window; set it to false")
    if decoder.config.activation != Activation.SILU:
        raise ValueError(
            f"model.exact is true, but the activation of this model is {decoder.config.activation}, which "
            "has no kernel; set it to false"
        )
    if decoder.device.type == "cuda":
        return choose_exact_card_ops(recipe.engine, decoder)
    if native is None:
        raise ValueError("model.exact is true, but its kernels cannot be built; set it to false")
    return native.exact


def choose_exact_card_ops(section: EngineSection, decoder: Decoder) -> Ops:
    """Return the arithmetic of ``model.exact`` on a GPU. Raises ValueError if the router has groups, Triton
    does not run, or a kernel has a fault."""
    moe = decoder.config.moe
    if moe is not None and moe.num_groups > 1:
        raise ValueError("model.exact is true with a router of groups, which no kernel has; set it to false")
    if not _can_run_triton(section, decoder):
        raise ValueError(f"model.exact is true, but Triton does not run on {decoder.device}; set it to false")
    from ostinato.model.cuda import make_exact_training_ops
    from ostinato.model.cuda.proof import prove_ops

    ops, faults = prove_ops(decoder, make_exact_training_ops())
    if faults:
        raise ValueError(f"model.exact is true, but {faults[0].partition(';')[0]}; set it to false")
    return ops


def choose_card_ops(section: EngineSection, decoder: Decoder) -> Ops | None:
    """Return the Triton kernels of the decoder's GPU that pass their checks; a fault is logged as a warning.
    None on a CPU, or if Triton does not run (``_can_run_triton``)."""
    if decoder.device.type != "cuda" or not _can_run_triton(section, decoder):
        return None
    from ostinato.model.cuda import CUDA_OPS
    from ostinato.model.cuda.proof import prove_ops

    ops, faults = prove_ops(decoder, CUDA_OPS)
    for fault in faults:
        _warn_once(fault)
    return ops


def _can_run_triton(section: EngineSection, decoder: Decoder) -> bool:
    """Whether Triton kernels run on the decoder's GPU: not with engine.native = false or without Triton, nor,
    with a warning, on a GPU that is not the current one."""
    if not section.native or importlib.util.find_spec("triton") is None:
        return False
    if decoder.device.index in (None, torch.cuda.current_device()):  # where Triton launches
        return True
    advice = 'name the card in CUDA_VISIBLE_DEVICES and set model.device to "cuda"'
    _warn_once(f"kernels in Triton are not used on {decoder.device}: {advice}")
    return False


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning the first time it is given: engine and trainer would each report the same kernels."""
    logger.warning(sentence)


def shares_base(recipe: Recipe) -> bool:
    """Whether all workers of a host map one copy of the base: of a cluster on Linux that trains an
    adapter."""
    cluster = recipe.cluster
    return bool(cluster.samplers) and sys.platform == "linux" and recipe.adapter.kind == "lora"
