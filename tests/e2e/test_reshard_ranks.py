"""Reshards on ranks of torch.distributed: the parts of after, and the bytes of the plan."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from small_shards import config_of

from ostinato.model.config import ModelConfig
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.share import placed
from ostinato.parallel.layout import Layout
from ostinato.parallel.links import Links
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.pieces import cut
from ostinato.parallel.reshard import Holdings, Reshard, factor_shapes, holdings

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
SPECS = {
    "shared_outer": AdapterSpec(rank=2, targets=("attn", "mlp", "shared", "experts", "router")),
    "per_expert": AdapterSpec(rank=2, expert_scheme=ExpertScheme.PER_EXPERT),
}
CASES = [
    ("llama", "t2", "p2", 0, "shared_outer"),
    ("llama", "p2v2t2", "d2t2", 0, "shared_outer"),
    ("qwen3_moe", "d2t2e4", "d2t2e2x2", 0, "per_expert"),
    ("qwen3_moe", "p2d2e2", "t4", 0, "shared_outer"),
    ("deepseek_v3", "d2t2e4", "p2d2e2", 0, "per_expert"),
    ("deepseek_v3", "d2e2", "t2x2", 2, "shared_outer"),  # apart: two ranks train, two others sample
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_is_planned_is_what_is_sent(case: tuple[str, str, str, int, str]) -> None:
    """On ranks of torch.distributed: the parts of after, and the bytes of the plan, rank by rank."""
    family, before, after, first, scheme = case
    config = config_of(family)
    whole = init_adapters(config, SPECS[scheme], seed=1).state_dict()
    generator = torch.Generator().manual_seed(2)
    whole = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in whole.items()}
    held, wanted = holdings(Layout.parse(before), config), holdings(Layout.parse(after), config, first)
    ranks = max(*held, *wanted) + 1
    owned = parts(config, held, whole) + [{}] * (ranks - max(held) - 1)
    results = on_ranks(ranks, run_plan, family, scheme, before, after, first, owned)
    plan = Reshard.plan(config, factor_shapes(config, SPECS[scheme]), held, wanted)
    expected = parts(config, wanted, whole)
    for rank, (found, sent) in enumerate(results):
        assert sent == sum(size for (source, _), size in plan.sent().items() if source == rank)
        mine = expected[rank] if rank < len(expected) else {}
        assert found.keys() == mine.keys()
        for name, tensor in mine.items():
            assert torch.equal(found[name], tensor), name


def run_plan(
    rank: int,
    world: int,
    family: str,
    scheme: str,
    before: str,
    after: str,
    first: int,
    owned: list[Tensors],
) -> tuple[Tensors, int]:
    config = config_of(family)
    held, wanted = holdings(Layout.parse(before), config), holdings(Layout.parse(after), config, first)
    plan = Reshard.plan(config, factor_shapes(config, SPECS[scheme]), held, wanted)
    links = Links(Mesh(Layout(data=world)))
    found = plan.run(owned[rank], links, torch.float32)
    assert links.traffic.bytes.keys() <= {("all_to_all", "all")}
    return found, links.traffic.bytes["all_to_all", "all"]


def parts(config: ModelConfig, held: Holdings, whole: Tensors) -> list[Tensors]:
    """By rank: what it keeps."""
    return [
        {
            name: cut(tensor, placed(config, share, name, tensor.shape))
            for name, tensor in whole.items()
            for share in held.get(rank, ())
            if int(name.split(".")[1]) in share.layers
        }
        for rank in range(max(held) + 1)
    ]
