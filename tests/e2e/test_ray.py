"""Runs over Ray equal runs in one process, to the last bit, whichever process is killed meanwhile.

One Ray for all tests here, with a folder of its own; runs find it and leave it as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lab.same_run import same
from ostinato.config import Recipe
from ostinato.launch import RunFailed
from ostinato.launch.session import Outcome, learn, resume
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="needs Ray")

OURS = ("workers/", "queue/", "pipeline/", "publish/")  # what only a cluster has to tell
SMALL = (
    "trainer.steps=10",
    "trainer.checkpoint_every=2",
    "trainer.lr=1e-3",
    "trainer.tokens_per_microbatch=512",
    "model.dtype=float32",
    "model.fp32_head=false",
    "adapter.rank=4",
    "task.n_train=12",
    "task.params={digits=2, terms=3}",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=24",
    "eval.n=4",
    "eval.every=5",
    "forecast.enabled=false",
    "engine.threads=1",
    "engine.kv_memory_mb=64",
    "log.trajectories_every=1",
    "log.mismatch_every=4",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ostinato-test-", dir="/tmp")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=1 << 28,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, *overrides: str) -> Outcome:
    return learn(Recipe.load("quickstart", *SMALL, f"log.dir={folder}", *overrides), quiet=True)


def reported(outcome: Outcome) -> dict[str, Any]:
    """All of a run that has to be equal: tokens, figures, weights."""
    folder = RunFolder.open(outcome.folder)
    rows = [{k: v for k, v in row.items() if not k.startswith(OURS)} for row in folder.metrics.rows()]
    return {
        "tokens": [*folder.trajectories.rows()],
        "metrics": same(rows),
        "eval": same(folder.eval.rows()),
        "adapter": (folder.adapter / "adapter_model.safetensors").read_bytes(),
    }


def assert_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """By part, and by row, so that a failure can be read."""
    for part in ("tokens", "metrics", "eval"):
        assert len(a[part]) == len(b[part])
        for one, other in zip(a[part], b[part], strict=True):
            assert one == other, part
    assert a["adapter"] == b["adapter"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run in one process, that all others have to equal."""
    return reported(run(tmp_path_factory.mktemp("here")))


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(("cluster.samplers=1",), marks=pytest.mark.lab),
        pytest.param(
            ("cluster.samplers=3", "pipeline.placement=longest-first", "engine.max_batch=4"),
            marks=pytest.mark.lab,
        ),
        ("cluster.samplers=2", "cluster.remote_trainer=true", "cluster.graders=2"),
    ],
    ids=["one", "three", "all"],
)
def test_ten_steps_over_ray_are_those_of_one_process(
    cluster: None, here: dict[str, Any], tmp_path: Path, workers: tuple[str, ...]
) -> None:
    outcome = run(tmp_path, *workers)
    assert_equal(reported(outcome), here)
    assert sum("loss" in row for row in here["metrics"]) >= 3  # there was something to learn from
    rows = json.loads((outcome.folder / "workers.json").read_text())
    assert {row["worker"] for row in rows} >= {"sampler-0"}


def test_rounds_played_ahead_are_those_of_one_process(cluster: None, tmp_path: Path) -> None:
    ahead = ("pipeline.staleness=2", "trainer.steps=6")
    alone = run(tmp_path / "a", *ahead)
    over = run(
        tmp_path / "b", *ahead, "cluster.samplers=3", "cluster.graders=1", "cluster.remote_trainer=true"
    )
    assert_equal(reported(alone), reported(over))


def test_weights_that_are_all_trained_travel_as_a_file(cluster: None, tmp_path: Path) -> None:
    full = ("adapter.kind=full", "trainer.lr=1e-4", "trainer.steps=3", "log.mismatch_every=0")
    alone, over = run(tmp_path / "a", *full), run(tmp_path / "b", *full, "cluster.samplers=2")
    ours, theirs = (RunFolder.open(one.folder) for one in (alone, over))
    assert [*ours.trajectories.rows()] == [*theirs.trajectories.rows()]
    weights = [(one.adapter / "model.safetensors").read_bytes() for one in (ours, theirs)]
    assert weights[0] == weights[1]


# ---- failures


class Killer:
    """Kills a worker once, as soon as the run has done so many steps: what a host that fails does to it.
    The row of a worker that has just begun has no pid for a moment, which ended this thread by a KeyError; on
    a machine with other work the run's start alone took the minute for which this thread once looked."""

    def __init__(self, root: Path, worker: str, after_step: int, number: int = signal.SIGKILL) -> None:
        self._root, self._worker, self._after, self._number = root, worker, after_step, number
        self.killed: list[int] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        until = time.monotonic() + 500  # the limit of a test is 600
        while time.monotonic() < until and not self.killed:
            if (
                sum(file.read_bytes().count(b"\n") for file in self._root.glob("*/metrics.jsonl"))
                >= self._after
            ):
                rows = [row for row in workers(self._root) if row["worker"] == self._worker]
                self.killed += [row["pid"] for row in rows if "pid" in row]
                for pid in self.killed:
                    os.kill(pid, self._number)
            time.sleep(0.02)


