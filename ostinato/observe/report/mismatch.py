"""The section "Sampler against trainer": how much their log-probabilities of the sampled tokens differ, and
how much of that replaying the sampler's experts removes.

Every step logs a few sums (``sampling/*`` and ``routing/*`` in metrics.jsonl), which are plotted. Once in a
while a batch is measured in full, a row of mismatch.jsonl: up to three arms over the same tokens at the same
weights, the columns of the table. Damaged values count as missing.
"""

from __future__ import annotations

from typing import Any

from ostinato.observe.report.charts import Chart, Section, Series, figure, lines
from ostinato.observe.report.facts import Fact, Table, best_score, figure_text, seconds_text
from ostinato.observe.report.reading import Row, RunData, mapping, number

DIRECTION = "KL(sampler || trainer)"
ARMS = {  # name, which experts the trainer used, color
    "native": ("native", "its own experts", "--red"),
    "replay": ("with replay", "the sampler's experts", "--teal"),
    "floor": ("floor", "trainer against itself", "--grey"),
}
GATE = 0.9  # the default of trainer.replay_threshold


def mismatch_section(data: RunData) -> Section:
    """The section. Without a full measurement it has the plots of every step, and a sentence instead."""
    return Section(
        title="Sampler against trainer",
        anchor="mismatch",
        lead=lead(data),
        facts=facts(data),
        tables=tables(data),
        charts=[gap_chart(data), _agreement(data)],
    )


# -- rows of mismatch.jsonl


def measured(data: RunData) -> list[Row]:
    """The rows that have a native arm, in order of steps."""
    return [row for row in data.mismatch if arm(row, "native")]


def arm(row: Row, name: str) -> Row:
    """One arm of a measurement; empty if it does not have that arm."""
    return mapping(mapping(row.get("arms")).get(name))


def _quantity(one: Row, name: str) -> float | None:
    """A figure of an arm: F(tau), the share of tokens whose ratio lies beyond tau or 1/tau, a masked share,
    or a value by its own name."""
    if not name.startswith("F("):
        return number({**mapping(one.get("masked")), **one}, name)
    pairs = [pair for pair in one.get("tails") or () if isinstance(pair, list) and len(pair) == 2]
    found = [dict(zip(("tau", name), pair, strict=True)) for pair in pairs]
    return next((number(pair, name) for pair in found if number(pair, "tau") == float(name[2:-1])), None)


# -- in words


def lead(data: RunData) -> str:
    """A summary of the section in a sentence or two."""
    rows = measured(data)
    if not rows:
        off = data.setting("log.mismatch_every") == 0
        return (
            "Sampler and trainer were compared at every step, but never in full: mismatch.jsonl has no rows"
            + (" (log.mismatch_every is 0)." if off else ".")
        )
    native, replay = arm(rows[-1], "native"), arm(rows[-1], "replay")
    tokens, answers = (number(native, name) or 0 for name in ("tokens", "sequences"))
    begin = (
        f"Step {rows[-1]['step']}: over {tokens:,.0f} sampled tokens of {answers:,.0f} answers, at equal "
        f"weights, k3 of {DIRECTION} is {_k3(native)} nats per token"
    )
    if not replay:
        return f"{begin} (no expert routes were recorded, so there is nothing to replay)."
    return (
        f"{begin} while the trainer chooses its own experts, and {_k3(replay)} with those of the sampler "
        "(95 % intervals, none of few answers)."
    )


def _k3(one: Row) -> str:
    """The value with its 95 % interval."""
    low, high = number(one, "k3_low"), number(one, "k3_high")
    interval = "" if low is None or high is None else f" [{figure_text(low)}, {figure_text(high)}]"
    return f"{figure_text(number(one, 'k3'))}{interval}"


def facts(data: RunData) -> list[Fact]:
    """Facts next to the last measurement: the correction, routes and their size, replay, seconds it took."""
    rows, found = measured(data), _correction(data)
    if not rows:
        return found
    last, latest = rows[-1], data.metrics[-1] if data.metrics else {}
    if choice := mapping(last.get("routers")):
        used = "the sampler's, replayed" if last.get("replay") else "the trainer's own"
        names = ("overlap", "lowest_sequence", "differ", "tokens_differ")
        overlap, lowest, differ, tokens = (_percent(number(choice, name)) for name in names)
        limit = f"; the gate requires {_percent(gate(data))}" if gate(data) else ""
        margin, near = (figure_text(number(choice, f"margin_{name}median")) for name in ("", "flip_"))
        found += [
            Fact("Experts in training", used),
            Fact("Experts in common", overlap, f"lowest answer {lowest}{limit}"),
            Fact("Routers that differ", differ, f"at least one in {tokens} of the tokens"),
            Fact("Router margin, median", f"{margin} logits", f"{near} where the two differ"),
            Fact("Rows with a recorded route", _percent(number(last, "coverage"))),
        ]
        memory = number(latest, "routing/bytes_per_token") or number(last, "route_bytes_per_token")
        packed = number(latest, "routing/packed_bytes_per_token")
        note = f"in memory; {packed:.1f} packed" if packed is not None else "in memory"
        found += [] if memory is None else [Fact("Routes of a token", f"{memory:.0f} bytes", note)]
    if (seconds := number(last, "seconds")) is not None:
        found.append(Fact("This measurement took", seconds_text(seconds), f"at step {last['step']}"))
    return found


