"""Require a vLLM server's key on every path:

    VLLM_API_KEY=... vllm serve ... --middleware ostinato.apps.interop.vllm_key.Guard

vLLM 0.32 requires the key under /v1, /v2, /inference and /cohere alone. The endpoints of its development
mode, which a run needs, are open to all who can reach the port: /collective_rpc calls any method of a worker.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

VARIABLE = "VLLM_API_KEY"


class Guard:
    """ASGI middleware that refuses requests without the key: with status 401, or by closing a websocket.
    Raises KeyError if the variable is not set."""

    def __init__(self, app: Any) -> None:
        self._app, self._authorization = app, f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(authorization, self._authorization):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
