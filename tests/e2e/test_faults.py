"""Faults injected into real runs of the packaged model: each ends in recovery or in a named error, bounded in
time, with nothing lost, nothing scored 0, and a resumed run that equals an undisturbed one bit for bit.

A run that is to be hurt is a process of its own. ``LAUNCHER`` starts the command line in it and listens to
Python's audit events: at the moment that a test names (the n-th opening of a file, a rename) it kills the
process or fills its disk, so every fault strikes at the same place every time. docs/faults.md is the table.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import LAUNCHER, LIMIT_S, ended, environment, gone, only_run, rows, tiny_recipe, wait_until

from lab.same_run import same
from ostinato.lock import LOCK
from ostinato.model.native import BuildError, load_kernels
from ostinato.run import JsonlZst

pytestmark = pytest.mark.slow

SAVED = re.compile(r"what was saved is in (\S+), to go on: ostinato resume \1")

# The n-th group that is graded, counted over all processes of a run, meets the fault that faults.json names.
REWARD = """
import ctypes, json, os, signal, time
from pathlib import Path

def graded(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    # before work starts it is called on two texts, and on the rows' own answers
    dry = len(texts) == 2 or texts == [str(columns["answer"][0])]
    fault = None if dry else next_fault()
    scores = [text.count("1") / (1 + len(text)) for text in texts]
    return scores if fault is None else globals()[fault](scores)

def next_fault():
    with open("workers", "a") as file:
        file.write(f"{os.getpid()} ")
    plan = Path("faults.json")
    number = len(Path("workers").read_text().split())
    return json.loads(plan.read_text()).get(str(number)) if plan.exists() else None

def sleeps(scores):
    time.sleep(60)

def hangs_in_c(scores):
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock: no thread of Python runs meanwhile

def raises(scores):
    raise KeyError("a column that is not there")

def nan(scores):
    return [float("nan"), *scores[1:]]

def dies(scores):
    os.kill(os.getpid(), signal.SIGKILL)
"""

RECIPE = {
    **{"task.n_train": 32, "reward.functions": ["reward.py:graded"], "reward.timeout_s": 30},
    "reward.isolation": "off",  # it counts its calls in a file
    **{"rollout.prompts_per_step": 3, "rollout.max_tokens": 8, "rollout.top_p": 0.95},
    **{"trainer.steps": 5, "trainer.lr": 1e-3, "trainer.checkpoint_every": 2},
}
RAISES = next(n for n, line in enumerate(REWARD.splitlines(), 1) if "raise KeyError" in line)
GROUPS_PER_STEP, GROUP_SIZE, STEPS = 3, 4, 5
EVAL_GROUPS = 2 + 2  # sampled answers, and greedy ones


class Place:
    """A working directory with one recipe, its reward and at most one run."""

    def __init__(self, path: Path, faults: dict[int, str] | None = None) -> None:
        self.path = path
        (path / "reward.py").write_text(REWARD)
        (path / "tiny.toml").write_text(tiny_recipe(RECIPE))
        if faults is not None:
            (path / "faults.json").write_text(json.dumps(faults))

    @property
    def run(self) -> Path:
        return only_run(self.path)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.run / name)

    @contextmanager
    def training(self, *overrides: str, fault: tuple[str, str, int, str] | None = None) -> Iterator[Any]:
        """``ostinato train`` as a process of its own, which does not outlive the block."""
        arguments = [sys.executable, "-c", LAUNCHER, json.dumps(fault or ("", "", 0, ""))]
        process = subprocess.Popen(
            [*arguments, "train", "tiny.toml", *overrides],
            cwd=self.path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def train(self, *overrides: str, fault: tuple[str, str, int, str] | None = None) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a run that meets ``fault``."""
        with self.training(*overrides, fault=fault) as process:
            out, error = process.communicate(timeout=LIMIT_S)
            return process.returncode, out, error

    def command(self, *arguments: str) -> int:
        return ended(self.path, *arguments)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("undisturbed"))
    assert place.command("train", "tiny.toml") == 0
    return place


