"""Frameworks as they are, on a model whose <tool_call> is an added token: smolagents, langchain, instructor,
openai-agents, inspect-ai, lm-evaluation-harness, verifiers. Each test is skipped without its package.

The extra ``contract`` has smolagents, langchain and openai-agents; the others want other versions of packages
than ours and are installed in an environment of their own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from qwen_like import save_qwen_like
from serving import At, server

pytest.importorskip("llguidance")
MODEL = "qwen-like"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of clients, which are not ours to fix


class Point(BaseModel):
    """A point."""

    x: int = Field(ge=0, le=99)
    label: Literal["a", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_like(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def at(folder: Path) -> Iterator[At]:
    with server(str(folder)) as running:
        yield running


@pytest.fixture
def url(at: At, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{at.url}/v1")
    return f"{at.url}/v1"


def test_smolagents_calls_its_tools(url: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    called: list[int] = []

    @smolagents.tool
    def look(place: int) -> str:
        """Look at a place.

        Args:
            place: where
        """
        called.append(place)
        return "nothing"

    model = smolagents.OpenAIServerModel(MODEL, api_base=url, api_key="none", max_tokens=1500, seed=5)
    agent = smolagents.ToolCallingAgent([look], model, max_steps=4, verbosity_level=0)
    agent.run("Where is it?")
    steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    assert any(step.tool_calls for step in steps), [step.error for step in steps]  # the policy is untrained


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structures_its_answers(url: str, method: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", seed=5, max_tokens=300)
    assert isinstance(chat.with_structured_output(Point, method=method).invoke("A point."), Point)
    bound = chat.bind_tools([Point], tool_choice="Point", parallel_tool_calls=False)
    assert [call["name"] for call in bound.invoke("A point.").tool_calls] == ["Point"]


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_openai_agents_call_tools_and_end_with_a_type(url: str, dialect: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    called: list[int] = []

    @agents.function_tool
    def add(x: Literal[1, 2]) -> str:
        """Adds."""
        called.append(x)
        return "3"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            kind = agents.OpenAIChatCompletionsModel if dialect == "chat" else agents.OpenAIResponsesModel
            settings = agents.ModelSettings(tool_choice="required", max_tokens=400, extra_body={"seed": 5})
            agent = agents.Agent(
                name="a",
                instructions="Be brief.",
                tools=[add],
                output_type=Point,
                model=kind(MODEL, client),
                model_settings=settings,  # the choice is reset after the first call
            )
            return await agents.Runner.run(agent, "1+2?", max_turns=3)

    result = asyncio.run(run())
    assert isinstance(result.final_output, Point) and len(called) == 1


def test_instructor_gets_a_type_by_its_default_mode(url: str) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"))
    question: Any = [{"role": "user", "content": "A point."}]
    point = client.chat.completions.create(
        model=MODEL, response_model=Point, messages=question, max_tokens=300, seed=5, max_retries=0
    )
    assert isinstance(point, Point)


def test_inspect_ai_evaluates_with_a_tool(url: str, tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolChoice, ToolFunction, tool  # noqa: F401

    @tool
    def add() -> Any:
        async def execute(x: int) -> str:
            """Adds.

            Args:
                x: a number
            """
            return "3"

        return execute

    model = get_model(
        f"openai-api/ours/{MODEL}",
        base_url=url,
        api_key="none",
        config=GenerateConfig(max_tokens=60, seed=3, max_connections=2),
    )
    task = inspect_ai.Task(
        dataset=[Sample(input="1+2?", target="3"), Sample(input="2+2?", target="4")],
        solver=[use_tools(add(), tool_choice="any"), generate(tool_calls="single")],
        scorer=includes(),
    )
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert all(any(m.role == "tool" for m in sample.messages) for sample in log.samples)


def test_lm_eval_has_the_log_likelihoods_of_transformers(at: At, folder: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    assert lm_eval
    model = LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{at.url}/v1/completions",
        tokenizer=str(folder),
        num_concurrent=1,
        batch_size=2,
    )
    pairs = [("The sum of one and two is", " three"), ("A cat", " sat on the mat"), ("x", "yz")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=k) for k, pair in enumerate(pairs)
    ]
    found = model.loglikelihood(requests)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for (context, rest), (logprob, greedy) in zip(pairs, found, strict=True):
        before, ids = tokenizer(context).input_ids, tokenizer(context + rest).input_ids
        with torch.no_grad():
            table = torch.log_softmax(theirs(torch.tensor([ids])).logits[0].double(), -1)
        places = range(len(before) - 1, len(ids) - 1)
        assert logprob == pytest.approx(sum(table[k, ids[k + 1]].item() for k in places), abs=1e-4)
        assert greedy == all(int(table[k].argmax()) == ids[k + 1] for k in places)


# an environment of verifiers: two questions, asked once each by a program with OpenAI's client
ENVIRONMENT = """
import verifiers.v1 as vf
from openai import AsyncOpenAI


class OursData(vf.TaskData):
    pass


class OursTask(vf.Task[OursData]):
    @vf.reward(weight=1.0)
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.assistant_messages))


class OursConfig(vf.TasksetConfig):
    pass


class OursTaskset(vf.Taskset[OursTask, OursConfig]):
    def load(self):
        return [OursTask(OursData(idx=k, prompt=f"{k}+1?")) for k in range(2)]


class OursHarnessConfig(vf.HarnessConfig):
    pass


class OursHarness(vf.Harness[OursHarnessConfig]):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER = True, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OursHarness", "OursTaskset"]
"""


@pytest.mark.parametrize("client", ["eval", "train"])
def test_verifiers_evaluates(url: str, folder: Path, tmp_path: Path, client: str) -> None:
    """Its client for evaluation relays chats; the one for training sends tokens to /inference/v1/generate."""
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("needs verifiers")
    (tmp_path / "ours_v1").mkdir()
    (tmp_path / "ours_v1" / "__init__.py").write_text(ENVIRONMENT)
    options = {
        **{"env.agent.harness.id": "ours_v1", "env.agent.runtime.type": "subprocess", "model": MODEL},
        **{"client.type": client, "client.base-url": url, "client.api-key-var": "OPENAI_API_KEY"},
        "output-dir": str(tmp_path / "out"),
    }
    if client == "train":
        options["client.renderer-model-name"] = str(folder)
    run = "import sys; from verifiers.v1.cli.eval.main import main; main(sys.argv[1:])"
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", run, "ours_v1", *named, "--no-push", "-n", "2"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (tmp_path / "out").glob("*/traces.jsonl")
    episodes = [json.loads(line) for line in found.read_text().splitlines()]
    assert len(episodes) == 2 and all(each["ok"] and each["num_output_tokens"] for each in episodes)


@pytest.mark.slow  # starts the environment's programs
def test_an_unmodified_environment_of_verifiers_trains_by_one_key(tmp_path: Path) -> None:
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("needs verifiers")
    (tmp_path / "ours_v1").mkdir()
    (tmp_path / "ours_v1" / "__init__.py").write_text(ENVIRONMENT)
    keys = ["task.agent=verifiers:ours_v1", "task.params.holdout=0.5", 'reward.functions=["env"]']
    sizes = ["trainer.steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2", "rollout.max_tokens=4"]
    (tmp_path / "mine.toml").write_text('[model]\npath = "asset:seed-moe"\n')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "ostinato", "train", "mine.toml", *keys, *sizes],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "held-out pass@1 1.000" in done.stdout + done.stderr, done.stdout + done.stderr
