"""The cost model against figures worked out by hand, and against a simulated pipeline."""

import itertools
import random

import pytest

from topology import cost
from topology.cost import Hop, Link, Machine, Pieces, Sends, Speed, Work, seconds

MACHINE = Machine(
    links=(Link(1e-3, 1e6), Link(5e-3, 1e5)),
    speeds={"none": Speed(1e6, 2e6), "int8": Speed(1e5, 2e5)},
    call=0.5,
    piece=0.25,
)
NOTHING = Machine(MACHINE.links, MACHINE.speeds, call=0.0, piece=0.0)


def test_an_operation_without_hops_is_a_call():
    assert seconds(MACHINE, []) == 0.5


def test_one_piece_is_the_sum_of_all_it_passes():
    hops = [
        Hop((Work("int8", encoded=1e5),), (Sends(0, 2e6),)),
        Hop((Work("int8", encoded=2e5, decoded=2e5),), (Sends(1, 3e5),)),
        Hop((Work("int8", decoded=4e5),)),
    ]
    computed = 1e5 / 1e5 + (2e5 / 1e5 + 2e5 / 2e5) + 4e5 / 2e5
    sent = (2e6 / 1e6 + 1e-3) + (3e5 / 1e5 + 5e-3)
    expected = 0.5 + 2 * 0.25 + computed + sent
    assert seconds(MACHINE, hops) == pytest.approx(expected)


def test_levels_of_one_hop_are_crossed_at_the_same_time():
    hops = [Hop((), (Sends(0, 1e6), Sends(1, 1e6)))]
    assert seconds(NOTHING, hops) == pytest.approx(1e6 / 1e5 + 5e-3)


def test_with_many_pieces_the_slowest_link_is_never_idle():
    """Encode a tenth, then the link all the time, then decode the last tenth."""
    hops = [Hop((Work("int8", encoded=1e5),), (Sends(1, 1e6),)), Hop((Work("int8", decoded=2e5),))]
    ten = seconds(NOTHING, hops, Pieces(10, head=1.0, in_flight=10))
    assert ten == pytest.approx(1.0 / 10 + 10.0 + 5e-3 + 1.0 / 10)


def test_smaller_first_and_last_pieces_fill_and_drain_sooner():
    hops = [Hop((Work("int8", encoded=1e5),), (Sends(1, 1e6),)), Hop((Work("int8", decoded=4e5),))]
    # 10 pieces, the first and the last a quarter of the others: 8.5 parts.
    ends = 0.25 / 8.5 * 1.0 + 0.25 / 8.5 * 2.0
    assert seconds(NOTHING, hops, Pieces(10, 4.0, 10)) == pytest.approx(ends + 10.0 + 5e-3)
    assert [Pieces(2, 4.0).first, Pieces(2, 4.0).last] == [0.2, 0.8]


def test_where_the_processor_is_slowest_only_what_it_waits_for_is_added():
    """It encodes and decodes all the time, but for the crossing of the first piece's message."""
    hops = [Hop((Work("int8", encoded=1e6),), (Sends(0, 1e5),)), Hop((Work("int8", decoded=2e6),))]
    assert seconds(NOTHING, hops, Pieces(10, 1.0, 10)) == pytest.approx(20.0)


def test_pieces_cost_processor_time():
    hops = [Hop((Work("int8", encoded=1e6),), (Sends(0, 1.0),))]
    few, many = (seconds(MACHINE, hops, Pieces(n, 1.0, n)) for n in (10, 40))
    assert many - few == pytest.approx(30 * 0.25, rel=0.01)


def test_messages_cost_processor_time():
    machine = Machine(MACHINE.links, MACHINE.speeds, call=0.0, piece=0.25, message=0.5)
    hops = [Hop((), (Sends(0, 1e5, 2), Sends(1, 1e4, 3)))]
    assert seconds(machine, hops) == pytest.approx(0.25 + 5 * 0.5 + 1e5 / 1e6 + 5e-3)


def test_sending_takes_the_processor_while_the_link_is_busy():
    """It delays nothing that waits for the link, until it takes longer than that."""
    free, busy = (
        Machine((Link(0.0, 1e5, processor),), MACHINE.speeds, call=0.0, piece=0.0)
        for processor in (0.0, 0.5e-5)
    )
    hops = [Hop((Work("int8", encoded=1e5),), (Sends(0, 1e6),))]
    for cut in (Pieces(), Pieces(10, 1.0, 10)):
        assert seconds(busy, hops, cut) == seconds(free, hops, cut)
    slower = Machine((Link(0.0, 1e5, 4e-5),), MACHINE.speeds, call=0.0, piece=0.0)
    assert seconds(slower, hops, Pieces(10, 1.0, 10)) == pytest.approx(1.0 + 40.0)


def test_latency_is_hidden_by_pieces_under_way_and_by_no_more():
    """64 small pieces, 4 at a time: 63 / 4 round trips, less cannot be."""
    hops = [Hop((), (Sends(1, 64.0),))]
    waves = seconds(NOTHING, hops, Pieces(64, 1.0, 4))
    assert waves == pytest.approx(63 / 4 * (5e-3 + 1e-5))


