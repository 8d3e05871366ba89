"""Our engine, and the roofline of its matrix products, as a contender of ``bench rollouts``.

argv: model folder, dtype, context length. Tasks as in ``peers/vllm_rollouts.py``, and {"roofline": batch} for
the seconds that the matrix products of one decode step, and the drawing of its tokens, take by themselves.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from lab.contender import serve
from lab.settings import native_kernels
from ostinato.engine.local import LocalEngine
from ostinato.engine.sampler import sample
from ostinato.engine.sequences import Settings
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.native import Kernels
from ostinato.types import Request, Sampling


def main() -> None:
    folder, dtype, context = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(int(sys.argv[4]))
    kernels = native_kernels()
    decoder = load_model(folder, dtype=dtype, device="cpu", fp32_head=True)
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=1024, context_limit=context)
    version = 0

    def answer(task: dict[str, Any]) -> dict[str, float]:
        nonlocal version
        if "roofline" in task:
            batch = task["roofline"]
            return {
                "seconds": roofline_s(decoder, kernels, batch),
                "sampling_s": sampling_s(decoder, kernels, batch),
            }
        version += 1
        engine.publish(None, version)  # empties the prefix tree: no prompt is found from the task before
        return rollout(engine, task)

    serve(f"ostinato, {'native' if kernels else 'torch'} kernels, {torch.get_num_threads()} threads", answer)


def rollout(engine: LocalEngine, task: dict[str, Any]) -> dict[str, float]:
    sampling = Sampling(max_tokens=task["new_tokens"])
    requests = [
        Request(tokens=np.array(ids, np.int32), sampling=sampling, seed=(task["seed"], row))
        for row, ids in enumerate(task["prompts"])
    ]

    async def all_tokens() -> int:
        return sum([len(done.tokens) async for _, done in engine.generate(requests)])

    start = time.perf_counter()
    tokens = asyncio.run(all_tokens())
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def roofline_s(decoder: Decoder, kernels: Kernels | None, batch: int, rounds: int = 5) -> float:
    """Seconds of the matrix products of one decode step, nothing else: every weight once, in the model's
    order, by whichever of torch and ours is faster (median of ``rounds`` each, alternating)."""
    tables = (decoder.embed, decoder.head_weight)  # a lookup, and the last product
    matrices = [p for p in decoder.parameters() if p.dim() == 2 and all(p is not table for table in tables)]
    weights: list[torch.Tensor] = [*matrices, decoder.head_weight]
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1]).to(decoder.dtype) for w in weights}
    linears = [torch.nn.functional.linear] + ([kernels.ops.linear] if kernels else [])
    times: list[list[float]] = [[] for _ in linears]
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for index, linear in enumerate(linears):
                start = time.perf_counter()
                for weight in weights:
                    linear(inputs[weight.shape[1]], weight)
                times[index].append(time.perf_counter() - start)
    return min(statistics.median(run[1:]) for run in times)


def sampling_s(decoder: Decoder, kernels: Kernels | None, batch: int, rounds: int = 5) -> float:
    """Seconds to draw one token for every row from logits over the model's vocabulary, at temperature 1."""
    logits = 3 * torch.randn(batch, decoder.config.vocab_size)
    settings, u = Settings.of([Sampling()] * batch), np.random.default_rng(0).random(batch)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        sample(logits, settings, u, kernels)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
