"""Replay as the trainer does it: the gate, the laws of each pass, what is measured and decided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_replay import (
    BYPASS,
    DENSE,
    GRPO,
    RAW,
    adapters_of,
    batch_of,
    bytes_of,
    decoder_of,
    local_passes,
    random_experts,
    samples_of,
    trainer_of,
    with_experts,
)

from ostinato.algo.algorithms import algorithm
from ostinato.algo.routing import Cause, Misaligned, shared_ids
from ostinato.config import TrainerSection
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.train.gate import count_rows, measure_agreement
from ostinato.train.inputs import repack
from ostinato.types import NO_EXPERT, Batch, Sample


def drawn(**sizes: int) -> tuple[Decoder, Adapters, list[Sample]]:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    return decoder, adapters, samples_of(decoder, adapters, **sizes)


# The gate


@given(seed=st.integers(0, 999), rows=st.integers(1, 30))
def test_counting_on_the_device_is_the_overlap_of_its_twin(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    native, carried = (rng.random((rows, 3, 6)).argsort(-1)[..., :2] for _ in range(2))
    carried[rng.random(rows) < 0.3] = NO_EXPERT
    common, known, differ = count_rows(torch.from_numpy(native), torch.from_numpy(carried)).numpy()
    share = shared_ids(native, carried)
    np.testing.assert_allclose(common, np.nansum(share, axis=1) * 2)
    np.testing.assert_array_equal(known, (~np.isnan(share)).sum(1) * 2)
    np.testing.assert_array_equal(differ, (share < 1).sum(1) * 2)


@pytest.mark.parametrize("replay", [True, False])
def test_the_routes_of_these_tokens_pass(replay: bool) -> None:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    trainer = trainer_of(decoder, adapters, replay=replay)
    metrics = trainer.step(batch_of(samples_of(decoder, adapters))).metrics
    assert metrics["routing/overlap"] == metrics["routing/lowest_sequence"] == 1
    assert metrics["routing/differ"] == 0
    assert metrics["routing/replay"] == float(replay)


def test_shuffled_routes_are_those_of_other_rows_whatever_the_gate_says_of_them() -> None:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    batch = batch_of(samples_of(decoder, adapters))
    rolled = [
        replace(one, experts=np.roll(one.experts, len(one.tokens) // 2, axis=0))
        for one in batch.microbatches
        if one.experts is not None
    ]
    control = trainer_of(decoder, adapters.detach_copy(), replay="shuffled")
    twin = trainer_of(decoder, adapters.detach_copy(), replay_threshold=0.0)
    metrics = control.step(batch).metrics
    twin.step(replace(batch, microbatches=tuple(rolled)))
    assert metrics["routing/replay"] == 1 and metrics["routing/overlap"] < 0.9
    assert bytes_of(control) == bytes_of(twin)


def planted(bug: str, samples: list[Sample]) -> list[Sample]:
    ids = [sample.experts for sample in samples if sample.experts is not None]
    match bug:
        case "late":
            ids = [np.concatenate([one[:1], one[:-1]]) for one in ids]
        case "rolled":
            ids = [np.roll(one, 1, axis=1) for one in ids]
        case "reversed":
            ids = [one[:, ::-1] for one in ids]
        case "shuffled":
            ids = [np.resize(ids[i - 1], one.shape) for i, one in enumerate(ids)]
        case "other ids":
            renamed = np.append(np.random.default_rng(0).permutation(RAW["num_experts"]), NO_EXPERT)
            ids = [renamed[one].astype(np.int16) for one in ids]
        case "zeros":
            ids = [np.zeros_like(one) for one in ids]
    return with_experts(samples, ids)


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("late", Cause.SHIFTED),
        ("rolled", Cause.LAYERS),
        ("reversed", Cause.LAYERS),
        ("shuffled", Cause.SHUFFLED),
        ("other ids", Cause.UNRELATED),
        ("zeros", Cause.ZERO),
    ],
)
def test_misaligned_routes_are_refused_before_anything_is_learned(bug: str, cause: Cause) -> None:
    """Each was shipped silently by somebody: the loss is finite, and the run learns from noise."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    batch = batch_of(planted(bug, samples_of(decoder, adapters, groups=5, siblings=1)))
    trainer = trainer_of(decoder, adapters)
    before, counters = bytes_of(trainer), trainer.counters()
    with pytest.raises(Misaligned, match=f"probable cause: {cause}.*nothing was learned") as caught:
        trainer.step(batch)
    assert caught.value.diagnosis.cause is cause
    assert caught.value.uids and set(caught.value.uids) <= {f"{group}#0" for group in range(5)}
    assert bytes_of(trainer) == before and trainer.counters() == counters
    assert all(leaf.grad is None for leaf in trainer._named.values())


