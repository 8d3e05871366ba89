"""Read and write adapters: PEFT's format for other programs, our own format, and merged Hugging Face models.

    adapter_config.json  adapter_model.safetensors   for peft.PeftModel.from_pretrained(model, folder)
    ostinato_adapter.safetensors                     logical tensors, spec, fingerprint of the base: lossless

transformers v5 holds the experts of a layer as two parameters, gate_up_proj [E, 2M, D] and down_proj
[E, D, M], and PEFT adapts such a parameter (``target_parameters``) with one rank for all experts:
A [E * r, in], expert after expert, and B [out, r * E], rank after rank. So gate and up become one adapter
of twice the rank with a block-diagonal B, and factors that experts share in our format are repeated.

D hidden size, M expert width, E experts, r rank.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.inputs import parse_json
from ostinato.model import tensor_file
from ostinato.model.base import Base
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model, write_tensors
from ostinato.model.hf_names import name_hf_module
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.peft_foreign import CONFIG as PEFT_CONFIG
from ostinato.model.peft_foreign import IN_MEMORY, read_foreign
from ostinato.model.peft_foreign import TENSORS as PEFT_TENSORS
from ostinato.model.shapes import AdapterSpec, compute_linear_shapes
from ostinato.model.weights import compute_fingerprint_stride
from ostinato.run import atomic_write

LOGICAL = "ostinato_adapter.safetensors"
log = logging.getLogger(__name__)


def save_peft(
    adapters: Adapters, decoder: Decoder, folder: Path, base_name: str = "", *, peft: bool = True
) -> None:
    """Write the adapters of ``decoder`` into ``folder``, in our own format and, with ``peft``, in PEFT's.
    PEFT finds the base at ``base_name``.

    Each file is written completely or not at all; other files of the folder stay.
    """
    write_logical(adapters, folder / LOGICAL, compute_base_fingerprint(decoder), base_name)
    if peft:
        write_peft(adapters, folder, base_name)


def write_logical(adapters: Adapters, path: Path, fingerprint: str, base_name: str) -> None:
    """Write only the file that ``map_saved`` reads; ``fingerprint``: of the base, "" if it is not known."""
    facts = {"spec": asdict(adapters.spec), "base": fingerprint, "base_name": base_name}
    # a single entry: safetensors writes several in random order, and equal runs should give equal files
    write_tensors(path, _move_to_cpu(adapters.state_dict()), {"ostinato": json.dumps(facts)})


def write_peft(adapters: Adapters, folder: Path, base_name: str = "") -> None:
    """Write the two files that PEFT and vLLM read, ``PEFT_CONFIG`` and ``PEFT_TENSORS``, and no file of our
    own format."""
    write_tensors(folder / PEFT_TENSORS, _move_to_cpu(dict(_list_tensors(adapters))), {"format": "pt"})
    config = json.dumps(_build_config(adapters, base_name), indent=2) + "\n"
    atomic_write(folder / PEFT_CONFIG, config.encode())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedAdapter:
    """An adapter read from a folder: its factors by the names of ``Adapters.state_dict``, on the CPU. They
    may be in the memory of a mapped file."""

    folder: Path
    spec: AdapterSpec
    tensors: dict[str, Tensor]
    base: str  # fingerprint of the base that it was trained on; "" from PEFT, which saves none
    base_name: str

    def check_base(self, fingerprint: str) -> None:
        """Raise ValueError if the adapter was trained on other weights than these."""
        if self.base and self.base != fingerprint:
            raise ValueError(
                f"adapter {self.folder} belongs to another base ({self.base_name}); load it onto that one"
            )


def read_peft(folder: Path, config: ModelConfig) -> SavedAdapter:
    """Read an adapter that ``save_peft`` wrote, for any base, or that PEFT wrote, for a model of ``config``,
    with a warning that its base is not checked.

    Raises ValueError when ``folder`` does not exist or has neither, when a file is damaged, and for an
    adapter of PEFT that would compute another function here.
    """
    path = folder / LOGICAL
    if not folder.is_dir():
        raise ValueError(f"adapter {folder} does not exist; check the path")
    if not path.is_file() and (folder / PEFT_CONFIG).is_file():
        return _read_foreign(folder, config)
    if not path.is_file():
        raise ValueError(f"adapter {folder} has no {LOGICAL} and no {PEFT_CONFIG}; give an adapter's folder")
    return map_saved(path)


def map_saved(path: Path) -> SavedAdapter:
    """Read a file ``LOGICAL``, whatever its name; the factors are in the file's own memory, which is read as
    they are used. Raises ValueError for a file that is damaged or something else."""
    try:
        with path.open("rb") as file:  # the mapping ends with the last of its views
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        metadata, state = tensor_file.read_tensors(content)
        facts = parse_json(metadata["ostinato"])
        spec = AdapterSpec(**{**facts["spec"], "targets": tuple(facts["spec"]["targets"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not an adapter of ours ({error}); save it again") from error
    return SavedAdapter(
        folder=path.parent,
        spec=spec,
        tensors=state,
        base=facts.get("base", ""),
        base_name=facts.get("base_name") or "unnamed",
    )


def _read_foreign(folder: Path, config: ModelConfig) -> SavedAdapter:
    """Read an adapter of PEFT's, and log a warning that its base is not checked. Raises ValueError."""
    foreign = read_foreign(folder, config)
    dropout = f"; its lora_dropout of {foreign.dropout:g} is not used here" if foreign.dropout else ""
    log.warning(
        f"adapter {folder} was made by PEFT for {foreign.base_name}: whether this base has the same weights "
        f"is not known{dropout}"
    )
    return SavedAdapter(
        folder=folder, spec=foreign.spec, tensors=foreign.tensors, base="", base_name=foreign.base_name
    )


