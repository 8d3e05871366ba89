"""What a user can write wrongly, through the command line: exit code 2, one sentence that names the field,
the value and the mend, nothing printed before it and no run folder left behind.

The commands run in this process, as ``main`` would in a new one; a few at the end are processes of their own.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.app import main
from ostinato.model.named import ASSETS

ASSET = ASSETS / "seed-moe"

RECIPE = """
[model]
dtype = "float32"
[adapter]
rank = 4
alpha = 8.0
targets = ["attn", "experts"]
[task]
n_train = 16
[reward]
functions = ["rewards.py:fine"]
timeout_s = 0.5
[rollout]
prompts_per_step = 2
group_size = 4
max_tokens = 4
[trainer]
steps = 2
checkpoint_every = 1
[eval]
n = 2
every = 0
"""

REWARDS = """
import os, time

def fine(completions, **columns):
    return [float(len(c[-1]["content"])) for c in completions]

def short(completions, **columns):
    return [1.0]

def short_for_four(completions, **columns):
    return [1.0] * min(len(completions), 3)

def misspelt(completions, **columns):
    return [flaot(1) for _ in completions]

def text(completions, **columns):
    return ["1.0" for _ in completions]

def hangs(completions, **columns):
    time.sleep(60)

def dies(completions, **columns):
    os._exit(3)
"""

ROW = {"prompt": "1+1?", "answer": "2"}
LONG_ROWS = [{"prompt": f"{number}+1?" * 600, "answer": str(number + 1)} for number in range(40)]
FILES: dict[str, list[Any] | bytes] = {
    "no_prompt.jsonl": [ROW, {"answer": "3"}],
    "long.jsonl": LONG_ROWS,
    "rewards.py": REWARDS.encode(),
}

# What replaces a file of the packaged model; None leaves it out.
MODELS: dict[str, dict[str, bytes | None]] = {
    "truncated": {"model.safetensors": (ASSET / "model.safetensors").read_bytes()[:-1000]},
    "broken_tokenizer": {"tokenizer.json": b'{"version": "1.0'},
    "broken_tokenizer_config": {"tokenizer_config.json": b"{"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe that is fine, and everything that is not."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny.toml").write_text(RECIPE)
    for name, content in FILES.items():
        lines = content if isinstance(content, bytes) else "\n".join(map(json.dumps, content)).encode()
        (folder / name).write_bytes(lines)
    for name, changes in MODELS.items():
        write_model(folder / name, changes)
    return folder


def write_model(folder: Path, changes: Mapping[str, bytes | None]) -> None:
    """The packaged model by links, except for ``changes``."""
    folder.mkdir()
    for name in {path.name for path in ASSET.iterdir()} | changes.keys():
        if name not in changes:
            (folder / name).symlink_to(ASSET / name)
        elif (content := changes[name]) is not None:
            (folder / name).write_bytes(content)


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def ostinato(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def begun(out: str) -> list[str]:
    """What was printed, but for what this machine's figures say of the dtype in the recipe."""
    return [line for line in out.splitlines() if not line.startswith("model.dtype")]


class Told:
    """Runs a command that must fail and gives its sentence."""

    def __init__(self, capsys: pytest.CaptureFixture[str], here: Path) -> None:
        self._capsys, self._runs = capsys, here / "runs"

    def __call__(self, *arguments: str, code: int = 2) -> str:
        before = sorted(self._runs.glob("*"))
        self._capsys.readouterr()
        assert ostinato(*arguments) == code
        printed = self._capsys.readouterr()
        *note, sentence = printed.err.splitlines()
        assert sentence.startswith("ostinato: "), printed.err
        assert not note or "reward" in sentence, "what a reward function was given, and its traceback"
        if code == 2:
            assert not begun(printed.out), "work had begun"
            assert sorted(self._runs.glob("*")) == before, "a run folder was left behind"
        return sentence


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], here: Path) -> Told:
    return Told(capsys, here)


