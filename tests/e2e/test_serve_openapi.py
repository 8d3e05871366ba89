"""The description at /openapi.json, and requests made from it: no 5xx, and answers as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serving import At, server

PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
    "/v1/models",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
    "/health",
}


@pytest.fixture(scope="module")
def at() -> Iterator[At]:
    with server(sequences=64, max_tokens=16, n=4, timeout_s=30.0) as running:
        yield running


def test_the_description_names_every_path_and_every_body(at: At) -> None:
    tree = httpx2.get(f"{at.url}/openapi.json").json()
    assert tree["openapi"].startswith("3.1") and set(tree["paths"]) == PATHS
    bodies = tree["components"]["schemas"]
    chat = bodies["ChatBody"]["properties"]
    assert {"messages", "response_format", "tool_choice", "return_routed_experts", "seed"} <= set(chat)

    def places(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = [*node.values()]
        for one in node if isinstance(node, list) else ():
            yield from places(one)

    assert {place.rpartition("/")[2] for place in places(tree)} <= set(bodies)


@pytest.mark.slow  # hundreds of requests
@pytest.mark.filterwarnings("ignore")  # of the library, which are not ours to fix
def test_requests_from_the_description_are_answered_as_it_says(at: At) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{at.url}/openapi.json")
    answered: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()

        _hundreds_of(operation, checks, answered.setdefault(operation.path, set()))
    assert set(answered) == PATHS
    assert answered.pop("/v1/models/{name}") == {404}  # made-up names
    assert all(200 in codes for codes in answered.values()), answered
    assert httpx2.get(f"{at.url}/health").json() == {"status": "ok", "under_way": 0}


def _hundreds_of(operation: Any, checks: list[Any], codes: set[int]) -> None:
    """Make requests to an operation, check the answers, and add their status codes to ``codes``."""

    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        codes.add(case.call_and_validate(checks=checks, timeout=60).status_code)

    check()
