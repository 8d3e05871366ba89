"""The workers of a cluster, as far as they show without one; and what Ray's own words are turned into."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.config import Recipe, dump_toml
from ostinato.launch.checks import check_recipe, list_caveats
from ostinato.launch.loop import RunComponents
from ostinato.pipeline.state import Finish, LoopState
from ostinato.types import HistoryEntry
from ostinato.workers.remote import WorkerFault

pytest.importorskip("ray", reason="needs Ray")
from ostinato.launch import cluster, graders, workers
from ostinato.workers import ray_cluster


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({**sections, "cluster": {"samplers": 2, **sections.get("cluster", {})}})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": {"kind": "full"}, "cluster": {"remote_trainer": True}}, "with cluster.remote_trainer"),
        ({"adapter": {"kind": "full"}, "cluster": {"address": "auto"}}, "with cluster.address"),
        ({"model": {"device": "cuda"}}, "cluster.gpus_per_sampler 0"),
        ({"engine": {"backend": "vllm"}}, "vLLM places workers of its own"),
    ],
)
def test_what_workers_elsewhere_cannot_do_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_recipe(recipe(**sections))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pipeline": {"placement": "histopipe"}, "cluster": {"samplers": 0}}, "changes nothing with no"),
    ],
)
def test_what_does_nothing_is_told(sections: dict[str, Any], words: str) -> None:
    reported = recipe(**sections)
    assert any(words in line for line in list_caveats(reported, check_recipe(reported)))


def test_everybody_has_a_place_and_a_pool() -> None:
    reported = recipe(cluster={"samplers": 2, "graders": 1, "remote_trainer": True, "cpus_per_worker": 3})
    wants = cluster.list_needs(reported)
    assert [want.name for want in wants] == ["trainer", "sampler-0", "sampler-1", "grader-0"]
    assert {want.cpus for want in wants} == {3} and not any(want.gpus for want in wants)
    assert cluster.count_devices(reported.cluster) == {"samplers": 2, "trainer": 1, "graders": 1}
    (line,) = cluster.describe_workers(reported.cluster)
    assert "2 samplers, 1 grader, 1 trainer on a Ray of its own" in line and "3 threads each" in line


class Pool:
    """What the accounts see of an EnginePool."""

    def __init__(self) -> None:
        self.work = {"decoded": 7.0, "seconds": 1.5, "seconds_without": 3.5}
        self.reported: list[tuple[str, int, int]] = []

    def remember(self, uid: str, step: int, pasts: list[HistoryEntry]) -> None:
        self.reported.append((uid, step, len(pasts)))

    def gauges(self) -> dict[str, float]:
        return {"workers/alive": 2.0}

    def take_publications(self) -> list[Any]:
        return [SimpleNamespace(bytes=10, seconds=0.5), SimpleNamespace(bytes=30, seconds=0.25)]


def test_figures_of_all_workers_are_added_up() -> None:
    pool: Any = Pool()
    history: Any = None
    assert cluster.SharedHistory(history, pool).measure_saved_s() == 2.0
    assert cluster.take_pool_metrics(pool) == {
        "workers/alive": 2.0,
        "publish/count": 2.0,
        "publish/bytes": 40.0,
        "publish/seconds": 0.75,
    }


def test_a_signal_while_the_workers_begin_ends_the_run_by_name(tmp_path: Path) -> None:
    """SIGTERM killed it without a word; it is handled as anywhere else, and Ctrl-C as at once as it was."""
    ended: list[str] = []

    async def ready() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    async def end() -> None:
        ended.append("end")

    unused: Any = None
    components = RunComponents(trainer=unused, engine=unused, ready=ready, end=end)
    loop: Any = SimpleNamespace(state=LoopState(step=3))
    number = signal.SIGTERM
    finished = asyncio.run(components.run(loop, tmp_path))
    assert (finished.why, finished.state.step, ended) == (Finish.TERMINATED, 3, ["end"])
    number = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(components.run(loop, tmp_path))


def test_the_last_rows_of_the_workers_are_those_of_the_run(tmp_path: Path) -> None:
    """A run of less than a second left what it had written before a worker had a host."""
    place: dict[str, str] = {}
    written: list[object] = []

    async def run() -> str:
        await asyncio.sleep(0.01)  # the first rows are written
        place["host"] = "here"
        return "finished"

    async def end() -> None:
        written.extend(json.loads((tmp_path / "workers.json").read_text()))

    unused: Any = None
    components = RunComponents(
        trainer=unused, engine=unused, status=lambda: [{"worker": "sampler-0", **place}], end=end
    )
    loop: Any = SimpleNamespace(run=run)
    asyncio.run(components.run(loop, tmp_path))
    assert written == [{"worker": "sampler-0", "host": "here"}]


def test_a_worker_sweeps_its_own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed run had left in the memory of another host than the driver's was never looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = tmp_path / "ostinato" / "shared" / f"ostinato-{os.getuid()}-f00d.safetensors"
    left.parent.mkdir(parents=True)
    left.touch()
    workers._read_recipe(dump_toml(recipe(model={"path": "asset:seed-moe"})))
    assert not left.exists()


def test_a_reward_that_only_the_driver_has_is_told_when_the_grader_is_built() -> None:
    """The driver's own check had passed, and every group of the run had no verdict."""
    reported = recipe(reward={"functions": ["nowhere_at_all:reward"]})
    with pytest.raises(WorkerFault, match=r"grader-0 on .*: .*nowhere_at_all"):
        graders.grader(dump_toml(reported), "grader-0")


