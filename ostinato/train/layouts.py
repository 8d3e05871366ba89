"""A ``PolicyTrainer`` on the ranks of a layout; each rank builds it from its own part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.algo.algorithms import Algorithm
from ostinato.config import TrainerSection
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes
from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.experts import ExpertParallel
from ostinato.parallel.fingerprint import parameter_shapes, sharded_fingerprint
from ostinato.parallel.fsdp import Pieces
from ostinato.parallel.layout import Layout
from ostinato.parallel.leaves import ShardedLeaves
from ostinato.parallel.placement import number_slots, owner_of, place_contiguously
from ostinato.parallel.rows import number_experts, sequence_ops
from ostinato.parallel.shares import Placement
from ostinato.train.leaves import trained_parameters
from ostinato.train.passes import Backend, copy_reference
from ostinato.train.sharded import ShardedPasses
from ostinato.train.trainer import PolicyTrainer


def sharded_trainer(
    mesh: Mesh,
    decoders: Sequence[Decoder],
    adapters: Adapters | None,
    algorithm: Algorithm,
    *,
    ops: Ops = TORCH_OPS,
    settings: TrainerSection,
    temperature: float = 1.0,
    placement: Placement | None = None,
    mirror: Decoder | None = None,
    **options: Any,
) -> PolicyTrainer:
    """Build the trainer of one rank and reset the traffic counts. All ranks build theirs together, since
    the weights are cut together, and make the same calls together from then on.

    decoders: the chunks that this rank keeps (``shares.shares_of``), unsharded over f: with f in the layout
    they are sharded here, and recompute is on. adapters: of all their layers (``pieces.own_adapters``), or
    None to train the decoders' parameters. placement: which rank keeps which experts, None for contiguous
    ones. mirror: see ``passes.Backend``; on the first rank. settings, options: those of ``PolicyTrainer``.

    Raises ValueError for a rank without anything to train, and as ``PolicyTrainer`` does.
    """
    layout, config, links = mesh.layout, decoders[0].config, Collectives(mesh)
    pieces = _cut_matrices(decoders, links) if layout.shard > 1 else None
    leaf_by_name = _collect_leaves(decoders, adapters, mesh)
    slots = None if placement is None else torch.from_numpy(number_slots(owner_of(placement)))
    for decoder in decoders:
        number_experts(decoder, slots)
    passes = ShardedPasses(
        mesh,
        links,
        decoders,
        adapters,
        reference=copy_reference(adapters, algorithm),
        ops=sequence_ops(ops, links, rows=_make_expert_parallel(layout, links), pieces=pieces),
        temperature=temperature,
        recompute=settings.recompute or pieces is not None,
        entropy_grad=algorithm.needs_entropy,
    )
    shapes = _list_shapes(config, None if adapters is None else adapters.spec)
    leaves = ShardedLeaves(mesh, links, config, leaf_by_name, shapes, pieces=pieces, placement=placement)
    base_fingerprint = ""  # not used if all parameters are trained
    if adapters is not None:
        base_fingerprint = sharded_fingerprint(mesh, links, decoders, pieces=pieces, placement=placement)
    links.traffic.take()  # the first step reports only its own traffic
    owner = _find_owner(layout.expert, config, placement)
    backend = Backend(
        passes=passes, leaves=leaves, fingerprint=lambda: base_fingerprint, owner=owner, mirror=mirror
    )
    return PolicyTrainer(
        decoders[0],
        adapters,
        algorithm,
        settings=settings,
        temperature=temperature,
        ops=ops,
        backend=backend,
        **options,
    )


def _cut_matrices(decoders: Sequence[Decoder], links: Collectives) -> Pieces:
    """Keep only this rank's pieces of the matrices of ``decoders``, in place."""
    pieces = Pieces(links)
    for decoder in decoders:
        pieces.take(decoder)
    return pieces


def _make_expert_parallel(layout: Layout, links: Collectives) -> ExpertParallel | None:
    """The experts of a rank that keeps some of them; None where it keeps all."""
    if layout.expert * layout.expert_tensor == 1:
        return None
    return ExpertParallel(links=links, tensor=layout.expert_tensor)


def _collect_leaves(
    decoders: Sequence[Decoder], adapters: Adapters | None, mesh: Mesh
) -> Mapping[str, Tensor]:
    """The leaves of this rank, over all its chunks. Raises ValueError where there are none."""
    leaf_by_name: dict[str, Tensor] = {}
    for decoder in decoders:
        leaf_by_name |= trained_parameters(decoder, adapters)
    if not leaf_by_name:
        raise ValueError(
            f"layout {mesh.layout} leaves rank {mesh.rank} nothing to train in layers "
            f"{decoders[0].share.layers[0]} to {decoders[-1].share.layers[-1]}; use fewer stages, or more "
            "adapter.targets"
        )
    return leaf_by_name


def _list_shapes(config: ModelConfig, spec: AdapterSpec | None) -> dict[str, tuple[int, ...]]:
    """The shapes of all leaves of the whole model, by name."""
    if spec is None:
        return {
            name: shape
            for name, shape in parameter_shapes(config).items()
            if not name.endswith("correction_bias")  # see ``Decoder.set_trainable``
        }
    return {
        f"{name}.{part}": shape
        for name, pair in compute_adapter_shapes(config, spec).items()
        for part, shape in zip("AB", pair, strict=True)
    }


def _find_owner(ranks: int, config: ModelConfig, placement: Placement | None) -> Any:
    """The expert rank [L, E] that keeps each expert; None without a mixture, or on one expert rank."""
    if config.moe is None or ranks == 1:
        return None
    if placement is not None:
        return owner_of(placement)
    return place_contiguously(len(config.moe.layers), config.moe.num_experts, ranks)
