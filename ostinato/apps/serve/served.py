"""From what a user names to a service: the engine in its thread, the policies by name, and those of a run
that still learns, published as their checkpoints come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from ostinato.apps.serve.calls import Answer, Asker, Call, Message
from ostinato.apps.serve.grammar import Guides
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.service import Canary, Limits, Model, Service
from ostinato.apps.serve.thread import EngineThread
from ostinato.launch import RunFailed
from ostinato.launch.engine import AnyEngine
from ostinato.launch.models import recipe_of
from ostinato.launch.policy import Policy, load_adapter, load_newest, load_policy, serve
from ostinato.model.base import Base
from ostinato.model.generation import sampling_defaults
from ostinato.model.lora import Adapters
from ostinato.model.wire import NotFinite
from ostinato.run import RunFolder
from ostinato.train.checkpoint import checkpoints

log = logging.getLogger(__name__)
T = TypeVar("T")
BASE = ""  # the engine's own policy without adapters
PRODUCT = "product"  # the model of a product's loop, as clients name it
LOOK_S = 2.0  # between two looks for a newer checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What to serve, and within which limits."""

    target: str  # a run, a recipe or a model
    overrides: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)  # name: run folder or PEFT adapter
    limits: Limits  # context 0: the model's
    name: str = ""  # of the target; "": its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service at work."""

    service: Service
    thread: EngineThread
    decoder: Base
    runs: Mapping[str, RunFolder]  # by the name under which their newest policies are served


@contextlib.contextmanager
def open_service(serving: Serving) -> Iterator[Served]:
    """The service of what is named, while the context lasts.

    Raises ValueError for a target or an adapter that cannot be served.
    """
    loaded: list[_Loaded] = []

    def make() -> AnyEngine:
        loaded.append(_load(serving))
        return loaded[0].engine

    thread = EngineThread(make)
    try:
        (all_,) = loaded
        metrics = Metrics()
        metrics.watch(all_.engine)
        renderer, vocab_size = all_.policy.renderer, all_.policy.decoder.config.vocab_size
        context = serving.limits.context or all_.engine.context_limit
        limits = replace(serving.limits, context=context, vocab_size=vocab_size)
        guides, defaults = Guides(renderer, vocab_size), sampling_defaults(all_.policy.folder)
        service = Service(thread, renderer, all_.models, limits, metrics, guides, defaults)
        yield Served(service=service, thread=thread, decoder=all_.policy.decoder, runs=all_.runs)
    finally:
        thread.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    engine: AnyEngine
    policy: Policy
    models: dict[str, Model]
    runs: dict[str, RunFolder]


def _load(serving: Serving) -> _Loaded:
    """The engine with all policies, and what clients call them."""
    policy = load_policy(serving.target, *serving.overrides)
    engine = serve(replace(policy, adapters=None, step=0))
    runs: dict[str, RunFolder] = {}
    models: dict[str, Model] = {}
    path = policy.recipe.model.path
    base = Path(path).name if "/" in path and Path(path).exists() else path.removeprefix("asset:")
    created = int(time.time())
    run = recipe_of(serving.target)[1]
    if policy.adapters is not None:
        name = serving.name or (run.path.resolve().name if run else "adapter")
        engine.publish(policy.adapters, policy.step, name)
        models[name] = Model(name=name, policy=name, created=created, version=policy.step, parent=base)
        if run is not None:
            runs[name] = run
    base = base if policy.adapters is not None or not serving.name else serving.name
    models[base] = Model(name=base, policy=BASE, created=created, version=0 if models else policy.step)
    for name, where in serving.adapters.items():
        if name in models:
            raise ValueError(f"--adapter {name}={where}: the name {name!r} is taken; choose another one")
        step, adapters, run = load_adapter(where, policy.decoder)
        engine.publish(adapters, step, name)
        models[name] = Model(name=name, policy=name, created=created, version=step, parent=base)
        if run is not None:
            runs[name] = run
    return _Loaded(engine=engine, policy=policy, models=models, runs=runs)


async def follow(served: Served) -> None:
    """Publish what the runs have learned, checkpoint by checkpoint, until it is cancelled. Requests that run
    end under the policy that they began with."""
    seen = {name: _newest_name(run) for name, run in served.runs.items()}
    while True:
        await asyncio.sleep(LOOK_S)
        for name, run in served.runs.items():
            if (last := _newest_name(run)) == seen[name]:
                continue
            seen[name] = last
            await renew(served, name, partial(load_newest, run, served.decoder))


