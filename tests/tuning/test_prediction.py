"""What a plan says to the cost model, against numbers counted by hand: 2 nodes of 2 ranks."""

import pytest

import zcomm
from topology.cost import Hop, Sends, Work, assumed, seconds
from zcomm import pieces
from zcomm.prediction import cost_hops, predict

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
    machine = assumed([1, 2])
    small = plan("all_gather", "flat", numel=2048)
    slowest = min(link.bandwidth for link in machine.links)
    expected = machine.call + 3 * 1024 / slowest
    assert predict(machine, small, "mpi") == pytest.approx(expected)
    assert predict(machine, plan("all_gather", "hierarchical", numel=2048), "mpi") > expected


@pytest.mark.parametrize("how", ["flat", "hierarchical", "hierarchical:piece=65536"])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [None, "int8", "int4:rounding=stochastic"])
def test_pieces_are_counted_as_they_are_cut(operation, how, codec):
    for numel in (4096, 2**17, 2**21, 2**23):
        made = plan(operation, how, codec, numel=numel)
        assert pieces.count(made) == pytest.approx(len(made.pieces), abs=1)


def test_over_nccl_all_is_one_piece():
    machine = assumed([1, 2], device=True)
    made = plan("all_gather", "hierarchical")
    assert predict(machine, made, "nccl") == seconds(machine, cost_hops(made))
    assert predict(machine, made, "mpi") != seconds(machine, cost_hops(made))
