"""Low-rank adapters on a frozen decoder: fp32 factors by logical name, applied unmerged.

``Adapters`` are trained, saved and exported: one (A, B) per logical linear map. The decoder stores
q, k, v (and gate, up) as one matrix, so before a forward the factors are ``prepared``: the A of one matrix
are stacked, its B become one block-diagonal matrix, both cast to the compute dtype. That is a
differentiable function of the fp32 leaves; it costs milliseconds, so an engine does it once per publish.

Update of a linear map W [out, in]: alpha / r * B A, with A [r, in] and B [out, r] (arXiv 2106.09685).
Experts: ``per_expert`` A [E, r, in], B [E, out, r]; ``shared_outer`` shares the factor that touches the
hidden dimension over the experts: A of gate and up, B of down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model.config import ModelConfig
from ostinato.model.gemm import Gemm
from ostinato.model.moe import ExpertLora
from ostinato.model.shapes import STACKED, AdapterSpec, compute_adapter_shapes, compute_layer_shapes
from ostinato.model.weights import Weight, load_saved_weight, save_weight

Product = Callable[..., Tensor]
TORCH_GEMM = Gemm(nt=F.linear, nn=torch.mm)


class Adapters:
    """The trained part of a policy: ``tensors[logical name] = (A, B)``, fp32 leaves."""

    def __init__(
        self, spec: AdapterSpec, tensors: Mapping[str, tuple[Tensor, Tensor]], config: ModelConfig
    ) -> None:
        self.spec = spec
        self._tensors = dict(tensors)
        self.config = config

    @property
    def tensors(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        return self._tensors

    def list_leaves(self) -> dict[str, Tensor]:
        """Return the trained tensors by name: ``{name}.A`` and ``{name}.B``."""
        pairs = self.tensors.items()
        return {f"{name}.{part}": leaf for name, pair in pairs for part, leaf in zip("AB", pair, strict=True)}

    def copy_leaves(self, leaves: Mapping[str, Tensor], config: Any) -> Adapters:
        """Make adapters of ``config`` with copies of ``leaves``, to be published while training goes on."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in leaves)
        pairs = {name: (leaves[f"{name}.A"].clone(), leaves[f"{name}.B"].clone()) for name in names}
        return type(self)(self.spec, pairs, config)

    def parameters(self) -> Iterator[Tensor]:
        yield from self.list_leaves().values()

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the factors as ``{name}.A`` and ``{name}.B``, detached and in the same memory."""
        return {
            f"{name}.{part}": t.detach()
            for name, pair in self.tensors.items()
            for part, t in zip("AB", pair, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy values in. Raises ValueError naming a tensor that is missing, extra or of another shape; a
        wrong shape may be found after other tensors have been copied."""
        tensors = self.state_dict()
        if names := sorted(tensors.keys() ^ state.keys()):
            fault = "missing from" if names[0] in tensors else "unknown in"
            raise ValueError(
                f"adapter tensor {names[0]} is {fault} this adapter; use the base and spec it was saved with"
            )
        for name, tensor in tensors.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"adapter tensor {name} has shape {tuple(state[name].shape)}, this base needs "
                    f"{tuple(tensor.shape)}; use the base and spec that it was saved with"
                )
            tensor.copy_(state[name])

    def detach_copy(self) -> Adapters:
        """Return an independent copy without gradients, to be published while training goes on."""
        return type(self)(
            self.spec,
            {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.tensors.items()},
            self.config,
        )

    def to(self, device: torch.device | str) -> Adapters:
        """Return the same adapters on ``device``. The leaves are new, and need a gradient if the old ones
        do."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

        return type(self)(
            self.spec, {name: (move(a), move(b)) for name, (a, b) in self.tensors.items()}, self.config
        )

    def prepare(self, dtype: torch.dtype) -> Prepared:
        """Return the factors in the shape and dtype that a forward uses, as a function of the leaves that
        autograd follows."""
        return Prepared(tuple(_prepare_layer(self, layer, dtype) for layer in range(self.config.num_layers)))


def init_adapters(
    config: ModelConfig, spec: AdapterSpec, seed: int = 0, device: torch.device | str = "cpu"
) -> Adapters:
    """Make adapters with new values: A uniform in +-1/sqrt(in) (Kaiming, as PEFT) and B zero, so that the
    policy is the base.

    The values are drawn on the CPU from ``seed``, hence equal on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (a_shape, b_shape) in compute_adapter_shapes(config, spec).items():
        a = (torch.rand(a_shape, generator=generator) * 2 - 1) / math.sqrt(a_shape[-1])
        tensors[name] = (a.to(device).requires_grad_(), torch.zeros(b_shape, device=device).requires_grad_())
    return Adapters(spec, tensors, config)


