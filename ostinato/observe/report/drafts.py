"""The section "Drafts from history": what drafting was good for, whether its estimates can be trusted, and
how alike the answers of neighbouring policies are. Absent where a run drafted nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ostinato.observe.report.charts import Chart, Section, Series, Values, figure, lines, plotted
from ostinato.observe.report.facts import seconds_text, wilson
from ostinato.observe.report.reading import Row, RunData, mean, names_under, number, total

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
    charts = [*_gain(rows), *_estimates(data.drafts), _budget(data.drafts), *_likeness(rows)]
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
    note = "Estimate: plain decoding of the same tokens by the engine's cost table, minus what they took."
    yield figure(rows, "Seconds saved", note, "s", {"draft/seconds_saved": "saved"}, low=0.0)


def _rest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(0.0, 1.0 - sum(known)) if known else None


def _estimates(rows: Sequence[Row]) -> Iterator[Chart]:
    """Over the whole run: predicted against observed acceptance, and how many drafts stand behind it."""
    labels, hits, predicted = (_summed(rows, key) for key in ("labels", "hits", "predicted"))
    middles = [round(100 * (i + 0.5) / len(labels)) for i in range(len(labels))]
    shares = _shares(hits, labels)
    bands = [
        None if p is None else wilson(p, (p * (1 - p) / n) ** 0.5, n)
        for p, n in zip(shares, labels, strict=True)
    ]
    low, high = ([None if band is None else band[end] for band in bands] for end in (0, 1))
    expected = Series(label="expected", values=_shares(predicted, labels), color="--grey")
    observed = Series(label="observed", values=shares, color="--blue", low=low, high=high)
    note = "How often guesses came true (band: 95 % interval), by how often they were expected to."
    along: dict[str, Any] = {"steps": middles, "along": "expected #\u202f%"}
    yield plotted("Calibration", note, "%", [expected, observed], low=0.0, high=1.0, **along)
    wrong: Values = [n - a for a, n in zip(hits, labels, strict=True)]
    right = Series(label="right", values=[*hits], color="--teal")
    note = "How many there were of each expectation; only those worth their time became drafts."
    guesses = [right, Series(label="wrong", values=wrong, color="--red")] if any(labels) else []
    yield plotted("Guesses", note, "tokens", guesses, stacked=True, **along)
    drafted, accepted = _summed(rows, "drafted_at"), _summed(rows, "accepted_at")
    accepted += [0.0] * (len(drafted) - len(accepted))  # the deepest drafts may all have been wrong
    note = "Share of drafted tokens that were right, by their place in the draft: a wrong one ends it."
    depth = [Series(label="right", values=_shares(accepted, drafted), color="--teal")]
    steps = list(range(1, len(drafted) + 1))
    yield plotted("Acceptance by depth", note, "%", depth, low=0.0, high=1.0, steps=steps, along="depth #")


def _budget(rows: Sequence[Row]) -> Chart:
    """Over the last step that has a trace."""
    traced = [row for row in rows if row.get("trace")]
    trace = traced[-1]["trace"] if traced else []
    where = f" Step {int(traced[-1]['step'])}." if traced else ""
    sizes = (("sequences", "--grey"), ("draft rows", "--orange"), ("tokens given", "--blue"))
    series = [
        Series(label=label, values=[float(point[i]) for point in trace], color=color)
        for i, (label, color) in enumerate(sizes)
    ]
    note = f"Sequences that ran, draft rows verified and tokens given, pass by pass.{where}"
    steps = list(range(1, len(trace) + 1))
    return plotted("Budget over a step", note, "", series, low=0.0, steps=steps, along="pass #")


def _likeness(rows: Sequence[Row]) -> Iterator[Chart]:
    """The two observations of RhymeRL, measured on this run."""
    if not any(number(row, "draft/reuse") is not None for row in rows):
        return
    note = (
        "New tokens that an answer of the prompt's last epoch has after the same three; "
        "notes on RhymeRL (arXiv 2508.18588) name 75 to 95 %."
    )
    yield figure(rows, "Token reuse", note, "%", {"draft/reuse": "reusable"}, low=0.0, high=1.0)
    ranks = {
        "draft/length_rank_correlation": "rank correlation",
        "draft/length_rank_moved": ("share that moved", "--orange"),
    }
    note = (
        "Do prompts keep their order by answer length? Moved: by more than 10 points; "
        "notes on RhymeRL name 2 to 4 % of answers."
    )
    yield figure(rows, "Length ranks", note, "", ranks, low=0.0, high=1.0)


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> Values:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]


def _summed(rows: Sequence[Row], key: str) -> list[float]:
    """The lists under ``key``, added up; as long as the longest."""
    lists = [row[key] for row in rows if isinstance(row.get(key), list)]
    size = max(map(len, lists), default=0)
    return [float(sum(one[i] for one in lists if i < len(one))) for i in range(size)]
