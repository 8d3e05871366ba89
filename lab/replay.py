"""``ostinato bench replay``: how far sampler and trainer are apart, with routes replayed and without.

    engine (bf16, int8, fp8)  --tokens, log-probabilities, routes-->  trainer (fp32, bf16), same adapters
                                                                        native: experts of its own choice
                                                                        replay: the experts of the engine

Everything in between is the product's: episodes are played, converted, packed, and measured by
``PolicyTrainer.measure``. Two policies are measured, the base and one that has trained for some steps: its
adapters are rounded on one side and not on the other. Bugs are planted in the routes of one step, to see
whether the gate finds them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.epochs import Model, record
from lab.harness import Bench, Result, Say, option
from lab.paired import alternate, wilson
from lab.planted import Trainers, planted, stale
from lab.settings import Clock
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.env.dialogue import Dialogue
from ostinato.env.tasks import Rows, load_tasks
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.named import find_model_folder
from ostinato.model.quantise import Weights, quantise
from ostinato.observe.mismatch import TAUS
from ostinato.render import Renderer
from ostinato.rollout.convert import make_samples
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play_groups
from ostinato.types import Batch, Group, Prompt, Reward, Sample, Sampling

# Tau is scaled to the model: F is compared at the largest tau that is exceeded by as large a share of native
# tokens as exceeds 2 on the R3 paper's Qwen3-30B-A3B (F(2) = 2.54e-4, arXiv 2510.11370, appendix). The native
# side alone decides.
PAPERS_SHARE = 2.54e-4

BARS = {"k3_ratio": 1.8, "F_ratio": 8.0, "step_time_ratio": 1.03}
SAMPLE_STEP = 10_000  # far from any training step: its noise is its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Bench):
    """``pairs`` of (engine, trainer) for the policies after each of ``steps`` training steps, on ``tokens``
    sampled tokens or more; ``rounds`` of the step's time."""

    recipe: str = "quickstart"
    pairs: tuple[tuple[Weights, str], ...] = (
        (Weights.BF16, "float32"),
        (Weights.INT8, "float32"),
        (Weights.FP8, "float32"),
        (Weights.BF16, "bfloat16"),
        (Weights.INT8, "bfloat16"),
    )
    steps: tuple[int, ...] = (0, 20)
    tokens: int = option(
        100_000, "Sampled tokens of every row, at least."
    )  # of which some 25 are beyond the scaled tau
    rounds: int = option(9, "Of a training step with replay and without.")
    least_s: float = 1.0
    clock: Clock = option(Clock.WALL, "cpu where others use the machine too.")

    @property
    def loaded(self) -> Recipe:
        """In bf16, where sampler and trainer differ most."""
        return Recipe.load(self.recipe, "model.dtype=bfloat16")

    def quick(self) -> Replay:
        return replace(self, pairs=self.pairs[:2], steps=(0, 2), tokens=2_000, rounds=2, least_s=0.0)

    def measure(self, say: Say) -> dict[str, Any]:
        bench = Setup.of(self, say)
        rows: list[dict[str, Any]] = []
        first, last = self.steps[0], self.steps[-1]
        one_step: dict[int, list[Sample]] = {}  # by steps: of the first pair's engine
        for steps, (weights, dtype) in itertools.product(self.steps, self.pairs):
            policy, trainers = bench.policies[steps], bench.trainers(dtype)
            made = bench.sampled(weights, policy)
            one_step.setdefault(steps, made[: bench.step_size])
            row: dict[str, Any] = {"engine": str(weights), "trainer": dtype, "steps": steps}
            row |= figures(trainers.make(policy).measure(bench.pack(made)))
            if steps == first:
                row |= step_time(self, trainers, policy, bench.pack(made[: bench.step_size]))
            rows.append(row | {"bars": judged(row)})
            say(_line(rows[-1]))
        trainers = bench.trainers(self.pairs[0][1])
        found = planted(trainers, bench.policies[first], one_step[first], bench.pack, say)
        old = stale(trainers, bench.policies, last, bench.pack(one_step[last]), say)
        return {"rows": rows, "planted": found, "stale": old, "bars": BARS}

    @staticmethod
    def table(result: Result) -> RenderableType:
        return Stack(
            _rows_table(result),
            _tails_table(result["rows"]),
            _planted_table(result["planted"]),
            _stale_table(result["stale"]),
        )


