"""The server's OpenAPI description: request bodies as they are validated (``serve.bodies``), and the parts of
answers that clients rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Schema = dict[str, Any]
_STRING, _COUNT, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_LIST = {"type": "array", "items": {"type": "object"}}


def _object(**fields: Any) -> Schema:
    """All fields required, others allowed."""
    return {"type": "object", "properties": fields, "required": [*fields]}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_MESSAGE = _object(role={"const": "assistant"}, content={"type": ["string", "null"]})
_REASON = {"enum": ["stop", "length", "tool_calls"]}
_CHOICE = _object(index=_COUNT, finish_reason=_REASON)
_MODEL = _object(id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING, version=_COUNT)
_IDS = {"type": "array", "items": _COUNT}


def _choices(kind: str, **more: Any) -> Schema:
    choice = _CHOICE | {"properties": _CHOICE["properties"] | more, "required": [*_CHOICE["required"], *more]}
    choices = {"type": "array", "items": choice, "minItems": 1}
    head = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    return _object(**head, choices=choices, usage=_USAGE)


# (path, method, answer, whether it may be a stream)
ANSWERS: tuple[tuple[str, str, Schema, bool], ...] = (
    ("/v1/chat/completions", "post", _choices("chat.completion", message=_MESSAGE), True),
    ("/v1/completions", "post", _choices("text_completion", text=_STRING), True),
    (
        "/v1/responses",
        "post",
        _object(id=_STRING, status=_STRING, output=_LIST, usage={"type": "object"}),
        True,
    ),
    ("/v1/messages", "post", _object(id=_STRING, type={"const": "message"}, content=_LIST), True),
    ("/v1/messages/count_tokens", "post", _object(input_tokens=_COUNT), False),
    ("/inference/v1/generate", "post", _object(request_id=_STRING, choices=_LIST, usage=_USAGE), False),
    ("/v1/models", "get", _object(object={"const": "list"}, data={"type": "array", "items": _MODEL}), False),
    ("/v1/models/{name}", "get", _MODEL, False),
    ("/tokenize", "post", _object(tokens=_IDS, count=_COUNT, max_model_len=_COUNT), False),
    ("/detokenize", "post", _object(prompt=_STRING), False),
    ("/feedback", "post", _object(accepted=_COUNT, repeated=_COUNT, expired=_COUNT, refused=_LIST), False),
    ("/health", "get", _object(status={"const": "ok"}, under_way=_COUNT), False),
)
_OPENAI = _object(error=_object(message=_STRING, type=_STRING, param={"type": ["string", "null"]}))
_ANTHROPIC = _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING))


def description(bodies: Mapping[str, type[BaseModel]], version: str) -> Schema:
    """OpenAPI 3.1. ``bodies`` by path."""
    kinds = [*dict.fromkeys(bodies.values())]
    place = "#/components/schemas/{model}"
    known, shared = models_json_schema([(kind, "validation") for kind in kinds], ref_template=place)
    paths: dict[str, Any] = {}
    for path, method, answer, streams in ANSWERS:
        if path == "/feedback" and path not in bodies:
            continue  # a server without a store of feedback
        error = _ANTHROPIC if path.startswith("/v1/messages") else _OPENAI
        content = _json(answer) | ({"text/event-stream": {}} if streams else {})
        described = {"200": {"description": "the answer", "content": content}}
        for status, what in (("4XX", "refused, in one sentence"), ("504", "took too long")):
            described[status] = {"description": what, "content": _json(error)}
        operation: Schema = {"responses": described}
        if path in bodies:
            body = known[bodies[path], "validation"]
            operation["requestBody"] = {"required": True, "content": _json(body)}
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
        paths[path] = {method: operation}
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    parts = {"schemas": shared.get("$defs", {}), "securitySchemes": keys}
    info = {"title": "Ostinato", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": parts}


def _json(schema: Mapping[str, Any]) -> Schema:
    return {"application/json": {"schema": schema}}
