"""Open the service of a run, recipe or model: the engine in its thread, and the policies by name. Newer
policies of a run that still learns are published as their checkpoints come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from ostinato.apps.serve.calls import Answer, Asker, Call, Message
from ostinato.apps.serve.grammar import Guides
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.policies import OUTCOMES, CatalogPolicies
from ostinato.apps.serve.service import Canary, Limits, Model, Service
from ostinato.catalog import open_catalog
from ostinato.engine.engine_thread import EngineThread, run_in_own_thread
from ostinato.engine.local import LocalEngine
from ostinato.launch import RunFailed
from ostinato.launch.engine import AnyEngine
from ostinato.launch.models import load_recipe
from ostinato.launch.policy import (
    Policy,
    load_adapter,
    load_newest_adapters,
    load_policy,
    map_policy,
    serve_policy,
)
from ostinato.model.base import Base
from ostinato.model.generation import read_sampling_defaults
from ostinato.model.lora import Adapters
from ostinato.model.peft_io import compute_base_fingerprint
from ostinato.model.wire import NotFinite
from ostinato.run import RunFolder
from ostinato.train.checkpoint import list_checkpoints

log = logging.getLogger(__name__)
T = TypeVar("T")
BASE = ""  # the engine's own policy without adapters
PRODUCT = "product"  # the clients' name for the model of a product's loop
LOOK_S = 2.0  # between two looks for a newer checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The policies to serve, and the limits."""

    target: str  # a run, a recipe or a model
    overrides: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)  # name: run folder or PEFT adapter
    limits: Limits  # context 0: the model's
    name: str = ""  # of the target; "": its own
    catalog: Path | None = None  # further policies
    catalog_mb: int = 1024  # of these in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A running service."""

    service: Service
    thread: EngineThread[AnyEngine]
    decoder: Base
    runs: Mapping[str, RunFolder]  # by the name under which their newest policies are served
    policies: CatalogPolicies | None = None


@contextlib.contextmanager
def open_service(serving: ServiceSpec) -> Iterator[RunningService]:
    """Open the service that ``serving`` names, while the context lasts.

    Raises ValueError for a target or an adapter that cannot be served.
    """
    loads: list[_LoadedPolicies] = []

    def make() -> AnyEngine:
        loads.append(_load_all(serving))
        return loads[0].engine

    thread = EngineThread(make)
    try:
        (policies,) = loads
        metrics = Metrics()
        metrics.watch_engine(policies.engine)
        renderer, vocab_size = policies.policy.renderer, policies.policy.decoder.config.vocab_size
        context = serving.limits.context or policies.engine.context_limit
        limits = replace(serving.limits, context=context, vocab_size=vocab_size)
        guides, defaults = Guides(renderer, vocab_size), read_sampling_defaults(policies.policy.folder)
        with contextlib.ExitStack() as stack:
            stored = None
            if serving.catalog is not None:
                stored = stack.enter_context(_open_policies(serving, policies, thread, metrics))
            service = Service(thread, renderer, policies.models, limits, metrics, guides, defaults, stored)
            decoder = policies.policy.decoder
            yield RunningService(
                service=service, thread=thread, decoder=decoder, runs=policies.runs, policies=stored
            )
    finally:
        thread.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadedPolicies:
    engine: AnyEngine
    policy: Policy
    models: dict[str, Model]
    runs: dict[str, RunFolder]


def _load_all(serving: ServiceSpec) -> _LoadedPolicies:
    """Load the engine with all policies, and the names that clients use for them."""
    policy = load_policy(serving.target, *serving.overrides)
    engine = serve_policy(replace(policy, adapters=None, step=0))
    runs: dict[str, RunFolder] = {}
    models: dict[str, Model] = {}
    path = policy.recipe.model.path
    base = Path(path).name if "/" in path and Path(path).exists() else path.removeprefix("asset:")
    now = int(time.time())
    run = load_recipe(serving.target)[1]
    if policy.adapters is not None:
        name = serving.name or (run.path.resolve().name if run else "adapter")
        engine.publish(policy.adapters, policy.step, name)
        models[name] = Model(name=name, policy=name, created=now, version=policy.step, parent=base)
        if run is not None:
            runs[name] = run
    base = base if policy.adapters is not None or not serving.name else serving.name
    models[base] = Model(name=base, policy=BASE, created=now, version=0 if models else policy.step)
    for name, source in serving.adapters.items():
        if name in models:
            raise ValueError(f"--adapter {name}={source}: the name {name!r} is taken; choose another one")
        step, adapters, run = load_adapter(source, policy.decoder)
        engine.publish(adapters, step, name)
        models[name] = Model(name=name, policy=name, created=now, version=step, parent=base)
        if run is not None:
            runs[name] = run
    return _LoadedPolicies(engine=engine, policy=policy, models=models, runs=runs)


@contextlib.contextmanager
def _open_policies(
    serving: ServiceSpec, policies: _LoadedPolicies, thread: EngineThread[AnyEngine], metrics: Metrics
) -> Iterator[CatalogPolicies]:
    """Open the catalog for the engine. Raises ValueError for a folder without one, and for an engine that
    runs a model of transformers."""
    assert serving.catalog is not None
    engine = policies.engine
    if not isinstance(engine, LocalEngine):
        raise ValueError('--catalog needs our own decoder; set model.backend = "native"')
    decoder = engine.decoder
    load = partial(
        map_policy,
        config=decoder.config,
        fingerprint=compute_base_fingerprint(policies.policy.decoder),
        dtype=decoder.dtype,
        device=decoder.device,
    )
    with contextlib.closing(open_catalog(serving.catalog)) as catalog:
        stored = CatalogPolicies(catalog, thread, load, serving.catalog_mb << 20)
        metrics.add_counts("catalog_requests", "Policies of the catalog", OUTCOMES, stored.counts.__getitem__)
        yield stored