class FullMarks:
    """Grades nothing: every episode counts. Implements protocols.Grader."""

    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=1.0) for _ in group.trajectories]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """What every row is measured with."""

    bench: Replay
    renderer: Renderer
    prompts: Sequence[Prompt]
    decoders: Mapping[str, Decoder]  # of the trainers, by dtype: the same weights
    model: Model  # that in fp32, of which the engines have copies, and the kernels
    policies: Mapping[int, Adapters]  # by the steps that they have trained

    @classmethod
    def of(cls, bench: Replay, say: Say) -> Setup:
        recipe, folder = bench.loaded, str(find_model_folder(bench.loaded.model.path))
        dtypes = {"float32", recipe.model.dtype, *(dtype for _, dtype in bench.pairs)}
        models = {
            dtype: Model.load(folder, dtype=dtype, fp32_head=recipe.model.fp32_head, say=say)
            for dtype in dtypes
        }
        if not models["float32"].decoder.num_moe_layers:
            raise ValueError(f"model.path is {recipe.model.path!r}, which has no experts; use asset:seed-moe")
        task = recipe.task
        return cls(
            bench=bench,
            renderer=Renderer(find_model_folder(recipe.model.path)),
            prompts=load_tasks(
                task.source, "train", task.seed, task.n_train, task.params, task.system_prompt
            ),
            decoders={dtype: model.decoder for dtype, model in models.items()},
            model=models["float32"],
            policies=_policies(bench, models[recipe.model.dtype], say),
        )

    def trainers(self, dtype: str) -> Trainers:
        return Trainers(
            decoder=self.decoders[dtype],
            kernels=self.model.kernels,
            rules=algorithm(self.bench.loaded.algo.name, **self.bench.loaded.algo.overrides),
            temperature=self.bench.loaded.rollout.temperature,
        )

    def sampled(self, weights: Weights, policy: Adapters) -> list[Sample]:
        """Whole steps of samples by an engine of ``weights``, until ``bench.tokens`` tokens are sampled."""
        recipe = self.bench.loaded
        engine = LocalEngine(
            quantise(self.decoders["float32"], weights),
            kernels=self.model.kernels,
            decode=self.renderer.decode,
            max_batch=recipe.engine.max_batch,
            context_limit=self.model.decoder.config.max_positions,
        )
        engine.publish(policy, 0)
        made: list[Sample] = []
        for step in itertools.count():
            made += self._one_more(engine, step)
            if sum(int(sample.loss_mask.sum()) for sample in made) >= self.bench.tokens:
                return made
        raise AssertionError  # count() does not end

    def _one_more(self, engine: LocalEngine, step: int) -> list[Sample]:
        """The samples of a step; half of each group is praised, half is blamed, and all of it trains."""
        rollout = self.bench.loaded.rollout
        rows, count = Rows(self.prompts, seed=0), rollout.prompts_per_step
        stage = RolloutContext(
            engine=engine,
            env=lambda prompt: Dialogue(prompt, self.renderer),
            grader=FullMarks(),
            sampling=Sampling(
                temperature=rollout.temperature,
                max_tokens=rollout.max_tokens,
                stop_tokens=self.renderer.stop_tokens,
            ),
            context_limit=engine.context_limit,
        )
        requests = [
            RolloutRequest(
                prompt=rows.prompt(index),
                seed=(self.bench.loaded.seed, SAMPLE_STEP + step, index),
                group_size=rollout.group_size,
                step=SAMPLE_STEP + step,
            )
            for index in range(step * count, (step + 1) * count)
        ]
        advantages = np.where(np.arange(rollout.group_size) % 2, 1.0, -1.0)
        groups = [played.group for played in asyncio.run(play_groups(stage, requests))]
        return [
            sample
            for index, group in enumerate(groups, start=step * count)
            for sample in make_samples(group, index, advantages)
        ]

    def pack(self, chosen: Sequence[Sample]) -> Batch:
        weights = aggregation_weights(chosen, Aggregation.TOKEN)
        return pack(chosen, weights, tokens_per_microbatch=self.bench.loaded.trainer.tokens_per_microbatch)

    @property
    def step_size(self) -> int:
        """Samples of one training step."""
        return self.bench.loaded.rollout.prompts_per_step * self.bench.loaded.rollout.group_size


