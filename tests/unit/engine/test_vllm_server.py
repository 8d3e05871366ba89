"""The vLLM server as a process: how it is started, addressed, guarded and given up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import gone, wait_until

from ostinato.apps.interop.vllm_key import Guard
from ostinato.engine.vllm_server import (
    Serve,
    Unreachable,
    VllmAt,
    VllmChild,
    call,
    make_environment,
    parse_address,
    post,
)
from ostinato.workers import guard
from ostinato.workers.remote import WorkerLost


@pytest.mark.parametrize(
    "address", ["localhost:8000", "https://host:8000", "http://", "http://h:x", "http://h/v1"]
)
def test_an_address_is_checked(address: str) -> None:
    with pytest.raises(ValueError, match=r'"http://host:8000"'):
        VllmAt(address)
    assert parse_address("http://host:81") == ("host", 81)


def served_by(python: str, **changes: Any) -> Serve:
    usual: dict[str, Any] = {"model": Path("model"), "dtype": "float32", "context": 64, "max_batch": 4}
    return Serve(python=python, **{**usual, "kv_memory_mb": 8, "rank": 8, **changes})


def test_a_rank_without_room_is_refused_and_others_are_rounded_up(tmp_path: Path) -> None:
    serve = served_by("python", rank=12, args=("--x",))
    command = serve.command(81)
    assert command[command.index("--max-lora-rank") + 1] == "16" and command[-1] == "--x"
    with pytest.raises(ValueError, match=r"adapter\.rank is 600"):
        VllmChild(replace(serve, rank=600), tmp_path / "log")


def test_a_server_beside_a_trainer_asks_for_what_is_free() -> None:
    """vLLM wants 0.92 of a GPU to be free, whatever its cache is given: beside a trainer it did not start."""
    share = "--gpu-memory-utilization"
    assert share not in served_by("python").command(81)
    command = served_by("python", memory_share=0.55, args=(share, "0.3")).command(81)
    assert [command[at + 1] for at, word in enumerate(command) if word == share] == ["0.55", "0.3"]


def test_what_a_run_needs_of_its_server_is_in_its_command() -> None:
    flags = {
        "lends": "--enable-sleep-mode",
        "shared_experts": "--enable-moe-shared-loras",
        "routes": "--enable-return-routed-experts",
        "supports": "--return-sampling-mask",
    }
    for name, flag in flags.items():
        assert flag not in served_by("python").command(81)
        assert flag in served_by("python", **{name: True}).command(81)


def test_the_servers_environment_keeps_the_users_and_has_what_it_needs() -> None:
    users = {"PYTHONPATH": "/mine", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_SERVER_DEV_MODE": "0"}
    found = make_environment(users, "a key")
    assert found["VLLM_API_KEY"] == "a key"
    assert found["PYTHONPATH"].endswith(f"{os.pathsep}/mine") and found["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_guard_ends_what_it_runs_when_its_input_closes(tmp_path: Path) -> None:
    """A server in a session of its own would outlive a run that is killed with -9."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    note = tmp_path / "pid"
    command = [sys.executable, "-P", guard.__file__, sys.executable, "-c", code, str(note)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert wait_until(lambda: note.exists() and note.read_text(), 240)
        pid = int(note.read_text())
        assert process.stdin is not None
        process.stdin.close()
        ended = process.wait(timeout=240)
        assert ended == -signal.SIGKILL
        assert gone(pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = VllmChild(served_by("/bin/false"), tmp_path / "vllm.log", start_s=30)
    with pytest.raises(WorkerLost, match=r"did not start: .*the server ended: exit status 1"):
        child.start()


def test_nobody_there_is_said_the_same_way_in_a_thread_and_in_a_loop() -> None:
    with pytest.raises(Unreachable):
        call("http://127.0.0.1:9", "GET", "/health", timeout_s=1)
    with pytest.raises(Unreachable):
        asyncio.run(post("http://127.0.0.1:9", "/x", {}))


def test_every_path_of_a_server_asks_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """In development mode vLLM lets everyone who reaches its port call any method of its workers
    (/collective_rpc), pause it and change its weights; with its own --api-key too."""
    monkeypatch.setenv("VLLM_API_KEY", "right")
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message.get("status", message.get("code")))

    async def ask(kind: str, *headers: tuple[bytes, bytes]) -> None:
        await Guard(app)({"type": kind, "path": "/collective_rpc", "headers": headers}, None, send)

    async def all_of_them() -> None:
        await ask("http", (b"authorization", b"Bearer right"))
        await ask("http", (b"authorization", b"Bearer wrong"))
        await ask("http")
        await ask("websocket")
        await Guard(app)({"type": "lifespan"}, None, send)

    asyncio.run(all_of_them())
    assert (reached, sent) == (["http", "lifespan"], [401, None, 401, None, 1008])


def test_a_key_is_the_runs_alone_and_in_no_command_line(tmp_path: Path) -> None:
    serve = served_by("python")
    one, other = (VllmChild(serve, tmp_path / "log") for _ in range(2))
    assert len(one.key) == 64 and one.key != other.key
    command = serve.command(81)
    assert command[command.index("--middleware") + 1] == "ostinato.apps.interop.vllm_key.Guard"
    assert one.key not in " ".join(command)
