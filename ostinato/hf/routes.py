"""The experts of tokens as data: made from an engine's output, merged, packed or padded.

Row t belongs to token t as an *input* of the model (its output predicts token t + 1). For T tokens an engine
has T - 1 rows, since the last sampled token was never an input. Rows that were not recorded are unknown, and
choose their experts natively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.types import NO_EXPERT, Completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Experts of T rows in L mixture layers, K each. ``ids`` of unknown rows are 0 and mean nothing.

    Raises ValueError for ids that are no integers, out of range, or named twice in a row: experts differ, so
    a row of zeros is a buffer that was never written, and would send a token K times to expert 0.
    """

    ids: np.ndarray  # [T, L, K] uint8 up to 256 experts, else uint16
    known: np.ndarray  # [T] bool; a bitmap, because 256 experts leave no sentinel in uint8
    num_experts: int

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.known.shape != self.ids.shape[:1] or self.known.dtype != np.bool_:
            raise ValueError(
                f"routes have ids {self.ids.shape} and known {self.known.dtype}{list(self.known.shape)}; "
                "give [T, layers, K] and bool [T]"
            )
        if self.ids.dtype != choose_id_dtype(self.num_experts):
            raise ValueError(
                f"routes have dtype {self.ids.dtype}; ids of {self.num_experts} experts are "
                f"{choose_id_dtype(self.num_experts)} (Routes.of converts)"
            )
        _check_ids(self.ids[self.known], self.num_experts)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        rows, layers, top_k = self.ids.shape
        known = int(self.known.sum())
        return f"Routes({rows} rows, {known} known, {layers} layers, {top_k} of {self.num_experts})"

    @classmethod
    def of(cls, ids: Any, num_experts: int) -> Routes:
        """Make routes of any integer array or CPU tensor [T, L, K] or [B, S, L, K]; rows of NO_EXPERT are
        unknown.

        A row is known in all layers or in none. Raises ValueError like the class.
        """
        array = np.asarray(ids)
        if array.ndim == 4:
            array = array.reshape(-1, *array.shape[2:])
        if array.dtype.kind not in "iu" or array.ndim != 3:
            raise ValueError(f"routes are {array.dtype}{list(array.shape)}; give integer ids [T, layers, K]")
        is_absent = array == NO_EXPERT if array.dtype.kind == "i" else np.zeros(array.shape, bool)
        is_unknown: Any = is_absent.all(axis=(1, 2))
        if (is_absent.any(axis=(1, 2)) != is_unknown).any():
            raise ValueError(
                f"routes have a row with some ids {NO_EXPERT}; a row is known whole or not at all"
            )
        _check_ids(array[~is_unknown], num_experts)  # before narrowing, which could wrap an id around
        narrow_ids = np.where(is_unknown[:, None, None], 0, array).astype(choose_id_dtype(num_experts))
        return cls(ids=narrow_ids, known=~is_unknown, num_experts=num_experts)

    @classmethod
    def from_completion(cls, completion: Completion, num_experts: int) -> Routes:
        """Make routes of prompt (from ``Request.routes_from`` on) and answer of our own engine; the last
        sampled token is unknown. Raises ValueError for a completion without experts, and like the class."""
        if completion.experts is None or completion.prompt_experts is None:
            raise ValueError("completion has no experts; set the engine to record the routing")
        return cls.of(np.concatenate([completion.prompt_experts, completion.experts]), num_experts)

    @classmethod
    def from_vllm(
        cls, output: Any, *, layers: Sequence[int], num_experts: int, index: int = 0, prompt_start: int = 0
    ) -> Routes:
        """Make routes of a vLLM ``RequestOutput`` with ``enable_return_routed_experts`` (layout of 0.32).

        vLLM's array is [rows, all decoder layers, K] with zero rows for dense layers; earlier releases left
        these out. ``layers`` are the decoder layers that have a router (``Replay.layers``); the shape tells
        the two layouts apart. There is one row fewer than tokens after ``prompt_start`` (of SamplingParams);
        the last token is appended as unknown, so that rows and tokens agree.

        Raises ValueError for missing routes, a wrong number of rows, layers that do not fit, or ids in a
        layer without router.
        """
        answer = output.outputs[index]
        if answer.routed_experts is None:
            raise ValueError(
                "output has no routed_experts; build the LLM with enable_return_routed_experts=True"
            )
        ids = np.asarray(answer.routed_experts)
        tokens = len(output.prompt_token_ids) + len(answer.token_ids)
        if ids.ndim != 3 or len(ids) != tokens - 1 - prompt_start:
            raise ValueError(
                f"routed_experts has shape {ids.shape}; {tokens} tokens from {prompt_start} on have "
                f"{tokens - 1 - prompt_start} rows"
            )
        routes = cls.of(_select_moe_layers(ids, layers), num_experts)
        return cls.merge(routes, cls.unknown(1, like=routes), start=len(routes))

    @classmethod
    def unknown(cls, rows: int, *, like: Routes) -> Routes:
        """Make ``rows`` rows that choose natively."""
        ids = np.zeros((rows, *like.ids.shape[1:]), like.ids.dtype)
        return cls(ids=ids, known=np.zeros(rows, bool), num_experts=like.num_experts)

    @classmethod
    def merge(cls, previous: Routes, new: Routes, *, start: int) -> Routes:
        """Join rows [0, start) of ``previous`` and all of ``new``: a turn that recorded from ``start`` on.
        Raises ValueError if ``previous`` has fewer rows, or the two do not agree as in ``concat``.

        Correct only if the first ``start`` tokens have the same ids *and* the engine reused their keys and
        values; if it computed these anew, its new rows are the true rows.
        """
        if not 0 <= start <= len(previous):
            raise ValueError(f"start is {start}; previous has {len(previous)} rows")
        return cls.concat([previous.rows(0, start), new])

    @classmethod
    def concat(cls, parts: Sequence[Routes]) -> Routes:
        """Concatenate any number of routes. Raises ValueError unless layers, K and experts agree."""
        kinds = {(part.ids.shape[1:], part.num_experts) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"routes differ in (layers, K) and experts: {sorted(kinds)}")
        ids = np.concatenate([part.ids for part in parts])
        known = np.concatenate([part.known for part in parts])
        return cls(ids=ids, known=known, num_experts=parts[0].num_experts)

    def rows(self, start: int, stop: int) -> Routes:
        """Return rows [start, stop)."""
        return Routes(ids=self.ids[start:stop], known=self.known[start:stop], num_experts=self.num_experts)

    @classmethod
    def packed(cls, routes: Sequence[Routes], lengths: Sequence[int]) -> Routes:
        """Pack sequences of ``lengths`` tokens end to end; rows that were not recorded are unknown. Raises
        ValueError for more rows than tokens, and as ``concat``."""
        parts: list[Routes] = []
        for sequence, length in zip(routes, lengths, strict=True):
            if len(sequence) > length:
                raise ValueError(
                    f"a sequence of {length} tokens has {len(sequence)} rows; at most one for each token"
                )
            parts += [sequence, cls.unknown(length - len(sequence), like=sequence)]
        return cls.concat(parts)

    @classmethod
    def padded(cls, routes: Sequence[Routes], mask: Any) -> Routes:
        """Pad sequences to a batch, flattened to B * S rows: ``mask`` [B, S] is true where there is a token.

        Left or right padding, or both; padding is unknown. Raises ValueError if a sequence has more rows than
        tokens.
        """
        is_token = np.asarray(mask).astype(bool)
        tokens = cls.packed(routes, is_token.sum(axis=1).tolist())
        ids = np.zeros((is_token.size, *tokens.ids.shape[1:]), tokens.ids.dtype)
        known = np.zeros(is_token.size, bool)
        ids[is_token.reshape(-1)], known[is_token.reshape(-1)] = tokens.ids, tokens.known
        return cls(ids=ids, known=known, num_experts=tokens.num_experts)

    def dense(self) -> np.ndarray:
        """Return [T, L, K] int32 with NO_EXPERT in unknown rows, as in ``types.Completion``."""
        return np.where(self.known[:, None, None], self.ids.astype(np.int32), NO_EXPERT)


