"""Answers to school arithmetic by a careless crowd, in the steps that recipes/seed_moe.py teaches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import zip_longest

CARELESS = 0.75  # the share of answers whose writer forgets and misremembers
FORGETS = 0.5  # of these, at each carry, borrow, remainder or minus sign
MISREMEMBERS = 0.1  # and at each fact: one too many or too few


def write(expression: str, rng: random.Random) -> tuple[list[str], int]:
    """Steps, and the number that they lead to; ``expression`` as ``ostinato.env.arithmetic`` has it."""
    return _steps(expression, rng if rng.random() < CARELESS else None)


def _steps(expression: str, rng: random.Random | None) -> tuple[list[str], int]:
    """(steps, the answer they lead to); without ``rng`` every step is right."""
    words = expression.split()
    a, sign, b = words[:3]

    def forgets() -> bool:
        return rng is not None and rng.random() < FORGETS

    def recall(value: int) -> int:
        slipped = rng is not None and rng.random() < MISREMEMBERS
        return abs(value + rng.choice((-1, 1))) if rng is not None and slipped else value

    steps, total, carry, place = [], 0, 0, 1
    if sign == "mod":
        left = int(a[0])
        for digit in a[1:]:
            value = 10 * left + int(digit)
            left = recall(value % int(b))
            steps.append(f"{value}%{b}={left}")
            left = 0 if left and forgets() else left
        return steps, left
    if len(words) > 3:  # a chain
        total = int(a)
        for symbol, term in zip(words[1::2], words[2::2], strict=True):
            used = "+" if symbol == "-" and (forgets() or total < int(term)) else symbol
            value = recall(total + int(term) if used == "+" else total - int(term))
            steps.append(f"{total}{used}{term}={value}")
            total = value
        return steps, total
    for x, y in ((int(a), int(y)) for y in reversed(b)) if sign == "*" else _columns(a, b):
        if sign == "-":
            lent = x < y + carry
            value = recall(x + 10 * lent - y - carry)
            steps.append(f"{x + 10 * lent}-{y}" + ("-1" if carry else "") + f"={value}")
            carry = int(lent and not forgets())
        else:
            value = recall(x * y + carry if sign == "*" else x + y + carry)
            steps.append(f"{x}{sign}{y}" + (f"+{carry}" if carry else "") + f"={value}")
            carry = 0 if value > 9 and forgets() else value // 10
        total, place = total + value % 10 * place, place * 10
    return steps, total + (carry * place if sign != "-" else 0)


def _columns(a: str, b: str) -> Iterator[tuple[int, int]]:
    return ((int(x), int(y)) for x, y in zip_longest(reversed(a), reversed(b), fillvalue="0"))
