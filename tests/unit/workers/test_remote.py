"""Workers behind links, without Ray: the remote is in this process, and what it says is pickled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, group_of

from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.engine.serve import SamplerLink
from ostinato.reward.remote import GraderLink, GraderServer
from ostinato.train.remote import TrainerLink, TrainerServer
from ostinato.types import Batch, Group, Microbatch, Reward, StepReport
from ostinato.workers.host import BUILD, Host
from ostinato.workers.remote import (
    Patience,
    WorkerFault,
    WorkerKind,
    WorkerLost,
    pack_answer,
    pack_refusal,
    seal,
    unpack_outcome,
    unseal,
)


class Direct:
    """``remote.Remote`` to an object in this process. ``dies`` says at which of its calls it dies, before the
    method runs or after it, without an answer."""

    def __init__(self, served: Any, dies: Callable[[int], str] = lambda call: "") -> None:
        self.name, self.served, self.killed, self.methods = "worker-0", served, False, list[str]()
        self._dies, self._calls = dies, 0
        of_trainer = isinstance(served, TrainerServer)
        self.kind = WorkerKind.TRAINER if of_trainer else WorkerKind.GRADER

    def _begin(self, method: str) -> str:
        self._calls += 1
        self.methods.append(method)
        end = self._dies(self._calls)
        if self.killed or end == "before":
            raise WorkerLost(self.kind, f"was lost while it did {method}", self.name)
        return end

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        end = self._begin(method)
        try:
            payload = pack_answer(getattr(self.served, method)(*unseal(seal(arguments))))
        except Exception as error:
            payload = pack_refusal(error, self.name)
        if end:
            raise WorkerLost(self.kind, f"was lost while it did {method}", self.name)
        return unpack_outcome(payload)

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
        end = self._begin(method)
        await asyncio.sleep(0)
        value = await getattr(self.served, method)(*unseal(seal(arguments)))
        if end:
            raise WorkerLost(self.kind, f"was lost while it did {method}", self.name)
        return unpack_outcome(pack_answer(value))

    def kill(self) -> None:
        self.killed = True


# ---- what travels


def test_a_refused_batch_is_refused_as_itself_from_afar() -> None:
    """Exceptions are rebuilt from their message alone unless they say otherwise: Misaligned, which carries a
    diagnosis, came back as a TypeError about its own arguments."""
    reported = Misaligned("routes of others", diagnosis(), ("a#0",), steps_taken=2)
    with pytest.raises(Misaligned, match="routes of others") as caught:
        unpack_outcome(pack_refusal(reported, "trainer"))
    assert caught.value.uids == ("a#0",) and caught.value.steps_taken == 2
    assert caught.value.diagnosis == diagnosis()
    assert caught.value.__notes__[0].startswith("in trainer:\n")


def diagnosis() -> Diagnosis:
    return Diagnosis(cause=Cause.SHIFTED, fixed_overlap=0.99)


def test_what_cannot_be_pickled_is_told_in_words() -> None:
    class Odd(Exception):
        def __init__(self) -> None:
            super().__init__("a lock cannot travel")
            self.lock = threading.Lock()

    with pytest.raises(WorkerFault, match="grader-1 raised Odd: a lock cannot travel"):
        unpack_outcome(pack_refusal(Odd(), "grader-1"))


# ---- how long somebody is waited for


def signs(*heard: float) -> Callable[[], Future[float]]:
    """Signs of life with that progress, one for each question, and then none."""
    left = iter(heard)

    def ask() -> Future[float]:
        sign: Future[float] = Future()
        for progress in left:
            sign.set_result(progress)
            break
        return sign

    return ask


@pytest.mark.parametrize(
    ("heard", "slices", "limit"),
    [
        ((), 4, 4),  # it gives no sign at all
        ((0.0,) * 99, 6, 6),  # it lives, and gets nowhere
        ((1.0,) * 99, 8, 6),  # it has got on once
        ((0.0, 0.0, 1.0, 1.0, 2.0), 10, 4),  # it got on until it gave no sign any more
    ],
)
def test_who_gets_on_is_waited_for(heard: tuple[float, ...], slices: int, limit: int) -> None:
    """A trainer elsewhere was killed, and its step begun anew, whenever a step took longer than the bound of
    the watch, which in one process hears of every microbatch."""
    patience = Patience(signs(*heard), "trainer", "gave no answer to step", 6.0, 4.0)
    for _ in range(slices - 1):
        patience.wear(1.0)
    with pytest.raises(WorkerLost, match=f"trainer gave no answer to step in {limit} s"):
        patience.wear(1.0)


# ---- the worker's side


class Counting:
    """Notes the order in which its methods begin."""

    def __init__(self, start: int = 0) -> None:
        self.seen: list[int] = []
        self.start, self.thread = start, threading.current_thread().name

    async def meet(self, number: int) -> list[int]:
        self.seen.append(number)
        await asyncio.sleep(0.001 * (number % 3))
        return self.seen

    def work(self, number: int) -> tuple[int, str]:
        self.seen.append(number)
        return self.start + number, threading.current_thread().name

    @property
    def progress(self) -> float:
        return len(self.seen)

    def refuse(self) -> None:
        raise ValueError("not this one")


def counting(start: int) -> Counting:
    return Counting(start)


def hosted(test: Callable[[Host], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        host = Host("worker-0")
        arguments = (f"{__name__}:counting", {"start": 40}, os.getcwd())
        unpack_outcome(await host.call(0, BUILD, seal(arguments)))
        return await test(host)

    return asyncio.run(run())


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(1, 8)))
def test_calls_begin_in_the_order_in_which_they_were_made(order: list[int]) -> None:
    """An actor may get a small call before a large one that was sent first: a publication would overtake the
    calls that are to be sampled by the policy before it."""

    async def test(host: Host) -> list[int]:
        await asyncio.gather(*(host.call(number, "meet", seal((number,))) for number in order))
        return unpack_outcome(await host.call(8, "meet", seal((8,))))

    assert hosted(test) == list(range(1, 9))


def test_methods_that_compute_do_so_in_one_thread_and_refusals_come_back() -> None:
    async def test(host: Host) -> None:
        number, thread = unpack_outcome(await host.call(1, "work", seal((2,))))
        assert number == 42 and thread.startswith("worker-0")
        with pytest.raises(ValueError, match="not this one"):
            unpack_outcome(await host.call(2, "refuse", seal(())))
        assert await host.alive() == 1.0

    hosted(test)


def test_a_worker_that_gives_way_does_so_with_all_its_threads() -> None:
    """On Linux a priority is one of a thread, and Ray has started some before the worker is made."""
    code = """