def _policies(bench: Replay, model: Model, say: Say) -> dict[int, Adapters]:
    """The recipe's adapters by the training steps behind them, all on the way to the last."""
    per_step = bench.loaded.rollout.prompts_per_step
    task = bench.loaded.task.model_copy(update={"n_train": (max(bench.steps) + 1) * per_step})
    recorded = record(bench.loaded.model_copy(update={"task": task}), model, 1, say)
    return {step.number - 1: step.adapters for step in recorded}


# ---- what is made of it


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the JSON from what ``PolicyTrainer.measure`` gave."""
    native, replay = measured["arms"]["native"], measured["arms"]["replay"]
    routers, floor = measured["routers"], measured["arms"].get("floor")
    curve = F_curve(native, replay)
    tau, F_native, F_replay = scaled(curve)
    return {
        "tokens": native["tokens"],
        "sequences": native["sequences"],
        "k3_native": native["k3"],
        "k3_native_low": native["k3_low"],
        "k3_native_high": native["k3_high"],
        "k3_replay": replay["k3"],
        "k3_replay_low": replay["k3_low"],
        "k3_replay_high": replay["k3_high"],
        "k3_ratio": native["k3"] / replay["k3"] if replay["k3"] > 0 else None,
        "tau": tau,
        "F_native": F_native,
        "F_replay": F_replay,
        # none seen among n is a share below 3 / n with 95 % (rule of three): the ratio is then a lower bound
        "F_ratio": F_native / (F_replay or 3 / replay["tokens"]),
        "F_ratio_is_bound": F_replay == 0,
        "F_native_interval": wilson(round(F_native * native["tokens"]), native["tokens"]),
        "F_replay_interval": wilson(round(F_replay * replay["tokens"]), replay["tokens"]),
        "F_curve": curve,
        "routers_differ": routers["differ"],
        "tokens_differ": routers["tokens_differ"],
        "overlap": routers["overlap"],
        "lowest_sequence": _known(routers["lowest_sequence"]),
        "margin_median": routers["margin_median"],
        "margin_flip_median": _known(routers["margin_flip_median"]),
        "coverage": measured["coverage"],
        "abs_max_native": native["abs_max"],
        "abs_max_replay": replay["abs_max"],
        "floor": None if floor is None else {"k3": floor["k3"], "abs_max": floor["abs_max"]},
    }


def _known(value: float) -> float | None:
    """None for what there is nothing of: JSON has no NaN."""
    return None if math.isnan(value) else value


def F_curve(native: Mapping[str, Any], replay: Mapping[str, Any]) -> list[list[float]]:
    """[tau, native share of tokens beyond it, share with replay], ascending: what two ARMs say of F, as tails
    and, at the points between, as the complement of their CDF."""

    def points(arm: Mapping[str, Any]) -> dict[float, float]:
        between = {math.exp(gap): 1 - below for gap, below in arm["cdf"]}
        return between | dict(arm["tails"])

    beyond, left = points(native), points(replay)
    return [[tau, beyond[tau], left[tau]] for tau in sorted(beyond) if tau >= TAUS[0]]


def scaled(curve: Sequence[Sequence[float]]) -> Sequence[float]:
    """The point of an F curve at the largest tau that PAPERS_SHARE of the native tokens are beyond; the first
    where that many are beyond none."""
    exceeded = [point for point in curve if point[1] >= PAPERS_SHARE]  # ascending, as the curve is
    return exceeded[-1] if exceeded else curve[0]


def judged(row: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the bars a row holds."""
    held = {
        "k3_ratio": row["k3_ratio"] is None or row["k3_ratio"] >= BARS["k3_ratio"],
        "k3_apart": row["k3_replay_high"] < row["k3_native_low"],
        "F_ratio": row["F_ratio"] >= BARS["F_ratio"],
        "F_apart": row["F_replay_interval"][1] < row["F_native_interval"][0],
    }
    if "step_time_ratio" in row:
        held["step_time_ratio"] = row["step_time_ratio"] <= BARS["step_time_ratio"]
    return held


def step_time(bench: Replay, trainers: Trainers, policy: Adapters, batch: Batch) -> dict[str, Any]:
    """``PolicyTrainer.step`` with replay and the gate over the step on the same batch without routes: all
    that replay costs is in the ratio. The policy hardly moves, so the routes stay the right ones."""
    bare = replace(batch, microbatches=tuple(replace(one, experts=None) for one in batch.microbatches))
    without, with_replay = trainers.make(policy, replay=False), trainers.make(policy)
    pairs = alternate(
        lambda: without.step(bare),
        lambda: with_replay.step(batch),
        bench.rounds,
        bench.clock.read,
        bench.least_s,
    )
    return {f"step_time_{name}": value for name, value in pairs.figures().items()}


