"""Grade groups in killable worker processes: a fault is bounded in time, named and counted, never a 0.

    grade(group) -> one call per function -> a thread of the pool -> an idle Worker -> its process
                                                  |  out of time, or the process is gone
                                                  +-> its process group is killed; the next call starts one

The invariants: every wait has a limit; a fault leaves ``Reward.value`` None with the fault's name in
``reason``; every fault is in ``counters``; a dead process is reaped before its worker is used again.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import queue
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from ostinato.inputs import parse_json
from ostinato.reward import isolation
from ostinato.reward import worker as child
from ostinato.reward.isolation import Mode
from ostinato.reward.own_answers import OTHERS, OwnVerdict, find_own_answer
from ostinato.reward.worker import Fault, Verdict
from ostinato.types import Group, Prompt, Reward, Stop, Trajectory
from ostinato.workers.process import Child

T = TypeVar("T")

MAX_DETAIL, MAX_TRACE = 1_000, 100_000  # characters of a reply that are kept
START_TIMEOUT_S = 60.0  # importing the functions may be slow; a call's limit does not include it
REAP_TIMEOUT_S = 5.0
RETRIES = 1  # of a call whose process died
COROUTINES = 8  # processes where a function is a coroutine, which waits more than it computes
KEEPER_S = 2.0  # for the keeper of a confined process to end after the process, with its status
JUDGE = "judge:"  # a function with this prefix is a Scorer; the rest names runs or addresses
NO_VERDICT = frozenset({Stop.ERROR, Stop.ABORT})  # ends of episodes that the policy did not cause


class Worker:
    """A child process, which is started when it is first needed and again after each fault. One thread may
    use it at a time; only ``interrupt`` may come from another."""

    def __init__(self, functions: Sequence[str], timeout_s: float, isolation: Mode) -> None:
        self._functions = list(functions)
        self._timeout_s = timeout_s
        self._isolation = isolation
        self.left_open: list[str] = []  # what isolation cannot prevent on this machine, in words
        self.has_coroutine = False  # whether one of the functions is one; known after ``start``
        self._own_folder = ""  # the temporary folder of the process
        self._folder = os.getcwd()  # the folder of relative paths, also for a process started later
        self._process: Child | None = None
        self._socket: socket.socket | None = None

    def start(self) -> str:
        """Start a process that imports the functions, unless there is one. Returns "", or a sentence that
        says why it failed, with the lines of a traceback under it; then the process is gone."""
        if self._process is not None:
            return ""
        try:
            self._spawn()
            hello = {
                "parent": os.getpid(),
                "path": [str(entry) for entry in sys.path],
                "functions": self._functions,
                "timeout_s": self._timeout_s,
                "isolation": self._isolation,
                "folder": self._own_folder,
            }
            payload = json.dumps(hello).encode()
            greeting = self._exchange(payload, START_TIMEOUT_S, 0, _read_greeting)
            error, self.left_open, self.has_coroutine = greeting
        except TimeoutError:
            error = f"importing the rewards {self._functions} took more than {START_TIMEOUT_S:g} s"
        except OSError as failure:
            error = f"no process could be started for the rewards {self._functions}: {failure}"
        except EOFError as failure:
            error = f"the process ended while it imported the rewards {self._functions}: {failure}"
        if error:
            self.kill()
        return error

    def _spawn(self) -> None:
        environ: dict[str, str] | None = None
        if self._isolation != "off":
            self._own_folder = tempfile.mkdtemp(prefix="ostinato-reward-")
            environ = isolation.drop_secrets(os.environ) | {"TMPDIR": self._own_folder}
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            command = [sys.executable, "-P", child.__file__, str(child_socket.fileno()), self._own_folder]
            self._process = Child(
                command, pass_fds=[child_socket.fileno()], folder=self._folder, environ=environ
            )

    def call(self, num_completions: int, request: bytes) -> Reply:
        """Return the reply to a pickled call, after starting the process if there is none. Raises
        TimeoutError or EOFError; then the process is gone."""
        if error := self.start():
            raise EOFError(error.partition("\n")[0])
        request_id = (
            secrets.randbits(63) | 1
        )  # a reply that was written before its request cannot have this id
        payload = child.REQUEST.pack(request_id, num_completions) + request
        return self._exchange(
            payload, self._timeout_s, request_id, lambda reply: Reply.of(reply, num_completions)
        )

    def _exchange(
        self, request: bytes, timeout_s: float, request_id: int, parse_reply: Callable[[dict[str, Any]], T]
    ) -> T:
        """Send a request and return what ``parse_reply`` makes of the reply. Kill the process if that
        fails."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            child.send(self._socket, request)
            reply = parse_json(child.receive(self._socket, deadline), surrogates=True)
            if not isinstance(reply, dict) or reply.get("id") != request_id:
                raise ValueError("another id")
            return parse_reply(reply)
        except TimeoutError:
            self.kill()
            raise
        except ValueError as error:  # something else wrote into the socket
            self.kill()
            raise EOFError(f"what it sent is no reply to its request ({error})") from error
        except (EOFError, OSError) as error:
            if self._isolation != "off" and self._process is not None:
                self._process.wait(KEEPER_S)
            raise EOFError(self.kill()) from error

    def interrupt(self) -> None:
        """Kill the process and all that it started, if there is one. A call in flight ends at once with
        EOFError. Without isolation, processes that have left its process group go on."""
        process = self._process
        if process is not None:
            if self._isolation != "off":
                isolation.end_descendants(process.pid)
            process.kill_group()

    def kill(self) -> str:
        """Interrupt and reap the process, close its socket and delete its folder. Returns how the process
        ended, as ``killed by signal 9`` or ``exit status 3``, and "" if there was none. A process that was
        already exiting keeps its own status: the signal comes too late to change it."""
        self.interrupt()
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
        if process is None:
            return ""
        status = process.wait(REAP_TIMEOUT_S)
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        return status or "not reaped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The verdicts and logs of a call."""

    verdicts: list[Verdict]  # one for each completion
    trace: str = ""  # the traceback of a call that raised
    metrics: Mapping[str, list[float | None]] = field(default_factory=dict)  # by log_metric
    extra: Mapping[str, list[Any]] = field(default_factory=dict)  # by log_extra, a value for each completion

    @classmethod
    def of(cls, reply: dict[str, Any], num_completions: int) -> Reply:
        """Make a reply of JSON that a reward function may have written itself. Raises ValueError for another
        form."""
        try:
            verdicts = [_parse_verdict(*fields) for fields in reply["verdicts"]]
            metrics = {
                child.clean_name(name): [*map(_check_number, values)]
                for name, values in reply["metrics"].items()
            }
            extra = {child.clean_name(name): list(values) for name, values in reply["extra"].items()}
            trace = str(reply["trace"])[-MAX_TRACE:]
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if {len(verdicts), *map(len, extra.values())} != {num_completions}:
            raise ValueError(f"{len(verdicts)} verdicts for {num_completions} completions")
        return cls(verdicts=verdicts, trace=trace, metrics=metrics, extra=extra)


