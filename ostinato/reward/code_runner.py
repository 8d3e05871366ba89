"""Runs tests on an answer's code, in two processes. Standard library only; run by its path.

    reward worker (code_tests)         the tests (here)               the answer (here, with "answer")
    {"code", "before", "tests"..} -->  start the answer's process  -> execute the code
                      "started"  <--
                                       execute the tests; names of
                                       the code are ``Remote``    <-> (operation, operands), (done, value)
         "passed", or why not    <--   "refused", and why, instead of both: tests that do not compile

The code has no object of the tests' process, and no way to the reward worker: its values come as plain
data, everything else stays with it as a ``Remote``. So it cannot write the verdict, be equal to everything,
or replace what the tests call; and how its process ends says nothing. What remains: docs/security.md.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import importlib
import io
import json
import math
import operator
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">Q")
MAX_FRAME = 1 << 26  # bytes of a value
MAX_WHY = 300  # characters
MAX_FILE = 1 << 24  # bytes of a file that an answer writes
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
BASIC = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
)
MORE = (
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction),
)
PLAIN = {(one.__module__, one.__qualname__): one for one in (*BASIC, *MORE)}
BASES = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "length": len,
    "items": list,
}


class AnswerError(Exception):
    """The answer's code raised or ended, or what it sent is no reply."""


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> bytes:
    """Raises EOFError without a peer, and for a frame that is too long."""
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > MAX_FRAME:
        raise EOFError(f"a value of {length} bytes")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (chunk := sock.recv(min(count - len(data), 1 << 20))):
            raise EOFError("its process ended")
        data += chunk
    return bytes(data)


# ---- the process of the tests


class Remote:
    """A value that stays in the answer's process: a function, an instance of its classes, an iterator."""

    __slots__ = ("_answer", "_number")

    def __init__(self, answer: Answer, number: int) -> None:
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._answer.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._answer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._answer.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._answer.ask("item", self, key)

    def __len__(self) -> int:
        return operator.index(self._answer.ask("length", self))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._answer.ask("items", self))


class Answer:
    """The process that executes an answer's code."""

    def __init__(self) -> None:
        """Raises OSError where it does not start."""
        self._socket, theirs = socket.socketpair()
        self._remotes: dict[int, Remote] = {}
        with theirs:
            command = [sys.executable, "-s", "-P", __file__, "answer", str(theirs.fileno())]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            receive(self._socket)
        except EOFError as error:
            raise OSError(str(error)) from error

    def load(self, code: str) -> dict[str, Any]:
        """Executes the code. Returns the names that it defines; standard modules are those of this process,
        which the code cannot have changed."""
        send(self._socket, code.encode("utf-8", "surrogatepass"))
        names: dict[str, Any] = self._reply()
        standard = {name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names}
        return names | standard

    def ask(self, operation: str, *operands: Any) -> Any:
        data = io.BytesIO()
        _RemotePickler(data).dump((operation, operands))
        send(self._socket, data.getvalue())
        return self._reply()

    def _reply(self) -> Any:
        """Raises what the code raised, where that is a built-in exception, else AnswerError."""
        try:
            done, value = _PlainUnpickler(receive(self._socket), self._remote).load()
        except (EOFError, OSError) as error:
            raise AnswerError(str(error)) from error
        if done:
            return value
        kind, text = map(str, value)
        known = getattr(builtins, kind, None)
        if isinstance(known, type) and issubclass(known, Exception):
            raise known(text)
        raise AnswerError(f"{kind}: {text}")

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))


class _RemotePickler(pickle.Pickler):
    """Of operands: of a value that stays with the answer its number."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj._number if type(obj) is Remote else None


class _PlainUnpickler(pickle.Unpickler):
    """Of values that the answer's process sent: plain types alone can come out of it."""

    def __init__(self, data: bytes, remote: Callable[[int], Remote]) -> None:
        super().__init__(io.BytesIO(data))
        self._remote = remote

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain type")
        return PLAIN[module, name]

    def persistent_load(self, pid: Any) -> Remote:
        return self._remote(operator.index(pid))


