"""What an engine was busy with, pass by pass, as spans of the timeline."""

from __future__ import annotations

import time
from collections import deque

from ostinato.observe.timeline import GAP_S, Kind, Span

MOST = 10_000  # spans that are kept where nobody takes them: the newest


class Busy:
    """Neighbouring passes of one kind are one span, so that a pass costs a microsecond and no memory."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._spans: deque[list[float]] = deque(maxlen=MOST)  # [is prefill, start, stop, rows, seconds]

    def passed(self, seconds: float, prefilled: int, sampled: int) -> None:
        """A pass of so many seconds has just ended; the kind of most of its rows is its kind."""
        stop = time.time()
        start, prefill = stop - seconds, prefilled > sampled
        if self._spans:
            last = self._spans[-1]
            if last[0] == prefill and start - last[2] <= GAP_S:
                last[2:] = stop, last[3] + prefilled + sampled, last[4] + seconds
                return
        self._spans.append([prefill, start, stop, prefilled + sampled, seconds])

    def take(self) -> list[Span]:
        """What there was since it was last asked, in order."""
        spans = [
            Span(
                worker=self._worker,
                kind=Kind.PREFILL if prefill else Kind.DECODE,
                start=start,
                stop=stop,
                amount=int(rows),
                busy=busy,
            )
            for prefill, start, stop, rows, busy in self._spans
        ]
        self._spans.clear()
        return spans


__all__ = ["Busy"]
