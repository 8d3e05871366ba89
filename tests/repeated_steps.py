"""One training step again and again from one state: digests of what it leaves behind.

    trainer, batch = prepare("dense", torch.float32, TORCH_OPS)
    digest(trainer, batch)     # of parameters and moments after a step from the first state

As a program (``python repeated_steps.py TIMES THREADS ...``) it prints one JSON object: for each number of
threads, case, dtype and set of kernels how many times each digest came. Tensors are large enough for torch to
cut its work over threads, and one prompt has thousands of answers: their first tokens are predicted by one
row, whose gradient is a sum over all of them, long enough for threads to meet in it on a busy machine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections import Counter

import numpy as np
import torch
from nouns import drawn
from trainer_options import trainer_options
from worlds import VOCAB, tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.model.config import MoEConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.native import BuildError, load_kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.collectives import Mesh
from ostinato.parallel.layout import Layout
from ostinato.train.layouts import sharded_trainer
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Sample

DENSE = tiny_dense(hidden_size=128, intermediate_size=192, max_position_embeddings=128)
MOE = tiny_moe(hidden_size=128, intermediate_size=192, head_dim=32, moe_intermediate_size=96)
CASES = ("dense", "moe", "full", "sharded")


def samples(moe: MoEConfig | None, siblings: int) -> list[Sample]:
    """Answers to one prompt: most of one token, which has no row of its own, the last 150 of 5."""
    lengths = [1] * (siblings - 150) + [5] * 150
    return drawn(np.random.default_rng(0), VOCAB, 8, lengths, moe=moe)


@functools.cache
def batch_of(case: str, siblings: int) -> Batch:
    """One microbatch of all samples."""
    given = samples(parse_config(MOE if case == "moe" else DENSE).moe, siblings)
    weights = aggregation_weights(given, Aggregation.TOKEN)
    return pack(given, weights, tokens_per_microbatch=4096, version=0)


def prepare(case: str, dtype: torch.dtype, ops: Ops, siblings: int = 2000) -> tuple[PolicyTrainer, Batch]:
    """A trainer in its first state, and a batch for it."""
    decoder = Decoder(parse_config(MOE if case == "moe" else DENSE), dtype=dtype).init_weights(seed=0)
    adapters = None
    if case == "full":
        decoder.set_trainable(True)
    else:
        targets = ("attn", "experts") if case == "moe" else ("attn", "mlp")
        adapters = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8, targets=targets), seed=1)
        for _, b in adapters.tensors.values():  # zeros would leave the A without gradients
            b.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    batch = batch_of(case, siblings)
    settings = trainer_options(lr=1e-2, ops=ops, replay_threshold=0.0, recompute=case == "full")
    if case == "sharded":
        mesh = Mesh(Layout.parse("1"))
        return sharded_trainer(mesh, [decoder], adapters, algorithm("grpo"), **settings), batch
    return PolicyTrainer(decoder, adapters, algorithm("grpo"), **settings), batch


def digest(trainer: PolicyTrainer, batch: Batch) -> str:
    """Of parameters, moments and metrics after one step; the trainer is then in its first state again."""
    first = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    counters = dict(trainer.counters())
    metrics = trainer.step(batch).metrics
    after = hashlib.sha256(repr(sorted((k, v) for k, v in metrics.items() if "seconds" not in k)).encode())
    for name, tensor in sorted(trainer.tensors().items()):
        after.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    trainer.restore(first, counters)
    return after.hexdigest()[:12]


def kernel_sets() -> dict[str, Ops]:
    """The native kernels where they can be built."""
    try:
        return {"torch": TORCH_OPS, "native": load_kernels().training}
    except BuildError:
        return {"torch": TORCH_OPS}


def main(times: int, threads: list[int]) -> None:
    found: dict[str, Counter[str]] = {}
    for count, (name, ops), case in itertools.product(threads, kernel_sets().items(), CASES):
        torch.set_num_threads(count)
        # all parameters are trained in fp32 only
        for dtype in (torch.float32,) if case == "full" else (torch.float32, torch.bfloat16):
            trainer, batch = prepare(case, dtype, ops)
            key = f"{case}, {dtype}, {name} kernels, {count} threads"
            found[key] = Counter(digest(trainer, batch) for _ in range(times))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(count) for count in sys.argv[2:]])
