"""Drafts by script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ostinato.history.scripted import ScriptedDrafter
from ostinato.types import Emitted, Request, Running, Sampling

FREE = np.full(65, 1e-3)  # seconds of a pass: cost is nothing to a script


def request(
    tokens: Sequence[int], *, seed: Sequence[int] = (1,), uid: str = "p", temperature: float = 1.0
) -> Request:
    return Request(
        tokens=np.array(tokens, np.int32),
        sampling=Sampling(temperature=temperature),
        seed=tuple(seed),
        uid=uid,
    )


def running(*handles: int, room: int = 40, seconds: np.ndarray = FREE, leaves: int = 1) -> Running:
    return Running(
        handles=np.array(handles, np.int64),
        room=np.full(len(handles), room, np.int32),
        weights=np.ones(len(handles), np.float32),
        seconds=seconds,
        leaves=leaves,
    )


def emitted(
    handle: int, tokens: Sequence[int], *, ended: bool = False, prob: float = 1.0, edge: float = 0.0
) -> Emitted:
    n = len(tokens)
    return Emitted(
        handles=np.array([handle], np.int64),
        counts=np.array([n], np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.full(n, prob, np.float32),
        edges=np.full(n, edge, np.float32),
        ended=np.array([ended]),
    )


def test_a_script_is_proposed_up_to_its_length_the_room_and_the_pass() -> None:
    drafter = ScriptedDrafter(lambda _, tokens: np.arange(len(tokens), len(tokens) + 9), length=5)
    handle = drafter.open(request([1, 2]))
    assert drafter.propose(running(handle)).tokens.tolist() == [2, 3, 4, 5, 6]
    assert drafter.propose(running(handle, room=2)).parents.tolist() == [-1, 0]
    assert drafter.propose(running(handle, seconds=FREE[:2])).tokens.tolist() == [2]
    drafter.observe(emitted(handle, [7, 7]))
    assert drafter.propose(running(handle)).tokens.tolist() == [4, 5, 6, 7, 8]
    drafter.observe(emitted(handle, [], ended=True))
    with pytest.raises(KeyError):
        drafter.propose(running(handle))


def test_scripted_trees_merge_what_begins_alike_and_add_decoys_to_a_single_row() -> None:
    rows = np.array([[4, 5, 6], [4, 7, -1], [8, -1, -1]])
    drafter = ScriptedDrafter(lambda *_: rows, tree=True)
    handle = drafter.open(request([1]))
    drafts = drafter.propose(running(handle, leaves=3))
    assert (drafts.tokens.tolist(), drafts.parents.tolist()) == ([4, 5, 6, 7, 8], [-1, 0, 1, 0, -1])
    assert drafter.propose(running(handle, leaves=1)).tokens.tolist() == [4, 5, 6]
    decoys = ScriptedDrafter(lambda *_: np.array([4, 0]), tree=True)
    drafts = decoys.propose(running(decoys.open(request([1])), leaves=3))
    assert (drafts.tokens.tolist(), drafts.parents.tolist()) == ([4, 0, 3, 1], [-1, 0, -1, 0])
