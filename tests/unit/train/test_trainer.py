"""The trainer against its slow twin, and its laws: exact ratios, refused steps, slices, repeated steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import repeated_steps
import torch
from hypothesis import given
from hypothesis import strategies as st
from nouns import drawn
from reference.plain_layers import DenseMaskAttention
from repeated_steps import CASES, prepare
from small_replay import local_passes
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_options import trainer_options
from worlds import KERNELS, VOCAB, tiny_dense, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.collectives import Collectives
from ostinato.parallel.layout import Coords, Layout
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import trained_parameters
from ostinato.train.sharded import Slice, count_padding, make_idle_slice, slice_part
from ostinato.train.totals import Totals
from ostinato.train.trainer import MAX_REFUSED, PolicyTrainer, TrainingStopped
from ostinato.types import NO_EXPERT, Batch, Microbatch, Sample, Segment

DENSE, MOE = tiny_dense(max_position_embeddings=128), tiny_moe(head_dim=8, max_position_embeddings=128)
WIDE = tiny_dense(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LR = TrainerSection(lr=1e-2)


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
    """Groups of siblings of different lengths, with a tool reply in the middle."""
    rng, samples = np.random.default_rng(seed), []
    for group in range(groups):
        lengths = [5 + 2 * sibling + group for sibling in range(siblings)]
        samples += drawn(rng, VOCAB, 4 + group, lengths, moe=decoder.config.moe, group=group, gap=slice(2, 4))
    return samples


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
    decoder = decoder_of(raw, dtype).set_trainable(full)
    adapters, samples = None if full else adapters_of(decoder, dtype), samples_of(decoder)
    expected_loss, expected = naive_gradients(decoder, adapters, samples, temperature=0.7, replay=replay)
    options = {"temperature": 0.7, "replay": replay, "recompute": recompute}
    trainer = PolicyTrainer(decoder, adapters, CISPO, **trainer_options(settings=LR, **options))
    loss, gradients = trainer_gradients(trainer, batch_of(samples))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)


GRPO = algorithm("grpo", correction="token_truncate")


def trainer_of(decoder: Decoder, **options) -> PolicyTrainer:
    """Without a gate: the experts of ``samples_of`` are random."""
    options = trainer_options(**{"algorithm": GRPO, "settings": LR, "replay_threshold": 0.0} | options)
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
        old = trainer._add_old([part])[0].old
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
    options = {"algorithm": algorithm("cispo"), "settings": LR}
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
    trainer = trainer_of(decoder)
    good = batch_of(samples_of(decoder), budget=20)
    bad = poisoned(good, 0, math.nan)
    for batch in (bad, good, *([bad] * (MAX_REFUSED - 1))):
        trainer.step(batch)
    with pytest.raises(TrainingStopped, match=r"5 optimizer steps in a row .*#"):
        trainer.step(bad)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])
def test_restoring_is_bitwise(raw: dict, full: bool) -> None:
    def fresh() -> PolicyTrainer:
        decoder = decoder_of(raw).set_trainable(full)
        settings = trainer_options(settings=LR, replay_threshold=0.0)
        return PolicyTrainer(decoder, None if full else adapters_of(decoder), GRPO, **settings)

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
    base = PolicyTrainer(decoder, fresh, options["algorithm"], **trainer_options(settings=LR, replay=False))
    batch = batch_of(samples_of(decoder))
    assert base.step(batch).metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert trainer_of(decoder, **options).step(batch).metrics["kl"] > 1e-4


def test_kl_is_measured_from_the_start() -> None:
    """Of adapters that a run begins with: 0 in its first step, and after a resume from where it was."""
    decoder = decoder_of(MOE)
    options = {"algorithm": algorithm("grpo", kl_coef=0.1, kl_reference="start"), "replay": False}
    trainer, again = trainer_of(decoder, **options), trainer_of(decoder, **options)
    batch = batch_of(samples_of(decoder))
    assert trainer.step(batch).metrics["kl"] == pytest.approx(0, abs=1e-6)
    again.restore({name: t.clone() for name, t in trainer.tensors().items()}, trainer.counters())
    later = trainer.step(batch).metrics["kl"]
    assert later > 1e-6 and again.step(batch).metrics["kl"] == later


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
    with pytest.raises(ValueError, match="nothing is trainable"):
        PolicyTrainer(decoder, None, GRPO, settings=LR)
    with pytest.raises(ValueError, match="trainable beside its adapters"):
        trainer_of(decoder_of(DENSE).set_trainable(True))
    with pytest.raises(ValueError, match=r"algo\.kl_coef"):
        PolicyTrainer(
            decoder_of(DENSE).set_trainable(True), None, algorithm("grpo", kl_coef=0.1), settings=LR
        )
    with pytest.raises(ValueError, match=r"model\.dtype"):
        PolicyTrainer(decoder_of(DENSE, torch.bfloat16).set_trainable(True), None, GRPO, settings=LR)
    with pytest.raises(ValueError, match="no microbatch"):
        trainer_of(decoder).step(Batch(microbatches=(), num_samples=0, num_tokens=0, num_context_tokens=0))


def test_tokens_grow_older_with_every_minibatch() -> None:
    """PPO-off-policy-4 (arXiv 2510.13786): a batch of one policy, four optimizer steps on it, so that tokens
    are 0, 1, 2 and 3 steps old when they are learned from; of a batch that is a version old, 4 to 7."""
    decoder = decoder_of(DENSE)
    batch = batch_of(samples_of(decoder, groups=4), budget=1000, minibatches=4)
    trainer = PolicyTrainer(decoder, adapters_of(decoder), algorithm("cispo"), settings=LR)
    metrics = trainer.step(batch).metrics
    sizes = [sum(len(part.targets) for part in minibatch) for minibatch in batch.minibatches]
    mean = sum(n * size for n, size in enumerate(sizes)) / sum(sizes)
    assert metrics["optimizer_steps"] == 4
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(mean), 3)
    older = replace(
        batch, microbatches=tuple(replace(part, staleness=part.staleness + 1) for part in batch.microbatches)
    )
    assert trainer.step(older).metrics["staleness/mean"] == pytest.approx(4 + mean)


# ---- cutting a microbatch into the shares of ranks: every row and every target is exactly one rank's


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, without ranks around it: what slicing uses of a mesh."""

    layout: Layout
    coords: Coords
    device: str = "cpu"

    def size(self, axis: str) -> int:
        return 1


