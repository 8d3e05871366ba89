"""The loop on a bandit: a softmax over ten tokens, trained by its exact policy gradient in numpy.

Small enough to run a whole training in milliseconds, real enough that every room takes part: addressed
rollouts, credit, packing, publishing, accounts, evaluation, checkpoints, resume, signals.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from reference.fake_engine import FakeEngine

from ostinato.algo.algorithms import algorithm
from ostinato.config import Recipe
from ostinato.every import Every
from ostinato.history.rules import DraftStats, Source
from ostinato.model.flops import FlopModel, Part, Rates
from ostinato.observe.ledger import Ledger
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.evaluate import Evaluation
from ostinato.pipeline.loop import Finished, Loop, LoopState, Plan
from ostinato.pipeline.spool import Spool
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import RunFolder
from ostinato.types import (
    Batch,
    Completion,
    Group,
    HistoryEntry,
    Prompt,
    Request,
    Reward,
    Sampling,
    StepReport,
)

RIGHT = 3
TEN_A_ROW = FlopModel(parts={Part.MLP: Rates(tokens=10.0)}, backward_rates=Rates(tokens=20.0))
SAMPLING = Sampling(max_tokens=2)


class Stream:
    """``epoch`` prompts, again and again in the same order."""

    def __init__(self, epoch: int = 10**6) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch

    def prompt(self, index: int) -> Prompt:
        return Prompt(uid=f"p{index % self.epoch}", text="?")


class Once:
    """A single-turn episode whose prompt is three tokens."""

    def __init__(self, prompt: Prompt) -> None: ...

    def start(self) -> np.ndarray:
        return np.array([7, 8, 9], np.int32)

    async def step(self, completion: Completion) -> None:
        return None


class IsRight:
    """1 when the first sampled token is RIGHT."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    async def grade(self, group: Group) -> list[Reward]:
        rewards = [self.value * float(t.turns[0].completion.tokens[0] == RIGHT) for t in group.trajectories]
        return [Reward(value=value, parts={"right": value}) for value in rewards]


class Lesson(IsRight):
    """There is something to learn from every group."""

    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=float(i % 2)) for i in range(len(group.trajectories))]


class Dies:
    """``grader``, whose process is killed at the first group that ``at`` names."""

    def __init__(self, at: Callable[[Group], bool], grader: Any = None) -> None:
        self.at, self.grader = at, grader or IsRight()

    async def grade(self, group: Group) -> list[Reward]:
        if self.at(group):
            raise Killed
        return await self.grader.grade(group)


class Stuck(Dies):
    """``grader``, which does not come back from the groups that ``at`` names."""

    async def grade(self, group: Group) -> list[Reward]:
        if self.at(group):
            await asyncio.sleep(60)
        return await self.grader.grade(group)


class BanditTrainer:
    """Gradient ascent on sum(weights * advantages * log p): the logits are the adapters."""

    def __init__(self, lr: float = 5.0) -> None:
        self.logits, self.lr = np.zeros(10), lr
        self.ages: list[set[int]] = []  # of the tokens of each batch
        self.refuse = False
        self.seconds = 0.0  # that a step takes at least

    def adapters(self) -> np.ndarray:
        return self.logits.copy()

    def score(self, batch: Batch) -> list[np.ndarray]:
        logprobs = self.logits - np.log(np.exp(self.logits).sum())
        return [logprobs[part.targets].astype(np.float32) for part in batch.microbatches]

    def step(self, batch: Batch) -> StepReport:
        time.sleep(self.seconds)
        self.ages.append({int(age) for part in batch.microbatches for age in part.staleness})
        if self.refuse:
            return StepReport(
                metrics={"loss": math.nan}, skipped="the loss is nan", uids=batch.microbatches[0].uids
            )
        probs = np.exp(self.logits) / np.exp(self.logits).sum()
        slope = np.zeros(10)
        for microbatch in batch.microbatches:
            push = (microbatch.weights * microbatch.advantages).astype(np.float64)
            np.add.at(slope, microbatch.targets, push)
            slope -= push.sum() * probs
        self.logits = self.logits + self.lr * slope
        return StepReport(metrics={"loss": float(-slope.sum())})


