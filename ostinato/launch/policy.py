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
from ostinato.launch.models import load_decoder, load_newest_checkpoint, load_recipe
from ostinato.model.generation import read_sampling_defaults
from ostinato.model.named import find_model_folder
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
    """Load the last policy of a run folder, or the model of a recipe or name, with ``adapter`` (a run folder
    or an adapter's), or if that is empty with the recipe's adapter.path, if any.

    Raises ValueError if ``target`` is none of these, for a run without a checkpoint or with an ``adapter``,
    and for a model that cannot be loaded or has no usable chat template; RunFailed if all checkpoints are
    damaged.
    """
    from ostinato.render import Renderer

    recipe, run = load_recipe(target, *overrides)
    check_adapter(run, adapter)
    recipe = resolve_auto(recipe)
    folder = find_model_folder(recipe.model.path)
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    _ = renderer.stop_tokens  # raises for a chat template that writes nothing, before anything is served
    decoder = load_decoder(recipe.model, folder)
    step, adapters = (
        load_trained(recipe, run, decoder) if run else load_initial_adapters(recipe, decoder, adapter)
    )
    return Policy(
        recipe=recipe, folder=folder, decoder=decoder, adapters=adapters, renderer=renderer, step=step
    )


def check_adapter(run: RunFolder | None, adapter: str) -> None:
    """Raises ValueError if an adapter is named beside a run, which has its own."""
    if run is not None and adapter:
        raise ValueError(
            f"--adapter is {adapter}, and {run.path} is a run with its own; name its model instead"
        )


def load_initial_adapters(recipe: Recipe, decoder: Base, adapter: str = "") -> tuple[int, Adapters | None]:
    """Load (step, adapters) of ``adapter``, or if that is empty (0, the adapters of adapter.path or None).
    Raises ValueError as ``load_adapter``."""
    from ostinato.launch.trainer import new_adapters

    if adapter:
        return load_adapter(adapter, decoder)[:2]
    return 0, new_adapters(recipe, decoder) if recipe.adapter.path else None


def load_adapter(path: str, decoder: Base) -> tuple[int, Adapters, RunFolder | None]:
    """Load (step, adapters, run) of the run folder ``path``, or (0, adapters, None) of an adapter's folder.
    Raises ValueError for anything else, and for adapters of another base; else as
    ``load_newest_adapters``."""
    from ostinato.hf.factors import read_folder
    from ostinato.hf.model import TransformersModel
    from ostinato.model.decoder import Decoder
    from ostinato.model.peft_io import load_peft
    from ostinato.run import RunFolder

    folder = Path(path).expanduser()
    if not (folder / "recipe.toml").is_file():
        if isinstance(decoder, TransformersModel):
            return 0, read_folder(folder, decoder.sites, decoder.device), None
        assert isinstance(decoder, Decoder)
        return 0, load_peft(folder, decoder), None
    run = RunFolder.open(folder)
    step, adapters = load_newest_adapters(run, decoder)
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
    from ostinato.model.wire import PackedAdapters, unpack_adapters

    saved = map_saved(path)
    saved.check_base(fingerprint)
    adapters = unpack_adapters(PackedAdapters(spec=saved.spec, factors=saved.tensors), config)
    assert adapters is not None
    return prepare_policy(adapters.to(device), dtype)


def load_newest_adapters(run: RunFolder, decoder: Base) -> tuple[int, Adapters]:
    """Load (step, adapters) of the newest whole checkpoint of a run. Raises ValueError if it has none, has
    another base, or trains all weights; RunFailed if all checkpoints are damaged."""
    recipe = Recipe.load(run.recipe)
    if recipe.adapter.kind != "lora":
        raise ValueError(f"run {run.path} trains all weights, so it is no adapter; use it by itself")
    step, adapters = load_trained(recipe, run, decoder)
    assert adapters is not None
    return step, adapters


