"""One trainer on many ranks: rank 0 is called as any trainer is, the others follow.

    loop -> ShardedTrainer.step(batch) -> Control.call("step", batch) -> local step, on every rank at once

What a rank's own trainer does, and what it says to the others meanwhile, is its own affair (``links``). Here
all of them get the same calls, and the loss of one ends the call on all, with one error and in time.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.control import Control, Terms, arrive, keyed, meet, own_store
from ostinato.parallel.launch import CLOSE_S, Place
from ostinato.parallel.watch import GRACE_S, Doing, Watch, last_line, rank_lost
from ostinato.types import Batch, StepReport
from ostinato.workers.lost import WorkerLost

T = TypeVar("T")
Ready = Callable[[], None]
BUILDING = "the building of its part"
SLICE_S = 0.2  # between two looks at the verdict while a call goes on


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
        """Grows while a call gets on."""
        ...


class Lead:
    """Rank 0's own part of every call is done in one thread of its own: a collective that nothing ends is
    left behind there, and the caller gets the verdict of the watch. ``answers``: see ``leading``."""

    def __init__(self, doing: Doing, verdict_s: float, answers: tuple[type[Exception], ...] = ()) -> None:
        self.lost = ""  # the verdict; empty while all are there
        self.answers = answers
        self._doing, self._verdict_s, self._known = doing, verdict_s, threading.Event()
        self._works: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rank-0", daemon=True)
        self._thread.start()
        doing.thread = self._thread.ident or 0

    def lose(self, sentence: str) -> None:
        """For ``Watch``."""
        self.lost = sentence
        self._known.set()

    def run(self, call: str, work: Callable[[], T]) -> T:
        """``work()``. Raises WorkerLost when a rank was lost before or meanwhile, or what ``work`` raises."""
        if self.lost:
            raise rank_lost(self.lost)
        done: Future[T] = Future()
        self._doing.call = call
        self._works.put((work, done))
        try:
            return self._result(done)
        except WorkerLost:
            raise
        except self.answers:
            self._doing.refused += 1
            raise
        except Exception as error:
            if not of_connection(error):
                raise
            self._doing.broken = last_line(error)
            self._known.wait(self._verdict_s)  # the watch finds out who it was
            raise rank_lost(self.lost or f"rank 0 lost a connection in {call}: {last_line(error)}") from error
        finally:
            self._doing.call = ""

    def _result(self, done: Future[T]) -> T:
        while True:
            try:
                return done.result(SLICE_S)
            except NotYet:
                if done.done():  # since, or by a TimeoutError of its own
                    return done.result()
                if self.lost:
                    raise rank_lost(self.lost) from None

    def _work(self) -> None:
        while (item := self._works.get()) is not None:
            work, done = item
            try:
                done.set_result(work())
            except BaseException as error:  # the edge of a thread: it is the caller's
                done.set_exception(error)
            del item, work, done  # or a batch would live until the next one
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self, within_s: float = 0.0) -> None:
        """Waited for, up to ``within_s``, where all is well; a process that ends, or trains something else,
        must not wait for a lost rank."""
        self._works.put(None)
        self._thread.join(within_s)


class ShardedTrainer:
    """What ``train.PolicyTrainer`` is to the loop, over all ranks. After a call that raised it refuses
    further ones: some rank may have learned from what another has not. Not after an answer (``leading``),
    which is that of all ranks: they stay together, and go on."""

    def __init__(self, local: Local, control: Control, lead: Lead) -> None:
        self._local, self._control, self._lead = local, control, lead
        self.failed = ""  # why, after a call that raised, and not as an answer

    def step(self, batch: Batch) -> StepReport:
        return self._together("step", batch)

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._together("score", batch)

    def adapters(self) -> Any:
        return self._together("adapters")

    def tensors(self) -> Mapping[str, Any]:
        return self._together("tensors")

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        self._together("restore", dict(tensors), dict(counters))

    def identity(self) -> dict[str, str]:
        return self._together("identity")

    def counters(self) -> Mapping[str, int]:
        return self._local.counters()

    @property
    def progress(self) -> float:
        return self._local.progress

    def _together(self, name: str, *arguments: Any) -> Any:
        if self.failed:
            raise rank_lost(self.failed)

        def work() -> Any:
            self._control.call(name, *arguments)
            return getattr(self._local, name)(*arguments)

        call = call_name(name, self._local)
        try:
            return self._lead.run(call, work)
        except self._lead.answers:
            raise
        except BaseException as error:
            lost = isinstance(error, WorkerLost)
            self.failed = str(error) if lost else f"rank 0 ended {call} by {last_line(error)}"
            raise


def call_name(name: str, local: Local) -> str:
    """A call in words: "step 7", or its name."""
    return f"step {local.counters()['steps'] + 1}" if name == "step" else name


@contextlib.contextmanager
def leading(
    place: Place,
    store: TCPStore,
    terms: Terms,
    new_local: Callable[[Ready], Local],
    ended: Callable[[], Mapping[int, str]] = dict,
    answers: tuple[type[Exception], ...] = (),
) -> Iterator[ShardedTrainer]:
    """Rank 0: the trainer over all ranks that come to ``store``, until the context ends; then they end too.

    ``new_local`` is called on all ranks at once and may make process groups, once it has called what it is
    given: that waits, for half an hour, until all ranks have loaded what they need. ``ended``: ranks that
    were started here and have ended, and how. ``answers``: what a call raises on all ranks alike, after which
    they are as much in step as before; the same as in ``following``.

    Raises WorkerLost where they do not come or are lost.
    """
    _alone(terms.timeout_s)
    keys = keyed(place, store)
    members, terms = arrive(place, keys, terms, ended)
    doing = Doing()
    lead = Lead(doing, terms.silence_s + 2 * GRACE_S, answers)
    watch = Watch(
        lambda: own_store(place, store, terms.silence_s),
        members,
        0,
        doing,
        silence_s=terms.silence_s,
        timeout_s=terms.timeout_s,
        on_lost=lead.lose,
        ended=ended,
    )
    trainer = None
    try:
        control = lead.run("the meeting", lambda: Control(place, keys, members, terms))
        local = lead.run(BUILDING, lambda: new_local(lambda: control.built(lambda: lead.lost)))
        doing.progress = lambda: local.progress + control.progress
        trainer = ShardedTrainer(local, control, lead)
        yield trainer
    except BaseException as error:
        if trainer is None or trainer.failed:
            watch.accuse(f"{members[0]} ended the run: {last_line(error)}", GRACE_S)
        raise
    finally:
        if trainer is not None and not trainer.failed and not lead.lost:
            with contextlib.suppress(WorkerLost):
                lead.run("the end", lambda: _end(control))
        watch.stop()
        lead.close(0.0 if lead.lost else CLOSE_S)


def _end(control: Control) -> None:
    control.stop()
    control.farewell(CLOSE_S)
    dist.destroy_process_group()


def _alone(within_s: float) -> None:
    """Wait for a process group that a lost rank has left behind here: its collective has an end."""
    deadline = time.monotonic() + within_s
    while dist.is_initialized():
        if time.monotonic() > deadline:
            raise rank_lost("torch.distributed is still in use in this process; begin the run in a new one")
        time.sleep(SLICE_S)


def following(
    place: Place,
    new_local: Callable[[str, Ready], Local],
    leave: Callable[[str], None],
    answers: tuple[type[Exception], ...] = (),
) -> None:
    """Every other rank: serve the calls of rank 0 until it has no more.
    ``new_local`` gets the recipe from rank 0, and what to wait for the others with (``leading``).
    ``leave`` ends the process, from any thread, with a sentence: rank 0 is lost, another rank is, or this one
    has raised and all ranks have its error.

    Raises WorkerLost where rank 0 never came.
    """
    store = meet(place)
    keys = keyed(place, store)
    members, terms = arrive(place, keys, None)
    doing = Doing(call="the meeting", thread=threading.get_ident())
    watch = Watch(
        lambda: own_store(place, store, terms.silence_s),
        members,
        place.rank,
        doing,
        silence_s=terms.silence_s,
        timeout_s=terms.timeout_s,
        on_lost=leave,
    )
    try:
        control = Control(place, keys, members, terms)
        doing.call = BUILDING
        local = new_local(terms.recipe, control.built)
        doing.progress = lambda: local.progress + control.progress
        _serve(local, control, doing, answers)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        word = last_line(error)
        doing.broken, doing.raised = (word, "") if of_connection(error) else ("", word)
        time.sleep(terms.timeout_s + terms.silence_s)  # the watch ends the process, long before
        leave(f"{members[place.rank]} raised {word}, and no other process has its error")
    watch.stop()
    control.bye()
    dist.destroy_process_group()


def _serve(local: Local, control: Control, doing: Doing, answers: tuple[type[Exception], ...] = ()) -> None:
    doing.call = ""
    while (call := control.awaited()) is not None:
        name, arguments = call
        doing.call = call_name(name, local)
        try:
            getattr(local, name)(*arguments)
        except answers as answer:  # rank 0 raises it too, or the watch finds out
            print(f"{doing.call}: {last_line(answer)}", file=sys.stderr, flush=True)
            doing.refused += 1
        doing.call = ""
        del call, arguments


def of_connection(error: BaseException) -> bool:
    """Is it a collective that failed, because of another rank, and not what this one has done?"""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "c10d"))
