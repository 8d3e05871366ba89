"""The trainer on the device: agreement with the sampler, utilisation, memory, and PEFT beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lab.gpu.sampling import answers, engine_of, requests, transformers_model
from lab.gpu.world import DENSE, EXPERTS, Line, Lines, World
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.config import TrainerSection
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.memory import Training
from ostinato.pipeline.account import compute_batch_work
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Completion, Request, Sample


def agreement(world: World) -> Lines:
    """KL of sampler and trainer on what the sampler drew, at the shape of 8B with few layers."""
    for name, raw in (("dense", DENSE), ("experts", EXPERTS)):
        decoder = world.decoder(world.raw(raw, layers=2 if world.dry else 8))
        trainer = new_trainer(world, decoder, _adapters(decoder, world))
        lengths = [8 if world.dry else 64] * 16
        asked = requests(decoder.config.vocab_size, 4, 24, lengths)
        done = answers(engine_of(world, decoder, 16 * 128, 256), asked)
        batch = batch_of(samples_of(asked, done), world.sizes.rows)
        scored = trainer.score(batch)
        ratios = np.concatenate(
            [s - m.logprobs for s, m in zip(scored, batch.microbatches, strict=True)]
        ).astype(np.float64)
        k3 = float(np.mean(np.exp(ratios) - 1 - ratios))
        yield Line(name=f"k3 of trainer and sampler, {name}", value=k3, unit="nats", bar=1e-3, most=True)
        probs = [np.mean(done_.logprobs) for done_ in done]
        yield Line(name=f"  mean log-probability, {name}", value=float(np.mean(probs)), unit="nats")


def _adapters(decoder: Decoder, world: World) -> Adapters:
    moe = decoder.config.moe is not None
    spec = AdapterSpec(
        rank=world.sizes.rank,
        alpha=2.0 * world.sizes.rank,
        targets=("attn", "experts") if moe else ("attn", "mlp"),
    )
    return init_adapters(decoder.config, spec, 0, decoder.device)


def new_trainer(
    world: World, decoder: Decoder, adapters: Adapters, *, recompute: bool = False, ops: Ops | None = None
) -> PolicyTrainer:
    grpo = algorithm("grpo", drop_zero_variance=False)
    settings = TrainerSection(lr=1e-5, recompute=recompute, replay=False)
    ops = ops or (TORCH_OPS if world.kernels is None else world.kernels.ops)
    return PolicyTrainer(decoder, adapters, grpo, settings=settings, ops=ops)


def samples_of(asked: Sequence[Request], done: Sequence[Completion]) -> list[Sample]:
    groups = {uid: index for index, uid in enumerate(dict.fromkeys(one.uid for one in asked))}
    return [
        _sample(request.tokens, one.tokens, one.logprobs, groups[request.uid], index)
        for index, (request, one) in enumerate(zip(asked, done, strict=True))
    ]


def _sample(prompt: np.ndarray, answer: np.ndarray, logprobs: np.ndarray, group: int, index: int) -> Sample:
    before, behind = len(prompt), len(answer)
    context = np.zeros(before, np.float32)
    return Sample(
        tokens=np.concatenate([prompt, answer]).astype(np.int32),
        loss_mask=np.repeat([False, True], [before, behind]),
        logprobs=np.concatenate([context, logprobs]).astype(np.float32),
        advantages=np.concatenate([context, np.full(behind, 1.0 - 2 * (index % 2))]).astype(np.float32),
        versions=np.repeat([-1, 0], [before, behind]).astype(np.int32),
        group=group,
        prompt_len=before,
        uid=f"{group}#{index}",
    )


def _random(vocab: int, prompts: int, group: int, before: int, behind: int) -> list[Sample]:
    noise = np.random.default_rng(0)
    found = []
    for at in range(prompts):
        prompt = noise.integers(0, vocab, before).astype(np.int32)
        for member in range(group):
            answer = noise.integers(0, vocab, behind).astype(np.int32)
            logprobs = np.full(behind, -2.0, np.float32)
            found.append(_sample(prompt, answer, logprobs, at, at * group + member))
    return found


def batch_of(samples: Sequence[Sample], rows: int, *, share: bool = True) -> Batch:
    total = sum(int(one.loss_mask.sum()) for one in samples)
    weights = [one.loss_mask.astype(np.float32) / total for one in samples]
    return pack(samples, weights, tokens_per_microbatch=rows, share_prompts=share)


def _step_s(world: World, trainer: PolicyTrainer, batch: Batch) -> float:
    trainer.step(batch)
    world.wait()
    start = time.perf_counter()
    trainer.step(batch)
    world.wait()
    return time.perf_counter() - start


def _measured(
    world: World,
    decoder: Decoder,
    name: str,
    samples: Sequence[Sample],
    rows: int,
    bar: float,
    *,
    recompute: bool,
) -> Lines:
    """Utilisation and memory of one step."""
    world.free()
    batch, adapters = batch_of(samples, rows), _adapters(decoder, world)
    trainer, seconds = new_trainer(world, decoder, adapters, recompute=recompute), [0.0]

    def work() -> None:
        seconds[0] = _step_s(world, trainer, batch)

    most = world.most_memory(work)
    flops, amount = FlopModel.of(decoder.config, adapters.spec), compute_batch_work(batch)
    used = (flops.forward(amount) + flops.backward(amount)) / seconds[0]
    yield Line(name=f"train {name}", value=amount.tokens / seconds[0], unit="rows/s")
    yield Line(
        name=f"  utilisation, {name}", value=used / world.peak, unit="of the peak", bar=bar, speed=True
    )
    if most:
        planned = sum(_planned(decoder, adapters, rows, samples, recompute=recompute).values())
        yield Line(
            name=f"  memory, {name}", value=most / 1e9, unit="GB", note=f"{planned / 1e9:.1f} GB planned"
        )
        yield Line(name=f"  memory over the plan, {name}", value=most / planned, unit="x", bar=1.1, most=True)


def _planned(
    decoder: Decoder, adapters: Adapters, rows: int, samples: Sequence[Sample], *, recompute: bool
) -> dict[str, float]:
    """Bytes by term, without what is taken beside tensors."""
    trained, prompt = sum(int(one.loss_mask.sum()) for one in samples), samples[0].prompt_len
    training = Training(
        config=decoder.config,
        adapter=adapters.spec,
        microbatch=rows,
        recompute=recompute,
        trained=trained / (trained + prompt),
    )
    return training.fullest()[1]


def dense(world: World) -> Lines:
    """Qwen3-8B with LoRA: long and short answers, with and without recomputing, and PEFT beside it."""
    sizes, raw = world.sizes, world.raw(DENSE)
    decoder, rows = world.decoder(raw), world.sizes.rows
    vocab, part = decoder.config.vocab_size, rows // 8
    whole = _random(vocab, 8, 1, part // 4, part - part // 4)
    yield from _measured(world, decoder, f"T = {rows}", whole, rows, 0.42, recompute=False)
    twice = _random(vocab, 16, 1, part // 4, part - part // 4)
    yield from _measured(world, decoder, f"T = {2 * rows}, recompute", twice, 2 * rows, 0.30, recompute=True)
    short = _random(vocab, sizes.answers // 8, 8, 2 * sizes.short, sizes.short)
    yield from _measured(world, decoder, "short answers", short, rows, 0.30, recompute=False)
    shared = _random(vocab, 2, 16, 4 * part // 8, part // 8)
    trainer = new_trainer(world, decoder, _adapters(decoder, world))
    apart, together = (
        _step_s(world, trainer, batch_of(shared, rows, share=share)) for share in (False, True)
    )
    yield Line(name="sharing of prompts", value=apart / together, unit="x", bar=2.5, speed=True)
    ours = _step_s(world, trainer, batch_of(whole, rows))
    del trainer
    world.free()
    theirs = _peft_step_s(world, transformers_model(decoder, raw), whole)
    yield Line(name="transformers with PEFT, recomputing", value=rows / theirs, unit="tokens/s")
    yield Line(name="  ours", value=theirs / ours, unit="x", bar=1.5, speed=True)


def _peft_step_s(world: World, model: Any, samples: Sequence[Sample]) -> float:
    """Of a step of supervised training on the same tokens, two sequences a pass."""
    import peft

    settings = peft.LoraConfig(
        r=world.sizes.rank,
        lora_alpha=2 * world.sizes.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    learner: Any = peft.get_peft_model(model, settings)
    learner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    learner.enable_input_require_grads()
    learner.train()
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=1e-5)
    ids = torch.from_numpy(np.stack([one.tokens for one in samples]).astype(np.int64)).to(world.device)

    def step() -> None:
        for some in ids.split(2):
            (learner(input_ids=some, labels=some, use_cache=False).loss * len(some) / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return world.seconds(step, 1)


def experts(world: World) -> Lines:
    """A step of Qwen3-30B-A3B with LoRA on attention and experts, recomputing."""
    whole = world.on_card and world.memory > 78e9
    decoder = world.decoder(world.raw(EXPERTS, layers=0 if whole else world.sizes.moe_layers))
    rows = world.sizes.moe_rows
    samples = _random(decoder.config.vocab_size, 4, 1, rows // 16, rows // 4 - rows // 16)
    name = f"30B-A3B, {decoder.config.num_layers} layers, T = {rows}"
    yield from _measured(world, decoder, name, samples, rows, 0.12, recompute=True)
