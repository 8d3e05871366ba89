"""The child process in which reward functions run: killable, replaceable, started without torch or numpy.

It is run by its path, and needs only a socket from the parent::

    parent (workers.Worker)                      child (this file)
    {parent, path, functions, timeout_s,
     isolation, folder}                   ---->  confine itself (isolation.py), import the functions
                                          <----  {"error": "" or one sentence, and the lines of a traceback,
                                                  "left_open": [what it can do],
                                                  "coroutine": whether a function is one}
    id, n, pickle (function, columns,
                   terms, probe)          ---->  call it
                                          <----  {"id": its own, "trace": traceback, "metrics", "extra",
                                                  "verdicts": [[value, fault, detail], ...]}, n of them

Requests are pickles (columns hold whatever a dataset holds); replies are JSON, so nothing that a reward
function does can run code in the trainer. What a reward function prints goes to stderr, never into the
socket, and a process that it forks does not have the socket. A reply that does not fit its request ends this
process. The functions run in the main thread: SIGALRM works there.

A child whose parent was killed ends by itself: a thread polls for a new parent, and where a C call
holds the GIL (a runaway regular expression) the kernel's limit on CPU time ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import math
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

HEADER = struct.Struct(">Q")
REQUEST = struct.Struct(">QQ")  # its id, how many completions it has
MAX_FRAME = 1 << 30  # a longer frame is a broken stream, not a message
MAX_DETAIL = 300  # characters of an exception in a reply
OPEN_UP = ' (reward.isolation="off" lets rewards use the network and write files)'
CONFINED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENETUNREACH, errno.EADDRNOTAVAIL})
HIDDEN = ' (reward.isolation leaves {} out of the environment of rewards; "off" hands it on)'
MAX_NAME = 100  # characters of a name for log_metric or log_extra
MAX_FRAMES = 8  # of a traceback, the innermost
MAX_CHAIN = 3  # exceptions in a chain of causes
WATCH_S = 0.5

Verdict = tuple[float | None, str, str]  # value, Fault or "", detail
Judgement = tuple[list[Verdict], str]  # a verdict per completion; the traceback of a call that raised, or ""


class Fault(StrEnum):
    """The reason why a reward function gave no verdict."""

    TIMEOUT = "timeout"
    DIED = "died"  # the process ended: kill -9, out of memory, os._exit
    RAISED = "raised"
    WRONG_LENGTH = "wrong_length"
    NOT_A_NUMBER = "not_a_number"
    NON_FINITE = "non_finite"
    UNPICKLABLE = "unpicklable"
    SIGNATURE = "signature"  # the last three only when probing: no completion could change them
    NO_COLUMN = "no_column"
    UNDEFINED = "undefined"


def send(sock: socket.socket, payload: bytes) -> None:
    """Write one frame. Raises TimeoutError after the socket's timeout."""
    sock.sendall(HEADER.pack(len(payload)) + payload)


def receive(sock: socket.socket, deadline: float = math.inf) -> bytes:
    """Read one frame. Raises TimeoutError after ``deadline`` (time.monotonic), EOFError without a peer."""
    (length,) = HEADER.unpack(_read_exactly(sock, HEADER.size, deadline))
    if length > MAX_FRAME:
        raise EOFError(f"a frame of {length} bytes")
    return _read_exactly(sock, length, deadline)


def _read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    buffer = bytearray()
    while len(buffer) < count:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        sock.settimeout(None if remaining_s == math.inf else remaining_s)
        chunk = sock.recv(min(count - len(buffer), 1 << 20))
        if not chunk:
            raise EOFError("the peer closed the socket")
        buffer += chunk
    return bytes(buffer)


class TrainerState:
    """TRL's ``trainer_state`` for reward functions: here ``global_step`` and ``max_steps``."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step, self.max_steps = global_step, max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name}")


class CallLog:
    """The values that a call gives to TRL's ``log_metric`` and ``log_extra``."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self.metrics: dict[str, list[float | None]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number of this call, None if it is not finite. The metric is the mean of the numbers of a
        name."""
        number = float(value)
        self.metrics.setdefault(clean_name(name), []).append(number if math.isfinite(number) else None)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value per completion, which samples get. A later call with the same name replaces the values.
        Raises ValueError for another number of values."""
        if len(values) != self._num_completions:
            raise ValueError(
                f"log_extra got {len(values)} values for {self._num_completions} completions in {column!r}"
            )
        self.extra[clean_name(column)] = [_to_plain(value) for value in values]