def workers(root: Path) -> list[dict[str, Any]]:
    """The rows of workers.json of the run in ``root``."""
    return [row for file in root.glob("*/workers.json") for row in json.loads(file.read_text())]


@pytest.mark.parametrize("worker", ["sampler-0", "trainer", pytest.param("grader-0", marks=pytest.mark.lab)])
def test_a_worker_that_is_killed_changes_nothing(
    cluster: None, here: dict[str, Any], tmp_path: Path, worker: str
) -> None:
    """At staleness 0, to the last bit: calls of a sampler go to others with their seeds; a run that loses its
    trainer or a grader ends by name, with the last step saved, and goes on."""
    killer = Killer(tmp_path, worker, after_step=3)
    samples = worker.startswith("sampler")
    named = pytest.raises(RunFailed, match=f"{worker} .*ostinato resume")
    with nullcontext() if samples else named:
        run(tmp_path, "cluster.samplers=2", "cluster.remote_trainer=true", "cluster.graders=1")
    assert killer.killed
    (folder,) = tmp_path.iterdir()
    assert_equal(reported(resume(folder, quiet=True)), here)
    rows = RunFolder.open(folder).metrics.rows()
    assert sum(row.get("workers/restarts", 0) for row in rows) == samples


def test_a_run_over_ray_leaves_nothing_behind(cluster: None, tmp_path: Path) -> None:
    from ray.util import placement_group_table

    run(tmp_path, "cluster.samplers=1", "trainer.steps=1", "trainer.checkpoint_every=1")
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}
    assert ray.is_initialized()  # it was there before


# ---- a Ray of its own, in a process of its own


def command(folder: Path, *overrides: str) -> list[str]:
    names = ("quickstart", *SMALL, f"log.dir={folder}", *overrides)
    return [sys.executable, "-m", "ostinato", "train", *names]


def of_driver(pid: int, name: str) -> int:
    """The child of ``pid`` whose program ends so."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                program = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:  # it has ended
                continue
            if parent == pid and program.endswith(name):
                return int(entry.name)
    raise AssertionError(f"{pid} has no child {name}")


@pytest.mark.parametrize("program", ["raylet", pytest.param("gcs_server", marks=pytest.mark.lab)])
def test_the_loss_of_ray_itself_ends_the_run_by_name(tmp_path: Path, program: str) -> None:
    """Ray aborts what cannot reach its head for a minute, and ends at once, without a word, a process
    whose daemon on its host dies. Either way somebody has to say what was saved."""
    endless = ("trainer.steps=1000", "trainer.lr=1e-9", "rollout.group_size=16")  # never solved, never empty
    arguments = command(tmp_path, *endless, "cluster.samplers=1")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as driver:
        try:
            until = time.monotonic() + 300
            while not any(file.read_bytes().count(b"\n") >= 3 for file in tmp_path.glob("*/metrics.jsonl")):
                assert time.monotonic() < until and driver.poll() is None
                time.sleep(0.1)
            os.kill(of_driver(driver.pid, program), signal.SIGKILL)
            _, output = driver.communicate(timeout=400)
        finally:
            driver.kill()
    assert driver.returncode == (75 if program == "gcs_server" else 1), output
    (folder,) = tmp_path.iterdir()
    last = output.strip().splitlines()[-1]
    assert last.startswith("ostinato: ") and "Ray" in last
    assert last.endswith(f"to go on: ostinato resume {folder}")
    done = max(row["step"] for row in RunFolder.open(folder).metrics.rows())
    outcome = resume(folder, f"trainer.steps={done + 2}", "cluster.samplers=0", quiet=True)
    assert outcome.step == done + 2


def test_the_token_of_ray_is_the_users_alone(tmp_path: Path) -> None:
    """Ray listens on all interfaces, and writes the token that opens it with mode 0644."""
    from ostinato.workers.ray_cluster import keep_token

    token = tmp_path / "auth_token"
    keep_token(token)  # not every Ray has one
    token.touch(0o644)
    keep_token(token)
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_run_in_one_process_imports_no_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from ostinato.cli.app import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit('ray' in sys.modules and 'Ray was imported')"
    )
    arguments = command(tmp_path, "trainer.steps=1")[3:]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
