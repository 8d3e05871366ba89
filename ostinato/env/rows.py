"""Rows of JSONL, parquet and datasets folders -> prompts. TRL's, verl's and SkyRL's rows are understood.

    {"prompt": "2+2?", "answer": "4", ...}                                   text
    {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4", ...}  chat
    {"data_source": .., "prompt": [..], "reward_model": {"ground_truth": "4"}, "extra_info": {..}}

The answer is found under ``answer``, ``solution``, ``ground_truth`` or the ``ground_truth`` inside
``reward_model`` or ``reward_spec``, and handed to rewards as ``answer``; all other columns keep their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ostinato.inputs import has_surrogate, parse_json
from ostinato.types import Prompt

ANSWERS = ("answer", "solution", "ground_truth")
NESTED_ANSWERS = ("reward_model", "reward_spec")  # verl, SkyRL
IDS = ("uid", "id")
RESERVED = frozenset({"prompts", "completions", "completion_ids"})  # also passed to reward functions
EVAL_SPLITS = ("eval", "validation", "valid", "dev", "test")

Row = Mapping[str, Any]


def read(
    source: str,
    split: str,
    *,
    prompt_column: str = "prompt",
    answer_column: str = "",
    holdout: float = 0.0,
    config: str = "",
) -> list[Prompt]:
    """The prompts of a .jsonl or .parquet file, a folder with train.jsonl and eval.jsonl, a datasets folder,
    or ``hf:<name>``.

    A dataset with named splits gives its own train or evaluation split. A single file has none: it gives all
    its rows, or with ``holdout`` that share of them (chosen by the hash of their content) to "eval" and the
    rest to "train". ``config`` is the configuration of a hub dataset. uids are the rows' ``uid`` or ``id``,
    else a hash of the content. Raises ValueError naming file, row and column.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"task.params.holdout is {holdout}; use a share of the rows in [0, 1)")
    rows, has_splits = raw_rows(source, split, config, holdout)
    prompts: list[Prompt] = []
    first_row: dict[str, int] = {}
    for number, row in rows:
        where = f"row {number} of {source}"
        prompt = prompt_from_row(row, where, prompt_column, answer_column)
        if any(row.get(name) is not None for name in IDS) and prompt.uid in first_row:
            earlier = first_row[prompt.uid]
            raise ValueError(f"{where} has the id {prompt.uid!r} of row {earlier}; make ids unique")
        first_row.setdefault(prompt.uid, number)
        prompts.append(prompt)
    if holdout and not has_splits:
        prompts = [prompt for prompt in prompts if _held_out(prompt, holdout) == (split == "eval")]
    if not prompts:
        raise ValueError(
            f"task.source {source} has no rows for {split}; check the file and task.params.holdout"
        )
    return prompts


def prompt_from_row(row: Row, where: str, prompt_column: str = "prompt", answer_column: str = "") -> Prompt:
    """One row -> one Prompt; ``where`` names it in the ValueError that a bad row raises."""
    if chosen := RESERVED & row.keys():
        raise ValueError(
            f"{where} has a column {min(chosen)!r}, which the rollout gives to rewards; rename it"
        )
    for name, value in row.items():
        if has_surrogate([name, value]):
            raise ValueError(
                f"{where} has half of a surrogate pair in column {name!r}, which is no character and no file "
                "can hold; write the whole character or U+FFFD"
            )
    content = row.get(prompt_column)
    if not content:
        raise ValueError(f"{where} has no {prompt_column!r}; give it one, or set task.params.prompt_column")
    answer = _answer(row, where, answer_column)
    columns = {name: value for name, value in row.items() if name != prompt_column} | {"answer": answer}
    if isinstance(content, str):
        return Prompt(uid=_uid(row, content, answer), text=content, columns=columns)
    return Prompt(uid=_uid(row, content, answer), messages=messages(content, where), columns=columns)


