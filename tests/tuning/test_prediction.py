"""What a plan says to the cost model, against numbers counted by hand: 2 nodes of 2 ranks."""

from dataclasses import replace

import pytest

import zcomm
from topology import parse
from topology.cost import Hop, Sends, Work, assumed, seconds
from zcomm import pieces
from zcomm.planner import Planner
from zcomm.prediction import cost_hops, predict
from zcomm.tuning import assume

N = 1_048_576  # elements of the whole buffer, 262144 of a shard
SHARD = N // 4


def plan(operation, how, codec=None, dtype="bfloat16", numel=N):
    def plans(comm):
        return comm.plans(operation, numel, dtype, codec=codec, algorithm=how)

    return zcomm.run_local(plans, 4, "2x2")[0][0]


def test_a_gather_over_two_levels_encodes_once_and_decodes_all():
    sent = SHARD * 2  # bfloat16
    assert cost_hops(plan("all_gather", "hierarchical")) == (
        Hop((Work("none", encoded=SHARD),), (Sends(1, sent),)),
        Hop((), (Sends(0, 2 * sent),)),
        Hop((Work("none", decoded=N),)),
    )


def test_a_flat_gather_sends_to_both_levels_in_one_hop():
    sent = SHARD + SHARD // 256 * 2  # int8, and a scale of 2 bytes for every 256 elements
    assert cost_hops(plan("all_gather", "flat", "int8")) == (
        Hop((Work("int8", encoded=SHARD),), (Sends(0, sent), Sends(1, 2 * sent, 2))),
        Hop((Work("int8", decoded=N),)),
    )


def test_a_reduction_over_two_levels_encodes_all_and_between_the_hops_half_of_it():
    sent = SHARD // 2 + SHARD // 128 * 2
    assert cost_hops(plan("reduce_scatter", "hierarchical", "int4")) == (
        Hop((Work("int4", encoded=N),), (Sends(0, 2 * sent),)),
        Hop((Work("int4", decoded=N), Work("int4", encoded=N / 2)), (Sends(1, sent),)),
        Hop((Work("int4", decoded=N / 2),)),
    )


def test_a_flat_reduction_in_float32_counts_every_element_twice():
    assert cost_hops(plan("reduce_scatter", "flat", dtype="float32")) == (
        Hop((Work("none", encoded=2 * N),), (Sends(0, 4 * SHARD), Sends(1, 8 * SHARD, 2))),
        Hop((Work("sum", decoded=2 * N),)),
    )


def test_what_fits_one_message_is_a_call_and_its_bytes():
    machine = assumed([("node", 2), ("network", 4)])
    small = plan("all_gather", "flat", numel=2048)
    expected = machine.call + 2 * 1024 / machine.links[1].bandwidth
    assert predict(machine, small, "mpi") == pytest.approx(expected)
    assert predict(machine, plan("all_gather", "hierarchical", numel=2048), "mpi") > expected


@pytest.mark.parametrize("how", ["flat", "hierarchical", "hierarchical:piece=65536"])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [None, "int8", "int4:rounding=stochastic"])
def test_pieces_are_counted_as_they_are_cut(operation, how, codec):
    for numel in (4096, 2**17, 2**21, 2**23):
        made = plan(operation, how, codec, numel=numel)
        assert pieces.count(made) == pytest.approx(len(made.pieces), abs=1)


@pytest.mark.parametrize("shape", ["1x4", "2x2", "4x1", "2x2x2"])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_more_elements_take_longer_and_a_faster_link_never_does(shape, operation, codec):
    known = assume(parse(shape), "mpi")
    planner = Planner("here", 0, known)
    before = 0.0
    for power in range(8, 25):
        for how in ("flat",) if power < 16 else ("flat", "hierarchical"):
            (made,) = planner.executed(operation, ("bfloat16", 2**power), codec, how)
            seconds = predict(known.machine, made, "mpi")
            for level, link in enumerate(known.machine.links):
                links = list(known.machine.links)
                links[level] = replace(link, bandwidth=2 * link.bandwidth)
                assert predict(replace(known.machine, links=tuple(links)), made, "mpi") <= seconds
            if how == "flat":
                assert seconds > before
                before = seconds


def test_over_nccl_all_is_one_piece():
    machine = assumed([("node", 2), ("network", 4)], device=True)
    made = plan("all_gather", "hierarchical")
    assert predict(machine, made, "nccl") == seconds(machine, cost_hops(made))
    assert predict(machine, made, "mpi") != seconds(machine, cost_hops(made))
