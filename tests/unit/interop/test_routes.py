"""Routes as data, and the gate that finds whose they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion

from ostinato.algo.routing import Cause, Misaligned, alignment, require_aligned, shared_ids
from ostinato.hf.routes import Routes, choose_id_dtype
from ostinato.types import NO_EXPERT

LAYERS, TOP_K, EXPERTS = 4, 3, 16


def some(
    rows: int, seed: int = 0, experts: int = EXPERTS, top_k: int = TOP_K, layers: int = LAYERS
) -> np.ndarray:
    """[rows, layers, K] different ids."""
    return np.random.default_rng(seed).random((rows, layers, experts)).argsort(-1)[..., :top_k]


def routes(rows: int, seed: int = 0) -> Routes:
    return Routes.of(some(rows, seed), EXPERTS)


# 256 is where a byte is full and leaves no sentinel
@given(
    experts=st.sampled_from([2, 3, 8, 128, 255, 256, 257, 384, 1024]),
    rows=st.integers(0, 20),
    seed=st.integers(0, 99),
    gaps=st.booleans(),
)
def test_narrow_and_back(experts: int, rows: int, seed: int, gaps: bool) -> None:
    ids = some(rows, seed, experts, top_k=min(experts, 4)).astype(np.int16)
    if gaps:
        ids[np.random.default_rng(seed).random(rows) < 0.3] = NO_EXPERT
    narrow = Routes.of(ids, experts)
    assert narrow.num_experts == experts and narrow.ids.dtype == choose_id_dtype(experts)
    np.testing.assert_array_equal(narrow.dense(), ids)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.zeros((2, 1, 2)), "integer ids"),
        (np.zeros((2, 2), int), "integer ids"),
        (np.array([[[0, 16]]]), "from 0 to 16"),
        (np.array([[[0, 272]]]), "from 0 to 272"),  # 272 is 16 in a byte
        (np.array([[[-2, 1]]]), "from -2"),
        (np.array([[[3, 3]]]), "expert twice"),
        (np.zeros((1, 1, 2), int), "never written"),  # the padding that is expert 0, K times
        (np.array([[[-1, 3]]]), "whole or not at all"),
        (np.array([[[1, 2], [-1, -1]]]), "whole or not at all"),
    ],
)
def test_what_is_no_routing_is_refused(ids: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Routes.of(ids, EXPERTS)


@given(rows=st.integers(1, 12), start=st.integers(0, 12))
def test_turns_merged_are_one_capture(rows: int, start: int) -> None:
    start = min(start, rows)
    whole = routes(rows)
    new = whole.rows(start, rows)
    for previous in (whole, whole.rows(0, start)):  # a turn's own last rows are replaced
        merged = Routes.merge(previous, new, start=start)
        np.testing.assert_array_equal(merged.ids, whole.ids)
        assert merged.known.all()
    with pytest.raises(ValueError, match="start"):
        Routes.merge(whole.rows(0, start), new, start=start + 1)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_padding_and_packing_keep_rows_with_their_tokens(lengths: list[int], seed: int) -> None:
    """Left, right or in the middle: the t-th token of sequence b has the t-th row of b, and padding none."""
    parts = [routes(length - 1, seed + i) for i, length in enumerate(lengths)]  # T - 1 rows of T tokens
    generator = np.random.default_rng(seed)
    mask = np.zeros((len(lengths), 8), bool)
    for line, length in zip(mask, lengths, strict=True):
        line[generator.choice(8, length, replace=False)] = True
    padded = Routes.padded(parts, mask).dense().reshape(len(lengths), 8, LAYERS, TOP_K)
    assert (padded[~mask] == NO_EXPERT).all()
    packed = Routes.packed(parts, lengths).dense()
    np.testing.assert_array_equal(padded[mask], packed)
    for line, length, part in zip(np.split(packed, np.cumsum(lengths)[:-1]), lengths, parts, strict=True):
        np.testing.assert_array_equal(line[: length - 1], part.dense())
        assert (line[length - 1] == NO_EXPERT).all()


def test_more_rows_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens has 4 rows"):
        Routes.packed([routes(4)], [3])
    with pytest.raises(ValueError, match="differ"):
        Routes.concat([routes(2), Routes.of(some(2, layers=2), EXPERTS)])


def vllm_output(ids: np.ndarray | None, prompt: int = 4, answer: int = 3) -> Any:
    completion = SimpleNamespace(routed_experts=ids, token_ids=list(range(answer)))
    return SimpleNamespace(prompt_token_ids=list(range(prompt)), outputs=[completion])


def test_vllm_rows_and_layers() -> None:
    """vLLM 0.32: one row fewer than tokens, zero rows for dense layers; before, MoE layers only."""
    ids = some(6, layers=2).astype(np.uint8)
    everything = np.zeros((6, 5, TOP_K), np.uint8)
    everything[:, [1, 3]] = ids
    for given_ids in (everything, ids):
        found = Routes.from_vllm(vllm_output(given_ids), layers=[1, 3], num_experts=EXPERTS)
        assert len(found) == 7 and not found.known[6]
        np.testing.assert_array_equal(found.ids[:6], ids)
    turn = Routes.from_vllm(vllm_output(everything[2:]), layers=[1, 3], num_experts=EXPERTS, prompt_start=2)
    np.testing.assert_array_equal(turn.ids[:4], ids[2:])


@pytest.mark.parametrize(
    ("ids", "layers", "says"),
    [
        (None, [0], "enable_return_routed_experts"),
        (some(7), [0, 1, 2, 3], "7 tokens from 0 on have 6 rows"),  # T rows for T - 1
        (some(6), [1, 2], "in layers \\[0, 3\\], where the model has no router"),
        (some(6, layers=2), [1, 2, 3], "2 layers"),
        (some(6), [0, 0], "two routers"),
        # a fused kernel that records nothing
        (np.zeros((6, 4, TOP_K), np.uint8), [0, 1, 2, 3], "never written"),
    ],
)
def test_unfit_vllm_outputs_are_refused(ids: np.ndarray | None, layers: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Routes.from_vllm(vllm_output(ids), layers=layers, num_experts=EXPERTS)


def test_a_completion_of_our_engine() -> None:
    answer = some(3, 1).astype(np.int16)
    answer[-1] = NO_EXPERT
    done = completion(np.arange(3), experts=answer, prompt_experts=some(4).astype(np.int16))
    found = Routes.from_completion(done, EXPERTS)
    assert found.known.tolist() == [True] * 6 + [False]
    np.testing.assert_array_equal(found.dense()[4:], answer)


# the gate


def native(sequences: int = 3, rows: int = 40) -> list[np.ndarray]:
    """Some experts are popular everywhere, as in real models: chance alone gives some agreement."""
    generator = np.random.default_rng(7)
    liked = np.linspace(0, 1, EXPERTS)
    return [
        (generator.random((rows + i, LAYERS, EXPERTS)) + liked).argsort(-1)[..., -TOP_K:]
        for i in range(sequences)
    ]


def flipped(ids: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """One of K replaced in a share of the rows: another precision, or an older policy."""
    ids, generator = ids.copy(), np.random.default_rng(seed)
    for t, layer in np.argwhere(generator.random(ids.shape[:2]) < share):
        ids[t, layer, 0] = next(e for e in generator.permutation(EXPERTS) if e not in ids[t, layer])
    return ids


def test_overlap_is_of_sets() -> None:
    ids = some(5)
    assert (shared_ids(ids, ids[..., ::-1]) == 1).all()
    one = flipped(ids, 1.0)
    np.testing.assert_allclose(shared_ids(ids, one), 2 / 3)
    one[2] = NO_EXPERT
    assert np.isnan(shared_ids(ids, one)[2]).all()
    assert alignment([ids], [one]) == pytest.approx(2 / 3)


def planted(bug: str) -> list[np.ndarray]:
    ids = native()
    match bug:
        case "late":
            return [np.concatenate([one[:1], one[:-1]]) for one in ids]
        case "early":
            return [np.concatenate([one[1:], one[-1:]]) for one in ids]
        case "rolled":
            return [np.roll(one, 1, axis=1) for one in ids]
        case "reversed":
            return [one[:, ::-1] for one in ids]
        case "shuffled":
            moved = [ids[1], ids[2], ids[0]]
            return [np.resize(one, (len(mine), *one.shape[1:])) for one, mine in zip(moved, ids, strict=True)]
        case "zeros":
            return [np.zeros_like(one) for one in ids]
        case "stale":
            return [flipped(one, 0.7) for one in ids]
        case _:
            return [one[np.random.default_rng(1).permutation(len(one))] for one in ids]


@pytest.mark.parametrize(
    ("bug", "cause", "detail"),
    [
        ("late", Cause.SHIFTED, "1 row(s) later"),
        ("early", Cause.SHIFTED, "1 row(s) earlier"),
        ("rolled", Cause.LAYERS, "rolled by 1 of 4"),
        ("reversed", Cause.LAYERS, "reversed"),
        ("shuffled", Cause.SHUFFLED, "another sequence"),
        ("zeros", Cause.ZERO, "several times"),
        ("stale", Cause.STALE, ""),
        ("other text", Cause.UNRELATED, ""),
    ],
)
def test_planted_bugs_are_caught_and_named(bug: str, cause: Cause, detail: str) -> None:
    """Each was shipped silently by somebody: training goes on, on noise."""
    with pytest.raises(Misaligned, match=cause) as caught:
        require_aligned(native(), planted(bug))
    assert detail in caught.value.diagnosis.detail
    if cause in (Cause.SHIFTED, Cause.LAYERS, Cause.SHUFFLED):
        assert caught.value.diagnosis.fixed_overlap > 0.99


def test_one_bad_sequence_among_good_ones_is_found() -> None:
    ids = native(6)
    replayed = [*ids[:5], np.concatenate([ids[5][:1], ids[5][:-1]])]
    with pytest.raises(Misaligned, match="1 of 6 sequences"):
        require_aligned(ids, replayed)


def test_shapes_have_to_agree() -> None:
    ids = native(1)
    with pytest.raises(ValueError, match="sequence 0"):
        alignment(ids, [ids[0][:-1]])
