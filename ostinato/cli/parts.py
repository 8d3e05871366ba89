"""The parts of a run that need a recipe and a decoder alone: the driver makes them, or a worker elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.cli.drafts import Memory
from ostinato.cli.models import adapter_spec, load_decoder
from ostinato.cli.place import read_placement
from ostinato.cli.ranks import check_ranks
from ostinato.cli.vllm import check_vllm
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import model_folder
from ostinato.model.native import Kernels
from ostinato.model.native import load as load_kernels
from ostinato.model.native.build import BuildError
from ostinato.model.ops import TORCH_OPS
from ostinato.model.peft_io import Saved, load_peft, read_peft
from ostinato.model.quantise import Weights, own_bytes, quantise
from ostinato.model.share import Share
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.parts import own_decoders
from ostinato.parallel.pieces import fresh_adapters, own_adapters
from ostinato.parallel.shares import shares_of
from ostinato.render import Renderer
from ostinato.train.layouts import sharded_trainer
from ostinato.train.optimizer import OptimizerSettings, Schedule
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Microbatch

Say = Callable[[str], None]


def check(recipe: Recipe) -> Algorithm:
    """The algorithm that the recipe asks for, checked against the rest of it."""
    chosen = algorithm(recipe.algo.name, **recipe.algo.overrides)
    try:
        check_group_size(recipe.rollout.group_size, chosen.baseline, chosen.scale, chosen.drop_zero_variance)
    except ValueError as error:
        raise ValueError(f"rollout.group_size: {error}") from error
    check_ranks(recipe)
    if recipe.cluster.samplers:
        check_cluster(recipe)
    if recipe.engine.backend == "vllm":
        check_vllm(recipe)
    if recipe.pipeline.overlap and recipe.adapter.kind == "full" and not recipe.cluster.samplers:
        raise ValueError(
            'pipeline.overlap is true with adapter.kind "full" in one process, where the sampler would read '
            "weights that the trainer is changing; set cluster.samplers to 1 or more, or train an adapter"
        )
    return chosen


def check_cluster(recipe: Recipe) -> None:
    """Raises ValueError for what workers elsewhere cannot do, with one sentence."""
    section = recipe.cluster
    if find_spec("ray") is None:
        raise ValueError(
            f"cluster.samplers is {section.samplers}, which needs Ray: pip install 'ostinato[ray]', or set "
            "it to 0 to run in one process"
        )
    if recipe.engine.backend == "vllm":
        raise ValueError(
            f'engine.backend is "vllm" with cluster.samplers {section.samplers}, but vLLM places workers of '
            "its own (engine.server_args); set cluster.samplers to 0"
        )
    if recipe.adapter.kind == "full" and (section.remote_trainer or section.address):
        key = "remote_trainer" if section.remote_trainer else "address"
        raise ValueError(
            f'adapter.kind is "full" with cluster.{key}, but a trainer in this process publishes all '
            "weights, as a file of this host; drop it, or train an adapter"
        )
    if recipe.model.device.startswith("cuda") and not section.gpus_per_sampler:
        raise ValueError(
            f"model.device is {recipe.model.device!r} with cluster.gpus_per_sampler 0, so samplers would see "
            "no GPU; set it to 1, or to a share of one"
        )


def new_adapters(recipe: Recipe, decoder: Decoder) -> Adapters | None:
    """Those at adapter.path, or fresh ones; for adapter.kind = "full" None, and the decoder is trainable."""
    if recipe.adapter.path:
        return load_peft(Path(recipe.adapter.path).expanduser(), decoder)
    if recipe.adapter.kind == "lora":
        return init_adapters(decoder.config, adapter_spec(recipe.adapter), recipe.seed, decoder.device)
    _check_full(recipe)
    decoder.trainable(True)
    return None


def _check_full(recipe: Recipe) -> None:
    if recipe.model.dtype != "float32":
        raise ValueError(
            f'model.dtype is "{recipe.model.dtype}" with adapter.kind "full", which trains fp32 parameters; '
            'use model.dtype="float32" or adapter.kind="lora"'
        )


def new_trainer(
    recipe: Recipe,
    decoder: Decoder,
    adapters: Adapters | None,
    on_refused: Callable[[Microbatch], None] | None = None,
) -> PolicyTrainer:
    """That of a process which has all of the model."""
    return PolicyTrainer(decoder, adapters, check(recipe), **_trainer_settings(recipe, decoder, on_refused))


def new_sharded_trainer(
    recipe: Recipe,
    rank: int,
    decoder: Decoder | None = None,
    refused: Callable[[Microbatch], None] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> PolicyTrainer:
    """The part of rank ``rank``, made on all ranks of ``parallel.layout`` at once, where torch.distributed is
    ready. ``decoder``: the whole one, where it is there already; else this rank loads what it keeps.
    ``ready`` is called then, and waits for the others."""
    section, folder = recipe.parallel, model_folder(recipe.model.path)
    layout, config = Layout.parse(section.layout), read_config(folder)
    placement = read_placement(section.placement, layout)
    kept = shares_of(layout, config, rank, placement)
    if decoder is not None:
        parts = own_decoders(decoder, kept)
    else:
        parts = [load_decoder(recipe.model, folder, share=share) for share in kept]
    saved = read_peft(Path(recipe.adapter.path).expanduser()) if recipe.adapter.path else None
    adapters = _own_adapters(recipe, config, kept, saved)
    if adapters is None:
        for part in parts:
            part.trainable(True)
    ready()  # to make a group waits for all ranks too, but not as long as a cold load may take
    mesh = Mesh(layout, parts[0].device, timeout_s=section.timeout_s)
    trainer = sharded_trainer(
        mesh,
        parts,
        None if adapters is None else adapters.to(mesh.device),
        check(recipe),
        placement=placement,
        mirror=decoder if adapters is None else None,
        **_trainer_settings(recipe, parts[0], refused if rank == 0 else None),
    )
    if saved is not None:
        saved.check_base(trainer.identity()["base"])
    return trainer


def _own_adapters(
    recipe: Recipe, config: ModelConfig, kept: Sequence[Share], saved: Saved | None
) -> Adapters | None:
    """Of ``new_adapters`` what a rank keeps."""
    if saved is not None:
        return own_adapters(config, kept, saved.spec, saved.tensors)
    if recipe.adapter.kind == "lora":
        return fresh_adapters(config, kept, adapter_spec(recipe.adapter), recipe.seed)
    _check_full(recipe)
    return None


def _trainer_settings(
    recipe: Recipe, decoder: Decoder, on_refused: Callable[[Microbatch], None] | None
) -> dict[str, Any]:
    settings = recipe.trainer
    beta1, beta2 = settings.betas
    found = kernels(recipe, decoder, lambda line: None)
    return {
        "optimizer": OptimizerSettings(
            lr=settings.lr,
            betas=(beta1, beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            schedule=Schedule(settings.schedule),
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
        ),
        "temperature": recipe.rollout.temperature,
        "replay": settings.replay,
        "replay_threshold": settings.replay_threshold,
        "measure_every": recipe.log.mismatch_every,
        "recompute": settings.recompute,
        "max_refused": settings.max_refused_in_a_row,
        "on_refused": on_refused,
        "ops": found.training if found else TORCH_OPS,
    }


def new_engine(
    recipe: Recipe,
    decoder: Decoder,
    renderer: Renderer,
    say: Say,
    memory: Memory | None = None,
    *,
    name: str = "sampler-0",
) -> LocalEngine:
    """The in-process engine, serving the base, on the decoder's own tensors or a copy (``engine.weights``);
    with drafts from ``memory``. ``name`` is the worker's in the timeline."""
    found = kernels(recipe, decoder, say)
    return LocalEngine(
        sampler_decoder(recipe, decoder, found, say),
        kernels=found,
        decode=renderer.decode,
        kv_memory_mb=recipe.engine.kv_memory_mb,
        max_batch=recipe.engine.max_batch,
        context_limit=decoder.config.max_positions,
        drafter=memory.drafter if memory else None,
        leaves=recipe.draft.leaves,
        expect=memory.expect if memory else None,
        name=name,
    )


