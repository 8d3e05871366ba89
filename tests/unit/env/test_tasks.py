"""Where tasks come from: arithmetic, rows of files, other packages; splits, streams, refusals."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.env.adapters import Gem, TextArena, TextWorld
from ostinato.env.arithmetic import PHRASINGS, Family, assign_split, draw_prompts
from ostinato.env.custom import make_factory
from ostinato.env.rows import make_prompt, read_source
from ostinato.env.tasks import Rows, check_disjoint, load_tasks
from ostinato.types import Prompt

SEEDS = st.integers(0, 10**6)
SPLITS = st.sampled_from(["train", "eval"])


def obvious(expression: str) -> int:
    """Python's own arithmetic on the expression: the slow twin of every drawer."""
    assert re.fullmatch(r"\d+( ([-+*]|mod) \d+)+", expression)
    return eval(expression.replace("mod", "%"))


def columns(prompt: Prompt, name: str) -> str:
    return prompt.columns[name]


def fields(prompt: Prompt) -> tuple:
    return prompt.uid, prompt.messages, prompt.columns


@settings(max_examples=20, deadline=None)
@given(SPLITS, SEEDS, st.integers(2, 6), st.integers(3, 8))
def test_answers_are_right_and_natural(split: str, seed: int, digits: int, terms: int) -> None:
    for prompt in draw_prompts(split, seed, 40, digits=digits, terms=terms):
        answer = int(columns(prompt, "answer"))
        assert answer == obvious(columns(prompt, "expression")) >= 0


@settings(max_examples=20, deadline=None)
@given(SEEDS, SEEDS)
def test_no_evaluation_problem_is_trained_on(train_seed: int, eval_seed: int) -> None:
    trained = {
        " ".join(sorted(columns(p, "expression").split())) for p in draw_prompts("train", train_seed, 300)
    }
    held_out = {
        " ".join(sorted(columns(p, "expression").split())) for p in draw_prompts("eval", eval_seed, 300)
    }
    assert not trained & held_out


@settings(max_examples=20, deadline=None)
@given(SPLITS, SEEDS, st.integers(1, 60))
def test_same_address_same_stream_and_more_rows_only_continue_it(split: str, seed: int, n: int) -> None:
    short, long = draw_prompts(split, seed, n), draw_prompts(split, seed, 60)
    assert [fields(p) for p in short] == [fields(p) for p in long[:n]]


def test_families_are_drawn_evenly_and_sentences_hold_the_expression() -> None:
    prompts = draw_prompts("train", 0, 1000)
    for family in Family:
        assert 150 < sum(p.columns["family"] == family for p in prompts) < 250
    for prompt in prompts:
        assert prompt.messages is not None
        (message,) = prompt.messages
        assert message["role"] == "user"
        assert message["content"] in [phrasing.format(prompt.columns["expression"]) for phrasing in PHRASINGS]


@pytest.mark.parametrize("family", list(Family))
def test_parameters_bound_the_problems(family: Family) -> None:
    for prompt in draw_prompts("train", 0, 100, families=[family], digits=4, terms=4):
        assert prompt.columns["family"] == family
        numbers = re.findall(r"\d+", columns(prompt, "expression"))
        assert max(map(len, numbers)) <= 4
        assert len(numbers) == 2 if family is not Family.CHAIN else 3 <= len(numbers) <= 4


def test_a_commuted_sum_falls_on_the_same_side() -> None:
    """Hashing the expression as it is written put 347 + 586 into training and 586 + 347 into evaluation."""
    rng = random.Random(0)
    for _ in range(100):
        a, b = rng.randrange(1000), rng.randrange(1000)
        assert assign_split(f"{a} + {b}") == assign_split(f"{b} + {a}")


