"""What a trainer measures of sampler against trainer, and what it decides by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_replay import (
    FAST,
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

from ostinato.algo.mismatch import tail
from ostinato.model.decoder import Decoder
from ostinato.train.inputs import otherwise_packed
from ostinato.train.trainer import PolicyTrainer


@pytest.mark.parametrize("replay", [True, False])
def test_the_arm_in_use_is_what_the_step_says(replay: bool) -> None:
    """Same forward, same head, same temperature: the report is no second opinion."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    samples = samples_of(decoder, adapters)
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
    assert tail(arm, 1.5) == pytest.approx(report.metrics["sampling/tail_1.5"])
    assert row["arms"]["native"]["k3"] != row["arms"]["replay"]["k3"]
    assert row["replay"] is replay and row["decision"].startswith(f"replay is {'on' if replay else 'off'}")


def test_the_floor_is_of_the_same_sequences_packed_otherwise() -> None:
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    trainer, batch = trainer_of(decoder, adapters), batch_of(samples_of(decoder, adapters, siblings=4))
    for microbatch in batch.microbatches:
        part = trainer._guard.inputs(microbatch)
        passes = list(otherwise_packed(part))
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


def auto(decoder: Decoder, **options: Any) -> PolicyTrainer:
    return trainer_of(decoder, replay="auto", optimizer=FAST, **options)


def test_replay_is_decided_by_measurement_and_told() -> None:
    """Off while sampler and trainer agree, on from the batch that does not, told when it changes."""
    decoder = decoder_of()
    samples = samples_of(decoder, adapters_of(decoder))
    doubtful = [replace(one, logprobs=np.where(one.loss_mask, one.logprobs - 1, 0)) for one in samples]
    trainer = auto(decoder, measure_every=2, replay_threshold=0.0)
    first = trainer.step(batch_of(samples))
    assert first.metrics["routing/replay"] == 0 and first.note.startswith("replay is off")
    assert not trainer.step(batch_of(doubtful)).note, "not a step that measures"
    switched = trainer.step(batch_of(doubtful))
    assert switched.metrics["routing/replay"] == 1 and switched.note.startswith("replay is on: native F(2)")
    assert switched.mismatch is not None and switched.mismatch["decision"] == switched.note
    resumed = auto(decoder, measure_every=2, replay_threshold=0.0)
    resumed.restore({name: t.clone() for name, t in trainer.tensors().items()}, trainer.counters())
    ours, theirs = (one.step(batch_of(samples)) for one in (trainer, resumed))
    assert ours.metrics["routing/replay"] == theirs.metrics["routing/replay"] == 1
    assert not ours.note and bytes_of(resumed) == bytes_of(trainer)


def test_auto_looks_at_the_arm_with_replay() -> None:
    """Several optimizer steps called for replay, however much worse it made k3. Without a gate, auto stays
    off where the intervals say so."""
    decoder = decoder_of()
    adapters = adapters_of(decoder)
    samples = samples_of(decoder, adapters, groups=8, siblings=1)
    routed = with_experts(samples, [random_experts(sample) for sample in samples])
    wrong, right = (batch_of(one, minibatches=2) for one in (routed, samples))
    options = {"replay": "auto", "replay_threshold": 0.0}
    report = trainer_of(decoder, **options).step(wrong)
    assert report.metrics["routing/replay"] == 0 and "as with misaligned routes" in report.note
    assert trainer_of(decoder, **options).step(right).metrics["routing/replay"] == 1


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
