"""The experts that tokens went to, as data: made from what an engine returns, merged, laid out.

Row t belongs to token t as an *input* of the model (its output predicts token t + 1). An engine that sampled
T tokens in all has T - 1 rows: the last one was never an input. Rows that were not recorded are unknown, and
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
    known: np.ndarray  # [T] bool; a bitmap and no sentinel, because 256 experts leave none in uint8
    num_experts: int

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.known.shape != self.ids.shape[:1] or self.known.dtype != np.bool_:
            raise ValueError(
                f"routes have ids {self.ids.shape} and known {self.known.dtype}{list(self.known.shape)}; "
                "give [T, layers, K] and bool [T]"
            )
        if self.ids.dtype != id_dtype(self.num_experts):
            raise ValueError(
                f"routes have dtype {self.ids.dtype}; ids of {self.num_experts} experts are "
                f"{id_dtype(self.num_experts)} (Routes.of converts)"
            )
        _check(self.ids[self.known], self.num_experts)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        rows, layers, top_k = self.ids.shape
        known = int(self.known.sum())
        return f"Routes({rows} rows, {known} known, {layers} layers, {top_k} of {self.num_experts})"

    @classmethod
    def of(cls, ids: Any, num_experts: int) -> Routes:
        """From any integer array or CPU tensor [T, L, K] or [B, S, L, K]; rows of NO_EXPERT are unknown.

        A row is known in all layers or in none. Raises ValueError like the class.
        """
        array = np.asarray(ids)
        if array.ndim == 4:
            array = array.reshape(-1, *array.shape[2:])
        if array.dtype.kind not in "iu" or array.ndim != 3:
            raise ValueError(f"routes are {array.dtype}{list(array.shape)}; give integer ids [T, layers, K]")
        absent = array == NO_EXPERT if array.dtype.kind == "i" else np.zeros(array.shape, bool)
        unknown: Any = absent.all(axis=(1, 2))
        if (absent.any(axis=(1, 2)) != unknown).any():
            raise ValueError(
                f"routes have a row with some ids {NO_EXPERT}; a row is known whole or not at all"
            )
        _check(array[~unknown], num_experts)  # before narrowing can wrap an id round
        small = np.where(unknown[:, None, None], 0, array).astype(id_dtype(num_experts))
        return cls(ids=small, known=~unknown, num_experts=num_experts)

    @classmethod
    def from_completion(cls, completion: Completion, num_experts: int) -> Routes:
        """Of prompt (from ``Request.routes_from`` on) and answer of our own engine; the last sampled token is
        unknown."""
        if completion.experts is None or completion.prompt_experts is None:
            raise ValueError("completion has no experts; set the engine to record the routing")
        return cls.of(np.concatenate([completion.prompt_experts, completion.experts]), num_experts)

    @classmethod
    def from_vllm(
        cls, output: Any, *, layers: Sequence[int], num_experts: int, index: int = 0, prompt_start: int = 0
    ) -> Routes:
        """From a vLLM ``RequestOutput`` made with ``enable_return_routed_experts`` (layout of 0.32).

        vLLM's array is [rows, all decoder layers, K], dense layers being zero rows; releases before left them
        out. ``layers`` are the decoder layers that have a router (``Replay.layers``); which of the two
        layouts it is, follows from the shape. Rows are one fewer than tokens after ``prompt_start`` (of
        SamplingParams); the last token is appended as unknown, so that rows and tokens agree.

        Raises ValueError for missing routes, another number of rows, layers that do not fit, or ids in a
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
        known = cls.of(_moe_layers(ids, layers), num_experts)
        return cls.merge(known, cls.unknown(1, like=known), start=len(known))

    @classmethod
    def unknown(cls, rows: int, *, like: Routes) -> Routes:
        """``rows`` rows that choose natively."""
        ids = np.zeros((rows, *like.ids.shape[1:]), like.ids.dtype)
        return cls(ids=ids, known=np.zeros(rows, bool), num_experts=like.num_experts)

    @classmethod
    def merge(cls, previous: Routes, new: Routes, *, start: int) -> Routes:
        """Rows [0, start) of ``previous``, then all of ``new``: a turn that recorded from ``start`` on.

        Right only if the first ``start`` tokens are the same ids *and* the engine reused their keys and
        values; if it computed them anew, its new rows are the true ones.
        """
        if not 0 <= start <= len(previous):
            raise ValueError(f"start is {start}; previous has {len(previous)} rows")
        return cls.concat([previous.rows(0, start), new])

    @classmethod
    def concat(cls, parts: Sequence[Routes]) -> Routes:
        """One after the other, in any number. Raises ValueError unless layers, K and experts agree."""
        kinds = {(part.ids.shape[1:], part.num_experts) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"routes differ in (layers, K) and experts: {sorted(kinds)}")
        ids = np.concatenate([part.ids for part in parts])
        known = np.concatenate([part.known for part in parts])
        return cls(ids=ids, known=known, num_experts=parts[0].num_experts)

    def rows(self, start: int, stop: int) -> Routes:
        """Rows [start, stop)."""
        return Routes(ids=self.ids[start:stop], known=self.known[start:stop], num_experts=self.num_experts)

    @classmethod
    def packed(cls, routes: Sequence[Routes], lengths: Sequence[int]) -> Routes:
        """Rows of sequences laid end to end, ``lengths`` tokens each; rows not recorded are unknown."""
        parts: list[Routes] = []
        for one, length in zip(routes, lengths, strict=True):
            if len(one) > length:
                raise ValueError(
                    f"a sequence of {length} tokens has {len(one)} rows; at most one for each token"
                )
            parts += [one, cls.unknown(length - len(one), like=one)]
        return cls.concat(parts)

    @classmethod
    def padded(cls, routes: Sequence[Routes], mask: Any) -> Routes:
        """Rows of a padded batch, flattened to B * S: ``mask`` [B, S] is true where there is a token.

        Left or right padding, or both; padding is unknown. Raises ValueError if a sequence has more rows than
        tokens.
        """
        real = np.asarray(mask).astype(bool)
        tokens = cls.packed(routes, real.sum(axis=1).tolist())
        ids = np.zeros((real.size, *tokens.ids.shape[1:]), tokens.ids.dtype)
        known = np.zeros(real.size, bool)
        ids[real.reshape(-1)], known[real.reshape(-1)] = tokens.ids, tokens.known
        return cls(ids=ids, known=known, num_experts=tokens.num_experts)

    def dense(self) -> np.ndarray:
        """[T, L, K] int32 with NO_EXPERT in unknown rows, as in ``types.Completion``."""
        return np.where(self.known[:, None, None], self.ids.astype(np.int32), NO_EXPERT)


