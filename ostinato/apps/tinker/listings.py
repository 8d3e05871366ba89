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

LATEST = 253402300799.0  # the end of the year 9999, after which there are no dates
RUNS, ONE = "/training_runs", "/training_runs/{run}/checkpoints/{kind}/{name}"


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

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Yield (path, method, handler) of each route."""
        yield RUNS, "GET", self.runs
        yield f"{RUNS}/{{run}}", "GET", self.run
        yield f"{RUNS}/{{run}}/checkpoints", "GET", self.checkpoints_of
        yield ONE, "DELETE", self.delete
        yield f"{ONE}/ttl", "PUT", self.ttl
        yield f"{ONE}/external_weights_urls", "GET", self.urls
        yield f"{ONE}/files/{{file:path}}", "GET", self.file
        yield "/checkpoints", "GET", self.checkpoints
        yield "/weights_info", "POST", self.weights_info
        yield "/copy_weights", "POST", self.copy
        yield "/sessions", "GET", self.sessions
        yield "/sessions/{session}", "GET", self.session

    async def runs(self, request: Request) -> Response:
        rows, cursor = _cut_page([self._describe_run(*entry) for entry in self._registry.all(MODEL)], request)
        return JSONResponse({"training_runs": rows, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        id = request.path_params["run"]
        for entry in self._registry.all(MODEL):
            if entry[0] == id:
                return JSONResponse(self._describe_run(*entry))
        raise NotFound(f"there is no training run {id!r} here")

    async def checkpoints_of(self, request: Request) -> Response:
        rows = [
            _describe_checkpoint(*entry)
            for entry in self._registry.all(CHECKPOINT, request.path_params["run"])
        ]
        return JSONResponse({"checkpoints": rows})

    async def checkpoints(self, request: Request) -> Response:
        rows, cursor = _cut_page(
            [_describe_checkpoint(*entry) for entry in self._registry.all(CHECKPOINT)], request, 100
        )
        return JSONResponse({"checkpoints": rows, "cursor": cursor})

    async def delete(self, request: Request) -> Response:
        self._work.delete(self._format_path(request))
        return Response(status_code=204)

    async def ttl(self, request: Request) -> Response:
        seconds = parse_body(TtlBody, await read_body(request)).ttl_seconds
        expires = None if seconds is None else datetime.now(UTC).timestamp() + seconds
        path = self._format_path(request)
        self._work.folder_of(path)
        self._registry.put(CHECKPOINT, path, {**self._registry.require(CHECKPOINT, path), "expires": expires})
        return Response(status_code=204)

    async def urls(self, request: Request) -> Response:
        """Return URLs of all files, served here; they expire with the checkpoint."""
        path = self._format_path(request)
        folder = self._work.folder_of(path)
        base = str(request.url).removesuffix("/external_weights_urls")
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        expires = self._registry.require(CHECKPOINT, path)["expires"] or 4102444800.0  # the year 2100
        return JSONResponse(
            {"urls": {name: f"{base}/files/{name}" for name in files}, "expires": _format_time(expires)}
        )

    async def file(self, request: Request) -> Response:
        folder = self._work.folder_of(self._format_path(request)).resolve()
        file = (folder / request.path_params["file"]).resolve()
        if not file.is_relative_to(folder) or not file.is_file():
            raise NotFound(f"this checkpoint has no file {request.path_params['file']!r}")
        return FileResponse(file)

    async def weights_info(self, request: Request) -> Response:
        path = parse_body(PathBody, await read_body(request)).tinker_path
        self._work.folder_of(path)
        model = self._registry.require(CHECKPOINT, path)["model"]
        lora = (self._registry.get(MODEL, model) or {}).get("lora", {})
        names = ("train_unembed", "train_mlp", "train_attn")
        facts = {"base_model": self._work.base.name, "is_lora": True, "lora_rank": lora.get("rank")}
        return JSONResponse({**facts, **{name: lora.get(name) for name in names}})

    async def copy(self, request: Request) -> Response:
        """Copy a checkpoint to the run that the request names, or to a new run."""
        body = parse_body(CopyBody, await read_body(request))
        if body.session_id is not None:
            self._registry.require("session", body.session_id)
        request_key = request.headers.get("x-idempotency-key", "") or secrets.token_hex(8)
        own_run = f"copy-{hashlib.sha256(request_key.encode()).hexdigest()[:16]}:train:0"
        run = own_run if body.session_id is None else f"{body.session_id}:train:{body.model_seq_id or 0}"
        expires = None if body.ttl_seconds is None else datetime.now(UTC).timestamp() + body.ttl_seconds
        return JSONResponse({"tinker_path": self._work.copy(body.source_path, run, expires)})

    async def sessions(self, request: Request) -> Response:
        rows, _ = _cut_page([id for id, _, _ in self._registry.all("session")], request)
        return JSONResponse({"sessions": rows})

    async def session(self, request: Request) -> Response:
        id = request.path_params["session"]
        document = self._registry.require("session", id)
        return JSONResponse(
            {
                "training_run_ids": [model for model, _, _ in self._registry.all(MODEL, id)],
                "sampler_ids": [sampler for sampler, _, _ in self._registry.all(SAMPLER, id)],
                "user_metadata": document["user_metadata"],
                "display_name": document["display_name"],
            }
        )

    def _describe_run(self, id: str, created_at: float, document: dict[str, Any]) -> dict[str, Any]:
        rows = [_describe_checkpoint(*entry) for entry in self._registry.all(CHECKPOINT, id)]

        def find_newest(kind: str) -> dict[str, Any] | None:
            return next((row for row in rows if row["checkpoint_type"] == kind), None)

        return {
            "training_run_id": id,
            "base_model": self._work.base.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": document["spec"]["rank"],
            "last_request_time": _format_time(self._registry.last_time(id) or created_at),
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
    return datetime.fromtimestamp(min(seconds, LATEST), UTC).isoformat()
