"""ScaleRL whole, on the packaged model and the command line, killed and resumed: all parts at once.

Batches that are two policies old, two optimizer steps each, prompts that leave for good, answers that are
interrupted, routes that are replayed: each has a law of its own elsewhere. Here they have to share a spool, a
stream and a checkpoint.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import LAUNCHER, ended, only_run, rows, run

from lab.same_run import same
from ostinato.model.native import BuildError, load_kernels

pytestmark = pytest.mark.lab

STEPS = 6
TINY = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=3",
    "trainer.minibatches=2",
    "trainer.lr=1e-3",
    "pipeline.staleness=2",
    "rollout.prompts_per_step=5",
    "rollout.group_size=4",
    "rollout.solved_for_good=0.5",
    "rollout.interrupt_after=[10, 14]",
    "rollout.answer_tokens=6",
    "task.n_train=24",
    "task.params={digits=2, terms=4}",
    "eval.n=4",
    "eval.k=1",
    "eval.every=0",
    "eval.start_factor=1",
    "forecast.enabled=false",
    "engine.threads=1",
)


def killed(place: Path, file: str, count: int) -> None:
    """kill -9 at the n-th opening of a file whose path has ``file`` in it; "$" is its end."""
    fault = json.dumps(["open", file, count, "kill"])
    run(place, "-c", LAUNCHER, fault, "train", "scalerl", *TINY, code=-signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        load_kernels()
    except BuildError as error:
        pytest.skip(f"bitwise only with the native kernels: {error}")
    place = tmp_path_factory.mktemp("undisturbed")
    assert ended(place, "train", "scalerl", *TINY) == 0
    return place


def test_every_part_acts(undisturbed: Path) -> None:
    """Or the runs below would be equal for want of anything to lose."""
    seen = rows(only_run(undisturbed) / "metrics.jsonl")
    assert len(seen) == STEPS
    assert max(row.get("staleness/max", 0) for row in seen) == 2 * 2 + 1, "two policies, and a minibatch"
    assert max(row.get("optimizer_steps", 0) for row in seen) == 2
    assert any(0 < row["interrupt/rate"] < 1 for row in seen)
    assert seen[-1]["groups/retired_total"] > seen[0]["groups/retired"] > 0
    assert all(row["routing/replay"] == 1 for row in seen if "routing/replay" in row)
    assert any(0 < row["groups/dropped"] < 5 for row in seen)


@pytest.mark.parametrize(
    ("file", "count", "rows_left"),
    [
        pytest.param("/inflight.jsonl.zst$", 28, 3, id="while a round is played ahead"),
        pytest.param("/metrics.jsonl$", 5, 4, id="after training, before the report"),
        pytest.param(".step-00000006.", 2, 6, id="inside a checkpoint"),
    ],
)
def test_killed_and_resumed_it_is_the_run_that_was_not(
    tmp_path: Path, undisturbed: Path, file: str, count: int, rows_left: int
) -> None:
    """Between two checkpoints, and while one is written: rounds that were played ahead, by policies that are
    gone, come from the spool, and the last bit of scores, adapter and optimizer is the same."""
    killed(tmp_path, file, count)
    assert len(rows(only_run(tmp_path) / "metrics.jsonl")) == rows_left
    assert ended(tmp_path, "resume", str(only_run(tmp_path))) == 0
    assert_same(tmp_path, undisturbed)


def assert_same(place: Path, undisturbed: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        ours, theirs = (same(rows(only_run(where) / name)) for where in (place, undisturbed))
        assert ours == theirs, name
    assert sum(row["rollout/from_spool"] for row in rows(only_run(place) / "metrics.jsonl")) > 5
    for name in ("adapter/adapter_model.safetensors", f"checkpoints/step-{STEPS:08d}/tensors.safetensors"):
        ours, theirs = ((only_run(where) / name).read_bytes() for where in (place, undisturbed))
        assert ours == theirs, name
