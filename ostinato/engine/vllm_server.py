"""vLLM servers: one that is started here and ends with this process, or one that runs elsewhere by itself.

    VllmChild  -> guard -> python -m vllm... -> engine core, workers       a session of its own
    VllmAt                                                                 an address

The features that a server needs are checked once (``check``), so that a missing one is reported in words
before any work. A server that is lost is not replaced: the run ends with an error that names it, and can be
resumed.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from ostinato.workers import guard
from ostinato.workers.process import Child, last_lines
from ostinato.workers.remote import WorkerKind, WorkerLost

if TYPE_CHECKING:
    import httpx2


DIRECT: dict[str, Any] = {"trust_env": False, "verify": False}  # no proxy; the address is plain http


class Unreachable(ConnectionError):
    """There was no complete answer: nothing listens, the connection broke, or it timed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    body: Any  # of JSON; the text where it is not JSON

    @property
    def error(self) -> str:
        """vLLM's reason for refusing a request, in one line."""
        body = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        message = body.get("message", body) if isinstance(body, dict) else body
        return f"{self.status}: {' '.join(str(message).split())[:400]}"


def parse_address(address: str) -> tuple[str, int]:
    """Split an address into (host, port), 80 if it names none. Raises ValueError for what is no address of a
    server."""
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:
        host, port, url = None, None, urlsplit("")
    if url.scheme != "http" or not host or url.path not in ("", "/"):
        raise ValueError(f'engine.address is {address!r}; give it as "http://host:8000"')
    return host, port or 80


def call(address: str, method: str, path: str, body: Any = None, *, key: str = "", timeout_s: float) -> Reply:
    """Return the answer to a request, with at most ``timeout_s`` for each part; ``key`` is the server's.
    Raises Unreachable."""
    import httpx2  # of the extra "vllm"

    try:
        with httpx2.Client(timeout=timeout_s, **DIRECT) as client:
            return _parse_reply(client.request(method, address + path, json=body, headers=_make_headers(key)))
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(f"{method} {path}: {type(error).__name__} {error}") from error


async def post(address: str, path: str, body: Any, *, key: str = "") -> Reply:
    """Wait for the answer without limit; a cancelled call closes the connection. Raises Unreachable."""
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=None, **DIRECT) as client:
            return _parse_reply(await client.post(address + path, json=body, headers=_make_headers(key)))
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(f"POST {path}: {type(error).__name__} {error}") from error


