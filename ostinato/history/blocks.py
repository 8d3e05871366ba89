"""A block of history: the responses to a prompt in a step, and their layout in memory.

native/blocks.cpp sorts and searches it.

    text      documents in a row: the last tokens before a response, the response, END
    order     the suffix array of text, without its ENDs: suffixes end with their document, are compared up to
              64 tokens, and among equals the earlier one comes first

Per token of text: 4 bytes of order, 2 of token (4 in a large vocabulary), 2 of edge, 1 of probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.types import HistoryEntry

END = -1  # as a token id
CONTEXT = 8  # tokens kept before a response, so that its first token can be drafted
NARROW = np.iinfo(np.uint16).max  # the code of END among 16-bit tokens; ids are smaller
EDGE_STEP = 2.0**-16
REWARD_TOLERANCE = 1e-6  # rewards this close to the mean of their prompt count as the mean


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """Arrays that share a piece of memory, in the order below: each is aligned for its type."""

    step: int  # of the rollout
    length: int  # tokens of text, ENDs included
    documents: int
    wide: bool  # 32-bit tokens, for ids that do not fit in 16 bits
    memory: np.ndarray  # [count_bytes(...)] uint8
    is_sorted: bool = False  # whether ``order`` is filled in

    @property
    def size(self) -> int:
        """The number of places in ``order``."""
        return self.length - self.documents

    @property
    def order(self) -> np.ndarray:
        """[size] int32, positions in text; meaningless before it is sorted."""
        return self._view_array(0, np.int32, self.size)

    @property
    def starts(self) -> np.ndarray:
        """[documents + 1] int32: the beginnings of documents in text, and the end of the last document."""
        return self._view_array(4 * self.size, np.int32, self.documents + 1)

    @property
    def tokens(self) -> np.ndarray:
        """[length] int32, or uint16 in which END is NARROW."""
        return self._view_array(self._tokens_offset, np.int32 if self.wide else np.uint16, self.length)

    @property
    def edges(self) -> np.ndarray:
        """[length] uint16, in units of EDGE_STEP."""
        return self._view_array(
            self._tokens_offset + (4 if self.wide else 2) * self.length, np.uint16, self.length
        )

    @property
    def probs(self) -> np.ndarray:
        """[length] uint8, codes of ``prob_table``; 0 on context and END."""
        return self._view_array(
            self._tokens_offset + (6 if self.wide else 4) * self.length, np.uint8, self.length
        )

    @property
    def rewards(self) -> np.ndarray:
        """[documents] int8: the sign of the reward minus the mean of its prompt; 0 without a verdict."""
        return self._view_array(len(self.memory) - self.documents, np.int8, self.documents)

    @property
    def text(self) -> np.ndarray:
        """[length] int32, decoded: END is -1."""
        codes = self.tokens if self.wide else self.tokens + np.uint16(1)  # NARROW becomes 0
        return codes.astype(np.int32) - (0 if self.wide else 1)

    @property
    def num_sampled(self) -> int:
        """The number of tokens of responses."""
        return int(np.count_nonzero(self.probs))

    @property
    def _tokens_offset(self) -> int:
        return 4 * self.size + 4 * (self.documents + 1)

    def _view_array(self, offset: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, count, offset)


def count_bytes(length: int, documents: int, is_wide: bool) -> int:
    """Return the size of a block's memory in bytes."""
    return 4 * (length - documents) + 4 * (documents + 1) + (7 if is_wide else 5) * length + documents


def make_block(step: int, pasts: Sequence[HistoryEntry]) -> Block:
    """Make the block of these responses, not yet sorted; ``pasts`` has at least one. Raises ValueError for a
    response without a prob and an edge for every token, or with a negative token."""
    for past in pasts:
        if not len(past.tokens) == len(past.probs) == len(past.edges):
            raise ValueError(
                f"a response of {len(past.tokens)} tokens has {len(past.probs)} probs and {len(past.edges)} "
                "edges; history keeps responses whose engine reports both for every token"
            )
    end = np.array([END])
    parts = [part for past in pasts for part in (past.context[-CONTEXT:], past.tokens, end)]
    text = np.concatenate(parts).astype(np.int32)
    is_sampled = np.repeat(np.tile([False, True, False], len(pasts)), [len(part) for part in parts])
    ends = np.cumsum([len(part) for part in parts])[2::3]
    if np.count_nonzero(text < 0) > len(pasts):
        raise ValueError(f"a response has the token {text.min()}; tokens are 0 or more")
    is_wide = bool((text >= NARROW).any())
    block = Block(
        step=step,
        length=len(text),
        documents=len(pasts),
        wide=is_wide,
        memory=np.empty(count_bytes(len(text), len(pasts), is_wide), np.uint8),
    )
    block.starts[:] = np.concatenate([[0], ends])
    block.tokens[:] = text if is_wide else text.astype(np.uint16)  # -1 becomes NARROW
    block.edges[:], block.probs[:] = 0, 0
    block.edges[is_sampled] = encode_edges(np.concatenate([past.edges for past in pasts]))
    block.probs[is_sampled] = encode_probs(np.concatenate([past.probs for past in pasts]))
    block.rewards[:] = compute_reward_signs([past.reward for past in pasts])
    return block


def compute_reward_signs(rewards: Sequence[float | None]) -> np.ndarray:
    """Return [R] int8: the sign of each reward minus the mean of all that are finite; 0 near it and without
    a verdict."""
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    finite = values[np.isfinite(values)]
    mean = finite.mean() if len(finite) else 0.0
    distance = np.nan_to_num(values - mean, nan=0.0)
    return (np.sign(distance) * (abs(distance) > REWARD_TOLERANCE * max(1.0, abs(mean)))).astype(np.int8)


# ---- quantisation ----


def make_prob_table() -> np.ndarray:
    """Return [256] float32, the probability of each code, rising. 0 means context.

    Steps of 5 % from below 1e-4 to 2/3; above, where most tokens are and an error of p is an error of the
    interval's end, steps of 8.6 % of 1 - p, down to 1 - p = 5e-4; then 1.
    """
    table = np.zeros(256, np.float32)
    prob, remainder = 2 / 3, 1 / 3
    for code in range(182, 0, -1):
        table[code] = prob
        prob /= 1.05
    for code in range(183, 255):
        remainder *= 0.914
        table[code] = 1 - remainder
    table[255] = 1
    return table


PROBS = make_prob_table()


def encode_probs(probs: np.ndarray) -> np.ndarray:
    """Return [T] uint8, the nearest code of each probability, 1 or more; 1 for NaN."""
    midpoints = (PROBS[1:-1] + PROBS[2:]) / 2
    return (1 + np.searchsorted(midpoints, np.nan_to_num(probs, nan=0.0))).astype(np.uint8)


def encode_edges(edges: np.ndarray) -> np.ndarray:
    """Return [T] uint16, the nearest multiple of EDGE_STEP below 1, in these units; 0 for NaN."""
    return np.clip(np.rint(np.nan_to_num(edges) / EDGE_STEP), 0, np.iinfo(np.uint16).max).astype(np.uint16)
