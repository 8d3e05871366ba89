"""Rows of JSONL, parquet and datasets folders -> prompts. TRL's, verl's and SkyRL's rows are understood.

    {"prompt": "2+2?", "answer": "4", ...}                                   text
    {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4", ...}  chat
    {"data_source": .., "prompt": [..], "reward_model": {"ground_truth": "4"}, "extra_info": {..}}

The answer, if the rows have one, is found under ``answer``, ``solution``, ``ground_truth`` or the
``ground_truth`` inside ``reward_model`` or ``reward_spec``, and handed to rewards as ``answer``; all other
columns keep their names. The chat template is given ``tools``, ``chat_template_kwargs`` and the messages of
a chat as they are (``tool_calls``, ``name``). A chat that ends with the assistant's words is continued.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.inputs import has_surrogate, parse_json
from ostinato.types import Prompt

PROMPTS = ("prompt", "question", "problem", "messages", "text")  # the last of MBPP
ANSWERS = ("answer", "solution", "ground_truth", "label")
NESTED_ANSWERS = ("reward_model", "reward_spec")  # verl, SkyRL
IDS = ("uid", "id")
RESERVED = frozenset(  # also passed to reward functions
    {"prompts", "completions", "completion_ids", "env_reward", "in_thought"}
)
EVAL_SPLITS = ("eval", "validation", "valid", "dev", "test")

Row = Mapping[str, Any]


def read_source(
    source: str,
    split: str,
    *,
    prompt_column: str = "",
    chat: bool = False,
    answer_column: str = "",
    holdout: float = 0.0,
    config: str = "",
) -> list[Prompt]:
    """Read the prompts of a .jsonl, .csv or .parquet file, a folder with train.jsonl and eval.jsonl, a
    datasets folder, or ``hf:<name>``.

    A dataset with named splits gives its own train or evaluation split. A single file has none: it gives all
    its rows, or with ``holdout`` that share of them (see ``compute_holdout_mask``) to "eval" and the rest to
    "train". ``chat``: a text is what the user says in a chat. ``config`` is the configuration of a hub
    dataset. uids are the rows' ``uid`` or ``id``, else a hash of the content. Raises ValueError, naming file,
    row and column, for what cannot be read, for an id that occurs twice, if there are no rows, and if some
    rows have an answer and others none.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"task.params.holdout is {holdout}; use a share of the rows in [0, 1)")
    rows, has_splits = read_raw_rows(source, split, config, holdout)
    prompts: list[Prompt] = []
    first_numbers: dict[str, int] = {}
    for number, row in rows:
        row_name = f"row {number} of {source}"
        prompt = make_prompt(row, row_name, prompt_column, answer_column)
        prompt = to_chat(prompt) if chat else prompt
        if any(row.get(name) is not None for name in IDS) and prompt.uid in first_numbers:
            first_number = first_numbers[prompt.uid]
            raise ValueError(f"{row_name} has the id {prompt.uid!r} of row {first_number}; make ids unique")
        first_numbers.setdefault(prompt.uid, number)
        prompts.append(prompt)
    if not prompts and not has_splits:
        raise ValueError(f"task.source {source} has no rows; write one object per line")
    _check_answers(prompts)
    contents = list[str]()
    if holdout and not has_splits:
        contents = [json.dumps([row.text, row.messages], sort_keys=True) for row in prompts]
        mask = compute_holdout_mask(contents, holdout)
        prompts = [
            row for row, is_held_out in zip(prompts, mask, strict=True) if is_held_out == (split == "eval")
        ]
    if not prompts:
        rows = f" of its {len(contents)}, {len({*contents})} of them different" if contents else ""
        raise ValueError(
            f"task.source {source} has no rows for {split}{rows}; check the file and task.params.holdout, "
            "which cuts between different prompts"
        )
    return prompts


def to_chat(prompt: Prompt) -> Prompt:
    """Return a text prompt as a chat of one user message, and a chat as it is."""
    if prompt.text is None:
        return prompt
    return replace(prompt, text=None, messages=({"role": "user", "content": prompt.text},))


def add_columns(rows: Sequence[Prompt], columns: Mapping[str, Any]) -> list[Prompt]:
    """Return the rows, each with those of ``columns`` (``task.columns``) that it lacks or that are null in
    it. Raises ValueError for a name that the rollout gives to rewards."""
    if reserved_names := RESERVED & columns.keys():
        raise ValueError(
            f"task.columns has {min(reserved_names)!r}, which the rollout gives to rewards; rename it"
        )

    def find_unset(row: Prompt) -> dict[str, Any]:
        return {name: value for name, value in columns.items() if row.columns.get(name) is None}

    return [replace(row, columns={**row.columns, **find_unset(row)}) for row in rows] if columns else [*rows]


