"""The shape of the house: no circle of files, classes that can be read, rooms within their budgets.

A budget is the most lines of Python that a room may have; raising one needs its reason beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ostinato"
MAX_CLASS_LINES = 300


def files() -> dict[str, Path]:
    """Every file of the package by the name of its module."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports anywhere, for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield from (name for name in (inside if inside in known else node.module,) if name in known)
        yield from imports(node, known)


def test_files_import_each_other_in_no_circle() -> None:
    known = files()
    graph = {
        name: {*imports(ast.parse(file.read_text(encoding="utf-8")), known)} - {name, "ostinato"}
        for name, file in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other: {' <- '.join(error.args[1])}") from None


def test_classes_can_be_read() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has {size} lines"
        for file in files().values()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_CLASS_LINES
    ]
    assert not long, "\n".join(long)


# Lines of Python: what was reached on 2026-11-25. The aims are 40,000 for the wheel, 8,000 for the lab
# and 32,000 for the tests (with those of the lab), so these come down.
BUDGETS = {  # room for step 14, to be set to what was reached when it ends
    "observe": 6_130,
    "engine": 6_315,
    "model": 7_150,
    "plan": 5_205,
    "cli": 2_485,
    "serve": 6_580,
    "ablate": 2_180,
    "parallel": 4_280,
    "launch": 7_200,
    "pipeline": 4_445,
    "scaling": 3_640,
    "train": 4_065,
    "(files of their own)": 3_700,  # logs that a power cut tore, keys of other trainers, the renderer
    "algo": 2_975,
    "interop": 2_470,
    "reward": 2_730,  # answers that are code: their processes 505; replies that fit their requests
    "workers": 2_085,
    "rollout": 2_150,
    "history": 1_795,
    "env": 2_480,
    "product": 3_965,
    "memory": 2_495,
    "config": 2_215,
}
LAB, TESTS = (
    # 2,700 a memory put to the test: world, policy, what replaces a line, its ceiling, refills by models,
    # public data; 120 the forgetting watch; 530 exact, 200 feedback, 880 the race against TRL, 45 a picture
    # of the ladder, 500 SFT and DPO, 115 a long chat, 240 the simulator beside the cube and sums
    15_600,  # and 135 own answers of public sets
    57_500,
)  # of the tests 1,400 serve, agents, environments and clients, 750 Tinker, 360 distillation, 560 SFT,
# 1,380 memory and 425 its bench, 2,100 product, 480 judges, 22 scores of toys and connections of the Tinker
# SDK, 190 TinyLoRA, 260 the race, 30 costs of a recorded run, 25 shuffled routes, 140 pilot
# answers and 25 gain per FLOP, 105 drift


def lines_of(*folders: Path, without: str = "-") -> int:
    found = (file for folder in folders for file in folder.rglob("*.py") if without not in file.parts)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in found)


def test_rooms_keep_their_budgets() -> None:
    sizes = {
        room.name: lines_of(room) for room in PACKAGE.iterdir() if room.is_dir() and any(room.rglob("*.py"))
    }
    sizes["(files of their own)"] = lines_of(PACKAGE) - sum(sizes.values())
    over = [
        f"{room} has {size} lines, its budget is {BUDGETS.get(room, 0)}: take something away"
        for room, size in sizes.items()
        if size > BUDGETS.get(room, 0)
    ]
    assert not over, "\n".join(over)


def test_lab_and_tests_keep_theirs() -> None:
    assert lines_of(ROOT / "lab", without="tests") <= LAB
    assert lines_of(ROOT / "tests", ROOT / "lab" / "tests") <= TESTS
