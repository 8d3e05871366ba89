"""A judge out of pairs: the rows of its warm start and of its RL, the two runs, and how good it is.

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
from ostinato.apps.product.judge import Compared, Spec, question
from ostinato.apps.product.judges import write_spec
from ostinato.apps.product.judging import Choice
from ostinato.apps.product.pairs import deduplicate, extract, split
from ostinato.apps.product.store import open_store
from ostinato.config import Recipe
from ostinato.env.rows import messages, raw_rows
from ostinato.env.tasks import check_source
from ostinato.observe.stats import wilson
from ostinato.run import RunFolder, atomic_write

log = logging.getLogger(__name__)
STORES = (".db", ".sqlite", ".sqlite3")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A row of pairs. ``critiques``: where the chosen answer is A, and where it is B."""

    chat: tuple[Mapping[str, str], ...]
    chosen: str
    rejected: str
    critiques: tuple[str, str] = ("", "")
    split: str = ""  # "train" or "eval", where the row says so

    @property
    def digest(self) -> bytes:
        """Of the prompt alone: rows with the same prompt fall on the same side."""
        return hashlib.sha256(json.dumps([*map(dict, self.chat)]).encode()).digest()


def preferences(source: str, holdout: float = 0.0) -> list[Preference]:
    """The rows of a .jsonl or .parquet file: prompt (or messages), chosen, rejected, and, if there is one,
    critique: a text with {chosen} and {rejected} for the letters, or two texts. Or the pairs that a store of
    feedback shows, the last ``holdout`` of which are "eval". ValueError by row."""
    if source.startswith(("postgresql://", "postgres://")) or Path(source).suffix in STORES:
        return _read_store(source, holdout)
    rows, _ = raw_rows(check_source(source), "train", "", 0.0)
    found = [_preference(row, f"row {number} of {source}") for number, row in rows]
    if not found:
        raise ValueError(f"{source} has no rows; give it pairs (docs/judge.md)")
    return found


def _read_store(source: str, holdout: float) -> list[Preference]:
    """Of answers and events that may be trained on; no user and no prompt is on both sides."""
    if "://" not in source and not Path(source).is_file():
        raise ValueError(f"there is no store {source}; give the one of ostinato serve --feedback")
    with open_store(source) as store:
        joined = list(store.joined())
    events = [event for one in joined for event in one.events]
    found = extract([one.exchange for one in joined], events, time.time())
    pairs, repeated = deduplicate(found.pairs, math.inf)
    if not pairs:
        raise ValueError(
            f"{len(events)} events on {len(joined)} answers in {source} show no pair: an edit is one, "
            "another answer that is liked where the first was not, and the better of two side by side; a "
            f"thumb alone is none {dict(found.counts) or ''}".rstrip()
        )
    end = float(np.quantile([pair.ts for pair in pairs], 1 - holdout)) if holdout else math.inf
    parts = split(pairs, (end, end))
    if holdout and not (parts.train and parts.test):  # of a single user all would be on one side
        log.info("pairs        of too few users to hold some of them out: parted by time and prompt alone")
        parts = split(pairs, (end, end), users=False)
    log.info(
        f"pairs        {dict(found.counts)}, repeated {repeated['repeated']}, dropped {dict(parts.dropped)}"
    )
    return [
        Preference(chat=tuple(_plain(one.messages)), chosen=one.chosen, rejected=one.rejected, split=name)
        for name, part in (("train", parts.train), ("eval", parts.test))
        for one in part
    ]


