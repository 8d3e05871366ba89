"""Rows of other projects become prompts; a bad row is named by file and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.env.rows import prompt_from_row, read

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_text_and_chat_rows_keep_their_other_columns() -> None:
    text = prompt_from_row({"prompt": "2+2?", "answer": 4, "level": 1}, "row 1")
    chat = prompt_from_row({"prompt": CHAT, "solution": "4", "id": 7}, "row 2")
    assert (text.text, text.messages, text.columns) == ("2+2?", None, {"answer": 4, "level": 1})
    assert chat.messages == tuple(CHAT)
    assert chat.columns == {"solution": "4", "id": 7, "answer": "4"}
    assert chat.uid == "7"


@pytest.mark.parametrize("key", ["reward_model", "reward_spec"])
def test_verl_and_skyrl_rows(key: str) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": CHAT,
        key: {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3},
    }
    prompt = prompt_from_row(row, "row 1")
    assert prompt.columns["answer"] == "4"
    assert prompt.columns["data_source"] == "gsm8k"
    assert prompt.columns["extra_info"] == {"index": 3}


def test_a_uid_is_the_content_and_not_the_place() -> None:
    row = {"prompt": CHAT, "answer": "4"}
    assert prompt_from_row(row, "row 1").uid == prompt_from_row(row | {"more": 1}, "row 9").uid
    assert prompt_from_row(row, "row 1").uid != prompt_from_row(row | {"answer": "5"}, "row 1").uid


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "4"}, "row 2 of .*rows.jsonl has no 'prompt'"),
        ({"prompt": "", "answer": "4"}, "row 2 of .* has no 'prompt'"),
        ({"prompt": "2+2?"}, "row 2 of .* has no 'answer', 'solution' or 'ground_truth'"),
        ({"prompt": "2+2?", "answer": None}, "row 2 of .* has no 'answer'"),
        ({"prompt": [{"role": "user"}], "answer": "4"}, "row 2 of .* neither text nor a chat"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "4"},
            "neither text nor a chat",
        ),
        ({"prompt": 5, "answer": "4"}, "neither text nor a chat"),
        ({"prompt": "2+2?", "answer": "4", "completions": 1}, "row 2 of .* has a column 'completions'"),
        ({"prompt": "2+2?", "answer": "4", "id": "a"}, "row 2 of .* has the id 'a' of row 1"),
        ("[1, 2]", "row 2 of .* is a list"),
        ('{"prompt": "cut', "row 2 of .* is not JSON"),
        ('{"prompt": "2+2?", "answer": ' + "[" * 100_000, "row 2 of .* is not JSON .nested deeper than 100"),
        ('{"prompt": "\\ud83d", "answer": "4"}', "row 2 of .* surrogate pair in column 'prompt'"),
        ('{"prompt": "2+2?", "answer": "\\ude00!"}', "row 2 of .* surrogate pair in column 'answer'"),
        ('{"prompt": "2+2?", "answer": "4", "more": {"a": ["\\ud83d"]}}', "in column 'more'"),
        ('{"prompt": "2+2?", "answer": "4", "\\ud83d": 1}', r"in column '\\ud83d'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, sentence: str) -> None:
    """Half of a surrogate pair is valid JSON, and broke the run where the row was written, in its middle, and
    every resume after that; brackets enough were a RecursionError."""
    source = jsonl(tmp_path / "rows.jsonl", {"prompt": "1+1?", "answer": "2", "id": "a"}, row)
    with pytest.raises(ValueError, match=sentence):
        read(source, "train")


def test_a_parquet_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.Array.from_buffers(
        pyarrow.utf8(),
        2,
        [None, pyarrow.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pyarrow.py_buffer(b"a\xff")],
    )
    table = pyarrow.table({"prompt": texts, "answer": ["1", "2"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"one of the rows 1 to 2 of .* not UTF-8"):
        read(str(tmp_path / "rows.parquet"), "train")


def test_an_empty_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows for train"):
        read(jsonl(tmp_path / "rows.jsonl"), "train")
    with pytest.raises(ValueError, match=r"use a \.jsonl or \.parquet file"):
        read(jsonl(tmp_path / "rows.csv", "a,b"), "train")


@pytest.mark.slow
def test_parquet_reads_as_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": CHAT, "answer": "4", "level": k} for k in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    theirs = read(str(tmp_path / "rows.parquet"), "train")
    ours = read(jsonl(tmp_path / "rows.jsonl", *rows), "train")
    assert [(p.uid, p.messages, p.columns) for p in theirs] == [(p.uid, p.messages, p.columns) for p in ours]
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not a parquet file"):
        read(str(tmp_path / "bad.parquet"), "train")


def test_a_datasets_folder_has_its_own_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": [f"{k}+1?" for k in range(20)], "answer": [str(k + 1) for k in range(20)]}
    train = datasets.Dataset.from_dict(rows)
    both = datasets.DatasetDict(
        train=train, test=datasets.Dataset.from_dict({"prompt": ["5+5?"], "answer": ["10"]})
    )
    train.save_to_disk(str(tmp_path / "plain"))
    both.save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict(train=train).save_to_disk(str(tmp_path / "one"))

    def texts(folder: str, split: str, **options: Any) -> list[str | None]:
        return [prompt.text for prompt in read(str(tmp_path / folder), split, **options)]

    assert texts("plain", "train") == texts("both", "train") == texts("one", "train") == rows["prompt"]
    assert texts("both", "eval") == ["5+5?"]
    assert texts("both", "train", holdout=0.5) == rows["prompt"], "its own split is what is held out"
    with pytest.raises(ValueError, match=r"has the splits \['train'\] and none for eval"):
        texts("one", "eval")
    held_out = texts("one", "eval", holdout=0.5) + texts("one", "train", holdout=0.5)
    assert sorted(map(str, held_out)) == sorted(rows["prompt"])