def load_peft(folder: Path, decoder: Decoder) -> Adapters:
    """Load the adapters in ``folder`` onto the device of ``decoder``: ours bit for bit as they were saved,
    PEFT's as ``peft_foreign`` converts them.

    Raises ValueError as ``read_peft`` does, when ours were trained on other weights than the decoder's, and
    when they do not fit it.
    """
    saved = read_peft(folder, decoder.config)
    saved.check_base(compute_base_fingerprint(decoder))
    adapters = init_adapters(decoder.config, saved.spec)
    with torch.no_grad():
        adapters.load_state_dict(saved.tensors)
    return adapters.to(decoder.device)


def export_merged(
    decoder: Decoder, adapters: Adapters, folder: Path, tokenizer_from: Path | None = None
) -> float:
    """Write the decoder with its adapters added to the weights, as a Hugging Face folder. ``tokenizer_from``
    and the errors are those of ``hf.save_model``.

    The sums are rounded to the decoder's dtype: only unmerged adapters are the exact policy. Returns the
    relative error of the update by this rounding (``compute_rounding_error``).
    """
    merged_decoder = merge_adapters(decoder, adapters)
    save_model(merged_decoder, folder, tokenizer_from)
    return compute_rounding_error(decoder, merged_decoder, adapters)


def compute_base_fingerprint(decoder: Base) -> str:
    """Compute a digest of the base: of the names and shapes of all tensors and some of their values, as bf16
    rounds them. So the same weights in another dtype have the same fingerprint.

    Fine-tuning changes all of a tensor, so a few values distinguish two bases; reading all of them would make
    every start and save as slow as loading the model.
    """
    quantised = decoder.quantised if isinstance(decoder, Decoder) else {}
    plain_samples = (
        (name, tuple(weight.shape), weight.detach().flatten()[:: compute_fingerprint_stride(weight.numel())])
        for name, weight in decoder.named_parameters()
    )
    # the values before quantising: an adapter may also be used on a base in another form
    code_samples = (
        (name, tuple(weight.shape), weight.samples)
        for name, weight in quantised.items()
        if weight.samples is not None
    )
    return compute_fingerprint(chain(plain_samples, code_samples))


