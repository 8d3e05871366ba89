"""``ostinato bench simulate --real``: the simulator beside the loop and the pool that it stands for.

Everything is real (admission, placement, the pool's messages, the trainer in its thread, the timeline) but
for two things that would need a core each: samplers sleep through their passes, for the seconds that the
cost table says, and the trainer sleeps through its steps. So many workers fit on one core, and what differs
is what the simulator leaves out.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.contender import ContenderFailed
from lab.pipeline_work import Window, figures
from lab.simulate_run import beside
from lab.simulator.events import Setup, simulate
from lab.simulator.policies import Policy, placement
from lab.simulator.sampler import Cost
from lab.simulator.traces import Stream, Trace, log_normal
from ostinato.algo.algorithms import algorithm
from ostinato.engine.pool import EnginePool
from ostinato.engine.serve import SamplerServer
from ostinato.history.lengths import Lengths
from ostinato.observe.ledger import Ledger
from ostinato.observe.timeline import Kind, Span
from ostinato.pipeline.loop import Loop
from ostinato.pipeline.state import Finish, Plan
from ostinato.rollout.play import Stage
from ostinato.run import RunFolder
from ostinato.types import Batch, Completion, Group, Prompt, Request, Reward, Sampling, StepReport, Stop

Say = Callable[[str], None]
COST = Cost.of([(1, 0.010), (16, 0.022)], slots=16, prefill_s=0.0002)  # slow enough for Python beside it
BAR = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    workers: int
    staleness: int
    policy: Policy


CASES = tuple(
    Case(workers=workers, staleness=staleness, policy=policy)
    for workers, staleness in ((2, 0), (2, 1), (4, 2))
    for policy in (Policy.STATIC, Policy.LEAST_LOADED, Policy.LONGEST_FIRST, Policy.HISTOPIPE)
)


def run(cases: Sequence[Case], say: Say) -> dict[str, Any]:
    """A row for each case: seconds per step and idle shares of both, and how far apart they are."""
    rows = []
    for case in cases:
        rows.append(compare(case))
        told = rows[-1]
        name = f"{case.workers} samplers, staleness {case.staleness}, {case.policy}"
        say(f"{name}: {told['real_step_s']:.3f} s per step, simulated {told['simulated_step_s']:.3f}")
    return {"rows": rows, "worst_step": max(abs(row["step_difference"]) for row in rows), "bar": BAR}


def compare(case: Case) -> dict[str, Any]:
    setup, stream = world(case)
    found = simulate(setup, stream)
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        real = played(setup, stream, Path(folder))
    return {
        "workers": case.workers,
        "staleness": case.staleness,
        "policy": case.policy,
    } | beside(real, found)


def world(case: Case) -> tuple[Setup, Stream]:
    """Answers of 40 tokens in the mean, the longest 200; a step of two prompts of eight for each sampler."""
    trace: Trace = log_normal(
        "short", epochs=3, prompts=24, samples=8, mean=40.0, limit=200, prompt_tokens=12, seed=1
    )
    steps = 9 + 2 * case.staleness
    prompts = 2 * case.workers
    stream = trace.stream(steps * prompts)
    setup = Setup(
        workers=case.workers,
        cost=COST,
        prompts=prompts,
        steps=steps,
        staleness=case.staleness,
        policy=case.policy,
        train_s=0.6,
        warmup=2 + case.staleness,
    )
    return setup, stream


class SleepingEngine:
    """Implements ``protocols.Engine``: tokens of the recorded number, in passes of the recorded time."""

    def __init__(self, cost: Cost, stream: Stream, name: str) -> None:
        self._cost, self._stream, self._name = cost, stream, name
        self._waiting: deque[_Seat] = deque()
        self._running: list[_Seat] = []
        self._read: set[int] = set()
        self._driver: asyncio.Task[None] | None = None
        self._spans: list[Span] = []
        self.version = 0

    def publish(self, adapters: Any, version: int) -> None:
        self.version = version

    @property
    def served(self) -> tuple[int, str]:
        return self.version, ""

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        done: asyncio.Queue[tuple[int, Completion]] = asyncio.Queue()
        for index, request in enumerate(requests):
            _, _, place, sample = request.seed
            length = int(self._stream.lengths[place, sample])
            self._waiting.append(_Seat(index, place, length, length, len(request.tokens), [], done))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        for _ in requests:
            yield await done.get()

    async def _drive(self) -> None:
        clock, before = time.perf_counter(), time.time()
        while self._waiting or self._running:
            seconds = 0.0
            while self._waiting and len(self._running) < self._cost.slots:
                seat = self._waiting.popleft()
                seconds += 0.0 if seat.place in self._read else seat.context * self._cost.prefill_s
                self._read.add(seat.place)
                self._running.append(seat)
            attended = float(sum(seat.context + 1 for seat in self._running))
            clock += seconds + self._cost.span(len(self._running), attended, 1)
            await asyncio.sleep(max(0.0, clock - time.perf_counter()))
            before, start = time.time(), before
            self._spans.append(Span(worker=self._name, kind=Kind.DECODE, start=start, stop=before))
            for seat in self._running:
                seat.versions.append(self.version)
                seat.left, seat.context = seat.left - 1, seat.context + 1
                if not seat.left:
                    seat.done.put_nowait((seat.index, answer(seat.versions)))
            self._running = [seat for seat in self._running if seat.left]
            await asyncio.sleep(0)  # whoever waits for these answers may ask for more at once


@dataclass(slots=True)
class _Seat:
    index: int
    place: int
    length: int
    left: int
    context: int
    versions: list[int]
    done: asyncio.Queue[tuple[int, Completion]]


def answer(versions: Sequence[int]) -> Completion:
    tokens = np.zeros(len(versions), np.int32)
    logprobs = np.full(len(versions), -1.0, np.float32)
    return Completion(tokens=tokens, logprobs=logprobs, versions=np.array(versions, np.int32), stop=Stop.EOS)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Implements ``protocols.Tasks``: the prompts of a stream."""

    stream: Stream

    def __len__(self) -> int:
        return len(self.stream.uids)

    def prompt(self, index: int) -> Prompt:
        return Prompt(uid=self.stream.uids[index], text=str(int(self.stream.prompts[index])))


