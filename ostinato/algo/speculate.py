"""Verification of drafts: sample, then match.

A pass runs the last token of a sequence and the nodes of its draft, a tree of guesses. Every row draws its
next token as plain decoding would, with the addressed noise of its position and not knowing the draft. Begin
at the last token: what it drew is emitted; if a child carries that token, go there and repeat. So

- what is emitted is what plain decoding emits, token by token; the draft decides how far one pass reaches.
  That holds whatever the drafter knows, the noise included (drafts are then coupled, arXiv 2408.07978);
- for a draft fixed before the draw no lossless rule accepts more: a node is reached with the probability of
  its path under the policy, which bounds every rule from above.

Accepting a past answer by min(1, p / q) against its old probability q is not in this file: it is wrong.
Training knew the answer, so given the new policy it is no draw from q. A rewarded answer has p > q and would
be repeated with certainty. ``tests/e2e/test_drafts_exact.py`` shows that rule, and another wrong one,
failing.

S sequences; n nodes in all. A sequence has one row more than nodes: row 0 is its last token, row 1 + i its
node i.
"""

from __future__ import annotations

import numpy as np


def accepted_chains(counts: np.ndarray, drafts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Accepted nodes [S] of chains: the leading drafts that equal what their parents drew.

    counts [S]: nodes of each; drafts [n]: tokens; drawn [n + S]: what each row drew.
    """
    S, n = len(counts), len(drafts)
    if n == 0:
        return np.zeros(S, np.int64)
    owner = np.repeat(np.arange(S), counts)
    depth = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    missed = drafts != drawn[np.arange(n) + owner]  # of node n - 1 and its like, or the last token
    accepted = counts.astype(np.int64)
    np.minimum.at(accepted, owner[missed], depth[missed])
    return accepted


def accepted_path(tokens: np.ndarray, parents: np.ndarray, drawn: np.ndarray) -> list[int]:
    """The accepted nodes of one tree, from the root on: tokens, parents [n]; drawn [n + 1] by row."""
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        token = drawn[at + 1]
        for node in range(at + 1, len(tokens)):
            if parents[node] == at and tokens[node] == token:
                path.append(node)
                break
        else:
            return path


def depths(parents: np.ndarray) -> np.ndarray:
    """Of every node of one tree, 0 for children of the last token."""
    depth = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents.tolist()):
        if parent >= node:
            raise ValueError(
                f"node {node} of a draft has the parent {parent}, which does not stand before it"
            )
        depth[node] = 0 if parent < 0 else depth[parent] + 1
    return depth


def leaves(parents: np.ndarray) -> list[list[int]]:
    """The path from the root to every leaf of one tree, in the order of the leaves."""
    inner = set(parents.tolist())
    paths = []
    for leaf in (node for node in range(len(parents)) if node not in inner):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(int(parents[path[-1]]))
        paths.append(path[::-1])
    return paths