def _parse_verdict(value: float | None, fault: str, detail: str) -> Verdict:
    name = Fault(fault) if fault else ""
    if name and value is not None:
        raise ValueError(f"the fault {name} with the value {value}")
    return _check_number(value), name, str(detail)[:MAX_DETAIL]


def _check_number(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"the number {value}")
    return value


def _read_greeting(reply: dict[str, Any]) -> tuple[str, list[str], bool]:
    """Return (error, what isolation leaves open, whether a function is a coroutine). Raises ValueError."""
    error, left_open = reply.get("error"), reply.get("left_open", [])
    if not isinstance(error, str) or not isinstance(left_open, list):
        raise ValueError("no greeting")
    return error, [str(gap) for gap in left_open], bool(reply.get("coroutine"))


class Scorer(Protocol):
    """A reward computed in this process, without a child: a judge on an engine, or at an address."""

    async def score(self, prompt: Prompt, answers: Sequence[str]) -> Sequence[Verdict]:
        """Return one verdict per answer, in order. It limits its own time, and never raises."""
        ...

    def close(self) -> None: ...


class WorkerGrader:
    """Implements protocols.Grader: the weighted sum of reward functions, called in killable processes.

    ``functions`` are what ``verify.resolve`` accepts: a built-in name, ``module:function`` or
    ``path.py:function``. ``timeout_s`` limits one function on one group; a call that hangs is killed, a
    call whose process died is repeated once. ``workers`` is the number of processes (0: one, or COROUTINES
    after ``check`` where a function is one), confined according to ``isolation``. ``judges`` maps a task of
    a mixture to the functions that grade its answers; all of them grade other tasks. ``scorers``: those of
    ``functions`` that are called in this process. ``max_steps`` of the run is in TRL's ``trainer_state``.

    A function's None is a skip and leaves the sum of the others, as in TRL. A fault leaves the completion
    without a value: the sum of the others would score the fault 0. ``Reward.reason`` reads
    ``fault: function: detail``, joined by ``; ``, or ``skipped``; ``Reward.failed`` has the tracebacks.

    ``counters`` has ``rewards/{function}/{fault}`` and ``rewards/{function}/skipped`` in completions, and
    ``reward_workers/{hung,died,retried}`` in calls. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        timeout_s: float = 10.0,
        workers: int = 0,
        isolation: Mode = "auto",
        judges: Mapping[str, Sequence[str]] = MappingProxyType({}),
        scorers: Mapping[str, Scorer] = MappingProxyType({}),
        counters: Counter[str] | None = None,
        max_steps: int = 0,
    ) -> None:
        self.counters = Counter[str]() if counters is None else counters
        self._functions = list(functions)
        self._name_functions = _name_functions(functions)
        self._weights = list(weights) if weights is not None else [1.0] * len(functions)
        self._judges, self._scorers = dict(judges), dict(scorers)
        self._timeout_s, self._max_steps = timeout_s, max_steps
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers or COROUTINES, thread_name_prefix="reward")
        self._idle_workers: queue.LifoQueue[Worker] = (
            queue.LifoQueue()
        )  # last in, first out: the process that runs
        child_functions = [function for function in functions if function not in scorers]
        self._new_worker = partial(Worker, child_functions, timeout_s, isolation)
        self._workers, self._can_grow = list[Worker](), not workers
        self._add_workers((workers or 1) if child_functions else 0)
        self._finalizer = weakref.finalize(self, _close_workers, self._workers, self._threads)

    def __enter__(self) -> WorkerGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and close the scorers. Calls in flight end at once without a verdict. May be
        called twice."""
        self._is_closed = True
        self._finalizer()
        for scorer in self._scorers.values():
            scorer.close()

    def _add_workers(self, count: int) -> None:
        for _ in range(count):
            self._workers.append(self._new_worker())
            self._idle_workers.put(self._workers[-1])

    @property
    def left_open(self) -> list[str]:
        """What ``isolation`` cannot prevent on this machine, in words. Valid after ``check``."""
        return self._workers[0].left_open if self._workers else []

    def check(
        self, prompt: Prompt | None = None, encode: Callable[[str], Sequence[int]] = lambda text: []
    ) -> list[str]:
        """Start the workers and, given a ``prompt``, call each function once on two completions of it: its
        reference answer (the column ``answer``) and an empty one, with their token ids by ``encode``. With
        ``workers`` 0 workers are added if a function is a coroutine.

        Raises ValueError, with traceback and completions as a note, for what no other completion could
        change: a function that cannot be imported, does not take the row's columns, looks up a column that
        the row lacks, or uses a name or a module that does not exist. Also for a result that is not a list of
        as many numbers, and for a function that ends its process or runs out of time. Failures that other
        completions may not have (any other exception, or a NaN for both) are returned as warnings: a run ends
        at its first evaluation or step if all of its answers have them.
        """
        for future in [self._threads.submit(self._start_idle) for _ in self._workers]:
            if error := future.result():
                raise _make_error(*error.partition("\n")[::2])
        if self._can_grow and any(worker.has_coroutine for worker in self._workers):
            self._can_grow = False
            self._add_workers(COROUTINES - len(self._workers))
        if prompt is None:
            return []
        texts, warnings = [find_own_answer(prompt) or "I do not know.", ""], []
        for function, name, _ in self._select_functions(prompt):
            if function in self._scorers:
                continue
            reply = self._try_call(function, prompt, texts, encode)
            if not all(fault for _, fault, _ in reply.verdicts):
                continue
            _, fault, detail = reply.verdicts[0]
            note = f"{reply.trace}\n{prompt.where}, completions {texts!r}".lstrip()
            if fix := _explain_refusal(name, fault, detail, self._timeout_s):
                raise _make_error(fix, note)
            warnings.append(
                f"reward {name} gave no verdict on a dry run ({fault}: {detail}); the run ends if it gives "
                f"none to any answer of the first evaluation or step\n{note}"
            )
        return warnings

    def iterate_own_verdicts(
        self, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]
    ) -> Iterator[tuple[str, str, list[OwnVerdict]]]:
        """Yield (function, its name, its verdicts on the own answers of these prompts, which are of one
        task). A function judges as many answers as its time limit allows, and at least one; ``scorers``,
        OTHERS and functions of weight 0 judge none."""
        for function, name, weight in self._select_functions(prompts[0]) if prompts else ():
            verdicts, end = list[OwnVerdict](), time.monotonic() + self._timeout_s
            for prompt in prompts if weight and function not in {*self._scorers, *OTHERS} else ():
                if (answer := find_own_answer(prompt, function)) is None:
                    continue
                ((value, fault, detail),) = self._try_call(function, prompt, [answer], encode).verdicts
                verdict = OwnVerdict(row=prompt.where, answer=answer, value=value, fault=fault, detail=detail)
                verdicts.append(replace(verdict, is_chat=prompt.messages is not None))
                if time.monotonic() > end:
                    break
            yield function, name, verdicts

    def _try_call(
        self, function: str, prompt: Prompt, texts: Sequence[str], encode: Callable[[str], Sequence[int]]
    ) -> Reply:
        """Call a function on whole answers before a run, and wait for its reply."""
        graded_prompt, answers = (
            _prepend_prefill(prompt, [])[0],
            [([text], list(encode(text))) for text in texts],
        )
        columns = _make_columns(graded_prompt, answers)
        columns |= {"env_reward": [0.0] * len(texts), "in_thought": [False] * len(texts)}
        return self._threads.submit(self._call_worker, function, len(texts), columns, 0, True).result()

    async def grade(self, group: Group) -> list[Reward]:
        """Grade each trajectory, in order, and count what has no value. Episodes that ended in ERROR or ABORT
        are not judged."""
        trajectories = [trajectory for trajectory in group.trajectories if trajectory.stop not in NO_VERDICT]
        if not trajectories:
            return [_make_unplayed_reward(trajectory) for trajectory in group.trajectories]
        prompt, answers = _prepend_prefill(
            group.prompt, [_extract_answer(trajectory) for trajectory in trajectories]
        )
        columns = _make_columns(prompt, answers)
        columns["env_reward"] = [trajectory.env_reward for trajectory in trajectories]
        columns["in_thought"] = [
            any(turn.in_thought for turn in trajectory.turns[-1:]) for trajectory in trajectories
        ]
        loop = asyncio.get_running_loop()
        functions, names, weights = zip(*self._select_functions(prompt), strict=True)
        texts = ["".join(words) for words, _ in answers]
        calls = [
            self._score(self._scorers[function], prompt, texts)
            if function in self._scorers
            else loop.run_in_executor(
                self._threads, self._call_worker, function, len(trajectories), columns, group.step
            )
            for function in functions
        ]
        replies = await asyncio.gather(*calls)
        for name, reply in zip(names, replies, strict=True):
            for value, fault, _ in reply.verdicts:
                if value is None:
                    self._increment(f"rewards/{name}/{fault or 'skipped'}")
        parts = list(zip(names, weights, replies, strict=True))
        rewards = iter([_sum_verdicts(parts, number) for number in range(len(trajectories))])
        return [
            _make_unplayed_reward(trajectory) if trajectory.stop in NO_VERDICT else next(rewards)
            for trajectory in group.trajectories
        ]

    async def _score(self, scorer: Scorer, prompt: Prompt, answers: Sequence[str]) -> Reply:
        return Reply(verdicts=list(await scorer.score(prompt, answers)))

    def _select_functions(self, prompt: Prompt) -> list[tuple[str, str, float]]:
        """Return (function, name in metrics, weight) of the functions that grade the prompt's task."""
        functions = zip(self._functions, self._name_functions, self._weights, strict=True)
        judges = self._judges.get(prompt.task, self._functions)
        return [function for function in functions if function[0] in judges]

    def _start_idle(self) -> str:
        """Start an idle worker's process if it has none; return its error or ""."""
        worker = self._idle_workers.get()
        try:
            return worker.start()
        finally:
            self._idle_workers.put(worker)

    def _call_worker(
        self, function: str, num_completions: int, columns: dict[str, Any], step: int, is_probe: bool = False
    ) -> Reply:
        """Call a function in an idle worker, once more if the process dies. Count a fault and return it as
        verdicts."""

        def make_faults(fault: Fault, detail: str) -> Reply:
            return Reply(verdicts=[(None, fault, detail)] * num_completions)

        trainer_terms = {"global_step": step, "max_steps": self._max_steps}
        try:
            request = pickle.dumps((function, columns, trainer_terms, is_probe))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError) as error:
            return make_faults(Fault.UNPICKLABLE, child.describe_error(error))
        detail = ""
        for attempt in range(1 + RETRIES):
            worker = self._idle_workers.get()
            try:
                if self._is_closed:
                    return make_faults(Fault.DIED, "the grader was closed")
                if attempt:
                    self._increment("reward_workers/retried")
                return worker.call(num_completions, request)
            except TimeoutError:
                self._increment("reward_workers/hung")
                return make_faults(Fault.TIMEOUT, f"no verdict in {self._timeout_s:g} s")
            except EOFError as error:
                self._increment("reward_workers/died")
                detail = str(error)
            finally:
                self._idle_workers.put(worker)
        return make_faults(Fault.DIED, detail)

    def _increment(self, key: str) -> None:
        with self._lock:
            self.counters[key] += 1


