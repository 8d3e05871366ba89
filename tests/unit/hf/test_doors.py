"""What is done with a model besides runs, for one that our decoder has not: the same doors."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from serving import server
from small_transformers import OTHERS, saved, with_tokenizer

pytest.importorskip("transformers", minversion="5.0")

from ostinato.apps.tinker.work import open_work
from ostinato.cli.data import data
from ostinato.cli.evaluate import evaluate
from ostinato.config import Recipe
from ostinato.launch.policy import SamplingOptions, answer_prompts
from ostinato.launch.sft import train_supervised


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Supervised training on rows of tiny gemma2, as transformers has it."""
    place = tmp_path_factory.mktemp("doors")
    folder = with_tokenizer(saved("gemma2", place / "gemma2", **OTHERS["gemma2"]))
    answers = {"role": "assistant", "content": "7"}
    chats = [[{"role": "user", "content": f"{n} + 1 ="}, answers] for n in range(16)]
    (place / "rows.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    prompts = [{"prompt": [chat[0]], "answer": "7"} for chat in chats]
    (place / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    keys = {
        "model.path": folder,
        "model.fp32_head": "false",
        "model.dtype": "float32",
        "adapter.targets": '["attn", "mlp"]',
        "task.source": place / "rows.jsonl",
        "task.n_train": 0,
        "task.params.holdout": 0.2,
        "sft.rows_per_step": 4,
        "sft.epochs": 0,
        "trainer.steps": 12,
        "trainer.lr": 0.02,
        "eval.n": 2,
        "log.dir": place,
    }
    return train_supervised(Recipe.load("sft", *(f"{key}={value}" for key, value in keys.items())))[0]


def test_supervised_training_learns(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    assert 'backend = "transformers"' in (run / "recipe.toml").read_text()


def test_it_is_served_and_scored(run: Path) -> None:
    """With its adapter and without; texts of a grammar are refused by one sentence."""
    call = {"prompt": "3 + 1 =", "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": True}
    adapters = {"again": str(run / "adapter")}
    with server(str(run), adapters=adapters) as at, httpx.Client(base_url=at.url) as client:
        names = [one["id"] for one in client.get("/v1/models").json()["data"]]
        found = [client.post("/v1/completions", json={**call, "model": name}).json() for name in names]
        scores = {
            name: one["choices"][0]["logprobs"]["token_logprobs"][1:]
            for name, one in zip(names, found, strict=True)
        }
        assert scores["again"] == pytest.approx(scores[run.name], rel=1e-4)
        assert scores["again"] != pytest.approx(scores["gemma2"], rel=1e-2)
        schema = {"name": "n", "schema": {"type": "integer"}, "strict": True}
        shaped = {
            "messages": [{"role": "user", "content": "3"}],
            "model": "again",
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        refused = client.post("/v1/chat/completions", json=shaped)
        assert refused.status_code == 400 and "native" in refused.text
        assert "ostinato_running_sequences" in client.get("/metrics").text


def test_it_answers_and_is_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SamplingOptions(max_tokens=3, temperature=0.0, top_p=None, seed=0)
    chat = [{"role": "user", "content": "3 + 1 ="}]
    assert answer_prompts(str(run), [chat, chat], options)[0].startswith("7")
    source = f"task.source={run.parent / 'prompts.jsonl'}"
    data(str(run), [source], model="", row=1)
    evaluate(str(run), [source, 'reward.functions=["exact"]', "rollout.max_tokens=2"])
    assert "pass@1" in capsys.readouterr().out


def test_the_tinker_api_refuses_it(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs our own decoder"), open_work(str(run), (), tmp_path):
        pass
