"""Rows with answers as tokens: what is trained of them, what is held out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.env.answers import Example, encode_example, encode_pair, load_rows
from ostinato.model.named import find_model_folder
from ostinato.render import Renderer

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AGAIN, LAST = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(find_model_folder("asset:seed-moe"))


def trained(renderer: Renderer, one: Example) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], one.mask.astype(int), [0]))))
    spans = edges.reshape(-1, 2)
    return [renderer.decode(one.tokens[first:end], skip_special=False) for first, end in spans]


def made(renderer: Renderer, row: dict[str, Any], **more: Any) -> Example:
    return encode_example(renderer, row, "row 7 of x", context=64, **more)


def test_a_chat_is_cut_where_sampling_cuts_it(renderer: Renderer) -> None:
    chat = [USER, ANSWER, AGAIN, LAST]
    last = made(renderer, {"messages": chat})
    assert trained(renderer, last) == ["6<|im_end|>"]
    every = made(renderer, {"messages": chat}, turns="all")
    assert trained(renderer, every) == ["4<|im_end|>", "6<|im_end|>"]
    answer = renderer.encode("4<|im_end|>")
    sampled = [renderer.chat([USER]), answer, renderer.after_turn([USER, ANSWER], [AGAIN], answer)]
    assert every.tokens.tolist() == np.concatenate([*sampled, renderer.encode("6<|im_end|>")]).tolist()
    assert made(renderer, {"messages": [*chat, AGAIN]}).tokens.tolist() == last.tokens.tolist()


def test_of_prompt_and_completion_the_completion_is_trained(renderer: Renderer) -> None:
    texts = made(renderer, {"prompt": "2+2=", "completion": "4"})
    assert trained(renderer, texts) == ["4<|im_end|>"]  # its eos
    assert trained(renderer, made(renderer, {"prompt": "2+2=", "completion": "4<|im_end|>"})) == [
        "4<|im_end|>"
    ]
    chats = made(renderer, {"prompt": [USER, ANSWER, AGAIN], "completion": [LAST]}, turns="all")
    assert trained(renderer, chats) == ["6<|im_end|>"]


# R1's: a thought is opened for the answer, and dropped from one that is given.
OPENS = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% else %}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:<think>\n{% endif %}"
)
DROPS = OPENS.replace(":<think>\n", ":")  # DeepSeek-V3's
CLOSES = OPENS.replace("<think>\n", "<think>\n\n</think>\n\n")  # Qwen3.5's without thoughts
SWITCHED = OPENS.replace("{% if add", "{% if think and add")
WRITES = DROPS.replace(
    "m.content.split('</think>')[-1]",
    "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content) ~ m.content",
)
THOUGHT = "<think>\n1+1, twice\n</think>\n\n4"


def with_template(renderer: Renderer, folder: Path, template: str) -> Renderer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((renderer.folder / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


@pytest.mark.parametrize(
    ("template", "answer", "want"),
    [
        (OPENS, {"content": THOUGHT}, "1+1, twice\n</think>\n\n4<|im_end|>"),
        (OPENS, {"content": "4", "reasoning_content": "1+1, twice"}, "1+1, twice\n</think>\n\n4<|im_end|>"),
        (OPENS, {"content": "<think></think>4"}, "</think>4<|im_end|>"),
        (DROPS, {"content": "4"}, "4<|im_end|>"),
        (CLOSES, {"content": "4"}, "4<|im_end|>"),
        (WRITES, {"content": "4", "reasoning_content": "1+1"}, "<think>1+1</think>4<|im_end|>"),
    ],
)
def test_an_answer_goes_on_where_the_template_stops(
    renderer: Renderer, tmp_path: Path, template: str, answer: dict[str, str], want: str
) -> None:
    """R1's and DeepSeek-V3's templates were refused, with the advice to set what was set."""
    own = with_template(renderer, tmp_path, template)
    row = made(own, {"messages": [USER, {"role": "assistant", **answer}]})
    assert trained(own, row) == [want]
    assert row.tokens[: -len(own.encode(want))].tolist() == own.chat([USER]).tolist()  # as sampling has it


@pytest.mark.parametrize(
    ("template", "answer", "why"),
    [
        (OPENS, {"content": "4"}, "opens a thought .* has none"),
        (DROPS, {"content": THOUGHT}, "does not write the text before </think>"),
        (DROPS, {"content": "4", "reasoning_content": "1+1"}, "does not write the reasoning_content"),
        (CLOSES, {"content": THOUGHT}, "closes the thought"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ '?' if add_generation_prompt }}",
            ANSWER,
            "asks",
        ),
    ],
)
def test_a_thought_that_would_be_lost_is_refused(
    renderer: Renderer, tmp_path: Path, template: str, answer: dict[str, str], why: str
) -> None:
    """The reasoning of rows was dropped without a word: their loss was that of rows without it."""
    own = with_template(renderer, tmp_path, template)
    with pytest.raises(ValueError, match=f"row 7 of x: .*{why}"):
        made(own, {"messages": [USER, {"role": "assistant", **answer}]})


def test_names_of_a_row_reach_the_template(renderer: Renderer, tmp_path: Path) -> None:
    """``chat_template_kwargs`` were read for RL alone, so the policy learned to answer another prompt."""
    own = with_template(renderer, tmp_path, SWITCHED)
    row = {"messages": [USER, {**ANSWER, "content": THOUGHT}], "chat_template_kwargs": {"think": True}}
    assert trained(own, made(own, row)) == ["1+1, twice\n</think>\n\n4<|im_end|>"]


def test_control_tokens_in_an_answer_are_letters_and_do_not_end_it(renderer: Renderer) -> None:
    """A row that quotes ``<|im_end|>`` was cut there, and forged a turn."""
    row = made(renderer, {"messages": [USER, {**ANSWER, "content": "4<|im_end|>\n<|im_start|>user"}]})
    end = renderer.encode("<|im_end|>")[0]
    assert trained(renderer, row) == ["4<|im_end|>\n<|im_start|>user<|im_end|>"]
    assert (row.tokens[row.mask] == end).sum() == 1


REFUSED = [
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": [ANSWER | {"tool_calls": [{"id": "1"}]}]}, "tool_calls"),
    ({"messages": [USER, ANSWER], "tools": [{"name": "x"}]}, "tools"),
    ({"messages": "hello"}, "the prompt is of type str"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 1 of the chat"),
    ({"prompt": "2+2="}, "no 'completion'"),
    ({"prompt": "2+2=", "completion": [ANSWER]}, "a text and the other a chat"),
    ({"prompt": "2+2=" * 40, "completion": "4"}, "the context of the model is 64"),
    ({"text": "2+2=4"}, "no 'prompt'; give messages, or prompt and completion"),
    ({"prompt": "\ud83d", "completion": "4"}, "surrogate"),
]


@pytest.mark.parametrize(("row", "why"), REFUSED)
def test_what_cannot_be_trained_on_is_refused_by_number(
    renderer: Renderer, row: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=r"^row 7 of x") as caught:
        made(renderer, row)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_preference_has_two_answers_that_differ(renderer: Renderer) -> None:
    chosen, rejected = encode_pair(
        renderer, {"prompt": [USER], "chosen": [ANSWER], "rejected": [LAST]}, "row 7", context=64
    )
    assert trained(renderer, chosen) == ["4<|im_end|>"] and trained(renderer, rejected) == ["6<|im_end|>"]
    with pytest.raises(ValueError, match="row 7 has the same answer"):
        encode_pair(renderer, {"prompt": "2+2=", "chosen": "4", "rejected": "4"}, "row 7", context=64)
    with pytest.raises(ValueError, match="row 7: it has no 'rejected'"):
        encode_pair(renderer, {"prompt": "2+2=", "chosen": "4"}, "row 7", context=64)


def test_held_out_rows_ask_nothing_that_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{k // 2}", "completion": f"{k}"} for k in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def requested(split: str, n: int | None = None, **params: Any) -> list[str]:
        return [str(row["prompt"]) for _, row in load_rows(str(file), split, 0, n, params)]

    train, held_out = requested("train", holdout=0.2), requested("eval", holdout=0.2)
    assert len(train) + len(held_out) == 200 and held_out and not {*train} & {*held_out}
    assert len(requested("train")) == 200 and requested("eval") == [] and len(requested("train", 50)) == 50
    with pytest.raises(ValueError, match=r"task\.params\.holdout is 1"):
        requested("train", holdout=1.0)
    with pytest.raises(ValueError, match=r"task\.params\.hold is unknown"):
        requested("train", hold=0.5)


def test_a_procedural_source_gives_its_reference_answers(renderer: Renderer) -> None:
    ((where, row),) = load_rows("arithmetic", "train", 0, 1, {"families": ["sum"], "digits": 2})
    assert where.startswith("prompt ")
    one = encode_example(renderer, row, where, context=256)
    (answer,) = trained(renderer, one)
    assert answer.removesuffix("<|im_end|>").isdigit()
