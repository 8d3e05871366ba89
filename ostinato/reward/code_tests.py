"""The reward ``code_tests``: the code of an answer passes the tests of its row, or it does not.

    MBPP       test_list: ["assert f(1) == 2", ...], test_setup_code: "..", test_imports: ["import math", ..]
    HumanEval  prompt: "def f(x): ..", test: "def check(candidate): ..", entry_point: "f"

Every answer is run in processes of its own (``code_runner``), within the isolation of the reward worker.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import json
import math
import os
import re
import select
import subprocess
import symtable
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ostinato.reward import code_runner, isolation
from ostinato.reward.answers import answer_texts

ANSWER_LIMIT_S = 5.0  # of one answer's code, where the limit of the group leaves so much
OF_GROUP = 0.8  # of the limit of a group's call: what its answers may take together
MEMORY = 2 << 30  # bytes of address space of an answer's process
MAX_FENCES = 8  # that may stand in the docstrings of a block
_OPENING = re.compile(r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_MARK = re.compile(r"(^[ \t]*\[BEGIN\]|^[ \t]*\[PYTHON\]|^[ \t]*\[DONE\]|\[/PYTHON\])", re.MULTILINE)
_BEGINS = frozenset({"[BEGIN]", "[PYTHON]"})
_BUILTINS = frozenset(vars(builtins))
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
    """1 where the code of the completion (``code_of``) passes all tests of its row, else 0.

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
    test, entry = row.get("test"), row.get("entry_point")
    if isinstance(test, str) and isinstance(entry, str):
        code = code_of(text, asked, frozenset({entry}))
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
    code = code_of(text, asked, _unknown((*before, *tests)))
    return Job(code=code, before=before, tests=tuple(tests))


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return bool(code)


def _unknown(tests: Sequence[str]) -> frozenset[str]:
    """The names that the tests use and do not define; built-in ones too, which an answer may define anew."""
    called = re.findall(r"\b([^\W\d]\w*)\s*\(", "\n".join(tests))
    names = _names("\n".join(tests)) or Names()
    return names.used | _BUILTINS.intersection(called)


def code_of(text: str, prompt: str = "", wanted: frozenset[str] = frozenset()) -> str:
    """The code of an answer that defines the names ``wanted``: of each the last block that does, and the
    blocks with what those use, in the order of the text. Blocks of Python come before other ones. Where none
    defines a name: the last block of Python, else of any kind, else the whole text. A block that is never
    closed ends with the text; one that ``prompt`` has opened begins with it."""
    if prompt.count("```") % 2:
        text = f"```python\n{text}"
    blocks, marked = fenced(text), between_marks(text)
    python = [code for language, code in blocks if language in _PYTHON]
    every = [code for _, code in blocks]
    chosen = (defining(codes, wanted) for codes in (marked, python, every))
    return next(filter(None, chosen), (python or every or marked)[-1])


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks, without the indentation of their fences."""
    blocks, at = [], 0
    while opening := _OPENING.search(text, at):
        indent, fence, language = opening.groups()
        start, margin = opening.end() + 1, re.compile(rf"^[ \t]{{1,{len(indent) or 1}}}", re.MULTILINE)
        closing = re.compile(rf"^[ \t]*{fence}{fence[0]}*[ \t]*([^\n]*)$", re.MULTILINE)
        ends = list(itertools.islice(closing.finditer(text, start), MAX_FENCES))
        language = language.strip().lower()
        is_code = language in _PYTHON or not language
        whole = (one for one in ends if is_code and _names(text[start : one.start()]))  # not in a docstring
        end = next(whole, ends[0] if ends else None)
        code = text[start : end.start() if end else len(text)]
        blocks.append((language, margin.sub("", code) if indent else code))
        at = len(text) if end is None else end.start() if end[1] else end.end()
    return blocks


def between_marks(text: str) -> list[str]:
    """What stands behind [BEGIN] or [PYTHON], or before [DONE] or [/PYTHON]; the whole text without them."""
    pieces = ["[BEGIN]", *_MARK.split(text)]
    return [code for mark, code in zip(pieces[::2], pieces[1::2], strict=True) if mark.strip() in _BEGINS]


def defining(codes: Sequence[str], wanted: frozenset[str]) -> str:
    """The codes that define ``wanted`` and what these use, joined; "" where none defines any of them."""
    codes = [textwrap.dedent(code) for code in codes]
    known = [_names(code) or Names() for code in codes]
    defined = frozenset[str]().union(*(names.defined for names in known))
    own = wanted & defined - _BUILTINS or wanted & defined
    chosen = {max(k for k, names in enumerate(known) if name in names.defined) for name in own}
    users = sorted(chosen)
    while users:
        user = users.pop()
        for name in sorted(known[user].used):
            sources = [k for k, names in enumerate(known) if name in names.defined | names.imported]
            source = max((k for k in sources if k < user), default=min(sources, default=user))
            if source not in chosen:
                chosen.add(source)
                users.append(source)
    return "\n".join(codes[k] for k in sorted(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The global names of a piece of code."""

    defined: frozenset[str] = frozenset()  # by def, class or assignment at its top level
    imported: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()  # and neither defined nor imported in it, nor built in


def _names(code: str) -> Names | None:
    """None for what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in an answer's texts
            top = symtable.symtable(textwrap.dedent(code), "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tables, used = [top], set[str]()
    for table in tables:
        used |= {one.get_name() for one in table.get_symbols() if one.is_referenced() and one.is_global()}
        tables += table.get_children()
    imported = frozenset(one.get_name() for one in top.get_symbols() if one.is_imported())
    defined = frozenset(one.get_name() for one in top.get_symbols() if one.is_assigned())
    return Names(defined=defined, imported=imported, used=frozenset(used) - defined - imported - _BUILTINS)


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