def _sum_verdicts(replies: Iterable[tuple[str, float, Reply]], number: int) -> Reward:
    """Return the weighted sum of the verdicts on answer ``number``; no value for any fault, or for skips
    alone. ``replies``: (name, weight, reply) of each function."""
    parts: dict[str, float | None] = {}
    failures: dict[str, str] = {}
    metrics: dict[str, list[float]] = {}
    extra: dict[str, Any] = {}
    faults, terms = [], []
    for name, weight, reply in replies:
        value, fault, detail = reply.verdicts[number]
        parts[name] = value
        extra |= {column: values[number] for column, values in reply.extra.items()}
        for metric, values in reply.metrics.items():
            metrics.setdefault(metric, []).extend(math.nan if value is None else value for value in values)
        if fault:
            faults.append(f"{fault}: {name}: {detail}")
            failures[name] = f"{fault}: {detail}\n{reply.trace}".rstrip()
        elif value is not None:
            terms.append(weight * value)
    logs = {
        "metrics": {metric: math.fsum(values) / len(values) for metric, values in metrics.items()},
        "extra": extra,
    }
    if faults or not terms:
        return Reward(value=None, reason="; ".join(faults) or "skipped", parts=parts, failed=failures, **logs)
    return Reward(value=math.fsum(terms), parts=parts, **logs)


