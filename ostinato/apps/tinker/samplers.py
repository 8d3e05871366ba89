"""Policies that clients sample from: adapters kept in files, and in the engine while they are in use."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ostinato.apps.serve.thread import EngineThread
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.ops import Ops
from ostinato.model.peft_io import base_fingerprint, load_peft
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.render import Renderer
from ostinato.train.checkpoint import load_checkpoint

KEPT = 16  # policies that the engine has at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that this server trains and samples from."""

    name: str  # shown to clients
    path: str  # its folder or hub name, which a tokenizer can be loaded from
    aliases: frozenset[str]  # the names that clients may use for it
    decoder: Decoder
    renderer: Renderer
    ops: Ops  # of training
    context: int


def spec_of(stored: Mapping[str, object]) -> AdapterSpec:
    """The adapter spec in the JSON of a model or a checkpoint."""
    given = {**stored, "targets": tuple(stored["targets"])}  # type: ignore[arg-type]
    return AdapterSpec(**{**given, "expert_scheme": ExpertScheme(given["expert_scheme"])})  # type: ignore[arg-type]


def identity(base: Base, spec: AdapterSpec) -> dict[str, str]:
    """The identity that a checkpoint must have to be loaded."""
    return {"base": base_fingerprint(base.decoder), "adapter": str(spec)}


def with_tensors(base: Base, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> Adapters:
    """The adapters of a training checkpoint."""
    adapters = init_adapters(base.decoder.config, spec, device=base.decoder.device)
    found = adapters.detach_copy()
    prefix = "parameters."
    found.load_state_dict(
        {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    )
    return found


class Samplers:
    """Keeps the most recently used policies in the engine; others are reloaded from their folders."""

    def __init__(self, thread: EngineThread, base: Base) -> None:
        self._thread, self._base = thread, base
        self._held: OrderedDict[str, Adapters] = OrderedDict()

    async def publish(self, name: str, adapters: Adapters, version: int) -> None:
        """Serve a copy under ``name`` from now on."""
        copy = adapters.detach_copy()
        await self._thread.call(lambda engine: engine.publish(copy, version, name))
        self._held[name] = copy
        self._held.move_to_end(name)
        while len(self._held) > KEPT:
            await self.withdraw(next(iter(self._held)))

    async def withdraw(self, name: str) -> None:
        """Take it out of the engine; its folder stays."""
        if self._held.pop(name, None) is not None:
            await self._thread.call(lambda engine: engine.withdraw(name))

    async def ensure(self, name: str, folder: Path, version: int) -> Adapters:
        """The policy in ``folder``, served as ``name``. Raises ValueError if it is incomplete."""
        if name not in self._held:
            adapters = await self._thread.call(lambda _: read_adapters(self._base, folder))
            await self.publish(name, adapters, version)
        self._held.move_to_end(name)
        return self._held[name]


def read_adapters(base: Base, folder: Path) -> Adapters:
    """The adapters in a folder that was saved for sampling, or in a training checkpoint."""
    if not any(folder.glob("step-*")):
        return load_peft(folder, base.decoder)
    spec = spec_of(json.loads((folder / "spec.json").read_text()))
    checkpoint = load_checkpoint(folder, identity=identity(base, spec))
    assert checkpoint is not None
    return with_tensors(base, spec, checkpoint.tensors)
