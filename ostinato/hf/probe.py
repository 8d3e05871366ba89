"""Find the routers of a model by watching a forward.

Every wrapper (PEFT, FSDP2, a device map, checkpointing) supports a forward, and it shows what names do not
tell: which modules choose experts, with which arguments, in which order, how often.
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
    find_slots,
    fit_rule,
    is_topk,
)

_PROBE_TOKENS = 48
# classes that route or hold experts, to recognise mixtures in which no router was observed
_MIXTURE = re.compile(r"(?:Moe|MoE|MoA)(?:Block|Layer)?$|SparseMLP$|Experts$|Router$|Gating$")
_ROUTER = re.compile(r"(?:Router|Gate|Gating)$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A router. Its experts are replayed by a formula if it has ``slots``; otherwise by swapping its
    top-k."""

    name: str
    layer: int  # the first number in its name
    module: nn.Module
    num_experts: int
    top_k: int
    slots: Slots | None
    rule: WeightRule | None
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of logits and weights when the rule was fitted


@dataclass(slots=True)
class _Observations:
    """Observations of a forward."""

    called: dict[str, int] = field(default_factory=dict)  # module name -> calls
    sites: list[Site] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # module name -> reason
    ids: list[Tensor] = field(default_factory=list)  # ids that routers returned, to recognise them
    topk: dict[str, list[Tensor]] = field(
        default_factory=dict
    )  # module name -> native ids of its top-k calls
    widths: dict[str, list[int]] = field(default_factory=dict)  # module name -> scores per row in these calls
    stack: list[str] = field(default_factory=list)
    testing: bool = False


def find_routers(model: nn.Module, example: Mapping[str, Any] | None) -> tuple[list[Site], list[nn.Module]]:
    """Watch a forward of ``model(**example)`` without dropout and gradients (None: random tokens). Returns
    (routers in the order of layers, mixture layers that this forward did not call).

    Raises UnsupportedRouter for the first mixture layer that cannot be replayed exactly, for a router that
    is called several times, for layers with different top-k, and without any router. Raises ValueError if
    the model needs an example.
    """
    record = _Observations()
    with _observe_forward(model, record), _set_evaluation(model), torch.no_grad():
        model(**(example if example is not None else _make_example(model)))
    sites = sorted(record.sites, key=lambda site: site.layer)  # stable: within a layer, in order of execution
    for site in sites:
        if record.called[site.name] != 1:
            raise _make_unsupported_error(site, f"one forward calls it {record.called[site.name]} times")
    if len({site.top_k for site in sites}) > 1:
        raise _make_unsupported_error(
            sites[0], f"layers differ in experts per token: {[site.top_k for site in sites]}"
        )
    idle_modules = list(_find_uncovered(model, record, [site.name for site in sites]))
    if not sites:
        raise UnsupportedRouter(
            "", type(model).__name__, "no router showed itself; is it a mixture of experts?"
        )
    return sites, idle_modules


def _make_example(model: nn.Module) -> dict[str, Any]:
    """Make inputs of random tokens, which suffice to observe routers. Raises ValueError without an embedding
    of tokens."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    embedding = embeddings() if callable(embeddings) else None
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(
            f"example is None; {type(model).__name__} has no input embeddings: give its arguments"
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, embedding.num_embeddings, (1, _PROBE_TOKENS), generator=generator)
    return {"input_ids": tokens.to(embedding.weight.device)}


@contextmanager
def _set_evaluation(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and jitter until the context ends, so that a router's weights follow its formula."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _observe_forward(model: nn.Module, record: _Observations) -> Iterator[None]:
    """Record calls, outputs and top-k of all modules until the context ends."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(_make_entering_hook(record, name)).remove)
            stack.callback(
                module.register_forward_hook(_make_leaving_hook(record, name), with_kwargs=True).remove
            )
        stack.enter_context(_TopKWatch(record))
        yield


class _TopKWatch(TorchFunctionMode):
    """Records the ids of each top-k, under the module that is running."""

    def __init__(self, record: _Observations) -> None:
        super().__init__()
        self.seen = record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_topk(func) and self.seen.stack and not self.seen.testing:
            name = self.seen.stack[-1]
            self.seen.topk.setdefault(name, []).append(result.indices)
            self.seen.widths.setdefault(name, []).append(args[0].shape[-1])
        return result


