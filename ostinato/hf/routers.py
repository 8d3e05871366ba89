"""How one router turns logits and chosen experts into weights: found out by looking, checked, never guessed.

Routers of ``transformers`` v5 return (logits [N, M], weights [N, K], ids [N, K]). Their weights follow one of
few formulas. ``fit`` tries them all on what a router returned and takes the one without error; replaying
other ids is then this formula on the live logits, so that the gradient to the router is the model's own.

Where a router does not return these, but calls ``topk`` once, ``TopKSwap`` puts other ids in the place of the
result, for the duration of that router's forward only.
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

ROUNDING = 2  # units in the last place, of the largest weight, within which a formula is the router's


class UnsupportedRouter(ValueError):
    """A mixture layer whose experts cannot be replayed exactly, by class and reason."""

    def __init__(self, name: str, kind: str, why: str) -> None:
        super().__init__(f"cannot replay {kind} at {name or 'the root'}: {why}")
        self.name, self.kind, self.why = name, kind, why


class Score(StrEnum):
    """What becomes of a logit first."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"  # DeepSeek-V4
    IDENTITY = "identity"  # what the router calls logits are probabilities: Gemma 4
    SPARSE_MIXER = "sparse_mixer"  # Phi-3.5-MoE: one expert after another (arXiv 2409.12136 section 2.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """weights = score(logits)[ids], divided by their sum, times a constant and a number per expert."""

    score: Score
    gather_first: bool = False  # scores of the chosen logits alone: gpt-oss
    fp32: bool = True  # scores in fp32, whatever the logits are in
    norm: float | None = None  # added to the sum that weights are divided by; None: they are not
    times: float = 1.0
    over: float = 1.0
    per_expert: str | None = None  # the router's parameter [M] that weights are multiplied with

    def weights(self, logits: Tensor, ids: Tensor, router: nn.Module) -> Tensor:
        """Weights [N, K] of experts ``ids`` [N, K] from live logits [N, M], in the dtype of the scores."""
        values = logits.float() if self.fp32 else logits
        if self.score is Score.SPARSE_MIXER:
            weights = sparse_mixer(values, ids, getattr(router, _BAND))
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
        """How far off the router's own ``weights`` it is, relative to the largest: a scalar tensor."""
        with torch.no_grad():
            mine = self.weights(logits, ids, router).to(weights.dtype)
            return (mine - weights).abs().max().float() / weights.abs().max().float().clamp(min=1e-30)

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
_BAND = "router_jitter_noise"  # of the routers of sparse mixers


def sparse_mixer(logits: Tensor, ids: Tensor, noise: float) -> Tensor:
    """Weights [N, K]: each expert's softmax among those not chosen before it whose logits lie within a band
    of 2 ``noise`` below the largest, relative to the larger of the two. The expert itself is always among
    them, as it is where the router chose it for being the largest."""
    weights, left = [], logits
    for column in ids.split(1, dim=-1):
        with torch.no_grad():
            best = left.max(dim=-1, keepdim=True).values
            outside = (best - logits) / logits.abs().clamp(min=best) > 2 * noise
            outside.scatter_(-1, column, False)
        weights.append(left.masked_fill(outside, -torch.inf).softmax(dim=-1).gather(-1, column))
        left = left.scatter(-1, column, -torch.inf)
    return torch.cat(weights, dim=-1)


class Slots(NamedTuple):
    """Where in a router's output they stand."""

    logits: int
    weights: int
    ids: int


def slots(output: Any) -> Slots | None:
    """Logits [N, M], weights [N, K] and ids [N, K] in a module's output; None if it is no such tuple."""
    if not isinstance(output, tuple | list):
        return None
    flat = [(i, one) for i, one in enumerate(output) if isinstance(one, Tensor) and one.dim() == 2]
    ids = [i for i, one in flat if not (one.is_floating_point() or one.dtype == torch.bool)]
    if len(ids) != 1:
        return None
    chosen = output[ids[0]].shape
    weights = [i for i, one in flat if one.is_floating_point() and one.shape == chosen]
    logits = [
        i
        for i, one in flat
        if one.is_floating_point() and one.shape[0] == chosen[0] and one.shape[1] > chosen[1]
    ]
    return Slots(logits[0], weights[0], ids[0]) if len(weights) == len(logits) == 1 else None