import os, threading
from ostinato.workers.host import Host
before, stop = os.getpriority(os.PRIO_PROCESS, 0), threading.Event()
threading.Thread(target=stop.wait).start()
Host("sampler-0", nice=3)
threading.Thread(target=stop.wait).start()
print({os.getpriority(os.PRIO_PROCESS, int(one)) - before for one in os.listdir("/proc/self/task")})
stop.set()
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system does not list the threads of a process")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "{3}"


def test_what_follows_waits_until_the_worker_is_built() -> None:
    async def run() -> int:
        host = Host("worker-0")
        arguments = (f"{__name__}:counting", {"start": 1}, os.getcwd())
        build, call = host.call(0, BUILD, seal(arguments)), host.call(1, "work", seal((1,)))
        built, called = await asyncio.gather(build, call)
        unpack_outcome(built)
        return unpack_outcome(called)[0]

    assert asyncio.run(run()) == 2


# ---- graders


@dataclass
class Judge:
    """Rewards the number of tokens; counts what it sees."""

    counters: Counter[str]

    async def grade(self, group: Group) -> list[Reward]:
        self.counters["seen"] += 1
        return [Reward(value=float(len(one.turns[0].completion.tokens))) for one in group.trajectories]


def group(*lengths: int) -> Group:
    routed = (completion(n, experts=np.zeros((n, 2, 2), np.int8)) for n in lengths)
    return group_of(*map(episode, routed))


def graders(count: int, dies: Callable[[int, int], str]) -> tuple[GraderLink, list[Direct]]:
    """A link and its workers; ``dies(worker, call)``."""
    servers = [GraderServer(Judge(Counter()), f"grader-{index}") for index in range(count)]
    made = [Direct(one, lambda call, index=index: dies(index, call)) for index, one in enumerate(servers)]
    return GraderLink(made, within_s=1.0), made


def test_groups_are_shared_out_and_counted() -> None:
    link, made = graders(2, lambda worker, call: "")

    async def run() -> list[list[Reward]]:
        return await asyncio.gather(*(link.grade(group(3, n)) for n in range(4)))

    assert [[one.value for one in rewards] for rewards in asyncio.run(run())] == [[3.0, n] for n in range(4)]
    assert [len(one.methods) for one in made] == [2, 2] and link.counters == {"seen": 4}
    assert {span.worker for span in link.take_spans()} == {"grader-0", "grader-1"} and not link.take_spans()


