"""Log-probability, entropy and slope in Triton are those of autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.model.cuda import scoring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK", 64)


@settings(max_examples=10)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 64, 65, 300]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.integers(0, 99),
)
def test_scores_and_slopes(rows: int, size: int, spread: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=random) * spread
    targets = torch.randint(size, (rows,), generator=random)
    wide = logits.double().requires_grad_()
    log_p = torch.log_softmax(wide, -1)
    own = log_p.gather(1, targets[:, None]).squeeze(1)
    (slope,) = torch.autograd.grad(own.sum(), wide)
    entropy = -(log_p.exp() * log_p).sum(-1)
    buffer = logits.to(DEVICE)
    scores = scoring.score_in_place(buffer, targets.to(DEVICE)).cpu()
    assert (scores[:, 0] - own).abs().max() <= 1e-5 * own.abs().max().clamp_min(1)
    assert (scores[:, 1] - entropy).abs().max() <= 1e-5 * entropy.abs().max().clamp_min(1)
    assert (buffer.cpu() - slope).abs().max() <= 1e-5


def test_the_slope_of_a_near_certain_token_is_not_lost() -> None:
    """1 - p is 0 in float32 from p = 1 - 3e-8 on; the mass of the others is not."""
    logits = torch.zeros(1, 100)
    logits[0, 7] = 30.0
    buffer = logits.clone().to(DEVICE)
    scoring.score_in_place(buffer, torch.tensor([7], device=DEVICE))
    assert float(buffer[0, 7]) == pytest.approx(99 * torch.tensor(-30.0).exp().item(), rel=1e-4)


def test_logits_that_were_banned() -> None:
    logits = torch.zeros(1, 130)
    logits[0, 3:] = -torch.inf
    scores = scoring.score_in_place(logits.to(DEVICE), torch.tensor([1], device=DEVICE)).cpu()
    assert torch.allclose(scores, torch.tensor([[-1.0986123, 1.0986123]]))
