"""What a trainer holds, as tensors by name: parameters and the moments of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ostinato.train.leaves import Leaves
from ostinato.train.optimizer import MOMENTS, load_optimizer_tensors, optimizer_tensors


def state_tensors(leaves: Leaves, optimizer: Optimizer) -> dict[str, Tensor]:
    """Of the whole model. Not copied where they are here; on other ranks than the one that drives the run,
    none."""
    parameters = leaves.whole({name: leaf.detach() for name, leaf in leaves.named.items()})
    found = {f"parameters.{name}": tensor for name, tensor in parameters.items()}
    state = optimizer_tensors(optimizer, leaves.named)
    for moment in MOMENTS:
        own = {name: state[key] for name in leaves.named if (key := f"{name}.{moment}") in state}
        found |= {f"optimizer.{name}.{moment}": one for name, one in leaves.whole(own).items()}
    return found


@torch.no_grad()
def load_state_tensors(leaves: Leaves, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse, under any layout. Raises ValueError naming the first parameter that is missing, unknown or
    of another shape, before anything is changed."""
    saved, shapes = _under("parameters.", tensors), leaves.shapes
    for name in sorted(saved.keys() | shapes.keys()):
        have = tuple(saved[name].shape) if name in saved else "nothing"
        want = shapes.get(name, "nothing")
        if have != want:
            raise ValueError(
                f"the checkpoint has {have} for parameter {name}, this run trains {want}; "
                "resume with the recipe that it was made with"
            )
    moments, own = _under("optimizer.", tensors), {}
    for name, parameter in leaves.named.items():
        parameter.copy_(leaves.own(name, saved[name]))
        keys = {f"{name}.{moment}" for moment in MOMENTS} & moments.keys()
        own |= {key: leaves.own(name, moments[key]) for key in keys}
    load_optimizer_tensors(optimizer, leaves.named, own)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


__all__ = ["load_state_tensors", "state_tensors"]
