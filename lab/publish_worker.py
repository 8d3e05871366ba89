"""A sampler in a process of its own, as a contender of ``bench publish``.

argv: JSON with folder, dtype, threads, shared (a folder, or "" for weights of its own). Tasks: {"sample": n}
for n tokens to each of a few prompts, {"memory": 1} for what this process holds, and a publication by file,
{"adapters": path} or {"weights": path}, with its version.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.contender import serve
from lab.memory import mapped, proportional
from lab.settings import native_kernels
from ostinato.engine.local import LocalEngine
from ostinato.model.hf import load_model
from ostinato.model.shared import shared_file, shared_model
from ostinato.model.wire import unpack
from ostinato.types import Request, Sampling
from ostinato.workers.remote import opened

PROMPTS, PROMPT = 4, 24


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    folder, dtype = Path(task["folder"]), getattr(torch, task["dtype"])
    shared = Path(task["shared"]) if task["shared"] else None
    decoder = shared_model(folder, dtype, folder=shared) if shared else load_model(folder, dtype)
    engine = LocalEngine(decoder, kernels=native_kernels(), kv_memory_mb=64, context_limit=256)
    base = shared_file(folder, dtype, shared) if shared else None

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if "memory" in task:
            of_base = mapped(base) if base else (0, 0)
            return {"total": proportional(), "base": of_base[0], "copied": of_base[1]}
        if "sample" in task:
            return {"tokens": sampled(engine, task["sample"])}
        return published(engine, task)

    serve("sampler", answer)


def published(engine: LocalEngine, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the file to a policy that is served, and of its fingerprint."""
    start = time.perf_counter()
    if "weights" in task:
        engine.publish_weights(Path(task["weights"]), task["version"])
    else:
        packed = opened(Path(task["adapters"]).read_bytes())
        engine.publish(unpack(packed, engine.decoder.config), task["version"])
    loaded = time.perf_counter()
    version, fingerprint = engine.served
    seconds = {"load_s": loaded - start, "prove_s": time.perf_counter() - loaded}
    return {"version": version, "fingerprint": fingerprint, **seconds}


def sampled(engine: LocalEngine, tokens: int) -> list[list[int]]:
    """Answers to prompts of random ids."""
    vocab = engine.decoder.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab, (PROMPTS, PROMPT)).astype(np.int32)
    sampling = Sampling(max_tokens=tokens)
    requests = [Request(tokens=row, sampling=sampling, seed=(0, i)) for i, row in enumerate(prompts)]

    async def answers() -> dict[int, list[int]]:
        return {index: done.tokens.tolist() async for index, done in engine.generate(requests)}

    return [tokens for _, tokens in sorted(asyncio.run(answers()).items())]


if __name__ == "__main__":
    main()
