"""Collectives on a machine of 4 devices with 100 GB/s links and 4 cards of 10 GB/s."""

from typing import Any

import pytest

from rlhf.plan import collectives
from rlhf.plan.collectives import all_gather, all_reduce, group

LINK = 100e9 * collectives.LINK
NETWORK = 40e9 * collectives.NETWORK


def test_inside_a_machine(make_device: Any) -> None:
    members = group(make_device(), 4)
    assert (members.nodes, members.per_node) == (1, 4)
    latency = collectives.START + 3 * collectives.HOP_INSIDE
    assert all_gather(members, 1e9) == pytest.approx(latency + 0.75e9 / LINK)
    assert all_reduce(members, 1e9) == pytest.approx(latency + 3 * collectives.HOP_INSIDE + 1.5e9 / LINK)


def test_between_machines_the_cards_are_the_limit(make_device: Any) -> None:
    members = group(make_device(), 8)
    assert members.nodes == 2
    hops = collectives.HOP_BETWEEN + 6 * collectives.HOP_INSIDE
    assert all_gather(members, 1e9) == pytest.approx(collectives.START + hops + 7 / 8 * 1e9 / NETWORK)


def test_groups_side_by_side_share_the_cards(make_device: Any) -> None:
    """Four data-parallel groups, one device of each machine: each has a quarter of the cards."""
    members = group(make_device(), 2, stride=4)
    assert (members.per_node, members.nodes) == (1, 2)
    assert members.rate == NETWORK / 4
    assert group(make_device(), 4, stride=2).per_node == 2


def test_one_rank_costs_nothing(make_device: Any) -> None:
    assert all_gather(group(make_device(), 1), 1e9) == all_reduce(group(make_device(), 1), 1e9) == 0


def test_a_network_with_fewer_cards_is_slower(make_device: Any) -> None:
    def seconds(**changes: Any) -> float:
        return all_gather(group(make_device(**changes), 8), 1e9)

    assert seconds() < seconds(nics=2) < seconds(nics=1)
    assert group(make_device(nics=1), 8).rate == 10e9 * collectives.ALONE  # one flow has the card to itself


def test_a_single_card(make_device: Any) -> None:
    from dataclasses import replace

    members = group(make_device(), 8)
    assert replace(members, single_card=True).rate == 10e9 * collectives.ALONE


def test_small_sums_go_over_a_tree(make_device: Any) -> None:
    """Hops grow with the logarithm of the machines: 7 machines more, one level of 3 instead of 7 hops."""
    members = group(make_device(), 32)
    tree = 2 * (3 * collectives.HOP_BETWEEN + 3 * collectives.HOP_INSIDE)
    assert all_reduce(members, 8.0) == pytest.approx(collectives.START + tree, rel=1e-3)


def test_dies_of_one_module(make_device: Any) -> None:
    device = make_device(pair_gb_s=400, link_gb_s=50)
    assert group(device, 2).inside == 8 * group(device, 4).inside
