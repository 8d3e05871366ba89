"""The forgetting watch: does a policy lose abilities that it had and is not trained on?

Before training the policy answers questions that are not the task's (``launch.forgetting``), greedily.
Its right answers are kept, and those without a verdict. During training, a look scores some of them again in
one forward pass. For an answer y, with rho = p(y) / p_start(y),

    lost    1 - min(rho, 1): the share of its probability that is gone. Gains on other answers do not offset
            it, so this grows before answers turn wrong
    kept    the mean of min(rho, 1)
    bets    (``observe.stats``) that the mean of ``lost`` is above ``tolerance``

Of an answer without a verdict rho is per token: its T-th root. Rows are looked at in turn, once in a pass.
The training does not use them, so whatever the policy has become they are fresh draws, and a pass is a
fair game: pass j raises a false alarm with a probability of at most ALPHA / (j (j + 1)), all together ALPHA.

Some answers are also sampled at the run's temperature: KL(start || now) per token is estimated on them. A
policy with next to nothing right has no ability to lose here: wrong answers are kept, and nothing is bet.

A look is taken while the whole watch has cost at most ``share`` of the FLOPs that the run has spent, or
HEAD_START of what the watch may cost in all: too high a learning rate forgets early. A look is SLICE rows,
and further slices while the bets rise, at most to the end of the pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ostinato.algo.pack import pack
from ostinato.model.flops import FlopModel, Work
from ostinato.observe.stability import Alarm, Rule
from ostinato.observe.stats import Bets
from ostinato.pipeline.account import answer_work, batch_work
from ostinato.protocols import Engine
from ostinato.run import Jsonl
from ostinato.types import Batch, Completion, Request, Sample, Sampling

ALPHA = 0.05  # of a false alarm in a run, however long
UNIT = 10  # the most that one answer can lose in bets, in tolerances: larger losses are clipped
HEAD_START = 0.6  # of what the watch may cost in all, supposing that coming steps cost half of those so far
SLICE = 16  # rows of a look, and the fewest that a watch takes
ROUND = 48  # questions at a time
ENOUGH = 96  # rows, after which there are no more questions
MOST = 256  # questions
ANSWERS_PER_QUESTION = 130  # of the run, so that asking costs no more than the head start
SEED = 1_000_003  # between the run's seed and a question's: noise that no rollout has


class Scorer(Protocol):
    """What the watch needs of a trainer."""

    def score(self, batch: Batch) -> Sequence[np.ndarray]:
        """[R] log-probabilities of the targets of each microbatch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A prompt [P], and whether an answer to it is right; None: not judged."""

    tokens: np.ndarray
    right: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """An answer of the policy at the start."""

    tokens: np.ndarray  # [P + T] int32, of the prompt and the answer
    logprobs: np.ndarray  # [T] float32, at the start
    right: bool | None  # None: not judged
    drawn: bool = False  # at the run's temperature, for the KL; the others are greedy

    def gain(self, logprobs: np.ndarray) -> float:
        """ln rho; -inf where a log-probability is not finite."""
        change = float((logprobs.astype(float) - self.logprobs).sum())
        change = change if self.right else change / len(self.logprobs)
        return change if math.isfinite(change) else -math.inf


def _bets(number: int) -> Bets:
    """Of a pass, from 1."""
    return Bets(name="forgetting", alpha=ALPHA / (number * (number + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where the passes over the rows stand."""

    bets: Bets = field(default_factory=lambda: _bets(1))
    passed: int = 0  # passes that are done
    at: int = 0  # the next slice

    def seen(self, x: np.ndarray, slices: int) -> tuple[State, bool]:
        """(state after the losses ``x`` of a slice, whether there is an alarm). After one, nothing is bet."""
        bets, alarm = self.bets.update(x)
        if alarm is not None or bets.alarmed:
            return replace(self, bets=bets, at=(self.at + 1) % slices), alarm is not None
        if self.at + 1 < slices:
            return replace(self, bets=bets, at=self.at + 1), False
        passed = self.passed + 1
        return State(bets=_bets(passed + 1), passed=passed), False

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> State:
        """The state from its ``asdict``, read back from JSON."""
        bets = {**saved["bets"], "wealth": tuple(saved["bets"]["wealth"])}
        return cls(bets=Bets(**bets), passed=saved["passed"], at=saved["at"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look has found, what it cost (rows, flops, seconds), and the alarm that it raised."""

    metrics: Mapping[str, float]
    cost: Mapping[str, float]
    alarm: Alarm | None


def ratios(gains: Iterable[float]) -> np.ndarray:
    """min(rho, 1) of ln rho."""
    return np.exp(np.minimum(np.array([*gains], float), 0.0))


def losses(gains: Iterable[float], tolerance: float) -> np.ndarray:
    """Observations for ``Bets``, in [-1, 1]: clipped from above, which only lowers their mean, so it is at
    most 0 while no more than ``tolerance`` is lost."""
    return np.minimum((1 - ratios(gains) - tolerance) / (UNIT * max(tolerance, 0.01)), 1.0)


def kept_share(gains: Iterable[float]) -> tuple[float, float, float]:
    """(mean of min(rho, 1), the ends of its 95 % interval, for rows as draws)."""
    found = ratios(gains)
    mean, half = float(found.mean()), 1.96 * float(np.std(found, ddof=1)) / math.sqrt(len(found))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def questions_for(answers: int) -> int:
    """How many questions a run that samples so many answers can afford; 0: too few to watch anything."""
    found = min(MOST, answers // ANSWERS_PER_QUESTION)
    return found if found >= SLICE else 0


@dataclass(kw_only=True)
class Forgetting:
    """The watch of one run of ``steps``. Rows and looks are in ``log`` (forgetting.jsonl), from which a
    resumed run goes on.

    ``about``: the questions, in words. ``share``: of the run's FLOPs, what the watch may cost.
    ``tolerance``: the share of the ability that may be lost without an alarm.
    """

    questions: Sequence[Question]
    about: str
    sampling: Sampling
    scorer: Scorer
    flops: FlopModel
    log: Jsonl
    steps: int
    tokens_per_microbatch: int
    seed: int = 0
    budget: float = math.inf  # FLOPs, where the run has such a budget
    share: float = 0.02
    tolerance: float = 0.03

    def open(self) -> None:
        """Read what there is, after the log was cut to the finished steps."""
        self._slices: list[tuple[Sequence[int], Batch]] = []
        self._rows: Sequence[Row] = ()
        self._gains: dict[int, float] = {}  # the last of each row
        self._state, self._spent = State(), 0.0
        for line in self.log.rows():
            self._spent += line["flops"]
            if "about" in line:
                self._take([_row(one) for one in line["rows"]])
            else:
                self._state = State.of(line["state"])
                gains = [-math.inf if gain is None else gain for gain in line["gains"]]
                self._gains |= dict(zip(line["places"], gains, strict=True))

    async def begin(self, engine: Engine) -> dict[str, Any] | None:
        """Ask the questions and keep the right answers. Returns the line of the log, None if done before."""
        if self._rows:
            return None
        started = time.perf_counter()
        found, work = await self._answers(engine, range(min(SLICE, len(self.questions))), self.sampling)
        drawn = [replace(one, right=None, drawn=True) for one in found if len(one.logprobs)]
        found = list[Row]()
        chosen = list[Row]()
        while len(found) < len(self.questions) and len(chosen) < ENOUGH and 8 * len(chosen) >= len(found):
            some = range(len(found), min(len(found) + ROUND, len(self.questions)))
            new, sampled = await self._answers(engine, some, replace(self.sampling, temperature=0.0))
            found, work = found + new, work + sampled
            chosen = [one for one in found if one.right is not False]
        if len(chosen) < SLICE:
            chosen = [one for one in found[:ROUND] if len(one.logprobs)]
            chosen = [replace(one, right=False) for one in chosen]
        judged = [one.right for one in found if one.right is not None]
        self._take([*chosen, *drawn])
        scores = {place: own for part in self._slices for place, own in self._scores(*part).items()}
        self._rows = [replace(one, logprobs=scores[place]) for place, one in enumerate(self._rows)]
        flops = self.flops.forward(work) + sum(self._price(part) for _, part in self._slices)
        line = {
            "step": 0,
            "about": self.about,
            "questions": len(found),
            "right": sum(judged) / len(judged) if judged else None,
            "rows": [asdict(row) for row in self._rows],
            "flops": flops,
            "seconds": time.perf_counter() - started,
        }
        self._spent += flops
        self.log.append(line)
        return line

    async def _answers(
        self, engine: Engine, numbers: Sequence[int], sampling: Sampling
    ) -> tuple[list[Row], Work]:
        """(answers to the questions of these numbers, the work of sampling them)."""
        some = [self.questions[number] for number in numbers]
        requests = [
            Request(tokens=one.tokens, sampling=sampling, seed=(self.seed, SEED, number))
            for number, one in zip(numbers, some, strict=True)
        ]
        answers = {index: answer async for index, answer in engine.generate(requests)}
        work = (answer_work(len(one.tokens), 0, answers[index]) for index, one in enumerate(some))
        rows = [_row_from_answer(one, answers[index]) for index, one in enumerate(some)]
        return [row if len(row.logprobs) else replace(row, right=False) for row in rows], sum(work, Work())

    def look(self, step: int, totals: Mapping[str, float], batch: Batch) -> Look | None:
        """Score the next rows after the training of ``step`` on ``batch``; ``totals``: of the run before it.
        None where there are no rows, or no look can be afforded now."""
        if not self._rows:
            return None
        spent = totals.get("total/flops", 0.0)
        own = 2 * self._price(batch) + self.flops.backward(batch_work(batch))  # sampled about as often
        most = self.share * min(self.budget, (spent + own) * (1 + 0.5 * (self.steps - step) / step))
        now = max(self.share * (spent + own), HEAD_START * most)
        started, before, scores, gains, alarmed = time.perf_counter(), self._spent, {}, {}, False
        while self._spent + self._price(self._slices[self._state.at][1]) <= (most if scores else now):
            bets = self._state.bets
            alarmed = self._next(scores, gains)
            if alarmed or not self._state.at or self._state.bets.evidence <= bets.evidence:
                break
        if not scores:
            return None
        metrics = self._metrics(scores)
        cost = {"rows": len(scores), "flops": self._spent - before, "seconds": time.perf_counter() - started}
        line = {"step": step, **metrics, "places": [*gains], "gains": [*gains.values()]}
        self.log.append(line | {"state": asdict(self._state)} | cost)
        return Look(metrics=metrics, cost=cost, alarm=self._alarm(step) if alarmed else None)

    def _next(self, scores: dict[int, np.ndarray], gains: dict[int, float]) -> bool:
        """Score the next slice, for ``scores`` and ``gains`` by place; is there an alarm?"""
        places, batch = self._slices[self._state.at]
        new_scores = self._scores(places, batch)
        new = {n: self._rows[n].gain(one) for n, one in new_scores.items() if not self._rows[n].drawn}
        self._spent += self._price(batch)
        scores |= new_scores
        gains |= new
        self._gains |= new
        could = any(self._rows[n].right is not False for n in new)
        x = losses(new.values(), self.tolerance) if could else np.empty(0)
        self._state, alarmed = self._state.seen(x, len(self._slices))
        return alarmed

    def _metrics(self, scores: Mapping[int, np.ndarray]) -> dict[str, float]:
        """``kept`` is over the newest score of every row, the other metrics over ``scores`` alone."""
        mean, low, high = kept_share(self._gains.values())
        found = {
            "forgetting/kept": mean,
            "forgetting/kept_low": low,
            "forgetting/kept_high": high,
            "forgetting/logprob": float(
                np.mean([scores[n].mean() for n in scores if not self._rows[n].drawn])
            ),
            "forgetting/evidence": self._state.bets.evidence,
        }
        if drawn := [n for n in scores if self._rows[n].drawn]:
            change = np.concatenate([scores[n].astype(float) - self._rows[n].logprobs for n in drawn])
            change = np.clip(change, -50.0, 50.0)
            found["forgetting/kl_k3"] = float(np.mean(np.expm1(change) - change))
        return found

    def _alarm(self, step: int) -> Alarm:
        mean, low, high = kept_share(self._gains.values())
        sentence = (
            f"what the policy could do before is being lost: of its answers to {self.about} {mean:.0%} "
            f"[{low:.0%}, {high:.0%}] of the probability is left; lower trainer.lr, train an adapter, or "
            "raise algo.kl_coef (docs/forgetting.md)"
        )
        return Alarm(step, step, Rule.FORGETTING, False, sentence)

    # ---- rows and batches

    def _take(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        greedy = [n for n, row in enumerate(rows) if not row.drawn]
        count = max(1, round(len(greedy) / SLICE))
        parts = [greedy[first::count] for first in range(count)]
        parts[0] += [n for n, row in enumerate(rows) if row.drawn]
        self._slices = [(part, self._packed([rows[n] for n in part])) for part in parts]

    def _packed(self, rows: Sequence[Row]) -> Batch:
        samples = [_sample(row, index) for index, row in enumerate(rows)]
        weights = [sample.loss_mask.astype(float) for sample in samples]
        return pack(samples, weights, tokens_per_microbatch=self.tokens_per_microbatch)

    def _price(self, batch: Batch) -> float:
        return self.flops.forward(batch_work(batch))

    def _scores(self, places: Sequence[int], batch: Batch) -> dict[int, np.ndarray]:
        """Log-probabilities [T] now of the rows at ``places``."""
        found: dict[int, np.ndarray] = {}
        for part, scores in zip(batch.microbatches, self.scorer.score(batch), strict=True):
            for index in np.unique(part.sample_idx).tolist():
                found[places[index]] = scores[part.sample_idx == index]
        return {place: found[place] for place in places}


def _row_from_answer(question: Question, answer: Completion) -> Row:
    tokens = np.concatenate([question.tokens, answer.tokens]).astype(np.int32)
    right = None if question.right is None else question.right(answer.text)
    return Row(tokens=tokens, logprobs=np.zeros(len(answer.tokens), np.float32), right=right)


def _row(saved: Mapping[str, Any]) -> Row:
    tokens, logprobs = np.array(saved["tokens"], np.int32), np.array(saved["logprobs"], np.float32)
    return Row(tokens=tokens, logprobs=logprobs, right=saved["right"], drawn=saved["drawn"])


def _sample(row: Row, index: int) -> Sample:
    answered = np.arange(len(row.tokens)) >= len(row.tokens) - len(row.logprobs)
    nothing = np.zeros(len(row.tokens), np.float32)
    return Sample(
        tokens=row.tokens,
        loss_mask=answered,
        logprobs=nothing,
        advantages=nothing,
        versions=np.where(answered, 0, -1).astype(np.int32),
        group=index,
        prompt_len=int((~answered).sum()),
    )
