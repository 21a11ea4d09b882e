"""The secondary that survives the step, against the text of the algorithm in one process."""

import copy
import dataclasses

import pytest
import torch

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, on, shard, train, whole
from zcomm import Codec

CONFIG = zero.Config(secondary="persistent", min_numel=0)
STEPS = 4


def by_hand(dtype, codec="int4"):
    """Train with what was published, step masters, publish what a receiver decodes.

    Returns losses by step and rank, and what was published last.
    """
    codec = Codec.parse(codec)
    model = make(Tower, dtype=dtype)
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = adamw(masters, fused=True)
    losses = []
    for step in range(STEPS):
        losses.append([])
        grads = []
        for rank in range(4):
            alone = copy.deepcopy(model)
            loss = loss_of(alone, tokens(rank, step))
            loss.backward()
            losses[-1].append(loss.item())
            grads.append([p.grad for p in alone.parameters()])
        for master, (a, b, c, d) in zip(masters, zip(*grads, strict=True), strict=True):
            nodes = [(x.float() + y.float()).to(hop(dtype)).float() for x, y in ((a, b), (c, d))]
            master.grad = ((nodes[0] + nodes[1]) / 4).to(dtype).float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                difference = (master - p.float()).flatten()
                wire = codec.encode(difference)
                moved = codec.decode(wire, difference.numel(), torch.float32).view(p.shape)
                p.copy_(p.float() + moved)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def hop(dtype):
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("topology", ["2x2", "1x4"])
def test_published_values_are_those_of_the_text(topology, prefetch, dtype):
    config = dataclasses.replace(CONFIG, prefetch=prefetch)
    if topology == "1x4":  # nobody to send differences to
        wanted = on(topology, train, make(Tower, dtype=dtype), zero.Config(stage=0), steps=STEPS)
        for found in on(topology, train, make(Tower, dtype=dtype), config, steps=STEPS):
            assert_same_bits(found.parameters, wanted[0].parameters)
        return
    losses, published = by_hand(dtype)
    found = on(topology, train, make(Tower, dtype=dtype), config, steps=STEPS)
    for rank, outcome in enumerate(found):
        assert outcome.losses == [step[rank] for step in losses]
        assert_same_bits(outcome.parameters, published)


@pytest.mark.parametrize("topology", ["4x1", "2x2x2"])
def test_all_copies_have_the_same_bits(topology):
    found = on(topology, train, make(Tower, dtype=torch.bfloat16), CONFIG, steps=6, micro=2)
    for outcome in found:
        assert_same_bits(outcome.parameters, found[0].parameters)


def test_errors_do_not_build_up():
    """However many steps: published values are one difference away from their masters."""

    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), CONFIG)
        distances = []
        for step in range(40):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole(sharded)
            masters = [m for u in sharded._zero_engine.units for b in u.buffers for m in b.masters]
            distances.append(max((m.tensor - m.held).abs().max().item() for m in masters))
        return distances

    for distances in on("2x2", program):
        assert 0 < max(distances[-10:]) < 3 * max(distances[:3])


@pytest.mark.parametrize("how", ["full_params", "forward"])
def test_an_edit_arrives_exactly_and_masters_keep_what_was_not_edited(how):
    def program(comm):
        sharded, optimizer = shard(comm, make(Tower, dtype=torch.bfloat16), CONFIG)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = whole(sharded)
        block = sharded.blocks[0]
        if how == "full_params":
            with zero.full_params(sharded), torch.no_grad():
                block.up.weight[0, 0] = 3.25
        else:

            def edit(*_):
                with torch.no_grad():
                    block.up.weight.clamp_(-0.01, 0.01)

            handle = block.up.register_forward_hook(edit)
            with torch.no_grad():
                sharded(tokens(0, 0))
            handle.remove()
        after = whole(sharded)
        loss_of(sharded, tokens(comm.rank, 1)).backward()
        optimizer.step()
        return before, after, whole(sharded)

    found = on("2x2", program)
    for before, after, stepped in found:
        name = "blocks.0.up.weight"
        wanted = before[name].clone()
        if how == "full_params":
            wanted[0, 0] = 3.25
        else:
            wanted.clamp_(-0.01, 0.01)
        assert_same_bits(after, {**before, name: wanted})
        assert_same_bits(stepped, found[0][2])


def test_small_units_travel_exactly():
    config = dataclasses.replace(CONFIG, min_numel=1 << 30)
    found = on("2x2", train, make(Tower), config, steps=3)
    wanted = on("2x2", train, make(Tower), zero.Config(stage=0), steps=3)
    for outcome in found:
        assert_same_bits(outcome.parameters, wanted[0].parameters)


def test_frozen_parameters_stay_and_are_not_sent():
    model = make(Tower)
    model.blocks[0].requires_grad_(False)

    def program(comm):
        sharded, optimizer = shard(comm, model, CONFIG)
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    for parameters in on("2x2", program):
        for name, p in model.named_parameters():
            assert torch.equal(parameters[name], p) == name.startswith("blocks.0"), name


def test_what_it_cannot_be_combined_with():
    with pytest.raises(ValueError, match="which has to be values"):
        zero.Config(secondary="persistent", weights="int4", secondary_codec="int4")
    assert zero.Config(secondary="persistent").weights == Codec.parse("int4")
    assert zero.Config(secondary="persistent", weights="int8").weights == Codec.parse("int8")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_filled_in_inference_mode(prefetch):
    """What is looked at before the first step is trained as if nobody had looked."""
    model = make(Tower)
    config = dataclasses.replace(CONFIG, prefetch=prefetch)

    def program(comm, *, look):
        sharded, optimizer = shard(comm, model, config)
        if look:
            with torch.inference_mode():
                sharded(tokens(comm.rank, 0))
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    found, wanted = on("2x2", program, look=True), on("2x2", program, look=False)
    assert_same_bits(found[0], wanted[0])