def test_one_sequence_of_many_is_found_and_named() -> None:
    decoder, adapters, samples = drawn(groups=8, siblings=4)
    ids = [sample.experts for sample in samples if sample.experts is not None]
    ids[13] = np.concatenate([ids[13][:1], ids[13][:-1]])
    with pytest.raises(Misaligned, match="1 of 32 sequences") as caught:
        trainer_of(decoder, adapters).step(batch_of(with_experts(samples, ids), budget=400))
    assert caught.value.uids == (samples[13].uid,)
    assert caught.value.diagnosis.cause is Cause.SHIFTED


def test_routes_of_another_policy_are_seen() -> None:
    """A cache that outlived an update: right tokens, wrong weights. Nothing explains it away."""
    decoder = decoder_of()
    adapters, other = adapters_of(decoder, "attn", "router"), adapters_of(decoder, "attn", "router")
    for _, b in other.tensors.values():
        b.data = b.data * -0.5
    batch = batch_of(samples_of(decoder, other))
    with pytest.raises(Misaligned) as caught:
        trainer_of(decoder, adapters).step(batch)
    assert caught.value.diagnosis.cause in (Cause.STALE, Cause.UNRELATED)


def test_the_routes_of_an_older_policy_are_its_own() -> None:
    """pipeline.staleness = 16 with a large learning rate ended after step 28 as "routes of 32 of 32 sequences
    ..., probable cause: stale": what the recipe had set. A batch with one fresh sequence among the old is
    still refused for that one, and so is an old batch whose routes are a row late."""
    decoder = decoder_of()
    adapters, other = adapters_of(decoder, "attn", "router"), adapters_of(decoder, "attn", "router")
    for _, b in other.tensors.values():
        b.data = b.data * -0.5
    samples = samples_of(decoder, other, groups=5, siblings=2)
    metrics = trainer_of(decoder, adapters).step(batch_of(samples, version=3)).metrics
    assert metrics["staleness/mean"] == 3 and metrics["routing/overlap"] < 0.9
    last = replace(samples[-1], versions=np.where(samples[-1].loss_mask, 3, -1).astype(np.int32))
    with pytest.raises(Misaligned, match="nothing was learned"):
        trainer_of(decoder, adapters).step(batch_of([*samples[:-1], last], version=3))
    aligned = samples_of(decoder, adapters, groups=5, siblings=1)
    with pytest.raises(Misaligned, match="probable cause: shifted"):
        trainer_of(decoder, adapters).step(batch_of(planted("late", aligned), version=3))


def test_without_replay_or_gate_disagreement_is_a_metric() -> None:
    decoder, adapters, samples = drawn()
    batch = batch_of(with_experts(samples, [random_experts(sample) for sample in samples]))
    for options in ({"replay": False}, {"replay_threshold": 0.0}):
        metrics = trainer_of(decoder, adapters, **options).step(batch).metrics
        assert metrics["routing/overlap"] < 0.5 and metrics["routing/lowest_sequence"] < 0.5
        assert metrics["routing/differ"] > 0.9


