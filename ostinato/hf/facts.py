"""Facts of a model of ``transformers`` for trainer and loop: sizes, and FLOPs of its linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.hf.factors import Site
from ostinato.hf.replay import Replay
from ostinato.model.config import MoEConfig
from ostinato.model.config_keys import read_quantisation
from ostinato.model.flops import FlopModel, Part, Rates
from ostinato.model.shapes import AdapterSpec

_PARTS = {"attn": Part.ATTENTION, "mlp": Part.MLP}
_DEFAULT_CONTEXT = 1 << 20  # if config.json has no longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``model.base.Facts`` of a configuration of transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    moe: MoEConfig | None
    num_heads: int
    head_dim: int

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        """Read the config.json in ``folder``, without routers. Raises ValueError if transformers cannot read
        it."""
        try:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            read_quantisation(config.to_dict())
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(
                f"transformers cannot read {folder}: {' '.join(str(error).split())[:300]}"
            ) from error
        return cls.of(config.get_text_config(), None)

    @classmethod
    def of(cls, config: Any, replay: Replay | None) -> ModelFacts:
        """Make the facts of ``config``, of the text model, and ``replay``: its routers, None without any."""
        moe = None
        if replay is not None:
            width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 0)
            moe = MoEConfig(
                num_experts=replay.num_experts,
                top_k=replay.top_k,
                intermediate_size=width if isinstance(width, int) else 1,
                layers=replay.layers,
            )
        heads = _read_number(config, "num_attention_heads", "n_head", default=1)
        hidden = _read_number(config, "hidden_size", "n_embd", "d_model", default=1)
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            num_layers=_read_number(config, "num_hidden_layers", "n_layer", default=1),
            max_positions=_read_number(
                config, "max_position_embeddings", "n_positions", default=_DEFAULT_CONTEXT
            ),
            moe=moe,
            num_heads=heads,
            head_dim=_read_number(config, "head_dim", default=max(1, hidden // heads)),
        )


def _read_number(config: Any, *names: str, default: int) -> int:
    """Return the value of the first of these keys that is a positive integer, by the first layer if layers
    differ; else ``default``."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # layers have different values (Gemma 4)
            value = getattr(config.per_layer_config[0], name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default


def count_flops(
    facts: ModelFacts,
    sites: Sequence[Site],
    adapter: AdapterSpec | None,
    *,
    recompute: bool = False,
    entropy_gradient: bool = False,
) -> FlopModel:
    """Compute the FLOPs of the linear maps by name, of top_k experts, of all pairs of attention, and of the
    head.

    Other products of a recurrence are not counted, and backward is assumed to go through every layer.
    """
    share = facts.moe.top_k / facts.moe.num_experts if facts.moe else 1.0
    parts = {part: Rates() for part in Part}
    factor_rate = 0.0
    for site in sites:
        num_used = (site.experts or 1) * share if site.role == "experts" else 1.0
        product = 2.0 * site.inputs * site.outputs * num_used
        parts[_PARTS.get(site.role, Part.EXPERTS)] += Rates(tokens=product)
        if adapter is not None and site.is_targeted(adapter.targets):
            rank = (adapter.expert_rank or adapter.rank) if site.role == "experts" else adapter.rank
            factor_rate += 2.0 * rank * (site.inputs + site.outputs) * num_used
    attention = 4.0 * facts.num_heads * facts.head_dim * facts.num_layers
    parts[Part.ATTENTION] += Rates(pairs=attention)
    frozen_rate = sum((rates.tokens for rates in parts.values()), 0.0)
    parts[Part.LORA] = Rates(tokens=factor_rate)
    head = 2.0 * facts.vocab_size * facts.hidden_size
    recomputation = Rates(tokens=frozen_rate + factor_rate, pairs=attention) if recompute else Rates()
    backward = Rates(tokens=frozen_rate + 2 * factor_rate, pairs=2.5 * attention) + recomputation
    parts[Part.HEAD] = Rates(logits=head)
    head_products = 3 if adapter is None else 1 + entropy_gradient
    return FlopModel(parts=parts, backward_rates=backward + Rates(logits=head_products * head))