async def renew(served: Served, name: str, load: Callable[[], tuple[int, Adapters]]) -> None:
    """Serve what ``load`` gives, (step, adapters), under ``name`` from now on. Where it is damaged or not
    finite, that is counted, and the policy that was served goes on."""
    service, outcomes = served.service, served.service.metrics.policies
    try:
        step, adapters = await _in_own_thread(load)
        await served.thread.call(lambda engine: engine.publish(adapters, step, name))
    except (ValueError, RunFailed, OSError, NotFinite) as error:  # the next checkpoint may be better
        outcomes.labels("refused").inc()
        log.warning("the newest policy of %s is not served: %s", name, error)
        return
    service.models[name] = replace(service.models[name], version=step)
    outcomes.labels("published").inc()
    log.info("%s is at step %d", name, step)


async def follow_product(served: Served, folder: Path) -> None:
    """Serve the current policy and the canary of a product's loop as the model PRODUCT, first of all, until
    it is cancelled; the base where no loop has begun. What the loop cannot give is counted, logged once, and
    what was served goes on."""
    outcomes, seen, logged, published = served.service.metrics.policies, "", "", {BASE}
    while True:
        try:
            text = await _in_own_thread(_serving_of, folder)
            if text != seen:
                await _serve_product(served, json.loads(text), published)
                outcomes.labels("published").inc()
                seen, logged = text, ""
        except (ValueError, OSError, NotFinite) as error:
            outcomes.labels("refused").inc()
            if str(error) != logged:
                log.warning("what %s names is not served: %s", folder, error)
            logged = str(error)
        await asyncio.sleep(LOOK_S)


def _serving_of(folder: Path) -> str:
    try:
        return (folder / "serving.json").read_text()
    except FileNotFoundError:
        return json.dumps({"round": 0, "policy": {"revision": "", "adapter": None}})


async def _serve_product(served: Served, facts: Mapping[str, Any], published: set[str]) -> None:
    service, canary = served.service, facts.get("canary")
    share = canary["share"] if canary else 0.0
    arms = [(PRODUCT, "control", 1 - share, facts["policy"])]
    arms += [(f"{PRODUCT}-canary", "canary", share, canary)] if canary else []
    models = {}
    for name, arm, propensity, policy in arms:
        revision = str(policy["revision"])
        known = (
            revision or policy["adapter"] or BASE
        )  # the adapter that a product begins with has no revision
        if known not in published:
            _, adapters, _ = await _in_own_thread(partial(load_adapter, policy["adapter"], served.decoder))
            publish = partial(_published, adapters=adapters, version=facts["round"], name=known)
            await served.thread.call(publish)
            published.add(known)
        models[name] = Model(
            name=name,
            policy=known,
            created=int(time.time()),
            version=facts["round"],
            revision=revision,
            arm=arm if canary else "",
            propensity=propensity,
        )
    others = {name: one for name, one in service.models.items() if not name.startswith(PRODUCT)}
    service.models = {**models, **others}
    service.canary = canary and Canary(of=PRODUCT, name=arms[-1][0], share=share, round=facts["round"])


def _published(engine: AnyEngine, *, adapters: Adapters, version: int, name: str) -> None:
    engine.publish(adapters, version, name)


async def _in_own_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What ``function`` returns, in a thread that ends with it: see ``serve.thread``."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _newest_name(run: RunFolder) -> str:
    found = checkpoints(run.checkpoints)
    return found[-1].name if found else ""


# ---- what other applications add to a server


class Feedback(Protocol):
    """POST /feedback, GET /feedback.js, and the record of answers."""

    async def post(self, body: bytes) -> Any: ...

    def script(self) -> Response: ...

    def record(
        self, id_: str, model: Model, call: Call, answer: Answer, asker: Asker, index: int
    ) -> None: ...


class SessionMemory(Protocol):
    """Keeps the messages of a session within a budget; GET and POST /v1/memory/{session}."""

    def show(self, metrics: Metrics) -> None: ...

    async def shortened(
        self, session: str, messages: Sequence[Message], measure: Callable[[Sequence[Message]], int] | None
    ) -> tuple[str, list[Message]]: ...

    async def view(self, name: str) -> dict[str, Any]: ...

    async def change(self, name: str, body: bytes) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """None: the server has no such routes."""

    feedback: Feedback | None = None
    memory: SessionMemory | None = None


NO_ADDITIONS = Additions()

# (the model that is served, the server's own address, its key) -> what is added while the server runs
OpenAdditions = Callable[[Served, str, str], AbstractContextManager[Additions]]
