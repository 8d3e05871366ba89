"""The reward ``code_tests``: the code of an answer passes the tests of its row, or it does not.

    MBPP       test_list: ["assert f(1) == 2", ...], test_setup_code: "..", test_imports: ["import math", ..]
    HumanEval  prompt: "def f(x): ..", test: "def check(candidate): ..", entry_point: "f"

Every answer is run in processes of its own (``code_runner``), within the isolation of the reward worker.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ostinato.reward import code_runner, isolation
from ostinato.reward.answers import answer_texts

ANSWER_LIMIT_S = 5.0  # of one answer's code, where the limit of the group leaves so much
OF_GROUP = 0.8  # of the limit of a group's call: what its answers may take together
MEMORY = 2 << 30  # bytes of address space of an answer's process
_BLOCK = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset({"python", "py", "python3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is run for one answer: its code, what its tests begin with, and the tests."""

    code: str
    before: tuple[str, ...]
    tests: tuple[str, ...]
    entry_point: str = ""  # of HumanEval: the function that ``check`` is called with


def code_tests(
    completions: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    timeout_s: float = 10.0,
    **columns: Any,
) -> list[float]:
    """1 where the last block of code of the completion, or its whole text, passes all tests of its row.

    An answer that takes longer than ANSWER_LIMIT_S fails, or than its part of 0.8 ``timeout_s`` where that is
    less: each core runs one answer at a time. NaN, no verdict, where the processes cannot be started. Raises
    ValueError for a row without tests and for tests that do not compile.
    """
    texts = answer_texts(completions, in_thought)
    rows = [
        {name: values[k] for name, values in columns.items() if _is_column(values, k)}
        for k in range(len(texts))
    ]
    jobs = [job(text, row) for text, row in zip(texts, rows, strict=True)]
    at_once = max(1, min(len(jobs), _cores()))
    limit_s = min(ANSWER_LIMIT_S, OF_GROUP * timeout_s / math.ceil(len(jobs) / at_once))
    isolation.hide()
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda one: run(one, limit_s), jobs))


def _is_column(values: Any, number: int) -> bool:
    return isinstance(values, Sequence) and len(values) > number


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job(text: str, row: dict[str, Any]) -> Job:
    """What is to be run for the answer ``text`` to a row. Raises ValueError for a row without tests."""
    asked = next((one for one in (row.get("prompt"), row.get("prompts")) if isinstance(one, str)), "")
    code, test, entry = code_of(text, asked), row.get("test"), row.get("entry_point")
    if isinstance(test, str) and isinstance(entry, str):
        begun = asked if re.search(rf"^def {re.escape(entry)}\b", asked, re.MULTILINE) else ""
        is_whole = re.search(rf"^(?:async )?(?:def |class )?{re.escape(entry)}\b", code, re.MULTILINE)
        before = (begun,) if _is_python(begun) else ()
        code = "\n".join([*before, code]) if is_whole else begun + code
        return Job(code=code, before=before, tests=(test, f"check({entry})"), entry_point=entry)
    tests, imports = row.get("test_list"), row.get("test_imports") or ()
    if not tests or not all(isinstance(one, str) for one in tests):
        raise ValueError(
            "the reward code_tests needs the column test_list, texts of Python, or test and entry_point"
        )
    before = (*([imports] if isinstance(imports, str) else imports), row.get("test_setup_code") or "")
    return Job(code=code, before=before, tests=tuple(tests))


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return bool(code)


def code_of(text: str, prompt: str = "") -> str:
    """The last fenced block of Python, else the last of any kind, else the whole text. A block that is never
    closed ends with the text; one that ``prompt`` has opened begins with it."""
    if prompt.count("```") % 2:
        text = f"```python\n{text}"
    blocks = [(found[1].strip().lower(), found[2]) for found in _BLOCK.finditer(text)]
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [code for _, code in blocks] or [text])[-1]


def run(job: Job, limit_s: float) -> float:
    """1 where the tests pass within ``limit_s``, 0 where they do not, NaN where they could not be run. Raises
    ValueError for tests that do not compile."""
    order = {"code": job.code, "before": job.before, "tests": job.tests, "entry_point": job.entry_point}
    order |= {"limit_s": limit_s, "memory": MEMORY}
    command = [sys.executable, "-s", "-P", code_runner.__file__]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
        except OSError:
            return math.nan
        with process:
            try:
                said = _said(process, json.dumps(order).encode() + b"\n", limit_s)
            finally:
                isolation.end_descendants(process.pid)
                process.kill()
    match said:
        case ["started", *verdict]:
            return float(verdict == ["passed"])
        case ["refused", why]:
            raise ValueError(f"the tests do not compile ({why})")
    return math.nan  # it ended, or was late, before the answer's code began


def _said(process: subprocess.Popen[bytes], order: bytes, limit_s: float) -> list[str]:
    """The lines that the tests' process writes: "started", and within ``limit_s`` the verdict; or fewer."""
    assert process.stdin is not None and process.stdout is not None
    said, output = b"", process.stdout.fileno()
    with contextlib.suppress(OSError):  # it has ended
        process.stdin.write(order)
        process.stdin.flush()
        while said.count(b"\n") < 2 and select.select([output], [], [], limit_s)[0]:
            if not (more := os.read(output, 1 << 16)):
                break
            said += more
    return [json.loads(line) for line in said.splitlines()]


def _environment(folder: str) -> dict[str, str]:
    """Of the processes: hashes that are the same in every run, one thread, nothing of the user's."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **threads, "PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder}