def _make_headers(key: str) -> dict[str, str]:
    """Return the headers of a request: a connection of its own, and the ``key`` if there is one."""
    return {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _parse_reply(response: httpx2.Response) -> Reply:
    """Convert a response; a body that is not JSON stays text, an empty one is None."""
    try:
        return Reply(status=response.status_code, body=response.json() if response.content else None)
    except ValueError:
        return Reply(status=response.status_code, body=response.text)


EXTENSION = "ostinato.apps.interop.vllm_worker.Worker"
GUARD = "ostinato.apps.interop.vllm_key.Guard"
KEY = "VLLM_API_KEY"
ROUTES, SUPPORTS = "--enable-return-routed-experts", "--return-sampling-mask"  # of GPU builds
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for the largest rank
POLL_S = 0.25
CALL_S = 60.0  # limit for requests that take milliseconds
TAIL_LINES = 6  # last lines of its log in an error


def make_vllm_lost(sentence: str) -> WorkerLost:
    """Make the error of a server that has not started, has ended, is silent, or serves another policy."""
    return WorkerLost(WorkerKind.VLLM, sentence, final=True)


class Server(Protocol):
    """A vLLM server by its address."""

    @property
    def address(self) -> str: ...

    @property
    def key(self) -> str:
        """The API key sent with every request; empty where it needs none."""
        ...

    def start(self) -> None:
        """Make the server ready. Raises WorkerLost."""
        ...

    def why(self) -> str:
        """Return what is known of the reason why the server ended."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Settings of a server to start; ``args`` are further arguments of vLLM, which take precedence."""

    python: str  # of the environment that has vLLM
    model: Path
    dtype: str
    context: int  # tokens of a sequence
    max_batch: int
    kv_memory_mb: int
    rank: int  # of the adapters, the largest
    memory_share: float = 0.0  # of a GPU that is free for it; 0: not on a GPU (vLLM's default is 0.92)
    lends: bool = False  # the memory of its keys and values, to a trainer on the same GPU
    shared_experts: bool = False  # adapters of experts share the factor at the hidden dimension
    routes: bool = False  # of experts, to be replayed
    supports: bool = False  # of top-k, top-p and min-p
    args: Sequence[str] = ()

    def command(self, port: int) -> list[str]:
        """Return the command line for a server at ``port``. Raises ValueError for a rank that is too large
        for vLLM."""
        max_rank = next((rank for rank in RANKS if rank >= self.rank), None)
        if max_rank is None:
            raise ValueError(f"adapter.rank is {self.rank}; vLLM takes adapters up to rank {RANKS[-1]}")
        options = {
            "model": self.model,
            "served-model-name": "base",
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "max-model-len": self.context,
            "max-num-seqs": self.max_batch + 1,  # and one for a proof
            "kv-cache-memory-bytes": self.kv_memory_mb << 20,
            "max-lora-rank": max_rank,
            "max-loras": 1,
            "max-cpu-loras": 1,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",  # none of the model's own sampling settings
            "worker-extension-cls": EXTENSION,
            "middleware": GUARD,
        }
        pairs = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if self.memory_share:
            pairs += ["--gpu-memory-utilization", f"{self.memory_share:.2f}"]
        flags = ["--enable-lora", "--enable-scale-out", "--enable-prompt-tokens-details"]
        flags += ["--enable-sleep-mode"] * self.lends + ["--enable-moe-shared-loras"] * self.shared_experts
        flags += [ROUTES] * self.routes + [SUPPORTS] * self.supports
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *self.args]


def make_environment(environ: Mapping[str, str], key: str) -> dict[str, str]:
    """Return ``environ`` with what vLLM needs: its endpoints for training, the ``key`` that it requires, and
    our worker extension. Values of the user take precedence for the binding of threads and for usage
    statistics."""
    package = str(Path(__file__).parents[2])
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    required = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", KEY: key}
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH", ""))))
    return {**defaults, **environ, **required, "PYTHONPATH": path}


class VllmChild:
    """A server that is started here. ``log`` receives its output; ``key``: its API key, empty: a random one.
    Raises ValueError as ``Serve.command`` does."""

    def __init__(self, serve: Serve, log: Path, *, start_s: float = 300.0, key: str = "") -> None:
        serve.command(0)
        self.key = key or secrets.token_hex(32)
        self._serve, self._log, self._start_s = serve, log, start_s
        self._guard_process: Child | None = None
        self.address = ""

    def start(self) -> None:
        """Start the server at a free port, and wait until it is healthy. Raises WorkerLost after
        ``start_s``, or when it ends; then, as after any error, it is closed."""
        port = _find_free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", guard.__file__, *self._serve.command(port)]
        environ = make_environment(os.environ, self.key)
        self._guard_process = Child(command, log=self._log, lifeline=True, environ=environ)
        try:
            self._wait_until_ready(time.monotonic() + self._start_s)
        except BaseException:  # Ctrl-C too: the server has its own session and would go on
            self.close()
            raise

    def _wait_until_ready(self, deadline: float) -> None:
        while not is_healthy(self.address, self.key):
            if self._guard_process is None or self._guard_process.describe_end():
                raise make_vllm_lost(f"vLLM did not start: {self.why()}")
            if time.monotonic() > deadline:
                raise make_vllm_lost(f"vLLM was not ready after {self._start_s:g} s: {self.why()}")
            time.sleep(POLL_S)

    def why(self) -> str:
        return f"the end of {self._log} is: {last_lines(self._log, TAIL_LINES) or 'empty'}"

    def close(self) -> None:
        """End the server and its children; gracefully first, since it has files in shared memory."""
        guard_process, self._guard_process = self._guard_process, None
        if guard_process is not None:
            guard_process.close(guard.GRACE_S + 2)


