"""The worker's side of a pool: an engine behind ``protocols.Sampler``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loops import jumping, now
from small_pool import SlowEngine, expected, group, publication, read, token_at

from ostinato.engine.serve import SamplerServer
from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Sampler
from ostinato.types import Completion, HistoryEntry, PollResult, Publication, Stop


def server(engine: Any, **options: Any) -> SamplerServer:
    return SamplerServer(engine, "sampler-0", read, **options)


async def all_of(sampler: Sampler, count: int) -> tuple[dict[int, Completion], list[PollResult]]:
    """The answers to ``count`` calls, and what came with them."""
    found: dict[int, Completion] = {}
    reported = []
    while len(found) < count:
        reported.append(await sampler.collect(2.0))
        assert not found.keys() & dict(reported[-1].done).keys(), "answered twice"
        found |= dict(reported[-1].done)
    return found, reported


@jumping
async def test_calls_are_answered_under_their_ids_with_proof_of_what_is_served() -> None:
    ours = server(SlowEngine())
    assert await ours.publish(publication(7, 3)) == publication(7, 3).fingerprint
    await ours.start([(40 + n, request) for n, request in enumerate(group(0, 3))])
    await ours.start([(50, group(1, 1)[0])])
    found, reported = await all_of(ours, 4)
    for id, request in zip((40, 41, 42, 50), [*group(0, 3), *group(1, 1)], strict=True):
        assert found[id].tokens.tolist() == expected(request, 7)
    assert {(one.version, one.fingerprint) for one in reported} == {(3, publication(7, 3).fingerprint)}
    assert reported[-1].sampled == sum(len(one.tokens) for one in found.values())
    assert reported[-1].counters["decoded"] == reported[-1].sampled
    assert [span.kind for one in reported for span in one.spans] == [Kind.PUBLISH]


@jumping
async def test_collect_waits_as_long_as_it_may_and_no_longer_than_it_must() -> None:
    ours = server(SlowEngine())
    assert (await ours.collect(5.0)).done == () and now() == pytest.approx(5.0)
    request = group(0, 1)[0]
    await ours.start([(1, request)])
    reported = await ours.collect(1e6)
    assert [id for id, _ in reported.done] == [1] and now() == pytest.approx(5.0 + len(expected(request)))


@jumping
async def test_calls_that_run_go_on_under_what_is_published_and_tell_how_far_they_are() -> None:
    ours, request = server(SlowEngine()), group(0, 1)[0]
    await ours.start([(1, request)])
    await asyncio.sleep(2.5)
    assert (await ours.collect(0.1)).progress == ((1, 2),)
    await ours.publish(publication(9, 1))
    found, _ = await all_of(ours, 1)
    weights = [0, 0, *[9] * (len(found[1].tokens) - 2)]
    at = [token_at(request.seed, len(request.tokens) + n, weight) for n, weight in enumerate(weights)]
    assert found[1].tokens.tolist() == at and set(found[1].versions.tolist()) == {0, 1}


@jumping
async def test_what_is_dropped_comes_back_with_what_it_has() -> None:
    ours, requests = server(SlowEngine()), group(0, 2)
    await ours.start([*enumerate(requests)])
    await asyncio.sleep(3.5)
    await ours.start([], drop=[1, 77])
    found, _ = await all_of(ours, 2)
    assert found[1].stop is Stop.ABORT and found[1].tokens.tolist() == expected(requests[1])[:3]
    assert found[0].tokens.tolist() == expected(requests[0])
    await ours.start([(5, requests[0])], drop=[5])  # before it has begun
    found, _ = await all_of(ours, 1)
    assert found[5].stop is Stop.ABORT


@jumping
async def test_a_request_that_is_refused_fails_alone() -> None:
    ours = server(SlowEngine(refuse={"p1"}))
    await ours.start([*enumerate([*group(0, 2), *group(1, 1)])])
    found, _ = await all_of(ours, 3)
    assert found[2].stop is Stop.ERROR and "is refused" in found[2].error
    assert [found[n].tokens.tolist() for n in range(2)] == [expected(request) for request in group(0, 2)]


@jumping
async def test_what_an_engine_raises_is_raised_when_all_answers_are_out() -> None:
    ours = server(SlowEngine(poison={"p1"}))
    short = group(0, 1, longest=2)[0]
    await ours.start([(0, short)])
    await ours.start([(1, group(1, 1)[0])])
    await asyncio.sleep(10)
    assert [id for id, _ in (await ours.collect(1.0)).done] == [0]
    with pytest.raises(RuntimeError, match="out of memory at p1"):
        await ours.collect(1.0)


@jumping
async def test_a_policy_that_cannot_be_read_leaves_the_old_one() -> None:
    ours = server(SlowEngine())
    await ours.publish(publication(7, 1))
    with pytest.raises(ValueError):
        await ours.publish(Publication(version=2, fingerprint="x", payload=b"torn"))
    with pytest.raises(RuntimeError, match="cannot load all weights"):
        await ours.publish(Publication(version=2, fingerprint="x", path="/somewhere"))
    reported = await ours.collect(0.1)
    assert (reported.version, reported.fingerprint) == (1, publication(7, 1).fingerprint)


@jumping
async def test_answers_of_earlier_steps_and_whole_policies_reach_the_engine(tmp_path: Path) -> None:
    class Whole(SlowEngine):
        def publish_weights(self, path: Path, version: int) -> None:
            self.publish(int(path.read_text()), version)

    remembered: list[tuple[str, int, Sequence[HistoryEntry]]] = []
    (tmp_path / "weights").write_text("21")

    ours = server(Whole(), remember=lambda *answers: remembered.append(answers))
    sent = Publication(
        version=4, fingerprint="", path=str(tmp_path / "weights"), answers=(("p0", 3, ()), ("p1", 3, ()))
    )
    assert await ours.publish(sent) == publication(21, 4).fingerprint
    [span] = (await ours.collect(0.1)).spans
    assert (span.kind, span.amount) == (Kind.PUBLISH, 2)
    assert remembered == [("p0", 3, ()), ("p1", 3, ())]


@jumping
async def test_spans_of_the_engine_and_of_publications_are_told_in_order() -> None:
    class Telling(SlowEngine):
        def take_spans(self) -> list[Span]:
            later = time.time() + 10
            return [
                Span(worker="sampler-0", kind=Kind.DECODE, start=1.0, stop=2.0),
                Span(worker="sampler-0", kind=Kind.DECODE, start=later, stop=later + 1),
            ]

    ours = server(Telling())
    await ours.publish(publication(7, 1))
    kinds = [span.kind for span in (await ours.collect(0.1)).spans]
    assert kinds == [Kind.DECODE, Kind.PUBLISH, Kind.DECODE]


@jumping
async def test_a_server_that_is_closed_has_nothing_running() -> None:
    engine = SlowEngine()
    ours = server(engine)
    await ours.start([*enumerate(group(0, 3))])
    await asyncio.sleep(1.5)
    assert len(engine.running) == 3
    await ours.close()
    await asyncio.sleep(0)
    assert not engine.running
