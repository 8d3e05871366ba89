"""The reward ``code_tests``: whether the code of an answer passes the tests of its row.

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
from ostinato.reward.answers import extract_texts

ANSWER_LIMIT_S = 5.0  # for an answer's code, unless the limit of the group gives less
GROUP_SHARE = 0.8  # the share of a group's limit that its answers may take together
MEMORY_BYTES = 2 << 30  # bytes of address space of an answer's process
MAX_FENCES = 8  # fences in the docstrings of a block that are looked at
_FENCE = re.compile(r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_BLOCK_MARK = re.compile(r"(^[ \t]*\[BEGIN\]|^[ \t]*\[PYTHON\]|^[ \t]*\[DONE\]|\[/PYTHON\])", re.MULTILINE)
_OPENING_MARKS = frozenset({"[BEGIN]", "[PYTHON]"})
_BUILTINS = frozenset(vars(builtins))
_PYTHON_LANGUAGES = frozenset({"python", "py", "python3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The code of an answer, the code that runs before its tests, and the tests."""

    code: str
    before: tuple[str, ...]
    tests: tuple[str, ...]
    entry_point: str = ""  # in HumanEval the function that ``check`` is called with


def code_tests(
    completions: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    timeout_s: float = 10.0,
    **columns: Any,
) -> list[float]:
    """Return 1 where the code of the completion (``extract_code``) passes all tests of its row, else 0.

    An answer fails if it takes longer than ANSWER_LIMIT_S, or longer than its part of 0.8 ``timeout_s`` if
    that is less: each core runs one answer at a time. The reward is NaN, no verdict, if the processes cannot
    be started. From then on other processes of the user cannot read this one. Raises ValueError for a row
    without tests and for tests that do not compile.
    """
    texts = extract_texts(completions, in_thought)
    rows = [
        {name: values[k] for name, values in columns.items() if _has_value(values, k)}
        for k in range(len(texts))
    ]
    jobs = [make_job(text, row) for text, row in zip(texts, rows, strict=True)]
    num_threads = max(1, min(len(jobs), _count_cores()))
    limit_s = min(ANSWER_LIMIT_S, GROUP_SHARE * timeout_s / math.ceil(len(jobs) / num_threads))
    isolation.forbid_tracing()
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(lambda answer_job: run_job(answer_job, limit_s), jobs))


def _has_value(values: Any, number: int) -> bool:
    return isinstance(values, Sequence) and len(values) > number


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_job(text: str, row: dict[str, Any]) -> Job:
    """Make the job of the answer ``text`` to a row. Raises ValueError for a row without tests."""
    prompt = next((value for value in (row.get("prompt"), row.get("prompts")) if isinstance(value, str)), "")
    test, entry_point = row.get("test"), row.get("entry_point")
    if isinstance(test, str) and isinstance(entry_point, str):
        code = extract_code(text, prompt, frozenset({entry_point}))
        stub = prompt if re.search(rf"^def {re.escape(entry_point)}\b", prompt, re.MULTILINE) else ""
        is_complete = re.search(
            rf"^(?:async )?(?:def |class )?{re.escape(entry_point)}\b", code, re.MULTILINE
        )
        preamble = (stub,) if _is_python(stub) else ()
        code = "\n".join([*preamble, code]) if is_complete else stub + code
        return Job(code=code, before=preamble, tests=(test, f"check({entry_point})"), entry_point=entry_point)
    tests, imports = row.get("test_list"), row.get("test_imports") or ()
    if not tests or not all(isinstance(value, str) for value in tests):
        raise ValueError(
            "the reward code_tests needs the column test_list, texts of Python, or test and entry_point"
        )
    preamble = (*([imports] if isinstance(imports, str) else imports), row.get("test_setup_code") or "")
    code = extract_code(text, prompt, _find_undefined_names((*preamble, *tests)))
    return Job(code=code, before=preamble, tests=tuple(tests))


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return bool(code)


def _find_undefined_names(tests: Sequence[str]) -> frozenset[str]:
    """Return the names that the tests use and do not define, with the built-in functions that they call,
    which an answer may define anew."""
    calls = re.findall(r"\b([^\W\d]\w*)\s*\(", "\n".join(tests))
    names = _analyse_names("\n".join(tests)) or Names()
    return names.used | _BUILTINS.intersection(calls)


def extract_code(text: str, prompt: str = "", names: frozenset[str] = frozenset()) -> str:
    """Return the code of an answer that defines the names ``names``. These are for each name the last block
    that defines it, and the blocks that define what those blocks use, in the order of the text. Blocks
    between marks come first, then those of Python, then all. If no block defines any of the names, return the
    last block of Python, else of any kind, else the whole text. A block that is never closed ends with the
    text; a block that ``prompt`` has opened begins with it."""
    if prompt.count("```") % 2:
        text = f"```python\n{text}"
    blocks, marked_blocks = split_fences(text), split_marks(text)
    python_blocks = [code for language, code in blocks if language in _PYTHON_LANGUAGES]
    all_blocks = [code for _, code in blocks]
    candidates = (select_definitions(codes, names) for codes in (marked_blocks, python_blocks, all_blocks))
    return next(filter(None, candidates), (python_blocks or all_blocks or marked_blocks)[-1])


