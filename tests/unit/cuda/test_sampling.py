"""Tokens drawn in Triton are those of ``sample_torch``, with every filter, at any place of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.sampler import Drawn, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.cuda import sampling
from ostinato.types import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 64)


def drawn(logits: torch.Tensor, wanted: list[Sampling], u: np.ndarray) -> Drawn:
    settings_of = Settings.of(wanted)
    temperature, top_k, top_p, min_p = (
        torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE)
        for x in (settings_of.temperature, settings_of.top_k, settings_of.top_p, settings_of.min_p)
    )
    logits = logits.to(DEVICE)
    cuts = sampling.compute_cuts(logits, temperature, top_k, top_p, min_p)
    out = sampling.draw_tokens(logits, temperature, cuts, torch.from_numpy(u).to(DEVICE)).cpu().numpy()
    return Drawn(out[0].astype(np.int64), *out[1:].astype(np.float32))


def check(logits: torch.Tensor, wanted: list[Sampling], u: np.ndarray) -> None:
    ours, theirs = drawn(logits, wanted, u), sample_torch(logits, Settings.of(wanted), u)
    # another order of a sum may move an edge by 1e-12 or so: there the neighbour is as right
    near = np.abs(u - theirs.edges) < 1e-9
    assert (ours.tokens[~near] == theirs.tokens[~near]).all()
    same = ours.tokens == theirs.tokens
    np.testing.assert_allclose(ours.logprobs[same], theirs.logprobs[same], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.edges[same], theirs.edges[same], rtol=1e-5, atol=1e-6)


FILTERS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.1]),
)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.lists(FILTERS, min_size=1, max_size=4), st.sampled_from([2, 63, 64, 65, 130]), st.integers(0, 999))
def test_tokens_are_the_twins(wanted: list[Sampling], size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 3, (len(wanted), size)).astype(np.float32))
    check(logits, wanted, random.uniform(size=len(wanted)))


@pytest.mark.slow
def test_ties_at_an_edge_are_kept_and_the_first_best_token_wins() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0] + [0.0] * 60]).repeat(4, 1)
    wanted = [Sampling(temperature=0.0), *(Sampling(top_k=k) for k in (1, 3, 4))]
    check(logits, wanted, np.array([0.9, 0.9, 0.999, 0.999]))
    assert drawn(logits, wanted, np.full(4, 0.999)).tokens.tolist() == [1, 2, 4, 4]


def test_the_ends_of_the_uniform_and_tokens_without_mass() -> None:
    """A uniform that rounds up to the whole mass takes the last token that has any."""
    logits = torch.full((3, 130), -torch.inf)
    logits[:, [5, 70]] = 0.0
    tiny, most = np.nextafter(0.0, 1.0), np.nextafter(1.0, 0.0)
    assert drawn(logits, [Sampling()] * 3, np.array([tiny, 0.6, most])).tokens.tolist() == [5, 70, 70]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_have_no_token(bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[1, 77] = bad
    out = drawn(logits, [Sampling()] * 2, np.array([0.5, 0.5]))
    assert out.tokens[0] == 50 and out.tokens[1] == -1 and np.isnan(out.logprobs[1])


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    u = np.linspace(0.05, 0.95, 3)
    whole = drawn(logits, [Sampling(top_p=0.9)] * 3, u)
    for row in range(3):
        alone = drawn(logits[row : row + 1], [Sampling(top_p=0.9)], u[row : row + 1])
        assert all(a[0] == b[row] for a, b in zip(alone[:3], whole[:3], strict=True))
