"""One decoder for every supported family, dense and mixture-of-experts, for sampling and for training.

Tokens are a flat packed row [T]; attention, adapters, routing and arithmetic are arguments of ``forward``.
The module holds the base weights and nothing else: no cache, no adapters, no mode.

T rows, D hidden size, H query heads, G key-value heads, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ostinato.model.attention import Attend, ProjectedAttend, compute_mla_scale, compute_rope_frequencies
from ostinato.model.config import Activation, ModelConfig, QKNorm
from ostinato.model.flops import FlopModel
from ostinato.model.lora import NO_LORA, Adapters, LayerLora, Lora, Prepared, lora_linear, narrow_linear
from ostinato.model.moe import check_routing
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import AdapterSpec
from ostinato.model.share import Share, make_local_config
from ostinato.model.weights import (
    Attention,
    Block,
    LatentAttention,
    Linear,
    Mlp,
    Moe,
    Quantised,
    Weight,
    fill_initial_values,
    iterate_linears,
    make_block,
)

_LATENT_EPS = 1e-6  # of the norms of DeepSeek-V3's latents, whatever rms_norm_eps is


def _recompute_block(
    decoder: Decoder, layer: int, block: Block, residual: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run ``Decoder._run_block`` from the residual alone. The norm of its input is computed again, so that a
    checkpoint keeps the residual and not the normed input as well."""
    x = args[-1].rms_norm(residual, decoder.compute_gain(block.attn_norm), decoder.config.rms_norm_eps)
    return decoder._run_block(layer, block, x, residual, *args)


