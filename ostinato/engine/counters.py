"""What an engine has done, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What the engine did since it was made."""

    steps: int = 0
    prefilled: int = 0  # tokens run to fill the cache
    decoded: int = 0  # tokens sampled
    cached: int = 0  # prompt tokens found in the prefix tree
    preempted: int = 0
    errors: int = 0
    drafted: int = 0  # draft tokens run
    accepted: int = 0  # of them, those that were what was sampled
    cut_drafts: int = 0  # draft tokens given up for want of KV blocks
    passes: int = 0  # sums over the steps the sequences that were given tokens
    seconds: float = 0.0  # in steps, drafting included
    seconds_without: float = (
        0.0  # that plain decoding would have taken for the same tokens, by the cost table
    )
