"""A pass over rows with answers, or over pairs of answers, on an ``Accumulator``: gradients and sums.

    SFT over rows                       one call: cross-entropy with weights 1 / tokens of the call
    DPO over (chosen, rejected) pairs   log-probabilities, then the same loss with the slopes of the pairs

Both give sums by name, over "count" tokens or pairs, of which "tokens" were trained. Gradients are of the
mean over one call: a step is one call, a held-out loss may take several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ostinato.algo.token_losses import dpo, mean_weights, token_loss
from ostinato.train.accumulate import Accumulator, Row

CROSS_ENTROPY = token_loss("cross_entropy")
Pairs = Sequence[tuple[Row, ...]]  # chosen, rejected


def make_row(tokens: np.ndarray, mask: np.ndarray) -> Row:
    """A row of tokens [L], of which those are trained on, with weight 1, whose ``mask`` [L] is True. Each is
    predicted by those before it. Raises ValueError if the first is trained on: nothing predicts it."""
    if mask[0]:
        raise ValueError("trains on its first token, which nothing predicts; begin with a prompt")
    values = {"weights": mask[1:].astype(np.float32)}
    return Row(tokens=tokens[:-1].astype(np.int32), targets=tokens[1:].astype(np.int64), values=values)


def supervised(learner: Accumulator, rows: Sequence[Row], *, learn: bool) -> dict[str, float]:
    """Sums over the assistant tokens of ``rows``: of cross-entropy, and their count. With ``learn`` the
    gradients of its mean are added."""
    weights = mean_weights([_select_trained(row) for row in rows])
    weighted_rows = [_set_weights(row, row_weights) for row, row_weights in zip(rows, weights, strict=True)]
    call = learner.forward_backward if learn else learner.forward
    count = sum(int(_select_trained(row).sum()) for row in rows)
    return {"loss": call(weighted_rows, CROSS_ENTROPY).loss * count, "count": count, "tokens": count}


def preferences(
    learner: Accumulator, pairs: Pairs, reference: np.ndarray, beta: float, *, learn: bool
) -> dict[str, float]:
    """Sums over ``pairs`` of DPO's loss and its measurements, with TRL's names. ``reference``: their
    ``answer_logprobs`` under the reference policy. With ``learn`` the gradients of the mean loss are
    added."""
    scores, rows_of_pairs = answer_logprobs(learner, pairs), [row for pair in pairs for row in pair]
    loss, rewards, slopes = dpo(scores, reference, beta)
    if learn:
        weights = (-slopes / len(pairs)).reshape(-1)
        weighted_rows = [
            _set_weights(row, weight * _select_trained(row))
            for row, weight in zip(rows_of_pairs, weights, strict=True)
        ]
        learner.forward_backward(weighted_rows, CROSS_ENTROPY)
    margins = rewards[:, 0] - rewards[:, 1]
    values = {"loss": loss, "rewards/accuracies": margins > 0, "rewards/margins": margins}
    for column, name in enumerate(("chosen", "rejected")):
        values |= {f"rewards/{name}": rewards[:, column], f"logps/{name}": scores[:, column]}
    sums = {name: float(value.sum()) for name, value in values.items()}
    return sums | {
        "count": len(pairs),
        "tokens": sum(int(_select_trained(row).sum()) for row in rows_of_pairs),
    }


def answer_logprobs(learner: Accumulator, pairs: Pairs) -> np.ndarray:
    """Log pi [P, 2] float64 of the chosen and the rejected answer of each pair, summed over their tokens."""
    rows = [row for pair in pairs for row in pair]
    logprobs_by_row = learner.forward(rows, CROSS_ENTROPY).logprobs
    sums = [
        float(logprobs[_select_trained(row)].sum(dtype=np.float64))
        for logprobs, row in zip(logprobs_by_row, rows, strict=True)
    ]
    return np.array(sums).reshape(-1, 2)


def _select_trained(row: Row) -> np.ndarray:
    """Mask [L] of the targets that are trained on."""
    return row.values["weights"] != 0


def _set_weights(row: Row, weights: np.ndarray) -> Row:
    """A copy of the row with ``weights`` [L]."""
    return replace(row, values={"weights": weights.astype(np.float32)})
