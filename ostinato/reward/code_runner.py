"""Runs tests on an answer's code, in two processes. Standard library only; run by its path.

    reward worker (code_tests)         the tests (here)               the answer (here, with "answer")
    {"code", "before", "tests"..} -->  start the answer's process  -> execute the code
                      "started"  <--
                                       execute the tests; names of
                                       the code are ``Remote``    <-> (operation, operands), (done, value)
         "passed", or the cause  <--   "refused" and the cause, for tests that do not compile

The code has no object of the tests' process, and no way to the reward worker: its values come as plain data,
and all others stay in its process and are a ``Remote`` here. So the code cannot write the verdict, be equal
to everything, or replace the functions that the tests call, and the exit status of its process has no effect.
The remaining risks are in docs/security.md.
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
MAX_FRAME_BYTES = 1 << 26  # bytes of a value
MAX_CAUSE_CHARS = 300  # characters
MAX_FILE_BYTES = 1 << 24  # bytes of a file that an answer writes
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
BASIC_TYPES = (
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
FURTHER_TYPES = (
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction),
)
PLAIN_TYPES = {(kind.__module__, kind.__qualname__): kind for kind in (*BASIC_TYPES, *FURTHER_TYPES)}
BASE_TYPES = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
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
    """Read one frame. Raises EOFError if the peer has ended, and for a frame that is too long."""
    (length,) = LENGTH.unpack(_read_exactly(sock, LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise EOFError(f"a value of {length} bytes")
    return _read_exactly(sock, length)


def _read_exactly(sock: socket.socket, count: int) -> bytes:
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

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._answer.ask("call", self, arguments, keywords)

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
        """Start the process. Raises OSError where it does not start."""
        self._socket, child_socket = socket.socketpair()
        self._remotes: dict[int, Remote] = {}
        with child_socket:
            command = [sys.executable, "-s", "-P", __file__, "answer", str(child_socket.fileno())]
            subprocess.Popen(command, pass_fds=[child_socket.fileno()], stdin=subprocess.DEVNULL)
        try:
            receive(self._socket)
        except EOFError as error:
            raise OSError(str(error)) from error

    def load(self, code: str) -> dict[str, Any]:
        """Execute the code and return the names that it defines. Standard modules are those of this process,
        which the code cannot have changed. Raises what the code raises, as ``ask`` does."""
        send(self._socket, code.encode("utf-8", "surrogatepass"))
        names: dict[str, Any] = self._receive_reply()
        standard = {name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names}
        return names | standard

    def ask(self, operation: str, *operands: Any) -> Any:
        """Return the result of an operation in the answer's process. Raises the code's exception if that is a
        built-in one, else AnswerError."""
        data = io.BytesIO()
        _RemotePickler(data).dump((operation, operands))
        send(self._socket, data.getvalue())
        return self._receive_reply()

    def _receive_reply(self) -> Any:
        """Return the value of a reply. Raises the code's exception if that is a built-in one, else
        AnswerError."""
        try:
            is_value, value = _PlainUnpickler(receive(self._socket), self._get_remote).load()
        except (EOFError, OSError) as error:
            raise AnswerError(str(error)) from error
        if is_value:
            return value
        kind, text = map(str, value)
        exception = getattr(builtins, kind, None)
        if isinstance(exception, type) and issubclass(exception, Exception):
            raise exception(text)
        raise AnswerError(f"{kind}: {text}")

    def _get_remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))


class _RemotePickler(pickle.Pickler):
    """Pickles operands. A ``Remote`` is pickled as its number."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj._number if type(obj) is Remote else None


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles values from the answer's process. The result has only plain types and ``Remote``s."""

    def __init__(self, data: bytes, remote: Callable[[int], Remote]) -> None:
        super().__init__(io.BytesIO(data))
        self._get_remote = remote

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN_TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain type")
        return PLAIN_TYPES[module, name]

    def persistent_load(self, pid: Any) -> Remote:
        return self._get_remote(operator.index(pid))


def run_tests(job: dict[str, Any], write_line: Callable[[str], None]) -> str:
    """Run the tests. Returns "passed", or the cause of the failure. ``write_line`` is called with "started"
    before the answer's code is executed. Raises SyntaxError or ValueError for tests that do not compile, and
    OSError if no process can be started."""
    setup_codes, test_codes = (
        [compile(source, "<tests>", "exec") for source in job[key]] for key in ("before", "tests")
    )
    test_names = {name for code in test_codes for name in code.co_names}
    answer = Answer()
    write_line("started")
    try:
        names = answer.load(job["code"])
        namespace = {"__name__": "tests", **_drop_builtins(names, test_names)}
        for code in setup_codes:
            exec(code, namespace)
        if job["entry_point"]:
            namespace[job["entry_point"]] = names[job["entry_point"]]
        for code in test_codes:
            exec(code, namespace)
    except BaseException as error:  # a failed assertion, an exception of the answer, or SystemExit
        return f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS]
    return "passed"