class VllmAt:
    """A server that others run; ``key``: the key that it requires, if any. Raises ValueError for an address
    that is none."""

    def __init__(self, address: str, *, start_s: float = 300.0, key: str = "") -> None:
        parse_address(address)
        self.key = key
        self.address, self._start_s = address.rstrip("/"), start_s

    def start(self) -> None:
        """Wait until it answers. Raises WorkerLost after ``start_s``."""
        deadline = time.monotonic() + self._start_s
        while not is_healthy(self.address, self.key):
            if time.monotonic() > deadline:
                raise make_vllm_lost(f"vLLM at {self.address} was not ready in {self._start_s:g} s")
            time.sleep(POLL_S)

    def why(self) -> str:
        return "its log is where it was started"

    def close(self) -> None:
        """Do nothing: the server itself keeps running."""


# ---- features


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties that a server reports."""

    base: str  # the server's name of the model without adapters
    context: int
    seeds: bool  # requests can be seeded: on a CPU, vLLM 0.32 dies of a seeded prompt that takes two passes


def check_server(
    address: str, prompt: Sequence[int], key: str = "", *, routes: bool = False, supports: bool = False
) -> Facts:
    """Check a server and return its facts. Raises ValueError naming a missing feature and how the server
    must be started to have it, and Unreachable. A token is sampled after ``prompt``, any of a token or more.
    ``key``: the server's; ``routes`` and ``supports``: the server has to return these."""

    def require(condition: bool, what: str, fix: str) -> None:
        if not condition:
            raise ValueError(f"vLLM at {address} {what}; start it with {fix}")

    def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        reply = call(address, method, path, body, key=key, timeout_s=CALL_S)
        return reply.status, reply.body

    status, answer = ask("GET", "/v1/models")
    require(status != 401, "requires another key", f"the {KEY} of this process, or set that to the server's")
    require(status == 200, f"answers GET /v1/models with {status}", "vllm serve, 0.32 or newer")
    model = next(card for card in answer["data"] if not card.get("parent"))
    status, _ = ask("GET", "/weight_info")
    require(
        status == 200, "has no /weight_info", "VLLM_SERVER_DEV_MODE=1 in its environment (vLLM 0.32 or newer)"
    )
    status, _ = ask("POST", "/v1/load_lora_adapter", {})  # incomplete: 400 where the path exists
    require(
        status == 400, "loads no adapters at run time", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    )
    status, device = ask("POST", "/collective_rpc", {"method": "ostinato_device"})
    require(
        status == 200,
        "does not have our worker extension",
        f"--worker-extension-cls {EXTENSION}, on its PYTHONPATH",
    )
    sampling = {"max_tokens": 1, "logprobs": 0, "top_k": 1, "temperature": 1.0}
    body = {"model": model["id"], "token_ids": list(prompt), "sampling_params": sampling}
    status, answer = ask("POST", "/inference/v1/generate", body)
    require(status != 403, "gives no tokens for tokens", "--enable-scale-out")
    require(status == 200, f"answers /inference/v1/generate with {status}", "vLLM 0.32 or newer")
    choice = answer["choices"][0]
    require(bool(choice.get("weight_versions")), "does not label who sampled a token", "vLLM 0.32 or newer")
    has_routes, has_supports = (choice.get(name) is not None for name in ("routed_experts", "sampling_mask"))
    require(has_routes or not routes, "returns no routed experts", f"{ROUTES}, on a GPU")
    require(has_supports or not supports, "does not return what filters leave", f"{SUPPORTS}, on a GPU")
    logprob = choice["logprobs"]["content"][0]["logprob"]  # of the only token that top_k = 1 keeps
    require(
        abs(logprob) < 1e-6, "returns log-probabilities before filters", "--logprobs-mode processed_logprobs"
    )
    return Facts(base=model["id"], context=int(model["max_model_len"]), seeds="cpu" not in device["results"])


def is_healthy(address: str, key: str = "", timeout_s: float = 5.0) -> bool:
    """Return whether the server is alive, also where it requires another key, which ``check`` reports."""
    try:
        return call(address, "GET", "/health", key=key, timeout_s=timeout_s).status in (200, 401)
    except Unreachable:
        return False


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
