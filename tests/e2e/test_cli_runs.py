"""The command line on the packaged model: train, stop, resume, evaluate, generate, export."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from commands import ended, only_run, rows, run, tiny_recipe

from ostinato.algo.algorithms import algorithm
from ostinato.config import Recipe
from ostinato.launch.session import learn

Here = Callable[..., str]  # a command in this process: what it prints, as ``run`` of another one

REWARD = """
def sevens(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [text.count("7") / max(1, len(text)) for text in texts]
"""

RECIPE = {
    **{"adapter.alpha": 16.0, "task.n_train": 64, "reward.functions": ["reward.py:sevens"], "eval.n": 8},
    **{"rollout.prompts_per_step": 4, "rollout.group_size": 8, "rollout.max_tokens": 8},
    **{"trainer.steps": 4, "trainer.lr": 3e-2, "trainer.checkpoint_every": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a reward and a recipe in it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.toml").write_text(tiny_recipe(RECIPE))
    return folder


@pytest.fixture
def here(place: Path, capsys: pytest.CaptureFixture[str]) -> Here:
    def ostinato(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert ended(place, *arguments) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return ostinato


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[Path, str]:
    """(the folder of a run of 4 steps, what the command printed)."""
    out = run(place, "train", "tiny.toml", "trainer.lr=0.02", "algo.clip_high=0.3")
    return only_run(place, "tiny-*"), out


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


def test_a_base_in_int8_is_the_trainers_and_the_samplers(place: Path, here: Here) -> None:
    """The mismatch of one base, a resumed run equal to an undisturbed one, adapters that are for the model as
    it is published, and weights that are merged into that."""
    keys = ("model.storage=int8", "model.dtype=float32", "eval.at_start=false")
    here("train", "tiny.toml", *keys, "log.dir=whole", "trainer.steps=2")
    here("train", "tiny.toml", *keys, "log.dir=halves", "trainer.steps=1")
    (whole,), (halves,) = (place / "whole").iterdir(), (place / "halves").iterdir()
    here("resume", str(halves), "trainer.steps=2")
    once, twice = ((run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (whole, halves))
    assert once == twice
    k3 = [row["sampling/kl_k3"] for row in rows(whole / "metrics.jsonl") if "sampling/kl_k3" in row]
    assert k3 and max(k3) < 1e-5  # a step with nothing to learn has none
    assert "merged in float32" in here("export", str(whole), "out/int8-merged", "--merged", "--float32")
    here("generate", "tiny.toml", "--adapter", str(whole / "adapter"), "-p", "1 + 1?", "--max-tokens", "6")


def test_generate_answers_each_line(
    here: Here, trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained
    arguments = ("generate", str(folder), "--max-tokens", "6", "--temperature", "0")
    once = here(*arguments, "--prompt", "1 + 1?")
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1?\n2 + 2?\n"))
    twice = here(*arguments)
    assert once.strip() and twice.startswith(once)


def test_an_adapter_is_put_on_a_model(place: Path, here: Here, trained: tuple[Path, str]) -> None:
    """An adapter's folder could be served and not talked to, nor scored."""
    folder, _ = trained
    words = ("-p", "1 + 1?", "--max-tokens", "6", "--temperature", "0")
    said = here("generate", str(folder), *words)
    assert said != here("generate", "tiny.toml", *words)
    here("export", str(folder), "out/other")
    for adapter in (folder, folder / "adapter", "out/other"):
        assert here("generate", "tiny.toml", "--adapter", str(adapter), *words) == said
    scores = [row for row in rows(folder / "eval.jsonl") if row["set"] == "eval"]
    for given in (("--adapter", str(folder / "adapter")), (f"adapter.path={folder / 'adapter'}",)):
        assert f"reward  {scores[-1]['reward']:.3f}" in here("eval", "tiny.toml", "eval.n=8", *given)
    assert "--adapter" in here("generate", str(folder), "--adapter", str(folder), *words, code=2)
    assert "nowhere" in here("generate", "tiny.toml", "--adapter", "nowhere", *words, code=2)


def test_export_as_adapter_and_as_model(place: Path, here: Here, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    here("export", str(folder), "out/adapter")
    assert (place / "out/adapter/adapter_config.json").is_file()
    assert "rounding error" in here("export", str(folder), "out/merged", "--merged")
    here("export", str(folder), "out/wide", "--merged", "--float32")
    assert json.loads((place / "out/wide/config.json").read_text())["dtype"] == "float32"
    assert "--float32" in here("export", str(folder), "out/no", "--float32", code=2)
    assert here("generate", "out/merged", "-p", "hello", "--max-tokens", "4")
    assert "not empty" in here("export", str(folder), "out/merged", code=2)


def test_export_for_other_servers(
    place: Path, here: Here, trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's converters stand in as programs that check what they are given and copy it. The real ones
    were not run: they need a checkout of llama.cpp."""
    folder, _ = trained
    assert "--lora-modules" in here("export", str(folder), "out/for-vllm")
    tools = place / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "convert_hf_to_gguf.py of llama.cpp" in here("export", str(folder), "out/no", "--gguf", code=2)
    converter = tools / "convert_hf_to_gguf.py"
    converter.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\n"
        "assert (folder / 'config.json').is_file() and sys.argv[2:5] == ['--outtype', 'f16', '--outfile']\n"
        "pathlib.Path(sys.argv[5]).write_bytes((folder / 'model.safetensors').read_bytes())\n"
    )
    converter.chmod(0o755)
    reported = here("export", str(folder), "out/gguf", "--gguf")
    assert "ollama create" in reported and (place / "out/gguf/Modelfile").read_text() == "FROM ./model.gguf\n"
    assert (place / "out/gguf/model.gguf").is_file()
    options = ("export", str(folder), "out/no", "--gguf-adapter")
    assert "convert_lora_to_gguf.py of llama.cpp, which writes GGUF, is not on the PATH" in here(
        *options, code=2
    )
    assert "is not in checkout" in here(*options, "--llama-cpp", "checkout", code=2)
    assert "drop --merged" in here(*options, "--merged", code=2)
    assert "add --gguf" in here("export", str(folder), "out/no", "--llama-cpp", "checkout", code=2)
    checkout = place / "checkout"
    checkout.mkdir()
    (checkout / "convert_lora_to_gguf.py").write_text(
        "import pathlib, sys\nfolder, _, base, *outtype, _, outfile = sys.argv[1:]\n"
        "assert (pathlib.Path(base) / 'config.json').is_file() and outtype == ['--outtype', 'f32']\n"
        "assert (pathlib.Path(folder) / 'adapter_config.json').is_file()\n"
        "tensors = pathlib.Path(folder) / 'adapter_model.safetensors'\n"
        "pathlib.Path(outfile).write_bytes(tensors.read_bytes())\n"
    )
    options = ("--gguf-adapter", "--llama-cpp", "checkout")
    assert "converter takes no adapter of experts" in here("export", str(folder), "out/no", *options, code=2)
    here("train", "tiny.toml", 'adapter.targets=["attn"]', "trainer.steps=1", "log.dir=dense")
    (dense,) = (place / "dense").glob("tiny-*")
    assert "--lora" in here("export", str(dense), "out/lora", *options)
    assert (place / "out/lora/adapter.gguf").is_file()
    source, adapter = (place / "out/lora/Modelfile").read_text().splitlines()
    assert (Path(source.removeprefix("FROM ")) / "config.json").is_file() and adapter.endswith("adapter.gguf")
    (checkout / "convert_lora_to_gguf.py").write_text("raise SystemExit('no such model')")
    assert "no such model" in here("export", str(dense), "out/failed", *options, code=1)


def test_a_run_is_not_resumed_with_other_rows_unless_they_are_named(place: Path, here: Here) -> None:
    """Rows that were replaced between two steps were trained on without a word, and "before" and "after" were
    scores on different questions."""
    file = place / "rows.jsonl"

    def write(start: int) -> None:
        made = [{"prompt": f"{k} + 1 = ?", "answer": str(k + 1)} for k in range(start, start + 40)]
        file.write_text("".join(json.dumps(row) + "\n" for row in made))

    write(0)
    given = ("task.source=rows.jsonl", "task.params={holdout=0.2}", "task.n_train=0", "trainer.steps=1")
    here("train", "tiny.toml", *given, "log.dir=replaced")
    (folder,) = (place / "replaced").iterdir()
    write(100)
    assert "task.source" in here("resume", str(folder), "trainer.steps=2", code=2)
    here("resume", str(folder), "trainer.steps=2", f"task.source={file}")
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1, 2]


OBJECTS = """
import asyncio
from ostinato import learn, resume

rows = [{"question": f"What is {a} + {b}?", "label": str(a + b)} for a in range(9) for b in range(5)]

async def close(completions, answer, **columns):
    return [float(gold in text) for text, gold in zip(completions, answer)]

def end(row):
    return row["step"] == 2

async def cell():  # of a notebook, whose thread has a loop that runs
    return learn(
        data=rows, reward=[close, lambda completions, **columns: [0.1 for _ in completions]], on_step=end,
        name="objects", trainer={"steps": 4, "checkpoint_every": 1}, eval={"n": 4}, quiet=True,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
    )

outcome = asyncio.run(cell())
print(outcome.why, [row["step"] for row in outcome.rows()], len(outcome.generate("1 + 1", max_tokens=3)))
print(resume(outcome.folder, trainer={"steps": 3}, quiet=True).step)
"""


def test_learning_from_python_objects(place: Path) -> None:
    """Rows, an asynchronous function and a lambda of a script; ended by a callback, resumed by the run folder
    alone."""
    assert run(place, "-c", OBJECTS) == "callback [1, 2] 1\n3\n"


def test_learning_from_python(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe in three lines; full-parameter training on the way."""
    monkeypatch.chdir(place)
    recipe = Recipe.load("tiny.toml", "trainer.steps=1", "adapter.kind=full", "name=script")
    outcome = learn(recipe, quiet=True)
    assert outcome.before and outcome.after and outcome.folder.name.startswith("script")
    assert (outcome.step, outcome.before["n"], outcome.after["n"]) == (1, 8, 8)


# ---- recipes/rl_loop.py is the documentation of the loop, so it has to run, and to learn


RL_LOOP = Path(__file__).parents[2] / "recipes" / "rl_loop.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", RL_LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo", "rloo", "reinforce_pp"])
def test_a_random_mixture_of_experts_learns_to_say_even_numbers(recipe: ModuleType, name: str) -> None:
    steps = 4 if name == "gspo" else 12  # a clip of 4e-3 is for models that move in small steps
    run = recipe.train(recipe.even_numbers(), steps=steps, prompts=8, group_size=8, algorithm=algorithm(name))
    rows = asyncio.run(run)
    assert rows[0]["reward"] == pytest.approx(0.5, abs=0.1)
    assert rows[-1]["reward"] > (0.8 if steps == 12 else 0.5)


def test_the_packaged_model_takes_the_same_steps(recipe: ModuleType) -> None:
    if not (recipe.SEED_MOE / "config.json").is_file():
        pytest.skip("seed-moe is not packaged")
    task = recipe.arithmetic(recipe.SEED_MOE)
    rows = asyncio.run(recipe.train(task, steps=2, prompts=4, group_size=4, algorithm=algorithm("grpo")))
    assert all(0 <= row["reward"] <= 1 for row in rows)
