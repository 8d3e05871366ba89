"""The first lines of a run: what is about to run, and what of it is not exact or not what it seems."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ostinato.algo.algorithms import Algorithm, Anchor, Loss, Reference
from ostinato.algo.offpolicy import Correction
from ostinato.config import Recipe
from ostinato.hf.model import TransformersModel
from ostinato.launch.checks import check, several_full_marks
from ostinato.launch.engine import notes
from ostinato.launch.inputs import RunInputs
from ostinato.model.base import Base
from ostinato.model.flops import Work
from ostinato.model.lora import Adapters


def device_name(decoder: Base) -> str:
    """The name of the GPU that the decoder is on; empty on a CPU."""
    return torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else ""


def introduction(prepared: RunInputs, adapters: Adapters | None) -> Iterator[str]:
    """What is about to run, in a few lines; the keys of the algorithm that are the user's by name."""
    recipe, decoder = prepared.recipe, prepared.decoder
    size = sum(parameter.numel() for parameter in decoder.parameters())
    a_token = Work(tokens=1, logits=1)  # 2 FLOPs for each weight that it meets
    active = decoder.flops(None).forward(a_token) / 2
    yield (
        f"model        {recipe.model.path}: {decoder.config.model_type}, {size / 1e6:.1f} M parameters, "
        f"{active / 1e6:.1f} M active, {recipe.model.dtype} on {decoder.device.type}"
    )
    if isinstance(decoder, TransformersModel):
        rows = "packed, prompts shared" if decoder.packs else "one sequence a pass"
        yield f"backend      transformers: {rows}; prompts of one length sampled together (docs/models.md)"
    trained = adapters.num_parameters if adapters else size
    size_text = f"{trained / 1e6:.2f} M" if trained > 1e4 else str(trained)
    yield f"training     {recipe.adapter.kind}, {size_text} parameters"
    chosen = check(recipe)
    yours = ", ".join(f"{key}={getattr(chosen, key)}" for key in chosen.overridden)
    yield f"algorithm    {chosen.name}" + (f" with your {yours}" if yours else "")
    if chosen.needs_teacher:
        named = (recipe.teacher.model, recipe.teacher.adapter, recipe.teacher.url)
        yield f"teacher      {' with '.join(filter(None, named))}"
    if chosen.correction is not Correction.NONE:
        bounds = f"{chosen.correction_low:g} to {chosen.correction_high:g}"
        yield f"correction   {chosen.correction} of the ratio trainer / sampler, {bounds}"
    train, held_out = len(prepared.train_prompts), len(prepared.eval_prompts)
    further = "".join(f", {len(rows)} of {name}" for name, rows in prepared.downstream.items())
    left_out = f"; {prepared.num_overlong} left out as too long" if prepared.num_overlong else ""
    sources = [
        f"{name} ({one.rows_from})" if name else one.rows_from for name, one in recipe.task.by_name.items()
    ]
    yield f"tasks        {', '.join(sources)}: {train} to train on, {held_out} held out{further}{left_out}"
    if prepared.left_open:
        can = " and ".join(prepared.left_open)
        yield f"rewards      can {can} on this machine (reward.isolation, docs/security.md)"
    moe = decoder.num_moe_layers > 0
    yield from (f"note         {caveat}" for caveat in caveats(recipe, chosen, moe=moe))
    yield from (f"warning      {warning}" for warning in prepared.warnings)


def caveats(recipe: Recipe, chosen: Algorithm, *, moe: bool = True) -> Iterator[str]:
    """What is allowed and is not exact, or not what it seems, one sentence each."""
    rollout, settings = recipe.rollout, recipe.trainer
    filters = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    if used := " and ".join(f"rollout.{name}" for name, on in filters.items() if on):
        yield (
            f"{used} cut what is sampled from: log-probabilities, entropy and gradients are over the tokens "
            "that were kept, which are recorded with each (sampling/support_mean, sampling/support_bytes)"
        )
    yield from several_full_marks(recipe.reward)
    yield from _of_weights(recipe)
    if recipe.engine.backend == "vllm":
        yield from notes(recipe)
    if rollout.interrupt_after:
        yield (
            f"rollout.interrupt_after = {list(rollout.interrupt_after)} bounds answers, with "
            f"rollout.answer_tokens = {rollout.answer_tokens}; rollout.max_tokens is not used"
        )
    usual = type(settings).model_fields
    idle = [key for key in ("replay", "replay_threshold") if getattr(settings, key) != usual[key].default]
    if idle and not moe:
        names = " and ".join(f"trainer.{key}" for key in idle)
        yield f"{names} change nothing: {recipe.model.path} has no mixture of experts"
    if recipe.adapter.path and chosen.needs_reference and chosen.kl_reference is Reference.BASE:
        yield (
            f"algo.kl_coef = {chosen.kl_coef} measures from the base model, not from adapter.path; "
            'algo.kl_reference = "start" does'
        )
    if chosen.loss is Loss.REINFORCE and recipe.trainer.minibatches > 1:
        yield (
            f"algo.loss '{chosen.loss}' has no ratio: of trainer.minibatches = {recipe.trainer.minibatches} "
            "all but the first learn off-policy without a correction"
        )
    yield from _of_workers(recipe)
    first = recipe.pipeline.staleness + 1
    if 5 * first > settings.steps and first > 1:
        yield (
            f"pipeline.staleness is {first - 1}: the first {first} of {settings.steps} batches are all "
            "sampled by the policy of the beginning"
        )
    if recipe.pipeline.staleness and uncorrected(chosen):
        yield (
            f"pipeline.staleness is {recipe.pipeline.staleness}, and nothing in {chosen.name} as it is set "
            "corrects for the policy that sampled: batches are trained on as if they were fresh"
        )


def _of_workers(recipe: Recipe) -> Iterator[str]:
    """What does nothing where the recipe has it."""
    place, workers = recipe.pipeline.placement, recipe.cluster.samplers
    usual = type(recipe.pipeline).model_fields["placement"].default
    if place != usual and workers < 2:
        yield f'pipeline.placement = "{place}" changes nothing with {workers or "no"} cluster.samplers'
    if recipe.pipeline.overlap and not recipe.pipeline.staleness:
        yield (
            "pipeline.overlap with pipeline.staleness 0 is the synchronous loop: nothing overlaps; set "
            "pipeline.staleness to 1 or 2"
        )


def uncorrected(chosen: Algorithm) -> bool:
    """Does no ratio of this algorithm see the policy that sampled?"""
    blind = chosen.loss is Loss.REINFORCE or chosen.anchor is Anchor.TRAINER
    return blind and chosen.correction is Correction.NONE


def _of_weights(recipe: Recipe) -> Iterator[str]:
    """What follows from engine.weights."""
    weights = recipe.engine.weights
    if weights == "model":
        return
    if not own_weights(recipe):
        yield f'engine.weights = "{weights}" changes nothing: the model is in bfloat16 already'
        return
    yield (
        f'engine.weights = "{weights}": the sampler is not quite the policy that is trained; sampling/* in '
        "the metrics says how far it is, and held-out scores are the sampler's, but for one of the exported "
        "policy at the end of the run"
    )


def own_weights(recipe: Recipe) -> bool:
    """Does the sampler compute with weights that are not the trainer's (``model.quantise``)?"""
    same = ("model", "bf16") if recipe.model.dtype == "bfloat16" else ("model",)
    return recipe.engine.weights not in same
