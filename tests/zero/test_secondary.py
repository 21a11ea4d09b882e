"""The secondary partition: sizes that do not fit, and versions."""

import pytest
import torch
from torch import nn

import zero
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import SIZES, adamw, assert_same_bits, on, shard, train, whole


def small():
    return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1, bias=False))


@pytest.mark.parametrize("secondary", [1, 2, 4, "node"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_one_and_three_elements_on_four_ranks(secondary, weights):
    """Fewer elements than ranks in the group, and than ranks: the others hold nothing."""

    def program(comm, config):
        model = make(small)
        optimizer = adamw(model.parameters())
        zero.shard(model, optimizer, config, comm=comm)
        for step in range(3):
            model(torch.full((2, 1), comm.rank + step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    def config(stage, secondary=None):
        return zero.Config(stage=stage, weights=weights, secondary=secondary, min_numel=0)

    wanted = on("2x2", program, config(2))
    for found in on("2x2", program, config(3, secondary)):
        assert_same_bits(found, wanted[0])


def sent(comm):
    last = len(comm.topology.levels) - 1
    return comm.traffic.wire_nbytes(last, "all_gather")


@pytest.mark.parametrize("event", ["nothing", "step", "skipped step", "edit", "read"])
def test_what_moves_the_version(event):
    """Between nodes bytes flow once per version; evaluation reads what is held."""

    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), zero.Config(secondary="node"))
        with torch.no_grad():
            sharded(tokens(0, 0))
        if event == "step":
            loss_of(sharded, tokens(comm.rank, 0)).backward()
            optimizer.step()
        elif event == "skipped step":
            (loss_of(sharded, tokens(comm.rank, 0)) * torch.nan).backward()
            optimizer.step()
        elif event in ("edit", "read"):
            with zero.full_params(sharded), torch.no_grad():
                if event == "edit":
                    for p in sharded.parameters():
                        p.view(-1)[-1].add_(1)
        comm.traffic.reset()
        with torch.no_grad():
            first = sharded(tokens(0, 0))
            once = sent(comm)
            second = sharded(tokens(0, 0))
        assert torch.equal(first, second)
        assert sent(comm) == once
        return once

    moved = event in ("step", "edit")
    whole_model = 4 * sum(p.numel() for p in make(Tower).parameters())
    assert sum(on("2x2", program)) == (whole_model if moved else 0)


@pytest.mark.parametrize("topology", ["2x2", slow("2x2x2")])
def test_every_divisor_of_the_ranks(topology):
    wanted = on(topology, train, make(Tower), zero.Config(), steps=3)
    for secondary in (1, 2, SIZES[topology]):
        found = on(topology, train, make(Tower), zero.Config(secondary=secondary), steps=3)
        for outcome, expected in zip(found, wanted, strict=True):
            assert outcome.losses == expected.losses
            assert_same_bits(outcome.parameters, expected.parameters)


def test_a_number_that_does_not_divide_is_refused():
    def program(comm):
        with pytest.raises(ValueError, match="secondary 3 does not divide 4 ranks"):
            shard(comm, make(Tower), zero.Config(secondary=3))

    on("2x2", program)
