"""Tiny models and what a test needs around them: configs, decoders for every kind of router, adapters,
routes, kernels, answers of an engine, and slow twins of what routers do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from nouns import drawn
from torch import Tensor

from ostinato.engine.cost import KNOTS, CostTable
from ostinato.engine.local import LocalEngine
from ostinato.model.config import MoEConfig, Scoring, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.native import BuildError, Kernels, load_kernels
from ostinato.model.shapes import AdapterSpec
from ostinato.model.weights import Moe
from ostinato.types import Completion, Request, Sample

VOCAB = 61
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXY"


def tiny_dense(**changes: Any) -> dict[str, Any]:
    """config.json of a llama."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return {"model_type": "llama", **sizes, **heads, "max_position_embeddings": 512, **changes}


def tiny_moe(**changes: Any) -> dict[str, Any]:
    """config.json of a qwen3_moe."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    return tiny_dense(**{"model_type": "qwen3_moe", "head_dim": 16, **experts, **changes})


def tiny_decoder(dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Decoder:
    """Of ``tiny_moe``; weights are large enough that it says different things."""
    config = parse_config(tiny_moe(**{"initializer_range": 0.3, **changes}))
    return Decoder(config, dtype=dtype).init_weights(seed)


def adapters_of(decoder: Decoder, seed: int = 0, size: float = 0.2, **spec: Any) -> Adapters:
    """Adapters that change what it says: B is drawn too, so every factor has a gradient."""
    adapters = init_adapters(decoder.config, AdapterSpec(**{"rank": 4, **spec}), seed)
    with torch.no_grad():
        draw = generator(seed)
        for _, b in adapters.tensors.values():
            b.normal_(0, size, generator=draw)
    return adapters


def decode(tokens: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(ALPHABET[token] for token in tokens)


# engines


def native() -> Kernels | None:
    """None where there is no compiler."""
    try:
        return load_kernels()
    except BuildError:
        return None


NATIVE = native()
KERNELS = [pytest.param(None, id="torch"), *([pytest.param(NATIVE, id="native")] if NATIVE else [])]


class DraftsPay(CostTable):
    """A pass is the shorter the more rows it has, whatever the clock says: drafts are always worth a try."""

    def predict_seconds(self, rows: np.ndarray | int, attended: np.ndarray | float) -> np.ndarray:
        return 1e3 / (1.0 + np.asarray(rows, np.float64))  # beside which no drafter takes time

    def observe(self, rows: int, attended: float, seconds: float) -> None:
        pass


DRAFTS_PAY = DraftsPay([1e-3] * len(KNOTS))


def answers(engine: LocalEngine, requests: Sequence[Request], *on_tokens: Any) -> list[Completion]:
    """In the order of the requests; nothing of them is left in the engine's cache."""

    async def collect() -> list[Completion]:
        found = {index: done async for index, done in engine.generate(requests, *on_tokens)}
        return [found[index] for index in range(len(requests))]

    done = asyncio.run(collect())
    engine._scheduler.cache.check([])
    return done


def same(one: Completion, other: Completion, *, bits: bool = True) -> None:
    """Bit for bit, but for what it cost; without ``bits`` but for rounding too."""
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.stop, one.text, one.error) == (other.stop, other.text, other.error)
    names = ("versions", "experts", "prompt_experts") + (("logprobs", "edges") if bits else ())
    for name in names:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.support is None) == (other.support is None)
    if one.support is not None and other.support is not None:
        assert len(one.support) == len(one.tokens) and one.support.holds(one.tokens).all()
        assert np.array_equal(one.support.counts, other.support.counts)
        assert np.array_equal(one.support.ids, other.support.ids)


# a mixture of experts for every kind of router that our decoder has


SIZES: dict[str, Any] = {  # of KINDS
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, so that routers are far from ties
}
QWEN = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {**QWEN, "norm_topk_prob": False, "mlp_only_layers": [1]},  # a dense layer in between
    "softmax-renormalised": {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [0]},  # dense first
    "every-second-layer": {**QWEN, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "top-k-then-softmax": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 3},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "sigmoid-bias": {
        **DEEPSEEK,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 2,
    },
    "sigmoid-bias-groups": {
        **DEEPSEEK,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Decoder:
    decoder = Decoder(parse_config({**SIZES, **KINDS[kind], **changed}), dtype=dtype).init_weights(1)
    for block in decoder.blocks:  # a bias that changes about every second choice
        if isinstance(block.mlp, Moe) and block.mlp.correction_bias is not None:
            block.mlp.correction_bias.data.normal_(0, 0.3, generator=generator(5))
    return decoder


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moe_of(decoder: Decoder) -> MoEConfig:
    assert decoder.config.moe is not None
    return decoder.config.moe


def random_routes(decoder: Decoder, rows: int, seed: int = 0) -> Tensor:
    """[rows, L_moe, K] int16 as no router would choose them, in no order."""
    moe = moe_of(decoder)
    shape = rows, len(moe.layers), moe.num_experts
    return torch.rand(shape, generator=generator(seed)).argsort(-1)[..., : moe.top_k].to(torch.int16)


def closed_form(logits: Tensor, ids: Tensor, moe: MoEConfig) -> Tensor:
    """Weights of given experts, each family's equation written out: the twin of what ``route`` computes."""
    chosen = logits.gather(1, ids)
    if moe.scoring == Scoring.SOFTMAX:
        # renormalised, the softmax of all is that of the chosen (Mixtral, arXiv 2401.04088 section 2.1)
        weights = chosen.softmax(-1) if moe.norm_topk else (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    else:
        weights = 1 / (1 + (-chosen).exp())
        weights = weights / weights.sum(-1, keepdim=True) if moe.norm_topk else weights
    return weights * moe.scaling


def native_choice(logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> list[set[int]]:
    """What routers choose by themselves, by sorting: the twin of ``choose``."""
    scores = logits.sigmoid() if moe.scoring == Scoring.SIGMOID else logits.softmax(-1)
    size, chosen = moe.num_experts // moe.num_groups, []
    for row in (scores if bias is None else scores + bias).tolist():
        groups = [range(start, start + size) for start in range(0, moe.num_experts, size)]
        if moe.num_groups > 1:
            groups.sort(key=lambda group: -sum(sorted((row[e] for e in group), reverse=True)[:2]))
        allowed = [e for group in groups[: moe.topk_groups] for e in group]
        chosen.append(set(sorted(allowed, key=lambda e: -row[e])[: moe.top_k]))
    return chosen


def siblings(decoder: Decoder, prompt: int, answers: list[int], seed: int) -> list[Sample]:
    """Of one prompt, whose routes they share, each with routes of its own; the last row unknown."""
    return drawn(np.random.default_rng(seed), VOCAB, prompt, answers, moe=moe_of(decoder), group=seed % 2)


def lab(*values: Any) -> list[Any]:
    """Further kinds of what a test parametrises, which make test-lab runs and CI does not."""
    return [pytest.param(value, marks=pytest.mark.lab) for value in values]
