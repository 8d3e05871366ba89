"""The board: logs are read once and known again, curves are bounded, and the server serves what is there."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, run_data
from pipeline_rows import pipeline_metrics, step_row, step_spans, worker_rows

from ostinato.config import Recipe, dump_toml
from ostinato.lock import LOCK
from ostinato.observe.board import open_server
from ostinato.observe.board.curves import Curves, charts
from ostinato.observe.board.follow import AGAIN_S, Follower, workers
from ostinato.observe.board.samples import Samples
from ostinato.observe.board.server import Board
from ostinato.observe.board.tail import Frames, Tail
from ostinato.run import Jsonl, JsonlZst, RunFolder, group_rows
from ostinato.types import Group, Prompt, Reward, Stop, Trajectory

PROBE = "</script><img src=x onerror=alert(1)>"


# ---- tails


def values(rows: list[dict[str, Any]]) -> list[int]:
    return [row["n"] for row in rows]


def test_a_replaced_log_is_read_anew(tmp_path: Path) -> None:
    """A resumed run drops the rows of later steps: another file takes the place of the log."""
    log = Jsonl(tmp_path / "log.jsonl")
    log.append(*({"n": n} for n in range(5)))
    tail = Tail(log.path)
    tail.read()
    log.keep(lambda row: row["n"] < 3)
    log.append({"n": 30})
    anew, rows = tail.read()
    assert anew and values(rows) == [0, 1, 2, 30]


def test_a_log_that_was_cut_in_place_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    tail = Tail(path)
    tail.read()
    with path.open("rb+") as file:
        file.truncate(9)
        file.seek(9)
        file.write(b'{"n": 3}\n{"n": 4}\n')
    anew, rows = tail.read()
    assert anew and values(rows) == [1, 3, 4]


def test_a_line_that_a_far_disk_has_not_got_yet_is_waited_for(tmp_path: Path) -> None:
    """A network disk may show the length of a file before its bytes: zeros, which then become the row."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b"\0" * 8 + b'\n{"n": 3}\n')
    tail = Tail(path)
    assert values(tail.read()[1]) == [1]
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert values(tail.read()[1]) == [2, 3]
    assert not tail.damaged


def test_a_damaged_line_ends_the_reading_and_is_said(tmp_path: Path) -> None:
    """As in the report, and when the run is resumed."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\nnot json\n{"n": 3}\n')
    tail = Tail(path)
    assert values(tail.read()[1]) == [1] and values(tail.read()[1]) == [] and tail.damaged


def test_a_tail_may_begin_near_the_end(tmp_path: Path) -> None:
    log = Jsonl(tmp_path / "log.jsonl")
    log.append(*({"n": n} for n in range(1000)))
    tail = Tail(log.path, last=100)
    rows = values(tail.read()[1])
    assert rows == list(range(1000 - len(rows), 1000)) and 5 < len(rows) < 15
    log.append({"n": 1000})
    assert values(tail.read()[1]) == [1000]


@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=20))
def test_however_a_log_grows_its_rows_come_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int]
) -> None:
    """Written in pieces of any size; a 0 reads twice in between."""
    path = tmp_path_factory.mktemp("tail") / "log.jsonl"
    content = b"".join(b'{"n": %d}\n' % n for n in range(25))
    tail, written, found = Tail(path), 0, list[int]()
    for piece in [*pieces, len(content)]:
        with path.open("ab") as file:
            file.write(content[written : written + piece])
        written += piece
        for _ in range(2 if not piece else 1):
            found += values(tail.read()[1])
    assert found == list(range(25))


# ---- frames


def trajectory(text: str, reward: float | None, stop: Stop = Stop.EOS) -> Trajectory:
    return episode(
        completion(4, stop=stop, text=text), reward=None if reward is None else Reward(value=reward)
    )


def log_step(log: JsonlZst, step: int, *trajectories: Trajectory, uid: str = "p") -> None:
    prompt = Prompt(uid=uid, text=f"question {step}", columns={"answer": "46"})
    log.append(*group_rows(Group(prompt=prompt, trajectories=trajectories, step=step)))


@pytest.fixture
def answers(tmp_path: Path) -> JsonlZst:
    """Steps 1 to 8, each with an answer that is right, one that is wrong and one that was cut."""
    log = JsonlZst(tmp_path / "trajectories.jsonl.zst")
    for step in range(1, 9):
        cut = trajectory("and then", 0.0, Stop.LENGTH)
        log_step(log, step, trajectory(f"It is {step}.", 1.0), trajectory("No idea", 0.25), cut)
    return log


def test_frames_are_found_without_inflating_them(answers: JsonlZst) -> None:
    """The same frames, at the same places, as the log's own reader finds by inflating everything."""
    frames = Frames(answers.path)
    frames.refresh()
    ends = [end for end, _ in answers._frames()]
    assert [frame.offset + frame.size for frame in frames.frames] == ends
    assert [frame.step for frame in frames.frames] == list(range(1, 9))
    assert [row for frame in frames.frames for row in frames.rows(frame)] == list(answers.rows())


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 40),
    st.booleans(),
)
def test_frames_of_any_size_and_a_torn_end(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, bool]], torn: int, checksum: bool
) -> None:
    """One block and several, incompressible and repeating ones, with and without a checksum."""
    import zstandard

    dice, writer = np.random.default_rng(0), zstandard.ZstdCompressor(write_checksum=checksum)
    bodies = [dice.bytes(size) if random else b"a" * size for size, random in parts]
    written = [writer.compress(b'{"step":%d,' % n + body) for n, body in enumerate(bodies)]
    last = writer.compress(b'{"step":99,"x":1}')
    path = tmp_path_factory.mktemp("frames") / "log.zst"
    path.write_bytes(b"".join(written) + last[:torn])
    frames = Frames(path)
    frames.refresh()
    wanted = [*map(len, written), *([len(last)] if torn >= len(last) else [])]
    assert [frame.size for frame in frames.frames] == wanted


