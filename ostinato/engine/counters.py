"""Counters of an engine, which only grow, and its passes as spans of the timeline."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from ostinato.observe.timeline import GAP_S, Kind, Span


@dataclass(slots=True)
class Counters:
    """Counts and seconds since the engine was made."""

    steps: int = 0
    prefilled: int = 0  # tokens run to fill the cache
    padded: int = 0  # positions before shorter prompts, run with them
    decoded: int = 0  # tokens sampled
    cached: int = 0  # prompt tokens found in the prefix tree
    preempted: int = 0
    errors: int = 0
    drafted: int = 0  # draft tokens run
    accepted: int = 0  # draft tokens that equalled the sampled token
    cut_drafts: int = 0  # draft tokens dropped because no KV block was free
    passes: int = 0  # sequences that were given tokens, summed over steps
    seconds: float = 0.0  # in steps, drafting included
    seconds_without: float = (
        0.0  # that plain decoding would have taken for the same tokens, by the cost table
    )


MOST = 10_000  # the newest spans, kept where nothing collects them


class Busy:
    """Records passes. Consecutive passes of one kind become one span, so that a pass costs a microsecond and
    no memory. Only the newest MOST spans are kept."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._spans: deque[list[float]] = deque(maxlen=MOST)  # [is prefill, start, stop, rows, seconds]

    def record_pass(self, seconds: float, prefilled: int, sampled: int) -> None:
        """Record a pass of ``seconds`` that ends now. It counts as prefill if more tokens were ``prefilled``
        than ``sampled``; it extends the last span if that is of the same kind and ended less than GAP_S
        ago."""
        stop = time.time()
        start, is_prefill = stop - seconds, prefilled > sampled
        if self._spans:
            last_span = self._spans[-1]
            if last_span[0] == is_prefill and start - last_span[2] <= GAP_S:
                last_span[2:] = stop, last_span[3] + prefilled + sampled, last_span[4] + seconds
                return
        self._spans.append([is_prefill, start, stop, prefilled + sampled, seconds])

    def take(self) -> list[Span]:
        """Return the spans since the last call, in order, and clear them."""
        spans = [
            Span(
                worker=self._worker,
                kind=Kind.PREFILL if is_prefill else Kind.DECODE,
                start=start,
                stop=stop,
                amount=int(rows),
                busy=busy,
            )
            for is_prefill, start, stop, rows, busy in self._spans
        ]
        self._spans.clear()
        return spans
