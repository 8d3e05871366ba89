"""Rows with answers, in Hugging Face's and TRL's formats, as tokens and a loss mask for training.

    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}                  a chat
    {"prompt": "2+2?", "completion": "4"}                                              texts, or chats
    {"prompt": .., "chosen": .., "rejected": ..}                                       a preference

A procedural source gives its prompt and the reference answer. No row is skipped: a bad one is an error.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from ostinato.control_tokens import END_THINK, THINK
from ostinato.env.rows import Row, check_messages, compute_holdout_mask, read_raw_rows, read_value
from ostinato.env.tasks import check_params, check_source, choose_subset, load_tasks
from ostinato.render import Message, Renderer
from ostinato.types import Prompt

log = logging.getLogger(__name__)
Turns = Literal["last", "all"]
CHATS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns that may hold a chat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A row as tokens, up to the last token that is trained on."""

    tokens: np.ndarray  # [L] int32
    mask: np.ndarray  # [L] bool: True on the assistant's tokens, including the one that ends its turn


def load_rows(
    source: str, split: str, seed: int, n: int | None, params: Mapping[str, Any]
) -> list[tuple[str, Row]]:
    """Return (name in errors, row) of ``n`` rows of ``split`` ("train" or "eval"), or of all, as in
    ``load_tasks``. A file without ``holdout`` has no rows for "eval". Raises ValueError for a source that
    cannot be read, an unknown parameter, and a source without rows."""
    if source == "arithmetic" or source.startswith("gym:"):
        prompts = load_tasks(source, split, seed, n, params)
        return [(f"prompt {prompt.uid}", _row_from_prompt(prompt)) for prompt in prompts]
    check_params(_read_rows, params, source, skip=("source", "split"))
    rows = _read_rows(check_source(source), split, **params)
    if split == "train" and n is not None and n < len(rows):
        log.info(f"task.n_train takes {n} of the {len(rows)} rows of {source}; 0 takes all")
    return choose_subset(rows, seed, n)


def _row_from_prompt(prompt: Prompt) -> Row:
    answer = str(prompt.columns["answer"])
    if prompt.messages is None:
        return {"prompt": prompt.text, "completion": answer}
    return {"prompt": list(prompt.messages), "completion": [{"role": "assistant", "content": answer}]}


def _read_rows(source: str, split: str, *, holdout: float = 0.0, config: str = "") -> list[tuple[str, Row]]:
    """Return (name in errors, row) of all rows of ``split``. Raises ValueError for a source that cannot be
    read, and if it has no rows."""
    if not 0 <= holdout < 1:
        raise ValueError(f"task.params.holdout is {holdout}; use a share of the rows in [0, 1)")
    rows, has_splits = read_raw_rows(source, split, config, holdout)
    pairs = [(f"row {number} of {source}", row) for number, row in rows]
    if not has_splits and (holdout or split == "eval"):
        mask = compute_holdout_mask([_extract_question(row) for _, row in pairs], holdout)
        pairs = [
            pair for pair, is_held_out in zip(pairs, mask, strict=True) if is_held_out == (split == "eval")
        ]
    if not pairs and (split == "train" or holdout):
        raise ValueError(
            f"task.source {source} has no rows for {split}; check the file and task.params.holdout"
        )
    return pairs


def _extract_question(row: Row) -> str:
    """Return the question of a row as JSON. Rows with the same question are in the same split."""
    chat = itertools.takewhile(lambda message: not _is_from_assistant(message), row.get("messages") or [])
    return json.dumps(row.get("prompt") or list(chat), sort_keys=True, default=str)


