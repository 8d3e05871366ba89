"""The command line on a tiny random model with experts: train, stop, resume, evaluate, generate, export.

What trains, is stopped or reads stdin is a process of its own, as for a user; the rest runs in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.same_run import same
from ostinato.cli.app import main

LIMIT_S = 300
Here = Callable[..., str]  # a command in this process: what it prints, as ``run`` of another one

REWARD = """
def sevens(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [text.count("7") / max(1, len(text)) for text in texts]
"""

RECIPE = """
[model]
path = "{model}"
dtype = "float32"
[adapter]
rank = 4
alpha = 16.0
targets = ["attn", "experts"]
[task]
n_train = 64
[reward]
functions = ["reward.py:sevens"]
[rollout]
prompts_per_step = 4
group_size = 8
max_tokens = 8
[trainer]
steps = 4
lr = 3e-2
checkpoint_every = 2
[eval]
n = 8
every = 0
[log]
trajectories_every = 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model, a reward and a recipe in it."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.toml").write_text(RECIPE.format(model=folder / "model"))
    return folder


def write_model(folder: Path) -> None:
    """A qwen3_moe of two layers with random weights, a character tokenizer and a chat template."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE

    from ostinato.model.config import parse_config
    from ostinato.model.decoder import Decoder
    from ostinato.model.hf import save_model

    characters = [chr(code) for code in range(32, 127)] + ["\n", "<unk>"]
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>"))
    tokenizer.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    end = tokenizer.token_to_id("<end>")
    raw: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "eos_token_id": end,
    }
    save_model(Decoder(parse_config(raw)).init_weights(0), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}<end>\n{% endfor %}a: "
    config = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostinato", *arguments]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(place: Path, *arguments: str, code: int = 0, stdin: str = "") -> str:
    """stdout of a command that ends with ``code``."""
    done = subprocess.run(
        command(*arguments),
        cwd=place,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    monkeypatch.chdir(place)

    def ostinato(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        printed = capsys.readouterr()
        assert int(caught.value.code or 0) == code, printed
        return printed.out if code == 0 else printed.err

    return ostinato


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def only_run(place: Path, name: str) -> Path:
    (folder,) = (place / "runs").glob(f"{name}-*")
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[Path, str]:
    """(the folder of a run of 4 steps, what the command printed)."""
    out = run(place, "train", "tiny.toml", "trainer.lr=0.02", "algo.clip_high=0.3")
    return only_run(place, "tiny"), out


def test_the_run_folder_is_complete(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    for name in ("recipe.toml", "metrics.jsonl", "ledger.jsonl", "eval.jsonl", "trajectories.jsonl.zst"):
        assert (folder / name).stat().st_size > 0, name
    assert "lr = 0.02" in (folder / "recipe.toml").read_text()
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    evaluations = rows(folder / "eval.jsonl")
    assert [(row["step"], row["set"]) for row in evaluations] == [
        *((0, "eval"), (0, "greedy"), (4, "eval"), (4, "greedy"))
    ]
    assert {"step", "split", "n", "pass@1", "pass@k", "stderr"} <= evaluations[0].keys()
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_eval_of_a_run_repeats_its_last_score(here: Here, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    out = here("eval", str(folder), "eval.n=8")
    assert "after 4 steps" in out
    for row in rows(folder / "eval.jsonl")[-2:]:
        assert f"pass@1  {row['pass@1']:.3f}" in out and f"reward  {row['reward']:.3f}" in out
    assert "eval split, greedy, 8 prompts" in out


def test_a_quantised_sampler_is_scored_beside_what_is_exported(place: Path, here: Here) -> None:
    """``eval`` scored the sampler of an int8 run and did not say so; what is exported never was scored."""
    out = here("train", "tiny.toml", "engine.weights=int8", "trainer.steps=2", "log.dir=quantised")
    (folder,) = (place / "quantised").iterdir()
    evals = [row for row in rows(folder / "eval.jsonl") if row["set"] == "eval"]
    scores = [(row["step"], row["weights"], row["pass@1"]) for row in evals]
    assert [score[:2] for score in scores] == [(0, "int8"), (2, "int8"), (2, "model")]
    assert f"with the model's weights: held-out pass@1 {scores[2][2]:.3f}" in out
    exported, sampler = (here("eval", str(folder), *key) for key in ((), ("engine.weights=int8",)))
    assert "after 2 steps, eval split" in exported and f"pass@1  {scores[2][2]:.3f}" in exported
    assert "after 2 steps, int8 weights" in sampler and f"pass@1  {scores[1][2]:.3f}" in sampler


def test_generate_answers_each_line(place: Path, here: Here, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    arguments = ("generate", str(folder), "--max-tokens", "6", "--temperature", "0")
    once = here(*arguments, "--prompt", "1 + 1?")
    twice = run(place, *arguments, stdin="1 + 1?\n2 + 2?\n")
    assert once.strip() and twice.startswith(once)


def test_export_as_adapter_and_as_model(place: Path, here: Here, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    here("export", str(folder), "out/adapter")
    assert (place / "out/adapter/adapter_config.json").is_file()
    here("export", str(folder), "out/merged", "--merged")
    assert here("generate", "out/merged", "-p", "hello", "--max-tokens", "4")
    assert "not empty" in here("export", str(folder), "out/merged", code=2)


def test_resume_after_ctrl_c_equals_a_run_without_it(place: Path, trained: tuple[Path, str]) -> None:
    """Ctrl-C once: the step is finished and saved; the resumed run writes the same metrics, bit for bit."""
    reference, _ = trained
    arguments = ("train", "tiny.toml", "trainer.lr=0.02", "algo.clip_high=0.3", "name=stopped")
    with subprocess.Popen(
        command(*arguments), cwd=place, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/4"):
                process.send_signal(signal.SIGINT)
                break
        process.stdout.read()
        assert process.wait(LIMIT_S) == 130
    folder = only_run(place, "stopped")
    assert len(rows(folder / "metrics.jsonl")) < 4
    run(place, "resume", str(folder))
    assert_same(folder, reference)


def assert_same(folder: Path, reference: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert same(rows(folder / name)) == same(rows(reference / name)), name


def test_learning_from_python(place: Path) -> None:
    """The five lines of the README, as a script; full-parameter training on the way."""
    script = (
        "from ostinato import Recipe, learn\n"
        "recipe = Recipe.load('tiny.toml', 'trainer.steps=1', 'adapter.kind=full', 'name=script')\n"
        "outcome = learn(recipe, quiet=True)\n"
        "print(outcome.step, outcome.before['n'], outcome.after['n'], outcome.folder.name[:6])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "1 8 8 script\n", done.stdout + done.stderr
