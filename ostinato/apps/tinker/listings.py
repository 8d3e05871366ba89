"""Answer queries of clients about their sessions, runs and checkpoints."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from ostinato.apps.serve.server import Handler, read_body
from ostinato.apps.tinker.models import MODEL
from ostinato.apps.tinker.registry import NotFound, Registry, UserError
from ostinato.apps.tinker.wire import Body, Seconds, Seq, parse_body
from ostinato.apps.tinker.work import CHECKPOINT, SAMPLER, Work

MAX_TIME = 253402300799.0  # the end of the year 9999, after which there are no dates
RUNS_ROUTE, CHECKPOINT_ROUTE = "/training_runs", "/training_runs/{run}/checkpoints/{kind}/{name}"


class PathBody(Body):
    tinker_path: str


class CopyBody(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: Seq | None = None
    ttl_seconds: Seconds | None = None


class TtlBody(Body):
    ttl_seconds: Seconds | None = None


class Listings:
    """The handlers of listings, and of checkpoints by path."""

    def __init__(self, work: Work, registry: Registry) -> None:
        self._work, self._registry = work, registry

    def list_routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Yield (path, method, handler) of each route."""
        yield RUNS_ROUTE, "GET", self.list_runs
        yield f"{RUNS_ROUTE}/{{run}}", "GET", self.get_run
        yield f"{RUNS_ROUTE}/{{run}}/checkpoints", "GET", self.list_run_checkpoints
        yield CHECKPOINT_ROUTE, "DELETE", self.delete_checkpoint
        yield f"{CHECKPOINT_ROUTE}/ttl", "PUT", self.set_expiry
        yield f"{CHECKPOINT_ROUTE}/external_weights_urls", "GET", self.list_urls
        yield f"{CHECKPOINT_ROUTE}/files/{{file:path}}", "GET", self.send_file
        yield "/checkpoints", "GET", self.list_checkpoints
        yield "/weights_info", "POST", self.describe_weights
        yield "/copy_weights", "POST", self.copy_checkpoint
        yield "/sessions", "GET", self.list_sessions
        yield "/sessions/{session}", "GET", self.get_session

    async def list_runs(self, request: Request) -> Response:
        rows, cursor = _cut_page(
            [self._describe_run(*entry) for entry in self._registry.list_all(MODEL)], request
        )
        return JSONResponse({"training_runs": rows, "cursor": cursor})

    async def get_run(self, request: Request) -> Response:
        id = request.path_params["run"]
        for entry in self._registry.list_all(MODEL):
            if entry[0] == id:
                return JSONResponse(self._describe_run(*entry))
        raise NotFound(f"there is no training run {id!r} here")

    async def list_run_checkpoints(self, request: Request) -> Response:
        rows = [
            _describe_checkpoint(*entry)
            for entry in self._registry.list_all(CHECKPOINT, request.path_params["run"])
        ]
        return JSONResponse({"checkpoints": rows})

    async def list_checkpoints(self, request: Request) -> Response:
        rows, cursor = _cut_page(
            [_describe_checkpoint(*entry) for entry in self._registry.list_all(CHECKPOINT)], request, 100
        )
        return JSONResponse({"checkpoints": rows, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        self._work.delete_checkpoint(self._format_path(request))
        return Response(status_code=204)

    async def set_expiry(self, request: Request) -> Response:
        seconds = parse_body(TtlBody, await read_body(request)).ttl_seconds
        expires = None if seconds is None else datetime.now(UTC).timestamp() + seconds
        path = self._format_path(request)
        self._work.find_folder(path)
        self._registry.put(CHECKPOINT, path, {**self._registry.require(CHECKPOINT, path), "expires": expires})
        return Response(status_code=204)

    async def list_urls(self, request: Request) -> Response:
        """Return URLs of all files, served here; they expire with the checkpoint."""
        path = self._format_path(request)
        folder = self._work.find_folder(path)
        base = str(request.url).removesuffix("/external_weights_urls")
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        expires = self._registry.require(CHECKPOINT, path)["expires"] or 4102444800.0  # the year 2100
        return JSONResponse(
            {"urls": {name: f"{base}/files/{name}" for name in files}, "expires": _format_time(expires)}
        )

    async def send_file(self, request: Request) -> Response:
        folder = self._work.find_folder(self._format_path(request)).resolve()
        file = (folder / request.path_params["file"]).resolve()
        if not file.is_relative_to(folder) or not file.is_file():
            raise NotFound(f"this checkpoint has no file {request.path_params['file']!r}")
        return FileResponse(file)

    async def describe_weights(self, request: Request) -> Response:
        path = parse_body(PathBody, await read_body(request)).tinker_path
        self._work.find_folder(path)
        model = self._registry.require(CHECKPOINT, path)["model"]
        lora = (self._registry.get(MODEL, model) or {}).get("lora", {})
        names = ("train_unembed", "train_mlp", "train_attn")
        facts = {"base_model": self._work.base.name, "is_lora": True, "lora_rank": lora.get("rank")}
        return JSONResponse({**facts, **{name: lora.get(name) for name in names}})

    async def copy_checkpoint(self, request: Request) -> Response:
        """Copy a checkpoint to the run that the request names, or to a new run."""
        body = parse_body(CopyBody, await read_body(request))
        if body.session_id is not None:
            self._registry.require("session", body.session_id)
        request_key = request.headers.get("x-idempotency-key", "") or secrets.token_hex(8)
        own_run = f"copy-{hashlib.sha256(request_key.encode()).hexdigest()[:16]}:train:0"
        run = own_run if body.session_id is None else f"{body.session_id}:train:{body.model_seq_id or 0}"
        expires = None if body.ttl_seconds is None else datetime.now(UTC).timestamp() + body.ttl_seconds
        return JSONResponse({"tinker_path": self._work.copy_checkpoint(body.source_path, run, expires)})

    async def list_sessions(self, request: Request) -> Response:
        rows, _ = _cut_page([id for id, _, _ in self._registry.list_all("session")], request)
        return JSONResponse({"sessions": rows})

    async def get_session(self, request: Request) -> Response:
        id = request.path_params["session"]
        document = self._registry.require("session", id)
        return JSONResponse(
            {
                "training_run_ids": [model for model, _, _ in self._registry.list_all(MODEL, id)],
                "sampler_ids": [sampler for sampler, _, _ in self._registry.list_all(SAMPLER, id)],
                "user_metadata": document["user_metadata"],
                "display_name": document["display_name"],
            }
        )

    def _describe_run(self, id: str, created_at: float, document: dict[str, Any]) -> dict[str, Any]:
        rows = [_describe_checkpoint(*entry) for entry in self._registry.list_all(CHECKPOINT, id)]

        def find_newest(kind: str) -> dict[str, Any] | None:
            return next((row for row in rows if row["checkpoint_type"] == kind), None)

        return {
            "training_run_id": id,
            "base_model": self._work.base.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": document["spec"]["rank"],
            "last_request_time": _format_time(self._registry.find_last_time(id) or created_at),
            "last_checkpoint": find_newest("training"),
            "last_sampler_checkpoint": find_newest("sampler"),
            "user_metadata": document["user_metadata"],
        }

    def _format_path(self, request: Request) -> str:
        return "tinker://{run}/{kind}/{name}".format(**request.path_params)


def _cut_page(rows: list[Any], request: Request, default: int = 20) -> tuple[list[Any], dict[str, int]]:
    try:
        limit = int(request.query_params.get("limit", default))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise UserError(f"limit and offset are numbers: {error}") from error
    if limit < 0 or offset < 0:
        raise UserError(f"limit is {limit} and offset {offset}; use numbers from 0")
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _describe_checkpoint(path: str, created_at: float, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint_id": path.split("/", 3)[3],
        "checkpoint_type": document["kind"],
        "time": _format_time(created_at),
        "tinker_path": path,
        "size_bytes": document["size"],
        "public": False,
        "user_metadata": document["user_metadata"],
        "expires_at": None if document["expires"] is None else _format_time(document["expires"]),
    }


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, MAX_TIME), UTC).isoformat()