def test_an_eighth_of_the_problems_is_held_out() -> None:
    held_out = sum(assign_split(f"{a} + {b}") == "eval" for a in range(100) for b in range(a, 100))
    assert 0.10 < held_out / 5050 < 0.15


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"families": ["sums"]}, "families has 'sums'"),
        ({"families": "sum"}, "families is 'sum'"),
        ({"families": []}, "families is []"),
        ({"digits": 1}, "digits is 1"),
        ({"terms": 2}, "terms is 2"),
        ({"families": ["product"], "digits": 2, "n": 5000}, "lower n or raise digits"),
    ],
)
def test_bad_parameters_are_named(arguments: dict, names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        draw_prompts(**{"split": "train", "seed": 0, "n": 4, **arguments})


# ---- rows of other projects become prompts; a bad row is named by file and number


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_text_and_chat_rows_keep_their_other_columns() -> None:
    text = make_prompt({"prompt": "2+2?", "answer": 4, "level": 1}, "row 1")
    chat = make_prompt({"prompt": CHAT, "solution": "4", "id": 7}, "row 2")
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
    prompt = make_prompt(row, "row 1")
    assert prompt.columns["answer"] == "4"
    assert prompt.columns["data_source"] == "gsm8k"
    assert prompt.columns["extra_info"] == {"index": 3}


def test_rows_of_csv_and_of_a_compressed_file_are_those_of_jsonl(tmp_path: Path) -> None:
    """HumanEval comes as .jsonl.gz, and was refused."""
    rows = [{"prompt": f'{k}, "{k}"\n+1?', "answer": str(k + 1)} for k in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], *([row["prompt"], row["answer"]] for row in rows)])
    for name in ("rows.jsonl.gz", "rows.csv"):
        read_ = read_source(str(tmp_path / name), "train")
        assert [(one.text, one.columns["answer"]) for one in read_] == [
            (row["prompt"], row["answer"]) for row in rows
        ]
    (tmp_path / "torn.csv").write_text("prompt,answer\n1+1?,2,3\n")
    with pytest.raises(ValueError, match=r"torn\.csv is not CSV .*row 1 has more values"):
        read_source(str(tmp_path / "torn.csv"), "train")


def test_a_uid_is_the_content_and_not_the_place() -> None:
    row = {"prompt": CHAT, "answer": "4"}
    assert make_prompt(row, "row 1").uid == make_prompt(row | {"more": 1}, "row 9").uid
    assert make_prompt(row, "row 1").uid != make_prompt(row | {"answer": "5"}, "row 1").uid


