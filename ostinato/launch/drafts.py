"""Drafts of a run: the history that they come from, kept in its folder, and the drafter on it.

A lost history only costs time, so nothing here ends a run: errors of its file are logged as warnings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ostinato.compiler import BuildError
from ostinato.config import DraftSection
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.lengths import Lengths
from ostinato.history.rules import Rules
from ostinato.history.store import History
from ostinato.pipeline.draft_metrics import Drafting, Store
from ostinato.types import Completion, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The history of a run's answers, and the drafter that reads it."""

    history: History
    drafter: HistoryDrafter

    def expect(self, request: Request) -> float:
        """See ``expect_length``."""
        return expect_length(self.history.lengths, request)

    def new_drafting(self, store: Store, saved_s: Callable[[], float]) -> Drafting:
        """Make the object that computes metrics of drafts, and adds new answers to the history by ``store``.
        ``saved_s`` returns the seconds that drafts have saved so far."""
        lengths, drafter = self.history.lengths, self.drafter
        return Drafting(store=store, lengths=lengths, drafter=drafter, saved_s=saved_s)


class SeenLengths:
    """Lengths of answers in this process, for runs without a history."""

    def __init__(self) -> None:
        self._lengths = Lengths()

    def expect(self, request: Request) -> float:
        """See ``expect_length``."""
        return expect_length(self._lengths, request)

    def observe(self, request: Request, answer: Completion) -> None:
        self._lengths.observe(request.uid, [len(answer.tokens)])


def expect_length(lengths: Lengths, request: Request) -> float:
    """Return the expected number of tokens of the answer to a request; 0 if unknown."""
    length = lengths.predict(request.uid)
    return length if math.isfinite(length) else 0.0


def new_memory(section: DraftSection, saved: Path | None) -> Memory | None:
    """Make the memory of a run, from the file ``saved`` if that is not None and readable, else empty. Returns
    None if the recipe has no drafts, or, with a warning, if the native code cannot be built."""
    if not section.enabled:
        return None
    try:
        history = load_history(saved) if saved else None
        if history is None:
            history = History()
    except BuildError as error:
        logger.warning(f"nothing is drafted: {error}")
        return None
    return Memory(history=history, drafter=HistoryDrafter(history, Rules()))


def load_history(path: Path) -> History | None:
    """Return the history in ``path``; None, with a warning, if it is missing or cannot be used. Raises
    BuildError if the native code cannot be built."""
    try:
        return History.load(path)
    except (OSError, ValueError) as error:
        logger.warning(f"the run goes on without its history, so its drafts begin anew: {error}")
        return None


def save_history(history: History, path: Path) -> None:
    """Write the history to ``path``; if that fails a warning is logged."""
    try:
        history.save(path)
    except OSError as error:
        logger.warning(f"the history was not saved, so drafts of a resumed run would begin anew: {error}")
