"""Small environments for ``task.env`` that our own small model learns on a laptop."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from ostinato.env.tools import EQUALS

_NUMBER = re.compile(r"-?[0-9]+")


class GuessNumber:
    """Find a number from ``low`` to ``high`` in ``tries`` guesses; each wrong guess is answered by
    "higher" or "lower". The last number of an answer is the guess. The reward is 1 for the right guess."""

    def __init__(self, low: int = 1, high: int = 10, tries: int = 4) -> None:
        if not low < high or tries < 1:
            raise ValueError(f"low is {low}, high {high}, tries {tries}; use low < high and at least one try")
        self._low, self._high, self._tries = low, high, tries
        self._secret = low

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self._secret, self._left = random.Random(seed).randint(self._low, self._high), self._tries
        return f"Guess a number from {self._low} to {self._high}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        numbers = _NUMBER.findall(action)
        if numbers and int(numbers[-1]) == self._secret:
            return "right", 1.0, True, False, {}
        reply = "no number" if not numbers else "higher" if int(numbers[-1]) < self._secret else "lower"
        return reply, 0.0, self._left == 0, False, {}


class PriceList:
    """Find a price that only a lookup reveals. An answer that ends in "item =" is a lookup, and the price of
    this item is the reply. Any other answer is final, and so is every answer after ``lookups`` lookups. Use
    ``rollout.stop = ["="]``, so that the policy does not write the price itself, as with the calculator of
    GSM8K (arXiv 2110.14168). Prices are drawn anew in each episode, from 1 to ``items``. The right lookup is
    worth 0.3, and the right price after it 0.7 more."""

    def __init__(self, items: int = 9, lookups: int = 2) -> None:
        if items < 2 or lookups < 1:
            raise ValueError(f"items is {items}, lookups {lookups}; use at least 2 items and 1 lookup")
        self._items, self._lookups = items, lookups

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        rng = random.Random(seed)
        self._prices = [rng.randint(1, self._items) for _ in range(self._items)]
        self._item, self._left, self._has_price = rng.randint(1, self._items), self._lookups, False
        return f"What is the price of {self._item}? Look up: {self._item}=", {}

    def lookup(self, item: int) -> int | None:
        """Return the price of an item; None if there is no such item."""
        return self._prices[item - 1] if 1 <= item <= self._items else None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        match = EQUALS.search(action)
        if match and self._left:
            self._left -= 1
            price, is_new = self.lookup(int(match[1])), int(match[1]) == self._item and not self._has_price
            self._has_price, reward = self._has_price or is_new, 0.3 if is_new else 0.0
            return ("none" if price is None else str(price)), reward, False, False, {}
        numbers = _NUMBER.findall(action)
        is_right = bool(numbers) and int(numbers[-1]) == self._prices[self._item - 1]
        return "", 0.7 if is_right and self._has_price else 0.0, True, False, {}
