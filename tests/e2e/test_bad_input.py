"""What a user can write wrongly, through the command line: exit code 2, one sentence that names the field,
the value and the fix, nothing printed before it and no run folder left behind.

The commands run in this process, as ``main`` would in a new one; the last test has a process of its own.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import ended, tiny_recipe

from ostinato.model.named import ASSETS

ASSET = ASSETS / "seed-moe"
Refusal = Callable[..., str]

RECIPE = {
    **{"task.n_train": 16, "reward.functions": ["rewards.py:fine"], "reward.timeout_s": 0.5},
    **{"rollout.prompts_per_step": 2, "rollout.max_tokens": 4, "trainer.steps": 2},
    "trainer.checkpoint_every": 1,
}

REWARDS = """
import time

def fine(completions, **columns):
    return [float(len(c[-1]["content"])) for c in completions]

def short(completions, **columns):
    return [1.0]

def misspelt(completions, **columns):
    return [flaot(1) for _ in completions]

def hangs(completions, **columns):
    time.sleep(60)
"""
LONG_ROWS = [{"prompt": f"{number}+1?" * 600, "answer": str(number + 1)} for number in range(40)]


def write_model(folder: Path, **changes: bytes | None) -> None:
    """The packaged model by links, but for the files that ``changes`` replaces or leaves out."""
    folder.mkdir()
    for path in ASSET.iterdir():
        content = changes.get(path.stem)
        if path.stem not in changes:
            (folder / path.name).symlink_to(path)
        elif content is not None:
            (folder / path.name).write_bytes(content)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe that is fine, and everything that is not."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny.toml").write_text(tiny_recipe(RECIPE))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "long.jsonl").write_text("\n".join(map(json.dumps, LONG_ROWS)))
    write_model(folder / "truncated", model=(ASSET / "model.safetensors").read_bytes()[:-1000])
    write_model(folder / "broken_tokenizer", tokenizer=b'{"version": "1.0')
    config = json.loads((ASSET / "config.json").read_text())
    write_model(folder / "text_eos", config=json.dumps({**config, "eos_token_id": "2"}).encode())
    (folder / "no_state").mkdir()
    (folder / "no_state" / "registry.sqlite").write_bytes(b"no database at all" * 100)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def begun(out: str) -> list[str]:
    """What was printed, but for what this machine's figures say of the dtype, and what takes a while here."""
    usual = ("model.dtype", "compiling", "loading")
    return [line for line in out.splitlines() if not line.startswith(usual)]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], here: Path) -> Refusal:
    """Runs a command that must fail and gives its sentence."""

    def run(*arguments: str, code: int = 2) -> str:
        before = sorted((here / "runs").glob("*"))
        capsys.readouterr()
        assert ended(Path(), *arguments) == code
        printed = capsys.readouterr()
        *note, sentence = printed.err.splitlines()
        assert sentence.startswith("ostinato: "), printed.err
        assert not begun("\n".join(note)) or "reward" in sentence, (
            "what a reward function was given, and its traceback"
        )
        if code == 2:
            assert not begun(printed.out), "work had begun"
            assert sorted((here / "runs").glob("*")) == before, "a run folder was left behind"
        return sentence

    return run


TRAIN = ["train", "tiny.toml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TRAIN, "trainer.stesp=3"], ["trainer.stesp is not a key", "did you mean trainer.steps?"]),
        ([*TRAIN, "task.source=long.jsonl", "task.params.holdout=0.5"], ["the context of 1024", "shorten"]),
        ([*TRAIN, "rollout.max_tokens=1020"], ["answer of 1020 (rollout.max_tokens)", "exceeds the context"]),
        ([*TRAIN, "reward.functions=[\"rewards.py:short\"]"], ["reward short returned 1 values for 2; re"]),
        ([*TRAIN, "reward.functions=[\"rewards.py:misspelt\"]"], ["misspelt uses what does not", "flaot"]),
        ([*TRAIN, "reward.functions=[\"rewards.py:hangs\"]"], ["reward hangs", "reward.timeout_s=0.5"]),
        ([*TRAIN, "model.path=asset:seed-meo"], ["'asset:seed-meo'", "did you mean asset:seed-moe?"]),
        ([*TRAIN, "model.path=truncated"], ["model.safetensors is truncated", "download it again"]),
        ([*TRAIN, "model.path=broken_tokenizer"], ["tokenizer.json is truncated", "save it again"]),
        ([*TRAIN, "model.path=text_eos"], ["text_eos/config.json is '2'"]),
        (["tinker", "asset:seed-moe", "--port", "0", "--state", "no_state"], ["registry.sqlite cannot be"]),
        (["resume", "nowhere"], ["run folder nowhere holds no recipe.toml", "name the folder of a"]),
        (["eval", "nowhere"], ["'nowhere' is no run folder, recipe or model", "e.g. quickstart"]),
        (["generate", "asset:seed-moe", "-p", "1" * 5000], ["tokens and the context 1024", "shorten"]),
    ],
    ids=lambda value: "-".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_refused_at_once(refusal: Refusal, arguments: list[str], words: list[str]) -> None:
    sentence = refusal(*arguments)
    for word in words:
        assert word in sentence