@dataclass(slots=True)
class Lora:
    """The adapter of one stored matrix [N, K]: a [R, K], b [N, R]. R is the sum of the ranks of its
    members."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(slots=True)
class LayerLora:
    """The adapters of one layer by stored matrix; None for a matrix that is not adapted."""

    qkv: Lora | None = None
    q: Lora | None = None
    q_a: Lora | None = None
    q_b: Lora | None = None
    kv_a: Lora | None = None
    kv_b: Lora | None = None
    o: Lora | None = None
    gate_up: Lora | None = None
    down: Lora | None = None
    shared_gate_up: Lora | None = None
    shared_down: Lora | None = None
    router: Lora | None = None
    experts: ExpertLora | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Adapters ready for a forward. An engine makes them once per publish, a trainer for every forward."""

    layers: tuple[LayerLora, ...]

    def prepare(self, dtype: torch.dtype) -> Prepared:
        """Return itself: a no-op, so that a forward takes ``Adapters`` and ``Prepared`` alike."""
        return self

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> Prepared:
        """Return the same adapters with every factor replaced by ``change(factor)``."""

        def apply(lora: Lora | ExpertLora | None) -> Any:
            if isinstance(lora, ExpertLora):
                gate_up_a, gate_up_b, down_a, down_b = (change(factor) for factor in lora[:4])
                return ExpertLora(gate_up_a, gate_up_b, down_a, down_b, lora.scale)
            return None if lora is None else Lora(change(lora.a), change(lora.b), lora.scale)

        names = [field.name for field in fields(LayerLora)]
        return Prepared(
            tuple(LayerLora(**{name: apply(getattr(layer, name)) for name in names}) for layer in self.layers)
        )


@torch.no_grad()
def stack_adapters(policies: Sequence[Adapters | None], config: ModelConfig, dtype: torch.dtype) -> Prepared:
    """Stack the adapters of P policies (None: the base) to factors [P, ...]. They have zeros up to the
    largest rank, and for maps that a policy does not adapt. The scales are multiplied into B."""
    layers = []
    for layer in range(config.num_layers):
        loras = [
            NO_LORA if adapters is None else _prepare_layer(adapters, layer, torch.float32)
            for adapters in policies
        ]
        names = [field.name for field in fields(LayerLora)]
        layers.append(
            LayerLora(
                **{name: _stack_factors([getattr(lora, name) for lora in loras], dtype) for name in names}
            )
        )
    return Prepared(tuple(layers))


@torch.no_grad()
def put_adapters(stack: Prepared, policy_idx: int, adapters: Adapters | None) -> bool:
    """Copy ``adapters`` (None: the base) into ``stack`` at ``policy_idx``, in its memory, and return True. If
    they do not fit, return False and change nothing: if they have a larger rank, a map that no policy in the
    stack adapts, or a factor per expert where the stack has one for all."""
    pairs = []
    for layer, stacked_lora in enumerate(stack.layers):
        lora = NO_LORA if adapters is None else _prepare_layer(adapters, layer, torch.float32)
        pairs += [
            (getattr(stacked_lora, field.name), getattr(lora, field.name)) for field in fields(LayerLora)
        ]
    if not all(_has_room(stacked_lora, lora) for stacked_lora, lora in pairs):
        return False
    for stacked_lora, lora in pairs:
        for name in () if stacked_lora is None else _list_factors(stacked_lora):
            target = getattr(stacked_lora, name)[policy_idx].zero_()
            if lora is not None:
                _copy_factor(target, lora, name)
    return True


def _stack_factors(loras: Sequence[Lora | ExpertLora | None], dtype: torch.dtype) -> Any:
    """Return the stacked factors [P, ...] of one stored matrix or of the experts of a layer; None if no
    policy adapts them."""
    adapted_loras = [lora for lora in loras if lora is not None]
    if not adapted_loras:
        return None

    def stack_factor(name: str) -> Tensor:
        factors, dim = [getattr(lora, name) for lora in adapted_loras], _find_rank_dim(name)
        full_factor = max(factors, key=Tensor.dim)  # a shared factor is expanded to all experts
        shape = list(full_factor.shape)
        shape[dim] = max(factor.shape[dim] for factor in factors)
        stacked_factor = full_factor.new_zeros(len(loras), *shape, dtype=dtype)
        for policy_idx, lora in enumerate(loras):
            if lora is not None:
                _copy_factor(stacked_factor[policy_idx], lora, name)
        return stacked_factor

    return type(adapted_loras[0])(*map(stack_factor, _list_factors(adapted_loras[0])), scale=1.0)


def _list_factors(lora: Lora | ExpertLora) -> tuple[str, ...]:
    return ("a", "b") if isinstance(lora, Lora) else ExpertLora._fields[:4]


def _find_rank_dim(factor: str) -> int:
    """Return the dimension of the rank in a factor, counted from the end."""
    return -2 if factor.endswith("a") else -1