def clean_name(name: object) -> str:
    """Return the text of a name, cut to MAX_NAME, with blanks for line ends and control characters."""
    return "".join(char if char.isprintable() else " " for char in str(name))[:MAX_NAME]


def _to_plain(value: Any) -> Any:
    """Convert a value to one of JSON: None for a float that is not finite, and the repr for any other
    type."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else repr(value)[:MAX_DETAIL]


def judge_completions(
    function: Callable[..., Any],
    num_completions: int,
    columns: dict[str, Any],
    is_confined: bool = False,
    is_probing: bool = False,
) -> Judgement:
    """Call a reward function and check what it returns: (a verdict per completion, the traceback or "").
    Never raises.

    None is a verdict too (a skip). A fault of the whole call applies to every completion, a NaN or an
    infinity only to its own. ``is_confined``: the detail of an error that isolation may have caused says how
    to turn isolation off. ``is_probing``: failures that no completion could change get their own names: a
    signature that does not take the columns, a column that the row does not have, a name or a module that
    does not exist. To find a missing column the function may be called a second time. A process that the
    function has forked ends here.
    """
    if is_probing:
        with contextlib.suppress(ValueError):  # a builtin without a signature
            try:
                inspect.signature(function).bind(**columns)
            except TypeError as error:
                return _repeat_fault(num_completions, Fault.SIGNATURE, str(error)), ""
    pid = os.getpid()
    try:
        values = _call_function(function, columns)
        _end_fork(pid)
        return _check_values(values, num_completions), ""
    except BaseException as error:  # also SystemExit and the timeouts of libraries that are no Exception
        _end_fork(pid, error)
        fault = _find_sure_fault(function, columns, error) if is_probing else None
        detail = _describe_with_hint(error, is_confined)
        return _repeat_fault(num_completions, fault or Fault.RAISED, detail), format_trace(error)


def select_arguments(
    function: Callable[..., Any], offered: dict[str, Any], optional: dict[str, Any]
) -> dict[str, Any]:
    """Return those of ``offered`` that a function takes, by name or with ``**``, and those of ``optional``
    that are among its parameters. Return {} for a function without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in offered.items() if takes_all or name in parameters}
    return arguments | {name: value for name, value in optional.items() if name in parameters}


def _end_fork(worker_pid: int, error: BaseException | None = None) -> None:
    """End this process, as Python ends a program, if a reward function has forked it from ``worker_pid`` and
    returned in it: only the worker may go on. A no-op in the worker."""
    if os.getpid() == worker_pid:
        return
    status = int(error is not None)
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _call_function(function: Callable[..., Any], columns: dict[str, Any]) -> Any:
    """Call a reward function; run what it returns if that is a coroutine."""
    values = function(**columns)
    return asyncio.run(values) if inspect.iscoroutine(values) else values


def _check_values(values: Any, num_completions: int) -> list[Verdict]:
    if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
        return _repeat_fault(num_completions, Fault.WRONG_LENGTH, f"{type(values).__name__}, not a list")
    if len(values) != num_completions:
        return _repeat_fault(
            num_completions, Fault.WRONG_LENGTH, f"{len(values)} values for {num_completions}"
        )
    return [_make_verdict(value) for value in values]


def _describe_with_hint(error: BaseException, is_confined: bool) -> str:
    """Describe the exception, its line, and how to turn off isolation if that may have caused it."""
    hint = ""
    if is_confined:
        hint = HIDDEN.format(name) if (name := _find_hidden_variable(error)) else ""
        hint = hint or (OPEN_UP if _is_refusal(error) else "")
    return f"{describe_error(error)}{locate_error(error)}{hint}"


def _find_hidden_variable(error: BaseException) -> str:
    """Return the missing environment variable that ``error`` is about, if it looks like a secret; else ""."""
    from ostinato.reward.isolation import drop_secrets

    text = describe_error(error)
    if not (_is_environment_lookup(error) or "environment variable" in text.lower()):
        return ""
    names = [name for name in re.findall("[A-Z][A-Z0-9_]+", text) if name not in os.environ]
    return next((name for name in names if not drop_secrets({name: ""})), "")


