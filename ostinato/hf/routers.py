"""Find the formula by which a router turns logits and chosen experts into weights, and check it.

Routers of ``transformers`` v5 return (logits [N, M], weights [N, K], ids [N, K]). Their weights follow one of
few formulas. ``fit`` tries all of them on the output of a router and takes the formula without error. A
replay of other ids applies this formula to the live logits, so that the gradient to the router is the model's
own.

If a router does not return these, but calls ``topk`` once, ``TopKSwap`` replaces the ids of the result, only
during the forward of that router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROUNDING = 2  # tolerance of the fit, in units in the last place of the largest weight


class UnsupportedRouter(ValueError):
    """A mixture layer whose experts cannot be replayed exactly, by class and reason."""

    def __init__(self, name: str, kind: str, why: str) -> None:
        super().__init__(f"cannot replay {kind} at {name or 'the root'}: {why}")
        self.name, self.kind, self.why = name, kind, why


class Score(StrEnum):
    """The function that is applied to the logits first."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"  # DeepSeek-V4
    IDENTITY = "identity"  # for routers whose "logits" are probabilities: Gemma 4
    SPARSE_MIXER = "sparse_mixer"  # Phi-3.5-MoE: expert by expert (arXiv 2409.12136 section 2.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """The formula weights = score(logits)[ids], divided by their sum, times a constant and a number per
    expert."""

    score: Score
    gather_first: bool = False  # scores of the chosen logits alone: gpt-oss
    fp32: bool = True  # scores in fp32, whatever the logits are in
    norm: float | None = None  # weights are divided by their sum plus this; None: they are not divided
    times: float = 1.0
    over: float = 1.0
    per_expert: str | None = None  # the router's parameter [M] that weights are multiplied with

    def weights(self, logits: Tensor, ids: Tensor, router: nn.Module) -> Tensor:
        """Compute the weights [N, K] of experts ``ids`` [N, K] from live logits [N, M], in the dtype of the
        scores."""
        values = logits.float() if self.fp32 else logits
        if self.score is Score.SPARSE_MIXER:
            weights = compute_sparse_mixer(values, ids, getattr(router, _BAND_ATTRIBUTE))
        elif self.gather_first:
            weights = _SCORES[self.score](values.gather(1, ids))
        else:
            weights = _SCORES[self.score](values).gather(1, ids)
        if self.norm is not None:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.norm)
        if self.times != 1.0:
            weights = weights * self.times
        if self.over != 1.0:
            weights = weights / self.over
        return weights if self.per_expert is None else weights * getattr(router, self.per_expert)[ids]

    def error(self, logits: Tensor, ids: Tensor, weights: Tensor, router: nn.Module) -> Tensor:
        """Compute the largest error against the router's own ``weights``, relative to the largest weight: a
        scalar tensor without a gradient."""
        with torch.no_grad():
            fitted = self.weights(logits, ids, router).to(weights.dtype)
            return (fitted - weights).abs().max().float() / weights.abs().max().float().clamp(min=1e-30)

    def __str__(self) -> str:
        text = f"{self.score}({'chosen' if self.gather_first else 'all'})"
        text += "" if self.norm is None else " / sum"
        text += "" if self.times == 1.0 else f" * {self.times:g}"
        text += "" if self.over == 1.0 else f" / {self.over:g}"
        return text + ("" if self.per_expert is None else f" * {self.per_expert}")


_SCORES: dict[Score, Callable[[Tensor], Tensor]] = {
    Score.SOFTMAX: lambda x: x.softmax(dim=-1),
    Score.SIGMOID: lambda x: x.sigmoid(),
    Score.SQRT_SOFTPLUS: lambda x: F.softplus(x).sqrt(),
    Score.IDENTITY: lambda x: x,
}
_BAND_ATTRIBUTE = "router_jitter_noise"  # attribute of the routers of sparse mixers


def compute_sparse_mixer(logits: Tensor, ids: Tensor, noise: float) -> Tensor:
    """Compute the weights [N, K]. That of an expert is its softmax among the experts that were not chosen
    before it and are within the band: their logits are below the largest by at most 2 ``noise`` times
    max(|logit|, largest). The expert itself always counts as within the band, as it is when the router
    chooses it for its largest logit."""
    weights, remaining = [], logits
    for column in ids.split(1, dim=-1):
        with torch.no_grad():
            max_logit = remaining.max(dim=-1, keepdim=True).values
            is_outside = (max_logit - logits) / logits.abs().clamp(min=max_logit) > 2 * noise
            is_outside.scatter_(-1, column, False)
        weights.append(remaining.masked_fill(is_outside, -torch.inf).softmax(dim=-1).gather(-1, column))
        remaining = remaining.scatter(-1, column, -torch.inf)
    return torch.cat(weights, dim=-1)


class Slots(NamedTuple):
    """The indices of logits, weights and ids in a router's output."""

    logits: int
    weights: int
    ids: int


