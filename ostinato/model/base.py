"""The trainer's interface to a base model: our decoder, or a model of ``transformers`` (``ostinato.hf``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ostinato.model.config import MoEConfig

if TYPE_CHECKING:
    from ostinato.model.attention import Attend
    from ostinato.model.flops import FlopModel
    from ostinato.model.lora import Adapters, Prepared
    from ostinato.model.ops import Ops
    from ostinato.model.shapes import AdapterSpec


class Facts(Protocol):
    """Sizes of a model; ``ModelConfig`` has all of them."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def moe(self) -> MoEConfig | None: ...


class Base(Protocol):
    """A language model with frozen weights that takes adapters as an argument."""

    @property
    def config(self) -> Facts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def head_weight(self) -> Tensor | None:
        """[V, D] if logits are the product with it alone; None if ``logits`` computes more."""
        ...

    @property
    def fp32_head(self) -> bool: ...

    @property
    def num_moe_layers(self) -> int: ...

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        adapters: Adapters | Prepared | None = None,
        routing: Tensor | None = None,
        routing_checked: bool = False,
        ops: Ops = ...,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what ``Decoder.forward`` describes."""
        ...

    def logits(self, hidden: Tensor, *, ops: Ops = ...) -> Tensor:
        """Compute the logits [R, V] of hidden states [R, D]."""
        ...

    def flops(self, adapter: AdapterSpec | None, **options: bool) -> FlopModel:
        """Return the FLOPs that ``FlopModel.of`` describes."""
        ...

    def parameters(self) -> Iterator[Any]: ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...

    def set_trainable(self, on: bool) -> Any: ...
