"""A causal language model of ``transformers`` as the trainer's base: ``model.base.Base``.

Weights are frozen. Factors, routes and packed attention reach the layers by hooks and by one argument of its
attention function; a lock holds them in place for one forward, so a sampler in another thread waits for it. A
layer that is computed again in backward gets them again. What the model is able to do is tried once, at the
start: whether rows of several sequences may lie in one pass, and how its logits follow from its last states.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ostinato.hf.attention import NAME, attention
from ostinato.hf.factors import PreparedSites, Site, find_sites
from ostinato.hf.facts import ModelFacts, measured
from ostinato.hf.replay import Replay, attach_replay
from ostinato.hf.routers import UnsupportedRouter
from ostinato.hf.routes import Routes
from ostinato.model.config_keys import quantisation_of
from ostinato.model.flops import FlopModel
from ostinato.model.lora import Lora
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.published import Weights
from ostinato.model.shapes import AdapterSpec
from ostinato.types import Segment

MISSING = 'model.backend is "transformers", which needs a package: pip install "ostinato[transformers]"'
_RECURRENT = re.compile(r"mamba|deltanet|shortconv|recurrent|rglru|linearattention|lightning|rwkv", re.I)
_KINDS = ("layer_types", "layers_block_type")  # keys of a configuration: kinds of its layers
_LAYERS = {"full_attention", "sliding_attention"}  # kinds whose rows may be packed
_FACTORS = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)


class TransformersModel:
    """See the module. ``packs``: several sequences go through one pass, prompts shared by siblings; otherwise
    every sequence of a microbatch is a pass of its own. ``pads``: padding before a row, masked, leaves its
    logits as they are. Raises ValueError, in one sentence, for a model that cannot be trained exactly."""

    fp32_head = False

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        found = self.model.get_decoder()
        self._body: Any = self.model.model if found is self.model else found
        self._head: Any = self.model.get_output_embeddings()
        if not isinstance(self._head, nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear head of token logits; it is no causal LM")
        text = self.model.config.get_text_config()
        self._replay = _routers(model, text)
        self.config = ModelFacts.of(text, self._replay)
        self.sites = find_sites(self.model)
        self._lock = threading.RLock()
        self._active: PreparedSites | None = None
        self._kept: dict[str, nn.Parameter] = {}
        self._hooks = [*self._hooked()]
        self._head_rule = self._fitted_head(text)
        self.packs = self._can_pack(text)
        self.pads = not _is_recurrent(self._body, text) and _can_pad(self.model, self.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    storage = dtype

    @property
    def head_weight(self) -> Tensor | None:
        plain = self._head_rule == (1.0, None) and self._head.bias is None
        return self._head.weight if plain else None

    @property
    def num_moe_layers(self) -> int:
        return len(self.config.moe.layers) if self.config.moe else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def trainable(self, on: bool) -> TransformersModel:
        """Its weights stay frozen: nothing but factors is trained."""
        assert not on
        return self

    def flops(self, adapter: AdapterSpec | None, **options: bool) -> FlopModel:
        return measured(self.config, self.sites, adapter, **options)

    def logits(self, hidden: Tensor, *, ops: Ops = TORCH_OPS) -> Tensor:
        """[R, D] -> [R, V], with the soft cap and the factor of the family."""
        factor, cap = self._head_rule
        found = self._head(hidden)
        if factor != 1.0:
            found = found * factor
        return found if cap is None else torch.tanh(found / cap) * cap

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Any,
        *,
        adapters: Any = None,
        routing: Tensor | None = None,
        routing_checked: bool = False,
        ops: Ops = TORCH_OPS,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``Decoder.forward``; ``attend`` is a ``PackedAttention``."""
        factors = adapters.prepared(self.dtype) if adapters is not None else None
        if self.packs:
            return self._run(tokens, positions, attend, factors, routing, recompute)
        found = []
        for one in attend.segments:
            rows = torch.cat(
                (torch.arange(one.prefix_start, one.prefix_stop), torch.arange(one.start, one.stop))
            ).to(tokens.device)
            taken = None if routing is None else routing[rows]
            hidden, native = self._run(tokens[rows], positions[rows], None, factors, taken, recompute)
            own = one.start - one.stop
            found.append((hidden[own:], None if native is None else native[own:]))
        hidden, native = zip(*found, strict=True)
        return torch.cat(hidden), None if native[0] is None else torch.cat(native)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: PackedAttention | None,
        factors: PreparedSites | None,
        routing: Tensor | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of rows [T]: of one sequence without ``attend``."""
        with self.using(factors, packed=attend is not None), self._checkpointing(recompute, factors, attend):
            given = {} if attend is None else {"attend": attend}
            with self._routed(routing) as tape:
                out = self._body(
                    input_ids=tokens[None], position_ids=positions[None], use_cache=False, **given
                )
                native = None
                if tape is not None:
                    native = torch.from_numpy(tape.native().dense().astype("int16")).to(tokens.device)
        return out.last_hidden_state[0], native

    def _routed(self, routing: Tensor | None) -> AbstractContextManager[Any]:
        if self._replay is None or self.config.moe is None:
            return nullcontext()
        if routing is None:
            return self.recorded()
        return self._replay.using(Routes.of(routing.cpu().numpy(), self.config.moe.num_experts))

    def recorded(self) -> AbstractContextManager[Any]:
        """A tape of what routers choose; None of a dense model."""
        return nullcontext() if self._replay is None else self._replay.record()

    @contextmanager
    def using(self, factors: PreparedSites | None, *, packed: bool = False) -> Iterator[None]:
        """The model under ``factors``, for this thread alone."""
        with self._lock:
            before = self._active, self._implementation
            self._active = factors
            if packed:
                self._implementation = NAME
            try:
                yield
            finally:
                self._active, self._implementation = before

    @property
    def _implementation(self) -> str:
        return self._body.config._attn_implementation

    @_implementation.setter
    def _implementation(self, name: str) -> None:
        self._body.config._attn_implementation_internal = name

    @contextmanager
    def _checkpointing(
        self, on: bool, factors: PreparedSites | None, attend: PackedAttention | None
    ) -> Iterator[None]:
        """Layers keep their inputs alone. Where backward runs one again, it is under the same factors and
        routes."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [one for one in self._body.modules() if isinstance(one, GradientCheckpointingLayer)]
        if not on or not layers:
            yield
            return

        @contextmanager
        def again(tape: Any) -> Iterator[None]:
            replay = self._replay
            routes = replay.again(tape) if replay is not None and tape is not None else nullcontext()
            with self.using(factors, packed=attend is not None), routes:
                yield

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), again(None if self._replay is None else self._replay.tape)

        run: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func, layer.training = True, run, True
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing, layer.training = False, False

    def _hooked(self) -> Iterator[Any]:
        """Handles of the hooks that apply the active factors."""
        inside: dict[str, list[Site]] = {}
        for site in self.sites:
            module = self.model.get_submodule(site.module)
            if site.experts is None:
                yield module.register_forward_hook(self._adding(site.name))
            else:
                inside.setdefault(site.module, []).append(site)
        for name, sites in inside.items():
            module = self.model.get_submodule(name)
            yield module.register_forward_pre_hook(self._entering(sites))
            yield module.register_forward_hook(self._leaving(sites), always_call=True)

    def _adding(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._active is None or (lora := self._active.at.get(name)) is None:
                return None
            return output + F.linear(F.linear(args[0], lora.a) * lora.scale, lora.b).to(output.dtype)

        return hook

    def _entering(self, sites: Sequence[Site]) -> Callable[..., None]:
        """In place of the parameters, their sums with the updates."""

        def hook(module: nn.Module, args: Any) -> None:
            for site in sites:
                if self._active is None or (lora := self._active.at.get(site.name)) is None:
                    continue
                own = site.name.rpartition(".")[2]
                weight = module._parameters.pop(own)
                assert weight is not None
                self._kept[site.name] = weight
                setattr(module, own, weight + _update(lora, site))

        return hook

    def _leaving(self, sites: Sequence[Site]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for site in sites:
                if (weight := self._kept.pop(site.name, None)) is not None:
                    own = site.name.rpartition(".")[2]
                    module.__dict__.pop(own, None)
                    module._parameters[own] = weight

        return hook

    @torch.no_grad()
    def _fitted_head(self, text: Any) -> tuple[float, float | None]:
        """(factor, soft cap) that lead from the head's products to the model's logits."""
        tokens = _tokens(self.config.vocab_size, 12).to(self.device)
        positions = torch.arange(12, device=self.device)
        hidden, _ = self._run(tokens, positions, None, None, None, recompute=False)
        theirs = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        cap = getattr(text, "final_logit_softcapping", None)
        given = [
            float(v) for name in _FACTORS if isinstance(v := getattr(text, name, None), int | float) and v
        ]
        for factor in (1.0, *given, *(1.0 / one for one in given)):
            self._head_rule = (factor, cap)
            if _apart(self.logits(hidden), theirs) < _bound(self.dtype):
                return self._head_rule
        raise ValueError(
            f"the logits of {self.config.model_type} do not follow from its last states by its head, a factor"
            ' and a soft cap; model.backend "transformers" cannot train it'
        )

    @torch.no_grad()
    def _can_pack(self, text: Any) -> bool:
        """Try two siblings and a stranger, packed and alone."""
        if _is_recurrent(self._body, text):
            return False
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attention)
        edges = ((0, 7, 0, 0), (7, 12, 0, 7), (12, 15, 0, 7), (15, 21, 0, 0))
        segments = tuple(Segment(start=a, stop=b, prefix_start=c, prefix_stop=d) for a, b, c, d in edges)
        rows = PackedAttention(segments)
        places = [torch.arange(s.stop - s.start) + s.prefix_stop - s.prefix_start for s in segments]
        tokens, positions = (
            _tokens(self.config.vocab_size, 21).to(self.device),
            torch.cat(places).to(self.device),
        )
        self.packs = False
        alone, _ = self(tokens, positions, rows)
        self.packs = True
        try:
            packed, _ = self(tokens, positions, rows)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            return False
        return _apart(packed, alone) < _bound(self.dtype)


def _is_recurrent(body: nn.Module, text: Any) -> bool:
    """Whether layers have a state, which rows of others, or padding, would enter."""
    kinds = {kind for name in _KINDS for kind in getattr(text, name, None) or ()}
    return bool(kinds - _LAYERS) or any(_RECURRENT.search(type(part).__name__) for part in body.modules())


@torch.no_grad()
def _can_pad(model: Any, vocab_size: int) -> bool:
    """Whether a row says behind padding what it says alone: of its tokens, and of one more by the cache."""
    parameter = next(model.parameters())
    tokens, width = _tokens(vocab_size, 9).to(parameter.device), 4

    def logits(padding: int) -> Tensor:
        ids = torch.cat((tokens.new_zeros(padding), tokens))[None]
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        positions, mask = (places - padding).clamp_min(0), (places >= padding).long()
        rows, cache = [], None
        for begin, end in ((0, ids.shape[1] - 1), (ids.shape[1] - 1, ids.shape[1])):
            out = model(
                input_ids=ids[:, begin:end],
                position_ids=positions[:, begin:end],
                attention_mask=mask[:, :end] if padding else None,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    try:
        return _apart(logits(width), logits(0)) < _bound(parameter.dtype)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return False


def _update(lora: Lora, site: Site) -> Tensor:
    """alpha / r * B A of the experts, [E, out, in], or as the parameter lies."""
    found = torch.matmul(lora.b, lora.a) * lora.scale
    return found.mT if site.transposed else found


def _routers(model: nn.Module, text: Any) -> Replay | None:
    """The routers of a mixture; None of a dense model."""
    many = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if not any(isinstance(one, int) and one > 1 for one in many) and not any(
        "expert" in type(one).__name__.lower() for one in model.modules()
    ):
        return None
    try:
        return attach_replay(model)
    except UnsupportedRouter as error:
        if "no router showed itself" in str(error):
            return None
        raise ValueError(f"routes of this mixture cannot be replayed: {error}") from error


def _tokens(vocab_size: int, number: int) -> Tensor:
    return torch.randint(
        min(4, vocab_size - 1), vocab_size, (number,), generator=torch.Generator().manual_seed(0)
    )


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|; infinite where a number is not finite."""
    gap = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-12))
    return gap if gap == gap else float("inf")


def _bound(dtype: torch.dtype) -> float:
    return 1e-4 if dtype.itemsize >= 4 else 3e-2


def load(folder: Path, *, dtype: torch.dtype, device: str) -> TransformersModel:
    """The model in ``folder``. Raises ValueError, in one sentence, for one that transformers cannot load
    by its own code, and for one that cannot be trained exactly."""
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(MISSING) from error
    given: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        raw = config.to_dict()
        if quantisation_of(raw) is not None:
            weights = Weights(folder, raw)
            for part in (config, config.get_text_config()):
                if hasattr(part, "quantization_config"):
                    del part.quantization_config
            plain = dict(weights.tensors(dtype))
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, about = kind.from_pretrained(None, config=config, state_dict=plain, **given)
        else:
            given |= {"local_files_only": True, "trust_remote_code": False}
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **given)
            model, about = loaded
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"transformers cannot load {folder}: {said}") from error
    if lacking := sorted(about["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(lacking)} tensors of {type(model).__name__}, the first is {lacking[0]}; "
            "download the model again"
        )
    return TransformersModel(torch.nn.Module.to(model, device))
