"""``ostinato export``: the last policy of a run as a PEFT adapter, or merged as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.cli.policy import load_policy

if TYPE_CHECKING:
    from ostinato.model.decoder import Decoder
    from ostinato.model.lora import Adapters


def export(run: Path, to: Path, *, merged: bool) -> None:
    """Write the policy of ``run`` into ``to``, which must be empty or not exist."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} exists and is not empty; name another folder")
    if not (run / "recipe.toml").is_file():
        raise ValueError(f"run folder {run} holds no recipe.toml; name the folder of a started run")
    policy = load_policy(str(run))
    if merged and policy.adapters is not None:
        from ostinato.model.peft_io import export_merged

        export_merged(policy.decoder, policy.adapters, to, tokenizer_from=policy.folder)
    else:
        write_policy(policy.decoder, policy.adapters, policy.folder, to, policy.recipe.model.path)
    print(f"wrote {to}: the policy after {policy.step} steps")


def write_policy(decoder: Decoder, adapters: Adapters | None, base: Path, to: Path, path: str) -> None:
    """The trained part: a PEFT adapter, or, for full-parameter training, the whole model.

    ``path`` is what the recipe calls the model in ``base``. A hub name goes into the adapter as it is: the
    cache folder behind it means nothing on another machine.
    """
    from ostinato.model.hf import save_model
    from ostinato.model.named import is_hub_name
    from ostinato.model.peft_io import save_peft

    if adapters is None:
        save_model(decoder, to, tokenizer_from=base)
    else:
        save_peft(adapters, decoder, to, base_name=path if is_hub_name(path) else str(base))
