"""The drafter: proposes the tokens that followed the same context before, where that saves time.

Drafts only affect time: the sampled tokens never depend on them. The drafter is compiled (one call
into C++ per pass and method, see native/drafter.cpp).
"""

from __future__ import annotations

import ctypes
import time
import weakref

import numpy as np

from ostinato.history.native.library import load_library
from ostinato.history.rules import BINS, MOST_DEPTH, DraftStats, Rules, Source
from ostinato.history.store import History, hash_prompt
from ostinato.types import DraftQuery, Drafts, Request, SampledTokens

FEATURES = 16  # of a candidate, from which its chance of being right is estimated (native/estimate.h)
INITIAL_WEIGHTS = (-2.6, 0.8, -0.8, -2.6, 1.9, 2.0, 0.1, 0.0, -1.1, -0.7, 0.7, 0.2, 0.4, 3.6, 0.7, 3.9)
"""Weights of these features, fitted to recorded rollouts so that the first drafts of a run are sensible."""

_MOST_LEVELS = 7
_P, _L, _I64, _I32, _U64 = ctypes.c_void_p, ctypes.c_long, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64


class _Levels(ctypes.Structure):
    """``Levels`` of live.h."""

    _fields_ = (("count", _I32), ("lengths", _I32 * _MOST_LEVELS))


class _Rules(ctypes.Structure):
    """``Rules`` of drafter.cpp."""

    _fields_ = (
        ("sources", _I32 * len(Source)),
        *((name, _I32) for name in ("noise", "most", "least", "epochs", "length", "walk")),
        *((name, _Levels) for name in ("ladder", "live", "shared")),
        *((name, _I64) for name in ("ring", "group", "total")),
    )


