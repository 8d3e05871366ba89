"""The rank of a process, and the ranks that rank 0 starts beside itself on one host.

torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) is honoured where it is there:
then a launcher has started all ranks. Otherwise ``Ranks`` starts them.

No torch here: whether a process follows another is decided before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.workers.process import Child

NEEDED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"
CLOSE_S = 10.0  # for ranks that have been ordered to end
SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
LAST_LINES = 3  # of a rank that has died, in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of ``world``, ``local_rank`` of ``local_world`` on its host, and the address where all
    meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    agent: bool = False  # whether torchrun's agent keeps the store at this address
    attempt: int = 0  # number of its restart: keys of an earlier attempt may still be in the store

    @property
    def is_local(self) -> bool:
        """Whether all ranks meet on this host, by an address that no other host reaches."""
        return self.address in (LOOPBACK, "localhost")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place | None:
        """The place that torchrun's ``environ`` gives; None if one of its variables is missing, or if there
        is one rank.

        Raises ValueError naming a variable that is no number or out of range.
        """
        if not all(environ.get(name) for name in NEEDED_VARIABLES):
            return None
        world = _read_number(environ, "WORLD_SIZE", 1, None)
        if world == 1:
            return None
        local_world = (
            _read_number(environ, "LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in environ else 1
        )
        return cls(
            rank=_read_number(environ, "RANK", 0, world - 1),
            world=world,
            local_rank=_read_number(environ, "LOCAL_RANK", 0, world - 1) if "LOCAL_RANK" in environ else 0,
            local_world=local_world,
            address=environ["MASTER_ADDR"],
            port=_read_number(environ, "MASTER_PORT", 1, 65535),
            agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        )

    def environment(self) -> dict[str, str]:
        """The variables from which ``of`` makes this place."""
        values = (self.rank, self.world, self.local_rank, self.local_world, self.address, self.port)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {name: str(value) for name, value in zip(names, values, strict=True)}


def local_place(world: int, port: int, rank: int = 0) -> Place:
    """The place of a rank of ``world`` on this host alone."""
    shared_fields = {"local_rank": rank, "local_world": world, "address": LOOPBACK}
    return Place(rank=rank, world=world, port=port, **shared_fields)


def _read_number(environ: Mapping[str, str], name: str, minimum: int, maximum: int | None) -> int:
    """The variable ``name`` as an integer. Raises ValueError where it is none from ``minimum`` to
    ``maximum``."""
    text = environ[name]
    if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
        bound = f"from {minimum} to {maximum}" if maximum is not None else f"of {minimum} or more"
        raise ValueError(f"{name} is {text!r}, no whole number {bound}; start the ranks with torchrun")
    return int(text)


class Ranks:
    """Ranks 1 to ``world`` - 1 of this host, children of this process, which is rank 0.

    They end with this process, however it ends (``workers.process``). What a rank prints goes to
    ``folder``/rank-N.log.
    """

    def __init__(self, children: Mapping[int, Child], folder: Path) -> None:
        self._children, self._folder = children, folder

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        world: int,
        port: int,
        folder: Path,
        command: Sequence[str] = (),
        threads: int | None = None,
    ) -> Iterator[Ranks]:
        """Start ``command`` (by default this program, as a follower) for each rank but 0, with a new log; at
        the end of the context all are ended. ``threads``: of each rank; None: an equal share of the cores."""
        folder.mkdir(parents=True, exist_ok=True)
        command = command or [sys.executable, "-m", "ostinato", "rank"]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        rank_environment = {
            "OMP_NUM_THREADS": str(threads or max(1, cores // world)),
            "GLOO_SOCKET_IFNAME": loopback(),
        }
        children: dict[int, Child] = {}
        ranks = cls(children, folder)
        try:
            for rank in range(1, world):
                environment = (
                    dict(os.environ) | rank_environment | local_place(world, port, rank).environment()
                )
                log = folder / f"rank-{rank}.log"
                log.unlink(missing_ok=True)
                children[rank] = Child(command, log=log, lifeline=True, environ=environment)
            yield ranks
        finally:
            ranks.close()

    def find_ended(self) -> dict[int, str]:
        """The endings, in words, of the ranks that have ended, by rank."""
        ending_by_rank = {rank: child.describe_end() for rank, child in self._children.items()}
        return {
            rank: self._describe_rank_end(rank, ending) for rank, ending in ending_by_rank.items() if ending
        }

    def _describe_rank_end(self, rank: int, ending: str) -> str:
        """``ending`` in words, with the last lines that the rank printed."""
        lines = self._children[rank].last_lines(LAST_LINES)
        log = self._folder / f"rank-{rank}.log"
        return f"ended: {ending}" + (f"; its last lines, in {log}: {lines}" if lines else "")

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait ``within_s`` for the ranks to end, and kill those that have not."""
        deadline = time.monotonic() + within_s
        for child in self._children.values():
            child.wait(deadline - time.monotonic())
        for child in self._children.values():
            child.close(0.0)


def loopback() -> str:
    """The loopback interface, for GLOO_SOCKET_IFNAME: gloo would query a resolver otherwise."""
    return "lo0" if sys.platform == "darwin" else "lo"


def choose_interface(place: Place, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME in ``environ`` to the interface by which the other ranks are reached, unless it
    is set already or the interface cannot be found. By itself gloo takes the address to which the name of
    this host resolves, often one that no other host reaches."""
    if "GLOO_SOCKET_IFNAME" in environ:
        return
    if interface := loopback() if place.is_local else find_interface(place.address):
        environ["GLOO_SOCKET_IFNAME"] = interface


def find_interface(address: str) -> str | None:
    """The network interface by which this host reaches ``address``; None where that cannot be found."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket sends nothing for it
            own_address = socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return None
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = name.encode()[:15].ljust(256, b"\0")
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if reply[20:24] == own_address:
                    return name
    return None
