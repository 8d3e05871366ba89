"""On-policy distillation: its advantages against a plain twin, and the law that a teacher who equals the
student teaches nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from nouns import drawn
from worlds import KERNELS, VOCAB, adapters_of, tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.losses import add_teacher_kl
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.teacher import local_teacher
from ostinato.train.totals import Totals
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Sample

WORLDS = {"dense": tiny_dense(), "moe": tiny_moe(head_dim=8)}
LR = TrainerSection(lr=1e-2)
TEMPERATURE = 0.7


def decoder_of(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(parse_config(WORLDS[name]), dtype=dtype).init_weights(seed=0)


def samples_of(rewarded: bool = False) -> list[Sample]:
    rng = np.random.default_rng(0)
    made = [sample for g in range(3) for sample in drawn(rng, VOCAB, 4 + g, [5, 7 + g], group=g)]
    return made if rewarded else [replace(one, advantages=np.zeros_like(one.advantages)) for one in made]


def batch_of(samples: list[Sample], minibatches: int = 1) -> Batch:
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=40, minibatches=minibatches)


def trainer_of(decoder: Decoder, student: Adapters, teacher: Adapters, **options: Any) -> PolicyTrainer:
    ops: Ops = options.pop("ops", TORCH_OPS)
    chosen = algorithm("opd", **options)
    scorer = local_teacher(decoder, teacher, temperature=TEMPERATURE, ops=ops)
    settings: dict[str, Any] = {"settings": LR, "temperature": TEMPERATURE, "ops": ops}
    return PolicyTrainer(decoder, student, chosen, teacher=scorer, **settings)


def test_advantages_token_by_token() -> None:
    rng = np.random.default_rng(1)
    given, new, teacher = rng.standard_normal((3, 9))
    as_tensors = [torch.from_numpy(one) for one in (given, new, teacher)]
    found, sums = add_teacher_kl(as_tensors[0], as_tensors[1], as_tensors[2], 0.5)
    twin = [a - 0.5 * (n - t) for a, n, t in zip(given, new, teacher, strict=True)]
    assert found.tolist() == pytest.approx(twin)
    assert float(sums["opd/reverse_kl"]) == pytest.approx(sum(new) - sum(teacher))
    assert float(sums["opd/teacher_logprob"]) == pytest.approx(sum(teacher))


def test_its_expectation_is_the_gradient_of_the_reverse_kl() -> None:
    """Over a vocabulary of 7, by all of its tokens, each with its probability as weight."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.log_softmax(torch.arange(7, dtype=torch.float64) / 3, 0)
    new = torch.log_softmax(logits, 0)
    advantages, _ = add_teacher_kl(torch.zeros(7, dtype=torch.float64), new, teacher, 1.0)
    (found,) = torch.autograd.grad(-(new.exp().detach() * advantages * new).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((new.exp() * (new - teacher)).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", list(WORLDS))
def test_a_teacher_equal_to_the_student_changes_nothing(name: str, kernels: Kernels | None) -> None:
    """To the bit, over two optimizer steps: the same forward scores both."""
    decoder, ops = decoder_of(name), kernels.training if kernels else TORCH_OPS
    trainer = trainer_of(decoder, adapters_of(decoder, 1), adapters_of(decoder, 1), ops=ops)
    before = {key: tensor.clone() for key, tensor in trainer.tensors().items() if ".A" in key or ".B" in key}
    report = trainer.step(batch_of(samples_of(), minibatches=2))
    assert report.metrics["opd/reverse_kl"] == report.metrics["loss"] == report.metrics["grad_norm"] == 0
    after = trainer.tensors()
    assert before and all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert report.metrics["passes/extra"] == pytest.approx(1)


@pytest.mark.parametrize("name", list(WORLDS))
def test_gradients_equal_one_sample_at_a_time(name: str) -> None:
    """Packed and with prompts shared, against plain forwards of each sample; rewards mixed in."""
    decoder = decoder_of(name, torch.float64)
    student, teacher = adapters_of(decoder, 1), adapters_of(decoder, 2)
    samples = samples_of(rewarded=True)
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    trainer = trainer_of(decoder, student, teacher, loss="reinforce", teacher_coef=0.5, reward_coef=1.0)
    total = torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        both = []
        for adapters in (student, teacher):
            hidden, _ = decoder(tokens, torch.arange(len(tokens)), CausalAttention(), adapters=adapters)
            both.append(torch.log_softmax(decoder.logits(hidden).double() / TEMPERATURE, dim=-1))
        for t in np.flatnonzero(sample.loss_mask):
            own, other = (log_p[t - 1, tokens[t]] for log_p in both)
            advantage = float(sample.advantages[t]) + 0.5 * float((other - own).detach())
            total = total - float(weight[t]) * advantage * own
    total.backward()
    leaves = {key: leaf for key, leaf in trainer._named.items() if leaf.grad is not None}
    expected = {key: leaf.grad.clone() for key, leaf in leaves.items() if leaf.grad is not None}
    parts = [trainer._guard.inputs(one) for one in batch_of(samples).microbatches]
    trainer._accumulate(parts, len(samples), 1, Totals())
    assert expected
    for key, gradient in expected.items():
        torch.testing.assert_close(leaves[key].grad, gradient, rtol=1e-5, atol=1e-8, msg=key)


def test_it_needs_a_teacher() -> None:
    decoder = decoder_of("dense")
    trainer = PolicyTrainer(decoder, adapters_of(decoder, 1), algorithm("opd"), settings=LR)
    with pytest.raises(ValueError, match=r"algo\.teacher_coef is 1\.0 but teacher_logprobs is None"):
        trainer.step(batch_of(samples_of()))
