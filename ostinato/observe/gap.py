"""Sampler against trainer, from the rows of mismatch.jsonl: the difference of their log-probabilities of the
sampled tokens, with and without replay of the sampler's experts.

Every step logs a few sums (``sampling/*`` and ``routing/*`` in metrics.jsonl). Every log.mismatch_every steps
a batch is measured in full: up to three arms over the same tokens at the same weights. Damaged values count
as missing.
"""

from __future__ import annotations

from typing import Any

from ostinato.observe.rows import Row, RunRows, by_step, mapping
from ostinato.observe.stats import number
from ostinato.tables import NONE, Table, format_figure, format_seconds

DIRECTION = "KL(sampler || trainer)"
ARMS = {  # name, which experts the trainer used
    "native": "native\nits own experts",
    "replay": "with replay\nthe sampler's experts",
    "floor": "floor\ntrainer against itself",
}
GATE = 0.9  # the default of trainer.replay_threshold
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


def select_measured(data: RunRows) -> list[Row]:
    """The rows that have a native arm, in order of steps."""
    return [row for row in by_step(data.logs["mismatch"]) if arm_of(row, "native")]


def arm_of(row: Row, name: str) -> Row:
    """One arm of a measurement; empty if it does not have that arm."""
    return mapping(mapping(row.get("arms")).get(name))


def describe_gap(data: RunRows) -> str:
    """Description of the last measurement in one or two sentences."""
    rows = select_measured(data)
    if not rows:
        hint = " (log.mismatch_every is 0)" if data.setting("log.mismatch_every") == 0 else ""
        return f"Compared at every step, but never in full: mismatch.jsonl has no rows{hint}."
    native, replay = arm_of(rows[-1], "native"), arm_of(rows[-1], "replay")
    tokens, answers = (number(native, name) or 0 for name in ("tokens", "sequences"))
    opening = (
        f"Step {rows[-1]['step']}: over {tokens:,.0f} sampled tokens of {answers:,.0f} answers, at equal "
        f"weights, k3 of {DIRECTION} is {_format_k3(native)} nats per token"
    )
    if not replay:
        return f"{opening} (no expert routes were recorded, so there is nothing to replay)."
    return (
        f"{opening} while the trainer chooses its own experts, and {_format_k3(replay)} with those of the "
        "sampler (95 % intervals, none of few answers)."
    )


def compare_arms(data: RunRows) -> list[Table]:
    """Tables of the arms of the last measurement beside the floor, which is measured once, and of routes and
    the correction where they are recorded."""
    rows, facts = select_measured(data), _facts(data)
    facts_table = [Table(title="Beside it", head=("value",), rows=facts, words=("value",))] if facts else []
    if not rows:
        return facts_table
    floor = next((row for row in reversed(rows) if arm_of(row, "floor")), {})
    arms = {name: arm_of(floor if name == "floor" else rows[-1], name) for name in ARMS}
    present_arms = {name: arm for name, arm in arms.items() if arm}
    lines = [
        (
            title,
            *(
                (
                    _format_k3(arm).replace(" ", "\n", 1)
                    if key == "k3"
                    else format_figure(_read_quantity(arm, key))
                )
                for arm in present_arms.values()
            ),
        )
        for key, title in QUANTITIES.items()
        if any(_read_quantity(arm, key) is not None for arm in present_arms.values())
    ]
    head = [ARMS[name] for name in present_arms]
    return [Table(title=f"Step {rows[-1]['step']}", head=head, rows=lines), *facts_table]


def _read_quantity(arm: Row, name: str) -> float | None:
    """A figure of an arm by name: F(tau), the share of tokens whose ratio lies beyond tau or 1/tau; a masked
    share; or a value of its row. None if missing."""
    if not name.startswith("F("):
        return number({**mapping(arm.get("masked")), **arm}, name)
    pairs = [pair for pair in arm.get("tails") or () if isinstance(pair, list) and len(pair) == 2]
    named = [dict(zip(("tau", name), pair, strict=True)) for pair in pairs]
    return next((number(pair, name) for pair in named if number(pair, "tau") == float(name[2:-1])), None)


def _format_k3(arm: Row) -> str:
    """k3 of an arm as text, with its 95 % interval if there is one."""
    low, high = number(arm, "k3_low"), number(arm, "k3_high")
    interval = "" if low is None or high is None else f" [{format_figure(low)}, {format_figure(high)}]"
    return f"{format_figure(number(arm, 'k3'))}{interval}"


def _facts(data: RunRows) -> list[tuple[str, str]]:
    """(name, value) of the ratio's correction, replay, routes and their size, and the measurement's
    seconds."""
    rows, metrics, starts = select_measured(data), data.logs["metrics"], data.logs["starts"]
    latest, algorithm = metrics[-1] if metrics else {}, mapping(starts[-1].get("algorithm")) if starts else {}
    facts: list[tuple[str, str]] = []
    if (kind := str(algorithm.get("correction", "none"))) != "none":
        low, high = number(algorithm, "correction_low"), number(algorithm, "correction_high")
        truncates = kind.endswith("truncate")
        corrected = number(latest, "sampling/truncated" if truncates else "sampling/masked")
        bounds = f"above {high:g}" if truncates else f"outside {low:g} to {high:g}"
        note = "" if corrected is None else f"\n{_format_percent(corrected)} of the tokens of the last step"
        facts.append(("correction of the ratio", f"{kind}, {bounds}{note}"))
    if not rows:
        return facts
    last = rows[-1]
    if choice := mapping(last.get("routers")):
        names = ("overlap", "lowest_sequence", "differ", "tokens_differ")
        overlap, lowest, differ, tokens = (_format_percent(number(choice, name)) for name in names)
        limit = f"; the gate requires {_format_percent(gate(data))}" if gate(data) else ""
        margin, near = (format_figure(number(choice, f"margin_{name}median")) for name in ("", "flip_"))
        facts += [
            ("experts in training", "the sampler's, replayed" if last.get("replay") else "the trainer's own"),
            ("experts in common", f"{overlap}\nlowest answer {lowest}{limit}"),
            ("routers that differ", f"{differ}\nat least one in {tokens} of the tokens"),
            ("router margin, median", f"{margin} logits\n{near} where the two differ"),
            ("rows with a recorded route", _format_percent(number(last, "coverage"))),
        ]
        memory = number(latest, "routing/bytes_per_token") or number(last, "route_bytes_per_token")
        packed = number(latest, "routing/packed_bytes_per_token")
        note = f"in memory; {packed:.1f} packed" if packed is not None else "in memory"
        facts += [] if memory is None else [("routes of a token", f"{memory:.0f} bytes\n{note}")]
    if (seconds := number(last, "seconds")) is not None:
        facts.append(("this measurement took", f"{format_seconds(seconds)}\nat step {last['step']}"))
    return facts


def _format_percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.4g}%"


def gate(data: RunRows) -> float:
    """The overlap below which a sequence's routes are refused; 0 without a gate, e.g. with replay off."""
    if data.setting("trainer.replay", True) is False:
        return 0.0
    return float(data.setting("trainer.replay_threshold", GATE))


def summarise_gap(data: RunRows) -> dict[str, Any]:
    """The gap as a JSON object: every measurement, the sums of the last step, the alarms."""
    latest = data.metrics[-1] if data.metrics else {}
    prefixes = ("sampling/", "routing/", "watch/")
    return {
        "run": data.name,
        "direction": DIRECTION,
        "lead": describe_gap(data),
        "measured": select_measured(data),
        "last_step": {key: latest[key] for key in latest if key.startswith(prefixes)},
        "alarms": data.logs["watch"],
    }
