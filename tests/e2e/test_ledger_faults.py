"""kill -9 at any moment, torn lines, other devices: the ledger has what was really done, once.

The run under test is this file as a script: the bandit of the loop's own tests, in a process of its own, that
notes outside of the ledger what it really does (every group that is graded, every step that is trained). The
test kills it at random moments, tears the end of its ledger, and holds the sums against these notes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, environment
from worlds import lab

from ostinato.observe.ledger import Event, Ledger, read, spent, summary
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

STEPS, EVERY, TOKENS = 12, 3, 8 * 2  # sampled in a group


# ---- the run


def run(folder: Path, devices: int) -> None:
    import small_loop
    from small_loop import BanditTrainer, IsRight

    from ostinato.observe.ledger import Terms
    from ostinato.pipeline.loop import LoopState

    notes = os.open(folder.with_suffix(".notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Graded(IsRight):
        async def grade(self, group: Any) -> Any:
            time.sleep(0.002)
            os.write(notes, b"graded\n" if group.prompt.uid.startswith("p") else b"scored\n")
            return await super().grade(group)

    class Trained(BanditTrainer):
        def step(self, batch: Any) -> Any:
            os.write(notes, b"trained\n")
            return super().step(batch)

    saved = folder.with_suffix(".json")
    state, logits = json.loads(saved.read_text()) if saved.exists() else (None, None)
    bench = small_loop.Bench(
        folder,
        state=state and LoopState(**state),
        logits=logits,
        grader=Graded(),
        steps=STEPS,
        checkpoint_every=EVERY,
        eval_every=EVERY,
        flops=small_loop.TEN_A_ROW,
    )
    trainer = Trained()
    trainer.logits = bench.trainer.logits
    bench.loop.trainer = bench.trainer = trainer

    def save(state: Any) -> int:
        part = saved.with_suffix(".part")
        part.write_text(json.dumps([state.to_json(), trainer.logits.tolist()]))
        part.replace(saved)
        return state.step

    bench.loop.save = save
    bench.loop.ledger = Ledger(folder=bench.folder, terms=Terms(devices=devices, price_per_device_hour=3.6))
    os.write(notes, b"begun\n")
    print("begun", flush=True)
    bench.run()


def start(folder: Path, devices: int) -> subprocess.Popen[str]:
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), str(devices)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
    )


# ---- the tests


def torn_at_random(folder: Path, chance: random.Random) -> None:
    """What a kill in the middle of a line leaves: a part of one more row."""
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"event":"step","session":1,"step":'[: chance.randrange(36)])


@pytest.mark.parametrize("seed", [1, *lab(2)])
def test_killed_three_times_the_sums_are_what_was_really_done(tmp_path: Path, seed: int) -> None:
    folder, chance, kills = tmp_path / "run", random.Random(seed), 3
    folder.mkdir()
    for number in range(kills + 1):
        process = start(folder, devices=1 + 3 * number)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        if number < kills:
            time.sleep(chance.uniform(0.01, 0.15))
            process.kill()
            process.wait(timeout=60)
            torn_at_random(folder, chance)
        process.communicate(timeout=120)
    assert process.returncode == 0

    rows = read(RunFolder(folder))
    events = Counter(row["event"] for row in rows)
    found, really = summary(rows), Counter(folder.with_suffix(".notes").read_text().split())
    begun = events[Event.START]  # one that was killed before its first row has none
    assert 1 <= begun <= kills + 1 and events[Event.END] == 1
    assert (found.steps, found.sessions) == (STEPS, begun)
    assert sorted(spent(rows, "steps")) == list(range(STEPS + 1))

    # a group that was graded and not yet spooled, and a step that was trained and has no row yet, are lost
    sampled = found.tokens["sampled"]
    assert really["graded"] * TOKENS - 4 * kills * TOKENS <= sampled <= really["graded"] * TOKENS
    trained = sum(row["tokens"]["trained"] > 0 for row in rows if row["event"] == Event.STEP)
    assert really["trained"] - kills <= trained <= really["trained"]
    assert sampled == found.tokens["trained"] + sum(found.dropped.values())

    last = list(RunFolder(folder).metrics.rows())[-1]  # of the steps that count, each once
    assert last["total/sampled_tokens"] == sampled - found.dropped.get("unused", 0)
    assert last["total/flops"] <= sum(found.flops.values())  # which has steps that were repeated too
    # Unix seconds are doubles in steps of 0.24 us, and a session has up to ten devices: on a machine that is
    # done within 0.3 s that is more than a millionth
    assert found.pools["local"].total == pytest.approx(held(rows), abs=1e-5)
    assert found.money == pytest.approx(held(rows) * 3.6 / 3600, abs=1e-8)


def held(rows: list[dict[str, Any]]) -> float:
    """The slow twin: by session, devices times the seconds from its begin to its last row."""
    total = 0.0
    for first in (row for row in rows if row["event"] == Event.START):
        own = [row for row in rows if row["session"] == first["session"]]
        ends = [row.get("ended_at") or row["at"] for row in own]
        devices = first["pools"]["local"]["devices"]
        total += devices * (max(ends) - first["process_started"])
    return total


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