def sampler_decoder(recipe: Recipe, decoder: Decoder, kernels: Kernels | None, say: Say) -> Decoder:
    """What the engine samples from (``engine.weights``); ``say`` hears what a copy costs."""
    weights = Weights(recipe.engine.weights)
    sampler = quantise(decoder, weights)
    if sampler is not decoder:
        own, model = (size / 1e6 for size in (own_bytes(sampler, decoder), own_bytes(decoder)))
        slow = "" if kernels and kernels.fast_codes else "; on this machine they save memory and cost time"
        say(f"engine weights {weights}: {own:,.0f} MB beside the model's {model:,.0f} MB{slow}")
    return sampler


def kernels(recipe: Recipe, decoder: Decoder, say: Say) -> Kernels | None:
    """The native kernels where they are wanted and can be had; torch does the work otherwise, and says so."""
    if not recipe.engine.native or decoder.device.type != "cpu":
        return None
    try:
        return load_kernels()
    except BuildError as error:
        say(f"native kernels are not used: {error}")
        return None


def shares(recipe: Recipe) -> bool:
    """Do all workers of a host map one copy of the base?"""
    cluster = recipe.cluster
    return bool(cluster.samplers) and cluster.share_weights and recipe.adapter.kind == "lora"


def save_refused(folder: Path) -> Callable[[Microbatch], None]:
    """Keep the microbatches of refused steps in ``folder``, numbered, as compressed numpy arrays."""

    def keep(microbatch: Microbatch) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
        arrays: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, np.ndarray)
        }
        if microbatch.support is not None:
            arrays |= {"support_counts": microbatch.support.counts, "support_ids": microbatch.support.ids}
        number = len(list(folder.glob("*.npz")))
        np.savez_compressed(folder / f"{number:04d}.npz", uids=microbatch.uids, **arrays)

    return keep
