"""The sampler on the device: what every engine promises, its speed, and transformers on the same tensors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.gpu.world import DENSE, EXPERTS, TINY, Line, Lines, World
from ostinato.algo.logprobs import linear_logprobs
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import BLOCK, KVStore, Places, count_block_bytes
from ostinato.engine.runner import Runner
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf_names import list_hf_tensors
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.packed import PackedAttention
from ostinato.model.shapes import AdapterSpec
from ostinato.types import Completion, Request, Sampling, Segment

CACHE_BLOCK = 256  # of transformers' continuous batching


def contract(world: World) -> Lines:
    """Each promise of tests/engine_contract.py, by an engine on the device. Tokens are not those of a request
    alone where products depend on the batch."""
    from engine_contract import CONTRACT, Subject

    config = parse_config({**DENSE, **TINY, "initializer_range": 0.3})
    decoder = Decoder(config).init_weights(0).to(world.device)
    policies = new_adapters(decoder, 1, 0.3), new_adapters(decoder, 2, 0.3)

    def score(adapters: Adapters, tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(world.device)
        with torch.no_grad():
            attend = PackedAttention((Segment(start=0, stop=len(ids)),))
            hidden, _ = decoder.forward(
                ids, torch.arange(len(ids), device=ids.device), attend, adapters=adapters
            )
            found, _ = linear_logprobs(hidden[:-1], decoder.head_weight, ids[1:])
        return found.cpu().numpy()

    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)

    for (label, kernels), promise in product(world.engines.items(), CONTRACT):
        engine = LocalEngine(decoder, kernels=kernels, decode=decode, kv_memory_mb=8, context_limit=64)
        subject = Subject(
            engine=engine,
            vocab=config.vocab_size,
            policies=policies,
            decode=decode,
            score=score,
            addressed=not world.on_card,
        )
        name, why = label + promise.__name__.replace("_", " "), ""
        try:
            promise(subject)
        except AssertionError as error:
            why = str(error).partition("\n")[0][:100] or "an assertion failed"
        yield Line(name=name, value=float(not why), bar=1, note=why)


def kernels_proven(world: World) -> Lines:
    """What the start of a run finds of the kernels at the widths of Qwen3-8B and of an expert layer."""
    for name, raw in (("dense", DENSE), ("experts", EXPERTS)):
        line = f"kernels in Triton that are proven, {name}"
        if world.captured is None:
            yield Line(name=line, note="no card, or no Triton")
            continue
        from ostinato.engine.proof import prove_kernels

        found, why = prove_kernels(world.decoder(world.raw(raw, layers=1)), world.captured)
        whole = found is not None and found.graph is not None and found.mixes
        yield Line(name=line, value=float(whole), bar=1, note=why)


def new_adapters(decoder: Decoder, seed: int, size: float = 0.0, rank: int = 8) -> Adapters:
    moe = decoder.config.moe is not None
    spec = AdapterSpec(rank=rank, alpha=2.0 * rank, targets=("attn", "experts") if moe else ("attn", "mlp"))
    adapters = init_adapters(decoder.config, spec, seed, decoder.device)
    if size:
        for _, b in adapters.tensors.values():
            b.data.normal_(0, size / math.sqrt(b.shape[-2]))
    return adapters


# ---- speed


def decoding(world: World, decoder: Decoder, cases: Sequence[tuple[int, int]], name: str) -> Lines:
    """Passes in which every sequence has one row, beside what has to be read from memory for them."""
    layers, adapters = decoder.config.num_layers, new_adapters(decoder, 0, rank=world.sizes.rank)
    most = max(rows * (context // BLOCK + 1) for rows, context in cases)
    for label, kernels in world.engines.items():
        by_position = kernels is not None
        store = KVStore.allocate(
            layers, most, decoder.kv_shape, decoder.dtype, world.device, by_position=by_position
        )
        runner = Runner(decoder, kernels, store)
        runner.serve(adapters)
        yield from _passes(world, runner, cases, label + name)


def _passes(world: World, runner: Runner, cases: Sequence[tuple[int, int]], name: str) -> Lines:
    decoder = runner.decoder
    layers = decoder.config.num_layers
    token_bytes = count_block_bytes(layers, decoder.kv_shape, decoder.dtype) / BLOCK
    for rows, context in cases:
        found = sorted((runner.measure_parts(rows, context) for _ in range(6)), key=sum)
        layers_s, head_s = found[2]
        seconds = layers_s + head_s
        floor = (read_bytes(decoder, rows) + rows * context * token_bytes) / world.copied
        about = f"{name}, {rows} x {context}"
        yield Line(
            name=f"decode {about}", value=rows / seconds, unit="tok/s", note=f"{1e3 * seconds:.1f} ms a pass"
        )
        yield Line(name=f"  of the bandwidth, {about}", value=floor / seconds, bar=0.7, speed=True)
        yield Line(name=f"  head and draw, {about}", value=head_s / seconds, unit="of the pass")
    yield _host_reads(world, runner, decoder, min(64, cases[-1][0]), name)


def read_bytes(decoder: Decoder, rows: int) -> float:
    """Bytes of weights that a pass of ``rows`` rows reads: of experts those that are chosen by chance."""
    total, moe = 0.0, decoder.config.moe
    for name, weight in decoder.named_parameters():
        size = float(weight.numel() * weight.element_size())
        if name == "embed" and not decoder.config.tie_embeddings:
            continue
        if weight.dim() == 3 and moe is not None:
            size *= 1 - (1 - moe.top_k / moe.num_experts) ** rows
        total += size
    return total


def _host_reads(world: World, runner: Runner, decoder: Decoder, rows: int, name: str) -> Line:
    """Whether the layers of a pass wait for the device anywhere."""
    about = f"passes of {name} that wait for the device"
    if not world.on_card:
        return Line(name=about, note="no card")
    owners = np.arange(rows, dtype=np.int32)
    tables, seen = owners[:, None].copy(), np.full(rows, 4, np.int32)
    where = Places(tables[:, 0].astype(np.int64) * BLOCK + 3, tables, owners, seen).move_to(world.device)
    ids = torch.zeros(rows, dtype=torch.int64, device=world.device)
    attend, policy = runner._attend(where), runner._policies[0].prepared
    waits, note = 0.0, ""
    with torch.inference_mode():
        decoder.forward(ids, ids, attend, adapters=policy, ops=runner._ops)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.forward(ids, ids, attend, adapters=policy, ops=runner._ops)
        except RuntimeError as error:
            waits, note = 1.0, str(error).partition("\n")[0][:100]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Line(name=about, value=waits, bar=0, most=True, note=note)


def engine_of(world: World, decoder: Decoder, tokens: int, context: int) -> LocalEngine:
    """An engine with room for ``tokens``, on what a recipe chooses."""
    blocks = tokens // BLOCK + 64
    size = blocks * count_block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype)
    engine = LocalEngine(
        decoder, kernels=world.captured, kv_memory_mb=(size >> 20) + 1, context_limit=context
    )
    engine.publish(new_adapters(decoder, 0, rank=world.sizes.rank), 0)
    return engine


def requests(
    vocab: int, prompts: int, prompt_tokens: int, lengths: Sequence[int], seed: int = 0
) -> list[Request]:
    """Answers of these lengths to ``prompts`` random prompts, alike to each."""
    noise = np.random.default_rng(seed)
    texts = noise.integers(0, vocab, (prompts, prompt_tokens)).astype(np.int32)
    share = math.ceil(len(lengths) / prompts)
    return [
        Request(
            tokens=texts[i // share], sampling=Sampling(max_tokens=n), seed=(seed, i), uid=str(i // share)
        )
        for i, n in enumerate(lengths)
    ]


def answers(engine: LocalEngine, asked: Sequence[Request]) -> list[Completion]:
    async def collect() -> list[Completion]:
        found = {index: done async for index, done in engine.generate(asked)}
        return [found[index] for index in range(len(asked))]

    return asyncio.run(collect())


def lengths_of(count: int, mean: int, most: int) -> list[int]:
    """Quantiles of a lognormal, in a fixed shuffled order."""
    normal = NormalDist(math.log(mean) - 0.32, 0.8)
    found = [min(most, max(1, round(math.exp(normal.inv_cdf((i + 0.5) / count))))) for i in range(count)]
    return np.random.default_rng(0).permutation(found).tolist()


def rollouts(world: World, decoder: Decoder) -> Lines:
    """A long prompt, then ragged answers to shared prompts, and answers of equal length."""
    sizes, vocab = world.sizes, decoder.config.vocab_size
    context = max(sizes.prefill + 8, sizes.prompt + sizes.ragged[2] + 8)
    engine = engine_of(
        world, decoder, max(sizes.prefill, sizes.ragged[0] * (sizes.prompt + sizes.ragged[1])), context
    )
    _timed(world, engine, requests(vocab, 1, sizes.prefill, [1], seed=8))
    seconds = _timed(world, engine, requests(vocab, 1, sizes.prefill, [1], seed=9))[0]
    rate, work = sizes.prefill / seconds, 2 * sum(p.numel() for p in decoder.parameters())
    yield Line(name=f"prefill of {sizes.prefill} tokens", value=rate, unit="tok/s")
    share = rate * work / world.multiplied
    yield Line(name="  of the product's rate", value=share, bar=0.45, speed=True)
    lengths = lengths_of(*sizes.ragged)
    seconds, tokens = _timed(world, engine, requests(vocab, 8, sizes.prompt, lengths, seed=10))
    world.rates["ragged"] = tokens / seconds
    yield Line(name=f"ragged rollout of {len(lengths)}", value=world.rates["ragged"], unit="tok/s")
    equal = [sizes.equal[1]] * sizes.equal[0]
    seconds, tokens = _timed(world, engine, requests(vocab, len(equal), sizes.prompt // 4, equal, seed=11))
    world.rates["equal"] = tokens / seconds
    yield Line(name=f"rollout of {len(equal)} x {equal[0]}", value=world.rates["equal"], unit="tok/s")
    few = requests(vocab, 8, sizes.prompt // 4, [min(16, equal[0])] * len(equal), seed=12)
    if world.on_card:
        yield Line(name="device busy in a rollout", value=_busy(engine, few), bar=0.9, speed=True)
    else:
        yield Line(name="device busy in a rollout", note="no card")


def _timed(world: World, engine: LocalEngine, asked: Sequence[Request]) -> tuple[float, int]:
    world.wait()
    start = time.perf_counter()
    tokens = sum(len(done.tokens) for done in answers(engine, asked))
    world.wait()
    return time.perf_counter() - start, tokens


def _busy(engine: LocalEngine, asked: Sequence[Request]) -> float:
    """Share of the time in which kernels run, by torch's profiler (which slows the host)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        start = time.perf_counter()
        answers(engine, asked)
        seconds = time.perf_counter() - start
    return sum(one.self_device_time_total for one in trace.key_averages()) / 1e6 / seconds