def test_a_grader_that_is_lost_ends_the_run_and_no_answer_gets_0() -> None:
    link, _ = graders(2, lambda worker, call: "after" if worker == 1 else "")

    async def run() -> list[list[Reward]]:
        return await asyncio.gather(*(link.grade(group(n)) for n in range(4)))

    with pytest.raises(WorkerLost, match="was lost while it did grade"):
        asyncio.run(run())


def test_graders_that_cannot_be_built_are_told_before_any_group() -> None:
    """A reward that another host could not import was found at the first group, as a fault of each."""

    class Nowhere(Direct):
        async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
            raise WorkerFault("grader-0 on elsewhere: reward 'mine:f' cannot be imported")

    link = GraderLink([Nowhere(None), Nowhere(None)], within_s=1.0)
    with pytest.raises(WorkerFault, match="on elsewhere: reward 'mine:f' cannot be imported"):
        asyncio.run(link.ready())


# ---- the trainer


class Sums:
    """A trainer in eight bytes: ``w = w * 0.9 + mean of the batch``, and the number of its steps."""

    def __init__(self) -> None:
        self.w, self.steps = np.zeros(1), 0

    def step(self, batch: Batch) -> StepReport:
        if batch.num_samples == 13:
            raise Misaligned("thirteen", diagnosis())
        self.w, self.steps = self.w * 0.9 + batch.num_tokens / 7, self.steps + 1
        return StepReport(metrics={"w": float(self.w[0]), "steps": float(self.steps)})

    def score(self, batch: Batch) -> list[np.ndarray]:
        return []

    def adapters(self) -> np.ndarray:
        return self.w.copy()

    def tensors(self) -> dict[str, np.ndarray]:
        return {"w": self.w}

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def restore(self, tensors: Any, counters: Any) -> None:
        self.w, self.steps = tensors["w"], counters["steps"]

    def identity(self) -> dict[str, str]:
        return {"model": "sums"}

    @property
    def progress(self) -> float:
        return self.steps


def batch(num_tokens: int, num_samples: int = 1) -> Batch:
    microbatches: tuple[Microbatch, ...] = ()
    return Batch(
        microbatches=microbatches, num_samples=num_samples, num_tokens=num_tokens, num_context_tokens=0
    )


def trainer(dies: Callable[[int], str] = lambda call: "") -> TrainerLink:
    """A link whose worker dies at some call."""
    return TrainerLink(Direct(TrainerServer(Sums()), dies), within_s=1.0)


@pytest.mark.parametrize("end", ["before", "after"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_last_state_is_safe_when_the_trainer_is_lost(steps: int, end: str) -> None:
    """What the run saves then, a new trainer goes on from as if nothing had been: the step is done again."""
    plain, link = Sums(), trainer(lambda call: end if call == 4 + steps else "")
    for size in range(steps):
        assert link.step(batch(size)) == plain.step(batch(size))
        assert link.adapters() == plain.adapters()
    with pytest.raises(WorkerLost, match="was lost while it did step"):
        link.step(batch(7))
    other = trainer()
    other.restore(link.tensors(), link.counters())
    assert other.step(batch(7)) == plain.step(batch(7)) and other.adapters() == plain.adapters()
    assert len(link.take_spans()) == steps


def test_a_run_resumes_into_a_trainer_elsewhere() -> None:
    link = trainer()
    link.restore({"w": np.array([3.0])}, {"steps": 4})
    assert link.adapters() == 3.0 and link.identity() == {"model": "sums"}
    assert link.step(batch(7)).metrics == {"w": 3.7, "steps": 5.0}


def test_what_the_trainer_refuses_is_no_loss() -> None:
    link = trainer()
    link.step(batch(7))
    with pytest.raises(Misaligned, match="thirteen"):
        link.step(batch(7, num_samples=13))
    assert link.counters() == {"steps": 1}


# ---- samplers


@pytest.mark.parametrize("end", ["", "after", "late"])
def test_a_sampler_is_handed_over_when_it_is_there(end: str) -> None:
    """Its first policy was sent while it still loaded its model, and the file of all weights was gone when it
    came to read it. Who waits no longer leaves no worker behind."""

    class Loading:
        async def collect(self, wait_s: float) -> str:
            await asyncio.sleep(0.01 if end != "late" else 60)
            return "there"

    remote = Direct(Loading(), lambda call: "after" if end == "after" else "")

    async def run() -> None:
        link: Any = SamplerLink(remote, 5.0)
        if end:
            with pytest.raises(WorkerLost if end == "after" else TimeoutError):
                await asyncio.wait_for(link.wait_until_built(), 0.1)
        else:
            assert await link.wait_until_built() is link

    asyncio.run(run())
    assert remote.methods == ["collect"] and remote.killed == bool(end)
