"""The policy of forgetting: for each masked block a level, by a softmax over features of the block and the
room.

    masked = those of which the policy would leave the smallest share
    level  ~ softmax(W phi(block, state))    W: one row for each level
    phi    = hashed words that a refill would keep, names, numbers, length, age, level, whether a later turn
             repeats the same (``sense``), the tokens of the history over the budget, the room

It is trained in ``Replay``, which has the same rules as ``ostinato.apps.memory`` on numbers that are computed
once for each history (a test compares the two), with groups of re-rollouts from one memory state (LoGo-GRPO,
arXiv 2605.21768): the advantage of a rollout is its reward minus the mean of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.forgetting.meaning import bucket, is_name, is_number
from lab.forgetting.sense import Sense
from lab.forgetting.world import UNKNOWN, History, Turn, followed, reply, words_of
from ostinato.apps.memory.blocks import LEVELS
from ostinato.apps.memory.refill import extract

Count = Callable[[str], int]
HASHED = 1024
GONE = len(LEVELS) - 1
DYNAMIC = (
    "bias",
    "length",
    "names",
    "numbers",
    "tool",
    "age",
    "level",
    "again",
    "again now",
    "tightness",
    "room",
)
FEATURES = HASHED + len(DYNAMIC)


def hashed_words(content: Sequence[str]) -> list[int]:
    return sorted({bucket(word, HASHED) for word in content})


@dataclass(slots=True)
class Prepared:
    """A history as numbers. n turns, L levels."""

    found: History
    tokens: np.ndarray  # [n, L] of a line at each level; the first verbatim, the last 0
    rooms: np.ndarray  # [n, L] what a line may have at each level
    intact: np.ndarray  # [n, L] whether its fact is still there
    texts: list[list[str]]  # [n][L]
    words: list[list[int]]  # [n] hashed
    fixed: np.ndarray  # [n, 4] length, names, numbers, tool
    again: np.ndarray  # [n, n] float32: how likely turns up to j (column) say anew what turn i does
    seen: np.ndarray  # [n + 1] tokens of the history up to a turn


def prepare(
    found: History, count: Count, sense: Sense, least: int, write: Callable[..., str] | None
) -> Prepared:
    """``write(turn, room)`` is the text of a refill within ``room`` tokens of its line."""
    turns = found.turns
    rooms = np.array([offered(turn.speaker, turn.text, count(turn.line), count, least) for turn in turns])
    texts = [
        [
            turn.line,
            *(write(turn, int(room)) if write and room >= least else "" for room in rooms[turn.idx, 1:]),
        ]
        for turn in turns
    ]
    tokens = np.array([[count(text) if text else 0 for text in mine] for mine in texts])
    each = zip(turns, texts, strict=True)
    intact = np.array([[_intact(turn, text) for text in mine] for turn, mine in each])
    subjects = [sense.subject(turn.speaker, turn.text) for turn in turns]
    content = [sense.content(turn.text) for turn in turns]
    again = np.zeros((len(turns), len(turns)), np.float32)
    for j in range(len(turns)):
        again[:j, j:] = np.maximum(
            again[:j, j:],
            [
                [sense.replaced(mine, content[j]) if subject == subjects[j] else 0.0]
                for mine, subject in zip(content[:j], subjects[:j], strict=True)
            ]
            or 0.0,
        )
    fixed = np.array([fixed_of(turn.speaker, turn.text, tokens[turn.idx, 0]) for turn in turns])
    return Prepared(
        found, tokens, rooms, intact, texts, [hashed_words(mine) for mine in content], fixed, again,
        np.concatenate([[0], np.cumsum(tokens[:, 0])]),
    )  # fmt: skip


def offered(speaker: str, text: str, whole: int, count: Count, least: int) -> list[int]:
    """[L] what a line may have at each level, as ``Memory`` offers them: 0 where not even an extract fits."""
    rooms = [whole]
    for share in LEVELS[1:]:
        room = math.ceil(share * whole)
        there = room >= least and extract(text, lambda part, room=room: count(f"{speaker}: {part}") <= room)
        rooms.append(room if there else 0)
    return rooms


def _intact(turn: Turn, text: str) -> bool:
    return turn.fact is not None and turn.fact.words <= set(words_of(text))


def fixed_of(speaker: str, text: str, whole: int) -> tuple[float, float, float, float]:
    found = words_of(text)
    return (
        (whole - 12) / 6,
        float(sum(map(is_name, found))) / 2,
        float(sum(map(is_number, found))) / 2,
        float(speaker == "tool"),
    )


@dataclass(slots=True)
class State:
    """Blocks that are in the context, by turn, with their levels. ``now``: turns that were appended."""

    level: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    now: int = 0
    over: int = 0  # tokens that the policy was over its room

    def copy(self) -> State:
        return State(dict(self.level), self.tokens, self.now, self.over)


@dataclass(slots=True)
class Policy:
    weights: np.ndarray = field(default_factory=lambda: np.zeros((len(LEVELS), FEATURES)))

    def fixed(self, one: Prepared) -> np.ndarray:
        """[n, L]: what words, length, names, numbers and tool add to the logits."""
        words = np.stack([self.weights[:, at].sum(1) for at in one.words])
        return words + one.fixed @ self.weights[:, HASHED + 1 : HASHED + 5].T


def changing(ages: Any, levels: np.ndarray, again: np.ndarray, over: float, room: float) -> np.ndarray:
    """[k, D]: the features that change, the fixed ones 0. ``over``: tokens of the history, ``room``: those to
    be freed, over the budget."""
    phi = np.zeros((len(levels), len(DYNAMIC)))
    phi[:, 0] = 1.0
    phi[:, 5] = np.log1p(ages) / 4
    phi[:, 6] = levels > 0
    phi[:, 7], phi[:, 8] = again, again > 0.5
    phi[:, 9], phi[:, 10] = math.log2(max(1.0, over)) / 4, room
    return phi


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Of ``ostinato.apps.memory.keep.Sizes``, as ``Replay`` has them."""

    budget: int
    recent: int = 32
    slack: float = 0.05
    at_once: int = 8
    least: int = 4


