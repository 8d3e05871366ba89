"""FLOPs from shapes against torch's profiler: whole training steps and whole rollouts, on every family.

``FlopCounterMode`` knows no grouped product, no addmm_ and no attention of the CPU; of other attention it
counts the whole rectangle. ``formulas`` adds them: the pairs that the mask leaves, and values as wide as they
are without the padding that flash attention adds. Everything else is counted by torch's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from nouns import drawn, episode, group_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from trainer_options import trainer_options
from worlds import KINDS, SIZES, answers, lab

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.pipeline.account import compute_batch_work, compute_rollout_work, compute_training_flops
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Request, Sampling

pytestmark = pytest.mark.slow

aten = torch.ops.aten
LR = TrainerSection(lr=1e-3)
DENSE = {**SIZES, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**DENSE, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False},
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    **{name: {**SIZES, **kind} for name, kind in KINDS.items()},
    "latent-queries": {**SIZES, **KINDS["sigmoid-bias-groups"], "q_lora_rank": 12},
}
NARROW = {**FAMILIES["latent-queries"], "v_head_dim": 4}  # values narrower than keys
EVERYTHING = ("attn", "mlp", "shared", "experts", "router")


def raw(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula that is given tensors, not their shapes."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def added(y: Sequence[int], a: Sequence[int], b: Sequence[int], **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def formulas(config: ModelConfig) -> Mapping[Any, Callable[..., int]]:
    """FLOPs of what torch's counter does not know."""

    def pairs(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> int:
        if mask is not None:  # [T, 1 or heads, 1, S], added to scores
            return int((mask[:, 0] == 0).sum())
        rows = q.shape[2]
        return q.shape[0] * (rows * (rows + 1) // 2 if causal else rows * k.shape[2])

    @raw
    def attention(
        q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **more: Any
    ) -> int:
        widths = config.head_dim + config.v_head_dim
        return 2 * q.shape[1] * widths * pairs(q, k, causal, more.get("attn_mask"))

    @raw
    def attention_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        p: float,
        causal: bool,
        **_: Any,
    ) -> int:
        return 2 * q.shape[1] * (3 * config.head_dim + 2 * config.v_head_dim) * pairs(q, k, causal, None)

    def grouped(x: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * x[0] * x[1] * w[-1]  # [S, K] [E, K, N] forward and for dx; [K, S] [S, N] for dw

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._grouped_mm: grouped,
        aten.addmm_: added,
    }


def profiled(config: ModelConfig, run: Callable[[], Any]) -> tuple[int, Any]:
    """(FLOPs that the profiler counts, what ``run`` returns)."""
    with FlopCounterMode(display=False, custom_mapping=formulas(config)) as counter:  # type: ignore[arg-type]
        result = run()
    return counter.get_total_flops(), result


# ---- training


def batch_of(vocab: int, seed: int = 0, budget: int = 90, minibatches: int = 1) -> Batch:
    """Groups of siblings that share prompts, in several microbatches; some answers have a reply inside."""
    rng, samples = np.random.default_rng(seed), []
    for group in range(3):
        lengths = [4 + 5 * sibling for sibling in range(4)]
        samples += drawn(rng, vocab, 6 + 5 * group, lengths, group=group, gap=slice(5, 8))
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=budget, minibatches=minibatches)


def trained(decoder: Decoder, spec: AdapterSpec | None) -> Adapters | None:
    decoder.set_trainable(spec is None)
    return None if spec is None else init_adapters(decoder.config, spec)


def step_ratio(
    decoder: Decoder, spec: AdapterSpec | None, *, recompute: bool = False, measure: bool = False, **more: Any
) -> float:
    """FLOPs of a training step by the profiler, over ours. ``more``: minibatches, keys of the algorithm."""
    minibatches = more.pop("minibatches", 1)
    chosen = algorithm("grpo", **more)
    options = trainer_options(settings=LR, recompute=recompute, measure_every=int(measure))
    trainer = PolicyTrainer(decoder, trained(decoder, spec), chosen, **options)
    batch = batch_of(decoder.config.vocab_size, minibatches=minibatches)
    counted, report = profiled(decoder.config, lambda: trainer.step(batch))
    flops = FlopModel.of(decoder.config, spec, recompute=recompute, entropy_gradient=chosen.needs_entropy)
    ours = compute_training_flops(flops, compute_batch_work(batch), report.metrics)
    assert (ours["measure"] > 0) == measure and len(batch.microbatches) >= 3
    return counted / (ours["train"] + ours["measure"])


