"""Loading of a policy that can be sampled from, by the name of a run, a recipe or a model.

Nothing heavy is imported at the top, as threads must be chosen before torch is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.config import Recipe
from ostinato.env.rows import to_chat
from ostinato.env.tasks import add_system_prompt
from ostinato.launch.machine import configure_threads, resolve_auto
from ostinato.launch.models import load_decoder, newest_checkpoint, recipe_of
from ostinato.model.generation import sampling_defaults
from ostinato.model.named import model_folder
from ostinato.run import Jsonl
from ostinato.types import Prompt, Request, Sampling, Stop

if TYPE_CHECKING:
    import torch

    from ostinato.engine.runner import ServedPolicy
    from ostinato.launch.engine import AnyEngine
    from ostinato.launch.policy import Policy
    from ostinato.model.base import Base
    from ostinato.model.config import ModelConfig
    from ostinato.model.lora import Adapters
    from ostinato.render import Renderer
    from ostinato.run import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model that can be sampled from: base, adapters (None: the base itself), tokenizer and its recipe."""

    recipe: Recipe
    folder: Path  # of the base model
    decoder: Base
    adapters: Adapters | None
    renderer: Renderer
    step: int = 0  # training steps behind it


def load_policy(target: str, *overrides: str, adapter: str = "") -> Policy:
    """The last policy of a run folder, or the model of a recipe or name with ``adapter`` (a run folder or an
    adapter's), else with its adapter.path, if any.

    Raises ValueError when ``target`` is none of these, and for a run with another adapter.
    """
    from ostinato.render import Renderer

    recipe, run = recipe_of(target, *overrides)
    check_adapter(run, adapter)
    recipe = resolve_auto(recipe)
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    _ = renderer.stop_tokens  # raises for a chat template that writes nothing, before anything is served
    decoder = load_decoder(recipe.model, folder)
    step, adapters = load_trained(recipe, run, decoder) if run else initial_adapters(recipe, decoder, adapter)
    return Policy(
        recipe=recipe, folder=folder, decoder=decoder, adapters=adapters, renderer=renderer, step=step
    )


def check_adapter(run: RunFolder | None, adapter: str) -> None:
    """Raise ValueError for an adapter beside a run, which has its own."""
    if run is not None and adapter:
        raise ValueError(
            f"--adapter is {adapter}, and {run.path} is a run with its own; name its model instead"
        )


def initial_adapters(recipe: Recipe, decoder: Base, adapter: str = "") -> tuple[int, Adapters | None]:
    """(step, adapters) of ``adapter``, else of what the recipe begins with: None without adapter.path."""
    from ostinato.launch.trainer import new_adapters

    if adapter:
        return load_adapter(adapter, decoder)[:2]
    return 0, new_adapters(recipe, decoder) if recipe.adapter.path else None


def load_adapter(where: str, decoder: Base) -> tuple[int, Adapters, RunFolder | None]:
    """(step, adapters, run) of a run folder or an adapter's folder, for this base. ValueError for others."""
    from ostinato.hf.factors import read_folder
    from ostinato.hf.model import TransformersModel
    from ostinato.model.decoder import Decoder
    from ostinato.model.peft_io import load_peft
    from ostinato.run import RunFolder

    folder = Path(where).expanduser()
    if not (folder / "recipe.toml").is_file():
        if isinstance(decoder, TransformersModel):
            return 0, read_folder(folder, decoder.sites, decoder.device), None
        assert isinstance(decoder, Decoder)
        return 0, load_peft(folder, decoder), None
    run = RunFolder.open(folder)
    step, adapters = load_newest(run, decoder)
    return step, adapters, run


