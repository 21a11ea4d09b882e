"""The cut, the slots and the units, against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import topology
from tests.zero.models import Tower, make
from zero.layout import cut, find_units, lay_out

NUMELS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 3000)), max_size=8)


@given(NUMELS, st.integers(1, 70), st.sampled_from([256, 512, 4096]))
def test_cut_deals_every_element_once_in_order(numels, size, piece):
    dealt = [
        (run.slot, run.offset + i)
        for shard in cut(numels, size, piece)
        for run in shard
        for i in range(run.numel)
    ]
    assert dealt == [(slot, i) for slot, numel in enumerate(numels) for i in range(numel)]


@given(NUMELS, st.integers(1, 70), st.sampled_from([256, 512, 4096]))
def test_cut_splits_no_piece_and_bounds_every_shard(numels, size, piece):
    shards = cut(numels, size, piece)
    assert len(shards) == size
    for shard in shards:
        assert sum(run.numel for run in shard) <= -(-sum(numels) // size) + piece - 1
        for run in shard:
            end = run.offset + run.numel
            assert run.offset % piece == 0
            assert end % piece == 0 or end == numels[run.slot]


@pytest.mark.parametrize("spec", ["2x2", "2x4", "4x2", "2x2x2", "3x2"])
def test_a_rail_owns_one_run_of_the_buffer(spec):
    world = topology.parse(spec, None)
    model = nn.Linear(100, 90)
    parameters = list(model.named_parameters())
    layout = lay_out(parameters, world.ownership(), 256, set(model.parameters()))[0]
    for rank in range(world.size):
        rail = world.rail(len(world.levels) - 1, rank)
        segments = [segment for peer in rail for segment in layout.all.shards[peer]]
        packed = sum(slot.numel for slot in layout.slots[:1])
        starts = [
            s.start if s.start < packed else s.start - layout.slots[1].start + packed
            for s in segments
        ]
        assert starts == sorted(starts)
        ends = [start + s.numel for start, s in zip(starts, segments, strict=True)]
        assert starts[1:] == ends[:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_start_at_64_bytes_and_buffers_have_one_dtype(dtype):
    model = make(Tower, dtype=dtype)
    model.head.float()
    layouts = lay_out(list(model.named_parameters()), (0, 1), 256, set(model.parameters()))
    assert {layout.dtype for layout in layouts} == {dtype, torch.float32}
    for layout in layouts:
        assert all(slot.start * dtype.itemsize % 64 == 0 for slot in layout.slots)
        ends = [slot.start + slot.numel for slot in layout.slots]
        assert all(a <= b.start for a, b in zip(ends, layout.slots[1:], strict=False))
        assert ends[-1] <= layout.numel


def test_channels_last_keeps_its_strides():
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    slot = lay_out(list(model.named_parameters()), (0,), 256, set())[0].slots[0]
    assert slot.stride == model.weight.stride()
    expanded = nn.Parameter(torch.ones(3, 1).expand(3, 4))
    assert lay_out([("p", expanded)], (0,), 256, set())[0].slots[0].stride == (4, 1)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="parameter p is float64: possible are float32"):
        lay_out([("p", nn.Parameter(torch.zeros(1, dtype=torch.float64)))], (0,), 256, set())


def names(model, units="auto"):
    return {unit.name: [name for name, _ in unit.parameters] for unit in find_units(model, units)}


def test_children_of_outermost_containers_are_units():
    model = nn.ModuleDict(
        {
            "stem": nn.Linear(1, 1, bias=False),
            "body": nn.Sequential(
                nn.Linear(1, 1, bias=False),
                nn.ReLU(),
                nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)),
            ),
        }
    )
    assert names(model) == {
        "body.0": ["body.0.weight"],
        "body.2": ["body.2.0.weight", "body.2.1.weight"],
        "": ["stem.weight"],
    }


def test_a_container_without_forward_stands_for_its_children():
    pair = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    model = nn.ModuleDict({"a": nn.ModuleList([pair, nn.ParameterList([torch.zeros(1)])])})
    assert names(model) == {"a.0.0": ["a.0.0.weight"], "a.0.1": ["a.0.1.weight"], "": ["a.1.0"]}


def test_what_two_units_use_belongs_to_the_root():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    model[3].weight = model[0].weight
    assert names(model) == {
        "0": ["0.bias"],
        "1": ["1.weight", "1.bias"],
        "2": ["2.weight", "2.bias"],
        "3": ["3.bias"],
        "": ["0.weight"],
    }


def test_what_a_unit_and_the_rest_use_belongs_to_the_root():
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    model["head"].weight = model["list"][0].weight
    assert names(model)[""] == ["list.0.weight", "head.bias"]


def test_one_module_at_two_places_is_one_unit():
    layer = nn.Linear(2, 2)
    assert names(nn.ModuleList([layer, layer])) == {"0": ["0.weight", "0.bias"], "": []}


def test_named_units():
    model = make(Tower)
    found = names(model, ("blocks.1", "head"))
    assert list(found) == ["blocks.1", "head", ""]
    assert "blocks.0.up.weight" in found[""]
    with pytest.raises(ValueError, match=r"'blocks\.1\.up' is inside 'blocks\.1'"):
        find_units(model, ("blocks.1", "blocks.1.up"))
    with pytest.raises(ValueError, match="'block' is no module inside the model"):
        find_units(model, ("block",))
