"""The section "Drafts from history": what speculative decoding gained.
Absent if a run drafted nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ostinato.observe.report.charts import Chart, Section, Series, figure, lines
from ostinato.observe.report.facts import seconds_text
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
    charts = list(_gain(rows))
    return [Section(title="Drafts from history", charts=charts, lead=lead(rows))]


def lead(rows: Sequence[Row]) -> str:
    """A summary of the section, in words."""
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
