"""One trainer on many ranks: rank 0 is called as any trainer is, and makes the other ranks do the same.

    loop -> ShardedTrainer.step(batch) -> store: call/7;  broadcast: "step", batch -> the local step
    others: wait for call/8 in the store -> the local step, with what was broadcast

Between two calls no rank is in a collective, so hours between two steps cause no timeout; within a call every
collective has a timeout. If a rank dies or hangs, the collectives of the others fail, and the run ends with
an error that names it (WorkerLost); a resumed run computes the same bits. The store and the group accept
everyone who reaches them: torch does not authenticate (docs/security.md).
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.launch import CLOSE_S, LOOPBACK, Place
from ostinato.types import Batch, StepReport
from ostinato.workers.remote import WorkerKind, WorkerLost, seal, unseal

MEET_S = 1800.0  # limit for all ranks to come, and to load their parts of a large model from a cold disk
DAY = timedelta(days=1)
LOOK_S = 0.05
GRACE_S = 2.0  # limit for a process that has broken a connection to end
STOP = "stop"  # the last call
Ready = Callable[[], None]
Ended = Callable[
    [], Mapping[int, str]
]  # finds the ranks that this process started and that have ended, and how


class Local(Protocol):
    """A rank's own part of the trainer. Each method but the last two is called on all ranks at once, with the
    same arguments; what rank 0 returns is used."""

    def step(self, batch: Batch) -> StepReport: ...

    def score(self, batch: Batch) -> Sequence[Any]: ...

    def adapters(self) -> Any: ...

    def tensors(self) -> Mapping[str, Any]: ...

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None: ...

    def identity(self) -> dict[str, str]: ...

    def counters(self) -> Mapping[str, int]: ...

    @property
    def progress(self) -> float:
        """A number that grows while a call makes progress."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Settings that rank 0 sends to all ranks before they meet. ``recipe``: as TOML."""

    backend: str  # of torch.distributed
    timeout_s: float  # of a collective
    recipe: str


