"""The products' own client: nobody waits, every event arrives once, what does not arrive is counted."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ostinato.apps.product import client
from ostinato.apps.product.client import Feedback


class Script(ThreadingHTTPServer):
    """Answers by ``statuses`` in turn, then with 200; a 200 keeps the events."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.events, self.keys = [*statuses], Counter[str](), set[str]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        events = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.statuses.pop(0) if server.statuses else 200
        server.keys.add(self.headers.get("Authorization", ""))
        if status in (200, 599):
            server.events.update(event["event_id"] for event in events)
        if status == 599:  # the events are in, and the reply is lost
            self.connection.close()
            return
        body = b'{"refused": []}' if status == 200 else b'{"error": {}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(*statuses: int) -> Iterator[Script]:
    with Script(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", (0.001, 0.01))


@pytest.mark.parametrize("statuses", [(), (503,), (503, 500, 429), (401,), (599, 599)])
def test_every_event_arrives_under_one_id(statuses: tuple[int, ...]) -> None:
    with served(*statuses) as server:
        with Feedback(server.url, key="k", user="u") as feedback:
            ids = {feedback.send("accept", f"r{k}") for k in range(250)}
        assert {*server.events} == ids and feedback.counts["sent"] == 250
        assert feedback.counts["retries"] == len(statuses) and server.keys == {"Bearer k"}
        assert feedback.counts["dropped"] == feedback.waiting == 0


def test_what_the_server_refuses_is_not_sent_again() -> None:
    with served(400) as server:
        with Feedback(server.url) as feedback:
            feedback.send("like", "r")
        assert feedback.counts == Counter(refused=1, sent=0) and "400" in feedback.refusals[0]["message"]


def test_a_server_that_is_away_is_waited_for_without_anybody_waiting() -> None:
    with served() as server:
        url = server.url
    feedback = Feedback(url, most=5)
    ids = [feedback.send("accept", "r") for _ in range(8)]
    assert ids[5:] == [None] * 3 and None not in ids[:5]
    assert feedback.close(0.05) == 5 and feedback.counts["dropped"] == 8 and feedback.counts["retries"] > 0
    assert feedback.send("accept", "r") is None