def _close_workers(workers: Sequence[Worker], threads: ThreadPoolExecutor) -> None:
    for worker in workers:
        worker.interrupt()
    threads.shutdown(wait=True, cancel_futures=True)
    for worker in workers:
        worker.kill()


def _explain_refusal(name: str, fault: str, detail: str, timeout_s: float) -> str:
    """Return why a function that failed on its dry run is refused; "" if another completion may work."""
    match fault:
        case Fault.WRONG_LENGTH:
            return f"reward {name} returned {detail}; return one number per completion"
        case Fault.NOT_A_NUMBER:
            return (
                f"reward {name} returned {detail} for a completion; return a number, or None for no opinion"
            )
        case Fault.TIMEOUT:
            return (
                f"reward {name} gave two completions no verdict in reward.timeout_s={timeout_s:g} s on a dry "
                "run; fix it or raise the limit"
            )
        case Fault.DIED:
            return f"reward {name} ended its process on a dry run ({detail}); fix it"
        case Fault.SIGNATURE:
            if "'environments'" in detail:
                return (
                    f"reward {name} requires TRL's environments, which rewards do not get here; use what the "
                    "environment of task.env returns as its reward (env), or give the argument a default"
                )
            is_missing = "missing a required" in detail
            other = 'add the column to the rows or choose another reward ("env": that of task.env)'
            fix = other if is_missing else "give it **columns"
            fix += " (it gets completions and the row's columns by their names)" if is_missing else ""
            fix = (
                f"name it in task.params.answer_column, {fix}" if is_missing and "'answer'" in detail else fix
            )
            return f"reward {name} does not take the row ({detail}); {fix}"
        case Fault.NO_COLUMN:
            return (
                f"reward {name} looks up a column that the row does not have ({detail}); add the column to "
                "the rows or choose another reward"
            )
        case Fault.UNDEFINED:
            return f"reward {name} uses what does not exist ({detail}); fix it"
    return ""


