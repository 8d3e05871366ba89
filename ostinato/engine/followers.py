"""The other ranks of a sampler: processes that rank 0 starts, tells what to do, and takes with it at its end.

    rank 0 (sharded.ShardedRunner)              rank k (follower.py)
    Begin                              ---->    torch, its share of the weights
    Allocate, Serve, Pass, Draw        ---->    does what rank 0 does; collectives meet in parallel.own_mesh
                                       <----    Answer, to Begin and Serve; with a fault when it cannot go on
    end of the stream                  ---->    ends

Orders go through a socket of each rank, not through a collective: a sampler may rest for hours, in which no
time limit runs, and the end of a stream tells either side that the other has ended, however it did. Within a
pass every wait is bounded by the time limit of the collectives. When a rank is lost, all end, and every later
order is refused with the same sentence.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.parallel.watch import RankLost, clock, last_line

GRACE_S = 2.0  # for the others to end, or to say what is wrong, once something is
CLOSE_S = 5.0  # for ranks that were told to end
_HEADER = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a rank has to know before it can load its share."""

    folder: str  # of the model
    dtype: str
    fp32_head: bool
    layout: str
    rank: int
    port: int  # where the ranks meet
    timeout_s: float
    native: bool
    shared: bool  # map the host's copy of this share


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make a cache of so many blocks."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Run with these adapters, which are the rank's own part (``wire.pack``); b"": the base."""

    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Run these rows, whose fields are those of ``paged.Rows``, after copying blocks (sources, targets)."""

    tokens: np.ndarray
    positions: np.ndarray
    rows: dict[str, np.ndarray]
    copies: Sequence[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class Draw:
    """Give rank 0 the own part of the logits of these rows of the last pass; None: of all."""

    rows: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``text``: of what was asked. ``fault``: why this rank cannot go on; ``waited``: it fell while it waited
    for others, which is then not its own fault."""

    text: str = ""
    fault: str = ""
    waited: bool = False


class Channel:
    """Messages over a socket. They are pickles: both ends are this program."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: object) -> None:
        """Raises OSError where the other side has gone, TimeoutError where it does not read."""
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_HEADER.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """Raises EOFError where the other side has gone, TimeoutError where it says nothing."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        return pickle.loads(self._read(size))

    def limit(self, seconds: float | None) -> None:
        """Of each wait from now on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other side has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Follower:
    """A rank's process, as rank 0 sees it."""

    def __init__(self, begin: Begin, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ostinato.engine.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C is rank 0's to handle
                env=_environment(threads),
            )
        self.rank, self.channel = begin.rank, Channel(ours)
        self.fault: Answer | None = None
        self._start, self._finish = begin, weakref.finalize(self, _end, self._process, self.channel)

    def begin(self, timeout_s: float) -> None:
        self.channel.limit(timeout_s)
        self.channel.send(self._start)

    def listen(self, seconds: float) -> None:
        """Take what it has to say for itself, if it says so in time."""
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            self.channel.limit(seconds)
            while self.fault is None:
                answer = self.channel.receive()
                self.fault = answer if isinstance(answer, Answer) and answer.fault else None

    @property
    def code(self) -> int | None:
        """How its process has ended; None while it runs."""
        return self._process.poll()

    @property
    def is_well(self) -> bool:
        """As far as one can see from here: it runs, and has not said that it cannot go on."""
        return self.code is None and self.fault is None

    def end(self) -> None:
        self._finish()

    def __str__(self) -> str:
        return f"rank {self.rank} of the sampler (process {self._process.pid})"


class Followers:
    """Ranks 1 and up. Raises RankLost, naming whoever is lost, from everything that needs them all."""

    def __init__(self, begins: Sequence[Begin], *, threads: int, timeout_s: float) -> None:
        self._timeout_s, self._lost = timeout_s, ""
        self._ranks = [Follower(begin, threads) for begin in begins]
        for rank in self._ranks:
            rank.begin(timeout_s)

    def check(self) -> None:
        """Are all there, as far as one can see without asking?"""
        if self._lost:
            raise RankLost(self._lost)

    def tell(self, message: object, place: int | None = None) -> None:
        """One message to all, or to the one at ``place`` from 0."""
        for rank in self._ranks if place is None else self._ranks[place : place + 1]:
            rank.channel.send(message)

    def answers(self, within_s: float | None = None) -> list[str]:
        """What each of them says next."""
        told = []
        for rank in self._ranks:
            rank.channel.limit(within_s or self._timeout_s)
            answer = rank.channel.receive()
            rank.channel.limit(self._timeout_s)
            if answer.fault:
                rank.fault = answer
                raise EOFError(answer.fault)
            told.append(answer.text)
        return told

    def broken(self, doing: str, error: BaseException) -> BaseException:
        """What to raise after ``error`` in something that all do together: a RankLost where others are to
        blame, the error itself where it is rank 0's own. Either way they are out of step, and end."""
        if self._lost:
            return RankLost(self._lost)
        if not is_waiting(error):
            self._lost = f"the sampler was given up in {doing}, when its rank 0 raised {last_line(error)}"
            self.close(0.0)
            return error
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(one.is_well for one in self._ranks):
            for one in self._ranks:
                one.listen(0.05)
        self._lost = f"{self._verdict(error)}, in {doing} (noticed at {clock()}); start the sampler again"
        self.close(0.0)
        return RankLost(self._lost)

    def _verdict(self, error: BaseException) -> str:
        """Whom it is to be blamed on: who died, else who failed by itself, else who is silent."""
        dead = {one: f"ended with {_code(one.code)}" for one in self._ranks if one.code and one.fault is None}
        own = {one: f"raised {one.fault.fault}" for one in self._ranks if one.fault and not one.fault.waited}
        silent = {one: f"has not answered for {self._timeout_s:g} s" for one in self._ranks if one.is_well}
        broken = {one: f"lost a connection: {last_line(error)}" for one in self._ranks}
        found = dead or own or silent or broken
        return "; ".join(f"{one} {what}" for one, what in found.items())

    def close(self, within_s: float = CLOSE_S) -> None:
        """End them; they have ``within_s`` to do so by themselves."""
        self._lost = self._lost or "the sampler's ranks have been closed"
        for one in self._ranks:
            one.channel.close()
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and any(one.code is None for one in self._ranks):
            time.sleep(0.02)
        for one in self._ranks:
            one.end()


def is_waiting(error: BaseException) -> bool:
    """Was it raised where a rank waits for others: in a collective, or at a channel?"""
    if isinstance(error, EOFError | ConnectionError | TimeoutError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = Path(frames[-1].filename) if frames else Path()
    return "distributed" in last.parts or last.name in ("links.py", "own_mesh.py")


def _code(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def _environment(threads: int) -> dict[str, str]:
    """Ours, with our package in sight and cores to share."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    waits = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}  # of ranks that wait for each other
    return {**os.environ, **waits, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


__all__ = [
    "Allocate",
    "Answer",
    "Begin",
    "Channel",
    "Draw",
    "Followers",
    "Pass",
    "Serve",
    "is_waiting",
]
