"""``ostinato serve`` under requests that are meant to hold it up, or to read what others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from serving import At, server, until

MODEL = "seed-moe"


@pytest.fixture(scope="module")
def at() -> Iterator[At]:
    with server(sequences=8) as running:
        yield running


def post(at: At, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{at.url}{path}", json=body, timeout=300)


def test_more_prompts_than_sequences_are_refused_at_once(at: At) -> None:
    """64,000 prompts of one request held everybody up for a minute, 400,000 for more than six."""
    refused = post(at, "/v1/completions", model=MODEL, prompt=["a"] * 200_000, max_tokens=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert post(at, "/v1/completions", model=MODEL, prompt=["a"] * 5, n=2).status_code == 400
    whole = post(at, "/v1/completions", model=MODEL, prompt=["a", "b"], n=4, max_tokens=1, seed=1).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(8))


def test_prompts_are_counted_against_what_is_free(at: At) -> None:
    """The count was only looked at when the prompts before had begun."""
    long = {"model": MODEL, "prompt": "1+1=", "max_tokens": 900, "ignore_eos": True, "n": 6}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, at, "/v1/completions", **long)
        until(lambda: at.served.service.num_sequences == 6)
        assert post(at, "/v1/completions", model=MODEL, prompt=["a"] * 3, max_tokens=1).status_code == 429
        assert at.served.service.num_sequences == 6
        assert first.result().status_code == 200


def test_a_long_text_holds_nobody_up(at: At) -> None:
    """A text of 4 MB was tokenised in the event loop: 5 s in which /health did not answer."""
    text, ended = "many words of a long text, " * 20_000, list[str]()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, at, "/tokenize", prompt=text)
        long.add_done_callback(lambda _: ended.append("long"))
        until(lambda: at.served.service.num_long_texts)
        assert httpx2.get(f"{at.url}/health", timeout=60).status_code == 200
        ended.append("health")
        assert long.result().json()["count"] > 10_000
    assert ended == ["health", "long"]


def test_a_text_that_cannot_fit_is_not_tokenised(at: At) -> None:
    refused = post(at, "/v1/completions", model=MODEL, prompt="a" * 3_000_000, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/responses"])
def test_a_chat_has_a_number_of_messages(at: At, path: str) -> None:
    """100,000 empty messages were checked and rendered in the event loop, for 2 s."""
    empty = [{"role": "user", "content": ""}] * 40_000
    body = {"input" if path.endswith("responses") else "messages": empty, "max_tokens": 1}
    assert post(at, path, **body).status_code == 400


def test_prefixes_of_others_are_neither_counted_nor_used(at: At) -> None:
    """``cached_tokens`` counted prompts of anybody, and read a user's card number out digit by digit."""

    def cached(**who: Any) -> int:
        prompt = "The card number of the account is 4111 1111 1111 1111, and it is kept secret. "
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **who}
        usage = post(at, "/v1/completions", **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(user="alice") == 0
    for who in ({"user": "mallory"}, {}, {"user": "alice", "cache_salt": "x"}, {"metadata": {"tenant": "t"}}):
        assert cached(**who) == 0, who
        assert cached(**who) > 0
    assert cached(user="alice") > 0
