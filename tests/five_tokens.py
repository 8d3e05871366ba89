"""A world of five tokens and answers of three, whose probabilities are known exactly, for tests of laws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ostinato.algo.speculate import accepted_drafts

VOCAB, LENGTH = 5, 3
Prefix = tuple[int, ...]
Policy = Mapping[Prefix, np.ndarray]  # next-token distribution by prefix


def policy(seed: int) -> Policy:
    """Next-token distributions by prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [p for n in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=n)]
    return {prefix: rng.dirichlet(np.full(VOCAB, 0.7)) for prefix in prefixes}


def exact(p: Policy) -> np.ndarray:
    """Probability of every answer."""
    answers = itertools.product(range(VOCAB), repeat=LENGTH)
    return np.array([np.prod([p[a[:n]][a[n]] for n in range(LENGTH)]) for a in answers])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic over cells of at least 5 expected draws (the rest is one cell), and its 99.99 % point."""
    n = counts.sum()
    large = expected * n >= 5
    cells = [*zip(counts[large], expected[large] * n, strict=True)]
    if not large.all():
        cells.append((counts[~large].sum(), expected[~large].sum() * n))
    df = len(cells) - 1
    point = df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3  # Wilson and Hilferty, 1931
    return float(sum((o - e) ** 2 / e for o, e in cells)), point


def inverse_transform(p: np.ndarray, u: float) -> int:
    return int(min(np.searchsorted(p.cumsum(), u, side="right"), VOCAB - 1))


def adversary(p: Policy, prefix: Prefix, u: np.ndarray, kind: str) -> Prefix:
    """The rest of an answer: what a drafter may know is everything, the noise included."""
    choose: dict[str, Callable[[np.ndarray, float], int]] = {
        "wrong": lambda q, _: int(q.argmin()),
        "likely": lambda q, _: int(q.argmax()),
        "coupled": inverse_transform,
        "spoilt": lambda q, v: (inverse_transform(q, v) + 1) % VOCAB,
    }
    at = prefix
    while len(at) < LENGTH:
        at += (choose[kind](p[at], u[len(at)]),)
    return at[len(prefix) :]


def sample_then_match(p: Policy, kind: str, rng: np.random.Generator) -> Prefix:
    """One answer through ``accepted_drafts``, with a draft before every pass."""
    u, out = rng.random(LENGTH), ()
    while len(out) < LENGTH:
        draft = adversary(p, out, u, kind)[:-1]
        contexts = [out + draft[:n] for n in range(len(draft) + 1)]
        drawn = np.array([inverse_transform(p[c], u[len(c)]) for c in contexts])
        (accepted,) = accepted_drafts(np.array([len(draft)]), np.array(draft, np.int64), drawn)
        out += tuple(drawn[: accepted + 1].tolist())
    return out


def counted(answers: Sequence[Prefix]) -> np.ndarray:
    index = {a: i for i, a in enumerate(itertools.product(range(VOCAB), repeat=LENGTH))}
    return np.bincount([index[a] for a in answers], minlength=VOCAB**LENGTH)


def ratio_against_the_old(p: Policy, q: Policy, old: Prefix, rng: np.random.Generator) -> Prefix:
    """SPEC-RL (arXiv 2509.23232) at leniency 1: token by token min(1, p / q), and a fresh draw from p on."""
    out: Prefix = ()
    while len(out) < LENGTH and rng.random() < min(1.0, p[out][old[len(out)]] / q[out][old[len(out)]]):
        out += (old[len(out)],)
    while len(out) < LENGTH:
        out += (inverse_transform(p[out], rng.random()),)
    return out


def greedy_by_count_ratio(p: Policy, r: Policy, rng: np.random.Generator) -> Prefix:
    """A deterministic draft (the likeliest stored token) accepted by min(1, p / its share in the store)."""
    out: Prefix = ()
    while len(out) < LENGTH:
        token = int(r[out].argmax())
        if rng.random() >= min(1.0, p[out][token] / r[out][token]):
            token = inverse_transform(p[out], rng.random())
        out += (token,)
    return out
