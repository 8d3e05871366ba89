from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.plain_pack import pad

from ostinato.algo.pack import Aggregation, aggregation_weights, count_split_prompts, pack
from ostinato.types import Batch, Microbatch, Sample, Segment, Support

LAYERS, TOP_K = 2, 3


def make_sample(
    prompt: list[int], rest: list[int], mask: list[int], *, group: int = 0, uid: str = "s", seed: int = 0
) -> Sample:
    """A sample whose routing is a function of the prefix, as a real one is."""
    tokens = np.array(prompt + rest, dtype=np.int32)
    loss_mask = np.array([0] * len(prompt) + mask, dtype=bool)
    rng = np.random.default_rng(seed)
    routing = (np.cumsum(tokens)[:, None, None] + np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K)) % 64
    return Sample(
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -rng.random(len(tokens)), 0).astype(np.float32),
        advantages=np.where(loss_mask, rng.normal(size=len(tokens)), 0).astype(np.float32),
        versions=np.where(loss_mask, rng.integers(0, 5, len(tokens)), -1).astype(np.int32),
        group=group,
        prompt_len=len(prompt),
        uid=uid,
        experts=routing.astype(np.int16),
        support=make_support(tokens, loss_mask, rng) if seed % 3 else None,
    )


def make_support(tokens: np.ndarray, loss_mask: np.ndarray, rng: np.random.Generator) -> Support:
    """Some trained tokens with the ids that they might have been drawn from, themselves among them."""
    kept = [
        np.unique(np.append(rng.integers(0, 10, rng.integers(0, 5)), token)) if restricted else tokens[:0]
        for token, restricted in zip(tokens, loss_mask & (rng.random(len(tokens)) < 0.7), strict=True)
    ]
    return Support.of([ids.astype(np.int32) for ids in kept])


@st.composite
def steps(draw: st.DrawFn) -> list[Sample]:
    """Groups of siblings with gaps in their masks, in any order, some without a trained token."""
    samples = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 5))):
            mask = draw(st.lists(st.integers(0, 1), min_size=0, max_size=7))
            rest = draw(st.lists(st.integers(0, 9), min_size=len(mask), max_size=len(mask)))
            uid = f"{group}#{len(samples)}"
            samples.append(make_sample(prompt, rest, mask, group=group, uid=uid, seed=len(samples)))
    return draw(st.permutations(samples))


def visible_rows(microbatch: Microbatch, row: int) -> list[int]:
    """The rows that ``row`` attends to, itself included, in the order of the sequence."""
    segment = next(s for s in microbatch.segments if s.start <= row < s.stop)
    return [*range(segment.prefix_start, segment.prefix_stop), *range(segment.start, row + 1)]


def loss_entries(batch: Batch) -> list[tuple[object, ...]]:
    """Everything that a trained token's loss can depend on, sorted by sample and position."""
    entries = []
    for mb in batch.microbatches:
        assert mb.experts is not None
        for i, row in enumerate(mb.rows):
            seen = visible_rows(mb, int(row))
            assert mb.positions[seen].tolist() == list(range(len(seen)))
            context = (tuple(mb.tokens[seen].tolist()), mb.experts[seen].tobytes())
            values = (mb.logprobs[i], mb.advantages[i], mb.weights[i], mb.staleness[i])
            kept = () if mb.support is None else tuple(mb.support.take(np.array([i])).ids.tolist())
            entries.append(
                (int(mb.sample_idx[i]), len(seen), context, int(mb.targets[i]), *map(float, values), kept)
            )
    return sorted(entries)  # type: ignore[type-var]


def token_weights(samples: list[Sample]) -> list[np.ndarray]:
    return aggregation_weights(samples, Aggregation.SAMPLE)


