"""Sampler against trainer: its figures against twins."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import sample_of
from reference.plain_pack import pad

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import is_never_written, sequence_spans, sum_parts
from ostinato.observe.mismatch import TAUS, arm, pearson, routers
from ostinato.types import NO_EXPERT, Sample

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def ids_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.random((rows, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)


def naive_arm(log_ratio: np.ndarray, owner: np.ndarray) -> dict[str, float]:
    """One token and one sequence at a time."""
    tokens = [float(value) for value in log_ratio]
    sequences = [[value for value, i in zip(tokens, owner, strict=True) if i == own] for own in set(owner)]
    ratios = [math.exp(value) for value in tokens]
    count = len(tokens)
    return {
        "k3": sum(math.exp(value) - 1 - value for value in tokens) / count,
        "abs_mean": sum(map(abs, tokens)) / count,
        "abs_max": max(map(abs, tokens)),
        "ess": sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)),
        "F(1.5)": sum(max(ratio, 1 / ratio) > 1.5 for ratio in ratios) / count,
        "truncated": sum(ratio > 2 for ratio in ratios) / count,
        "masked": sum(not 0.5 <= ratio <= 5 for ratio in ratios) / count,
        "sequence": sum(len(one) for one in sequences if math.exp(sum(one)) > 3) / count,
    }


@given(tokens=st.integers(1, 60), sequences=st.integers(1, 8), scale=st.sampled_from([0.01, 0.5, 2.0]))
def test_an_arm_is_what_its_definitions_say(tokens: int, sequences: int, scale: float) -> None:
    rng = np.random.default_rng(tokens * 10 + sequences)
    log_ratio, owner = scale * rng.standard_normal(tokens), rng.integers(0, sequences, tokens) * 3
    found, twin = arm(log_ratio, owner, bootstrap=50), naive_arm(log_ratio, owner)
    flat = {
        **found,
        "F(1.5)": dict(found["tails"])[1.5],
        "truncated": found["masked"]["token_truncate"],
        "masked": found["masked"]["token_mask"],
        "sequence": found["masked"]["sequence_mask"],
    }
    for name, value in twin.items():
        assert flat[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert found["tokens"] == tokens and found["sequences"] == len(set(owner.tolist()))
    assert [tau for tau, _ in found["tails"]] == list(TAUS)
    for below in ([share for _, share in found["cdf"]], [-share for _, share in found["tails"]]):
        assert below == sorted(below)
    reported = {name: value for name, value in found.items() if name not in ("k3_low", "k3_high")}
    assert json.loads(json.dumps(reported)) == reported, "plain numbers"
    assert math.isnan(found["k3_low"]) == math.isnan(found["k3_high"]) == (found["sequences"] < 5)


def test_policies_that_agree_have_nothing_to_report() -> None:
    same = arm(np.zeros(50), np.arange(50) // 5)
    names = ("k3", "k3_low", "k3_high", "abs_mean", "abs_max")
    assert all(same[name] == 0 for name in names)
    assert same["ess"] == 1
    assert all(share == 0 for _, share in same["tails"]) and all(share == 1 for _, share in same["cdf"])
    with pytest.raises(ValueError, match="at least one token"):
        arm(np.zeros(0), np.zeros(0))


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    wild = arm(np.array([900.0, -900.0, 0.0]), np.array([0, 1, 2]))
    unknown = {"k3_low", "k3_high"}  # of three sequences
    assert all(math.isfinite(wild[name]) for name in wild.keys() - unknown if isinstance(wild[name], float))
    assert wild["ess"] <= 1


def test_the_interval_is_of_sequences_and_covers() -> None:
    """Tokens of a sequence deviate together: an interval over tokens would be far too narrow. Of 100 batches
    it misses the true mean in about 5, or somewhat more since it is made from a finite sample."""
    rng, missed = np.random.default_rng(0), 0
    common = 0.1 * rng.standard_normal(200_000)
    truth = float((np.expm1(common) - common).mean())
    owner = np.repeat(np.arange(100), 10)
    for batch in range(100):
        found = arm(np.repeat(0.1 * rng.standard_normal(100), 10), owner, bootstrap=300, seed=batch)
        missed += not found["k3_low"] <= truth <= found["k3_high"]
    assert 1 <= missed <= 15
    assert arm(common[:500], owner[:500]) == arm(common[:500], owner[:500]), "the seed decides"


def test_few_sequences_have_no_interval() -> None:
    """One sequence had an interval without width, low = k3 = high, and the report claimed of two such that
    their intervals do not overlap."""
    log_ratio = 0.1 * np.random.default_rng(0).standard_normal(40)
    for count, known in ((1, False), (4, False), (5, True)):
        found = arm(log_ratio, np.arange(40) % count, bootstrap=50)
        assert math.isfinite(found["k3_low"]) == math.isfinite(found["k3_high"]) == known


def test_siblings_are_drawn_together() -> None:
    """Answers to one prompt deviate together; taken as independent, 8 of each of 20 prompts gave an interval
    that looked as if there were 160."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(20), 80)
    log_ratio = np.repeat(0.3 * rng.standard_normal(20), 80) + 0.01 * rng.standard_normal(1600)
    sequences = np.repeat(np.arange(160), 10)
    alone, together = arm(log_ratio, sequences), arm(log_ratio, sequences, clusters=prompts)
    widths = [one["k3_high"] - one["k3_low"] for one in (alone, together)]
    assert widths[1] > 2 * widths[0]
    assert together == alone | {name: together[name] for name in ("k3_low", "k3_high")}
    assert arm(log_ratio, prompts)["k3_low"] == together["k3_low"]


