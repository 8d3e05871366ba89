"""What ``model.exact`` brings and costs: ``python -m lab.exact MODEL [DTYPE [ROUNDS [TEXT]]]``.

Answers of a policy with adapters are sampled; then both forwards of training score them. ``far``: the most
that a log-probability of the trainer is from the sampler's, over the whole vocabulary at every place, and of
the tokens that were sampled. TEXT is chat (sums to compute) or random (token ids). Seconds are of forward and
backward of the same rows, in turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.settings import our_threads
from ostinato.algo.pack import pack
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import find_model_folder
from ostinato.model.native import Kernels, load_kernels
from ostinato.model.ops import Ops
from ostinato.model.shapes import AdapterSpec
from ostinato.render import Renderer
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.local import LocalPasses
from ostinato.types import Emitted, Request, Sample, Sampling

GROUPS, SIBLINGS, PROMPT, TOKENS = 4, 4, 64, 48


def prompts_of(text: str, folder: Path, vocab: int) -> list[np.ndarray]:
    rng, renderer = np.random.default_rng(0), Renderer(folder)
    if text == "random":
        return [rng.integers(0, vocab, PROMPT + 7 * group).astype(np.int32) for group in range(GROUPS)]
    sums = [f"What is {a} + {b}?" for a, b in rng.integers(10, 99, (GROUPS, 2)).tolist()]
    return [renderer.chat([{"role": "user", "content": one}]) for one in sums]


def sampled(
    decoder: Decoder, adapters: Adapters, kernels: Kernels, prompts: list[np.ndarray], top: int
) -> tuple[list[Sample], Any]:
    """Samples, and by sample and place the log-probabilities of the ``top`` likeliest tokens, by id."""
    requests = [
        Request(tokens=prompt, sampling=Sampling(max_tokens=TOKENS), seed=(g, k), top_logprobs=top)
        for g, prompt in enumerate(prompts)
        for k in range(SIBLINGS)
    ]
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=256, max_batch=GROUPS * SIBLINGS)
    engine.publish(adapters, 1)
    rows: dict[int, list[np.ndarray]] = defaultdict(list)

    def listen(index: int, emitted: Emitted) -> None:
        for ids, logprobs in emitted.top:
            rows[index].append(logprobs[np.argsort(ids)])

    async def collect() -> list[Any]:
        found = {index: done async for index, done in engine.generate(requests, listen)}
        return [found[index] for index in range(len(requests))]

    samples = []
    for index, (request, done) in enumerate(zip(requests, asyncio.run(collect()), strict=True)):
        total = len(request.tokens) + len(done.tokens)
        mask, zeros = np.arange(total) >= len(request.tokens), np.zeros(len(request.tokens), np.float32)
        experts = None
        if done.experts is not None and done.prompt_experts is not None:
            experts = np.concatenate([done.prompt_experts, done.experts])
        samples.append(
            Sample(
                tokens=np.concatenate([request.tokens, done.tokens]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.concatenate([zeros, done.logprobs]),
                advantages=mask * np.float32(1 if index % 2 else -1),
                versions=np.where(mask, 1, -1).astype(np.int32),
                group=index // SIBLINGS,
                prompt_len=len(request.tokens),
                uid=str(index),
                experts=experts,
            )
        )
    return samples, rows


def whole(decoder: Decoder, hidden: torch.Tensor, ops: Ops) -> np.ndarray:
    """[R, V] as the engine has its likeliest tokens."""
    z = decoder.logits(hidden, ops=ops).float()
    return (z - z.logsumexp(dim=-1, keepdim=True)).numpy()


def far(
    passes: LocalPasses, ops: Ops, decoder: Decoder, adapters: Adapters, parts: list[Inputs], rows: Any
) -> Any:
    most = {"whole_vocabulary": 0.0, "sampled_tokens": 0.0}
    for part in parts:
        seen: dict[int, int] = defaultdict(int)
        hidden, _ = passes.forward(part, adapters)
        logprobs, _ = passes.logprobs(hidden, part, want_entropy=False)
        gap = float((logprobs.detach() - part.behaviour).abs().max())
        most["sampled_tokens"] = max(most["sampled_tokens"], gap)
        for row, index in zip(hidden.detach(), part.sample_idx.tolist(), strict=True):
            mine = whole(decoder, row[None], ops)[0]
            theirs = rows[index][seen[index]]
            seen[index] += 1
            most["whole_vocabulary"] = max(most["whole_vocabulary"], float(np.abs(mine - theirs).max()))
    return most


def main(name: str, dtype: str = "float32", rounds: str = "7", text: str = "chat") -> dict[str, Any]:
    torch.set_num_threads(our_threads())
    decoder, kernels = load_model(find_model_folder(name), dtype=getattr(torch, dtype)), load_kernels()
    adapters = init_adapters(decoder.config, AdapterSpec(rank=16), 0)
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    prompts = prompts_of(text, find_model_folder(name), decoder.config.vocab_size)
    samples, rows = sampled(decoder, adapters, kernels, prompts, decoder.config.vocab_size)
    weights = [sample.loss_mask.astype(np.float64) for sample in samples]
    batch, moe = pack(samples, weights, tokens_per_microbatch=2048, version=1), decoder.config.moe is not None
    parts = [as_inputs(one, torch.device("cpu"), moe=moe, replay=True) for one in batch.microbatches]
    for leaf in adapters.parameters():
        leaf.requires_grad_()
    arms = {"off": kernels.training, "on": kernels.exact}
    options = {"temperature": 1.0, "recompute": False, "entropy_grad": False}
    passes = {arm: LocalPasses(decoder, adapters, ops=ops, **options) for arm, ops in arms.items()}
    found = {arm: far(passes[arm], ops, decoder, adapters, parts, rows) for arm, ops in arms.items()}
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(int(rounds)):
        for arm, one in passes.items():
            start = time.perf_counter()
            for part in parts:
                hidden, _ = one.forward(part, adapters)
                (one.logprobs(hidden, part, want_entropy=True)[0] * part.advantages).sum().backward()
            seconds[arm].append(time.perf_counter() - start)
    median = {arm: statistics.median(times[1:] or times) for arm, times in seconds.items()}
    return {
        "model": name,
        "dtype": dtype,
        "text": text,
        "rows": sum(len(part.tokens) for part in parts),
        "targets": sum(len(part.targets) for part in parts),
        "far": found,
        "seconds": seconds,
        "price": median["on"] / median["off"],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