@pytest.mark.slow  # half a gigabyte
def test_a_frame_that_grows_without_bound_is_not_expanded(tmp_path: Path) -> None:
    """The first bytes of a frame were expanded in full to read its step: 128 kB of input are up to 4 GB."""
    import zstandard

    writer = zstandard.ZstdCompressor(level=1).compressobj()
    row = [b'{"step":1,"x":"', *([b"a" * (1 << 23)] * 64), b'"}\n']
    (tmp_path / "log.zst").write_bytes(b"".join(map(writer.compress, row)) + writer.flush())
    frames = Frames(tmp_path / "log.zst")
    frames.refresh()
    assert [frame.step for frame in frames.frames] == [1] and frames.rows(frames.frames[0]) == []


def test_new_frames_are_seen_and_a_replaced_log_is_read_anew(answers: JsonlZst) -> None:
    frames = Frames(answers.path)
    frames.refresh()
    log_step(answers, 9, trajectory("nine", 1.0))
    frames.refresh()
    assert frames.frames[-1].step == 9
    answers.keep(lambda row: row["step"] < 3)
    frames.refresh()
    assert [frame.step for frame in frames.frames] == [1, 2]
    answers.path.unlink()
    frames.refresh()
    assert frames.frames == []


# ---- samples


def texts(samples: Samples, step: int) -> list[str]:
    return [one["turns"][0]["text"] for one in samples.group(step, 0)["answers"]]


def test_groups_come_by_step_the_last_one_first(answers: JsonlZst) -> None:
    samples = Samples(answers.path, None)
    found = samples.index()
    assert found["steps"] == list(range(1, 9)) and [one["step"] for one in found["groups"]] == [8]
    assert found["groups"][0]["preview"] == "question 8" and found["groups"][0]["rewards"] == (1.0, 0.25, 0.0)
    assert samples.index(3)["groups"][0]["step"] == 3 and samples.index(99) == found
    assert texts(samples, 3) == ["It is 3.", "No idea", "and then"]
    assert samples.group(3, 0)["columns"] == {"answer": "46"}
    with pytest.raises(ValueError, match="step 3 has no group 1"):
        samples.group(3, 1)


def test_a_step_that_is_done_again_is_read_anew(answers: JsonlZst) -> None:
    samples = Samples(answers.path, None)
    samples.index(8)
    answers.keep(lambda row: row["step"] < 8)
    log_step(answers, 8, trajectory("anew", None))
    assert samples.index(8)["groups"][0]["rewards"] == (None,)
    assert texts(samples, 8) == ["anew"]


# ---- curves


