"""The trainer against its slow twin, and its laws: exact ratios, refused steps, minibatches, restoring."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from nouns import sample_of
from small_replay import local_passes
from worlds import KERNELS, VOCAB, tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.model.attention import CausalAttention, DenseMaskAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, AdapterSpec, init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import trained_parameters
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.totals import Totals
from ostinato.train.trainer import PolicyTrainer, TrainingStopped
from ostinato.types import NO_EXPERT, Batch, Microbatch, Sample

DENSE, MOE = tiny_dense(max_position_embeddings=128), tiny_moe(head_dim=8, max_position_embeddings=128)
WIDE = tiny_dense(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LR = OptimizerSettings(lr=1e-2)


def decoder_of(raw: dict, dtype: torch.dtype = torch.float32, fp32_head: bool = False) -> Decoder:
    return Decoder(parse_config(raw), dtype=dtype, fp32_head=fp32_head).init_weights(seed=0)


def adapters_of(decoder: Decoder, dtype: torch.dtype = torch.float32) -> Adapters:
    """Adapters with B drawn too, so that every factor has a gradient."""
    targets = ("attn", "experts") if decoder.num_moe_layers else ("attn", "mlp")
    adapters = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8, targets=targets), seed=1)
    generator = torch.Generator().manual_seed(2)
    leaves = {}
    for name, (a, b) in adapters.tensors.items():
        drawn = torch.randn(b.shape, generator=generator) * 0.1
        leaves[name] = (a.detach().to(dtype).requires_grad_(), drawn.to(dtype).requires_grad_())
    return Adapters(adapters.spec, leaves, adapters.config)


def samples_of(decoder: Decoder, groups: int = 3, siblings: int = 3, seed: int = 0) -> list[Sample]:
    """Groups of siblings of different lengths; the last one of each has a tool reply in the middle."""
    rng = np.random.default_rng(seed)
    moe, samples = decoder.config.moe, []
    for group in range(groups):
        prompt = rng.integers(0, VOCAB, size=4 + group)
        prompt_experts = experts_of(rng, len(prompt), moe)
        for sibling in range(siblings):
            answer = rng.integers(0, VOCAB, size=5 + 2 * sibling + group)
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            logprobs = 0.1 * rng.standard_normal(len(tokens)) - math.log(VOCAB)
            if sibling == siblings - 1:
                mask[len(prompt) + 2 : len(prompt) + 4] = False
            experts = None
            if moe is not None:
                experts = np.concatenate([prompt_experts, experts_of(rng, len(answer), moe)])
                experts[-1] = NO_EXPERT
            samples.append(
                sample_of(
                    tokens,
                    len(prompt),
                    loss_mask=mask,
                    logprobs=np.where(mask, logprobs, 0).astype("f4"),
                    advantages=np.where(mask, rng.standard_normal(), 0).astype("f4"),
                    group=group,
                    uid=f"{group}#{sibling}",
                    experts=experts,
                )
            )
    return samples


def experts_of(rng: np.random.Generator, count: int, moe) -> np.ndarray:
    if moe is None:
        return np.zeros(0)
    shape = (count, len(moe.layers), moe.num_experts)
    return rng.random(shape).argsort(axis=-1)[..., : moe.top_k].astype(np.int16)


def batch_of(samples: list[Sample], budget: int = 60, version: int = 0, minibatches: int = 1) -> Batch:
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=budget, version=version, minibatches=minibatches)


def naive_gradients(
    decoder: Decoder, adapters: Adapters | None, samples: list[Sample], *, temperature: float, replay: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The slow twin of a CISPO step with no cap in reach: one sample, all its logits, at a time."""
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    total = torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        positions = torch.arange(len(tokens))
        routing = torch.from_numpy(sample.experts) if replay and sample.experts is not None else None
        hidden, _ = decoder(tokens, positions, CausalAttention(), adapters=adapters, routing=routing)
        log_p = torch.log_softmax(decoder.logits(hidden).double() / temperature, dim=-1)
        for t in np.flatnonzero(sample.loss_mask):
            logprob = log_p[t - 1, tokens[t]]
            ratio = (logprob.detach() - float(sample.logprobs[t])).exp()
            total = total - float(weight[t]) * float(sample.advantages[t]) * ratio * logprob
    total.backward()
    leaves = trained_parameters(decoder, adapters)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return total.item(), gradients