def _is_from_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def encode_example(
    renderer: Renderer,
    row: Row,
    row_name: str,
    *,
    context: int,
    turns: Turns = "last",
    key: str = "completion",
) -> Example:
    """Encode the row's ``messages``, or ``prompt`` and ``key``, as the tokens that a policy would have
    sampled. Raises ValueError, whose text begins with ``row_name``, for a row that cannot be trained on or
    does not fit ``context``."""
    try:
        pieces = _encode_row(renderer, row, turns, key)
    except ValueError as error:
        raise ValueError(f"{row_name}: {error}") from error
    tokens = np.concatenate([piece for piece, _ in pieces])
    mask = np.concatenate([np.full(len(piece), is_trained) for piece, is_trained in pieces])
    if not mask.any() or mask[0]:
        fault = "before its answer" if mask.any() else "to train on"
        raise ValueError(f"{row_name} has no token {fault}; leave the row out")
    if len(tokens) > context:
        limit = f"the context of the model is {context}"
        raise ValueError(f"{row_name} has {len(tokens)} tokens and {limit}; shorten it or leave it out")
    return Example(tokens=tokens.astype(np.int32), mask=mask)


def encode_pair(renderer: Renderer, row: Row, row_name: str, *, context: int) -> tuple[Example, Example]:
    """Return (chosen, rejected) of a preference row. Raises ValueError as ``encode_example`` does, or if they
    are equal."""
    chosen, rejected = (
        encode_example(renderer, row, row_name, context=context, turns="all", key=key)
        for key in ("chosen", "rejected")
    )
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise ValueError(f"{row_name} has the same answer as chosen and as rejected; leave the row out")
    return chosen, rejected


# The end of a context in which the template opens a thought for the answer, and may also close it.
_THOUGHT_OPENING = re.compile(rf"{THINK}\s*({END_THINK}\s*)?\Z")
_Pieces = list[tuple[np.ndarray, bool]]  # (tokens, whether they are trained on)


def _encode_row(renderer: Renderer, row: Row, turns: Turns, key: str) -> _Pieces:
    """Return the pieces of a row's chat, or of its prompt and answer. The answer to a text ends with the
    token that ends sequences, if there is one. Raises ValueError for a wrong row."""
    if row.get("tools"):
        raise ValueError("it has tools, which are not read here; leave the column out")
    template_kwargs = read_value(row, "chat_template_kwargs", dict, "it") or {}
    if key == "completion" and row.get("messages") is not None:
        return _encode_chat(renderer, _read_messages(row["messages"]), 0, turns, template_kwargs)
    columns = "messages, or prompt and completion" if key == "completion" else "prompt, chosen and rejected"
    for name in ("prompt", key):
        if not row.get(name):
            raise ValueError(f"it has no {name!r}; give {columns}")
    prompt, answer = row["prompt"], row[key]
    if isinstance(prompt, str) != isinstance(answer, str):
        raise ValueError(f"one of 'prompt' and {key!r} is a text and the other a chat; give both alike")
    if not isinstance(prompt, str):
        context = _read_messages(prompt)
        return _encode_chat(
            renderer, (*context, *_read_messages(answer)), len(context), turns, template_kwargs
        )
    tokens = renderer.encode(answer)
    if renderer.eos is not None and int(tokens[-1]) not in renderer.stop_tokens:
        tokens = np.append(tokens, np.int32(renderer.eos))
    return [(renderer.prompt(Prompt(uid="", text=prompt)), False), (tokens, True)]


def _read_messages(chat: Any) -> tuple[dict[str, str], ...]:
    """Return a chat. Raises ValueError for a message with a field that is no text, and as ``check_messages``
    does."""
    for message in chat if isinstance(chat, list | tuple) else [chat]:
        fields = message if isinstance(message, Mapping) else {}
        if non_texts := [key for key, value in fields.items() if value and not isinstance(value, str)]:
            raise ValueError(
                f"a message has {non_texts[0]!r}, which is no text and is not read here; leave it out"
            )
    return check_messages(chat)


