"""Clusters by name, how fast groups of their devices talk, and which share of a peak programs reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ostinato.apps.plan.traffic import Traffic
from ostinato.parallel.gpus import Gpu, gpu_named
from ostinato.parallel.layout import Layout

# also in README.md and docs/index.md
ON_GPUS = "Tested on CPUs only: no GPU has run its code yet, and plans go by data sheets"
PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``nodes`` x ``per_node`` GPUs of one kind."""

    gpu: Gpu
    nodes: int
    per_node: int
    host_memory: float  # bytes of one node
    usable_host: float = 0.85  # of it: the rest is the system's, page cache, data loaders

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.per_node


def parse_cluster(text: str) -> Cluster:
    """ "64xH800-80" (nodes of 8, or a single one of fewer) or "4x8xH100-80" (nodes x devices in each).

    Raises ValueError for a device that is not known and for numbers that make no whole nodes.
    """
    parts = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9][\w-]*)", text.strip())
    if parts is None:
        raise ValueError(f"gpus is {text!r}; write a number and a device, like 64xH800-80 or 8x8xH100-80")
    count, gpu = int(parts[2]), gpu_named(parts[3])
    if parts[1]:
        nodes, per_node = int(parts[1]), count
    elif count <= PER_NODE or gpu.name == "cpu":
        nodes, per_node = 1, count
    elif count % PER_NODE == 0:
        nodes, per_node = count // PER_NODE, PER_NODE
    else:
        raise ValueError(
            f"gpus is {text!r}, which is no whole number of nodes of {PER_NODE}; write nodes x devices, "
            f"like 2x{(count + 1) // 2}x{gpu.name}"
        )
    if nodes < 1 or per_node < 1:
        raise ValueError(f"gpus is {text!r}; use at least 1 device")
    return Cluster(gpu=gpu, nodes=nodes, per_node=per_node, host_memory=gpu.host * per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """``ranks`` devices, every ``stride``-th one: a group of a layout on its cluster. Ranks fill node by
    node."""

    ranks: int
    stride: int

    def per_node(self, cluster: Cluster) -> int:
        """How many of them share a node."""
        return max(1, min(self.ranks, cluster.per_node // self.stride))

    def bandwidth(self, cluster: Cluster) -> float:
        """Bytes/s that one device sends in a ring, all groups at once. Between nodes a ring is laid through
        every network port that its members have, so it is as fast as all of them together (NCCL)."""
        here = self.per_node(cluster)
        return cluster.gpu.link if here == self.ranks else min(cluster.gpu.link, here * cluster.gpu.nic)

    def exchange_seconds(self, cluster: Cluster, sent: float) -> float:
        """Of an all-to-all in which every device sends ``sent`` bytes to the others, alike to each: its own
        port carries what leaves the node, while the links carry the rest."""
        if self.ranks == 1:
            return 0.0
        away = sent * (self.ranks - self.per_node(cluster)) / (self.ranks - 1)
        return max(away / cluster.gpu.nic, (sent - away) / cluster.gpu.link)


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
        ranks, stride = {
            "t": (one.tensor, 1),
            "c": (one.context, one.tensor),
            "dc": (one.data * one.context, one.tensor),
            "dcf": (one.data // one.shard * one.context, one.tensor),
            "f": (one.shard, one.row_shards),
            "s": (one.stage_ranks, 1),
            "e": (one.expert, one.tensor if one.expert_tensor > 1 else 1),
            "r": (one.expert_replicas, one.expert * one.expert_tensor),
            "p": (one.pipeline, one.stage_ranks),
            "all": (one.world, 1),
        }[axis]
        return Ring(ranks=ranks, stride=stride)

    def seconds(self, traffic: Traffic, axes: str = "") -> float:
        """Of collectives one after the other; ``axes``: of these alone."""
        chosen = (key for key in traffic if not axes or key[1] in axes.split())
        return sum(self._seconds(*key, *traffic[key]) for key in chosen)

    def _seconds(self, operation: str, axis: str, calls: float, sent: float) -> float:
        """Seconds are linear in bytes, so those of calls of many sizes follow from their sums."""
        ring, cluster, e = self.ring(axis), self.cluster, self.efficiency
        near = ring.per_node(cluster) == ring.ranks
        latency = calls * (e.latency if near else e.far_latency)
        if operation == "all_to_all":
            return latency + ring.exchange_seconds(cluster, sent) / e.exchange
        if operation == "send_recv":  # to the neighbour, in the same node or not
            return latency + sent / ((cluster.gpu.link if near else cluster.gpu.nic) * e.network)
        return latency + sent / (ring.bandwidth(cluster) * (e.links if near else e.network))