def make_rank_lost(sentence: str) -> WorkerLost:
    """The error for a rank that died, hung, or could not be reached."""
    return WorkerLost(WorkerKind.RANK, sentence, final=True)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def is_connection_error(error: BaseException) -> bool:
    """Whether ``error`` is the error of a collective, which another rank has caused."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "c10d"))


# ---- how they meet


def keep_store(port: int = 0, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """A store kept by this process, on ``port`` of 127.0.0.1 (0: a free one); by itself torch would listen on
    every interface, whatever address it is given. Raises OSError."""
    listener = socket.create_server((LOOPBACK, port))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def meet(place: Place, within_s: float = MEET_S) -> TCPStore:
    """The store at which all ranks meet: kept by rank 0, or by torchrun's agent.

    Raises WorkerLost when no process keeps it within ``within_s``.
    """
    is_keeper, timeout = place.rank == 0 and not place.agent, timedelta(seconds=within_s)
    try:
        if is_keeper and place.is_local:
            return keep_store(place.port, timeout)
        return TCPStore(
            place.address, place.port, is_master=is_keeper, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise make_rank_lost(
            f"rank {place.rank} did not reach rank 0 at {place.address}:{place.port} within {within_s:g} s: "
            f"{describe_error(error)}"
        ) from error


class Meeting:
    """A rank among the others, by the keys of this attempt in ``store``; ``join`` makes the group of all."""

    def __init__(self, place: Place, store: Store, ended: Ended = dict) -> None:
        self.place, self._find_ended, self._calls = place, ended, 0
        self._store = PrefixStore(f"ostinato/{place.attempt}", store)
        self._group: Any = None

    def terms(self, terms: Terms | None = None) -> Terms:
        """The terms of rank 0. With ``terms``, on rank 0, publish them; without, wait for them, MEET_S at
        most."""
        if terms is not None:
            self._store.set("terms", json.dumps(asdict(terms)))
            return terms
        self._store.wait(["terms"], timedelta(seconds=MEET_S))
        return Terms(**json.loads(self._store.get("terms")))

    def all_there(self, what: str, within_s: float, late: str) -> None:
        """Say that this rank has come to ``what``, and wait until all have. On rank 0, raises WorkerLost
        naming the ranks that have ended or have not come after ``within_s``; ``late`` describes the latter.
        Other ranks wait twice as long, and then raise torch's error."""
        keys = [f"{what}/{rank}" for rank in range(self.place.world)]
        self._store.set(keys[self.place.rank], "")
        if self.place.rank:
            self._store.wait([f"{what}/all"], timedelta(seconds=2 * within_s))  # rank 0 names who is late
            return
        deadline = time.monotonic() + within_s
        while not self._store.check(keys):
            time.sleep(LOOK_S)
            if endings := self._find_ended():
                raise make_rank_lost("; ".join(f"rank {rank} {how}" for rank, how in endings.items()))
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                missing_ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {self.place.world}"
                raise make_rank_lost(f"{missing_ranks} {late} {within_s:g} s")
        self._store.set(f"{what}/all", "")

    def join(self, terms: Terms) -> None:
        """Wait for all ranks, then initialise torch.distributed and make the group of the calls, on all ranks
        at once. Raises as ``all_there`` does."""
        late = f"did not come to {self.place.address}:{self.place.port} within"
        self.all_there("here", terms.timeout_s, late)
        timeout, group = timedelta(seconds=terms.timeout_s), PrefixStore("group", self._store)
        rank, world = self.place.rank, self.place.world
        dist.init_process_group(terms.backend, store=group, rank=rank, world_size=world, timeout=timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def wait_until_built(self) -> None:
        """Wait until all ranks have loaded their part: groups are made together, and within a timeout."""
        self.all_there("built", MEET_S, "did not load their part of the model within")

    # ---- calls

    def call(self, name: str, *arguments: Any) -> None:
        """Make the other ranks call the method ``name`` of their ``Local``, and count the call. The caller
        makes the same call next."""
        self._store.set(f"call/{self._calls}", "")
        self._calls += 1
        dist.broadcast_object_list([name, seal(arguments)], 0, group=self._group)

    def wait_for_call(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call; its name and arguments. Raises dist.DistError where rank 0 is gone."""
        key = f"call/{self._calls}"
        while True:
            with contextlib.suppress(dist.DistStoreError):  # a day without a call
                self._store.wait([key], DAY)
                break
        self._calls += 1
        call: list[Any] = [None, None]
        dist.broadcast_object_list(call, 0, group=self._group)
        return call[0], unseal(call[1])

    def part(self) -> None:
        """Say goodbye after the last call. Rank 0 waits, CLOSE_S at most, until all others have: it keeps the
        store from which they read that call."""
        if self.place.rank:
            self._store.set(f"bye/{self.place.rank}", "")
            return
        keys = [f"bye/{rank}" for rank in range(1, self.place.world)]
        with contextlib.suppress(dist.DistError):
            self._store.wait(keys, timedelta(seconds=CLOSE_S))

    def name_loss(self, error: BaseException, doing: str) -> WorkerLost:
        """The error for a collective of this rank that failed by ``error``. It names the ranks that have
        ended, if this process knows of any after GRACE_S at most."""
        deadline = time.monotonic() + GRACE_S
        while not (endings := self._find_ended()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        lost_ranks = "; ".join(f"rank {rank} {how}" for rank, how in endings.items()) or "a rank was lost"
        return make_rank_lost(
            f"{lost_ranks}, as rank {self.place.rank} saw in {doing}: {describe_error(error)}"
        )


# ---- rank 0


class ShardedTrainer:
    """A ``train.PolicyTrainer`` over all ranks. After a call has raised, further calls raise WorkerLost,
    since only some ranks may have learned from the batch. The errors ``answers``, which all ranks raise
    alike, have no such consequence."""

    def __init__(self, local: Local, meeting: Meeting, answers: tuple[type[Exception], ...]) -> None:
        self._local, self._meeting, self._answers = local, meeting, answers
        self.failed = ""  # the reason to refuse calls, after one that raised anything but an answer

    def step(self, batch: Batch) -> StepReport:
        return self.call_all("step", batch)

    def score(self, batch: Batch) -> Sequence[Any]:
        return self.call_all("score", batch)

    def adapters(self) -> Any:
        return self.call_all("adapters")

    def tensors(self) -> Mapping[str, Any]:
        return self.call_all("tensors")

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        self.call_all("restore", dict(tensors), dict(counters))

    def identity(self) -> dict[str, str]:
        return self.call_all("identity")

    def counters(self) -> Mapping[str, int]:
        return self._local.counters()

    @property
    def progress(self) -> float:
        return self._local.progress

    def call_all(self, name: str, *arguments: Any) -> Any:
        """Call the method ``name`` of all ranks; the result of this one. Raises what the method raises here,
        and WorkerLost if another rank is lost or an earlier call has failed. All but ``answers`` end the
        trainer."""
        if self.failed:
            raise make_rank_lost(self.failed)
        task = f"step {self._local.counters()['steps'] + 1}" if name == "step" else name
        try:
            self._meeting.call(name, *arguments)
            return getattr(self._local, name)(*arguments)
        except self._answers:
            raise
        except BaseException as error:
            if not is_connection_error(error):
                self.failed = f"rank 0 ended {task} by {describe_error(error)}"
                raise
            lost = self._meeting.name_loss(error, task)
            self.failed = str(lost)
            raise lost from error


@contextlib.contextmanager
def lead(
    place: Place,
    store: Store,
    terms: Terms,
    new_local: Callable[[Ready], Local],
    ended: Ended = dict,
    answers: tuple[type[Exception], ...] = (),
) -> Iterator[ShardedTrainer]:
    """On rank 0, the trainer over all ranks that come to ``store``, until the context ends; then they end
    too.

    ``new_local`` is called on all ranks at once. It may make process groups once it has called its argument,
    which waits, for half an hour at most, until all ranks have loaded what they need. ``answers``: errors
    that a call raises on all ranks alike, after which they are in step as before; the same as in
    ``follow_calls``.

    Raises WorkerLost where they do not come or are lost.
    """
    meeting = Meeting(place, store, ended)
    try:
        try:
            meeting.join(meeting.terms(terms))
            trainer = ShardedTrainer(new_local(meeting.wait_until_built), meeting, answers)
        except Exception as error:
            if not is_connection_error(error):
                raise
            raise meeting.name_loss(error, "the meeting") from error
        yield trainer
        if not trainer.failed:
            meeting.call(STOP)
            meeting.part()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the others


def follow_calls(
    place: Place, new_local: Callable[[str, Ready], Local], answers: tuple[type[Exception], ...] = ()
) -> None:
    """Serve the calls of rank 0, on every other rank, until it sends the last one; then leave the group.
    ``new_local`` gets the recipe of rank 0, and the function that waits for the others (``lead``). Errors of
    ``answers`` are ignored, since rank 0 raises them.

    Raises what its own part raises, and WorkerLost where rank 0 or another rank is lost.
    """
    meeting, task = Meeting(place, meet(place)), "the meeting"
    try:
        terms = meeting.terms()
        meeting.join(terms)
        local = new_local(terms.recipe, meeting.wait_until_built)
        while True:
            task = "waiting for a call"
            name, arguments = meeting.wait_for_call()
            if name == STOP:
                break
            task = name
            with contextlib.suppress(*answers):  # rank 0 raises it too
                getattr(local, name)(*arguments)
            del arguments  # or a batch would live until the next one
        meeting.part()
        dist.destroy_process_group()
    except Exception as error:
        if not is_connection_error(error):
            raise
        raise meeting.name_loss(error, task) from error