def _make_error(sentence: str, note: str) -> ValueError:
    error = ValueError(sentence)
    if note:
        error.add_note(note)
    return error


def _name_functions(functions: Sequence[str]) -> list[str]:
    """Return the names in metrics: ``f`` for ``path.py:f``, ``judge`` for a judge; the functions if two would
    be equal."""
    short_names = ["judge" if spec.startswith(JUDGE) else spec.rpartition(":")[2] for spec in functions]
    return short_names if len(set(short_names)) == len(short_names) else list(functions)


def _make_unplayed_reward(trajectory: Trajectory) -> Reward:
    return Reward(value=None, reason=f"episode: {trajectory.stop}: {trajectory.error}")


def _extract_answer(trajectory: Trajectory) -> tuple[list[str], list[int]]:
    """Return the policy's texts by turn, and all token ids after the prompt (tool replies included)."""
    texts = [turn.completion.text for turn in trajectory.turns]
    parts = [part for turn in trajectory.turns for part in (turn.context, turn.completion.tokens)][1:]
    return texts, np.concatenate(parts).tolist() if parts else []


_Answers = list[tuple[list[str], list[int]]]  # (texts of its turns, token ids) of each answer


def _prepend_prefill(prompt: Prompt, answers: _Answers) -> tuple[Prompt, _Answers]:
    """Move an assistant message at the end of a prompt, if any, to the beginning of its answers, as TRL
    does."""
    if prompt.prefill is None or prompt.messages is None:
        return prompt, answers
    longer_answers = [([prompt.prefill + "".join(texts[:1]), *texts[1:]], ids) for texts, ids in answers]
    return replace(prompt, messages=prompt.messages[:-1]), longer_answers


def _make_columns(prompt: Prompt, answers: Sequence[tuple[list[str], list[int]]]) -> dict[str, Any]:
    """Make the arguments that TRL passes to a reward function, all as lists: the row's columns and the
    answers. For a chat prompt a completion is a chat too: the policy's messages, one per turn."""
    num_completions = len(answers)
    columns = {name: [value] * num_completions for name, value in prompt.columns.items()}
    if prompt.messages is None:
        columns["prompts"] = [prompt.text] * num_completions
        columns["completions"] = ["".join(texts) for texts, _ in answers]
    else:
        columns["prompts"] = [[dict(message) for message in prompt.messages]] * num_completions
        columns["completions"] = [
            [{"role": "assistant", "content": text} for text in texts] for texts, _ in answers
        ]
    columns["completion_ids"] = [ids for _, ids in answers]
    return columns
