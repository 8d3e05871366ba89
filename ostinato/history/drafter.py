"""The drafter: proposes for running sequences what followed the same tokens before, where that saves time.

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
from ostinato.history.store import History, prompt_key
from ostinato.types import DraftQuery, Drafts, Request, SampledTokens

FEATURES = 16  # of a candidate, to estimate its chance of being right (native/estimate.h)
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


class _Shelf:
    """Arrays that C++ reads and writes: their addresses are taken once, not in every call."""

    def __init__(self, **kinds: type) -> None:
        self._kinds = kinds
        self.arrays: dict[str, np.ndarray] = {}
        self.at: dict[str, int] = {}
        self._size = 0
        self.hold(256)

    def hold(self, size: int) -> None:
        """Make room for ``size`` entries in each array; their contents may be lost."""
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
        self._history = history  # keeps alive the store that is read here
        self._library = _bind(load_library())
        store = history.native if history is not None else None
        self._drafter = self._library.drafter_new(
            store, _c_rules(self.rules), (ctypes.c_double * FEATURES)(*INITIAL_WEIGHTS)
        )
        weakref.finalize(self, self._library.drafter_free, self._drafter)
        self._seconds = [0.0, 0.0, 0.0]  # open, propose, observe
        self._prompt = "", prompt_key("")  # the last uid and its key
        i32, f32 = np.int32, np.float32
        self._asked = _Shelf(
            handles=np.int64, room=i32, weights=f32, seconds=np.float64, counts=i32, tokens=i32
        )
        self._sampled = _Shelf(handles=np.int64, counts=i32, ended=np.uint8, tokens=i32, probs=f32, edges=f32)

    def open(self, request: Request) -> int:
        """Begin a sequence. Returns its handle for ``propose`` and ``observe``."""
        start = time.perf_counter()
        tokens, seed = np.ascontiguousarray(request.tokens, np.int32), request.seed
        if request.uid != self._prompt[0]:  # siblings come one after another
            self._prompt = request.uid, prompt_key(request.uid)
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
        """The draft tokens worth their time in the next pass, if any. ValueError if a handle is closed."""
        start = time.perf_counter()
        count, most = len(running.handles), len(running.seconds) - 1
        self._asked.hold(max(count, most + 1))
        room, at = self._asked.arrays, self._asked.at
        room["handles"][:count] = running.handles
        room["room"][:count] = running.room
        room["weights"][:count] = running.weights
        room["seconds"][: most + 1] = running.seconds
        rows = self._library.drafter_propose(
            self._drafter, count, at["handles"], at["room"], at["weights"], at["seconds"], most,
            at["counts"], at["tokens"],
        )  # fmt: skip
        if rows < 0:
            raise ValueError(
                "a handle is not open; propose for handles that open gave and observe has not ended"
            )
        drafts = Drafts(counts=room["counts"][:count].copy(), tokens=room["tokens"][:rows].copy())
        self._seconds[1] += time.perf_counter() - start
        return drafts

    def observe(self, emitted: SampledTokens) -> None:
        """Take in the tokens that the pass emitted, drafted or not. ValueError if a handle is closed."""
        start = time.perf_counter()
        count, tokens = len(emitted.handles), len(emitted.tokens)
        self._sampled.hold(max(count, tokens))
        room, at = self._sampled.arrays, self._sampled.at
        room["handles"][:count] = emitted.handles
        room["counts"][:count] = emitted.counts
        room["ended"][:count] = emitted.ended
        room["tokens"][:tokens] = emitted.tokens
        room["probs"][:tokens] = emitted.probs
        room["edges"][:tokens] = emitted.edges
        done = self._library.drafter_observe(
            self._drafter, count, at["handles"], at["counts"], at["tokens"], at["probs"], at["edges"],
            at["ended"],
        )  # fmt: skip
        if done < 0:
            raise ValueError("a handle is not open; observe handles that open gave and that have not ended")
        self._seconds[2] += time.perf_counter() - start

    def forget(self, uids: list[str] | None = None) -> None:
        """Drop the live text of these prompts (None: of all prompts), except of prompts with a running
        sequence: it has become closed history, or will not be needed."""
        if uids is None:
            self._library.drafter_forget(self._drafter, None, -1)
            return
        prompts = np.array([prompt_key(uid) for uid in uids], np.uint64)
        self._library.drafter_forget(self._drafter, prompts.ctypes.data, len(prompts))

    def stats(self) -> DraftStats:
        """Its counters since it was created."""
        raw = _Stats()
        self._library.drafter_stats(self._drafter, ctypes.byref(raw))
        values = {name: getattr(raw, name) for name, *_ in _Stats._fields_}
        for name in ("drafted", "accepted"):
            values[name] = dict(zip(Source, values[name], strict=True))
        for name in ("drafted_at", "accepted_at", "labels", "hits", "predicted"):
            values[name] = tuple(values[name])
        opened, proposed, observed = self._seconds
        return DraftStats(**values, open_s=opened, propose_s=proposed, observe_s=observed)

    def weights(self) -> np.ndarray:
        """[FEATURES] float64: what the estimator has learnt, see native/estimate.h."""
        weights = np.zeros(FEATURES)
        self._library.drafter_weights(self._drafter, weights.ctypes.data)
        return weights


def _c_rules(rules: Rules) -> _Rules:
    raw = _Rules(
        noise=rules.use_noise,
        **{name: getattr(rules, name) for name in ("most", "least", "epochs", "length", "walk")},
        **{name: getattr(rules, name) for name in ("ring", "group", "total")},
    )
    for at, source in enumerate(Source):
        raw.sources[at] = source in rules.sources
    for name in ("ladder", "live", "shared"):
        lengths = getattr(rules, name)
        setattr(raw, name, _Levels(len(lengths), (_I32 * _MOST_LEVELS)(*lengths)))
    return raw


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
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
    for name, (returns, takes) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returns, takes
    return library
