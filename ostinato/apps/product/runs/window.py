"""The window that the loop learns from: pairs that users decided, counted while they come, then written down.

store -> joined answers and events -> pairs, deduplicated -> split by time, user and prompt -> *.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.apps.product.pairs import Pair, deduplicate, extract, split
from ostinato.apps.product.rewards import Table
from ostinato.apps.product.runs.settings import CollectSettings
from ostinato.apps.product.store import Store
from ostinato.files import atomic_write
from ostinato.inputs import parse_json
from ostinato.run import Jsonl, atomic_folder, to_json

PARTS = ("train", "validation", "test")


def collect_pairs(
    store: Store, table: Table, since: float, now: float, upto: int
) -> tuple[list[Pair], dict[str, int]]:
    """Return the pairs that were decided in [since, now) by event time, from rows up to the watermark
    ``upto``, and counts of what gave no pair. The pairs of one user weigh at most ``table.cap`` together."""
    reach = since - table.horizon_s - table.lateness_s  # an earlier answer may have been decided since then
    answers = list(store.joined(since=reach, until=now, upto=upto))
    exchanges = [answer.exchange for answer in answers]
    extraction = extract(
        exchanges, (event for answer in answers for event in answer.events), now, horizon_s=table.horizon_s
    )
    pairs, dropped = deduplicate((pair for pair in extraction.pairs if since <= pair.ts < now), table.cap)
    return pairs, {**extraction.counts, **dropped}


def read_part(window: Path, part: str) -> list[dict[str, Any]]:
    """Read the rows of "train", "validation" or "test": messages, chosen, rejected, importance, source, user,
    ts."""
    return list(Jsonl(window / f"{part}.jsonl").rows())


def write_window(
    folder: Path, store: Store, table: Table, settings: CollectSettings, since: float, now: float
) -> dict[str, Any]:
    """Write the window [since, now) atomically, or read it where ``folder`` has one already. Return its
    facts: since, until, upto (the watermark), counts, table (its revision)."""
    if (folder / "window.json").is_file():
        return parse_json((folder / "window.json").read_bytes())
    upto = store.watermark()
    pairs, counts = collect_pairs(store, table, since, now, upto)
    times = [pair.ts for pair in pairs]
    pair_split = split(pairs, _find_cuts(times, settings.test_share), users=settings.by_user)
    parts = (pair_split.train, pair_split.validation, pair_split.test)
    counts |= {f"dropped_{name}": count for name, count in pair_split.dropped.items()}
    counts |= {name: len(part) for name, part in zip(PARTS, parts, strict=True)}
    facts = {"since": since, "until": now, "upto": upto, "counts": counts, "table": table.revision}
    with atomic_folder(folder) as temporary:
        for name, part in zip(PARTS, parts, strict=True):
            atomic_write(
                temporary / f"{name}.jsonl", "".join(f"{to_json(build_row(pair))}\n" for pair in part)
            )
        atomic_write(temporary / "window.json", json.dumps(facts, indent=1))
    return facts


def build_row(pair: Pair) -> dict[str, Any]:
    """Return the row of a pair as training reads it."""
    return {
        "messages": [dict(message) for message in pair.messages],
        "chosen": pair.chosen,
        "rejected": pair.rejected,
        "importance": pair.importance,
        "source": str(pair.source),
        "user": pair.user,
        "ts": pair.ts,
    }


def _find_cuts(times: Sequence[float], test_share: float) -> tuple[float, float]:
    """Find the times at which validation and test begin, so that each has ``test_share`` of the pairs."""
    if not times:
        return 0.0, 0.0
    sorted_times = sorted(times)
    last = len(sorted_times) - 1
    return sorted_times[round(last * (1 - 2 * test_share))], sorted_times[round(last * (1 - test_share))]


def read_bank(file: Path) -> list[dict[str, Any]]:
    """Read the hack bank: rows of messages, chosen (honest answer) and rejected (exploit), and a name."""
    return list(Jsonl(file).rows())


def add_exemplars(file: Path, exemplars: Iterable[Mapping[str, Any]]) -> int:
    """Add exemplars to the hack bank, unless their answers are in it already; return how many were new."""
    bank_keys = {(exemplar["chosen"], exemplar["rejected"]) for exemplar in read_bank(file)}
    exemplar_of = {(exemplar["chosen"], exemplar["rejected"]): exemplar for exemplar in exemplars}
    new = [exemplar for key, exemplar in exemplar_of.items() if key not in bank_keys]
    if new:
        Jsonl(file).append(*new)
    return len(new)
