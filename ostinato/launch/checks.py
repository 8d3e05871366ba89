"""Checks of a recipe's keys against each other and this machine, and the reward that solves an answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ostinato.algo.advantages import Baseline, Rewards, check_group_size
from ostinato.algo.algorithms import Algorithm, Anchor, Loss, Reference, algorithm
from ostinato.algo.offpolicy import Correction
from ostinato.config import AdapterSection, Recipe
from ostinato.config.sections import ParallelSection, RewardSection
from ostinato.engine.vllm_adapters import list_expert_kinds
from ostinato.engine.vllm_answers import COLDEST
from ostinato.launch.machine import choose_device
from ostinato.launch.models import make_adapter_spec
from ostinato.model.decoder import Decoder
from ostinato.parallel.launch import Place
from ostinato.parallel.layout import Layout
from ostinato.render import Renderer
from ostinato.reward.verify import BUILT_IN, READS
from ostinato.reward.workers import JUDGE
from ostinato.types import Prompt

log = logging.getLogger(__name__)


def check_recipe(recipe: Recipe) -> Algorithm:
    """Return the algorithm of the recipe. Raises ValueError for keys that do not fit it, each other, the
    installed packages, the device, or the ranks that torchrun has started."""
    algo = algorithm(recipe.algo.name, **recipe.algo.overrides)
    try:
        baseline = Baseline.GROUP_MEAN if algo.rewards is Rewards.APART else algo.baseline
        check_group_size(recipe.rollout.group_size, baseline, algo.scale, algo.drop_zero_variance)
    except ValueError as error:
        raise ValueError(f"rollout.group_size: {error}") from error
    check_ranks(recipe.parallel)
    if recipe.model.exact:
        check_exact(recipe)
    if recipe.cluster.samplers:
        check_cluster(recipe)
    if recipe.engine.backend == "vllm":
        check_vllm(recipe)
    if recipe.pipeline.overlap and recipe.adapter.kind == "full" and not recipe.cluster.samplers:
        raise ValueError(
            'pipeline.overlap is true with adapter.kind "full" in one process, where the sampler would read '
            "weights that the trainer is changing; set cluster.samplers to 1 or more, or train an adapter"
        )
    return algo


def check_exact(recipe: Recipe) -> None:
    """Raises ValueError for keys by which sampler and trainer would compute different numbers."""
    engine = recipe.engine
    fixes = {
        f'engine.weights is "{engine.weights}"': engine.weights != "model" and 'set it to "model"',
        f'engine.backend is "{engine.backend}"': engine.backend == "vllm" and 'set it to "local"',
        "engine.native is false": not engine.native and "set it to true",
        'adapter.kind is "full"': recipe.adapter.kind == "full" and 'set it to "lora"',
        f'parallel.layout is "{recipe.parallel.layout}"': Layout.parse(recipe.parallel.layout).world > 1
        and "leave it empty",
    }
    for setting, fix in fixes.items():
        if fix:
            raise ValueError(
                f"model.exact is true, but {setting}, where the sampler computes other numbers; {fix}"
            )


def check_cluster(recipe: Recipe) -> None:
    """Raises ValueError without Ray, and for keys that workers of a cluster do not support."""
    section = recipe.cluster
    if find_spec("ray") is None:
        raise ValueError(
            f"cluster.samplers is {section.samplers}, which needs Ray: pip install 'ostinato[ray]', or set "
            "it to 0 to run in one process"
        )
    if section.graders and (
        judges := [function for function in recipe.reward.functions if function.startswith(JUDGE)]
    ):
        raise ValueError(
            f"cluster.graders is {section.graders} with the reward {judges[0]!r}, which judges on an "
            "engine of the driver; set cluster.graders to 0"
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
    device = recipe.model.device
    resolved = choose_device(recipe.model) if device == "auto" else device
    if resolved.startswith("cuda") and not section.gpus_per_sampler:
        raise ValueError(
            f"model.device is {device!r}, here {resolved}, with cluster.gpus_per_sampler 0, so samplers "
            "would see no GPU; set it to 1, or to a share of one"
        )


def check_ranks(section: ParallelSection) -> None:
    """Raises ValueError if torchrun has started another number of ranks than the layout has."""
    layout, place = Layout.parse(section.layout), Place.of(os.environ)
    if place is not None and place.world != layout.world:
        raise ValueError(
            f'parallel.layout is "{section.layout}", of {layout.world} in all, but torchrun has '
            f"started {place.world} ranks (WORLD_SIZE); start {layout.world}, or choose another layout"
        )


def check_vllm(recipe: Recipe) -> None:
    """Raises ValueError for keys that vLLM does not support, and if the package of its client is missing."""
    engine = recipe.engine
    if find_spec("httpx2") is None:
        raise ValueError('engine.backend is "vllm", which needs a package: pip install "ostinato[vllm]"')
    if recipe.adapter.kind == "full":
        raise ValueError(
            'engine.backend is "vllm" with adapter.kind "full"; vLLM is sent adapters: use "lora"'
        )
    if engine.weights != "model":
        raise ValueError(
            f'engine.weights is "{engine.weights}" with engine.backend "vllm", which has weights of its own; '
            "leave it at model, and say what vLLM is to quantise in engine.server_args"
        )
    for name, temperature in (("rollout", recipe.rollout.temperature), ("eval", recipe.eval.temperature)):
        if 0 < temperature < COLDEST:
            raise ValueError(
                f"{name}.temperature is {temperature}; vLLM takes 0 (greedy) or {COLDEST} and more"
            )


def check_model(section: AdapterSection, decoder: Decoder) -> None:
    """Raises ValueError for a model that vLLM does not support."""
    if decoder.config.is_untied:
        raise ValueError(
            "tie_word_embeddings is true in the model's config.json, and vLLM leaves out the lm_head.weight "
            "that is there beside it; set the key to false"
        )
    list_expert_kinds(decoder.config, make_adapter_spec(section))


ROUNDING = 1e-6  # error of sums of weighted rewards


def compute_solved_at(reward: RewardSection) -> float:
    """Return the least reward of a solved answer, less ROUNDING. It is the recipe's number, or with "full"
    the reward of an answer that gets a 1 from every function with a positive weight."""
    return (reward.full_marks if reward.solved_at == "full" else reward.solved_at) - ROUNDING


def check_solvable(reward: RewardSection) -> None:
    """Raises ValueError if no answer can be solved, or if all would be, as no weight is positive.

    The first is only known of built-in functions, which give 0 to 1. A user's function may give more."""
    max_reward = reward.full_marks
    if reward.solved_at == "full" and not max_reward:
        raise ValueError(
            f"reward.weights {list(reward.weights)} has no weight above 0, so every answer would count as "
            "solved; give one that is, or set reward.solved_at to the reward that you call solved"
        )
    if compute_solved_at(reward) > max_reward and all(name in BUILT_IN for name in reward.positive):
        raise ValueError(
            f"reward.solved_at is {reward.solved_at:g}, but reward.functions {list(reward.functions)} give "
            f"at most {max_reward:g}, so no answer could be solved; set it to {max_reward:g} or less, or to "
            '"full"'
        )


