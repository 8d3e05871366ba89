"""``engine.layout`` in a recipe: what it becomes for vLLM, and what is refused before any work."""

from __future__ import annotations

import sys

import pytest

from ostinato.cli.engine_layout import check_engine_layout, same_shares, vllm_layout
from ostinato.config import Recipe

VLLM = ("engine.backend=vllm", 'adapter.targets=["attn"]')


def recipe(*overrides: str) -> Recipe:
    return Recipe.load("quickstart", *overrides)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("", ""),
        ("1", ""),
        ("t2", "--tensor-parallel-size 2"),
        ("t2p4", "--tensor-parallel-size 2 --pipeline-parallel-size 4"),
        ("d2t2e4", "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel"),
        ("d8e8", "--data-parallel-size 8 --enable-expert-parallel"),
    ],
)
def test_what_it_is_to_vllm(layout: str, flags: str) -> None:
    told = recipe(*VLLM, f'engine.layout="{layout}"')
    check_engine_layout(told)
    assert " ".join(vllm_layout(told)) == flags


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("engine.layout=q3",), r"^engine\.layout is 'q3'; use each of d, t"),
        (("engine.layout=t2", "adapter.kind=full", "model.dtype=float32"), r"'t2' with adapter\.kind"),
        (("engine.layout=t2", "engine.weights=int8"), r"'t2' with engine\.weights \"int8\""),
        (("engine.layout=t2", "model.device=cuda"), r"'t2' with model\.device 'cuda'.* set engine\.backend"),
        ((*VLLM, "engine.layout=c2"), r"'c2' with engine\.backend \"vllm\", which has no c"),
        ((*VLLM, "engine.layout=t2x2"), r"which has no x"),
        ((*VLLM, "engine.layout=d2t2e2"), r"over all ranks of d and t or over none; use e4"),
        ((*VLLM, "engine.layout=t2", 'engine.server_args=["-tp", "4"]'), r"has '-tp' beside engine\.layout"),
        (
            (*VLLM, "engine.layout=t2", 'engine.server_args=["--tensor-parallel-size=4"]'),
            r"has '--tensor-parallel-size=4' beside",
        ),
        ((*VLLM, "engine.layout=t2", "engine.address=http://a:1"), r"with engine\.address 'http://a:1'"),
    ],
)
def test_what_cannot_be_had(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_engine_layout(recipe(*overrides))


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        (("parallel.layout=d2e2", "engine.layout=d2e2"), True),
        (("parallel.layout=d4e4", "engine.layout=d4e4"), True),
        (("parallel.layout=d2e2", "engine.layout=d4e4"), False),  # other experts in a rank
        (("parallel.layout=p2", "engine.layout=d2e2"), False),  # a stage is no sampler
        (("parallel.layout=d2f2e2", "engine.layout=d2e2"), False),  # in pieces
        (("parallel.layout=d2e2",), False),
        (("parallel.layout=d2e2", "engine.layout=d2e2", "cluster.share_weights=false"), False),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="copies are shared on Linux")
def test_when_trainer_and_sampler_map_one_copy(overrides: tuple[str, ...], shared: bool) -> None:
    assert same_shares(recipe(*overrides)) == shared