def assert_as_if_nothing_had_happened(place: Place, undisturbed: Place) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert same(place.rows(name)) == same(undisturbed.rows(name)), name
    for name in ("adapter/adapter_model.safetensors", f"checkpoints/step-{STEPS:08d}/tensors.safetensors"):
        assert (place.run / name).read_bytes() == (undisturbed.run / name).read_bytes(), name
    samples = [list(JsonlZst(p.run / "trajectories.jsonl.zst").rows()) for p in (place, undisturbed)]
    assert samples[0] == samples[1]
    assert not list(place.run.glob("checkpoints/.*")), "a resumed run clears what a dead one left"


def skip_without_native_kernels() -> None:
    """A step that is resumed half way plays its missing groups in a smaller batch. Our kernels give a row the
    same bits in any batch; torch's do so up to rounding (see pipeline/spool.py)."""
    try:
        load_kernels()
    except BuildError as error:
        pytest.skip(f"bitwise only with the native kernels: {error}")


# --- restarts ---------------------------------------------------------------------------------------------


def test_a_trainer_that_is_killed_twice_ends_with_the_same_bits_by_itself(
    place: Place, undisturbed: Place
) -> None:
    skip_without_native_kernels()

    def session(step: int) -> int | None:
        """The process of the session, once ``step`` has its row and the run its lock."""
        with suppress(ValueError, OSError, KeyError):
            holder = int(json.loads((place.run / LOCK).read_bytes())["pid"])
            done = [row["step"] for row in rows(place.run / "metrics.jsonl")]
            return holder if step in done and not gone(holder) else None
        return None

    with place.training("--restarts", "2") as process:
        for step in (1, 3):
            os.kill(wait_until(lambda step=step: session(step), LIMIT_S), signal.SIGKILL)
            assert wait_until(lambda step=step: session(step) is None, 5)
        _, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, error
    assert [(row["restart"], row["cause"]) for row in rows(place.run / "restarts.jsonl")] == [
        (1, "killed by signal 9"),
        (2, "killed by signal 9"),
    ]
    assert_as_if_nothing_had_happened(place, undisturbed)


# --- rewards ----------------------------------------------------------------------------------------------


def test_each_reward_fault_is_told_counted_and_survived(tmp_path: Path) -> None:
    """One run, one fault per step: hang, hang in C, exception, NaN, killed twice in a row, killed once."""
    first = {step: GROUPS_PER_STEP * (step - 1) + 1 for step in range(1, 8)}
    plan = {first[2]: "sleeps", first[3]: "hangs_in_c", first[4]: "raises", first[5]: "nan"}
    plan |= {
        first[6]: "dies",
        first[6] + 1: "dies",
        first[7] + 1: "dies",
    }  # + 1: the repeated call counts too
    place = Place(tmp_path, plan)
    code, out, error = place.train(
        "trainer.steps=7", "reward.timeout_s=0.5", "eval.at_start=false", "rollout.prompts_per_step=3"
    )
    assert (code, "Traceback" in error) == (0, False), error
    rows = place.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [faults(row) for row in rows] == [
        {},
        {"faults/timeout": 4, "rewards/graded/timeout": 4, "reward_workers/hung": 1},
        {"faults/timeout": 4, "rewards/graded/timeout": 4, "reward_workers/hung": 1},
        {"faults/raised": 4, "rewards/graded/raised": 4},
        {"faults/non_finite": 1, "rewards/graded/non_finite": 1},
        {"faults/died": 4, "rewards/graded/died": 4, "reward_workers/died": 2, "reward_workers/retried": 1},
        {"reward_workers/died": 1, "reward_workers/retried": 1},
    ]
    assert [row["rollout/no_verdict"] for row in rows] == [0, 4, 4, 4, 1, 4, 0]
    assert [row.get("groups/dropped/too_few_verdicts", 0) for row in rows] == [0, 1, 1, 1, 0, 1, 0]
    for row in rows:
        assert row["tokens/trained"] + row["tokens/wasted"] == row["tokens/sampled"], (
            "each token is somewhere"
        )
    reported = [line.partition(" (reported once")[0] for line in out.splitlines() if "(reported once" in line]
    assert reported == [
        "step 2: timeout: graded: no verdict in 0.5 s",
        f"step 4: raised: graded: KeyError: 'a column that is not there' (reward.py:{RAISES})",
        "step 5: non_finite: graded: nan",
        "step 6: died: graded: killed by signal 9",
    ]
    last = out[out.rindex("warning      Reward graded") :]
    assert "gave no verdict to 17 answers, the last time at step 6: died: killed by signal 9" in last
    assert "Traceback (most recent call last):" in last and "step 4, prompt " in last, "of the last exception"
    assert_no_fault_was_scored(place)