def map_policy(
    path: Path, config: ModelConfig, fingerprint: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> ServedPolicy:
    """The adapter in a file of ours, prepared for passes without a copy: what an engine serves when
    ``load_adapter`` of its folder is published. The others: of the base. The file must not change.

    Raises ValueError for another base and for a damaged file, NotFinite, and OSError.
    """
    from ostinato.engine.runner import prepare_policy
    from ostinato.model.peft_io import map_saved
    from ostinato.model.wire import Packed, unpack

    saved = map_saved(path)
    saved.check_base(fingerprint)
    adapters = unpack(Packed(spec=saved.spec, factors=saved.tensors), config)
    assert adapters is not None
    return prepare_policy(adapters.to(device), dtype)


def load_newest(run: RunFolder, decoder: Base) -> tuple[int, Adapters]:
    """(step, adapters) of the newest whole checkpoint of a run on this base. ValueError without one."""
    recipe = Recipe.load(run.recipe)
    if recipe.adapter.kind != "lora":
        raise ValueError(f"run {run.path} trains all weights, so it is no adapter; use it by itself")
    step, adapters = load_trained(recipe, run, decoder)
    assert adapters is not None
    return step, adapters


def load_trained(recipe: Recipe, run: RunFolder, decoder: Base) -> tuple[int, Adapters | None]:
    """(step, adapters) of the newest whole checkpoint of ``run``.

    Full-parameter checkpoints are loaded into ``decoder`` itself, and the adapters are None.
    """
    from ostinato.launch.trainer import new_adapters, new_trainer

    adapters = new_adapters(recipe, decoder)
    trainer = new_trainer(recipe, decoder, adapters)
    checkpoint = newest_checkpoint(run, trainer)
    if checkpoint is None:
        raise ValueError(
            f"run {run.path} has no checkpoint yet; let it train first: ostinato resume {run.path}"
        )
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    decoder.trainable(False)
    return checkpoint.step, trainer.adapters()


def serve(policy: Policy) -> AnyEngine:
    """An engine that samples from ``policy``."""
    from ostinato.launch.engine import any_engine

    engine = any_engine(policy.recipe, policy.decoder, policy.renderer)
    engine.publish(policy.adapters, policy.step)
    return engine


def write_policy(decoder: Base, adapters: Adapters | None, base: Path, to: Path, path: str) -> None:
    """The trained part: a PEFT adapter, or, for full-parameter training, the whole model.

    ``path`` is what the recipe calls the model in ``base``. A hub name goes into the adapter as it is: the
    cache folder behind it means nothing on another machine.
    """
    from ostinato.hf.factors import ModuleAdapters, write_folder
    from ostinato.model.decoder import Decoder
    from ostinato.model.hf import save_model
    from ostinato.model.named import is_hub_name
    from ostinato.model.peft_io import save_peft

    name = path if is_hub_name(path) else str(base)
    if isinstance(adapters, ModuleAdapters):
        write_folder(adapters, to, name)
        return
    assert isinstance(decoder, Decoder)
    if adapters is None:
        save_model(decoder, to, tokenizer_from=base)
    else:
        save_peft(adapters, decoder, to, base_name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """A user's sampling parameters; None: the value in the model's generation_config.json."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int

    def sampling(self, policy: Policy) -> Sampling:
        own = sampling_defaults(policy.folder)
        return Sampling(
            temperature=own.temperature if self.temperature is None else self.temperature,
            top_p=own.top_p if self.top_p is None else self.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            max_tokens=self.max_tokens,
            stop_tokens=policy.renderer.stop_tokens,
        )


def answer(
    target: str, prompts: Sequence[str | Sequence[Mapping[str, Any]]], options: SamplingOptions
) -> list[str]:
    """The texts with which ``target``, a run folder, a recipe or a model, answers ``prompts``: rendered as
    rows of its task are: a text as it is, or as what a user says where the run's prompts were chats; messages
    by the chat template, with ``task.system_prompt`` in front.

    Raises ValueError for a prompt that leaves no room for an answer, RuntimeError when the engine fails.
    """
    recipe, run = recipe_of(target)
    configure_threads(recipe)
    policy = load_policy(target)
    engine, sampling = serve(policy), options.sampling(policy)
    starts = [*Jsonl(run.path / "starts.jsonl").rows()] if run else []
    chats = any(start.get("chats") for start in starts[-1:]) or bool(recipe.task.params.get("chat"))
    rows = [
        _prompt(prompt, f"prompt-{idx}", chats, recipe.task.system_prompt)
        for idx, prompt in enumerate(prompts)
    ]
    requests = [
        Request(tokens=policy.renderer.prompt(row), sampling=sampling, seed=(options.seed, idx))
        for idx, row in enumerate(rows)
    ]

    async def sample() -> list[str]:
        texts = [""] * len(requests)
        async for idx, completion in engine.generate(requests):
            if completion.stop is Stop.ERROR:
                raise RuntimeError(completion.error)
            texts[idx] = completion.text
        return texts

    return asyncio.run(sample())


def _prompt(prompt: str | Sequence[Mapping[str, Any]], uid: str, chats: bool, system_prompt: str) -> Prompt:
    row = Prompt(uid=uid, text=prompt) if isinstance(prompt, str) else Prompt(uid=uid, messages=tuple(prompt))
    row = to_chat(row) if chats else row
    return add_system_prompt(row, system_prompt) if system_prompt else row
