"""After a pass: which rows are sampled, and how tokens are appended, up to a stop or the limit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ostinato.algo.noise import uniform
from ostinato.algo.speculate import accepted_drafts
from ostinato.engine.model_input import ModelInput, count_draft_tokens
from ostinato.engine.sampler import Drawn
from ostinato.engine.sequences import SequenceTable, Settings
from ostinato.types import Drafts, Emitted, Stop, Support

Decode = Callable[[Seq[int]], str] | None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The tokens that a pass gave to R sequences, concatenated over the sequences."""

    counts: np.ndarray  # [R] tokens
    accepted: np.ndarray  # [R] of these, those that were drafted
    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    stops: dict[int, Stop]  # by index of the sequence
    top: tuple[np.ndarray, np.ndarray] | None = None  # the likeliest of every token: ids, logprobs [n, m]

    def select_sequence(self, r: int, top: int, version: int) -> Emitted:
        """Return the tokens of sequence r, sampled by ``version``, each with the ``top`` likeliest."""
        start = int(self.counts[:r].sum())
        span = slice(start, start + int(self.counts[r]))
        likeliest: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
        if self.top is not None and top:
            likeliest = tuple(
                (ids[:top], logprobs[:top])
                for ids, logprobs in zip(*(t[span] for t in self.top), strict=True)
            )
        return Emitted(tokens=self.tokens[span], logprobs=self.logprobs[span], top=likeliest, version=version)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The inputs of the sampler for the R rows that may emit a token."""

    rows: np.ndarray | None  # [R] of the pass; None: all
    settings: Settings
    u: np.ndarray  # [R] uniforms, addressed by sequence and position
    banned: list[tuple[int, list[int] | np.ndarray]]  # (which of the R, ids or a mask: not to be drawn)
    filtered: bool  # the ids that filters keep are recorded
    top: int  # so many of the likeliest tokens are reported


def find_sampling_rows(
    table: SequenceTable, plan: ModelInput, drafts: Drafts, ready: np.ndarray
) -> SamplingRows:
    """Return, for every ready sequence, the row of its last token and the rows of its draft, in order."""
    lengths = count_draft_tokens(drafts, len(plan.slots))[ready] + 1
    heads = plan.firsts[ready] + plan.counts[ready] - lengths  # the row of the last token
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(ready)), lengths)
    rows = np.arange(len(owner)) - starts[owner] + heads[owner]
    row_slots = plan.slots[ready][owner]
    banned = [
        (row, _find_banned(table, int(row_slots[row]), int(plan.positions[rows[row]]) + 1))
        for row in np.flatnonzero(plan.positions[rows] + 1 < table.banned_until[row_slots]).tolist()
    ]
    return SamplingRows(
        rows=None if len(rows) == len(plan.tokens) else rows,
        settings=table.settings(row_slots),
        u=uniform(table.address[row_slots], plan.positions[rows] + 1),
        banned=banned,
        filtered=bool(table.filtered[row_slots].any()),
        top=int(table.top[row_slots].max(initial=0)),
    )


def _find_banned(table: SequenceTable, slot: int, position: int) -> list[int] | np.ndarray:
    """Return ids or a mask [V] of tokens that are banned at ``position``: stop tokens within the first
    ``min_tokens`` of the answer, and tokens that the constraint bans."""
    request, prompt = table.get_sequence(slot).request, int(table.prompt[slot])
    early = list(request.sampling.stop_tokens) if position < prompt + request.sampling.min_tokens else []
    if request.constraint is None:
        return early
    mask = request.constraint(table.text[slot, prompt:position])
    mask[early] = True
    return mask


def postprocess(
    table: SequenceTable,
    plan: ModelInput,
    drafts: Drafts,
    ready: np.ndarray,
    drawn: Drawn,
    versions: np.ndarray,
    decode: Decode,
) -> StepOutput:
    """Verify the drafts of the ``ready`` sequences of a pass, and append their new tokens, up to a stop or
    the limit, with their counts to the table.

    ``versions`` [R] are those of the policies that the sequences ran under. ``drawn`` has one token for the
    last token and for each draft token of every ready sequence, in order.
    """
    slots = plan.slots[ready]
    if len(drafts.tokens):
        num_drafted = drafts.counts[ready].astype(np.int64)
        accepted = accepted_drafts(num_drafted, drafts.tokens, drawn.tokens)
        rows = np.flatnonzero(_mask_leading(num_drafted + 1, accepted + 1))
    else:
        num_drafted = accepted = np.zeros(len(ready), np.int64)
        rows = np.arange(len(ready))
    num_new = accepted + 1
    counts, stops = _count_kept_tokens(table, slots, num_new, drawn.tokens[rows], decode)
    if stops:
        rows = rows[_mask_leading(num_new, counts)]
        accepted = np.minimum(accepted, counts)
    tokens, logprobs, edges = drawn.tokens[rows].astype(np.int32), drawn.logprobs[rows], drawn.edges[rows]
    token_slots, columns = slots, table.length[slots]
    if len(rows) != len(ready) or stops:
        owner = np.repeat(np.arange(len(ready)), counts)
        token_slots, versions = slots[owner], versions[owner]
        columns = columns[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    table.text[token_slots, columns], table.logprobs[token_slots, columns] = tokens, logprobs
    table.edges[token_slots, columns], table.versions[token_slots, columns] = edges, versions
    if drawn.support is not None:
        _store_support(table, token_slots, rows, drawn.support)
    table.length[slots] += counts
    table.computed[slots] = table.length[slots] - 1  # all but the newest token have been an input
    table.passes[slots] += 1
    table.drafted[slots] += num_drafted
    table.accepted[slots] += accepted
    top = None if drawn.top is None else (drawn.top[0][rows], drawn.top[1][rows])
    return StepOutput(counts, accepted, tokens, logprobs, stops, top)


def _store_support(table: SequenceTable, token_slots: np.ndarray, rows: np.ndarray, support: Support) -> None:
    """Append to every sequence with filters the ids from which its new tokens, ``rows`` of the draw, came."""
    ends = np.cumsum(support.counts, dtype=np.int64)[rows]
    is_filtered = table.filtered[token_slots]
    spans = (token_slots[is_filtered], (ends - support.counts[rows])[is_filtered], ends[is_filtered])
    for slot, start, end in zip(*(span.tolist() for span in spans), strict=True):
        table.get_sequence(slot).supports.append(
            support.ids[start:end].copy()
        )  # a view would keep all ids in memory


def _mask_leading(counts: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return a mask [sum counts] of the first limits[r] of each run of counts[r]."""
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return offset < np.repeat(limits, counts)