def test_worked_example() -> None:
    """Two siblings of P P P. The last token of each is a target and never an input: it has no row."""
    samples = [
        make_sample([5, 6, 7], [1, 2], [1, 1], uid="p#0"),
        make_sample([5, 6, 7], [3, 4], [1, 1], uid="p#1"),
    ]
    batch = pack(samples, token_weights(samples), tokens_per_microbatch=10, version=5)
    (mb,) = batch.microbatches
    assert mb.tokens.tolist() == [5, 6, 7, 1, 3]
    assert mb.positions.tolist() == [0, 1, 2, 3, 3]
    prompt = Segment(start=0, stop=3)
    assert mb.segments == (
        prompt,
        Segment(start=3, stop=4, prefix_start=0, prefix_stop=3),
        Segment(start=4, stop=5, prefix_start=0, prefix_stop=3),
    )
    assert mb.rows.tolist() == [2, 3, 2, 4]
    assert mb.targets.tolist() == [1, 2, 3, 4]
    assert mb.sample_idx.tolist() == [0, 0, 1, 1]
    assert mb.weights.tolist() == [0.25] * 4
    assert mb.staleness.tolist() == [5 - v for s in samples for v in s.versions[3:].tolist()]
    assert mb.uids == ("p#0", "p#1")
    assert (batch.num_samples, batch.num_tokens, batch.num_context_tokens) == (2, 4, 2)
    assert {a.dtype.name for a in (mb.tokens, mb.positions, mb.rows, mb.targets, mb.sample_idx)} == {"int32"}
    assert {a.dtype.name for a in (mb.logprobs, mb.advantages, mb.weights)} == {"float32"}


def test_group_beyond_the_budget_repeats_its_prompt() -> None:
    samples = [make_sample([7] * 4, [i, i, i], [1, 1, 1], uid=str(i)) for i in range(5)]
    batch = pack(samples, token_weights(samples), tokens_per_microbatch=8)  # room for 2 of 2 rows beside 4
    assert [len(mb.tokens) for mb in batch.microbatches] == [8, 8, 6]
    assert [mb.uids for mb in batch.microbatches] == [("0", "1"), ("2", "3"), ("4",)]
    assert batch.num_context_tokens == 3 * 3
    assert loss_entries(batch) == loss_entries(pad(samples, token_weights(samples)))


def test_microbatches_are_filled_across_groups() -> None:
    """First-fit-decreasing of parts of 6, 5, 4, 3 and 2 rows into 10: [6, 4], [5, 3, 2]."""
    lengths = (2, 3, 4, 5, 6)
    samples = [make_sample([1], list(range(n)), [1] * n, group=n) for n in lengths]
    batch = pack(samples, token_weights(samples), tokens_per_microbatch=10)
    assert [len(mb.tokens) for mb in batch.microbatches] == [10, 10]
    assert [len(mb.segments) for mb in batch.microbatches] == [2, 3]


@given(steps(), st.integers(1, 30), st.booleans())
def test_packing_changes_nothing_that_losses_need(samples: list[Sample], budget: int, share: bool) -> None:
    """Each trained token exactly once, predicted by the row that sees exactly the tokens before it."""
    weights = token_weights(samples)
    batch = pack(samples, weights, tokens_per_microbatch=budget, share_prompts=share, version=4)
    twin = pad(samples, weights, version=4)
    assert loss_entries(batch) == loss_entries(twin)
    assert (batch.num_samples, batch.num_tokens) == (twin.num_samples, twin.num_tokens)
    assert batch.num_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    if batch.num_tokens:
        assert sum(mb.weights.sum() for mb in batch.microbatches) == pytest.approx(1, abs=1e-6)


@given(steps(), st.integers(1, 30), st.booleans(), st.integers(1, 6))
def test_every_optimizer_step_has_its_share_of_the_groups(
    samples: list[Sample], budget: int, share: bool, wanted: int
) -> None:
    """Whole groups, numbers that differ by at most one, in their order; as many steps as groups where more
    are requested, however few microbatches they would fit into."""
    weights, options = token_weights(samples), {"tokens_per_microbatch": budget, "share_prompts": share}
    batch = pack(samples, weights, minibatches=wanted, **options)
    assert loss_entries(batch) == loss_entries(pad(samples, weights))
    groups = [*dict.fromkeys(sample.group for sample in samples if sample.loss_mask.any())]
    dealt = [
        {samples[i].group for part in parts for i in part.sample_idx.tolist()} for parts in batch.minibatches
    ]
    assert len(dealt) == min(wanted, len(groups))
    edges = np.cumsum([0, *map(len, dealt)]).tolist()
    assert dealt == [set(groups[first:end]) for first, end in pairwise(edges)]
    assert not dealt or max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for number, parts in enumerate(batch.minibatches):
        mine = [sample for sample in samples if sample.group in dealt[number]]
        alone = pack(mine, token_weights(mine), **options)
        assert [part.uids for part in parts] == [part.uids for part in alone.microbatches]