def trainer_gradients(trainer: PolicyTrainer, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """What one optimizer step would be given, read out of the trainer before it applies it."""
    totals = Totals()
    trainer._accumulate([trainer._guard.inputs(m) for m in batch.microbatches], batch.num_samples, 1, totals)
    gradients = {name: leaf.grad for name, leaf in trainer._named.items() if leaf.grad is not None}
    return float(torch.stack(totals.loss).sum()), gradients


CISPO = algorithm("cispo", ratio_cap=1e6)


@pytest.mark.parametrize(
    ("dtype", "full", "rtol", "atol"),
    [
        (torch.float32, False, 1e-5, 1e-6),
        (torch.float32, True, 1e-4, 1e-6),
        (torch.float64, False, 1e-6, 1e-9),  # bounded by weights and advantages, which arrive as fp32
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_packed_gradients_equal_one_sample_at_a_time(
    raw: dict, replay: bool, recompute: bool, dtype: torch.dtype, full: bool, rtol: float, atol: float
) -> None:
    decoder = decoder_of(raw, dtype).trainable(full)
    adapters, samples = None if full else adapters_of(decoder, dtype), samples_of(decoder)
    expected_loss, expected = naive_gradients(decoder, adapters, samples, temperature=0.7, replay=replay)
    options = {"temperature": 0.7, "replay": replay, "recompute": recompute}
    trainer = PolicyTrainer(decoder, adapters, CISPO, optimizer=LR, **options)
    loss, gradients = trainer_gradients(trainer, batch_of(samples))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)


GRPO = algorithm("grpo", correction="token_truncate")


def trainer_of(decoder: Decoder, **options) -> PolicyTrainer:
    """Without a gate: the experts of ``samples_of`` are random."""
    options = {"algorithm": GRPO, "optimizer": LR, "replay_threshold": 0.0} | options
    return PolicyTrainer(decoder, adapters_of(decoder), options.pop("algorithm"), **options)


def logprobs_of(trainer: PolicyTrainer, part: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        hidden, _ = local_passes(trainer).forward(part, trainer._adapters)
        return local_passes(trainer).logprobs(hidden, part, want_entropy=True)


def poisoned(batch: Batch, index: int, value: float) -> Batch:
    """The batch with one advantage of microbatch ``index`` replaced."""
    bad = batch.microbatches[index]
    advantages = bad.advantages.copy()
    advantages[0] = value
    microbatches = list(batch.microbatches)
    microbatches[index] = replace(bad, advantages=advantages)
    return replace(batch, microbatches=tuple(microbatches))


def bytes_of(trainer: PolicyTrainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.tensors().items()}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raw", [DENSE, MOE, WIDE], ids=["dense", "moe", "wide"])
def test_old_logprobs_are_bitwise_those_of_the_training_forward(
    raw: dict, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    """So the ratio of a minibatch that nothing was learned before is exactly 1, not 1 within rounding.

    Native products have gradients only inside a LoRA layer, so an old pass without gradients multiplies with
    torch's, which at the widths of a real model round one bf16 entry in ten thousand differently.
    """
    decoder = decoder_of(raw, dtype)
    trainer = trainer_of(decoder, ops=kernels.training if kernels else TORCH_OPS)
    for microbatch in batch_of(samples_of(decoder)).microbatches:
        part = trainer._guard.inputs(microbatch)
        hidden, _ = local_passes(trainer).forward(part, trainer._adapters)
        logprobs, _ = local_passes(trainer).logprobs(hidden, part, want_entropy=True)
        old = trainer._with_old([part])[0].old
        assert logprobs.requires_grad
        assert old is not None
        assert not old.requires_grad
        assert torch.equal(old, logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp32_head", [False, True])
def test_logprobs_are_those_of_the_decoders_head(dtype: torch.dtype, fp32_head: bool) -> None:
    """The trainer's fast head must be the engine's: same precision, same temperature."""
    decoder = decoder_of(DENSE, dtype, fp32_head)
    trainer = trainer_of(decoder, temperature=0.8)
    part = trainer._guard.inputs(batch_of(samples_of(decoder), budget=1000).microbatches[0])
    with torch.no_grad():
        logprobs, entropy = logprobs_of(trainer, part)
        attend = DenseMaskAttention(part.source.segments)
        hidden, _ = decoder(part.tokens, part.positions, attend, adapters=trainer._adapters)
        log_p = torch.log_softmax(decoder.logits(hidden[part.rows]).float() / 0.8, dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # the two attentions round differently in bf16
    expected = log_p.gather(1, part.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=tolerance)


def test_native_head_products_agree_with_torch(kernels: Kernels) -> None:
    """bf16 products summed in fp32 are the FP32 head up to the order of summation."""
    decoder = decoder_of(DENSE, torch.bfloat16, fp32_head=True)
    plain, native = trainer_of(decoder), trainer_of(decoder, ops=kernels.training)
    batch = batch_of(samples_of(decoder), budget=1000)
    part = plain._guard.inputs(batch.microbatches[0])
    hidden, _ = local_passes(plain).forward(part, plain._adapters)
    ours, _ = local_passes(native).logprobs(hidden, part, want_entropy=True)
    theirs, _ = local_passes(plain).logprobs(hidden, part, want_entropy=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    _, expected = trainer_gradients(plain, batch)
    _, gradients = trainer_gradients(native, batch)
    for name, gradient in gradients.items():
        assert torch.linalg.vector_norm(gradient - expected[name]) < 0.02 * torch.linalg.vector_norm(
            expected[name]
        )


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo", "rloo"])
def test_cutting_a_step_into_microbatches_changes_memory_not_gradients(name: str) -> None:
    decoder = decoder_of(DENSE)
    samples = samples_of(decoder)
    trainer = trainer_of(decoder, algorithm=algorithm(name))
    whole_loss, whole = trainer_gradients(trainer, batch_of(samples, budget=1000))
    cut_loss, cut = trainer_gradients(trainer, batch_of(samples, budget=20))
    assert cut_loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-7)
    for parameter, gradient in cut.items():
        torch.testing.assert_close(gradient, whole[parameter], rtol=1e-4, atol=1e-7, msg=parameter)


def test_minibatches_are_steps_one_after_the_other() -> None:
    """The twin: a batch of its own for each, with the weights that it has among the others."""
    decoder = decoder_of(DENSE)
    options = {"algorithm": algorithm("cispo"), "optimizer": LR}
    whole = batch_of(samples_of(decoder, groups=5), budget=20, minibatches=2)
    together, apart = trainer_of(decoder, **options), trainer_of(decoder, **options)
    together.step(whole)
    for minibatch in whole.minibatches:
        parts = tuple(replace(part, weights=2 * part.weights) for part in minibatch)
        apart.step(replace(whole, microbatches=parts))
    assert bytes_of(together) == bytes_of(apart)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_refused_and_names_its_samples(value: float) -> None:
    decoder = decoder_of(DENSE)
    seen: list[Microbatch] = []
    trainer = trainer_of(decoder, on_refused=seen.append)
    batch = batch_of(samples_of(decoder), budget=20)
    trainer.step(batch)
    before = bytes_of(trainer)
    report = trainer.step(poisoned(batch, 1, value))
    assert bytes_of(trainer) == before
    assert report.skipped
    assert report.uids == batch.microbatches[1].uids
    assert [microbatch.uids for microbatch in seen] == [report.uids]
    assert report.metrics["refused_steps"] == 1
    after = trainer.step(batch)
    assert not after.skipped
    assert bytes_of(trainer) != before
    assert all(math.isfinite(metric) for metric in after.metrics.values())


def test_an_overflow_that_no_microbatch_has_alone_names_them_all() -> None:
    decoder = decoder_of(DENSE)
    trainer = trainer_of(decoder, algorithm=algorithm("rloo"))
    batch = batch_of(samples_of(decoder), budget=20)
    huge = [
        replace(m, advantages=np.full_like(m.advantages, 2e38), weights=m.weights * 0 + 1e-3)
        for m in batch.microbatches
    ]
    report = trainer.step(replace(batch, microbatches=tuple(huge)))
    assert report.skipped
    assert set(report.uids) == {uid for microbatch in batch.microbatches for uid in microbatch.uids}


def test_one_refused_minibatch_leaves_the_others_their_step() -> None:
    decoder = decoder_of(DENSE)
    trainer = trainer_of(decoder)
    batch = batch_of(samples_of(decoder), budget=20, minibatches=3)
    metrics = trainer.step(poisoned(batch, 1, math.nan)).metrics
    assert (metrics["optimizer_steps"], metrics["refused_steps"]) == (2, 1)


def test_training_stops_after_refusals_in_a_row_only() -> None:
    decoder = decoder_of(DENSE)
    trainer = trainer_of(decoder, max_refused=2)
    good = batch_of(samples_of(decoder), budget=20)
    bad = poisoned(good, 0, math.nan)
    for batch in (bad, good, bad):
        trainer.step(batch)
    with pytest.raises(TrainingStopped, match=r"2 optimizer steps in a row .*#"):
        trainer.step(bad)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_restoring_is_bitwise(raw: dict, full: bool) -> None:
    def fresh() -> PolicyTrainer:
        decoder = decoder_of(raw).trainable(full)
        return PolicyTrainer(
            decoder, None if full else adapters_of(decoder), GRPO, optimizer=LR, replay_threshold=0.0
        )

    batch = batch_of(samples_of(decoder_of(raw)))
    straight, broken, resumed = (fresh() for _ in range(3))
    for _ in range(4):
        straight.step(batch)
    for _ in range(2):
        broken.step(batch)
    resumed.restore({name: t.clone() for name, t in broken.tensors().items()}, broken.counters())
    for _ in range(2):
        resumed.step(batch)
    assert bytes_of(resumed) == bytes_of(straight)
    assert resumed.counters() == straight.counters()


def test_kl_is_measured_from_the_base() -> None:
    decoder = decoder_of(MOE)
    options = {"algorithm": algorithm("grpo", kl_coef=0.1), "replay": False}
    fresh = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8, targets=("attn",)), seed=1)
    base = PolicyTrainer(decoder, fresh, options["algorithm"], optimizer=LR, replay=False)
    batch = batch_of(samples_of(decoder))
    assert base.step(batch).metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert trainer_of(decoder, **options).step(batch).metrics["kl"] > 1e-4


def test_published_adapters_stay_what_they_were() -> None:
    decoder = decoder_of(DENSE)
    trainer = trainer_of(decoder)
    published = trainer.adapters()
    assert published is not None
    before = {name: t.clone() for name, t in published.state_dict().items()}
    trainer.step(batch_of(samples_of(decoder)))
    assert all(torch.equal(t, before[name]) for name, t in published.state_dict().items())


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    decoder = decoder_of(DENSE)
    for field, options in {
        "rollout.temperature": {"temperature": 0.0},
        "trainer.max_refused_in_a_row": {"max_refused": 0},
        "trainer.replay_threshold": {"replay_threshold": 1.5},
        "log.mismatch_every": {"measure_every": -1},
    }.items():
        with pytest.raises(ValueError, match=field):
            trainer_of(decoder, **options)
    with pytest.raises(ValueError, match="nothing is trainable"):
        PolicyTrainer(decoder, None, GRPO, optimizer=LR)
    with pytest.raises(ValueError, match="trainable beside its adapters"):
        trainer_of(decoder_of(DENSE).trainable(True))
    with pytest.raises(ValueError, match=r"algo\.kl_coef"):
        PolicyTrainer(decoder_of(DENSE).trainable(True), None, algorithm("grpo", kl_coef=0.1), optimizer=LR)
    with pytest.raises(ValueError, match=r"model\.dtype"):
        PolicyTrainer(decoder_of(DENSE, torch.bfloat16).trainable(True), None, GRPO, optimizer=LR)
    with pytest.raises(ValueError, match="no microbatch"):
        trainer_of(decoder).step(Batch(microbatches=(), num_samples=0, num_tokens=0, num_context_tokens=0))


def test_tokens_grow_older_with_every_minibatch() -> None:
    """PPO-off-policy-4 (arXiv 2510.13786): a batch of one policy, four optimizer steps on it, so that tokens
    are 0, 1, 2 and 3 steps old when they are learned from; of a batch that is a version old, 4 to 7."""
    decoder = decoder_of(DENSE)
    batch = batch_of(samples_of(decoder, groups=4), budget=1000, minibatches=4)
    trainer = PolicyTrainer(decoder, adapters_of(decoder), algorithm("cispo"), optimizer=LR)
    metrics = trainer.step(batch).metrics
    sizes = [sum(len(part.targets) for part in minibatch) for minibatch in batch.minibatches]
    mean = sum(n * size for n, size in enumerate(sizes)) / sum(sizes)
    assert metrics["optimizer_steps"] == 4
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(mean), 3)
    older = replace(
        batch, microbatches=tuple(replace(part, staleness=part.staleness + 1) for part in batch.microbatches)
    )
    assert trainer.step(older).metrics["staleness/mean"] == pytest.approx(4 + mean)