# ---- transformers on the same tensors


def transformers_model(decoder: Decoder, raw: dict[str, Any]) -> Any:
    """AutoModelForCausalLM over the decoder's own tensors."""
    import transformers

    facts = {key: value for key, value in raw.items() if key != "model_type"}
    rope = {"rope_type": "default", "rope_theta": facts.get("rope_theta", 1e6)}
    config = transformers.AutoConfig.for_model(raw["model_type"], **facts, rope_parameters=rope)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=decoder.dtype, attn_implementation="sdpa"
        )
    model.load_state_dict(dict(list_hf_tensors(decoder)), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(decoder.device)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def same_logprobs(world: World) -> Lines:
    """Of the decoder and of transformers, at four layers."""
    raw = world.raw(DENSE, layers=2 if world.dry else 4)
    decoder = world.decoder(raw)
    model = transformers_model(decoder, raw)
    ids = torch.randint(decoder.config.vocab_size, (256,), generator=torch.Generator().manual_seed(1))
    ids = ids.to(world.device)
    with torch.no_grad():
        attend = PackedAttention((Segment(start=0, stop=len(ids)),))
        hidden, _ = decoder.forward(ids, torch.arange(len(ids), device=world.device), attend)
        ours = _at_next(decoder.logits(hidden), ids)
        theirs = _at_next(model(ids[None]).logits[0], ids)
    apart = (ours - theirs).abs()
    yield Line(
        name="log-probabilities apart from transformers'",
        value=float(apart.mean()),
        unit="nats",
        bar=0.02,
        most=True,
    )
    yield Line(name="  at most", value=float(apart.max()), unit="nats", bar=0.2, most=True)


def _at_next(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def peers(world: World, decoder: Decoder, raw: dict[str, Any]) -> Lines:
    """``generate`` of transformers on the same tensors."""
    model, sizes = transformers_model(decoder, raw), world.sizes
    count, length = sizes.equal
    ids = torch.randint(decoder.config.vocab_size, (count, sizes.prompt // 4), device=world.device)

    def generate() -> object:
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=length,
                max_new_tokens=length,
                pad_token_id=0,
            )

    start = time.perf_counter()
    generate()
    world.wait()
    rate = count * length / (time.perf_counter() - start)
    yield Line(name="transformers generate", value=rate, unit="tok/s")
    yield Line(name="  ours, equal lengths", value=world.rates["equal"] / rate, unit="x", bar=3, speed=True)
    mean, most = sizes.ragged[1:]  # a padded batch runs until its longest answer ends
    yield Line(
        name="  ours, ragged", value=world.rates["ragged"] / (rate * mean / most), unit="x", bar=5, speed=True
    )


def batching(world: World) -> Lines:
    """``generate_batch`` of transformers, on the same tensors; last of all, since it may hang."""
    raw, sizes = world.raw(DENSE), world.sizes
    decoder = world.decoder(raw)
    count, length = sizes.equal
    ids = torch.randint(decoder.config.vocab_size, (count, sizes.prompt // 4), device=world.device)
    rate = _continuous(world, transformers_model(decoder, raw), ids.tolist(), length)
    yield Line(name="transformers continuous batching", value=rate, unit="tok/s")
    if ours := world.rates.get("equal"):
        yield Line(name="  ours, equal lengths", value=ours / rate, unit="x", bar=2, speed=True)


def _continuous(world: World, model: Any, prompts: list[list[int]], length: int) -> float:
    """Tokens a second of ``generate_batch``."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    each = math.ceil((len(prompts[0]) + length) / CACHE_BLOCK) + 1
    cache = ContinuousBatchingConfig(
        block_size=CACHE_BLOCK, num_blocks=each * len(prompts), max_batch_tokens=8 * CACHE_BLOCK
    )
    start = time.perf_counter()
    outputs = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=cache, progress_bar=False
    )
    world.wait()
    seconds = time.perf_counter() - start
    return sum(len(one.generated_tokens) for one in outputs.values()) / seconds


# ---- parts


def dense(world: World) -> Lines:
    """Qwen3-8B by shape: decoding, prefill, rollouts, and transformers beside it."""
    raw = world.raw(DENSE)
    decoder = world.decoder(raw)
    steps: tuple[Callable[[], Lines], ...] = (
        lambda: decoding(world, decoder, world.sizes.decode, "8B"),
        lambda: rollouts(world, decoder),
        lambda: peers(world, decoder, raw),
    )
    for step in steps:
        yield from step()
        world.free()


def experts(world: World) -> Lines:
    """Qwen3-30B-A3B by shape, whole where the card has room for it."""
    whole = world.on_card and world.memory > 78e9
    decoder = world.decoder(world.raw(EXPERTS, layers=0 if whole else world.sizes.moe_layers))
    name = f"30B-A3B, {decoder.config.num_layers} layers"
    yield from decoding(world, decoder, ((world.sizes.moe_batch, 512 if not world.dry else 32),), name)
