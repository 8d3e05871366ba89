"""``ostinato bench quantised``: what rollouts with quantised weights gain, from tokens per second to reward.

    runs     a recipe trained with each kind of engine weights and several seeds, one run after another, in a
             process of its own: ``ostinato train``. Held-out score, and reward per second beside bf16's
    speed    rollouts of a larger dense model by themselves: tokens per second of int8 over bf16, in turn

All runs replay routes and truncate the ratio trainer / sampler: that is what keeps cheaper rollouts honest.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.epochs import Model, answers_of
from lab.harness import Bench, Result, Say, option
from lab.paired import alternate
from lab.settings import Clock
from lab.whole_runs import trained
from ostinato.engine.cache import BLOCK
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import block_bytes
from ostinato.model.named import model_folder
from ostinato.model.quantise import Weights, own_bytes, quantise
from ostinato.run import MAIN_SET, RunFolder
from ostinato.types import Request, Sampling

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
    model: str = option(
        "smollm2-135m", "Whose rollouts are timed by themselves; empty for none."
    )  # of the rollouts by themselves; empty: none
    batches: tuple[int, ...] = (1, 4, 8, 16)
    new_tokens: int = 64
    prompt_tokens: int = 32
    rounds: int = 9
    clock: Clock = option(Clock.WALL, "Of the rollouts by themselves.")

    def quick(self) -> Quantised:
        return replace(
            self,
            weights=self.weights[:2],
            seeds=self.seeds[:1],
            steps=3,
            held_out=32,
            batches=(1, 4),
            new_tokens=8,
            rounds=2,
        )

    def measure(self, say: Say) -> dict[str, Any]:
        speed = speeds(self, say) if self.model else []
        runs: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            for seed in self.seeds:  # all weights of a seed in a row: what changes with time changes for all
                for weights in self.weights:
                    folder = train(self, weights, seed, Path(root) / f"{weights}-{seed}")
                    runs.append({"weights": weights, "seed": seed} | facts(folder))
                    say(_line(runs[-1]))
        return {
            "runs": runs,
            "arms": compared(runs, self.weights),
            "speed": speed,
        }

    @staticmethod
    def table(result: Result) -> RenderableType:
        settings = result["settings"]
        seeds = ", ".join(map(str, settings["seeds"]))
        runs = Table(
            "engine.weights",
            "rollout s",
            "step s",
            "reward/s",
            "against the first",
            "k3",
            "held-out before -> after",
            "difference (95 %)",
            title=f"{settings['recipe']}, {settings['steps']} steps, seeds {seeds}",
        )
        for arm in result["arms"]:
            low, high = arm["score_difference_low"], arm["score_difference_high"]
            runs.add_row(
                arm["weights"],
                f"{arm['rollout_s']:.2f} (x{arm['rollout_s_ratio']:.2f})",
                f"{arm['step_s']:.2f} (x{arm['step_s_ratio']:.2f})",
                f"{arm['reward_per_s']:.1f}",
                f"{arm['reward_per_s_ratio']:.3f}",
                f"{arm['k3']:.1e}",
                f"{arm['before']:.3f} -> {arm['score']:.3f}",
                f"{arm['score_difference']:+.3f} ({low:+.3f} to {high:+.3f})",
            )
        speed = Table(
            "model", "weights", "batch", "tokens/s", "bf16", "faster by", "MB", title="rollouts by themselves"
        )
        for row in result["speed"]:
            speed.add_row(
                row["model"],
                row["weights"],
                str(row["batch"]),
                f"{row['tokens_per_s']:.0f}",
                f"{row['bf16_tokens_per_s']:.0f}",
                _faster(row),
                f"{row['weights_mb']:.0f} / {row['bf16_weights_mb']:.0f}",
            )
        return Stack(runs, speed) if result["speed"] else runs


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


# ---- rollouts by themselves


def speeds(bench: Quantised, say: Say) -> list[dict[str, Any]]:
    """Tokens per second of ``bench.model`` with quantised weights beside bf16, at every batch."""
    model = Model.load(str(model_folder(bench.model)), dtype="bfloat16", fp32_head=True, say=say)
    plain = _Rollouts(bench, model, Weights.BF16)
    rows = []
    for weights in bench.weights:
        if weights in (Weights.MODEL, Weights.BF16):
            continue
        quantised = _Rollouts(bench, model, Weights(weights))
        for batch in bench.batches:
            pairs = alternate(
                lambda batch=batch: plain(batch),
                lambda batch=batch, engine=quantised: engine(batch),
                bench.rounds,
                bench.clock.read,
            )
            tokens = batch * bench.new_tokens
            found = pairs.figures()
            rows.append(
                {
                    "model": bench.model,
                    "weights": weights,
                    "batch": batch,
                    "bf16_tokens_per_s": round(tokens / statistics.median(pairs.base), 1),
                    "tokens_per_s": round(tokens / statistics.median(pairs.other), 1),
                    "speedup": round(1 / pairs.ratio, 4),
                    "speedup_low": round(1 / found["high"], 4),
                    "speedup_high": round(1 / found["low"], 4),
                    "weights_mb": round(quantised.own_bytes / 2**20, 1),
                    "bf16_weights_mb": round(plain.own_bytes / 2**20, 1),
                }
            )
            say(_speed_line(rows[-1]))
    return rows


class _Rollouts:
    """An engine of some weights, to be asked for a batch of answers that never stop early."""

    def __init__(self, bench: Quantised, model: Model, weights: Weights) -> None:
        decoder = quantise(model.decoder, weights)
        self.own_bytes = own_bytes(decoder)
        context = bench.prompt_tokens + bench.new_tokens
        each = block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype)
        blocks = max(bench.batches) * (context // BLOCK + 2)
        self._plan, self._vocabulary = bench, decoder.config.vocab_size
        self._engine = LocalEngine(
            decoder,
            kernels=model.kernels,
            kv_memory_mb=(blocks * each >> 20) + 1,
            max_batch=max(bench.batches),
            context_limit=context,
        )

    def __call__(self, batch: int) -> None:
        bench, rng = self._plan, np.random.default_rng(batch)
        prompts = rng.integers(0, self._vocabulary, (batch, bench.prompt_tokens), dtype=np.int32)
        sampling = Sampling(max_tokens=bench.new_tokens)
        requests = [
            Request(tokens=prompt, sampling=sampling, seed=(batch, row)) for row, prompt in enumerate(prompts)
        ]
        self._engine.publish(None, self._engine.version + 1)  # no prompt is found from the time before
        asyncio.run(answers_of(self._engine, requests))


# ---- for people


def _line(one: Mapping[str, Any]) -> str:
    return (
        f"{one['weights']}, seed {one['seed']}: held-out {one['before']:.3f} -> {one['score']:.3f}, rollout "
        f"{one['rollout_s']:.2f} s of a {one['step_s']:.2f} s step, {one['reward_per_s']:.1f} reward/s"
    )


def _speed_line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']} at batch {row['batch']}: {row['weights']} {row['tokens_per_s']:.0f} tokens/s, bf16 "
        f"{row['bf16_tokens_per_s']:.0f}: {_faster(row)}"
    )


def _faster(row: Mapping[str, Any]) -> str:
    return f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
