"""How long a run will take, before its first step: timed passes of its engine and trainer, and its recipe.

How long answers are is not known yet; so there are two figures, for answers of a quarter of the longest that
the recipe allows, and of the longest. Drafts, rewards and other work of the machine are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.algo.pack import pack
from ostinato.axis import Axis
from ostinato.config import Recipe
from ostinato.engine import threads
from ostinato.engine.local import LocalEngine
from ostinato.every import Every
from ostinato.launch.inputs import RunInputs, environment, longest_answer
from ostinato.launch.loop import new_evaluations, new_flops
from ostinato.model.flops import FlopModel, Work
from ostinato.pipeline.evaluate import Evaluation
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Sample

SHORTEST = 0.25  # of the longest answer: the mean length in the lower figure
PROBED_ROWS = 512  # of training, at most
REPEATS = 3
ENOUGH_S = 0.5  # of one timed pass: it is not repeated, and no larger one is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens."""

    prompt: int
    answer: int  # the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a pass of the engine at some numbers of rows, and of a row in training."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    trained_row: float
    max_batch: int

    def a_pass(self, rows: float) -> float:
        """Between the timed numbers of rows it is linear, beyond the last proportional."""
        beyond = max(1.0, rows / self.rows[-1])
        return float(np.interp(rows, self.rows, self.seconds)) * beyond

    def sampling(self, prompts: int, answers: int, length: Lengths, mean: float) -> float:
        """Of ``answers`` to ``prompts`` prompts, of lengths spread evenly from 1 to twice ``mean``, or all of
        the longest."""
        total = self.a_pass(prompts * length.prompt)
        for token in range(min(length.answer, math.ceil(2 * mean))):
            alive = answers * max(0.0, 1 - token / (2 * mean)) if mean < length.answer else answers
            full, rest = divmod(alive, self.max_batch)
            total += full * self.a_pass(self.max_batch) + (self.a_pass(rest) if rest > 0 else 0.0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """(low, high) seconds of what is left: in all, of a step, of all evaluations."""

    total: tuple[float, float]
    step: tuple[float, float]
    evaluations: tuple[float, float]
    steps: int
    answers: tuple[int, int]  # tokens of an answer, on average, that the two figures are for
    busy: bool = False  # the machine, while passes were timed

    def __str__(self) -> str:
        low, high = self.answers
        beside = ", beside other work of the machine" if self.busy else ""
        return (
            f"about {span(*self.total)}: {self.steps} steps of {span(*self.step)} and evaluations of "
            f"{span(*self.evaluations)} in all, if answers have {low} to {high} tokens on average (passes of "
            f"this model, timed now{beside})"
        )


def forecast(prepared: RunInputs, engine: object, trainer: object, done: int = 0) -> Expected | None:
    """Of a run of one process from step ``done`` on; None where other processes compute. The engine then
    serves the trainer's adapters, as it will in the run."""
    recipe = prepared.recipe
    if (
        recipe.parallel.sharded
        or not isinstance(engine, LocalEngine)
        or not isinstance(trainer, PolicyTrainer)
    ):
        return None
    adapters = trainer.adapters()
    engine.publish(adapters, done)
    flops = new_flops(recipe, prepared.decoder.config, adapters)
    episode = environment(recipe, prepared.renderer)(prepared.train_prompts[0])
    length = Lengths(prompt=len(episode.start()), answer=longest_answer(recipe, prepared.renderer)[0])
    pace = paced(engine, trainer, recipe, length, flops)
    found = expected(pace, recipe, length, flops, new_evaluations(prepared), done)
    return replace(found, busy=threads.is_busy())


def paced(
    engine: LocalEngine, trainer: PolicyTrainer, recipe: Recipe, length: Lengths, flops: FlopModel
) -> Pace:
    """Time a few passes of an engine that has had no request, with what it serves, and a trainer's forward: a
    second or two for a small model. Neither is changed."""
    most = min(recipe.engine.max_batch, recipe.rollout.prompts_per_step * recipe.rollout.group_size)
    rows = sorted({1, min(8, most), max(1, most // 4), most})
    context = length.prompt + length.answer // 4
    engine.pass_seconds(1, context)  # buffers are made
    seconds = [_least(lambda rows=each: engine.pass_seconds(rows, context)) for each in rows]
    most_answers = max(1, PROBED_ROWS // (length.prompt + length.answer))
    for answers in sorted({1, most_answers}):  # more of them where one takes hardly any time
        batch = _batch(length, engine.decoder.config.vocab_size, answers)
        forward = _least(lambda batch=batch: trainer.measure(batch, floor=False)["seconds"])
        if forward > ENOUGH_S / most_answers:
            break
    work = Work(tokens=1, logits=length.answer / (length.prompt + length.answer))
    passes = 1 + flops.backward(work) / flops.forward(work) + (recipe.trainer.minibatches > 1)
    return Pace(
        rows=tuple(rows),
        seconds=tuple(np.maximum.accumulate(seconds).tolist()),
        trained_row=forward * passes / (batch.num_tokens + batch.num_context_tokens),
        max_batch=recipe.engine.max_batch,
    )


def _least(run: Callable[[], float]) -> float:
    """The least of a few seconds that ``run`` says it took, of one where that is long."""
    least = run()
    for _ in range(REPEATS - 1):
        if least > ENOUGH_S:
            break
        least = min(least, run())
    return least


def _batch(length: Lengths, vocab_size: int, count: int) -> Batch:
    """``count`` made-up answers to one prompt, as they are packed for training."""
    rng, size = np.random.default_rng(0), length.prompt + length.answer
    trained = np.arange(size) >= length.prompt
    prompt = rng.integers(0, vocab_size, length.prompt)
    samples = [
        Sample(
            tokens=np.append(prompt, rng.integers(0, vocab_size, length.answer)).astype(np.int32),
            loss_mask=trained,
            logprobs=np.where(trained, -1.0, 0.0).astype(np.float32),
            advantages=np.zeros(size, np.float32),
            versions=np.where(trained, 0, -1).astype(np.int32),
            group=0,
            prompt_len=length.prompt,
            uid=f"expected#{number}",
        )
        for number in range(count)
    ]
    return pack(samples, [trained / trained.sum()] * count, tokens_per_microbatch=max(PROBED_ROWS, size))


def expected(
    pace: Pace,
    recipe: Recipe,
    length: Lengths,
    flops: FlopModel,
    evaluations: Sequence[Evaluation],
    done: int = 0,
) -> Expected:
    """Of a run from step ``done`` to its last."""
    steps = max(0, recipe.trainer.steps - done)
    prompts = recipe.rollout.prompts_per_step
    answers = prompts * recipe.rollout.group_size
    means = (max(1.0, SHORTEST * length.answer), float(length.answer))
    step, scored = [], []
    for mean in means:
        rows = prompts * length.prompt + answers * mean
        step.append(pace.sampling(prompts, answers, length, mean) + rows * pace.trained_row)
        sampled, trained = Work(tokens=rows, logits=answers * mean), answers * mean
        spent = {
            Axis.STEPS: 1.0,
            Axis.TOKENS: trained,
            Axis.FLOPS: 2 * flops.forward(sampled) + flops.backward(sampled),
            "seconds": step[-1],
            "device_hours": step[-1] / 3600 * recipe.ledger.devices,
        }
        scored.append(
            sum(
                pace.sampling(len(one.prompts), len(one.prompts) * one.samples, length, mean)
                * _times(one, spent, steps, at_start=recipe.eval.at_start and not done)
                for one in evaluations
            )
        )
    low, high = (steps * a + b for a, b in zip(step, scored, strict=True))
    return Expected(
        total=(low, high),
        step=(step[0], step[1]),
        evaluations=(scored[0], scored[1]),
        steps=steps,
        answers=(round(means[0]), round(means[1])),
    )


def _times(one: Evaluation, spent: dict[str, float], steps: int, *, at_start: bool) -> float:
    """How often the set is scored: before, on its schedule, and after the last step."""
    every: Every = one.every
    scheduled = every.times({unit: amount * steps for unit, amount in spent.items()})
    on_last = every.unit is Axis.STEPS and every.amount > 0 and steps % every.amount == 0
    return at_start * one.start_factor + scheduled + (not on_last)


def span(low: float, high: float) -> str:
    """Two times in words: "2.1 to 4.0 s", "4 to 6 min"."""
    unit, size = next(((u, s) for u, s in (("h", 3600.0), ("min", 60.0)) if low >= 2 * s), ("s", 1.0))
    first, last = (f"{value:.2g}" if value < 100 else f"{value:.0f}" for value in (low / size, high / size))
    return f"{first} {unit}" if first == last else f"{first} to {last} {unit}"
