"""Rows with answers as tokens: what is trained of them, what is held out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.env.answers import Example, example, load_rows, pair
from ostinato.model.named import model_folder
from ostinato.render import Renderer

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AGAIN, LAST = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(model_folder("asset:seed-moe"))


def trained(renderer: Renderer, one: Example) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], one.mask.astype(int), [0]))))
    spans = edges.reshape(-1, 2)
    return [renderer.decode(one.tokens[first:end], skip_special=False) for first, end in spans]


def made(renderer: Renderer, row: dict[str, Any], **more: Any) -> Example:
    return example(renderer, row, "row 7 of x", context=64, **more)


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


REFUSED = [
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": [ANSWER | {"tool_calls": [{"id": "1"}]}]}, "tool_calls"),
    ({"messages": [USER, ANSWER], "tools": [{"name": "x"}]}, "tools"),
    ({"messages": "hello"}, "message 0 of the chat is a str"),
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


def test_names_of_the_template_are_handed_to_it(tmp_path: Path) -> None:
    """A row's ``chat_template_kwargs`` were ignored, so the policy learned to answer another prompt."""
    for file in model_folder("asset:seed-moe").glob("*token*.json"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ mood }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    moody = Renderer(tmp_path)
    one = made(moody, {"messages": [USER, ANSWER], "chat_template_kwargs": {"mood": "12"}})
    assert trained(moody, one) == ["4<|im_end|>"]
    assert moody.decode(one.tokens, skip_special=False).startswith("12<|im_start|>")


def test_a_preference_has_two_answers_that_differ(renderer: Renderer) -> None:
    chosen, rejected = pair(
        renderer, {"prompt": [USER], "chosen": [ANSWER], "rejected": [LAST]}, "row 7", context=64
    )
    assert trained(renderer, chosen) == ["4<|im_end|>"] and trained(renderer, rejected) == ["6<|im_end|>"]
    with pytest.raises(ValueError, match="row 7 has the same answer"):
        pair(renderer, {"prompt": "2+2=", "chosen": "4", "rejected": "4"}, "row 7", context=64)
    with pytest.raises(ValueError, match="row 7: it has no 'rejected'"):
        pair(renderer, {"prompt": "2+2=", "chosen": "4"}, "row 7", context=64)


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
    one = example(renderer, row, where, context=256)
    (answer,) = trained(renderer, one)
    assert answer.removesuffix("<|im_end|>").isdigit()