def test_the_gate_looks_before_weights_move() -> None:
    """With large steps the later minibatches of an aligned batch disagree with their own routes: that is what
    replay is for, and no sign of misalignment."""
    decoder = decoder_of()
    adapters = adapters_of(decoder, "attn", "router")
    batch = batch_of(samples_of(decoder, adapters, groups=3), budget=40, minibatches=3)
    trainer = trainer_of(decoder, adapters, settings=TrainerSection(lr=0.5))
    assert trainer.step(batch).metrics["routing/overlap"] == 1
    parts = [trainer._guard.inputs(microbatch) for microbatch in batch.microbatches]
    natives = [local_passes(trainer).forward(part, adapters)[1] for part in parts]
    now = measure_agreement(
        [
            (part.source, count_rows(native, part.carried))
            for part, native in zip(parts, natives, strict=True)
            if native is not None and part.carried is not None
        ],
        top_k=4,
    )
    assert now.metrics["routing/overlap"] < 0.9


def test_a_refused_minibatch_leaves_the_gate_to_the_next() -> None:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    batch = batch_of(planted("late", samples_of(decoder, adapters)), budget=60, minibatches=3)
    first = batch.microbatches[0]
    poisoned = replace(first, advantages=np.full_like(first.advantages, math.nan))
    batch = replace(batch, microbatches=(poisoned, *batch.microbatches[1:]))
    trainer = trainer_of(decoder, adapters)
    before = bytes_of(trainer)
    with pytest.raises(Misaligned):
        trainer.step(batch)
    assert bytes_of(trainer) == before


def test_a_dense_model_and_routes_not_recorded_have_no_gate() -> None:
    dense, decoder = decoder_of(DENSE), decoder_of()
    metrics = trainer_of(dense).step(batch_of(samples_of(dense, None))).metrics
    assert not any(name.startswith("routing/") for name in metrics)
    samples = samples_of(decoder, None)
    unknown = [np.full_like(sample.experts, NO_EXPERT) for sample in samples]
    metrics = trainer_of(decoder).step(batch_of(with_experts(samples, unknown))).metrics
    assert {name: value for name, value in metrics.items() if name.startswith("routing/")} == {
        "routing/replay": 0,
        "routing/coverage": 0,
    }


def spoilt_but_the_first(samples: list[Sample], minibatches: int) -> Batch:
    """The samples that are not in the first of the minibatches have their routes a row late."""
    right, late = batch_of(samples, minibatches=minibatches), planted("late", samples)
    first = {uid for microbatch in right.minibatches[0] for uid in microbatch.uids}
    mixed = [good if good.uid in first else bad for good, bad in zip(samples, late, strict=True)]
    return batch_of(mixed, minibatches=minibatches)


@pytest.mark.parametrize("rule", [GRPO, BYPASS])
def test_every_minibatch_is_judged(rule: Any) -> None:
    """The gate looked at the first minibatch alone: 6 of 8 sequences were shifted by a row, and the step
    reported routing/overlap = 1. Old log-probabilities are of all minibatches before any weight moves;
    without them, a minibatch is refused before its own optimizer step, and the sentence says what was
    learned before."""
    decoder, adapters, samples = drawn(groups=8, siblings=1, answer=30)
    batch = spoilt_but_the_first(samples, minibatches=4)
    trainer = trainer_of(decoder, adapters, algorithm=rule)
    before = bytes_of(trainer)
    reported = (
        "nothing was learned" if rule.is_decoupled else "1 of 4 optimizer steps of this batch had been taken"
    )
    with pytest.raises(Misaligned, match=reported) as caught:
        trainer.step(batch)
    assert caught.value.diagnosis.cause is Cause.SHIFTED
    assert caught.value.steps_taken == (0 if rule.is_decoupled else 1)
    assert (bytes_of(trainer) == before) == rule.is_decoupled
    assert all(leaf.grad is None for leaf in trainer._named.values())


