"""LoCoMo and LongMemEval, from files that the user has: their licences keep them out of the repository.

Checked on load: the hash (LoCoMo) and all counts. What is measured needs no model and no judge: how much
of the gold evidence is in a context of so many words. Nothing is fitted here.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.forgetting import contenders
from lab.forgetting.f1 import normal, stem
from lab.forgetting.world import History, Question, Turn
from lab.harness import Result, Say, columns
from lab.paired import wilson
from ostinato.apps.memory.blocks import Kept, MemoryState
from ostinato.apps.memory.blocks import Turn as MemoryTurn
from ostinato.apps.memory.facts import MONTHS
from ostinato.apps.memory.importance import Importance, equal, lexical
from ostinato.apps.memory.keep import Memory, Sizes
from ostinato.inputs import parse_json

LOCOMO_SHA256 = "79fa87e90f04081343b8c8debecb80a9a6842b76a7aa537dc9fdf651ea698ff4"
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
LOCOMO_COUNTS: dict[str, int] = {
    "conversations": 10,
    "sessions": 272,
    "turns": 5882,
    "words": 133_772,
    "turns with image": 910,
    "questions": 1986,
    "multi-hop": 282,
    "temporal": 321,
    "open-domain": 96,
    "single-hop": 841,
    "adversarial": 446,
    "only adversarial_answer": 444,
}
LONGMEMEVAL_COUNTS: dict[str, int] = {
    "questions": 500,
    "single-session-user": 70,
    "single-session-assistant": 56,
    "single-session-preference": 30,
    "multi-session": 133,
    "temporal-reasoning": 133,
    "knowledge-update": 78,
}


@dataclass(frozen=True, slots=True)
class Public:
    name: str
    histories: tuple[History, ...]
    days: tuple[tuple[str, ...], ...]  # of each turn of each history
    counts: Mapping[str, int]
    sha256: str
    dangling: int  # evidence ids without a turn


def locomo(file: Path, counts: Mapping[str, int] = LOCOMO_COUNTS, sha256: str = LOCOMO_SHA256) -> Public:
    """Raises ValueError where the hash or a count is another."""
    data = file.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise ValueError(f"{file} has the sha256 {found}; LoCoMo's locomo10.json has {sha256}")
    seen: Counter[str] = Counter()
    histories, days, dangling = [], [], 0
    for record in parse_json(data.decode()):
        turns, of, when = _locomo_turns(record["conversation"], seen)
        questions = []
        for one in record["qa"]:
            ids = [
                f"D{a}:{b}"
                for text in one.get("evidence") or ()
                for a, b in re.findall(r"D:?(\d+):(\d+)", text)
            ]
            dangling += sum(id not in of for id in ids)
            kind = CATEGORIES[one["category"]]
            seen.update(["questions", kind])
            seen["only adversarial_answer"] += "answer" not in one
            gold = str(one.get("answer", one.get("adversarial_answer", "")))
            questions.append(
                Question(kind, one["question"], (), gold, tuple(of[id] for id in ids if id in of))
            )
        seen["conversations"] += 1
        histories.append(History(tuple(turns), tuple(questions), ()))
        days.append(tuple(when))
    _check(file, seen, counts)
    return Public("LoCoMo", tuple(histories), tuple(days), dict(seen), sha256, dangling)


def _locomo_turns(
    talk: Mapping[str, Any], seen: Counter[str]
) -> tuple[list[Turn], dict[str, int], list[str]]:
    turns: list[Turn] = []
    of: dict[str, int] = {}
    days: list[str] = []
    sessions = sorted(
        int(key.split("_")[1]) for key, value in talk.items() if re.fullmatch(r"session_\d+", key) and value
    )
    for number in sessions:
        seen["sessions"] += 1
        day = day_of(str(talk.get(f"session_{number}_date_time", "")))
        for one in talk[f"session_{number}"]:
            image = f" [image: {one['blip_caption']}]" if one.get("blip_caption") else ""
            seen["turns"] += 1
            seen["words"] += len(one["text"].split())
            seen["turns with image"] += bool(one.get("img_url"))
            of[one["dia_id"]] = len(turns)
            turns.append(Turn(len(turns), one["speaker"], one["text"] + image))
            days.append(day)
    return turns, of, days


def _month(name: str) -> int:
    return MONTHS.index(name.lower()) + 1


def day_of(text: str) -> str:
    """ "1:56 pm on 8 May, 2023" and "2023/05/20 (Sat) 02:21" as 2023-05-08; "" for neither."""
    if found := re.search(r"(\d{1,2}) ([A-Z][a-z]+),? (\d{4})", text):
        day, month, year = found.groups()
        return f"{year}-{_month(month):02}-{int(day):02}" if month.lower() in MONTHS else ""
    found = re.search(r"(\d{4})/(\d\d)/(\d\d)", text)
    return "-".join(found.groups()) if found else ""


def longmemeval(file: Path, counts: Mapping[str, int] = LONGMEMEVAL_COUNTS) -> Public:
    """Raises ValueError where a count is another. Its files are revised from time to time: the hash is
    reported, not checked."""
    data = file.read_bytes()
    seen: Counter[str] = Counter()
    histories, days = [], []
    for record in parse_json(data.decode()):
        turns: list[Turn] = []
        when: list[str] = []
        evidence: list[int] = []
        for day, session in zip(record["haystack_dates"], record["haystack_sessions"], strict=True):
            for one in session:
                if one.get("has_answer"):
                    evidence.append(len(turns))
                turns.append(Turn(len(turns), one["role"], one["content"]))
                when.append(day_of(day))
        kind = record["question_type"]
        seen.update(["questions", kind])
        question = Question(kind, record["question"], (), str(record["answer"]), tuple(evidence))
        histories.append(History(tuple(turns), (question,), ()))
        days.append(tuple(when))
    _check(file, seen, counts)
    return Public(
        "LongMemEval", tuple(histories), tuple(days), dict(seen), hashlib.sha256(data).hexdigest(), 0
    )


def _check(file: Path, seen: Mapping[str, int], counts: Mapping[str, int]) -> None:
    if odd := {name: (seen.get(name, 0), n) for name, n in counts.items() if seen.get(name, 0) != n}:
        name, (found, n) = next(iter(odd.items()))
        raise ValueError(f"{file} has {found} {name} where {n} are expected; use the published file")


def words(text: str) -> int:
    """What budgets of public data are counted in."""
    return len(text.split())


def remembered(found: History, days: Sequence[str], budget: int, importance: Importance) -> contenders.Lines:
    memory = Memory(sizes=Sizes.of(budget), count=words, originals=Kept(), importance=importance)
    state = MemoryState()
    for turn, day in zip(found.turns, days, strict=True):
        state = memory.append(state, MemoryTurn(speaker=turn.speaker, text=turn.text, day=day))
    texts: dict[int, list[str]] = {}
    for block in state.blocks:
        texts.setdefault(block.turn, []).append(block.text)
    return [(found.turns[at], " ".join(some)) for at, some in texts.items()]


Make = Callable[[History, Sequence[str], Question, int], contenders.Lines]


def _for_all(make: Callable[[History, int, contenders.Count], contenders.Lines]) -> Make:
    return lambda found, days, question, budget: make(found, budget, words)


def _for_each(make: Callable[[History], contenders.Ranking]) -> Make:
    ready: dict[int, tuple[History, contenders.Ranking]] = {}  # of the last history, for all its questions

    def made(found: History, days: Sequence[str], question: Question, budget: int) -> contenders.Lines:
        if id(found) not in ready:
            ready.clear()
            ready[id(found)] = found, make(found)
        return contenders.within(ready[id(found)][1](question), budget, words)

    return made


CONTENDERS: dict[str, tuple[bool, Make]] = {  # whether it knows the question
    "recency": (False, _for_all(contenders.recency)),
    "uniform summary": (False, _for_all(contenders.uniform)),
    "overwrite": (False, _for_all(contenders.overwrite)),
    "equal memory": (False, lambda found, days, _, budget: remembered(found, days, budget, equal)),
    "lexical memory": (False, lambda found, days, _, budget: remembered(found, days, budget, lexical())),
    "BM25": (True, _for_each(contenders.bm25)),
    "hashed embedding": (True, _for_each(contenders.by_hash)),
}


def evidence_curves(
    locomo_file: str, longmemeval_file: str, budgets: Sequence[int], say: Say
) -> dict[str, Any]:
    rows, sources = [], []
    for load, file in ((locomo, locomo_file), (longmemeval, longmemeval_file)):
        if file:
            data = load(Path(file))
            about = {"name": data.name, "sha256": data.sha256}
            sources.append(about | {"counts": data.counts, "dangling": data.dangling})
            rows += _curves(data, budgets, say)
    return {"public": sources, "rows": rows}


def _curves(data: Public, budgets: Sequence[int], say: Say) -> list[dict[str, Any]]:
    rows = []
    for name, (each, make) in CONTENDERS.items():
        for budget in budgets:
            sums: dict[str, list[float]] = {}
            for found, days in zip(data.histories, data.days, strict=True):
                questions = [one for one in found.questions if one.evidence]
                lines = make(found, days, questions[0], budget) if questions and not each else []
                for question in questions:
                    mine = make(found, days, question, budget) if each else lines
                    kept = _kept(found, question, mine)
                    for kind in (question.kind, "all"):
                        sums[kind] = [
                            a + b for a, b in zip(sums.get(kind, [0.0] * 5), [*kept, 1.0], strict=True)
                        ]
            for kind, (there, verbatim, whole, left, n) in sums.items():
                shares = {"evidence": there, "verbatim": verbatim, "all_evidence": whole, "words": left}
                row = {"data": data.name, "contender": name, "budget": budget, "kind": kind}
                row |= {key: round(value / n, 4) for key, value in shares.items()} | {"questions": int(n)}
                rows.append(row | {"interval": [round(one, 4) for one in wilson(int(whole), int(n))]})
            say(f"{data.name}: {name:18} budget {budget:6}   evidence {sums['all'][0] / sums['all'][4]:.3f}")
    return rows


def _kept(found: History, question: Question, lines: contenders.Lines) -> tuple[float, float, float, float]:
    """Of the gold evidence of a question: the share of turns in the context in some form; verbatim;
    whether all are there in some form; and of the answer's stemmed words that its turns have the share
    that is left."""
    texts = {turn.idx: text for turn, text in lines}
    n = len(question.evidence)
    there = [at in texts for at in question.evidence]
    verbatim = [at in texts and found.turns[at].text in texts[at] for at in question.evidence]
    before = _stems(" ".join(found.turns[at].text for at in question.evidence)) & _stems(question.answer)
    left = _stems(" ".join(texts.get(at, "") for at in question.evidence))
    share = len(before & left) / len(before) if before else sum(there) / n
    return sum(there) / n, sum(verbatim) / n, float(all(there)), share


def _stems(text: str) -> set[str]:
    return set(map(stem, normal(text).split()))


def table(result: Result) -> Any:
    budgets = sorted({row["budget"] for row in result["rows"]})
    lines = []
    for data, name in dict.fromkeys((row["data"], row["contender"]) for row in result["rows"]):
        mine = {
            row["budget"]: row
            for row in result["rows"]
            if (row["data"], row["contender"], row["kind"]) == (data, name, "all")
        }
        lines.append([f"{data}: {name}", *(f"{mine[budget]['evidence']:.3f}" for budget in budgets)])
    return columns(
        "share of the gold evidence in the context, by budget in words", ["context", *budgets], lines
    )


__all__ = ["evidence_curves", "locomo", "longmemeval", "table"]
