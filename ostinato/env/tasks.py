"""Sources of prompts: ``load_tasks`` reads a source by name, ``Rows`` makes an endless stream of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ostinato.env import arithmetic, gym, rows
from ostinato.types import Prompt

T = TypeVar("T")
SUBSET_EPOCH = -1  # addresses the order that picks a subset; the epochs of a stream count from 0


class Rows:
    """Implements protocols.Tasks: each epoch is a permutation of ``prompts`` addressed by (seed, epoch), or
    with ``shuffle`` off the prompts in their order. Raises ValueError without prompts.

    It has no state, so a resumed run continues the stream by its index alone.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("tasks are empty; a run needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._prompts))
        if self._shuffle:
            position = int(shuffle_order(self._seed, epoch, len(self._prompts))[position])
        return self._prompts[position]


@functools.lru_cache(maxsize=16)  # a batch can straddle two epochs of each task
def shuffle_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return [count] int64, a permutation: argsort of raw Philox words, which numpy keeps stable across
    versions. The array is cached: do not write to it."""
    key = np.array([seed, epoch], np.int64).view(np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def load_tasks(
    source: str,
    split: str,
    seed: int,
    n: int | None,
    params: Mapping[str, Any] | None = None,
    system_prompt: str = "",
) -> list[Prompt]:
    """Load the prompts of ``split`` ("train" or "eval") of a source; ``n`` None means all rows of a file.

    - ``arithmetic``: the procedural family of ``env.arithmetic``
    - ``gym:<name>``: any task of reasoning_gym
    - ``hf:<name>``: a dataset of the Hugging Face hub
    - a path to a .jsonl (or .jsonl.gz), .csv or .parquet file, or to a folder written by ``save_to_disk`` of
      ``datasets``

    Procedural sources give exactly ``n`` distinct prompts. The text of a problem decides its split, so the
    splits are disjoint for every seed and size. A file with more than ``n`` rows gives
    a subset that depends on ``seed``, in the file's order; for files see ``rows.read_source`` and
    ``check_disjoint``. ``params`` are the source's own. ``system_prompt`` opens every chat.

    Raises ValueError with one sentence for what the user can fix.
    """
    params = dict(params or {})
    if source == "arithmetic" or source.startswith("gym:"):
        if n is None:
            raise ValueError(f"n is missing; {source} is endless, say how many {split} prompts to draw")
        prompts = _generate_rows(source, split, seed, n, params)
    else:
        check_params(rows.read_source, params, source, skip=("source", "split"))
        prompts = choose_subset(rows.read_source(check_source(source), split, **params), seed, n)
    return [add_system_prompt(prompt, system_prompt) for prompt in prompts] if system_prompt else prompts


def check_disjoint(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """Raise ValueError when an evaluation prompt, by uid or by content, is also trained on."""
    uids = {prompt.uid for prompt in train}
    contents = {_get_text(prompt) for prompt in train}
    copies = [prompt.where for prompt in evaluation if prompt.uid in uids or _get_text(prompt) in contents]
    if copies:
        raise ValueError(
            f"{len(copies)} of {len(evaluation)} evaluation prompts are also in the training data "
            f"(the first is {copies[0]}); set task.params.holdout to the share to hold out, e.g. 0.1"
        )


def _get_text(prompt: Prompt) -> str:
    """Return the text of a prompt without system messages, which may differ between the splits."""
    if prompt.messages is None:
        return prompt.text or ""
    lines = [
        f"{m['role']}: {m['content']}{m.get('tool_calls') or ''}"
        for m in prompt.messages
        if m["role"] != "system"
    ]
    return "\n".join(lines)


def _generate_rows(source: str, split: str, seed: int, n: int, params: dict[str, Any]) -> list[Prompt]:
    """Draw the prompts of a procedural source. Raises ValueError."""
    if source == "arithmetic":
        check_params(arithmetic.draw_prompts, params, source, skip=("split", "seed", "n"))
        return arithmetic.draw_prompts(split, seed, n, **params)
    return gym.draw_prompts(source.removeprefix("gym:"), split, seed, n, params)


def check_source(source: str) -> str:
    """Return ``source``. Raises ValueError unless it is a path that exists or a name of the hub."""
    if not source:
        raise ValueError(
            "task.source is empty; name rows, e.g. task.source=rows.jsonl (ostinato judge train FEEDBACK.db "
            "makes those of a judge, preference_rows.py beside the packaged recipes pairs to try DPO on)"
        )
    if source.startswith("hf:") or Path(source).exists():
        return source
    if Path(source).suffix or "/" in source:
        raise ValueError(f"task.source is {source!r}; there is no such file or folder, check the path")
    nearest = get_close_matches(source.partition(":")[0], ["arithmetic", "gym", "hf"], n=1, cutoff=0)[0]
    nearest += {"arithmetic": ""}.get(nearest, ":<name>")
    raise ValueError(f"task.source is {source!r}, neither a source nor a file; did you mean {nearest}?")


def check_params(
    reader: Callable[..., Any], params: Mapping[str, Any], source: str, skip: Sequence[str]
) -> None:
    """Raise ValueError for a parameter that ``reader`` does not take."""
    names = [name for name in inspect.signature(reader).parameters if name not in skip]
    for name in params:
        if name not in names:
            nearest = get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ValueError(f"task.params.{name} is unknown for {source}; nearest is {nearest!r} of {names}")


def choose_subset(rows: list[T], seed: int, n: int | None) -> list[T]:
    """Return ``n`` rows drawn by ``seed``, in their original order; all rows if ``n`` is None or no less than
    their number."""
    if n is None or n >= len(rows):
        return rows
    return [rows[index] for index in sorted(shuffle_order(seed, SUBSET_EPOCH, len(rows))[:n].tolist())]


def add_system_prompt(prompt: Prompt, system_prompt: str) -> Prompt:
    """Return the prompt as a chat that begins with ``system_prompt``; a text becomes the user's message.
    Raises ValueError if the chat has a system message."""
    prompt = rows.to_chat(prompt)
    assert prompt.messages is not None
    if prompt.messages[0]["role"] == "system":
        raise ValueError(f"task.system_prompt is set but {prompt.where} has its own; drop one")
    return replace(prompt, messages=({"role": "system", "content": system_prompt}, *prompt.messages))
