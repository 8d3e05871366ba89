"""Real training steps of small models over layouts, as ``bench plan`` measures them: seconds and bytes.

The models are small enough that eight ranks of them train on two cores, and large enough that a step is
mostly products. Every batch has the same shape; groups fill microbatches exactly.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lab.live import LiveBytes, storages
from lab.settings import Clock
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.parts import own_decoders
from ostinato.parallel.pieces import own_adapters
from ostinato.parallel.shares import shares_of
from ostinato.train.layouts import sharded_trainer
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Sample

_COMMON = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **_COMMON, "intermediate_size": 768, "num_hidden_layers": 8},
    "moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
LR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of every batch: ``prompts`` groups of ``group`` answers; ``groups`` of them fill a microbatch."""

    prompts: int = 8
    group: int = 4
    prompt_tokens: int = 36
    answer_tokens: int = 64
    groups: int = 1

    @property
    def microbatch(self) -> int:
        """Rows of one: shared prompts, and answers whose last token is no row."""
        return self.groups * (self.prompt_tokens + self.group * (self.answer_tokens - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration that is measured. ``way``: an expert scheme, "lora" (of a dense model) or "full"."""

    model: str
    way: str
    layout: str
    recompute: bool = False
    shape: Shape = Shape()

    @property
    def ranks(self) -> int:
        return Layout.parse(self.layout).world

    @property
    def config(self) -> ModelConfig:
        return _config(self.model)

    @property
    def adapter(self) -> AdapterSpec | None:
        if self.way == "full":
            return None
        scheme = ExpertScheme.SHARED_OUTER if self.way == "lora" else ExpertScheme(self.way)
        return AdapterSpec(rank=8, alpha=16.0, expert_scheme=scheme)

    def __str__(self) -> str:
        return f"{self.model} {self.way} {self.layout}{' recompute' * self.recompute}"


@lru_cache
def _config(model: str) -> ModelConfig:
    return parse_config(MODELS[model])


def measured(rank: int, world: int, runs: Sequence[Run], steps: int, clock: Clock) -> list[dict[str, Any]]:
    """Every run, on ranks that were started once: seconds and bytes of all ranks, by run."""
    return [_measured(run, steps, clock) for run in runs]


def _measured(run: Run, steps: int, clock: Clock) -> dict[str, Any]:
    trainer, decoders, adapters = new_trainer(run)
    batch = batch_of(run)
    trainer.step(batch)  # optimizer moments are there from here on
    weights = [parameter for decoder in decoders for parameter in decoder.parameters()]
    factors = list(adapters.parameters()) if adapters else []
    state = [tensor for name, tensor in _own_state(trainer).items() if not name.endswith("step")]
    buffers = [buffer for decoder in decoders for buffer in decoder.buffers()]
    with LiveBytes([*weights, *factors, *state, *buffers]) as live:
        trainer.step(batch)
    seconds = [_timed(lambda: trainer.step(batch), clock) for _ in range(steps)]
    trained = factors or [parameter for parameter in weights if parameter.requires_grad]
    own = {
        "weights": storages(weights),
        "adapters": storages(factors),
        "gradients": sum(leaf.nbytes for leaf in trained),
        "optimizer": storages(state),
        "peak": live.peak,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
    }
    return {"ranks": _all(own)}


def _own_state(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Adam's moments that this rank keeps."""
    optimizer = trainer._optimizer
    return {
        f"{index}.{name}": value
        for index, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }


def _timed(step: Callable[[], object], clock: Clock) -> float:
    if dist.is_initialized():
        dist.barrier()
    started = clock.read()
    step()
    return clock.read() - started


def _all(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [own]
    text = json.dumps(own).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
    return [json.loads(bytes(text.numpy())) for text in texts]


def new_trainer(run: Run) -> tuple[PolicyTrainer, list[Decoder], Adapters | None]:
    """The trainer of this rank, with what it keeps of model and adapter."""
    layout, config = Layout.parse(run.layout), run.config
    mesh = Mesh(layout)
    whole = Decoder(config).init_weights(seed=0)
    shares = shares_of(layout, config, mesh.rank)
    decoders, adapters = own_decoders(whole, shares), None
    del whole
    if run.adapter is None:
        for decoder in decoders:
            decoder.trainable(True)
    else:
        drawn = init_adapters(config, run.adapter, seed=1)
        adapters = own_adapters(config, shares, run.adapter, drawn.state_dict())
    settings = OptimizerSettings(lr=LR)
    trainer = sharded_trainer(
        mesh, decoders, adapters, algorithm("grpo"), optimizer=settings, recompute=run.recompute
    )
    return trainer, decoders, adapters


def batch_of(run: Run) -> Batch:
    """A batch of random tokens without routes."""
    shape, rng = run.shape, np.random.default_rng(3)
    samples = [
        _sample(rng, run.config.vocab_size, shape, group, number, prompt)
        for group in range(shape.prompts)
        for prompt in [rng.integers(0, run.config.vocab_size, shape.prompt_tokens)]
        for number in range(shape.group)
    ]
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=shape.microbatch)


def _sample(
    rng: np.random.Generator, vocabulary: int, shape: Shape, group: int, number: int, prompt: np.ndarray
) -> Sample:
    tokens = np.concatenate((prompt, rng.integers(0, vocabulary, shape.answer_tokens))).astype(np.int32)
    mask = np.arange(len(tokens)) >= shape.prompt_tokens
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        advantages=np.where(mask, rng.standard_normal(), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        group=group,
        prompt_len=shape.prompt_tokens,
        uid=f"{group}#{number}",
    )


def configurations() -> tuple[Run, ...]:
    """Those of ``bench plan``: one rank to eight, adapters and all parameters, dense and experts."""
    dense = [("lora", ("1", "d2", "t2", "p2", "c2", "d4", "d2t2", "p4", "t2p2", "d2t2p2"))]
    dense += [("full", ("1", "d2", "t2", "d2f2", "d2p2"))]
    experts = [("shared_outer", ("1", "d2e2", "t2e2", "d4e4", "d2t2e4", "p2d2e2", "d4t2e8", "d2t2p2e2"))]
    experts += [("per_expert", ("1", "t2x2", "d2e2", "d2c2e4")), ("full", ("1", "d2e2", "p2"))]
    runs = [
        Run(model=model, way=way, layout=layout)
        for model, ways in (("dense", dense), ("moe", experts))
        for way, layouts in ways
        for layout in layouts
    ]
    again = [Run(model="dense", way="lora", layout="p2", recompute=True)]
    return (*runs, *again, Run(model="moe", way="shared_outer", layout="d2e2", recompute=True))


def of_ranks(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """By number of ranks."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.ranks, []).append(run)
    return dict(sorted(found.items()))


__all__ = ["MODELS", "Run", "Shape", "batch_of", "configurations", "measured", "new_trainer", "of_ranks"]
