"""A teacher at an address: its numbers by a plain server, and everything that such a server may do wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from nouns import drawn

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.train.inputs import as_inputs
from ostinato.train.teacher_at import TeacherAt, TeacherFailed

Reply = tuple[int, Any]
VOCAB = 40


def logprob_of(tokens: list[int], at: int) -> float:
    """Of token ``at``: any function of what comes before and of itself."""
    return -(sum(tokens[:at]) % 7) - tokens[at] / 100


def good(path: str, body: Any) -> Reply:
    if path == "/v1/models":
        return 200, {"data": [{"id": "first"}, {"id": "second"}]}
    if path == "/detokenize":
        return 200, {"prompt": text(body["tokens"])}
    tokens = body["prompt"]
    found = [{str(tokens[at]): {"logprob": logprob_of(tokens, at)}} for at in range(1, len(tokens))]
    return 200, {"choices": [{"prompt_logprobs": [None, *found]}]}


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@contextmanager
def serving(answer: Callable[[str, Any], Reply]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answer(self.path, json.loads(data) if data else None)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_packed_targets_get_the_numbers_of_their_sequences() -> None:
    """Prompts shared or not, one token or several, two turns: against plain loops over the samples."""
    rng = np.random.default_rng(0)
    samples = [one for g in range(4) for one in drawn(rng, VOCAB, 3 + g, [1, 5, 2 + g], group=g)]
    for share in (True, False):
        weights = aggregation_weights(samples, Aggregation.TOKEN)
        batch = pack(samples, weights, tokens_per_microbatch=40, share_prompts=share)
        parts = [as_inputs(one, torch.device("cpu"), moe=False, replay=False) for one in batch.microbatches]
        with serving(good) as url:
            teacher = TeacherAt(f"{url}/v1/")
            scored, flops = teacher.score(parts)
        by_uid = {one.uid: one for one in samples}
        order = [by_uid[uid] for part in batch.microbatches for uid in part.uids]
        trained = [(one.tokens.tolist(), np.flatnonzero(one.loss_mask).tolist()) for one in order]
        expected = [logprob_of(tokens, t) for tokens, places in trained for t in places]
        found = torch.cat([one.teacher for one in scored if one.teacher is not None])
        assert found.tolist() == pytest.approx(expected) and flops == 0
        assert teacher.metrics() == {"teacher/requests": len(samples), "teacher/retries": 0}
        assert teacher.metrics()["teacher/requests"] == 0 and teacher.progress == len(samples)


def test_what_may_pass_is_tried_again_and_counted() -> None:
    replies: list[Reply] = [(503, "busy"), (429, "later"), (200, b'{"choices": [tor')]

    def answer(path: str, body: Any) -> Reply:
        return replies.pop() if replies else good(path, body)

    pauses: list[float] = []
    with serving(answer) as url:
        teacher = TeacherAt(url, "first", sleep=pauses.append)
        found = teacher.logprobs(np.array([3, 1, 2]))
    assert found[1:].tolist() == pytest.approx([-3.01, -4.02]) and np.isnan(found[0])
    assert pauses == [0.5, 1.0, 2.0] and teacher.metrics()["teacher/retries"] == 3


def other(change: Callable[[dict[str, Any]], Any]) -> Callable[[str, Any], Reply]:
    def answer(path: str, body: Any) -> Reply:
        status, reply = good(path, body)
        return status, change(reply["choices"][0]) or reply

    return answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda path, body: (500, "broken"), r"/v1/completions gave 500 .*broken.*, 3 times in a row"),
        (lambda path, body: (400, "too long"), r"/v1/completions gave 400 .*too long"),
        (other(lambda one: one.pop("prompt_logprobs")), "has no prompt_logprobs of the 3 tokens"),
        (other(lambda one: one["prompt_logprobs"].pop()), "has no prompt_logprobs of the 3 tokens"),
        (other(lambda one: one["prompt_logprobs"][1].update({"1": {}})), "has no prompt_logprobs of the 3"),
        (other(lambda one: one.update(prompt_logprobs=[None, {"9": {"logprob": 0.0}}] * 2)), "has no prompt"),
        (
            other(lambda one: one["prompt_logprobs"][1].update({"1": {"logprob": -float("inf")}})),
            "a log-probability that is not finite",
        ),
    ],
)
def test_a_failed_answer_ends_the_work(answer: Callable[[str, Any], Reply], why: str) -> None:
    with serving(answer) as url:
        teacher = TeacherAt(url, "first", max_retries=2, sleep=lambda seconds: None)
        with pytest.raises(TeacherFailed, match=why):
            teacher.logprobs(np.array([3, 1, 2]))


def test_silence_is_bounded_and_nobody_there_is_said() -> None:
    over = threading.Event()

    def answer(path: str, body: Any) -> Reply:
        over.wait(20)
        return good(path, body)

    with serving(answer) as url:
        teacher = TeacherAt(url, "first", timeout_s=0.05, max_retries=1, sleep=lambda seconds: None)
        with pytest.raises(TeacherFailed, match=r"gave no answer \(timed out\), 2 times in a row"):
            teacher.logprobs(np.array([3, 1]))
        over.set()
    with pytest.raises(ValueError, match=r"teacher\.url http://127.* cannot be a teacher: .*refused"):
        TeacherAt(url, max_retries=0).check(text, [1, 2])


def test_another_tokenizer_or_model_is_refused() -> None:
    ids = list(range(9000))
    with serving(good) as url:
        TeacherAt(url).check(text, ids)
        swapped = [*ids[:5000], 5001, 5000, *ids[5002:]]
        with pytest.raises(ValueError, match="other tokens than the student between 4096 and 8191"):
            TeacherAt(url).check(lambda some: text([swapped[one] for one in some]), ids)
        with pytest.raises(ValueError, match=r"teacher\.model is 'third'; .* serves first, second"):
            TeacherAt(url, "third").check(text, ids)
    with (
        serving(lambda path, body: (404, "none") if path == "/detokenize" else good(path, body)) as url,
        pytest.raises(ValueError, match="it has to answer /v1/models, /detokenize and /v1/completions"),
    ):
        TeacherAt(url).check(text, ids)
