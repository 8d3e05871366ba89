"""The teacher of a recipe, checked and loaded."""

from __future__ import annotations

import os
from pathlib import Path

from ostinato.algo.algorithms import Algorithm
from ostinato.config import Recipe
from ostinato.launch.engine import training_ops
from ostinato.launch.models import load_decoder
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.named import model_folder
from ostinato.model.peft_io import load_peft
from ostinato.render import Renderer
from ostinato.train.teacher import Teacher, local_teacher
from ostinato.train.teacher_at import TeacherAt

KEY = "OSTINATO_TEACHER_KEY"


def check_teacher(recipe: Recipe, algorithm: Algorithm, renderer: Renderer) -> None:
    """Raises ValueError, before any work, for a teacher that is missing, idle, or has other tokens than the
    model of ``renderer``."""
    section = recipe.teacher
    given = next((key for key in ("url", "adapter", "model") if getattr(section, key)), "")
    if not algorithm.needs_teacher:
        if given:
            raise ValueError(
                f"teacher.{given} has no effect because algo.teacher_coef is 0; remove it, or set "
                'algo.name="opd"'
            )
        return
    if not given:
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
    _teacher_at(recipe).check(lambda some: renderer.decode(some, skip_special=False), ids)


def _teacher_at(recipe: Recipe) -> TeacherAt:
    section = recipe.teacher
    return TeacherAt(
        section.url,
        section.model,
        key=os.environ.get(KEY, ""),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
    )


def _check_tokens(name: str, student: str, renderer: Renderer) -> None:
    folder = model_folder(name)
    own, other = (one.tokenizer.get_vocab(with_added_tokens=True) for one in (renderer, Renderer(folder)))
    if own != other:
        raise ValueError(
            f"teacher.model {name} has another vocabulary ({len(other)} tokens) than {student} "
            f"({len(own)} tokens), so it cannot score the same tokens; use a teacher with the same tokenizer"
        )
    sizes = [read_config(one).vocab_size for one in (folder, renderer.folder)]
    if sizes[0] < sizes[1]:
        raise ValueError(
            f"teacher.model {name} has logits of {sizes[0]} tokens and {student} of {sizes[1]}; use a "
            "teacher that has them all"
        )


def new_teacher(recipe: Recipe, decoder: Decoder) -> Teacher | None:
    """What ``[teacher]`` names; None without one. An adapter alone is one of ``decoder``, whose weights it
    shares. Raises ValueError for an adapter of another base."""
    section = recipe.teacher
    if section.url:
        return _teacher_at(recipe)
    if not (section.adapter or section.model):
        return None
    if section.model:
        model = recipe.model.model_copy(update={"path": section.model})
        decoder = load_decoder(model, model_folder(section.model))
    adapters = load_peft(adapter_folder(section.adapter), decoder) if section.adapter else None
    ops = training_ops(recipe, decoder)
    return local_teacher(decoder, adapters, temperature=recipe.rollout.temperature, ops=ops)


def adapter_folder(path: str) -> Path:
    """The adapter of a run folder, or the folder itself."""
    folder = Path(path).expanduser()
    return folder / "adapter" if (folder / "recipe.toml").is_file() else folder
