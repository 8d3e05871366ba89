"""LoRA on a model of ``transformers``: where PEFT would place it, and PEFT's folders in and out.

A place is a linear map, or one parameter of all experts of a layer ([E, out, in], or [E, in, out] where its
module says ``is_transposed``). Its factors are A [r, in] and B [out, r], of experts A [E, r, in] and
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
from ostinato.model.peft_foreign import CONFIG, TENSORS, Scale, read_pairs, read_settings
from ostinato.model.shapes import ROLES, AdapterSpec
from ostinato.run import atomic_write

_LAYER = re.compile(r"(?:^|\.)\d+\.")
_OTHER_INPUTS = re.compile(r"vision|visual|audio|image|speech|multi_modal|mtp", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|conv|recurrent|temporal|delta", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place for factors. ``experts``: of a parameter of so many; None: a linear map [out, in]."""

    name: str
    role: str  # of model.shapes.ROLES
    outputs: int
    inputs: int
    experts: int | None = None
    transposed: bool = False

    @property
    def module(self) -> str:
        """The module that is called."""
        return self.name if self.experts is None else self.name.rpartition(".")[0]

    def is_meant(self, targets: Sequence[str]) -> bool:
        """Do targets of ``AdapterSpec`` name it: its role, or its role and the last part of its name?"""
        last = self.name.rpartition(".")[2]
        names = {self.role, f"{self.role}.{last}", f"{self.role}.{last.removesuffix('_proj')}"}
        return not names.isdisjoint(targets)


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """All places in the layers of the language model, in the model's order."""
    found = list[Site]()
    for name, module in model.named_modules():
        if not _LAYER.search(f"{name}.") or _OTHER_INPUTS.search(name):
            continue
        if isinstance(module, nn.Linear) and not _is_beside(model, name):
            outputs, inputs = module.weight.shape
            found.append(Site(name=name, role=role_of(name), outputs=outputs, inputs=inputs))
            continue
        turned = bool(getattr(module, "is_transposed", False))
        for own, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and weight.is_floating_point() and "expert" in type(module).__name__.lower():
                number, *sizes = weight.shape
                inputs, outputs = sizes if turned else reversed(sizes)
                found.append(
                    Site(
                        name=f"{name}.{own}",
                        role="experts",
                        outputs=outputs,
                        inputs=inputs,
                        experts=number,
                        transposed=turned,
                    )
                )
    return tuple(found)


def _is_beside(model: nn.Module, name: str) -> bool:
    """The last product of a Mamba layer: its kernels take the weight and call no module; PEFT refuses it."""
    parent, _, last = name.rpartition(".")
    kind = type(model.get_submodule(parent)).__name__.lower()
    return last == "out_proj" and ("mamba" in kind or "mixer" in kind)


def role_of(name: str) -> str:
    """One of ROLES by a module's name."""
    last = name.rpartition(".")[2]
    if last in ("gate", "router", "shared_expert_gate", "wg") or ".router" in name:
        return "router"
    if "shared" in name:
        return "shared"
    if "expert" in name:
        return "experts"
    return "attn" if _ATTENTION.search(name.rpartition("layers.")[2]) else "mlp"


class ModuleAdapters(Adapters):
    """Factors by site. ``config`` are the sites."""

    config: Any  # tuple[Site, ...]

    def scale(self, name: str) -> float:
        """alpha / r, r being what the factors have."""
        return self.spec.alpha / self.tensors[name][0].shape[-2]

    def copy_of(self, leaves: Mapping[str, Tensor], config: Any) -> Adapters:
        """See ``Adapters``; the sites stay those of these factors."""
        return super().copy_of(leaves, self.config)

    def prepared(self, dtype: torch.dtype) -> PreparedSites:  # type: ignore[override]
        """The factors in the dtype that a forward uses."""
        return PreparedSites(
            {name: Lora(a.to(dtype), b.to(dtype), self.scale(name)) for name, (a, b) in self.tensors.items()}
        )


@dataclass(frozen=True, slots=True)
class PreparedSites:
    """``model.lora.Prepared`` by site."""

    at: Mapping[str, Lora]

    def prepared(self, dtype: torch.dtype) -> PreparedSites:
        return self

    def changed(self, change: Callable[[Tensor], Tensor]) -> PreparedSites:
        """With ``change`` of every factor in its place."""
        return PreparedSites(
            {name: Lora(change(one.a), change(one.b), one.scale) for name, one in self.at.items()}
        )


