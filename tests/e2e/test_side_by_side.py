"""Runs side by side on one base: each has, to the last bit, what it has alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import NATIVE

from lab.same_run import same
from ostinato import learn, resume
from ostinato.cli.train import train_all
from ostinato.config import Recipe, dump_toml
from ostinato.launch.side_by_side import SideRun, learn_side_by_side
from ostinato.pipeline.signals import SignalRelay, StopSignals
from ostinato.run import RunFolder

NEEDS_KERNELS = pytest.mark.skipif(NATIVE is None, reason="rows depend on others without native kernels")
SMALL = {
    "model": {"path": "asset:seed-moe", "dtype": "float32"},
    "engine": {"threads": 1},
    "task": {"source": "arithmetic", "params": {"digits": 2}, "n_train": 64},
    "rollout": {"prompts_per_step": 3, "group_size": 4, "max_tokens": 12},
    "trainer": {"steps": 2, "warmup_steps": 0, "checkpoint_every": 1, "tokens_per_microbatch": 256},
    "eval": {"n": 3, "every": 1, "at_start": False},
    "draft": {"enabled": False},
}
# other seeds, sizes, ranks and algorithms, one with rounds that are played ahead
CHANGES: Sequence[dict[str, Any]] = (
    {"seed": 1},
    {"seed": 2, "rollout.prompts_per_step": 2, "adapter.rank": 4},
    {"seed": 3, "algo.name": "dapo", "trainer.lr": 1e-3},
    {"seed": 4, "pipeline.staleness": 1, "rollout.group_size": 6},
)


def recipe(folder: Path, number: int, **changes: Any) -> Recipe:
    words = [f"{key}={value}" for key, value in {**CHANGES[number], **changes}.items()]
    base = Recipe.model_validate({**SMALL, "name": f"run-{number}", "log": {"dir": str(folder)}})
    file = folder / f"{number}.toml"
    file.write_text(dump_toml(base))
    return Recipe.load(str(file), *words)


def bits(folder: Path) -> dict[str, Any]:
    """What must be equal of a run: the bytes of its adapter, and its rows."""
    run = RunFolder.open(folder)
    files = {file.name: file.read_bytes() for file in run.adapter.iterdir() if file.suffix == ".safetensors"}
    assert files
    return {**files, "metrics": same(run.metrics.rows()), "eval": same(run.eval.rows())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    runs = [learn(recipe(folder, number), quiet=True) for number in range(len(CHANGES))]
    return [bits(run.folder) for run in runs]


def outcomes(runs: Sequence[SideRun]) -> list[Path]:
    for run in runs:
        if run.error is not None:
            raise run.error
    return [run.folder for run in runs]


@NEEDS_KERNELS
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_runs_side_by_side_have_the_bits_of_runs_alone(
    alone: list[dict[str, Any]], tmp_path: Path, count: int
) -> None:
    runs = learn_side_by_side([recipe(tmp_path, number) for number in range(count)], quiet=True)
    for number, folder in enumerate(outcomes(runs)):
        assert bits(folder) == alone[number]


@NEEDS_KERNELS
def test_each_can_be_resumed_alone(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two steps in one go, or one side by side with another run and one alone."""
    short = [recipe(tmp_path, number, **{"trainer.steps": 1}) for number in range(2)]
    for number, folder in enumerate(outcomes(learn_side_by_side(short, shares=[3, 1], quiet=True))):
        resume(folder, "trainer.steps=2", quiet=True)
        assert bits(folder)["metrics"][1:] == alone[number]["metrics"][1:]
        assert bits(folder)["adapter_model.safetensors"] == alone[number]["adapter_model.safetensors"]


BROKEN = """
def score(completions, **columns):
    if len(completions) > 1:
        raise KeyError("there is no such key")
    return [1.0 for _ in completions]
"""


