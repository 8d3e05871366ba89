"""Convert a LoRA adapter written by PEFT to an adapter of ours that computes the same function.

Supported are LoRA on linear maps of a family that ``model.hf`` reads, with any rank per map
(``rank_pattern``) and any scale (``lora_alpha``, ``alpha_pattern``, ``use_rslora``), on all layers or some,
on experts in the layout of transformers v5 (``target_parameters``: one parameter for all experts) or of older
files (a module per expert). Anything else is refused by its name. Our adapters have one rank for all maps,
and one for experts: smaller factors are padded with zeros, which stay zero in training, so a map that was not
adapted stays unadapted.

D hidden size, M expert width, E experts, r rank.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato.inputs import parse_json
from ostinato.model.config import ModelConfig
from ostinato.model.hf_names import name_hf_module
from ostinato.model.shapes import AdapterSpec, ExpertScheme, compute_adapter_shapes, compute_linear_shapes

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
IN_MEMORY = "qwen3_moe"  # transformers v5 names the modules of every MoE family so; Mixtral's files differ

# Values under which an adapter is plain LoRA. Keys that are not here (names, versions, dropout,
# initialisation) do not change what a trained adapter computes.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# These change the base before training; the adapter belongs to that base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_EXPERT = re.compile(r"(?P<before>.+\.experts)\.(?P<expert>\d+)\.(?P<role>\w+)")

Factors = dict[str, Tensor]  # "A" and "B"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignAdapter:
    """An adapter of PEFT's for a model of one configuration. ``tensors``: by the names of
    ``Adapters.state_dict``, float32, on the CPU."""

    spec: AdapterSpec
    tensors: dict[str, Tensor]
    base_name: str
    dropout: float  # in PEFT's training; ours uses none


def read_foreign(folder: Path, config: ModelConfig) -> ForeignAdapter:
    """Read the adapter in ``folder`` for a model of ``config``.

    Raises ValueError for files that cannot be read or lack a tensor, for factors that do not fit the model,
    and, naming what is not supported, if the adapter would compute another function here.
    """
    settings = read_settings(folder)
    pairs = read_pairs(folder)
    scales = Scales.of(settings)
    maps: dict[str, tuple[Tensor, Tensor, float]] = {}  # logical name -> A, B, scale
    for module, factors in pairs.items():
        if factors.keys() != {"A", "B"}:
            raise ValueError(
                f"adapter {folder} has only lora_{next(iter(factors))} of {module}; save it again"
            )
    modules = _map_modules(config)
    experts: dict[str, dict[int, tuple[Tensor, Tensor, float]]] = defaultdict(dict)
    for module, factors in pairs.items():
        a, b = factors["A"].float(), factors["B"].float()
        name = module.replace(".base_layer", "")
        if name in modules:
            maps[modules[name]] = (a, b, scales.get_scale(name, a.shape[0]))
        elif name.endswith(".experts"):
            maps |= _split_experts(name, a, b, config, scales, folder)
        elif (match := _EXPERT.fullmatch(name)) and f"{match['before']}.{{}}.{match['role']}" in modules:
            logical = modules[f"{match['before']}.{{}}.{match['role']}"]
            experts[logical][int(match["expert"])] = (a, b, scales.get_scale(name, a.shape[0]))
        else:
            raise ValueError(
                f"adapter {folder} adapts {name}, which is no linear map of a layer of {config.model_type}; "
                "merge it into its base by peft (merge_and_unload)"
            )
    for logical, by_expert in experts.items():
        maps[logical] = _stack_experts(by_expert, compute_linear_shapes(config)[logical])
    spec = _build_spec(maps, config)
    return ForeignAdapter(
        spec=spec,
        tensors=_build_tensors(maps, spec, config, folder),
        base_name=str(settings.get("base_model_name_or_path") or "unnamed"),
        dropout=float(settings.get("lora_dropout") or 0.0),
    )


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Read adapter_config.json. Raises ValueError for a file that cannot be read, and for a setting under
    which the adapter is no plain LoRA."""
    path = folder / CONFIG
    try:
        settings = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); save the adapter again") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object; save the adapter again")
    fix = "merge it into its base by peft (merge_and_unload)"
    for key, values in _PLAIN.items():
        if key in settings and settings[key] not in values:
            raise ValueError(f"adapter {folder} has {key} {settings[key]!r}, which is not supported; {fix}")
    init = str(settings.get("init_lora_weights", "")).lower()
    if init.startswith(_CHANGES_BASE):
        raise ValueError(
            f"adapter {folder} has init_lora_weights {init!r}, which changes the base too; save it by "
            "peft's path_initial_model_for_weight_conversion, or merge it"
        )
    return settings