def _make_entering_hook(record: _Observations, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not record.testing:
            record.stack.append(name)
            record.called[name] = record.called.get(name, 0) + 1

    return hook


def _make_leaving_hook(record: _Observations, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if record.testing:
            return
        record.stack.pop()
        if record.called[name] > 1:
            return
        slot_indices = find_slots(output)
        if slot_indices is not None and any(output[slot_indices.ids] is ids for ids in record.ids):
            return  # a wrapper that returns the output of the router inside it
        if slot_indices is None and not (_is_mixture(module) and name in record.topk):
            return
        record.testing = True  # the calls of the module from here on are tests
        try:
            record.sites.append(
                _make_site(
                    record, name, module, slot_indices, output, lambda: module.forward(*args, **kwargs)
                )
            )
        except LookupError as error:
            record.refused[name] = str(error)
        finally:
            record.testing = False

    return hook


def _make_site(
    record: _Observations,
    name: str,
    module: nn.Module,
    slot_indices: Slots | None,
    output: Any,
    run: Callable[[], Any],
) -> Site:
    """Bind a router by its formula or by its top-k. Raises LookupError with the reason if neither is
    possible."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    make_site = partial(
        Site, name=name, layer=int(number.group(1)) if number else len(record.sites), module=module
    )
    reason = ""
    if slot_indices is not None:
        record.ids.append(output[slot_indices.ids])
        logits, weights, ids = (output[i] for i in slot_indices)
        try:
            # an additional class skips or copies the token: weights masked for it follow no formula
            if getattr(module, "num_experts", logits.shape[1]) != logits.shape[1]:
                raise LookupError("it chooses among more than its experts")
            rule = fit_rule(module, logits, weights, ids)
            dtypes = logits.dtype, weights.dtype
            return make_site(
                num_experts=logits.shape[1], top_k=ids.shape[1], slots=slot_indices, rule=rule, dtypes=dtypes
            )
        except LookupError as error:
            reason = f"{error}, and "
    topk_ids, widths = record.topk.get(name, []), record.widths.get(name, [])
    if len(topk_ids) != 1:
        raise LookupError(f"{reason}it calls top-k {len(topk_ids)} times")
    native = topk_ids[0].reshape(-1, topk_ids[0].shape[-1])
    try:
        check_swap(run, native, widths[0])
    except LookupError as error:
        raise LookupError(f"{reason}{error}") from None
    return make_site(num_experts=widths[0], top_k=native.shape[1], slots=None, rule=None)


def _is_mixture(module: nn.Module) -> bool:
    return hasattr(module, "experts") or _MIXTURE.search(type(module).__name__) is not None


def _find_uncovered(model: nn.Module, record: _Observations, site_names: list[str]) -> Iterator[nn.Module]:
    """Yield mixture modules that were not called. Raises UnsupportedRouter for a called module without a
    router, and for a router that can be replayed neither way."""
    for name, reason in record.refused.items():
        if not any(site.startswith(f"{name}.") for site in site_names):
            raise UnsupportedRouter(name, type(model.get_submodule(name)).__name__, reason)
    for name, module in model.named_modules():
        if not _is_mixture(module):
            continue
        is_covered = any(
            name == site or site.startswith(f"{name}.") or name.startswith(f"{site}.") for site in site_names
        )
        if not hasattr(module, "experts"):  # not a block but a part of a block: experts beside the router
            is_covered = is_covered or any(
                site == block or site.startswith(f"{block}.")
                for block in _list_blocks(model, name)
                for site in site_names
            )
        if is_covered:
            continue
        if record.called.get(name):
            inner, kind = _find_router(name, module)
            raise UnsupportedRouter(inner, kind, "it returns no (logits, weights, ids) and calls no top-k")
        yield module


def _list_blocks(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the blocks that may have the router of a part: its parent, and outer mixture blocks, around
    adapters."""
    parent = block = name.rpartition(".")[0]
    yield parent
    while block:
        block = block.rpartition(".")[0]
        if hasattr(model.get_submodule(block), "experts"):
            yield block


def _find_router(name: str, block: nn.Module) -> tuple[str, str]:
    """Return (name, class) for an error message: of the router inside a block, or of the block if there is
    none."""
    for inner_name, module in block.named_modules(prefix=name):
        if _ROUTER.search(type(module).__name__):
            return inner_name, type(module).__name__
    return name, type(block).__name__


def _make_unsupported_error(site: Site, reason: str) -> UnsupportedRouter:
    return UnsupportedRouter(site.name, type(site.module).__name__, reason)
