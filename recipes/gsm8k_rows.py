"""GSM8K for ``laptop-1.5b.toml``: each question behind two solved rows of the train split, as turns.

python gsm8k_rows.py TRAIN.jsonl TEST.jsonl FOLDER      writes FOLDER/train.jsonl and FOLDER/eval.jsonl

The files are those of the set: lines with ``question`` and ``answer``. A model that was told how to answer
is brief and wrong, or is cut; solved rows show it the form.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

SHOWN = (0, 5)  # rows of the train split, which are not trained on


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_chats(path: Path, rows: Sequence[dict[str, str]], shown: Sequence[dict[str, str]]) -> None:
    """Write a line for each of ``rows``: the turns of ``shown``, its question, and its answer."""
    turns = []
    for row in shown:
        solution = re.sub(r"<<.*?>>", "", row["answer"])  # the set's notes for a calculator
        turns += [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": solution},
        ]
    with path.open("w") as file:
        for row in rows:
            prompt = [*turns, {"role": "user", "content": row["question"]}]
            file.write(json.dumps({"prompt": prompt, "answer": row["answer"]}) + "\n")


def main(train: str, test: str, folder: str) -> None:
    rows, directory = read_rows(train), Path(folder)
    shown = [rows[index] for index in SHOWN]
    directory.mkdir(parents=True, exist_ok=True)
    write_chats(directory / "train.jsonl", [row for row in rows if row not in shown], shown)
    write_chats(directory / "eval.jsonl", read_rows(test), shown)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python gsm8k_rows.py TRAIN.jsonl TEST.jsonl FOLDER")
    main(*sys.argv[1:])