def faults(row: dict[str, Any]) -> dict[str, int]:
    named = ("timeout", "raised", "non_finite", "died", "hung", "retried", "skipped")
    return {key: value for key, value in row.items() if key.endswith(named)}


def assert_no_fault_was_scored(place: Place) -> None:
    """Every sample has the score of its text, or none and the reason why."""
    rows = list(JsonlZst(place.run / "trajectories.jsonl.zst").rows())
    assert len(rows) == 7 * GROUPS_PER_STEP * GROUP_SIZE
    for row in rows:
        text = row["turns"][-1]["text"]
        expected = None if row["reason"] else text.count("1") / (1 + len(text))
        assert row["reward"] == pytest.approx(expected)
    assert sum(row["reward"] is None for row in rows) == 17


def test_a_policy_that_has_diverged_is_named_and_scores_nothing(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table at the end once subtracted the score before from one that could not be measured."""
    overrides = ("trainer.steps=3", "trainer.lr=1e30", "trainer.max_grad_norm=inf")
    code = place.command("train", "tiny.toml", *overrides)
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert (
        "step 2: engine: the logits are not finite (reported once; faults/engine counts them)" in printed.out
    )
    assert [row.get("faults/engine", 0) for row in place.rows("metrics.jsonl")] == [0, 12, 12]
    evals = [row for row in place.rows("eval.jsonl") if row["set"] == "eval"]
    assert [(row["pass@1"], row["excluded"]) for row in evals] == [(0.0, 0), (None, 2)]


# --- the trainer is killed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "last_row", "last_checkpoint"),
    [
        pytest.param(("open", "/inflight.jsonl.zst$", 9, "kill"), 2, 2, id="while rolling out"),
        pytest.param(
            ("open", "/metrics.jsonl$", 3, "kill"),
            2,
            2,
            id="after training, before the report",
            marks=pytest.mark.lab,
        ),
        pytest.param(("open", ".step-00000004.", 3, "kill"), 4, 2, id="inside a checkpoint"),
        pytest.param(
            ("os.rename", "/step-00000004$", 1, "kill"),
            4,
            2,
            id="before it gets its name",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_kill_9_then_resume_is_as_if_nothing_had_happened(
    place: Place, undisturbed: Place, fault: tuple[str, str, int, str], last_row: int, last_checkpoint: int
) -> None:
    code, _, _ = place.train(fault=fault)
    assert code == -signal.SIGKILL
    assert place.rows("metrics.jsonl")[-1]["step"] == last_row
    assert max(path.name for path in place.run.glob("checkpoints/step-*")) == f"step-{last_checkpoint:08d}"
    workers = {int(pid) for pid in (place.path / "workers").read_text().split()}
    assert wait_until(lambda: all(gone(pid) for pid in workers), 10), "a reward worker outlived its trainer"
    assert place.command("resume", str(place.run)) == 0
    if "inflight" in fault[1]:
        skip_without_native_kernels()
    assert_as_if_nothing_had_happened(place, undisturbed)
    if "inflight" in fault[1]:
        read_back = [row["rollout/from_spool"] for row in place.rows("metrics.jsonl")]
        assert read_back == [0, 0, 1, 0, 0], "the group that was graded before the kill is not played again"


# --- the disk is full -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "named", "last_row", "last_checkpoint"),
    [
        pytest.param(
            ("tempfile.mkdtemp", ".step-00000004.", 1, "fill"),
            r"checkpoint \S+/step-00000004 could not be written \(.*File too large.*\); free disk space: "
            r"the last good one is \S+/step-00000002",
            4,
            2,
            id="checkpoint",
        ),
        pytest.param(
            ("open", "/metrics.jsonl$", 3, "fill"),
            r"File too large: '\S+/metrics\.jsonl'",
            2,
            2,
            id="metrics",
        ),
        pytest.param(
            ("open", "/inflight.jsonl.zst$", 9, "fill"),
            r"File too large: '\S+/inflight\.jsonl\.zst'",
            2,
            2,
            id="rollouts in flight",
            marks=pytest.mark.lab,
        ),
        pytest.param(
            ("tempfile.mkstemp", "adapter/.ostinato_adapter", 1, "fill"),
            r"adapter/ostinato_adapter\.safetensors could not be written \(.*File too large.*\)",
            5,
            5,
            id="adapter",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_a_full_disk_is_named_and_the_last_checkpoint_goes_on(
    place: Place,
    undisturbed: Place,
    fault: tuple[str, str, int, str],
    named: str,
    last_row: int,
    last_checkpoint: int,
) -> None:
    code, _, error = place.train(fault=fault)
    assert code == 1
    assert error.startswith("ostinato: ") and error.count("\n") == 1
    assert re.search(named, error) and SAVED.search(error)
    assert place.rows("metrics.jsonl")[-1]["step"] == last_row, "whole rows only"
    assert max(path.name for path in place.run.glob("checkpoints/step-*")) == f"step-{last_checkpoint:08d}"
    assert place.command("resume", str(place.run)) == 0
    if "inflight" in fault[1]:
        skip_without_native_kernels()
    assert_as_if_nothing_had_happened(place, undisturbed)


# --- a person or a scheduler stops it ---------------------------------------------------------------


def test_ctrl_c_finishes_the_step_and_saves(place: Place, undisturbed: Place) -> None:
    """SIGTERM does so in the run that follows."""
    with place.training() as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGINT)
                break
        out = process.stdout.read()
        assert process.wait(LIMIT_S) == 130
    done = place.rows("metrics.jsonl")[-1]["step"]
    assert f"interrupted after step {done}; to go on: ostinato resume {place.run}" in out
    assert (place.run / f"checkpoints/step-{done:08d}").is_dir() and done < STEPS
    assert place.command("resume", str(place.run)) == 0
    assert_as_if_nothing_had_happened(place, undisturbed)


def test_a_second_run_in_a_folder_is_refused(
    place: Place, undisturbed: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs in one folder removed each other's checkpoints. The run waits before the row of step 3 until
    the second was refused, is stopped, and resumed."""
    with place.training(fault=("open", "/metrics.jsonl$", 3, "wait")) as process:
        assert wait_until((place.path / "waits").exists, LIMIT_S)
        capsys.readouterr()
        assert place.command("resume", str(place.run)) == 2
        reported = capsys.readouterr().err
        assert re.match(
            rf"ostinato: run folder \S+ is in use by process {process.pid} on .*; wait until", reported
        )
        process.send_signal(signal.SIGTERM)
        (place.path / "go").touch()
        process.stdout.read()
        assert process.wait(LIMIT_S) == 143
    assert [row["step"] for row in place.rows("metrics.jsonl")] == [1, 2, 3]
    assert place.rows("ledger.jsonl")[-1]["why"] == "terminated"
    assert place.command("resume", str(place.run)) == 0
    assert_as_if_nothing_had_happened(place, undisturbed)


def test_ctrl_c_twice_ends_a_hanging_run_at_once(tmp_path: Path, undisturbed: Place) -> None:
    """The reward hangs in the second step, for longer than the test would wait: the first Ctrl-C lets
    that step end, the second ends it. Groups that were graded come from the spool afterwards."""
    hanging = EVAL_GROUPS + GROUPS_PER_STEP + 2
    place = Place(tmp_path, {hanging: "hangs_in_c"})
    with place.training() as process:
        graded = place.path / "workers"
        assert wait_until(lambda: graded.exists() and len(graded.read_text().split()) == hanging, LIMIT_S)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        _, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert time.monotonic() - stopped < 25, "less than the reward's limit of 30 s"
    assert error.startswith("ostinato: stopped at once; ") and error.count("\n") == 1 and SAVED.search(error)
    assert [row["step"] for row in place.rows("metrics.jsonl")] == [1]
    assert place.command("resume", str(place.run)) == 0
    skip_without_native_kernels()
    assert_as_if_nothing_had_happened(place, undisturbed)
    assert [row["rollout/from_spool"] for row in place.rows("metrics.jsonl")] == [3, 1, 0, 0, 0]
