"""Adapters in files as vLLM 0.32 reads them, experts too.

    model.layers.3.self_attn.q_proj.lora_A.weight      [r, in], and B [out, r]
    model.layers.3.mlp.experts.w1.lora_A.weight        [1, r, in], and B [E, out, r]: gate (up is w3, down w2)
    model.layers.3.mlp.experts.7.gate_proj.lora_A...   [r, in], and B [out, r]

(each with "base_model.model." before it, and the names of the checkpoint). The second form is of
``shared_outer`` and needs ``--enable-moe-shared-loras``: the factor that experts share has one expert, and
vLLM broadcasts it; the third is of ``per_expert``. PEFT's own form of experts is another one
(``model.peft_io``), which vLLM reads only for models whose files have fused experts. vLLM takes gate, up and
down of experts together, and one alpha / r for all: where experts have another rank, B is scaled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.hf import write_tensors
from ostinato.model.hf_names import name_hf_module
from ostinato.model.lora import Adapters
from ostinato.model.peft_foreign import CONFIG, TENSORS
from ostinato.model.shapes import AdapterSpec, ExpertScheme, compute_adapter_shapes
from ostinato.run import atomic_write

STACKED = {"gate": "w1", "up": "w3", "down": "w2"}


def write_adapters(adapters: Adapters, folder: Path, dtype: torch.dtype) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` to ``folder``, factors in ``dtype``, to
    which vLLM would round them."""
    spec = adapters.spec
    tensors = {
        f"base_model.model.{module}.lora_{part}.weight": factor.detach().to(dtype).cpu().contiguous()
        for module, pair in _iterate_modules(adapters)
        for part, factor in zip("AB", pair, strict=True)
    }
    config = {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
    }
    write_tensors(folder / TENSORS, tensors, {"format": "pt"})
    atomic_write(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def list_expert_kinds(config: ModelConfig, spec: AdapterSpec) -> list[str]:
    """Return the adapted maps of experts, such as "experts.gate". Raises ValueError if only some of gate, up
    and down are adapted, which vLLM takes together."""
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in compute_adapter_shapes(config, spec))
    experts = [kind for kind in kinds if kind.startswith("experts.")]
    if experts and len(experts) < len(STACKED):
        raise ValueError(
            f"adapter.targets has {experts[0]!r}, and vLLM takes adapters of gate, up and down of experts "
            'together; use "experts"'
        )
    return experts


def _iterate_modules(adapters: Adapters) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield (module as vLLM names it, (A, B)); B of experts is scaled to the alpha / r that all maps
    share."""
    spec, model_type = adapters.spec, adapters.config.model_type
    for name, (a, b) in adapters.tensors.items():
        module = name_hf_module(name, model_type)
        if ".experts." not in name:
            yield module, (a, b)
            continue
        b = b * (spec.get_scale(name) / (spec.alpha / spec.rank))
        if spec.expert_scheme == ExpertScheme.PER_EXPERT:
            for expert, pair in enumerate(zip(a.unbind(), b.unbind(), strict=True)):
                yield module.format(expert), pair
        else:
            stack = f"{module.partition('.{}')[0]}.{STACKED[name.rpartition('.')[2]]}"
            yield stack, (a if a.dim() == 3 else a[None], b if b.dim() == 3 else b[None])
