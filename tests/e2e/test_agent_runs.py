"""Whole runs with agents, as commands: a worker in another process, the built-in twin, a proxy behind it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, command, environment, only_run, rows, run

from ostinato.run import JsonlZst

pytest.importorskip("openai")
RECIPES = ROOT / "recipes"
TINY = (
    "trainer.steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "task.n_train=8",
    "eval.n=2",
    "eval.every=0",
    "trainer.warmup_steps=0",
    "log.trajectories_every=1",
    "model.dtype=float32",
)
KEY = "only for this test"


@contextmanager
def started(*argv: str, place: Path, **more: str) -> Iterator[Any]:
    """A process that is ended with the context."""
    environ = environment() | more
    process = subprocess.Popen(argv, cwd=place, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def tokens_of(folder: Path) -> list[Any]:
    found = JsonlZst(folder / "trajectories.jsonl.zst").rows()
    return [
        [row["step"], row["uid"], row["sample"], row["reward"], [turn["tokens"] for turn in row["turns"]]]
        for row in found
    ]


@pytest.mark.slow
def test_a_run_with_workers_elsewhere_is_the_run_of_the_built_in_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, rewards and metrics of both steps, through a key; then a proxy records a rollout of
    what was learned."""
    (tmp_path / "in").mkdir()
    run(tmp_path / "in", "train", str(RECIPES / "price_list.toml"), *TINY)
    monkeypatch.setenv("OSTINATO_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out = tmp_path / "out"
    out.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    remote = ("task.agent=remote", f"task.agent_port={port}")
    with started(
        *(sys.executable, str(RECIPES / "agent_worker.py"), f"http://127.0.0.1:{port}"),
        *(str(RECIPES / "price_agent.py"), "4"),
        place=out,
    ):
        run(out, "train", str(RECIPES / "price_agent.toml"), *TINY, *remote)
    inside, outside = only_run(tmp_path / "in"), only_run(out)
    assert tokens_of(inside) == tokens_of(outside)
    for name in ("loss", "grad_norm", "reward", "turns/mean", "tokens/prefilled"):
        both = [[row.get(name) for row in rows(one / "metrics.jsonl")] for one in (inside, outside)]
        assert both[0] == both[1] and len(both[0]) == 2, name
    assert sum(row.get("faults/env", 0) for row in rows(outside / "metrics.jsonl")) == 0
    recorded(outside, tmp_path / "r.zst")


def recorded(trained: Path, file: Path) -> None:
    argv = command("proxy", str(trained), "--out", str(file), "--port", "0")
    with started(*argv, place=file.parent) as process:
        base = next(line for line in process.stdout if "/rollout/ID/v1" in line).split()[1].replace("ID", "a")
        code = f"import asyncio, price_agent; print(asyncio.run(price_agent.agent({base!r}, {{'seed': 5}})))"
        run(RECIPES, "-c", code)
    (row,) = JsonlZst(file).rows()
    assert row["uid"] == "a" and row["step"] == 2 and row["error"] == "" and row["turns"][0]["experts"]
