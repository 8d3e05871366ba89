"""A model of ``transformers`` over data ranks, each with a part of the weights: torch's ``fully_shard``.

    layers               a part of every tensor on each rank; whole while the layer runs (FSDP2)
    embedding and head   rows of the vocabulary on each rank; never whole, as rows of tokens travel
    factors              flat pieces; whole while a step or a published policy uses them

transformers reads only each rank's slices of the files (``DistributedConfig``). All ranks make the same calls
at the same time, with rows of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.hf.factors import ModuleAdapters, PreparedSites, Site
from ostinato.hf.model import TransformersModel, is_mixture, load_checked
from ostinato.model.config_keys import read_quantisation
from ostinato.model.lora import Adapters, Lora
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.peft_io import compute_fingerprint
from ostinato.model.shapes import AdapterSpec
from ostinato.model.weights import compute_fingerprint_stride
from ostinato.parallel.collectives import Collectives, all_gather_ragged
from ostinato.parallel.fsdp import cut_piece, join_piece

_M_MMAP_THRESHOLD = -3  # of malloc.h
AXIS = "f"  # of ``parallel.layout``


def load_sharded(folder: Path, *, dtype: torch.dtype, device: str, links: Collectives) -> ShardedModel:
    """Load this rank's part of the model in ``folder``; all ranks together. Raises ValueError, in one
    sentence, for a model that cannot be divided, and as ``load_transformers`` does."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        raise ValueError(
            "parallel.layout with a model of transformers needs a newer one: pip install -U transformers"
        ) from error
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if read_quantisation(config.to_dict()) is not None or not [*folder.glob("*.safetensors")]:
        raise ValueError(
            f"parallel.layout divides models in plain safetensors, which {folder} is not; leave the layout "
            "empty, or save the model by save_pretrained first"
        )
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    if is_mixture(skeleton, config.get_text_config()):
        raise ValueError(
            f'{config.model_type} is a mixture of experts, and model.backend "transformers" replays no '
            'routes over ranks; leave parallel.layout empty, or use model.backend="native" if that has it'
        )
    plan = plan_sharding(skeleton)
    del skeleton
    if device == "cpu":
        _return_freed_memory()
    sharding = DistributedConfig(fsdp_size=links.size(AXIS), fsdp_plan=plan)
    model = load_checked(folder, dtype=dtype, distributed_config=sharding)
    divide_vocabulary(model, links)
    return ShardedModel(model, links)


def _return_freed_memory() -> None:
    """Make glibc return every block of a megabyte or more to the system when it is freed, from now on in this
    process; elsewhere do nothing. Otherwise gathered layers would stay in its heap, several times over."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def plan_sharding(model: Any) -> dict[str, str]:
    """Return the plan of transformers, by module name, a layer's number as "*": each layer, embedding, head,
    and other module with parameters is sharded alone."""
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names[id(part)] for part in (model.get_input_embeddings(), model.get_output_embeddings())]
    layers = {
        f"{name}.{number}"
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and not re.search(r"\.\d+\.", f"{name}.")
        for number in range(len(part))
    }
    others = {
        name
        for name, module in model.named_modules()
        if name
        and [*module.parameters(recurse=False)]
        and not any(f"{name}.".startswith(f"{layer}.") for layer in layers)
    }
    plan = {re.sub(r"\.\d+$", ".*", name): "free_full_weight" for name in layers | others}
    return plan | dict.fromkeys(ends, "keep_full_weight")


def divide_vocabulary(model: Any, links: Collectives) -> None:
    """Replace embedding and head of a sharded model, in place, by modules that keep this rank's rows. Raises
    ValueError for an embedding of another kind, and for a head with a bias."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind = type(embedding).__mro__[2]  # behind the class of fully_shard
    scale = getattr(embedding, "embed_scale", None)
    if (kind is not nn.Embedding and scale is None) or head.bias is not None:
        reason = (
            "a bias of its head" if head.bias is not None else f"an embedding of the class {kind.__name__}"
        )
        raise ValueError(
            f"{type(model).__name__} has {reason}, which parallel.layout does not divide; leave it empty"
        )
    rows = nn.Parameter(embedding.weight.to_local().detach(), requires_grad=False)
    is_tied = head.weight is embedding.weight
    head_rows = rows if is_tied else nn.Parameter(head.weight.to_local().detach(), requires_grad=False)
    model.set_input_embeddings(DividedEmbedding(rows, len(embedding.weight), links, scale))
    model.set_output_embeddings(DividedHead(head_rows, len(head.weight), links))


