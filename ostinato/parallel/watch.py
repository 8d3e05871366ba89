"""Signs of life of all ranks, and one verdict when one of them is lost.

    every rank   beat/3 = {beat, call, idle_s, at, waits}   once a second, through the store
    rank 0       reads all beats, judges, writes the verdict
    every rank   reads the verdict, or finds that rank 0 does not answer, and ends by it

A rank is lost when it gives no sign for ``silence_s``, when it has ended, when it has raised or refused
what others have not, or when it gets on with nothing for ``timeout_s`` while the others wait. What it gets
on with are passes, finished collectives, pieces of what rank 0 sends. Seconds are counted as they pass here:
a machine that slept blames no rank.

The store is torch's, but nothing here needs torch.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from ostinato.workers.heartbeat import Heartbeat, Idle
from ostinato.workers.lost import WorkerKind, WorkerLost

BEAT_S = 1.0
GRACE_S = 5.0  # for rank 0 to raise what another rank has raised, or for a better reason to be known
STOP_S = 5.0  # for an answer of the store that is on its way
VERDICT = "verdict"
PACKAGE = Path(__file__).parents[1]
COLLECTIVES = (PACKAGE / "parallel" / "collectives.py", PACKAGE / "parallel" / "control.py")


def rank_lost(sentence: str) -> WorkerLost:
    """A rank died, hung, could not be reached or failed alone; ``sentence`` says which, where, doing what,
    for how long. No other can take its place within a run."""
    return WorkerLost(WorkerKind.RANK, sentence, final=True)


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank as it has presented itself. ``nonce``: a random number, for signatures of this meeting alone."""

    rank: int
    host: str
    pid: int
    nonce: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life. ``call``: the call the rank is in, empty between calls; ``idle_s``: since it last
    got on with it; ``at``: where it is, file:line function; ``waits``: for others, as far as can be seen;
    ``broken``: the error of a collective that it was in; ``raised``: its own error; ``refused``: how many
    calls it has answered by an error that all ranks have to raise alike."""

    beat: int
    call: str = ""
    idle_s: float = 0.0
    at: str = ""
    waits: bool = False
    broken: str = ""
    raised: str = ""
    refused: int = 0

    def doing(self) -> str:
        where = f" at {self.at}" if self.at else ""
        return f"in {self.call}{where}" if self.call else "between two calls"


@dataclass(slots=True, eq=False)
class Doing:
    """What this rank is at: written by the thread that computes, read by the one that beats."""

    progress: Callable[[], float] | None = None  # None: nothing says whether it gets on
    call: str = ""
    thread: int = 0  # its ident
    broken: str = ""
    raised: str = ""
    refused: int = 0
    _idle: Idle = field(default_factory=lambda: Idle(("", 0.0)))

    def sign(self, beat: int, passed_s: float) -> Sign:
        """``passed_s``: since the last one."""
        now = (self.call, self.progress() if self.progress else 0.0)
        busy = bool(self.call and self.progress)
        idle_s = self._idle.after(passed_s if busy else 0.0, now if busy else None)
        frame = sys._current_frames().get(self.thread) if self.call else None
        at, waits = position(frame)
        return Sign(
            beat=beat,
            call=self.call,
            idle_s=round(idle_s, 1),
            at=at,
            waits=waits,
            broken=self.broken,
            raised=self.raised,
            refused=self.refused,
        )


def position(frame: FrameType | None) -> tuple[str, bool]:
    """("trainer.py:300 _update", does it wait for other ranks?) of a stack: its innermost line of ours that
    is not of the collectives themselves; ("", False) where there is none."""
    waits = frame is not None and _is_waiting(frame)
    ours: FrameType | None = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            ours = ours if ours is not None and path in COLLECTIVES else frame
            if path not in COLLECTIVES:
                break
        frame = frame.f_back
    if ours is None:
        return "", waits
    return f"{Path(ours.f_code.co_filename).name}:{ours.f_lineno} {ours.f_code.co_name}", waits


def _is_waiting(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path in COLLECTIVES or {"torch", "distributed"} <= set(path.parts)


@dataclass(slots=True, eq=False)
class Judge:
    """Rank 0's view of the others. Pure: signs and seconds in, a sentence out."""

    members: Sequence[Member]
    silence_s: float
    timeout_s: float
    signs: dict[int, Sign] = field(default_factory=dict)
    _silent: dict[int, Idle] = field(default_factory=dict)
    _failed_s: float = 0.0

    def see(
        self, signs: Mapping[int, Sign], ended: Mapping[int, str], passed_s: float, when: str
    ) -> str | None:
        """The verdict, or None while no rank is lost. ``ended``: how ranks have ended, where that is known;
        ``passed_s``: since the last look; ``when``: it is, in words."""
        for rank in range(len(self.members)):  # those too that have not given a first sign
            beat = signs[rank].beat if rank in signs else None
            self._silent.setdefault(rank, Idle()).after(passed_s, beat)
        self.signs |= signs
        if ended:
            return self._sentence(dict(sorted(ended.items())), when)
        longest = max((idle.seconds for idle in self._silent.values()), default=0.0)
        silent = {  # with those of its host, say, that gave one a moment later
            rank: f"gave no sign of life for {idle.seconds:.0f} s"
            for rank, idle in sorted(self._silent.items())
            if longest >= self.silence_s and idle.seconds >= self.silence_s / 2
        }
        return self._sentence(silent, when) if silent else self._failure(passed_s, when)

    def _failure(self, passed_s: float, when: str) -> str | None:
        """Of ranks that all live."""
        raised = {rank: f"raised {sign.raised}" for rank, sign in sorted(self.signs.items()) if sign.raised}
        broken = {rank: sign for rank, sign in sorted(self.signs.items()) if sign.broken}
        late = {rank: s for rank, s in sorted(self.signs.items()) if s.call and s.idle_s >= self.timeout_s}
        raised = self._odd() | raised
        self._failed_s = self._failed_s + passed_s if raised or broken or late else 0.0
        if raised:
            return self._sentence(raised, when) if self._failed_s >= GRACE_S else None
        hung = {
            rank: f"hangs, for {sign.idle_s:.0f} s"
            for rank, sign in late.items()
            if not sign.waits and not sign.broken
        }
        if hung:
            return self._sentence(hung, when)
        if late and not broken and self._failed_s >= GRACE_S:
            words = {rank: f"has waited for others for {sign.idle_s:.0f} s" for rank, sign in late.items()}
            return self._sentence(words, when)
        if broken and self._failed_s >= self.silence_s + GRACE_S:  # a dead one would have been named by now
            words = {rank: f"lost a connection: {sign.broken}" for rank, sign in broken.items()}
            return self._sentence(words, when)
        return None

    def _odd(self) -> dict[int, str]:
        """Ranks that have refused what rank 0 has not, or the other way round, and not because one of the two
        is still computing its answer."""
        odd: dict[int, str] = {}
        mine = self.signs.get(0, Sign(beat=0))
        for rank, sign in sorted(self.signs.items()):
            behind = min(sign, mine, key=lambda one: one.refused)
            if sign.refused != mine.refused and (behind.waits or not behind.call):
                odd[rank] = f"has refused {sign.refused} of its calls where rank 0 refused {mine.refused}"
        return odd

    def _sentence(self, causes: Mapping[int, str], when: str) -> str:
        parts = []
        for rank, cause in causes.items():
            doing = self.signs[rank].doing() if rank in self.signs else "before its first sign of life"
            parts.append(f"{self.members[rank]} {cause}, {'last seen ' * (rank in self.signs)}{doing}")
        mine = self.signs.get(0)
        then = f", rank 0 {mine.doing()}" if mine is not None and 0 not in causes else ""
        return f"{'; '.join(parts)} (noticed at {when}{then})"