def part_of(rows: int, targets: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    none = np.zeros(targets, "f4")
    source = Microbatch(
        tokens=rng.integers(0, 50, rows).astype(np.int32),
        positions=np.arange(rows, dtype=np.int32),
        segments=(Segment(start=0, stop=rows),),
        rows=rng.integers(0, rows, targets).astype(np.int32),
        targets=rng.integers(0, 50, targets).astype(np.int32),
        logprobs=none,
        advantages=none,
        weights=none,
        sample_idx=np.zeros(targets, np.int32),
        staleness=np.zeros(targets, np.int32),
        uids=("0#0",),
    )
    routes = torch.from_numpy(rng.integers(0, 8, (rows, 2, 2)).astype(np.int16))
    ids = {
        name: torch.from_numpy(getattr(source, name)).long()
        for name in ("tokens", "positions", "rows", "targets")
    }
    zeros = torch.zeros(targets)
    return Inputs(
        source=source,
        segments=source.segments,
        behaviour=zeros,
        advantages=zeros,
        weights=zeros,
        sample_idx=zeros.long(),
        carried=routes,
        routing=routes,
        **ids,
    )


def all_ranks(layout: Layout, part: Inputs) -> list[Slice]:
    """Of the ranks of one data rank, in order of context and tensor."""
    places = [Place(layout, layout.coords(rank)) for rank in range(layout.row_shards)]
    return [slice_part(part, 0, place, Collectives(place)) for place in places]  # type: ignore[arg-type]


LAYOUTS = st.sampled_from(["1", "t2", "c2", "t2c2", "t3c2", "c4t2"])


@given(LAYOUTS, st.integers(1, 30), st.integers(1, 40), st.integers(0, 99))
def test_every_row_and_every_target_is_one_ranks(text: str, rows: int, targets: int, seed: int) -> None:
    layout, part = Layout.parse(text), part_of(rows, targets, seed)
    slices = all_ranks(layout, part)
    total = rows + count_padding(rows, layout)
    assert total % layout.row_shards == 0 and total - rows < layout.row_shards
    assert [row for one in slices for row in one.own] == list(range(total))
    assert sum(one.real for one in slices) == rows
    for one in slices:
        assert len(one.own) == total // layout.row_shards
        assert one.carried is not None and one.rows.routing is not None
        own = torch.tensor([row for row in one.own if row < rows], dtype=torch.long)
        assert part.carried is not None
        assert torch.equal(one.carried[: one.real], part.carried[own])
        assert (one.carried[one.real :] == NO_EXPERT).all()
    firsts = slices[:: layout.tensor]  # tensor ranks of a context slice share its targets
    for n, one in enumerate(firsts):
        start = n * total // layout.context
        assert torch.equal(part.rows[one.places], one.predictors + start)
        real = min(rows, start + len(one.rows.tokens)) - start
        assert torch.equal(one.rows.tokens[: max(0, real)], part.tokens[start : start + max(0, real)])
    assert sorted(int(place) for one in firsts for place in one.places) == list(range(targets))


@given(LAYOUTS)
def test_an_idle_pass_is_padding_alone(text: str) -> None:
    layout = Layout.parse(text)
    for rank in range(layout.row_shards):
        place = Place(layout, layout.coords(rank))
        one = make_idle_slice(place, Collectives(place))  # type: ignore[arg-type]
        assert one.source is None and one.real == 0 and not len(one.predictors) and not len(one.places)
        assert len(one.own) == 1 and len(one.rows.tokens) == layout.tensor


# ---- a training step repeats to the bit, with any number of threads and beside other load


TIMES = 3


class AtomicSums(TorchDispatchMode):
    """``seen``: operations that torch does on a CPU by atomic additions of all threads, fp32 sums whose order
    and last bits change from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if "index_put" in name and (args[3:4] == (True,) or kwargs.get("accumulate")):
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("case", CASES)
def test_no_step_sums_by_atomics(case: str) -> None:
    """The trainer took ``hidden[rows]`` of rows that come twice: the first tokens of all answers are
    predicted by the last row of their prompt. The backward of indexing sums such rows by atomics. This looks
    for the operation and needs no race: with ``hidden[rows]`` it fails every time, for every case."""
    trainer, batch = prepare(case, torch.float32, TORCH_OPS, siblings=200)
    with AtomicSums() as sums:
        trainer.step(batch)
    assert not sums.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "threads", [2, pytest.param(1, marks=pytest.mark.lab), pytest.param(4, marks=pytest.mark.lab)]
)
def test_steps_repeat_with_any_number_of_threads(threads: int) -> None:
    """From one state and with one batch, steps at 2 threads left different adapters (3:2 over five tries with
    native kernels, 4:2 with torch's), so a run that was resumed after kill -9 ended with other bytes than an
    undisturbed one. With ``hidden[rows]`` each of the fp32 cases at 2 and 4 threads gives several digests in
    four steps; those of bf16, which torch indexes in one thread, give one."""
    root = Path(repeated_steps.__file__).parent
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(root.parent), str(root))),
        "OMP_NUM_THREADS": str(threads),
    }
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        command = [sys.executable, repeated_steps.__file__, str(TIMES), str(threads)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
    finally:
        busy.kill()
        busy.wait()
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 2 * len(CASES) - 1
    assert {key: digests for key, digests in found.items() if len(digests) > 1} == {}
