"""Finding the routers of a model by watching one forward.

A forward is the one thing that every wrapper (PEFT, FSDP2, a device map, checkpointing) supports, and it
shows what reading names cannot: which modules choose experts, with what arguments, in what order, how often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ostinato.hf.routers import (
    Slots,
    UnsupportedRouter,
    WeightRule,
    check_swap,
    fit,
    is_topk,
    slots,
)

_PROBE_TOKENS = 48
# classes that route or hold experts, for what did not show itself as a router
_MIXTURE = re.compile(r"(?:Moe|MoE|MoA)(?:Block|Layer)?$|SparseMLP$|Experts$|Router$|Gating$")
_ROUTER = re.compile(r"(?:Router|Gate|Gating)$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """One router, and how its experts are replayed: ``slots`` by formula; None by swapping its top-k."""

    name: str
    layer: int  # the first number in its name
    module: nn.Module
    num_experts: int
    top_k: int
    slots: Slots | None
    rule: WeightRule | None
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of logits and weights when the rule was fitted


@dataclass(slots=True)
class _Seen:
    """What one forward showed."""

    called: dict[str, int] = field(default_factory=dict)  # module name -> calls
    sites: list[Site] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # module name -> why
    ids: list[Tensor] = field(default_factory=list)  # what routers returned, to know it again
    topk: dict[str, list[Tensor]] = field(default_factory=dict)  # module -> native ids of its top-k calls
    widths: dict[str, list[int]] = field(default_factory=dict)  # module -> what these chose from
    stack: list[str] = field(default_factory=list)
    testing: bool = False


def find_routers(model: nn.Module, example: Mapping[str, Any] | None) -> tuple[list[Site], list[nn.Module]]:
    """(routers in the order of layers, mixture layers that this forward did not call).

    Raises UnsupportedRouter for the first mixture layer that cannot be replayed exactly.
    """
    seen = _Seen()
    with _watching(model, seen), _evaluating(model), torch.no_grad():
        model(**(example if example is not None else _example(model)))
    sites = sorted(seen.sites, key=lambda site: site.layer)  # stable: of one layer, in order of execution
    for site in sites:
        if seen.called[site.name] != 1:
            raise _unsupported(site, f"one forward calls it {seen.called[site.name]} times")
    if len({site.top_k for site in sites}) > 1:
        raise _unsupported(sites[0], f"layers differ in experts per token: {[site.top_k for site in sites]}")
    idle = list(_uncovered(model, seen, [site.name for site in sites]))
    if not sites:
        raise UnsupportedRouter(
            "", type(model).__name__, "no router showed itself; is it a mixture of experts?"
        )
    return sites, idle


def _example(model: nn.Module) -> dict[str, Any]:
    """Any tokens will do: routers are watched, not judged."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    table = embeddings() if callable(embeddings) else None
    if not isinstance(table, nn.Embedding):
        raise ValueError(
            f"example is None; {type(model).__name__} has no input embeddings: give its arguments"
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, table.num_embeddings, (1, _PROBE_TOKENS), generator=generator)
    return {"input_ids": tokens.to(table.weight.device)}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no jitter: the probe has to see each router's formula and nothing else."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _watching(model: nn.Module, seen: _Seen) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(_entering(seen, name)).remove)
            stack.callback(module.register_forward_hook(_left(seen, name), with_kwargs=True).remove)
        stack.enter_context(_TopKWatch(seen))
        yield


