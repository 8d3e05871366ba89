"""Clients of a served product: they chat, send what they did until it is acknowledged, and keep a log of it.

    {"event": {...}}                     before an event is sent for the first time
    {"id": "...", "outcome": "accepted", "late": 0.03} behind its acknowledgement (or "repeated": it was known
                                         already), so many seconds after the event
    {"answer": "...", "by": "..."}       an answer that was shown, and its system_fingerprint

A log is appended to by one process and outlives it. Users like what is right; and they dislike every second
revision of the policy, so that canaries have to be rolled back.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.product.answers import Manner, expression_of, features, write
from lab.product.corpora import question_of
from lab.product.users import user_name
from ostinato.env.arithmetic import rows

AGAIN_S = 0.3  # between attempts
TIMEOUT_S = 30.0
TWICE = 0.05  # share of the events that are sent again though they were acknowledged


class Unanswered(Exception):
    """The server does not answer, or not yet with what is asked for."""


@dataclass(slots=True)
class Crowd:
    """Threads of users of the server at ``port``, who ask for ``model``."""

    port: int
    model: str
    file: Path
    seed: int
    threads: int = 3
    users: int = 24
    pause_s: float = 2.0  # between two sessions of a thread
    ended: threading.Event = field(default_factory=threading.Event)
    log: int = -1  # file descriptor
    met: list[str] = field(default_factory=list)  # revisions, in their order

    def work(self) -> None:
        """Until SIGTERM, and until all that was sent is acknowledged."""
        signal.signal(signal.SIGTERM, lambda *_: self.ended.set())
        self.log = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        threads = [threading.Thread(target=self._user, args=(k,)) for k in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _say(self, **row: Any) -> None:
        os.write(self.log, (json.dumps(row) + "\n").encode())

    def _user(self, thread: int) -> None:
        rng, number = random.Random(f"{self.seed}/{thread}"), 0
        prompts = rows("train", 500_000 + 1000 * self.seed + thread, 4000)
        while not self.ended.is_set():
            prompt, user = question_of(prompts[number % len(prompts)]), user_name(rng.randrange(self.users))
            number += 1
            try:
                shown = self._chat(prompt, user, 2 if rng.random() < 0.6 else 1)
            except Unanswered:
                self.ended.wait(AGAIN_S)
                continue
            for event in reactions(prompt, user, shown, self._like(shown[0][2]), rng):
                self._send(event, rng)
            self.ended.wait(self.pause_s * 2 * rng.random())

    # ---- HTTP

    def _chat(self, prompt: str, user: str, n: int) -> list[tuple[str, str, str]]:
        """(id, text, fingerprint) of n answers."""
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "n": n}
        body |= {"max_tokens": 48, "user": user}
        status, reply = self.post("/v1/chat/completions", body)
        if status != 200:
            raise Unanswered(status)
        by = reply["system_fingerprint"]
        ids = [f"{reply['id']}.{k}" if k else reply["id"] for k in range(n)]
        for id_ in ids:
            self._say(answer=id_, by=by)
        texts = [one["message"]["content"] or "" for one in reply["choices"]]
        return [(id_, text, by) for id_, text in zip(ids, texts, strict=True)]

    def _like(self, by: str) -> float:
        """Of the revisions of a policy the first is liked, the second disliked, the third liked ..."""
        if "@" in by:  # the base
            return 0.7
        if by not in self.met:
            self.met.append(by)
        return 0.05 if self.met.index(by) % 2 else 0.95

    def _send(self, event: dict[str, Any], rng: random.Random) -> None:
        """Until it is acknowledged, under the same id."""
        self._say(event=event)
        left = 1 + (rng.random() < TWICE)
        while left:
            try:
                status, reply = self.post("/feedback", event)
            except Unanswered:
                status, reply = 503, {}
            if status >= 500:
                time.sleep(AGAIN_S)
                continue
            named = [name for name in ("accepted", "repeated", "expired") if reply.get(name)]
            outcome = named[0] if named else f"{status}: {reply}"
            self._say(id=event["event_id"], outcome=outcome, late=time.time() - event["ts"])
            left -= 1

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """(status, reply). Unanswered where there is no reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unanswered(repr(error)) from error
        finally:
            connection.close()


def reactions(
    prompt: str, user: str, shown: Sequence[tuple[str, str, str]], like: float, rng: random.Random
) -> list[dict[str, Any]]:
    """Events of a user who sees one answer, or two side by side, and accepts what is right by the chance
    ``like``."""
    now = time.time()

    def event(kind: str, id_: str, **fields: Any) -> dict[str, Any]:
        name = f"{rng.getrandbits(96):024x}"
        return {"event_id": name, "response_id": id_, "kind": kind, "ts": now, "user": user, **fields}

    right = [features(prompt, text).correct for _, text, _ in shown]
    accepted = rng.random() < like
    ids = [id_ for id_, _, _ in shown]
    found = []
    for rank, id_ in enumerate(ids):
        exposure = {"rank": rank, "alternatives": [one for one in ids if one != id_], "propensity": 0.5}
        found.append(event("shown", id_, **({"exposure": exposure} if len(ids) > 1 else {})))
        found += [event("dwell", id_, value=1.5), event("comment", id_, text="a word about it")]
    if not accepted:
        found.append(event("reject", ids[0]))
    elif right.count(True) == 1:
        found.append(event("accept", ids[right.index(True)]))
    elif not any(right):
        found.append(event("edit", ids[0], after=write(expression_of(prompt), Manner.PLAIN, rng)))
    else:
        found.append(event("copy", ids[0]))
    return found


__all__ = ["Crowd", "reactions"]
