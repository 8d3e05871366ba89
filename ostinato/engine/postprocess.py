"""After a pass: which rows are sampled, and how tokens are appended, up to a stop or the limit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ostinato.algo.noise import uniform
from ostinato.algo.speculate import accepted_drafts
from ostinato.engine.model_input import ModelInput, draft_counts
from ostinato.engine.sampler import Drawn
from ostinato.engine.sequences import SequenceTable, Settings
from ostinato.types import Drafts, Emitted, Stop, Support

Decode = Callable[[Seq[int]], str] | None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The tokens that a pass gave to R sequences, concatenated over the sequences."""

    counts: np.ndarray  # [R] tokens
    accepted: np.ndarray  # [R] of them, those that had been drafted
    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    stops: dict[int, Stop]  # of those that end
    top: tuple[np.ndarray, np.ndarray] | None = None  # the likeliest of every token: ids, logprobs [n, m]

    def of(self, r: int, top: int, version: int) -> Emitted:
        """The tokens of sequence r, with the ``top`` likeliest at each position, sampled by ``version``."""
        first = int(self.counts[:r].sum())
        mine = slice(first, first + int(self.counts[r]))
        best: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
        if self.top is not None and top:
            best = tuple(
                (ids[:top], logprobs[:top])
                for ids, logprobs in zip(*(t[mine] for t in self.top), strict=True)
            )
        return Emitted(tokens=self.tokens[mine], logprobs=self.logprobs[mine], top=best, version=version)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What the sampler draws for the R rows that may emit a token."""

    rows: np.ndarray | None  # [R] of the pass; None: all
    settings: Settings
    u: np.ndarray  # [R] uniforms, addressed by sequence and position
    banned: list[tuple[int, list[int] | np.ndarray]]  # (which of the R, ids or a mask: not to be drawn)
    filtered: bool  # the ids that filters keep are recorded
    top: int  # so many of the likeliest tokens are reported


def sampling_rows(table: SequenceTable, plan: ModelInput, drafts: Drafts, ready: np.ndarray) -> SamplingRows:
    """For every ready sequence, the row of its last token and the rows of its draft, in order."""
    lengths = draft_counts(drafts, len(plan.slots))[ready] + 1
    heads = plan.firsts[ready] + plan.counts[ready] - lengths  # the row of the last token
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(ready)), lengths)
    rows = np.arange(len(owner)) - starts[owner] + heads[owner]
    by_row = plan.slots[ready][owner]
    banned = [
        (row, _banned(table, int(by_row[row]), int(plan.positions[rows[row]]) + 1))
        for row in np.flatnonzero(plan.positions[rows] + 1 < table.banned_until[by_row]).tolist()
    ]
    return SamplingRows(
        rows=None if len(rows) == len(plan.tokens) else rows,
        settings=table.settings(by_row),
        u=uniform(table.address[by_row], plan.positions[rows] + 1),
        banned=banned,
        filtered=bool(table.filtered[by_row].any()),
        top=int(table.top[by_row].max(initial=0)),
    )


def _banned(table: SequenceTable, slot: int, position: int) -> list[int] | np.ndarray:
    """Ids or a mask [V] that ``position`` may not have: early stop tokens, and what the constraint bans."""
    request, prompt = table.at(slot).request, int(table.prompt[slot])
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
    """Verify the drafts of the ``ready`` sequences of the pass, and append their new tokens.

    ``versions`` [R] of the policies that they ran under. ``drawn`` has one token for the last token and for
    each draft token of every ready sequence, in order.
    """
    chosen = plan.slots[ready]
    if len(drafts.tokens):
        nodes = drafts.counts[ready].astype(np.int64)
        accepted = accepted_drafts(nodes, drafts.tokens, drawn.tokens)
        rows = np.flatnonzero(_leading(nodes + 1, accepted + 1))
    else:
        nodes = accepted = np.zeros(len(ready), np.int64)
        rows = np.arange(len(ready))
    given = accepted + 1
    counts, stops = _cut_off(table, chosen, given, drawn.tokens[rows], decode)
    if stops:
        rows = rows[_leading(given, counts)]
        accepted = np.minimum(accepted, counts)
    tokens, logprobs, edges = drawn.tokens[rows].astype(np.int32), drawn.logprobs[rows], drawn.edges[rows]
    by_token, place = chosen, table.length[chosen]
    if len(rows) != len(ready) or stops:
        owner = np.repeat(np.arange(len(ready)), counts)
        by_token, versions = chosen[owner], versions[owner]
        place = place[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    table.text[by_token, place], table.logprobs[by_token, place] = tokens, logprobs
    table.edges[by_token, place], table.versions[by_token, place] = edges, versions
    if drawn.support is not None:
        _keep(table, by_token, rows, drawn.support)
    table.length[chosen] += counts
    table.computed[chosen] = table.length[chosen] - 1  # all but the newest token have been an input
    table.passes[chosen] += 1
    table.drafted[chosen] += nodes
    table.accepted[chosen] += accepted
    top = None if drawn.top is None else (drawn.top[0][rows], drawn.top[1][rows])
    return StepOutput(counts, accepted, tokens, logprobs, stops, top)


def _keep(table: SequenceTable, by_token: np.ndarray, rows: np.ndarray, support: Support) -> None:
    """Give every sequence that has filters the ids that its new tokens, ``rows`` of the draw, came from."""
    ends = np.cumsum(support.counts, dtype=np.int64)[rows]
    filtered = table.filtered[by_token]
    spans = (by_token[filtered], (ends - support.counts[rows])[filtered], ends[filtered])
    for slot, start, end in zip(*(span.tolist() for span in spans), strict=True):
        table.at(slot).kept.append(support.ids[start:end].copy())  # a view would hold the whole draw


def _leading(counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Mask [sum counts] of the first kept[r] of each run of counts[r]."""
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return offset < np.repeat(kept, counts)