def _copy_factor(target: Tensor, lora: Lora | ExpertLora, name: str) -> None:
    """Copy a factor into the beginning of ``target``, whose rank may be larger. A factor B is scaled
    first."""
    factor, dim = getattr(lora, name), _find_rank_dim(name)
    target.narrow(dim, 0, factor.shape[dim]).copy_(factor if dim == -2 else factor * lora.scale)


def _has_room(stacked_lora: Any, lora: Any) -> bool:
    """Return whether the adapter of a policy fits into its place in a stack. No adapter (None) always
    fits."""
    if lora is None or stacked_lora is None:
        return lora is None
    pairs = [
        (getattr(stacked_lora, name)[0], getattr(lora, name), _find_rank_dim(name))
        for name in _list_factors(lora)
    ]
    return all(
        target.dim() >= factor.dim() and target.shape[dim] >= factor.shape[dim]
        for target, factor, dim in pairs
    )


NO_LORA = LayerLora()
RANKS = 8  # ranks are padded to a multiple of it: grouped products on CUDA need rows of 16 bytes


class Factors:
    """The factors of one optimizer step, prepared once for all of its microbatches.

    The tensors of ``prepared`` are leaves. After the backward of a microbatch ``add`` adds their gradients to
    sums, or ``drop`` discards them; ``backward`` passes the sums on to the adapters' own leaves. The result
    has the same bits as when every microbatch prepares its own factors, since slices and casts of single
    terms commute with their sum.
    """

    def __init__(self, adapters: Adapters, dtype: torch.dtype) -> None:
        with torch.enable_grad():
            prepared = adapters.prepare(torch.promote_types(dtype, torch.float32))
        self._wide: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._sums: list[Tensor | None] = []

        def add_leaf(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
            self._wide.append(tensor)
            self._leaves.append(leaf)
            self._sums.append(None)
            return leaf

        self.prepared = prepared.map_factors(add_leaf)

    def add(self) -> None:
        """Add the gradients of the leaves to the sums, in fp32, and remove them from the leaves."""
        for index, leaf in enumerate(self._leaves):
            gradient_sum = self._sums[index]
            if leaf.grad is not None:
                dtype = self._wide[index].dtype
                self._sums[index] = (
                    leaf.grad.to(dtype) if gradient_sum is None else gradient_sum.add_(leaf.grad)
                )
        self.drop()

    def drop(self) -> None:
        """Remove the gradients from the leaves."""
        for leaf in self._leaves:
            leaf.grad = None

    def backward(self) -> None:
        """Pass the sums on to the adapters' own leaves; a no-op without any."""
        pairs = [
            (wide, total) for wide, total in zip(self._wide, self._sums, strict=True) if total is not None
        ]
        if pairs:
            wide, sums = zip(*pairs, strict=True)
            _WithGradients.apply(sums, *wide).backward()


class _WithGradients(torch.autograd.Function):
    """A scalar whose backward passes ``sums`` to ``tensors`` as their gradients. ``torch.autograd.backward``
    with gradients as arguments would import sympy (a second, 50 MB) to compare their shapes."""

    @staticmethod
    def forward(ctx: Any, sums: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.sums = sums
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.sums


def _prepare_layer(adapters: Adapters, layer: int, dtype: torch.dtype) -> LayerLora:
    """Prepare the factors of one layer: stack those of maps in one matrix, and cast them to ``dtype``."""
    shapes = compute_layer_shapes(adapters.config, layer)
    prefix = f"layers.{layer}."
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in shapes:
        if prefix + name in adapters.tensors:  # cast before they are stacked, which then moves fewer bytes
            a, b = adapters.tensors[prefix + name]
            pairs[name] = a.to(dtype), b.to(dtype)
    is_latent = adapters.config.mla is not None
    layer_lora = LayerLora()
    for slot, members in STACKED.items():
        if slot == ("qkv" if is_latent else "q") or not any(name in pairs for name in members):
            continue
        a, b = _stack_members([(shapes[name][-2], pairs.get(name)) for name in members])
        setattr(layer_lora, slot, Lora(a, b, adapters.spec.get_scale(prefix + members[0])))
    if any(name.startswith("experts.") for name in pairs):
        layer_lora.experts = _prepare_experts(adapters, shapes, pairs, prefix, dtype)
    return layer_lora


def _stack_members(members: list[tuple[int, tuple[Tensor, Tensor] | None]]) -> tuple[Tensor, Tensor]:
    """Stack the factors of the maps in one matrix, which are given as (out size, (A, B) or None): each A
    below the one before, and B block-diagonal.

    The zeros of B cost a few more products than going slice by slice, but save a kernel call per map.
    """
    pairs = [pair for _, pair in members if pair is not None]
    rank, blocks, rank_start = sum(a.shape[-2] for a, _ in pairs), [], 0
    stacked_a = torch.cat([a for a, _ in pairs], dim=-2)
    if not any(b.requires_grad for _, b in pairs):  # no gradient has to pass: each value is written once
        first_b, row = pairs[0][1], 0
        stacked_b = first_b.new_zeros(*first_b.shape[:-2], sum(out for out, _ in members), rank)
        for num_outputs, pair in members:
            if pair is not None:
                width = pair[1].shape[-1]
                stacked_b[..., row : row + num_outputs, rank_start : rank_start + width] = pair[1]
                rank_start += width
            row += num_outputs
        return stacked_a, stacked_b
    for num_outputs, pair in members:
        if pair is None:
            blocks.append(pairs[0][1].new_zeros(*pairs[0][1].shape[:-2], num_outputs, rank))
            continue
        member_rank = pair[1].shape[-1]
        blocks.append(F.pad(pair[1], (rank_start, rank - rank_start - member_rank)))
        rank_start += member_rank
    return stacked_a, torch.cat(blocks, dim=-2)


def _prepare_experts(
    adapters: Adapters,
    shapes: Mapping[str, tuple[int, ...]],
    pairs: dict[str, tuple[Tensor, Tensor]],
    prefix: str,
    dtype: torch.dtype,
) -> ExpertLora:
    """Prepare the factors of experts. For maps without an adapter zeros are made, also in ``pairs``. On CUDA
    ranks are padded."""
    rank = adapters.spec.get_rank(prefix + "experts.gate")
    device = next(iter(pairs.values()))[0].device
    gate_up = [(shapes[name][-2], pairs.get(name)) for name in ("experts.gate", "experts.up")]
    if all(
        pair is None for _, pair in gate_up
    ):  # only down is adapted; with zeros all cases have the same form
        count, width, hidden = shapes["experts.gate"]
        zeros = (torch.zeros(rank, hidden, device=device), torch.zeros(count, width, rank, device=device))
        gate_up[0] = (width, zeros)
    if "experts.down" not in pairs:
        count, hidden, width = shapes["experts.down"]
        pairs["experts.down"] = (
            torch.zeros(count, rank, width, device=device),
            torch.zeros(hidden, rank, device=device),
        )
    a, b = _stack_members(gate_up)
    down_a, down_b = pairs["experts.down"]
    scale = adapters.spec.get_scale(prefix + "experts.gate")
    if device.type == "cuda":
        (a, b), (down_a, down_b) = pad_rank(a, b), pad_rank(down_a, down_b)
    return ExpertLora(a.to(dtype), b.to(dtype), down_a.to(dtype), down_b.to(dtype), scale)


def pad_rank(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad A [..., r, in] and B [..., out, r] with zeros to a rank that is a multiple of RANKS. The update
    stays the same."""
    num_zeros = -a.shape[-2] % RANKS  # the distance to the next multiple
    return (F.pad(a, (0, 0, 0, num_zeros)), F.pad(b, (0, num_zeros))) if num_zeros else (a, b)


def lora_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, lora: Lora, gemm: Gemm = TORCH_GEMM
) -> Tensor:
    """Compute x W^T + bias + scale * x a^T b^T for training: x [T, K] -> [T, N].

    With a frozen W only x and the [T, R] projection are kept for the backward.
    """
    if isinstance(weight, Tensor) and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return F.linear(x, weight, bias) + F.linear(F.linear(x, lora.a) * lora.scale, lora.b)
    return _LoraLinear.apply(x, weight, bias, lora.a, lora.b, lora.scale, gemm)  # type: ignore[return-value]


def narrow_linear(x: Tensor, weight: Weight, bias: Tensor | None, nt: Product, nn: Product) -> Tensor:
    """Compute x W^T + bias for training with a frozen W that is stored in fewer bits than x. No wide copy of
    W is kept for the backward."""
    return _NarrowLinear.apply(x, weight, bias, nt, nn)  # type: ignore[return-value]


class _NarrowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, nt, nn):
        save_weight(ctx, weight)
        ctx.nn = nn
        return nt(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (weight,) = load_saved_weight(ctx)
        return ctx.nn(grad, weight) if ctx.needs_input_grad[0] else None, None, None, None, None


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, gemm):
        low = gemm.thin(x, a) * scale
        save_weight(ctx, weight, x, low, a, b)
        ctx.scale, ctx.nn = scale, gemm.nn
        return gemm.add(gemm.nt(x, weight, bias), low, b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, low, a, b, weight = load_saved_weight(ctx)
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_low = grad.mm(b) * ctx.scale if needs_x or needs_a else grad
        grad_x = ctx.nn(grad, weight).addmm_(grad_low, a) if needs_x else None
        grad_a = grad_low.t().mm(x) if needs_a else None
        grad_b = grad.t().mm(low) if needs_b else None
        return grad_x, None, None, grad_a, grad_b, None, None
