"""LoRA on a model of ``transformers``: in the places of PEFT, read from and written to PEFT's folders.

A place is a linear map, or a parameter of all experts of a layer ([E, out, in], or [E, in, out] if its module
has ``is_transposed``). Its factors are A [r, in] and B [out, r], of experts A [E, r, in] and
B [E, out, r]; the update is alpha / r * B A (arXiv 2106.09685). Names are those of modules and parameters.

Costs: the update of experts is added to a copy of the layer's experts in every forward, as PEFT does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.model.hf import write_tensors
from ostinato.model.lora import Adapters, Lora
from ostinato.model.peft_foreign import CONFIG, TENSORS, Scales, read_pairs, read_settings
from ostinato.model.shapes import ROLES, AdapterSpec
from ostinato.run import atomic_write

_LAYER = re.compile(r"(?:^|\.)\d+\.")
_OTHER_INPUTS = re.compile(r"vision|visual|audio|image|speech|multi_modal|mtp", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|conv|recurrent|temporal|delta", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place for factors. ``experts``: the number of experts of a parameter; None: a linear map [out,
    in]."""

    name: str
    role: str  # of model.shapes.ROLES
    outputs: int
    inputs: int
    experts: int | None = None
    transposed: bool = False

    @property
    def module(self) -> str:
        """The name of the module that is called."""
        return self.name if self.experts is None else self.name.rpartition(".")[0]

    def is_targeted(self, targets: Sequence[str]) -> bool:
        """Return whether one of the targets of ``AdapterSpec`` is its role, or its role and the last part of
        its name, with or without "_proj"."""
        leaf = self.name.rpartition(".")[2]
        names = {self.role, f"{self.role}.{leaf}", f"{self.role}.{leaf.removesuffix('_proj')}"}
        return not names.isdisjoint(targets)


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """Return all places in the layers of the language model, in the model's order. Places of other inputs,
    and outputs of Mamba, are left out."""
    sites = list[Site]()
    for name, module in model.named_modules():
        if not _LAYER.search(f"{name}.") or _OTHER_INPUTS.search(name):
            continue
        if isinstance(module, nn.Linear) and not _is_mamba_output(model, name):
            outputs, inputs = module.weight.shape
            sites.append(Site(name=name, role=find_role(name), outputs=outputs, inputs=inputs))
            continue
        is_transposed = bool(getattr(module, "is_transposed", False))
        for parameter, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and weight.is_floating_point() and "expert" in type(module).__name__.lower():
                number, *sizes = weight.shape
                inputs, outputs = sizes if is_transposed else reversed(sizes)
                sites.append(
                    Site(
                        name=f"{name}.{parameter}",
                        role="experts",
                        outputs=outputs,
                        inputs=inputs,
                        experts=number,
                        transposed=is_transposed,
                    )
                )
    return tuple(sites)


def _is_mamba_output(model: nn.Module, name: str) -> bool:
    """Return whether this is the last product of a Mamba layer. Its kernels take the weight without calling
    the module, and PEFT refuses it."""
    parent, _, leaf = name.rpartition(".")
    kind = type(model.get_submodule(parent)).__name__.lower()
    return leaf == "out_proj" and ("mamba" in kind or "mixer" in kind)


def find_role(name: str) -> str:
    """Return the role, of ROLES, of a module by its name."""
    leaf = name.rpartition(".")[2]
    if leaf in ("gate", "router", "shared_expert_gate", "wg") or ".router" in name:
        return "router"
    if "shared" in name:
        return "shared"
    if "expert" in name:
        return "experts"
    return "attn" if _ATTENTION.search(name.rpartition("layers.")[2]) else "mlp"


class ModuleAdapters(Adapters):
    """Factors by site; ``config`` is the tuple of sites."""

    config: Any  # tuple[Site, ...]

    def scale(self, name: str) -> float:
        """Return alpha / r, with the rank r of these factors."""
        return self.spec.alpha / self.tensors[name][0].shape[-2]

    def copy_leaves(self, leaves: Mapping[str, Tensor], config: Any) -> Adapters:
        """Copy as ``Adapters`` does, with the sites of these factors; ``config`` is not used."""
        return super().copy_leaves(leaves, self.config)

    def prepare(self, dtype: torch.dtype) -> PreparedSites:  # type: ignore[override]
        """Return the factors in the dtype that a forward uses."""
        return PreparedSites(
            {name: Lora(a.to(dtype), b.to(dtype), self.scale(name)) for name, (a, b) in self.tensors.items()}
        )


@dataclass(frozen=True, slots=True)
class PreparedSites:
    """``model.lora.Prepared`` by site."""

    at: Mapping[str, Lora]

    def prepare(self, dtype: torch.dtype) -> PreparedSites:
        """Return itself: it is prepared already."""
        return self

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> PreparedSites:
        """Return the same factors, each replaced by ``change(factor)``."""
        return PreparedSites(
            {name: Lora(change(lora.a), change(lora.b), lora.scale) for name, lora in self.at.items()}
        )


