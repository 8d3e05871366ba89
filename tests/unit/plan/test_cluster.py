"""Machines by name, and how fast groups of their devices talk."""

from __future__ import annotations

import pytest

from ostinato.plan.cluster import Ring, parse_cluster


def test_a_cluster_is_nodes_of_eight_or_as_written() -> None:
    for text, nodes, per_node in (
        ("64xH800-80", 8, 8),
        ("4xH100-80", 1, 4),
        ("3x4xA100-80", 3, 4),
        ("8x8xh800", 8, 8),
        ("12xcpu", 1, 12),
    ):
        cluster = parse_cluster(text)
        assert (cluster.nodes, cluster.per_node) == (nodes, per_node), text
    assert parse_cluster("64xH800-80").gpu.memory == 80e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64", "write a number and a device"),
        ("64xB100", "known are"),
        ("12xH100-80", "2x6xH100-80"),
        ("0xH100-80", "at least 1"),
    ],
)
def test_what_is_no_cluster_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_cluster(text)


def test_groups_know_who_shares_their_node() -> None:
    cluster = parse_cluster("4x8xH800-80")
    assert Ring(ranks=8, stride=1).bandwidth(cluster) == cluster.gpu.link
    assert Ring(ranks=4, stride=2).per_node(cluster) == 4
    # one member per node: its own port; eight of them: their ports together, but no faster than the links
    assert Ring(ranks=4, stride=8).bandwidth(cluster) == cluster.gpu.nic
    assert Ring(ranks=32, stride=1).bandwidth(cluster) == cluster.gpu.link


def test_an_exchange_is_as_slow_as_what_leaves_the_node() -> None:
    cluster = parse_cluster("2x8xH800-80")
    within = Ring(ranks=8, stride=1).exchange_seconds(cluster, 1e9)
    across = Ring(ranks=16, stride=1).exchange_seconds(cluster, 1e9)
    assert within == pytest.approx(1e9 / cluster.gpu.link)
    assert across == pytest.approx(1e9 * 8 / 15 / cluster.gpu.nic)
    assert Ring(ranks=1, stride=1).exchange_seconds(cluster, 1e9) == 0
