"""What is equal, to the last bit, in the rows of two runs of one recipe, of which one may have been killed.

Everything is, but for the columns that are named here: one table for all tests that interrupt a run, so that
a new column is compared until somebody says why it cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

OF_THE_CLOCK = (
    "time/",
    "step_time",
    "tokens_per_s",
    "seconds",
    "device_hours",
    "total/seconds",
    "total/device_seconds",
)
OF_DRAFTS = (  # what is worth a draft is a matter of measured time
    "tokens/drafted",
    "tokens/accepted",
    "draft/tokens_per_pass",
    "draft/drafted_per_pass",
    "draft/acceptance",
    "draft/share_",
    "draft/cpu_share",
    "draft/seconds_saved",
)
OF_A_KILL = (  # a resumed run reads groups back, and its prefix tree is cold, which an empty step leaves warm
    "rollout/from_spool",
    "tokens/prefilled",
    "tokens/cached",
    "rollout/preempted",
    "reward_workers/",
)
OF_BOTH = (  # what was computed, refused drafts too: the accounts of the ledger, not the compute of a curve
    "flops/rollout",
    "total/flops",
)
LOOSE = OF_THE_CLOCK + OF_DRAFTS + OF_A_KILL + OF_BOTH


def same(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or eval.jsonl without the columns that may differ."""
    return [_same(row) for row in rows]


def _same(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _same(value) if isinstance(value, Mapping) else value
        for name, value in row.items()
        if not name.startswith(LOOSE)
    }
