"""What the built-in rewards give the own answers of public test sets, and their last numbers alone.

    python -m lab.own_answers FOLDER [NAME ...]

FOLDER has files of the sets as their authors publish them: gsm8k-*.jsonl, math500-*.jsonl (the final answer
behind "The answer is:"), mbpp.jsonl, HumanEval.jsonl.gz. Prints a line for each file and reward, and the rows
whose own answer gets less than full marks, or whose last number alone gets them without being the answer.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.reward.answers import read_whole_number
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn

Row = Mapping[str, Any]
TIMEOUT_S = 120.0  # of a row
UNITS = re.compile(r"\^\\circ|\\text\{[^}]*\}|^[a-z] ?=")  # around a number that is the answer all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """A row as a reward sees it."""

    prompt: Prompt
    text: str  # the completion that is the row's own answer
    last: str = ""  # one that is the last number of it alone, where that is not the answer


def gsm8k(row: Row, number: int) -> OwnAnswer:
    return OwnAnswer(prompt=_prompt(number, row["question"], answer=row["answer"]), text=row["answer"])


def math500(row: Row, number: int) -> OwnAnswer:
    gold = row["answer"].rpartition("The answer is:")[2].strip()
    numbers = re.findall(r"\d+(?:\.\d+)?", gold)
    is_answer = not numbers or read_whole_number(UNITS.sub("", gold))
    return OwnAnswer(
        prompt=_prompt(number, row["question"], answer=gold),
        text=row["answer"].rpartition("The answer is:")[0],
        last="" if is_answer else rf"The answer is \boxed{{{numbers[-1]}}}.",
    )


def mbpp(row: Row, number: int) -> OwnAnswer:
    return OwnAnswer(prompt=_prompt(number, row["text"], **row), text=f"```python\n{row['code']}\n```")


def humaneval(row: Row, number: int) -> OwnAnswer:
    columns = {name: row[name] for name in ("test", "entry_point")}
    return OwnAnswer(prompt=_prompt(number, row["prompt"], **columns), text=row["canonical_solution"])


def _prompt(number: int, text: str, /, **columns: Any) -> Prompt:
    return Prompt(uid=str(number), text=text, columns=columns)


SETS: tuple[tuple[str, str, Callable[[Row, int], OwnAnswer]], ...] = (
    ("gsm8k-*.jsonl", "numeric", gsm8k),
    ("gsm8k-test.jsonl", "math_verify", gsm8k),
    ("math500-*.jsonl", "math_verify", math500),
    ("mbpp.jsonl", "code_tests", mbpp),
    ("HumanEval.jsonl.gz", "code_tests", humaneval),
)


def rows_of(file: Path) -> Iterator[Row]:
    data = file.read_bytes()
    lines = (gzip.decompress(data) if file.suffix == ".gz" else data).decode().split("\n")
    yield from (json.loads(line) for line in lines if line.strip())


async def graded(grader: WorkerGrader, own: OwnAnswer) -> list[Reward]:
    """Of the own answer, and of its last number where there is one."""
    texts = [text for text in (own.text, own.last) if text]
    nothing = np.zeros(0, np.int32)
    played = [
        Trajectory(turns=(Turn(context=nothing, completion=_completion(text)),), stop=Stop.EOS, seed=(k,))
        for k, text in enumerate(texts)
    ]
    return await grader.grade(Group(prompt=own.prompt, trajectories=tuple(played), step=0))


def _completion(text: str) -> Completion:
    tokens = np.zeros(0, np.int32)
    return Completion(
        tokens=tokens, logprobs=np.zeros(0, np.float32), versions=tokens, stop=Stop.EOS, text=text
    )


async def judge(file: Path, reward: str, form: Callable[[Row, int], OwnAnswer]) -> tuple[str, list[str]]:
    """A line of the table, and what is to be looked at."""
    rows = [form(row, number) for number, row in enumerate(rows_of(file), 1)]
    with WorkerGrader([reward], timeout_s=TIMEOUT_S, workers=2) as grader:
        verdicts = await asyncio.gather(*(graded(grader, row) for row in rows))
    failures, full, paid, lasts = [], 0, 0, 0
    for row, (own, *last) in zip(rows, verdicts, strict=True):
        full += own.value == 1
        lasts, paid = lasts + len(last), paid + sum(one.value == 1 for one in last)
        gold = str(row.prompt.columns.get("answer", ""))[-60:]
        if own.value != 1:
            failures.append(f"row {row.prompt.uid}: {own.value} for its own answer {gold!r} {own.reason}")
        failures += [
            f"row {row.prompt.uid}: 1 for {row.last!r}, it is {gold!r}" for one in last if one.value == 1
        ]
    share = f"{full} of {len(rows)} ({full / len(rows):.2%})"
    return f"{file.name:22} {reward:12} {share:24} {f'{paid} of {lasts}' if lasts else '-'}", failures


def main(folder: str, *names: str) -> int:
    print(f"{'file':22} {'reward':12} {'own answers with 1':24} last numbers alone with 1")
    for pattern, reward, form in SETS:
        for file in sorted(Path(folder).glob(pattern)):
            if not names or file.name in names:
                line, failures = asyncio.run(judge(file, reward, form))
                print(line, *(f"    {one}" for one in failures), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