def bandit(adapters: Any, request: Request, sampled: Sequence[int]) -> np.ndarray:
    return adapters


KEYS = {
    "trainer": {"steps", "tokens_per_microbatch", "minibatches", "checkpoint_every"}
    | {"stop_on_collapse", "stop_on_forgetting"},
    "rollout": {"prompts_per_step", "group_size", "solved_for_good"},
    "pipeline": {"staleness", "overlap", "watch_s"},
    "log": {"trajectories_every"},
}


def plan(**changes: Any) -> Plan:
    """Of keys of the recipe by their last names, without checks, and other fields of the plan."""
    usual: dict[str, Any] = {"steps": 6, "prompts_per_step": 4, "group_size": 8, "answer_tokens": 2}
    usual |= {"tokens_per_microbatch": 64, "checkpoint_every": 0, "trajectories_every": 0, **changes}
    recipe = Recipe()
    keys = {
        section: {name: usual.pop(name) for name in names & usual.keys()} for section, names in KEYS.items()
    }
    keys["eval"] = {"at_start": usual.pop("eval_at_start", True)}
    sections = {name: getattr(recipe, name).model_copy(update=own) for name, own in keys.items()}
    return Plan(recipe=recipe.model_copy(update={**sections, "seed": usual.pop("seed", 0)}), **usual)


class Killed(BaseException):
    """What kill -9 does, as far as a test in one process can: nothing of ours handles it."""


class TellingEngine(FakeEngine):
    """Tells of every token where its uniform fell, and of every answer that one of three drafts was right."""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        async for index, answer in super().generate(requests):
            edges = np.zeros(len(answer.tokens), np.float32)
            yield index, replace(answer, edges=edges, drafted=3, accepted=1, passes=len(answer.tokens) - 1)


@dataclass
class Recorder:
    """``pipeline.state.Observer`` of functions."""

    on_step: Callable[[Mapping[str, float]], None]
    on_eval: Callable[[Mapping[str, Any]], None] = lambda row: None
    should_stop: Callable[[int], bool] = lambda step: False


@dataclass
class Elsewhere:
    """``pipeline.state.Workers`` of functions."""

    progress: Callable[[], float] = lambda: 0.0
    extra_metrics: Callable[[], Mapping[str, float]] = dict
    trainer_consistent: Callable[[], bool] = lambda: False


class FakeMemory:
    """Store, lengths and drafter of ``Drafting``: notes the calls."""

    num_tokens, num_bytes = 7, 70

    def __init__(self) -> None:
        self.added: list[tuple[int, str]] = []
        self.forgotten: list[str] = []
        self.observed, self.looked = 0, 0.1
        all_of_it: Any = self
        self.accounts = Drafting(
            store=self, lengths=all_of_it, drafter=all_of_it, saved_s=lambda: 3 * self.looked
        )

    def add(self, uid: str, step: int, pasts: Sequence[HistoryEntry]) -> None:
        assert len(pasts) == 8 and pasts[0].context.tolist() == [7, 8, 9]
        self.added.append((step, uid))

    def observe(self, uid: str, lengths: Sequence[int], *, step: int) -> None:
        self.observed += sum(lengths)

    def forget(self, uids: list[str] | None = None) -> None:
        self.forgotten += uids or []

    def stats(self) -> DraftStats:
        """Ten times as much at each look: 1, 10, 100 ..."""
        self.looked *= 10
        counts, zeros = {source: int(self.looked) for source in Source}, (0,) * 10
        return DraftStats(
            **dict.fromkeys(("passes", "naps", "looked", "slept", "emitted"), int(10 * self.looked)),
            **dict.fromkeys(("live_bytes", "sequences", "groups"), 0),
            **dict.fromkeys(("open_s", "propose_s", "observe_s"), 0.0),
            **dict.fromkeys(("labels", "hits", "predicted"), zeros),
            **dict.fromkeys(("drafted_at", "accepted_at"), (int(self.looked), 0, 0)),
            drafted=counts,
            accepted=counts,
        )