@given(seed=st.integers(0, 999), tokens=st.integers(2, 50))
def test_pearson_is_numpys(seed: int, tokens: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, tokens))
    assert pearson(a, b) == pytest.approx(float(np.corrcoef(a, b)[0, 1]))
    assert pearson(a, 2 * a - 1) == pytest.approx(1)
    assert math.isnan(pearson(a, np.ones(tokens)))


@given(seed=st.integers(0, 999), rows=st.integers(1, 40))
def test_routers_are_compared_one_by_one(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    native, recorded = ids_of(rng, rows), ids_of(rng, rows)
    same = rng.random(rows) < 0.6
    recorded[same] = native[same][..., ::-1]  # the order of the K does not count
    recorded[rng.random(rows) < 0.2] = NO_EXPERT
    margins = rng.random((rows, LAYERS))
    found = routers(native, recorded, margins, layers=(1, 2, 5))
    known = [t for t in range(rows) if recorded[t, 0, 0] != NO_EXPERT]
    pairs = [(t, i, set(native[t, i]) & set(recorded[t, i])) for t in known for i in range(LAYERS)]
    flips = [(t, i) for t, i, common in pairs if len(common) < TOP_K]
    if not known:
        assert math.isnan(found["differ"])
        return
    assert found["differ"] == pytest.approx(len(flips) / len(pairs))
    assert found["tokens_differ"] == pytest.approx(len({t for t, _ in flips}) / len(known))
    assert found["overlap"] == pytest.approx(np.mean([len(common) / TOP_K for *_, common in pairs]))
    assert found["margin_median"] == pytest.approx(np.median([margins[t, i] for t, i, _ in pairs]))
    if flips:
        assert found["margin_flip_median"] == pytest.approx(np.median([margins[t, i] for t, i in flips]))
    assert [layer["layer"] for layer in found["layers"]] == [1, 2, 5]
    assert np.mean([layer["differ"] for layer in found["layers"]]) == pytest.approx(found["differ"])


def samples_of(rng: np.random.Generator, groups: int) -> list[Sample]:
    """Siblings of a common prompt; answers of one token, which have no row of their own, are among them."""
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, 50, size=rng.integers(1, 6))
        for sibling in range(rng.integers(1, 5)):
            answer = rng.integers(0, 50, size=rng.choice([1, 1, 2, 5, 9]))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            if len(answer) > 4:
                mask[len(prompt) + 1 : len(prompt) + 3] = False
            uid = f"{group}#{sibling}"
            samples.append(sample_of(tokens, len(prompt), loss_mask=mask, group=group, uid=uid))
    return samples


@given(seed=st.integers(0, 9999), budget=st.sampled_from([1, 12, 40, 500]), shared=st.booleans())
def test_the_rows_of_a_sequence_are_found_in_a_microbatch(seed: int, budget: int, shared: bool) -> None:
    """Its answer and its prompt, whatever else uses that: together the inputs of that sample. An answer
    begins behind the row that predicts its first token, also where the sequence has a segment for itself."""
    rng = np.random.default_rng(seed)
    samples = samples_of(rng, groups=4)
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    by_uid = {sample.uid: sample for sample in samples}
    packed = pack(samples, weights, tokens_per_microbatch=budget, share_prompts=shared)
    for microbatch in (*packed.microbatches, *pad(samples, weights).microbatches):
        spans = sequence_spans(microbatch)
        assert spans.shape == (len(microbatch.uids), 4)
        places = np.arange(len(microbatch.tokens))
        sums = sum_parts(np.stack([places, np.ones_like(places)]), spans)
        for i, (uid, (start, stop, first, last)) in enumerate(zip(microbatch.uids, spans, strict=True)):
            rows = np.r_[first:last, start:stop]
            inputs = by_uid[uid].tokens[: len(rows)]
            np.testing.assert_array_equal(microbatch.tokens[rows], inputs)
            np.testing.assert_array_equal(microbatch.positions[rows], np.arange(len(rows)))
            assert len(rows) >= np.flatnonzero(by_uid[uid].loss_mask)[-1]
            assert last - first == by_uid[uid].prompt_len
            assert sums[:, i].sum(axis=-1).tolist() == [rows.sum(), len(rows)]
            assert sums[1, i].tolist() == [stop - start, last - first]


def test_a_buffer_that_nobody_filled_is_seen() -> None:
    routes = ids_of(np.random.default_rng(0), 6)
    assert not is_never_written(routes)
    assert not is_never_written(np.full_like(routes, NO_EXPERT))
    routes[4, 1] = 0
    assert is_never_written(routes)
    assert not is_never_written(np.zeros((6, LAYERS, 1), np.int16)), "one expert of one is a choice"


def test_lowest_sequence_is_what_the_gate_judges() -> None:
    rng = np.random.default_rng(0)
    native = ids_of(rng, 200)
    recorded = native.copy()
    recorded[100:] = ids_of(rng, 100)
    spans = np.array([[0, 100, 0, 0], [100, 200, 0, 0]])
    found = routers(native, recorded, np.ones((200, LAYERS)), spans=spans)
    assert found["lowest_sequence"] == pytest.approx(2 * found["overlap"] - 1)
    found = routers(native, recorded, np.ones((200, LAYERS)), spans=np.array([[190, 200, 0, 100]]))
    assert found["lowest_sequence"] == 1, "30 routers are too few to say anything by themselves"
