"""The trajectories that go into the page: one deflated chunk per group, opened only when it is looked at.

A page has a budget of bytes. Each recorded step gets its first group before any gets its second, the first
and the last step before those between; what is left out is counted, and stays in the run folder.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.observe.report.reading import Row
from ostinato.render import Renderer
from ostinato.routes import routes_from_json
from ostinato.run import JsonlZst, to_json

BUDGET_BYTES = 6_000_000  # of all chunks, as base64
GROUPS_PER_STEP = 32
TOKENS_PER_ANSWER = 2048  # shown one by one
CHARACTERS = 20_000  # of a prompt, a tool's reply or a column
PREVIEW = 72  # characters of a prompt in the list

_BROKEN = "\ufffd"  # what a part of a UTF-8 character decodes to


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A group: what the list shows of it, and ``data``, the rest as base64 of deflated JSON."""

    step: int
    uid: str
    preview: str
    rewards: tuple[float | None, ...]
    cut_tokens: int  # of overlong answers, not in data
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """``recorded`` and ``shown`` count trajectories; ``damage`` is a sentence, empty for a whole log."""

    chunks: tuple[Chunk, ...]
    recorded: int
    damage: str

    @property
    def shown(self) -> int:
        return sum(len(chunk.rewards) for chunk in self.chunks)

    @property
    def cut_tokens(self) -> int:
        return sum(chunk.cut_tokens for chunk in self.chunks)


def pack_samples(log: JsonlZst, renderer: Renderer | None, *, budget: int = BUDGET_BYTES) -> Samples:
    """Read the log once and keep what fits. Damage ends the reading and is reported, not raised."""
    pieces = Pieces(renderer) if renderer else None
    by_step: dict[int, list[Chunk]] = {}
    most = _groups_per_step(log, budget)
    recorded, held = 0, 0
    damage: list[str] = []
    for rows in groups_of(_whole(log, damage)):
        recorded += len(rows)
        chunks = by_step.setdefault(int(rows[0]["step"]), [])
        if len(chunks) < most:
            chunks.append(_chunk(rows, pieces))
            held += len(chunks[-1].data)
        if held > 4 * budget:  # a long run is thinned as it is read
            by_step = choose(by_step, 2 * budget)
            held = sum(len(chunk.data) for chunks in by_step.values() for chunk in chunks)
    kept = choose(by_step, budget)
    chunks = tuple(chunk for step in sorted(kept) for chunk in kept[step])
    return Samples(chunks=chunks, recorded=recorded, damage="".join(damage))


def _groups_per_step(log: JsonlZst, budget: int) -> int:
    """Groups of a step to pack: fewer for a long log, as a chunk is about as large as its group in it."""
    size = log.path.stat().st_size if log.path.exists() else 0
    return GROUPS_PER_STEP if size <= budget else max(1, round(GROUPS_PER_STEP * 2 * budget / size))


def choose(by_step: Mapping[int, Sequence[Chunk]], budget: int) -> dict[int, list[Chunk]]:
    """As many chunks as fit into ``budget`` bytes, spread over the steps; at least one is always kept."""
    ranks = {sorted(by_step)[index]: rank for rank, index in enumerate(spread(len(by_step)))}
    places = [(turn, ranks[step], step) for step, chunks in by_step.items() for turn in range(len(chunks))]
    kept: dict[int, list[Chunk]] = {}
    for turn, _, step in sorted(places):
        chunk = by_step[step][turn]
        if len(chunk.data) <= budget or not kept:
            kept.setdefault(step, []).append(chunk)
            budget -= len(chunk.data)
    return kept