def test_a_text_prompt_has_empty_columns_of_the_template() -> None:
    """A table that has chats with tools as well gives each row these columns."""
    empty = {"tools": [], "chat_template_kwargs": None}
    assert make_prompt({"prompt": "2+2?", "answer": "4", **empty}, "row 1").text == "2+2?"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "4"}, "row 2 of .*rows.jsonl has no 'prompt'"),
        ({"prompt": "", "answer": "4"}, "row 2 of .* has no 'prompt'"),
        ({"prompt": "2+2?"}, "row 2 of .* has no answer"),
        ({"prompt": "2+2?", "answer": None}, "row 2 of .* has no answer"),
        ({"prompt": [{"role": "user"}], "answer": "4"}, "row 2 of .* message 0 .* 'content' null"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "4"}, "'content' a list"),
        ({"prompt": 5, "answer": "4"}, "row 2 of .* the prompt is of type int"),
        ({"prompt": "2+2?", "answer": "4", "tools": '[{"type": "function"}]'}, "row 2 of .* 'tools'"),
        ({"prompt": "2+2?", "answer": "4", "chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs'"),
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
    every resume after that; brackets enough were a RecursionError. Tools beside a prompt of text, which no
    template writes, were dropped."""
    source = jsonl(tmp_path / "rows.jsonl", {"prompt": "1+1?", "answer": "2", "id": "a"}, row)
    with pytest.raises(ValueError, match=sentence):
        read_source(source, "train")


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
        read_source(str(tmp_path / "rows.parquet"), "train")


def test_an_empty_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows; write"):
        read_source(jsonl(tmp_path / "rows.jsonl"), "train")
    with pytest.raises(ValueError, match=r"use a \.jsonl, \.csv or \.parquet file"):
        read_source(jsonl(tmp_path / "rows.xlsx", "a,b"), "train")


@pytest.mark.slow
def test_parquet_reads_as_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": CHAT, "answer": "4", "level": k} for k in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    theirs = read_source(str(tmp_path / "rows.parquet"), "train")
    ours = read_source(jsonl(tmp_path / "rows.jsonl", *rows), "train")
    assert [(p.uid, p.messages, p.columns) for p in theirs] == [(p.uid, p.messages, p.columns) for p in ours]
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not a parquet file"):
        read_source(str(tmp_path / "bad.parquet"), "train")


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
        return [prompt.text for prompt in read_source(str(tmp_path / folder), split, **options)]

    assert texts("plain", "train") == texts("both", "train") == texts("one", "train") == rows["prompt"]
    assert texts("both", "eval") == ["5+5?"]
    assert texts("both", "train", holdout=0.5) == rows["prompt"], "its own split is what is held out"
    with pytest.raises(ValueError, match=r"has the splits \['train'\] and none for eval"):
        texts("one", "eval")
    held_out = texts("one", "eval", holdout=0.5) + texts("one", "train", holdout=0.5)
    assert sorted(map(str, held_out)) == sorted(rows["prompt"])


# ---- task sources by name, and the addressed stream of prompts


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(uid=str(k), text=f"question {k}") for k in range(first, first + count)]


def write_rows(path: Path, count: int) -> str:
    rows = [{"prompt": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(st.integers(1, 40), st.integers(-5, 2**40), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation_and_an_address_says_it_all(count: int, seed: int, epoch: int) -> None:
    """Read backwards by a second stream, as a resumed run would, each index is the same prompt."""
    rows, again = Rows(prompts(count), seed=seed), Rows(prompts(count), seed=seed)
    indices = range(epoch * count, (epoch + 1) * count)
    seen = {index: rows.prompt(index).uid for index in indices}
    assert sorted(seen.values()) == sorted(prompt.uid for prompt in prompts(count))
    assert {index: again.prompt(index).uid for index in reversed(indices)} == seen


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order() -> None:
    def stream(start: int, **options: Any) -> list[str]:
        return [Rows(prompts(50), **options).prompt(start + k).uid for k in range(50)]

    assert stream(0, seed=0) != stream(50, seed=0)
    assert stream(0, seed=0) != stream(0, seed=1)
    assert stream(50, seed=0, shuffle=False) == [str(k) for k in range(50)]


def test_the_order_of_a_seed_is_fixed_for_good() -> None:
    """A change here changes every resumed run: numpy's permutation() may change, raw Philox words may not."""
    assert [Rows(prompts(8), seed=0).prompt(k).uid for k in range(8)] == list("02154367")


@pytest.mark.parametrize("source", ["arithmetic", "gym:chain_sum", "gym:number_sorting"])
def test_procedural_splits_are_disjoint_distinct_and_grow_in_place(source: str) -> None:
    if source.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    train = load_tasks(source, "train", 0, 60)
    evaluation = load_tasks(source, "eval", 0, 20) + load_tasks(source, "eval", 1, 20)
    check_disjoint(train, evaluation)
    assert len({prompt.uid for prompt in train}) == 60
    assert [prompt.uid for prompt in load_tasks(source, "train", 0, 30)] == [
        prompt.uid for prompt in train[:30]
    ]
    assert [prompt.uid for prompt in load_tasks(source, "train", 1, 60)] != [prompt.uid for prompt in train]


def test_a_small_space_shared_by_both_splits_stays_disjoint() -> None:
    """Sums of two digits: with splits made of seed ranges alone most evaluation questions are trained on."""
    pytest.importorskip("reasoning_gym")
    params = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train = load_tasks("gym:chain_sum", "train", 0, 100, params)
    evaluation = load_tasks("gym:chain_sum", "eval", 0, 10, params)
    check_disjoint(train, evaluation)
    with pytest.raises(ValueError, match="has only about"):
        load_tasks("gym:chain_sum", "eval", 0, 200, params)


def test_a_file_gives_a_seeded_subset_in_its_order(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 100)
    some = load_tasks(source, "train", 0, 10)
    numbers = [int(prompt.columns["answer"]) for prompt in some]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert numbers != list(range(1, 11))
    assert [prompt.uid for prompt in load_tasks(source, "train", 0, 10)] == [prompt.uid for prompt in some]
    assert len(load_tasks(source, "eval", 0, None)) == len(load_tasks(source, "eval", 0, 1000)) == 100


def test_one_file_for_both_splits_is_noticed_and_holdout_mends_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 100)
    with pytest.raises(ValueError, match="100 of 100 evaluation prompts are also in the training data"):
        check_disjoint(load_tasks(source, "train", 0, None), load_tasks(source, "eval", 0, None))
    train, evaluation = (load_tasks(source, split, 0, None, {"holdout": 0.2}) for split in ("train", "eval"))
    check_disjoint(train, evaluation)
    assert len(train) == 80 and len(evaluation) == 20


