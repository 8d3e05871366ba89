"""One pass over the model: which rows it has, where their keys and values go, what they see.

A sequence that decodes has 1 + k rows: its last token and the k tokens of its draft, in its own blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.engine.cache import BLOCK
from ostinato.engine.sequences import SequenceTable
from ostinato.types import Drafts


@dataclass(frozen=True, slots=True, eq=False)
class ModelInput:
    """The T rows of a pass over S sequences. Rows of a sequence are consecutive, and the rows of its known
    text come before those of its draft."""

    slots: np.ndarray  # [S] in the table of sequences
    counts: np.ndarray  # [S] rows
    firsts: np.ndarray  # [S] first row
    owner: np.ndarray  # [T] int32: which sequence
    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    tables: np.ndarray  # [S, blocks] int32
    kv_slots: np.ndarray  # [T] int64: where keys and values of each row go
    policies: list[tuple[int, int, int]]  # (number, first row, last row + 1), in the order of the rows

    @property
    def attended(self) -> int:
        """Positions that the rows see, in all."""
        return int(self.positions.sum()) + len(self.positions)


NO_DRAFTS = Drafts(counts=np.zeros(0, np.int32), tokens=np.zeros(0, np.int32))


def count_draft_tokens(drafts: Drafts, sequences: int) -> np.ndarray:
    """Return the number of draft tokens of each sequence: [S] int64, zeros where nothing is drafted."""
    return drafts.counts.astype(np.int64) if len(drafts.counts) else np.zeros(sequences, np.int64)


def build_model_input(
    table: SequenceTable, slots: np.ndarray, counts: np.ndarray, drafts: Drafts
) -> ModelInput:
    """Make the input of a pass over the sequences ``slots``: ``counts`` rows of known text, then ``drafts``.

    ``drafts.counts`` is aligned with ``slots``, or empty where nothing is drafted. The blocks must be
    allocated already.
    """
    rows = counts + count_draft_tokens(drafts, len(slots))
    ends = np.cumsum(rows)
    firsts, T = ends - rows, int(ends[-1])
    owner = np.repeat(np.arange(len(slots), dtype=np.int32), rows)
    offset = np.arange(T) - firsts[owner]
    positions = table.computed[slots][owner] + offset
    tokens = np.empty(T, np.int64)
    if len(drafts.tokens):
        is_text = offset < counts[owner]
        tokens[is_text] = table.text[slots[owner[is_text]], positions[is_text]]
        tokens[~is_text] = drafts.tokens
    else:
        tokens[:] = table.text[slots[owner], positions]
    tables = table.tables[slots, : int(table.num_blocks[slots].max(initial=1))]
    kv_slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return ModelInput(
        slots,
        rows,
        firsts,
        owner,
        tokens,
        positions,
        tables,
        kv_slots,
        _find_policy_spans(table.policy[slots], ends),
    )


def _find_policy_spans(numbers: np.ndarray, ends: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (number, first row, last row + 1) of every run of rows of one policy.

    ``numbers`` [S]: policies of the sequences; ``ends`` [S]: last row + 1 of each.
    """
    last_idx = np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True))
    stops = ends[last_idx].tolist()
    return list(zip(numbers[last_idx].tolist(), [0, *stops[:-1]], stops, strict=True))
