"""The section "Drafts from history": what drafting was good for, and whether its estimates can be trusted.
Absent where a run drafted nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ostinato.observe.report.charts import Chart, Section, Series, Values, figure, lines, plotted
from ostinato.observe.report.facts import seconds_text, wilson
from ostinato.observe.report.reading import Row, RunData, mean, names_under, total

SOURCES = {  # of drafts, as the metrics name them
    "history": ("past answers", "--blue"),
    "sibling": ("siblings", "--teal"),
    "own": ("own text", "--purple"),
    "other": ("other prompts", "--orange"),
}


def draft_sections(data: RunData) -> list[Section]:
    """The section, or nothing."""
    rows = [row for row in data.metrics if any(key.startswith("draft/") for key in row)]
    if not rows:
        return []
    charts = [*_gain(rows), *_estimates(data.drafts)]
    return [Section(title="Drafts from history", charts=charts, lead=lead(rows))]


def lead(rows: Sequence[Row]) -> str:
    """What it means, for people."""
    per_pass = mean(rows[-max(1, len(rows) // 10) :], "draft/tokens_per_pass")
    if per_pass is None:
        return "Nothing was sampled by an engine that verifies drafts."
    drafted, sampled = total(rows, "tokens/accepted"), total(rows, "tokens/sampled")
    share = f"; {drafted / sampled:.0%} of all tokens were guessed in advance" if sampled else ""
    saved, spent = total(rows, "draft/seconds_saved"), total(rows, "time/rollout_s")
    saving = (
        f" By the engine's own table of costs that {'saved' if saved >= 0 else 'cost'} "
        f"{seconds_text(abs(saved))} of rollouts, which took {seconds_text(spent)}."
    )
    return (
        f"A pass over the model gave each sequence {per_pass:.2f} tokens at the end of the run instead of one"
        f"{share}.{saving if spent else ''} A guess is kept only where it is what the policy samples anyway: "
        "every token is the one that would have come without drafts."
    )


def _gain(rows: Sequence[Row]) -> Iterator[Chart]:
    note = "Tokens that a sequence got from one forward pass; 1 without drafts."
    per_pass = {"draft/tokens_per_pass": "tokens"}
    yield figure(rows, "Tokens per pass", note, "", per_pass, low=1.0, mark=(1.0, ""))
    names = (*SOURCES, *sorted(set(names_under(rows, "draft/share_")) - set(SOURCES)))
    parts = lines(rows, {f"draft/share_{name}": SOURCES.get(name, (name, "--red")) for name in names})
    known = [one for one in parts if any(value is not None for value in one.values)]
    undrafted = [_rest(values) for values in zip(*(one.values for one in known), strict=True)]
    rest = [Series(label="not guessed", values=undrafted, color="--grey")] if known else []
    note = "Where the accepted guesses came from, as shares of all sampled tokens."
    yield figure(rows, "Output by source", note, "%", [*known, *rest], stacked=True)
    accepted = {"draft/acceptance": ("accepted", "--teal"), "draft/cpu_share": ("drafting time", "--orange")}
    note = "Share of guesses that were right; share of the rollouts' time that guessing took."
    yield figure(rows, "Acceptance and price", note, "%", accepted, low=0.0, high=1.0)


def _rest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(0.0, 1.0 - sum(known)) if known else None


def _estimates(rows: Sequence[Row]) -> Iterator[Chart]:
    """Over the whole run: predicted against observed acceptance, and what came of a draft by its length."""
    labels, hits, predicted = (_summed(rows, key) for key in ("labels", "hits", "predicted"))
    shares = _shares(hits, labels)
    bands = [
        None if p is None else wilson(p, (p * (1 - p) / n) ** 0.5, n)
        for p, n in zip(shares, labels, strict=True)
    ]
    low, high = ([None if band is None else band[end] for band in bands] for end in (0, 1))
    expected = Series(label="expected", values=_shares(predicted, labels), color="--grey")
    observed = Series(label="observed", values=shares, color="--blue", low=low, high=high)
    note = "How often guesses came true (band: 95 % interval), by how often they were expected to."
    ends: dict[str, Any] = {"low": 0.0, "high": 1.0}
    middles = [round(100 * (i + 0.5) / len(labels)) for i in range(len(labels))]
    axis = {"steps": middles, "along": "expected #\u202f%"}
    yield plotted("Calibration", note, "%", [expected, observed], **ends, **axis)
    drafted, accepted = _summed(rows, "drafted_at"), _summed(rows, "accepted_at")
    accepted += [0.0] * (len(drafted) - len(accepted))  # the deepest drafts may all have been wrong
    note = "Share of drafted tokens that were right, by their place in the draft: a wrong one ends it."
    depth = [Series(label="right", values=_shares(accepted, drafted), color="--teal")]
    axis = {"steps": list(range(1, len(drafted) + 1)), "along": "depth #"}
    yield plotted("Acceptance by depth", note, "%", depth, **ends, **axis)


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> Values:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]


def _summed(rows: Sequence[Row], key: str) -> list[float]:
    """The lists under ``key``, added up; as long as the longest."""
    lists = [row[key] for row in rows if isinstance(row.get(key), list)]
    size = max(map(len, lists), default=0)
    return [float(sum(one[i] for one in lists if i < len(one))) for i in range(size)]
