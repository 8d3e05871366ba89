"""Further clients as they are: litellm and llm, beside OpenAI's and Anthropic's (tests/e2e/test_serve.py).

The extra ``contract`` has them; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import At, server

MODEL = "seed-moe"
QUESTION = [{"role": "user", "content": "Compute: 23 + 45"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def at() -> Iterator[At]:
    with server(sequences=300) as running:
        yield running


@pytest.fixture(scope="module")
def litellm(at: At) -> Iterator[Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are not looked up in the internet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [("ignore", None, Warning, None, 0)])  # of its own imports
        made = pytest.importorskip("litellm")
    made.telemetry, made.suppress_debug_info = False, True
    yield made


def ask(litellm: Any, at: At, **fields: Any) -> Any:
    defaults = {"messages": QUESTION, "max_tokens": 24, "seed": 5, "num_retries": 0, "timeout": 60}
    where = {"model": f"openai/{MODEL}", "api_base": f"{at.url}/v1", "api_key": "none"}
    return litellm.completion(**{**defaults, **where, **fields})


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of clients, which are not ours to fix


def test_litellm_streams_what_it_gets_whole_with_seed_n_and_logprobs(litellm: Any, at: At) -> None:
    whole = ask(litellm, at, n=2, logprobs=True, top_logprobs=2)
    texts = {0: "", 1: ""}
    for chunk in ask(litellm, at, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == [texts[0], texts[1]]
    assert texts[0] != texts[1] and whole.usage.completion_tokens > 2
    for choice in whole.choices:
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert ask(litellm, at, n=2).choices[1].message.content == texts[1]


def test_litellm_calls_tools_and_gets_json(litellm: Any, at: At) -> None:
    pytest.importorskip("llguidance")
    reply_ = ask(litellm, at, tools=TOOLS, tool_choice="required", max_tokens=300).choices[0].message
    assert reply_.tool_calls[0].function.name == "add" and json.loads(reply_.tool_calls[0].function.arguments)
    replies = [*QUESTION, reply_.model_dump(exclude_none=True)]
    replies += [{"role": "tool", "tool_call_id": reply_.tool_calls[0].id, "content": "68"}]
    assert ask(litellm, at, messages=replies, tools=TOOLS).choices[0].message is not None
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOLS[0]["function"]["parameters"]}}
    assert "a" in json.loads(
        ask(litellm, at, response_format=form, max_tokens=300).choices[0].message.content
    )


# ---- llm, as its users have it: a command and a file of models


def said_by_llm(folder: Path, at: At, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("llm")
    folder.mkdir(exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {at.url}/v1\n  api_key_name: ours\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    (folder / "keys.json").write_text('{"ours": "none"}')
    # no plug-ins: those of other packages may want a runtime that is not installed
    variables = {
        **os.environ,
        "LLM_USER_PATH": str(folder),
        "LLM_LOAD_PLUGINS": "",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "llm", "prompt", "-m", "ours", "--no-log", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_llm_prompts_streamed_and_not_with_a_seed(tmp_path: Path, at: At) -> None:
    options = ("-o", "seed", "5", "-o", "max_tokens", "24", QUESTION[0]["content"])
    streamed, whole = (said_by_llm(tmp_path / "u", at, *more, *options) for more in ((), ("--no-stream",)))
    assert streamed.returncode == whole.returncode == 0, streamed.stderr + whole.stderr
    assert streamed.stdout == whole.stdout != "\n"
    stopped = said_by_llm(tmp_path / "u", at, "-o", "stop", whole.stdout[2:4], *options)
    assert stopped.stdout.rstrip("\n") == whole.stdout[: whole.stdout.index(whole.stdout[2:4])].rstrip("\n")


def test_llm_gets_json_of_a_schema_and_refusals_as_errors(tmp_path: Path, at: At) -> None:
    pytest.importorskip("llguidance")
    schema = json.dumps(TOOLS[0]["function"]["parameters"])
    reply_ = said_by_llm(
        tmp_path / "u", at, "--schema", schema, "-o", "seed", "5", "-o", "max_tokens", "300", "a?"
    )
    assert reply_.returncode == 0, reply_.stderr
    assert 0 <= json.loads(reply_.stdout)["a"] <= 9
    refused = said_by_llm(tmp_path / "u", at, "-o", "frequency_penalty", "1", "a?")
    assert refused.returncode != 0 and "frequency_penalty is not supported" in refused.stderr
