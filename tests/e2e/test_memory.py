"""Chats within a budget: in ``ostinato serve`` by a session, in front of another address, in a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import dump_dom
from commands import only_run, rows, run
from serving import At as ServerAt
from serving import server, until

from ostinato.access import STRICT
from ostinato.apps.memory.conversations import Keeping, open_memory
from ostinato.apps.memory.refill import ChatModel
from ostinato.apps.memory.upstream import SESSION_HEADER, Upstream
from ostinato.apps.serve.server import HttpServer, format_address, open_socket
from ostinato.run import JsonlZst

BUDGET = 500


def http(url: str, body: Any = None) -> tuple[int, Any, Any]:
    """(status, JSON, headers) of a POST of ``body``, or of a GET."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def chat(turns: int) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for k in range(turns):
        messages.append({"role": "user", "content": f"Note {k}: {17 * k % 90} boats in Oslo."})
        messages.append({"role": "assistant", "content": f"Fine, {k}."})
    return messages[:-1]


def ask(url: str, messages: list[dict[str, str]], session: str, **fields: Any) -> tuple[int, Any, Any]:
    metadata = {"metadata": {"session_id": session}} if session else {}
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **metadata, **fields}
    return http(f"{url}/v1/chat/completions", body)


def block_of(view: Any, id: int) -> Any:
    return next(one for one in view["blocks"] if one["id"] == id)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAt]:
    file = tmp_path_factory.mktemp("memory") / "memory.sqlite"
    with server(memory=Keeping(budget=BUDGET, file=file)) as found:
        yield found


def test_a_session_stays_within_its_budget_however_long(at: ServerAt) -> None:
    for turns in (3, 30, 31, 32):
        status, reply, _ = ask(at.url, chat(turns), "long")
        assert status == 200 and reply["usage"]["prompt_tokens"] <= BUDGET
    status, view, _ = http(f"{at.url}/v1/memory/long")
    assert status == 200 and view["turns"] == 63 and view["budget"] == BUDGET
    assert any(not one["here"] for one in view["blocks"]) and any(one["level"] for one in view["blocks"])
    whole = "".join(
        one["original"] for one in sorted(view["blocks"], key=lambda one: one["id"]) if one["turn"] == 0
    )
    assert whole == "Note 0: 0 boats in Oslo."
    status, reply, _ = ask(at.url, chat(32), "")
    assert reply["usage"]["prompt_tokens"] > BUDGET if status == 200 else status == 400


def test_a_person_pins_and_restores(at: ServerAt) -> None:
    ask(at.url, chat(30), "pins")
    url = f"{at.url}/v1/memory/pins"
    view = http(url)[1]
    gone = next(one for one in view["blocks"] if not one["here"])
    view = http(url, {"restore": gone["id"]})[1]
    assert block_of(view, gone["id"])["text"] == gone["original"]
    http(url, {"pin": gone["id"]})
    ask(at.url, chat(60), "pins")
    kept = block_of(http(url)[1], gone["id"])
    assert kept["here"] and kept["pinned"] and kept["text"] == gone["original"]
    assert not next(one for one in http(url, {"unpin": gone["id"]})[1]["blocks"] if one["id"] == gone["id"])[
        "pinned"
    ]


