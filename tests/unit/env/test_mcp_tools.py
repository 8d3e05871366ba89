"""Tools of a real MCP server, a process beside this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ostinato.config import Recipe
from ostinato.config.fields import PathKind, make_absolute
from ostinato.env.tools import resolve_tools
from ostinato.launch.inputs import new_stage, prepare_inputs
from ostinato.protocols import Engine
from ostinato.rollout.rollout import start_env

SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    \"\"\"The sum of two integers.\"\"\"
    return a + b

@server.tool()
def process() -> int:
    return os.getpid()

@server.tool()
def end() -> str:
    os._exit(3)

server.run()
"""


# A run in small: it prints what it saw, and is killed.
RUN = """
import asyncio, json, os, signal, sys, time
from collections import Counter
from ostinato.env.mcp_tools import ToolLost
from ostinato.env.tools import Toolbox, resolve_tools

counters = Counter()
box = Toolbox(resolve_tools([f"mcp:{sys.executable} server.py"]), 60.0, counters)

def ask(name, **arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return asyncio.run(box.run_calls(f"<tool_call>{call}</tool_call>"))[0]["content"]

seen = {"schema": box.schemas[0]["function"], "sum": ask("add", a=347, b=586)}
seen["refusal"] = ask("add", a="many")
try:
    ask("end")
except ToolLost as error:
    seen["lost"] = str(error)
for _ in range(600):
    try:
        seen["process"] = int(ask("process"))
        break
    except ToolLost:
        time.sleep(0.1)
print(json.dumps({**seen, "counters": counters}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_server_answers_is_lost_comes_again_and_ends_with_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["schema"]["name"], seen["schema"]["description"]) == ("add", "The sum of two integers.")
    assert seen["schema"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert seen["sum"] == "933" and "valid integer" in seen["refusal"]
    assert seen["counters"]["tools/raised"] == 1, "the policy reads that; of a lost server it reads nothing"
    assert "server.py" in seen["lost"]
    deadline = time.monotonic() + 30
    while not is_gone(seen["process"]):
        assert time.monotonic() < deadline, "the server outlived its run"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_starts_a_server_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of lengths had one of its own, and each task of a mixture all of them."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(f"open('started', 'a').write('x')\n{SERVER}")
    monkeypatch.chdir(tmp_path)
    tools = [f"mcp:{sys.executable} server.py"]
    recipe = Recipe.load(
        {"model": {"path": "asset:seed-moe", "dtype": "float32"}, "task": {"tools": tools, "max_turns": 2}}
    )
    with prepare_inputs(recipe, training=True) as inputs:
        episode = new_stage(inputs, cast(Engine, None), inputs.grader).env(inputs.train_prompts[0])
        asked = inputs.renderer.decode(asyncio.run(start_env(episode)), skip_special=False)
    assert "The sum of two integers." in asked
    assert (tmp_path / "started").read_text() == "x"


@pytest.mark.slow  # starts the server
def test_the_chats_of_the_recipe_begin_as_its_run_does(tmp_path: Path) -> None:
    """A warm start on another text than RL shows would be none."""
    pytest.importorskip("mcp")
    file = Path(__file__).parents[3] / "recipes" / "mcp_prices.py"
    subprocess.run([sys.executable, file, tmp_path], check=True, timeout=120)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    whole = next(chat for chat in chats if len(chat) == 5)
    recipe = Recipe.load(
        f"{file.with_suffix('.toml')}",
        f"task.source={tmp_path}/prices.jsonl",
        f"task.tools=['mcp:{sys.executable} {file}']",
        "model.dtype=float32",
    )
    with prepare_inputs(recipe, training=True) as inputs:
        row = replace(inputs.train_prompts[0], messages=(whole[1],))
        episode = new_stage(inputs, cast(Engine, None), inputs.grader).env(row)
        asked = asyncio.run(start_env(episode))
        assert asked.tolist() == inputs.renderer.chat(whole[:2]).tolist()
    assert 0.4 < sum(chat[-2]["role"] == "tool" for chat in chats) / len(chats) < 0.6


@pytest.mark.slow
def test_a_server_that_is_not_there_is_refused_with_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ValueError, match=r"task\.tools has 'mcp:.*no list of tools.*nowhere\.py"):
        resolve_tools([f"mcp:{sys.executable} {tmp_path}/nowhere.py"])


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second took the place of the first, and the policy was told of both."""
    (tmp_path / "mine.py").write_text("def calculator(x: str) -> str: ...\n")
    with pytest.raises(ValueError, match="'calculator' twice"):
        resolve_tools(["calculator", f"{tmp_path}/mine.py:calculator"])


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("mcp:python server.py --day 3", "mcp:python {base}/server.py --day 3"),
        ("mcp:uvx mcp-server-time", "mcp:uvx mcp-server-time"),
        ("mcp:https://example.org/mcp", "mcp:https://example.org/mcp"),
    ],
)
def test_files_of_a_command_begin_at_the_folder_of_the_recipe(
    tmp_path: Path, text: str, absolute: str
) -> None:
    (tmp_path / "server.py").touch()
    assert make_absolute(PathKind.CODE, text, tmp_path) == absolute.format(base=tmp_path)
