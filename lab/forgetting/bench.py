"""``ostinato bench memory``: accuracy against the budget of a context, beside baselines of the same budget.

The world is procedural, its people and phrasings held out. What forgets is trained first, once for each seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lab.forgetting import contenders
from lab.forgetting.ceiling import Knowing
from lab.forgetting.meaning import Vectors, fitted
from lab.forgetting.measure import View, area, tally
from lab.forgetting.policy import Learning, Policy, Rules, learn, prepare
from lab.forgetting.sense import Sense, learn_sense
from lab.forgetting.tokens import counter, tokenizer
from lab.forgetting.trained import Trained, remember
from lab.forgetting.words import WordPolicy, learn_words, written
from lab.forgetting.world import History, Question, history
from lab.harness import Bench, Result, Say, columns, markdown, option, seeds
from ostinato.apps.memory.importance import equal, lexical
from ostinato.apps.memory.keep import Parts

LEAST = 4  # tokens of a shortened line
Entries = list[tuple[str, int, Callable[[int], View]]]  # a contender, its seed, views within a budget
OFF = {
    "mask order": Parts(mask=False),
    "allocation": Parts(allocation=False),
    "refill": Parts(refill=False),
    "gate": Parts(gate=False),
    "drift guard": Parts(drift_guard=False),
}


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one seed has learnt: vectors of words for retrieval, words to keep, what says the same anew,
    levels."""

    vectors: Vectors
    words: WordPolicy
    sense: Sense
    policy: Policy
    log: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBench(Bench):
    """Memories within a budget of tokens on held-out histories: accuracy, evidence, false answers, cost."""

    histories: int = option(40, "Held-out histories, 20 questions each.")
    first: int = option(3000, "Seed of the first of them. Under 1020, and 5000 to 5019, were looked at.")
    tokens: int = option(2048, "Of a history.")
    shares: tuple[int, ...] = option((16, 8, 4, 2), "Budgets: the history over these.")
    seed: tuple[int, ...] = option((0, 1, 2), "Of training.", "seeds", seeds)
    train: int = option(120, "Training histories.")
    word_steps: int = option(8_000, "Of learning which words to keep.")
    levels_train: int = option(60, "Of the training histories, those that levels are learnt on.")
    steps: int = option(600, "Of learning which level a block gets.")
    parts: bool = option(False, "Also without each part of the algorithm, of the first seed.")
    growth: tuple[int, ...] = option((1, 10, 100), "Histories so many times as long, for tokens per turn.")
    refills: bool = option(False, "Instead: refills by two models, learnt first, on histories of their own.")
    refill_steps: int = option(4000, "Of learning to refill, 64 rows each.")
    locomo: str = option("", "locomo10.json: evidence that is left, by category.")
    longmemeval: str = option("", "longmemeval_s.json: the same.")
    public_budgets: tuple[int, ...] = option((1024, 2048, 4096, 8192, 16384), "In words, on public data.")

    def quick(self) -> MemoryBench:
        small = {"histories": 3, "seed": (0,), "train": 12, "word_steps": 300, "steps": 10, "growth": (1, 3)}
        return replace(self, **small, refill_steps=20)

    def measure(self, say: Say) -> dict[str, Any]:
        if self.locomo or self.longmemeval:
            from lab.forgetting.public import evidence_curves

            return evidence_curves(self.locomo, self.longmemeval, self.public_budgets, say)
        count = counter(tokenizer())
        learnt = [self._learnt(seed, count, say) for seed in self.seed]
        budgets = [self.tokens // share for share in sorted(self.shares, reverse=True)]
        about = {"eighth": self.tokens // 8, "seed_of_parts": self.seed[0] if self.seed else -1}
        if self.refills:
            return about | self._refilled(learnt, count, budgets, say)
        held_out = self._held_out(self.first, count)
        rows = self._rows(self._contenders(count, learnt), held_out, budgets, count, say)
        whole = {"full context": lambda found: lambda question: contenders.full(found, 0, count)}
        whole["evidence alone"] = lambda found: lambda question: contenders.gold(found, question)
        for name, view in whole.items():
            rows.append(
                {"contender": name, "seed": -1, "budget": self.tokens, **tally(held_out, view, count)}
            )
        cost = [self._cost(times, count, learnt[0]) for times in self.growth] if learnt else []
        learning = [one.log for one in learnt]
        return about | {"rows": rows, "areas": _areas(rows), "learning": learning, "cost": cost}

    def _held_out(self, first: int, count: contenders.Count) -> list[History]:
        seeds = range(first, first + self.histories)
        return [history(at, "eval", tokens=self.tokens, count=count) for at in seeds]

    @staticmethod
    def _rows(
        entries: Entries, held_out: Sequence[History], budgets: Sequence[int], count: contenders.Count,
        say: Say,
    ) -> list[dict[str, Any]]:  # fmt: skip
        rows = []
        for name, seed, make in entries:
            for budget in budgets:
                found = tally(held_out, make(budget), count)
                rows.append({"contender": name, "seed": seed, "budget": budget, **found})
                say(f"{name:24} seed {seed} budget {budget:5}   {found['accuracy']:.3f}")
        return rows

    def _learnt(self, seed: int, count: contenders.Count, say: Say) -> Learnt:
        began = time.process_time()
        first = 100_000 * (seed + 1)
        found = [history(first + at, "train", count=count, questions=60) for at in range(self.train)]
        vectors, words = fitted(found), WordPolicy(count)
        kept = learn_words(words, found, seed, steps=self.word_steps)
        sense = learn_sense(words, found, seed)
        ready = [
            prepare(one, count, sense, LEAST, partial(written, words)) for one in found[: self.levels_train]
        ]
        log: list[dict[str, float]] = []
        settings = Learning(steps=self.steps)
        policy = learn(
            ready, shrinking, seed, settings, lambda row: (log.append(row), say(f"seed {seed} {row}"))[0]
        )
        took = round(time.process_time() - began, 1)
        return Learnt(
            vectors, words, sense, policy, {"seed": seed, "words": kept, "levels": log, "cpu_s": took}
        )

    def _refilled(
        self, learnt: Sequence[Learnt], count: contenders.Count, budgets: Sequence[int], say: Say
    ) -> dict[str, Any]:
        """The memory of each seed with refills by models, by words learnt by RL and by extracts; of the first
        seed also without what guards a writer."""
        from lab.forgetting.refills import extracts, judged, taught

        held_out = self._held_out(self.first + 1000, count)
        blocks, rows, learning = [], [], []
        for one in learnt:
            seed = one.log["seed"]
            models, log = taught(seed, self.refill_steps, 2 * self.train, say)
            learning += log
            for name, refiller in ({"extracts": extracts(), "words by RL": one.words} | models).items():
                row = judged(held_out, refiller, count, LEAST)
                row |= models[name].per_block() if name in models else {}
                blocks.append({"refill": name, "seed": seed, **row})
                say(f"{name} seed {seed}: {row}")
                kept = lru_cache(maxsize=None)(refiller)  # the same arguments give the same text
                entries = [(name, seed, _trained(count, one, refiller=kept))]
                if one is learnt[0] and name in ("autoregressive", "diffusion, a pass a token"):
                    off = ("gate", "drift guard")
                    entries += [
                        (f"{name} without {part}", seed, _trained(count, one, refiller=kept, parts=OFF[part]))
                        for part in off
                    ]
                rows += self._rows(entries, held_out, budgets, count, say)
        return {"blocks": blocks, "rows": rows, "areas": _areas(rows), "learning": learning}

    def _contenders(self, count: contenders.Count, learnt: Sequence[Learnt]) -> Entries:
        rows: Entries = [
            ("recency", -1, _fixed(contenders.recency, count)),
            ("uniform summary", -1, _fixed(contenders.uniform, count)),
            ("overwrite", -1, _fixed(contenders.overwrite, count)),
            ("BM25", -1, _ranked(contenders.bm25, count)),
            ("hashed embedding", -1, _ranked(contenders.by_hash, count)),
            ("equal memory", -1, _memory(count, importance=equal)),
            ("lexical memory", -1, _memory(count, importance=lexical())),
        ]
        rows += [
            ("fitted embedding", -1, _ranked(contenders.by_meaning(one.vectors), count)) for one in learnt[:1]
        ]
        rows += [("ceiling", -1, _knowing(count, one.words)) for one in learnt[:1]]
        for one in learnt:
            seed = one.log["seed"]
            rows.append(("trained memory", seed, _trained(count, one)))
            if self.parts and one is learnt[0]:
                rows.append(("all parts", seed, _trained(count, one)))
                rows.append(
                    ("without RL of levels", seed, _memory(count, importance=lexical(), refiller=one.words))
                )
                rows.append(("without RL of words", seed, _trained(count, one, refiller=None)))
                blind = replace(one, sense=replace(one.sense, bias=-np.inf))
                rows.append(("without what replaces", seed, _trained(count, blind)))
                rows += [
                    (f"without {name}", seed, _trained(count, one, parts=parts))
                    for name, parts in OFF.items()
                ]
        return rows

    def _cost(self, times: int, count: contenders.Count, one: Learnt) -> dict[str, Any]:
        """Tokens that the memory reads and writes for a turn, at one eighth of the shortest history."""
        found = history(0, "eval", tokens=self.tokens * times, count=count)
        rules = Rules(budget=self.tokens // 8)
        began = time.process_time()
        held = remember(
            found, rules, count, refiller=one.words, trained=Trained(one.policy, one.sense, count, rules)
        )
        moved = held.counters.get("memory/read", 0) + held.counters.get("memory/wrote", 0)
        turns = len(found.turns)
        return {
            "history_tokens": sum(count(turn.line) for turn in found.turns),
            "turns": turns,
            "tokens_per_turn": round(moved / turns, 3),
            "most_tokens": held.tokens,
            "budget": rules.budget,
            "ms_per_turn": round(1e3 * (time.process_time() - began) / turns, 3),
        }

    @staticmethod
    def table(result: Result) -> Any:
        if "public" in result:
            from lab.forgetting.public import table

            return table(result)
        if "blocks" in result:
            return page(result)
        budgets = sorted({row["budget"] for row in result["rows"] if row["contender"] not in WHOLE})
        names = list(dict.fromkeys(row["contender"] for row in result["rows"]))
        lines = []
        for name in names:
            mine = [row for row in result["rows"] if row["contender"] == name]
            cells = [
                _mean([row["accuracy"] for row in mine if row["budget"] == budget]) for budget in budgets
            ]
            if name in WHOLE:
                cells = [_mean([row["accuracy"] for row in mine])] * len(budgets)
            last = [_mean([row[key] for row in mine]) for key in ("false", "unsupported")]
            lines.append([name, *cells, f"{result['areas'].get(name, float('nan')):.3f}", *last])
        return columns(
            "accuracy by budget", ["context", *map(str, budgets), "area", "false", "unsupported"], lines
        )


WHOLE = ("full context", "evidence alone")


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if values else ""


def _areas(rows: Sequence[Result]) -> dict[str, float]:
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        found.setdefault(row["contender"], {}).setdefault(row["budget"], []).append(row["accuracy"])
    return {
        name: round(area([(budget, float(np.mean(some))) for budget, some in sorted(mine.items())]), 4)
        for name, mine in found.items()
        if len(mine) > 1
    }


def page(data: Result) -> str:
    """The tables of lab/studies/2026-11-24-memory-bench/page.md."""
    rows = data["rows"]
    budgets = sorted({row["budget"] for row in rows if row["contender"] not in WHOLE})
    part = ("all parts", "without")
    main = [row["contender"] for row in rows if not row["contender"].startswith(part)]
    parts = [row["contender"] for row in rows if row["contender"].startswith(part)]
    head = ["context", *(f"{budget} tokens" for budget in budgets), "area", "false answers"]
    table = markdown(head, [_line(data, name, budgets) for name in dict.fromkeys(main)])
    if "blocks" in data:
        return f"{_blocks(data)}\n\nThe trained memory of each seed with these refills:\n\n{table}"
    if not parts:
        return table
    off = [_line(data, name, budgets) for name in dict.fromkeys(parts)]
    what = f"The trained memory of seed {data['seed_of_parts']} without its parts:"
    return f"{table}\n\n{what}\n\n{markdown(head, off)}"


def _blocks(data: Result) -> str:
    """What each refiller writes, block by block."""
    names = {
        "passed": "passes the gate", "new_words": "of these with a new word", "kept": "facts kept",
        "passes": "passes", "tokens": "tokens run", "ms_per_block": "ms",
    }  # fmt: skip
    lines = []
    for refill in dict.fromkeys(row["refill"] for row in data["blocks"]):
        mine = [row for row in data["blocks"] if row["refill"] == refill]
        cells = [_range([row[key] for row in mine]) if key in mine[0] else "" for key in names]
        lines.append([refill, *cells])
    return markdown(["refill", *names.values()], lines)


def _line(data: Result, name: str, budgets: Sequence[int]) -> list[str]:
    mine = [row for row in data["rows"] if row["contender"] == name]
    if name in WHOLE:
        return [
            name,
            *[""] * (len(budgets) - 1),
            _range([row["accuracy"] for row in mine]),
            "",
            _mean([row["false"] for row in mine]),
        ]
    cells = [_range([row["accuracy"] for row in mine if row["budget"] == budget]) for budget in budgets]
    false = [row["false"] for row in mine if row["budget"] == data["eighth"]]
    return [name, *cells, f"{data['areas'][name]:.3f}", _mean(false)]


def _range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.3f} to {max(values):.3f})" if min(values) < max(values) else ""
    return _mean(values) + spread


def shrinking(progress: float, rng: np.random.Generator, tokens: int) -> int:
    """The curriculum of budgets: half and a quarter of the history first, a sixteenth last."""
    shares = [2, 4, 8, 16] if progress > 0.4 else [2, 4, 8] if progress > 0.2 else [2, 4]
    return max(96, int(tokens / rng.choice(shares)))


def _fixed(make: Any, count: contenders.Count) -> Callable[[int], View]:
    """Of a context that does not know the question."""

    def at(budget: int) -> View:
        def view(found: History) -> Callable[[Question], contenders.Lines]:
            lines = make(found, budget, count)
            return lambda question: lines

        return view

    return at


def _ranked(make: Callable[[History], contenders.Ranking], count: contenders.Count) -> Callable[[int], View]:
    """Of retrieval: the turns that are worth most for the question, within the budget."""

    def at(budget: int) -> View:
        def view(found: History) -> Callable[[Question], contenders.Lines]:
            ask = make(found)
            return lambda question: contenders.within(ask(question), budget, count)

        return view

    return at


def _memory(count: contenders.Count, **how: Any) -> Callable[[int], View]:
    def make(found: History, budget: int, count: contenders.Count) -> contenders.Lines:
        return remember(found, Rules(budget=budget), count, **how).lines

    return _fixed(make, count)


def _knowing(count: contenders.Count, words: WordPolicy) -> Callable[[int], View]:
    def make(found: History, budget: int, count: contenders.Count) -> contenders.Lines:
        rules = Rules(budget=budget)
        return remember(
            found, rules, count, refiller=words, trained=Knowing(found, words, count, rules)
        ).lines

    return _fixed(make, count)


def _trained(count: contenders.Count, one: Learnt, **how: Any) -> Callable[[int], View]:
    def make(found: History, budget: int, count: contenders.Count) -> contenders.Lines:
        rules = Rules(budget=budget)
        trained = Trained(one.policy, one.sense, count, rules)
        return remember(found, rules, count, **({"refiller": one.words, "trained": trained} | how)).lines

    return _fixed(make, count)


__all__ = ["MemoryBench", "page", "shrinking"]