def read_pairs(folder: Path) -> dict[str, Factors]:
    """Read the factors of every adapted module, by its name; a module may have one of the two only. Raises
    ValueError for a file that is missing, broken or empty, and for a tensor that is no factor of LoRA."""
    path = folder / TENSORS
    if not path.is_file():
        raise ValueError(f"adapter {folder} has no {TENSORS}; save it by peft's save_pretrained")
    pairs: dict[str, Factors] = defaultdict(dict)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                match = _TENSOR.fullmatch(name)
                if match is None:
                    raise ValueError(
                        f"adapter {folder} has {name}, which is no factor of LoRA on a linear map; merge it "
                        "into its base by peft (merge_and_unload)"
                    )
                pairs[match["module"]][match["factor"]] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); save it again") from error
    if not pairs:
        raise ValueError(f"{path} has no tensors; save the adapter again")
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The scales of maps, by the names of their modules: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv
    2312.03732)."""

    alpha: float
    patterns: Mapping[str, float]
    parameters: tuple[str, ...]  # adapted as parameters ("mlp.gate.weight"), as patterns name them
    has_root: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Scales:
        return cls(
            alpha=float(settings.get("lora_alpha") or 8),  # PEFT's default
            patterns=settings.get("alpha_pattern") or {},
            parameters=tuple(settings.get("target_parameters") or ()),
            has_root=bool(settings.get("use_rslora")),
        )

    def get_scale(self, name: str, rank: int) -> float:
        """Return the scale of a map of this rank. As in peft, the first pattern that matches the end of the
        name counts."""
        if f"{name}.weight".endswith(self.parameters):
            name = f"{name}.weight"
        alpha = next(
            (alpha for key, alpha in self.patterns.items() if re.match(rf"(.*\.)?({key})$", name)), self.alpha
        )
        return alpha / (math.sqrt(rank) if self.has_root else rank)


def _map_modules(config: ModelConfig) -> dict[str, str]:
    """Map the name of a module, in a checkpoint or in memory, to the logical name of its map. An expert's
    index is ``{}``."""
    return {
        name_hf_module(name, family): name
        for name in compute_linear_shapes(config)
        for family in (IN_MEMORY, config.model_type)
    }


def _split_experts(
    module: str, a: Tensor, b: Tensor, config: ModelConfig, scales: Scales, folder: Path
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Split the adapter of a parameter of all experts into the adapters of its maps. A is [E r, in], and B is
    [out, r E] with ranks outside of experts (see ``peft_io``). gate_up_proj [E, 2 M, D] becomes gate and up,
    which share its A. Raises ValueError for factors that do not fit the model."""
    moe = config.moe
    layer = int(module.split(".")[2]) if re.match(r"model\.layers\.\d+\.", module) else -1
    if moe is None or layer not in moe.layers or a.shape[0] % moe.num_experts or b.shape[1] != a.shape[0]:
        raise ValueError(
            f"adapter {folder} has experts at {module} that this model does not have; check its base"
        )
    num_experts, width, hidden = moe.num_experts, moe.intermediate_size, config.hidden_size
    rank, prefix = a.shape[0] // num_experts, f"layers.{layer}.experts"
    factor_a = a.reshape(num_experts, rank, a.shape[1])
    factor_b = b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1)
    if (a.shape[1], b.shape[0]) == (width, hidden):
        return {f"{prefix}.down": (factor_a, factor_b, scales.get_scale(f"{module}.down_proj", rank))}
    if (a.shape[1], b.shape[0]) != (hidden, 2 * width):
        raise ValueError(
            f"adapter {folder} has factors of {module} with {a.shape[1]} inputs and {b.shape[0]} outputs; "
            f"this model's experts have {hidden} and {2 * width}, or {width} and {hidden}: check its base"
        )
    scale = scales.get_scale(f"{module}.gate_up_proj", rank)
    return {
        f"{prefix}.gate": (factor_a, factor_b[:, :width], scale),
        f"{prefix}.up": (factor_a, factor_b[:, width:], scale),
    }