def init_sites(
    sites: Sequence[Site], spec: AdapterSpec, seed: int, device: torch.device | str
) -> ModuleAdapters:
    """Fresh factors, drawn on the CPU as ``model.lora.init_adapters`` does: the policy is the base.

    Raises ValueError where a target that is no role names no place, or none is left.
    """
    chosen = [site for site in sites if site.is_meant(spec.targets)]
    for target in spec.targets:
        if target not in ROLES and not any(site.is_meant([target]) for site in sites):
            known = sorted({f"{site.role}.{site.name.rpartition('.')[2]}" for site in sites})
            raise ValueError(f"adapter.targets has {target!r}; this model has {', '.join(known)}")
    if not chosen:
        raise ValueError(
            f"adapter.targets {list(spec.targets)} name no linear map of this model; use attn, mlp"
        )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for site in chosen:
        lead = () if site.experts is None else (site.experts,)
        rank = (spec.expert_rank or spec.rank) if site.role == "experts" else spec.rank
        a = torch.rand(*lead, rank, site.inputs, generator=generator) * 2 - 1
        a = (a / math.sqrt(site.inputs)).to(device)
        b = torch.zeros(*lead, site.outputs, rank, device=device)
        tensors[site.name] = (a.requires_grad_(), b.requires_grad_())
    return ModuleAdapters(spec, tensors, tuple(chosen))  # type: ignore[arg-type]


def write_folder(adapters: ModuleAdapters, folder: Path, base_name: str) -> None:
    """What ``peft.PeftModel.from_pretrained(model, folder)`` reads, float32: lossless."""
    tensors = {}
    for site, module in _nested(adapters.config):
        a, b = (factor.detach() for factor in adapters.tensors[site.name])
        if site.experts is not None:  # expert after expert; rank after rank (PEFT's ParamWrapper)
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
        for part, factor in (("A", a), ("B", b)):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = factor.cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors, {"format": "pt"})
    mixture = any(site.role == "experts" for site in adapters.config)
    modules, parameters, ranks = list[str](), list[str](), dict[str, int]()
    for site in adapters.config:
        # in a mixture PEFT takes modules named gate_proj and the like for experts of older versions
        as_module = site.experts is None and (site.role == "attn" or not mixture)
        name = site.name if as_module or site.experts is not None else f"{site.name}.weight"
        (modules if as_module else parameters).append(name)
        if (rank := adapters.tensors[site.name][0].shape[-2]) != adapters.spec.rank:
            ranks[re.escape(name)] = rank
    about = {
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
    atomic_write(folder / CONFIG, (json.dumps(about, indent=2) + "\n").encode())


def read_folder(folder: Path, sites: Sequence[Site], device: torch.device | str) -> ModuleAdapters:
    """The adapter that PEFT, or we, wrote for a model with these sites. Raises ValueError with what of it is
    not understood: it would be another function."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"adapter {folder} has no {CONFIG}; give the folder of a PEFT adapter")
    settings, pairs = read_settings(folder), read_pairs(folder)
    scale, rank = Scale.of(settings), int(settings.get("r") or 8)
    alpha, tensors = float(settings.get("lora_alpha") or 8), dict[str, tuple[Tensor, Tensor]]()
    adapted = [site for site in sites if site.experts is None or _is_adapted(site, settings)]
    for site, module in _nested(adapted):
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
        own, size = alpha / a.shape[-2], scale.of_map(site.name, a.shape[-2])
        b = b if math.isclose(own, size, rel_tol=1e-12) else b * (size / own)
        tensors[site.name] = (a.to(device), b.to(device))
    if pairs:
        raise ValueError(
            f"adapter {folder} adapts {next(iter(pairs))}, which is no linear map of a layer of this model; "
            "merge it into its base by peft (merge_and_unload)"
        )
    chosen = tuple(site for site in adapted if site.name in tensors)
    roles = tuple(sorted({site.role for site in chosen}))
    spec = AdapterSpec(rank=rank, alpha=alpha, targets=roles)
    return ModuleAdapters(spec, tensors, chosen)  # type: ignore[arg-type]


def _nested(sites: Sequence[Site]) -> Iterator[tuple[Site, str]]:
    """(site, module by PEFT's name): wrappers of several parameters of a module lie inside each other, the
    first innermost."""
    for site in sites:
        if site.experts is None:
            yield site, site.name
            continue
        same = [one.name for one in sites if one.experts is not None and one.module == site.module]
        outside = len(same) - 1 - same.index(site.name)
        yield site, site.module + ".base_layer" * outside


def _is_adapted(site: Site, settings: Mapping[str, Any]) -> bool:
    """Do the ``target_parameters`` of PEFT name this parameter of experts?"""
    return any(site.name.endswith(one) for one in settings.get("target_parameters") or ())