def _cut_off(
    table: SequenceTable, chosen: np.ndarray, counts: np.ndarray, tokens: np.ndarray, decode: Decode
) -> tuple[np.ndarray, dict[int, Stop]]:
    """How many of the tokens each sequence keeps, and why those end that do."""
    room = table.limit[chosen] - table.length[chosen]
    suspicious = tokens < 0
    for token in table.watched():
        suspicious |= tokens == token
    look = table.special[chosen] | (counts >= room)
    if suspicious.any():
        owner = np.repeat(np.arange(len(chosen)), counts)
        look[owner[suspicious]] = True
    stops: dict[int, Stop] = {}
    if not look.any():
        return counts, stops
    firsts, counts = np.cumsum(counts) - counts, counts.copy()
    for r in np.flatnonzero(look).tolist():
        given = tokens[firsts[r] : firsts[r] + min(int(counts[r]), int(room[r]))]
        counts[r], stop = _listen(table, int(chosen[r]), given, decode)
        if stop is not None:
            stops[r] = stop
    return counts, stops


def _listen(table: SequenceTable, slot: int, given: np.ndarray, decode: Decode) -> tuple[int, Stop | None]:
    """(tokens kept, why it ends) of one sequence, checked token by token as in plain decoding."""
    sequence = table.at(slot)
    sampling, length, prompt = sequence.request.sampling, int(table.length[slot]), int(table.prompt[slot])
    for n, token in enumerate(given.tolist(), start=1):
        if token < 0:
            return n - 1, Stop.ERROR
        if token in sampling.stop_tokens:
            return n, Stop.EOS
        if sampling.stop_strings:
            assert decode is not None, "a request with stop strings was let in without a tokenizer"
            answer = np.concatenate([table.text[slot, prompt:length], given[:n]])
            if text_before(decode, answer, sampling.stop_strings) is not None:
                return n, Stop.STRING
    return len(given), Stop.LENGTH if length + len(given) >= table.limit[slot] else None


def text_before(decode: Callable[[Seq[int]], str], answer: np.ndarray, strings: Seq[str]) -> str | None:
    """The text of ``answer`` before the first of the stop strings, or None when there is none."""
    # a token adds at least one byte, so a new match lies within the last tokens
    recent = max(len(string.encode()) for string in strings) + 4
    tail = decode(answer[-recent:].tolist())
    if not any(string in tail for string in strings):
        return None
    text = decode(answer.tolist())
    cuts = [text.index(string) for string in strings if string in text]
    return text[: min(cuts)] if cuts else None
