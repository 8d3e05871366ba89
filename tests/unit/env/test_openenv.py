"""An environment of OpenEnv behind its own server, where the package is installed."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ostinato.env.adapters import OpenEnv
from ostinato.env.custom import make_factory, make_seed_prompts

pytestmark = pytest.mark.slow

SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Answer(Action):
    message: str

class Question(Observation):
    text: str = ""
    hint: str = ""

class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **_):
        generator = random.Random(seed)
        a, b = generator.randint(100, 999), generator.randint(100, 999)
        self._sum = str(a + b)
        return Question(text=f"What is {a} + {b}?")

    def step(self, action, **_):
        right = action.message.rpartition("#### ")[2] == self._sum
        return Question(text="", done=right, reward=float(right))

    @property
    def state(self):
        return State()

app = create_app(Sums, Answer, Question, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv")
    file: Path = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(file), str(port)]) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema").close()
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.kill()


def test_episodes_are_sessions_of_the_server(url: str) -> None:
    one, other = (OpenEnv(url, observation="{text}") for _ in range(2))
    question = one.reset(seed=3, options={})[0]
    assert re.fullmatch(r"What is \d+ \+ \d+\?", question)
    assert other.reset(seed=4, options={})[0] != question
    right = f"#### {sum(map(int, re.findall('[0-9]+', question)))}"
    assert one.step("#### 1")[1:3] == (0.0, False) and other.step(right)[1:3] == (0.0, False)
    assert one.step(right)[1:3] == (1.0, True)
    for env in (one, other):
        env.close()


def test_a_run_gets_its_prompts_from_the_server_and_what_is_not_clear_is_refused(url: str) -> None:
    name = "ostinato.env.adapters:OpenEnv"
    make = make_factory(name, {"url": url, "observation": "{text}"})
    texts = [
        prompt.messages[0]["content"]
        for prompt in make_seed_prompts(make, name, "train", 0, 4)
        if prompt.messages
    ]
    assert len(set(texts)) == 4 and all(text.startswith("What is") for text in texts)
    with pytest.raises(ValueError, match=r"observation has the texts \['text', 'hint'\]; name one"):
        make_factory(name, {"url": url})
