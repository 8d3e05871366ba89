"""Adapters that are mapped from their files: what is served is what the loader that copies would serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import adapters_of, tiny_decoder

from ostinato.engine.engine_thread import run_in_own_thread
from ostinato.launch.policy import load_adapter, map_policy
from ostinato.model.peft_io import LOGICAL, compute_base_fingerprint, save_peft
from ostinato.model.shapes import ExpertScheme


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [{}, {"rank": 3, "expert_scheme": ExpertScheme.PER_EXPERT}])
def test_a_mapped_adapter_is_the_loaded_one(dtype: torch.dtype, spec: dict[str, Any], tmp_path: Path) -> None:
    decoder = tiny_decoder(dtype)
    save_peft(adapters_of(decoder, 1, **spec), decoder, tmp_path)
    mapped = map_policy(tmp_path / LOGICAL, decoder.config, compute_base_fingerprint(decoder), dtype)
    (tmp_path / LOGICAL).unlink()  # which the mapping survives
    save_peft(adapters_of(decoder, 1, **spec), decoder, tmp_path)
    loaded = load_adapter(str(tmp_path), decoder)[1]
    assert mapped.adapters is not None and mapped.prepared is not None
    assert mapped.adapters.spec == loaded.spec
    theirs = loaded.state_dict()
    assert mapped.adapters.state_dict().keys() == theirs.keys()
    assert all(torch.equal(ours, theirs[name]) for name, ours in mapped.adapters.state_dict().items())
    ours, want = [], []
    mapped.prepared.map_factors(lambda factor: ours.append(factor) or factor)
    loaded.prepare(dtype).map_factors(lambda factor: want.append(factor) or factor)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, want, strict=True))
    assert mapped.num_bytes == sum(t.nbytes for t in (*ours, *theirs.values()))


def test_a_file_of_another_base_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    save_peft(adapters_of(decoder), decoder, tmp_path, peft=False)
    path, fingerprint = tmp_path / LOGICAL, compute_base_fingerprint(decoder)
    with pytest.raises(ValueError, match="belongs to another base"):
        map_policy(path, decoder.config, "0" * 16, decoder.dtype)
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-4]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or not an adapter of ours"):
            map_policy(path, decoder.config, fingerprint, decoder.dtype)


def test_a_load_in_a_thread_of_its_own_takes_no_team_of_workers() -> None:
    """Beside an engine's, a team waited for cores: a load took eight times as long on two cores."""
    before = torch.get_num_threads()
    assert asyncio.run(run_in_own_thread(torch.get_num_threads)) == 1
    assert torch.get_num_threads() == before
