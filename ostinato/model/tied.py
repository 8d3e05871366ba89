"""TinyLoRA (arXiv 2602.04118): a LoRA of a few trained numbers for all linear maps together.

With Q [in, r] an orthonormal basis of what the r largest right singular vectors of a map W [out, in] span,

    A = Q^T [r, in]    B = W Q sum_j v_j P_j [out, r]    update = alpha / r * B A

The paper has U Sigma and V^T, which differ from W Q and Q^T by a rotation, and Gaussian P_j [r, r] have no
direction. Each map has r * r of the N trained numbers, in turn, from the first again after the last: N = 1
moves all maps by one number, and N = maps * r * r is LoRA-XS (arXiv 2405.17604). A factor that experts share
is of all their weights stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, Prepared
from ostinato.model.shapes import AdapterSpec, adapter_shapes

SWEEPS = 16  # of subspace iteration: Q need not be exact, only the same again


class TiedAdapters(Adapters):
    """``numbers`` [N] are trained; ``tensors`` are computed from them, ordinary factors to their readers.

    frozen: (A, W Q) by logical name; mixes: [maps, r * r, r, r], the P of each map.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        frozen: Mapping[str, tuple[Tensor, Tensor]],
        config: ModelConfig,
        mixes: Tensor,
        numbers: Tensor,
    ) -> None:
        super().__init__(spec, frozen, config)
        self._mixes, self.numbers = mixes, numbers
        self._turns = (torch.arange(mixes.shape[0] * mixes.shape[1]) % len(numbers)).to(numbers.device)

    @property
    def tensors(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        own = self.numbers.index_select(0, self._turns).view(self._mixes.shape[:2])
        cores = torch.einsum("mj,mjab->mab", own, self._mixes)
        return {
            name: (a, u @ core) for (name, (a, u)), core in zip(self._tensors.items(), cores, strict=True)
        }

    def leaves(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers}

    def copy_of(self, leaves: Mapping[str, Tensor], config: ModelConfig) -> Adapters:
        return self.detach_copy()

    def prepared(self, dtype: torch.dtype) -> Prepared:
        return Adapters(self.spec, self.tensors, self.config).prepared(dtype)


@torch.no_grad()
def tied_adapters(decoder: Decoder, spec: AdapterSpec, count: int, seed: int = 0) -> TiedAdapters:
    """Fresh ones of ``count`` numbers, all 0, so the policy is the base. Drawn on the CPU from ``seed``.

    Raises ValueError for more numbers than the maps have places, and for a rank that a map is too narrow for.
    """
    shapes, linears = adapter_shapes(decoder.config, spec), decoder.named_linears()
    each = spec.rank**2
    if spec.rank > (narrow := min(min(linears[name].weight.shape[-2:]) for name in shapes)):
        raise ValueError(f"adapter.rank is {spec.rank}, and a map is {narrow} wide; lower it")
    if count > (most := len(shapes) * each):
        raise ValueError(
            f"adapter.tied is {count}, and {len(shapes)} maps of rank {spec.rank} have places for {most} "
            "numbers; lower it or raise adapter.rank"
        )
    generator, frozen = torch.Generator().manual_seed(seed), {}
    for name, (a_shape, b_shape) in shapes.items():
        weight = linears[name].weight.float()
        rows = weight if len(a_shape) <= len(b_shape) else weight.mT  # experts.down of one B: from the left
        stacked = rows.flatten(0, -2) if len(a_shape) != len(b_shape) else rows
        size = (*stacked.shape[:-2], stacked.shape[-1], spec.rank)
        q = torch.randn(size, generator=generator).to(weight.device)
        for _ in range(SWEEPS):
            q = torch.linalg.qr(stacked.mT @ (stacked @ q)).Q
        a, u = (q.mT, weight @ q) if rows is weight else (q.mT @ weight, q)
        frozen[name] = (a.contiguous(), u.contiguous())
    mixes = torch.randn((len(shapes), each, spec.rank, spec.rank), generator=generator).to(decoder.device)
    return TiedAdapters(spec, frozen, decoder.config, mixes, torch.zeros(count, device=decoder.device))