@given(st.integers(0, 400), st.sampled_from([4, 8, 32]))
def test_curves_are_the_means_of_bounded_places(count: int, places: int) -> None:
    """The slow twin: cut the whole column into stretches of 2^n steps and take the mean of each."""
    curves = Curves(places)
    column = [None if n % 7 == 3 else float(n * n % 101) for n in range(count)]
    for n, value in enumerate(column):
        curves.add({"step": n + 1, **({} if value is None else {"x": value})})
    each = curves.each
    rows = curves.rows()
    assert len(rows) <= places
    assert [row["step"] for row in rows] == [min(n + each, count) for n in range(0, count, each)]
    wanted = [[v for v in column[n : n + each] if v is not None] for n in range(0, count, each)]
    for row, known in zip(rows, wanted, strict=True):
        assert row.get("x") == (pytest.approx(sum(known) / len(known)) if known else None)


def test_panels_without_a_value_are_not_drawn() -> None:
    curves = Curves()
    assert charts(curves, run_data(), ["loss"]) == []
    for step in (1, 2):
        curves.add({"step": step, "reward": 0.5, "reward_std": 0.1, "loss": None, "mine": 3.0})
    drawn = charts(curves, run_data(), ["mine", "unknown"])
    assert [chart["title"] for chart in drawn] == ["Reward", "mine"]
    assert drawn[0]["series"][0]["low"] == [0.4, 0.4] and drawn[1]["key"] == "metric mine"


# ---- following


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    tree = {"name": "quickstart", "trainer": {"steps": 40}}
    return RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse(tree)))


def began(run: RunFolder, session: int = 1) -> None:
    start = {"event": "start", "session": session, "at": time.time(), "process_started": time.time() - 4}
    run.ledger.append({**start, "step": 0, "pools": {}, "price_per_device_hour": 0, "currency": "USD"})


def a_step(run: RunFolder, step: int) -> None:
    run.write(step, {"reward": step / 40, "loss": -0.1, "tokens_per_s": 900.0, **pipeline_metrics(step)})
    run.ledger.append(step_row(step))
    run.timeline.append(*(span.to_json() for span in step_spans(step)))


def hold(run: RunFolder, *, alive: bool = True) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    holder = {"pid": os.getpid() if alive else ended.pid, "host": socket.gethostname(), "since": "noon"}
    (run.path / LOCK).write_text(json.dumps(holder))


def later(follower: Follower, hands: Hands, seconds: float = 1.0) -> dict[str, str]:
    hands.now += seconds
    follower.look()
    return follower.status()


def test_a_run_before_its_first_step(run: RunFolder) -> None:
    hands = Hands()
    follower = Follower(run, hands)
    assert later(follower, hands) == {"tone": "open", "text": "has not begun yet"}
    assert follower.charts([]) == [] and follower.timeline(60) is None
    assert follower.state()["progress"] == {"step": 0, "of": 40, "share": 0.0, "left": None}
    began(run)
    hold(run)
    assert later(follower, hands) == {"tone": "live", "text": "running, the first step"}


def test_a_run_goes_on_dies_and_is_taken_up_again(run: RunFolder) -> None:
    hands = Hands()
    began(run)
    a_step(run, 1)
    hold(run)
    follower = Follower(run, hands)
    assert later(follower, hands)["tone"] == "live"
    hold(run, alive=False)
    dead = later(follower, hands)
    assert dead["tone"] == "bad" and "it was killed" in dead["text"]
    assert f"ostinato resume {run.path}" in dead["text"]
    (run.path / LOCK).write_text(json.dumps({"pid": 1, "host": "another", "since": "noon"}))
    assert later(follower, hands)["tone"] == "open"
    began(run, session=2)
    hold(run)
    assert later(follower, hands)["tone"] == "live"
    run.ledger.append({"event": "end", "session": 2, "at": 9000.0, "step": 1, "why": "done"})
    assert later(follower, hands) == {"tone": "good", "text": "finished, after step 1"}


@pytest.mark.parametrize(
    ("why", "tone", "words"),
    [
        ("failed: NoTrainableSamples", "bad", "failed: NoTrainableSamples"),
        ("terminated", "good", "stopped by SIGTERM"),
        ("collapsed", "bad", "the policy collapsed"),
        ("solved", "good", "every prompt is solved"),
    ],
)
def test_how_a_run_ended(run: RunFolder, why: str, tone: str, words: str) -> None:
    began(run)
    run.ledger.append({"event": "end", "session": 1, "at": 1.0, "step": 3, "why": why})
    hands = Hands()
    status = later(Follower(run, hands), hands)
    assert status["tone"] == tone and words in status["text"]


