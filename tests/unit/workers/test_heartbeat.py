import threading

import pytest

from ostinato.workers.heartbeat import Heartbeat, Idle


def test_idle_seconds_are_those_without_a_change() -> None:
    idle = Idle(0)
    assert [idle.after(1.0, value) for value in (0, 0, 1, 1, 1, 2)] == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["hangs", "raises"])
def test_a_peer_that_does_not_answer_is_noticed_once(kind: str) -> None:
    heard, silent, release = list[tuple[float, str]](), threading.Event(), threading.Event()

    def beat(passed_s: float) -> bool:
        if kind == "hangs":
            release.wait(60)
        raise OSError("refused\nand more")

    def on_silence(seconds: float, fault: str) -> None:
        heard.append((seconds, fault))
        silent.set()

    heart = Heartbeat(beat, on_silence, every_s=0.01, silence_s=0.1, name="test")
    heart.start()
    assert silent.wait(60)
    release.set()
    heart.stop(60)
    ((seconds, fault),) = heard
    assert seconds >= 0.1 and fault == ("" if kind == "hangs" else "refused")


def test_a_beat_that_says_that_it_is_over_ends_both_threads() -> None:
    heart = Heartbeat(
        lambda passed_s: True, lambda *_: pytest.fail("silent"), every_s=0.01, silence_s=60, name="test"
    )
    heart.start()
    assert heart.stopped.wait(60)
    heart.stop(60)
