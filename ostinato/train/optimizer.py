"""AdamW over fp32 parameters, learning-rate schedules as functions of the step, and gradient clipping.

AdamW (arXiv 1711.05101, algorithm 2) as in torch: decay subtracts lr * weight_decay * parameter. Vectors
(biases, norms) do not decay. ``max_grad_norm=inf`` turns clipping off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ostinato.config import TrainerSection

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # torch's names of AdamW's state


def lr_factor(settings: TrainerSection, step: int) -> float:
    """The learning rate of step ``step`` (the first is 0) as a share of ``settings.lr``.

    Warmup climbs linearly and reaches 1 at step ``warmup_steps - 1``; no step has rate 0, since that
    would cost as much and learn nothing. Then linear and cosine fall, and would be 0 at ``settings.steps``.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    num_falling_steps = settings.steps - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / num_falling_steps)
    return 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def _is_vector(parameter: Tensor) -> bool:
    return parameter.ndim < 2


class AdamW:
    """Bit-identical to ``torch.optim.AdamW(fused=True)``, by the same kernel. Not torch's own class, because
    its first use imports torch's compiler: seconds at the start of every run.

    param_groups: dicts of params, lr, betas, eps, weight_decay; state: the moments of updated parameters.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        self.param_groups = list(param_groups)
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient; one that has no moments yet gets zeros first."""
        for group in self.param_groups:
            leaves = [leaf for leaf in group["params"] if leaf.grad is not None]
            if not leaves:
                continue
            states = [self._ensure_state(leaf) for leaf in leaves]
            first_moments, second_moments, steps = ([state[moment] for state in states] for moment in MOMENTS)
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                leaves,
                [leaf.grad for leaf in leaves],
                first_moments,
                second_moments,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _ensure_state(self, leaf: Tensor) -> dict[str, Tensor]:
        """The moments of a leaf; made of zeros, and stored, before its first step."""
        if leaf not in self.state:
            step = torch.zeros((), dtype=torch.float32, device=leaf.device)
            self.state[leaf] = {name: torch.zeros_like(leaf) for name in MOMENTS[:2]} | {"step": step}
        return self.state[leaf]


def build_optimizer(
    parameters: Iterable[Tensor],
    settings: TrainerSection,
    is_vector: Callable[[Tensor], bool] = _is_vector,
) -> AdamW:
    """AdamW over ``parameters``, matrices with decay and vectors without, in one fused kernel for each of
    these groups; an empty group is left out."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if not is_vector(parameter)]
    vectors = [parameter for parameter in parameters if is_vector(parameter)]
    common_settings = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay, **common_settings},
        {"params": vectors, "weight_decay": 0.0, **common_settings},
    ]
    return AdamW(group for group in groups if group["params"])


def set_lr(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, a scalar; not finite when one is not, or on overflow."""
    return torch.nn.utils.get_total_norm(gradients)


def clip_gradients(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale ``gradients`` in place to a joint norm of at most ``max_norm``; ``norm`` is the current one."""
    if norm > max_norm:
        torch._foreach_mul_(list(gradients), max_norm / norm)  # pyright: ignore[reportPrivateImportUsage]


def optimizer_tensors(optimizer: AdamW, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state by "<parameter>.<moment>"; empty before its first step."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in named.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    optimizer: AdamW, named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Restore, bit for bit, copies of what ``optimizer_tensors`` returned. A parameter without a state there
    loses its own, and starts from zero."""
    for name, parameter in named.items():
        if f"{name}.step" in tensors:
            optimizer.state[parameter] = {
                moment: tensors[f"{name}.{moment}"].to(parameter.device, copy=True) for moment in MOMENTS
            }
        else:
            optimizer.state.pop(parameter, None)