class Bench:
    """A loop and the things that a test wants to look at."""

    def __init__(
        self, path: Path, *, state: LoopState | None = None, logits: Any = None, **changes: Any
    ) -> None:
        names = (
            "grader",
            "algorithm",
            "delay_s",
            "train_s",
            "drafting",
            "epoch",
            "eval_every",
            "keep",
            "forgetting",
        )
        options = {name: changes.pop(name) for name in names if name in changes}
        path.mkdir(exist_ok=True)
        self.folder = RunFolder(path)
        self.drafting = options.get("drafting")
        kind = FakeEngine if self.drafting is None else TellingEngine
        self.engine = kind(bandit, delay_s=options.get("delay_s", 0.0))
        self.trainer = BanditTrainer()
        self.trainer.seconds = options.get("train_s", 0.0)
        if logits is not None:
            self.trainer.logits = np.array(logits)
        self.saved: list[tuple[dict[str, Any], np.ndarray]] = []
        self.rows: list[Mapping[str, float]] = []
        self.observer = Recorder(on_step=self.rows.append)
        self.workers = Elsewhere()
        self.keep = options.get("keep", 1)  # checkpoints
        evaluation = Evaluation(
            split="eval",
            prompts=[Prompt(uid=f"e{i}", text="?") for i in range(8)],
            sampling=SAMPLING,
            samples=4,
            k=2,
            every=Every.parse(options.get("eval_every", 0), "eval_every"),
        )
        self.grader = options.get("grader", IsRight())
        self.loop = Loop(
            plan=plan(**changes),
            stage=RolloutContext(
                engine=self.engine, env=Once, grader=self.grader, sampling=SAMPLING, context_limit=16
            ),
            tasks=Stream(options.get("epoch", 10**6)),
            trainer=self.trainer,
            algorithm=options.get("algorithm", algorithm("grpo", scale="none", aggregation="token")),
            folder=self.folder,
            state=state or LoopState(),
            evaluations=[evaluation],
            forgetting=options["forgetting"](self) if "forgetting" in options else None,
            drafting=self.drafting and self.drafting.accounts,
            save=self.save,
            observer=self.observer,
            workers=self.workers,
        )

    def save(self, state: LoopState) -> int:
        self.saved.append((state.to_json(), self.trainer.logits.copy()))
        return self.saved[-self.keep :][0][0]["step"]

    def run(self) -> Finished:
        return asyncio.run(self.loop.run())


def a_spool(path: Path, ledger: Ledger | None = None) -> Spool:
    return Spool(path, ledger or Ledger(folder=RunFolder(path.parent)))


def deterministic(row: Mapping[str, Any]) -> dict[str, Any]:
    timed = ("time", "seconds", "per_s", "from_spool", "device_hours")
    kept = {name: value for name, value in row.items() if not any(word in name for word in timed)}
    return kept | {name: deterministic(value) for name, value in kept.items() if isinstance(value, Mapping)}


def send(bench: Bench, number: signal.Signals, after_steps: int) -> None:
    """Deliver a signal to this process when ``after_steps`` steps are reported."""

    def on_step(row: Mapping[str, float]) -> None:
        bench.rows.append(row)
        if row["step"] == after_steps:
            os.kill(os.getpid(), number)

    bench.observer.on_step = on_step


def raises_at(bench: Bench, done: int, error: Exception, learned: bool = False) -> None:
    """The trainer raises ``error`` when ``done`` steps are done, before or after it has learned."""
    learn = bench.trainer.step

    def step(batch: Batch) -> StepReport:
        report = learn(batch) if learned or bench.loop.state.step != done else None
        if report is None or bench.loop.state.step == done:
            raise error
        return report

    bench.trainer.step = step  # type: ignore[method-assign]


def as_saved(bench: Bench, which: int = -1) -> dict[str, Any]:
    """Where a resumed run begins: state and logits of a checkpoint, read back."""
    saved, logits = bench.saved[which]
    return {"state": LoopState(**json.loads(json.dumps(saved))), "logits": logits}
