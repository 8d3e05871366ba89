"""Python objects as a recipe names them, so that workers, ranks and a resumed run can load them.

A function or class of an importable module is ``module:name``. One of a script, of a notebook or of another
function has no such name: it is written by value (cloudpickle) to ``FOLDER/NAME-DIGEST.pkl`` and is
``FOLDER/NAME-DIGEST.pkl:NAME``. Loading such a file runs code, as importing a .py file does.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato.inputs import has_surrogate

PICKLE = ".pkl"


def name_object(value: Any, folder: Path, key: str) -> str:
    """The name of ``value``, a callable, in the key ``key`` of a recipe; a string is a name already. An
    object without a name is written to ``folder``.

    Raises ValueError for what is not callable, and for what no file can hold (an open file, a lock).
    """
    if isinstance(value, str):
        return value
    if not callable(value):
        raise ValueError(
            f"{key} is {value!r:.80}, which is not callable; give a function, a class or its name"
        )
    name = getattr(value, "__name__", type(value).__name__)
    name = name if name.isidentifier() else key.rpartition(".")[2].strip("s")  # a lambda
    module = getattr(value, "__module__", None)
    if module not in (None, "__main__") and _is_importable(value, module, name):
        return f"{module}:{name}"
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # whatever an object that it refers to raises
        raise ValueError(
            f"{key}: {name} cannot be handed to another process ({type(error).__name__}: {error}); make what "
            f"it needs inside it, or put it into a file and name it file.py:{name}"
        ) from error
    path = _write_by_digest(data, folder, name, PICKLE)
    return f"{path}:{name}"


def _write_by_digest(data: bytes, folder: Path, name: str, suffix: str) -> Path:
    """Write ``data`` to a file named by its content, so that an object has the same name in every run. Makes
    the folder; an existing file is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}{suffix}"
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)
    return path


def _is_importable(value: Any, module: str, name: str) -> bool:
    """Whether another process that imports ``module`` gets the same object; False for a module made by hand
    (a notebook, ``exec``)."""
    loaded = sys.modules.get(module)
    return (
        loaded is not None
        and getattr(loaded, "__spec__", None) is not None
        and getattr(loaded, name, None) is value
        and importlib.util.find_spec(module) is not None
    )


def load_object(path: Path, what: str) -> Any:
    """The object in a file that ``name_object`` wrote. Loading runs code. Raises ValueError for a missing
    file."""
    if not path.is_file():
        raise ValueError(f"{what}: there is no file {path}; give the object to learn again")
    return pickle.loads(path.read_bytes())


def load_named(spec: str, what: str, nearest: str) -> Callable[..., Any]:
    """The user's callable at ``module:name``, ``path.py:name`` or ``path.pkl:name``; its module or file is
    run. Raises ValueError for a name of another form (``nearest`` is an example), a missing module, file or
    function, and an error in the file. ``what``: the purpose of the callable, for errors."""
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise ValueError(f"{what} {spec!r} is unknown; use {nearest!r}, module:name or path.py:name")
    if location.endswith(PICKLE):
        return load_object(Path(location), f"{what} {spec!r}")
    if location.endswith(".py"):
        module = _load_file(Path(location), f"{what} {spec!r}")
    elif importlib.util.find_spec(location.partition(".")[0]) is None:
        is_file = Path(f"{location}.py").is_file()
        fix = f"write {location}.py:{name}" if is_file else "check the name"
        raise ValueError(f"{what} {spec!r}: there is no module {location!r}; {fix}")
    else:
        module = importlib.import_module(location)
    value = getattr(module, name, None)
    if not callable(value):
        near = difflib.get_close_matches(
            name, [key for key in vars(module) if callable(vars(module)[key])], n=1
        )
        fix = f"did you mean {near[0]}?" if near else "define it there"
        raise ValueError(f"{what} {spec!r}: {location} has no {name!r}; {fix}")
    return value


def _load_file(path: Path, what: str) -> ModuleType:
    """The module of a Python file. Raises ValueError if it is missing, or its import raises."""
    if not path.is_file():
        raise ValueError(f"{what}: there is no file {path} in {Path.cwd()}; give its path")
    module_spec = importlib.util.spec_from_file_location(f"ostinato_file_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pydantic resolve annotations here
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # a user's file can raise anything while it is imported
        fix = f"install {error.name}" if isinstance(error, ModuleNotFoundError) else "fix the file"
        raise ValueError(f"{what}: importing {path} raised {type(error).__name__}: {error}; {fix}") from error
    return module


def write_rows(rows: Iterable[Any], folder: Path, key: str) -> Path:
    """A new .jsonl file of ``rows``: mappings of a list, a ``datasets.Dataset`` or a generator.

    Raises ValueError for what is not iterable, for no rows and, with the number of the row, for a row that is
    no mapping or has a value that JSON does not have.
    """
    if not isinstance(rows, Iterable):
        raise ValueError(f"{key} is {rows!r}; give rows, a file of them, or the name of a source")
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"row {number} of {key} is a {type(row).__name__}; write {{'prompt': ..., 'answer': ...}}"
            )
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=has_surrogate(dict(row)), allow_nan=False))
        except (TypeError, ValueError) as error:
            column = next((name for name, value in row.items() if not _is_json(value)), "")
            raise ValueError(
                f"row {number} of {key} has in column {column!r} what JSON does not have ({error}); "
                "drop the column, or write numbers, texts, lists and dicts"
            ) from error
    if not lines:
        raise ValueError(f"{key} has no rows")
    return _write_by_digest("\n".join([*lines, ""]).encode(), folder, key, ".jsonl")


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
