"""``ostinato sft`` on the packaged model: what is learned, that it resumes, what goes on from it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import LAUNCHER, LIMIT_S, ended, environment, rows, tiny_recipe
from worlds import lab

from ostinato.env.tasks import load_tasks

KEYS = {
    **{"task.source": "rows.jsonl", "task.n_train": 0, "task.params.holdout": 0.2},
    **{"sft.rows_per_step": 8, "trainer.steps": 6, "trainer.lr": 2e-3, "trainer.checkpoint_every": 2},
    **{"eval.n": 32, "eval.every": 3, "engine.threads": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    with (folder / "rows.jsonl").open("w") as sft, (folder / "pairs.jsonl").open("w") as dpo:
        for prompt in load_tasks("arithmetic", "train", 0, 96, {"families": ["sum"], "digits": 2}):
            chat, right = list(prompt.messages or ()), str(prompt.columns["answer"])
            output = [{"role": "assistant", "content": text} for text in (right, right + "0")]
            sft.write(json.dumps({"messages": [*chat, output[0]]}) + "\n")
            dpo.write(json.dumps({"prompt": chat, "chosen": output[:1], "rejected": output[1:]}) + "\n")
    for name, wrong in (("rows", "silent"), ("pairs", "equal")):
        few = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()[:4]]
        bad = {"rejected": few[2]["chosen"]} if name == "pairs" else {"messages": few[2]["messages"][:1]}
        few[2] |= bad
        (folder / f"{wrong}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in few))
    (folder / "tiny.toml").write_text(tiny_recipe(KEYS))
    return folder


def only(place: Path, name: str) -> Path:
    (folder,) = (place / name).iterdir()
    return folder


def same_run(one: Path, other: Path) -> None:
    """The same metrics and the same tensors, bit for bit."""
    assert rows(one / "metrics.jsonl") == rows(other / "metrics.jsonl")
    tensors = "checkpoints/step-00000006/tensors.safetensors"
    assert (one / tensors).read_bytes() == (other / tensors).read_bytes()
    adapter = "adapter/adapter_model.safetensors"
    assert (one / adapter).read_bytes() == (other / adapter).read_bytes()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_run_learns_and_resumes_to_the_same_bits(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    more = ["--preference", "task.source=pairs.jsonl"] if kind == "dpo" else []
    assert ended(place, "sft", "tiny.toml", f"log.dir={kind}", *more) == 0
    run, printed = only(place, kind), capsys.readouterr().out
    assert f"warm start   ostinato train RECIPE adapter.path={run}/adapter" in printed
    metrics = rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5, 6]
    scored = [row["eval_loss"] for row in metrics if "eval_loss" in row]
    assert len(scored) == 3 and scored[-1] < scored[0]
    if kind == "dpo":
        assert metrics[0]["eval_rewards/margins"] == 0 < metrics[-1]["eval_rewards/margins"]
    again = place / f"{kind}-again" / "run"
    shutil.copytree(run, again)  # as a kill behind step 5 has left it
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    shutil.rmtree(again / "adapter")
    assert ended(place, "resume", str(again)) == 0
    same_run(run, again)
    capsys.readouterr()
    with (again / "recipe.toml").open() as file:
        assert f'loss = "{"dpo" if kind == "dpo" else "tokens"}"' in file.read()
    assert ended(place, "train", "tiny.toml", f"sft.loss={'dpo' if kind == 'dpo' else 'tokens'}") == 2
    assert "run ostinato sft" in capsys.readouterr().err


def test_rl_and_the_other_commands_go_on_from_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(place, "sft", "tiny.toml", "log.dir=first", "eval.every=0", "eval.at_start=false") == 0
    run = only(place, "first")
    assert ended(place, "eval", str(run), "task.source=arithmetic", "task.params={}", "eval.n=2") == 0
    assert "after 6 steps" in capsys.readouterr().out
    assert ended(place, "generate", str(run), "-p", "1 + 1?", "--max-tokens", "4") == 0
    adapter = f"adapter.path={run}/adapter"
    small = ["trainer.steps=1", "eval.n=2", "eval.every=0", "task.n_train=8", "rollout.max_tokens=8"]
    assert ended(place, "train", "quickstart", adapter, "model.dtype=float32", "log.dir=rl", *small) == 0


def test_epochs_are_counted_and_full_parameters_train(place: Path) -> None:
    keys = ["adapter.kind=full", "sft.epochs=1", "sft.rows_per_step=40", "task.params.holdout=0.0"]
    assert ended(place, "sft", "tiny.toml", "trainer.lr=1e-5", "log.dir=full", *keys) == 0
    run = only(place, "full")
    metrics = rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]  # 96 rows; nothing is held out
    assert (run / "adapter" / "config.json").is_file()


@contextmanager
def struck(place: Path, name: str, fault: tuple[str, str, int, str]) -> Iterator[Any]:
    """``ostinato sft`` as a process of its own, which meets ``fault`` and does not outlive the block."""
    command = [sys.executable, "-c", LAUNCHER, json.dumps(fault), "sft", "tiny.toml", f"log.dir={name}"]
    with subprocess.Popen(
        command, cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    assert ended(place, "sft", "tiny.toml", "log.dir=undisturbed") == 0
    return only(place, "undisturbed")


FAULTS = {
    "killed in a step": ("open", "/metrics.jsonl$", 4, "kill"),
    "killed inside a checkpoint": ("open", ".step-00000004.", 3, "kill"),
    "killed before a checkpoint has its name": ("os.rename", "/step-00000004$", 1, "kill"),
    "no room for a checkpoint": ("tempfile.mkdtemp", ".step-00000004.", 1, "fill"),
    "no room for metrics": ("open", "/metrics.jsonl$", 5, "fill"),
    "no room for the adapter": ("tempfile.mkstemp", "adapter/.ostinato_adapter", 1, "fill"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*list(FAULTS)[:1], *list(FAULTS)[3:4], *lab(*list(FAULTS)[1:3], *list(FAULTS)[4:])]
)
def test_a_run_that_is_struck_resumes_to_the_same_bits(
    place: Path, undisturbed: Path, tmp_path: Path, name: str
) -> None:
    """RL's checkpoints and logs are the same functions, and struck everywhere in test_faults."""
    fault = FAULTS[name]
    with struck(place, str(tmp_path), fault) as process:
        _, error = process.communicate(timeout=LIMIT_S)
    (run,) = tmp_path.iterdir()
    if fault[-1] == "kill":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 1 and error.count("\n") == 1, error
        assert re.search(r"File too large.*what was saved is in (\S+), to go on: ostinato resume \1", error)
    assert ended(place, "resume", str(run)) == 0
    same_run(run, undisturbed)
    assert not list(run.glob("checkpoints/.*"))