def compute_fingerprint(samples: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> str:
    """Compute the digest, 16 hex digits, of (name, shape, sampled values) of all tensors, in any order."""
    digest = hashlib.sha256()
    for name, shape, values in sorted(samples, key=lambda sample: sample[0]):
        digest.update(f"{name} {shape}".encode())
        digest.update(values.bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _move_to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _build_config(adapters: Adapters, base_name: str) -> dict[str, Any]:
    """Build the content of PEFT's adapter_config.json."""
    spec = adapters.spec
    modules, parameters, ranks, alphas = set(), set(), {}, {}
    for name in adapters.tensors:
        module = _name_module(name)
        if ".experts." in name:
            prefix, _, role = name.rpartition(".")
            parameter = "mlp.experts.down_proj" if role == "down" else "mlp.experts.gate_up_proj"
            members = 1 if role == "down" else len(_find_gate_up(adapters, prefix))
            parameters.add(parameter)
            if (rank := members * spec.get_rank(name)) != spec.rank:
                ranks[parameter] = rank
            if members > 1:
                alphas[parameter] = members * spec.alpha
        elif ".attn." in name or adapters.config.moe is None:
            modules.add(module.rpartition(".")[2])
        else:
            # Not as modules: in a MoE model PEFT takes gate_proj and the like for the experts of transformers
            # v4 (peft.utils.transformers_weight_conversion).
            # model.layers.3.mlp.gate_proj -> mlp.gate_proj
            parameters.add(module.split(".", 3)[3] + ".weight")
    # peft 0.21 warns of a key that no module matches, though it applies the key to parameters. So a key for
    # parameters is also one for a module, whose own rank comes first.
    if modules:
        matching_module = min(modules)
        ranks = (
            {
                matching_module: spec.rank,
                **{f"{name}|{matching_module}": rank for name, rank in ranks.items()},
            }
            if ranks
            else {}
        )
        alphas = (
            {matching_module: spec.alpha, **{f"{name}|{matching_module}": a for name, a in alphas.items()}}
            if alphas
            else {}
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _list_tensors(adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, factor) of all factors as PEFT saves them."""
    for name, pair in adapters.tensors.items():
        if ".experts." not in name:
            yield from _name_factors(_name_module(name), *pair)
    for layer in range(adapters.config.num_layers):
        yield from _list_expert_tensors(adapters, layer)


def _list_expert_tensors(adapters: Adapters, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, factor) of the experts of a layer. PEFT nests the wrappers of a module in the order of its
    parameters: gate_up_proj is inside."""
    prefix, module = f"layers.{layer}.experts", f"model.layers.{layer}.mlp.experts"
    gate_up, down = _find_gate_up(adapters, prefix), adapters.tensors.get(f"{prefix}.down")
    if gate_up:
        width = compute_linear_shapes(adapters.config)[f"{prefix}.gate"][-2]
        gate_up_module = f"{module}.base_layer" if down else module
        yield from _name_factors(gate_up_module, *_flatten_experts(*_fuse_gate_up(adapters, gate_up, width)))
    if down:
        yield from _name_factors(module, *_flatten_experts(*_expand_experts(adapters, *down)))


def _find_gate_up(adapters: Adapters, prefix: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the adapters of the experts' gate and up, those of the two that are adapted."""
    names = {role: f"{prefix}.{role}" for role in ("gate", "up")}
    return {role: adapters.tensors[name] for role, name in names.items() if name in adapters.tensors}


def _fuse_gate_up(
    adapters: Adapters, gate_up: dict[str, tuple[Tensor, Tensor]], width: int
) -> tuple[Tensor, Tensor]:
    """Fuse the adapters of gate and up to an adapter of the stacked [gate; up]: their A are stacked, and B is
    block-diagonal."""
    pairs = {role: _expand_experts(adapters, *pair) for role, pair in gate_up.items()}
    stacked_a = torch.cat([a for a, _ in pairs.values()], dim=1)
    block_diagonal = stacked_a.new_zeros(len(stacked_a), 2 * width, stacked_a.shape[1])
    rank_start = 0
    for role, (a, b) in pairs.items():
        row_start = width if role == "up" else 0
        block_diagonal[:, row_start : row_start + width, rank_start : rank_start + a.shape[1]] = b
        rank_start += a.shape[1]
    return stacked_a, block_diagonal


def _expand_experts(adapters: Adapters, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Expand factors to A [E, r, in] and B [E, out, r]: what all experts share is repeated."""
    assert adapters.config.moe is not None
    num_experts = adapters.config.moe.num_experts
    return a.detach().expand(num_experts, *a.shape[-2:]), b.detach().expand(num_experts, *b.shape[-2:])


def _flatten_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten A [E, r, in] to [E * r, in] and B [E, out, r] to [out, r * E], as PEFT's ParamWrapper unfolds
    them."""
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)


def _name_factors(module: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"base_model.model.{module}.lora_A.weight", a
    yield f"base_model.model.{module}.lora_B.weight", b


def _name_module(name: str) -> str:
    return name_hf_module(name, IN_MEMORY)


def merge_adapters(decoder: Decoder, adapters: Adapters) -> Decoder:
    """Copy the decoder, and add alpha / r * B A to every adapted weight of the copy, in fp32 before
    rounding."""
    merged_decoder = copy.deepcopy(decoder)
    linears = merged_decoder.named_linears()
    with torch.no_grad():
        for name in adapters.tensors:
            weight = linears[name].weight
            weight.copy_(weight.float() + _compute_update(adapters, name).to(weight.device))
    return merged_decoder


def compute_rounding_error(decoder: Decoder, merged_decoder: Decoder, adapters: Adapters) -> float:
    """Compute the relative error of the update by rounding, |merged - decoder - update| / |update|, in
    Frobenius norms over all adapted weights. It is 0 without an update."""
    base_linears, merged_linears = decoder.named_linears(), merged_decoder.named_linears()
    squared_error = squared_update = 0.0
    with torch.no_grad():
        for name in adapters.tensors:
            update = _compute_update(adapters, name)
            change = (merged_linears[name].weight.float() - base_linears[name].weight.float()).to(
                update.device
            )
            squared_error += float((change - update).square().sum(dtype=torch.float64))
            squared_update += float(update.square().sum(dtype=torch.float64))
    return math.sqrt(squared_error / squared_update) if squared_update else 0.0


def _compute_update(adapters: Adapters, name: str) -> Tensor:
    """Compute alpha / r * B A, [out, in] or [E, out, in], in float32."""
    a, b = adapters.tensors[name]
    return adapters.spec.get_scale(name) * (b.float() @ a.float())
