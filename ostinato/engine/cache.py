"""KV blocks and their prefix tree: pure Python on ints, so that every rule is testable without a model.

A block holds BLOCK positions of keys, values and routes (the arrays live with the engine; here are only ids).
A sequence owns a list of blocks. Blocks whose content is known are also nodes of a tree keyed by (policy
version, salt, token prefix), where a group's siblings, an agent's next turn and a preempted sequence are
looked up.

Invariants (asserted by ``check``):
- ``refs[b]`` = sequences that use block b, plus one if a tree node holds it; it is free exactly at 0.
- an inner node is full; a partial node is a leaf.
- only tokens computed under the current policy version are reachable: ``publish`` forgets the tree.

A shared block is never written: a sequence that continues inside a partly matched block gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 16  # positions; the native kernels hold one vector of 16 positions per block
POLICY_BIT, SALT_BIT = 32, 64  # of a key: below them are the token and the policy


class OutOfBlocks(Exception):
    """No block is free and none can be evicted: the engine then preempts a sequence."""


@dataclass(slots=True, eq=False)
class Node:
    """A block of known content, reached from its parent by its tokens."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    ready: bool = True  # False while the forward that fills it is still to come
    used: int = 0  # clock of the last match, for eviction


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: ``blocks`` to share, then ``copied`` tokens to copy out of ``source``."""

    blocks: tuple[int, ...]
    tokens: int  # in all, copied ones included
    source: int = -1
    copied: int = 0
    pending: bool = False  # a part of it is computed in this step: look it up again after the step


class KVCache:
    """Allocates blocks, shares prefixes, evicts the least recently used."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"the KV cache has {num_blocks} blocks; give engine.kv_memory_mb more memory")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._root = Node((), -1, None)
        self._nodes: dict[int, Node] = {}  # by block
        self._clock = 0
        self.generation = 0  # of the tree: a sequence that began under another tree must not be inserted
        self.evicted = 0

    @property
    def num_available(self) -> int:
        """Blocks free now or after eviction."""
        return len(self._free) + sum(1 for block in self._nodes if self.refs[block] == 1)

    @property
    def num_free(self) -> int:
        """Blocks free without eviction."""
        return len(self._free)

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the longest known prefix of ``tokens[:-1]``; the last token must run to give logits. If the
        next part of it is still being computed, the match is ``pending`` and ends before that part. Advances
        the clock, and marks the matched nodes as used."""
        self._clock += 1
        end = len(tokens) - 1
        node, blocks, start = self._root, [], 0
        while start + BLOCK <= end:
            child = node.children.get(tuple(tokens[start : start + BLOCK]))
            if child is None:
                break
            if not child.ready:
                return Match(tuple(blocks), start, pending=True)
            child.used = self._clock
            blocks.append(child.block)
            node, start = child, start + BLOCK
        best_child, overlap = None, 0
        tail = tuple(tokens[start : min(start + BLOCK, end)])
        for child in node.children.values():
            if not tail or child.tokens[0] != tail[0]:
                continue
            common = _count_common(child.tokens, tail)
            if common > overlap:
                best_child, overlap = child, common
        if best_child is None:
            return Match(tuple(blocks), start)
        if not best_child.ready:
            return Match(tuple(blocks), start, pending=True)
        best_child.used = self._clock
        return Match(tuple(blocks), start + overlap, best_child.block, overlap)

    def share(self, blocks: Sequence[int]) -> None:
        """Count another user of each of these blocks, whose content is known."""
        for block in blocks:
            self.refs[block] += 1

    def allocate(self) -> int:
        """Return a block for a sequence, with a count of one user. If none is free, half of the unused
        leaves are evicted first. Raises OutOfBlocks if there is nothing to evict."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each of these blocks. A block without users is free; the tree is a user of
        its blocks until it evicts them."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free.append(block)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], *, ready: bool = True) -> list[Node]:
        """Make the blocks of ``tokens`` findable, and return the new nodes. The last block may be partly
        filled.

        A partial leaf of the same block grows in its place, and is not returned. If there is a node of
        another block for the same tokens, it stays. Insertion ends at the first block that cannot be a node
        there.
        """
        node, new_nodes = self._root, []
        for index, block in enumerate(blocks):
            chunk = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            if not chunk:
                break
            child = node.children.get(chunk)
            old_node = self._nodes.get(block)
            if (
                child is None
                and old_node is not None
                and old_node.parent is node
                and chunk[: len(old_node.tokens)] == old_node.tokens
            ):
                del node.children[old_node.tokens]  # the partial leaf of this very block has grown
                old_node.tokens, child = chunk, old_node
                node.children[chunk] = old_node
            elif child is None and old_node is None:
                child = Node(chunk, block, node, ready=ready, used=self._clock)
                node.children[chunk] = child
                self._nodes[block] = child
                self.refs[block] += 1
                new_nodes.append(child)
            if child is None or len(chunk) < BLOCK:
                break
            node = child
        return new_nodes

    def discard(self, nodes: Sequence[Node]) -> None:
        """Remove nodes that never became ready, with all nodes below them, and release their blocks. Nodes
        that are not in the tree any more are skipped."""
        stack = list(nodes)  # a list and not a recursion: a long prompt is a deep chain
        while stack:
            node = stack.pop()
            if self._nodes.get(node.block) is not node:
                continue  # the tree has been forgotten since, or its parent was discarded
            assert node.parent is not None
            del node.parent.children[node.tokens]
            del self._nodes[node.block]
            self.release([node.block])
            stack.extend(node.children.values())

    def forget(self) -> None:
        """Empty the tree and begin a new generation: its content belongs to a policy that is no longer
        served."""
        for block in self._nodes:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free.append(block)
        self._nodes.clear()
        self._root = Node((), -1, None)
        self.generation += 1

    def forget_policy(self, policy: int) -> None:
        """Remove from the tree what was computed under this policy; running sequences keep their blocks."""
        children = self._root.children.values()
        self.discard(
            [child for child in children if child.tokens[0] % (1 << SALT_BIT) >> POLICY_BIT == policy]
        )

    def check(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the invariants hold; ``sequences`` are the blocks of every living
        sequence."""
        expected = [0] * self.num_blocks
        for blocks in sequences:
            for block in blocks:
                expected[block] += 1
        for block in self._nodes:
            expected[block] += 1
        assert expected == self.refs, "reference counts disagree with the owners"
        assert sorted(self._free) == [b for b, n in enumerate(expected) if n == 0], "free list disagrees"
        for block, node in self._nodes.items():
            assert node.block == block and node.parent is not None
            assert node.parent.children[node.tokens] is node
            assert len(node.tokens) == BLOCK or not node.children, "a partial node is a leaf"

    def _evict(self) -> None:
        """Free the least recently used half of the leaves that no sequence uses, at least one, and count
        them in ``evicted``. Raises OutOfBlocks if there is no such leaf."""
        leaves = [n for b, n in self._nodes.items() if self.refs[b] == 1 and not n.children and n.ready]
        if not leaves:
            raise OutOfBlocks(f"all {self.num_blocks} KV blocks are in use")
        # Half of the leaves at once: the scan is linear, so it must not run for every block.
        leaves.sort(key=lambda node: node.used)
        for node in leaves[: max(1, len(leaves) // 2)]:
            assert node.parent is not None
            del node.parent.children[node.tokens]
            del self._nodes[node.block]
            self.refs[node.block] = 0
            self._free.append(node.block)
            self.evicted += 1


def _count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading items that are equal in both."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
