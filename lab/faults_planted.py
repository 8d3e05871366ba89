"""Faults that are planted in a run of ``ostinato bench faults`` before it begins, and strike from inside.

    fault.json in the working folder of the run says which, and where; the file ``struck`` has when.

The reward function here is of every run of the bench, hurt or not; workers with a defect are made by
``lab.planted_workers``. Without a fault.json all of it is harmless.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAN, STRUCK, CALLS = Path("fault.json"), Path("struck"), Path("graded")
VERDICT_S = 0.2  # that a group takes to be judged, or verdict_s: time to be hurt in, which costs no core
NEVER_S = 3600.0


def planned(kind: str) -> dict[str, Any]:
    """What fault.json says of this kind of fault; nothing where it is of another, or not there."""
    plan = _plan()
    return plan if plan.get("kind") == kind else {}


def _plan() -> dict[str, Any]:
    return json.loads(PLAN.read_text()) if PLAN.exists() else {}


def struck() -> None:
    """The first time is what counts."""
    if not STRUCK.exists():
        aside = STRUCK.with_suffix(".new")  # its reader must not find it empty
        aside.write_text(repr(time.time()))
        aside.replace(STRUCK)


def graded(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The share of ones in each answer; the n-th group that is judged hangs, where that is planned."""
    texts = [completion[-1]["content"] for completion in completions]
    if len(texts) > 2:  # two empty ones are the check before work starts
        with CALLS.open("a") as file:
            file.write(".")
        plan = planned("hang")
        if plan and CALLS.stat().st_size == plan["call"]:
            struck()
            hang(plan["in_c"])
        time.sleep(_plan().get("verdict_s", VERDICT_S))
    return [text.count("1") / (1 + len(text)) for text in texts]


def hang(in_c: bool) -> None:
    """In C the interpreter's lock is held, so no thread of the process runs meanwhile."""
    if in_c:
        ctypes.PyDLL(None).sleep(int(NEVER_S))
    time.sleep(NEVER_S)