@pytest.mark.parametrize("lr", [2e-3, 0.02, 0.5])
def test_what_a_batch_itself_moved_is_no_misalignment(lr: float) -> None:
    """Without old log-probabilities the later minibatches are compared with a policy that has moved, whose
    choices are others after steps as large as these; nothing would put their routes right."""
    decoder = decoder_of()
    adapters = adapters_of(decoder, "attn", "router")
    samples = samples_of(decoder, adapters, groups=6, siblings=1)
    trainer = trainer_of(decoder, adapters, algorithm=BYPASS, settings=TrainerSection(lr=lr))
    metrics = trainer.step(batch_of(samples, minibatches=3)).metrics
    assert metrics["optimizer_steps"] == 3 and metrics["routing/overlap"] < 0.9


@pytest.mark.parametrize(("prompt", "answer"), [(60, 14), (100, 20)])
@pytest.mark.parametrize("bug", ["late", "rolled", "random"])
@pytest.mark.parametrize("siblings", [1, 4])
def test_a_long_prompt_vouches_for_no_wrong_answer(prompt: int, answer: int, bug: str, siblings: int) -> None:
    """A prompt of 60 rows that was right, counted once more for each sibling, made 0.9 of answers of 10 rows
    that were drawn by chance, and the lowest sequence was reported to be above the mean."""
    decoder = decoder_of({**RAW, "max_position_embeddings": 256})
    adapters = adapters_of(decoder)
    right = samples_of(
        decoder, adapters, groups=4 // siblings, siblings=siblings, prompt=prompt, answer=answer
    )
    if bug == "random":
        wrong = with_experts(right, [random_experts(sample, seed) for seed, sample in enumerate(right)])
    else:
        wrong = planted(bug, right)
    mixed = [
        replace(a, experts=np.concatenate([a.experts[:prompt], b.experts[prompt:]]))
        for a, b in zip(right, wrong, strict=True)
        if a.experts is not None and b.experts is not None
    ]
    trainer_of(decoder).step(batch_of(right, budget=2000))
    with pytest.raises(Misaligned) as caught:
        trainer_of(decoder, adapters).step(batch_of([*mixed[:1], *right[1:]], budget=2000))
    assert caught.value.uids == (mixed[0].uid,), "one of four"
    with pytest.raises(Misaligned) as caught:
        trainer_of(decoder, adapters).step(batch_of(mixed, budget=2000))
    assert len(caught.value.uids) == 4


def broken(kind: str, ids: np.ndarray) -> np.ndarray:
    """Routes that no model can replay, in one row."""
    ids = ids.copy()
    match kind:
        case "physical ids":
            ids[3, 0, 0] = 99
        case "repeated":
            ids[3, 0] = [3, 3, 1, 2]
        case "partly unknown":
            ids[3, 0, 1] = NO_EXPERT
        case "zeros":
            ids = np.zeros_like(ids)
    return ids


@pytest.mark.parametrize("kind", ["physical ids", "repeated", "partly unknown", "zeros"])
@pytest.mark.parametrize("measure_every", [0, 1])
def test_routes_that_cannot_be_replayed_name_their_samples(kind: str, measure_every: int) -> None:
    """They ended the run as a ValueError from inside a pass, without a name and without a checkpoint; or in a
    step that measured, as shapes (149,) and (189,) that could not be broadcast. Without replay they end
    nothing: no caller needs them."""
    decoder, adapters, samples = drawn()
    samples[4] = replace(samples[4], experts=broken(kind, samples[4].experts))  # type: ignore[arg-type]
    batch = batch_of(samples, budget=40)
    trainer = trainer_of(decoder, adapters, measure_every=measure_every)
    before, counters = bytes_of(trainer), trainer.counters()
    with pytest.raises(Misaligned, match="cannot be replayed") as caught:
        trainer.step(batch)
    assert samples[4].uid in caught.value.uids and len(caught.value.uids) <= 3, "its siblings share rows"
    assert (caught.value.diagnosis.cause is Cause.ZERO) == (kind == "zeros")
    assert bytes_of(trainer) == before and trainer.counters() == counters
    trainer = trainer_of(decoder, adapters, replay=False, measure_every=measure_every)
    report = trainer.step(batch)
    assert report.note.startswith("the batch carries routes that cannot be replayed")
    assert report.metrics["routing/coverage"] == 0 and "routing/overlap" not in report.metrics
    assert report.mismatch is None or "replay" not in report.mismatch["arms"]
    assert not trainer.step(batch).note, "reported once"