def split_fences(text: str) -> list[tuple[str, str]]:
    """Return (language, code) of the fenced blocks, without the indentation of their fences."""
    blocks, position = [], 0
    while opening := _FENCE.search(text, position):
        indent, fence, language = opening.groups()
        start, margin = opening.end() + 1, re.compile(rf"^[ \t]{{1,{len(indent) or 1}}}", re.MULTILINE)
        closing = re.compile(rf"^[ \t]*{fence}{fence[0]}*[ \t]*([^\n]*)$", re.MULTILINE)
        ends = list(itertools.islice(closing.finditer(text, start), MAX_FENCES))
        language = language.strip().lower()
        is_code = language in _PYTHON_LANGUAGES or not language
        # A fence in a docstring does not end the block: the code before it is incomplete.
        complete_ends = (match for match in ends if is_code and _analyse_names(text[start : match.start()]))
        end = next(complete_ends, ends[0] if ends else None)
        code = text[start : end.start() if end else len(text)]
        blocks.append((language, margin.sub("", code) if indent else code))
        position = len(text) if end is None else end.start() if end[1] else end.end()
    return blocks


def split_marks(text: str) -> list[str]:
    """Return the texts after [BEGIN] or [PYTHON], or before [DONE] or [/PYTHON]; the whole text if there is
    no such mark."""
    # the text before the first mark counts as one that was begun
    pieces = ["[BEGIN]", *_BLOCK_MARK.split(text)]
    return [
        code for mark, code in zip(pieces[::2], pieces[1::2], strict=True) if mark.strip() in _OPENING_MARKS
    ]


def select_definitions(codes: Sequence[str], wanted: frozenset[str]) -> str:
    """Join the codes that define ``wanted`` and the codes that define what those use. Returns "" if no code
    defines any of the names."""
    codes = [textwrap.dedent(code) for code in codes]
    name_sets = [_analyse_names(code) or Names() for code in codes]
    defined_names = frozenset[str]().union(*(names.defined for names in name_sets))
    targets = wanted & defined_names - _BUILTINS or wanted & defined_names
    selected_idx = {
        max(idx for idx, names in enumerate(name_sets) if name in names.defined) for name in targets
    }
    pending_idx = sorted(selected_idx)
    while pending_idx:
        code_idx = pending_idx.pop()
        for name in sorted(name_sets[code_idx].used):
            sources = [idx for idx, names in enumerate(name_sets) if name in names.defined | names.imported]
            source = max((idx for idx in sources if idx < code_idx), default=min(sources, default=code_idx))
            if source not in selected_idx:
                selected_idx.add(source)
                pending_idx.append(source)
    return "\n".join(codes[idx] for idx in sorted(selected_idx))


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The global names of a piece of code."""

    defined: frozenset[str] = frozenset()  # by def, class or assignment at its top level
    imported: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()  # neither defined nor imported in it, nor built in


def _analyse_names(code: str) -> Names | None:
    """Return the global names of a piece of code; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an answer's strings may have invalid escapes
            top = symtable.symtable(textwrap.dedent(code), "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tables, uses = [top], set[str]()
    for table in tables:
        uses |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and symbol.is_global()
        }
        tables += table.get_children()
    imports = frozenset(symbol.get_name() for symbol in top.get_symbols() if symbol.is_imported())
    definitions = frozenset(symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned())
    return Names(
        defined=definitions, imported=imports, used=frozenset(uses) - definitions - imports - _BUILTINS
    )


def run_job(job: Job, limit_s: float) -> float:
    """Return 1 if the tests pass within ``limit_s``, 0 if they do not, NaN if they could not be run. Raises
    ValueError for tests that do not compile. All processes that were started are ended."""
    request = {"code": job.code, "before": job.before, "tests": job.tests, "entry_point": job.entry_point}
    request |= {"limit_s": limit_s, "memory": MEMORY_BYTES}
    command = [sys.executable, "-s", "-P", code_runner.__file__]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder,
                env=_make_environment(folder),
                start_new_session=True,
            )
        except OSError:
            return math.nan
        with process:
            try:
                lines = _exchange_lines(process, json.dumps(request).encode() + b"\n", limit_s)
            finally:
                isolation.end_descendants(process.pid)
                process.kill()
    match lines:
        case ["started", *verdict]:
            return float(verdict == ["passed"])
        case ["refused", reason]:
            raise ValueError(f"the tests do not compile ({reason})")
    return math.nan  # the process ended, or was late, before the answer's code began


def _exchange_lines(process: subprocess.Popen[bytes], request: bytes, limit_s: float) -> list[str]:
    """Send ``request`` to the tests' process and return the lines that it writes: "started" and the verdict,
    each within ``limit_s`` of the one before. There are fewer lines if the process ends or is late."""
    assert process.stdin is not None and process.stdout is not None
    data, output = b"", process.stdout.fileno()
    with contextlib.suppress(OSError):  # the process may have ended
        process.stdin.write(request)
        process.stdin.flush()
        while data.count(b"\n") < 2 and select.select([output], [], [], limit_s)[0]:
            if not (chunk := os.read(output, 1 << 16)):
                break
            data += chunk
    return [json.loads(line) for line in data.splitlines()]


def _make_environment(folder: str) -> dict[str, str]:
    """Return the environment of the processes: the same hashes in every run, one thread, and no other
    variables of the user but three that programs need."""
    inherited_variables = {
        name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ
    }
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**inherited_variables, **threads, "PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder}