@pytest.mark.parametrize(
    ("name", "body", "status", "sentence"),
    [
        ("ghost", None, 404, "there is no session 'ghost' in this memory"),
        ("ghost", {"pin": 0}, 404, "there is no session 'ghost'"),
        ("bad", {"pin": 999}, 404, "session 'bad' has no block 999"),
        ("bad", {"pin": True}, 404, "has no block True"),
        ("bad", {"pin": 10**24}, 404, "has no block 1000"),  # it was a 500: SQLite has no such number
        ("bad", {"pin": -(10**24)}, 404, "has no block -1000"),
        ("bad", {"forget": 1}, 400, "the body is one of"),
        ("bad", [1], 400, "the body is one of"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    at: ServerAt, name: str, body: Any, status: int, sentence: str
) -> None:
    ask(at.url, chat(2), "bad")
    found, reply, _ = http(f"{at.url}/v1/memory/{name}", body)
    assert found == status and sentence in reply["error"]["message"]


def test_the_model_itself_shortens_where_it_is_asked_to() -> None:
    with server(memory=Keeping(budget=BUDGET, refill="model")) as at:
        status, reply, _ = ask(at.url, chat(20), "model")
        assert status == 200 and reply["usage"]["prompt_tokens"] <= BUDGET
        counts = dict(line.rsplit(" ", 1) for line in _metrics(at.url) if "ostinato_memory_total" in line)
        assert float(counts['ostinato_memory_total{outcome="rewritten"}']) > 0
        assert float(counts['ostinato_memory_total{outcome="failed"}']) == 0


def _metrics(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return reply.read().decode().splitlines()


def test_another_programs_chat_is_kept_within_the_budget_by_a_proxy(at: ServerAt, tmp_path: Path) -> None:
    """Without session ids: the messages themselves say which chat goes on. Streams and other paths pass."""
    keeping = Keeping(budget=300, file=tmp_path / "m.sqlite")
    with (
        open_memory(keeping, None, ChatModel("http://127.0.0.1:9")) as kept,
        open_socket("127.0.0.1", 0) as listening,
    ):
        assert kept is not None
        app = Upstream(f"{at.url}/v1", kept).app()
        runner = HttpServer(app, listening, STRICT, log_level="error")
        thread = threading.Thread(target=runner.serve_until_signal, daemon=True)
        thread.start()
        until(lambda: runner.started)
        url, names = format_address(listening), set[str]()
        for turns in (1, 2, 40):
            status, reply, headers = ask(url, chat(turns), "")
            names.add(headers[SESSION_HEADER])
            assert status == 200 and reply["usage"]["prompt_tokens"] < 1000
        assert len(names) == 1
        ask(url, [{"role": "user", "content": "Another one."}], "")
        view = http(f"{url}/v1/memory/{names.pop()}")[1]
        assert view["turns"] == 79 and any(not one["here"] for one in view["blocks"])
        assert http(f"{url}/v1/models")[1]["data"]
        assert http(f"{url}/v1/chat/completions", {"messages": "hello"})[0] == 400
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps({"messages": chat(41), "stream": True, "max_tokens": 3}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert b"data: [DONE]" in reply.read()
        runner.should_exit = True
        thread.join(20)


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_session_survives_kill_9_of_the_server(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ostinato",
        "serve",
        "asset:seed-moe",
        "--port",
        "0",
        "--memory",
        str(BUDGET),
    ]
    command += ["--memory-file", str(tmp_path / "memory.sqlite")]

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("OpenAI address"):
                return process, text.split()[2].removesuffix("/v1,")
        raise AssertionError("the server did not begin")

    process, url = start()
    try:
        ask(url, chat(30), "kept")
        view = http(f"{url}/v1/memory/kept")[1]
        gone = next(one for one in view["blocks"] if not one["here"])
        before = http(f"{url}/v1/memory/kept", {"pin": gone["id"]})[1]
        end(process)
        process, url = start()
        assert http(f"{url}/v1/memory/kept")[1] == before
        assert ask(url, chat(31), "kept")[1]["usage"]["prompt_tokens"] <= BUDGET
        assert next(one for one in http(f"{url}/v1/memory/kept")[1]["blocks"] if one["id"] == gone["id"])[
            "pinned"
        ]
    finally:
        end(process)


@pytest.mark.slow
def test_the_page_shows_what_was_forgotten(at: ServerAt, tmp_path: Path) -> None:
    ask(at.url, chat(30), "shown")
    view = http(f"{at.url}/v1/memory/shown")[1]
    gone = next(one for one in view["blocks"] if not one["here"])
    http(f"{at.url}/v1/memory/shown", {"pin": gone["id"]})
    page = dump_dom(f"{at.url}/#memory=shown", tmp_path / "profile")
    assert "59 turns in about" in page and "forgotten" in page and "verbatim, pinned" in page
    assert page.count(">Restore<") > 3 and page.count(">Unpin<") == 1


LOG = """
class Log:
    def reset(self, *, seed, options):
        self.n, self.seed = 0, seed
        return f"Log {seed % 97}. Say go.", {}

    def step(self, action):
        self.n += 1
        reply = f"Line {self.n}: sensor {self.n * 7} shows {(self.seed + self.n) % 50} degrees."
        return reply, float(len(action) % 3), self.n >= 8, False, {}
"""


@pytest.mark.slow
def test_a_run_trains_on_episodes_whose_contexts_stay_within_the_budget(tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text(LOG)
    settings = ("task.memory=true", "memory.budget=220", "task.env=log.py:Log", "task.env_params={}")
    sizes = (
        "task.max_turns=8",
        "rollout.max_tokens=12",
        "rollout.prompts_per_step=1",
        "rollout.group_size=4",
    )
    length = ("trainer.steps=1", "trainer.warmup_steps=0", "task.n_train=8", "eval.every=0", "eval.n=1")
    run(tmp_path, "train", "guess_number", *settings, *sizes, *length, "eval.at_start=false")
    folder = only_run(tmp_path)
    (metrics,) = rows(folder / "metrics.jsonl")
    assert metrics["memory/rows"] >= 4 and metrics["num_tokens"] > 0
    for row in JsonlZst(folder / "trajectories.jsonl.zst").rows():
        length_so_far = 0
        for turn in row["turns"]:
            length_so_far = len(turn["context"]) + (0 if turn.get("new_row") else length_so_far)
            assert length_so_far <= 220
            length_so_far += len(turn["tokens"])
