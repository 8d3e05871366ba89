"""Does the mismatch of sampler and trainer make RL collapse, and what helps?

A run is the product's own loop with one thing made worse on purpose: the engine samples from a damaged copy
of the decoder (the dose), while the trainer keeps the decoder as it is. An arm is what the trainer does
about it. Runs are drawn from their seed alone, and each ends as one JSON line of an append-only file, so a
study that was stopped goes on where it was. ``collapse_page`` makes tables and plots of the file.

    dose    bf16      sampler and trainer have the same weights: what is left is rounding
            int8, int4   linear weights rounded
            noise:S   S times a Gaussian on every router logit of the sampler, fixed by the token's own logits
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.harness import Bench, Result, Say, main, option, seeds
from ostinato.algo import noise
from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.engine.local import LocalEngine
from ostinato.env.dialogue import Dialogue
from ostinato.env.tasks import Rows, load_tasks
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, AdapterSpec, ExpertScheme, init_adapters
from ostinato.model.named import model_folder
from ostinato.model.native import Kernels, load
from ostinato.model.quantise import Weights, codes, is_quantised
from ostinato.pipeline.evaluate import Evaluation, evaluate
from ostinato.pipeline.loop import Finish, Loop, Plan
from ostinato.pipeline.observer import Silent
from ostinato.protocols import Trainer
from ostinato.render import Renderer
from ostinato.reward.verify import exact
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import RunFolder
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer, TrainingStopped
from ostinato.types import Batch, Group, Prompt, Reward, Sampling, StepReport

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What the trainer does about the mismatch."""

    name: str
    algo: str = "grpo"
    keys: Mapping[str, Any] = field(default_factory=dict)
    replay: bool = False
    shuffled: bool = False  # the control: the routes of another sequence

    @property
    def algorithm(self) -> Algorithm:
        return algorithm(self.algo, **self.keys)