def test_routes_that_are_missing_are_told() -> None:
    """With replay=true and an engine that records nothing, training went on natively without a word; with
    nine rows in ten unknown, every metric was 1."""
    decoder, adapters, samples = drawn()
    trainer = trainer_of(decoder)
    bare = batch_of([replace(sample, experts=None) for sample in samples])
    first, second = trainer.step(bare), trainer.step(bare)
    assert first.note.startswith("replay is on, but the batch carries no experts") and not second.note
    assert first.metrics["routing/coverage"] == first.metrics["routing/replay"] == 0
    trainer = trainer_of(decoder, adapters)
    assert trainer.step(batch_of(samples)).metrics["routing/coverage"] == 1
    assert trainer.step(bare).note, "news again"
    partly = []
    for sample in samples:
        assert sample.experts is not None
        late = np.arange(len(sample.tokens))[:, None, None] >= len(sample.tokens) - 6
        partly.append(np.where(late, sample.experts, NO_EXPERT).astype(np.int16))
    metrics = trainer_of(decoder).step(batch_of(with_experts(samples, partly))).metrics
    assert 0 < metrics["routing/coverage"] < 0.3 and metrics["routing/overlap"] == 1


def test_an_ids_check_is_made_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward sorted a copy of all ids and waited for the device several times."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    looked: list[int] = []
    monkeypatch.setattr("ostinato.model.decoder.check_routing", lambda *_: looked.append(1))
    trainer_of(decoder, adapters).step(batch_of(samples_of(decoder, adapters), minibatches=2))
    assert not looked


# The passes


def test_every_pass_but_the_reference_takes_the_carried_experts() -> None:
    """Old log-probabilities and each minibatch; the reference policy, and whatever carries no routes, choose
    for themselves."""
    decoder, adapters, samples = drawn()
    forced = batch_of(with_experts(samples, [random_experts(sample) for sample in samples]))
    plain = batch_of([replace(sample, experts=None) for sample in samples])
    trainer = trainer_of(decoder, adapters)
    for microbatch, native in zip(forced.microbatches, plain.microbatches, strict=True):
        part, free = trainer._guard.inputs(microbatch), trainer._guard.inputs(native)
        one, other = (made.reference for made in trainer._add_reference([part, free]))
        assert one is not None and other is not None and torch.equal(one, other)
        old, natively = (made.old for made in trainer._add_old([part, free]))
        assert old is not None and natively is not None and not torch.equal(old, natively)
        hidden, _ = local_passes(trainer).forward(replace(part, routing=part.carried), adapters)
        assert torch.equal(old, local_passes(trainer).logprobs(hidden, part, want_entropy=False)[0])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_equal_weights_have_a_ratio_of_exactly_one(minibatches: int) -> None:
    """Whatever is replayed: with nothing learned, new / old is 1 bit for bit, so nothing is clipped."""
    decoder, adapters, samples = drawn()
    routed = with_experts(samples, [random_experts(sample) for sample in samples])
    batch = batch_of(routed, minibatches=minibatches)
    tight = algorithm("grpo", correction="token_truncate", clip_low=0.0, clip_high=0.0)
    still = TrainerSection(lr=1e-30)
    options = {"settings": still, "replay_threshold": 0.0}
    metrics = trainer_of(decoder, adapters, algorithm=tight, **options).step(batch).metrics
    assert metrics["optimizer_steps"] == minibatches
    assert metrics["clip_ratio/region_mean"] == 0


# ---- what a trainer measures of sampler against trainer, and what it decides by it


