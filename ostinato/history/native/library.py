"""The compiled half of the history. It needs no torch and no threads of its own.

It is loaded as a ``PyDLL``: a call holds the GIL, takes microseconds, and no two of them ever run at once.
That is all the locking that a history shared by several engines and threads needs.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

from ostinato.compiler import NativeCode, build, load
from ostinato.history import blocks
from ostinato.isa import flags

FOLDER = Path(__file__).parent
SOURCES = ("blocks.cpp", "drafter.cpp")
# no contraction: with fused multiply-adds the results would differ between processors
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off")


class Span(ctypes.Structure):
    """``Span`` of blocks.h."""

    _fields_ = (("low", ctypes.c_int32), ("high", ctypes.c_int32))


class Next(ctypes.Structure):
    """``Next`` of blocks.h."""

    _fields_ = (
        ("token", ctypes.c_int32),
        ("edge", ctypes.c_float),
        ("prob", ctypes.c_float),
        ("reward", ctypes.c_int8),
    )


class Block(ctypes.Structure):
    """``Block`` of blocks.h."""

    _fields_ = (
        ("step", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("documents", ctypes.c_int32),
        ("narrow", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("probs", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rewards", ctypes.c_void_p),
        ("sorted", ctypes.c_bool),
    )


def load_library() -> ctypes.CDLL:
    """Load the compiled functions, and build them first if this source was not built yet. Raises
    BuildError."""
    code = NativeCode(name="history", folder=FOLDER, sources=SOURCES, flags=(*FLAGS, *flags()))
    library = load(build(code), kind=ctypes.PyDLL)
    store, block, span = ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Span)
    uint64, int32, long, context = ctypes.c_uint64, ctypes.c_int32, ctypes.c_long, ctypes.c_void_p
    signatures = {
        "history_new": (store, ()),
        "history_free": (None, (store,)),
        "history_generation": (uint64, (store,)),
        "history_add": (None, (store, uint64, ctypes.POINTER(Block))),
        "history_drop": (None, (store, uint64, int32)),
        "history_block": (block, (store, uint64, int32)),
        "history_find": (None, (block, context, long, span)),
        "history_narrow": (None, (block, span, long, int32)),
        "history_longest": (long, (block, context, long, long, span)),
        "history_next": (None, (block, int32, long, ctypes.POINTER(Next))),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class NativeStore:
    """The ``Store`` of blocks.h. Its blocks are numpy arrays that the caller keeps until it drops them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.pointer: int = library.history_new()
        weakref.finalize(self, library.history_free, self.pointer)

    def add(self, key: int, block: blocks.Block) -> None:
        """Add a block, whose arrays are read until it is dropped."""
        tokens = block.tokens.ctypes.data
        native_block = Block(
            step=block.step,
            length=block.length,
            documents=block.documents,
            narrow=None if block.wide else tokens,
            wide=tokens if block.wide else None,
            order=block.order.ctypes.data,
            edges=block.edges.ctypes.data,
            probs=block.probs.ctypes.data,
            starts=block.starts.ctypes.data,
            rewards=block.rewards.ctypes.data,
            sorted=block.is_sorted,
        )
        self._library.history_add(self.pointer, key, native_block)

    def drop(self, key: int, step: int) -> None:
        self._library.history_drop(self.pointer, key, step)

    def sort(self, key: int, step: int) -> None:
        """Sort a block, unless it is sorted."""
        self._library.history_block(self.pointer, key, step)
