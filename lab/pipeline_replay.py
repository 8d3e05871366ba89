"""Part (b) of ``ostinato bench pipeline``: placements side by side, on two samplers and a replayed trainer.

The samplers are real, each on a core of its own, and so are prompts, tokens and the loop. The trainer sleeps
for the seconds that one took in part (a), and publishes the policy that it has: lengths then keep their
order from one epoch to the next, and every placement knows them equally well. A step has twice as many
prompts as in part (a), for twice as many samplers, and the trainer's seconds are what they were, as if it
had two cores as well.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.contender import ContenderFailed
from lab.pipeline_work import Window, Work, figures, write_prompts
from ostinato.algo.algorithms import algorithm
from ostinato.cluster.actors import Cluster, Want
from ostinato.cluster.samplers import SamplerLink
from ostinato.engine.local import LocalEngine
from ostinato.engine.pool import EnginePool
from ostinato.engine.serve import SamplerServer
from ostinato.env.dialogue import Dialogue
from ostinato.env.tasks import Rows, load_tasks
from ostinato.history.lengths import Lengths
from ostinato.model.hf import load_model
from ostinato.model.named import model_folder
from ostinato.model.native import BuildError, load
from ostinato.model.wire import unpack
from ostinato.observe.ledger import Ledger
from ostinato.pipeline.loop import Finish, Loop, Plan
from ostinato.render import Renderer
from ostinato.rollout.play import Stage
from ostinato.rollout.schedule import placement
from ostinato.run import RunFolder
from ostinato.types import Batch, Group, Request, Reward, Sampling, StepReport, Stop

Say = Callable[[str], None]
PLACEMENTS = ("least-loaded", "longest-first", "histopipe")
SAMPLERS = 2
AHEAD = 2  # calls for each seat of a sampler, as in a recipe's run: the next one is there when an answer ends
START_S, SILENCE_S = 120.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """``train_s``: the trainer's recorded seconds, step by step, from the start again where a run has more
    steps. ``epoch``: prompts, which have to come back for their lengths to be known."""

    work: Work
    train_s: tuple[float, ...]
    model: str = "asset:seed-moe"
    placements: tuple[str, ...] = PLACEMENTS
    rounds: int = 2
    staleness: int = 1
    epoch: int = 192
    steps: int = 11
    warm_up: int = 3  # the first epoch: nothing is known of lengths
    drain: int = 2

    def __post_init__(self) -> None:
        if not self.train_s:
            raise ValueError("train_s is empty, so there is nothing to replay; give the seconds of a step")

    @property
    def window(self) -> Window:
        return Window(steps=self.steps, warm_up=self.warm_up, drain=self.drain)


# ---- the worker


def sampler(name: str, model: str, slots: int) -> SamplerServer:
    """What a worker is built of: our engine on the model's own tensors, with one thread."""
    torch.set_num_threads(1)
    folder = model_folder(model)
    decoder = load_model(folder, dtype=torch.bfloat16)
    try:
        kernels = load()
    except BuildError:
        kernels = None
    engine = LocalEngine(decoder, kernels=kernels, decode=Renderer(folder).decode, max_batch=slots, name=name)
    return SamplerServer(engine, name, lambda payload: unpack(payload, decoder.config))


# ---- the driver's side


@dataclass(kw_only=True)
class Sleeper:
    """A trainer that takes its time and learns nothing. Implements protocols.Trainer."""

    seconds: Iterator[float]

    def step(self, batch: Batch) -> StepReport:
        time.sleep(next(self.seconds))
        return StepReport(metrics={"loss": 0.0})

    def adapters(self) -> None:
        """The base."""
        return None


@dataclass(kw_only=True)
class Ruler:
    """A grader that measures: every second sibling is right, and the lengths of all are remembered."""

    lengths: Lengths

    async def grade(self, group: Group) -> list[Reward]:
        ended = [trajectory.turns[-1].completion for trajectory in group.trajectories]
        self.lengths.observe(
            group.prompt.uid, [len(one.tokens) for one in ended], [one.stop is Stop.LENGTH for one in ended]
        )
        return [Reward(value=float(number % 2)) for number in range(len(ended))]

    def expect(self, request: Request) -> float:
        """Tokens that the request will be answered with; 0 where nothing is known."""
        mean = self.lengths.mean(request.uid)
        return mean if mean < float("inf") else 0.0


