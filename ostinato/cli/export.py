"""``ostinato export``: the last policy of a run as a PEFT adapter, or merged as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from ostinato.launch.policy import load_policy, write_policy


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
