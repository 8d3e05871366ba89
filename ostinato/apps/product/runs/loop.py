"""The continual loop of a product in a folder: each stage's work, then one row of its journal.

    FOLDER/decisions.jsonl (the state)  serving.json (what servers answer with)  bank.jsonl (known exploits)
           revisions/HASH/ (adapters, never changed)  round-001/{window,judge,policy}/

A stage that was killed is done again: its runs go on from their checkpoints, and its files are written
atomically. Every row of the journal is final; ``serving.json`` follows from the last row.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ostinato.apps.product.loop import Decision, Finding, Position, Stage, advance, replay_journal
from ostinato.apps.product.rewards import Table, read_table
from ostinato.apps.product.runs.settings import ProductSettings
from ostinato.apps.product.runs.window import collect_pairs
from ostinato.apps.product.store import Store
from ostinato.files import atomic_write
from ostinato.launch import RunFailed
from ostinato.run import Jsonl, atomic_folder

log = logging.getLogger(__name__)


Work = Callable[["ProductLoop", Position], Finding]


class ProductLoop:
    """The loop in ``folder``. It begins after the last row of the journal, copies the first hack bank there
    and writes serving.json. ``work`` has the function of each stage but ``COLLECT``. ``now`` returns the
    event time up to which feedback has come in. ``wait`` waits until there may be more feedback."""

    def __init__(
        self,
        settings: ProductSettings,
        folder: Path,
        store: Store,
        work: Mapping[Stage, Work],
        now: Callable[[], float] = time.time,
        wait: Callable[[], None] | None = None,
    ) -> None:
        folder = folder.absolute()  # servers elsewhere read the paths in serving.json
        self.settings, self.folder, self.store, self.now = settings, folder, store, now
        self.wait = wait or (lambda: time.sleep(settings.collect.look_s))
        self.table: Table = read_table(settings.rewards)
        self.bank = folder / "bank.jsonl"
        self._work = {Stage.COLLECT: collect_feedback, **work}
        self._journal = Jsonl(folder / "decisions.jsonl")
        self.at = replay_journal(list(self._journal.rows()))
        if settings.bank is not None and not self.bank.exists():
            atomic_write(self.bank, settings.bank.read_bytes())
        self._publish()

    def step(self) -> Decision:
        """Do the work of the next stage, append the decision to the journal, write serving.json and return
        the decision."""
        before, start = self.at, time.monotonic()
        finding = self._work[before.stage](self, before)
        after, words = advance(before, finding)
        finding = replace(finding, figures={**finding.figures, "seconds": time.monotonic() - start})
        decision = Decision(ts=self.now(), before=before, finding=finding, after=after, what=words)
        self._journal.append(decision.row())
        self.at = after
        self._publish()
        log.info(f"round {before.round}   {before.stage:<13} {words}   {'; '.join(finding.reasons)}".rstrip())
        return decision

    def run(self, rounds: int) -> None:
        """Run the loop until ``rounds`` rounds have ended, counted from the first."""
        while self.at.round < rounds or self.at.stage is not Stage.COLLECT:
            self.step()

    def until(self) -> float:
        """Return the time at which a window may end. Its events have come by then, except those that are
        later than ``lateness_s``, which belong to no window."""
        return self.now() - self.table.lateness_s

    # ---- folders

    def round_folder(self, at: Position) -> Path:
        return self.folder / f"round-{at.round:03d}"

    def keep(self, adapter: Path) -> str:
        """Copy an adapter's folder into ``revisions`` for good, unless it is there, and return its
        revision."""
        revision = hash_folder(adapter)
        target = self.folder / "revisions" / revision
        if not target.exists():
            with atomic_folder(target) as temporary:
                shutil.copytree(adapter, temporary, dirs_exist_ok=True)
        return revision

    def adapter_of(self, revision: str) -> Path | None:
        """Return the folder of a revision's adapter; None for "", the base. Raises RunFailed if the folder is
        missing or its bytes have changed."""
        if not revision:
            return None
        folder = self.folder / "revisions" / revision
        if not folder.is_dir() or hash_folder(folder) != revision:
            raise RunFailed(f"the adapter in {folder} is not what it was; put the kept bytes back")
        return folder

    def _publish(self) -> None:
        """Write serving.json: the current policy, and the candidate at the stage of the canary."""
        at, current = self.at, self.adapter_of(self.at.policy)
        base = self.settings.policy.base and str(Path(self.settings.policy.base).absolute())
        facts = {
            "round": at.round,
            "policy": {"revision": at.policy, "adapter": str(current or base) or None},
        }
        if at.stage is Stage.CANARY:
            canary = self.adapter_of(at.candidate)
            share = self.settings.canary.share
            facts["canary"] = {"revision": at.candidate, "adapter": str(canary), "share": share}
        atomic_write(self.folder / "serving.json", json.dumps(facts, indent=1))


def hash_folder(folder: Path) -> str:
    """Hash the bytes and names of all files of a folder: sixteen hex digits."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        total.update(f"{file.relative_to(folder)} {len(data)}\n".encode() + data)
    return total.hexdigest()[:16]


def collect_feedback(loop: ProductLoop, at: Position) -> Finding:
    """Wait for the pairs of a window; fewer are needed after an alarm."""
    settings = loop.settings.collect
    needed = settings.refresh_pairs if at.refresh else settings.pairs
    pairs, counts = wait_for(loop, at, needed)
    return Finding(figures={"pairs": pairs, "needed": needed, **counts})


def wait_for(loop: ProductLoop, at: Position, needed: int) -> tuple[int, dict[str, int]]:
    """Wait until ``needed`` pairs have been decided since the last window, and log progress. Return their
    number and the counts of what gave none."""
    last_count = -1
    while True:
        pairs, counts = collect_pairs(loop.store, loop.table, at.frozen, loop.until(), loop.store.watermark())
        if len(pairs) >= needed:
            return len(pairs), counts
        if len(pairs) != last_count:
            log.info(f"round {at.round}   {at.stage:<13} {len(pairs)} of {needed} pairs so far")
        last_count = len(pairs)
        loop.wait()


def find_run(folder: Path, name: str) -> Path | None:
    """Find the last run of the recipe ``name`` ("": of any) in ``folder``, which a killed process may have
    left; None without a run."""
    return max((file.parent for file in folder.glob(f"{name}*-*/recipe.toml")), default=None)


def require_end(run: Path, why: str) -> None:
    """Raise RunFailed if a signal or a watch has ended a training run. The loop then ends too. Its next
    process does the stage again, from the last checkpoint."""
    if why not in ("done", "solved", "spent", "enough"):
        raise RunFailed(f"the run in {run} ended as {why}; ostinato product run goes on with it")
