"""Train a judge on pairs: the rows of its warm start and of its RL, the two runs, and its figures.

pairs -> data folder (judge.json, warm/, pairs/, held_out.jsonl) -> SFT on critiques -> RL in both orders
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.product import judging
from ostinato.apps.product.judge import Compared, Spec, format_chat
from ostinato.apps.product.judges import write_spec
from ostinato.apps.product.judging import Choice
from ostinato.apps.product.pairs import deduplicate, extract, split
from ostinato.apps.product.store import open_store
from ostinato.config import Recipe
from ostinato.env.rows import check_messages, read_raw_rows
from ostinato.env.tasks import check_source
from ostinato.observe.stats import wilson
from ostinato.run import RunFolder, atomic_write

log = logging.getLogger(__name__)
STORES = (".db", ".sqlite", ".sqlite3")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A row of pairs. ``critiques``: first with the chosen answer as A, then as B."""

    chat: tuple[Mapping[str, str], ...]
    chosen: str
    rejected: str
    critiques: tuple[str, str] = ("", "")
    split: str = ""  # "train" or "eval", where the row says so

    @property
    def digest(self) -> bytes:
        """SHA-256 of the prompt alone: rows with the same prompt get into the same split."""
        return hashlib.sha256(json.dumps([*map(dict, self.chat)]).encode()).digest()


def read_preferences(source: str, holdout: float = 0.0) -> list[Preference]:
    """Read the rows of a .jsonl or .parquet file: prompt (or messages), chosen, rejected and, optionally,
    critique: a text with {chosen} and {rejected} for the letters, or two texts.

    From a store of feedback, read the pairs that its events show; the last share ``holdout`` of them are
    "eval". Raises ValueError for a source without pairs, and for a faulty row, which it names.
    """
    if source.startswith(("postgresql://", "postgres://")) or Path(source).suffix in STORES:
        return _read_store(source, holdout)
    rows, _ = read_raw_rows(check_source(source), "train", "", 0.0)
    pairs = [_parse_preference(row, f"row {number} of {source}") for number, row in rows]
    if not pairs:
        raise ValueError(f"{source} has no rows; give it pairs (docs/judge.md)")
    return pairs


def _read_store(source: str, holdout: float) -> list[Preference]:
    """Read the pairs of answers and events that may be trained on. The splits share no prompt, and no user
    unless one of them would be empty then. Raises ValueError for a store that is missing or shows no pair."""
    if "://" not in source and not Path(source).is_file():
        raise ValueError(f"there is no store {source}; give the one of ostinato serve --feedback")
    with open_store(source) as store:
        answers = list(store.joined())
    events = [event for answer in answers for event in answer.events]
    result = extract([answer.exchange for answer in answers], events, time.time())
    pairs, counts = deduplicate(result.pairs, math.inf)
    if not pairs:
        raise ValueError(
            f"{len(events)} events on {len(answers)} answers in {source} show no pair: an edit is one, "
            "another answer that is liked where the first was not, and the better of two side by side; a "
            f"thumb alone is none {dict(result.counts) or ''}".rstrip()
        )
    end = float(np.quantile([pair.ts for pair in pairs], 1 - holdout)) if holdout else math.inf
    parts = split(pairs, (end, end))
    if holdout and not (parts.train and parts.test):  # all pairs of a single user would get into one split
        log.info("pairs        of too few users to hold some of them out: parted by time and prompt alone")
        parts = split(pairs, (end, end), users=False)
    log.info(
        f"pairs        {dict(result.counts)}, repeated {counts['repeated']}, dropped {dict(parts.dropped)}"
    )
    return [
        Preference(
            chat=tuple(_strip_messages(pair.messages)), chosen=pair.chosen, rejected=pair.rejected, split=name
        )
        for name, part in (("train", parts.train), ("eval", parts.test))
        for pair in part
    ]


