"""The page of a product's loop: where it stands and why, from its journal alone."""

from __future__ import annotations

from pathlib import Path

from ostinato.apps.product.loop import Decision, Finding, Position, Stage, Verdict, advance
from ostinato.observe.board.product import JOURNAL, STAGES, ProductBoard
from ostinato.run import Jsonl


def journal(folder: Path, findings: list[Finding]) -> None:
    at = Position()
    for number, found in enumerate(findings):
        after, what = advance(at, found)
        row = Decision(ts=1.7e9 + number, before=at, finding=found, after=after, what=what).row()
        Jsonl(folder / JOURNAL).append(row)
        at = after


def text(folder: Path) -> str:
    return ProductBoard(folder).page.decode()


def test_its_stages_are_those_of_the_loop() -> None:
    assert list(STAGES) == [stage.value for stage in Stage]


def test_a_round_with_its_decisions_reasons_and_prices(tmp_path: Path) -> None:
    found = [Finding(figures={"pairs": 212.0, "seconds": 3.0}), Finding(frozen=5.0)]
    found += [Finding(revision="0123456789abcdef", figures={"seconds": 41.0}), Finding(), Finding()]
    found += [
        Finding(verdict=Verdict.ALARM, reasons=("proxy rose by <0.2>, gold fell",), figures={"kl": 0.25})
    ]
    journal(tmp_path, found)
    page = text(tmp_path)
    assert "0123456789abcdef</b> judge in office since" in page
    assert "the model itself</b> policy in office" in page
    assert 'class="now" aria-current="step">Collect' in page
    assert "judge promoted" in page and "policy training stopped by an alarm" in page
    assert "proxy rose by &lt;0.2&gt;, gold fell" in page and "kl 0.25" in page
    assert '<td class="num">212</td>' in page and "41 s judge" in page


def test_a_loop_that_has_decided_nothing(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).touch()
    page = text(tmp_path)
    assert "No round has begun" in page and "none yet</b> judge in office" in page
