"""Functions on n ranks of torch.distributed (gloo, this host), for tests.

    results = on_ranks(4, step_of, "d2t2", timeout_s=30)     # [step_of(rank, 4, "d2t2") for each rank]

Ranks are forked from multiprocessing's fork server, which has torch imported: they begin afresh, within
milliseconds, and none is left when the call returns. They end with this process, however that ends.

A rank that raises, dies or hangs ends all of them, and RanksFailed says what each one was doing. Warnings are
errors in the ranks where they are errors in the test.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

# torch._dynamo and its sympy: an optimizer imports them at its first step, 2 CPU seconds in every rank
PRELOADED = ["numpy.random", "torch._dynamo", "torch.distributed", "pytest", "hypothesis"]
# gloo would otherwise ask a resolver for the name of this host
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_S = 1.0  # for the other ranks to fail by themselves, once one has
DUMP_S = 0.3  # for a rank that hangs to write where
LAST_WORDS = 4000  # characters of a rank's output in an error


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has a paragraph for each rank."""


def on_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    lost: Collection[int] = (),
    group: bool = True,
) -> list[Any]:
    """``function(rank, n, *args)`` on each of n ranks, with torch.distributed initialised: results by rank.

    ``function`` is one of a module, not a lambda or a closure. Each rank has one thread and the environment
    and folder of the caller; tensors come back on the CPU and without gradients. ``timeout_s`` bounds the
    whole call, and is the timeout of the process group. Ranks in ``lost`` may die: their result is None then.
    Without ``group`` torch.distributed is left to the function.

    Raises RanksFailed when a rank raised, died or did not end in time; no process is left in any case.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            n=n,
            timeout_s=timeout_s,
            group=group,
            module=(function.__module__, str(sys.modules[function.__module__].__file__)),
            payload=pickle.dumps((function, args)),
            environment=dict(os.environ) | ENVIRONMENT,
            filters=list(warnings.filters),
            folder=folder,
        )
        ranks: list[Rank] = []
        try:
            ranks.extend(Rank.start(rank, job) for rank in range(n))
            _await(ranks, timeout_s, lost)
            _dump([one for one in ranks if one.word == "had not ended" and one.rank not in lost])
            failed = [one for one in ranks if one.word != "ended" and one.failed(lost)]
            if failed:
                first = min(failed, key=lambda one: one.seconds)
                ordered = [first, *(one for one in ranks if one is not first)]
                raise RanksFailed("\n\n".join(one.says(n) for one in ordered))
            return [None if one.value is None else pickle.loads(one.value) for one in ranks]
        finally:
            for one in ranks:
                one.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is given. ``payload``: the function and its arguments, pickled."""

    n: int
    timeout_s: float
    group: bool
    module: tuple[str, str]  # name, file
    payload: bytes
    environment: Mapping[str, str]
    filters: Sequence[Any]  # of the module warnings
    folder: str  # for the store and what ranks print


@dataclass(slots=True, kw_only=True, eq=False)
class Rank:
    """A rank and what became of it: it "ended" with a pickled value, "raised", "died" or "had not ended"."""

    rank: int
    process: Any
    pipe: connection.Connection
    output: Path
    began: float = field(default_factory=time.monotonic)
    word: str = "had not ended"
    value: bytes | None = None
    text: str = ""  # of a traceback
    seconds: float = math.inf  # until then

    @classmethod
    def start(cls, rank: int, job: Job) -> Rank:
        context = _context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, job, theirs), daemon=False)
        process.start()
        theirs.close()
        return cls(rank=rank, process=process, pipe=ours, output=_output(job.folder, rank))

    def look(self) -> None:
        """Take up its outcome, or that it died without one."""
        try:
            self.word, self.value, self.text = self.pipe.recv()
        except EOFError:
            self.process.join(2)
            code = self.process.exitcode or 0
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            self.word = f"died ({how})"
        self.seconds = time.monotonic() - self.began

    def failed(self, lost: Collection[int]) -> bool:
        return self.word == "raised" or self.rank not in lost

    def says(self, n: int) -> str:
        printed = self.output.read_text(errors="replace")[-LAST_WORDS:] if self.output.exists() else ""
        text = self.text or ("" if self.word == "ended" else printed.strip())
        seconds = min(self.seconds, time.monotonic() - self.began)
        return f"rank {self.rank} of {n} {self.word} after {seconds:.1f} s" + (f":\n{text}" if text else "")

    def end(self) -> None:
        """Kill it and what it has started."""
        for kill in (os.killpg, os.kill):  # it may not have its own group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.pipe.close()


def _output(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"


@functools.cache
def _context() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _await(ranks: Sequence[Rank], timeout_s: float, lost: Collection[int]) -> None:
    """Until all that count have ended, one has failed and the others had their grace, or time is up."""
    deadline = time.monotonic() + timeout_s
    running = {one.pipe: one for one in ranks}
    while any(one.rank not in lost for one in running.values()):
        ready = connection.wait([*running], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            one = running.pop(pipe)  # type: ignore[call-overload]
            one.look()
            if one.word != "ended" and one.failed(lost):
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _dump(hanging: Sequence[Rank]) -> None:
    """They write their stacks."""
    for one in hanging:
        with suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(DUMP_S if hanging else 0.0)


# ---- in a rank


def _rank(rank: int, job: Job, pipe: connection.Connection) -> None:
    """Never returns before it is killed: a rank that left could break connections that others still use."""
    _settle(rank, job)
    try:
        _import(*job.module)
        function, args = pickle.loads(job.payload)
        if job.group:
            _initialise(rank, job)
        answer = ("ended", pickle.dumps(_plain(function(rank, job.n, *args))), "")
    except BaseException:
        answer = ("raised", None, traceback.format_exc())
    pipe.send(answer)
    while True:
        signal.pause()


def _settle(rank: int, job: Job) -> None:
    """Its own process group, which ends with that of the test; output into a file; environment, warnings."""
    import faulthandler

    os.setpgid(0, 0)
    test = multiprocessing.parent_process()
    assert test is not None
    threading.Thread(target=lambda: (test.join(), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    output = os.open(_output(job.folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(job.environment)
    warnings.resetwarnings()
    for one in reversed(job.filters):
        warnings.filters.insert(0, one)  # type: ignore[attr-defined] (a list, in CPython)


def _import(name: str, file: str) -> None:
    """The module under the name that it has in the test, whichever way pytest has imported it."""
    if name in sys.modules:
        return
    if (Path(file).parent / "__init__.py").exists():
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _initialise(rank: int, job: Job) -> None:
    """Nothing has to be torn down: the process is killed once all have ended."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{job.folder}/store", job.n),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=job.n,
        timeout=timedelta(seconds=job.timeout_s),
    )


def _plain(value: Any) -> Any:
    """``value`` with its tensors on the CPU and without gradients, in lists, tuples and mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # a view would bring all of its storage along
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value