def _drop_builtins(names: dict[str, Any], test_names: set[str]) -> dict[str, Any]:
    """Return an answer's names without those of built-in functions, so that ``set(f(x))`` calls the built-in.
    If the tests use none of the other names, return all: then they test a function of such a name."""
    other_names = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    return other_names if other_names.keys() & test_names else names


def _serve_tests() -> None:
    """Run the tests of a job from standard input, and write the verdict to standard output. Limits the
    memory, CPU time and files of this process, hides it from others, and waits to be ended."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the answer's process cannot read or trace this one
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # then processes that the answer starts can be found
    verdict_file, null_fd = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null_fd, fd)

    def write_line(line: str) -> None:
        print(json.dumps(line), file=verdict_file, flush=True)

    job = json.loads(sys.stdin.readline())
    max_seconds = math.ceil(job["limit_s"]) + 1
    for limit, maximum in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_CPU, max_seconds),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard_limit = resource.getrlimit(limit)
        maximum = maximum if hard_limit == resource.RLIM_INFINITY else min(maximum, hard_limit)
        with contextlib.suppress(OSError, ValueError):  # a system may not have a limit
            resource.setrlimit(limit, (maximum, maximum))
    try:
        write_line(run_tests(job, write_line))
    except (SyntaxError, ValueError) as error:  # the tests do not compile
        write_line("refused")
        write_line(str(error))
    sys.stdin.read()  # wait until the reward worker ends this process and its descendants


# ---- the process of the answer


class _PlainPickler(pickle.Pickler):
    """Pickles values for the tests. A value that is no plain data is stored in ``objects``, and pickled as
    its number there."""

    def __init__(self, data: io.BytesIO, objects: list[Any]) -> None:
        super().__init__(data)
        self._objects = objects

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        is_plain = (
            kind in BASIC_TYPES
            or kind in FURTHER_TYPES
            or isinstance(obj, BASE_TYPES)
            or kind.__module__ == "numpy"
        )
        if is_plain or any(obj is value for value in PLAIN_TYPES.values()):
            return None
        numbers = (number for number, value in enumerate(self._objects) if value is obj)
        if (number := next(numbers, None)) is None:
            number = len(self._objects)
            self._objects.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        """Reduce instances of subclasses (a named tuple) to their base class, and numpy's to Python's."""
        if type(obj) in BASIC_TYPES or type(obj) in FURTHER_TYPES or isinstance(obj, type):
            return NotImplemented
        if type(obj).__module__ == "numpy":
            return type(obj.tolist()), (obj.tolist(),)
        values: Any = obj
        base: Any = next(kind for kind in BASE_TYPES if isinstance(obj, kind))
        return base, (list(values) if base in (tuple, list, set, frozenset) else base(obj),)


class _OperandUnpickler(pickle.Unpickler):
    """Unpickles operands from the tests, which are trusted."""

    def __init__(self, data: bytes, objects: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


def _serve_answer(fd: int) -> None:
    """Execute the answer's code, then run operations on its values, until the socket closes; then end the
    process."""
    sock = socket.socket(fileno=fd)
    send(sock, b"ready")
    objects: list[Any] = []
    module = types.ModuleType("answer")
    sys.modules["answer"] = module

    def reply(compute: Callable[[], Any]) -> None:
        data = io.BytesIO()
        try:
            _PlainPickler(data, objects).dump((True, compute()))
        except BaseException as error:  # any failure of the code is sent to the tests
            data = io.BytesIO(pickle.dumps((False, [type(error).__name__, str(error)[:MAX_CAUSE_CHARS]])))
        send(sock, data.getvalue())

    def execute_code() -> dict[str, Any]:
        exec(compile(receive(sock), "<answer>", "exec"), module.__dict__)
        values = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        is_module = {name: isinstance(value, types.ModuleType) for name, value in values.items()}
        return {name: None if is_module[name] else value for name, value in values.items()}

    def run_operation() -> Any:
        operation, operands = _OperandUnpickler(receive(sock), objects).load()
        return OPERATIONS[operation](*operands)

    try:
        reply(execute_code)
        while True:
            reply(run_operation)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["answer"]:
        _serve_answer(int(sys.argv[2]))
    else:
        _serve_tests()
