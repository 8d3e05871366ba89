"""School arithmetic without a download: five families of problems, an endless stream for each seed.

A problem is its expression ("347 + 586"). The hash of the expression, not of the sentence around it,
decides whether the problem belongs to training or to evaluation, so no evaluation problem is ever
trained on, in any phrasing or order of its operands, with any seeds and parameters.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from ostinato.types import Prompt

EVAL_SHARE = 8  # one expression in 8 belongs to the evaluation split
MAX_DRAWS_PER_PROMPT = 200  # draws without a new problem, before a parameter space counts as exhausted
PHRASINGS = ("What is {}?", "Compute {}.", "{} = ?")


class Family(StrEnum):
    """The kind of a problem; every answer is a natural number."""

    SUM = "sum"  # 347 + 586
    DIFFERENCE = "difference"  # 812 - 347, never below zero
    PRODUCT = "product"  # 7 * 468
    REMAINDER = "remainder"  # 347 mod 7
    CHAIN = "chain"  # 7 + 8 - 5 + 9, never below zero on the way


def draw_prompts(
    split: str, seed: int, n: int, *, families: Sequence[str] = tuple(Family), digits: int = 3, terms: int = 5
) -> list[Prompt]:
    """Return ``n`` distinct problems of ``split`` ("train" or "eval"), as chat prompts.

    ``families`` are drawn evenly. ``digits`` is the maximum of digits of an operand of sum, difference,
    product and remainder (the minimum is 2), and ``terms`` the maximum of terms of a chain (the minimum is
    3). The same (split, seed, parameters) gives the same stream: a larger ``n`` only continues it. Columns:
    ``answer`` (a string), ``family``, ``expression``. The uid is the expression, so it is stable across runs.
    Raises ValueError for a bad parameter, and when the parameters allow fewer than ``n`` distinct problems.
    """
    _check_params(families, digits, terms)
    rng = random.Random(f"{split}/{seed}")  # a string seed is hashed in full: streams do not overlap
    draw_functions = _make_draw_functions(rng, digits, terms)
    prompts: dict[str, Prompt] = {}
    for _ in range(n):
        family = Family(rng.choice(families))
        for _ in range(MAX_DRAWS_PER_PROMPT):
            expression, answer = draw_functions[family]()
            if assign_split(expression) == split and expression not in prompts:
                break
        else:
            raise ValueError(
                f"n is {n}, but the {split} split has no more than about {len(prompts)} distinct problems"
                f" of families {[str(f) for f in families]} with digits={digits} and terms={terms};"
                " lower n or raise digits or terms"
            )
        prompts[expression] = _make_prompt(expression, answer, family, rng.choice(PHRASINGS))
    return list(prompts.values())


def assign_split(expression: str) -> str:
    """Return the split of an expression, by the SHA-256 of its sorted words: 0 modulo EVAL_SHARE is "eval".

    The words are sorted so that 347 + 586 and 586 + 347 are in the same split.
    """
    digest = hashlib.sha256(" ".join(sorted(expression.split())).encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def _make_prompt(expression: str, answer: int, family: Family, phrasing: str) -> Prompt:
    return Prompt(
        uid=f"arithmetic/{expression}",
        messages=({"role": "user", "content": phrasing.format(expression)},),
        columns={"answer": str(answer), "family": str(family), "expression": expression},
    )


def _make_draw_functions(
    rng: random.Random, digits: int, terms: int
) -> Mapping[Family, Callable[[], tuple[str, int]]]:
    """Return, for each family, a function that draws (expression, answer) from ``rng``."""

    def draw_number() -> int:
        """Draw the number of digits uniformly, then the number, so that short numbers are not rare."""
        length = rng.randint(2, digits)
        return rng.randrange(10 ** (length - 1), 10**length)

    def draw_sum() -> tuple[str, int]:
        a, b = draw_number(), draw_number()
        return f"{a} + {b}", a + b

    def draw_difference() -> tuple[str, int]:
        b, a = sorted((draw_number(), draw_number()))
        return f"{a} - {b}", a - b

    def draw_product() -> tuple[str, int]:
        a, b = rng.randint(2, 9), draw_number()
        return f"{a} * {b}", a * b

    def draw_remainder() -> tuple[str, int]:
        a, b = draw_number(), rng.randint(3, 9)
        return f"{a} mod {b}", a % b

    def draw_chain() -> tuple[str, int]:
        total = rng.randint(1, 9)
        expression = str(total)
        for _ in range(rng.randint(3, terms) - 1):
            term = rng.randint(1, 9)
            sign = rng.choice((1, -1)) if term <= total else 1
            total += sign * term
            expression += f" {'+' if sign > 0 else '-'} {term}"
        return expression, total

    return {
        Family.SUM: draw_sum,
        Family.DIFFERENCE: draw_difference,
        Family.PRODUCT: draw_product,
        Family.REMAINDER: draw_remainder,
        Family.CHAIN: draw_chain,
    }


def _check_params(families: Sequence[str], digits: int, terms: int) -> None:
    """Raise ValueError for an unknown family and for numbers out of range."""
    if isinstance(families, str) or not families:
        raise ValueError(f"arithmetic: families is {families!r}; use a list of {[str(f) for f in Family]}")
    for family in families:
        if family not in tuple(Family):
            raise ValueError(f"arithmetic: families has {family!r}; use some of {[str(f) for f in Family]}")
    if not 2 <= digits <= 18:
        raise ValueError(f"arithmetic: digits is {digits}; use 2 to 18")
    if not 3 <= terms <= 100:
        raise ValueError(f"arithmetic: terms is {terms}; use 3 to 100")