def make_prompt(row: Row, row_name: str, prompt_column: str = "", answer_column: str = "") -> Prompt:
    """Make a Prompt of a row. ``row_name`` is its name in the ValueError that a bad row raises."""
    if reserved_names := RESERVED & row.keys():
        raise ValueError(
            f"{row_name} has a column {min(reserved_names)!r}, which the rollout gives to rewards; rename it"
        )
    for key, value in row.items():
        if has_surrogate([key, value]):
            raise ValueError(
                f"{row_name} has half of a surrogate pair in column {key!r}, which is no character and no "
                "file can hold; write the whole character or U+FFFD"
            )
    name = prompt_column or next((name for name in PROMPTS if row.get(name) is not None), PROMPTS[0])
    content = row.get(name)
    if not content:
        raise ValueError(f"{row_name} has no {name!r}; give it one, or set task.params.prompt_column")
    if name == "messages" and not prompt_column and _ends_with_answer(content):
        raise ValueError(
            f"{row_name} has no 'prompt', and its 'messages' end with the assistant's words; put what the "
            "policy reads into 'prompt', or set task.params.prompt_column if it is to go on with them"
        )
    answer = _find_answer(row, row_name, answer_column)
    columns = {key: value for key, value in row.items() if key not in (name, "answer")}
    columns |= {} if answer is None else {"answer": answer}
    uid = _make_uid(row, content, answer)
    tools = read_value(row, "tools", list, row_name) or []
    template_kwargs = read_value(row, "chat_template_kwargs", dict, row_name) or {}
    if isinstance(content, str):
        settings = {"tools": tools, "chat_template_kwargs": template_kwargs}
        if unusable := [key for key, value in settings.items() if value]:
            raise ValueError(
                f"{row_name} has {unusable[0]!r}, which needs a chat prompt, and its {name!r} is a text; "
                'write [{"role": "user", "content": ..}], or rename the column'
            )
        return Prompt(uid=uid, text=content, columns=columns, row=row_name)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{row_name} has 'tools' that are not JSON schemas of functions; rename the column")
    return Prompt(
        uid=uid,
        messages=check_messages(content, row_name),
        tools=tuple(tools),
        template_kwargs=template_kwargs,
        columns=columns,
        row=row_name,
    )


def read_value(row: Row, name: str, value_type: type, row_name: str) -> Any:
    """Return the value of a column that the chat template is given, which has to be of ``value_type``; None
    if there is none. The column may hold JSON text, since a table has one type for a whole column. Raises
    ValueError for a value of another type."""
    value = row.get(name)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_json(value.encode())
    if value is not None and not isinstance(value, value_type):
        raise ValueError(
            f"{row_name} has {name!r} of {type(value).__name__}, which the chat template would be given as "
            f"{value_type.__name__}; mend or rename the column"
        )
    return value


def check_messages(content: Any, row_name: str = "") -> tuple[dict[str, Any], ...]:
    """Return a chat as the template is given it: without fields that are null, and with "" for the text of a
    message that only calls tools. Raises ValueError, which names the message, for a chat that has another
    form or ends with a call."""
    chat = content if isinstance(content, list | tuple) else [content]
    prefix = f"{row_name}: " if row_name else ""
    for number, message in enumerate(chat):
        label = f"{prefix}message {number} of the chat"
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{label if chat is content else f'{prefix}the prompt'} is of type {type(message).__name__}; "
                "give a text, or a chat of {role, content}"
            )
        calls, text = message.get("tool_calls"), message.get("content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{label} has no 'role'; give a chat of {{role, content}} texts")
        if not isinstance(text, str) and not (text is None and calls):
            kind = "null" if text is None else f"a {type(text).__name__}"
            raise ValueError(f"{label} has as 'content' {kind}; give it a text")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise ValueError(
                f"{label} has 'tool_calls' that are not a list of "
                '{"type": "function", "function": {"name": .., "arguments": ..}}; mend them'
            )
    if chat[-1].get("tool_calls"):
        raise ValueError(f"{prefix}the chat ends with a call of a tool; put the tool's reply behind it")
    fields = [{name: value for name, value in message.items() if value is not None} for message in chat]
    return tuple(message if "content" in message else {**message, "content": ""} for message in fields)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _ends_with_answer(content: Any) -> bool:
    last_message = content[-1] if isinstance(content, list | tuple) and content else None
    return isinstance(last_message, Mapping) and last_message.get("role") == "assistant"