def init_sites(
    sites: Sequence[Site], spec: AdapterSpec, seed: int, device: torch.device | str
) -> ModuleAdapters:
    """Draw new factors on the CPU, as ``model.lora.init_adapters`` does, for the sites that are targeted. B
    is zero, so that the policy is the base.

    Raises ValueError if a target that is no role names no place, or if no place is left.
    """
    adapted_sites = [site for site in sites if site.is_targeted(spec.targets)]
    for target in spec.targets:
        if target not in ROLES and not any(site.is_targeted([target]) for site in sites):
            names = sorted({f"{site.role}.{site.name.rpartition('.')[2]}" for site in sites})
            raise ValueError(f"adapter.targets has {target!r}; this model has {', '.join(names)}")
    if not adapted_sites:
        raise ValueError(
            f"adapter.targets {list(spec.targets)} name no linear map of this model; use attn, mlp"
        )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for site in adapted_sites:
        leading = () if site.experts is None else (site.experts,)
        rank = (spec.expert_rank or spec.rank) if site.role == "experts" else spec.rank
        a = torch.rand(*leading, rank, site.inputs, generator=generator) * 2 - 1
        a = (a / math.sqrt(site.inputs)).to(device)
        b = torch.zeros(*leading, site.outputs, rank, device=device)
        tensors[site.name] = (a.requires_grad_(), b.requires_grad_())
    return ModuleAdapters(spec, tensors, tuple(adapted_sites))  # type: ignore[arg-type]


def write_folder(adapters: ModuleAdapters, folder: Path, base_name: str) -> None:
    """Write a folder for ``peft.PeftModel.from_pretrained(model, folder)``, in float32, so without loss. The
    folder is created if needed, and its old files are replaced."""
    tensors = {}
    for site, module in _nest_modules(adapters.config):
        a, b = (factor.detach() for factor in adapters.tensors[site.name])
        if site.experts is not None:  # order of PEFT's ParamWrapper: A by expert, B by rank
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
        for part, factor in (("A", a), ("B", b)):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = factor.cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors, {"format": "pt"})
    is_mixture = any(site.role == "experts" for site in adapters.config)
    modules, parameters, ranks = list[str](), list[str](), dict[str, int]()
    for site in adapters.config:
        # in a mixture PEFT takes modules named gate_proj and the like for experts of older versions
        as_module = site.experts is None and (site.role == "attn" or not is_mixture)
        name = site.name if as_module or site.experts is not None else f"{site.name}.weight"
        (modules if as_module else parameters).append(name)
        if (rank := adapters.tensors[site.name][0].shape[-2]) != adapters.spec.rank:
            ranks[re.escape(name)] = rank
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapters.spec.rank,
        "lora_alpha": adapters.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": ranks,
        "alpha_pattern": {},
    }
    atomic_write(folder / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def read_folder(folder: Path, sites: Sequence[Site], device: torch.device | str) -> ModuleAdapters:
    """Read an adapter that PEFT, or ``write_folder``, wrote for a model with these sites. Factors are scaled
    where PEFT's alpha / r is another one. Raises ValueError, naming the cause, for a folder without a
    config, half of a pair, other sizes, maps that are no sites, or settings that compute another function
    here."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"adapter {folder} has no {CONFIG}; give the folder of a PEFT adapter")
    settings, pairs = read_settings(folder), read_pairs(folder)
    scale, rank = Scales.of(settings), int(settings.get("r") or 8)
    alpha, tensors = float(settings.get("lora_alpha") or 8), dict[str, tuple[Tensor, Tensor]]()
    candidates = [site for site in sites if site.experts is None or _is_adapted(site, settings)]
    for site, module in _nest_modules(candidates):
        if (factors := pairs.pop(module, None)) is None:
            continue
        if factors.keys() != {"A", "B"}:
            raise ValueError(f"adapter {folder} has only half of the factors of {module}; save it again")
        a, b = factors["A"].float(), factors["B"].float()
        if site.experts is not None and a.shape[0] % site.experts == 0:
            a = a.unflatten(0, (site.experts, -1))
            b = b.unflatten(1, (-1, site.experts)).permute(2, 0, 1).contiguous()
        if (a.shape[-1], b.shape[-2]) != (site.inputs, site.outputs):
            raise ValueError(
                f"adapter {folder} has factors of {site.name} for {a.shape[-1]} inputs and {b.shape[-2]} "
                f"outputs; this model has {site.inputs} and {site.outputs}; check its base"
            )
        own_scale, target_scale = alpha / a.shape[-2], scale.get_scale(site.name, a.shape[-2])
        b = b if math.isclose(own_scale, target_scale, rel_tol=1e-12) else b * (target_scale / own_scale)
        tensors[site.name] = (a.to(device), b.to(device))
    if pairs:
        raise ValueError(
            f"adapter {folder} adapts {next(iter(pairs))}, which is no linear map of a layer of this model; "
            "merge it into its base by peft (merge_and_unload)"
        )
    trained_sites = tuple(site for site in candidates if site.name in tensors)
    roles = tuple(sorted({site.role for site in trained_sites}))
    spec = AdapterSpec(rank=rank, alpha=alpha, targets=roles)
    return ModuleAdapters(spec, tensors, trained_sites)  # type: ignore[arg-type]


def _nest_modules(sites: Sequence[Site]) -> Iterator[tuple[Site, str]]:
    """Yield (site, name of its module in PEFT). PEFT nests the wrappers of several parameters of a module,
    the first one innermost."""
    for site in sites:
        if site.experts is None:
            yield site, site.name
            continue
        names = [
            other_site.name
            for other_site in sites
            if other_site.experts is not None and other_site.module == site.module
        ]
        depth = len(names) - 1 - names.index(site.name)
        yield site, site.module + ".base_layer" * depth


def _is_adapted(site: Site, settings: Mapping[str, Any]) -> bool:
    """Return whether the ``target_parameters`` of PEFT name this parameter of experts."""
    return any(site.name.endswith(target) for target in settings.get("target_parameters") or ())
