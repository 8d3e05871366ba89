"""``ostinato bench abilities``: the forgetting watch on short runs of quickstart that train sums alone.

quiet      runs that lose nothing: how many raise an alarm
planted    all parameters at learning rates that are too high, scored after every step until the alarm
compare    LoRA and full, KL and routing replay on and off: what is kept, what is gained
cost       quickstart as it is, for the share of its FLOPs and seconds
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lab.harness import Bench, Result, Say, markdown, option, seeds
from ostinato.launch.session import learn
from ostinato.run import RunFolder


class Part(StrEnum):
    QUIET = "quiet"
    PLANTED = "planted"
    COMPARE = "compare"
    COST = "cost"


SUMS = ('task.params={families=["sum"]}', "rollout.prompts_per_step=8", "rollout.group_size=8")
SMALL = (
    *SUMS,
    "model.dtype=float32",
    "trainer.steps=24",
    "trainer.warmup_steps=0",
    "forgetting.share=0.4",  # looks as often as 2 % of a run of quickstart's size
    "eval.temperature=0.0",
)
BRIEF = ("trainer.steps=12", "rollout.prompts_per_step=4", "forgetting.share=1.0", "eval.n=1")
OTHERS = (
    'eval.downstream.others={{source="arithmetic",params={{families=["difference","product","remainder",'
    '"chain"]}},n=128,every={every}}}'
)
FULL = ("adapter.kind=full",)
ARMS: Mapping[Part, Mapping[str, Sequence[str]]] = {
    Part.QUIET: {"LoRA": (*SMALL, *BRIEF, "eval.at_start=false")},
    Part.PLANTED: {
        f"full, lr {lr}": (*SMALL, *FULL, f"trainer.lr={lr}", "trainer.stop_on_forgetting=true")
        for lr in ("1e-3", "1.5e-3", "2e-3", "3e-3")
    },
    Part.COMPARE: {
        "LoRA": SMALL,
        "LoRA, KL": (*SMALL, "algo.kl_coef=0.05"),
        "LoRA, no replay": (*SMALL, "trainer.replay=false"),
        "LoRA, lr 1e-2": (*SMALL, "trainer.lr=1e-2"),
        "LoRA, lr 1e-2, KL": (*SMALL, "trainer.lr=1e-2", "algo.kl_coef=0.05"),
        "full, lr 1e-4": (*SMALL, *FULL, "trainer.lr=1e-4"),
        "full, lr 1e-3": (*SMALL, *FULL, "trainer.lr=1e-3"),
        "full, lr 1e-3, no replay": (*SMALL, *FULL, "trainer.lr=1e-3", "trainer.replay=false"),
    },
    Part.COST: {"quickstart": ("eval.at_start=false", "eval.n=1")},
}
EVERY = {Part.PLANTED: 1, Part.COMPARE: 0}  # steps between scores of what is not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities(Bench):
    """The forgetting watch: false alarms, planted forgetters, what arms keep, what it costs."""

    part: Part = option(Part.COMPARE, "quiet, planted, compare or cost.")
    seeds: tuple[int, ...] = option((1, 2), "How many, or FIRST:END.", parse=seeds)
    only: str = option("", "Arms that have this in their name.")
    kept: str = option("", "A file of lines; runs that are in it are not done again.")

    def measure(self, say: Say) -> dict[str, Any]:
        file = Path(self.kept) if self.kept else None
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
        there = {(row["arm"], row["seed"]) for row in rows}
        for seed in self.seeds:
            for arm, keys in ARMS[self.part].items():
                if self.only in arm and (arm, seed) not in there:
                    rows.append({"part": self.part, "arm": arm, "seed": seed, **self._run(keys, seed)})
                    say(_line(rows[-1]))
                    if file:
                        with file.open("a") as out:
                            out.write(f"{json.dumps(rows[-1])}\n")
        return {"runs": rows}

    def _run(self, keys: Sequence[str], seed: int) -> dict[str, Any]:
        more = [OTHERS.format(every=EVERY[self.part])] if self.part in EVERY else []
        common = ("engine.threads=1", "eval.every=0", "trainer.checkpoint_every=0", "log.mismatch_every=0")
        with tempfile.TemporaryDirectory() as made:
            keys = (*common, *keys, *more, f"seed={seed}", f"log.dir={made}", "log.trajectories_every=0")
            done = learn("quickstart", *keys, quiet=True)
            return {"why": str(done.why), "steps": done.step, **figures(RunFolder.open(done.folder))}

    @staticmethod
    def table(result: Result) -> str:
        lines = ([row["arm"], row["seed"], *_cells(row)] for row in result["runs"])
        return markdown(
            ["arm", "seed", "alarm", "kept", "KL", "trained", "others", "FLOPs", "seconds"], lines
        )


def figures(run: RunFolder) -> dict[str, Any]:
    """Of the watch: looks, alarm, what it cost beside the steps; and scores."""
    begin, *looks = [*run.forgetting.rows()] or [{"flops": 0, "seconds": 0}]
    steps = [row for row in run.ledger.rows() if row["event"] == "step"]
    names = ("kept", "kept_low", "kept_high", "kl_k3", "logprob", "evidence")
    return {
        "questions": begin.get("questions"),
        "right": begin.get("right"),
        "rows": len(begin.get("rows", ())),
        "looks": [
            {"step": one["step"], **{name: one.get(f"forgetting/{name}") for name in names}}
            | {"gains": [gain if gain is None else round(gain, 3) for gain in one["gains"]]}
            for one in looks
        ],
        "alarm": next((row["step"] for row in run.watch.rows() if row["rule"] == "forgetting"), None),
        "flops": sum(row["flops"] for row in (begin, *looks)),
        "seconds": sum(row["seconds"] for row in (begin, *looks)),
        "run_flops": sum(sum(row["flops"].values()) for row in steps),
        "run_seconds": sum(row["seconds"] for row in steps),
        "scores": [[row["set"], row["step"], row["pass@1"], row["n"]] for row in run.eval.rows()],
    }


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    scores = {
        name: [score for one, _, score, _ in row["scores"] if one == name] for name in ("eval", "others")
    }
    looks = row["looks"]
    yield str(row["alarm"] or "-")
    yield f"{looks[-1]['kept']:.3f}" if looks else "-"
    kl = [one["kl_k3"] for one in looks if one["kl_k3"] is not None]
    yield f"{kl[-1]:.2g}" if kl else "-"
    for some in scores.values():
        yield f"{some[0]:.3f} -> {some[-1]:.3f}" if some else "-"
    yield f"{row['flops'] / row['run_flops']:.2%}"
    yield f"{row['seconds'] / row['run_seconds']:.2%}"


def _line(row: Mapping[str, Any]) -> str:
    return " | ".join((row["arm"], f"seed {row['seed']}", *_cells(row)))
