"""``ostinato bench feedback``: what a stream of feedback costs those who chat.

Latencies of streaming clients at a server that keeps feedback and gets it, and at one that does neither.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.harness import ModelBench, Result, Say, option
from lab.serve import Server, started
from ostinato.apps.product.store import open_store

PROMPT_TOKENS = 32
VOCABULARY = 250

# python -c SENDER PORT EVENTS_PER_MINUTE OF_A_REQUEST: sends until SIGTERM, then prints counts and latencies.
SENDER = """
import asyncio, json, signal, sys, time, uuid
port, each = int(sys.argv[1]), int(sys.argv[3])
gap = 60.0 * each / float(sys.argv[2])
seconds, going = [], True
async def send():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while going:
        due, now = await queue.get(), time.time()
        usual = {"kind": "rating", "value": 1, "ts": now, "user": "u", "text": "a word about it " * 4}
        names = [{"event_id": uuid.uuid4().hex, "response_id": uuid.uuid4().hex} for _ in range(each)]
        data = json.dumps([name | usual for name in names]).encode()
        head = b"POST /feedback HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n" % len(data)
        writer.write(head + b"Content-Type: application/json\\r\\n\\r\\n" + data)
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert b" 200 " in head.partition(b"\\r\\n")[0], head
        lines = head.lower().split(b"\\r\\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length"))
        assert json.loads(await reader.readexactly(length))["accepted"] == each
        seconds.append(time.perf_counter() - due)
async def main():
    global queue
    queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    senders = [asyncio.create_task(send()) for _ in range(32)]
    start, k = time.perf_counter(), 0
    while not ended.is_set():
        k += 1
        await asyncio.sleep(max(0.0, start + k * gap - time.perf_counter()))
        queue.put_nowait(time.perf_counter())
        for sender in senders:
            if sender.done(): sender.result()
    took = time.perf_counter() - start
    counts = {"events": len(seconds) * each, "late": queue.qsize() * each, "took": took}
    print(json.dumps(counts | {"seconds": seconds}))
asyncio.run(main())
"""


@dataclass(slots=True)
class Window:
    """What the clients of one window have met."""

    seconds: list[float] = field(default_factory=list)  # of whole answers
    errors: int = 0

    def at(self, share: float) -> float:
        return float(np.quantile(self.seconds, share)) * 1e3 if self.seconds else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback(ModelBench):
    """Chat without and with feedback, A B A B."""

    clients: int = option(16, "Who chat, at once; each begins again at once.")
    new_tokens: int = option(32, "Of every answer.")
    rounds: int = option(3, "Pairs of windows.")
    window_s: float = option(25.0, "Of one window.")
    events: int = option(10_000, "A minute.")
    each: int = option(1, "Events of one request.")

    def quick(self) -> Feedback:
        return replace(self, rounds=1, window_s=4.0, clients=4)

    def measure(self, say: Say) -> dict[str, Any]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-feedback-")))
            command = [sys.executable, "-m", "ostinato", "serve", self.model, "--name", "base"]
            command += [f"model.dtype={self.dtype}"] if self.dtype else []
            kept = ["--feedback", str(folder / "f.db")]

            def at(*more: str) -> Server:
                made = started("server", lambda port: [*command, *more, "--port", str(port)], folder, say)
                return stack.enter_context(made)

            plain, with_ = at(), at(*kept)
            servers, rows, sent = (plain, with_), [], []
            for server in servers:
                with server.alone(servers):
                    asyncio.run(self._window(server, 3.0))
            for number in range(self.rounds):
                with plain.alone(servers):
                    without = asyncio.run(self._window(plain, self.window_s))
                with with_.alone(servers):
                    beside, load = self._beside(with_)
                rows.append((without, beside))
                sent.append(load)
                say(f"{number + 1}: p99 {without.at(0.99):.0f} ms, with feedback {beside.at(0.99):.0f} ms")
            with open_store(folder / "f.db") as store:
                counts = store.counts()
        ratios = {
            name: [after.at(share) / before.at(share) for before, after in rows]
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        commits = [second * 1e3 for load in sent for second in load["seconds"]]
        return {
            "windows": [
                {
                    **{"arm": arm, "p50_ms": one.at(0.5), "p99_ms": one.at(0.99)},
                    **{"answers": len(one.seconds), "errors": one.errors},
                }
                for pair in rows
                for arm, one in zip(("without", "with"), pair, strict=True)
            ],
            "ratio_p50": statistics.median(ratios["p50"]),
            "ratio_p99": statistics.median(ratios["p99"]),
            "ratios_p99": ratios["p99"],
            "events_per_minute": sum(t["events"] for t in sent) / sum(t["took"] for t in sent) * 60,
            "events_late": sum(load["late"] for load in sent),
            "acknowledged_p50_ms": float(np.quantile(commits, 0.5)),
            "acknowledged_p99_ms": float(np.quantile(commits, 0.99)),
            "lost": max(0, sum(load["events"] for load in sent) - counts["events"]),
            "stored": counts,
        }

    def _beside(self, server: Server) -> tuple[Window, dict[str, Any]]:
        words = [str(server.port), str(self.events), str(self.each)]
        sender = subprocess.Popen([sys.executable, "-c", SENDER, *words], stdout=subprocess.PIPE, text=True)
        try:
            window = asyncio.run(self._window(server, self.window_s))
        finally:
            sender.send_signal(signal.SIGTERM)
            printed, _ = sender.communicate(timeout=60)
        return window, json.loads(printed)

    async def _window(self, server: Server, seconds: float) -> Window:
        window, end = Window(), time.perf_counter() + seconds

        async def client(number: int) -> None:
            rng = np.random.default_rng(number)
            while time.perf_counter() < end:
                await self._ask(server, rng, window)

        await asyncio.gather(*(client(number) for number in range(self.clients)))
        return window

    async def _ask(self, server: Server, rng: np.random.Generator, window: Window) -> None:
        prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
        body = {"model": "base", "prompt": prompt, "max_tokens": self.new_tokens, "ignore_eos": True}
        data, start = json.dumps(body | {"stream": True}).encode(), time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
        text = await reader.read()
        writer.close()
        if b" 200 " in text[:20] and b"[DONE]" in text:
            window.seconds.append(time.perf_counter() - start)
        else:
            window.errors += 1

    @staticmethod
    def table(result: Result) -> str:
        lines = [
            f"{row['arm']:8} p50 {row['p50_ms']:7.0f} ms  p99 {row['p99_ms']:7.0f} ms  "
            f"{row['answers']} answers, {row['errors']} errors"
            for row in result["windows"]
        ]
        lines.append(
            f"with over without: p50 {result['ratio_p50']:.2f}x, p99 {result['ratio_p99']:.2f}x; "
            f"{result['events_per_minute']:.0f} events a minute, acknowledged after "
            f"{result['acknowledged_p50_ms']:.0f} ms (p99 {result['acknowledged_p99_ms']:.0f}), "
            f"{result['lost']} lost"
        )
        return "\n".join(lines)