def _line(row: Mapping[str, Any]) -> str:
    step = f", step time {row['step_time_ratio']:.3f}" if "step_time_ratio" in row else ""
    return (
        f"{row['engine']} engine, {row['trainer']} trainer, {row['steps']} steps, {row['tokens']} tokens: "
        f"k3 {row['k3_native']:.2e} -> {row['k3_replay']:.2e}, F({row['tau']:.3g}) {row['F_native']:.2e} -> "
        f"{row['F_replay']:.2e}, {row['routers_differ']:.2%} of routers differ{step}"
    )


def _rows_table(result: Mapping[str, Any]) -> Table:
    bars = result["bars"]
    out = Table(
        "engine / trainer,\ntraining steps",
        "k3 native\n(95 %)",
        "k3 with replay\n(95 %)",
        f"lower by\n(>= {bars['k3_ratio']:g})",
        "tail,\nnative -> replay",
        f"lower by\n(>= {bars['F_ratio']:g})",
        "routers,\ntokens differ",
        "overlap\n(lowest)",
        f"step time\n(<= {bars['step_time_ratio']:g})",
        title="KL(sampler || trainer) in millionths of a nat per token, and the tail at the scaled tau",
    )
    for row in result["rows"]:
        held, ratio = row["bars"], row["k3_ratio"]
        out.add_row(
            f"{row['engine']} / {row['trainer']},\n{row['steps']} steps",
            _interval(row, "k3_native"),
            _interval(row, "k3_replay"),
            _marked(_number(ratio, ".2f"), held["k3_ratio"] and held["k3_apart"]),
            f"F({row['tau']:.3g})\n{row['F_native']:.3%} -> {row['F_replay']:.3%}",
            _marked(f"{'>= ' if row['F_ratio_is_bound'] else ''}{row['F_ratio']:.1f}", held["F_ratio"]),
            f"{row['routers_differ']:.2%}\n{row['tokens_differ']:.2%}",
            f"{row['overlap']:.4f}\n({_number(row['lowest_sequence'], '.3f')})",
            _step_time(row),
        )
    return out


def _step_time(row: Mapping[str, Any]) -> str:
    if "step_time_ratio" not in row:
        return ""
    interval = f"({row['step_time_low']:.3f}..{row['step_time_high']:.3f})"
    return _marked(f"{row['step_time_ratio']:.3f}\n{interval}", row["bars"]["step_time_ratio"])


def _tails_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = "tokens whose ratio exceeds tau, native -> replay"
    out = Table("engine / trainer, steps", "tokens", *map(str, TAUS), title=title)
    for row in rows:
        counts = [
            f"{native * row['tokens']:.0f} -> {replay * row['tokens']:.0f}"
            for tau, native, replay in row["F_curve"]
            if tau in TAUS
        ]
        out.add_row(_name(row), str(row["tokens"]), *counts)
    return out


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['engine']} / {row['trainer']}, {row['steps']}"


def _interval(row: Mapping[str, Any], name: str) -> str:
    low, high = row[name + "_low"], row[name + "_high"]
    return f"{1e6 * row[name]:.3g}\n({1e6 * low:.3g}..{1e6 * high:.3g})"


def _marked(text: str, held: bool) -> str:
    return f"[green]{text}[/green]" if held else f"[red]{text} ![/red]"


def _planted_table(found: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(
        "bug", "in", "gate", "cause named", "overlap", "lowest", "k3 without the gate", title="planted bugs"
    )
    for one in found:
        out.add_row(
            one["bug"],
            one["where"],
            _marked("caught" if one["caught"] else "not caught", one["caught"]),
            _marked(one["cause"] or "-", one["right"]),
            _number(one["overlap"], ".3f"),
            _number(one["lowest_sequence"], ".3f"),
            _number(one["k3"], ".2e"),
        )
    return out


def _stale_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(
        "routes of",
        "distance (k3)",
        "overlap",
        "lowest",
        "gate",
        "k3 with them",
        title="routes of another policy",
    )
    for one in rows:
        out.add_row(
            one["policy"],
            f"{one['distance']:.2e}",
            f"{one['overlap']:.4f}",
            f"{one['lowest_sequence']:.3f}",
            f"caught: {one['cause']}" if one["caught"] else "passes",
            f"{one['k3']:.2e}",
        )
    return out


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