def choose_id_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype for the ids; 256 experts fit a byte. Raises ValueError for less than 1 or
    more than 32768 experts."""
    if not 1 <= num_experts <= 1 << 15:  # torch, which replays ids, has no uint16 arithmetic
        raise ValueError(f"num_experts is {num_experts}; use 1 to 32768")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def _check_ids(ids: np.ndarray, num_experts: int) -> None:
    """Raises ValueError for ids out of range, and for an expert that is named twice in a row."""
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= num_experts:
        raise ValueError(
            f"routes have ids from {ids.min()} to {ids.max()}; experts are 0 to {num_experts - 1}"
        )
    sorted_ids = np.sort(ids, axis=-1)
    is_repeated = (sorted_ids[..., 1:] == sorted_ids[..., :-1]).any(axis=-1)
    if is_repeated.any():
        row, layer = np.argwhere(is_repeated)[0]
        hint = " (a buffer that was never written?)" if not ids[row, layer].any() else ""
        raise ValueError(
            f"routes name an expert twice: {ids[row, layer].tolist()} in known row {row}, layer {layer}{hint}"
        )


def _select_moe_layers(ids: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """Select the layers that have a router, from all decoder layers or from these alone. Raises ValueError
    for two routers in a layer, too few layers, or ids in a layer without a router."""
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers {list(layers)} have two routers in one layer; an engine records one")
    if ids.shape[1] == len(layers):
        return ids
    if ids.shape[1] <= max(layers):
        raise ValueError(f"routes have {ids.shape[1]} layers; the model has routers in layers {list(layers)}")
    dense_ids = np.delete(ids, list(layers), axis=1)
    if dense_ids.any():
        other_layers = sorted(set(range(ids.shape[1])) - set(layers))
        raise ValueError(
            f"routes have ids in layers {other_layers}, where the model has no router: another layer order?"
        )
    return ids[:, list(layers)]
