"""Run folders of the models that clients train, for ``ostinato report``."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from ostinato.files import atomic_write
from ostinato.observe.ledger import Ledger
from ostinato.run import RunFolder
from ostinato.train.accumulate import Row, Scored

RecordMachine = Callable[[RunFolder], None]  # records the machine that works on a run from now on
log = logging.getLogger(__name__)
TOTALS = {"total/sampled_tokens": "sampled", "total/trained_tokens": "trained"}


class Record:
    """The run folder of a model while a process has it loaded: a row and the cost of each optim_step.

    Rows after ``step`` are written again as their requests run again; the ledger keeps the cost of both runs.
    Answers count in the step after them; answers of a process that is killed before that step are in no row.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], step: int, start: RecordMachine) -> None:
        self._run, self._stack, self._sampling = RunFolder(path), ExitStack(), threading.Lock()
        if not self._run.recipe.is_file():
            shutil.rmtree(path, ignore_errors=True)  # the process was killed before it wrote the recipe
            path.mkdir(parents=True)
            atomic_write(self._run.recipe, tomli_w.dumps(recipe))
        self._run.sweep()
        self._run.truncate_after(step)
        start(self._run)
        newest_row: Mapping[str, Any] = {}
        for newest_row in self._run.metrics.rows():  # noqa: B007  only the newest row is used
            pass
        self._totals = Counter({name: int(newest_row.get(name, 0)) for name in TOTALS})
        self._ledger = Ledger(folder=self._run, why="stopped")
        self._stack.enter_context(self._ledger.session(step))
        self._step, self._step_start = step, time.monotonic()
        self._tokens, self._loss, self._busy_s = Counter[str](), 0.0, 0.0

    def count_work(
        self, rows: Sequence[Row], work: Generator[None, None, Scored]
    ) -> Generator[None, None, Scored]:
        """Wrap the ``work`` of a forward_backward; at its end, count targets with a weight or advantage."""
        busy = 0.0
        while True:
            start = time.perf_counter()
            try:
                next(work)
            except StopIteration as end:
                weights = [row.values.get("weights", row.values.get("advantages")) for row in rows]
                num_trained = sum(int(np.count_nonzero(array)) for array in weights if array is not None)
                self._tokens.update(trained=num_trained, read=sum(len(row.tokens) for row in rows))
                self._loss += end.value.loss
                self._busy_s += busy + time.perf_counter() - start
                return end.value
            busy += time.perf_counter() - start
            yield

    def count_sampled_tokens(self, tokens: int) -> None:
        """Count sampled tokens; callable from any thread."""
        with self._sampling:
            self._tokens.update(sampled=tokens)

    def take_sampled(self) -> int:
        """Return the sampled tokens that no row has yet, and count them no more."""
        with self._sampling:
            return self._tokens.pop("sampled", 0)

    def record_step(self, taken: Mapping[str, float], seconds: float) -> None:
        """Record an optim_step with its metrics ``taken``; the step alone took ``seconds``."""
        with self._sampling:
            tokens, self._tokens = self._tokens, Counter[str]()
        self._step += 1
        now = time.monotonic()
        wall_s, self._step_start = now - self._step_start, now
        self._totals.update({name: tokens[kind] for name, kind in TOTALS.items()})
        row = {f"tokens/{kind}": tokens[kind] for kind in ("sampled", "trained")}
        row |= {"num_tokens": tokens["read"], "tokens_per_s": tokens["sampled"] / wall_s, "step_time": wall_s}
        loss = {"loss": self._loss / tokens["trained"]} if tokens["trained"] else {}
        self._run.write(self._step, {**loss, **taken, **row, **self._totals})
        token_counts = {kind: tokens[kind] for kind in ("sampled", "trained")}
        self._ledger.step(self._step, wall_s, {"train": self._busy_s + seconds}, {"tokens": token_counts})
        words = [f"{name} {value:.4g}" for name, value in {**loss, **taken}.items()]
        log.info("%s step %d, %.1f s: %s", self._run.path.name, self._step, wall_s, ", ".join(words))
        self._loss = self._busy_s = 0.0

    def close(self, why: str) -> None:
        """End the record, as the process no longer has the model loaded."""
        self._ledger.why = why
        self._stack.close()
