"""How far two right results may lie apart that add the same numbers in another order.

A sum of n terms is rounded n - 1 times, each time by at most half of eps of the magnitudes so far: whichever
the order, it is within (n - 1) eps / 2 of the exact one, times the sum of the magnitudes (Higham, Accuracy
and Stability of Numerical Algorithms, section 4.2). So two orders lie at most n eps apart. Which order is
taken depends on a processor's vectors, on the number of rows and on the library: an absolute tolerance that
holds by a hair on one machine fails on the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig


def rounding(dtype: torch.dtype, terms: int, scale: Tensor | float) -> float:
    """The bound for sums of ``terms`` terms in ``dtype``, one after the other or one of another. ``scale``: a
    bound of the magnitudes that add up; of a tensor its largest entry."""
    largest = float(scale.detach().abs().max()) if isinstance(scale, Tensor) else abs(scale)
    return terms * torch.finfo(dtype).eps * largest


def terms_of(config: ModelConfig, rows: int) -> int:
    """Terms of all sums that a hidden state passes on its way through the layers, with ``rows`` keys: norms
    and projections (four sums over the hidden size), scores, softmax, values, heads, widths, experts.

    What a layer rounds reaches the next by the residual stream with a factor of about one, so that the
    roundings of layers add up.
    """
    moe, heads = config.moe, config.num_heads * config.v_head_dim
    wide = max(config.intermediate_size, 0 if moe is None else moe.intermediate_size)
    experts = 0 if moe is None else moe.top_k
    return config.num_layers * (4 * config.hidden_size + config.head_dim + 2 * rows + heads + wide + experts)


def hidden_rounding(config: ModelConfig, rows: int, hidden: Tensor) -> float:
    """``rounding`` of hidden states [T, D] that were computed over ``rows`` rows, in their dtype."""
    return rounding(hidden.dtype, terms_of(config, rows), hidden)