def _check_answers(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if some rows have an answer and others none. Rewards may need no answer, but then no
    row has one."""
    missing_rows = [prompt.where for prompt in prompts if "answer" not in prompt.columns]
    if missing_rows and len(missing_rows) < len(prompts):
        raise ValueError(
            f"{missing_rows[0]} has no answer ({', '.join(ANSWERS)}), and other rows have; give it one, "
            "or name the column in task.params.answer_column"
        )


def _find_answer(row: Row, row_name: str, answer_column: str) -> Any:
    """Return the answer of a row, or None. Raises ValueError for a row without ``answer_column``."""
    for name in (answer_column,) if answer_column else ANSWERS:
        if row.get(name) is not None:
            return row[name]
    for name in () if answer_column else NESTED_ANSWERS:
        container = row.get(name)
        if isinstance(container, Mapping) and container.get("ground_truth") is not None:
            return container["ground_truth"]
    if answer_column:
        raise ValueError(
            f"{row_name} has no {answer_column!r}; give it one, or change task.params.answer_column"
        )
    return None


def _make_uid(row: Row, content: Any, answer: Any) -> str:
    """Return the row's id; without one, a hash of what the policy reads and the answer."""
    for name in IDS:
        if row.get(name) is not None:
            return str(row[name])
    settings = [row[name] for name in ("tools", "chat_template_kwargs") if row.get(name) is not None]
    text = json.dumps([content, answer, *settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute_holdout_mask(contents: Sequence[str], share: float) -> list[bool]:
    """Return for each row whether it is held out: ``share`` of them, rounded but at least one (none for 0),
    in the order of the hashes of ``contents`` (the questions), so that new rows move few others. Rows of
    equal content are in the same split, so fewer or more rows may be held out. None are if all contents are
    equal and more than the share."""
    if not share:
        return [False] * len(contents)
    digests = [hashlib.sha256(content.encode()).digest() for content in contents]
    counts, num_missing, held_digests = Counter(digests), max(1, round(share * len(contents))), set[bytes]()
    for digest, count in sorted(counts.items()):
        if count <= num_missing:
            held_digests.add(digest)
            num_missing -= count
    if not held_digests and len(counts) > 1:
        held_digests.add(min(counts, key=lambda digest: (counts[digest], digest)))
    return [digest in held_digests for digest in digests]


def read_raw_rows(
    source: str, split: str, config: str, holdout: float
) -> tuple[Iterable[tuple[int, Row]], bool]:
    """Return ((row number, row) ..., whether the source has named splits). Lines of a file count from 1. Rows
    are read during the iteration. Raises ValueError for a source that cannot be read."""
    path = Path(source)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"task.source is {source}, a pipe or a device, which may have no end; give a file")
    if (file := path / f"{split}.jsonl").is_file():
        return _read_jsonl(file), True
    if source.startswith("hf:") or path.is_dir():
        return _read_dataset(source, split, config, holdout)
    if path.name.endswith((".jsonl", ".ndjson", ".jsonl.gz")):
        return _read_jsonl(path), False
    if path.suffix == ".csv":
        return enumerate(_read_csv(path), 1), False
    if path.suffix == ".parquet":
        return enumerate(_read_parquet(path), 1), False
    raise ValueError(f"task.source is {source}; use a .jsonl, .csv or .parquet file or a datasets folder")


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns. All values are texts. Raises
    ValueError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 1):
                if None in row:
                    raise csv.Error(f"row {number} has more values than the first line has names")
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"task.source {path} is not CSV in UTF-8 ({error}); fix it") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row), without blank lines. Raises ValueError for a line that is not an object of
    JSON."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
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


def _read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file. Raises ValueError for a file or a text that cannot be read."""
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
                place = f"one of the rows {number + 1} to {number + batch.num_rows} of {path}"
                raise ValueError(f"{place} has a text that is not UTF-8 ({error}); fix it") from error
            yield from map(_drop_fillers, rows)
            number += batch.num_rows


def _drop_fillers(row: Row) -> Row:
    """Return the row without nulls in the values that the chat template is given: chats, ``tools`` and
    ``chat_template_kwargs``. A table gives each struct the fields of all rows' structs, with null for a field
    that a row does not have."""

    def is_chat(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]

    def drop_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: drop_nulls(part) for name, part in value.items() if part is not None}
        return [drop_nulls(part) for part in value] if isinstance(value, list) else value

    return {
        name: drop_nulls(value) if name in ("tools", "chat_template_kwargs") or is_chat(value) else value
        for name, value in row.items()
    }


def _read_dataset(
    source: str, split: str, config: str, holdout: float
) -> tuple[Iterable[tuple[int, Row]], bool]:
    """Return the rows of a hub dataset or datasets folder, as ``read_raw_rows`` does. Raises ValueError."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"task.source {source} needs datasets; install the extra 'data'") from error
    dataset: Any
    try:
        if source.startswith("hf:"):
            dataset = datasets.load_dataset(source.removeprefix("hf:"), config or None)
        else:
            dataset = datasets.load_from_disk(source)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"task.source {source} is no dataset that can be read ({reason})") from error
    if not isinstance(dataset, Mapping):
        return enumerate(map(_drop_fillers, dataset), 1), False
    names = [name for name in (EVAL_SPLITS if split == "eval" else ("train",)) if name in dataset]
    if names:
        rows = enumerate(map(_drop_fillers, dataset[names[0]]), 1)
        return rows, split == "eval" or any(name in dataset for name in EVAL_SPLITS)
    if split == "eval" and holdout and "train" in dataset:
        return enumerate(map(_drop_fillers, dataset["train"]), 1), False
    raise ValueError(
        f"task.source {source} has the splits {list(dataset)} and none for {split}; "
        "with a train split alone set task.params.holdout to the share of rows to evaluate on"
    )
