"""Judges end to end: a run that an address judges, one of our own adapters, training, measuring, serving."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import ended, rows, tiny_recipe

pytestmark = pytest.mark.slow

KEYS = {
    **{"trainer.steps": 2, "trainer.checkpoint_every": 1, "rollout.prompts_per_step": 2, "task.n_train": 64},
    **{"rollout.max_tokens": 12, "engine.threads": 1, "engine.kv_memory_mb": 32, "trainer.lr": 1e-3},
    **{"task.params.families": ["sum"], "task.params.digits": 2, "trainer.warmup_steps": 0},
}


class Judging(BaseHTTPRequestHandler):
    """An OpenAI-compatible judge that prefers the longer answer; every fifth call it is busy."""

    calls = 0

    def do_POST(self) -> None:
        Judging.calls += 1
        busy = Judging.calls % 5 == 0
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        a, b = (re.findall(rf"<answer_{one}>\n(.*?)\n</answer_{one}>", text, re.DOTALL)[0] for one in "ab")
        verdict = "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"
        message = {"role": "assistant", "content": f"One is longer.\nVerdict: {verdict}"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        reply = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
        self.send_response(429 if busy else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judging) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny.toml").write_text(tiny_recipe(KEYS))
    pairs = [{"prompt": f"{k}?", "chosen": str(k), "rejected": f"{k}{k}"} for k in range(10, 50)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "template.txt").write_text("{prompt}\nA: {a}\nB: {b}")
    return folder


def only(folder: Path, name: str = "*") -> Path:
    (found,) = folder.glob(name)
    return found


def test_a_run_is_judged_and_a_resumed_one_alike(place: Path, address: str) -> None:
    judged = f'reward.functions=["judge:{address}"]'
    assert ended(place, "train", "tiny.toml", judged, "log.dir=judged") == 0
    run = only(place / "judged")
    assert re.search(r'"judge:http://[^"]+@[0-9a-f]{12}"', (run / "recipe.toml").read_text())
    metrics, ledger = rows(run / "metrics.jsonl"), rows(run / "ledger.jsonl")
    assert all(row["judge/judgements"] >= 8 and row["judge/tokens"] > 0 for row in metrics)
    assert sum(row.get("judge/retried", 0) for row in metrics) > 0
    assert all("judge" in row for row in ledger if row["event"] == "step")
    assert [row for row in rows(run / "eval.jsonl") if 0 <= row["reward"] <= 1]
    again = place / "again" / "run"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-00000002")
    shutil.rmtree(again / "spool", ignore_errors=True)
    assert ended(place, "resume", str(again)) == 0
    same = [[row["reward"] for row in rows(one / "metrics.jsonl")] for one in (run, again)]
    assert same[0] == same[1] and len(same[0]) == 2


FEW = [
    *("trainer.steps=2", "trainer.lr=1e-3", "engine.threads=1", "engine.kv_memory_mb=32", "adapter.rank=4"),
    *("rl.rollout.prompts_per_step=2", "rl.rollout.group_size=2", "rl.rollout.max_tokens=12", "eval.n=2"),
    *("warm.sft.epochs=0", "warm.sft.rows_per_step=4", "model.dtype=float32"),
]


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A judge of two steps and one of RL: it can say nothing yet, but it is one."""
    train = ["judge", "train", "pairs.jsonl", "--template", "template.txt", *FEW]
    assert ended(place, *train, "log.dir=judges") == 0
    return only(place / "judges", "judge_rl-*")


def test_a_judge_whose_rl_has_nothing_to_learn_from_is_that_of_its_warm_start(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thirty clicks on a model that has never read the letters of a verdict: the command ended with an error
    and `ostinato product run` with it, round after round, though gates are there to drop such a judge."""
    assert ended(place, "judge", "train", "pairs.jsonl", *FEW, "rl.trainer.steps=12", "log.dir=mute") == 0
    heard = capsys.readouterr()
    warm = only(place / "mute", "judge_sft-*")
    assert "the judge is that of the warm start" in heard.err and f"judge:{warm}" in heard.out
    assert (warm / "judge.json").is_file()


def test_a_judge_is_trained_measured_and_resumed(place: Path, trained: Path) -> None:
    warm, data = only(place / "judges", "judge_sft-*"), only(place / "judges", "judge-data-*")
    spec = (trained / "judge.json").read_text()
    assert spec == (warm / "judge.json").read_text() == (data / "judge.json").read_text()
    assert f'path = "{warm}/adapter"' in (trained / "recipe.toml").read_text()
    played = [row for row in rows(trained / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in played] == [1, 2]
    options = [
        "--against",
        "asset:seed-moe",
        "--json",
        "figures.json",
        "model.dtype=float32",
        "engine.threads=1",
    ]
    held_out = str(data / "held_out.jsonl")
    assert ended(place, "judge", "eval", str(trained), held_out, *options) == 0
    figures = json.loads((place / "figures.json").read_text())
    assert [*figures] == [str(trained), "asset:seed-moe"]
    for row in figures.values():
        low, high = row["consistency"]["interval"]
        assert (
            0 <= low <= row["consistency"]["value"] <= high <= 1
            and row["judge/judgements"] == 2 * row["pairs"]
        )
    (trained / "judge.json").unlink()  # as a kill leaves a run, before it gets one
    assert ended(place, "judge", "eval", str(trained), held_out, *options[2:]) == 0
    assert (
        json.loads((place / "figures.json").read_text())[str(trained)]["revision"]
        == figures[str(trained)]["revision"]
    )
    (trained / "judge.json").write_text(spec)


def test_a_judge_without_verdicts_ends_a_run_by_name(
    place: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a reward of 0: a run whose judge says nothing is refused as with any reward function."""
    judged = f'reward.functions=["judge:{trained}"]'
    assert ended(place, "train", "tiny.toml", judged, "log.dir=unreadable") == 2
    assert "reward judge gave no verdict to any of the" in capsys.readouterr().err