def _is_environment_lookup(error: BaseException) -> bool:
    """Return whether ``os.environ[...]`` has raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyError) and frame.f_globals.get("__name__") == "os"


def _repeat_fault(num_completions: int, fault: Fault, detail: str) -> list[Verdict]:
    return [(None, fault, detail)] * num_completions


def _make_verdict(value: Any) -> Verdict:
    if value is None:
        return None, "", ""
    if isinstance(value, str | bytes):  # float("1.0") would let a text pass for a score
        return None, Fault.NOT_A_NUMBER, type(value).__name__
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None, Fault.NOT_A_NUMBER, type(value).__name__
    return (number, "", "") if math.isfinite(number) else (None, Fault.NON_FINITE, str(number))


def describe_error(error: BaseException) -> str:
    """Describe an error as ``ZeroDivisionError: division by zero``, on one line, of bounded length, valid as
    UTF-8."""
    try:
        text = str(error)
    except Exception as str_error:  # from a user's own __str__
        text = f"its text cannot be made: {type(str_error).__name__}"
    line = " ".join(f"{type(error).__name__}: {text}".split())[:MAX_DETAIL]
    return line.encode("utf-8", "backslashreplace").decode()


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether this error, or an error in its chain, is of a kind that isolation causes."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in CONFINED):
            return True
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def locate_error(error: BaseException) -> str:
    """Return `` (reward.py:12)``, the innermost line of the user's own code; "" if there is none."""
    frames = [frame for frame in _extract_frames(error) if _is_user_file(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and _is_user_file(error.filename):
        return f" ({os.path.basename(error.filename)}:{error.lineno})"
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _is_user_file(filename: str) -> bool:
    """Return whether a file is the user's, not Python's, an installed package's or code run from a string."""
    library = filename.startswith((os.path.dirname(os.__file__), "<")) or "-packages" in filename
    return not library and filename != __file__


def _extract_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the innermost frames, without those of this file and of the import system."""
    frames = traceback.extract_tb(error.__traceback__, limit=-MAX_FRAMES)
    return [
        frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]


def format_trace(error: BaseException) -> str:
    """Format the traceback as Python prints it (causes first), with at most MAX_CHAIN exceptions and bounded
    lines."""
    chain = [error]
    while len(chain) < MAX_CHAIN and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    parts = [
        "Traceback (most recent call last):\n"
        + "".join(
            line[:MAX_DETAIL].rstrip("\n") + "\n" for line in traceback.format_list(_extract_frames(link))
        )
        + describe_error(link)
        for link in reversed(chain)
    ]
    return "\n\n".join(parts).encode("utf-8", "backslashreplace").decode()  # may not be valid UTF-8


def _find_sure_fault(
    function: Callable[..., Any], columns: dict[str, Any], error: BaseException
) -> Fault | None:
    """Return the fault of a dry run that no completion could change; None if another completion might. For a
    missing key the function is called again, with a column of that name."""
    frames, code = _extract_frames(error), getattr(inspect.unwrap(function), "__code__", None)
    if not frames:
        return None
    filename = frames[-1].filename  # cloudpickle names no file: "<dynamic-code>"
    if filename.startswith("<") and (code is None or filename != code.co_filename):
        return None  # code run from a string, perhaps a completion
    if isinstance(error, ImportError | NameError) and not isinstance(error, UnboundLocalError):
        return Fault.UNDEFINED
    if _is_environment_lookup(error):
        return Fault.UNDEFINED
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str) or key in columns:
        return None
    try:  # a dictionary made from a completion still lacks the key when the row has such a column
        _call_function(function, {**columns, key: [None] * len(columns["completions"])})
    except KeyError as second_error:
        return None if second_error.args == error.args else Fault.NO_COLUMN
    except BaseException:  # another failure: with the column the function got further
        return Fault.NO_COLUMN
    return Fault.NO_COLUMN


def _end_with_parent(parent: int) -> None:
    """Wait until the parent is gone, then kill the process group."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)


def _limit_cpu(timeout_s: float) -> None:
    """Limit the CPU time from now on, so that the kernel ends a call whose parent is gone. While the parent
    runs the limit is never reached: the parent kills after ``timeout_s``, before all cores together have used
    that much."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft_limit = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s * (os.cpu_count() or 1)) + 1
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    soft_limit = soft_limit if hard_limit == resource.RLIM_INFINITY else min(soft_limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, hard_limit))


def _answer_request(
    functions: dict[str, Callable[..., Any]], request: bytes, is_confined: bool, timeout_s: float
) -> dict[str, Any]:
    """Call the function that a request names, and return the reply. A request that cannot be unpickled is a
    fault."""
    request_id, num_completions = REQUEST.unpack_from(request)
    log = CallLog(num_completions)
    try:
        name, columns, trainer_terms, is_probing = pickle.loads(memoryview(request)[REQUEST.size :])
    except BaseException as error:  # a column of a class that cannot be imported here
        verdicts, trace_text = _repeat_fault(num_completions, Fault.UNPICKLABLE, describe_error(error)), ""
    else:
        helpers = {"log_metric": log.log_metric, "log_extra": log.log_extra}
        helpers["trainer_state"] = TrainerState(**trainer_terms)
        columns = {**select_arguments(functions[name], helpers, {"timeout_s": timeout_s}), **columns}
        verdicts, trace_text = judge_completions(
            functions[name], num_completions, columns, is_confined, is_probing
        )
    return {
        "id": request_id,
        "verdicts": verdicts,
        "trace": trace_text,
        "metrics": log.metrics,
        "extra": log.extra,
    }


def _confine(settings: dict[str, Any], sock: socket.socket) -> list[str]:
    """Confine this worker. Returns, in a new confined process, what this machine leaves open (``isolation``).
    With isolation "off", or off Linux, only a thread is started that ends the process with its parent.

    Raises OSError, and ValueError if isolation is "strict" and something is left open.
    """
    from ostinato.reward import isolation

    mode, means, gaps = settings["isolation"], [], []
    if mode != "off":
        means = isolation.find_means(settings["folder"])
        gaps = isolation.list_gaps(means)
        if mode == "strict":
            isolation.refuse_gaps(gaps)
    if mode == "off" or sys.platform != "linux":
        threading.Thread(target=_end_with_parent, args=(settings["parent"],), daemon=True).start()
    else:
        isolation.enter_isolation(means, settings["folder"], settings["parent"], sock.close)
    return gaps


def main(fd: int) -> None:
    """Confine this process, import the functions, and answer requests until the socket closes, which raises
    EOFError. If confining or importing fails, send the error and return."""
    sock = socket.socket(fileno=fd)
    settings = json.loads(receive(sock))
    sys.path[:] = settings["path"]
    is_confined = settings["isolation"] != "off"
    functions: dict[str, Callable[..., Any]] = {}
    spec = ""
    try:
        gaps = _confine(settings, sock)
    except (OSError, ValueError) as error:
        send(sock, json.dumps({"id": 0, "error": str(error)}).encode())
        return
    os.register_at_fork(after_in_child=sock.close)
    from ostinato.inputs import escape_stream
    from ostinato.reward import verify

    sys.stdout, sys.stderr = (
        escape_stream(sys.stdout),
        escape_stream(sys.stderr),
    )  # rewards may print any text

    try:
        for spec in settings["functions"]:
            functions[spec] = verify.resolve_function(spec)
    except BaseException as error:  # importing a user's file can raise anything
        summary = f"importing the reward {spec!r} raised {_describe_with_hint(error, is_confined)}; fix it"
        is_from_verify = type(error) is ValueError and _extract_frames(error)[-1].filename == verify.__file__
        sentence = str(error) if is_from_verify else f"{summary}\n{format_trace(error)}"
        send(sock, json.dumps({"id": 0, "error": sentence}).encode())
        return
    has_coroutine = any(map(inspect.iscoroutinefunction, functions.values()))
    greeting = {"id": 0, "error": "", "left_open": gaps, "coroutine": has_coroutine}
    send(sock, json.dumps(greeting).encode())
    while True:
        request = receive(sock)
        _limit_cpu(settings["timeout_s"])
        send(
            sock, json.dumps(_answer_request(functions, request, is_confined, settings["timeout_s"])).encode()
        )


if __name__ == "__main__":
    status = 1
    try:
        main(int(sys.argv[1]))
        status = 0
    except (EOFError, OSError):
        status = 0  # the parent has closed the socket or is gone
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # where the parent was killed before there was a keeper
            os.rmdir(sys.argv[2])
        sys.stderr.flush()
        os._exit(status)  # a thread left behind by a reward function must not keep the process