@torch.no_grad()
def fit(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> WeightRule:
    """The formula that gives the router's own weights [N, K], from one call of it.

    Raises LookupError, saying why, if there is none, or if several fit and are different formulas: logits
    that are all alike distinguish none.
    """
    logits, weights, ids = logits.detach(), weights.detach(), ids.detach().long()
    close = ROUNDING * torch.finfo(weights.dtype).eps
    found = [
        (float(rule.error(logits, ids, weights, router)), rule)
        for rule in _rules(router, logits, weights, ids)
    ]
    found = sorted((one for one in found if one[0] <= close), key=lambda one: one[0])
    if not found:
        raise LookupError("its weights follow none of the formulas known")
    best = found[0][1]
    # of logits that are all alike the formulas may agree; of these they do not
    apart = 3 * torch.randn(logits.shape, generator=_generator()).to(logits.device)
    theirs = best.weights(apart, ids, router)
    for _, rule in found[1:]:
        if not torch.allclose(rule.weights(apart, ids, router), theirs, rtol=0.05, atol=1e-5):
            raise LookupError(f"its logits do not distinguish {best} from {rule}")
    return best


def _rules(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> Iterator[WeightRule]:
    """Every formula that could be meant, the plain ones first."""
    dtypes = (True,) if logits.dtype == torch.float32 else (True, False)
    # 1e-20 stands for all that fp32 does not distinguish from 0; lfm2_moe adds 1e-6
    for score, first, fp32, norm in product(Score, (False, True), dtypes, (None, 1e-20, 1e-6)):
        if first and score in (Score.IDENTITY, Score.SPARSE_MIXER):
            continue
        if score is Score.SPARSE_MIXER and (norm is not None or not hasattr(router, _BAND)):
            continue
        for name in _per_expert(router, logits.shape[1]):
            plain = WeightRule(score=score, gather_first=first, fp32=fp32, norm=norm, per_expert=name)
            for constant in _constants(router, plain.weights(logits, ids, router), weights):
                yield WeightRule(
                    score=score, gather_first=first, fp32=fp32, norm=norm, per_expert=name, **constant
                )


def _per_expert(router: nn.Module, num_experts: int) -> tuple[str | None, ...]:
    """A scale of each expert is preferred to none: as long as all are 1, both give the same numbers."""
    named = router.named_parameters(recurse=False)
    names = [n for n, p in named if "expert" in n and "scale" in n and p.shape == (num_experts,)]
    return tuple(names) or (None,)


def _constants(router: nn.Module, mine: Tensor, theirs: Tensor) -> Iterator[dict[str, float]]:
    """Constants that could stand between the two: numbers that the router holds, exact to the last bit."""
    total = float(mine.float().sum())
    ratio = float(theirs.float().sum()) / total if total else 1.0
    numbers = [
        float(v) for v in vars(router).values() if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    if abs(ratio - 1) < 1e-2:
        yield {}
    for number in dict.fromkeys(numbers):
        if number not in (0.0, 1.0) and abs(ratio / number - 1) < 1e-2:
            yield {"times": number}
        if number not in (0.0, 1.0) and abs(ratio * number - 1) < 1e-2:
            yield {"over": number}


class TopKSwap(TorchFunctionMode):
    """While active, the ``topk`` over ``num_experts`` is answered with given ids, and remembered.

    ``choose`` gets the native ids [N, K] and returns those to use. Values are the scores at these ids, so
    what the router makes of them is its own formula. Only for routers that ``check_swap`` has passed.
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
    """That swapping the top-k of ``run`` (one call of a router on fixed inputs) means what replay means.

    Its own ids [N, K] have to give its own output bit for bit; other ids a finite output, and another one,
    with no score masked. Raises LookupError, saying what fails.
    """
    plain = tensors(run())
    again = _swapped(run, num_experts, native)
    if not all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)):
        raise LookupError("with its own experts put in the place of its top-k, its output differs")
    order = torch.rand(len(native), num_experts, generator=_generator()).argsort(dim=-1)
    other = _swapped(run, num_experts, order[:, : native.shape[1]].to(native.device))
    if not all(torch.isfinite(one).all() for one in other if one.is_floating_point()):
        raise LookupError("experts other than its own give no finite output")
    if all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)):
        raise LookupError("its output does not depend on its top-k")


def _swapped(run: Callable[[], Any], num_experts: int, ids: Tensor) -> list[Tensor]:
    with TopKSwap(num_experts, ids.shape[1], lambda _: ids) as swap:
        output = tensors(run())
    if swap.calls != 1 or swap.scores is None:
        raise LookupError(f"it calls top-k over {num_experts} experts {swap.calls} times")
    scores = swap.scores.reshape(-1, num_experts)
    # a group limit or a mask sets what it excludes to one number: weight 0 and no gradient, silently
    if not torch.isfinite(scores).all() or (scores == 0).any():
        raise LookupError("its top-k is over scores that are masked, so weights of other experts are lost")
    return output


def tensors(output: Any) -> list[Tensor]:
    """All tensors of a module's output, in order."""
    return [
        one for one in (output if isinstance(output, tuple | list) else [output]) if isinstance(one, Tensor)
    ]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