# ---- Ray


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\nThe actor is dead "
            "because its worker process has died. Worker exit detail: Worker unexpectedly exits with a "
            "connection error code 2. End of file. Some common causes include: (1) ...",
            "its process ended, as one does that is killed or out of memory",
        ),
        (
            "The actor is dead because its node has died. Node Id: f00. There are some potential causes.",
            "RuntimeError: its node has died. Node Id: f00",
        ),
        ("", "RuntimeError: "),
    ],
)
def test_rays_words_become_a_sentence(output: str, words: str) -> None:
    assert ray_cluster.describe_error(RuntimeError(output)) == words


@pytest.mark.parametrize("address", ["somewhere", "ray://host:10001", "host:port", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match='give "auto", or host:port'):
        ray_cluster.check_reachable(address)


def test_nobody_at_an_address_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="where no Ray answers"):
        ray_cluster.check_reachable("127.0.0.1:9")


@pytest.mark.parametrize(("end", "output"), [("os._exit(1)", ["last words"]), ("pass", [])])
def test_a_witness_speaks_only_for_who_cannot(tmp_path: Path, end: str, output: list[str]) -> None:
    """A process that Ray ends has no time for a word."""
    code = f"import os; from ostinato.workers.process import witness\nwith witness('last words', None): {end}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert done.stderr.splitlines() == output


def test_workers_are_given_their_threads_and_this_path() -> None:
    environment = ray_cluster._make_environment(3, local=True)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert str(Path(__file__).parents[3]) in environment["PYTHONPATH"].split(os.pathsep)
    assert "PYTHONPATH" not in ray_cluster._make_environment(1, local=False)


@pytest.mark.parametrize(
    ("sections", "gives_way"),
    [
        ({}, False),  # one works at a time
        ({"pipeline": {"overlap": True, "staleness": 1}}, True),
        ({"pipeline": {"overlap": True, "staleness": 1}, "cluster": {"remote_trainer": True}}, False),
        ({"pipeline": {"overlap": True, "staleness": 1}, "cluster": {"address": "auto"}}, False),
        ({"pipeline": {"overlap": True, "staleness": 1}, "cluster": {"gpus_per_sampler": 1.0}}, False),
    ],
)
def test_samplers_give_way_to_a_trainer_that_shares_their_cores(
    sections: dict[str, Any], gives_way: bool
) -> None:
    wants = {want.name: want.nice for want in cluster.list_needs(recipe(**sections))}
    assert (wants["sampler-0"], wants["sampler-1"]) == (cluster.SAMPLER_NICE * gives_way,) * 2
    assert not wants.get("trainer")