class Decoder(nn.Module):
    """Base weights and the forward pass. Parameters are frozen, except after ``set_trainable(True)``. The
    dtype is chosen here or when loading; use ``to`` for devices only."""

    embed: nn.Parameter  # [V, D]; in a share that embeds or whose head is the embedding
    norm: nn.Parameter  # [D], before the head
    head: nn.Parameter  # [V, D], absent when tied
    inv_freq: Tensor  # [rotary dim / 2] fp32
    local_inv_freq: Tensor  # of local layers, if these have a rope of their own

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        storage: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        fp32_head: bool = False,
        stored: Mapping[str, nn.Parameter | Quantised] | None = None,
        share: Share | None = None,
    ) -> None:
        """Allocate the weights without values, which ``hf.load_model`` or ``init_weights`` fills in.
        ``dtype``: of activations, norms, biases and adapters. ``storage``: of matrices, None: ``dtype``;
        fewer bits cannot be trained. ``fp32_head``: the last product is in fp32. ``stored``: the weights by
        name (``model.quantise``), in which case none are allocated. ``share``: the part to have; its
        ``forward`` needs ``Ops`` that reach other ranks."""
        super().__init__()
        self.config = config
        self.share = share or Share.all(config)
        # of the share, as if it were a whole model
        self.local = c = make_local_config(config, share) if share else config
        self.fp32_head = fp32_head
        self.quantised: dict[str, Quantised] = {}  # linear maps that are no parameters, by name

        def new_weight(name: str, *shape: int, dtype: torch.dtype = dtype) -> Any:
            if stored is None:
                own_dtype = storage if storage is not None and len(shape) > 1 else dtype
                weight = nn.Parameter(torch.empty(shape, dtype=own_dtype, device=device), requires_grad=False)
            else:
                weight = stored[name]
            if isinstance(weight, Quantised):
                self.quantised[name] = weight
            else:
                _register(self, name, weight)
            return weight

        if self.share.has_embedding or (self.share.has_head and c.tie_embeddings):
            new_weight("embed", c.vocab_size, c.hidden_size)
        if self.share.has_head:
            new_weight("norm", c.hidden_size)
        if self.share.has_head and not c.tie_embeddings:
            new_weight("head", c.vocab_size, c.hidden_size)
        final_norm = self.norm if self.share.has_head else None
        self.blocks = [make_block(c, new_weight, layer, final_norm) for layer in self.share.layers]
        for block, next_block in zip(self.blocks[:-1], self.blocks[1:], strict=True):
            block.next_norm = next_block.attn_norm
        rotary_dim = config.mla.rope_head_dim if config.mla else config.head_dim
        inv_freq, self._rope_factor = compute_rope_frequencies(config.rope, rotary_dim)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        if config.local_rope is not None:
            local_freq, self._local_factor = compute_rope_frequencies(config.local_rope, rotary_dim)
            self.register_buffer("local_inv_freq", local_freq.to(device), persistent=False)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self._scale = compute_mla_scale(config.rope, config.head_dim) if config.mla else scale

    @property
    def device(self) -> torch.device:
        return self.blocks[0].attn_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.blocks[0].attn_norm.dtype

    @property
    def storage(self) -> torch.dtype:
        """The dtype of matrices; of a decoder with quantised linear maps, that of their codes."""
        for weight in self.quantised.values():  # all have one dtype
            return weight.tiles.dtype
        return next((p.dtype for p in self.parameters() if p.dim() > 1), self.dtype)

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D], of a share its rows of it. It is the embedding itself if the two are tied."""
        return self.embed if self.config.tie_embeddings else self.head

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(key-value heads, key width, value width) of the keys and values that ``attend`` gets per row;
        those of latent attention are expanded."""
        return self.local.num_kv_heads, self.config.head_dim, self.config.v_head_dim

    @property
    def num_moe_layers(self) -> int:
        """The number of MoE layers that are here."""
        return sum(isinstance(block.mlp, Moe) for block in self.blocks)

    def flops(self, adapter: AdapterSpec | None, **options: bool) -> FlopModel:
        """Return the FLOPs that ``FlopModel.of`` describes."""
        return FlopModel.of(self.config, adapter, **options)

    def set_trainable(self, on: bool) -> Decoder:
        """Turn training of all weights on or off, but never of DeepSeek's correction bias; return the
        decoder."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(on and not name.endswith("correction_bias"))
        return self

    def named_linears(self) -> dict[str, Linear]:
        """Return every linear map by logical name, as views. Raises ValueError for a quantised map."""
        return dict(iterate_linears(self.local, self.blocks, self.share.layers))

    def init_weights(self, seed: int) -> Decoder:
        """Fill in initial values (``weights.fill_initial_values``), and return the decoder."""
        c = self.config
        fill_initial_values(self.named_parameters(), c.initializer_range, seed, norm=1.0 - c.norm_offset)
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        adapters: Adapters | Prepared | None = None,
        routing: Tensor | None = None,
        routing_checked: bool = False,
        ops: Ops = TORCH_OPS,
        recompute: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute hidden states after the final norm, and the experts that the model itself chose per row.
        tokens, positions: [T] integers. routing: [T, L_moe, K] to replay, or None; in a row of NO_EXPERT the
        model chooses. routing_checked: the caller has checked that it fits (``moe.check_routing``), once for
        all passes of a batch. recompute: keep the activations of one layer at a time. residual: the input
        [own rows, D] of a share without the first layers; a share without the last layers returns one in
        place of hidden. If ranks cut the rows (``Ops.enter``), residual, routing, hidden and native are of
        own rows. Returns (hidden [T, D], native [T, L_moe, K] int16, or None for a dense model): the experts
        that the router chose, which in a replayed row are not always those that computed. Raises ValueError
        for a routing that does not fit, and if ``.to()`` has changed the dtype."""
        moe = self.config.moe
        if routing is not None:
            if moe is None:
                raise ValueError(f"routing was given, but this {self.config.model_type} model has no experts")
            if not routing_checked:
                check_routing(routing, tokens.shape[0], moe)
        loras = adapters.prepare(self.dtype).layers if adapters is not None else None
        rope = self.compute_rotations(positions)
        local_rope = rope if self.config.local_rope is None else self.compute_rotations(positions, local=True)
        if residual is None:
            residual = self._embed(tokens, ops)
        x = ops.rms_norm(residual, self.compute_gain(self.blocks[0].attn_norm), self.config.rms_norm_eps)
        stream: Tensor = residual
        choices: list[Tensor] = []
        for layer, block in zip(self.share.layers, self.blocks, strict=True):
            lora = NO_LORA if loras is None else loras[layer]
            replay = routing[:, len(choices)] if routing is not None and isinstance(block.mlp, Moe) else None
            cos, sin = local_rope if layer in self.config.local_layers else rope
            args = (cos, sin, attend, lora, replay, ops)
            if recompute:
                x, stream, native = checkpoint(  # type: ignore[misc]
                    _recompute_block, self, layer, block, stream, *args,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x, stream, native = self._run_block(layer, block, x, stream, *args)
            if native is not None:
                choices.append(native)
        return x, torch.stack(choices, dim=1).to(torch.int16) if choices else None

    def logits(
        self, hidden: Tensor, *, adapters: Adapters | Prepared | None = None, ops: Ops = TORCH_OPS
    ) -> Tensor:
        """Compute logits [R, V] of hidden [R, D], in fp32 with ``fp32_head``. ``adapters`` have no effect."""
        return ops.linear(hidden, self.head_weight, None, torch.float32 if self.fp32_head else None)

    def _embed(self, tokens: Tensor, ops: Ops) -> Tensor:
        rows = ops.embed(tokens, self.embed).to(self.dtype)
        scale = self.config.embed_scale
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)

    def compute_gain(self, norm: Tensor) -> Tensor:
        """Return the factors [D] of a norm: its weights plus ``norm_offset``."""
        return norm + self.config.norm_offset if self.config.norm_offset else norm

    def compute_rotations(self, positions: Tensor, *, local: bool = False) -> tuple[Tensor, Tensor]:
        """Compute cos and sin [T, rotary dim], equal in both halves of a head, for all layers, or with
        ``local`` for local layers. Raises ValueError if ``.to()`` has changed the dtype."""
        if self.inv_freq.dtype.itemsize < 4:
            raise ValueError(f"dtype was changed to {self.dtype} by .to(); give the dtype when loading")
        inv_freq, factor = (
            (self.local_inv_freq, self._local_factor) if local else (self.inv_freq, self._rope_factor)
        )
        angles = positions.to(inv_freq.dtype).unsqueeze(-1) * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(self.dtype), sin.to(self.dtype)

    def _run_block(
        self,
        layer: int,
        block: Block,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        lora: LayerLora,
        routing: Tensor | None,
        ops: Ops,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run a layer: (normed input, residual) -> (normed input of the next layer, residual, experts that it
        chose itself). If the next norm is not here, the residual is returned in place of the normed input,
        too."""
        eps, block = self.config.rms_norm_eps, ops.gather(block)
        x = ops.enter(x)
        if isinstance(block.attn, Attention):
            x = self._attend(layer, block.attn, x, cos, sin, attend, lora, ops)
        else:
            x = _attend_latent(self.local, self._scale, layer, block.attn, x, cos, sin, attend, lora, ops)
        x = ops.leave(x)
        if block.attn_out_norm is not None:
            x = ops.rms_norm(x, self.compute_gain(block.attn_out_norm), eps)
        x, residual = ops.add_rms_norm(x, residual, self.compute_gain(block.mlp_norm), eps)
        native = None
        if isinstance(block.mlp, Moe):
            x, native = self._run_moe(block.mlp, x, lora, routing, ops)
        else:
            x = self._run_mlp(block.mlp, x, lora.gate_up, lora.down, ops)
        if block.mlp_out_norm is not None:
            x = ops.rms_norm(x, self.compute_gain(block.mlp_out_norm), eps)
        if block.next_norm is None:
            residual = residual + x
            return residual, residual, native
        x, residual = ops.add_rms_norm(x, residual, self.compute_gain(block.next_norm), eps)
        return x, residual, native

    def _run_mlp(self, w: Mlp, x: Tensor, gate_up: Lora | None, down: Lora | None, ops: Ops) -> Tensor:
        gate = ops.silu_mul if self.config.activation == Activation.SILU else ops.gelu_mul
        hidden = gate(_apply_linear(ops.enter(x), w.gate_up, w.gate_up_bias, gate_up, ops))
        return ops.leave(_apply_linear(hidden, w.down, self._select_bias(w.down_bias), down, ops))

    def _select_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of a map whose outputs are summed over tensor ranks, on the first rank alone."""
        return bias if self.share.tensor_rank == 0 else None

    def _attend(
        self,
        layer: int,
        w: Attention,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        lora: LayerLora,
        ops: Ops,
    ) -> Tensor:
        c = self.local
        heads, num_rotary = c.num_heads, c.num_heads + c.num_kv_heads
        qkv = _apply_linear(x, w.qkv, w.qkv_bias, lora.qkv, ops)
        norms = (
            None
            if w.q_norm is None or w.k_norm is None
            else (self.compute_gain(w.q_norm), self.compute_gain(w.k_norm))
        )
        if norms is not None and c.qk_norm == QKNorm.FULL:
            q, k, v = qkv.split([heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2], dim=-1)
            q, k = ops.rms_norm(q, norms[0], c.rms_norm_eps), ops.rms_norm(k, norms[1], c.rms_norm_eps)
            qkv, norms = torch.cat((q, k, v), dim=-1), None
        if c.clip_qkv is not None:
            qkv = qkv.clamp(-c.clip_qkv, c.clip_qkv)
        qkv = qkv.unflatten(-1, (-1, c.head_dim))
        if isinstance(attend, ProjectedAttend):
            out = attend.project(layer, qkv, norms, c.rms_norm_eps, (cos, sin), self._scale)
        else:
            q, k = _norm_and_rotate(qkv[:, :num_rotary], heads, norms, c.rms_norm_eps, cos, sin, ops)
            window = self.config.get_window(layer)
            window_args = () if window is None else (window,)
            out = attend(layer, q, k, qkv[:, num_rotary:], self._scale, *window_args)
        return _apply_linear(out.flatten(1), w.o, self._select_bias(w.o_bias), lora.o, ops)

    def _run_moe(
        self, w: Moe, x: Tensor, lora: LayerLora, routing: Tensor | None, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        assert self.config.moe is not None
        # always fp32: a rounded logit flips experts between sampler and trainer
        logits = ops.linear(x, w.router, None, torch.promote_types(x.dtype, torch.float32))
        if lora.router is not None:
            logits = ops.add_lora(logits, x, lora.router.a, lora.router.b, lora.router.scale)
        ids, weights, native = ops.route(logits, self.config.moe, w.correction_bias, routing)
        slots = ids if w.slots is None else w.slots[ids]
        out = ops.experts(x, slots, weights, w.gate_up, w.down, lora.experts)
        if w.shared is not None:
            out = out + self._run_mlp(w.shared, x, lora.shared_gate_up, lora.shared_down, ops)
        return out, native


def _attend_latent(
    config: ModelConfig,
    scale: float,
    layer: int,
    w: LatentAttention,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    lora: LayerLora,
    ops: Ops,
) -> Tensor:
    """Compute multi-head latent attention with keys and values expanded (arXiv 2405.04434 section 2.1)."""
    mla, heads = config.mla, config.num_heads
    assert mla is not None
    if w.q is not None:
        q = _apply_linear(x, w.q, None, lora.q, ops)
    else:
        assert w.q_a_norm is not None
        latent = ops.rms_norm(_apply_linear(x, w.q_a, None, lora.q_a, ops), w.q_a_norm, _LATENT_EPS)
        q = _apply_linear(latent, w.q_b, None, lora.q_b, ops)
    q_nope, q_rope = q.unflatten(-1, (heads, -1)).split([mla.nope_head_dim, mla.rope_head_dim], dim=-1)
    kv = _apply_linear(x, w.kv_a, None, lora.kv_a, ops)
    latent, k_rope = kv.split([mla.kv_lora_rank, mla.rope_head_dim], dim=-1)
    latent = ops.rms_norm(latent, w.kv_a_norm, _LATENT_EPS)
    kv = _apply_linear(latent, w.kv_b, None, lora.kv_b, ops).unflatten(-1, (heads, -1))
    k_nope, v = kv.split([mla.nope_head_dim, mla.v_head_dim], dim=-1)
    k_rope = k_rope.unsqueeze(1)  # one rotary key for all heads
    if mla.interleaved:
        q_rope, k_rope = _split_pairs(q_rope), _split_pairs(k_rope)
    q = torch.cat((q_nope, ops.rope(q_rope, cos, sin)), dim=-1)
    k = torch.cat((k_nope, ops.rope(k_rope, cos, sin).expand(-1, heads, -1)), dim=-1)
    out = attend(layer, q, k, v, scale)
    return _apply_linear(out.flatten(1), w.o, None, lora.o, ops)


def _apply_linear(
    x: Tensor, weight: Weight | None, bias: Tensor | None, lora: Lora | None, ops: Ops
) -> Tensor:
    """Apply a linear map with its adapter. Under autograd, a map with an adapter or with weights in fewer
    bits than x is computed in the form that saves little for the backward."""
    assert weight is not None
    if torch.is_grad_enabled():
        if lora is not None:
            return lora_linear(x, weight, bias, lora, ops.gemm)
        if isinstance(weight, Quantised) or weight.dtype != x.dtype:
            return narrow_linear(x, weight, bias, ops.gemm.nt, ops.gemm.nn)
    if lora is None:
        return ops.linear(x, weight, bias)
    return ops.add_lora(ops.linear(x, weight, bias), x, lora.a, lora.b, lora.scale)


def _norm_and_rotate(
    x: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, G, D], the parts of x [T, H + G, D], after their norms by the weights [D]
    of ``norms``, if there are any."""
    if norms is None:
        x = ops.rope(x, cos, sin)
        return x[:, :num_heads], x[:, num_heads:]
    q, k = ops.rms_norm(x[:, :num_heads], norms[0], eps), ops.rms_norm(x[:, num_heads:], norms[1], eps)
    return ops.rope(q, cos, sin), ops.rope(k, cos, sin)


def _split_pairs(x: Tensor) -> Tensor:
    """Reorder rotary pairs as ``rope`` takes them: (x0, y0, x1, y1, ...) -> (x0, x1, ..., y0, y1, ...)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name; missing submodules are added."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)
