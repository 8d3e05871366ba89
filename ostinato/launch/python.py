"""``learn`` with Python objects: rewards, rows, an environment, an agent and tools become names in a
recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.config import Recipe
from ostinato.config.recipe import merge
from ostinato.objects import name_object, write_rows

OBJECTS = "objects"  # folder beside the runs, for objects without a name, named by content
HOLDOUT_SHARE = 0.1  # of the rows, for evaluations, if there are no rows of their own


def make_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    overrides: Sequence[str],
    *,
    model: str | Path | Mapping[str, Any] | None,
    data: Any,
    eval_data: Any,
    reward: Any,
    env: Any,
    agent: Any,
    loss: Any,
    tools: Any,
    sections: Mapping[str, Any],
) -> Recipe:
    """Make a recipe of ``recipe`` (None: all defaults), ``sections`` (``trainer={"steps": 20}``, ``seed=1``)
    and objects. Rows, and objects without a name, are written to the folder OBJECTS of log.dir.

    Raises ValueError, naming the argument, for an object that a recipe cannot name and for arguments that do
    not go together, and for invalid keys.
    """
    if isinstance(recipe, Recipe) and overrides:
        raise ValueError(f"overrides {overrides} need a recipe file; give them to Recipe.load instead")
    if recipe is data is env is None and not any(key.startswith("task") for key in (*overrides, *sections)):
        raise ValueError(
            'data is not given; give rows, a file of them, or the name of a source: "arithmetic"'
        )
    base = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe or {"name": "learn"}, *overrides)
    section_keys = {key: dict(value) for key, value in sections.items() if isinstance(value, Mapping)}
    folder = Path(section_keys.get("log", {}).get("dir", base.log.dir)).absolute() / OBJECTS
    changes: dict[str, dict[str, Any]] = {"task": {}}
    if model is not None:
        changes["model"] = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    if data is None and eval_data is not None:
        raise ValueError("eval_data needs data beside it, the rows to train on")
    if data is not None:
        task = section_keys.setdefault("task", {})
        changes["task"] = _make_task_keys(
            data, eval_data, folder, {**base.task.params, **task.get("params", {})}
        )
        if not isinstance(data, str | Path):
            task.setdefault("n_train", 0)  # all rows
    if reward is not None:
        keys = dict(reward) if isinstance(reward, Mapping) else {"functions": reward}
        if "functions" in keys:
            names = [name_object(value, folder, "reward") for value in _to_sequence(keys["functions"])]
            keys["functions"] = names
        changes["reward"] = keys
    for key, value in {"env": env, "agent": agent}.items():
        if value := section_keys.get("task", {}).get(key) if value is None else value:
            changes["task"][key] = name_object(value, folder, key)
    if loss is not None:
        changes["algo"] = {"loss": name_object(loss, folder, "loss")}
    if tools:
        changes["task"]["tools"] = [name_object(value, folder, "tools") for value in _to_sequence(tools)]
    return merge(
        base, {**sections, **{key: section_keys.get(key, {}) | keys for key, keys in changes.items()}}
    )


def _to_sequence(objects: Any) -> Sequence[Any]:
    """``objects`` if it is a sequence, else a list of the one object."""
    return objects if isinstance(objects, Sequence) and not isinstance(objects, str) else [objects]


def _make_task_keys(data: Any, eval_data: Any, folder: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Make the keys of [task] for ``data``: a source by its name, one table of rows, or tables by split.
    Tables are written to files in ``folder``. Raises ValueError for ``eval_data`` beside a source or a split,
    and for tables without the split "train"."""
    if isinstance(data, str | Path):
        if eval_data is not None:
            raise ValueError(
                f"eval_data beside data={str(data)!r}, a file or a name; give the rows of both as lists, or "
                "a folder with train.jsonl and eval.jsonl as data"
            )
        return {"source": str(data)}
    if isinstance(data, Mapping):  # of datasets.DatasetDict, or {"train": rows, "eval": rows}
        names = [name for name in ("eval", "validation", "test") if name in data]
        if "train" not in data or eval_data is not None:
            raise ValueError(f"data has the splits {list(data)}; give 'train', and 'eval' or eval_data=rows")
        data, eval_data = data["train"], data[names[0]] if names else None
    source = write_rows(data, folder, "data" if eval_data is None else "train")
    changes: dict[str, Any] = {"source": str(source)}
    if eval_data is not None:
        changes["source"] = str(_make_split_folder(source, write_rows(eval_data, folder, "eval"), folder))
    elif "holdout" not in params:
        changes["params"] = {**params, "holdout": HOLDOUT_SHARE}
    return changes


def _make_split_folder(train: Path, evaluation: Path, folder: Path) -> Path:
    """Move both files, as train.jsonl and eval.jsonl, into a folder that is named by them, and return it."""
    target = folder / f"{train.stem}-{evaluation.stem}"
    target.mkdir(exist_ok=True)
    for name, path in (("train", train), ("eval", evaluation)):
        (target / f"{name}.jsonl").write_bytes(path.read_bytes())
        path.unlink()
    return target