@pytest.mark.parametrize(("rows", "share", "count"), [(20, 0.2, 4), (10, 0.1, 1), (3, 0.1, 1), (50, 0.5, 25)])
def test_as_many_rows_are_held_out_as_the_share_says(
    tmp_path: Path, rows: int, share: float, count: int
) -> None:
    """A threshold for the hash of each row made 0.2 of 20 rows 1 row, and an evaluation of one prompt."""
    source = write_rows(tmp_path / "rows.jsonl", rows)
    train, held = (read_source(source, split, holdout=share) for split in ("train", "eval"))
    assert len(held) == count and len(train) == rows - count
    longer = read_source(write_rows(tmp_path / "more.jsonl", rows + 1), "eval", holdout=share)
    assert len({one.text for one in held} - {one.text for one in longer}) <= 1


def test_equal_prompts_are_held_out_together_and_none_is_lost(tmp_path: Path) -> None:
    twice = [{"prompt": f"{k // 2}+0?", "answer": str(k // 2), "id": k} for k in range(20)]
    source = jsonl(tmp_path / "rows.jsonl", *twice, *({"prompt": "many?", "answer": "1"} for _ in range(10)))
    train, held = (read_source(source, split, holdout=0.2) for split in ("train", "eval"))
    assert len(train) + len(held) == 30 and len(held) == 6
    assert not {one.text for one in train} & {one.text for one in held}


def test_where_every_question_comes_often_the_rarest_is_held_out(tmp_path: Path) -> None:
    often = [{"prompt": f"{k % 3 % 2}+0?", "answer": "1", "id": k} for k in range(12)]
    held = read_source(jsonl(tmp_path / "rows.jsonl", *often), "eval", holdout=0.1)
    assert [one.text for one in held] == ["1+0?"] * 4


def test_rows_need_no_answer_but_then_none_has_one(tmp_path: Path) -> None:
    """TRL needs ``prompt`` alone, and a reward of the length or a judge reads no answer: such rows were
    refused."""
    source = jsonl(tmp_path / "rows.jsonl", {"prompt": "Sing."}, {"prompt": "Whistle.", "answer": None})
    assert [one.columns.get("answer", "none") for one in read_source(source, "train")] == ["none", "none"]
    source = jsonl(tmp_path / "some.jsonl", {"prompt": "2+2?", "answer": "4"}, {"prompt": "Sing."})
    with pytest.raises(ValueError, match=r"row 2 of .* has no answer"):
        read_source(source, "train")
    with pytest.raises(ValueError, match=r"row 2 of .* has no 'label'"):
        read_source(
            jsonl(tmp_path / "l.jsonl", {"prompt": "a", "label": 1}, {"prompt": "b"}),
            "train",
            answer_column="label",
        )


# ---- what the chat template is given


CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": {"item": "cup"}}}
TOOL = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object"}}}
ASKED = [
    {"role": "user", "content": "How many cups?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_calls_tools_and_names_of_the_template_are_kept(tmp_path: Path, form: str) -> None:
    """The policy was shown an empty answer and a reply from nowhere: calls of rows and their tools were
    dropped. Tables fill structs with nulls, which are no arguments."""
    names = {"enable_thinking": False}
    row = {"prompt": ASKED, "tools": [TOOL], "chat_template_kwargs": names, "answer": "7"}
    other = {**CALL, "function": {"name": "price", "arguments": {"thing": "tea"}}}
    rows = [row, {**row, "prompt": [ASKED[0], {**ASKED[1], "tool_calls": [other]}, ASKED[2]]}]
    source = jsonl(tmp_path / "rows.jsonl", *rows)
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        source = str(tmp_path / "rows.parquet")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), source)
    first, second = read_source(source, "train")
    assert first.messages == (
        {**ASKED[0]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {**ASKED[2]},
    )
    assert second.messages and second.messages[1]["tool_calls"] == [other]
    assert first.tools == (TOOL,) and first.template_kwargs == names
    texts = {**row, "tools": json.dumps([TOOL]), "chat_template_kwargs": '{"enable_thinking": false}'}
    again = make_prompt(texts, "row 1")
    assert again.tools == first.tools and again.template_kwargs == first.template_kwargs


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [ASKED[0], {"role": "assistant", "content": None}]}, "message 1 .* 'content' null"),
        ({"prompt": [ASKED[0], {"role": "user", "content": ["a"]}]}, "message 1 .* 'content' a list"),
        ({"prompt": [{"content": "a"}]}, "message 0 .* 'role'"),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": ["f"]}]},
            "message 0 .* 'tool_calls'",
        ),
        ({"prompt": ASKED[:2]}, "ends with a call"),
        ({"prompt": ASKED[:1], "tools": ["calculator"]}, "'tools'"),
        ({"prompt": ASKED[:1], "tools": "calculator"}, "'tools'"),
        ({"prompt": ASKED[:1], "chat_template_kwargs": [1]}, "'chat_template_kwargs'"),
    ],
)
def test_what_the_template_cannot_be_given_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"row 3: .*{words}|row 3 has {words}"):
        make_prompt({"answer": "7", **row}, "row 3")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_source_without_an_end_is_refused(tmp_path: Path, kind: str) -> None:
    """A named pipe held the run without a word, and a link to /dev/zero took all memory."""
    source = tmp_path / "rows.jsonl"
    os.mkfifo(source) if kind == "pipe" else source.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"task\.source is .*rows\.jsonl"):
        load_tasks(str(source), "train", 0, None)