def check_columns(reward: RewardSection, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError naming the first row whose column for a built-in reward is missing or invalid."""
    for function, (column, read) in READS.items():
        for prompt in prompts if function in reward.functions else ():
            if (value := prompt.columns.get(column)) is None:
                name = "task.params.answer_column" if column == "answer" else "[task.columns], for all rows"
                raise ValueError(
                    f"{prompt.where} has no {column} for the reward {function}; give it one, or name it in "
                    f"{name}"
                )
            try:
                read(value)
            except ValueError as error:
                raise ValueError(f"{prompt.where}: {error}") from error


def explain_full_marks(reward: RewardSection) -> Iterator[str]:
    """Yield a note if reward.solved_at is "full", several functions count, and one of them is a user's."""
    weights = reward.positive
    if reward.solved_at == "full" and len(weights) > 1 and not all(name in BUILT_IN for name in weights):
        names = [name.rpartition(":")[2] for name in weights]
        yield (
            'reward.solved_at = "full" counts an answer as solved from a reward of '
            f"{reward.full_marks:g} on, a 1 from each of {', '.join(names)}; where one of them never "
            "gives 1, pass@1 stays 0: set reward.solved_at to the reward that you call solved"
        )


def warn_of_control_tokens(renderer: Renderer, chats: Sequence[tuple[str, Any]]) -> None:
    """Log a warning if messages of ``chats``, (row name, chat), spell control tokens. The renderer passes
    such a spelling to the model as text, not as the token."""
    spelled = [
        (row_name, token)
        for row_name, messages in chats
        if (token := renderer.control.find_spelled(messages))
    ]
    if spelled:
        row_name, token = spelled[0]
        log.warning(
            f"{len(spelled)} of {len(chats)} rows spell a control token in a message, the first {token!r} in "
            f"{row_name}; the model reads its letters (docs/security.md)"
        )


def list_caveats(recipe: Recipe, algo: Algorithm, *, moe: bool = True) -> Iterator[str]:
    """Yield a sentence on each setting that is allowed but inexact, without effect, or surprising. ``moe``:
    whether the model has a mixture of experts."""
    rollout, settings = recipe.rollout, recipe.trainer
    filters = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    if filter_keys := " and ".join(f"rollout.{name}" for name, is_set in filters.items() if is_set):
        yield (
            f"{filter_keys} cut what is sampled from: log-probabilities, entropy and gradients are over "
            "the tokens that were kept, which are recorded with each (sampling/support_mean, "
            "sampling/support_bytes)"
        )
    yield from explain_full_marks(recipe.reward)
    for name, task in recipe.task.by_name.items():
        functions = recipe.judges(name).functions
        if task.env and "env" not in functions and all(function in BUILT_IN for function in functions):
            yield f'reward.functions {list(functions)} leave out "env", the rewards of task.env {task.env}'
    yield from _explain_weights(recipe)
    if recipe.engine.backend == "vllm":
        yield from explain_vllm(recipe)
    if rollout.interrupt_after:
        yield (
            f"rollout.interrupt_after = {list(rollout.interrupt_after)} bounds answers, with "
            f"rollout.answer_tokens = {rollout.answer_tokens}; rollout.max_tokens is not used"
        )
    defaults = type(settings).model_fields
    unused = [
        key for key in ("replay", "replay_threshold") if getattr(settings, key) != defaults[key].default
    ]
    if unused and not moe:
        names = " and ".join(f"trainer.{key}" for key in unused)
        yield f"{names} change nothing: {recipe.model.path} has no mixture of experts"
    if recipe.adapter.path and algo.needs_reference and algo.kl_reference is Reference.BASE:
        yield (
            f"algo.kl_coef = {algo.kl_coef} measures from the base model, not from adapter.path; "
            'algo.kl_reference = "start" does'
        )
    if algo.loss is Loss.REINFORCE and recipe.trainer.minibatches > 1:
        yield (
            f"algo.loss '{algo.loss}' has no ratio: of trainer.minibatches = {recipe.trainer.minibatches} "
            "all but the first learn off-policy without a correction"
        )
    yield from _explain_workers(recipe)
    num_batches = recipe.pipeline.staleness + 1
    if 5 * num_batches > settings.steps and num_batches > 1:
        yield (
            f"pipeline.staleness is {num_batches - 1}: the first {num_batches} of {settings.steps} batches "
            "are all sampled by the policy of the beginning"
        )
    if recipe.pipeline.staleness and is_uncorrected(algo):
        yield (
            f"pipeline.staleness is {recipe.pipeline.staleness}, and nothing in {algo.name} as it is set "
            "corrects for the policy that sampled: batches are trained on as if they were fresh"
        )


def _explain_workers(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence on each setting of workers that has no effect."""
    place, workers = recipe.pipeline.placement, recipe.cluster.samplers
    default = type(recipe.pipeline).model_fields["placement"].default
    if place != default and workers < 2:
        yield f'pipeline.placement = "{place}" changes nothing with {workers or "no"} cluster.samplers'
    if recipe.pipeline.overlap and not recipe.pipeline.staleness:
        yield (
            "pipeline.overlap with pipeline.staleness 0 is the synchronous loop: nothing overlaps; set "
            "pipeline.staleness to 1 or 2"
        )


def is_uncorrected(algo: Algorithm) -> bool:
    """Whether no ratio of this algorithm corrects for the policy that sampled."""
    ignores_sampler = algo.loss is Loss.REINFORCE or algo.anchor is Anchor.TRAINER
    return ignores_sampler and algo.correction is Correction.NONE


def _explain_weights(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence on the effect of engine.weights; none if they are the model's."""
    weights = recipe.engine.weights
    if weights == "model":
        return
    if not has_own_weights(recipe):
        yield f'engine.weights = "{weights}" changes nothing: the model is in bfloat16 already'
        return
    yield (
        f'engine.weights = "{weights}": the sampler is not quite the policy that is trained; sampling/* in '
        "the metrics says how far it is, and held-out scores are the sampler's, but for one of the exported "
        "policy at the end of the run"
    )


def has_own_weights(recipe: Recipe) -> bool:
    """Whether the sampler computes with other weights than the trainer's (``model.quantise``)."""
    equal = ("model", "bf16") if recipe.model.dtype == "bfloat16" else ("model",)
    return recipe.engine.weights not in equal


def explain_vllm(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence on each setting that has another effect, or none, with vLLM as the engine."""
    yield "vLLM's noise is its own: the same run samples other tokens the next time"
    if recipe.draft.enabled:
        yield "draft.enabled changes nothing: vLLM drafts as engine.server_args say (docs/vllm_drafter.md)"
    if recipe.model.fp32_head and recipe.model.dtype != "float32":
        yield "model.fp32_head is of the trainer alone: vLLM computes logits in model.dtype"
