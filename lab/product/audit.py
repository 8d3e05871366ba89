"""Is a product whose processes were killed whole? Clients' logs, store and folder of the loop compared.

``audit`` gives counts, and under ``broken`` what must not be, in sentences: nothing where all is well.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.launch.product.loop import digest
from ostinato.launch.product.window import PARTS, decided
from ostinato.product.events import Event, parse_event
from ostinato.product.loop import position_of
from ostinato.product.rewards import Table
from ostinato.product.store import Store, open_store
from ostinato.run import Jsonl

Row = Mapping[str, Any]
BEFORE = {
    "judge promoted": ("judge", "judge_gates", "shadow"),
    "policy promoted": ("policy", "policy_gates", "canary"),
}


def audit(product: Path, store: str, logs: Sequence[Path], table: Table) -> dict[str, Any]:
    entries = [row for log in logs for row in Jsonl(log).rows()]
    with open_store(store) as opened:
        stored, counts = [*opened.events()], opened.counts()
        answers = {one.exchange.response_id for one in opened.joined(training=False)}
    decisions = [*Jsonl(product / "decisions.jsonl").rows()]
    broken: list[str] = []
    found = events(entries, stored, broken)
    shown = {row["answer"] for row in entries if "answer" in row}
    found |= {"answers_shown": len(shown), "answers_recorded": len(shown & answers), "rows": counts}
    found |= journal(decisions, broken) | revisions(product, decisions, broken) | windows(product, broken)
    late = sum(row.get("late", 0.0) > table.lateness_s for row in entries)
    with open_store(store) as opened:
        missed = _missed(product, opened, table)
    if missed > late:
        broken.append(f"{missed} pairs are in no window, and only {late} events came later than allowed")
    return {**found, "events_late": late, "pairs_in_no_window": missed, "broken": broken}


def events(entries: Iterable[Row], stored: Sequence[Event], broken: list[str]) -> dict[str, Any]:
    """Every acknowledged event is stored once as it was sent, and none that was never sent."""
    sent: dict[str, Row] = {}
    outcomes: dict[str, list[str]] = {}
    for row in entries:
        if "event" in row:
            sent[row["event"]["event_id"]] = row["event"]
        elif "id" in row:
            outcomes.setdefault(row["id"], []).append(row["outcome"])
    times = Counter(event.event_id for event in stored)
    lost = [id_ for id_ in outcomes if id_ not in times]
    twice = [id_ for id_, many in times.items() if many > 1]
    taken_twice = [id_ for id_, heard in outcomes.items() if heard.count("accepted") > 1]
    strange = [id_ for id_ in times if id_ not in sent]
    changed = [
        one.event_id for one in stored if one.event_id in sent and parse_event(sent[one.event_id]) != one
    ]
    other = [one for heard in outcomes.values() for one in heard if one not in ("accepted", "repeated")]
    for what, ids in (
        ("acknowledged and not stored", lost),
        ("stored twice", twice),
        ("accepted twice", taken_twice),
        ("stored and never sent", strange),
        ("stored with another content", changed),
        ("refused", other),
    ):
        if ids:
            broken.append(f"{len(ids)} events were {what}, e.g. {ids[0]}")
    heard = Counter(one for many in outcomes.values() for one in many)
    return {
        **{"events_sent": len(sent), "events_acknowledged": len(outcomes), "events_stored": len(stored)},
        **{"stored_unacknowledged": len({*times} - {*outcomes}), "outcomes": dict(heard)},
    }


def journal(decisions: Sequence[Row], broken: list[str]) -> dict[str, Any]:
    """Rows follow from one another, none twice, and promotions are behind their gates."""
    try:
        position_of(decisions)
    except ValueError as error:
        broken.append(str(error))
    done: dict[tuple[int, str], Row] = {}
    for row in decisions:
        before, stage = row["before"], row["before"]["stage"]
        number = before["round"] + (stage == "collect")  # collect begins the next round
        if (number, stage) in done:
            broken.append(f"stage {stage} of round {number} is in the journal twice")
        done[number, stage] = row
        needed = BEFORE.get(row["what"], ())
        for gate in needed:
            passed = done.get((number, gate))
            if passed is None or passed["finding"]["verdict"] != "passed":
                broken.append(f"{row['what']} in round {number} without {gate}")
        changed = [name for name in ("judge", "policy") if row["after"][name] != before[name]]
        if changed != [one.split()[0] for one in BEFORE if one == row["what"]]:
            broken.append(f"{row['what']} in round {number} changed {changed}")
        if needed and done[number, needed[0]]["finding"]["revision"] != row["after"][changed[0]]:
            broken.append(f"{row['what']} in round {number} is not the candidate that was trained")
    last = decisions[-1]["after"] if decisions else {"round": 0}
    return {"rounds": last["round"], "decisions": dict(Counter(row["what"] for row in decisions))}


def revisions(product: Path, decisions: Sequence[Row], broken: list[str]) -> dict[str, Any]:
    """Every revision has the bytes of its name, and serving.json names what the journal has in office."""
    kept = [one for one in (product / "revisions").glob("*") if not one.name.startswith(".")]
    wrong = [one.name for one in kept if digest(one) != one.name]
    if wrong:
        broken.append(f"{len(wrong)} revisions have other bytes, e.g. {wrong[0]}")
    names = {one.name for one in kept}
    made = {row["finding"]["revision"] for row in decisions if row["finding"]["revision"]}
    if missing := made - names:
        broken.append(f"{len(missing)} revisions of the journal are gone, e.g. {min(missing)}")
    serving = json.loads((product / "serving.json").read_text())
    office = decisions[-1]["after"]["policy"] if decisions else ""
    adapter = serving["policy"]["adapter"]
    if serving["policy"]["revision"] != office or (office and digest(Path(adapter)) != office):
        broken.append(f"serving.json names {serving['policy']}, in office is {office}")
    back = [row for row in decisions if row["what"] == "policy rolled back"]
    for row in back:
        office = row["before"]["policy"]
        if row["after"]["policy"] != office or (office and office not in names - {*wrong}):
            broken.append(f"the roll-back of round {row['before']['round']} does not restore {office}")
    return {
        "revisions": len(kept),
        "rolled_back": len(back),
        "rolled_back_to_an_adapter": sum(bool(row["after"]["policy"]) for row in back),
    }


def windows(product: Path, broken: list[str]) -> dict[str, Any]:
    """Windows follow one another without a gap, and no pair is in two places."""
    places: Counter[str] = Counter()
    end, many = 0.0, 0
    for folder in sorted(product.glob("round-*/window")):
        facts = json.loads((folder / "window.json").read_text())
        if facts["since"] != end:
            broken.append(
                f"the window {folder.parent.name} begins at {facts['since']}, the last ended at {end}"
            )
        end, many = facts["until"], many + 1
        for part in PARTS:
            for row in Jsonl(folder / f"{part}.jsonl").rows():
                places[json.dumps([row["user"], row["ts"], row["chosen"], row["rejected"]])] += 1
    if twice := [one for one, count in places.items() if count > 1]:
        broken.append(f"{len(twice)} pairs are in the windows twice, e.g. {twice[0]}")
    return {"windows": many, "pairs_in_windows": len(places)}


def _missed(product: Path, store: Store, table: Table) -> int:
    """Pairs that the store shows now within the windows, and that none of them had."""
    missed = 0
    for file in sorted(product.glob("round-*/window/window.json")):
        facts = json.loads(file.read_text())
        pairs, _ = decided(store, table, facts["since"], facts["until"], store.watermark())
        counts = facts["counts"]
        parted = (*PARTS, *(name for name in counts if name.startswith("dropped_")))
        missed += max(0, len(pairs) - sum(counts[name] for name in parted))
    return missed


__all__ = ["audit", "events", "journal", "revisions", "windows"]