def _correction(data: RunData) -> list[Fact]:
    """How the ratio trainer / sampler is corrected, its bounds, and the tokens affected in the last step."""
    chosen = mapping(data.starts[-1].get("algorithm")) if data.starts else {}
    kind = str(chosen.get("correction", "none"))
    if kind == "none":
        return []
    low, high = number(chosen, "correction_low"), number(chosen, "correction_high")
    truncates = kind.endswith("truncate")
    bounds = f"above {high:g}" if truncates else f"outside {low:g} to {high:g}"
    latest = data.metrics[-1] if data.metrics else {}
    touched = number(latest, "sampling/truncated" if truncates else "sampling/masked")
    note = f"{_percent(touched)} of the tokens of the last step" if touched is not None else ""
    return [Fact("Correction of the ratio", f"{kind}, {bounds}", note)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.4g}%"


# -- the table


QUANTITIES = {  # r: trainer over sampler, of one sampled token
    "k3": f"k3\nnats per token; {DIRECTION} [95 %]",
    "abs_mean": "mean |log r|\nnats; 0 is exact",
    "abs_max": "largest |log r|\nnats",
    "F(1.1)": "F(1.1)\nshare of tokens; more than 1.1x apart",
    "F(2)": "F(2)\nshare of tokens; before a collapse above 0.1",
    "ess": "effective sample\nshare of tokens; 1 is on-policy",
    "token_truncate": "TIS would cut\nshare of tokens; r above 2",
    "token_mask": "IcePop would mask\nshare of tokens; r outside 0.5 to 5",
    "sequence_mask": "answer mask would drop\nshare of tokens; product of r above 3",
    "pearson": "Pearson\nof the two log-probabilities",
}


def tables(data: RunData) -> list[Table]:
    """The arms of the last measurement side by side, and the floor, which is measured once."""
    rows = measured(data)
    if not rows:
        return []
    last, floor = rows[-1], next((row for row in reversed(rows) if arm(row, "floor")), {})
    arms = {name: arm(floor if name == "floor" else last, name) for name in ARMS}
    shown = {name: one for name, one in arms.items() if one}
    found = [
        (title, *(_cell(one, key) for one in shown.values()))
        for key, title in QUANTITIES.items()
        if any(_quantity(one, key) is not None for one in shown.values())
    ]
    head = ["\n".join(ARMS[name][:2]) for name in shown]
    return [Table(title=f"Step {last['step']}", head=head, rows=found)]


def _cell(one: Row, key: str) -> str:
    """The text of a cell; the interval of k3 is its note."""
    return _k3(one).replace(" ", "\n", 1) if key == "k3" else figure_text(_quantity(one, key))


# -- over the steps


def gap_chart(data: RunData) -> Chart:
    """The log-probability gap at every step, and k3 of both arms where a batch was measured in full."""
    rows, gap = data.metrics, "sampling/sampling_logp_difference"
    gaps = {
        f"{gap}/max": ("max |Δ log p|", "--orange"),
        f"{gap}/mean": ("mean |Δ log p|", "--blue"),
        "sampling/kl_k3": ("KL (k3)", "--purple"),
    }
    full = {row["step"]: row for row in measured(data)}
    at = [full.get(row["step"], {}) for row in rows]
    arms = [
        Series(
            label=f"KL, {name}", values=[number(arm(row, key), "k3") for row in at], color=color, marker="dot"
        )
        for key, (name, _, color) in ARMS.items()
        if key != "floor"
    ]
    dots = " Dots: measured in full." if full else ""
    note = f"Trainer minus sampler, per token in nats; 0 is exact agreement.{dots}"
    return figure(rows, "Log-probability gap", note, "", [*lines(rows, gaps), *arms], log=True)


def _agreement(data: RunData) -> Chart:
    """Effective sample size and shared experts, as shares."""
    rows = data.metrics
    shares = {
        "sampling/ess": ("effective sample", "--blue"),
        "routing/overlap": ("experts in common", "--teal"),
        "routing/lowest_sequence": ("in the lowest sequence", "--orange"),
    }
    routed = any("routing/overlap" in row for row in rows)
    limit = gate(data) if routed else 0.0
    note = "Share of tokens that count after weighting"
    note += " and of expert ids that trainer and sampler have in common" if routed else ""
    note += "; the gate refuses less." if limit else "; 100 % is on-policy."
    mark = (limit, "gate") if limit else None
    return figure(rows, "Agreement", note, "%", shares, low=0.9, high=1.0, mark=mark)


def gate(data: RunData) -> float:
    """The overlap below which a sequence's routes are refused; 0 without a gate, e.g. with replay off."""
    if data.setting("trainer.replay", True) is False:
        return 0.0
    return float(data.setting("trainer.replay_threshold", GATE))


# -- as data


def summary(data: RunData) -> dict[str, Any]:
    """The section as one JSON object: every measurement, the sums of the last step, the alarms."""
    best = best_score(data)
    latest = data.metrics[-1] if data.metrics else {}
    return {
        "run": data.name,
        "direction": DIRECTION,
        "lead": lead(data),
        "measured": measured(data),
        "last_step": {
            key: latest[key] for key in latest if key.startswith(("sampling/", "routing/", "watch/"))
        },
        "best": best and {"step": best[0], "pass@1": best[1].value, "interval": best[1].interval},
        "alarms": list(data.alarms),
    }
