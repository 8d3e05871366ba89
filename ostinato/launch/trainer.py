"""The trainer and the teacher of a recipe, in a process with the whole model or as one rank of several."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.algo.algorithms import Algorithm
from ostinato.config import ModelSection, Recipe
from ostinato.config.sections import TeacherSection
from ostinato.hf.factors import ModuleAdapters, init_sites, read_folder
from ostinato.hf.fsdp import PieceAdapters, PieceLeaves, load_sharded
from ostinato.hf.model import TransformersModel
from ostinato.hf.ranks_sampler import RankSampler
from ostinato.launch.checks import check_recipe
from ostinato.launch.engine import choose_kernels, choose_training_ops
from ostinato.launch.machine import choose_device
from ostinato.launch.models import load_decoder, make_adapter_spec
from ostinato.model.base import Base
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import SavedAdapter, load_peft, read_peft
from ostinato.model.share import Share
from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.layout import Layout
from ostinato.parallel.pieces import fresh_adapters, own_adapters, own_decoders
from ostinato.parallel.placement import read_placement
from ostinato.parallel.shares import shares_of
from ostinato.render import Renderer
from ostinato.train.fully_sharded import fully_sharded_trainer
from ostinato.train.layouts import sharded_trainer
from ostinato.train.teacher import Teacher, local_teacher
from ostinato.train.teacher_at import TeacherAt
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Microbatch


def new_adapters(recipe: Recipe, decoder: Base) -> Adapters | None:
    """Load adapters from adapter.path, or make new ones. For adapter.kind "full" make the decoder trainable
    and return None. Raises ValueError for adapters of another base, and for "full" with another dtype than
    float32."""
    if isinstance(decoder, TransformersModel):
        if recipe.adapter.path:
            return read_folder(Path(recipe.adapter.path).expanduser(), decoder.sites, decoder.device)
        return init_sites(decoder.sites, make_adapter_spec(recipe.adapter), recipe.seed, decoder.device)
    assert isinstance(decoder, Decoder)
    if recipe.adapter.path:
        return load_peft(Path(recipe.adapter.path).expanduser(), decoder)
    if recipe.adapter.kind == "lora":
        return init_adapters(decoder.config, make_adapter_spec(recipe.adapter), recipe.seed, decoder.device)
    _check_full_dtype(recipe.model)
    decoder.set_trainable(True)
    return None


def _check_full_dtype(section: ModelSection) -> None:
    """Raises ValueError for a dtype other than float32, which full training needs."""
    if section.dtype != "float32":
        raise ValueError(
            f'model.dtype is "{section.dtype}" with adapter.kind "full", which trains fp32 parameters; '
            'use model.dtype="float32" or adapter.kind="lora"'
        )


def new_trainer(
    recipe: Recipe,
    decoder: Base,
    adapters: Adapters | None,
    on_refused: Callable[[Microbatch], None] | None = None,
    teacher: Teacher | None = None,
    between: Callable[[], None] = lambda: None,
) -> PolicyTrainer:
    """Make the trainer of a process with the whole model. Without the ``teacher`` of its recipe it can be
    restored and published, but cannot train. ``on_refused`` gets each microbatch of a refused step;
    ``between``: as in ``PolicyTrainer``."""
    settings = _select_settings(recipe, decoder, on_refused)
    return PolicyTrainer(
        decoder, adapters, check_recipe(recipe), teacher=teacher, between=between, **settings
    )


def new_sharded_trainer(
    recipe: Recipe,
    rank: int,
    decoder: Decoder | None = None,
    on_refused: Callable[[Microbatch], None] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> PolicyTrainer:
    """Make the trainer of rank ``rank``. All ranks of ``parallel.layout`` call it at once, after
    torch.distributed is initialised. ``decoder``: the whole model if it is already loaded; if None, this rank
    loads its own shares. ``on_refused`` is used on rank 0 alone. ``ready`` is called after loading, and waits
    for the other ranks. Raises ValueError for an adapter.path of another base or size."""
    section, folder = recipe.parallel, find_model_folder(recipe.model.path)
    layout, config = Layout.parse(section.layout), read_config(folder)
    placement = read_placement(Path(section.placement), layout.expert) if section.placement else None
    own_shares = shares_of(layout, config, rank, placement)
    if decoder is not None:
        parts = own_decoders(decoder, own_shares)
    else:
        parts = [load_decoder(recipe.model, folder, share=share) for share in own_shares]
    saved = read_peft(Path(recipe.adapter.path).expanduser(), config) if recipe.adapter.path else None
    adapters = _shard_adapters(recipe, config, own_shares, saved)
    if adapters is None:
        for part in parts:
            part.set_trainable(True)
    ready()  # a mesh waits for all ranks, too, but not for as long as some may take to load
    mesh = Mesh(layout, parts[0].device, timeout_s=section.timeout_s)
    trainer = sharded_trainer(
        mesh,
        parts,
        None if adapters is None else adapters.to(mesh.device),
        check_recipe(recipe),
        placement=placement,
        mirror=decoder if adapters is None else None,
        **_select_settings(recipe, parts[0], on_refused if rank == 0 else None),
    )
    if saved is not None:
        saved.check_base(trainer.identity()["base"])
    return trainer


class SamplingRank:
    """A rank of a divided model of transformers: what rank 0 calls of its trainer and its sampler."""

    def __init__(self, trainer: PolicyTrainer, sampler: RankSampler) -> None:
        self.trainer, self.sampler = trainer, sampler
        self.step, self.score, self.adapters = trainer.step, trainer.score, trainer.adapters
        self.tensors, self.restore = trainer.tensors, trainer.restore
        self.identity, self.counters = trainer.identity, trainer.counters
        self.sample, self.serve_factors = sampler.sample, sampler.serve_factors

    @property
    def progress(self) -> float:
        return self.trainer.progress


def new_sampling_rank(
    recipe: Recipe,
    rank: int,
    refused: Callable[[Microbatch], None] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> SamplingRank:
    """Trainer and sampler of rank ``rank`` over its part of a model of transformers; as
    ``new_sharded_trainer``."""
    folder, device = find_model_folder(recipe.model.path), choose_device(recipe.model)
    ready()  # the model needs its groups before it is loaded
    mesh = Mesh(Layout.parse(recipe.parallel.layout), device, timeout_s=recipe.parallel.timeout_s)
    links = Collectives(mesh)
    model = load_sharded(folder, dtype=getattr(torch, recipe.model.dtype), device=device, links=links)
    whole = new_adapters(recipe, model)
    assert isinstance(whole, ModuleAdapters)
    pieces = PieceAdapters.cut(whole, links)
    settings = _select_settings(recipe, model, refused if rank == 0 else None)
    leaves = PieceLeaves(pieces, links)
    trainer = fully_sharded_trainer(links, model, pieces, leaves, check_recipe(recipe), **settings)
    sampler = RankSampler(
        model,
        decode=Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs).decode,
        max_batch=recipe.engine.max_batch,
        context_limit=model.config.max_positions,
        kernels=choose_kernels(recipe.engine, model),
    )
    return SamplingRank(trainer, sampler)


def _shard_adapters(
    recipe: Recipe, config: ModelConfig, own_shares: Sequence[Share], saved: SavedAdapter | None
) -> Adapters | None:
    """Make a rank's shares of the adapters, of ``saved`` or new ones. None for full training; then raises
    ValueError for another dtype than float32."""
    if saved is not None:
        return own_adapters(config, own_shares, saved.spec, saved.tensors)
    if recipe.adapter.kind == "lora":
        return fresh_adapters(config, own_shares, make_adapter_spec(recipe.adapter), recipe.seed)
    _check_full_dtype(recipe.model)
    return None


def _select_settings(
    recipe: Recipe, decoder: Base, on_refused: Callable[[Microbatch], None] | None
) -> dict[str, Any]:
    """Select the keyword arguments that all trainers of the recipe share."""
    return {
        "settings": recipe.trainer,
        "temperature": recipe.rollout.temperature,
        "measure_every": recipe.log.mismatch_every,
        "on_refused": on_refused,
        "ops": choose_training_ops(recipe, decoder),
    }


def make_refused_saver(folder: Path) -> Callable[[Microbatch], None]:
    """Make the function that writes the microbatch of a refused step into ``folder``, as compressed numpy
    arrays in a file whose name is its number."""

    def save(microbatch: Microbatch) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
        arrays: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, np.ndarray)
        }
        if microbatch.support is not None:
            arrays |= {"support_counts": microbatch.support.counts, "support_ids": microbatch.support.ids}
        number = len(list(folder.glob("*.npz")))
        np.savez_compressed(folder / f"{number:04d}.npz", uids=microbatch.uids, **arrays)

    return save


KEY = "OSTINATO_TEACHER_KEY"  # environment variable with the key of the teacher's server


def check_teacher(recipe: Recipe, algorithm: Algorithm, renderer: Renderer) -> None:
    """Raises ValueError for a teacher that is missing, has no effect, does not go with the recipe's other
    keys, or has other tokens than the model of ``renderer``. A server at teacher.url is asked for them."""
    section = recipe.teacher
    key_set = next((key for key in ("url", "adapter", "model") if getattr(section, key)), "")
    if not algorithm.needs_teacher:
        if key_set:
            raise ValueError(
                f"teacher.{key_set} has no effect because algo.teacher_coef is 0; remove it, or set "
                'algo.name="opd"'
            )
        return
    if not key_set:
        raise ValueError(
            f"algo.teacher_coef is {algorithm.teacher_coef:g} without a teacher; train one first (ostinato "
            "train quickstart, for example) and set teacher.adapter to its run folder or adapter, or set "
            "teacher.model or teacher.url"
        )
    if recipe.parallel.sharded:
        raise ValueError(
            f"parallel.layout is {recipe.parallel.layout!r}, and a teacher scores in one process; drop the "
            "layout"
        )
    if section.url:
        return _check_address(recipe, renderer)
    if recipe.adapter.kind == "full" and not section.model:
        raise ValueError(
            'teacher.adapter is on the base that adapter.kind "full" trains; set teacher.model to that base, '
            'or use adapter.kind="lora"'
        )
    if section.model:
        _check_tokens(section.model, recipe.model.path, renderer)


def _check_address(recipe: Recipe, renderer: Renderer) -> None:
    """Raises ValueError for keys with which the server at teacher.url cannot score answers, and if the server
    does not answer or has other tokens."""
    rollout, url = recipe.rollout, recipe.teacher.url
    if recipe.teacher.adapter:
        raise ValueError(f"teacher.adapter is set with teacher.url {url}, which serves its own; drop one")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f'teacher.url is {url!r}; give it as "http://host:8000"')
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for key, value in neutral.items():
        if getattr(rollout, key) != value:
            raise ValueError(
                f"rollout.{key} is {getattr(rollout, key)}, and a server scores the plain distribution; set "
                f"it to {value:g}, or use teacher.adapter or teacher.model"
            )
    ids = sorted(renderer.tokenizer.get_vocab(with_added_tokens=True).values())
    _connect_teacher(recipe.teacher).check(lambda tokens: renderer.decode(tokens, skip_special=False), ids)


def _connect_teacher(section: TeacherSection) -> TeacherAt:
    return TeacherAt(section.url, section.model, key=os.environ.get(KEY, ""))


def _check_tokens(name: str, student: str, renderer: Renderer) -> None:
    """Raises ValueError if the teacher ``name`` has another vocabulary, or fewer logits, than the student."""
    folder = find_model_folder(name)
    student_vocab, teacher_vocab = (
        source.tokenizer.get_vocab(with_added_tokens=True) for source in (renderer, Renderer(folder))
    )
    if student_vocab != teacher_vocab:
        raise ValueError(
            f"teacher.model {name} has another vocabulary ({len(teacher_vocab)} tokens) than {student} "
            f"({len(student_vocab)} tokens), so it cannot score the same tokens; use a teacher with the same "
            "tokenizer"
        )
    sizes = [read_config(source).vocab_size for source in (folder, renderer.folder)]  # teacher, student
    if sizes[0] < sizes[1]:
        raise ValueError(
            f"teacher.model {name} has logits of {sizes[0]} tokens and {student} of {sizes[1]}; use a "
            "teacher that has them all"
        )


def new_teacher(recipe: Recipe, decoder: Decoder) -> Teacher | None:
    """Make the teacher of ``[teacher]``; None without one. A teacher.model is loaded; a teacher with only an
    adapter shares the weights of ``decoder``. Raises ValueError for an adapter of another base."""
    section = recipe.teacher
    if section.url:
        return _connect_teacher(recipe.teacher)
    if not (section.adapter or section.model):
        return None
    if section.model:
        model = recipe.model.model_copy(update={"path": section.model})
        decoder = load_decoder(model, find_model_folder(section.model))
    adapters = load_peft(find_adapter_folder(section.adapter), decoder) if section.adapter else None
    ops = choose_training_ops(recipe, decoder)
    return local_teacher(decoder, adapters, temperature=recipe.rollout.temperature, ops=ops)


def find_adapter_folder(path: str) -> Path:
    """Find the adapter's folder: the one in ``path`` if that is a run folder, else ``path`` itself."""
    folder = Path(path).expanduser()
    return folder / "adapter" if (folder / "recipe.toml").is_file() else folder
