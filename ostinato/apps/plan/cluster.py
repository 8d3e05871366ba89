"""Clusters by name, the bandwidth of groups of their devices, and the shares of peaks that programs reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ostinato.apps.plan.traffic import Traffic
from ostinato.parallel.gpus import Gpu, find_gpu
from ostinato.parallel.layout import Layout

# also in README.md and docs/index.md
ON_GPUS = "Tested on CPUs only. No GPU has run this code yet; the planner uses data sheets"
PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``nodes`` x ``per_node`` GPUs of one kind."""

    gpu: Gpu
    nodes: int
    per_node: int
    host_memory: float  # bytes of one node
    usable_host: float = 0.85  # share of it; the system, page cache and data loaders take the rest

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.per_node


def parse_cluster(text: str) -> Cluster:
    """Parse "64xH800-80" (nodes of 8, or a single smaller node) or "4x8xH100-80" (nodes x devices in each).

    Raises ValueError for an unknown device and for a number of devices that makes no whole nodes.
    """
    plain = re.sub(r"^([^:]+):(\d+)$", r"\2x\1", text.strip())  # H100:8, as clouds write it
    parts = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9][\w-]*)", plain)
    if parts is None:
        raise ValueError(f"gpus is {text!r}; write a number and a device, like 64xH800-80 or 8x8xH100-80")
    count, gpu = int(parts[2]), find_gpu(parts[3])
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
    """A group of a layout on its cluster: ``ranks`` devices, every ``stride``-th. Ranks fill node by node."""

    ranks: int
    stride: int

    def per_node(self, cluster: Cluster) -> int:
        """Return how many of the devices share a node."""
        return max(1, min(self.ranks, cluster.per_node // self.stride))

    def bandwidth(self, cluster: Cluster) -> float:
        """Return the bytes/s that a device sends in a ring while all groups send. Between nodes a ring uses
        every network port of its members, so it is as fast as all of them together (NCCL)."""
        num_local = self.per_node(cluster)
        return (
            cluster.gpu.link
            if num_local == self.ranks
            else min(cluster.gpu.link, num_local * cluster.gpu.nic)
        )

    def exchange_seconds(self, cluster: Cluster, sent: float) -> float:
        """Return the seconds of an all-to-all in which every device sends ``sent`` bytes, the same number to
        each other device. The device's port carries the bytes that leave the node, while the links carry the
        rest."""
        if self.ranks == 1:
            return 0.0
        remote_bytes = sent * (self.ranks - self.per_node(cluster)) / (self.ranks - 1)
        return max(remote_bytes / cluster.gpu.nic, (sent - remote_bytes) / cluster.gpu.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of peaks that real programs reach, and seconds that do not depend on size. They are assumptions
    for H100-class devices and large products in bf16, until a run has been measured (``plan.fit``)."""

    products: float = 0.55  # of peak FLOP/s: dense products of thousands of rows
    grouped: float = 0.40  # the same for grouped products, a group per expert
    attention: float = 0.40
    memory: float = 0.75  # of memory bandwidth
    links: float = 0.75  # of NVLink or PCIe between devices
    network: float = 0.75  # of a network port
    exchange: float = 0.55  # of either, in an all-to-all of uneven parts
    pcie: float = 0.75
    latency: float = 12e-6  # of a collective within a node
    far_latency: float = 30e-6  # of a collective that leaves the node
    layer: float = 250e-6  # the least seconds of a layer's forward, to launch its kernels
    captured: float = 30e-6  # the same in a captured graph, as samplers decode
    ahead: bool = True  # kernels are launched while others run, so only shorter kernels wait for a launch
    sweeps: float = 14.0  # times that a layer's elementwise work reads or writes its rows, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The groups of a layout on a cluster."""

    layout: Layout
    cluster: Cluster
    efficiency: Efficiency

    def ring(self, axis: str) -> Ring:
        """The devices of an axis; ranks fill nodes in the order of ``Layout``: t fastest, p slowest."""
        layout = self.layout
        ranks, stride = {
            "t": (layout.tensor, 1),
            "c": (layout.context, layout.tensor),
            "dc": (layout.data * layout.context, layout.tensor),
            "dcf": (layout.data // layout.shard * layout.context, layout.tensor),
            "f": (layout.shard, layout.row_shards),
            "s": (layout.stage_ranks, 1),
            "e": (layout.expert, layout.tensor if layout.expert_tensor > 1 else 1),
            "r": (layout.expert_replicas, layout.expert * layout.expert_tensor),
            "p": (layout.pipeline, layout.stage_ranks),
            "all": (layout.world, 1),
        }[axis]
        return Ring(ranks=ranks, stride=stride)

    def seconds(self, traffic: Traffic, axes: str = "") -> float:
        """Return the seconds of collectives one after the other; ``axes``: only those over these axes."""
        keys = (key for key in traffic if not axes or key[1] in axes.split())
        return sum(self._price_calls(*key, *traffic[key]) for key in keys)

    def _price_calls(self, operation: str, axis: str, calls: float, sent: float) -> float:
        """Return the seconds of ``calls`` that send ``sent`` bytes together. Seconds are linear in bytes, so
        sums over calls of many sizes suffice."""
        ring, cluster, e = self.ring(axis), self.cluster, self.efficiency
        is_local = ring.per_node(cluster) == ring.ranks
        latency = calls * (e.latency if is_local else e.far_latency)
        if operation == "all_to_all":
            return latency + ring.exchange_seconds(cluster, sent) / e.exchange
        if operation == "send_recv":  # to the neighbour, in the same node or not
            return latency + sent / ((cluster.gpu.link if is_local else cluster.gpu.nic) * e.network)
        return latency + sent / (ring.bandwidth(cluster) * (e.links if is_local else e.network))
