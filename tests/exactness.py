"""The law of ``model.exact`` for any set of kernels: trainer and sampler agree in every bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st
from worlds import answers

from ostinato.algo.pack import pack
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import Ops
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.local import LocalPasses
from ostinato.train.passes import ScoreOptions
from ostinato.types import Completion, Request, Sample, Sampling

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

CPU = torch.device("cpu")


def sampled(
    decoder: Decoder,
    adapters: Adapters,
    requests: list[Request],
    max_batch: int,
    kernels: Kernels | CudaKernels,
) -> list[Completion]:
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=8, max_batch=max_batch, context_limit=256)
    engine.publish(adapters, 1)
    return answers(engine, requests)


def samples_of(requests: list[Request], found: list[Completion], groups: list[int]) -> list[Sample]:
    samples = []
    for number, (request, done, group) in enumerate(zip(requests, found, groups, strict=True)):
        prompt, total = len(request.tokens), len(request.tokens) + len(done.tokens)
        zeros, mask = np.zeros(prompt, np.float32), np.arange(total) >= prompt
        experts = None
        if done.experts is not None and done.prompt_experts is not None:
            experts = np.concatenate([done.prompt_experts, done.experts])
        support = None
        if done.support is not None:
            support = type(done.support).concatenate([done.support.whole(prompt), done.support])
        samples.append(
            Sample(
                tokens=np.concatenate([request.tokens, done.tokens]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.concatenate([zeros, done.logprobs]),
                advantages=mask.astype(np.float32),
                versions=np.where(mask, 1, -1).astype(np.int32),
                group=group,
                prompt_len=prompt,
                uid=str(number),
                experts=experts,
                support=support,
            )
        )
    return samples


def parts_of(
    samples: list[Sample], budget: int, *, moe: bool, replay: bool, device: torch.device = CPU
) -> list[Inputs]:
    weights = [sample.loss_mask.astype(np.float64) for sample in samples]
    batch = pack(samples, weights, tokens_per_microbatch=budget, version=1)
    return [as_inputs(one, device, moe=moe, replay=replay) for one in batch.microbatches]


def passes_of(decoder: Decoder, adapters: Adapters, ops: Ops, **changes: Any) -> LocalPasses:
    options = {"temperature": 1.0, "recompute": False, "entropy_grad": False, **changes}
    return LocalPasses(decoder, adapters, ops=ops, **options)


WORLDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "scheme": st.sampled_from(["shared_outer", "per_expert"]),
        "groups": st.lists(
            st.tuples(st.integers(1, 40), st.lists(st.integers(1, 24), min_size=1, max_size=4)),
            min_size=1,
            max_size=4,
        ),
        "seed": st.integers(0, 99),
        "max_batch": st.integers(1, 6),
        "budget": st.sampled_from([65, 90, 400]),
        "temperature": st.sampled_from([1.0, 0.7, 1.5]),
        "filters": st.sampled_from([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 9}]),
        "replay": st.booleans(),
        "recompute": st.booleans(),
    }
)


def check_equal(
    decoder: Decoder, adapters: Adapters, world: dict[str, Any], kernels: Kernels | CudaKernels, exact: Ops
) -> None:
    """Every row has the sampler's log-probability and route: with gradients and without."""
    rng = np.random.default_rng(world["seed"])
    vocab = decoder.config.vocab_size
    requests, groups = [], []
    for group, (prompt, lengths) in enumerate(world["groups"]):
        tokens = rng.integers(0, vocab, prompt).astype(np.int32)
        for sibling, length in enumerate(lengths):
            sampling = Sampling(temperature=world["temperature"], max_tokens=length, **world["filters"])
            requests.append(Request(tokens=tokens, sampling=sampling, seed=(world["seed"], group, sibling)))
            groups.append(group)
    found = sampled(decoder, adapters, requests, world["max_batch"], kernels)
    samples = samples_of(requests, found, groups)
    passes = passes_of(
        decoder, adapters, exact, temperature=world["temperature"], recompute=world["recompute"]
    )
    moe = decoder.config.moe is not None
    for part in parts_of(samples, world["budget"], moe=moe, replay=world["replay"], device=decoder.device):
        for as_trained in (True, False):
            (scores,) = passes.score([part], ScoreOptions(as_trained=as_trained, native=moe))
            assert scores.logprobs is not None
            assert torch.equal(scores.logprobs, part.behaviour)
            if moe and part.carried is not None and scores.native is not None:
                known = part.carried[..., :1] >= 0
                assert bool(((scores.native == part.carried) | ~known).all())