def _count_kept_tokens(
    table: SequenceTable, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray, decode: Decode
) -> tuple[np.ndarray, dict[int, Stop]]:
    """Return (counts [R] of the new tokens that each sequence keeps, reasons of those that stop by index)."""
    room = table.limit[slots] - table.length[slots]
    may_stop = tokens < 0
    for token in table.list_stop_tokens():
        may_stop |= tokens == token
    needs_scan = table.special[slots] | (counts >= room)
    if may_stop.any():
        owner = np.repeat(np.arange(len(slots)), counts)
        needs_scan[owner[may_stop]] = True
    stops: dict[int, Stop] = {}
    if not needs_scan.any():
        return counts, stops
    firsts, counts = np.cumsum(counts) - counts, counts.copy()
    for r in np.flatnonzero(needs_scan).tolist():
        new_tokens = tokens[firsts[r] : firsts[r] + min(int(counts[r]), int(room[r]))]
        counts[r], stop = _find_stop(table, int(slots[r]), new_tokens, decode)
        if stop is not None:
            stops[r] = stop
    return counts, stops


def _find_stop(
    table: SequenceTable, slot: int, tokens: np.ndarray, decode: Decode
) -> tuple[int, Stop | None]:
    """Return (number of the new tokens that a sequence keeps, reason to stop or None), as plain decoding
    would have ended. A token without finite logits is not kept."""
    sequence = table.get_sequence(slot)
    sampling, length, prompt = sequence.request.sampling, int(table.length[slot]), int(table.prompt[slot])
    for n, token in enumerate(tokens.tolist(), start=1):
        if token < 0:
            return n - 1, Stop.ERROR
        if token in sampling.stop_tokens:
            return n, Stop.EOS
        if sampling.stop_strings:
            assert decode is not None, "a request with stop strings was let in without a tokenizer"
            answer = np.concatenate([table.text[slot, prompt:length], tokens[:n]])
            if cut_at_string(decode, answer, sampling.stop_strings) is not None:
                return n, Stop.STRING
    return len(tokens), Stop.LENGTH if length + len(tokens) >= table.limit[slot] else None


def cut_at_string(decode: Callable[[Seq[int]], str], answer: np.ndarray, strings: Seq[str]) -> str | None:
    """Return the text of ``answer`` before the first of the stop strings, or None if it has none."""
    # a token adds at least one byte, so a new match lies within the last tokens; 4 more, since the first of
    # them may begin within a character
    recent = max(len(string.encode()) for string in strings) + 4
    tail = decode(answer[-recent:].tolist())
    if not any(string in tail for string in strings):
        return None
    text = decode(answer.tolist())
    cuts = [text.index(string) for string in strings if string in text]
    return text[: min(cuts)] if cuts else None
