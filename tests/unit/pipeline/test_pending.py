"""Sampling ahead is paid for by the step that does it, and judged by the step that trains on it."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loop import TEN_A_ROW, Bench, IsRight, Killed

from ostinato.observe.ledger import Summary, read, spent, summary
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.rollout.health import sampled_tokens
from ostinato.types import Group, Reward


class Counts(IsRight):
    """A grader that knows what was really sampled, by the step that was to come when it was; it dies at the
    ``dies``-th group."""

    def __init__(self, dies: int = 0) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.sampled, self.left = Counter[int](), dies

    async def grade(self, group: Group) -> list[Reward]:
        assert self.bench is not None
        self.left -= 1
        if self.left == 0:
            raise Killed
        if group.prompt.uid.startswith("p"):  # and not held out
            now = self.bench.loop.state.step + 1
            self.sampled[now] += sum(map(sampled_tokens, group.trajectories))
        return await super().grade(group)


def counted(path: Path, dies: int = 0, **changes: Any) -> tuple[Bench, Counts]:
    grader = Counts(dies)
    bench = Bench(path, grader=grader, flops=TEN_A_ROW, max_empty_steps=99, **changes)
    grader.bench, bench.trainer.lr = bench, 0.5
    return bench, grader


def adds_up(rows: list[dict[str, Any]]) -> Summary:
    """Row by row and in sum."""
    for row in (row for row in rows if row["event"] == "step"):
        tokens, pending = row["tokens"], row.get("pending", {"sampled": 0, "flops": 0})
        assert row["useful"] + sum(row["wasted"].values()) + pending["flops"] == sum(row["flops"].values())
        assert tokens["trained"] + sum(tokens["dropped"].values()) + pending["sampled"] == tokens["sampled"]
    found = summary(rows)
    assert found.useful is not None and found.useful + sum(found.wasted.values()) == sum(found.flops.values())
    assert found.tokens["sampled"] == found.tokens["trained"] + sum(found.dropped.values())
    assert min(0, *found.wasted.values(), *found.dropped.values()) == 0
    return found


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 6))
def test_compute_is_counted_when_the_device_computes_it(staleness: int, steps: int, ends: int) -> None:
    """Sampling was booked by the step that trained on it: with a staleness of 8, a run that its forecast
    ended after step 4 had sampled 768 tokens, of which the ledger had 256, and the time of all of them.
    Evaluations lacked up to 8 rounds of compute, in favour of whoever plays ahead."""
    with tempfile.TemporaryDirectory() as folder:
        bench, grader = counted(Path(folder), staleness=staleness, steps=steps, eval_every=1)
        bench.observer.should_stop = lambda step: step >= ends
        why = bench.run().why
        rows = read(bench.folder)
        found = adds_up(rows)
        of_steps = {row["step"]: row["tokens"]["sampled"] for row in rows if row["event"] == "step"}
        assert of_steps == {step: grader.sampled[step] for step in of_steps}
        by_step, flops, tokens = 0, spent(rows, "flops"), spent(rows, "tokens")
        cached = 7 * 2 * 10 / (8 * 2)  # FLOPs for a token: what 7 of 8 siblings need not read again
        for row in bench.folder.eval.rows():
            by_step += grader.sampled[row["step"]]
            assert row["spent"]["tokens"] == by_step == tokens[row["step"]]
            assert row["spent"]["flops"] == flops[row["step"]] - cached * by_step
        ahead = min(staleness, steps - bench.loop.state.step) * (why is Finish.ENOUGH)
        assert found.dropped.get("unused", 0) == ahead * 4 * 8 * 2  # prompts x answers x tokens
        assert ("unused" in found.wasted) == bool(ahead) and "pending" not in found.wasted


@pytest.mark.parametrize("lose_spool", [False, True])
def test_killed_with_rounds_ahead(tmp_path: Path, lose_spool: bool) -> None:
    """Killed in step 7, with the checkpoint of step 5. What was ahead then comes from the spool and is no
    sampling of the new process; where the spool is gone it is played anew, and what was ahead is unused."""
    sizes = {"steps": 10, "checkpoint_every": 5, "staleness": 2}
    killed, before = counted(tmp_path / "killed", dies=8 + 4 * 8 + 3, **sizes)  # held out, steps 1 to 6
    with pytest.raises(Killed):
        killed.run()
    saved, logits = killed.saved[-1]
    if lose_spool:
        (killed.folder.path / "inflight.jsonl.zst").unlink()
    again, after = counted(tmp_path / "killed", state=LoopState(**saved), logits=logits, **sizes)
    again.run()
    whole, _ = counted(tmp_path / "whole", **sizes)
    whole.run()
    found, straight = adds_up(read(again.folder)), adds_up(read(whole.folder))
    assert (found.repeated, found.dropped.get("unused", 0)) == (1, 2 * 64 * lose_spool)
    in_vain = before.sampled[7] * lose_spool  # of the step that was killed: finished groups that no row has
    assert found.tokens["sampled"] == (before.sampled + after.sampled).total() - in_vain
    if not lose_spool:
        assert found.tokens == straight.tokens and found.useful == straight.useful
        assert sum(found.flops.values()) == sum(straight.flops.values()) + found.wasted["repeated"]
        assert again.rows[-1]["total/sampled_tokens"] == whole.rows[-1]["total/sampled_tokens"]
