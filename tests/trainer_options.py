"""Options of a ``PolicyTrainer``, for tests that change them one by one."""

from __future__ import annotations

from typing import Any

from ostinato.config import TrainerSection


def trainer_options(**options: Any) -> dict[str, Any]:
    """Keys of ``TrainerSection`` become part of ``settings``; without checks, so any may be combined."""
    own = {name: options.pop(name) for name in list(options) if name in TrainerSection.model_fields}
    return options | {"settings": options.get("settings", TrainerSection()).model_copy(update=own)}
