from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.algo.offpolicy import (
    LOG_RATIO_BOUND,
    Correction,
    bounded_exp,
    importance_weights,
    kl_k1,
    kl_k2,
    kl_k3,
    mismatch,
    mismatch_metrics,
    sequence_means,
    sequence_sums,
)


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


RATIOS = (4.0, 0.25, 1.0, 3.0, 0.1)  # sample 0: 4, 1/4 (product 1); sample 2: 1, 3, 0.1 (product 0.3)
SAMPLE_IDX = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)


def test_corrections_by_hand() -> None:
    geometric = 0.3 ** (1 / 3)
    expected = {
        Correction.NONE: [1, 1, 1, 1, 1],
        Correction.TOKEN_TRUNCATE: [2, 0.25, 1, 2, 0.1],
        Correction.TOKEN_MASK: [0, 0, 1, 0, 0],
        Correction.SEQUENCE_TRUNCATE: [1, 1, 0.3, 0.3, 0.3],
        Correction.SEQUENCE_MASK: [1, 1, 0, 0, 0],
        Correction.GEOMETRIC_MASK: [1, 1, 1, 1, 1],
    }
    for mode, values in expected.items():
        got = importance_weights(logs(*RATIOS), SAMPLE_IDX, 3, mode, low=0.5, high=2.0)
        assert got.tolist() == pytest.approx(values), mode
    rejected = importance_weights(
        logs(*RATIOS), SAMPLE_IDX, 3, Correction.GEOMETRIC_MASK, low=geometric + 1e-3, high=2.0
    )
    assert rejected.tolist() == [1, 1, 0, 0, 0]


@given(st.sampled_from(list(Correction)), st.integers(1, 6))
def test_equal_policies_are_left_alone(mode: Correction, num_tokens: int) -> None:
    """Exactly 1, not nearly: the first minibatch where engine and trainer agree must not be touched."""
    logprobs = torch.randn(num_tokens)
    sample_idx = torch.arange(num_tokens) // 2
    weights = importance_weights(logprobs - logprobs, sample_idx, num_tokens, mode, low=0.5, high=2.0)
    assert weights.tolist() == [1.0] * num_tokens
    metrics = mismatch_metrics([mismatch(logprobs, logprobs, correction=weights)])
    ones = ("mean", "max", "min")
    assert [metrics[f"sampling/importance_sampling_ratio/{name}"] for name in ones] == [1, 1, 1]
    assert metrics["sampling/ess"] == 1
    nearly = mismatch_metrics([mismatch(logprobs + 1e-6 * torch.rand(num_tokens), logprobs)])
    assert 0.99 < nearly["sampling/ess"] <= 1  # never above by the rounding of the sums
    zeros = [v for k, v in metrics.items() if "ratio" not in k and k != "sampling/ess"]
    assert zeros and all(value == 0 for value in zeros)


def test_weights_carry_no_gradient_and_corrupted_tokens_stay_finite() -> None:
    log_ratio = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    sample_idx = torch.tensor([0, 1, 2])
    for mode in Correction:
        weights = importance_weights(log_ratio, sample_idx, 3, mode, low=0.0, high=2.0)
        assert not weights.requires_grad
        assert weights.isfinite().all() and weights.max() <= 2
    assert bounded_exp(log_ratio).max().item() == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-6)
    assert bounded_exp(log_ratio).square().isfinite().all()


def test_kl_estimators_are_of_sampler_to_trainer() -> None:
    """Averaged exactly over mu: k1 and k3 give KL(mu || pi), which differs from KL(pi || mu); k2 nearly."""
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    log_ratio = pi.log() - mu.log()
    exact = float((mu * (mu / pi).log()).sum())
    reverse = float((pi * (pi / mu).log()).sum())
    assert float((mu * kl_k1(log_ratio)).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((mu * kl_k3(log_ratio)).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((mu * kl_k2(log_ratio)).sum()) == pytest.approx(exact, rel=0.1)
    assert abs(exact - reverse) > 1e-4
    assert (kl_k3(log_ratio) >= 0).all() and (kl_k2(log_ratio) >= 0).all()


def test_k3_does_not_cancel_where_policies_almost_agree() -> None:
    """r - 1 - log r in fp32 is noise of 1e-7 at log r = 1e-4, where the truth is 5e-9."""
    assert float(kl_k3(torch.tensor([1e-4]))) == pytest.approx(5e-9, rel=0.05)


def test_sequence_reductions_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sequence_sums(values, SAMPLE_IDX, 3).tolist() == [3, 0, 12]
    assert sequence_means(values, SAMPLE_IDX, 3).tolist() == [1.5, 0, 4]


def test_metrics_by_hand_and_split_over_microbatches() -> None:
    """Ratios 2 and 1/2: ESS = 2.5^2 / (2 * 4.25); any split into microbatches gives the same metrics."""
    log_ratio, zero = logs(2.0, 0.5).float(), torch.zeros(2)
    correction = torch.tensor([1.5, 0.0])
    whole = mismatch_metrics([mismatch(log_ratio, zero, correction=correction)])
    parts = [mismatch(log_ratio[i : i + 1], zero[:1], correction=correction[i : i + 1]) for i in range(2)]
    assert mismatch_metrics(parts) == pytest.approx(whole)
    ln2 = math.log(2)
    expected = {
        "sampling/sampling_logp_difference/mean": ln2,
        "sampling/sampling_logp_difference/max": ln2,
        "sampling/importance_sampling_ratio/mean": 1.25,
        "sampling/importance_sampling_ratio/max": 2,
        "sampling/importance_sampling_ratio/min": 0.5,
        "sampling/ess": 2.5**2 / (2 * 4.25),
        "sampling/kl_k1": 0,
        "sampling/kl_k2": ln2**2 / 2,
        "sampling/kl_k3": ((2 - 1 - ln2) + (0.5 - 1 + ln2)) / 2,
        "sampling/tail_1.5": 1,
        "sampling/tail_3": 0,
        "sampling/masked": 0.5,
        "sampling/truncated": 0.5,
    }
    got = mismatch_metrics([mismatch(log_ratio, zero, correction=correction, taus=(1.5, 3.0))])
    assert got == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="no microbatch"):
        mismatch_metrics([])