@pytest.mark.slow
def test_a_signal_in_a_step_finishes_it_and_saves(place: Path, undisturbed: Path, tmp_path: Path) -> None:
    """It waits before the row of step 3, of which no checkpoint is due, until SIGTERM has come."""
    with struck(place, str(tmp_path), ("open", "/metrics.jsonl$", 4, "wait")) as process:
        for line in process.stdout:
            if line.startswith("step 2 of 6"):
                break
        process.send_signal(signal.SIGTERM)
        (place / "go").touch()
        assert process.wait(LIMIT_S) == 143, process.stderr.read()
    (run,) = tmp_path.iterdir()
    done = rows(run / "metrics.jsonl")[-1]["step"]
    assert done < 6 and (run / f"checkpoints/step-{done:08d}").is_dir()
    assert ended(place, "resume", str(run)) == 0
    same_run(run, undisturbed)


BAD = [
    (["task.source=nowhere.jsonl"], "there is no such file"),
    (["eval.every=1e6 tokens"], "give it in steps"),
    (["parallel.layout=d2"], "parallel.layout"),
    (["--preference"], "rows.jsonl: it has no 'prompt'"),
    (["sft.loss=rl"], "sft.loss"),
    (["task.source=silent.jsonl"], "silent.jsonl: it has no assistant turn"),
    (["task.source=equal.jsonl", "--preference"], "equal.jsonl has the same answer as chosen and"),
]


@pytest.mark.parametrize(("more", "why"), BAD)
def test_bad_input_is_one_sentence_and_leaves_no_folder(
    place: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    assert ended(place, "sft", "tiny.toml", "log.dir=bad", "task.params.holdout=0.0", *more) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert why in sentence
    assert not (place / "bad").exists() or not list((place / "bad").iterdir())