HOLDOUT = "task.params.holdout=0.5"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.stesp=3"], ["trainer.stesp is not a key", "did you mean trainer.steps?"]),
        (["rollout.lr=3"], ["rollout.lr is not a key", "did you mean trainer.lr?"]),
        (["adapter.targets=[\"attn.z\"]"], ["adapter.targets", "attn.z"]),
        (["log.dir=rewards.py"], ["run folder rewards.py/tiny-", "cannot be written", "set log.dir"]),
        (["task.source=no_prompt.jsonl"], ["row 2 of no_prompt.jsonl has no 'prompt'", "prompt_column"]),
        (["task.source=long.jsonl", HOLDOUT], ["prompt ", "tokens", "the context of 1024", "shorten it"]),
        (["rollout.max_tokens=1024"], ["1024 tokens (rollout.max_tokens)", "lower rollout.max_tokens"]),
        (["rollout.max_tokens=1020"], ["answer of 1020 (rollout.max_tokens)", "exceeds the context of 1024"]),
        (["reward.functions=[\"rewards.py:short\"]"], ["reward short returned 1 values for 2; return one"]),
        (["reward.functions=[\"rewards.py:misspelt\"]"], ["reward misspelt uses what does not", "flaot"]),
        (["reward.functions=[\"rewards.py:text\"]"], ["reward text returned str for a completion", "number"]),
        (["reward.functions=[\"rewards.py:dies\"]"], ["reward dies", "exit status 3", "mend it"]),
        (["reward.functions=[\"rewards.py:hangs\"]"], ["reward hangs", "reward.timeout_s=0.5", "raise"]),
        (["model.path=asset:seed-meo"], ["model.path is 'asset:seed-meo'", "did you mean asset:seed-moe?"]),
        (["model.path=truncated"], ["truncated/model.safetensors is truncated", "download it again"]),
        (["model.path=broken_tokenizer"], ["broken_tokenizer/tokenizer.json is truncated", "save it again"]),
        (["model.path=broken_tokenizer_config"], ["tokenizer_config.json is not valid JSON", "save it"]),
    ],
    ids=lambda value: "-".join(value)[:60] if isinstance(value, list) and "=" in value[0] else "",
)  # fmt: skip
def test_train_refuses_what_is_wrong_before_any_work(
    told: Told, overrides: list[str], words: list[str]
) -> None:
    sentence = told("train", "tiny.toml", *overrides)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "quickstrat"], ["recipe 'quickstrat' does not exist", "did you mean quickstart?"]),
        (["resume", "nowhere"], ["run folder nowhere holds no recipe.toml", "name the folder of a"]),
        (["eval", "nowhere"], ["'nowhere' is no run folder, recipe or model", "e.g. quickstart"]),
        (["generate", "asset:seed-moe", "-p", "\udcff"], ["\\udcff", "has half of a surrogate pair"]),
        (["generate", "asset:seed-moe", "-p", "1" * 5000], ["tokens and the context 1024", "shorten"]),
    ],
)  # fmt: skip
def test_a_name_that_means_nothing(told: Told, arguments: list[str], words: list[str]) -> None:
    sentence = told(*arguments)
    for word in words:
        assert word in sentence


