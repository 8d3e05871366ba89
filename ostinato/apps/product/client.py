"""A client for products: what users do with answers, sent to ``POST /feedback`` in the background.

Standard library alone. An event keeps its id until the server has it, so sent again it counts once.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, deque
from itertools import islice
from typing import Any

BATCH = 100  # events of one request
AGAIN_S = (0.2, 30.0)  # between attempts: the first, doubled up to the last


class Feedback:
    """Events of one product. ``url``: of the server; the other fields stand in every event.

    ``counts``: events "sent" (the server has them), "refused" (by it; ``refusals`` say why), "dropped"
    (``most`` were waiting, or the end came first), and "retries" of requests.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        user: str = "",
        session: str = "",
        tenant: str = "",
        most: int = 10_000,
        timeout_s: float = 10.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: deque[Any] = deque(maxlen=100)  # the last ones
        self._url, self._most, self._timeout_s = f"{url.rstrip('/')}/feedback", most, timeout_s
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        who = {"user": user, "session": session, "tenant": tenant}
        self._who = {name: value for name, value in who.items() if value}
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._end: float | None = None  # of time.monotonic
        self._thread = threading.Thread(target=self._work, name="feedback", daemon=True)
        self._thread.start()

    def send(self, kind: str, response_id: str, *, ts: float | None = None, **fields: Any) -> str | None:
        """Queue an event (docs/feedback.md has kinds and fields); its id, or None where it was dropped."""
        now = time.time() if ts is None else ts
        event = {"event_id": str(uuid.uuid4()), "response_id": response_id, "kind": kind, "ts": now}
        with self._changed:
            if self._end is not None or len(self._waiting) >= self._most:
                self.counts["dropped"] += 1
                return None
            self._waiting.append({**event, **self._who, **fields})
            self._changed.notify()
        return event["event_id"]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self, limit_s: float = 10.0) -> int:
        """Send what waits, for about ``limit_s``; how many events could not be sent, which are dropped."""
        with self._changed:
            self._end = time.monotonic() + limit_s
            self._changed.notify()
        self._thread.join(limit_s + self._timeout_s)
        self.counts["dropped"] += len(self._waiting)
        return len(self._waiting)

    def __enter__(self) -> Feedback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread

    def _work(self) -> None:
        wait_s = AGAIN_S[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._end is not None)
                events = list(islice(self._waiting, BATCH))
            if not events:
                return
            if self._post(events):
                wait_s = AGAIN_S[0]
                for _ in events:
                    self._waiting.popleft()
                continue
            self.counts["retries"] += 1
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None, wait_s)
            if self._end is not None:
                if (left_s := self._end - time.monotonic()) <= 0:
                    return
                time.sleep(min(wait_s, left_s, AGAIN_S[0]))
            wait_s = min(2 * wait_s, AGAIN_S[1])

    def _post(self, events: list[dict[str, Any]]) -> bool:
        """Whether the server has them, or will never take them."""
        try:
            request = urllib.request.Request(self._url, json.dumps(events).encode(), self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                refused = json.load(reply)["refused"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code >= 500 or error.code in (401, 403, 404, 408, 429):
                    return False  # the server, its key or its settings may be mended
                refused = [{"message": f"{error.code}: {error.read(2_000)!r}"}] * len(events)
        except (OSError, ValueError, KeyError):
            return False
        self.counts["sent"] += len(events) - len(refused)
        self.counts["refused"] += len(refused)
        self.refusals.extend(refused)
        return True