@dataclass(slots=True)
class Replay:
    """A memory over a prepared history under a policy: sampled with ``rng``, else the most probable levels.
    ``trace`` collects (ids, phi, probabilities, chosen) of every decision."""

    one: Prepared
    policy: Policy
    rules: Rules
    rng: np.random.Generator | None = None
    trace: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    base: np.ndarray | None = None

    def run(self, state: State, until: int) -> State:
        fixed = self.policy.fixed(self.one) if self.base is None else self.base
        while state.now < until:
            state.level[state.now] = 0
            state.tokens += int(self.one.tokens[state.now, 0])
            state.now += 1
            while state.tokens > self.rules.budget:
                self._fit(state, fixed)
        return state

    def _fit(self, state: State, fixed: np.ndarray) -> None:
        one, rules = self.one, self.rules
        need = state.tokens - math.floor(rules.budget * (1 - rules.slack))
        ids = np.array([i for i in state.level if i not in self._recent(state)])
        levels = np.array([state.level[i] for i in ids])
        over, freed = one.seen[state.now] / rules.budget, need / rules.budget
        phi = changing(state.now - ids, levels, one.again[ids, state.now - 1], over, freed)
        logits = fixed[ids] + phi @ self.policy.weights[:, HASHED:].T
        sizes = np.array([one.tokens[i, state.level[i]] for i in ids])
        options = one.rooms[ids]  # [k, L]
        allowed = (
            (np.arange(GONE + 1) > levels[:, None]) & (options >= rules.least) & (options < sizes[:, None])
        )
        allowed[np.arange(len(ids)), levels] = True
        allowed[:, GONE] = True
        probabilities = softmax(np.where(allowed, logits, -1e9))
        left = np.where(np.arange(GONE + 1) == levels[:, None], sizes[:, None], options)
        order = np.argsort((probabilities * left).sum(1) / sizes, kind="stable")
        enough = int(np.searchsorted(np.cumsum(sizes[order]), need) + 1)
        picked = order[: min(len(ids), max(rules.at_once, enough))]
        p = probabilities[picked]
        if self.rng is None:
            chosen = p.argmax(1)
        else:
            drawn = self.rng.random((len(picked), 1))
            chosen = np.minimum((p.cumsum(1) < drawn).sum(1), GONE)
        if self.trace is not None:
            self.trace.append((ids[picked], phi[picked], p, chosen.copy()))
        self._lower(state, ids[picked], chosen, allowed[picked], options[picked], sizes[picked], need)

    def _lower(self, state, ids, chosen, allowed, options, sizes, need) -> None:
        """Where not enough is freed, the first of the masked blocks get less."""
        took = np.where(chosen == [state.level[i] for i in ids], sizes, options[np.arange(len(ids)), chosen])
        over = int(took.sum()) - (int(sizes.sum()) - need)
        state.over += max(0, over)
        for at in range(len(ids)):
            while over > 0 and chosen[at] < GONE:
                lower = next(k for k in range(chosen[at] + 1, GONE + 1) if allowed[at, k])
                over -= int(took[at] - options[at, lower])
                chosen[at], took[at] = lower, options[at, lower]
        for i, level, before in zip(ids, chosen, sizes, strict=True):
            state.tokens += int(self.one.tokens[i, level]) - int(before)
            if not self.one.tokens[i, level]:  # dropped, or nothing fits
                del state.level[i]
            else:
                state.level[i] = int(level)

    def _recent(self, state: State) -> set[int]:
        left, found = self.rules.recent, set()
        for i in range(state.now - 1, -1, -1):
            left -= int(self.one.tokens[i, 0])
            if left < 0 or state.level.get(i) != 0:
                break
            found.add(i)
        return found