async def follow_catalog(policies: CatalogPolicies) -> None:
    """Take over what other processes change in the catalog, until cancelled. A request ends under the version
    with which it began."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            policies.refresh()
        except Exception as error:  # an end of this loop would keep keys valid that are revoked
            log.warning("the catalog cannot be read: %s", error)


async def follow_runs(served: RunningService) -> None:
    """Publish the newest checkpoint of each run, until cancelled. A request ends under the policy with which
    it began."""
    names = {name: _find_newest(run) for name, run in served.runs.items()}
    while True:
        await asyncio.sleep(LOOK_S)
        for name, run in served.runs.items():
            if (newest := _find_newest(run)) == names[name]:
                continue
            names[name] = newest
            await publish_newest(served, name, partial(load_newest_adapters, run, served.decoder))


async def publish_newest(served: RunningService, name: str, load: Callable[[], tuple[int, Adapters]]) -> None:
    """Serve the (step, adapters) that ``load`` returns under ``name`` from now on. A policy that is damaged
    or not finite is counted and not served, and the earlier policy stays."""
    service, outcomes = served.service, served.service.metrics.policies
    try:
        step, adapters = await run_in_own_thread(load)
        await served.thread.call(lambda engine: engine.publish(adapters, step, name))
    except (ValueError, RunFailed, OSError, NotFinite) as error:  # the next checkpoint may be better
        outcomes.labels("refused").inc()
        log.warning("the newest policy of %s is not served: %s", name, error)
        return
    service.models[name] = replace(service.models[name], version=step)
    outcomes.labels("published").inc()
    log.info("%s is at step %d", name, step)


async def follow_product(served: RunningService, folder: Path) -> None:
    """Serve the current policy and the canary of a product's loop as the model PRODUCT, before all other
    models, until cancelled. Where no loop has begun, PRODUCT is the base. A policy that cannot be loaded is
    counted and logged once, and the earlier policy stays."""
    outcomes, current_text, last_error, policies = served.service.metrics.policies, "", "", {BASE}
    while True:
        try:
            text = await run_in_own_thread(_read_serving, folder)
            if text != current_text:
                await _serve_product(served, json.loads(text), policies)
                outcomes.labels("published").inc()
                current_text, last_error = text, ""
        except (ValueError, OSError, NotFinite) as error:
            outcomes.labels("refused").inc()
            if str(error) != last_error:
                log.warning("what %s names is not served: %s", folder, error)
            last_error = str(error)
        await asyncio.sleep(LOOK_S)


def _read_serving(folder: Path) -> str:
    try:
        return (folder / "serving.json").read_text()
    except FileNotFoundError:
        return json.dumps({"round": 0, "policy": {"revision": "", "adapter": None}})


async def _serve_product(served: RunningService, facts: Mapping[str, Any], policies: set[str]) -> None:
    """Publish the policies of a product's loop, and make them the first models of the service."""
    service, canary = served.service, facts.get("canary")
    share = canary["share"] if canary else 0.0
    arms = [(PRODUCT, "control", 1 - share, facts["policy"])]
    arms += [(f"{PRODUCT}-canary", "canary", share, canary)] if canary else []
    models = {}
    for name, arm, propensity, policy in arms:
        revision = str(policy["revision"])
        policy_name = revision or policy["adapter"] or BASE  # a product's first adapter has no revision
        if policy_name not in policies:
            _, adapters, _ = await run_in_own_thread(partial(load_adapter, policy["adapter"], served.decoder))
            call = partial(_publish, adapters=adapters, version=facts["round"], name=policy_name)
            await served.thread.call(call)
            policies.add(policy_name)
        models[name] = Model(
            name=name,
            policy=policy_name,
            created=int(time.time()),
            version=facts["round"],
            revision=revision,
            arm=arm if canary else "",
            propensity=propensity,
        )
    others = {name: model for name, model in service.models.items() if not name.startswith(PRODUCT)}
    service.models = {**models, **others}
    service.canary = canary and Canary(model=PRODUCT, name=arms[-1][0], share=share, round=facts["round"])


def _publish(engine: AnyEngine, *, adapters: Adapters, version: int, name: str) -> None:
    engine.publish(adapters, version, name)


def _find_newest(run: RunFolder) -> str:
    folders = list_checkpoints(run.checkpoints)
    return folders[-1].name if folders else ""


# ---- additions of other applications to a server


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

    async def shorten(
        self, session: str, messages: Sequence[Message], measure: Callable[[Sequence[Message]], int] | None
    ) -> tuple[str, list[Message]]: ...

    async def view(self, name: str) -> dict[str, Any]: ...

    async def change(self, name: str, body: bytes) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """The additions of other applications. None: the server has no such routes."""

    feedback: Feedback | None = None
    memory: SessionMemory | None = None


NO_ADDITIONS = Additions()

# (the running service, the server's address, its key) -> the additions while the server runs
OpenAdditions = Callable[[RunningService, str, str], AbstractContextManager[Additions]]