def find_slots(output: Any) -> Slots | None:
    """Return the indices of logits [N, M], weights [N, K] and ids [N, K] in a module's output; None unless
    it is a tuple or list with exactly one of each."""
    if not isinstance(output, tuple | list):
        return None
    matrices = [
        (i, tensor) for i, tensor in enumerate(output) if isinstance(tensor, Tensor) and tensor.dim() == 2
    ]
    ids = [i for i, tensor in matrices if not (tensor.is_floating_point() or tensor.dtype == torch.bool)]
    if len(ids) != 1:
        return None
    shape = output[ids[0]].shape
    weights = [i for i, tensor in matrices if tensor.is_floating_point() and tensor.shape == shape]
    logits = [
        i
        for i, tensor in matrices
        if tensor.is_floating_point() and tensor.shape[0] == shape[0] and tensor.shape[1] > shape[1]
    ]
    return Slots(logits[0], weights[0], ids[0]) if len(weights) == len(logits) == 1 else None


@torch.no_grad()
def fit_rule(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> WeightRule:
    """Find the formula that gives the router's own weights [N, K], from a single call of it.

    Raises LookupError, with the reason, if there is none, or if several different formulas fit: equal logits
    distinguish no formulas.
    """
    logits, weights, ids = logits.detach(), weights.detach(), ids.detach().long()
    bound = ROUNDING * torch.finfo(weights.dtype).eps
    fits = [
        (float(rule.error(logits, ids, weights, router)), rule)
        for rule in _list_rules(router, logits, weights, ids)
    ]
    fits = sorted(
        (candidate for candidate in fits if candidate[0] <= bound), key=lambda candidate: candidate[0]
    )
    if not fits:
        raise LookupError("its weights follow none of the formulas known")
    best_rule = fits[0][1]
    # formulas may agree on similar logits; on these they differ
    distinct_logits = 3 * torch.randn(logits.shape, generator=_make_generator()).to(logits.device)
    expected = best_rule.weights(distinct_logits, ids, router)
    for _, rule in fits[1:]:
        if not torch.allclose(rule.weights(distinct_logits, ids, router), expected, rtol=0.05, atol=1e-5):
            raise LookupError(f"its logits do not distinguish {best_rule} from {rule}")
    return best_rule


def _list_rules(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> Iterator[WeightRule]:
    """Yield all candidate formulas, the plain formulas first."""
    dtypes = (True,) if logits.dtype == torch.float32 else (True, False)
    # 1e-20 represents all values that vanish in a sum of fp32; lfm2_moe adds 1e-6
    for score, gather_first, fp32, norm in product(Score, (False, True), dtypes, (None, 1e-20, 1e-6)):
        if gather_first and score in (Score.IDENTITY, Score.SPARSE_MIXER):
            continue
        if score is Score.SPARSE_MIXER and (norm is not None or not hasattr(router, _BAND_ATTRIBUTE)):
            continue
        for name in _find_expert_scales(router, logits.shape[1]):
            rule = WeightRule(score=score, gather_first=gather_first, fp32=fp32, norm=norm, per_expert=name)
            for constant in _list_constants(router, rule.weights(logits, ids, router), weights):
                yield WeightRule(
                    score=score, gather_first=gather_first, fp32=fp32, norm=norm, per_expert=name, **constant
                )


def _find_expert_scales(router: nn.Module, num_experts: int) -> tuple[str | None, ...]:
    """Return the names of the router's scales per expert; (None,) without any. A scale is preferred to none:
    while all are 1, both give the same numbers."""
    parameters = router.named_parameters(recurse=False)
    names = [
        name
        for name, parameter in parameters
        if "expert" in name and "scale" in name and parameter.shape == (num_experts,)
    ]
    return tuple(names) or (None,)


def _list_constants(router: nn.Module, unscaled: Tensor, expected: Tensor) -> Iterator[dict[str, float]]:
    """Yield constants that could turn ``unscaled`` into ``expected``: none, or numeric attributes of the
    router as factors or divisors, exact to the last bit."""
    total = float(unscaled.float().sum())
    ratio = float(expected.float().sum()) / total if total else 1.0
    numbers = [
        float(value)
        for value in vars(router).values()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if abs(ratio - 1) < 1e-2:
        yield {}
    for number in dict.fromkeys(numbers):
        if number not in (0.0, 1.0) and abs(ratio / number - 1) < 1e-2:
            yield {"times": number}
        if number not in (0.0, 1.0) and abs(ratio * number - 1) < 1e-2:
            yield {"over": number}


class TopKSwap(TorchFunctionMode):
    """While active, replaces the ids of the ``topk`` over ``num_experts``, and records the call.

    ``choose`` gets the native ids [N, K] and returns the ids to use. Values are the scores at these ids, so
    the router computes its own formula from them. Only for routers that pass ``check_swap``.
    """

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shape, self.choose, self.calls = (num_experts, top_k), choose, 0
        self.scores: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        native = func(*args, **(kwargs or {}))
        if not is_topk(func) or (args[0].shape[-1], native.indices.shape[-1]) != self.shape:
            return native
        self.calls, self.scores = self.calls + 1, args[0].detach()
        ids = self.choose(native.indices.reshape(-1, self.shape[1])).view(native.indices.shape)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def is_topk(func: Any) -> bool:
    return func is torch.topk or func is Tensor.topk


def check_swap(run: Callable[[], Any], native: Tensor, num_experts: int) -> None:
    """Check that swapping the top-k of ``run`` (a call of a router on fixed inputs) is a replay.

    Its own ids [N, K] must give its own output bit for bit; other ids must give a finite and different
    output, without masked scores. Raises LookupError, with the reason.
    """
    outputs = list_tensors(run())
    own_outputs = _run_swapped(run, num_experts, native)
    if not all(torch.equal(a, b) for a, b in zip(outputs, own_outputs, strict=True)):
        raise LookupError("with its own experts put in the place of its top-k, its output differs")
    order = torch.rand(len(native), num_experts, generator=_make_generator()).argsort(dim=-1)
    other_outputs = _run_swapped(run, num_experts, order[:, : native.shape[1]].to(native.device))
    if not all(torch.isfinite(tensor).all() for tensor in other_outputs if tensor.is_floating_point()):
        raise LookupError("experts other than its own give no finite output")
    if all(torch.equal(a, b) for a, b in zip(outputs, other_outputs, strict=True)):
        raise LookupError("its output does not depend on its top-k")


def _run_swapped(run: Callable[[], Any], num_experts: int, ids: Tensor) -> list[Tensor]:
    """Run with ``ids`` swapped in. Raises LookupError unless one top-k over unmasked scores is called."""
    with TopKSwap(num_experts, ids.shape[1], lambda _: ids) as swap:
        output = list_tensors(run())
    if swap.calls != 1 or swap.scores is None:
        raise LookupError(f"it calls top-k over {num_experts} experts {swap.calls} times")
    scores = swap.scores.reshape(-1, num_experts)
    # a group limit or a mask sets excluded scores to a constant: weight 0 and no gradient, silently
    if not torch.isfinite(scores).all() or (scores == 0).any():
        raise LookupError("its top-k is over scores that are masked, so weights of other experts are lost")
    return output


def list_tensors(output: Any) -> list[Tensor]:
    """Return all tensors of a module's output, in order; of a tuple or list its own, without nested ones."""
    return [
        tensor
        for tensor in (output if isinstance(output, tuple | list) else [output])
        if isinstance(tensor, Tensor)
    ]


def _make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
