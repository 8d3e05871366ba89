"""Any task of reasoning_gym by name: endless problems, scored by the task's own rules (reward ``gym_score``).

reasoning_gym draws item i of a dataset from the generator seeded ``seed + i``, so neighbouring seeds share
items. We hash our seeds to spread them, and a question's text decides which split it belongs to: no
evaluation question is ever trained on, whatever the seeds, sizes and parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ostinato.types import Prompt

EVAL_SHARE = 8  # one question in 8 belongs to the evaluation split
MAX_FAILED_DRAWS = 2000  # consecutive draws without a new question, before a task counts as exhausted


def draw_prompts(name: str, split: str, seed: int, n: int, config: Mapping[str, Any]) -> list[Prompt]:
    """Return ``n`` distinct questions of ``split`` as chat prompts; a larger ``n`` only continues the stream.

    ``config`` are the fields of the task's own configuration. Columns: ``answer`` (the task's example of a
    right answer, sometimes None), ``gym`` ({"name", "config"}: what the scorer is made from) and ``entry``
    (the task's item, which the scorer reads). Raises ValueError for a missing package, an unknown task or
    field, a bad value, or a task with fewer than ``n`` questions.
    """
    dataset = _open_dataset(name, {**config, "seed": _mix_seed(seed), "size": 2**24})
    prompts: dict[str, Prompt] = {}
    index = last_new_index = 0
    while len(prompts) < n:
        entry = dataset[index]
        prompt = _make_prompt(name, config, entry)
        if assign_split(entry["question"]) == split and prompt.uid not in prompts:
            prompts[prompt.uid], last_new_index = prompt, index
        if index - last_new_index > MAX_FAILED_DRAWS:
            raise ValueError(
                f"n is {n} but gym:{name} has only about {len(prompts)} distinct {split} questions; "
                "use fewer, or widen the task in params"
            )
        index += 1
    return list(prompts.values())


def assign_split(question: str) -> str:
    """Return the split of a question, by its SHA-256: 0 modulo EVAL_SHARE is "eval"."""
    return "eval" if hashlib.sha256(question.encode()).digest()[0] % EVAL_SHARE == 0 else "train"


def _make_prompt(name: str, config: Mapping[str, Any], entry: dict[str, Any]) -> Prompt:
    digest = hashlib.sha256(f"{entry['question']}\0{entry['answer']}".encode()).hexdigest()[:16]
    return Prompt(
        uid=f"gym/{name}/{digest}",
        messages=({"role": "user", "content": entry["question"]},),
        columns={"answer": entry["answer"], "gym": {"name": name, "config": dict(config)}, "entry": entry},
    )


def _mix_seed(seed: int) -> int:
    """Hash a seed to 31 bits, so that neighbouring seeds share no items. numpy, which some tasks seed with
    the result, takes at most 32 bits."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") >> 1


def _open_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """Open a task of reasoning_gym. Raises ValueError for a missing package, an unknown task or a bad
    parameter."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise ValueError(f"task.source gym:{name} needs reasoning-gym; install the extra 'gym'") from error
    if name not in DATASETS:
        nearest_name = get_close_matches(name, DATASETS, n=1, cutoff=0)[0]
        raise ValueError(f"task.source is gym:{name}, an unknown task; the nearest is gym:{nearest_name}")
    names = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in config:
        if key not in names:
            nearest_name = get_close_matches(key, names, n=1, cutoff=0)[0]
            raise ValueError(
                f"task.params.{key} is unknown for gym:{name}; nearest is {nearest_name!r} of {names}"
            )
    try:
        return create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task.params are refused by gym:{name}: {error}") from error
