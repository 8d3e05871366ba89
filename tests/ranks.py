"""Functions on n ranks of torch.distributed (gloo, this host), for tests.

    results = on_ranks(4, step_of, "d2t2", timeout_s=30)     # [step_of(rank, 4, "d2t2") for each rank]

The first call starts a fork server that has torch imported; every call forks its ranks from it, so that they
begin afresh, within milliseconds, and leave nothing behind. It ends with this process, however that ends.

    test -- job --> server -- fork --> ranks -- result or traceback --> server -- outcomes --> test

A rank that raises, dies or hangs ends all of them, and RanksFailed tells what each one was doing. Warnings
are errors in the ranks where they are errors in the test.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

# torch._dynamo and its sympy: an optimizer imports them at its first step, 2 CPU seconds in every rank
PRELOADED = ("numpy.random", "torch._dynamo", "torch.distributed", "pytest", "hypothesis")
# before torch is imported; gloo would otherwise ask a resolver for the name of this host
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_S = 1.0  # for the other ranks to fail by themselves, once one has
DUMP_S = 0.3  # for a rank that hangs to write where
STARTS_S = 120.0  # for the server to import torch on a busy machine
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
    file = sys.modules[function.__module__].__file__
    job = Job(
        n=n,
        timeout_s=timeout_s,
        lost=tuple(lost),
        group=group,
        module=(function.__module__, str(file)),
        payload=pickle.dumps((function, args)),
        path=list(sys.path),
        folder=os.getcwd(),
        environment=dict(os.environ) | ENVIRONMENT,
        filters=list(warnings.filters),
    )
    outcomes = _asked(job)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        first = min(failed, key=lambda outcome: outcome.seconds)
        ordered = [first, *(outcome for outcome in outcomes if outcome is not first)]
        raise RanksFailed("\n\n".join(outcome.told(n) for outcome in ordered))
    return [None if outcome.value is None else pickle.loads(outcome.value) for outcome in outcomes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the server is asked for. ``payload``: the function and its arguments, pickled."""

    n: int
    timeout_s: float
    lost: Sequence[int]
    group: bool
    module: tuple[str, str]  # name, file
    payload: bytes
    path: list[str]
    folder: str
    environment: Mapping[str, str]
    filters: list[Any]  # of the module warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a rank after ``seconds``: "ended" with a pickled value, "raised", "died" or
    "had not ended"."""

    rank: int
    word: str
    seconds: float
    text: str = ""  # the traceback, and for the last two what it wrote last
    value: bytes | None = None
    failed: bool = True

    def told(self, n: int) -> str:
        text = f":\n{self.text}" if self.text else ""
        return f"rank {self.rank} of {n} {self.word} after {self.seconds:.1f} s{text}"


# ---- the test's side


def _asked(job: Job) -> list[Outcome]:
    """What the server answers; it ends where the wait for it was broken off, and begins anew next time."""
    link = _server()
    try:
        link.settimeout(STARTS_S + job.timeout_s + GRACE_S)
        _send(link, job)
        answer = _receive(link)
        if answer is None:
            raise RanksFailed("the fork server of the ranks has ended; its last words are on stderr")
        return answer
    except BaseException:
        link.close()  # it ends its ranks, and itself
        _server.cache_clear()
        raise


@functools.cache
def _server() -> socket.socket:
    """The link to the fork server of this process."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ) | ENVIRONMENT
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import ranks; "
    command = [sys.executable, "-c", begin + f"ranks.serve({theirs.fileno()})"]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(_close, ours, process)
    return ours