def values(one: Prepared, state: State) -> dict[tuple[str, str], str]:
    """The newest value of each subject that the memory still has."""
    facts = (one.found.turns[i].fact for i in sorted(state.level) if one.intact[i, state.level[i]])
    return {(fact.subject, fact.relation): fact.value for fact in facts if fact}


def reward(one: Prepared, state: State, wrong: float, overspent: float) -> float:
    """Over probes whose evidence has all come: right answers, minus ``wrong`` times the false ones (stale
    values that stand alone), minus ``overspent`` times the tokens beyond the room."""
    known, total, n = values(one, state), 0.0, 0
    for question in one.found.questions:
        if question.evidence and max(question.evidence) < state.now:
            got = reply(question.chain, followed(known, question.chain))
            total += 1.0 if got == question.answer else 0.0 if got == UNKNOWN else -wrong
            n += 1
    return total / max(1, n) - overspent * state.over / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    steps: int = 300
    starts: int = 4  # memory states of a step
    group: int = 8  # re-rollouts of each
    window: int = 24  # turns that a re-rollout goes on for
    lr: float = 0.5
    wrong: float = 1.0
    overspent: float = 0.02


def learn(
    histories: Sequence[Prepared], budgets: Callable[[float, np.random.Generator, int], int], seed: int,
    settings: Learning, say: Callable[[dict[str, float]], None] = lambda row: None,
) -> Policy:  # fmt: skip
    """GRPO on groups that share a memory state; ``budgets(progress, rng, tokens)`` is the curriculum."""
    rng, policy = np.random.default_rng(seed), Policy()
    moment = np.zeros_like(policy.weights)
    second = np.zeros_like(policy.weights)
    recent: list[float] = []
    for step in range(1, settings.steps + 1):
        slope = np.zeros_like(policy.weights)
        for _ in range(settings.starts):
            one = histories[int(rng.integers(len(histories)))]
            budget = budgets(step / settings.steps, rng, int(one.seen[-1]))
            gained, mean = _group(one, policy, Rules(budget=budget), rng, settings)
            slope += gained / settings.starts
            recent.append(mean)
        moment = 0.9 * moment + 0.1 * slope
        second = 0.99 * second + 0.01 * slope**2
        rate = settings.lr * min(1.0, 2 * (1 - step / (settings.steps + 1)))
        policy.weights += (
            rate * 0.1 * (moment / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-6)
        )
        if step % 50 == 0:
            say({"step": step, "reward": round(float(np.mean(recent)), 4)})
            recent.clear()
    return policy


def _group(
    one: Prepared, policy: Policy, rules: Rules, rng: np.random.Generator, settings: Learning
) -> tuple[np.ndarray, float]:
    """(the gradient of one group, its mean reward)."""
    n, base = len(one.found.turns), policy.fixed(one)
    first = int(np.searchsorted(one.seen, rules.budget))  # before that nothing is decided
    at = int(rng.integers(min(first, n - 1), n))
    start = Replay(one, policy, rules, rng, None, base).run(State(), at)
    start.over, until = 0, min(n, at + settings.window)
    traces, rewards = [], []
    for _ in range(settings.group):
        trace: list = []
        end = Replay(one, policy, rules, rng, trace, base).run(start.copy(), until)
        traces.append(trace)
        rewards.append(reward(one, end, settings.wrong, settings.overspent))
    gains = np.array(rewards) - np.mean(rewards)
    gains /= gains.std() + 1e-3
    slope = np.zeros_like(policy.weights)
    for trace, gain in zip(traces, gains, strict=True):
        for ids, phi, p, chosen in trace:
            error = gain * ((np.arange(GONE + 1) == chosen[:, None]) - p)  # [k, L]
            slope[:, HASHED:] += error.T @ phi
            slope[:, HASHED + 1 : HASHED + 5] += error.T @ one.fixed[ids]
            for row, i in zip(error, ids, strict=True):
                slope[:, one.words[i]] += row[:, None]
    return slope / settings.group, float(np.mean(rewards))


__all__ = [
    "Learning",
    "Policy",
    "Prepared",
    "Replay",
    "Rules",
    "State",
    "learn",
    "offered",
    "prepare",
    "reward",
]