@NEEDS_KERNELS
def test_a_run_that_breaks_has_its_error_and_the_others_go_on(
    alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    functions = f'["{tmp_path / "broken.py"}:score"]'
    broken, good = recipe(tmp_path, 1, **{"reward.functions": functions}), recipe(tmp_path, 0)
    ended = learn_side_by_side([broken, good], quiet=True)
    assert ended[0].outcome is None and "no such key" in str(ended[0].error)
    assert ended[1].error is None and bits(ended[1].folder) == alone[0]


@NEEDS_KERNELS
def test_the_command_names_the_run_that_broke_in_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    for number in range(2):
        recipe(tmp_path, number)
    good, bad = str(tmp_path / "0.toml"), str(tmp_path / "bad.toml")
    functions = f'reward.functions=["{tmp_path / "broken.py"}:score"]'
    Path(bad).write_text(dump_toml(Recipe.load(str(tmp_path / "1.toml"), "name=bad", functions)))
    assert train_all([good, bad, "trainer.steps=1"], 0, "2,1") == 1
    shown = capsys.readouterr()
    assert "bad-" in shown.err and "no such key" in shown.err and "run-0" not in shown.err
    assert "talk to it   ostinato serve" in shown.out
    assert train_all([good, str(tmp_path / "1.toml"), "trainer.steps=1"], 0, "") == 0
    with pytest.raises(ValueError, match="--shares is '2,x'; give numbers"):
        train_all([good, bad], 0, "2,x")
    with pytest.raises(ValueError, match="--shares is '2' with one recipe"):
        train_all([good], 0, "2")
    with pytest.raises(ValueError, match="--restarts is 1 with 2 recipes"):
        train_all([good, bad], 1, "")


def test_what_is_not_shared_or_wrong_is_said_before_any_run_begins(tmp_path: Path) -> None:
    first = recipe(tmp_path, 0)
    for key, value in (("model.dtype", "bfloat16"), ("engine.max_batch", 7)):
        with pytest.raises(ValueError, match=f"{key} is {value!r} in 'run-1' and .* in 'run-0'"):
            learn_side_by_side([first, recipe(tmp_path, 1, **{key: value})], quiet=True)
    with pytest.raises(ValueError, match=r"pipeline\.overlap = false; set it in 'run-3'"):
        learn_side_by_side([first, recipe(tmp_path, 3, **{"pipeline.overlap": "true"})], quiet=True)
    with pytest.raises(ValueError, match=r"log\.writers without trackio and wandb; set it in 'run-1'"):
        learn_side_by_side([first, recipe(tmp_path, 1, **{"log.writers": '["wandb"]'})], quiet=True)
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        learn_side_by_side([first, recipe(tmp_path, 1, **{"task.source": "rows.jsonl"})], quiet=True)
    with pytest.raises(ValueError, match=r"teacher\.url = .*; set it in 'run-1'"):
        learn_side_by_side([first, recipe(tmp_path, 1, **{"teacher.url": "http://127.0.0.1:1"})], quiet=True)
    for shares in ("nan,1", ",", "1,-1"):
        with pytest.raises(ValueError, match="shares"):
            train_all([str(tmp_path / "0.toml"), str(tmp_path / "1.toml")], 0, shares)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    """Such a recipe was taken for a key, and the sentence was about min()."""
    with pytest.raises(ValueError, match=r"lr=1/r\.toml"):
        train_all([str(tmp_path / "lr=1" / "r.toml"), "trainer.steps=1"], 0, "")


def test_signals_reach_the_loops_of_other_threads() -> None:
    """Ctrl-C ends each loop after its step; another one cancels its work, and is raised here."""
    ready, ended = threading.Barrier(3), list[Any]()
    relay = SignalRelay()

    async def work() -> None:
        ready.wait()
        await asyncio.sleep(60)

    async def loop() -> None:
        with StopSignals(0.0, relay=relay) as signals:
            try:
                await signals.run_bounded(work())
            finally:
                ended.append(signals.received)

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(loop())

    threads = [threading.Thread(target=run) for _ in range(2)]
    with relay:
        for thread in threads:
            thread.start()
        ready.wait()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            while True:
                os.kill(os.getpid(), signal.SIGINT)
        for thread in threads:
            thread.join()
    assert ended == [signal.SIGINT] * 2