_TRAINER = {"anchor": "trainer"}
_TIS = {"correction": "token_truncate", "correction_high": 2.0}
_ICEPOP = {"correction": "token_mask", "correction_low": 0.5, "correction_high": 5.0}
ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="none", keys=_TRAINER),
        Arm(name="R3", keys=_TRAINER, replay=True),
        Arm(name="bypass"),
        Arm(name="TIS", keys=_TIS),
        Arm(name="IcePop", keys=_ICEPOP),
        Arm(name="GSPO", algo="gspo", keys=_TRAINER),
        Arm(name="R3+TIS", keys=_TIS, replay=True),
        Arm(name="shuffled", keys=_TRAINER, replay=True, shuffled=True),
    )
}
# What is run without being asked for: (arms, doses), the primary comparison first.
PARTS = (
    (("none", "R3"), ("bf16", "int8", "int4", "noise:1", "noise:2", "noise:4")),
    (("bypass", "TIS", "IcePop", "GSPO", "R3+TIS"), ("bf16", "int4", "noise:2", "noise:4")),
    (("shuffled",), ("bf16", "noise:2")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs of a study have in common."""

    model: str = "asset:seed-moe"
    targets: tuple[str, ...] = ("attn", "mlp", "experts")
    rank: int = 16
    alpha: float = 32.0
    steps: int = 60
    prompts: int = 8
    group: int = 8
    max_tokens: int = 48
    minibatches: int = 4  # optimizer steps per batch
    microbatch: int = 4096  # most tokens of one
    lr: float = 1.25e-3
    warmup: int = 5
    max_grad_norm: float = 1.0
    held_out: int = 128  # problems, one answer each
    train: int = 4096  # problems
    measure_every: int = 10  # steps: native and replayed log-probabilities side by side

    @property
    def hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a study."""

    arm: str
    dose: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """What the runs of one process share."""

    setting: Setting
    decoder: Decoder
    kernels: Kernels
    renderer: Renderer
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    samplers: dict[str, tuple[Decoder, Kernels]] = field(default_factory=dict)  # by dose
    starts: dict[str, float] = field(default_factory=dict)  # held-out score of the base, by dose

    @classmethod
    def load(cls, setting: Setting) -> World:
        """Raises BuildError without a C++ compiler: by torch's own kernels a study would take days."""
        torch.set_num_threads(1)
        folder = model_folder(setting.model)
        return cls(
            setting=setting,
            decoder=load_model(folder, dtype=torch.bfloat16, fp32_head=True),
            kernels=load(),
            renderer=Renderer(folder),
            train=load_tasks("arithmetic", "train", 0, setting.train),
            held_out=load_tasks("arithmetic", "eval", 0, setting.held_out),
        )

    def sampler(self, dose: str) -> tuple[Decoder, Kernels]:
        """The damaged copy for ``dose``, made once."""
        if dose not in self.samplers:
            self.samplers[dose] = damaged(self.decoder, self.kernels, dose)
        return self.samplers[dose]


def damaged(decoder: Decoder, kernels: Kernels, dose: str) -> tuple[Decoder, Kernels]:
    """What the engine gets in place of (decoder, kernels). Raises ValueError for a dose that is not known."""
    kind, sigma = parsed(dose)
    if kind == "noise":
        ops = replace(kernels.ops, route=noisy_route(kernels.ops.route, sigma))
        return decoder, replace(kernels, ops=ops, fused=lambda decoder, adapters: None)
    return (decoder if kind == "bf16" else rounded(decoder, int4 if kind == "int4" else int8)), kernels


def rounded(decoder: Decoder, nearest: Callable[[Tensor], Tensor]) -> Decoder:
    """The decoder with the nearest values of what the sampler quantises; the rest is shared."""
    stored = {
        name: nn.Parameter(nearest(weight.detach()), requires_grad=False)
        if is_quantised(name, weight)
        else weight
        for name, weight in decoder.named_parameters()
    }
    return Decoder(decoder.config, dtype=decoder.dtype, fp32_head=decoder.fp32_head, stored=stored)


def int8(weight: Tensor) -> Tensor:
    return codes(weight, Weights.INT8).dequantised().to(weight.dtype)


def int4(weight: Tensor) -> Tensor:
    """weight [..., N, K] as whole numbers up to 7, with a scale for each output channel and 32 inputs."""
    inputs = weight.shape[-1]
    groups = F.pad(weight.float(), (0, -inputs % 32)).unflatten(-1, (-1, 32))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    scale = torch.where(scale > 0, scale, 1.0)
    return ((groups / scale).round().clamp(-7, 7) * scale).flatten(-2)[..., :inputs].to(weight.dtype)


def parsed(dose: str) -> tuple[str, float]:
    """("noise", 2.0) of noise:2, ("int4", 0.0) of int4."""
    kind, colon, size = dose.partition(":")
    if not colon and kind in ("bf16", "int8", "int4"):
        return kind, 0.0
    try:
        if kind == "noise" and (sigma := float(size)) > 0:
            return kind, sigma
    except ValueError:
        pass
    raise ValueError(f"--doses has {dose!r}; use bf16, int8, int4 or noise:SIGMA, e.g. noise:0.5")


def noisy_route(route: Callable[..., Any], sigma: float) -> Callable[..., Any]:
    """``route`` on logits + sigma * ``gaussian``: a sampler whose routers err, and nothing else of it."""

    def noisy(logits: Tensor, *args: Any) -> Any:
        return route(logits + sigma * gaussian(logits), *args)

    return noisy


def gaussian(logits: Tensor) -> Tensor:
    """Standard normal numbers [T, E] fp32 that are a function of each row of ``logits`` [T, E] alone.

    So a token errs alike in whatever batch it stands, as it does under other arithmetic, and neighbouring
    tokens err independently. The bits of a row are hashed to a key, and (key, expert) is the address.
    """
    bits = logits.contiguous().view(torch.int32).numpy().astype(np.uint64)
    odd = 2 * np.arange(1, bits.shape[1] + 1, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    keys = (bits * odd).sum(axis=1, dtype=np.uint64)
    uniform = noise.uniform(keys[:, None], np.arange(bits.shape[1]))
    return torch.special.ndtri(torch.from_numpy(uniform)).float()


class Exact:
    """A grader: 1 for the right answer, in this process."""

    async def grade(self, group: Group) -> list[Reward]:
        texts = [trajectory.turns[-1].completion.text for trajectory in group.trajectories]
        verdicts = exact(texts, [group.prompt.columns["answer"]] * len(texts))
        return [Reward(value=value) for value in verdicts]


class Shuffling:
    """``trainer``, whose batches carry the routes of other sequences."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def step(self, batch: Batch) -> StepReport:
        return self._trainer.step(shuffled_routes(batch))

    def adapters(self) -> Any:
        return self._trainer.adapters()


def shuffled_routes(batch: Batch) -> Batch:
    """Every row gets the routes of the row half a microbatch further: another sequence, the same statistics.
    A row without routes (the last of a sequence) hands that on."""

    def shuffled(routes: np.ndarray | None) -> np.ndarray | None:
        return None if routes is None else np.roll(routes, len(routes) // 2, axis=0)

    return replace(
        batch,
        microbatches=tuple(replace(one, experts=shuffled(one.experts)) for one in batch.microbatches),
    )


class Recorder(Silent):
    """Keeps the rows of a run."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def on_step(self, row: Mapping[str, float]) -> None:
        self._rows.append(dict(row))


def run(world: World, job: Job) -> Row:
    """One run of the study, from the base to the last step: its line."""
    started, setting, arm = time.perf_counter(), world.setting, ARMS[job.arm]
    adapters = new_adapters(world, job.seed)
    trainer = new_trainer(world, adapters, arm)
    sampler, clean = stage(world, *world.sampler(job.dose)), stage(world, world.decoder, world.kernels)
    for name, at in ((job.dose, sampler), ("clean", clean)):
        if name not in world.starts:  # the base is the same for all arms and seeds
            world.starts[name] = held_out(world, at, None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(
            plan=plan(setting, job.seed),
            stage=sampler,
            tasks=Rows(world.train, seed=job.seed),
            trainer=Shuffling(trainer) if arm.shuffled else trainer,
            algorithm=arm.algorithm,
            folder=RunFolder.create(Path(folder) / "run", ""),
            observer=Recorder(rows),
        )
        ended = "done"
        try:
            if asyncio.run(loop.run()).why is not Finish.DONE:
                raise KeyboardInterrupt  # the loop answers a signal by ending well; half a run is no run
        except TrainingStopped as error:
            ended = str(error)
        measured = list(loop.folder.mismatch.rows())
    after = {name: held_out(world, at, adapters) for name, at in (("sampler", sampler), ("clean", clean))}
    return {
        **asdict(job),
        "setting": setting.hash,
        "ended": ended,
        "before": {"sampler": world.starts[job.dose], "clean": world.starts["clean"]},
        "after": after,
        "steps": {name: [figure(row, key) for row in rows] for name, key in SERIES.items()},
        "measured": [compact(row) for row in measured],
        "seconds": round(time.perf_counter() - started, 1),
    }


SERIES = {
    "reward": "reward",
    "k3": "sampling/kl_k3",
    "tail_1.5": "sampling/tail_1.5",
    "tail_2": "sampling/tail_2",
    "ess": "sampling/ess",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "clip": "clip_ratio/region_mean",
    "length": "completions/mean_length",
    "overlap": "routing/overlap",
}


def figure(row: Mapping[str, Any], key: str) -> float | None:
    """Three digits of a metric; None where the step has none (nothing to learn from)."""
    value = row.get(key)
    return None if value is None or not np.isfinite(value) else float(f"{value:.3g}")


def new_adapters(world: World, seed: int) -> Adapters:
    setting = world.setting
    spec = AdapterSpec(
        rank=setting.rank,
        alpha=setting.alpha,
        targets=setting.targets,
        expert_scheme=ExpertScheme.SHARED_OUTER,
    )
    return init_adapters(world.decoder.config, spec, seed, "cpu")


def new_trainer(world: World, adapters: Adapters, arm: Arm) -> PolicyTrainer:
    """On the clean decoder. No gate: the arms that it would stop are what is studied."""
    setting = world.setting
    return PolicyTrainer(
        world.decoder,
        adapters,
        arm.algorithm,
        optimizer=OptimizerSettings(
            lr=setting.lr,
            warmup_steps=setting.warmup,
            max_grad_norm=setting.max_grad_norm,
            total_steps=setting.steps,
        ),
        replay=arm.replay,
        replay_threshold=0.0,
        measure_every=setting.measure_every,
        max_refused=3 * setting.minibatches,
        ops=world.kernels.training,
    )


def stage(world: World, decoder: Decoder, kernels: Kernels) -> RolloutContext:
    """Where episodes are played: a new engine on ``decoder``."""
    renderer, setting = world.renderer, world.setting
    return RolloutContext(
        engine=LocalEngine(
            decoder,
            kernels=kernels,
            decode=renderer.decode,
            kv_memory_mb=64,
            max_batch=setting.prompts * setting.group,
            context_limit=decoder.config.max_positions,
        ),
        env=lambda prompt: Dialogue(prompt, renderer),
        grader=Exact(),
        sampling=Sampling(max_tokens=setting.max_tokens, stop_tokens=renderer.stop_tokens),
        context_limit=decoder.config.max_positions,
    )


def plan(setting: Setting, seed: int) -> Plan:
    return Plan(
        steps=setting.steps,
        prompts_per_step=setting.prompts,
        group_size=setting.group,
        answer_tokens=setting.max_tokens,
        tokens_per_microbatch=setting.microbatch,
        minibatches=setting.minibatches,
        seed=seed,
        max_empty_steps=setting.steps + 1,  # a policy that never scores has collapsed; the run goes on
    )


def held_out(world: World, at: RolloutContext, adapters: Adapters | None) -> float:
    """The share of right answers to the fixed problems, with the same noise in all runs."""
    engine = at.engine
    engine.publish(adapters, 0)
    evaluation = Evaluation(split="eval", prompts=world.held_out, sampling=at.sampling)
    return round(asyncio.run(evaluate(at, evaluation, 0))["pass@1"], 4)


def compact(row: Mapping[str, Any]) -> Row:
    """Of a measured step what the page shows."""
    arms = {
        name: {"k3": arm["k3"], "tails": arm["tails"], "abs_max": arm["abs_max"]}
        for name, arm in row["arms"].items()
        if arm is not None
    }
    differ = row["routers"]["differ"] if row["routers"] else None
    return {"step": row["step"], "arms": arms, "differ": differ}


# ---- the study: many runs, one file


def jobs(parts: Sequence[tuple[Sequence[str], Sequence[str]]], seeds: Sequence[int]) -> list[Job]:
    """Part after part of (arms, doses), each seed by seed, so that a study which is stopped is balanced.
    Raises ValueError for an arm or a dose that is not known."""
    for arms, doses in parts:
        for dose in doses:
            parsed(dose)
        for name in arms:
            if name not in ARMS:
                raise ValueError(f"--arms has {name!r}; use some of {', '.join(ARMS)}")
    return [
        Job(arm=arm, dose=dose, seed=seed)
        for arms, doses in parts
        for seed in seeds
        for dose in doses
        for arm in arms
    ]


def finished(file: Path, setting: Setting) -> set[Job]:
    """The jobs that ``file`` has under this setting."""
    if not file.exists():
        return set()
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        Job(arm=row["arm"], dose=row["dose"], seed=row["seed"])
        for row in rows
        if row["setting"] == setting.hash
    }


def study(setting: Setting, wanted: Sequence[Job], file: Path, workers: int, say: Say = print) -> None:
    """Run what ``file`` does not have yet, and append to it, one line per run, as runs end."""
    done = finished(file, setting)
    left = [job for job in wanted if job not in done]
    say(f"{len(left)} of {len(wanted)} runs to do, setting {setting.hash}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for number, row in enumerate(_rows(setting, left, workers), start=1):
            out.write(json.dumps(row) + "\n")
            out.flush()
            after = row["after"]
            say(
                f"{number} of {len(left)}: {row['dose']} {row['arm']} seed {row['seed']}: "
                f"{row['before']['clean']:.3f} -> {after['clean']:.3f} (sampler {after['sampler']:.3f}), "
                f"{row['seconds']:.0f} s"
            )


def _rows(setting: Setting, left: Sequence[Job], workers: int) -> Iterator[Row]:
    """The lines of ``left`` as runs end. Workers import and load everything once."""
    if workers == 1:
        yield from (_in_world(setting, job) for job in left)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(_in_world, setting, job) for job in left]):
            yield future.result()


def _in_world(setting: Setting, job: Job) -> Row:
    return run(_world(setting), job)


@functools.cache
def _world(setting: Setting) -> World:
    return World.load(setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse(Bench):
    """Runs of all arms and doses; without --arms and --doses the whole study."""

    out: Path = option(Path("runs.jsonl"), "A line per run; a study that was stopped goes on there.")
    arms: tuple[str, ...] = option((), "With commas, with --doses.")
    doses: tuple[str, ...] = option((), "bf16, int8, int4, noise:SIGMA, with commas.")
    seeds: tuple[int, ...] = option(tuple(range(5)), "How many, or FIRST:END.", parse=seeds)
    model: str = option("asset:seed-moe", "A Hugging Face folder or a model name.")
    workers: int = option(1, "Runs at a time, one thread each.")

    def measure(self, say: Say) -> dict[str, Any]:
        if bool(self.arms) != bool(self.doses):
            raise ValueError("--arms and --doses belong together; give both, or neither for the whole study")
        wanted = jobs(((self.arms, self.doses),) if self.arms else PARTS, self.seeds)
        study(Setting(model=self.model), wanted, self.out, self.workers, say)
        return {"runs": len(wanted)}

    @staticmethod
    def table(result: Result) -> str:
        return f"{result['runs']} runs are there"


if __name__ == "__main__":
    sys.exit(main("collapse.py", Collapse, sys.argv[1:]))
