"""The answers of a run, the newest first, as far as they match: read frame by frame, a little at a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ostinato.observe.board.tail import Frame, Frames
from ostinato.observe.report.reading import Row, number, numbers
from ostinato.observe.report.samples import clip, prompt_texts

PAGE = 24  # answers in one reply
SECONDS = 1.0  # of looking, for one reply
FRAMES = 16  # that are kept as they were read
ANY = (float("-inf"), float("inf"))


class Verdict(StrEnum):
    ALL = "all"
    SOLVED = "solved"
    UNSOLVED = "unsolved"
    TRUNCATED = "truncated"
    FAULT = "fault"  # or without a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which answers, and from where on: ``step`` and those before it (-1: the last), then what an earlier
    reply gave as ``next``."""

    verdict: Verdict = Verdict.ALL
    find: str = ""  # in prompt or answer; letters of either case
    low: float = ANY[0]  # of the reward
    high: float = ANY[1]
    step: int = -1
    after: tuple[int, int] | None = None  # (offset of a frame, place in it)


class Answers:
    """The answers in trajectories.jsonl.zst, without their tokens; a few frames stay at hand."""

    def __init__(self, path: Path, solved_at: float) -> None:
        self._frames, self._solved_at = Frames(path), solved_at
        self._kept: OrderedDict[Frame, list[dict[str, Any]]] = OrderedDict()

    def browse(self, query: Query, seconds: float = SECONDS) -> dict[str, Any]:
        """{"answers": at most ``PAGE``, "next": where to go on, None at the beginning of the run, "at": the
        step that was looked at last, "steps": all there are}. Where little matches, a reply may be empty."""
        deadline, found, then, at = time.monotonic() + seconds, list[dict[str, Any]](), None, None
        self._frames.refresh()
        first, place = query.after or (None, 0)
        coming = [
            frame
            for frame in reversed(self._frames.frames)
            if (query.step < 0 or frame.step <= query.step) and (first is None or frame.offset <= first)
        ]
        for frame, before in zip(coming, [*coming, None][1:], strict=True):
            at, start = frame.step, place if frame.offset == first else 0
            those = [(i, one) for i, one in enumerate(self._of(frame)) if i >= start and _matches(one, query)]
            room = PAGE - len(found)
            found += [one for _, one in those[:room]]
            then = (before.offset, 0) if before else None
            if len(those) > room:
                then = (frame.offset, those[room][0])
            if len(found) == PAGE or time.monotonic() > deadline:
                break
        steps = list(dict.fromkeys(frame.step for frame in self._frames.frames))
        return {"answers": found, "next": then and list(then), "at": at, "steps": steps}

    def _of(self, frame: Frame) -> list[dict[str, Any]]:
        if frame not in self._kept:
            self._kept[frame] = [_shown(row, self._solved_at) for row in self._frames.rows(frame)]
            while len(self._kept) > FRAMES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(frame)
        return self._kept[frame]


def _matches(answer: Mapping[str, Any], query: Query) -> bool:
    reward, bounds = answer["reward"], (query.low, query.high)
    if bounds != ANY and (reward is None or not query.low <= reward <= query.high):
        return False
    tone, verdict = answer["tone"], query.verdict
    judged = verdict is Verdict.ALL or tone == verdict
    if not (judged or (verdict is Verdict.TRUNCATED and answer["stop"] == "length")):
        return False
    if not query.find:
        return True
    texts = [answer["uid"], *(one["content"] for one in answer["messages"])]
    texts += [turn["text"] for turn in answer["turns"]]
    return query.find.casefold() in "\n".join(map(str, texts)).casefold()


def _shown(row: Row, solved_at: float) -> dict[str, Any]:
    """What the page shows of a trajectory."""
    reward, turns = number(row, "reward"), row.get("turns") or []
    versions = [version for turn in turns for version in turn.get("versions", ()) if version >= 0]
    messages, columns = prompt_texts(row)
    solved = Verdict.SOLVED if reward is not None and reward >= solved_at else Verdict.UNSOLVED
    return {
        **{key: row.get(key) for key in ("step", "uid", "sample", "stop", "error", "reason")},
        "reward": reward,
        "parts": numbers(row.get("parts") or {}),
        "tone": Verdict.FAULT if reward is None or row.get("error") else solved,
        "messages": messages,
        "columns": columns,
        "versions": [min(versions), max(versions)] if versions else [],
        "turns": [
            {"text": clip(str(turn.get("text", ""))), "tokens": len(turn.get("tokens", ()))} for turn in turns
        ],
    }
