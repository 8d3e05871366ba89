"""``ostinato bench serve``: streaming clients at our server and at vLLM's, in turn; with ``--soak-s`` many
clients for minutes at ours alone.
The load generator is the same for both and small: plain sockets, one coroutine a client, no client library.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.contender import ContenderFailed
from lab.harness import ModelBench, Result, Say, option
from lab.settings import environment, vllm_threads

PROMPT_TOKENS = 32
START_S = 400.0
VOCABULARY = 250  # prompts are ids below it, which every model has


@dataclass(slots=True)
class Load:
    """What a number of clients have met: seconds to the first token, between tokens, and of a wave."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    waves: list[float] = field(default_factory=list)
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve(ModelBench):
    """Tokens per second and latencies of streaming completions. ``rounds`` waves at each, in turn."""

    clients: tuple[int, ...] = option((1, 16, 64), "At once, with commas.")
    new_tokens: int = option(64, "Of every answer.")
    rounds: int = option(5, "Waves of every server at every number of clients; the median counts.")
    vllm_python: str | None = option(None, "The python of an environment with vLLM.")
    vllm_dtype: str = option("bfloat16", "Of vLLM.")
    soak_s: float = option(0.0, "Instead: so many seconds of --soak-clients at our server alone.")
    soak_clients: int = option(256, "At once, in a soak.")

    def quick(self) -> Serve:
        return replace(self, rounds=1, clients=(1, 4))

    def measure(self, say: Say) -> dict[str, Any]:
        with ExitStack() as stack:
            logs = Path(tempfile.mkdtemp(prefix="ostinato-serve-"))
            ours = stack.enter_context(started("ostinato", self._ours, logs, say))
            if self.soak_s:
                return self._soak(ours, say)
            servers = {"ostinato": ours}
            if self.vllm_python:
                environ = vllm_threads()["all cores bound"]
                servers["vllm"] = stack.enter_context(started("vllm", self._vllm, logs, say, environ))
            found = {name: {n: Load() for n in self.clients} for name in servers}
            for server in servers.values():
                asyncio.run(self._wave(server, max(self.clients), 0, Load()))  # kernels, caches, graphs
            for n in self.clients:
                for k in range(1, self.rounds + 1):
                    for name, server in servers.items():
                        with server.alone(servers.values()):
                            asyncio.run(self._wave(server, n, k, found[name][n]))
                say(
                    f"{n} clients: "
                    + ", ".join(f"{name} {_row(found[name][n], n, self)}" for name in servers)
                )
        return {
            "results": [
                {"server": name, "clients": n, **_row(load, n, self)}
                for name, loads in found.items()
                for n, load in loads.items()
            ]
        }

    def _ours(self, port: int) -> list[str]:
        dtype = f"model.dtype={self.dtype}"
        served = ["serve", self.model, dtype, "--port", str(port), "--name", "base"]
        return [sys.executable, "-m", "ostinato", *served]

    def _vllm(self, port: int) -> list[str]:
        given = {
            "model": str(self.folder),
            "served-model-name": "base",
            "host": "127.0.0.1",
            "port": str(port),
            "dtype": self.vllm_dtype,
            "max-model-len": "1024",
            "max-num-seqs": "256",
            "generation-config": "vllm",
        }
        pairs = [word for name, value in given.items() for word in (f"--{name}", value)]
        assert self.vllm_python is not None
        return [self.vllm_python, "-m", "vllm.entrypoints.openai.api_server", *pairs]

    async def _wave(self, server: Server, clients: int, wave: int, load: Load) -> None:
        """``clients`` requests at once, each with a prompt of its own."""
        start = time.perf_counter()
        await asyncio.gather(
            *(self._client(server, wave * 10_000 + k, load, self.new_tokens) for k in range(clients))
        )
        load.waves.append(time.perf_counter() - start)

    async def _client(self, server: Server, seed: int, load: Load, tokens: int) -> None:
        """One streaming request; what is not 200 with ``tokens`` events is an error."""
        prompt = np.random.default_rng(seed).integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
        body = {"model": "base", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": seed}
        data = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        start, times = time.perf_counter(), []
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
            status = (await reader.readline()).split()[1]
            async for line in reader:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
            writer.close()
        except (OSError, IndexError):
            status = b""
        if status != b"200" or not times:
            load.errors += 1
            return
        load.first.append(times[0] - start)
        load.between.append((times[-1] - times[0]) / max(tokens - 1, 1))

    def _soak(self, server: Server, say: Say) -> dict[str, Any]:
        load, memory = Load(), []
        end = time.perf_counter() + self.soak_s

        async def client(number: int) -> None:
            k = 0
            while time.perf_counter() < end:
                await self._client(server, number * 100_000 + k, load, self.new_tokens)
                k += 1

        async def watch() -> None:
            while time.perf_counter() < end:
                memory.append(server.memory_mb())
                say(f"{len(load.first)} answers, {load.errors} errors, {memory[-1]:.0f} MB")
                await asyncio.sleep(self.soak_s / 10)

        async def run() -> None:
            await asyncio.gather(watch(), *(client(k) for k in range(self.soak_clients)))

        asyncio.run(run())
        memory.append(server.memory_mb())
        return {
            "soak": {
                "clients": self.soak_clients,
                "seconds": self.soak_s,
                "answers": len(load.first),
                "errors": load.errors,
                "tokens_per_s": len(load.first) * self.new_tokens / self.soak_s,
                "memory_mb": memory,
            }
        }

    @staticmethod
    def table(result: Result) -> str:
        if "soak" in result:
            return json.dumps(result["soak"], indent=1)
        ours = {row["clients"]: row for row in result["results"] if row["server"] == "ostinato"}
        lines = [
            f"{'server':10} {'clients':>7} {'tokens/s':>9} {'ours is':>8} {'first p50, p99 ms':>19} "
            f"{'between p50, p99 ms':>20} {'errors':>6}"
        ]
        for row in result["results"]:
            ratio = ours[row["clients"]]["tokens_per_s"] / row["tokens_per_s"]
            lines.append(
                f"{row['server']:10} {row['clients']:7} {row['tokens_per_s']:9.0f} "
                f"{'' if row['server'] == 'ostinato' else f'{ratio:.2f}x':>8} "
                f"{row['first_p50_ms']:10.0f} {row['first_p99_ms']:8.0f} "
                f"{row['between_p50_ms']:11.1f} {row['between_p99_ms']:8.1f} {row['errors']:6}"
            )
        return "\n".join(lines)


def _row(load: Load, clients: int, bench: Serve) -> dict[str, Any]:
    def at(values: list[float], share: float) -> float:
        return float(np.quantile(values, share)) * 1e3 if values else float("nan")

    return {
        "tokens_per_s": clients * bench.new_tokens / statistics.median(load.waves),
        "first_p50_ms": at(load.first, 0.5),
        "first_p99_ms": at(load.first, 0.99),
        "between_p50_ms": at(load.between, 0.5),
        "between_p99_ms": at(load.between, 0.99),
        "errors": load.errors,
    }


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a process group of its own."""

    port: int
    process: subprocess.Popen[bytes]

    @contextmanager
    def alone(self, servers: Any) -> Iterator[None]:
        """With the others stopped."""
        others = [one for one in servers if one is not self]
        for one in others:
            os.killpg(one.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for one in others:
                os.killpg(one.process.pid, signal.SIGCONT)

    def memory_mb(self) -> float:
        """Resident memory of the server's process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def started(
    name: str,
    command: Callable[[int], list[str]],
    logs: Path,
    say: Say,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Started, healthy, and ended with the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = logs / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(port), stdout=out, stderr=out, env=environment(environ or {}), start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ContenderFailed(f"{name} did not start: {log.read_text(errors='replace')[-800:]}")
            time.sleep(0.5)
        say(f"{name} is ready")
        yield Server(port, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False