class Once:
    """A prompt of so many tokens, and one answer."""

    def __init__(self, prompt: Prompt) -> None:
        self._tokens = int(prompt.text or "1")

    def start(self) -> np.ndarray:
        return np.zeros(self._tokens, np.int32)

    async def step(self, completion: Completion) -> None:
        return None


class Ruler:
    """Every second sibling is right; lengths are remembered."""

    def __init__(self, stream: Stream) -> None:
        self._lengths = Lengths()
        for uid, lengths in stream.history.items():
            self._lengths.observe(uid, lengths.tolist(), [False] * len(lengths))

    async def grade(self, group: Group) -> list[Reward]:
        lengths = [len(one.turns[-1].completion.tokens) for one in group.trajectories]
        self._lengths.observe(group.prompt.uid, lengths, [False] * len(lengths))
        return [Reward(value=float(i % 2)) for i in range(len(lengths))]

    def expect(self, request: Request) -> float:
        mean = self._lengths.mean(request.uid)
        return float(round(mean)) if math.isfinite(mean) else 0.0


@dataclass(frozen=True, slots=True)
class Sleeper:
    """Implements ``protocols.Trainer``: takes its time, and learns nothing."""

    seconds: float

    def step(self, batch: Batch) -> StepReport:
        time.sleep(self.seconds)
        return StepReport(metrics={"loss": 0.0})

    def adapters(self) -> None:
        return None


def played(setup: Setup, stream: Stream, path: Path) -> dict[str, Any]:
    """The same in the loop; ``pipeline_work.figures`` of the steps that count."""

    async def go() -> RunFolder:
        folder, ruler = RunFolder.create(path / "run", ""), Ruler(stream)

        async def spawn(number: int) -> SamplerServer:
            name = f"sampler-{number}"
            engine = SleepingEngine(setup.cost, stream, name)
            return SamplerServer(engine, name, lambda payload: None)

        pool = EnginePool(
            spawn,
            setup.workers,
            place=placement(setup.policy),
            expect=ruler.expect,
            slots=setup.cost.slots,
        )
        try:
            await pool.ready()
            finished = await new_loop(setup, stream, pool, ruler, folder).run()
        finally:
            await pool.close()
        if finished.why is not Finish.DONE:
            raise ContenderFailed(f"the run with {setup.policy} ended early: {finished.why}")
        return folder

    folder = asyncio.run(go())
    drain = setup.steps - setup.last
    return figures(folder, Window(steps=setup.steps, warm_up=setup.warmup, drain=drain))


def new_loop(setup: Setup, stream: Stream, pool: EnginePool, ruler: Ruler, folder: RunFolder) -> Loop:
    most = int(stream.lengths.max())
    return Loop(
        plan=Plan(
            steps=setup.steps,
            prompts_per_step=setup.prompts,
            group_size=stream.lengths.shape[1],
            answer_tokens=most,
            tokens_per_microbatch=8192,
            staleness=setup.staleness,
            overlap=True,
            eval_at_start=False,
            trajectories_every=1,
        ),
        stage=Stage(
            engine=pool,
            env=Once,
            grader=ruler,
            sampling=Sampling(max_tokens=most),
            context_limit=most + int(stream.prompts.max()) + 1,
        ),
        tasks=Recorded(stream),
        trainer=Sleeper(setup.train_s),
        algorithm=algorithm("dr_grpo"),
        folder=folder,
        ledger=Ledger(folder=folder),
        timed=(pool,),
    )


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="the loop and the pool with sleeping workers, and the simulator")
    for name in ("samplers", "staleness", "placement", "s per step", "simulated", "off by"):
        shown.add_column(name, justify="left" if name == "placement" else "right")
    for name in ("samplers idle", "simulated", "trainer idle", "simulated"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        shown.add_row(
            str(row["workers"]),
            str(row["staleness"]),
            row["policy"],
            f"{row['real_step_s']:.3f}",
            f"{row['simulated_step_s']:.3f}",
            f"{row['step_difference']:+.1%}",
            f"{row['real_bubble_share']:.1%}",
            f"{row['simulated_bubble_share']:.1%}",
            f"{row['real_trainer_idle_share']:.1%}",
            f"{row['simulated_trainer_idle_share']:.1%}",
        )
    return shown
