"""What users of other programs reported, tried here: each test names the thread, its input is our own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import Recipe
from ostinato.env.rows import read_source
from ostinato.launch.inputs import prepare_inputs
from ostinato.launch.sft import read_rows
from ostinato.model.named import find_model_folder


@pytest.fixture(scope="module")
def with_an_added_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """seed-moe with a token that was added to its tokenizer alone."""
    folder = tmp_path_factory.mktemp("models") / "added"
    shutil.copytree(find_model_folder("asset:seed-moe"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer["added_tokens"].append({"id": size, "content": "<unit>", "special": True, **added})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_token_without_an_embedding_is_refused_by_its_row(
    with_an_added_token: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/tokenizers/issues/1609: tokens were added and the model was not resized.
    Here a run broke in its first step that met such a row, after both evaluations, naming no row."""
    plain = [{"prompt": f"{k}+{k}=", "completion": "4", "answer": str(2 * k)} for k in range(3)]
    odd = {"prompt": "6+6=<unit>", "completion": "4", "answer": "12"}
    tree: dict[str, Any] = {
        "model": {"path": str(with_an_added_token), "dtype": "float32"},
        "eval": {"n": 1, "split": "train"},
    }
    recipe = Recipe.parse(tree | {"task": {"source": rows_file(tmp_path, *plain, odd)}})
    with pytest.raises(ValueError, match=r"row 4 of .*<unit>.*295"):
        prepare_inputs(recipe, training=True)
    with pytest.raises(ValueError, match=r"row 4 of .*<unit>.*295"):
        read_rows(recipe, with_an_added_token)
    kept = Recipe.parse(tree | {"task": {"source": rows_file(tmp_path, *plain)}})
    assert len(read_rows(kept, with_an_added_token)[0]) == 3


@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_a_table_gives_a_call_no_arguments_of_other_tools(form: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/pull/5376: a column of a table has one type, so each call gets the
    arguments of all calls, as null, and a template that writes JSON shows them to the model."""
    pyarrow = pytest.importorskip("pyarrow")

    def row(tool: str, argument: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {argument: {"type": "string"}}}
        call = {"type": "function", "function": {"name": tool, "arguments": {argument: "x"}}}
        chat = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
        ]
        tools = [{"type": "function", "function": {"name": tool, "parameters": schema}}]
        return {"prompt": chat, "tools": tools, "answer": "3"}

    rows = [row("weather", "city"), row("stock", "item")]
    table = pyarrow.Table.from_pylist(rows)
    assert table["tools"][1].as_py()[0]["function"]["parameters"]["properties"]["city"] is None
    if form == "parquet":
        source = str(tmp_path / "rows.parquet")
        __import__("pyarrow.parquet").parquet.write_table(table, source)
    else:
        source = str(tmp_path / "folder")
        pytest.importorskip("datasets").Dataset(table).save_to_disk(source)
    for given, prompt in zip(rows, read_source(source, "train"), strict=True):
        assert prompt.messages == tuple(given["prompt"]) and list(prompt.tools) == given["tools"]
