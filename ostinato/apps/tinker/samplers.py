"""Policies that clients sample from: adapters kept in files, and in the engine while they are in use."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.ops import Ops
from ostinato.model.peft_io import compute_base_fingerprint, load_peft
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.render import Renderer
from ostinato.train.checkpoint import load_checkpoint

MAX_POLICIES = 16  # policies in the engine at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that this server trains and samples from."""

    name: str  # shown to clients
    path: str  # its folder or hub name, from which a tokenizer can be loaded
    aliases: frozenset[str]  # the names that clients may use for it
    decoder: Decoder
    renderer: Renderer
    ops: Ops  # of training
    context_limit: int  # tokens of a sequence


def parse_spec(stored: Mapping[str, object]) -> AdapterSpec:
    """Return the adapter spec in the JSON of a model or a checkpoint."""
    fields = {**stored, "targets": tuple(stored["targets"])}  # type: ignore[arg-type]
    return AdapterSpec(**{**fields, "expert_scheme": ExpertScheme(fields["expert_scheme"])})  # type: ignore[arg-type]


def make_identity(base: Base, spec: AdapterSpec) -> dict[str, str]:
    """Return the identity that a checkpoint must have to be loaded."""
    return {"base": compute_base_fingerprint(base.decoder), "adapter": str(spec)}


def make_adapters(base: Base, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> Adapters:
    """Return the adapters of a training checkpoint."""
    adapters = init_adapters(base.decoder.config, spec, device=base.decoder.device)
    adapters_copy = adapters.detach_copy()
    prefix = "parameters."
    adapters_copy.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    )
    return adapters_copy


class Samplers:
    """Keeps the most recently used policies in the engine; others are reloaded from their folders."""

    def __init__(self, thread: EngineThread[LocalEngine], base: Base) -> None:
        self._thread, self._base = thread, base
        self._policies: OrderedDict[str, Adapters] = OrderedDict()

    async def publish(self, name: str, adapters: Adapters, version: int) -> None:
        """Serve a copy under ``name`` from now on."""
        copy = adapters.detach_copy()
        await self._thread.call(lambda engine: engine.publish(copy, version, name))
        self._policies[name] = copy
        self._policies.move_to_end(name)
        while len(self._policies) > MAX_POLICIES:
            await self.withdraw(next(iter(self._policies)))

    async def withdraw(self, name: str) -> None:
        """Take a policy out of the engine; its folder stays."""
        if self._policies.pop(name, None) is not None:
            await self._thread.call(lambda engine: engine.withdraw(name))

    async def load(self, name: str, folder: Path, version: int) -> Adapters:
        """Return the policy in ``folder``, served as ``name``. Raises ValueError if it is incomplete."""
        if name not in self._policies:
            adapters = await self._thread.call(lambda _: read_adapters(self._base, folder))
            await self.publish(name, adapters, version)
        self._policies.move_to_end(name)
        return self._policies[name]


def read_adapters(base: Base, folder: Path) -> Adapters:
    """Read the adapters of a folder that was saved for sampling, or of a training checkpoint."""
    if not any(folder.glob("step-*")):
        return load_peft(folder, base.decoder)
    spec = parse_spec(json.loads((folder / "spec.json").read_text()))
    checkpoint = load_checkpoint(folder, identity=make_identity(base, spec))
    assert checkpoint is not None
    return make_adapters(base, spec, checkpoint.tensors)