def run_tests(job: dict[str, Any], tell: Callable[[str], None]) -> str:
    """Returns "passed", or why not. Raises SyntaxError for tests that do not compile, and OSError where no
    process can be started."""
    before, tests = ([compile(one, "<tests>", "exec") for one in job[key]] for key in ("before", "tests"))
    used = {name for code in tests for name in code.co_names}
    answer = Answer()
    tell("started")
    try:
        names = answer.load(job["code"])
        found = {"__name__": "tests", **_without_builtins(names, used)}
        for code in before:
            exec(code, found)
        if job["entry_point"]:
            found[job["entry_point"]] = names[job["entry_point"]]
        for code in tests:
            exec(code, found)
    except BaseException as error:  # the tests' assertions, what the answer raised, an end that it asked for
        return f"{type(error).__name__}: {error}"[:MAX_WHY]
    return "passed"


def _without_builtins(names: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """An answer's names without those of built-in functions, so that ``set(f(x))`` calls ours; but with them
    where the tests (``used``: their names) have no other: they are about a function of that name."""
    own = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    return own if own.keys() & used else names


def _tests_main() -> None:
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the answer's process cannot read or trace this one
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the answer starts can be found
    verdicts, nowhere = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nowhere, fd)

    def tell(line: str) -> None:
        print(json.dumps(line), file=verdicts, flush=True)

    job = json.loads(sys.stdin.readline())
    seconds = math.ceil(job["limit_s"]) + 1
    for limit, most in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # systems that do not know a limit
            resource.setrlimit(limit, (most, most))
    try:
        tell(run_tests(job, tell))
    except (SyntaxError, ValueError) as error:  # of the tests
        tell("refused")
        tell(str(error))
    sys.stdin.read()  # until it is ended, with what the answer has left behind


# ---- the process of the answer


class _PlainPickler(pickle.Pickler):
    """Of values for the tests: of what is no plain data its number in ``kept``."""

    def __init__(self, data: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(data)
        self._kept = kept

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        is_plain = kind in BASIC or kind in MORE or isinstance(obj, BASES) or kind.__module__ == "numpy"
        if is_plain or any(obj is one for one in PLAIN.values()):
            return None
        known = (number for number, one in enumerate(self._kept) if one is obj)
        if (number := next(known, None)) is None:
            number = len(self._kept)
            self._kept.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        """Instances of subclasses (a named tuple) and numpy's values as what they are made of."""
        if type(obj) in BASIC or type(obj) in MORE or isinstance(obj, type):
            return NotImplemented
        if type(obj).__module__ == "numpy":
            return type(obj.tolist()), (obj.tolist(),)
        values: Any = obj
        base: Any = next(one for one in BASES if isinstance(obj, one))
        return base, (list(values) if base in (tuple, list, set, frozenset) else base(obj),)


class _KeptUnpickler(pickle.Unpickler):
    """Of operands from the tests, which are trusted."""

    def __init__(self, data: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]


def _answer_main(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    send(sock, b"ready")
    kept: list[Any] = []
    module = types.ModuleType("answer")
    sys.modules["answer"] = module

    def reply(compute: Callable[[], Any]) -> None:
        data = io.BytesIO()
        try:
            _PlainPickler(data, kept).dump((True, compute()))
        except BaseException as error:  # whatever the code does is its own
            data = io.BytesIO(pickle.dumps((False, [type(error).__name__, str(error)[:MAX_WHY]])))
        send(sock, data.getvalue())

    def names() -> dict[str, Any]:
        exec(compile(receive(sock), "<answer>", "exec"), module.__dict__)
        known = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        is_module = {name: isinstance(value, types.ModuleType) for name, value in known.items()}
        return {name: None if is_module[name] else value for name, value in known.items()}

    def computed() -> Any:
        operation, operands = _KeptUnpickler(receive(sock), kept).load()
        return OPERATIONS[operation](*operands)

    try:
        reply(names)
        while True:
            reply(computed)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["answer"]:
        _answer_main(int(sys.argv[2]))
    else:
        _tests_main()