class Watch:
    """The heartbeat of this rank through the store, and the end of it when a rank is lost.

    ``on_lost`` is called once, in a thread of the watch, with the sentence. ``ended`` gives rank 0 the ranks
    that it has started itself and that have ended. ``open_store`` gives a connection of its own: a wait on a
    shared one would delay the beat.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        members: Sequence[Member],
        rank: int,
        doing: Doing,
        *,
        silence_s: float,
        timeout_s: float,
        on_lost: Callable[[str], None],
        ended: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._open, self._members, self._rank = open_store, members, rank
        self._doing, self._on_lost, self._ended = doing, on_lost, ended
        self._judge = Judge(members, silence_s, timeout_s) if rank == 0 else None
        self._store: Store | None = None
        self._beats, self._accused, self._reported = 0, "", threading.Lock()
        every_s = min(BEAT_S, silence_s / 5)
        self._heart = Heartbeat(
            self._beat, self._unreachable, every_s=every_s, silence_s=silence_s, name="watch-ranks"
        )
        self._heart.start()

    def stop(self) -> None:
        """Returns when both threads have ended, or after ``STOP_S``: a process that ends while one of them is
        in the store would abort."""
        self._heart.stop(STOP_S)

    def accuse(self, sentence: str, within_s: float) -> None:
        """End all ranks with this sentence; returns when it is written down, or after ``within_s``."""
        self._accused = sentence
        self._heart.stopped.wait(within_s)

    def _beat(self, passed_s: float) -> bool:
        """Is it over? Raises whatever the store raises."""
        store = self._store = self._store or self._open()
        self._beats += 1
        sign = self._doing.sign(self._beats, passed_s)
        store.set(f"beat/{self._rank}", json.dumps(asdict(sign)))
        if self._judge is not None:
            signs = _signs(store, len(self._members))
            verdict = self._accused or self._judge.see(signs, self._ended(), passed_s, clock())
            if verdict:
                store.set(VERDICT, verdict)
        if not store.check([VERDICT]):
            return False
        self._lose(store.get(VERDICT).decode())
        return True

    def _unreachable(self, silent_s: float, fault: str) -> None:
        sign = self._doing.sign(0, 0.0)
        why = f" ({fault})" if fault else ""
        self._lose(
            f"{self._members[0]}, where the ranks meet, could not be reached from "
            f"{self._members[self._rank]} for {silent_s:.0f} s{why}, {sign.doing()} "
            f"(noticed at {clock()})"
        )

    def _lose(self, sentence: str) -> None:
        if self._reported.acquire(blocking=False) and not self._heart.stopped.is_set():
            self._heart.stopped.set()
            self._on_lost(sentence)


def _signs(store: Store, world: int) -> dict[int, Sign]:
    """Of the ranks that have given one."""
    keys = [(rank, f"beat/{rank}") for rank in range(world)]
    return {rank: Sign(**json.loads(store.get(key))) for rank, key in keys if store.check([key])}


def clock() -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime())


def last_line(error: BaseException) -> str:
    """An exception in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