def _plain(chat: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    return ({"role": str(one["role"]), "content": str(one.get("content") or "")} for one in chat)


def _preference(row: Mapping[str, Any], where: str) -> Preference:
    prompt = row.get("prompt") or row.get("messages") or row.get("question")
    if not prompt:
        raise ValueError(f"{where} has no 'prompt'; give it a text or a chat")
    chat = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else messages(prompt, where)
    answers = []
    for name in ("chosen", "rejected"):
        given = row.get(name)
        answers.append(
            given if isinstance(given, str) else messages(given, where)[-1]["content"] if given else ""
        )
        if not answers[-1].strip():
            raise ValueError(f"{where} has no {name!r}; give it a text or a chat that ends with one")
    if answers[0].strip() == answers[1].strip():
        raise ValueError(f"{where} has the same answer as chosen and as rejected; leave the row out")
    given = row.get("critique") or ""
    two = (
        [given.replace("{chosen}", good).replace("{rejected}", bad) for good, bad in (("A", "B"), ("B", "A"))]
        if isinstance(given, str)
        else list(given)
    )
    if len(two) != 2 or (side := row.get("split") or "") not in ("", "train", "eval"):
        raise ValueError(f"{where}: critique is a text or two, and split is train or eval; mend the row")
    return Preference(
        chat=tuple(chat), chosen=answers[0], rejected=answers[1], critiques=(two[0], two[1]), split=side
    )


# ---- data and runs


def write_data(rows: Sequence[Preference], spec: Spec, folder: Path, holdout: float) -> None:
    """What both runs read, in ``folder``; the same rows give the same bytes."""
    splits: dict[str, list[Preference]] = {"train": [], "eval": []}
    for one in rows:
        held = int.from_bytes(one.digest[:4], "big") < holdout * 2**32
        splits[one.split or ("eval" if held else "train")].append(one)
    for name, kept in splits.items():
        if not kept:
            raise ValueError(
                f"none of {len(rows)} pairs is for {name}; change --holdout ({holdout:g}) or the rows"
            )
        for kind, lines in (("warm", _warm(kept, spec)), ("pairs", _episodes(kept, spec))):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            _write(folder / kind / f"{name}.jsonl", lines)
    held_out = (
        {"prompt": [*one.chat], "chosen": one.chosen, "rejected": one.rejected} for one in splits["eval"]
    )
    _write(folder / "held_out.jsonl", held_out)
    write_spec(spec, folder)


def _write(file: Path, rows: Iterator[Row]) -> None:
    atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _orders(one: Preference, spec: Spec) -> list[tuple[list[dict[str, str]], str, str]]:
    """(chat, verdict, critique) where the chosen answer is A, and where it is B."""
    ways = ((one.chosen, one.rejected), "A"), ((one.rejected, one.chosen), "B")
    return [
        (_chat(one, answers, spec), right, critique)
        for (answers, right), critique in zip(ways, one.critiques, strict=True)
    ]


def _chat(one: Preference, answers: tuple[str, str], spec: Spec) -> list[dict[str, str]]:
    text, _ = judging.pairwise_prompts(spec.template, question(one.chat), *answers)
    return [{"role": "user", "content": text}]


def _warm(rows: Sequence[Preference], spec: Spec) -> Iterator[Row]:
    for chat, right, critique in (order for row in rows for order in _orders(row, spec)):
        text = f"{judging.critique_of(critique)}\nVerdict: {right}".lstrip()
        yield {"prompt": chat, "completion": [{"role": "assistant", "content": text}]}


def _episodes(rows: Sequence[Preference], spec: Spec) -> Iterator[Row]:
    for number, one in enumerate(rows):
        orders = _orders(one, spec)
        (chat, right, critique), (swapped, _, other) = orders if one.digest[4] % 2 else orders[::-1]
        uid = f"{hashlib.sha256(json.dumps([chat, swapped]).encode()).hexdigest()[:12]}/{number}"
        row = {"uid": uid, "prompt": chat, "swapped": swapped, "answer": right}
        yield row | ({"critiques": [critique, other]} if critique else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The two runs of a judge, by their recipes; ``warm`` comes first."""

    spec: Spec
    warm: Recipe
    rl: Recipe

    def after(self, warm: Path) -> Recipe:
        """The RL that goes on from the run in ``warm``."""
        adapter = self.rl.adapter.model_copy(update={"path": str(RunFolder(warm).adapter.absolute())})
        return self.rl.model_copy(update={"adapter": adapter})


def plan(source: str, overrides: Sequence[str], template: str, holdout: float) -> Plan:
    """Write the data of both runs beside them. Overrides hold for both, those of ``warm.`` and ``rl.`` for
    one. Raises ValueError for rows and keys that cannot be used."""
    both = [override for override in overrides if not override.startswith(("warm.", "rl."))]
    own = {
        kind: [override.removeprefix(kind) for override in overrides if override.startswith(kind)]
        for kind in ("warm.", "rl.")
    }
    rl = Recipe.load("judge_rl", *both, *own["rl."])
    if rl.adapter.kind == "full":
        raise ValueError('adapter.kind is "full", and a judge is an adapter; use "lora"')
    spec = Spec(model=rl.model.path, template=template, max_tokens=rl.rollout.max_tokens)
    rows = preferences(source, holdout)
    digest = hashlib.sha256(repr((rows, spec, holdout)).encode()).hexdigest()[:12]
    folder = Path(rl.log.dir).absolute() / f"judge-data-{digest}"
    write_data(rows, spec, folder, holdout)
    warm = Recipe.load("judge_sft", *both, *own["warm."], f"task.source={folder / 'warm'}")
    return Plan(spec=spec, warm=warm, rl=_source(rl, folder / "pairs"))


def _source(recipe: Recipe, folder: Path) -> Recipe:
    task = recipe.task.model_copy(update={"source": str(folder)})
    return recipe.model_copy(update={"task": task})


# ---- how good it is


def figures(found: Sequence[Compared]) -> dict[str, Any]:
    """Of pairs whose first answer is the better one, with 95 % Wilson intervals: accuracy in each order, of
    both (``accuracy``: they agree and are right), ``consistency``, ``unreadable`` in one order at least.
    ``first``: of readable verdicts for one side, those for whichever stood first. ``ece``: of the calibrated
    probabilities over both orders, which ``temperature`` would calibrate further."""
    n = len(found)
    whole = judging.tally([(one.ab, one.ba) for one in found], [Choice.A] * n)
    shares = {
        "accuracy_ab": sum(one.ab is Choice.A for one in found) / n,
        "accuracy_ba": sum(one.ba is Choice.B for one in found) / n,
        "accuracy": whole.accuracy,
        "consistency": whole.consistency,
        "unreadable": whole.counts.get(Choice.UNREADABLE, 0) / n,
        "tie": whole.counts.get(Choice.TIE, 0) / n,
    }
    row: dict[str, Any] = {"pairs": n}
    row |= {name: {"value": share, "interval": wilson(share, 0.0, n)} for name, share in shares.items()}
    odds = np.array([one.log_odds for one in found if one.log_odds is not None])
    right = np.ones(len(odds))
    row |= {"first": whole.first, "with_probability": len(odds)}
    if len(odds):
        row["ece"] = judging.calibration_error(judging.probability(odds), right)
        row["temperature"] = judging.temperature(odds, right)
    return row