def id_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest type that holds the ids: 256 experts still fit a byte."""
    if not 1 <= num_experts <= 1 << 15:  # torch, where ids are replayed, has no uint16 arithmetic
        raise ValueError(f"num_experts is {num_experts}; use 1 to 32768")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def _check(ids: np.ndarray, num_experts: int) -> None:
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= num_experts:
        raise ValueError(
            f"routes have ids from {ids.min()} to {ids.max()}; experts are 0 to {num_experts - 1}"
        )
    ordered = np.sort(ids, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if repeated.any():
        row, layer = np.argwhere(repeated)[0]
        zero = " (a buffer that was never written?)" if not ids[row, layer].any() else ""
        raise ValueError(
            f"routes name an expert twice: {ids[row, layer].tolist()} in known row {row}, layer {layer}{zero}"
        )


def _moe_layers(ids: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """The layers that have a router, out of all decoder layers or of themselves."""
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers {list(layers)} have two routers in one layer; an engine records one")
    if ids.shape[1] == len(layers):
        return ids
    if ids.shape[1] <= max(layers):
        raise ValueError(f"routes have {ids.shape[1]} layers; the model has routers in layers {list(layers)}")
    dense = np.delete(ids, list(layers), axis=1)
    if dense.any():
        found = sorted(set(range(ids.shape[1])) - set(layers))
        raise ValueError(
            f"routes have ids in layers {found}, where the model has no router: another layer order?"
        )
    return ids[:, list(layers)]
