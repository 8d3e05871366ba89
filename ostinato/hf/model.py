"""A causal language model of ``transformers`` as the trainer's base: ``model.base.Base``.

Weights are frozen. Factors, routes and packed attention reach the layers by hooks and by an argument of its
attention function; a lock keeps them in place for a forward, so a sampler in another thread waits for it. A
layer that is computed again in backward gets them again. The abilities of the model are tested once, at the
start: whether a pass may have rows of several sequences, and how its logits follow from its last states.
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

from ostinato.hf.attention import NAME, compute_attention
from ostinato.hf.factors import PreparedSites, Site, find_sites
from ostinato.hf.facts import ModelFacts, count_flops
from ostinato.hf.replay import Replay, attach_replay
from ostinato.hf.routers import UnsupportedRouter
from ostinato.hf.routes import Routes
from ostinato.model.config_keys import read_quantisation
from ostinato.model.flops import FlopModel
from ostinato.model.lora import Lora
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.published import Weights
from ostinato.model.shapes import AdapterSpec
from ostinato.types import Segment

MISSING = 'model.backend is "transformers", which needs a package: pip install "ostinato[transformers]"'
_RECURRENT = re.compile(r"mamba|deltanet|shortconv|recurrent|rglru|linearattention|lightning|rwkv", re.I)
_KINDS = ("layer_types", "layers_block_type")  # keys of a configuration for the kinds of its layers
_LAYERS = {"full_attention", "sliding_attention"}  # kinds whose rows may be packed
_FACTORS = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)


class TransformersModel:
    """A frozen model in evaluation mode; see the module. ``packs``: several sequences share a pass, and
    siblings their prompt; otherwise every sequence of a microbatch is a pass of its own. ``pads``: masked
    padding before a row does not change its logits. Making it runs test forwards and registers hooks. Raises
    ValueError, in one sentence, for a model that cannot be trained exactly."""

    fp32_head = False

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        decoder = self.model.get_decoder()
        self._body: Any = self.model.model if decoder is self.model else decoder
        self._head: Any = self.model.get_output_embeddings()
        if not isinstance(self._head, nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear head of token logits; it is no causal LM")
        text_config = self.model.config.get_text_config()
        self._replay = _find_routers(model, text_config)
        self.config = ModelFacts.of(text_config, self._replay)
        self.sites = find_sites(self.model)
        self._lock = threading.RLock()
        self._active_factors: PreparedSites | None = None
        self._frozen: dict[str, nn.Parameter] = {}
        self._hook_handles = [*self._add_hooks()]
        self._head_rule = self._fit_head(text_config)
        self.packs = self._test_packing(text_config)
        self.pads = not _is_recurrent(self._body, text_config) and _can_pad(
            self.model, self.config.vocab_size
        )

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    storage = dtype

    @property
    def head_weight(self) -> Tensor | None:
        """The head's weight, if logits are plain products with it; else None."""
        plain = self._head_rule == (1.0, None) and self._head.bias is None
        return self._head.weight if plain else None

    @property
    def num_moe_layers(self) -> int:
        return len(self.config.moe.layers) if self.config.moe else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def set_trainable(self, on: bool) -> TransformersModel:
        """Return itself; ``on`` must be False, since only factors are trained."""
        assert not on
        return self

    def flops(self, adapter: AdapterSpec | None, **options: bool) -> FlopModel:
        return count_flops(self.config, self.sites, adapter, **options)

    def logits(self, hidden: Tensor, *, ops: Ops = TORCH_OPS) -> Tensor:
        """Compute logits [R, V] of hidden states [R, D], with the soft cap and the factor of the family."""
        return self._apply_head_rule(self._head(hidden))

    def _apply_head_rule(self, logits: Tensor) -> Tensor:
        """Return ``logits``, the products of the head, with factor and soft cap."""
        factor, cap = self._head_rule
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

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
        """Compute (hidden states, native routes or None) as ``Decoder.forward`` does; ``attend`` is a
        ``PackedAttention``. Without ``packs`` every segment is a pass of its own, after its prefix."""
        factors = adapters.prepare(self.dtype) if adapters is not None else None
        if self.packs:
            return self._run(tokens, positions, attend, factors, routing, recompute)
        results = []
        for segment in attend.segments:
            rows = torch.cat(
                (
                    torch.arange(segment.prefix_start, segment.prefix_stop),
                    torch.arange(segment.start, segment.stop),
                )
            ).to(tokens.device)
            routes = None if routing is None else routing[rows]
            hidden, native = self._run(tokens[rows], positions[rows], None, factors, routes, recompute)
            start = segment.start - segment.stop
            results.append((hidden[start:], None if native is None else native[start:]))
        hidden, native = zip(*results, strict=True)
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
        """Run a forward of rows [T]; without ``attend`` they are a single sequence."""
        with (
            self.using(factors, packed=attend is not None),
            self._checkpoint_layers(recompute, factors, attend),
        ):
            options = {} if attend is None else {"attend": attend}
            with self._enter_routing(routing) as tape:
                out = self._body(
                    input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options
                )
                native = None
                if tape is not None:
                    native = torch.from_numpy(tape.native().dense().astype("int16")).to(tokens.device)
        return out.last_hidden_state[0], native

    def _enter_routing(self, routing: Tensor | None) -> AbstractContextManager[Any]:
        """Return a context that replays ``routing``, or records without one; empty for a dense model."""
        if self._replay is None or self.config.moe is None:
            return nullcontext()
        if routing is None:
            return self.record_routing()
        return self._replay.using(Routes.of(routing.cpu().numpy(), self.config.moe.num_experts))

    def record_routing(self) -> AbstractContextManager[Any]:
        """Return a context that records the choices of routers on a tape; of a dense model it gives None."""
        return nullcontext() if self._replay is None else self._replay.record()

    @contextmanager
    def using(self, factors: PreparedSites | None, *, packed: bool = False) -> Iterator[None]:
        """Apply ``factors`` to the model until the context ends; ``packed``: with our attention too. Other
        threads wait for the end."""
        with self._lock:
            previous = self._active_factors, self._implementation
            self._active_factors = factors
            if packed:
                self._implementation = NAME
            try:
                yield
            finally:
                self._active_factors, self._implementation = previous

    @property
    def _implementation(self) -> str:
        return self._body.config._attn_implementation

    @_implementation.setter
    def _implementation(self, name: str) -> None:
        self._body.config._attn_implementation_internal = name

    @contextmanager
    def _checkpoint_layers(
        self, on: bool, factors: PreparedSites | None, attend: PackedAttention | None
    ) -> Iterator[None]:
        """Let layers save only their inputs within the context, if ``on``. Backward runs a layer again with
        the same factors and routes."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [part for part in self._body.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not on or not layers:
            yield
            return

        @contextmanager
        def restore(tape: Any) -> Iterator[None]:
            replay = self._replay
            routes = replay.restore(tape) if replay is not None and tape is not None else nullcontext()
            with self.using(factors, packed=attend is not None), routes:
                yield

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), restore(None if self._replay is None else self._replay.tape)

        run: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func, layer.training = True, run, True
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing, layer.training = False, False

    def _add_hooks(self) -> Iterator[Any]:
        """Register the hooks that apply the active factors; yield their handles."""
        expert_sites: dict[str, list[Site]] = {}
        for site in self.sites:
            module = self.model.get_submodule(site.module)
            if site.experts is None:
                yield module.register_forward_hook(self._make_adding_hook(site.name))
            else:
                expert_sites.setdefault(site.module, []).append(site)
        for name, sites in expert_sites.items():
            module = self.model.get_submodule(name)
            yield module.register_forward_pre_hook(self._make_entering_hook(sites))
            yield module.register_forward_hook(self._make_leaving_hook(sites), always_call=True)

    def _make_adding_hook(self, name: str) -> Callable[..., Tensor | None]:
        """Make a hook that adds the update of a linear map to its output."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._active_factors is None or (lora := self._active_factors.at.get(name)) is None:
                return None
            return output + F.linear(F.linear(args[0], lora.a) * lora.scale, lora.b).to(output.dtype)

        return hook

    def _make_entering_hook(self, sites: Sequence[Site]) -> Callable[..., None]:
        """Make a hook that replaces the parameters of experts by their sums with the updates."""

        def hook(module: nn.Module, args: Any) -> None:
            for site in sites:
                if self._active_factors is None or (lora := self._active_factors.at.get(site.name)) is None:
                    continue
                parameter = site.name.rpartition(".")[2]
                weight = module._parameters.pop(parameter)
                assert weight is not None
                self._frozen[site.name] = weight
                setattr(module, parameter, weight + _compute_update(lora, site))

        return hook

    def _make_leaving_hook(self, sites: Sequence[Site]) -> Callable[..., None]:
        """Make a hook that restores the parameters of experts."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for site in sites:
                if (weight := self._frozen.pop(site.name, None)) is not None:
                    parameter = site.name.rpartition(".")[2]
                    module.__dict__.pop(parameter, None)
                    module._parameters[parameter] = weight

        return hook

    @torch.no_grad()
    def _fit_head(self, text_config: Any) -> tuple[float, float | None]:
        """Find and store the (factor, soft cap) that turn the head's products into the model's logits.
        Raises ValueError if there are none."""
        tokens = _draw_tokens(self.config.vocab_size, 12).to(self.device)
        positions = torch.arange(12, device=self.device)
        hidden, _ = self._run(tokens, positions, None, None, None, recompute=False)
        # not a call: a sharded model is gathered layer by layer, without its outermost hooks
        out = self.model.forward(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        expected = out.logits[0]
        cap = getattr(text_config, "final_logit_softcapping", None)
        scales = [
            float(value)
            for name in _FACTORS
            if isinstance(value := getattr(text_config, name, None), int | float) and value
        ]
        for factor in (1.0, *scales, *(1.0 / scale for scale in scales)):
            self._head_rule = (factor, cap)
            if _measure_difference(self._apply_head_rule(self._head(hidden)), expected) < _choose_bound(
                self.dtype
            ):
                return self._head_rule
        raise ValueError(
            f"the logits of {self.config.model_type} do not follow from its last states by its head, a factor"
            ' and a soft cap; model.backend "transformers" cannot train it'
        )

    @torch.no_grad()
    def _test_packing(self, text_config: Any) -> bool:
        """Register our attention, and return whether packing changes nothing: compare two siblings and an
        unrelated sequence, packed and single. Sets ``packs`` meanwhile."""
        if _is_recurrent(self._body, text_config):
            return False
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, compute_attention)
        edges = ((0, 7, 0, 0), (7, 12, 0, 7), (12, 15, 0, 7), (15, 21, 0, 0))
        segments = tuple(Segment(start=a, stop=b, prefix_start=c, prefix_stop=d) for a, b, c, d in edges)
        rows = PackedAttention(segments)
        places = [torch.arange(s.stop - s.start) + s.prefix_stop - s.prefix_start for s in segments]
        tokens, positions = (
            _draw_tokens(self.config.vocab_size, 21).to(self.device),
            torch.cat(places).to(self.device),
        )
        self.packs = False
        single, _ = self(tokens, positions, rows)
        self.packs = True
        try:
            packed, _ = self(tokens, positions, rows)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            return False
        return _measure_difference(packed, single) < _choose_bound(self.dtype)


def _is_recurrent(body: nn.Module, text_config: Any) -> bool:
    """Return whether layers have a state that other sequences, or padding, would change."""
    kinds = {kind for name in _KINDS for kind in getattr(text_config, name, None) or ()}
    return bool(kinds - _LAYERS) or any(_RECURRENT.search(type(part).__name__) for part in body.modules())


@torch.no_grad()
def _can_pad(model: Any, vocab_size: int) -> bool:
    """Whether padding changes no logits: of the tokens of a row, and of another token by the cache."""
    parameter = next(model.parameters())
    tokens, width = _draw_tokens(vocab_size, 9).to(parameter.device), 4

    def compute_logits(padding: int) -> Tensor:
        ids = torch.cat((tokens.new_zeros(padding), tokens))[None]
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        positions, mask = (places - padding).clamp_min(0), (places >= padding).long()
        rows, cache = [], None
        for start, end in ((0, ids.shape[1] - 1), (ids.shape[1] - 1, ids.shape[1])):
            out = model.forward(
                input_ids=ids[:, start:end],
                position_ids=positions[:, start:end],
                attention_mask=mask[:, :end] if padding else None,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    try:
        return _measure_difference(compute_logits(width), compute_logits(0)) < _choose_bound(parameter.dtype)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return False


def _compute_update(lora: Lora, site: Site) -> Tensor:
    """Compute alpha / r * B A of the experts, [E, out, in], or transposed as the parameter is stored."""
    update = torch.matmul(lora.b, lora.a) * lora.scale
    return update.mT if site.transposed else update


def is_mixture(model: nn.Module, text_config: Any) -> bool:
    """Return whether the model has experts."""
    counts = [
        getattr(text_config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ]
    return any(isinstance(count, int) and count > 1 for count in counts) or any(
        "expert" in type(part).__name__.lower() for part in model.modules()
    )


def _find_routers(model: nn.Module, text_config: Any) -> Replay | None:
    """Attach a replay to the routers of a mixture; None for a dense model, or if no router is observed.
    Raises ValueError for an unsupported router."""
    if not is_mixture(model, text_config):
        return None
    try:
        return attach_replay(model)
    except UnsupportedRouter as error:
        if "no router showed itself" in str(error):
            return None
        raise ValueError(f"routes of this mixture cannot be replayed: {error}") from error


def _draw_tokens(vocab_size: int, number: int) -> Tensor:
    return torch.randint(
        min(4, vocab_size - 1), vocab_size, (number,), generator=torch.Generator().manual_seed(0)
    )


def _measure_difference(logits: Tensor, expected: Tensor) -> float:
    """Compute |logits - expected| / |expected|; infinite if it is not a number."""
    gap = float((logits.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12))
    return gap if gap == gap else float("inf")  # NaN is not equal to itself


def _choose_bound(dtype: torch.dtype) -> float:
    return 1e-4 if dtype.itemsize >= 4 else 3e-2


def load_transformers(folder: Path, *, dtype: torch.dtype, device: str) -> TransformersModel:
    """Load the model in ``folder``. Raises ValueError, in one sentence, for one that transformers cannot load
    by its own code, and for one that cannot be trained exactly."""
    return TransformersModel(torch.nn.Module.to(load_checked(folder, dtype=dtype), device))


def load_checked(folder: Path, *, dtype: torch.dtype, **options: Any) -> Any:
    """Load the model of transformers in ``folder``, with more ``options`` of ``from_pretrained``. Raises
    ValueError for one that transformers cannot load by its own code, and for missing tensors."""
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(MISSING) from error
    options |= {"dtype": dtype, "output_loading_info": True}
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        raw = config.to_dict()
        if read_quantisation(raw) is not None:
            weights = Weights(folder, raw)
            for part in (config, config.get_text_config()):
                if hasattr(part, "quantization_config"):
                    del part.quantization_config
            plain = dict(weights.iterate_tensors(dtype))
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, loading_info = kind.from_pretrained(None, config=config, state_dict=plain, **options)
        else:
            options |= {"local_files_only": True, "trust_remote_code": False}
            pair: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
            model, loading_info = pair
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"transformers cannot load {folder}: {reason}") from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of {type(model).__name__}, the first is {missing[0]}; "
            "download the model again"
        )
    return model
