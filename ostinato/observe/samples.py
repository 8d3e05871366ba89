"""Recorded trajectories, read from the frames of one step at a time, for the page and ``ostinato show``."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ostinato.inputs import parse_json
from ostinato.observe.rows import Row
from ostinato.render import Renderer
from ostinato.routes import routes_from_json
from ostinato.run import JsonlZst, to_json

BUDGET_BYTES = 6_000_000  # size of the groups in a page, as base64
GROUPS_PER_STEP = 32  # most in a page
PAIRS = 3  # prompts that are shown before and after
LOOKED_BACK = 8  # last steps in which prompts of the first step are searched
TOKENS_PER_ANSWER = 2048  # shown one by one
CHARACTERS = 20_000  # most that are shown of a prompt, a tool's reply or a column
PREVIEW = 72  # characters of a prompt in the list

_BROKEN = "\ufffd"  # what a part of a UTF-8 character decodes to
_STEP = re.compile(rb'^\{"step":(\d+),')


class Frame(NamedTuple):
    """A zstd frame of trajectories.jsonl.zst, written by one step."""

    start: int  # in bytes of the file
    stop: int
    step: int


class Samples:
    """The groups of trajectories.jsonl.zst; the groups of the last step read stay in memory.

    With a ``renderer``, answers are shown token by token, and contexts as text."""

    def __init__(self, path: Path, renderer: Renderer | None) -> None:
        self._log, self._pieces = JsonlZst(path), Pieces(renderer) if renderer else None
        self._frames: list[Frame] = []
        self._inode, self._unread = -1, 0  # unread: bytes at the end that are no whole frame
        self._read: list[Frame] = []
        self._groups: list[list[Row]] = []

    @property
    def steps(self) -> list[int]:
        """All recorded steps; reads the headers of frames added since the last call."""
        try:
            with self._log.path.open("rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
                end = self._frames[-1].stop if self._frames else 0
                if inode != self._inode or size < end:  # the file was replaced by a resumed run
                    self._frames, self._inode, end = [], inode, 0
                while (frame := self._read_frame(file, end)) and (step := _STEP.match(frame[1])):
                    self._frames.append(Frame(end, frame[0], int(step[1])))
                    end = frame[0]
                self._unread = size - end
        except FileNotFoundError:
            self._frames = []
        return list(dict.fromkeys(frame.step for frame in self._frames))

    def index(self, step: int = -1) -> dict[str, Any]:
        """{"steps": all recorded steps, "groups": the groups of ``step``, or of the last step if that is not
        recorded, without answers}."""
        steps = self.steps
        shown_step = step if step in steps else next(reversed(steps), -1)
        return {"steps": steps, "groups": [_list_group(rows) for rows in self.groups(shown_step)]}

    def group(self, step: int, place: int) -> dict[str, Any]:
        """The group at index ``place`` of the step's ``groups``. Raises ValueError if there is none."""
        groups = self.groups(step)
        if not 0 <= place < len(groups):
            raise ValueError(f"step {step} has no group {place}")
        return self._content(groups[place])

    def groups(self, step: int) -> list[list[Row]]:
        """The rows of a step by group; empty for frames that can no longer be read."""
        frames = [frame for frame in self._frames if frame.step == step]
        if frames != self._read:
            rows = (row for frame in frames for row in self._rows(frame))
            self._read, self._groups = frames, list(_group_rows(rows))
        return self._groups

    def _read_frame(self, file: BinaryIO, start: int) -> tuple[int, bytes] | None:
        """(end, content) of the frame at ``start``; None if it is incomplete or too large."""
        with suppress(ValueError):
            return self._log.frame(file, start)
        return None

    def _rows(self, frame: Frame) -> Iterator[Row]:
        """Yield the trajectories of a frame, up to the first invalid row."""
        with suppress(OSError, ValueError), self._log.path.open("rb") as file:
            for line in (self._read_frame(file, frame.start) or (0, b""))[1].splitlines():
                if isinstance(row := parse_json(line, surrogates=True), dict):
                    yield row

    def pairs(self) -> list[dict[str, Any]]:
        """Answers to prompts of the first recorded step, each paired with the latest answer to the same
        prompt; if none was recorded again, answers of the first and the last step to different prompts.
        [{"same": whether prompts are equal, "before": {uid, prompt, step, text, reward, stop}, "after"}]."""
        steps = self.steps
        if len(steps) < 2:
            return []
        first = {str(rows[0]["uid"]): rows[0] for rows in self.groups(steps[0])}
        latest_rows: dict[str, Row] = {}
        for step in reversed(steps[1:][-LOOKED_BACK:]):
            for rows in self.groups(step):
                uid = str(rows[0]["uid"])
                if uid in first and uid not in latest_rows and len(latest_rows) < PAIRS:
                    latest_rows[uid] = rows[0]
        last = [rows[0] for rows in self.groups(steps[-1])]
        pairs = [(first[uid], row) for uid, row in latest_rows.items()] or list(
            zip(first.values(), last, strict=False)
        )[:PAIRS]
        return [
            {"same": bool(latest_rows), "before": _describe_side(before), "after": _describe_side(after)}
            for before, after in pairs
        ]

    def packed(self, budget: int = BUDGET_BYTES) -> dict[str, Any]:
        """The part of the groups that fits into a page: {"groups": as in ``index``, each with "data", the
        rest as base64 of deflated JSON; "recorded": all steps; "left_out": number of groups without room;
        "unread": bytes at the end that are no whole frame}. The first and the last step take precedence."""
        steps = self.steps
        max_groups = max(4, min(GROUPS_PER_STEP, 256 // max(1, len(steps))))
        shown_groups: dict[int, list[dict[str, Any]]] = {}
        left_out = 0
        for step in (steps[index] for index in spread(len(steps))):
            groups = self.groups(step)
            for rows in groups[:max_groups]:
                data = base64.b64encode(zlib.compress(to_json(self._content(rows)).encode(), 6)).decode()
                if len(data) <= budget or not shown_groups:
                    shown_groups.setdefault(step, []).append({**_list_group(rows), "data": data})
                    budget -= len(data)
            left_out += len(groups) - len(shown_groups.get(step, ()))
        shown = [group for step in sorted(shown_groups) for group in shown_groups[step]]
        return {"groups": shown, "recorded": steps, "left_out": left_out, "unread": self._unread}

    def _content(self, rows: Sequence[Row]) -> dict[str, Any]:
        """A group in the format of samples.js."""
        return {**_prompt(rows[0]), "answers": [_answer(row, self._pieces) for row in rows]}


def held_out_pairs(evals: Sequence[Row]) -> list[dict[str, Any]]:
    """Pairs of answers to the same held-out prompts, from the first and the last of ``evals`` with answers,
    in the format of ``Samples.pairs``."""
    rows = [row for row in evals if row.get("answers")]
    if len(rows) < 2:
        return []
    first, last = ({str(answer["uid"]): answer for answer in row["answers"]} for row in (rows[0], rows[-1]))
    steps = {"before": rows[0]["step"], "after": rows[-1]["step"]}
    return [
        {
            "same": True,
            "before": {**answer, "step": steps["before"]},
            "after": {**last[uid], "step": steps["after"]},
        }
        for uid, answer in first.items()
        if uid in last
    ]


def spread(n: int) -> list[int]:
    """0 to n - 1 in the order ends, middle, middles of the halves, ...

    >>> spread(5)
    [0, 4, 2, 1, 3]
    """
    order, gaps = list(dict.fromkeys([0, n - 1]))[:n], [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _group_rows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each group: siblings are adjacent; a new prompt or a lower sample begins a group."""
    group: list[Row] = []
    for row in rows:
        is_sibling = group and (row["step"], row["uid"]) == (group[0]["step"], group[0]["uid"])
        if group and (not is_sibling or row["sample"] <= group[-1]["sample"]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


# ---- the page's format


def _list_group(rows: Sequence[Row]) -> dict[str, Any]:
    """The entry of a group in the list of groups: step, uid, beginning of the prompt, rewards."""
    messages = _prompt(rows[0])["messages"]
    return {
        "step": int(rows[0]["step"]),
        "uid": str(rows[0]["uid"]),
        "preview": " ".join(messages[-1]["content"].split())[:PREVIEW] if messages else "",
        "rewards": [row.get("reward") for row in rows],
    }


def _describe_side(row: Row) -> dict[str, Any]:
    """One side of a pair, see ``Samples.pairs``."""
    text = "\n".join(str(turn.get("text") or "") for turn in row.get("turns") or ())
    messages = _prompt(row)["messages"]
    columns = row.get("columns") or {}
    return {
        "uid": str(row["uid"]),
        "prompt": messages[-1]["content"] if messages else "",
        **({"answer": _clip(_text(columns["answer"]))} if "answer" in columns else {}),
        "step": row["step"],
        "text": _clip(text),
        "reward": row.get("reward"),
        "stop": row.get("stop"),
    }


def _answer(row: Row, pieces: Pieces | None) -> dict[str, Any]:
    """A trajectory in the page's format, cut after ``TOKENS_PER_ANSWER`` tokens."""
    turns, num_left = [], TOKENS_PER_ANSWER
    for turn in row.get("turns") or ():
        turns.append(_turn(turn, pieces, num_left))
        num_left = max(0, num_left - len(turn["tokens"]))
    fields = ("sample", "seed", "stop", "ended", "error", "reward", "advantage", "reason", "parts", "extra")
    last_reply = _clip(row.get("last_reply") or "")
    return {**{key: row.get(key) for key in fields}, "last_reply": last_reply, "turns": turns}


def _turn(turn: Mapping[str, Any], pieces: Pieces | None, most: int) -> dict[str, Any]:
    """A turn in the page's format, with arrays of the first ``most`` tokens: log-probabilities rounded to
    three decimals, one version if all are equal, experts as a flat list of layers x top_k per token.
    ``injected``: indices of tokens that were inserted, not sampled; they have no log-probability, and the
    version of the token before."""
    tokens, injected = turn["tokens"], turn.get("injected") or []
    versions: list[int] = []
    for version in turn["versions"]:  # -1: a token that no policy sampled
        versions.append(versions[-1] if version < 0 and versions else version)
    packed = turn.get("experts")  # a list in older runs, which is not shown
    experts = routes_from_json(packed) if isinstance(packed, Mapping) else None
    return {
        "num_tokens": len(tokens),
        "num_context": len(turn["context"]),
        "context": _clip(pieces.text(turn["context"])) if pieces else None,
        "tokens": tokens[:most],
        "pieces": pieces.split(tokens[:most]) if pieces else None,
        "logprobs": [
            None if value is None or index in injected else round(value, 3)
            for index, value in enumerate(turn["logprobs"][:most])
        ],
        "injected": [index for index in injected if index < most],
        "versions": versions[:1] if len(set(versions)) == 1 else versions[:most],
        "experts": experts[:most].ravel().tolist() if experts is not None else None,
        "routing": list(experts.shape[1:]) if experts is not None else None,  # [moe_layers, top_k]
        "text": _clip(turn["text"]),
        "stop": turn["stop"],
    }


def _prompt(row: Row) -> dict[str, Any]:
    """Messages and columns of a trajectory's prompt, each cut to ``CHARACTERS``."""
    prompt, columns = row.get("prompt"), row.get("columns") or {}
    chat = prompt if isinstance(prompt, list) else [{"role": "", "content": prompt}]
    return {
        "messages": [
            {"role": str(message.get("role", "")), "content": _clip(_text(message.get("content")))}
            for message in chat
        ],
        "columns": {str(name): _clip(_text(value)) for name, value in columns.items()},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _clip(text: str) -> str:
    """The first ``CHARACTERS`` of a text, with a note on the number of the others."""
    num_hidden = len(text) - CHARACTERS
    return (
        text
        if num_hidden <= 0
        else f"{text[:CHARACTERS]} … ({num_hidden:,} more characters in the run folder)"
    )


class Pieces:
    """Texts of single tokens, which join to the text of their sequence."""

    def __init__(self, renderer: Renderer) -> None:
        self._decode = renderer.decode
        self._anchor = [int(token) for token in renderer.encode("a")]  # decoders trim the start of a text
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special=False)

    def split(self, tokens: Sequence[int]) -> list[str]:
        """One string per token; a character of several tokens belongs to the first, and the others are
        empty."""
        pieces = [self._alone(token) for token in tokens]
        start = 0
        while start < len(tokens):
            stop = start
            while stop < len(tokens) and _BROKEN in pieces[stop]:
                stop += 1
            if stop - start > 1:
                pieces[start:stop] = [self._decode_inside(tokens[start:stop]), *[""] * (stop - start - 1)]
            start = max(stop, start + 1)
        return pieces

    def _alone(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode_inside([token])
        return self._known[token]

    def _decode_inside(self, tokens: Sequence[int]) -> str:
        """The text of tokens inside a longer text, untrimmed."""
        return self.text([*self._anchor, *tokens])[len(self.text(self._anchor)) :]
