"""Two hosts train one model; one is cut off in the middle and comes back, and nothing is lost.

The hosts are network namespaces of this machine (``namespaces``): their ranks meet over a virtual cable.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from namespaces import Hosts, why_not
from safetensors.torch import load_file, save_file
from short_run import SHORT, STEPS

from ostinato.model.named import find_model_folder

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
PORT = 29517


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with Hosts.open(2) as made:
        yield made


def torchrun(hosts: Hosts, i: int, ranks: int, *command: str) -> list[str]:
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}", f"--node-rank={i}"),
        *(f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"),
        *command,
    ]


@contextmanager
def started(hosts: Hosts, folder: Path, ranks: int, *command: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``command`` by torchrun on both hosts; all that it has started has ended after the context."""
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    processes = []
    try:
        for i in range(2):
            reported = torchrun(hosts, i, ranks, *command)
            processes.append(hosts.start(i, reported, folder / f"host{i}.log", environment))
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(processes: Sequence[subprocess.Popen[bytes]], within_s: float, folder: Path) -> list[int]:
    """Their exit codes."""
    deadline = time.monotonic() + within_s
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not ended within {within_s:g} s:\n{logs(folder)}") from None


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


def until(true: object, within_s: float, folder: Path) -> None:
    deadline = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {within_s:g} s in vain:\n{logs(folder)}"
        time.sleep(0.05)


def rows_of(folder: Path) -> int:
    """Finished steps of a run."""
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


def adapter_of(folder: Path) -> bytes:
    (path,) = folder.glob("*/adapter/adapter_model.safetensors")
    return path.read_bytes()


def even_vocabulary(folder: Path) -> Path:
    """The packaged model with one more row in its vocabulary of 295: two tensor ranks can share it."""
    source = find_model_folder("asset:seed-moe")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    rows = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows + 1}))
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: torch.cat([tensor, tensor[:1] * 0]) if len(tensor) == rows else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


RUN = SHORT | {"parallel.layout": "d2t2", "parallel.timeout_s": 20.0}


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_run_over_two_hosts_loses_one_and_nothing_else(hosts: Hosts, tmp_path: Path) -> None:
    """``ostinato train`` of the packaged model, layout d2t2 with two ranks on each host, is cut off in an
    optimizer step. A collective's timeout ends it; the resumed run ends with the undisturbed one's bytes."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()

    model = even_vocabulary(tmp_path / "model")

    def train(folder: Path) -> list[str]:
        where = [f"log.dir={folder}", f"model.path={model}"]
        overrides = [f"{key}={value}" for key, value in RUN.items()]
        return ["-m", "ostinato", "train", "quickstart", *where, *overrides]

    with started(hosts, whole, 2, *train(whole)) as processes:
        assert ended(processes, 240, whole) == [0, 0], logs(whole)

    with started(hosts, cut, 2, *train(cut)) as processes:
        until(lambda: rows_of(cut) >= 3, 240, cut)
        hosts.slow(1, "400kbit")  # the gradients of a step then take some 20 s: it is cut off within them
        before = hosts.bytes_received(1)
        until(lambda: hosts.bytes_received(1) > before + 150_000, 60, cut)
        hosts.cut(1)
        at = time.monotonic()
        assert all(ended(processes, 100, cut)), logs(cut)
        took = time.monotonic() - at
    print(f"all ranks of both hosts had ended {took:.1f} s after the cut")
    assert took < 60, f"{took:.1f} s:\n{logs(cut)}"
    assert rows_of(cut) < STEPS
    output = (cut / "host0.log").read_text()
    assert "a rank was lost, as rank 0 saw in step" in output and "ostinato resume" in output, logs(cut)

    hosts.reconnect(1)
    (run,) = [path.parent for path in cut.glob("*/recipe.toml")]
    with started(hosts, cut, 2, "-m", "ostinato", "resume", str(run)) as processes:
        assert ended(processes, 240, cut) == [0, 0], logs(cut)
    assert adapter_of(whole) == adapter_of(cut)


@contextmanager
def ray_started(hosts: Hosts, folder: Path) -> Iterator[dict[str, str]]:
    """A Ray over both hosts, whose head has no CPU to place a worker on; the environment of who joins it."""
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    reported = clean | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    reported |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    begin = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    short = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # for the names of sockets
    head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={short}"]
    further = [f"--address={hosts.address(0)}:6379", "--num-cpus=2"]
    processes = []
    try:
        for i, role in enumerate((head, further)):
            log = folder / f"ray{i}.log"
            where = [f"--node-ip-address={hosts.address(i)}", "--object-store-memory=200000000"]

            def has_begun(log: Path = log) -> bool:
                return log.exists() and "Ray runtime started" in log.read_text()

            for _ in range(3):  # on a busy machine Ray gives up on its own daemon, after 30 s
                process = hosts.start(i, [*begin, *role, *where], log, reported)
                processes.append(process)
                until(lambda process=process: has_begun() or process.poll() is not None, 120, folder)
                if has_begun():
                    break
            assert has_begun(), logs(folder)
        yield reported
    finally:
        hosts.clear()
        for process in processes:
            process.wait()
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.timeout(600)
def test_the_sampler_may_be_on_the_other_host(hosts: Hosts, tmp_path: Path) -> None:
    """Ray over both hosts: two ranks train on the first, the sampler is on the second, and the result is that
    of two ranks of which the first one samples, bit for bit."""
    pytest.importorskip("ray")
    overrides = {key: value for key, value in RUN.items() if key != "parallel.layout"}
    overrides |= {"trainer.steps": 3, "parallel.layout": "d2", "parallel.timeout_s": 120.0}
    command = [sys.executable, "-m", "ostinato", "train", "quickstart"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    here, apart = tmp_path / "here", tmp_path / "apart"
    for folder in (here, apart):
        folder.mkdir()
    address = [f"cluster.address={hosts.address(0)}:6379", "cluster.samplers=1"]
    with ray_started(hosts, tmp_path) as environment:
        for folder, further in ((here, []), (apart, address)):
            reported = [*command, f"log.dir={folder}", *further]
            process = hosts.start(0, reported, folder / "host0.log", environment)
            assert ended([process], 240, folder) == [0], logs(folder)
    (workers,) = apart.glob("*/workers.json")
    assert [row["host"] for row in json.loads(workers.read_text())] == [hosts.names[1]]
    assert adapter_of(here) == adapter_of(apart)