@pytest.mark.parametrize("replay", [True, False])
def test_the_arm_in_use_is_what_the_step_says(replay: bool) -> None:
    """Same forward, same head, same temperature: the report is no second opinion."""
    decoder, adapters, samples = drawn()
    batch = batch_of(with_experts(samples, [random_experts(sample) for sample in samples]), budget=60)
    trainer = trainer_of(
        decoder, adapters, replay=replay, temperature=0.7, replay_threshold=0.0, measure_every=5
    )
    before = bytes_of(trainer)
    row = trainer.measure(batch)
    assert bytes_of(trainer) == before
    report = trainer.step(batch)
    assert report.mismatch is not None and report.mismatch["arms"] == row["arms"], "before the first step"
    arm = row["arms"]["replay" if replay else "native"]
    assert arm["k3"] == pytest.approx(report.metrics["sampling/kl_k3"], rel=1e-5)
    assert arm["ess"] == pytest.approx(report.metrics["sampling/ess"], rel=1e-5)
    assert dict(arm["tails"])[1.5] == pytest.approx(report.metrics["sampling/tail_1.5"])
    assert row["arms"]["native"]["k3"] != row["arms"]["replay"]["k3"]
    assert row["replay"] is replay


def test_the_floor_is_of_the_same_sequences_packed_otherwise() -> None:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    trainer, batch = trainer_of(decoder, adapters), batch_of(samples_of(decoder, adapters, siblings=4))
    for microbatch in batch.microbatches:
        part = trainer._guard.inputs(microbatch)
        passes = list(repack(part))
        assert len(passes) > 1
        assert all(segment.prefix_start == segment.prefix_stop for one in passes for segment in one.segments)
        again = torch.cat(
            [local_passes(trainer).forward(replace(one, routing=None), adapters)[0] for one in passes]
        )
        torch.testing.assert_close(
            again, local_passes(trainer).forward(replace(part, routing=None), adapters)[0], rtol=0, atol=1e-4
        )


@pytest.mark.slow
def test_measured_at_the_first_step_and_every_few() -> None:
    decoder = decoder_of()
    batch = batch_of(samples_of(decoder, adapters_of(decoder)))
    options = {"measure_every": 3, "replay_threshold": 0.0}  # the routes of the batch get old
    straight, broken, resumed = (trainer_of(decoder, **options) for _ in range(3))
    rows = [straight.step(batch).mismatch for _ in range(7)]
    assert [row is not None for row in rows] == [True, False, False, True, False, False, True]
    assert ["floor" in row["arms"] for row in rows if row] == [True, False, False], "once is enough"
    for _ in range(2):
        broken.step(batch)
    resumed.restore({name: t.clone() for name, t in broken.tensors().items()}, broken.counters())
    again = [resumed.step(batch).mismatch for _ in range(5)]
    for ours, theirs in zip(again, rows[2:], strict=True):
        assert (ours and ours["arms"]) == (theirs and theirs["arms"])
    assert trainer_of(decoder).step(batch).mismatch is None, "0 is never"


def test_an_arm_is_of_the_whole_batch_or_not_there() -> None:
    """Where some microbatches have no routes, those of the others were compared with all tokens."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    batch = batch_of(samples_of(decoder, adapters), budget=60)
    partly = replace(
        batch, microbatches=(replace(batch.microbatches[0], experts=None), *batch.microbatches[1:])
    )
    row = trainer_of(decoder, adapters).measure(partly)
    assert row["arms"].keys() == {"native", "floor"} and 0 < row["coverage"] < 1
    assert row["routers"]["overlap"] == 1


def test_the_interval_is_over_prompts() -> None:
    """Uids are "prompt#sample": siblings share a prompt and are drawn together. Three prompts are too few."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    trainer = trainer_of(decoder, adapters)
    few, many = (batch_of(samples_of(decoder, adapters, groups=n, siblings=2), budget=80) for n in (3, 6))
    assert math.isnan(trainer.measure(few, floor=False)["arms"]["native"]["k3_low"])
    assert math.isfinite(trainer.measure(many, floor=False)["arms"]["native"]["k3_low"])