def run(replay: Replay, say: Say = print) -> dict[str, Any]:
    """Every placement in every round, and what they come to."""
    runs: list[dict[str, Any]] = []
    wants = [Want(name=f"sampler-{number}") for number in range(SAMPLERS)]
    with (
        tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root,
        Cluster.open("", wants, pin=True, start_s=START_S, silence_s=SILENCE_S) as cluster,
    ):
        path = write_prompts(replay.work, Path(root) / "prompts.jsonl")
        for round_, name in turns(replay):
            folder = RunFolder.create(Path(root) / f"{name}-{round_}", "")
            asyncio.run(played(replay, cluster, path, folder, name, round_))
            runs.append({"placement": name, "round": round_} | figures(folder, replay.window))
            say(
                f"{name}, round {round_ + 1}: {1 / runs[-1]['steps_per_s']:.3f} s per step, samplers idle "
                f"{idle(runs[-1]):.1%}"
            )
    return summary(replay, runs)


def turns(replay: Replay) -> Iterator[tuple[int, str]]:
    """There and back again: what drifts meets all alike."""
    for round_ in range(replay.rounds):
        order = replay.placements if round_ % 2 == 0 else replay.placements[::-1]
        yield from ((round_, name) for name in order)


async def played(
    replay: Replay, cluster: Cluster, prompts: Path, folder: RunFolder, name: str, seed: int
) -> None:
    """One run under one placement; its books are in ``folder``."""
    ruler = Ruler(lengths=Lengths())

    async def spawn(number: int) -> SamplerLink:
        worker = f"sampler-{number}"
        arguments = {"name": worker, "model": replay.model, "slots": replay.work.slots}
        made = cluster.remote(worker, f"{__name__}:sampler", arguments, start_s=START_S)
        return SamplerLink(made, SILENCE_S)

    pool = EnginePool(
        spawn,
        SAMPLERS,
        place=placement(name),
        expect=ruler.expect,
        slots=AHEAD * replay.work.slots,
        silence_s=SILENCE_S,
        start_s=START_S,
    )
    try:
        await pool.ready()
        finished = await new_loop(replay, pool, ruler, prompts, folder, seed).run()
    finally:
        await pool.close()
    if finished.why is not Finish.DONE:
        raise ContenderFailed(f"the replay of {name} ended early: {finished.why}")


def new_loop(
    replay: Replay, pool: EnginePool, ruler: Ruler, prompts: Path, folder: RunFolder, seed: int
) -> Loop:
    """The run: sampled by ``pool``, rewarded by turns, trained by nobody."""
    work, renderer = replay.work, Renderer(model_folder(replay.model))
    rows = load_tasks(str(prompts), "train", 0, replay.epoch)
    stage = Stage(
        engine=pool,
        env=lambda prompt: Dialogue(prompt, renderer),
        grader=ruler,
        sampling=Sampling(max_tokens=work.max_tokens, stop_tokens=renderer.stop_tokens),
        context_limit=1024,
    )
    plan = Plan(
        steps=replay.steps,
        prompts_per_step=SAMPLERS * work.prompts,
        group_size=work.siblings,
        answer_tokens=work.max_tokens,
        tokens_per_microbatch=4096,
        staleness=replay.staleness,
        overlap=True,
        seed=seed,
        eval_at_start=False,
    )
    return Loop(
        plan=plan,
        stage=stage,
        tasks=Rows(rows, seed=seed),
        trainer=Sleeper(seconds=itertools.cycle(replay.train_s)),
        algorithm=algorithm("dr_grpo"),
        folder=folder,
        ledger=Ledger(folder=folder),
        span_sources=(pool,),
    )


# ---- what the runs come to


def idle(one: Mapping[str, Any]) -> float:
    """The share of their time in which the samplers of a run did nothing."""
    shares = [1 - share for name, share in one["utilisation"].items() if name != "trainer"]
    return statistics.fmean(shares) if shares else float("nan")


def summary(replay: Replay, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By placement: medians over rounds, and how many times as fast histopipe was in the same round."""
    rows: dict[str, Any] = {}
    seconds = {(one["placement"], one["round"]): 1 / one["steps_per_s"] for one in runs}
    for name in replay.placements:
        mine = [one for one in runs if one["placement"] == name]
        rows[name] = {
            "seconds_per_step": round(statistics.median(1 / one["steps_per_s"] for one in mine), 4),
            "sampler_idle": round(statistics.median(idle(one) for one in mine), 4),
            "bubble_share": statistics.median(one["bubble_share"] or 0.0 for one in mine),
            "tail": round(statistics.median(one["tail"] for one in mine), 2),
        }
        if "histopipe" in replay.placements:
            gains = [seconds[name, n] / seconds["histopipe", n] for n in range(replay.rounds)]
            rows[name]["over_histopipe"] = [round(gain, 4) for gain in gains]
    return {
        "placements": rows,
        "staleness": replay.staleness,
        "samplers": SAMPLERS,
        "train_s": round(statistics.median(replay.train_s), 4),
        "runs": list(runs),
    }
