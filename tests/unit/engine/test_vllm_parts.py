"""The parts of the engine on vLLM, each by itself: what a server serves, its lives, requests and replies."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.engine.requests import Limits
from ostinato.engine.vllm_answers import choice_of, refuse
from ostinato.engine.vllm_http import Reply, Unreachable
from ostinato.engine.vllm_served import LORA, Lives, Policy, Served
from ostinato.engine.vllm_server import vllm_lost, vllm_wrong
from ostinato.types import Completion, Request, Sampling, Stop
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts

# ---- what is served


class Scripted(Served):
    """Calls are noted; the server answers them as ``serving`` says, and never over a network."""

    def __init__(self, **refused: int) -> None:
        super().__init__(None, 1.0)  # type: ignore[arg-type]
        self.calls: list[str] = []
        self.now, self.adapters, self.digest, self.refused = "default", set[str](), "d1", refused

    def _call(self, method: str, path: str, body: Any = None) -> Reply:
        name = path.partition("?")[0].split("/")[-1]
        self.calls.append(name)
        if status := self.refused.get(name):
            return Reply(status=status, body={"error": "no"})
        answers: dict[str, Any] = {
            "models": {"data": [{"id": one} for one in ("base", *self.adapters)]},
            "weight_info": {"weight_version": self.now},
            "collective_rpc": {"results": [self.digest]},
        }
        if name == "load_lora_adapter":
            self.adapters.add(body["lora_name"])
        if name == "update_weight_version":
            self.now = body["new_version"]
        return Reply(status=200, body=answers.get(name))


def adapter(version: int) -> Policy:
    return Policy(version=version, fingerprint=f"f{version}", folder=Path("a"), digest="d1")


def labelled(*labels: str) -> dict[str, Any]:
    spans = [{"version": label, "start": n, "end": n + 1} for n, label in enumerate(labels)]
    return {"token_ids": [5] * len(labels), "weight_versions": spans}


def test_an_adapter_is_replaced_between_pause_and_label() -> None:
    served = Scripted()
    served.install(adapter(1))
    publish = ["collective_rpc", "update_weight_version", "resume", "weight_info"]
    assert served.calls == ["pause", "models", "load_lora_adapter", *publish]
    assert served.adapters == {LORA} and served.label == "1:f1" and served.signs == 1
    served.calls.clear()
    served.install(adapter(2))
    assert served.calls == ["pause", "models", *publish]
    served.calls.clear()
    served.install(Policy(version=3))
    assert served.calls == ["pause", *publish[1:]] and served.label == "3:base"


@pytest.mark.parametrize(
    ("refused", "error", "last"),
    [
        ("load_lora_adapter", WorkerLost, "resume"),  # nothing was replaced
        ("collective_rpc", WorkerLost, "collective_rpc"),
        ("update_weight_version", Unreachable, "update_weight_version"),
    ],
)
def test_a_server_that_refuses_stays_paused_unless_nothing_was_replaced(
    refused: str, error: type[Exception], last: str
) -> None:
    served = Scripted(**{refused: 400})
    with pytest.raises(error):
        served.install(adapter(1))
    assert served.calls[-1] == last


def test_files_that_were_not_read_and_labels_that_were_not_taken_are_final() -> None:
    served = Scripted()
    served.digest = "d9"
    with pytest.raises(WorkerLost, match=r"'d9'.* where d1 was written") as error:
        served.install(adapter(1))
    assert error.value.final


def test_versions_are_by_label_and_a_request_on_the_base_stays_on_it() -> None:
    served, base = Scripted(), Policy(version=0)
    for policy in (base, adapter(1), adapter(2)):
        served.install(policy)
    assert served.versions(adapter(1), labelled("1:f1", "1:f1", "2:f2")).tolist() == [1, 1, 2]
    assert served.versions(base, labelled("0:base", "2:f2")).tolist() == [0, 0]
    assert len(served.versions(base, {"token_ids": [], "weight_versions": None})) == 0
    for choice, sentence in (
        (labelled("7:somebody"), "not published"),
        (labelled("1:f1"), "answered as policy 1 where 2 was asked"),
        ({"token_ids": [5], "weight_versions": None}, "answered as policy -1"),
    ):
        with pytest.raises(Unreachable, match=sentence):
            served.versions(adapter(2), choice)


def test_a_server_with_a_foreign_label_gives_no_sign_of_life() -> None:
    served = Scripted()
    served.install(adapter(1))
    served.now = "default"
    with pytest.raises(Unreachable, match="'default', which was not published"):
        served.beat()
    assert served.signs == 1 and served.label == "1:f1"


# ---- lives


class Fragile:
    """A server whose next lives end as ``faults`` say; None: one that goes on."""

    def __init__(self, *faults: Exception | None) -> None:
        self.faults, self.installed, self.said, self.closed = [*faults], list[int](), list[str](), 0
        self.counters = Counter[str]()

    def start(self) -> None: ...

    def install(self, policy: Policy) -> None:
        if (fault := self.faults.pop(0) if self.faults else None) is not None:
            raise fault
        self.installed.append(policy.version)

    def why(self) -> str:
        return "its log is empty"

    def close(self) -> None:
        self.closed += 1


def lives(server: Fragile, most: int = 2) -> Lives:
    return Lives(
        server=server,  # type: ignore[arg-type]
        start=server.start,
        install=server.install,
        restarts=Restarts(most=most),
        counters=server.counters,
        say=server.said.append,
    )


def test_what_could_not_be_published_is_published_in_the_next_life() -> None:
    server = Fragile(Unreachable("gone"), vllm_lost("did not start"))
    mine = lives(server)
    mine.publish(adapter(1))
    assert server.installed == [1] and mine.epoch == 1 and server.counters["workers/restarts"] == 1
    assert [sentence.partition(": ")[2] for sentence in server.said] == ["gone", "did not start"]


def test_one_of_many_that_find_a_server_lost_has_it_started_anew() -> None:
    server = Fragile()
    mine = lives(server)
    mine.publish(adapter(4))
    threads = [threading.Thread(target=mine.recover, args=(0, "silent")) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mine.epoch == 1 and server.installed == [4, 4] and len(server.said) == 1


def test_losses_in_a_row_end_it_and_so_does_what_a_new_life_cannot_mend() -> None:
    server = Fragile(*(Unreachable("gone") for _ in range(9)))
    with pytest.raises(WorkerLost, match="vLLM was lost 3 times in a row: gone; its log is empty"):
        lives(server).publish(adapter(1))
    server = Fragile(Unreachable("gone"), vllm_wrong("another digest"))
    with pytest.raises(WorkerLost, match="another digest"):
        lives(server).publish(adapter(1))
    server = Fragile()
    mine = lives(server)
    mine.close()
    with pytest.raises(WorkerLost, match="lost 1 times in a row: late"):
        mine.recover(0, "late")
    assert server.closed == 2 and not server.installed


# ---- requests and replies


def request(tokens: int = 3, partial: Completion | None = None, **sampling: Any) -> Request:
    return Request(
        tokens=np.ones(tokens, np.int32), sampling=Sampling(**sampling), seed=(0,), partial=partial
    )


PART = Completion(
    tokens=np.ones(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    stop=Stop.ABORT,
)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (request(0), "no tokens"),
        (request(9), "shorten the prompt"),
        (request(partial=PART), "cannot go on with"),
        (request(temperature=0.001), "vLLM takes 0"),
        (request(min_tokens=2, stop_strings=("a",)), "drop one of them"),
    ],
)
def test_what_vllm_would_answer_otherwise_is_refused(refused: Request, sentence: str) -> None:
    limits = Limits(
        context=8,
        vocab_size=2,
        blocks=sys.maxsize,
        has_text=True,
        records_support=False,
        policies={"": 0},
    )
    refuse(request(temperature=0.0, stop_strings=("a",)), limits)
    with pytest.raises(ValueError, match=sentence):
        refuse(refused, limits)


def test_a_reply_is_a_choice_a_refusal_or_of_another_server() -> None:
    body = {"model": "m", "choices": ["said"], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}
    assert choice_of(Reply(status=200, body=body), request(), "m") == ("said", 2)
    assert choice_of(Reply(status=200, body=body | {"usage": {}}), request(), "m") == ("said", 0)
    for reply, model, error in (
        (Reply(status=404, body="who?"), "m", Unreachable),
        (Reply(status=200, body=body), "other", Unreachable),
        (Reply(status=400, body="too long"), "m", ValueError),
    ):
        with pytest.raises(error, match="vLLM"):
            choice_of(reply, request(), model)
