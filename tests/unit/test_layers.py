"""The plan of the house, asserted: imports point down, importing is cheap, nothing grows beyond reading."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ostinato"
LEAVES = {"types", "protocols", "config", "every", "run", "render", "routes", "lock"}
LEAVES |= {"observe.timeline", "observe.ledger", "observe.stability", "observe.stats"}
LEAVES |= {"tables"}
BASE = {
    "access",
    "failure",
    "files",
    "inputs",
    "objects",
    "options",
    "other_names",
    "threads",
}  # all may import

CORE = LEAVES | {"algo", "model", "hf", "engine", "history", "env", "reward", "rollout", "train", "parallel"}
CORE |= {
    "catalog",
    "database",
    "residency",
    "pipeline",
    "workers",
    "launch",
    "compiler",
    "isa",
    "terminal",
    "tool_calls",
    "control_tokens",
    "tiktoken_vocabulary",
    "",
}
READERS = {"observe.rows", "observe.figures", "observe.gap", "observe.costs"}  # of a run folder
CORE |= READERS | {"observe.concerns", "observe.samples", "observe.page", "observe.mismatch"}

# app -> apps that it may import, beside every room of the core.
APPS: dict[str, set[str]] = {
    "apps": set(),
    "apps.interop": set(),
    "apps.memory": {"apps.serve"},  # a server in front of others
    "apps.plan": set(),
    "apps.product": {"apps.serve", "cli"},  # what users did with what is served; judges that are served
    "apps.scaling": set(),
    "apps.serve": set(),  # what others add to a server: Additions in apps/serve/served.py
    "apps.tinker": {"apps.serve"},
}

# room -> rooms it may import. Deferred imports and those for type checkers count too.
ARROWS: dict[str, set[str]] = {
    "types": set(),
    "access": set(),
    "inputs": set(),
    "objects": {"inputs"},
    "options": set(),
    "other_names": set(),
    "failure": set(),
    "threads": set(),
    "files": {"inputs"},
    "every": set(),
    "isa": set(),
    "terminal": {"inputs"},
    "tables": {"inputs"},
    "config": {"every"},
    "protocols": {"observe.timeline", "types"},
    "routes": {"types"},
    "run": {"types", "routes", "lock"},
    "lock": set(),
    "catalog": {"database"},
    "residency": set(),
    "database": set(),  # and SQLAlchemy, which applications write their statements in
    "render": {"types", "chat_template", "control_tokens", "tool_calls", "tiktoken_vocabulary"},
    "tiktoken_vocabulary": set(),
    "tool_calls": {"control_tokens"},
    "control_tokens": set(),
    "chat_template": set(),
    "algo": {"types"},
    "workers": set(),  # and Ray, which nothing else imports
    "model": {"types", "run", "compiler", "isa"},
    "engine": {"observe.timeline", "types", "protocols", "run", "render", "routes", "algo", "model"}
    | {"isa", "workers"},
    "parallel": {
        "every",
        "types",
        "run",
        "model",
        "workers",
    },  # every collective is here
    "compiler": {"isa"},
    "history": {"types", "protocols", "run", "compiler", "isa", "algo"},
    "env": {"types", "protocols", "render", "tool_calls", "control_tokens"},
    "reward": {"types", "protocols", "render", "control_tokens", "workers", "observe.timeline"},
    "rollout": {"types", "protocols", "run", "algo"},
    "train": {"types", "config", "protocols", "run", "algo", "model", "parallel", "workers"}
    | {"observe.mismatch", "observe.timeline"},
    "hf": {"types", "run", "algo", "model", "engine", "parallel", "observe.timeline"},
    "pipeline": {"types", "protocols", "config", "every", "run", "routes", "algo"}
    | {"model", "history", "rollout", "train", "observe.timeline", "observe.ledger", "observe.stability"}
    | {"observe.stats"},
    "observe": set(),
    "observe.timeline": set(),
    "observe.ledger": {"every", "run"},
    "observe.stability": set(),
    "observe.mismatch": {"algo"},
    "observe.stats": set(),
    "observe.rows": LEAVES,
    "observe.costs": LEAVES,
    "observe.figures": LEAVES | {"observe.costs", "observe.rows"},
    "observe.gap": LEAVES | {"observe.rows"},
    "observe.concerns": LEAVES | READERS,
    "observe.samples": LEAVES | {"observe.rows"},
    "observe.page": LEAVES | READERS | {"observe.concerns", "observe.samples"},
    "launch": LEAVES
    | {"algo", "model", "hf", "engine", "history", "env", "reward", "rollout", "train", "pipeline", "workers"}
    | {"compiler", "isa", "parallel", "observe.rows", "observe.figures", "observe.concerns", "terminal", ""},
    "cli": CORE | APPS.keys(),
    "": {"config", "cli", "launch"},  # the lazy names of __init__, and __main__
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(file: Path) -> str:
    """ "algo" for ostinato/algo/pack.py, "types" for ostinato/types.py, "" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts[0] in ("__init__", "__main__") else _room(parts)


