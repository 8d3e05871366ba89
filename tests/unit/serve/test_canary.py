"""The model of a product: a user keeps the arm, shares are kept, calls for other models are left alone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.apps.serve import served as launch
from ostinato.apps.serve.calls import Call
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.served import PRODUCT, follow_product
from ostinato.apps.serve.service import Canary, Model, Service
from ostinato.model.generation import SamplingDefaults


def service() -> Service:
    models = {name: Model(name=name, policy=name, created=0) for name in (PRODUCT, "product-canary", "other")}
    found = Service(*[None] * 2, models, *[None] * 3, SamplingDefaults())  # type: ignore[arg-type]
    found.canary = Canary(model=PRODUCT, name="product-canary", share=0.2, round=3)
    return found


def test_a_share_of_users_gets_the_canary_and_each_stays_with_it() -> None:
    found = service()
    arms = {f"u{k}": found.assign_model(Call(model="", text="hi"), f"u{k}").model for k in range(5000)}
    assert abs(Counter(arms.values())["product-canary"] / 5000 - 0.2) < 0.02
    assert all(
        found.assign_model(Call(model="", text="again"), user).model == arm for user, arm in arms.items()
    )


def test_who_names_another_model_gets_it() -> None:
    call = Call(text="hi", model="other")
    assert service().assign_model(call, "u1").model == "other"


def test_without_a_canary_nothing_is_drawn() -> None:
    found = service()
    found.canary = None
    call = Call(model="", text="hi")
    assert found.assign_model(call, "u1").model == ""


class Thread:
    """An engine's thread, of which the publications are kept."""

    def __init__(self) -> None:
        self.published: list[str] = []

    async def call(self, work: Any) -> None:
        work(SimpleNamespace(publish=lambda adapters, version, name: self.published.append(name)))


@pytest.fixture
def follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Service, Thread, Callable[[str], None]]:
    """(a service, its thread, what lets it follow the folder while that says so; "": while it is empty)."""
    monkeypatch.setattr(launch, "LOOK_S", 0.01)
    monkeypatch.setattr(launch, "load_adapter", lambda where, decoder: (0, Path(where), None))
    found, thread = service(), Thread()
    found.metrics = Metrics()
    served: Any = SimpleNamespace(service=found, thread=thread, decoder=None)

    async def followed() -> None:
        task = asyncio.create_task(follow_product(served, tmp_path))
        await asyncio.sleep(0.3)
        task.cancel()

    def follow(text: str) -> None:
        if text:
            (tmp_path / "serving.json").write_text(text)
        asyncio.run(followed())

    return found, thread, follow


def test_what_is_served_follows_the_loop(follows: Any) -> None:
    """The canary comes and goes; a folder that cannot be read is counted, and what was served goes on."""
    found, thread, follow = follows
    current = {"revision": "a1", "adapter": "a"}
    canary = {"revision": "b2", "adapter": "b", "share": 0.3}

    def seen(text: str) -> tuple[list[str], Canary | None]:
        follow(text)
        return [name for name in found.models if name.startswith(PRODUCT)], found.canary

    first = seen(json.dumps({"round": 1, "policy": current, "canary": canary}))
    assert first[0] == [PRODUCT, "product-canary"] and first[1] is not None and first[1].share == 0.3
    assert next(iter(found.models)) == PRODUCT  # who names none gets it
    assert (found.models["product-canary"].revision, found.models[PRODUCT].propensity) == ("b2", 0.7)
    assert seen("no JSON") == first
    assert b'ostinato_policies_total{outcome="refused"}' in found.metrics.format_text()
    assert seen(json.dumps({"round": 2, "policy": current})) == ([PRODUCT], None)
    assert set(thread.published) == {"a1", "b2"}


def test_before_a_loop_has_begun_its_base_is_served(follows: Any, caplog: pytest.LogCaptureFixture) -> None:
    """docs/product.md starts the server first: it had no model "product" then, and a warning every two
    seconds. The adapter that a product begins with (policy.base) was not served at all."""
    found, thread, follow = follows
    found.models = {}
    follow("")
    first = found.models[PRODUCT]
    assert (first.policy, first.revision, first.fingerprint(None)) == ("", "", "product@0")
    follow(json.dumps({"round": 0, "policy": {"revision": "", "adapter": "begun"}}))
    second = found.models[PRODUCT]
    assert (second.policy, second.revision, thread.published) == ("begun", "", ["begun"])
    follow("no JSON")
    assert len(caplog.messages) == 1
