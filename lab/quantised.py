"""``ostinato bench quantised``: what rollouts with quantised weights gain: reward per second of whole runs.

    runs     a recipe trained with each kind of engine weights and several seeds, one run after another, in a
             process of its own: ``ostinato train``. Held-out score, and reward per second beside bf16's

All runs replay routes and truncate the ratio trainer / sampler: that is what keeps cheaper rollouts honest.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.harness import Bench, Result, Say, columns, option
from lab.whole_runs import trained
from ostinato.run import MAIN_SET, RunFolder

HONEST = ("trainer.replay=true", "algo.correction=token_truncate")
WARM_UP = 3  # steps of a run whose seconds do not count: kernels are compiled, tables measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised(Bench):
    """``weights``: engine weights, the first is what the others are compared with. ``steps`` of every run."""

    recipe: str = option("quickstart", "A recipe, by name or file.")
    weights: tuple[str, ...] = ("model", "int8", "fp8")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = option(60, "Training steps of every run.")
    held_out: int = 512
    overrides: tuple[str, ...] = ()  # of the recipe, for all runs

    def quick(self) -> Quantised:
        return replace(self, weights=self.weights[:2], seeds=self.seeds[:1], steps=3, held_out=32)

    def measure(self, say: Say) -> dict[str, Any]:
        runs: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            for seed in self.seeds:  # all weights of a seed in a row: what changes with time changes for all
                for weights in self.weights:
                    folder = train(self, weights, seed, Path(root) / f"{weights}-{seed}")
                    runs.append({"weights": weights, "seed": seed} | facts(folder))
                    say(_line(runs[-1]))
        return {"runs": runs, "arms": compared(runs, self.weights)}

    @staticmethod
    def table(result: Result) -> Table:
        settings = result["settings"]
        seeds = ", ".join(map(str, settings["seeds"]))
        names = ("engine.weights", "rollout s", "step s", "reward/s", "against the first", "k3")
        rows = (
            (
                arm["weights"],
                f"{arm['rollout_s']:.2f} (x{arm['rollout_s_ratio']:.2f})",
                f"{arm['step_s']:.2f} (x{arm['step_s_ratio']:.2f})",
                f"{arm['reward_per_s']:.1f}",
                f"{arm['reward_per_s_ratio']:.3f}",
                f"{arm['k3']:.1e}",
                f"{arm['before']:.3f} -> {arm['score']:.3f}",
                f"{arm['score_difference']:+.3f} ({arm['score_difference_low']:+.3f} to "
                f"{arm['score_difference_high']:+.3f})",
            )
            for arm in result["arms"]
        )
        title = f"{settings['recipe']}, {settings['steps']} steps, seeds {seeds}"
        return columns(title, (*names, "held-out before -> after", "difference (95 %)"), rows)


# ---- whole runs


def train(bench: Quantised, weights: str, seed: int, logs: Path) -> RunFolder:
    """One run of ``ostinato train``, in a process of its own; its folder."""
    overrides = [
        f"seed={seed}",
        f"engine.weights={weights}",
        f"trainer.steps={bench.steps}",
        "trainer.checkpoint_every=0",
        "eval.every=0",
        f"eval.n={bench.held_out}",
        "log.mismatch_every=0",
        "log.trajectories_every=0",
        *HONEST,
        *bench.overrides,
    ]
    return trained(bench.recipe, overrides, logs, f"with engine.weights={weights}, seed {seed}")


def facts(folder: RunFolder) -> dict[str, Any]:
    """What a finished run comes to: median seconds of a step by part, solved answers per second, both without
    the first steps; and the held-out scores with their standard errors."""
    rows = list(folder.metrics.rows())
    evals = [row for row in folder.eval.rows() if row["set"] == MAIN_SET]
    timed = rows[WARM_UP:] or rows

    def median(name: str) -> float:
        return statistics.median(row[name] for row in timed if name in row)

    seconds = sum(row["step_time"] for row in timed)
    return {
        "steps": len(rows),
        "rollout_s": median("time/rollout_s"),
        "train_s": median("time/train_s"),
        "step_s": median("step_time"),
        "tokens_per_rollout_s": sum(row["tokens/sampled"] for row in timed)
        / sum(row["time/rollout_s"] for row in timed),
        "steps_per_s": len(timed) / seconds,
        "reward_per_s": sum(row["reward"] * row["rollout/trajectories"] for row in timed) / seconds,
        "k3": median("sampling/kl_k3"),
        "before": evals[0]["pass@1"],
        "score": evals[-1]["pass@1"],  # with the model's own weights: of what is exported
        "score_error": evals[-1]["stderr"],
        "score_sampler": [row for row in evals if row["weights"] == evals[0]["weights"]][-1]["pass@1"],
    }


def compared(runs: Sequence[Mapping[str, Any]], weights: Sequence[str]) -> list[dict[str, Any]]:
    """One row per arm: means over seeds, and against the first arm the ratios of speeds (geometric mean over
    seeds) and the difference of the scores with its 95 % interval, paired by seed.

    ``reward_per_s_ratio`` is fair only where the scores are equal, so ``equal`` says whether the interval of
    the difference has 0 in it, and its width says how much that is worth.
    """
    base = {one["seed"]: one for one in runs if one["weights"] == weights[0]}
    return [_arm(name, [one for one in runs if one["weights"] == name], base) for name in weights]


def _arm(
    name: str, own: Sequence[Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    def mean(key: str) -> float:
        return statistics.fmean(one[key] for one in own)

    def ratio(key: str) -> float:
        ratios = [one[key] / base[one["seed"]][key] for one in own if base[one["seed"]][key] > 0]
        return statistics.geometric_mean(ratios) if ratios and min(ratios) > 0 else math.nan

    gaps = [one["score"] - base[one["seed"]]["score"] for one in own]
    low, high = _t_interval(
        gaps, [math.hypot(one["score_error"], base[one["seed"]]["score_error"]) for one in own]
    )
    names = ("rollout_s", "train_s", "step_s", "reward_per_s", "k3", "before", "score")
    return {
        "weights": name,
        "seeds": len(own),
        **{key: mean(key) for key in names},
        "rollout_s_ratio": ratio("rollout_s"),
        "step_s_ratio": ratio("step_s"),
        "reward_per_s_ratio": ratio("reward_per_s"),
        "score_difference": statistics.fmean(gaps),
        "score_difference_low": low,
        "score_difference_high": high,
        "equal": low <= 0 <= high,
    }


# 97.5 % points of Student's t by degrees of freedom 1 to 9
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _t_interval(gaps: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """95 % for the mean of ``gaps`` over seeds; of one seed, what its held-out prompts alone leave open."""
    middle, n = statistics.fmean(gaps), len(gaps)
    if n == 1:
        half = 1.96 * errors[0]
    else:
        t = _T[n - 2] if n - 2 < len(_T) else 1.96
        half = t * statistics.stdev(gaps) / math.sqrt(n)
    return middle - half, middle + half


# ---- for people


def _line(one: Mapping[str, Any]) -> str:
    return (
        f"{one['weights']}, seed {one['seed']}: held-out {one['before']:.3f} -> {one['score']:.3f}, rollout "
        f"{one['rollout_s']:.2f} s of a {one['step_s']:.2f} s step, {one['reward_per_s']:.1f} reward/s"
    )
