"""Small trainings that every layout must do alike: two models, three ways to train, fixed batches.

A run is a function of its case alone; on the ranks of a layout it is that same function, so what differs from
one rank is rounding, or a mistake. In fp64 the rounding is gone, and the mistake would stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nouns import drawn
from torch import Tensor
from trainer_options import trainer_options
from worlds import DEEPSEEK, tiny_dense

from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.parallel.collectives import Mesh
from ostinato.parallel.layout import Layout
from ostinato.parallel.pieces import own_adapters, own_decoders
from ostinato.parallel.shares import Placement, shares_of
from ostinato.train.layouts import sharded_trainer
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch

_COMMON = tiny_dense(
    vocab_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=128,
    initializer_range=0.15,
)
MODELS: dict[str, dict[str, Any]] = {
    "moe": {  # grouped queries, norms per head, one dense layer, tied embedding
        **_COMMON,
        **{"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 8, "num_experts": 8},
        **{
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    },
    "mla": {  # latents, groups of experts with a correction bias, shared experts, one dense layer
        **_COMMON,
        **DEEPSEEK,
        **{"num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        "tie_word_embeddings": False,
    },
}
EVERYTHING = ("attn", "mlp", "shared", "experts", "router")
WAYS = (*ExpertScheme, "full")
GRPO = algorithm("grpo", correction="token_truncate")  # decoupled: old log-probabilities are computed, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and on what."""

    model: str = "moe"
    way: str = ExpertScheme.SHARED_OUTER  # or "full": all parameters
    dtype: torch.dtype = torch.float32
    steps: int = 10  # of two optimizer steps each
    minibatches: int = 2
    microbatch: int = 40  # rows
    algorithm: Algorithm = GRPO
    lr: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)  # of PolicyTrainer
    placement: Placement | None = None  # of experts; None: neighbours together
    restored: tuple[dict[str, Tensor], dict[str, int]] | None = None  # where it goes on from

    def __str__(self) -> str:
        return f"{self.model} {self.way}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What came of it; tensors are those of the whole model, on the first rank alone."""

    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, float]]  # of every step
    tensors: dict[str, Tensor]
    counters: dict[str, int]
    identity: dict[str, str]
    adapters: dict[str, Tensor]


def trained(rank: int, world: int, layout: str, case: Case) -> Run:
    """The training of a case, as one rank. torch.distributed is there if world is above 1;
    world 1 is the plain trainer, which knows of no layout."""
    trainer = new_trainer(layout, case) if world > 1 else plain_trainer(case)
    first = 0
    if case.restored is not None:
        trainer.restore(*case.restored)
        first = case.restored[1]["steps"]
    reports = [trainer.step(batch_of(case, step)) for step in range(first, case.steps)]
    adapters = trainer.adapters()
    return Run(
        losses=[report.metrics["loss"] for report in reports],
        grad_norms=[report.metrics["grad_norm"] for report in reports],
        metrics=[dict(report.metrics) for report in reports],
        tensors={name: tensor.clone() for name, tensor in trainer.tensors().items()},
        counters=trainer.counters(),
        identity=trainer.identity(),
        adapters={} if adapters is None else adapters.state_dict(),
    )


def trained_all(rank: int, world: int, layout: str, cases: list[Case]) -> list[Run]:
    """Several cases, one after the other, on ranks that were started once."""
    return [trained(rank, world, layout, case) for case in cases]


def plain_trainer(case: Case) -> PolicyTrainer:
    decoder, adapters = whole_model(case)
    return PolicyTrainer(decoder, adapters, case.algorithm, **_settings(case))


def new_trainer(layout: str, case: Case, mirror: Decoder | None = None) -> PolicyTrainer:
    """On every rank of a layout."""
    mesh = Mesh(Layout.parse(layout))
    decoder, adapters = whole_model(case)
    shares = shares_of(mesh.layout, decoder.config, mesh.rank, case.placement)
    parts = own_decoders(decoder, shares)
    own = None
    if adapters is None:
        for part in parts:
            part.set_trainable(True)
    else:
        own = own_adapters(decoder.config, shares, adapters.spec, adapters.state_dict())
    return sharded_trainer(
        mesh, parts, own, case.algorithm, placement=case.placement, mirror=mirror, **_settings(case)
    )


def whole_model(case: Case) -> tuple[Decoder, Adapters | None]:
    """The same on every rank. B is drawn too, so that the policy is not the base and every factor learns."""
    decoder = Decoder(parse_config(MODELS[case.model]), dtype=case.dtype).init_weights(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("correction_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if case.way == "full":
        return decoder.set_trainable(True), None
    spec = AdapterSpec(
        rank=4, alpha=8, targets=EVERYTHING, expert_scheme=ExpertScheme(case.way), expert_rank=3
    )
    drawn = init_adapters(decoder.config, spec, seed=2)
    leaves = {}
    for name, (a, b) in drawn.tensors.items():
        values = torch.randn(b.shape, generator=generator) * 0.05
        leaves[name] = (a.detach().to(case.dtype).requires_grad_(), values.to(case.dtype).requires_grad_())
    return decoder, Adapters(spec, leaves, decoder.config)


def batch_of(case: Case, step: int) -> Batch:
    """The batch of a step: 4 groups of 3 siblings, with routes to replay that no router would have chosen."""
    config = parse_config(MODELS[case.model])
    rng = np.random.default_rng((7, step))
    samples = []
    for group in range(4):
        lengths = [5 + 3 * sibling + group for sibling in range(3)]
        samples += drawn(rng, config.vocab_size, 4 + group, lengths, moe=config.moe, group=group)
    weights = aggregation_weights(samples, Aggregation.SAMPLE)
    return pack(samples, weights, tokens_per_microbatch=case.microbatch, minibatches=case.minibatches)


LAYOUTS = (
    *("d2", "t2", "p2", "c2", "d2e2", "t2x2", "d2f2"),
    *("d2t2", "t2p2", "t2c2", "d2p2v2", "p4", "d2c2e4", "d2t2e2x2", "d4e2f2"),
    *("d2t2p2", "d2t2c2e4", "d4t2e8f2", "t2p2c2e4", "d2t2p2e2v2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of a run from another one: the largest relative differences of a loss and of a trained tensor, and that
    of all trained tensors as one vector."""

    loss: float
    tensors: float
    together: float


def difference(run: Run, other: Run) -> Difference:
    """Of the parameters that are trained."""
    assert run.tensors.keys() == other.tensors.keys(), "runs of one case train the same tensors"
    names = [name for name in other.tensors if name.startswith("parameters.")]
    losses = [abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True)]
    apart = [float((run.tensors[n] - other.tensors[n]).norm() / other.tensors[n].norm()) for n in names]
    joined, wanted = (torch.cat([one.tensors[n].flatten() for n in names]) for one in (run, other))
    together = float((joined - wanted).norm() / wanted.norm())
    return Difference(loss=max(losses), tensors=max(apart), together=together)


def _settings(case: Case) -> dict[str, Any]:
    return trainer_options(**{"lr": case.lr, "replay_threshold": 0.0} | case.options)
