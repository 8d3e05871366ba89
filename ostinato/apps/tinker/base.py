"""From what a user names to the work of a Tinker server: one base in the engine, and adapters of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.apps.serve.thread import EngineThread
from ostinato.apps.tinker.registry import Registry
from ostinato.apps.tinker.samplers import Base
from ostinato.apps.tinker.work import Work
from ostinato.engine.local import LocalEngine
from ostinato.launch.engine import training_ops
from ostinato.launch.machine import record_start
from ostinato.launch.policy import Policy, load_policy, serve
from ostinato.lock import locked
from ostinato.model.named import is_hub_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What an application of ``serve.tinker`` is made of."""

    work: Work
    registry: Registry


@contextlib.contextmanager
def open_work(target: str, overrides: tuple[str, ...], state: Path, name: str = "") -> Iterator[Workshop]:
    """The work of a model, a recipe or a run's base; what clients make is kept in ``state``. ``name`` is what
    clients call the base; "": its folder or hub name, which they may always use.

    Raises ValueError for a target that cannot be trained, and for a folder that another process uses.
    """
    loaded: list[tuple[Policy, LocalEngine]] = []

    def make() -> LocalEngine:
        policy = load_policy(target, *overrides)
        loaded.append((policy, serve(replace(policy, adapters=None, step=0))))
        return loaded[0][1]

    state.mkdir(parents=True, exist_ok=True)
    with (
        locked(state),
        contextlib.closing(Registry(state / "registry.sqlite")) as registry,
        contextlib.closing(EngineThread(make)) as thread,
    ):
        ((policy, engine),) = loaded
        work = Work(thread, _base(target, policy, engine, name), registry, state, record_start)
        yield Workshop(work=work, registry=registry)


def _base(target: str, policy: Policy, engine: LocalEngine, name: str) -> Base:
    path = policy.recipe.model.path
    folder = policy.folder.resolve()
    place = path if is_hub_name(path) else str(folder)
    return Base(
        name=name or place,
        path=place,
        aliases=frozenset({name or place, place, path, target, str(policy.folder), str(folder), folder.name}),
        decoder=policy.decoder,
        renderer=policy.renderer,
        ops=training_ops(policy.recipe, policy.decoder),
        context=engine.context_limit,
    )