def _stack_experts(
    by_expert: Mapping[int, tuple[Tensor, Tensor, float]], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, float]:
    """Stack the factors of modules of experts to A [E, r, in] and B [E, out, r], with zeros for what no
    module adapts. All get the scale of the first, so the B of another scale is multiplied by the quotient."""
    num_experts, outputs, inputs = shape
    rank = max(a.shape[0] for a, _, _ in by_expert.values())
    first_scale = next(iter(by_expert.values()))[2]
    factor_a, factor_b = torch.zeros(num_experts, rank, inputs), torch.zeros(num_experts, outputs, rank)
    for expert, (a, b, scale) in by_expert.items():
        factor_a[expert, : a.shape[0]] = a
        factor_b[expert, :, : a.shape[0]] = b if scale == first_scale else b * (scale / first_scale)
    return factor_a, factor_b, first_scale


def _build_spec(maps: Mapping[str, tuple[Tensor, Tensor, float]], config: ModelConfig) -> AdapterSpec:
    """Build the spec: the largest ranks, and the scale of the first map, whose factors then keep their
    bits."""
    ranks = {is_of_expert: [a.shape[-2] for name, (a, _, _) in maps.items()
                            if (".experts." in name) == is_of_expert]
             for is_of_expert in (False, True)}  # fmt: skip
    rank = max(ranks[False] or ranks[True])
    first_name, (_, _, scale) = next(iter(maps.items()))
    expert_rank = max(ranks[True]) if ranks[True] else None
    first_rank = expert_rank if ".experts." in first_name and expert_rank else rank
    return AdapterSpec(
        rank=rank,
        alpha=scale * first_rank,
        targets=tuple(sorted({name.split(".", 2)[2] for name in maps})),
        expert_scheme=ExpertScheme.PER_EXPERT,
        expert_rank=expert_rank,
    )


def _build_tensors(
    maps: Mapping[str, tuple[Tensor, Tensor, float]], spec: AdapterSpec, config: ModelConfig, folder: Path
) -> dict[str, Tensor]:
    """Return all factors of ``spec``: those of ``maps``, padded with zeros and rescaled, and zeros for other
    maps. Raises ValueError for factors that do not fit the model."""
    tensors: dict[str, Tensor] = {}
    for name, (a_shape, b_shape) in compute_adapter_shapes(config, spec).items():
        factor_a, factor_b = torch.zeros(a_shape), torch.zeros(b_shape)
        if name in maps:
            a, b, scale = maps[name]
            rank, target_scale = a.shape[-2], spec.get_scale(name)
            if (*a.shape[:-2], a.shape[-1], *b.shape[:-1]) != (*a_shape[:-2], a_shape[-1], *b_shape[:-1]):
                raise ValueError(
                    f"adapter {folder} has factors of {name} for {a.shape[-1]} inputs and {b.shape[-2]} "
                    f"outputs; this model has {a_shape[-1]} and {b_shape[-2]}; check its base"
                )
            factor_a[..., :rank, :] = a
            factor_b[..., :rank] = (
                b if math.isclose(target_scale, scale, rel_tol=1e-12) else b * (scale / target_scale)
            )
        tensors[f"{name}.A"], tensors[f"{name}.B"] = factor_a, factor_b
    return tensors