def test_no_optimizer_step_has_all_the_long_groups() -> None:
    """Microbatches, which are filled longest first, were dealt like cards: of 128 prompts the eight steps of
    PPO-off-policy-8 had 11 to 29 with mean answers of 36 falling to 12 tokens, and the last of them 2.6 times
    the gradient of the second, so every phase learned its longest groups first."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, 128)
    samples = [
        make_sample([1, 2, 3], [4] * int(length), [1] * int(length), group=group, uid=f"{group}#{i}")
        for group, length in enumerate(lengths)
        for i in range(2)
    ]
    weights = aggregation_weights(samples, Aggregation.PROMPT)
    batch = pack(samples, weights, tokens_per_microbatch=512, minibatches=8)
    for first, parts in zip(range(0, 128, 16), batch.minibatches, strict=True):
        seen = {samples[i].group for part in parts for i in part.sample_idx.tolist()}
        assert seen == set(range(first, first + 16))
        assert sum(float(part.weights.sum()) for part in parts) == pytest.approx(1 / 8)


@given(steps(), st.integers(1, 30), st.booleans())
def test_budget_economy_and_contiguity(samples: list[Sample], budget: int, share: bool) -> None:
    weights = token_weights(samples)
    batch = pack(samples, weights, tokens_per_microbatch=budget, share_prompts=share)
    apart = pack(samples, weights, tokens_per_microbatch=budget, share_prompts=False)
    rows = sum(len(mb.tokens) for mb in batch.microbatches)
    assert rows <= sum(len(mb.tokens) for mb in apart.microbatches)
    assert batch.num_context_tokens == rows - sum(len(set(mb.rows.tolist())) for mb in batch.microbatches)
    for mb in batch.microbatches:
        fits = len(mb.tokens) <= budget
        # Siblings of one token add no row to a prompt that alone is over the budget.
        assert fits or len(mb.uids) == 1 or len(mb.segments) == 1
        starts = [segment.start for segment in mb.segments]
        assert starts == [0, *(segment.stop for segment in mb.segments[:-1])]
        assert mb.segments[-1].stop == len(mb.tokens)
        used = {row for loss_row in mb.rows for row in visible_rows(mb, int(loss_row))}
        assert used == set(range(len(mb.tokens)))  # no row is computed for nothing
        changes = np.flatnonzero(np.diff(mb.sample_idx))
        assert len(changes) + 1 == len(set(mb.sample_idx.tolist()))  # the rows of a sample are contiguous
    seen = [int(i) for mb in batch.microbatches for i in set(mb.sample_idx.tolist())]
    assert sorted(seen) == [i for i, s in enumerate(samples) if s.loss_mask.any()]


def test_siblings_with_other_prompts_do_not_share() -> None:
    """Same group, but the contexts differ (an environment may draw them): sharing would train on a lie."""
    samples = [make_sample([p, 2], [3, 4], [1, 1], uid=str(p)) for p in (1, 9)]
    (mb,) = pack(samples, token_weights(samples), tokens_per_microbatch=99).microbatches
    assert mb.segments == (Segment(start=0, stop=3), Segment(start=3, stop=6))


def test_siblings_whose_prompt_met_other_experts_do_not_share() -> None:
    """Between two siblings a policy was published, or the prompt evicted and run again: the second answer was
    trained behind the routes of the first one's prompt, without a message."""
    first, second, third = (make_sample([1, 2], [3, n], [1, 1], uid=f"p#{n}") for n in range(3))
    assert first.experts is not None
    changed = first.experts.copy()
    changed[1, 0, 0] += 1
    samples = [first, replace(second, experts=changed), third]
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    (microbatch,) = pack(samples, weights, tokens_per_microbatch=100).microbatches
    assert microbatch.experts is not None
    assert loss_entries(pack(samples, weights, tokens_per_microbatch=100)) == loss_entries(
        pack(samples, weights, tokens_per_microbatch=100, share_prompts=False)
    )
    assert len(microbatch.tokens) == 2 + 1 + 1 + 2 + 1  # one shared prompt, one by itself
    assert count_split_prompts(samples) == 1 and count_split_prompts([first, third]) == 0


