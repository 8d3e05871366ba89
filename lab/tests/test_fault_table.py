"""Each row of the fault table once: a real run over Ray, hurt at a random moment, ends well or says why.

``ostinato bench faults`` does the same twenty times over; docs/faults.md has what it found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import faults as bench
from lab.faults_child import Heartbeat

ray = pytest.importorskip("ray", reason="needs Ray")
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def heartbeat() -> Heartbeat:
    return Heartbeat()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, heartbeat: Heartbeat) -> dict[str, Any]:
    return bench.undisturbed(tmp_path_factory.mktemp("undisturbed"), heartbeat)


@pytest.mark.parametrize("fault", bench.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_survived_or_named_and_nothing_is_lost(
    fault: bench.Fault, tmp_path: Path, heartbeat: Heartbeat, reference: dict[str, Any]
) -> None:
    row = bench.hurt(fault, 0, tmp_path, heartbeat, reference)
    assert row["outcome"] in ("recovered", "stopped"), row
    assert row["lost"] == 0 and not row["left_behind"], row
    assert row["equal"] is not False, row["differs"]
    assert bool(row["dropped"]) == fault.takes_groups