def spread(n: int) -> list[int]:
    """0 to n - 1: the ends, then the middle, then the middles of the halves ...

    >>> spread(5)
    [0, 4, 2, 1, 3]
    """
    order = list(dict.fromkeys([0, n - 1]))[:n]
    gaps = [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _whole(log: JsonlZst, damage: list[str]) -> Iterator[Row]:
    """The rows up to where the log is damaged."""
    try:
        yield from log.rows()
    except ValueError as error:
        damage.append(f"{log.path.name} is damaged ({error}); later samples are not shown.")


def groups_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows by group. Siblings are adjacent in the log; a new prompt or a lower sample begins a new group."""
    group: list[Row] = []
    for row in rows:
        same = group and (row["step"], row["uid"]) == (group[0]["step"], group[0]["uid"])
        if group and (not same or row["sample"] <= group[-1]["sample"]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def listed(rows: Sequence[Row]) -> dict[str, Any]:
    """What the list of groups shows of a group: step, uid, the beginning of its prompt, rewards."""
    first = rows[0]
    messages = _prompt(first)["messages"]
    return {
        "step": int(first["step"]),
        "uid": str(first["uid"]),
        "preview": " ".join(messages[-1]["content"].split())[:PREVIEW] if messages else "",
        "rewards": tuple(row.get("reward") for row in rows),
    }


def content(rows: Sequence[Row], pieces: Pieces | None) -> tuple[dict[str, Any], int]:
    """(a group in the format of samples.js, number of tokens cut from overlong answers)."""
    answers, cuts = zip(*(_answer(row, pieces) for row in rows), strict=True)
    return {**_prompt(rows[0]), "answers": answers}, sum(cuts)


def _chunk(rows: Sequence[Row], pieces: Pieces | None) -> Chunk:
    shown, cut = content(rows, pieces)
    data = base64.b64encode(zlib.compress(to_json(shown).encode(), 4)).decode()
    return Chunk(**listed(rows), cut_tokens=cut, data=data)


def _answer(row: Row, pieces: Pieces | None) -> tuple[dict[str, Any], int]:
    """(what the page shows of a trajectory, how many of its tokens are cut)."""
    turns, left, cut = [], TOKENS_PER_ANSWER, 0
    for turn in row["turns"]:
        turns.append(_turn(turn, pieces, left))
        cut += max(0, len(turn["tokens"]) - left)
        left = max(0, left - len(turn["tokens"]))
    shown = ("sample", "seed", "stop", "error", "reward", "reason", "parts", "extra")
    return {**{key: row.get(key) for key in shown}, "turns": turns}, cut


def _turn(turn: Mapping[str, Any], pieces: Pieces | None, most: int) -> dict[str, Any]:
    """Arrays of the first ``most`` tokens: log-probabilities rounded to three decimals, one version if all
    are equal, experts as a flat list of layers x top_k per token. ``injected``: indices of tokens that were
    inserted, not sampled; they have no log-probability, and the version of the token before."""
    tokens, injected = turn["tokens"], turn.get("injected") or []
    put_in, versions = set(injected), _of_sampled(turn["versions"])
    packed = turn.get("experts")  # a list in older runs, whose routes were not packed: not shown
    experts = routes_from_json(packed) if isinstance(packed, Mapping) else None
    return {
        "num_tokens": len(tokens),
        "num_context": len(turn["context"]),
        "context": _clip(pieces.text(turn["context"])) if pieces else None,
        "tokens": tokens[:most],
        "pieces": pieces.split(tokens[:most]) if pieces else None,
        "logprobs": [
            None if value is None or place in put_in else round(value, 3)
            for place, value in enumerate(turn["logprobs"][:most])
        ],
        "injected": [place for place in injected if place < most],
        "versions": versions[:1] if len(set(versions)) == 1 else versions[:most],
        "experts": experts[:most].ravel().tolist() if experts is not None else None,
        "routing": list(experts.shape[1:]) if experts is not None else None,  # [moe_layers, top_k]
        "text": _clip(turn["text"]),
        "stop": turn["stop"],
    }


def _of_sampled(versions: Sequence[int]) -> list[int]:
    """-1, which stands at tokens that no policy sampled, becomes the version before it."""
    known: list[int] = []
    for version in versions:
        known.append(known[-1] if version < 0 and known else version)
    return known


def _prompt(row: Row) -> dict[str, Any]:
    """The messages of a trajectory's prompt, and its columns; overlong ones are cut."""
    prompt, columns = row.get("prompt"), row.get("columns") or {}
    chat = prompt if isinstance(prompt, list) else [{"role": "", "content": prompt}]
    messages = [{"role": str(m.get("role", "")), "content": _clip(_text(m.get("content")))} for m in chat]
    return {
        "messages": messages,
        "columns": {str(name): _clip(_text(value)) for name, value in columns.items()},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _clip(text: str) -> str:
    more = len(text) - CHARACTERS
    return text if more <= 0 else f"{text[:CHARACTERS]} … ({more:,} more characters in the run folder)"


class Pieces:
    """The text of each token of a sequence; joined, the pieces are the text of the whole."""

    def __init__(self, renderer: Renderer) -> None:
        self._decode = renderer.decode
        self._anchor = [int(token) for token in renderer.encode("a")]  # decoders trim the start of a text
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special=False)

    def split(self, tokens: Sequence[int]) -> list[str]:
        """One string per token. A character of several tokens is at the first; the others are empty."""
        pieces = [self._alone(token) for token in tokens]
        start = 0
        while start < len(tokens):
            stop = start
            while stop < len(tokens) and _BROKEN in pieces[stop]:
                stop += 1
            if stop - start > 1:
                pieces[start:stop] = [self._behind_anchor(tokens[start:stop]), *[""] * (stop - start - 1)]
            start = max(stop, start + 1)
        return pieces

    def _alone(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._behind_anchor([token])
        return self._known[token]

    def _behind_anchor(self, tokens: Sequence[int]) -> str:
        return self.text([*self._anchor, *tokens])[len(self.text(self._anchor)) :]
