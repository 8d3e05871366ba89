"""Rows with answers, for supervised training, in Hugging Face's and TRL's formats -> tokens and a loss mask.

    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}                  a chat
    {"prompt": "2+2?", "completion": "4"}                                              texts, or chats
    {"prompt": .., "chosen": .., "rejected": ..}                                       a preference

A procedural source gives its prompt and the reference answer. No row is skipped: a bad one is an error.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from ostinato.env.rows import Row, held_out, messages, raw_rows, value_of
from ostinato.env.tasks import check_params, existing, load_tasks, subset
from ostinato.render import Message, Renderer
from ostinato.types import Prompt

log = logging.getLogger(__name__)
Turns = Literal["last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A row as tokens, up to the last one that is trained on."""

    tokens: np.ndarray  # [L] int32
    mask: np.ndarray  # [L] bool: True on the assistant's tokens, including the one that ends its turn


def load_rows(
    source: str, split: str, seed: int, n: int | None, params: Mapping[str, Any]
) -> list[tuple[str, Row]]:
    """(name in errors, row) of ``split`` ("train" or "eval"), ``n`` of them or all, as in ``load_tasks``. A
    file without ``holdout`` has no rows for "eval". Raises ValueError for a source that cannot be read."""
    if source == "arithmetic" or source.startswith("gym:"):
        prompts = load_tasks(source, split, seed, n, params)
        return [(f"prompt {prompt.uid}", _answered(prompt)) for prompt in prompts]
    check_params(_read, params, source, skip=("source", "split"))
    rows = _read(existing(source), split, **params)
    if split == "train" and n is not None and n < len(rows):
        log.info(f"task.n_train takes {n} of the {len(rows)} rows of {source}; 0 takes all")
    return subset(rows, seed, n)


def _answered(prompt: Prompt) -> Row:
    answer = str(prompt.columns["answer"])
    if prompt.messages is None:
        return {"prompt": prompt.text, "completion": answer}
    return {"prompt": list(prompt.messages), "completion": [{"role": "assistant", "content": answer}]}


def _read(source: str, split: str, *, holdout: float = 0.0, config: str = "") -> list[tuple[str, Row]]:
    if not 0 <= holdout < 1:
        raise ValueError(f"task.params.holdout is {holdout}; use a share of the rows in [0, 1)")
    rows, has_splits = raw_rows(source, split, config, holdout)
    named = [(f"row {number} of {source}", row) for number, row in rows]
    if not has_splits and (holdout or split == "eval"):
        held = held_out([_question(row) for _, row in named], holdout)
        named = [one for one, is_held in zip(named, held, strict=True) if is_held == (split == "eval")]
    if not named and (split == "train" or holdout):
        raise ValueError(
            f"task.source {source} has no rows for {split}; check the file and task.params.holdout"
        )
    return named


def _question(row: Row) -> str:
    """What is asked, as JSON: two rows that ask the same are in the same split."""
    chat = itertools.takewhile(lambda one: not _of_assistant(one), row.get("messages") or [])
    return json.dumps(row.get("prompt") or list(chat), sort_keys=True, default=str)


def _of_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def example(
    renderer: Renderer, row: Row, where: str, *, context: int, turns: Turns = "last", key: str = "completion"
) -> Example:
    """The row's ``messages``, or ``prompt`` and ``key``, as the tokens that a policy would have sampled.
    Raises ValueError, beginning with ``where``, for a row that cannot be trained on."""
    try:
        pieces = _pieces(renderer, row, turns, key)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    tokens = np.concatenate([piece for piece, _ in pieces])
    mask = np.concatenate([np.full(len(piece), trained) for piece, trained in pieces])
    if not mask.any() or mask[0]:
        missing = "before its answer" if mask.any() else "to train on"
        raise ValueError(f"{where} has no token {missing}; leave the row out")
    if len(tokens) > context:
        most = f"the context of the model is {context}"
        raise ValueError(f"{where} has {len(tokens)} tokens and {most}; shorten it or leave it out")
    return Example(tokens=tokens.astype(np.int32), mask=mask)


def pair(renderer: Renderer, row: Row, where: str, *, context: int) -> tuple[Example, Example]:
    """(chosen, rejected) of a preference row. Raises ValueError as ``example`` does, or if they are equal."""
    chosen, rejected = (
        example(renderer, row, where, context=context, turns="all", key=key) for key in ("chosen", "rejected")
    )
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise ValueError(f"{where} has the same answer as chosen and as rejected; leave the row out")
    return chosen, rejected


_Pieces = list[tuple[np.ndarray, bool]]  # (tokens, whether they are trained on)


def _pieces(renderer: Renderer, row: Row, turns: Turns, key: str) -> _Pieces:
    if row.get("tools"):
        raise ValueError("it has tools, which are not read here; leave the column out")
    names = value_of(row, "chat_template_kwargs", dict, "it") or {}
    if key == "completion" and row.get("messages") is not None:
        return _chat(renderer, _plain(row["messages"]), 0, turns, names)
    needed = "messages, or prompt and completion" if key == "completion" else "prompt, chosen and rejected"
    for name in ("prompt", key):
        if not row.get(name):
            raise ValueError(f"it has no {name!r}; give {needed}")
    prompt, answer = row["prompt"], row[key]
    if isinstance(prompt, str) != isinstance(answer, str):
        raise ValueError(f"one of 'prompt' and {key!r} is a text and the other a chat; give both alike")
    if not isinstance(prompt, str):
        before = _plain(prompt)
        return _chat(renderer, (*before, *_plain(answer)), len(before), turns, names)
    tokens = renderer.encode(answer)
    if renderer.eos is not None and int(tokens[-1]) not in renderer.stop_tokens:
        tokens = np.append(tokens, np.int32(renderer.eos))
    return [(renderer.prompt(Prompt(uid="", text=prompt)), False), (tokens, True)]


def _plain(chat: Any) -> tuple[dict[str, str], ...]:
    for message in chat if isinstance(chat, list | tuple) else [chat]:
        given = message if isinstance(message, Mapping) else {}
        if odd := [key for key, value in given.items() if value and not isinstance(value, str)]:
            raise ValueError(f"a message has {odd[0]!r}, which is no text and is not read here; leave it out")
    return messages(chat)


def _chat(
    renderer: Renderer, chat: Sequence[Message], start: int, turns: Turns, template_kwargs: Mapping[str, Any]
) -> _Pieces:
    """Contexts and answers alternately, split where sampling splits: an answer ends with its stop token."""
    rendered = partial(renderer.marked_text, template_kwargs=template_kwargs)
    answers = [at for at in range(start, len(chat)) if chat[at]["role"] == "assistant"]
    if not answers:
        raise ValueError("it has no assistant turn; add one, or leave the row out")
    stops = [renderer.decode([token], skip_special=False) for token in renderer.stop_tokens]
    pieces: _Pieces = []
    done = ""  # the text already in the pieces
    for at in answers[-1:] if turns == "last" else answers:
        before = rendered(chat[:at])
        whole = rendered(chat[: at + 1], add_generation_prompt=False)
        if not (before.startswith(done) and whole.startswith(before)):
            raise ValueError(
                "the chat template rewrites what comes before an answer; use sft.turns=last, or a template "
                "that only appends"
            )
        ends = [found + len(stop) for stop in stops if (found := whole.rfind(stop, len(before))) >= 0]
        end = max(ends, default=len(whole))
        pieces += [(renderer.encode_marked(before[len(done) :]), False)]
        pieces += [(renderer.encode_marked(whole[len(before) : end]), True)]
        done = whole[:end]
    return pieces
