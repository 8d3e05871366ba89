"""The forgetting watch: tests whether a policy loses abilities that it had and is not trained on.

Before training the policy greedily answers questions that are not the task's (``launch.forgetting``).
Its right answers are kept, and those without a verdict. During training, a look scores some of them again in
a forward pass. For an answer y, with rho = p(y) / p_start(y),

    lost    1 - min(rho, 1): the share of its probability that is gone. Gains on other answers do not offset
            it, so this share grows before answers become wrong
    kept    the mean of min(rho, 1)
    bets    (``observe.stats``) that the mean of ``lost`` is above ``tolerance``

Of an answer without a verdict rho is per token: its T-th root. Rows are scored in turn, once in a pass. The
training does not use them, so for any later policy they are fresh draws, and a pass is a fair game: pass j
raises a false alarm with a probability of at most ALPHA / (j (j + 1)), all together ALPHA.

Some answers are also sampled at the run's temperature: KL(start || now) per token is estimated on them. A
policy with almost no right answers has no ability to lose here: wrong answers are kept, and nothing is bet.

A look is taken while the whole watch has cost at most ``share`` of the FLOPs that the run has spent, or
HEAD_START of its total budget: with too high a learning rate a policy forgets early. A look is SLICE rows,
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
from ostinato.pipeline.account import compute_answer_work, compute_batch_work
from ostinato.protocols import Engine
from ostinato.run import Jsonl
from ostinato.types import Batch, Completion, Request, Sample, Sampling

ALPHA = 0.05  # of a false alarm in a run, however long
UNIT = 10  # the largest loss of an answer in bets, in tolerances: larger losses are clipped
HEAD_START = 0.6  # of the total budget, supposing that coming steps cost half as much as those so far
SLICE = 16  # rows of a look, and the fewest that a watch takes
ROUND = 48  # questions that are asked together
ENOUGH = 96  # rows, after which there are no more questions
MOST = 256  # questions
ANSWERS_PER_QUESTION = 130  # answers of the run for each: so questions cost at most the head start
SEED = 1_000_003  # between the run's seed and the question's number: noise that no rollout has


class Scorer(Protocol):
    """The part of a trainer that the watch needs."""

    def score(self, batch: Batch) -> Sequence[np.ndarray]:
        """Return log-probabilities [R] of the targets of each microbatch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A prompt [P], and a function that tells whether an answer to it is right; None: not judged."""

    tokens: np.ndarray
    right: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """An answer of the policy at the start."""

    tokens: np.ndarray  # [P + T] int32, of the prompt and the answer
    logprobs: np.ndarray  # [T] float32, at the start
    right: bool | None  # None: not judged
    drawn: bool = False  # sampled at the run's temperature, for the KL; the other rows are greedy

    def compute_gain(self, logprobs: np.ndarray) -> float:
        """Return ln rho, per token for an answer that is not judged right; -inf if a log-probability is not
        finite."""
        change = float((logprobs.astype(float) - self.logprobs).sum())
        change = change if self.right else change / len(self.logprobs)
        return change if math.isfinite(change) else -math.inf


def _make_bets(number: int) -> Bets:
    """Make the bets of pass ``number``, from 1."""
    return Bets(name="forgetting", alpha=ALPHA / (number * (number + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The position in the passes over the rows, and the bets of the current pass."""

    bets: Bets = field(default_factory=lambda: _make_bets(1))
    passed: int = 0  # passes that are done
    at: int = 0  # the next slice

    def advance(self, x: np.ndarray, slices: int) -> tuple[State, bool]:
        """Return (state after the losses ``x`` of a slice, whether there is an alarm). After an alarm the
        bets stay as they are, and the slices go round; otherwise new bets begin after the last slice of a
        pass."""
        bets, alarm = self.bets.update(x)
        if alarm is not None or bets.alarmed:
            return replace(self, bets=bets, at=(self.at + 1) % slices), alarm is not None
        if self.at + 1 < slices:
            return replace(self, bets=bets, at=self.at + 1), False
        num_passed = self.passed + 1
        return State(bets=_make_bets(num_passed + 1), passed=num_passed), False

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> State:
        """Restore a state from its ``asdict``, read back from JSON."""
        bets = {**saved["bets"], "wealth": tuple(saved["bets"]["wealth"])}
        return cls(bets=Bets(**bets), passed=saved["passed"], at=saved["at"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The metrics of a look, its cost (rows, flops, seconds), and the alarm that it raised."""

    metrics: Mapping[str, float]
    cost: Mapping[str, float]
    alarm: Alarm | None


def compute_ratios(gains: Iterable[float]) -> np.ndarray:
    """Return min(rho, 1) for each ln rho."""
    return np.exp(np.minimum(np.array([*gains], float), 0.0))


def compute_losses(gains: Iterable[float], tolerance: float) -> np.ndarray:
    """Return observations for ``Bets``, in [-1, 1]. Losses are clipped from above, which only lowers their
    mean, so it is at most 0 while no more than ``tolerance`` is lost."""
    return np.minimum((1 - compute_ratios(gains) - tolerance) / (UNIT * max(tolerance, 0.01)), 1.0)


def compute_kept_share(gains: Iterable[float]) -> tuple[float, float, float]:
    """Return (mean of min(rho, 1), lower end, upper end of its 95 % interval with the rows as draws)."""
    shares = compute_ratios(gains)
    mean, half = float(shares.mean()), 1.96 * float(np.std(shares, ddof=1)) / math.sqrt(len(shares))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def count_questions(answers: int) -> int:
    """Return how many questions a run with so many answers can afford; 0: too few for a watch."""
    count = min(MOST, answers // ANSWERS_PER_QUESTION)
    return count if count >= SLICE else 0


@dataclass(kw_only=True)
class Forgetting:
    """The watch of a run of ``steps``. Rows and looks are in ``log`` (forgetting.jsonl), from which a
    resumed run continues.

    ``about``: the questions, in words. ``share``: the share of the run's FLOPs that the watch may cost.
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
        """Restore the state from the log, which was cut to the finished steps before."""
        self._slices: list[tuple[Sequence[int], Batch]] = []
        self._rows: Sequence[Row] = ()
        self._gains: dict[int, float] = {}  # latest ln rho of each row, by place
        self._state, self._spent = State(), 0.0
        for line in self.log.rows():
            self._spent += line["flops"]
            if "about" in line:
                self._slice_rows([_parse_row(row) for row in line["rows"]])
            else:
                self._state = State.of(line["state"])
                gains = [-math.inf if gain is None else gain for gain in line["gains"]]
                self._gains |= dict(zip(line["places"], gains, strict=True))

    async def begin(self, engine: Engine) -> dict[str, Any] | None:
        """Ask the questions, keep the right answers and those without a verdict, and sampled answers for the
        KL; score them, and append the line that is returned to the log. With too few of these, ROUND answers
        are kept, as wrong. Returns None and does nothing if there are rows."""
        if self._rows:
            return None
        start = time.perf_counter()
        rows, work = await self._sample_answers(engine, range(min(SLICE, len(self.questions))), self.sampling)
        drawn_rows = [replace(row, right=None, drawn=True) for row in rows if len(row.logprobs)]
        rows = list[Row]()
        good_rows = list[Row]()
        while len(rows) < len(self.questions) and len(good_rows) < ENOUGH and 8 * len(good_rows) >= len(rows):
            numbers = range(len(rows), min(len(rows) + ROUND, len(self.questions)))
            new_rows, new_work = await self._sample_answers(
                engine, numbers, replace(self.sampling, temperature=0.0)
            )
            rows, work = rows + new_rows, work + new_work
            good_rows = [row for row in rows if row.right is not False]
        if len(good_rows) < SLICE:
            good_rows = [row for row in rows[:ROUND] if len(row.logprobs)]
            good_rows = [replace(row, right=False) for row in good_rows]
        verdicts = [row.right for row in rows if row.right is not None]
        self._slice_rows([*good_rows, *drawn_rows])
        scores = {
            place: part_scores
            for part in self._slices
            for place, part_scores in self._score_rows(*part).items()
        }
        self._rows = [replace(row, logprobs=scores[place]) for place, row in enumerate(self._rows)]
        flops = self.flops.forward(work) + sum(self._count_flops(part) for _, part in self._slices)
        line = {
            "step": 0,
            "about": self.about,
            "questions": len(rows),
            "right": sum(verdicts) / len(verdicts) if verdicts else None,
            "rows": [asdict(row) for row in self._rows],
            "flops": flops,
            "seconds": time.perf_counter() - start,
        }
        self._spent += flops
        self.log.append(line)
        return line

    async def _sample_answers(
        self, engine: Engine, numbers: Sequence[int], sampling: Sampling
    ) -> tuple[list[Row], Work]:
        """Return (rows of answers to the questions of these numbers, the work of sampling them); an empty
        answer counts as wrong."""
        questions = [self.questions[number] for number in numbers]
        requests = [
            Request(tokens=question.tokens, sampling=sampling, seed=(self.seed, SEED, number))
            for number, question in zip(numbers, questions, strict=True)
        ]
        answers = {index: answer async for index, answer in engine.generate(requests)}
        work = (
            compute_answer_work(len(question.tokens), 0, answers[index])
            for index, question in enumerate(questions)
        )
        rows = [_make_row(question, answers[index]) for index, question in enumerate(questions)]
        return [row if len(row.logprobs) else replace(row, right=False) for row in rows], sum(work, Work())

    def look(self, step: int, totals: Mapping[str, float], batch: Batch) -> Look | None:
        """Score the next rows after the training of ``step`` on ``batch``, and append a line to the log;
        ``totals``: of the run before the step. Returns None if there are no rows, or no look can be afforded
        now."""
        if not self._rows:
            return None
        run_flops = totals.get("total/flops", 0.0)
        # the forward twice: sampling costs about as much
        step_flops = 2 * self._count_flops(batch) + self.flops.backward(compute_batch_work(batch))
        total_limit = self.share * min(
            self.budget, (run_flops + step_flops) * (1 + 0.5 * (self.steps - step) / step)
        )
        present_limit = max(self.share * (run_flops + step_flops), HEAD_START * total_limit)
        start, spent_before, scores, gains, has_alarm = time.perf_counter(), self._spent, {}, {}, False
        while self._spent + self._count_flops(self._slices[self._state.at][1]) <= (
            total_limit if scores else present_limit
        ):
            bets = self._state.bets
            has_alarm = self._score_slice(scores, gains)
            if has_alarm or not self._state.at or self._state.bets.evidence <= bets.evidence:
                break
        if not scores:
            return None
        metrics = self._make_metrics(scores)
        cost = {
            "rows": len(scores),
            "flops": self._spent - spent_before,
            "seconds": time.perf_counter() - start,
        }
        line = {"step": step, **metrics, "places": [*gains], "gains": [*gains.values()]}
        self.log.append(line | {"state": asdict(self._state)} | cost)
        return Look(metrics=metrics, cost=cost, alarm=self._make_alarm(step) if has_alarm else None)

    def _score_slice(self, scores: dict[int, np.ndarray], gains: dict[int, float]) -> bool:
        """Score the next slice into ``scores`` and ``gains``, by place, add its FLOPs, and update the bets;
        return whether there is an alarm. Wrong answers alone are no ability: then nothing is bet."""
        places, batch = self._slices[self._state.at]
        new_scores = self._score_rows(places, batch)
        new_gains = {
            n: self._rows[n].compute_gain(logprobs)
            for n, logprobs in new_scores.items()
            if not self._rows[n].drawn
        }
        self._spent += self._count_flops(batch)
        scores |= new_scores
        gains |= new_gains
        self._gains |= new_gains
        has_ability = any(self._rows[n].right is not False for n in new_gains)
        observations = compute_losses(new_gains.values(), self.tolerance) if has_ability else np.empty(0)
        self._state, has_alarm = self._state.advance(observations, len(self._slices))
        return has_alarm

    def _make_metrics(self, scores: Mapping[int, np.ndarray]) -> dict[str, float]:
        """Make the metrics: ``kept`` over the newest score of every row, the others over ``scores`` alone."""
        mean, low, high = compute_kept_share(self._gains.values())
        metrics = {
            "forgetting/kept": mean,
            "forgetting/kept_low": low,
            "forgetting/kept_high": high,
            "forgetting/logprob": float(
                np.mean([scores[n].mean() for n in scores if not self._rows[n].drawn])
            ),
            "forgetting/evidence": self._state.bets.evidence,
        }
        if drawn_places := [n for n in scores if self._rows[n].drawn]:
            change = np.concatenate([scores[n].astype(float) - self._rows[n].logprobs for n in drawn_places])
            change = np.clip(change, -50.0, 50.0)
            metrics["forgetting/kl_k3"] = float(np.mean(np.expm1(change) - change))
        return metrics

    def _make_alarm(self, step: int) -> Alarm:
        mean, low, high = compute_kept_share(self._gains.values())
        sentence = (
            f"what the policy could do before is being lost: of its answers to {self.about} {mean:.0%} "
            f"[{low:.0%}, {high:.0%}] of the probability is left; lower trainer.lr, train an adapter, or "
            "raise algo.kl_coef (docs/forgetting.md)"
        )
        return Alarm(step, step, Rule.FORGETTING, False, sentence)

    # ---- rows and batches

    def _slice_rows(self, rows: Sequence[Row]) -> None:
        """Store the rows, and pack them into slices; the first slice has all sampled rows too."""
        self._rows = rows
        greedy = [n for n, row in enumerate(rows) if not row.drawn]
        count = max(1, round(len(greedy) / SLICE))
        parts = [greedy[first_index::count] for first_index in range(count)]
        parts[0] += [n for n, row in enumerate(rows) if row.drawn]
        self._slices = [(part, self._pack_rows([rows[n] for n in part])) for part in parts]

    def _pack_rows(self, rows: Sequence[Row]) -> Batch:
        samples = [_make_sample(row, index) for index, row in enumerate(rows)]
        weights = [sample.loss_mask.astype(float) for sample in samples]
        return pack(samples, weights, tokens_per_microbatch=self.tokens_per_microbatch)

    def _count_flops(self, batch: Batch) -> float:
        return self.flops.forward(compute_batch_work(batch))

    def _score_rows(self, places: Sequence[int], batch: Batch) -> dict[int, np.ndarray]:
        """Compute the present log-probabilities [T] of the rows at ``places``."""
        by_place: dict[int, np.ndarray] = {}
        for part, scores in zip(batch.microbatches, self.scorer.score(batch), strict=True):
            for index in np.unique(part.sample_idx).tolist():
                by_place[places[index]] = scores[part.sample_idx == index]
        return {place: by_place[place] for place in places}


def _make_row(question: Question, answer: Completion) -> Row:
    tokens = np.concatenate([question.tokens, answer.tokens]).astype(np.int32)
    right = None if question.right is None else question.right(answer.text)
    return Row(tokens=tokens, logprobs=np.zeros(len(answer.tokens), np.float32), right=right)


def _parse_row(row: Mapping[str, Any]) -> Row:
    tokens, logprobs = np.array(row["tokens"], np.int32), np.array(row["logprobs"], np.float32)
    return Row(tokens=tokens, logprobs=logprobs, right=row["right"], drawn=row["drawn"])


def _make_sample(row: Row, index: int) -> Sample:
    is_answer = np.arange(len(row.tokens)) >= len(row.tokens) - len(row.logprobs)
    zeros = np.zeros(len(row.tokens), np.float32)
    return Sample(
        tokens=row.tokens,
        loss_mask=is_answer,
        logprobs=zeros,
        advantages=zeros,
        versions=np.where(is_answer, 0, -1).astype(np.int32),
        group=index,
        prompt_len=int((~is_answer).sum()),
    )
