"""The work of ``ostinato bench pipeline``: long-tailed arithmetic, and what a run of it says of its pipeline.

Seven prompts of eight are of the families that the packaged model knows; the eighth is a chain of up to
``terms`` terms, far beyond what it was taught. Such answers either end soon or run on to the limit, as those
of real models do to problems that are too hard for them: the mean stays near 40 tokens, the longest answer of
a step is seven to twelve times as long.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.contender import ContenderFailed
from ostinato.env.arithmetic import Family, rows
from ostinato.observe.ledger import read
from ostinato.observe.timeline import Kind, Span, Usage, pool_of, usage, usages
from ostinato.run import MAIN_SET, RunFolder
from ostinato.types import Prompt

ONE_LONG_OF = 8  # prompts
HELD_OUT = 0.125  # of the prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every arm trains: a step is ``prompts`` groups of ``siblings``.

    ``slots`` is how many sequences a sampler decodes together: as many as the memory of a small device would
    hold, and as it takes for sampling to last about as long as training on one core each.
    """

    recipe: str = "quickstart"  # model and adapters are its own
    prompts: int = 48
    siblings: int = 8
    max_tokens: int = 320
    slots: int = 16
    terms: int = 24  # of the longest chain
    distinct: int = 2048  # prompts in the file
    lr: float = 1e-4
    scored: int = 256  # held-out prompts, an answer each, after the last step

    def overrides(self, prompts: Path) -> tuple[str, ...]:
        """Of the recipe, for a run that only trains: no drafts, which would be of use in some arms and
        epochs only, and nothing that is measured or kept on the way."""
        return (
            f"task.source={prompts}",
            "task.n_train=0",
            f"task.params.holdout={HELD_OUT}",
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.group_size={self.siblings}",
            f"rollout.max_tokens={self.max_tokens}",
            f"engine.max_batch={self.slots}",
            f"trainer.lr={self.lr}",
            "trainer.warmup_steps=0",
            "trainer.checkpoint_every=0",
            f"eval.n={self.scored}",
            "eval.every=0",
            "eval.at_start=false",
            "draft.enabled=false",
            "forecast.enabled=false",
            "log.mismatch_every=0",
            "log.trajectories_every=0",
        )


# A model whose arithmetic dwarfs that of the loop and of Ray; sampling takes as long as training.
SMOLLM2 = Work(
    recipe=str(Path(__file__).parent / "recipes" / "smollm2_brief.toml"),
    prompts=2,
    max_tokens=320,
    slots=9,
    distinct=512,
    lr=2e-5,
    scored=16,
)


def write_prompts(work: Work, path: Path) -> Path:
    """The prompts as JSON lines, always the same: distinct, their order shuffled by the run itself."""
    long = rows("train", 1, work.distinct // ONE_LONG_OF, families=[Family.CHAIN], terms=work.terms)
    known = {prompt.uid for prompt in long}
    short = [prompt for prompt in rows("train", 0, work.distinct) if prompt.uid not in known]
    chosen = [*long, *short[: work.distinct - len(long)]]
    path.write_text("".join(f"{json.dumps(_row(one))}\n" for one in chosen), encoding="utf-8")
    return path


def _row(prompt: Prompt) -> dict[str, Any]:
    return {"uid": prompt.uid, "prompt": list(prompt.messages or ()), "answer": prompt.columns["answer"]}


# ---- what a run says


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps of a run that are measured: what starts up and what runs dry is not."""

    steps: int  # of the run
    warm_up: int
    drain: int  # at the end nothing is admitted any more

    def __post_init__(self) -> None:
        if self.measured < 1:
            raise ValueError(
                f"steps is {self.steps}, of which {self.warm_up} warm up and {self.drain} drain the "
                "pipeline; use more"
            )

    @property
    def measured(self) -> int:
        return self.steps - self.warm_up - self.drain


def figures(folder: RunFolder, window: Window) -> dict[str, Any]:
    """Of a finished run: seconds, utilisation by worker and staleness within the window, rewards of all its
    steps. Raises ContenderFailed for a run that has not finished its steps."""
    ended = {row["step"]: row["ended_at"] for row in read(folder) if row["event"] == "step"}
    first, last = window.warm_up, window.steps - window.drain
    if missing := {first, last, window.steps} - ended.keys():
        raise ContenderFailed(f"the run in {folder.path} has not finished step {min(missing)}")
    start, stop = ended[first], ended[last]
    metrics = [row for row in folder.metrics.rows() if first < row["step"] <= last]
    spans = [Span.of(row) for row in folder.timeline.rows()]
    return {
        "steps_per_s": window.measured / (stop - start),
        "step_s": [round(ended[n] - ended[n - 1], 4) for n in range(first + 1, last + 1)],
        **utilisation(usage(spans, start, stop)),
        "train_s": train_seconds(spans, [ended[n] for n in range(first, last + 1)]),
        "staleness_mean": _mean(metrics, "staleness/mean"),
        "staleness_max": max((row.get("staleness/max", 0.0) for row in metrics), default=0.0),
        "tokens_per_s": _mean(metrics, "tokens_per_s"),
        "tail": _mean(metrics, "completions/max_length") / _mean(metrics, "completions/mean_length"),
        "reward": _mean(list(folder.metrics.rows()), "reward"),
        "held_out": held_out(folder),
    }


def utilisation(use: Usage) -> dict[str, Any]:
    """Shares of the window in which samplers and trainer worked, and the share of all their time in which
    they did not. Graders are children of the process that runs the loop, and have no core of their own."""
    of = {name: use.utilisation(name) for name in use.seconds if pool_of(name) in ("samplers", "trainer")}
    idle = 1 - sum(of.values()) / len(of) if of else None
    return {
        "utilisation": {name: round(share, 4) for name, share in of.items()},
        "bubble_share": None if idle is None else round(idle, 4),
    }


def train_seconds(spans: Sequence[Span], ends: Sequence[float]) -> list[float]:
    """How long the trainer was at it in each step, from the end of the one before to its own: a trainer
    elsewhere does not know the number of its step."""
    steps = usages(spans, list(pairwise(ends)))
    found = [step.seconds.get("trainer", {}).get(Kind.TRAIN, 0.0) for step in steps]
    return [round(seconds, 4) for seconds in found if seconds]


def held_out(folder: RunFolder) -> float | None:
    """The last score of the run on the main set."""
    scores = [row["pass@1"] for row in folder.eval.rows() if row["set"] == MAIN_SET]
    return scores[-1] if scores else None


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    found = [row[name] for row in metrics if row.get(name) is not None]
    return statistics.fmean(found) if found else 0.0