def test_a_system_prompt_opens_every_chat(tmp_path: Path) -> None:
    (prompt,) = load_tasks("arithmetic", "train", 0, 1, system_prompt="Be brief.")
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    rows = write_rows(tmp_path / "rows.jsonl", 1)
    (text,) = load_tasks(rows, "train", 0, None)
    (prompt,) = load_tasks(rows, "train", 0, None, system_prompt="Be brief.")
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text.text},
    )


def test_a_text_is_what_a_user_says_where_params_ask_for_a_chat(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 1)
    (text,), (chat,) = (load_tasks(rows, "train", 0, None, params) for params in ({}, {"chat": True}))
    assert chat.messages == ({"role": "user", "content": text.text},) and chat.uid == text.uid


@pytest.mark.parametrize("column", ["prompt", "question", "problem", "messages"])
@pytest.mark.parametrize("gold", ["answer", "solution", "ground_truth", "label"])
def test_columns_of_public_datasets_are_known(column: str, gold: str) -> None:
    asked: Any = [{"role": "user", "content": "1+1?"}] if column == "messages" else "1+1?"
    prompt = make_prompt({column: asked, gold: "2", "hint": "x"}, "row 1")
    assert (prompt.text or prompt.messages) and prompt.columns["answer"] == "2"
    assert prompt.columns["hint"] == "x" and column not in prompt.columns


def test_messages_of_a_finished_chat_are_no_prompt() -> None:
    """Rows of SFT: trained on as they are, the policy would go on behind the whole answer."""
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="prompt_column"):
        make_prompt({"messages": chat}, "row 1")
    assert make_prompt({"messages": chat}, "row 1", "messages").prefill == "2"