def gather_rows(x: Tensor, links: Collectives) -> tuple[Tensor, int]:
    """Return ([n R, ...], R): the rows of all n ranks, those of each padded with zeros to the longest, R."""
    size = torch.tensor([len(x)], device=x.device)
    longest = int(links.max_(size, AXIS))
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, longest - len(x)))
    return links.gather(padded, AXIS), longest


class DividedEmbedding(nn.Module):
    """A frozen embedding of which this rank keeps ``rows`` [V / n, D] of ``vocab_size``. Each rank looks up
    the tokens of all, and gets its own from the sum."""

    def __init__(self, rows: nn.Parameter, vocab_size: int, links: Collectives, scale: Tensor | None) -> None:
        super().__init__()
        self.weight, self.num_embeddings, self._links, self._scale = rows, vocab_size, links, scale

    def forward(self, ids: Tensor) -> Tensor:
        every, _ = gather_rows(ids.flatten(), self._links)
        own = every - -(-self.num_embeddings // self._links.size(AXIS)) * self._links.place(AXIS)
        is_here = (own >= 0) & (own < len(self.weight))
        values = F.embedding(own.where(is_here, 0), self.weight).masked_fill(~is_here[:, None], 0)
        values = self._links.scatter(values, AXIS)[: ids.numel()].view(*ids.shape, self.weight.shape[1])
        return values if self._scale is None else values * self._scale.to(values.dtype)


class DividedHead(nn.Linear):
    """A frozen head of which this rank keeps ``rows`` [V / n, D] of ``vocab_size``. A forward computes logits
    of all tokens [..., V], without gradients."""

    def __init__(self, rows: nn.Parameter, vocab_size: int, links: Collectives) -> None:
        super().__init__(rows.shape[1], 1, bias=False, device="meta")
        self.weight, self.out_features, self._links = rows, vocab_size, links

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        ranks, hidden = self._links.size(AXIS), input.reshape(-1, input.shape[-1])
        every, longest = gather_rows(hidden, self._links)
        width = -(-self.out_features // ranks)
        products = F.linear(every, self.weight)
        products = F.pad(products, (0, width - products.shape[1]))
        counts = [longest] * ranks  # each rank gets its own rows, by part of the vocabulary
        parts = self._links.exchange(products, counts, counts, AXIS).view(ranks, longest, width)
        logits = parts.transpose(0, 1).reshape(longest, ranks * width)[: len(hidden), : self.out_features]
        return logits.reshape(*input.shape[:-1], self.out_features)


class ShardedModel(TransformersModel):
    """A ``TransformersModel`` of ``load_sharded``. ``logits`` and ``head_weight`` are of this rank's part of
    the vocabulary. Raises ValueError for a model whose rows cannot be packed: its ranks would run different
    numbers of passes."""

    def __init__(self, model: nn.Module, links: Collectives) -> None:
        self.links = links
        super().__init__(model)
        if not self.packs:
            raise ValueError(
                f"{self.config.model_type} computes one sequence a pass, which parallel.layout does not "
                "divide; leave it empty"
            )

    @property
    def vocabulary(self) -> range:
        """The tokens of this rank's part."""
        start = -(-self._head.out_features // self.links.size(AXIS)) * self.links.place(AXIS)
        return range(start, start + len(self._head.weight))

    def logits(self, hidden: Tensor, *, ops: Ops = TORCH_OPS) -> Tensor:
        return self._apply_head_rule(F.linear(hidden, self._head.weight))

    def run_idle(self) -> None:
        """Run a pass of one token, for the sake of ranks with more passes."""
        self.model.forward(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False
        )

    def _test_packing(self, text_config: Any) -> bool:
        """As ``TransformersModel`` does; gathered layers are freed if the test has failed in one."""
        packs = super()._test_packing(text_config)
        for part in self.model.modules():
            if hasattr(part, "reshard"):
                part.reshard()
        return packs

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Compute ``base_fingerprint`` of the whole model; all ranks together."""
        ranks, place = self.links.size(AXIS), self.links.place(AXIS)
        shapes, indices, samples = dict[str, tuple[int, ...]](), dict[str, Tensor](), dict[int, Tensor]()
        embedding: Any = self.model.get_input_embeddings()
        sizes = {id(self._head.weight): int(self._head.out_features)}
        sizes[id(embedding.weight)] = int(embedding.num_embeddings)
        parameters: Any = self.named_parameters()  # of DTensor's, but for the ends
        for number, (name, weight) in enumerate(parameters):
            rows = sizes[id(weight)] if id(weight) in sizes else int(weight.shape[0])
            shapes[name] = (rows, *weight.shape[1:])
            indices[name] = torch.arange(
                0, prod(shapes[name]), compute_fingerprint_stride(prod(shapes[name]))
            )
            part = weight if id(weight) in sizes else weight.to_local()
            own = indices[name] - -(-rows // ranks) * place * prod(weight.shape[1:])
            is_here = (own >= 0) & (own < part.numel())
            values = torch.zeros(len(own))
            values[is_here] = part.flatten()[own[is_here].to(part.device)].bfloat16().float().cpu()
            samples[number] = values.to(self.device)
        lengths = [(len(places),) for places in indices.values()]
        whole = all_gather_ragged(self.links, lengths, samples, dtype=torch.float32, device=self.device)
        return compute_fingerprint(
            (name, shapes[name], values) for name, values in zip(shapes, whole, strict=True)
        )


class PieceAdapters(ModuleAdapters):
    """Factors of which each rank keeps a flat piece; ``prepare`` gathers them, on all ranks together, and its
    backward gives each rank the sum of its piece's gradients."""

    def __init__(
        self,
        spec: AdapterSpec,
        tensors: Mapping[str, tuple[Tensor, Tensor]],
        sites: Sequence[Site],
        shapes: Mapping[str, tuple[int, ...]],
        links: Collectives,
    ) -> None:
        super().__init__(spec, tensors, tuple(sites))  # type: ignore[arg-type]
        self.shapes, self._links = shapes, links

    @classmethod
    def cut(cls, whole: ModuleAdapters, links: Collectives) -> PieceAdapters:
        """Keep copies of this rank's pieces."""
        shapes = {name: tuple(leaf.shape) for name, leaf in whole.list_leaves().items()}
        pieces = {
            name: (
                cut_piece(a.detach(), links).requires_grad_(),
                cut_piece(b.detach(), links).requires_grad_(),
            )
            for name, (a, b) in whole.tensors.items()
        }
        return cls(whole.spec, pieces, whole.config, shapes, links)

    def scale(self, name: str) -> float:
        return self.spec.alpha / self.shapes[f"{name}.A"][-2]

    def copy_leaves(self, leaves: Mapping[str, Tensor], config: Any) -> Adapters:
        """Copy whole factors; ``config`` is not used."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in leaves)
        pairs = {name: (leaves[f"{name}.A"].clone(), leaves[f"{name}.B"].clone()) for name in names}
        return ModuleAdapters(self.spec, pairs, self.config)

    def detach_copy(self) -> PieceAdapters:
        pairs = {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.tensors.items()}
        return PieceAdapters(self.spec, pairs, self.config, self.shapes, self._links)

    def prepare(self, dtype: torch.dtype) -> PreparedSites:  # type: ignore[override]
        leaves = self.list_leaves()
        by_rank = self._links.all_gather(torch.cat([*leaves.values()]).to(dtype), AXIS)
        columns = by_rank.view(self._links.size(AXIS), -1).split(
            [len(leaf) for leaf in leaves.values()], dim=1
        )
        whole = {
            name: column.reshape(-1)[: prod(self.shapes[name])].view(self.shapes[name])
            for name, column in zip(leaves, columns, strict=True)
        }
        return PreparedSites(
            {name: Lora(whole[f"{name}.A"], whole[f"{name}.B"], self.scale(name)) for name in self.tensors}
        )


class PieceLeaves:
    """``train.leaves.Leaves`` of ``PieceAdapters``, whose gradients are sums over all ranks already."""

    def __init__(self, adapters: PieceAdapters, links: Collectives) -> None:
        self.named, self.shapes, self._links = adapters.list_leaves(), adapters.shapes, links

    def reduce(self) -> Tensor:
        """Return the norm over all pieces; a leaf without a gradient gets one of zeros."""
        squares = []
        for leaf in self.named.values():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            squares.append(torch.linalg.vector_norm(leaf.grad, dtype=torch.float64).square())
        return self._links.sum_(torch.stack(squares).sum().reshape(1), AXIS).sqrt()[0]

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join tensors of leaves one after another, on the first rank and its CPU; empty on the others."""
        whole_by_name = {}
        for name, piece in own.items():
            tensor = join_piece(piece, self.shapes[name], self._links) if piece.ndim else piece.clone()
            if self._links.place(AXIS) == 0:
                whole_by_name[name] = tensor.cpu()
        return whole_by_name

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's piece; a scalar is its own."""
        return cut_piece(whole, self._links) if whole.ndim else whole