def test_a_resumed_run_loses_the_rows_that_it_does_again(run: RunFolder) -> None:
    hands = Hands()
    began(run)
    for step in range(1, 6):
        a_step(run, step)
    follower = Follower(run, hands)
    later(follower, hands)
    assert follower.state()["progress"]["step"] == 5
    run.truncate_after(3)
    a_step(run, 4)
    before = follower.revisions["charts"]
    later(follower, hands)
    (reward,) = [chart for chart in follower.charts([]) if chart["title"] == "Reward"]
    assert reward["steps"] == [1, 2, 3, 4] and follower.revisions["charts"] > before


def test_only_the_last_minutes_of_the_timeline_are_drawn(run: RunFolder) -> None:
    hands = Hands()
    began(run)
    hold(run)
    for step in range(1, 41):
        a_step(run, step)
    follower = Follower(run, hands)
    later(follower, hands)
    shown = follower.timeline(12.0)
    assert shown is not None and shown["seconds"] == 12.0 and shown["end"] == "latest"
    assert [lane["worker"] for lane in shown["lanes"]][-1] == "grader-0"
    assert all(0 <= share <= 1 for share in shown["idle"].values())


def test_nothing_is_read_again_within_half_a_second(run: RunFolder) -> None:
    hands = Hands()
    follower = Follower(run, hands)
    later(follower, hands)
    a_step(run, 1)
    later(follower, hands, AGAIN_S / 2)
    assert follower.state()["progress"]["step"] == 0
    later(follower, hands, AGAIN_S)
    assert follower.state()["progress"]["step"] == 1


def test_workers_in_words(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    assert workers(path) == []
    path.write_text(json.dumps(worker_rows(time.time())))
    found = workers(path)
    assert [(one["worker"], one["tone"]) for one in found] == [
        ("sampler-0", "good"),
        ("sampler-1", "open"),
        ("trainer", "good"),
    ]
    assert found[0]["sampled"] == "48,210" and found[2]["sampled"] == ""
    assert workers(path, live=False)[0]["state"] == "was alive"
    for broken in ("[", "{}", '[1, {"state": 3}]'):
        path.write_text(broken)
        assert workers(path) == []


def test_progress_under_a_budget_is_its_share(tmp_path: Path) -> None:
    tree = {"name": "quickstart", "trainer": {"steps": 10**6, "budget": "8 steps", "until": 0.5}}
    run, hands = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse(tree))), Hands()
    follower = Follower(run, hands)
    began(run)
    a_step(run, 1)
    later(follower, hands)
    progress = follower.state()["progress"]
    assert progress.pop("left") is not None and progress == {"step": 1, "of": None, "share": 0.25}


def test_the_page_shows_scores_alarms_and_the_forecast(run: RunFolder) -> None:
    hands = Hands()
    score = {"step": 0, "set": "eval", "split": "eval", "n": 64, "pass@1": 0.25, "stderr": 0.05}
    run.eval.append(score, {**score, "step": 20, "pass@1": 0.75}, {**score, "step": 20, "set": "other"})
    run.eval.append(score | {"step": 20, "set": "greedy", "pass@1": 0.61})
    run.watch.append({"step": 9, "since": 5, "collapse": True, "sentence": "k3 is 120 times"})
    run.forecast.append({"step": 20, "sentence": "A 0.9"})
    failed = {
        "part": "train",
        "function": "graded",
        "of": 64,
        "uid": "p1",
        "completion": "4",
        "stopped": False,
    }
    failed |= {"trace": "Traceback ...", "detail": "raised: KeyError: 'gold' (rewards.py:3)"}
    run.failed.append({"step": 3, "count": 16, **failed}, {"step": 4, "count": 4, **failed})
    follower = Follower(run, hands)
    later(follower, hands)
    state = follower.state()
    assert state["alarms"] == [{"tone": "bad", "text": "step 9: k3 is 120 times, since step 5"}]
    assert state["forecast"] == "A 0.9"
    assert [tile["value"] for tile in state["tiles"] if "pass@1" in tile["name"]] == ["0.750", "0.610"]
    (one,) = state["failed"]
    assert one["sentence"].startswith("Reward graded gave no verdict to 20 answers, the last time at step 4")
    assert (one["trace"], one["answer"]) == ("Traceback ...", "step 4, prompt p1, completion '4'")
    assert [chart["steps"] for chart in follower.charts([]) if chart["key"] == "held-out"] == [[0, 20]]