@pytest.mark.parametrize(
    ("source", "params", "sentence"),
    [
        ("arithmatic", {}, "did you mean arithmetic"),
        ("gymm:chain_sum", {}, "did you mean gym:<name>"),
        ("data/no.jsonl", {}, "no such file or folder"),
        ("arithmetic", {"digit": 3}, "task.params.digit is unknown for arithmetic; nearest is 'digits'"),
        ("gym:chain_sun", {}, "the nearest is gym:chain_sum"),
        ("gym:chain_sum", {"max_term": 3}, "nearest is 'max_terms'"),
        ("gym:chain_sum", {"min_terms": 9, "max_terms": 3}, "refused by gym:chain_sum"),
    ],
)
def test_what_is_written_wrongly_is_named(source: str, params: dict[str, Any], sentence: str) -> None:
    if source.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=sentence):
        load_tasks(source, "train", 0, 3, params)


def test_split_and_n_are_checked(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 3)
    for arguments, sentence in [
        (("arithmetic", "train", 0, None), "n is missing"),
        ((source, "train", 0, 3, {"promt_column": "q"}), "nearest is 'prompt_column'"),
        ((source, "train", 0, 3, {"holdout": 1.0}), "holdout is 1.0"),
        ((str(tmp_path), "train", 0, 3), "no dataset that can be read"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            load_tasks(*arguments)


# ---- games of other packages, where they are installed: the same seed plays the same game


BOXED = {"id": "game:GuessTheNumber-v0-easy", "action": "\\boxed{{{number}}}"}
GAMES: list[tuple[str, Any, dict[str, Any]]] = [
    ("gem", Gem, BOXED),
    ("textarena", TextArena, {"id": "GuessTheNumber-v0", "action": "[{number}]"}),
    ("textworld", TextWorld, {"rooms": 1, "objects": 2, "quest": 1}),
]


@pytest.mark.parametrize(("package", "game", "params"), GAMES, ids=[name for name, *_ in GAMES])
def test_a_seed_is_a_game(package: str, game: Any, params: dict[str, Any]) -> None:
    pytest.importorskip(package)

    def played(seed: int) -> list[Any]:
        env = game(**params)
        heard: list[Any] = [env.reset(seed=seed, options={})[0]]
        for answer in ("#### 2", "10", "it is 3"):
            text, reward, ended, cut, _ = env.step(answer)
            heard.append((text, reward, ended, cut))
            if ended:
                break
        getattr(env, "close", lambda: None)()
        return heard

    first = played(3)
    assert first == played(3) and first[0] and len(first) > 1
    assert any(played(seed) != first for seed in range(4, 16))


class Wordy:
    """gem's interface: English around what matters."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "You are playing a game. Guess between 1 and 10, please.", {"suffix": "Your turn."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return {"[7]": "It is lower than 7.", "[]": "That is none."}[action], 0.5, False, False, {}


def test_of_a_wordy_game_only_what_is_shown_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=lambda id: Wordy()))
    game = Gem("wordy", action="[{number}]", shown=r"between \d+ and \d+|lower than \d+|You")
    assert game.reset(seed=0, options={})[0] == "You\nbetween 1 and 10\nYou"
    assert game.step("#### 7")[:2] == ("lower than 7", 0.5)
    assert game.step("none")[0] == "That is none."  # without a match all of it is
    with pytest.raises(ValueError, match=r"task.env 'ostinato.env.adapters:Gem' .* unterminated"):
        make_factory("ostinato.env.adapters:Gem", {"id": "wordy", "shown": "[0-9"})


def test_a_package_that_is_missing_is_named() -> None:
    for package, game, params in GAMES:
        try:
            __import__(package)
        except ModuleNotFoundError:
            with pytest.raises(ValueError, match=f"install it: pip install {package}"):
                make_factory(f"ostinato.env.adapters:{game.__name__}", params)
