"""How fast a device and its links really are: efficiencies, and seconds of products and messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.apps.plan.cluster import Ring
from ostinato.apps.plan.comm import Message
from ostinato.apps.plan.problem import Cluster
from ostinato.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of peaks that real programs reach, and seconds that pass whatever the size. Assumptions, until a
    run has been measured (``plan.fit``); of H100-class devices, large products in bf16."""

    products: float = 0.55  # of peak FLOP/s: dense products of thousands of rows
    grouped: float = 0.40  # the same of grouped products, one group per expert
    attention: float = 0.40
    memory: float = 0.75  # of memory bandwidth
    links: float = 0.75  # of NVLink or PCIe between devices
    network: float = 0.75  # of a network port
    exchange: float = 0.55  # of either, in an all-to-all of uneven parts
    pcie: float = 0.75
    latency: float = 12e-6  # of a collective within a node
    far_latency: float = 30e-6  # of one that leaves it
    layer: float = 250e-6  # least seconds of a layer's forward: its kernels have to be launched
    captured: float = 30e-6  # the same in a captured graph, as samplers decode
    ahead: bool = True  # kernels are launched while others run: only what is shorter than its launch waits
    sweeps: float = 14.0  # times that a layer's elementwise work reads or writes its rows, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The groups of a layout on a cluster."""

    layout: Layout
    cluster: Cluster
    efficiency: Efficiency

    def ring(self, axis: str) -> Ring:
        """The devices of an axis; ranks fill nodes in the order of ``Layout``: t fastest, p slowest."""
        one = self.layout
        expert_stride = one.tensor if one.expert_tensor > 1 else 1
        ranks, stride = {
            "t": (one.tensor, 1),
            "c": (one.context, one.tensor),
            "rows": (one.row_shards, 1),
            "d": (one.data, one.row_shards),
            "dc": (one.data * one.context, one.tensor),
            "dcf": (one.data // one.shard * one.context, one.tensor),
            "f": (one.shard, one.row_shards),
            "s": (one.stage_ranks, 1),
            "e": (one.expert, expert_stride),
            "r": (one.expert_replicas, one.expert * one.expert_tensor),
            "p": (one.pipeline, one.stage_ranks),
            "all": (one.world, 1),
        }[axis]
        return Ring(ranks=ranks, stride=stride)

    def seconds(self, messages: Iterable[Message]) -> float:
        """Of messages one after the other."""
        return sum(one.calls * self.of(one) for one in messages)

    def of(self, one: Message) -> float:
        """Of one call."""
        ring, cluster, e = self.ring(one.axis), self.cluster, self.efficiency
        near = ring.per_node(cluster) == ring.ranks
        latency = e.latency if near else e.far_latency
        if one.operation == "all_to_all":
            return latency + ring.exchange_seconds(cluster, one.sent) / e.exchange
        if one.operation == "send_recv":  # to the neighbour, in the same node or not
            return latency + one.sent / ((cluster.gpu.link if near else cluster.gpu.nic) * e.network)
        return latency + one.sent / (ring.bandwidth(cluster) * (e.links if near else e.network))