def _room(parts: Sequence[str]) -> str:
    """The first part; of apps and observe the second one too."""
    deep = parts[0] in ("apps", "observe")
    return ".".join(part for part in parts[:2] if part != "__init__") if deep else parts[0]


def imported_rooms(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of ours anywhere in the file."""
    package = ("ostinato", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            whole = module in ("ostinato", "ostinato.apps", "ostinato.observe")
            names = [f"{module}.{alias.name}" for alias in node.names] if whole else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ostinato":
                yield node.lineno, _room_of_name(parts)


def _room_of_name(parts: list[str]) -> str:
    known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
    return _room(parts[1:]) if known else ""


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def allowed(name: str) -> set[str]:
    return CORE | APPS[name] if name in APPS else ARROWS[name]


def test_imports_point_down() -> None:
    new_rooms = {room(file) for file in modules()} - ARROWS.keys() - APPS.keys()
    assert not new_rooms, f"new rooms {sorted(new_rooms)}: draw their arrows in docs/design.md and here"
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports ostinato.{there or '__init__'}"
        for file in modules()
        for line, there in imported_rooms(parsed(file), file)
        if there not in {room(file), *allowed(room(file)), *BASE}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_does_not_import_the_lab() -> None:
    """But for ``ostinato bench``, which says where benches are when there are none."""
    users = [
        str(file.relative_to(PACKAGE))
        for file in modules()
        for node in ast.walk(parsed(file))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lab")
        or (isinstance(node, ast.Import) and any(name.name.split(".")[0] == "lab" for name in node.names))
    ]
    assert users == ["cli/app.py"]


def test_the_core_imports_no_app() -> None:
    """But for the command line, which has a table of them."""
    core = (name for name in ARROWS if name != "cli")
    assert not [name for name in core for there in allowed(name) if there.startswith("apps")]


def test_the_arrows_have_no_cycle() -> None:
    seen: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for below in ARROWS.get(name, set()) - seen - {""}:
            visit(below, (*path, name))
        seen.add(name)

    for name in ARROWS:
        visit(name, ())


def test_files_and_functions_can_be_read() -> None:
    long = [fault for file in modules() for fault in too_long(file)]
    assert not long, "\n".join(long)


def too_long(file: Path) -> Iterator[str]:
    text, name = file.read_text(encoding="utf-8"), file.relative_to(PACKAGE)
    if text.count("\n") > MAX_FILE_LINES:
        yield f"{name} has {text.count(chr(10))} lines; split it by subject"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno} {node.name} has {size} lines"


def loaded_by(statement: str) -> set[str]:
    """First-level modules that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport json, sys; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
        timeout=400,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "ray",
    "wandb",
    "trackio",
    "plotly",
    "tensorboard",
    "datasets",
    "peft",
}


def test_importing_the_package_is_cheap() -> None:
    assert not loaded_by("import ostinato") & (HEAVY | {"numpy", "pydantic"})


def test_types_config_and_command_line_load_no_torch() -> None:
    loaded = loaded_by("import ostinato.types, ostinato.protocols, ostinato.config, ostinato.cli.app")
    assert not loaded & HEAVY


def test_threads_can_be_configured_before_torch() -> None:
    assert not loaded_by("from ostinato.engine import threads") & HEAVY


TOO_LATE = """
import sys
from ostinato.launch import machine

def configure(recipe):
    print("torch" in sys.modules)
    raise SystemExit

machine.configure_threads = configure
from ostinato.cli.app import main
main(sys.argv[1:])
"""


def test_a_resumed_run_chooses_its_threads_before_torch(tmp_path: Path) -> None:
    """`ostinato resume` looked for the newest step in a module that loads torch: engine.threads had no effect
    on the rest of the run, and where OMP_NUM_THREADS was another number its bits were other ones."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "recipe.toml").write_text("[trainer]\nsteps = 1\n")
    words = [sys.executable, "-c", TOO_LATE, "resume", str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.stdout.split()[-1:] == ["False"], found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["tinker", "--port", "0"], ["serve", "--port", "0"], ["generate", "--prompt", "hello"]]
)
def test_commands_configure_threads_before_torch(command: list[str]) -> None:
    """`ostinato tinker` looked for its SDK by importing it, which loads torch: engine.threads had no effect,
    and torch's own threads spin: ten times as long on cores that others use too."""
    pytest.importorskip("tinker")
    words = [
        command[0],
        "asset:seed-moe",
        *command[1:],
        *(["--port", "0"] if command[0] != "generate" else []),
    ]
    found = subprocess.run([sys.executable, "-c", TOO_LATE, *words], capture_output=True, text=True)
    assert found.stdout.split()[-1:] == ["False"], found.stdout + found.stderr