class _TopKWatch(TorchFunctionMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_topk(func) and self.seen.stack and not self.seen.testing:
            name = self.seen.stack[-1]
            self.seen.topk.setdefault(name, []).append(result.indices)
            self.seen.widths.setdefault(name, []).append(args[0].shape[-1])
        return result


def _entering(seen: _Seen, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not seen.testing:
            seen.stack.append(name)
            seen.called[name] = seen.called.get(name, 0) + 1

    return hook


def _left(seen: _Seen, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if seen.testing:
            return
        seen.stack.pop()
        if seen.called[name] > 1:
            return
        where = slots(output)
        if where is not None and any(output[where.ids] is one for one in seen.ids):
            return  # a wrapper that hands on what the router inside it returned
        if where is None and not (_is_mixture(module) and name in seen.topk):
            return
        seen.testing = True  # calls of the module from here on are ours
        try:
            seen.sites.append(
                _site(seen, name, module, where, output, lambda: module.forward(*args, **kwargs))
            )
        except LookupError as error:
            seen.refused[name] = str(error)
        finally:
            seen.testing = False

    return hook


def _site(
    seen: _Seen, name: str, module: nn.Module, where: Slots | None, output: Any, run: Callable[[], Any]
) -> Site:
    """Bind a router, by its formula or by its top-k. Raises LookupError, saying why neither is possible."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    bind = partial(Site, name=name, layer=int(number.group(1)) if number else len(seen.sites), module=module)
    why = ""
    if where is not None:
        seen.ids.append(output[where.ids])
        logits, weights, ids = (output[i] for i in where)
        try:
            # one more class than experts is one to skip or to copy: what is masked for it follows no formula
            if getattr(module, "num_experts", logits.shape[1]) != logits.shape[1]:
                raise LookupError("it chooses among more than its experts")
            rule = fit(module, logits, weights, ids)
            dtypes = logits.dtype, weights.dtype
            return bind(
                num_experts=logits.shape[1], top_k=ids.shape[1], slots=where, rule=rule, dtypes=dtypes
            )
        except LookupError as error:
            why = f"{error}, and "
    calls, widths = seen.topk.get(name, []), seen.widths.get(name, [])
    if len(calls) != 1:
        raise LookupError(f"{why}it calls top-k {len(calls)} times")
    native = calls[0].reshape(-1, calls[0].shape[-1])
    try:
        check_swap(run, native, widths[0])
    except LookupError as error:
        raise LookupError(f"{why}{error}") from None
    return bind(num_experts=widths[0], top_k=native.shape[1], slots=None, rule=None)


def _is_mixture(module: nn.Module) -> bool:
    return hasattr(module, "experts") or _MIXTURE.search(type(module).__name__) is not None


def _uncovered(model: nn.Module, seen: _Seen, bound: list[str]) -> Iterator[nn.Module]:
    """Mixture modules that were not called; raises UnsupportedRouter for one that was, and has no router."""
    for name, why in seen.refused.items():
        if not any(site.startswith(f"{name}.") for site in bound):
            raise UnsupportedRouter(name, type(model.get_submodule(name)).__name__, why)
    for name, module in model.named_modules():
        if not _is_mixture(module):
            continue
        covered = any(
            name == site or site.startswith(f"{name}.") or name.startswith(f"{site}.") for site in bound
        )
        if not hasattr(module, "experts"):  # not a block but a part of one: experts beside the router
            covered = covered or any(
                site == block or site.startswith(f"{block}.")
                for block in _blocks(model, name)
                for site in bound
            )
        if covered:
            continue
        if seen.called.get(name):
            inner, kind = _router_in(name, module)
            raise UnsupportedRouter(inner, kind, "it returns no (logits, weights, ids) and calls no top-k")
        yield module


def _blocks(model: nn.Module, name: str) -> Iterator[str]:
    """Where the router of a part could be: its parent, and mixture blocks further out, around adapters."""
    parent = block = name.rpartition(".")[0]
    yield parent
    while block:
        block = block.rpartition(".")[0]
        if hasattr(model.get_submodule(block), "experts"):
            yield block


def _router_in(name: str, block: nn.Module) -> tuple[str, str]:
    """(name, class) of what to name in a refusal: the router inside a block, or the block."""
    for inner, module in block.named_modules(prefix=name):
        if _ROUTER.search(type(module).__name__):
            return inner, type(module).__name__
    return name, type(block).__name__


def _unsupported(site: Site, why: str) -> UnsupportedRouter:
    return UnsupportedRouter(site.name, type(site.module).__name__, why)
