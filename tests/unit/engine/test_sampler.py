"""The sampler against its definition, and the native one against its torch twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounding import rounding

from ostinato.engine.sampler import sample, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.native import Kernels
from ostinato.types import Sampling


def settings(rows: int, **values: float) -> Settings:
    return Settings.of([Sampling(**values)] * rows)  # type: ignore[arg-type]


def test_the_token_is_where_the_cumulative_mass_passes_u() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    for u, token in ((0.1, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.999999, 2)):
        tokens, logprobs, edges, *_ = sample_torch(logits, settings(1), np.array([u]))
        assert tokens[0] == token
        assert logprobs[0] == pytest.approx(math.log([0.2, 0.3, 0.5][token]), abs=1e-6)
        assert edges[0] == pytest.approx([0.0, 0.2, 0.5][token], abs=1e-6)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 2}, [0.0, 0.3, 0.5]),
        ({"top_p": 0.7}, [0.0, 0.3, 0.5]),
        ({"top_p": 0.5}, [0.0, 0.0, 0.5]),
        ({"min_p": 0.5}, [0.0, 0.3, 0.5]),
        ({"top_k": 2, "top_p": 0.6}, [0.0, 0.0, 0.5]),  # of what top-k left, 0.625 is the best token's
    ],
)
def test_filters_renormalise_what_they_keep(
    values: dict[str, float], kept: list[float], kernels: Kernels
) -> None:
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]])).repeat(200, 1)
    u = (np.arange(200) + 0.5) / 200
    for result in (
        sample_torch(logits, settings(200, **values), u),
        sample(logits, settings(200, **values), u, kernels),
    ):
        tokens, logprobs, *_ = result
        shares = np.bincount(tokens, minlength=3) / 200
        expected = np.array(kept) / sum(kept)
        assert np.abs(shares - expected).max() <= 0.01
        assert np.exp(logprobs) == pytest.approx(expected[tokens], abs=1e-5)


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0},
     {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.01}],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [7, 1000])
def test_native_equals_its_twin(values: dict[str, float], vocab: int, kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (64, vocab)).astype(np.float32))
    u = rng.random(64)
    ours, twin = (
        sample(logits, settings(64, **values), u, kernels),
        sample_torch(logits, settings(64, **values), u),
    )
    assert (ours[0] == twin[0]).mean() >= 63 / 64  # a cumulative sum in another order may move one edge
    same = ours[0] == twin[0]
    assert np.abs(ours[1] - twin[1])[same].max() < 2e-5
    assert np.abs(ours[2] - twin[2])[same].max() < 2e-6
    if "temperature" not in values or values["temperature"] > 0:  # where the uniform fell
        assert (ours.edges <= u + 1e-6).all() and (u <= ours.edges + np.exp(ours.logprobs) + 1e-6).all()


def test_frequencies_follow_the_distribution(kernels: Kernels) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).repeat(20000, 1)
    tokens, *_ = sample(logits, settings(20000), np.random.default_rng(2).random(20000), kernels)
    expected = torch.softmax(logits[0], -1).numpy() * 20000
    chi2 = ((np.bincount(tokens, minlength=50) - expected) ** 2 / expected).sum()
    assert chi2 < 85.4  # the 99.9 % point of chi-squared with 49 degrees of freedom is 85.35


def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    logits = torch.randn(33, 999, generator=torch.Generator().manual_seed(3))
    u = np.random.default_rng(4).random(33)
    together = sample(logits, settings(33), u, kernels)
    for row in (0, 16, 32):
        alone = sample(logits[row : row + 1].clone(), settings(1), u[row : row + 1], kernels)
        assert alone[0][0] == together[0][row] and alone[1][0] == together[1][row]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named_not_sampled(bad: float, kernels: Kernels) -> None:
    logits = torch.zeros(2, 40)
    logits[1, 3] = bad
    for result in (
        sample_torch(logits, settings(2), np.array([0.5, 0.5])),
        sample(logits, settings(2), np.array([0.5, 0.5]), kernels),
    ):
        assert result[0][0] == 20 and result[0][1] == -1 and math.isnan(result[1][1])


def test_a_banned_token_is_never_drawn(kernels: Kernels) -> None:
    logits = torch.zeros(100, 17)
    logits[:, 16] = -math.inf
    u = np.linspace(0.001, 0.999999999, 100)
    for result in (sample_torch(logits, settings(100), u), sample(logits, settings(100), u, kernels)):
        assert result[0].max() == 15


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e-39, -1.0])
def test_a_temperature_that_fp32_cannot_divide_by_is_refused(temperature: float) -> None:
    """At 1e-39 its inverse is infinite: the best token came back with the log-probability NaN."""
    with pytest.raises(ValueError, match="0 \\(greedy\\)"):
        Sampling(temperature=temperature)


FILTERS = [
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.6, "top_p": 0.99, "min_p": 0.001},
]


@pytest.mark.parametrize("values", FILTERS)
@pytest.mark.parametrize("vocab", [7, 1000, 1003])
def test_a_token_was_drawn_from_its_support(values: dict[str, float], vocab: int, kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (64, vocab)).astype(np.float32))
    reported = []
    for kernel in (kernels, None):
        drawn = sample(logits, settings(64, **values), rng.random(64), kernel, want_support=True)
        assert drawn.support is not None and drawn.support.holds(drawn.tokens).all()
        scaled = logits.double() / values.get("temperature", 1.0)
        for row, piece in enumerate(drawn.support.split(1)):
            ids = torch.from_numpy(piece.ids).long() if len(piece.ids) else torch.arange(vocab)
            log_p = scaled[row, drawn.tokens[row]] - scaled[row, ids].logsumexp(0)
            # division, shift, logarithm and difference are each rounded at the size of a logit
            assert drawn.logprobs[row] == pytest.approx(float(log_p), abs=rounding(torch.float32, 4, scaled))
            assert piece.ids.tolist() == sorted(set(piece.ids.tolist()))
        reported.append([piece.ids.tolist() for piece in drawn.support.split(1)])
    assert reported[0] == reported[1]


def test_without_a_cut_the_support_is_the_whole_vocabulary(kernels: Kernels) -> None:
    """Rows without a filter, greedy ones, broken ones, and those whose filters have cut nothing."""
    logits = torch.zeros(6, 40)
    logits[1, 3] = math.nan
    logits[5, 7:] = -30.0
    half, greedy = Sampling(top_p=0.5), Sampling(top_k=3, temperature=0.0)
    mixed = Settings.of([Sampling(), half, greedy, Sampling(top_k=40), Sampling(min_p=0.5), half])
    for kernel in (kernels, None):
        drawn = sample(logits, mixed, np.full(6, 0.5), kernel, want_support=True)
        assert drawn.support is not None
        # of equal logits top-p keeps all: ties at the edge stay
        assert drawn.support.counts.tolist() == [0, 0, 0, 0, 0, 7]
        assert drawn.support.ids.tolist() == list(range(7))
        assert sample(logits, mixed, np.full(6, 0.5), kernel).support is None