def _encode_chat(
    renderer: Renderer, chat: Sequence[Message], start: int, turns: Turns, template_kwargs: Mapping[str, Any]
) -> _Pieces:
    """Return contexts and answers alternately, split where sampling splits: an answer ends with its stop
    token. Raises ValueError for a chat without an answer after ``start``, and for a template that sampling
    could not follow."""
    render = partial(renderer.marked_text, template_kwargs=template_kwargs)
    indices = [index for index in range(start, len(chat)) if chat[index]["role"] == "assistant"]
    if not indices:
        raise ValueError("it has no assistant turn; add one, or leave the row out")
    pieces: _Pieces = []
    prefix = ""  # the text of the pieces so far
    for index in indices[-1:] if turns == "last" else indices:
        context = render(chat[:index])
        full_text = render(chat[: index + 1], add_generation_prompt=False)
        if not context.startswith(prefix):
            raise ValueError(
                "the chat template writes an earlier answer otherwise once a turn follows, so not all turns "
                "can be trained on in one row; train on the last one (sft.turns=last), or make each a row"
            )
        answer = _extract_answer(renderer, chat[index], context, full_text)
        pieces += [(renderer.encode_marked(context[len(prefix) :]), False)]
        pieces += [(renderer.encode_marked(answer), True)]
        prefix = context + answer
    return pieces


def _extract_answer(renderer: Renderer, message: Message, context: str, full_text: str) -> str:
    """Return what a policy would have sampled after ``context``, with the token that ends its turn.

    ``full_text`` is the chat up to this message, as the template writes it. Templates that open a thought in
    the context (R1, DeepSeek-V3, Nemotron) leave the thought of an answer out of the chat; it is then taken
    from the row. Raises ValueError if what would have been sampled cannot be known.
    """
    thought, answer_text = _split_thought(message)
    opening = _THOUGHT_OPENING.search(context)
    if opening is None or full_text.startswith(context):
        text_before, thought_opening = context, ""
    else:
        text_before, thought_opening = context[: opening.start()], opening[0]
    if not full_text.startswith(text_before):
        raise ValueError(
            "the chat template begins an answer otherwise than it asks for one, so no context of it was "
            f"sampled from: it asks with {renderer.control.show(context)[-40:]!r}; use another template"
        )
    answer_end, stop_text = _find_answer_end(renderer, full_text, len(text_before))
    if END_THINK in thought_opening and thought is not None and thought.strip():
        raise ValueError(
            "the chat template closes the thought before the answer, and this answer has one; leave it out, "
            "or switch thinking on in chat_template_kwargs"
        )
    if thought_opening and END_THINK not in thought_opening:
        if thought is None:
            raise ValueError(
                f"the chat template opens a thought for the answer ({THINK}) and this answer has none; give "
                f"it reasoning_content, or begin its content with {THINK}..{END_THINK} (an empty one where "
                "there is none), or use another template"
            )
        # The context has already the blanks behind the tag.
        thought = thought.removeprefix(thought_opening.removeprefix(THINK))
        return renderer.control.hide(f"{thought}{END_THINK}{answer_text}") + stop_text
    answer = full_text[len(text_before) : answer_end]
    if thought is not None and renderer.control.hide(thought.strip()) not in answer:
        name = "reasoning_content" if message.get("reasoning_content") else f"text before {END_THINK}"
        raise ValueError(
            f"the chat template does not write the {name} of its answer, so it would not be learned; leave "
            "it out, or use a template that writes it"
        )
    return answer


def _split_thought(message: Message) -> tuple[str | None, str]:
    """Return (the thought of an answer with the blanks around it, or None; the text after it)."""
    content = str(message["content"])
    if reasoning := message.get("reasoning_content"):
        return f"\n{reasoning}\n", f"\n\n{content}"
    thought, tag, text = content.partition(END_THINK)
    return (thought.lstrip().removeprefix(THINK), text) if tag else (None, content)


def _find_answer_end(renderer: Renderer, text: str, start: int) -> tuple[int, str]:
    """Return (the end of the answer that begins at ``start``, the text of the stop token there). Without a
    stop token they are the end of the text and ""."""
    stops = [renderer.decode([token], skip_special=False) for token in renderer.stop_tokens]
    ends = [(index + len(stop), stop) for stop in stops if (index := text.rfind(stop, start)) >= 0]
    return max(ends, default=(len(text), ""))
