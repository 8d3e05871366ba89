"""Verification of drafts: sample, then match.

A pass runs the last token of a sequence and the tokens of its draft. Every row draws its next token as plain
decoding would, with the addressed noise of its position and without the draft. Start at the last token: what
its row drew is emitted; if the draft continues with that token, move to its row and repeat. So

- the emitted tokens are those of plain decoding, token by token; the draft decides how far one pass reaches.
  That holds whatever the drafter uses, even the noise (drafts are then coupled, arXiv 2408.07978);
- for a draft fixed before the draw no lossless rule accepts more: a token is reached with the probability of
  the draft up to it under the policy, which is an upper bound for every rule.

Accepting a past answer by min(1, p / q) against its old probability q is not in this file: it is wrong.
Training used the answer, so given the new policy it is not a draw from q. A rewarded answer has p > q and
would be repeated with certainty. ``tests/e2e/test_drafts_exact.py`` shows that rule, and another wrong one,
failing.

S sequences; n draft tokens in all. A sequence has one row more than draft tokens: row 0 is its last token,
row 1 + i its draft token i.
"""

from __future__ import annotations

import numpy as np


def accepted_drafts(counts: np.ndarray, drafts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Number [S] of accepted draft tokens: the leading ones that equal the tokens drawn by the rows before
    them.

    counts [S]: draft tokens of each sequence; drafts [n]: their tokens; drawn [n + S]: the token of each row.
    """
    S, n = len(counts), len(drafts)
    if n == 0:
        return np.zeros(S, np.int64)
    owner = np.repeat(np.arange(S), counts)
    depth = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    is_rejected = drafts != drawn[np.arange(n) + owner]  # by the row before it
    num_accepted = counts.astype(np.int64)
    np.minimum.at(num_accepted, owner[is_rejected], depth[is_rejected])
    return num_accepted
