"""Whole state dicts on demand, and weights read from safetensors by their owners."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file, save_model

import zero
import zero.checkpoint.files
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.pretrained import MODELS, batch_of
from tests.zero.runs import adamw, assert_same_bits, on, shard, whole
from zcomm.errors import CheckpointError

CONFIGS = [
    *(zero.Config(stage=stage) for stage in range(4)),
    zero.Config(secondary="node"),
    zero.Config(stage=1, weights="int8", min_numel=0),
    dataclasses.replace(zero.Config.zeropp(), min_numel=0),
]
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.stage}-{c.weights}")


@EVERY
@pytest.mark.parametrize("name", ["gpt2", slow("t5"), slow("vit")])
def test_full_state_dict_is_that_of_the_masters(name, config):
    model = make(MODELS[name], dtype=torch.bfloat16)

    def program(comm):
        mine = copy.deepcopy(model)
        mine, optimizer = zero.shard(mine, adamw(mine.parameters()), config, comm=comm)
        before = zero.full_state_dict(mine)
        mine(**batch_of(name, comm.rank, 0)).loss.backward()
        optimizer.step()
        after = zero.full_state_dict(mine, root=1)
        masters = [
            (b.layout.slots[m.run.slot].name, m.run, m.tensor.detach().bfloat16())
            for u in mine._zero_engine.units
            for b in u.buffers
            for m in b.own_masters()
        ]
        return before, after, masters, whole(mine)

    outcomes = on("2x2", program)
    for before, after, _, _ in outcomes:
        assert list(before) == list(model.state_dict())
        assert_same_bits(before, model.state_dict())
        assert (after == {}) == (after is not outcomes[1][1])
    after = outcomes[1][1]
    for _, _, masters, _ in outcomes:
        for parameter, run, values in masters:
            assert torch.equal(after[parameter].flatten()[run.offset :][: run.numel], values)
    if config.weights is None:
        assert_same_bits({n: after[n] for n in outcomes[1][3]}, outcomes[1][3])
    plain = copy.deepcopy(model)
    plain.load_state_dict(after)
    if name == "gpt2":
        assert after["lm_head.weight"] is after["transformer.wte.weight"]


def saved(name, folder, how):
    """Save a model in one of the forms that people have; return it."""
    model = make(MODELS[name], seed=3)
    if how == "folder":
        model.save_pretrained(folder)
    elif how == "shards":
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    else:
        save_model(model, folder / "weights.safetensors")
    return model, folder if how != "file" else folder / "weights.safetensors"


@EVERY
@pytest.mark.parametrize(
    ("name", "how"), [("gpt2", "folder"), slow("llama", "shards"), slow("t5", "file")]
)
def test_load_pretrained(name, how, config, tmp_path):
    check_load_pretrained(name, how, config, tmp_path)


def check_load_pretrained(name, how, config, tmp_path):
    """Then one step gives what it gives when the model was made with these weights."""
    model, path = saved(name, tmp_path, how)

    def step(comm, mine):
        mine, optimizer = zero.shard(mine, adamw(mine.parameters()), config, comm=comm)
        if path is not None and mine is not made.get(comm.rank):
            assert zero.load_pretrained(mine, path) == []
        before = zero.full_state_dict(mine)
        mine(**batch_of(name, comm.rank, 0)).loss.backward()
        optimizer.step()
        return before, whole(mine)

    made = {}

    def program(comm):
        made[comm.rank] = copy.deepcopy(model)
        expected = step(comm, made[comm.rank])
        other = copy.deepcopy(unrelated)
        found = step(comm, other)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)

    unrelated = make(MODELS[name], seed=4)
    on("2x2", program)


def test_a_rank_reads_what_it_owns(tmp_path, monkeypatch):
    """Of a large matrix, four ranks read its rows once, but for the rows where they meet."""
    model = make(lambda: torch.nn.Linear(300, 400, bias=False))
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    read = []
    part = zero.checkpoint.files.Reader.part

    def counting(*arguments):
        tensor = part(*arguments)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(zero.checkpoint.files.Reader, "part", counting)
    monkeypatch.setattr(zero.checkpoint.files.Reader, "tensor", None)

    def program(comm):
        mine, _ = shard(comm, make(lambda: torch.nn.Linear(300, 400, bias=False), seed=1), None)
        zero.load_pretrained(mine, tmp_path / "m.safetensors")
        return zero.full_state_dict(mine)

    for found in on("2x2", program):
        assert_same_bits(found, model.state_dict())
    assert len(read) == 4
    assert sum(read) <= 300 * (400 + 3)


@pytest.mark.parametrize(("name", "how"), [("llama", "shards"), ("t5", "file")])
def test_load_pretrained_from_other_forms(name, how, tmp_path):
    check_load_pretrained(name, how, zero.Config(), tmp_path)


def test_load_twice_with_hpz(tmp_path):
    """The second copy is never that of the weights before."""
    files = []
    for seed in (3, 4):
        files.append(tmp_path / f"{seed}.safetensors")
        save_file(make(Tower, seed=seed).state_dict(), files[-1])

    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config(secondary="node"))
        found = []
        for file in files:
            zero.load_pretrained(mine, file)
            loss_of(mine, tokens(comm.rank, 0)).backward()
            optimizer.zero_grad()
            found.append(whole(mine))
        return found

    for found in on("2x2", program):
        for seed, parameters in zip((3, 4), found, strict=True):
            assert_same_bits(parameters, dict(make(Tower, seed=seed).named_parameters()))


def fewer(state):
    del state["head.bias"]


def more(state):
    state["other"] = torch.zeros(1)


def reshaped(state):
    state["head.bias"] = torch.zeros(18)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer, r"lacks 1 tensors: head.bias"),
        (more, r"has, and the model lacks, 1 tensors: other"),
        (reshaped, r"head.bias has shape \[18\] in .*, and \[17\] in the model"),
        (None, r"m.safetensors is missing, and there is no model.safetensors.index.json"),
        ("cut", r"m.safetensors cannot be read"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    file = tmp_path / "m.safetensors"
    state = {name: t.contiguous() for name, t in make(Tower, seed=3).state_dict().items()}
    if callable(change):
        change(state)
    if change is not None:
        save_file(state, file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-5])

    def program(comm):
        mine, _ = shard(comm, make(Tower), zero.Config())
        before = whole(mine)
        with pytest.raises(CheckpointError, match=message):
            zero.load_pretrained(mine, file)
        assert_same_bits(whole(mine), before)
        if change is fewer:
            assert zero.load_pretrained(mine, file, strict=False) == ["head.bias"]
            assert torch.equal(whole(mine)["head.bias"], before["head.bias"])
            assert torch.equal(whole(mine)["head.weight"], state["head.weight"])

    on("1x2", program)


def test_an_index_that_is_not_one(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps([]))

    def program(comm):
        mine, _ = shard(comm, make(Tower), zero.Config())
        with pytest.raises(CheckpointError, match=r"index.json cannot be read as an index"):
            zero.load_pretrained(mine, tmp_path)

    on("1", program)