class _Stats(ctypes.Structure):
    """``Stats`` of drafter.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("passes", "naps", "looked", "slept", "emitted")),
        *((name, _I64 * len(Source)) for name in ("drafted", "accepted")),
        *((name, _I64 * MOST_DEPTH) for name in ("drafted_at", "accepted_at")),
        *((name, _I64 * BINS) for name in ("labels", "hits")),
        ("predicted", ctypes.c_double * BINS),
        *((name, _I64) for name in ("live_bytes", "sequences", "groups")),
    )


class _ArrayPool:
    """Arrays that C++ reads and writes; their addresses are taken once, not in every call."""

    def __init__(self, **kinds: type) -> None:
        self._kinds = kinds
        self.arrays: dict[str, np.ndarray] = {}
        self.at: dict[str, int] = {}  # addresses by name
        self._size = 0
        self.hold(256)

    def hold(self, size: int) -> None:
        """Make room for ``size`` entries in each array. If that needs new arrays, the old contents are
        lost."""
        if size > self._size:
            self._size = 2 * size
            self.arrays = {name: np.zeros(self._size, kind) for name, kind in self._kinds.items()}
            self.at = {name: array.ctypes.data for name, array in self.arrays.items()}


class HistoryDrafter:
    """Implements ``protocols.Drafter`` over a ``History`` (None: live text only) by the given ``Rules``.

    Raises BuildError where there is no compiler.
    """

    def __init__(self, history: History | None = None, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._history = history  # a reference, so that its store is not freed while it is read
        self._library = _declare_signatures(load_library())
        store = history.native if history is not None else None
        self._drafter = self._library.drafter_new(
            store, _convert_rules(self.rules), (ctypes.c_double * FEATURES)(*INITIAL_WEIGHTS)
        )
        weakref.finalize(self, self._library.drafter_free, self._drafter)
        self._seconds = [0.0, 0.0, 0.0]  # open, propose, observe
        self._prompt = "", hash_prompt("")  # the last uid and its key
        i32, f32 = np.int32, np.float32
        self._query_arrays = _ArrayPool(
            handles=np.int64, room=i32, weights=f32, seconds=np.float64, counts=i32, tokens=i32
        )
        self._token_arrays = _ArrayPool(
            handles=np.int64, counts=i32, ended=np.uint8, tokens=i32, probs=f32, edges=f32
        )

    def open(self, request: Request) -> int:
        """Open a sequence, and return its handle for ``propose`` and ``observe``."""
        start = time.perf_counter()
        tokens, seed = np.ascontiguousarray(request.tokens, np.int32), request.seed
        if request.uid != self._prompt[0]:  # siblings are opened in a row, so the last key is enough
            self._prompt = request.uid, hash_prompt(request.uid)
        handle = self._library.drafter_open(
            self._drafter,
            self._prompt[1],
            request.uid != "",
            (_I64 * len(seed))(*seed),
            len(seed),
            request.sampling.temperature == 0,
            tokens.ctypes.data,
            len(tokens),
        )
        self._seconds[0] += time.perf_counter() - start
        return handle

    def propose(self, running: DraftQuery) -> Drafts:
        """Return the draft tokens that save time in the next pass. Raises ValueError for a handle that is
        not open."""
        start = time.perf_counter()
        count, max_tokens = len(running.handles), len(running.seconds) - 1
        self._query_arrays.hold(max(count, max_tokens + 1))
        arrays, ptrs = self._query_arrays.arrays, self._query_arrays.at
        arrays["handles"][:count] = running.handles
        arrays["room"][:count] = running.room
        arrays["weights"][:count] = running.weights
        arrays["seconds"][: max_tokens + 1] = running.seconds
        rows = self._library.drafter_propose(
            self._drafter, count, ptrs["handles"], ptrs["room"], ptrs["weights"], ptrs["seconds"],
            max_tokens, ptrs["counts"], ptrs["tokens"],
        )  # fmt: skip
        if rows < 0:
            raise ValueError(
                "a handle is not open; propose for handles that open gave and observe has not ended"
            )
        drafts = Drafts(counts=arrays["counts"][:count].copy(), tokens=arrays["tokens"][:rows].copy())
        self._seconds[1] += time.perf_counter() - start
        return drafts

    def observe(self, emitted: SampledTokens) -> None:
        """Record the tokens that the pass emitted, drafted or not, and close the handles of ended sequences.
        Raises ValueError for a handle that is not open."""
        start = time.perf_counter()
        count, tokens = len(emitted.handles), len(emitted.tokens)
        self._token_arrays.hold(max(count, tokens))
        arrays, ptrs = self._token_arrays.arrays, self._token_arrays.at
        arrays["handles"][:count] = emitted.handles
        arrays["counts"][:count] = emitted.counts
        arrays["ended"][:count] = emitted.ended
        arrays["tokens"][:tokens] = emitted.tokens
        arrays["probs"][:tokens] = emitted.probs
        arrays["edges"][:tokens] = emitted.edges
        status = self._library.drafter_observe(
            self._drafter, count, ptrs["handles"], ptrs["counts"], ptrs["tokens"], ptrs["probs"],
            ptrs["edges"], ptrs["ended"],
        )  # fmt: skip
        if status < 0:
            raise ValueError("a handle is not open; observe handles that open gave and that have not ended")
        self._seconds[2] += time.perf_counter() - start

    def forget(self, uids: list[str] | None = None) -> None:
        """Drop the live text of these prompts (None: of all prompts), except of prompts with a running
        sequence. It is in the closed history by now, or will not be needed."""
        if uids is None:
            self._library.drafter_forget(self._drafter, None, -1)
            return
        prompts = np.array([hash_prompt(uid) for uid in uids], np.uint64)
        self._library.drafter_forget(self._drafter, prompts.ctypes.data, len(prompts))

    def stats(self) -> DraftStats:
        """Return the counters since the drafter was created."""
        raw = _Stats()
        self._library.drafter_stats(self._drafter, ctypes.byref(raw))
        values = {name: getattr(raw, name) for name, *_ in _Stats._fields_}
        for name in ("drafted", "accepted"):
            values[name] = dict(zip(Source, values[name], strict=True))
        for name in ("drafted_at", "accepted_at", "labels", "hits", "predicted"):
            values[name] = tuple(values[name])
        open_s, propose_s, observe_s = self._seconds
        return DraftStats(**values, open_s=open_s, propose_s=propose_s, observe_s=observe_s)

    def weights(self) -> np.ndarray:
        """Return the learnt weights of the estimator, [FEATURES] float64; see native/estimate.h."""
        weights = np.zeros(FEATURES)
        self._library.drafter_weights(self._drafter, weights.ctypes.data)
        return weights


def _convert_rules(rules: Rules) -> _Rules:
    raw = _Rules(
        noise=rules.use_noise,
        **{name: getattr(rules, name) for name in ("most", "least", "epochs", "length", "walk")},
        **{name: getattr(rules, name) for name in ("ring", "group", "total")},
    )
    for index, source in enumerate(Source):
        raw.sources[index] = source in rules.sources
    for name in ("ladder", "live", "shared"):
        lengths = getattr(rules, name)
        setattr(raw, name, _Levels(len(lengths), (_I32 * _MOST_LEVELS)(*lengths)))
    return raw


def _declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {
        "drafter_new": (_P, (_P, ctypes.POINTER(_Rules), ctypes.POINTER(ctypes.c_double))),
        "drafter_free": (None, (_P,)),
        "drafter_open": (_I64, (_P, _U64, ctypes.c_int, _P, _L, ctypes.c_int, _P, _L)),
        "drafter_propose": (_L, (_P, _L, _P, _P, _P, _P, _L, _P, _P)),
        "drafter_observe": (ctypes.c_int, (_P, _L, _P, _P, _P, _P, _P, _P)),
        "drafter_forget": (None, (_P, _P, _L)),
        "drafter_stats": (None, (_P, ctypes.POINTER(_Stats))),
        "drafter_weights": (None, (_P, _P)),
        "drafter_uniform": (ctypes.c_double, (_P, _L, _I64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