# --- runs and their checkpoints -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run of two steps with a checkpoint of each, on a model of its own."""
    write_model(place / "base")
    assert ended(place, "train", "tiny.toml", "model.path=base", "log.dir=trained") == 0
    (run,) = (place / "trained").iterdir()
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be harmed."""
    return shutil.copytree(trained, tmp_path / "run")


def commands(run: Path, out: Path) -> list[list[str]]:
    """Everything that needs the policy of a run."""
    return [["eval", str(run)], ["generate", str(run), "-p", "1+1?"], ["export", str(run), str(out)]]


def test_a_run_without_a_checkpoint(refusal: Refusal, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for words in commands(run, tmp_path / "out"):
        assert f"run {run} has no checkpoint yet; let it train first: ostinato resume {run}" in refusal(
            *words
        )


def test_an_adapter_of_another_base(refusal: Refusal, run: Path, here: Path, tmp_path: Path) -> None:
    """The files of the base are replaced by those of a model of the same shape with other weights."""
    from ostinato.model.hf import load_model, save_model

    other = load_model(ASSET)
    other.embed.mul_(1.5)
    write_model(tmp_path / "other", model=None)
    save_model(other, tmp_path / "weights")
    shutil.move(tmp_path / "weights/model.safetensors", tmp_path / "other")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace(f'"{here / "base"}"', f'"{tmp_path / "other"}"'))
    for words in (*commands(run, tmp_path / "out"), ["resume", str(run), "trainer.steps=3"]):
        sentence = refusal(*words)
        assert f"checkpoint {run}/checkpoints/step-00000002 was made with base = " in sentence
        assert "use the recipe and the model that it was made with" in sentence
    assert not (tmp_path / "out").exists()
    assert (run / "recipe.toml").read_text().count("steps = 2") == 1, "a refused resume changes nothing"


def test_a_run_that_has_done_more_steps_than_it_is_to_have(refusal: Refusal, run: Path) -> None:
    """``resume RUN trainer.steps=2`` of a run of three ended in "interrupted after step 3", as by Ctrl-C."""
    assert "trainer.steps is 1" in (sentence := refusal("resume", str(run), "trainer.steps=1"))
    assert "has done 2 steps" in sentence
    assert (run / "recipe.toml").read_text().count("steps = 2") == 1, "a refused resume changes nothing"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_truncated_in_the_middle_is_skipped_for_the_one_before(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate(run / "checkpoints/step-00000002/tensors.safetensors")
    damaged = f"checkpoint {run}/checkpoints/step-00000002 is damaged (tensors.safetensors has "
    assert ended(Path(), "eval", str(run)) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(damaged) and not printed.err
    assert "after 1 steps" in printed.out
    before = (run / "metrics.jsonl").read_text().splitlines()
    assert ended(Path(), "resume", str(run)) == 0
    assert damaged in capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] == json.loads(before[1])["loss"], "the second step is the same once more"


def test_only_truncated_checkpoints_are_a_named_error(
    here: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run.glob("checkpoints/*/tensors.safetensors"):
        truncate(file)
    for words in (*commands(run, tmp_path / "out"), ["resume", str(run)]):
        assert ended(Path(), *words) == 1
        *notes, last = capsys.readouterr().err.splitlines()
        assert last == f"ostinato: none of the 2 checkpoints in {run}/checkpoints is whole; start a new run"
        assert all("is damaged" in note for note in notes)


def test_a_damaged_log_is_named(refusal: Refusal, run: Path) -> None:
    (run / "metrics.jsonl").write_text("half a row\n" + (run / "metrics.jsonl").read_text())
    sentence = refusal("resume", str(run), "trainer.steps=3", code=1)
    assert f"line 1 of {run}/metrics.jsonl is not JSON; delete it to read the rest" in sentence


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_while_exporting(refusal: Refusal, run: Path, tmp_path: Path) -> None:
    for merged in ([], ["--merged"]):
        out = tmp_path / f"out{len(merged)}"
        with disk_full_after(10_000):
            sentence = refusal("export", str(run), str(out), *merged, code=1)
        assert f"{out}/" in sentence and "could not be written" in sentence
        assert "File too large" in sentence and "free disk space" in sentence
        assert list(out.iterdir()) == [], "no half file"
        assert ended(Path(), "export", str(run), str(out), *merged) == 0
