"""The twin of native/drafter.cpp: same candidates, same arithmetic, same decisions, slowly.

Only a budgeted drafter (``Window.BUDGET``) has a twin.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference.plain_blocks import Span, find, next_at
from reference.plain_estimate import Estimator
from reference.plain_lookup import (
    MOST_OCCURRENCES,
    Candidate,
    Live,
    Match,
    Occurrence,
    good,
    tally,
    update,
    window,
)

from ostinato.algo.noise import key, uniform
from ostinato.history.blocks import Block
from ostinato.history.rules import BINS, MOST_DEPTH, DraftStats, Rules, Source, Window
from ostinato.history.store import History
from ostinato.types import DraftQuery, Drafts, Request, SampledTokens

LEAST_GAIN = 1.01  # a draft that promises less than 1 % is noise of the cost table
FAINT = 0.05  # a path that survives less often is not followed
PATIENCE = 6  # misses in a row before a sequence sleeps
LONGEST_SLEEP = 16  # passes
QUIET = 8  # passes in a row without a draft before the whole drafter sleeps
PROMPT = 0  # as a writer


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A candidate; ``children`` are None until what follows it has been looked up."""

    sequence: Sequence
    parent: Node | None
    depth: int
    survival: float
    candidate: Candidate
    match: Match | None = None
    children: list[Node] | None = None
    taken: int = 0  # of its children
    rank: int = -1  # in the order of taking
    kept: bool = False  # it is drafted


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The live text of one prompt."""

    live: Live
    opened: int
    running: int = 0
    prompt: tuple[int, ...] | None = None  # that is in ``live``


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A running sequence. The last lines are about the last pass that looked at it."""

    uid: str | int
    address: int  # key of its noise
    greedy: bool
    writer: int
    group: Group
    tokens: list[int]
    prompt_length: int
    edges: list[float]
    probs: list[float]
    indexed: int = 0
    blocks: list[Block] = field(default_factory=list)
    generation: int = -1
    match: Match = field(default_factory=Match)
    wake: int = 0
    misses: int = 0
    proposed: int = -1
    first: list[Node] = field(default_factory=list)
    weight: float = 1.0
    deepest: int = 0
    leaves: int = 0
    drafted: int = 0
    exhausted: bool = False


