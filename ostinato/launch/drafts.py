"""Drafts of a run: the history that they come from, kept in its folder, and the drafter on it.

A history costs time when it is lost and nothing else, so nothing here can end a run: what goes wrong with the
file is a warning.
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
    """What a run remembers, and the drafter that reads it."""

    history: History
    drafter: HistoryDrafter

    def expect(self, request: Request) -> float:
        """See ``expected``."""
        return expected(self.history.lengths, request)

    def drafting(self, store: Store, saved_s: Callable[[], float]) -> Drafting:
        """The accounts of drafts, and what remembers the answers for the next ones."""
        lengths, drafter = self.history.lengths, self.drafter
        return Drafting(store=store, lengths=lengths, drafter=drafter, saved_s=saved_s)


class Seen:
    """Lengths of answers without a history: of this process alone."""

    def __init__(self) -> None:
        self._lengths = Lengths()

    def expect(self, request: Request) -> float:
        """See ``expected``."""
        return expected(self._lengths, request)

    def observe(self, request: Request, answer: Completion) -> None:
        self._lengths.observe(request.uid, [len(answer.tokens)])


def expected(lengths: Lengths, request: Request) -> float:
    """How many tokens the request will be answered with; 0 where nothing is known."""
    length = lengths.predict(request.uid)
    return length if math.isfinite(length) else 0.0


def new_memory(section: DraftSection, saved: Path | None) -> Memory | None:
    """The memory of a run, with what is ``saved``; None where the recipe has no drafts, or where there is
    no compiler."""
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
    """The history in ``path``; None, and a warning, where there is none or it cannot be used."""
    try:
        return History.load(path)
    except (OSError, ValueError) as error:
        logger.warning(f"the run goes on without its history, so its drafts begin anew: {error}")
        return None


def save_history(history: History, path: Path) -> None:
    try:
        history.save(path)
    except OSError as error:
        logger.warning(f"the history was not saved, so drafts of a resumed run would begin anew: {error}")
