"""Policies of a catalog through a server: their answers, a publish, and what a key cannot do to others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import At, server, until
from worlds import adapters_of

from ostinato.catalog import Catalog, Quota, open_catalog
from ostinato.launch.policy import load_policy
from ostinato.model.decoder import Decoder
from ostinato.model.peft_io import LOGICAL, save_peft

MODEL = "seed-moe"
PROMPT = "Compute: 23 + 45 and then once more the same, as often as there are words here."


@dataclass(frozen=True, slots=True)
class Made:
    """A catalog of policies, each with content of its own."""

    folder: Path
    catalog: Catalog
    sources: list[Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, decoder = tmp_path_factory.mktemp("sources"), load_policy("asset:seed-moe", "model.dtype=float32")
    assert isinstance(decoder.decoder, Decoder)
    for seed in range(6):
        adapters = adapters_of(decoder.decoder, seed, 0.3, rank=4)
        save_peft(adapters, decoder.decoder, folder / str(seed), peft=False)
    return [folder / str(seed) / LOGICAL for seed in range(6)]


@pytest.fixture
def made(tmp_path: Path, sources: list[Path]) -> Iterator[Made]:
    catalog = open_catalog(tmp_path / "catalog", new=True)
    yield Made(tmp_path / "catalog", catalog, sources)
    catalog.close()


def ask(at: At, model: str, key: str = "", **fields: Any) -> httpx2.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "seed": 3, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{at.url}/v1/completions", json=body, headers=headers, timeout=120)


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def count(at: At, outcome: str) -> int:
    assert at.served.policies is not None
    return at.served.policies.counts[outcome]


def test_each_policy_answers_as_alone_while_others_come_and_go(made: Made) -> None:
    names = [f"team/p{number}" for number in range(6)]
    for name, source in zip(names, made.sources, strict=True):
        made.catalog.publish("", name, source)
    size = made.sources[0].stat().st_size
    with server(catalog=made.folder, catalog_mb=(5 * size >> 20) + 1) as at:  # two or three of six
        alone = {}
        for name in names:
            response = ask(at, name)
            alone[name] = text_of(response)
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len({*alone.values(), text_of(ask(at, MODEL))}) == 7
        order = random.Random(0).choices(names, k=40)
        with ThreadPoolExecutor(8) as pool:
            answers = [(name, pool.submit(ask, at, name)) for name in order]
            assert all(text_of(answer.result()) == alone[name] for name, answer in answers)
        assert count(at, "evicted") > 6 and count(at, "hit") > 0 and count(at, "refused") == 0
        policies = at.served.thread.engine.policies.numbers
        assert len(policies) == 1 + count(at, "load") - count(at, "evicted") <= 4
        listed = httpx2.get(f"{at.url}/v1/models").json()["data"]
        assert [row["id"] for row in listed] == [MODEL, *names]


def test_a_publish_is_served_from_the_next_request_on_and_damage_is_said(made: Made) -> None:
    for name in ("one", "other"):
        made.catalog.publish("", name, made.sources[0])
    with server(catalog=made.folder) as at, ThreadPoolExecutor(1) as pool:
        assert at.served.policies is not None
        before = ask(at, "one")
        running = pool.submit(ask, at, "one", max_tokens=400, ignore_eos=True)
        until(lambda: at.served.service.num_sequences == 1)
        made.catalog.publish("", "one", made.sources[1])
        at.served.policies.refresh()
        after = ask(at, "one")
        assert text_of(after) != text_of(before) == text_of(ask(at, "one@1")) == text_of(ask(at, "other"))
        fingerprints = [response.json()["system_fingerprint"] for response in (before, after)]
        assert fingerprints == ["one@1", "one@2"]
        assert running.result().json()["system_fingerprint"] == "one@1"
        scored = ask(at, "one", echo=True, logprobs=1, max_tokens=0)
        assert scored.status_code == 200, scored.text
        third = made.catalog.publish("", "one", made.sources[2])
        made.catalog.path(third).write_bytes(b"damaged")
        at.served.policies.refresh()
        refused = ask(at, "one")
        assert refused.status_code == 500 and refused.json()["error"]["code"] == "policy_damaged"
        assert "files" not in refused.text
        made.catalog.roll_back("", "one")
        at.served.policies.refresh()
        assert text_of(ask(at, "one")) == text_of(after)
        made.catalog.delete("", "one")
        at.served.policies.refresh()
        assert ask(at, "one").status_code == 404

        # a policy with the name of the base: nobody is answered by the other one
        made.catalog.publish("", MODEL, made.sources[0])
        at.served.policies.refresh()
        refused = ask(at, MODEL)
        assert refused.status_code == 409 and f"{MODEL}@1" in refused.text
        assert ask(at, f"{MODEL}@1").status_code == 200


def test_a_key_reads_nothing_of_another_key_and_takes_nothing_from_it(made: Made) -> None:
    quota = Quota(sequences=3)
    ann, bob = (made.catalog.add_owner(owner, quota) for owner in ("ann", "bob"))
    for name in ("secret", "tone"):
        made.catalog.publish("ann", name, made.sources[0])
    for number in range(5):
        made.catalog.publish("bob", f"many{number}", made.sources[number + 1])
    size = made.sources[0].stat().st_size
    with server(catalog=made.folder, catalog_mb=(9 * size >> 20) + 1) as at, ThreadPoolExecutor(8) as pool:
        for key in ("", "wrong"):
            assert ask(at, MODEL, key).status_code == 401
        first = text_of(ask(at, "secret", ann))

        # reading and guessing: what others have and what nobody has get the same answer
        sentences = []
        for name in ("secret", "nobody", "secret@1", "nobody@1"):
            for response in (ask(at, name, bob), generate(at, name, bob)):
                assert response.status_code == 404
                sentences.append(response.text.replace(name, "NAME"))
            response = httpx2.get(f"{at.url}/v1/models/{name}", headers={"x-api-key": bob})
            sentences.append(response.text.replace(name, "NAME"))
        assert len(set(sentences)) == 1 and "tone" not in sentences[0]
        listed = httpx2.get(f"{at.url}/v1/models", headers={"x-api-key": bob}).json()["data"]
        assert [row["id"] for row in listed] == [MODEL, *(f"many{number}" for number in range(5))]
        assert "secret" not in httpx2.get(f"{at.url}/metrics").text

        # the cache of the base, which all share: equal prompts of another key are not found
        for key in (ann, bob):
            cached = ask(at, MODEL, key).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0
        assert ask(at, MODEL, bob).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        # evicting: bob asks for all of his, again and again, and ann's policy stays
        for number in (*range(5), *range(5)):
            text_of(ask(at, f"many{number}", bob))
        loads, evicted = count(at, "load"), count(at, "evicted")
        assert evicted > 0 and text_of(ask(at, "secret", ann)) == first and count(at, "load") == loads

        # slowing: bob's share of sequences is used up, ann's is not
        long = {"max_tokens": 900, "ignore_eos": True}
        running = [pool.submit(ask, at, "many4", bob, **long) for _ in range(3)]
        until(lambda: at.served.service.num_sequences == 3)
        refused = ask(at, MODEL, bob)
        assert refused.status_code == 429 and "quota of 3" in refused.text
        scored = ask(at, MODEL, bob, max_tokens=0, echo=True, logprobs=1)
        assert scored.status_code == 429, "a prompt that is scored takes a sequence of its key"
        assert ask(at, MODEL, bob, n=4).status_code == 400, "it can never be answered"
        assert text_of(ask(at, "secret", ann)) == first
        assert all(done.result().status_code == 200 for done in running)


def generate(at: At, model: str, key: str) -> httpx2.Response:
    body = {"model": model, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.post(f"{at.url}/inference/v1/generate", json=body, headers=headers, timeout=60)
