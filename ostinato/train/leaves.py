"""The leaves that are trained: all of a model in one process, or each rank's parts of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ostinato.model.base import Base
from ostinato.model.lora import Adapters
from ostinato.train.optimizer import MOMENTS, AdamW, gradient_norm, load_optimizer_tensors, optimizer_tensors


class Leaves(Protocol):
    """``named``: the local leaves, by name. ``shapes``: the shapes of all leaves of the whole model."""

    @property
    def named(self) -> Mapping[str, Tensor]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def reduce(self) -> Tensor:
        """Complete the gradients of the local leaves, once per optimizer step. Returns the L2 norm over the
        whole model, the same on all ranks; not finite when a gradient is not, or on overflow."""
        ...

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole model's tensors by leaf (the leaves themselves, or a moment of them), gathered from those
        of the local leaves. Complete on the rank that drives the run, empty elsewhere."""
        ...

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The local part of a whole tensor that belongs to the leaf ``name``."""
        ...


class WholeLeaves:
    """``Leaves`` of a process that has all of the model."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = named
        self.shapes = {name: tuple(leaf.shape) for name, leaf in named.items()}

    def reduce(self) -> Tensor:
        return gradient_norm(leaf.grad for leaf in self.named.values() if leaf.grad is not None)

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(own)

    def own(self, name: str, whole: Tensor) -> Tensor:
        return whole


def trained_parameters(decoder: Base, adapters: Adapters | None) -> dict[str, Tensor]:
    """The leaves that a trainer updates, by name. Raises ValueError if the decoder is trainable beside
    ``adapters``, and without adapters if it is not trainable or stored in less than fp32."""
    if adapters is not None:
        if any(parameter.requires_grad for parameter in decoder.parameters()):
            raise ValueError(
                "the decoder is trainable beside its adapters; call decoder.set_trainable(False) or pass none"
            )
        return adapters.list_leaves()
    leaf_by_name: dict[str, Tensor] = {
        name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad
    }
    if not leaf_by_name:
        raise ValueError("nothing is trainable; pass adapters or call decoder.set_trainable(True)")
    if decoder.dtype.itemsize < 4:
        raise ValueError(
            f"model.dtype is {decoder.dtype}, in which small updates of full-parameter training "
            "round away; use float32 or train an adapter"
        )
    return leaf_by_name


def state_tensors(leaves: Leaves, optimizer: AdamW) -> dict[str, Tensor]:
    """Parameters and moments of the whole model, by name; in one process they are not copied. On many ranks
    all call it together, and ranks other than the one that drives the run get none."""
    parameters = leaves.whole({name: leaf.detach() for name, leaf in leaves.named.items()})
    saved_tensors = {f"parameters.{name}": parameter for name, parameter in parameters.items()}
    state = optimizer_tensors(optimizer, leaves.named)
    for moment in MOMENTS:
        local_moments = {name: state[key] for name in leaves.named if (key := f"{name}.{moment}") in state}
        saved_tensors |= {
            f"optimizer.{name}.{moment}": tensor for name, tensor in leaves.whole(local_moments).items()
        }
    return saved_tensors


@torch.no_grad()
def load_state_tensors(leaves: Leaves, optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of ``state_tensors``, under any layout; a parameter without saved moments starts from zero.
    Raises ValueError naming the first parameter that is missing, unknown or of another shape, before anything
    is changed."""
    saved_parameters, shapes = _select_prefix("parameters.", tensors), leaves.shapes
    for name in sorted(saved_parameters.keys() | shapes.keys()):
        saved_shape = tuple(saved_parameters[name].shape) if name in saved_parameters else "nothing"
        own_shape = shapes.get(name, "nothing")
        if saved_shape != own_shape:
            raise ValueError(
                f"the checkpoint has {saved_shape} for parameter {name}, this run trains {own_shape}; "
                "resume with the recipe that it was made with"
            )
    moments, local_moments = _select_prefix("optimizer.", tensors), {}
    for name, parameter in leaves.named.items():
        parameter.copy_(leaves.own(name, saved_parameters[name]))
        keys = {f"{name}.{moment}" for moment in MOMENTS} & moments.keys()
        local_moments |= {key: leaves.own(name, moments[key]) for key in keys}
    load_optimizer_tensors(optimizer, leaves.named, local_moments)


def _select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