def test_without_routing_and_without_trained_tokens() -> None:
    def plain(mask: list[int]) -> Sample:
        sample = make_sample([1], [2, 3], mask)
        arrays = {name: getattr(sample, name) for name in ("tokens", "loss_mask", "logprobs", "advantages")}
        return Sample(**arrays, versions=sample.versions, group=0, prompt_len=1)

    (mb,) = pack([plain([1, 1])], [np.ones(3)], tokens_per_microbatch=9).microbatches
    assert mb.experts is None
    empty = pack([plain([0, 0])], [np.zeros(3)], tokens_per_microbatch=9)
    assert (empty.microbatches, empty.num_samples, empty.num_tokens) == ((), 1, 0)
    with pytest.raises(ValueError, match="experts is missing"):
        pack([plain([1, 1]), make_sample([1], [2], [1])], [np.ones(3), np.ones(2)], tokens_per_microbatch=9)


def test_refusals_name_the_sample() -> None:
    good = make_sample([1, 2], [3], [1], uid="x#1")

    first = np.array([True, False, True])
    cases = [
        ([replace(good, loss_mask=first)], [np.ones(3)], "x#1: loss_mask is True inside the prompt"),
        ([replace(good, prompt_len=0)], [np.ones(3)], "x#1: prompt_len is 0"),
        ([replace(good, prompt_len=4)], [np.ones(3)], "x#1: prompt_len is 4"),
        ([good], [np.ones(2)], "x#1: 2 weights for 3 tokens"),
    ]
    for samples, weights, message in cases:
        for build in (lambda s, w: pack(s, w, tokens_per_microbatch=9), pad):
            with pytest.raises(ValueError, match=message):
                build(samples, weights)
    with pytest.raises(ValueError, match="tokens_per_microbatch is 0"):
        pack([good], [np.ones(3)], tokens_per_microbatch=0)


def aggregation_step() -> list[Sample]:
    """Prompt 0 with answers of 1 and 3 trained tokens, prompt 1 with one of 2, and an untrained one."""
    masks = [([1], 0), ([1, 1, 0, 1], 0), ([0, 1, 1], 1), ([0, 0], 2)]
    return [make_sample([1, 2], [3] * len(mask), mask, group=group) for mask, group in masks]


def test_aggregation_by_hand() -> None:
    samples = aggregation_step()
    expected = {
        Aggregation.TOKEN: [1 / 6, 1 / 6, 1 / 6],
        Aggregation.SAMPLE: [1 / 3, 1 / 9, 1 / 6],
        Aggregation.PROMPT: [1 / 8, 1 / 8, 1 / 4],
        Aggregation.CONSTANT: [1 / 40, 1 / 40, 1 / 40],
    }
    for mode, per_token in expected.items():
        weights = aggregation_weights(samples, mode, max_tokens=10)
        for sample, weight, value in zip(samples, weights, [*per_token, 0.0], strict=True):
            np.testing.assert_allclose(weight, sample.loss_mask * value, rtol=1e-15)


@given(steps(), st.sampled_from([Aggregation.TOKEN, Aggregation.SAMPLE, Aggregation.PROMPT]))
def test_aggregation_sums_to_one(samples: list[Sample], mode: Aggregation) -> None:
    total = sum(weight.sum() for weight in aggregation_weights(samples, mode))
    assert total == pytest.approx(1 if any(s.loss_mask.any() for s in samples) else 0)


def test_constant_aggregation_needs_a_length() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        aggregation_weights(aggregation_step(), Aggregation.CONSTANT)
    assert aggregation_weights([], Aggregation.PROMPT) == []