# ---- over HTTP


@contextmanager
def served(run: RunFolder, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    server = open_server(Board(run), host)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.address.removeprefix("http://").rpartition(":")[0], server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(where: tuple[str, int], path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*where, timeout=10)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    reported = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return reported


def test_the_page_and_its_policy(run: RunFolder) -> None:
    with served(run) as where:
        status, headers, page = get(where, "/")
    assert status == 200 and b"</html>" in page
    policy = page.decode().split('Content-Security-Policy" content="')[1].split('">')[0]
    assert headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "'unsafe-eval'" not in policy
    assert policy.count("'sha256-") == 5
    assert b"http" not in page.replace(b"https://github.com/leeoniya/uPlot", b"").replace(
        b"http-equiv", b""
    )  # no request


def test_nothing_outside_the_run_can_be_asked_for(run: RunFolder) -> None:
    (run.path.parent / "secret").write_text("secret")
    with served(run) as where:
        for path in ("/../secret", "/recipe.toml", "/%2e%2e/secret", "//etc/passwd", "/state/../../secret"):
            assert get(where, path)[0] == 404
        assert get(where, "/groups?step=nan")[0] == 400
        assert get(where, "/group?step=1&place=0")[0] == 400
        assert get(where, "/charts?revision=x")[0] == 400
        assert get(where, "/groups?step=inf")[0] == 400  # once an OverflowError, and no answer at all
        assert get(where, "/groups?step=1e400")[0] == 400
        assert get(where, "/groups")[0] == 200  # of a run that has none yet: once a 400


@pytest.mark.parametrize(
    ("name", "status"),
    [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:7", 200), ("evil.example:7321", 403), ("", 403)],
)
def test_another_site_cannot_point_its_name_at_the_board(run: RunFolder, name: str, status: int) -> None:
    with served(run) as where:
        assert get(where, "/state", Host=name)[0] == status


def test_what_has_not_changed_is_not_sent_again(run: RunFolder) -> None:
    began(run)
    a_step(run, 1)
    with served(run) as where:
        reported = json.loads(get(where, "/charts?metric=loss")[2])
        assert reported["charts"]
        again = json.loads(get(where, f"/charts?metric=loss&revision={reported['revision']}")[2])
        assert "charts" not in again
        shown = json.loads(get(where, "/timeline?seconds=60")[2])
        assert shown["picture"]["lanes"]
        assert "picture" not in json.loads(get(where, f"/timeline?revision={shown['revision']}")[2])


def test_what_a_model_said_is_data(run: RunFolder) -> None:
    log_step(run.trajectories, 1, trajectory(PROBE, 1.0), uid=PROBE)
    with served(run) as where:
        get(where, "/groups")
        _, headers, body = get(where, "/group?step=1&place=0")
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["answers"][0]["turns"][0]["text"] == PROBE


def test_many_ask_at_once(run: RunFolder) -> None:
    began(run)
    shared, reported = Board(run), list[int]()

    def ask() -> None:
        for _ in range(5):
            reported.append(shared.routes["/state"]({})["progress"]["step"])
            shared.routes["/charts"]({"metric": ["loss"]})

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for step in range(1, 20):
        a_step(run, step)
    for thread in threads:
        thread.join()
    assert len(reported) == 40


def test_the_board_writes_nothing(run: RunFolder) -> None:
    began(run)
    a_step(run, 1)
    log_step(run.trajectories, 1, trajectory("x", 1.0))
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    os.utime(run.path, ns=(1, 1))
    with served(run) as where:
        for path in ("/", "/state", "/charts", "/timeline", "/groups", "/group?step=1&place=0"):
            assert get(where, path)[0] == 200
    assert run.path.stat().st_mtime_ns == 1
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_a_port_that_is_taken_is_told_in_words(run: RunFolder) -> None:
    with (
        served(run) as (_, port),
        pytest.raises(ValueError, match=f"cannot listen on port {port} of 127.0.0.1 .*give --port"),
    ):
        open_server(Board(run), "127.0.0.1", port)
