"""A weight as an argument of the kernels, plain or in codes: the struct of codes.h."""

from __future__ import annotations

import ctypes

import torch

from ostinato.model.weights import Quantised, Weight

FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # of codes
_PLAIN, _BF16 = 0, 3  # of the dtype of the rows; bf16 for rows of fp32


class Matrix(ctypes.Structure):
    """Rows of a matrix (or of several in succession), which the caller keeps alive."""

    _fields_ = [("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("format", ctypes.c_long)]


def make_matrix(weight: Weight, dtype: torch.dtype) -> Matrix:
    """Make the struct of ``weight`` [..., N, K], contiguous, for rows of ``dtype``. Raises TypeError for fp8
    codes and rows that are not bf16."""
    if isinstance(weight, Quantised):
        tiles = weight.tiles
        if tiles.dtype != torch.int8 and dtype != torch.bfloat16:
            raise TypeError(f"codes of {tiles.dtype} are multiplied with bfloat16, not {dtype}")
        return Matrix(data=tiles.data_ptr(), scale=weight.scale.data_ptr(), format=FORMATS[tiles.dtype])
    is_bf16 = weight.dtype == torch.bfloat16 != dtype
    return Matrix(data=weight.data_ptr(), format=_BF16 if is_bf16 else _PLAIN)