def test_a_reward_of_the_wrong_length_that_only_shows_at_work_ends_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was counted, and the run went to its end without a verdict."""
    overrides = ('reward.functions=["rewards.py:short_for_four"]', "eval.at_start=false", "log.dir=counted")
    assert ostinato("train", "tiny.toml", *overrides) == 2
    told = "short_for_four gave no verdict to any of the 8 answers of training at step 1 (wrong_length: 3 "
    assert told in capsys.readouterr().err
    (run,) = (here / "counted").iterdir()
    (row,) = map(json.loads, (run / "failed_rewards.jsonl").read_text().splitlines())
    assert (row["function"], row["count"], row["of"], row["stopped"]) == ("short_for_four", 8, 8, True)


# --- runs and their checkpoints -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run of two steps with a checkpoint of each, on a model of its own."""
    write_model(place / "base", {})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(place)
        assert ostinato("train", "tiny.toml", "model.path=base", "log.dir=trained") == 0
    (run,) = (place / "trained").iterdir()
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be harmed."""
    return shutil.copytree(trained, tmp_path / "run")


def commands(run: Path, out: Path) -> list[list[str]]:
    """Everything that needs the policy of a run."""
    return [
        ["eval", str(run)],
        ["generate", str(run), "-p", "1+1?"],
        ["export", str(run), str(out)],
    ]


def test_a_run_without_a_checkpoint(told: Told, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for command in commands(run, tmp_path / "out"):
        assert f"run {run} has no checkpoint yet; let it train first: ostinato resume {run}" in told(*command)


def test_an_adapter_of_another_base(told: Told, run: Path, here: Path, tmp_path: Path) -> None:
    """The files of the base are replaced by those of a model of the same shape with other weights."""
    from ostinato.model.hf import load_model, save_model

    other = load_model(ASSET)
    other.embed.mul_(1.5)
    write_model(tmp_path / "other", {"model.safetensors": None})
    save_model(other, tmp_path / "weights")
    shutil.move(tmp_path / "weights/model.safetensors", tmp_path / "other")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace('"base"', f'"{tmp_path / "other"}"'))
    for command in (*commands(run, tmp_path / "out"), ["resume", str(run), "trainer.steps=3"]):
        sentence = told(*command)
        assert f"checkpoint {run}/checkpoints/step-00000002 was made with base = " in sentence
        assert "use the recipe and the model that it was made with" in sentence
    assert not (tmp_path / "out").exists()
    assert (run / "recipe.toml").read_text().count("steps = 2") == 1, "a refused resume changes nothing"


def test_an_adapter_of_another_shape(told: Told, run: Path) -> None:
    sentence = told("resume", str(run), "adapter.rank=8", "trainer.steps=3")
    assert "was made with adapter = AdapterSpec(rank=4" in sentence and "rank=8" in sentence


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_truncated_in_the_middle_is_skipped_for_the_one_before(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate(run / "checkpoints/step-00000002/tensors.safetensors")
    damaged = f"checkpoint {run}/checkpoints/step-00000002 is damaged (tensors.safetensors has "
    assert ostinato("eval", str(run)) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"ostinato: {damaged}") and printed.err.count("\n") == 1
    assert "after 1 steps" in printed.out
    before = (run / "metrics.jsonl").read_text().splitlines()
    assert ostinato("resume", str(run)) == 0
    assert damaged in capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] == json.loads(before[1])["loss"], "the second step is the same once more"


def test_only_truncated_checkpoints_are_a_named_error(
    here: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run.glob("checkpoints/*/tensors.safetensors"):
        truncate(file)
    for command in (*commands(run, tmp_path / "out"), ["resume", str(run)]):
        assert ostinato(*command) == 1
        *notes, last = capsys.readouterr().err.splitlines()
        assert last == f"ostinato: none of the 2 checkpoints in {run}/checkpoints is whole; start a new run"
        assert all("is damaged" in note for note in notes)


def test_a_damaged_log_is_named(told: Told, run: Path) -> None:
    (run / "metrics.jsonl").write_text("half a row\n" + (run / "metrics.jsonl").read_text())
    sentence = told("resume", str(run), "trainer.steps=3", code=1)
    assert f"line 1 of {run}/metrics.jsonl is not JSON; delete it to read the rest" in sentence


def test_the_recipe_of_a_run_that_was_spoilt(told: Told, run: Path) -> None:
    (run / "recipe.toml").write_text("steps = \n")
    assert f"recipe {run}/recipe.toml is not valid TOML" in told("resume", str(run))


def test_export_overwrites_nothing(told: Told, run: Path, here: Path) -> None:
    assert "rewards.py exists and is not empty; name another folder" in told("export", str(run), "rewards.py")
    assert str(run) in told("export", str(run), str(run))


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("merged", [[], ["--merged"]])
def test_a_full_disk_while_exporting(told: Told, run: Path, tmp_path: Path, merged: list[str]) -> None:
    with disk_full_after(10_000):
        sentence = told("export", str(run), str(tmp_path / "out"), *merged, code=1)
    assert f"{tmp_path}/out/" in sentence and "could not be written" in sentence
    assert "File too large" in sentence and "free disk space" in sentence
    assert list((tmp_path / "out").iterdir()) == [], "no half file"
    assert ostinato("export", str(run), str(tmp_path / "out"), *merged) == 0


# --- as a user meets it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["train", "tiny.toml", "trainer.stesp=3"], 2, "did you mean trainer.steps?"),
        (["train", "tiny.toml", 'reward.functions=["rewards.py:short"]'], 2, "returned 1 values for 2"),
    ],
)
def test_a_process_of_its_own_says_the_same(
    place: Path, arguments: list[str], code: int, sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ostinato", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, begun(done.stdout)) == (code, [])
    *note, last = done.stderr.splitlines()
    assert last.startswith("ostinato: ") and sentence in last
    assert len(note) == ("reward" in last), "what the reward function was given"