def _close(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    link.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    link.sendall(struct.pack("!Q", len(data)) + data)


def _receive(link: socket.socket) -> Any:
    """The next value; None when the other end is closed."""
    head = _exactly(link, 8)
    data = head and _exactly(link, struct.unpack("!Q", head)[0])
    return pickle.loads(data) if data else None


def _exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


# ---- the server's side: one thread, or forking would not be safe


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A rank as the server sees it."""

    rank: int
    pid: int
    pipe: int  # its outcome comes out of here
    output: BinaryIO
    data: bytearray = field(default_factory=bytearray)
    ended_s: float | None = None

    @property
    def whole(self) -> bool:
        """Has all of its outcome arrived? What it has started may hold its pipe for longer."""
        return len(self.data) >= 8 and len(self.data) - 8 >= struct.unpack("!Q", self.data[:8])[0]

    def outcome(self) -> tuple[str, bytes | None, str]:
        """("ended" or "raised", the pickled value, the traceback)."""
        return pickle.loads(memoryview(self.data)[8:])

    def last_words(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-LAST_WORDS:].strip()


def serve(descriptor: int) -> None:
    """Jobs from the socket with this descriptor, until its other end is closed."""
    link = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which then closes the link
    for name in PRELOADED:
        importlib.import_module(name)
    while (job := _receive(link)) is not None:
        sys.path[:] = job.path
        try:
            _import(*job.module)
        except Exception:
            text = f"importing {job.module[0]} failed:\n{traceback.format_exc()}"
            outcomes = [Outcome(rank=0, word="did not begin", seconds=0.0, text=text)]
        else:
            outcomes = _run(job, link)
        _send(link, outcomes)


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
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _run(job: Job, link: socket.socket) -> list[Outcome]:
    store = tempfile.mkdtemp(prefix="ranks-")
    start = time.monotonic()
    children: list[Child] = []
    try:
        for rank in range(job.n):
            children.append(_forked(job, rank, f"{store}/store", link))
        _await(children, job, link, start)
        running = [child for child in children if child.ended_s is None and child.rank not in job.lost]
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGUSR1)  # it writes its stack
        time.sleep(DUMP_S if running else 0.0)
        return [_outcome(child, job, time.monotonic() - start) for child in children]
    finally:
        for child in children:
            _end(child)
        shutil.rmtree(store, ignore_errors=True)


def _forked(job: Job, rank: int, store: str, link: socket.socket) -> Child:
    output = tempfile.TemporaryFile()  # noqa: SIM115 (the child writes, the server reads and closes)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            link.close()
            _rank(job, rank, store, output, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)  # before the next fork: the end of a rank is the end of its pipe
    return Child(rank=rank, pid=pid, pipe=reading, output=output)


def _await(children: Sequence[Child], job: Job, link: socket.socket, start: float) -> None:
    """Until every rank that counts has ended, one has failed and the others had their grace, or time is up.
    Exits where the test has gone."""
    deadline = start + job.timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ, None)
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while any(child.ended_s is None for child in children if child.rank not in job.lost):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in selector.select(left):
                if key.data is None:
                    for child in children:
                        _end(child)
                    os._exit(0)
                part = os.read(child.pipe, 1 << 20) if (child := key.data) else b""
                child.data += part
                if not part or child.whole:
                    selector.unregister(child.pipe)
                    child.ended_s = time.monotonic() - start
                    if _failed(child, job):
                        deadline = min(deadline, time.monotonic() + GRACE_S)


def _failed(child: Child, job: Job) -> bool:
    if not child.whole:
        return child.rank not in job.lost
    return child.outcome()[0] != "ended"


def _outcome(child: Child, job: Job, now: float) -> Outcome:
    if child.ended_s is None:
        excused = child.rank in job.lost
        text = "" if excused else child.last_words()
        return Outcome(rank=child.rank, word="had not ended", seconds=now, text=text, failed=not excused)
    if not child.whole:
        excused = child.rank in job.lost
        word, text = f"died ({_status(child.pid)})", child.last_words()
        return Outcome(rank=child.rank, word=word, seconds=child.ended_s, text=text, failed=not excused)
    word, value, text = child.outcome()
    failed = word != "ended"
    return Outcome(rank=child.rank, word=word, seconds=child.ended_s, text=text, value=value, failed=failed)


def _status(pid: int) -> str:
    for _ in range(20):  # its pipe is closed a moment before it can be waited for
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        time.sleep(0.05)
    return "it closed its pipe"


def _end(child: Child) -> None:
    """Kill it and what it has started."""
    for kill in (os.killpg, os.kill):  # it may not have its own group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(child.pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child.pid, 0)
    with suppress(OSError):
        os.close(child.pipe)
    child.output.close()


# ---- a rank


def _rank(job: Job, rank: int, store: str, output: BinaryIO, pipe: int) -> None:
    """Never returns before it is killed: a rank that left could break connections that others still use."""
    _settle(job, output)
    try:
        function, args = pickle.loads(job.payload)
        if job.group:
            _initialise(rank, job, store)
        value = pickle.dumps(_plain(function(rank, job.n, *args)))
        answer = ("ended", value, "")
    except BaseException:
        answer = ("raised", None, traceback.format_exc())
    data = pickle.dumps(answer)
    with os.fdopen(pipe, "wb") as stream:
        stream.write(struct.pack("!Q", len(data)) + data)
    while True:
        signal.pause()


def _settle(job: Job, output: BinaryIO) -> None:
    """Its own process group, which the kernel ends with the server; the caller's folder, environment and
    warnings; output into a file."""
    os.setpgid(0, 0)
    with suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    warnings.resetwarnings()
    for one in reversed(job.filters):
        warnings.filters.insert(0, one)  # type: ignore[attr-defined] (a list, in CPython)


def _initialise(rank: int, job: Job, store: str) -> None:
    """Nothing has to be torn down: the process is killed once all have ended."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, job.n),  # pyright: ignore[reportPrivateImportUsage]
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