def messages(content: Any, where: str) -> tuple[dict[str, str], ...]:
    found = []
    for message in content if isinstance(content, list | tuple) else [content]:
        texts = isinstance(message, Mapping) and {name: message.get(name) for name in ("role", "content")}
        if not texts or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(
                f"{where} has a prompt that is neither text nor a chat of {{role, content}} texts"
            )
        found.append({name: text for name, text in message.items() if isinstance(text, str)})
    return tuple(found)


def _answer(row: Row, where: str, answer_column: str) -> Any:
    for name in (answer_column,) if answer_column else ANSWERS:
        if row.get(name) is not None:
            return row[name]
    for name in () if answer_column else NESTED_ANSWERS:
        nested = row.get(name)
        if isinstance(nested, Mapping) and nested.get("ground_truth") is not None:
            return nested["ground_truth"]
    named = repr(answer_column) if answer_column else "'answer', 'solution' or 'ground_truth'"
    raise ValueError(f"{where} has no {named}; give it one, or name the column in task.params.answer_column")


def _uid(row: Row, content: Any, answer: Any) -> str:
    for name in IDS:
        if row.get(name) is not None:
            return str(row[name])
    text = json.dumps([content, answer], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _held_out(prompt: Prompt, share: float) -> bool:
    """Depends on the prompt only: two rows with the same prompt are in the same split."""
    text = json.dumps([prompt.text, prompt.messages], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


def raw_rows(source: str, split: str, config: str, holdout: float) -> tuple[Iterable[tuple[int, Row]], bool]:
    """((row number, row) ..., whether the source has named splits). Lines of a file count from 1."""
    path = Path(source)
    if (file := path / f"{split}.jsonl").is_file():
        return _jsonl(file), True
    if source.startswith("hf:") or path.is_dir():
        return _dataset_rows(source, split, config, holdout)
    if path.suffix in (".jsonl", ".ndjson"):
        return _jsonl(path), False
    if path.suffix == ".parquet":
        return enumerate(_parquet(path), 1), False
    raise ValueError(f"task.source is {source}; use a .jsonl or .parquet file or a datasets folder")


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line, surrogates=True)  # checked by column
            except ValueError as error:  # not JSON, not UTF-8, or nested too deeply
                raise ValueError(f"row {number} of {path} is not JSON ({error}); fix the line") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"row {number} of {path} is a {type(row).__name__}; write one object per line"
                )
            yield number, row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"task.source {path} needs pyarrow; install the extra 'data'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"task.source {path} is not a parquet file ({error}); check the file") from error
    with file:
        number = 0
        for batch in file.iter_batches():
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError as error:  # a text column holds unchecked bytes
                among = f"one of the rows {number + 1} to {number + batch.num_rows} of {path}"
                raise ValueError(f"{among} has a text that is not UTF-8 ({error}); fix it") from error
            yield from rows
            number += batch.num_rows


def _dataset_rows(
    source: str, split: str, config: str, holdout: float
) -> tuple[Iterable[tuple[int, Row]], bool]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"task.source {source} needs datasets; install the extra 'data'") from error
    found: Any
    try:
        if source.startswith("hf:"):
            found = datasets.load_dataset(source.removeprefix("hf:"), config or None)
        else:
            found = datasets.load_from_disk(source)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"task.source {source} is no dataset that can be read ({first})") from error
    if not isinstance(found, Mapping):
        return enumerate(found, 1), False
    names = [name for name in (EVAL_SPLITS if split == "eval" else ("train",)) if name in found]
    if names:
        return enumerate(found[names[0]], 1), split == "eval" or any(name in found for name in EVAL_SPLITS)
    if split == "eval" and holdout and "train" in found:
        return enumerate(found["train"], 1), False
    raise ValueError(
        f"task.source {source} has the splits {list(found)} and none for {split}; "
        "with a train split alone set task.params.holdout to the share of rows to evaluate on"
    )
