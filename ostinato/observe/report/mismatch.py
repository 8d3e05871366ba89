"""The section "Sampler against trainer": how far apart the two are about the tokens that were sampled, what
replaying the sampler's experts changes about it, and where the routers disagree.

Every step leaves a few sums (``sampling/*`` and ``routing/*`` in metrics.jsonl). Once in a while a batch is
measured in full, a row of mismatch.jsonl: up to three arms over the same tokens at the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ostinato.observe.report.arms import ARMS, DIRECTION, arm, gate, last_arm, measured, routers, tail
from ostinato.observe.report.charts import Section
from ostinato.observe.report.facts import Fact, Table, best_score, figure_text, seconds_text
from ostinato.observe.report.mismatch_plots import courses, disagreement, every_step, ratios
from ostinato.observe.report.reading import Row, RunData, number, numbers

MOST_DECISIONS = 10
APART = "the intervals do not overlap"
OVERLAP = "the intervals overlap"


def mismatch_section(data: RunData) -> Section:
    """The section. Without a full measurement it has the plots of every step, and a sentence instead."""
    rows = measured(data)
    charts = [*every_step(data), *courses(rows), *ratios(rows), *disagreement(rows)]
    return Section(
        title="Sampler against trainer",
        anchor="mismatch",
        lead=lead(data),
        facts=facts(data),
        tables=tables(data),
        charts=charts,
    )


# -- in words


def lead(data: RunData) -> str:
    """What it comes to, in a few sentences."""
    rows = measured(data)
    if not rows:
        off = data.setting("log.mismatch_every") == 0
        return (
            "Sampler and trainer were compared at every step, but never in full: mismatch.jsonl has no rows"
            + (" (log.mismatch_every is 0)." if off else ".")
        )
    row = rows[-1]
    native, floor = arm(row, "native"), arm(row, "floor")
    tokens, answers = (number(native, name) or 0 for name in ("tokens", "sequences"))
    parts = [
        f"Step {row['step']}: over {tokens:,.0f} sampled tokens of {answers:,.0f} answers, at equal weights, "
        f"k3 of {DIRECTION} is {_k3(native)} nats per token",
        _effect(native, arm(row, "replay")),
        *_disagreement(routers(row)),
        *([f"The trainer against itself, packed otherwise, differs by {_k3(floor)}."] if floor else []),
    ]
    return " ".join(parts)


def _effect(native: Row, replay: Row) -> str:
    """How the sentence about k3 goes on."""
    if not replay:
        return "(no expert routes were recorded, so there is nothing to replay)."
    change = _factor(number(native, "k3"), number(replay, "k3"))
    return (
        f"while the trainer chooses its own experts, and {_k3(replay)} with those of the sampler: {change} "
        f"({_apart(native, replay)})."
    )


def _disagreement(choice: Row) -> Iterator[str]:
    shares = [number(choice, key) for key in ("differ", "tokens_differ", "per_token")]
    differ, tokens, each = (value or 0.0 for value in shares)
    if None not in shares:
        yield (
            f"{differ:.2%} of the routers, one for each token and layer, chose another set of experts than "
            f"the sampler's; {tokens:.1%} of the tokens met at least one, and a token {each:.2f} on average."
        )


def _k3(one: Row) -> str:
    """The value with its 95 % interval."""
    return f"{figure_text(number(one, 'k3'))} {_interval(one)}".strip()


def _interval(one: Row) -> str:
    low, high = number(one, "k3_low"), number(one, "k3_high")
    return "" if low is None or high is None else f"[{figure_text(low)}, {figure_text(high)}]"


def _apart(native: Row, replay: Row) -> str:
    low, high = number(native, "k3_low"), number(native, "k3_high")
    other_low, other_high = number(replay, "k3_low"), number(replay, "k3_high")
    if low is None or high is None or other_low is None or other_high is None:
        return "without intervals"
    return APART if other_high < low or high < other_low else OVERLAP


def _factor(native: float | None, replay: float | None) -> str:
    """How many times lower with replay than native: "1.99x lower", "1.2x higher", "none left"."""
    if native is None or replay is None or native < 0 or replay < 0 or native == replay == 0:
        return ""
    if not native or not replay:
        return "none left" if native else "none before"
    if max(native, replay) < 1.005 * min(native, replay):
        return "the same"
    return f"{native / replay:.3g}x lower" if native > replay else f"{replay / native:.3g}x higher"


def facts(data: RunData) -> list[Fact]:
    """What stands beside the last measurement: the correction, routes, margins, sizes, the age of tokens, its
    price."""
    rows, found = measured(data), _correction(data)
    if not rows:
        return found
    last = rows[-1]
    if choice := routers(last):
        used = "the sampler's, replayed" if last.get("replay") else "the trainer's own"
        names = ("overlap", "lowest_sequence", "margin_median", "margin_flip_median")
        overlap, lowest, margin, flip = (number(choice, name) for name in names)
        limit = f"; the gate asks for {_percent(gate(data))}" if gate(data) else ""
        near = f"{figure_text(flip)} where the two differ"
        found += [
            Fact("Experts in training", used),
            Fact("Experts in common", _percent(overlap), f"lowest answer {_percent(lowest)}{limit}"),
            Fact("Router margin, median", f"{figure_text(margin)} logits", near),
            Fact("Rows with a recorded route", _percent(number(last, "coverage"))),
            *_sizes(data, last),
        ]
    if ages := _ages(last):
        found.append(Fact("Versions since the tokens were sampled", ages))
    if (seconds := number(last, "seconds")) is not None:
        found.append(Fact("This measurement took", seconds_text(seconds), f"at step {last['step']}"))
    return found


def _sizes(data: RunData, last: Row) -> list[Fact]:
    """Bytes of routes for each token, as far as a run has them."""
    latest = data.metrics[-1] if data.metrics else {}
    memory = number(latest, "routing/bytes_per_token") or number(last, "route_bytes_per_token")
    packed = number(latest, "routing/packed_bytes_per_token")
    note = f"in memory; {packed:.1f} packed" if packed is not None else "in memory"
    return [] if memory is None else [Fact("Routes of a token", f"{memory:.0f} bytes", note)]


def _correction(data: RunData) -> list[Fact]:
    """How the ratio trainer / sampler is corrected, within which bounds, and what that touched at last."""
    chosen = data.starts[-1].get("algorithm") if data.starts else None
    if not isinstance(chosen, Mapping) or chosen.get("correction", "none") == "none":
        return []
    low, high = number(chosen, "correction_low"), number(chosen, "correction_high")
    kind = str(chosen["correction"])
    bounds = f"above {high:g}" if kind.endswith("truncate") else f"outside {low:g} to {high:g}"
    latest = data.metrics[-1] if data.metrics else {}
    touched = number(latest, "sampling/truncated" if kind.endswith("truncate") else "sampling/masked")
    note = f"{_percent(touched)} of the tokens of the last step" if touched is not None else ""
    return [Fact("Correction of the ratio", f"{kind}, {bounds}", note)]


def _ages(row: Row) -> str:
    """ "0: 75%, 1: 25%" from tokens by staleness."""
    versions = row.get("versions")
    counts = numbers(versions) if isinstance(versions, Mapping) else {}
    total = sum(counts.values())
    return ", ".join(f"{age}: {count / total:.0%}" for age, count in counts.items()) if total else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.4g}%"


# -- tables


Read = Callable[[Row], float | None]


def _field(name: str) -> Read:
    return lambda one: number(one, name)


def _tail(tau: float) -> Read:
    return lambda one: tail(one, tau)


def _masked(name: str) -> Read:
    return lambda one: number(shares, name) if isinstance(shares := one.get("masked"), Mapping) else None


QUANTITIES: Mapping[str, tuple[str, Read]] = {  # r: trainer over sampler, of one sampled token
    "k3": (f"nats per token; {DIRECTION} [95 %]", _field("k3")),
    "mean |log r|": ("nats; 0 is exact", _field("abs_mean")),
    "99 % of |log r| below": ("nats", _field("abs_p99")),
    "largest |log r|": ("nats", _field("abs_max")),
    "F(1.1)": ("share of tokens; more than 1.1x apart", _tail(1.1)),
    "F(1.5)": ("share of tokens", _tail(1.5)),
    "F(2)": ("share of tokens; before a collapse above 0.1", _tail(2.0)),
    "effective sample": ("share of tokens; 1 is on-policy", _field("ess")),
    "χ²": ("mean r² - 1; 0 is on-policy", _field("chi2")),
    "|log r| of an answer": ("nats; summed over it", _field("sequence_abs_mean")),
    "TIS would cut": ("share of tokens; r above 2", _masked("token_truncate")),
    "IcePop would mask": ("share of tokens; r outside 0.5 to 5", _masked("token_mask")),
    "answer mask would drop": ("share of tokens; product of r above 3", _masked("sequence_mask")),
    "Pearson": ("of the two log-probabilities", _field("pearson")),
}
UNSCALED = ("effective sample", "Pearson")  # so many times lower means nothing


def comparison(rows: Sequence[Row], floor: Row) -> Table:
    """Measured steps side by side: their arms, what replay changed, and at last the arm of the floor."""
    head: list[str] = []
    for row in rows:
        head.append(f"native\nstep {row['step']}")
        head += [f"with replay\nstep {row['step']}", "change\nby replay"] if arm(row, "replay") else []
    lines = [
        (f"{name}\n{unit}", *(cell for row in rows for cell in _cells(name, read, row)))
        + ((_value(name, read, floor),) if floor else ())
        for name, (unit, read) in QUANTITIES.items()
        if any(read(arm(row, one)) is not None for row in rows for one in ARMS)
    ]
    head += ["floor\ntrainer against itself"] if floor else []
    return Table(title=f"Step {' and '.join(str(row['step']) for row in rows)}", head=head, rows=lines)


def _cells(name: str, read: Read, row: Row) -> Iterator[str]:
    """The columns of one measured step."""
    native, replay = arm(row, "native"), arm(row, "replay")
    yield _value(name, read, native)
    if replay:
        yield _value(name, read, replay)
        yield "" if name in UNSCALED else _factor(read(native), read(replay))


def _value(name: str, read: Read, one: Row) -> str:
    interval = _interval(one) if name == "k3" else ""
    return f"{figure_text(read(one))}\n{interval}"


def decisions(rows: Sequence[Row]) -> list[Row]:
    """The measured steps whose decision about replay is worth a line: the first, each change, the last."""
    decided = [row for row in rows if row.get("decision") and arm(row, "replay")]
    return [
        row
        for i, row in enumerate(decided)
        if i in (0, len(decided) - 1) or row.get("replay") != decided[i - 1].get("replay")
    ]


def decision_table(rows: Sequence[Row]) -> Table:
    found = decisions(rows)
    shown = found if len(found) <= MOST_DECISIONS else [*found[: MOST_DECISIONS - 1], found[-1]]
    left = len(found) - len(shown)
    lines = [
        (f"step {row['step']}", "on" if row.get("replay") else "off", str(row["decision"])) for row in shown
    ]
    note = f"{left} more changes are in mismatch.jsonl." if left else ""
    words = ("replay", "why")
    return Table(title="Decisions about replay", head=words, rows=lines, words=words, note=note)


# -- as data


def summary(data: RunData) -> dict[str, Any]:
    """The section as one JSON object: the first and the last measurement, what lies between, decisions."""
    rows, best = measured(data), best_score(data)
    latest = data.metrics[-1] if data.metrics else {}
    sums = {name: latest[name] for name in latest if name.startswith(("sampling/", "routing/", "watch/"))}
    return {
        "run": data.name,
        "direction": DIRECTION,
        "lead": lead(data),
        "measured": [row["step"] for row in rows],
        "k3": {name: [number(arm(row, name), "k3") for row in rows] for name in ARMS},
        "first": rows[0] if rows else None,
        "last": rows[-1] if rows else None,
        "decisions": [
            {"step": row["step"], "replay": row.get("replay"), "why": row["decision"]}
            for row in decisions(rows)
        ],
        "last_step": sums,
        "best": best and {"step": best[0], "pass@1": best[1].value, "interval": best[1].interval},
        "alarms": list(data.alarms),
    }


def tables(data: RunData, *, whole: bool = True) -> list[Table]:
    """The first and the last measurement side by side (``whole=False``: the last), and the decisions."""
    rows = measured(data)
    if not rows:
        return []
    ends = [rows[0], rows[-1]] if whole and len(rows) > 1 else [rows[-1]]
    return [comparison(ends, last_arm(rows, "floor")), *([decision_table(rows)] if decisions(rows) else [])]
