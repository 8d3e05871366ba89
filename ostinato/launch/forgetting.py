"""The questions of the forgetting watch, on abilities that are not trained.

forgetting.source           rows of that source, judged by their ``answer`` if they have one
tasks of arithmetic alone   the families that they leave out; if there are none, longer operands and chains
any other task              short arithmetic, and plain questions whose answers have no verdict
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ostinato.config import Recipe
from ostinato.env.arithmetic import Family
from ostinato.env.tasks import load_tasks
from ostinato.every import Axis, Every
from ostinato.launch.inputs import RunInputs, make_sampling
from ostinato.model.flops import FlopModel, Work
from ostinato.pipeline.forgetting import Forgetting, Question, Scorer, count_questions
from ostinato.reward.verify import exact
from ostinato.run import RunFolder
from ostinato.types import Prompt

MAX_TOKENS = 48  # of an answer
USUAL_SHARE = 0.02  # share of a run's FLOPs that ``questions_for`` assumes
THINGS = ("the sea", "a bicycle", "rain", "bread", "a school", "the moon", "a river", "winter")
PLAIN = (
    "What is {}?",
    "Write one sentence about {}.",
    "Name two words that go with {}.",
    "Tell a child what {} is.",
)


def new_forgetting(inputs: RunInputs, trainer: Scorer, run: RunFolder, flops: FlopModel) -> Forgetting | None:
    """Make the forgetting watch of a run; None if it is off, or if the run is too short to afford it."""
    recipe, section = inputs.recipe, inputs.recipe.forgetting
    budget = Every.parse(recipe.trainer.budget, "trainer.budget")
    num_answers = estimate_answers(recipe, budget, flops)
    count = count_questions(round(num_answers * section.share / USUAL_SHARE)) if section.enabled else 0
    if not count:
        return None
    subject, prompts = choose_questions(recipe, count)
    sampling, renderer = make_sampling(recipe.rollout, inputs.renderer), inputs.renderer
    if not renderer.has_chat_template:
        prompts = [_to_text(prompt) for prompt in prompts]
    return Forgetting(
        questions=[Question(tokens=renderer.prompt(prompt), right=_new_judge(prompt)) for prompt in prompts],
        about=subject,
        sampling=replace(
            sampling, max_tokens=min(sampling.max_tokens, MAX_TOKENS), top_k=0, top_p=1.0, min_p=0.0
        ),
        scorer=trainer,
        flops=flops,
        log=run.forgetting,
        steps=recipe.trainer.steps,
        budget=budget.amount if budget.amount and budget.unit is Axis.FLOPS else math.inf,
        tokens_per_microbatch=recipe.trainer.tokens_per_microbatch,
        seed=recipe.seed,
        share=section.share,
        tolerance=section.tolerance,
    )


def estimate_answers(recipe: Recipe, budget: Every, flops: FlopModel) -> float:
    """Estimate the number of answers that a run samples in its steps, or in its budget of steps or FLOPs if
    that is less. Answers are assumed to have half of the largest length."""
    answers_per_step, tokens = (
        recipe.rollout.prompts_per_step * recipe.rollout.group_size,
        recipe.rollout.max_tokens / 2,
    )
    work, steps = (
        Work(tokens=tokens * answers_per_step, logits=tokens * answers_per_step),
        float(recipe.trainer.steps),
    )
    prices = {Axis.STEPS: 1.0, Axis.FLOPS: 2 * flops.forward(work) + flops.backward(work)}
    if budget.amount and budget.unit in prices:
        steps = min(steps, budget.amount / prices[budget.unit])
    return steps * answers_per_step


def choose_questions(recipe: Recipe, count: int) -> tuple[str, list[Prompt]]:
    """Choose ``count`` prompts; returns (their subject in words, prompts). There may be fewer, as a source or
    the longer arithmetic has no more."""
    section, seed = recipe.forgetting, recipe.task.seed
    if section.source:
        return section.source, load_tasks(section.source, "eval", seed, count, section.params)
    tasks = [*recipe.task.by_name.values()]
    arithmetic = [task.params for task in tasks if task.source == "arithmetic"]
    if len(arithmetic) < len(tasks):
        plain = [
            Prompt(uid=f"plain/{text}", messages=({"role": "user", "content": text},))
            for text in (form.format(thing) for thing in THINGS for form in PLAIN)
        ][: count // 2]
        params: dict[str, Any] = {"digits": 2, "terms": 3}
        return "short arithmetic and plain questions", [
            *_load_arithmetic(seed, count - len(plain), params),
            *plain,
        ]
    digits, terms = (
        max(item.get(key, default) for item in arithmetic) for key, default in (("digits", 3), ("terms", 5))
    )
    families = {family for item in arithmetic for family in item.get("families", tuple(Family))}
    if others := [family for family in Family if family not in families]:
        params = {"families": others, "digits": digits, "terms": terms}
        return f"arithmetic that is not trained ({', '.join(others)})", _load_arithmetic(seed, count, params)
    params = {"digits": digits + 1, "terms": terms + 2}
    # of 8 times as many rows, enough are longer: many have no more than is trained
    longer = [item for item in _load_arithmetic(seed, 8 * count, params) if _is_longer(item, digits, terms)]
    return f"longer arithmetic (to {digits + 1} digits, {terms + 2} terms)", longer[:count]


def _load_arithmetic(seed: int, count: int, params: dict[str, Any]) -> list[Prompt]:
    return load_tasks("arithmetic", "eval", seed, count, params)


def _is_longer(prompt: Prompt, digits: int, terms: int) -> bool:
    """Whether an expression has more terms, or a longer operand, than is trained."""
    words = str(prompt.columns["expression"]).split()
    # n terms are n operands and n - 1 operators
    return len(words) > 2 * terms - 1 or any(len(word) > digits for word in words if word.isdigit())


def _to_text(prompt: Prompt) -> Prompt:
    """Return the prompt as plain text, without roles and tools, for a model without a chat template."""
    text = "\n".join(message["content"] for message in prompt.messages or ())
    return prompt if prompt.messages is None else replace(prompt, messages=None, text=text)


def _new_judge(prompt: Prompt) -> Callable[[str], bool] | None:
    """Make the function that judges a text as the prompt's answer; None for a prompt without an answer."""
    answer = prompt.columns.get("answer")
    if answer is None:
        return None
    return lambda text: exact([text], [answer])[0] == 1