def load_trained(recipe: Recipe, run: RunFolder, decoder: Base) -> tuple[int, Adapters | None]:
    """Load (step, adapters) of the newest whole checkpoint of ``run``.

    Full-parameter checkpoints are loaded into ``decoder`` itself, and the adapters are None. In any case the
    decoder is frozen. Raises as ``load_newest_checkpoint``, and ValueError without a checkpoint.
    """
    from ostinato.launch.trainer import new_adapters, new_trainer

    adapters = new_adapters(recipe, decoder)
    trainer = new_trainer(recipe, decoder, adapters)
    checkpoint = load_newest_checkpoint(run, trainer)
    if checkpoint is None:
        raise ValueError(
            f"run {run.path} has no checkpoint yet; let it train first: ostinato resume {run.path}"
        )
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    decoder.set_trainable(False)
    return checkpoint.step, trainer.adapters()


def serve_policy(policy: Policy) -> AnyEngine:
    """Make an engine that samples from ``policy``."""
    from ostinato.launch.engine import new_any_engine

    engine = new_any_engine(policy.recipe, policy.decoder, policy.renderer)
    engine.publish(policy.adapters, policy.step)
    return engine


def write_policy(decoder: Base, adapters: Adapters | None, base: Path, folder: Path, path: str) -> None:
    """Write the trained part into ``folder``: a PEFT adapter, or, for full-parameter training, the whole
    model with the tokenizer of ``base``.

    ``path`` is what the recipe calls the model in ``base``. The adapter names its base: by ``path`` if that
    is a name of the hub, as the cache's folder is of no use on another machine, else by ``base``."""
    from ostinato.hf.factors import ModuleAdapters, write_folder
    from ostinato.model.decoder import Decoder
    from ostinato.model.hf import save_model
    from ostinato.model.named import is_hub_name
    from ostinato.model.peft_io import save_peft

    name = path if is_hub_name(path) else str(base)
    if isinstance(adapters, ModuleAdapters):
        write_folder(adapters, folder, name)
        return
    assert isinstance(decoder, Decoder)
    if adapters is None:
        save_model(decoder, folder, tokenizer_from=base)
    else:
        save_peft(adapters, decoder, folder, base_name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """A user's sampling parameters; None: the value in the model's generation_config.json."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int

    def make_sampling(self, policy: Policy) -> Sampling:
        """Make the sampling parameters; top_k and min_p are always the model's."""
        defaults = read_sampling_defaults(policy.folder)
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            max_tokens=self.max_tokens,
            stop_tokens=policy.renderer.stop_tokens,
        )


def answer_prompts(
    target: str, prompts: Sequence[str | Sequence[Mapping[str, Any]]], options: SamplingOptions
) -> list[str]:
    """Load the policy of ``target`` (a run folder, a recipe or a model) and sample its answer to each prompt.
    A prompt is rendered as a row of the task, with ``task.system_prompt`` in front: messages by the chat
    template; a text as it is, or as a user's message if the run's prompts were chats. Also sets the number of
    threads of this process.

    Raises ValueError as ``load_policy``, and for a prompt that leaves no room for an answer; RuntimeError if
    the engine fails.
    """
    recipe, run = load_recipe(target)
    configure_threads(recipe)
    policy = load_policy(target)
    engine, sampling = serve_policy(policy), options.make_sampling(policy)
    starts = [*Jsonl(run.path / "starts.jsonl").rows()] if run else []
    are_chats = any(start.get("chats") for start in starts[-1:]) or bool(recipe.task.params.get("chat"))
    rows = [
        _make_row(prompt, f"prompt-{idx}", are_chats, recipe.task.system_prompt)
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


def _make_row(
    prompt: str | Sequence[Mapping[str, Any]], uid: str, is_chat: bool, system_prompt: str
) -> Prompt:
    """Make the row of a prompt; with ``is_chat`` a text becomes a user's message."""
    row = Prompt(uid=uid, text=prompt) if isinstance(prompt, str) else Prompt(uid=uid, messages=tuple(prompt))
    row = to_chat(row) if is_chat else row
    return add_system_prompt(row, system_prompt) if system_prompt else row
