"""Answers and what users did with them, over HTTP: one record for every answer that a client saw, one effect
for every event, and nothing lost that was acknowledged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from browsers import open_page
from commands import command, environment
from serving import At, server, until

from ostinato.apps.product.events import Action, Exchange, Kind
from ostinato.apps.product.store import open_store
from ostinato.apps.serve import app

CHAT = {"model": "seed-moe", "messages": [{"role": "user", "content": "Compute: 23 + 45"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("feedback") / "f.db"


@pytest.fixture(scope="module")
def at(where: Path) -> Iterator[At]:
    with server(feedback=str(where)) as running:
        yield running


def post(at: At, path: str, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx2.post(f"{at.url}{path}", content=content, headers=headers, timeout=60)


def recorded(where: Path, id_: str) -> Exchange:
    with open_store(where) as store:
        until(lambda: store.exchange(id_) is not None)
        found = store.exchange(id_)
    assert found is not None
    return found


def event(id_: str, response: str, **fields: Any) -> dict[str, Any]:
    usual = {"kind": "rating", "value": 1, "ts": time.time()}
    return {"event_id": id_, "response_id": response, **usual, **fields}


# ---- answers


def test_an_answer_is_recorded_as_it_was_sampled(at: At, where: Path) -> None:
    who = {"user": "u7", "metadata": {"session_id": "s", "tenant": "t"}}
    stated = post(
        at, "/v1/chat/completions", CHAT | who | {"n": 2, "logprobs": True, "return_token_ids": True}
    )
    reply = stated.json()
    for choice in reply["choices"]:
        k = choice["index"]
        found = recorded(where, reply["id"] + (f".{k}" if k else ""))
        assert found.tokens.tolist() == choice["token_ids"]
        assert found.prompt_tokens.tolist() == choice["prompt_token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found.logprobs.tolist() == np.array(logprobs, np.float32).tolist()
        assert found.output == choice["message"]["content"]
        assert [*found.messages] == CHAT["messages"]
        assert (found.user, found.session, found.tenant) == ("u7", "s", "t")
        assert found.revision == reply["system_fingerprint"] and found.propensity == 1.0
        assert found.experts is not None
        assert len(found.experts) == len(found.prompt_tokens) + len(found.tokens)
        assert found.sampling["temperature"] == 1.0
        assert found.action in Action


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "1+1=", "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"model": "seed-moe", "max_tokens": 4, "messages": CHAT["messages"]}),
    ],
)
def test_the_id_that_the_client_sees_is_the_key_in_every_dialect(
    at: At, where: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    text = post(at, path, body | {"stream": stream}).text
    tree = json.loads(text) if not stream else json.loads(text.partition("data: ")[2].partition("\n")[0])
    inner = tree.get("response") or tree.get("message") or tree
    assert len(recorded(where, inner["id"]).tokens)


def test_a_client_that_refuses_the_store_is_not_recorded(at: At, where: Path) -> None:
    refused = post(at, "/v1/chat/completions", CHAT | {"store": False}).json()["id"]
    recorded(where, post(at, "/v1/chat/completions", CHAT).json()["id"])
    with open_store(where) as store:
        assert store.exchange(refused) is None


def test_names_that_events_cannot_have_are_recorded_by_their_hash(at: At, where: Path) -> None:
    long = {"metadata": {"user_id": "x" * 300}}
    found = recorded(where, post(at, "/v1/chat/completions", CHAT | long).json()["id"])
    assert len(found.user) == 64


# ---- events


def test_an_event_is_joined_once(at: At, where: Path) -> None:
    id_ = post(at, "/v1/chat/completions", CHAT).json()["id"]
    first = event("once", id_, user="u")
    for name in ("accepted", "repeated", "repeated"):
        reply = post(at, "/feedback", first)
        assert reply.status_code == 200 and reply.json()[name] == 1
    other = post(at, "/feedback", first | {"value": -1})
    assert other.status_code == 409 and other.json()["error"]["code"] == "conflict"
    recorded(where, id_)
    with open_store(where) as store:
        (found,) = [each for each in store.joined() if each.exchange.response_id == id_]
    assert [(e.event_id, e.value) for e in found.events] == [("once", 1.0)]


def test_a_list_is_taken_but_for_what_is_refused_in_it(at: At) -> None:
    events = [event("l1", "r"), event("l2", "r", kind="like"), event("l1", "r", value=0, ts=1.0), 7]
    reply = post(at, "/feedback", events)
    assert reply.status_code == 200 and reply.json()["accepted"] == 1
    assert [(row["index"], row["code"]) for row in reply.json()["refused"]] == [
        (1, "invalid_event"),
        (2, "conflict"),
        (3, "invalid_event"),
    ]
    assert "kind is 'like'" in reply.json()["refused"][0]["message"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "no JSON"),
        (b"3", 400, "one event or a list"),
        (event("x", "r", kind="edit"), 400, "after is missing"),
        ({"kind": "accept"}, 400, "event_id is missing; an event has event_id, response_id, kind and ts"),
        (event("x", "r", value=None), 400, "value is missing"),
        (event("x", "r", value=3), 400, "from -1"),
        (event("x", "r", kind="dwell", value=-1e9), 400, "value is"),  # it was accepted
        (event("x", "r", kind="dwell", value=1e300), 400, "value is"),
        (event("x\0", "r"), 400, "event_id"),
        (event("x", "r", colour="red"), 400, "colour"),
        ([event("x", "r")] * 1001, 413, "1000 at most"),
        (b'{"event_id": "\\ud83d"}', 400, "surrogate"),
    ],
)
def test_what_is_wrong_is_said_in_the_servers_form(at: At, body: Any, status: int, words: str) -> None:
    reply = post(at, "/feedback", body)
    assert reply.status_code == status and words in reply.json()["error"]["message"]


def test_pages_of_elsewhere_are_refused(at: At) -> None:
    own = {"Origin": at.url, "Host": at.url.removeprefix("http://")}
    assert post(at, "/feedback", event("o1", "r"), **own).status_code == 200
    elsewhere = post(at, "/feedback", event("o2", "r"), Origin="https://evil.example")
    assert elsewhere.status_code == 403 and "--origin" in elsewhere.json()["error"]["message"]


def test_what_is_counted_and_shown(at: At) -> None:
    text = httpx2.get(f"{at.url}/metrics").text
    assert 'ostinato_feedback_events_total{outcome="accepted"}' in text
    assert 'ostinato_exchanges_total{outcome="dropped"} 0.0' in text
    assert 'ostinato_feedback_waiting{outcome="all"}' in text
    assert "ostinatoFeedback" in httpx2.get(f"{at.url}/feedback.js").text
    assert "feedback.js" in httpx2.get(at.url).text


def test_a_server_without_a_store_has_no_such_address() -> None:
    with server(key="secret") as at:
        assert post(at, "/feedback", event("a", "r"), Authorization="Bearer secret").status_code == 404
        assert '<script src="feedback.js"' not in httpx2.get(at.url).text


# ---- kill -9


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    """Clients write down what was acknowledged, and send again what was not, under the same ids."""
    rng, store_at, log = random.Random(3), tmp_path / "f.db", tmp_path / "log"
    acknowledged: set[str] = set()
    unsure: list[dict[str, Any]] = []
    number = 0
    for _ in range(2):
        with log.open("wb") as out:
            words = ("serve", "asset:seed-moe", "--port", "0", "--feedback", str(store_at))
            process = subprocess.Popen(
                command(*words),
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment() | {"PYTHONUNBUFFERED": "1"},
            )
        assert process.stdout is not None
        base = next(line.split()[2] for line in process.stdout if line.startswith(b"OpenAI")).decode()
        address = base.removesuffix(",").removesuffix("/v1")
        chats: list[str] = []
        threading.Thread(target=_chat, args=(address, chats), daemon=True).start()
        until(lambda chats=chats: len(chats) > 2, 120)
        killer = threading.Timer(0.2 + rng.random(), os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        with httpx2.Client() as client:
            while True:
                events = [*unsure, *(event(f"k{number + n}", rng.choice(chats)) for n in range(3))]
                number += 3
                try:
                    reply = client.post(f"{address}/feedback", json=events)
                except httpx2.TransportError:
                    unsure = events
                    break
                assert reply.status_code == 200 and not reply.json()["refused"]
                acknowledged |= {each["event_id"] for each in events}
                unsure = []
        process.wait()
        process.stdout.close()
    with open_store(store_at) as store:
        found = [each.event_id for each in store.events()]
        answers = [each.exchange.response_id for each in store.joined()]
    assert len(found) == len({*found}) and acknowledged <= {*found}
    assert {*found} - acknowledged <= {each["event_id"] for each in unsure}
    assert len(acknowledged) > 10 and len(answers) > 5


def _chat(address: str, ids: list[str]) -> None:
    with httpx2.Client(timeout=60) as client:
        while True:
            try:
                ids.append(client.post(f"{address}/v1/chat/completions", json=CHAT).json()["id"])
            except httpx2.TransportError:
                return


# ---- the chat page, in a real browser

# A user who chats, presses both thumbs, copies, edits and has another answer.
USER = """
const until = async (what) => { while (!what()) await new Promise((done) => setTimeout(done, 20)); };
const button = (title) => document.querySelector(`.acts [title="${title}"]`);
(async () => {
  await until(() => document.querySelector("section"));
  $("tokens").value = "6";
  $("seed").value = "1";
  $("text").value = "Compute: 23 + 45";
  await send();
  const spoken = document.querySelectorAll(".turn")[1].textContent;
  button("good").click();
  button("bad").click();
  button("copy the answer").click();
  button("write what it should have been").click();
  document.querySelector(".turn textarea").value = "68";
  button("keep this text").click();
  $("seed").value = "2";
  button("another answer").click();
  await until(() => !running && button("good"));
  await until(() => feedback.pending === 0);
  const wide = document.documentElement.scrollWidth - innerWidth;
  const text = document.querySelectorAll(".turn")[1].textContent;
  feedback.comment("the end", JSON.stringify({ ...feedback.counts, text, wide, spoken }));
})();
"""


@pytest.mark.lab
def test_a_user_of_the_chat_page(
    at: At, where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = app.PAGE.read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(page.replace("</html>", f"<script>{USER}</script></html>"))
    monkeypatch.setattr(app, "PAGE", tmp_path / "page.html")
    with open_store(where) as store:

        def end() -> list[str]:
            return [each.text for each in store.events() if each.response_id == "the end"]

        with open_page(at.url, tmp_path / "profile"):
            until(end, 60)
        seen = json.loads(end()[0])
        first, second = [each for each in store.joined() if each.exchange.user.startswith("page-")]
    assert seen["dropped"] == seen["refused"] == 0 and seen["sent"] >= 7
    assert seen["text"] == "68" and seen["wide"] <= 0
    assert "<|" not in seen["spoken"], "the token that ends an answer was shown as a part of it"
    reported = [(e.kind.value, e.value, e.after) for e in first.events if e.kind is not Kind.DWELL]
    assert sorted(reported, key=str) == [
        ("copy", None, None),
        ("edit", None, "68"),
        ("rating", -1.0, None),
        ("rating", 1.0, None),
        ("regenerate", None, None),
        ("shown", None, None),
    ]
    (shown,) = [e for e in second.events if e.kind is Kind.SHOWN]
    assert shown.replaces == first.exchange.response_id and shown.user == second.exchange.user