def _strip_messages(chat: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    return ({"role": str(message["role"]), "content": str(message.get("content") or "")} for message in chat)


def _parse_preference(row: Mapping[str, Any], row_name: str) -> Preference:
    """Parse a row of pairs. Raises ValueError for a faulty row; ``row_name`` names it."""
    prompt = row.get("prompt") or row.get("messages") or row.get("question")
    if not prompt:
        raise ValueError(f"{row_name} has no 'prompt'; give it a text or a chat")
    chat = (
        ({"role": "user", "content": prompt},)
        if isinstance(prompt, str)
        else check_messages(prompt, row_name)
    )
    answers = []
    for name in ("chosen", "rejected"):
        value = row.get(name)
        answers.append(
            value
            if isinstance(value, str)
            else check_messages(value, row_name)[-1]["content"]
            if value
            else ""
        )
        if not answers[-1].strip():
            raise ValueError(f"{row_name} has no {name!r}; give it a text or a chat that ends with one")
    if answers[0].strip() == answers[1].strip():
        raise ValueError(f"{row_name} has the same answer as chosen and as rejected; leave the row out")
    value = row.get("critique") or ""
    critiques = (
        [value.replace("{chosen}", good).replace("{rejected}", bad) for good, bad in (("A", "B"), ("B", "A"))]
        if isinstance(value, str)
        else list(value)
    )
    if len(critiques) != 2 or (side := row.get("split") or "") not in ("", "train", "eval"):
        raise ValueError(f"{row_name}: critique is a text or two, and split is train or eval; mend the row")
    return Preference(
        chat=tuple(chat),
        chosen=answers[0],
        rejected=answers[1],
        critiques=(critiques[0], critiques[1]),
        split=side,
    )


# ---- data and runs


def write_data(rows: Sequence[Preference], spec: Spec, folder: Path, holdout: float) -> None:
    """Write the data of both runs, the held-out pairs and judge.json into ``folder``. The same rows give the
    same bytes. Raises ValueError for a split without rows."""
    splits: dict[str, list[Preference]] = {"train": [], "eval": []}
    for row in rows:
        is_held_out = int.from_bytes(row.digest[:4], "big") < holdout * 2**32
        splits[row.split or ("eval" if is_held_out else "train")].append(row)
    for name, split_rows in splits.items():
        if not split_rows:
            raise ValueError(
                f"none of {len(rows)} pairs is for {name}; change --holdout ({holdout:g}) or the rows"
            )
        for kind, lines in (
            ("warm", _generate_warm_rows(split_rows, spec)),
            ("pairs", _generate_episodes(split_rows, spec)),
        ):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            _write_rows(folder / kind / f"{name}.jsonl", lines)
    held_out = (
        {"prompt": [*row.chat], "chosen": row.chosen, "rejected": row.rejected} for row in splits["eval"]
    )
    _write_rows(folder / "held_out.jsonl", held_out)
    write_spec(spec, folder)


def _write_rows(file: Path, rows: Iterator[Row]) -> None:
    atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _build_orders(row: Preference, spec: Spec) -> list[tuple[list[dict[str, str]], str, str]]:
    """Build (chat, verdict, critique) of both orders: first with the chosen answer as A, then as B."""
    orders = ((row.chosen, row.rejected), "A"), ((row.rejected, row.chosen), "B")
    return [
        (_build_chat(row, answers, spec), label, critique)
        for (answers, label), critique in zip(orders, row.critiques, strict=True)
    ]


def _build_chat(row: Preference, answers: tuple[str, str], spec: Spec) -> list[dict[str, str]]:
    text, _ = judging.build_prompts(spec.template, format_chat(row.chat), *answers)
    return [{"role": "user", "content": text}]


def _generate_warm_rows(rows: Sequence[Preference], spec: Spec) -> Iterator[Row]:
    for chat, label, critique in (order for row in rows for order in _build_orders(row, spec)):
        text = f"{judging.extract_critique(critique)}\nVerdict: {label}".lstrip()
        yield {"prompt": chat, "completion": [{"role": "assistant", "content": text}]}


def _generate_episodes(rows: Sequence[Preference], spec: Spec) -> Iterator[Row]:
    """Yield the rows of RL: both orders of each pair, the first order chosen by the digest of the prompt."""
    for number, preference in enumerate(rows):
        orders = _build_orders(preference, spec)
        (chat, label, critique), (swapped, _, swapped_critique) = (
            orders if preference.digest[4] % 2 else orders[::-1]
        )
        uid = f"{hashlib.sha256(json.dumps([chat, swapped]).encode()).hexdigest()[:12]}/{number}"
        row = {"uid": uid, "prompt": chat, "swapped": swapped, "answer": label}
        yield row | ({"critiques": [critique, swapped_critique]} if critique else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The two runs of a judge, by their recipes; ``warm`` comes first."""

    spec: Spec
    warm: Recipe
    rl: Recipe

    def after(self, warm: Path) -> Recipe:
        """Return the recipe of the RL that begins with the adapter of the run in ``warm``."""
        adapter = self.rl.adapter.model_copy(update={"path": str(RunFolder(warm).adapter.absolute())})
        return self.rl.model_copy(update={"adapter": adapter})


def plan_runs(source: str, overrides: Sequence[str], template: str, holdout: float) -> Plan:
    """Write the data of both runs into a folder beside them; return the recipes of the runs. Overrides hold
    for both runs; those that begin with ``warm.`` or ``rl.`` hold for one. Raises ValueError for rows and
    keys that cannot be used, and for a judge that is no adapter."""
    shared_overrides = [override for override in overrides if not override.startswith(("warm.", "rl."))]
    overrides_of = {
        kind: [override.removeprefix(kind) for override in overrides if override.startswith(kind)]
        for kind in ("warm.", "rl.")
    }
    rl = Recipe.load("judge_rl", *shared_overrides, *overrides_of["rl."])
    if rl.adapter.kind == "full":
        raise ValueError('adapter.kind is "full", and a judge is an adapter; use "lora"')
    spec = Spec(model=rl.model.path, template=template, max_tokens=rl.rollout.max_tokens)
    rows = read_preferences(source, holdout)
    digest = hashlib.sha256(repr((rows, spec, holdout)).encode()).hexdigest()[:12]
    folder = Path(rl.log.dir).absolute() / f"judge-data-{digest}"
    write_data(rows, spec, folder, holdout)
    warm = Recipe.load(
        "judge_sft", *shared_overrides, *overrides_of["warm."], f"task.source={folder / 'warm'}"
    )
    return Plan(spec=spec, warm=warm, rl=_set_source(rl, folder / "pairs"))


def _set_source(recipe: Recipe, folder: Path) -> Recipe:
    task = recipe.task.model_copy(update={"source": str(folder)})
    return recipe.model_copy(update={"task": task})


# ---- how good it is


def compute_figures(comparisons: Sequence[Compared]) -> dict[str, Any]:
    """Compute accuracy and calibration of a judge from pairs whose first answer is the better one; shares
    have 95 % Wilson intervals.

    Accuracy in each order, and of both (``accuracy``: they agree and are right); ``consistency``;
    ``unreadable`` in at least one order. ``first`` is the share of the readable verdicts for one side that
    are for the answer that stood first. ``ece`` is the error of the calibrated probabilities of both orders,
    and ``temperature`` would calibrate them further; without probabilities both are missing.
    """
    n = len(comparisons)
    tally = judging.count_verdicts([(pair.ab, pair.ba) for pair in comparisons], [Choice.A] * n)
    shares = {
        "accuracy_ab": sum(pair.ab is Choice.A for pair in comparisons) / n,
        "accuracy_ba": sum(pair.ba is Choice.B for pair in comparisons) / n,
        "accuracy": tally.accuracy,
        "consistency": tally.consistency,
        "unreadable": tally.counts.get(Choice.UNREADABLE, 0) / n,
        "tie": tally.counts.get(Choice.TIE, 0) / n,
    }
    row: dict[str, Any] = {"pairs": n}
    row |= {name: {"value": share, "interval": wilson(share, 0.0, n)} for name, share in shares.items()}
    log_odds = np.array([pair.log_odds for pair in comparisons if pair.log_odds is not None])
    labels = np.ones(len(log_odds))
    row |= {"first": tally.first, "with_probability": len(log_odds)}
    if len(log_odds):
        row["ece"] = judging.compute_calibration_error(judging.compute_probability(log_odds), labels)
        row["temperature"] = judging.fit_temperature(log_odds, labels)
    return row
