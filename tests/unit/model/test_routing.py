"""Routing as a value: the choice, the replay of a choice, and what cannot be a choice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.moe import choose, margins, route

QWEN = MoEConfig(num_experts=8, top_k=3, intermediate_size=4, layers=(0, 1), norm_topk=True)
OLMOE = replace(QWEN, norm_topk=False)
DEEPSEEK = replace(
    QWEN, scoring=Scoring.SIGMOID, scaling=2.5, num_groups=4, topk_groups=2, correction_bias=True
)
BIAS = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.5, -0.5, 0.1, 0.0])


def logits(rows: int, seed: int = 0, experts: int = 8) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def test_softmax_then_top_k_by_hand() -> None:
    row = torch.tensor([[math.log(p) for p in (0.1, 0.4, 0.05, 0.2, 0.05, 0.1, 0.06, 0.04)]])
    ids, weights, _ = route(row, replace(OLMOE, top_k=2))
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.2]]))
    _, normalised, _ = route(row, replace(QWEN, top_k=2))
    torch.testing.assert_close(normalised, torch.tensor([[2 / 3, 1 / 3]]))


def test_group_limit_and_correction_bias_by_hand() -> None:
    """Groups (0 1) (2 3) (4 5) (6 7) score by their best two, 0.9 0.8 1.3 1.0 with the bias: the last win.

    Expert 0 has the best raw score but its group loses; the weights come from raw scores, without the bias.
    """
    scores = torch.tensor([[0.8, 0.1, 0.4, 0.4, 0.3, 0.5, 0.7, 0.2]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.1, 0.0])
    moe = replace(DEEPSEEK, top_k=2)
    assert sorted(choose(scores, moe, bias)[0].tolist()) == [4, 6]
    ids, weights, _ = route(scores.logit(), moe, bias)
    raw = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert raw == pytest.approx({4: 2.5 * 0.3 / 1.0, 6: 2.5 * 0.7 / 1.0})


@pytest.mark.parametrize("moe", [QWEN, OLMOE, DEEPSEEK])
@pytest.mark.parametrize("experts", [6, 8, 16])
def test_a_token_is_routed_alike_in_every_batch(moe: MoEConfig, experts: int) -> None:
    """torch's sigmoid rounds otherwise in what is left over after whole vectors: a token's weights, and then
    its log-probabilities, were off by a bit when others were in the batch (DeepSeek's router)."""
    moe, x = replace(moe, num_experts=experts, num_groups=1, topk_groups=1), logits(41, experts=experts)
    ids, weights, _ = route(x, moe)
    for rows in range(1, 41):
        some_ids, some_weights, _ = route(x[:rows], moe)
        assert torch.equal(some_ids, ids[:rows]) and torch.equal(some_weights, weights[:rows])


@pytest.mark.parametrize("moe", [QWEN, replace(DEEPSEEK, num_groups=1, topk_groups=1)])
def test_a_margin_is_what_a_logit_must_move_for_a_flip(moe: MoEConfig) -> None:
    """The last expert chosen falls by a little less, and stays; by a little more, and is left out."""
    x = logits(30)
    ids, gaps = choose(x, moe, None), margins(x, moe)
    assert (gaps > 0).all()
    for share, stays in ((0.99, True), (1.01, False)):
        moved = x.clone()
        moved[torch.arange(30), ids[:, -1]] -= share * gaps
        same = (choose(moved, moe, None).sort().values == ids.sort().values).all(dim=-1)
        assert (same == stays).all()


def test_a_margin_with_a_correction_bias_is_never_too_large() -> None:
    """A sigmoid's slope is at most 1/4: a logit that moves by less than the margin flips no choice."""
    x, moe = logits(200), replace(DEEPSEEK, num_groups=1, topk_groups=1)
    ids, gaps = choose(x.sigmoid(), moe, BIAS), margins(x, moe, BIAS)
    assert (gaps >= 0).all()
    moved = x.clone()
    moved[torch.arange(200), ids[:, -1]] -= 0.99 * gaps
    assert torch.equal(choose(moved.sigmoid(), moe, BIAS).sort().values, ids.sort().values)


def test_no_margin_where_every_expert_is_chosen() -> None:
    assert margins(logits(3), replace(QWEN, top_k=8)).isnan().all()
    only_one_group = replace(DEEPSEEK, topk_groups=1, top_k=2, num_groups=4)
    assert margins(logits(3), only_one_group, BIAS).isnan().all()