class PlainDrafter:
    """Implements ``protocols.Drafter`` in plain Python; see drafter.HistoryDrafter."""

    def __init__(self, history: History | None = None, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        assert self.rules.window is Window.BUDGET
        self._history = history
        self._estimator = Estimator()
        self._others = Live(levels=self.rules.shared, most=self.rules.ring)
        self._groups: dict[str | int, Group] = {}
        self._sequences: dict[int, Sequence] = {}
        self._writers = self._handles = self._pass = self._quiet = self._wake = self._nodes = 0
        self._counts = dict.fromkeys(("passes", "naps", "looked", "slept", "emitted"), 0)
        self._by_source = {name: dict.fromkeys(Source, 0) for name in ("drafted", "accepted")}
        self._by_depth = {name: [0] * MOST_DEPTH for name in ("drafted_at", "accepted_at")}
        self._bins = {name: [0] * BINS for name in ("labels", "hits")}
        self._predicted = [0.0] * BINS
        self._seconds = [0.0, 0.0, 0.0]

    def open(self, request: Request) -> int:
        """A sequence begins; the handle under which it is continued."""
        start = time.perf_counter()
        self._make_room()
        self._writers += 1
        uid, tokens = request.uid or self._writers, [int(token) for token in request.tokens]
        live = Live(levels=self.rules.live, most=self.rules.group)
        group = self._groups.setdefault(uid, Group(live=live, opened=self._writers))
        self._handles += 1
        self._sequences[self._handles] = Sequence(
            uid=uid,
            address=key(request.seed),
            greedy=request.sampling.temperature == 0,
            writer=self._writers,
            group=group,
            tokens=tokens,
            prompt_length=len(tokens),
            edges=[0.0] * len(tokens),
            probs=[0.0] * len(tokens),
            indexed=len(tokens) if group.prompt == tuple(tokens) else 0,
            wake=self._pass,
        )
        group.prompt = tuple(tokens)
        group.running += 1
        self._wake, self._quiet = self._pass, 0
        self._seconds[0] += time.perf_counter() - start
        return self._handles

    def propose(self, running: DraftQuery) -> Drafts:
        """The draft tokens that are worth their time in the coming pass; often none."""
        start = time.perf_counter()
        self._pass += 1
        self._counts["passes"] += 1
        batch = [self._at(handle) for handle in running.handles.tolist()]
        seconds = running.seconds.tolist()
        kept: list[list[Node]] = [[] for _ in batch]
        awake = [sequence.wake <= self._pass for sequence in batch]
        if self._pass < self._wake:
            self._counts["naps"] += 1
        else:
            self._counts["slept"] += len(batch) - sum(awake)
            if any(awake) and len(seconds) > 1:
                kept = self._choose(batch, awake, running, seconds)
        nodes = [node for path in kept for node in path]
        parents = [-1 if node.parent is None else path.index(node.parent) for path in kept for node in path]
        drafts = Drafts(
            counts=np.array([len(path) for path in kept], np.int32),
            tokens=np.array([node.candidate.token for node in nodes], np.int32),
            parents=np.array(parents, np.int32),
        )
        self._seconds[1] += time.perf_counter() - start
        return drafts

    def observe(self, emitted: SampledTokens) -> None:
        """What the pass gave, drafted or not."""
        start = time.perf_counter()
        batch = [self._at(handle) for handle in emitted.handles.tolist()]
        at = 0
        for sequence, n in zip(batch, emitted.counts.tolist(), strict=True):
            tokens, part = emitted.tokens[at : at + n].tolist(), slice(at, at + n)
            if sequence.proposed == self._pass:
                self._teach(sequence, tokens)
            sequence.proposed = -1  # what was foreseen has been judged
            sequence.tokens += tokens
            # a greedy token comes whatever the uniform is
            sequence.edges += [0.0] * n if sequence.greedy else emitted.edges[part].tolist()
            sequence.probs += [1.0] * n if sequence.greedy else emitted.probs[part].tolist()
            self._counts["emitted"] += n
            at += n
        for handle, ended in zip(emitted.handles.tolist(), emitted.ended.tolist(), strict=True):
            if ended:
                self._close(self._sequences.pop(handle))
        self._seconds[2] += time.perf_counter() - start

    def forget(self, uids: list[str] | None = None) -> None:
        """Drop the live text of these prompts (None: of all) that have no running sequence."""
        for uid in list(self._groups) if uids is None else uids:
            if uid in self._groups and not self._groups[uid].running:
                del self._groups[uid]

    def stats(self) -> DraftStats:
        """What it has done since it was made; of live text the bytes are those of the compiled drafter."""
        live = [self._others, *(group.live for group in self._groups.values())]
        opened, proposed, observed = self._seconds
        values: dict[str, Any] = {**self._counts}
        values |= {name: dict(counts) for name, counts in self._by_source.items()}
        values |= {name: tuple(counts) for name, counts in (self._by_depth | self._bins).items()}
        return DraftStats(
            **values,
            predicted=tuple(self._predicted),
            open_s=opened,
            propose_s=proposed,
            observe_s=observed,
            live_bytes=64 * sum(len(one.seen) for one in live),
            sequences=len(self._sequences),
            groups=len(self._groups),
        )

    def weights(self) -> np.ndarray:
        """[FEATURES] float64: what the estimator has learnt."""
        return np.array(self._estimator.weights)

    # ---- choosing

    def _choose(
        self, batch: list[Sequence], awake: list[bool], running: DraftQuery, seconds: list[float]
    ) -> list[list[Node]]:
        """The kept nodes of every sequence, parents before their children and the best first."""
        for sequence in batch:
            self._refresh(sequence)
            self._index(sequence)
        looked = [sequence for sequence, is_awake in zip(batch, awake, strict=True) if is_awake]
        rooms, weights = running.room.tolist(), running.weights.tolist()
        heap: list[tuple[float, int, Node]] = []
        for sequence, room, weight, is_awake in zip(batch, rooms, weights, awake, strict=True):
            if not is_awake:
                continue
            sequence.proposed, sequence.first, sequence.weight = self._pass, [], weight
            sequence.drafted = sequence.leaves = 0
            sequence.exhausted, sequence.deepest = False, min(self.rules.length, room)
            if sequence.deepest >= 1:
                sequence.first = self._expand(sequence, None, running.leaves)
                self._offer(heap, sequence.first)
        best = self._take(heap, sum(weights), seconds, running.leaves)
        kept = [self._kept(sequence.first, best) if sequence in looked else [] for sequence in batch]
        for sequence, path in zip(batch, kept, strict=True):
            if sequence in looked:
                sequence.drafted = len(path)
                if not path and sequence.deepest >= 1 and not sequence.exhausted:
                    self._doze(sequence)
        self._quiet = 0 if any(kept) else self._quiet + 1
        if self._quiet >= QUIET:
            self._wake = self._pass + 1 + min(LONGEST_SLEEP, 1 << (self._quiet - QUIET))
        return kept

    def _take(
        self, heap: list[tuple[float, int, Node]], worth: float, seconds: list[float], leaves: int
    ) -> int:
        """Take candidates in the order of their worth, and look up what follows those taken: how many of them
        are kept, so that expected tokens per second are the most."""
        plain = rate = worth / seconds[0]
        taken = best = 0
        while heap and taken < len(seconds) - 1:
            gain, _, node = heap[0]
            # tokens of this worth at the most, at the cheapest way on: could they still raise the rate?
            cheapest = min(
                (seconds[m] - seconds[taken]) / (m - taken) for m in range(taken + 1, len(seconds))
            )
            if not -gain > rate * cheapest:
                break
            heapq.heappop(heap)
            sequence, parent = node.sequence, node.parent
            prolongs = (sequence.drafted if parent is None else parent.taken) == 0
            if not prolongs and sequence.leaves == leaves:
                continue
            sequence.leaves += parent is None or not prolongs
            sequence.drafted += 1
            if parent is not None:
                parent.taken += 1
            node.rank = taken
            taken += 1
            worth += -gain
            if worth / seconds[taken] > rate:
                rate, best = worth / seconds[taken], taken
            if node.depth < sequence.deepest:
                node.children = self._expand(sequence, node, leaves)
                self._offer(heap, node.children)
        return best if rate >= LEAST_GAIN * plain else 0

    def _offer(self, heap: list[tuple[float, int, Node]], nodes: list[Node]) -> None:
        for node in nodes:
            self._nodes += 1  # among equals the older one
            if node.survival >= FAINT:
                heapq.heappush(heap, (-(node.sequence.weight * node.survival), self._nodes, node))

    def _kept(self, nodes: list[Node], best: int) -> list[Node]:
        path: list[Node] = []
        for node in nodes:
            node.kept = 0 <= node.rank < best
            if node.kept:
                self._by_source["drafted"][node.candidate.source] += 1
                self._by_depth["drafted_at"][node.depth - 1] += 1
                path += [node, *self._kept(node.children or [], best)]
        return path

    def _doze(self, sequence: Sequence) -> None:
        """A miss: after PATIENCE of them in a row a sequence is left alone for 1, 2, 4 .. passes."""
        sequence.misses += 1
        if sequence.misses > PATIENCE:
            sequence.wake = self._pass + 1 + min(LONGEST_SLEEP, 1 << (sequence.misses - PATIENCE - 1))

    # ---- looking up

    def _expand(self, sequence: Sequence, parent: Node | None, leaves: int) -> list[Node]:
        """Candidates for what follows ``parent`` (None: the last token of the sequence)."""
        path, node = [], parent
        while node is not None:
            path.append(node.candidate.token)
            node = node.parent
        text = sequence.tokens + path[::-1]
        above = sequence.match if parent is None or parent.parent is None else parent.parent.match
        match = sequence.match
        if parent is not None:
            assert above is not None
            match = parent.match = above.copy()
        u = 0.5 if sequence.greedy else uniform(sequence.address, len(text))
        found, ended = self._look_up(sequence, match, text, u)
        self._counts["looked"] += 1
        if parent is None:
            sequence.exhausted = ended
        nodes: list[Node] = []
        left = 1.0  # siblings exclude each other
        for candidate in found[:leaves]:
            share = min(candidate.estimate, left)
            left -= share
            survival = (1.0 if parent is None else parent.survival) * share
            nodes.append(
                Node(
                    sequence=sequence,
                    parent=parent,
                    depth=len(path) + 1,
                    survival=survival,
                    candidate=candidate,
                )
            )
        return nodes

    def _look_up(
        self, sequence: Sequence, match: Match, text: list[int], u: float
    ) -> tuple[list[Candidate], bool]:
        """Everything that is known about the next token, from the most similar circumstances to the least;
        and whether history knows that nothing follows."""
        found: list[Candidate] = []
        ended = False
        for number, block in enumerate(sequence.blocks):
            if good(found):
                break
            length, span = update(match, number, block, text, self.rules)
            if length:
                ended |= not self._look_up_block(found, block, span, length, number, u)
        if ended and not found:
            return [], True
        if not good(found) and {Source.SIBLING, Source.OWN} & self.rules.sources:
            self._look_up_live(found, sequence.group.live, sequence, text, u)
        for length in self.rules.ladder:
            for number, block in enumerate(sequence.blocks):
                if not good(found) and match.found[number][0] > length:
                    span = find(block, text[-length:])
                    self._look_up_block(found, block, span, length, number, u)
        if not good(found) and Source.OTHER in self.rules.sources and not sequence.blocks:
            self._look_up_live(found, self._others, sequence, text, u)
        return found, False

    def _look_up_block(
        self, found: list[Candidate], block: Block, span: Span, length: int, age: int, u: float
    ) -> bool:
        """After ``length`` tokens in one block; False where all of these places are at the end."""
        low, high = window(block, span, length, self.rules.use_noise, u)
        count = min(high - low, MOST_OCCURRENCES)
        seen: list[Occurrence] = []
        for i in range(count):
            one = next_at(block, low + i * (high - low) // count, length)
            prob = one.prob if self.rules.use_noise else 0.0
            seen.append(Occurrence(one.token, one.edge, prob, one.reward, Source.HISTORY))
        tally(self._estimator, found, seen, length, age, u)
        return count > 0

    def _look_up_live(
        self, found: list[Candidate], live: Live, sequence: Sequence, text: list[int], u: float
    ) -> None:
        """In live text, at the longest context first."""
        seen: list[tuple[Occurrence, int]] = []
        for one, writer, level in live.walk(text, self.rules.walk):
            own = Source.OWN if writer in (PROMPT, sequence.writer) else Source.SIBLING
            source = Source.OTHER if live is self._others else own
            if source in self.rules.sources:
                prob = one.prob if self.rules.use_noise else 0.0
                seen.append((Occurrence(one.token, one.edge, prob, 0, source), level))
        for level, length in enumerate(live.levels):
            if any(at == level for _, at in seen) and not good(found):
                agreeing = [one for one, at in seen if at <= level][:MOST_OCCURRENCES]
                tally(self._estimator, found, agreeing, length, 0, u)

    # ---- learning

    def _teach(self, sequence: Sequence, tokens: list[int]) -> None:
        """Go along what came, as far as it was foreseen. Candidates whose place was reached are labels."""
        accepted, nodes = 0, sequence.first
        for token in tokens:
            hit = next((node for node in nodes if node.candidate.token == token), None)
            for node in nodes:
                self._label(node.candidate, node is hit)
            if hit is None:
                break
            if hit.kept:
                accepted += 1
                self._by_source["accepted"][hit.candidate.source] += 1
                self._by_depth["accepted_at"][hit.depth - 1] += 1
            if hit.children is None:
                break
            assert hit.match is not None
            sequence.match, nodes = hit.match, hit.children
        if accepted:
            sequence.misses = 0
        elif sequence.drafted:
            self._doze(sequence)

    def _label(self, candidate: Candidate, accepted: bool) -> None:
        at = min(int(candidate.estimate * BINS), BINS - 1)
        self._bins["labels"][at] += 1
        self._bins["hits"][at] += accepted
        self._predicted[at] += candidate.estimate
        self._estimator.learn(candidate.x, candidate.estimate, accepted)

    # ---- text

    def _at(self, handle: int) -> Sequence:
        if handle not in self._sequences:
            raise ValueError("a handle is not open; use handles that open gave and observe has not ended")
        return self._sequences[handle]

    def _index(self, sequence: Sequence) -> None:
        """Put what is new in the text of a sequence before its siblings and the others."""
        live = bool({Source.SIBLING, Source.OWN} & self.rules.sources) and self._live() < self.rules.total
        others = Source.OTHER in self.rules.sources and not sequence.blocks
        for at in range(sequence.indexed, len(sequence.tokens)):
            said = at >= sequence.prompt_length
            seen = Occurrence(sequence.tokens[at], sequence.edges[at], sequence.probs[at], 0, Source.OWN)
            if live:
                sequence.group.live.add(sequence.tokens[:at], seen, sequence.writer if said else PROMPT)
            if said and others:
                self._others.add(sequence.tokens[:at], seen, sequence.writer)
        sequence.indexed = len(sequence.tokens)

    def _refresh(self, sequence: Sequence) -> None:
        """The blocks of its prompt, where the history has changed."""
        if self._history is None or Source.HISTORY not in self.rules.sources:
            return
        generation = sum(self._history.counters.values())
        if sequence.generation != generation:
            blocks = self._history.blocks(sequence.uid) if isinstance(sequence.uid, str) else []
            sequence.generation, sequence.blocks = generation, blocks[: self.rules.epochs]
            sequence.match = Match()

    def _close(self, sequence: Sequence) -> None:
        self._index(sequence)
        sequence.group.running -= 1
        if not isinstance(sequence.uid, str):
            self._groups.pop(sequence.uid)

    def _live(self) -> int:
        return sum(len(group.live.seen) for group in self._groups.values())

    def _make_room(self) -> None:
        """Where live text is too much, that of finished groups goes, the one opened first at first."""
        while self._live() >= self.rules.total:
            finished = [uid for uid, group in self._groups.items() if not group.running]
            if not finished:
                return
            del self._groups[min(finished, key=lambda uid: self._groups[uid].opened)]


__all__ = ["PlainDrafter"]
