"""``ostinato bench long-chat``: what an answer late in a chat with a memory takes, beside an early one.

A client of ``ostinato serve --memory`` sends all messages of a chat at every turn. The first and the last
turns are answered; the memory gets those between at once, as it would have turn by turn. Of the last
20 of each the mean counts, as a turn that shortens costs more than others. A turn has about 78 tokens, so
that a memory of 1,024 is full from turn 14 on. Answers are of a fixed length, the assistant's messages are
made up.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.harness import Bench, Result, Say, columns, option

MOST = 1.2  # of the time of an early answer
COUNTED = 20  # turns at either end


@dataclass(frozen=True, slots=True, kw_only=True)
class LongChat(Bench):
    """Time per answer at turn 20 and at the last turn of a chat within a budget of tokens."""

    model: str = option("smollm2-135m", "What is served.")
    memory: int = option(1024, "Tokens of the memory.")
    turns: int = option(300, "Of the chat.")
    answered: int = option(30, "Turns at the beginning, and at the end, that are answered.")
    tokens: int = option(16, "Of an answer.")
    threads: int = option(2, "Of the engine.")

    def measure(self, say: Say) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "ostinato",
                "serve",
                self.model,
                f"engine.threads={self.threads}",
            ]
            command += ["--port", "0", "--memory", str(self.memory)]
            command += ["--memory-file", str(Path(folder) / "memory.sqlite")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                try:
                    assert server.stdout is not None
                    begun = next(line for line in server.stdout if line.startswith("OpenAI address"))
                    rows = self._chat(begun.split()[2].rstrip(","), say)
                finally:
                    server.kill()
        early, late = rows[: self.answered][-COUNTED:], rows[self.answered :][-COUNTED:]
        found: dict[str, Any] = {"turns": rows, "most": MOST}
        for kind in (statistics.mean, statistics.median):
            ends = [kind([row["seconds"] for row in of]) for of in (early, late)]
            found[kind.__name__] = {"early": ends[0], "late": ends[1], "ratio": ends[1] / ends[0]}
        return found

    def _chat(self, url: str, say: Say) -> list[dict[str, Any]]:
        draw, messages, rows = random.Random(0), list[dict[str, str]](), list[dict[str, Any]]()
        for turn in range(1, self.turns + 1):
            who, where, many = (
                draw.choice(("Ann", "Bob", "Cleo")),
                draw.choice(("museum", "harbour")),
                draw.randrange(99),
            )
            text = (
                f"On day {turn} I met {who} at the {where} and we counted {many} boats, which was more than "
                f"the day before. {who} then decided to come back in {many + 2} days, with a camera and a "
                "friend."
            )
            messages.append({"role": "user", "content": text})
            if not self.answered < turn <= self.turns - self.answered:
                rows.append(self._asked(url, turn, messages))
                say(f"turn {turn}: {rows[-1]['seconds']:.2f} s, {rows[-1]['prompt_tokens']} tokens")
            text = f"That sounds like a good day. I will remember {who}, and the {many} boats too."
            messages.append({"role": "assistant", "content": text})
        return rows

    def _asked(self, url: str, turn: int, messages: list[dict[str, str]]) -> dict[str, Any]:
        limits = {"max_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        body = {"messages": messages, "metadata": {"session_id": "bench"}, **limits}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            usage = json.load(reply)["usage"]
        seconds, cached = time.perf_counter() - start, usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "turn": turn,
            "seconds": seconds,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": cached,
        }

    @staticmethod
    def table(result: Result) -> Table:
        kinds = ("mean", "median")
        rows = [(one, *(f"{result[kind][one]:.2f}" for kind in kinds)) for one in ("early", "late", "ratio")]
        return columns("Seconds of an answer", ("", *kinds), rows)

    @staticmethod
    def passed(result: Result) -> bool:
        return result["mean"]["ratio"] <= result["most"]
