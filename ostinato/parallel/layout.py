"""Layout of a trainer over ranks, as a string: ``d2t2p2`` is 2 data, 2 tensor, 2 pipeline ranks, 8 in all.

    d  data               each takes a part of the microbatches
    t  tensor             heads, MLP width and vocabulary are cut; rows too between them (sequence parallel,
                          arXiv 2205.05198 section 4.2)
    p  pipeline           layers are cut into stages; v: so many chunks of layers per stage, interleaved
                          (arXiv 2104.04473 section 2.2)
    c  context            rows are cut, and heads while attention runs (Ulysses, arXiv 2309.14509)
    e  expert             routed experts are cut. Takes no ranks of its own but those of d, c and t
    x  expert tensor      the width of an expert is cut: 1, or as many as t
    f  fully sharded      weights are cut over so many data ranks and gathered layer by layer (FSDP, ZeRO-3)

The notation is AReaL's, with experts folded into the other axes as there. No torch: a planner imports it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from ostinato.model.config import ModelConfig, QKNorm

_LETTERS = {
    "d": "data",
    "t": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
    "x": "expert_tensor",
    "v": "virtual",
    "f": "shard",
}


class Coords(NamedTuple):
    """Place of a rank on every axis that takes ranks."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of all axes; see the module. Raises ValueError for sizes that do not fit each other."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"layout {self} has {field.name} {getattr(self, field.name)}; use at least 1"
                )
        if self.expert_tensor not in (1, self.tensor):
            raise ValueError(f"layout {self} has x{self.expert_tensor}; use x1, or x{self.tensor} as t")
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise ValueError(
                f"layout {self} has e{self.expert} times x{self.expert_tensor}, which does not divide the "
                f"{self.stage_ranks} ranks of d, c and t; use a divisor"
            )
        if self.data % self.shard:
            raise ValueError(
                f"layout {self} has f{self.shard}, which does not divide d{self.data}; use a divisor"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"layout {self} has v{self.virtual} without stages; set p to 2 or more")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout written as ``text`` ("d2t2p2", factors in any order; "" and "1" are one rank). Raises
        ValueError for another form, an unknown or repeated letter, and as ``Layout`` does."""
        factors = re.findall(r"([a-z])(\d+)", text)
        letters = [letter for letter, _ in factors]
        if "".join(letter + size for letter, size in factors) != text and text != "1":
            short = re.sub(r"([dtpce])p(?=\d)", r"\1", text.lower())  # TP2PP2, as others write it
            example = short if short != text and re.fullmatch(r"([a-z]\d+)+", short) else "d2t2p2"
            raise ValueError(f"layout is {text!r}; write factors like {example} of {', '.join(_LETTERS)}")
        for letter in letters:
            if letter not in _LETTERS or letters.count(letter) > 1:
                raise ValueError(f"layout is {text!r}; use each of {', '.join(_LETTERS)} once at most")
        return cls(**{_LETTERS[letter]: int(size) for letter, size in factors})

    def __str__(self) -> str:
        sizes = [(letter, getattr(self, name)) for letter, name in _LETTERS.items()]
        return "".join(f"{letter}{size}" for letter, size in sizes if size != 1) or "1"

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def world(self) -> int:
        return self.pipeline * self.stage_ranks

    @property
    def row_shards(self) -> int:
        """Number of parts into which the rows of a microbatch are cut between attention and MLP."""
        return self.context * self.tensor

    @property
    def chunks(self) -> int:
        """Number of chunks of layers over all stages."""
        return self.pipeline * self.virtual

    @property
    def expert_replicas(self) -> int:
        """Number of ranks of a stage that keep the same part of the same experts."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    @property
    def couples_microbatches(self) -> bool:
        """Whether data ranks exchange weights in pieces, or rows for experts, in the passes over their own
        microbatches. An expert group lies within one data rank if e divides the expert slots of that rank."""
        slots = self.context * (1 if self.expert_tensor > 1 else self.tensor)
        return self.shard > 1 or slots % self.expert != 0

    def coords(self, rank: int) -> Coords:
        """Coordinates of ``rank``: tensor runs fastest, then context, data, pipeline. Raises ValueError for a
        rank outside of the layout."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; layout {self} has ranks 0 to {self.world - 1}")
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        pipeline, data = divmod(rank, self.data)
        return Coords(pipeline, data, context, tensor)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share an axis with ``rank``, itself among them, in order of their place on it.

        axis: "d", "t", "p" or "c"; "f": the holders of the pieces of the same weights; "e": ranks that
        exchange rows for experts; "r": the replicas of the same expert part; "s": the whole stage; "dc": its
        ranks with the same part of heads and widths; "dcf": those of "dc" with the same piece of f; "rows":
        the ranks of one microbatch; "all".
        """
        members = [
            candidate
            for candidate in range(self.world)
            if self._make_group_key(axis, candidate) == self._make_group_key(axis, rank)
        ]
        return tuple(sorted(members, key=lambda candidate: (self.place(axis, candidate), candidate)))

    def place(self, axis: str, rank: int) -> int:
        """Index of ``rank`` in its group of ``axis``."""
        coords = self.coords(rank)
        return {
            "p": coords.pipeline,
            "d": coords.data,
            "c": coords.context,
            "t": coords.tensor,
            "f": coords.data % self.shard,
            "e": self._locate_expert(coords)[0],
            "r": self._locate_expert(coords)[1],
            "s": rank % self.stage_ranks,
            "dc": coords.data * self.context + coords.context,
            "dcf": coords.data // self.shard * self.context + coords.context,
            "rows": coords.context * self.tensor + coords.tensor,
            "all": rank,
        }[axis]

    def _locate_expert(self, coords: Coords) -> tuple[int, int]:
        """(place on the expert axis, which replica of these experts)."""
        slot = coords.data * self.context + coords.context
        if self.expert_tensor == 1:
            slot = slot * self.tensor + coords.tensor
        return slot % self.expert, slot // self.expert

    def _make_group_key(self, axis: str, rank: int) -> tuple[int, ...]:
        """Key that exactly the ranks of one group of ``axis`` have in common."""
        coords = self.coords(rank)
        expert_tensor_rank = coords.tensor if self.expert_tensor > 1 else 0
        return {
            "p": (coords.data, coords.context, coords.tensor),
            "d": (coords.pipeline, coords.context, coords.tensor),
            "c": (coords.pipeline, coords.data, coords.tensor),
            "t": (coords.pipeline, coords.data, coords.context),
            "f": (coords.pipeline, coords.context, coords.tensor, coords.data // self.shard),
            "e": (coords.pipeline, expert_tensor_rank, self._locate_expert(coords)[1]),
            "r": (coords.pipeline, expert_tensor_rank, self._locate_expert(coords)[0]),
            "s": (coords.pipeline,),
            "dc": (coords.pipeline, coords.tensor),
            "dcf": (coords.pipeline, coords.tensor, coords.data % self.shard),
            "rows": (coords.pipeline, coords.data),
            "all": (),
        }[axis]

    def refuse(self, config: ModelConfig) -> None:
        """Raise ValueError where this layout cannot cut the model."""
        for quantity, size, divisor, letters in self._list_cuts(config):
            if size % divisor:
                raise ValueError(
                    f"layout {self} cuts {quantity} ({size}) by {letters} = {divisor}; use a divisor"
                )
        if self.chunks > config.num_layers:
            raise ValueError(
                f"layout {self} has {self.chunks} chunks for {config.num_layers} layers; use fewer stages"
            )
        if config.moe is None and self.expert * self.expert_tensor > 1:
            raise ValueError(
                f"layout {self} cuts experts, but {config.model_type} here has none; drop e and x"
            )
        if config.qk_norm == QKNorm.FULL and self.tensor > 1:
            raise ValueError(
                f"layout {self} cuts heads by t, but {config.model_type} norms all heads at once; use t1"
            )

    def _list_cuts(self, config: ModelConfig) -> list[tuple[str, int, int, str]]:
        """(quantity, its size, its divisor, the letters of the divisor) for every size that the layout
        divides."""
        heads = self.tensor * self.context
        cuts = [
            ("num_attention_heads", config.num_heads, heads, "t times c"),
            ("num_key_value_heads", config.num_kv_heads, heads, "t times c"),
            ("vocab_size", config.vocab_size, self.tensor, "t"),
        ]
        moe = config.moe
        if moe is None or len(moe.layers) < config.num_layers:
            cuts.append(("intermediate_size", config.intermediate_size, self.tensor, "t"))
        if moe is not None:
            cuts += [
                ("the number of experts", moe.num_experts, self.expert, "e"),
                ("the width of an expert", moe.intermediate_size, self.expert_tensor, "x"),
                ("the width of shared experts", moe.shared_intermediate_size, self.tensor, "t"),
            ]
        return cuts

    def chunk_layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of every chunk, in order; chunk i is on stage i % p. If the layers cannot be divided
        evenly, the first chunks get one more, since the last also has the head."""
        size, remainder = divmod(num_layers, self.chunks)
        bounds = [0]
        for chunk in range(self.chunks):
            bounds.append(bounds[-1] + size + (chunk < remainder))
        return tuple(range(start, stop) for start, stop in pairwise(bounds))

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks on a stage, in order of depth."""
        return tuple(range(stage, self.chunks, self.pipeline))