def simulated(times, pieces):
    """Return the end of the last of equal pieces that pass stages of different resources."""
    free = [0.0] * len(times)
    for _ in range(pieces):
        now = 0.0
        for stage, time in enumerate(times):
            now = free[stage] = max(now, free[stage]) + time / pieces
    return free[-1]


def test_a_chain_of_links_takes_as_long_as_simulated():
    draw = random.Random(1)
    for num_stages, pieces in itertools.product((1, 2, 3, 5), (2, 3, 16, 100)):
        times = [draw.uniform(0.1, 2.0) for _ in range(num_stages)]
        links = tuple(Link(0.0, 1.0 / time) for time in times)
        machine = Machine(links, MACHINE.speeds, 0.0, 0.0)
        hops = [Hop((), (Sends(level, 1.0),)) for level in range(num_stages)]
        cut = Pieces(pieces, 1.0, in_flight=pieces)
        assert seconds(machine, hops, cut) == pytest.approx(simulated(times, pieces), rel=1e-9)


def test_a_codec_that_was_not_measured_is_as_slow_as_the_slowest():
    hops = [Hop((Work("fp8_e4m3", encoded=1e5),))]
    assert seconds(NOTHING, hops) == pytest.approx(1.0)


def test_assumed_constants_share_a_link_among_the_ranks_of_a_node():
    machine = cost.assumed([("node", 4), ("network", 8)])
    assert machine.links[1].bandwidth == cost.LINKS["ethernet 1gbit"].bandwidth / 4
    assert machine.links[0] == cost.LINKS["shared memory"]
    device = cost.assumed([("node", 8), ("network", 16)], device=True)
    assert device.links[1].bandwidth == pytest.approx(1.5e9)
    assert device.links[0].bandwidth > 100 * machine.links[0].bandwidth / 4


KINDS = {
    "8": ({"node": "shared memory"}, {"node": "nvlink sm80"}),
    "2x2x4": (
        {"domain": "shared memory", "node": "shared memory", "network": "ethernet 1gbit"},
        {"domain": "nvlink sm80", "node": "pcie gen4", "network": "infiniband 100gbit"},
    ),
    "a rack of trays": (
        {"node": "shared memory", "domain": "ethernet 1gbit", "network": "ethernet 1gbit"},
        {"node": "nvlink sm80", "domain": "nvlink sm80", "network": "infiniband 100gbit"},
    ),
    "racks by hand": (
        {"node": "shared memory", "rack": "ethernet 1gbit", "network": "ethernet 1gbit"},
        {"node": "nvlink sm80", "rack": "infiniband 100gbit", "network": "infiniband 100gbit"},
    ),
    "no node": (
        {"inner": "shared memory", "outer": "ethernet 1gbit"},
        {"inner": "nvlink sm80", "outer": "infiniband 100gbit"},
    ),
    "four levels": (
        {
            "level0": "shared memory",
            "domain": "shared memory",
            "node": "shared memory",
            "network": "ethernet 1gbit",
        },
        {
            "level0": "nvlink sm80",
            "domain": "nvlink sm80",
            "node": "pcie gen4",
            "network": "infiniband 100gbit",
        },
    ),
}


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("job", KINDS)
def test_assumed_constants_follow_the_names_of_the_levels(job, device):
    """A network has one link for each node, whatever is between; other links are a rank's own."""
    expected = KINDS[job][device]
    levels = [(name, 2 * 2**number) for number, name in enumerate(expected)]
    machine = cost.assumed(levels, device=device)
    per_node = dict(levels).get("node", 2)
    for link, kind in zip(machine.links, expected.values(), strict=True):
        shared = per_node if kind.startswith(("ethernet", "infiniband")) else 1
        assert link.bandwidth == cost.LINKS[kind].bandwidth / shared
        assert link.latency == cost.LINKS[kind].latency


# GB/s of one link in NCCL's topo.h, and links of a GPU.
NVLINK = {"sm60": (18, 4), "sm70": (20, 6), "sm80": (20, 12), "sm86": (12, 4), "sm90": (20.6, 18)}


@pytest.mark.parametrize(("architecture", "links"), NVLINK.items())
def test_nvlink_is_all_links_of_a_gpu(architecture, links):
    each, number = links
    bandwidth = cost.LINKS[f"nvlink {architecture}"].bandwidth
    assert bandwidth == pytest.approx(each * number * 1e9)


def test_constants_of_named_links_are_shared_among_the_ranks_that_use_them():
    kinds = ["nvlink sm90", "socket amd", "infiniband 400gbit"]
    machine = cost.of_links(kinds, [1, 4, 8], device=True)
    assert [link.bandwidth for link in machine.links] == pytest.approx([370.8e9, 4e9, 6e9])
    hops = [Hop((), (Sends(2, 6e9),))]
    assert seconds(machine, hops) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("kinds", "inside", "message"),
    [
        (["nvlink sm91"], [1], "link 'nvlink sm91' is unknown; possible: nvlink sm60"),
        (["nvlink sm90"], [1, 8], "1 kinds of links for 2 levels"),
    ],
)
def test_links_that_cannot_be_are_an_error(kinds, inside, message):
    with pytest.raises(ValueError, match=message):
        cost.of_links(kinds, inside)
