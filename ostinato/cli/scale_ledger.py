"""``ostinato scale ledger``: the books of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ostinato.cli.scale_answers import Answer
from ostinato.observe.ledger import priced, read, summary
from ostinato.observe.report.charts import Section
from ostinato.observe.report.ledger import section, tables, torn
from ostinato.run import RunFolder


def books(runs: Sequence[RunFolder], price: float = 0.0) -> Answer:
    """The sums of their ledgers, with ``price`` for a device-hour of sessions that have none. Raises
    ValueError for a run without a ledger, or with one that is damaged."""
    names = _names(runs)
    rows = {name: priced(read(run), price) for name, run in zip(names, runs, strict=True)}
    for name, found in rows.items():
        if not found:
            raise ValueError(f"run {name} has no row in ledger.jsonl; it has finished no step yet")
    sums = {name: summary(found) for name, found in rows.items()}
    lead = []
    for name, run in zip(names, runs, strict=True):
        lead.append(f"{name}: {sums[name].steps} steps, started {_times(sums[name].sessions)}.")
        lead += ["The last line of its ledger was torn by a kill and is not counted."] * torn(run)
        lead += sums[name].notes

    def sections() -> list[Section]:
        made = [section(found, name if len(rows) > 1 else "") for name, found in rows.items()]
        return [one for one in made if one is not None]

    return Answer(
        title=" and ".join(names),
        kind="ledger",
        result={"runs": [{"run": name, **asdict(one)} for name, one in sums.items()]},
        lead=lead,
        tables=tables(sums),
        sections=sections,
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Of the folders; numbered where two are alike."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]