SPECS: dict[str, AdapterSpec | None] = {
    "full": None,
    "lora": AdapterSpec(rank=2, targets=EVERYTHING),
    "per-expert": AdapterSpec(
        rank=2, targets=EVERYTHING, expert_scheme=ExpertScheme.PER_EXPERT, expert_rank=3
    ),
}


@pytest.mark.parametrize("recompute", [False, *lab(True)], ids=["keep", "recompute"])
@pytest.mark.parametrize("spec", ["per-expert", *lab("full", "lora")])
@pytest.mark.parametrize("family", [*FAMILIES, "narrow-values"])
def test_a_training_step_of_every_family(family: str, spec: str, recompute: bool) -> None:
    """To the last product: what the profiler counts is what the shapes say."""
    decoder = Decoder(parse_config(FAMILIES.get(family, NARROW))).init_weights(0)
    assert step_ratio(decoder, SPECS[spec], recompute=recompute) == 1.0


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ("attn.q",)),
        ("llama", ("attn.o",)),  # attention of the lowest layer needs no gradient
        ("llama", ("mlp.up",)),
        ("llama", ("mlp.down",)),
        ("softmax", ("experts.gate",)),  # the down of the adapter is a zero update
        ("softmax", ("experts.down",)),  # ... and here gate and up are
        ("softmax-renormalised", ("experts.up", "router")),  # the lowest layer has no experts
        ("every-second-layer", ("mlp",)),
        ("every-second-layer", ("router",)),
        ("sigmoid-bias-groups", ("shared.down",)),
        ("sigmoid-bias-groups", ("experts",)),
        ("latent-queries", ("attn.q_b",)),
        ("latent-queries", ("attn.kv_b", "router")),
    ],
)
@pytest.mark.parametrize("scheme", [ExpertScheme.SHARED_OUTER, *lab(ExpertScheme.PER_EXPERT)])
def test_no_gradient_is_counted_below_the_lowest_adapter(
    family: str, targets: tuple[str, ...], scheme: ExpertScheme
) -> None:
    decoder = Decoder(parse_config(FAMILIES[family])).init_weights(0)
    spec = AdapterSpec(rank=2, targets=targets, expert_scheme=scheme)
    for recompute in (False, True):
        assert step_ratio(decoder, spec, recompute=recompute) == 1.0


@pytest.mark.parametrize("family", ["softmax", *lab("llama", "latent-queries")])
@pytest.mark.parametrize("spec", ["full", "lora", *lab("per-expert")])
@pytest.mark.parametrize(
    "how",
    [
        {"minibatches": 3, "anchor": "trainer"},  # old log-probabilities
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "minibatches": 2, "anchor": "trainer", "recompute": True},
        {"entropy_coef": 0.1},
        {"measure": True},
        {"measure": True, "minibatches": 2, "anchor": "trainer", "entropy_coef": 0.1},
    ],
    ids=lambda how: "+".join(how),
)
def test_a_whole_step_with_its_further_passes(family: str, spec: str, how: dict[str, Any]) -> None:
    """Old log-probabilities, reference and measurement are counted in forwards of the batch."""
    if spec == "full" and "kl_coef" in how:
        pytest.skip("full-parameter training keeps no reference")
    decoder = Decoder(parse_config(FAMILIES[family])).init_weights(0)
    assert step_ratio(decoder, SPECS[spec], **how) == pytest.approx(1, abs=1e-9)


# ---- rollouts


@pytest.mark.parametrize("adapters", ["lora", *lab("full", "per-expert")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_of_every_family(family: str, adapters: str) -> None:
    """One token at a time on cached keys: as many products as the tokens say."""
    decoder, spec = Decoder(parse_config(FAMILIES[family])).init_weights(0), SPECS[adapters]
    vocab, rng = decoder.config.vocab_size, np.random.default_rng(0)
    engine = LocalEngine(decoder, kv_memory_mb=4, context_limit=128)
    engine.publish(None if spec is None else init_adapters(decoder.config, spec), 1)
    prompts = [rng.integers(0, vocab, 21 + 8 * n).astype(np.int32) for n in range(3)]
    requests = [
        Request(tokens=prompt, sampling=Sampling(max_tokens=6 + 5 * n), seed=(n,))
        for n, prompt in enumerate(prompts)
    ]
    counted, played = profiled(decoder.config, lambda: answers(engine, requests))
    assert len({len(one.tokens) for one in played}) > 1
    groups = [group_of(episode(one, len(prompt))) for one, prompt in zip(played, prompts, strict=True)]
    assert counted == FlopModel.of(decoder.config, spec).forward(compute_rollout_work(groups))
