"""The ledger of a run as its recipe and its machine have it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ostinato.config import Recipe, dump_toml
from ostinato.launch.introduction import device_name
from ostinato.model.decoder import Decoder
from ostinato.observe.ledger import Ledger, Life, SteadyClock, Terms
from ostinato.run import RunFolder


def new_ledger(
    recipe: Recipe,
    run: RunFolder,
    decoder: Decoder,
    clock: SteadyClock,
    life: Life,
    pools: Mapping[str, int] | None = None,
) -> Ledger:
    """The books of one process, which began when ``clock`` did and shows ``life``. ``pools``: devices by
    pool where workers have them; otherwise it has the recipe's."""
    section = recipe.ledger
    terms = Terms(
        devices=sum(pools.values()) if pools else section.devices,
        pools=pools or {},
        device=device_name(decoder) or "cpu",
        price_per_device_hour=section.price_per_device_hour,
        currency=section.currency,
        recipe=hashlib.sha256(dump_toml(recipe).encode()).hexdigest()[:12],
    )
    return Ledger(folder=run, terms=terms, clock=clock, life=life)
