"""The first lines of a run: what is about to run, for a person."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ostinato.algo.offpolicy import Correction
from ostinato.launch.caveats import caveats
from ostinato.launch.checks import check
from ostinato.launch.inputs import RunInputs
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters


def device_name(decoder: Decoder) -> str:
    """The name of the GPU that the decoder is on; empty on a CPU."""
    return torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else ""


def introduction(prepared: RunInputs, adapters: Adapters | None) -> Iterator[str]:
    """What is about to run, in a few lines; the keys of the algorithm that are the user's by name."""
    recipe, decoder = prepared.recipe, prepared.decoder
    size = sum(parameter.numel() for parameter in decoder.parameters())
    a_token = Work(tokens=1, logits=1)  # 2 FLOPs for each weight that it meets
    active = FlopModel.of(decoder.config, None).forward(a_token) / 2
    yield (
        f"model        {recipe.model.path}: {decoder.config.model_type}, {size / 1e6:.1f} M parameters, "
        f"{active / 1e6:.1f} M active, {recipe.model.dtype} on {decoder.device.type}"
    )
    trained = adapters.num_parameters if adapters else size
    yield f"training     {recipe.adapter.kind}, {trained / 1e6:.2f} M parameters"
    chosen = check(recipe)
    yours = ", ".join(f"{key}={getattr(chosen, key)}" for key in chosen.overridden)
    yield f"algorithm    {chosen.name}" + (f" with your {yours}" if yours else "")
    if chosen.correction is not Correction.NONE:
        bounds = f"{chosen.correction_low:g} to {chosen.correction_high:g}"
        yield f"correction   {chosen.correction} of the ratio trainer / sampler, {bounds}"
    train, held_out = len(prepared.train_prompts), len(prepared.eval_prompts)
    further = "".join(f", {len(rows)} of {name}" for name, rows in prepared.downstream.items())
    sources = [f"{name} ({one.source})" if name else one.source for name, one in recipe.task.by_name.items()]
    yield f"tasks        {', '.join(sources)}: {train} to train on, {held_out} held out{further}"
    if prepared.left_open:
        can = " and ".join(prepared.left_open)
        yield f"rewards      can {can} on this machine (reward.isolation, docs/security.md)"
    moe = decoder.num_moe_layers > 0
    yield from (f"note         {caveat}" for caveat in caveats(recipe, chosen, moe=moe))
    yield from (f"warning      {warning}" for warning in prepared.warnings)
