"""``ostinato bench serve --catalog``: clients at a server with a catalog, by Zipf's law, while one of the
policies is published again and again; then as many clients at one policy. Each answer is compared with what
an engine that has its policy alone says, from factors that were never on a disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.harness import ModelBench, Result, Say, columns, option
from lab.serve import Server, started
from ostinato.catalog import open_catalog

PROMPT_TOKENS = 32
VOCABULARY = 250  # prompts are ids below it, which every model has
PUBLISH_S = 10.0
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(slots=True)
class Load:
    """What clients have met. ``answers``: tokens by policy and version, all that there were."""

    seconds: list[float] = field(default_factory=list)
    answers: dict[str, Counter[tuple[int, ...]]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    published: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCatalog(ModelBench):
    """A server with a catalog: errors, answers of a wrong policy, latencies, tokens per second against one
    policy, and how many requests found their policy in memory."""

    model: str = option("asset:seed-moe", "A Hugging Face folder or a model name.")
    catalog: bool = option(False, "Which chooses this bench.")
    policies: int = option(1000, "In the catalog.")
    clients: int = option(64, "At once, each with a request after the other.")
    zipf: float = option(1.0, "Exponent of how often a policy is asked for, by its rank.")
    minutes: float = option(10.0, "Of the clients at all policies, and as many at one.")
    rank: int = option(4, "Of the adapters.")
    new_tokens: int = option(32, "Of every answer.")
    catalog_mb: int = option(256, "Of adapters in memory.")

    def quick(self) -> ServeCatalog:
        return replace(self, policies=12, clients=4, minutes=0.1, rank=1, new_tokens=8, catalog_mb=8)

    def measure(self, say: Say) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ostinato-catalog-") as name:
            folder, alone = Path(name), Alone(self)
            say(f"writing {self.policies} policies")
            with closing(open_catalog(folder / "catalog", new=True)) as catalog:
                for number in range(self.policies):
                    catalog.publish("", f"p{number}", alone.write(f"p{number}@1", folder / "source"))
            with started(
                "ostinato", lambda port: self._command(folder / "catalog", port), folder, say
            ) as server:
                many, one = Load(), Load()
                asyncio.run(self._run(server, many, folder, alone))
                hits = _read_counts(server)
                say(f"{len(many.seconds)} answers, {many.errors.total()} errors")
                asyncio.run(self._run(server, one, None, alone))
            rows = [
                self._row("all policies", many, alone, say),
                self._row("one policy", one, alone, say),
            ]
            asked = hits["hit"] + hits["load"]
            return {"results": rows, "hit_rate": hits["hit"] / max(asked, 1), "counts": hits}

    def _command(self, catalog: Path, port: int) -> list[str]:
        words = ["serve", self.model, f"model.dtype={self.dtype}", "--port", str(port)]
        return [
            *(sys.executable, "-m", "ostinato", *words),
            *("--catalog", str(catalog), "--catalog-mb", str(self.catalog_mb)),
        ]

    async def _run(self, server: Server, load: Load, folder: Path | None, alone: Alone) -> None:
        """Clients until the time is over: at all policies of the catalog in ``folder``, of which the most
        wanted one is published again every PUBLISH_S, or (None) at one policy."""
        end = time.perf_counter() + self.minutes * 60
        weights = np.arange(1, self.policies + 1) ** -self.zipf
        shares = weights / weights.sum()

        async def client(number: int) -> None:
            draw = np.random.default_rng(number)
            while time.perf_counter() < end:
                policy = int(draw.choice(self.policies, p=shares)) if folder is not None else 1
                await self._ask(server, policy, load)

        async def publish(folder: Path) -> None:
            with closing(open_catalog(folder / "catalog")) as catalog:
                while time.perf_counter() + PUBLISH_S < end:
                    await asyncio.sleep(PUBLISH_S)
                    load.published += 1
                    source = alone.write(f"p0@{load.published + 1}", folder / "source")
                    await asyncio.to_thread(catalog.publish, "", "p0", source)

        publishing = [publish(folder)] if folder is not None else []
        await asyncio.gather(*map(client, range(self.clients)), *publishing)

    async def _ask(self, server: Server, policy: int, load: Load) -> None:
        body = {"model": f"p{policy}", "prompt": prompt_of(policy), "max_tokens": self.new_tokens, **SAMPLED}
        body |= {"seed": policy, "ignore_eos": True, "return_token_ids": True}
        data, start = json.dumps(body).encode(), time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        except OSError as error:
            load.errors[type(error).__name__] += 1
            return
        if head.split()[1:2] != [b"200"]:
            load.errors[head.split(b"\r\n")[0].decode(errors="replace")] += 1
            return
        load.seconds.append(time.perf_counter() - start)
        answer = json.loads(content)
        tokens = load.answers.setdefault(answer["system_fingerprint"], Counter())
        tokens[tuple(answer["choices"][0]["token_ids"])] += 1

    def _row(self, name: str, load: Load, alone: Alone, say: Say) -> dict[str, Any]:
        wrong = 0
        for version, answers in load.answers.items():
            right = alone.answer(version, self.new_tokens)
            wrong += sum(count for tokens, count in answers.items() if tokens != right)
        say(f"{name}: {wrong} answers of a wrong policy")
        p50, p99 = np.quantile(load.seconds or [float("nan")], (0.5, 0.99)) * 1e3
        return {
            "load": name,
            "answers": len(load.seconds),
            "versions": len(load.answers),
            "published": load.published,
            "errors": dict(load.errors),
            "wrong": wrong,
            "p50_ms": p50,
            "p99_ms": p99,
            "tokens_per_s": len(load.seconds) * self.new_tokens / (self.minutes * 60),
        }

    @staticmethod
    def passed(result: Result) -> bool:
        return all(not row["wrong"] and not row["errors"] for row in result["results"])

    @staticmethod
    def table(result: Result) -> Table:
        many, one = result["results"]
        settings = result["settings"]
        title = (
            f"{settings['policies']} policies, {settings['clients']} clients, Zipf {settings['zipf']:g}: "
            f"{result['hit_rate']:.1%} found their policy in memory, {result['counts']['evicted']} evicted, "
            f"{many['published']} published; "
            f"{many['tokens_per_s'] / one['tokens_per_s']:.2f} of the throughput of one policy"
        )
        names = ("load", "answers", "errors", "wrong", "p50 ms", "p99 ms", "tokens/s")
        rows = [
            (
                *(row["load"], row["answers"], sum(row["errors"].values()), row["wrong"]),
                *(f"{row[key]:.0f}" for key in ("p50_ms", "p99_ms", "tokens_per_s")),
            )
            for row in result["results"]
        ]
        return columns(title, names, rows)


class Alone:
    """What each version of each policy says when an engine has it alone; its name is its seed."""

    def __init__(self, bench: ServeCatalog) -> None:
        from ostinato.launch.policy import load_policy, serve_policy
        from ostinato.model.peft_io import compute_base_fingerprint

        self._policy = load_policy(bench.model, f"model.dtype={bench.dtype}")
        self._rank, self._engine = bench.rank, serve_policy(replace(self._policy, adapters=None, step=0))
        self._base = compute_base_fingerprint(self._policy.decoder)

    def draw(self, version: str) -> Any:
        """The adapters of NAME@VERSION."""
        import torch

        from ostinato.model.lora import init_adapters
        from ostinato.model.shapes import AdapterSpec

        seed = int.from_bytes(version.encode()) % 2**31
        adapters = init_adapters(self._policy.decoder.config, AdapterSpec(rank=self._rank), seed)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, b in adapters.tensors.values():
                b.normal_(0, 0.05, generator=generator)
        return adapters

    def write(self, version: str, path: Path) -> Path:
        from ostinato.model.peft_io import write_logical

        write_logical(self.draw(version), path, self._base, "")
        return path

    def answer(self, version: str, new_tokens: int) -> tuple[int, ...]:
        from ostinato.types import Request, Sampling

        policy = int(version[1:].partition("@")[0])
        self._engine.publish(self.draw(version), 0, "alone")
        request = Request(
            tokens=np.array(prompt_of(policy), np.int32),
            sampling=Sampling(**SAMPLED, max_tokens=new_tokens),
            seed=(policy, 0),
            policy="alone",
        )

        async def sample() -> tuple[int, ...]:
            async for _, completion in self._engine.generate([request]):
                return tuple(completion.tokens.tolist())
            raise AssertionError("an engine answers each request")

        return asyncio.run(sample())


def prompt_of(policy: int) -> list[int]:
    return np.random.default_rng(policy).integers(0, VOCABULARY, PROMPT_TOKENS).tolist()


def _read_counts(server: Server) -> dict[str, int]:
    """What the server has counted of its catalog, by outcome."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    pattern = r'^ostinato_catalog_requests_total\{outcome="(\w+)"\} (\S+)'
    return {outcome: int(float(number)) for outcome, number in re.findall(pattern, text, re.MULTILINE)}
