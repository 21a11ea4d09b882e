"""Checkpoints: what is trained after a load is what would have been trained without it.

The oracle of a resume is the run that was not interrupted, bit by bit. Ranks are threads here, and
share torch's generator: random state is tested under MPI.
"""

import copy
import dataclasses
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero
import zero.checkpoint.save
from tests.marks import one_in, slow
from tests.zero.models import Tower, differing_copy, loss_of, make, tokens
from tests.zero.pretrained import MODELS, batch_of
from tests.zero.runs import assert_same_bits, on, shard, whole
from zcomm.errors import CheckpointError
from zcomm.tuning import Tuning
from zero.checkpoint import files
from zero.checkpoint.files import write_tensors

ZEROPP = dataclasses.replace(zero.Config.zeropp(), min_numel=0)
CONFIGS = {
    **{f"stage {stage}": zero.Config(stage=stage) for stage in range(4)},
    "hpZ": zero.Config(secondary="node"),
    "zeropp": ZEROPP,
    "codes": dataclasses.replace(ZEROPP, secondary_codec="int8"),
    "stage 1 int8": zero.Config(stage=1, weights="int8", grads="int8", min_numel=0),
    "stage 2 int8": zero.Config(stage=2, weights="int8", grads="int8", min_numel=0),
    "safe4": dataclasses.replace(
        zero.Config.safe4(),
        min_numel=0,
        loss_scale=zero.DynamicLossScale(initial=4.0, interval=3),
    ),
    "persistent": zero.Config(secondary="persistent", grads=("int4", "int4"), min_numel=0),
    "node": zero.Config(stage=2, accumulate="node", grads="int8", grads_feedback=True, min_numel=0),
    "stochastic": zero.Config(
        weights="int8:rounding=stochastic",
        grads="int4:rounding=stochastic",
        min_numel=0,
        seed=7,
    ),
}
DTYPES = [torch.float32, torch.bfloat16]


def one_step(model, optimizer, rank, step, scheduler=None, *, micro=1):
    losses = []
    for part in range(micro):
        loss = loss_of(model, tokens(rank, 10 * step + part)) / micro
        loss.backward()
        losses.append(loss.item())
    zero.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return losses


def states(model, optimizer):
    """Return parameters, and the optimizer's states by position."""
    found = whole(model)
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in enumerate(stepped):
        found |= {f"{number} {k}": v.clone() for k, v in optimizer.state[tensor].items()}
    return found


def schedule(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)


@pytest.mark.parametrize(("name", "dtype"), one_in(2, list(CONFIGS), DTYPES))
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, dtype, tmp_path):
    model = make(Tower, dtype=dtype)
    other = make(Tower, dtype=dtype, seed=1)

    def program(comm):
        first, optimizer = shard(comm, model, CONFIGS[name])
        scheduler = schedule(optimizer)
        for step in range(4):
            one_step(first, optimizer, comm.rank, step, scheduler, micro=1 + step % 2)
        zero.save(tmp_path, first, optimizer, scheduler=scheduler, step=4, extra={"at": (1, 2.5)})
        at_save = states(first, optimizer)
        expected = [one_step(first, optimizer, comm.rank, s, scheduler) for s in range(4, 8)]
        wanted = states(first, optimizer)

        second, optimizer = shard(comm, other, CONFIGS[name])
        one_step(second, optimizer, comm.rank, 0)
        scheduler = schedule(optimizer)
        loaded = zero.load(tmp_path, second, optimizer, scheduler=scheduler, random_state=False)
        assert loaded == zero.Loaded(4, {"at": (1, 2.5)}, same_plan=True)
        assert_same_bits(states(second, optimizer), at_save)
        found = [one_step(second, optimizer, comm.rank, s, scheduler) for s in range(4, 8)]
        assert found == expected
        assert_same_bits(states(second, optimizer), wanted)

    on("2x2", program)


def test_states_that_share_memory_are_saved_each(tmp_path):
    """A synchronous save writes from where the states are, and no file holds one memory twice."""
    model = make(Tower)

    def program(comm):
        mine, optimizer = shard(comm, model, zero.Config())
        one_step(mine, optimizer, comm.rank, 0)
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for tensor in tensors:
            optimizer.state[tensor]["again"] = optimizer.state[tensor]["exp_avg"]
        before = states(mine, optimizer)
        zero.save(tmp_path, mine, optimizer)
        for tensor in tensors:
            del optimizer.state[tensor]["again"]
        zero.load(tmp_path, mine, optimizer, random_state=False)
        assert_same_bits(states(mine, optimizer), before)

    on("2", program)


ON_ALL_LEVELS = {
    "zeropp": ("2x2", CONFIGS["zeropp"]),
    "stage 2": ("2x2", zero.Config(stage=2, grads=("int8", "int4"), min_numel=0)),
}


@pytest.mark.parametrize(
    ("topology", "config"),
    [
        *ON_ALL_LEVELS.values(),
        pytest.param("2x2x2", CONFIGS["safe4"], marks=pytest.mark.slow),
    ],
)
def test_the_algorithms_of_quantised_reductions_are_those_of_the_save(
    topology, config, tmp_path, monkeypatch
):
    """A resumed run whose tuning would choose otherwise has the same bits."""
    model = make(Tower)

    def train(comm, *, load):
        mine, optimizer = shard(comm, model, config)
        if load:
            loaded = zero.load(tmp_path, mine, optimizer, random_state=False)
            assert loaded.same_plan
        else:
            one_step(mine, optimizer, comm.rank, 0)
            zero.save(tmp_path, mine, optimizer)
        losses = [one_step(mine, optimizer, comm.rank, step) for step in (1, 2)]
        return losses, states(mine, optimizer)

    def under(number, **options):
        """Train under a tuning that finds the first or the last way to be the fastest."""
        monkeypatch.setattr(Tuning, "pick", lambda self, ways: range(len(ways))[number])
        return on(topology, train, **options)

    other = under(-1, load=False)
    expected = under(0, load=False)
    for found, wanted in zip(under(-1, load=True), expected, strict=True):
        assert found[0] == wanted[0]
        assert_same_bits(found[1], wanted[1])
    # Else the tunings would not have been two.
    assert any(a[0] != b[0] for a, b in zip(other, expected, strict=True))


def train_same(comm, model, optimizer, steps):
    """Train on one batch for all ranks, so that their number changes only how sums round."""
    losses = []
    for step in steps:
        loss = loss_of(model, tokens(0, step, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PAIRS = [
    ("stage 3", "stage 3"),
    ("hpZ", "stage 2"),
    ("stage 2", "hpZ"),
    ("stage 1", "stage 0"),
    ("stage 0", "stage 3"),
]


@pytest.mark.parametrize(
    ("saved", "loaded", "topology"), one_in(2, PAIRS, ["1", "1x2", "4x1", "2x4"])
)
def test_other_ranks_and_stages(saved, loaded, topology, tmp_path):
    """Parameters and states keep their bits; saved again and loaded at once, too; losses go on."""
    model = make(Tower, dtype=torch.bfloat16)

    def save(comm):
        mine, optimizer = shard(comm, model, CONFIGS[saved])
        train_same(comm, mine, optimizer, range(3))
        zero.save(tmp_path / "a", mine, optimizer)
        return train_same(comm, mine, optimizer, range(3, 6))

    def load_and_save(comm):
        mine, optimizer = shard(comm, make(Tower, dtype=torch.bfloat16, seed=1), CONFIGS[loaded])
        found = zero.load(tmp_path / "a", mine, optimizer)
        assert not found.same_plan
        zero.save(tmp_path / "b", mine, optimizer)

    def load_and_train(comm):
        mine, optimizer = shard(comm, make(Tower, dtype=torch.bfloat16, seed=2), CONFIGS[loaded])
        zero.load(tmp_path / "b", mine, optimizer)
        return train_same(comm, mine, optimizer, range(3, 6))

    expected = on("2x2", save)[0]
    on(topology, load_and_save)
    assert_same_bits(everything(tmp_path / "b"), everything(tmp_path / "a"))
    for losses in on(topology, load_and_train):
        assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("topology", [slow("1"), "1x2", slow("2x2x2")])
def test_a_wider_range_of_sums_in_float32(topology, tmp_path):
    """In float32 only the order of sums differs between numbers of ranks."""
    model = make(Tower)

    def save(comm):
        mine, optimizer = shard(comm, model, zero.Config())
        train_same(comm, mine, optimizer, range(3))
        zero.save(tmp_path, mine, optimizer)
        return train_same(comm, mine, optimizer, range(3, 6))

    def load(comm):
        mine, optimizer = shard(comm, make(Tower, seed=1), zero.Config())
        zero.load(tmp_path, mine, optimizer)
        return train_same(comm, mine, optimizer, range(3, 6))

    expected = on("2x2", save)[0]
    for losses in on(topology, load):
        assert losses == pytest.approx(expected, abs=1e-5)


def everything(path):
    """Put the tensors of a checkpoint together without our reader: whole, by kind and parameter."""
    index = json.loads((path / "index.json").read_text())["content"]
    runs = {}
    for rank in index["ranks"]:
        for key, tensor in load_file(path / index["folder"] / rank["file"]).items():
            kind, name, offset = key.split("|")
            if not kind.startswith(("provider", "buffer")):
                runs.setdefault((kind, name), []).append((int(offset), tensor))
    return {
        key: torch.cat([tensor for _, tensor in sorted(found, key=lambda pair: pair[0])])
        for key, found in runs.items()
    }


@pytest.mark.parametrize(("stage", "dtype"), one_in(2, range(4), DTYPES))
def test_between_two_backwards(stage, dtype, tmp_path):
    """Reduced gradients, and under no_sync those of each rank, are part of the checkpoint."""
    model = make(Tower, dtype=dtype)

    def begin(comm, mine, optimizer, no_sync):
        one_step(mine, optimizer, comm.rank, 0, micro=2)
        if no_sync:
            with zero.no_sync(mine):
                loss_of(mine, tokens(comm.rank, 1)).backward()
        else:
            loss_of(mine, tokens(comm.rank, 1)).backward()

    def end(comm, mine, optimizer):
        one_step(mine, optimizer, comm.rank, 2)
        one_step(mine, optimizer, comm.rank, 3)
        return whole(mine)

    def program(comm, no_sync):
        path = tmp_path / str(no_sync)
        mine, optimizer = shard(comm, model, zero.Config(stage))
        begin(comm, mine, optimizer, no_sync)
        zero.save(path, mine, optimizer)
        expected = end(comm, mine, optimizer)
        mine, optimizer = shard(comm, make(Tower, dtype=dtype, seed=1), zero.Config(stage))
        zero.load(path, mine, optimizer, random_state=False)
        assert_same_bits(end(comm, mine, optimizer), expected)

    on("2x2", program, False)
    on("2x2", program, True)

    def elsewhere(comm):
        mine, optimizer = shard(comm, model, zero.Config(stage))
        zero.load(tmp_path / "False", mine, optimizer)
        before = states(mine, optimizer)
        versions = [unit.version for unit in engine_units(mine)]
        with pytest.raises(CheckpointError, match="had not reduced"):
            zero.load(tmp_path / "True", mine, optimizer)
        assert_same_bits(states(mine, optimizer), before)
        assert [unit.version for unit in engine_units(mine)] == versions

    on("1x2", elsewhere)


def test_training_goes_on_behind_an_asynchronous_save(tmp_path, monkeypatch):
    """No rank begins to write before training has gone on."""
    model = make(Tower, width=128, hidden=512)
    trained = threading.Event()
    trained.set()

    def write_later(*arguments):
        trained.wait()
        write_tensors(*arguments)

    monkeypatch.setattr(zero.checkpoint.save, "write_tensors", write_later)

    def program(comm):
        mine, optimizer = shard(comm, model, zero.Config())
        one_step(mine, optimizer, comm.rank, 0)
        zero.save(tmp_path / "a", mine, optimizer)
        trained.clear()
        saving = zero.save(tmp_path / "b", mine, optimizer, async_op=True)
        for step in range(3):
            one_step(mine, optimizer, comm.rank, step)
        assert not saving.done()
        comm.barrier()
        trained.set()
        saving.wait()
        assert saving.done()
        # The next save waits for the one before it.
        zero.save(tmp_path / "c", mine, optimizer, async_op=True)
        zero.save(tmp_path / "d", mine, optimizer)
        return whole(mine)

    after = on("2x2", program)[0]
    assert_same_bits(everything(tmp_path / "a"), everything(tmp_path / "b"))
    assert_same_bits(everything(tmp_path / "c"), everything(tmp_path / "d"))
    name = "blocks.0.up.weight"
    assert torch.equal(everything(tmp_path / "d")["value", name], after[name].flatten())
    assert not torch.equal(everything(tmp_path / "a")["value", name], after[name].flatten())


@pytest.mark.parametrize("config", [zero.Config(stage=2), zero.Config(secondary="node"), ZEROPP])
def test_the_second_copy_is_not_of_the_values_before(config, tmp_path):
    """Loaded over parameters of the same version, whose second copy was in use."""
    model = make(Tower)

    def program(comm):
        first, optimizer = shard(comm, model, config)
        one_step(first, optimizer, comm.rank, 0)
        zero.save(tmp_path, first, optimizer)
        second, optimizer = shard(comm, make(Tower, seed=1), config)
        one_step(second, optimizer, comm.rank, 0)
        before = whole(second)
        zero.load(tmp_path, second, optimizer, random_state=False)
        assert_same_bits(whole(second), whole(first))
        assert not torch.equal(whole(second)["head.weight"], before["head.weight"])

    on("2x2", program)


@pytest.mark.parametrize("config", [zero.Config(stage=2), zero.Config(), ZEROPP])
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama-lora"])
def test_export(name, config, tmp_path):
    """The file loads strictly into plain torch, and into transformers, with the masters' values."""
    model = make(MODELS[name], dtype=torch.bfloat16)

    def program(comm):
        mine = copy.deepcopy(model)
        trained = [p for p in mine.parameters() if p.requires_grad]
        mine, optimizer = zero.shard(mine, torch.optim.AdamW(trained), config, comm=comm)
        mine(**batch_of(name, comm.rank, 0)).loss.backward()
        optimizer.step()
        zero.save(tmp_path, mine, optimizer)
        masters = [m for u in engine_units(mine) for b in u.buffers for m in named_masters(b)]
        return masters, whole(mine)

    outcomes = on("2x2", program)
    zero.export(tmp_path, tmp_path / "model.safetensors")
    plain = make(MODELS[name], dtype=torch.bfloat16, seed=5)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    found = dict(plain.named_parameters())
    for masters, _ in outcomes:
        for parameter, run, values in masters:
            part = found[parameter].detach().flatten()[run.offset : run.offset + run.numel]
            assert torch.equal(part, values.bfloat16())
    if config.weights is None:
        assert_same_bits({n: p.detach() for n, p in found.items()}, outcomes[0][1])
    if name == "gpt2":
        model.config.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert again.lm_head.weight is again.transformer.wte.weight
        assert_same_bits(again.state_dict(), plain.state_dict())


def engine_units(model):
    return model._zero_engine.units


def named_masters(buffer):
    return [
        (buffer.layout.slots[m.run.slot].name, m.run, m.tensor.detach().clone())
        for m in buffer.own_masters()
    ]


def test_channels_last_is_saved_in_memory_order_and_exported_in_torchs(tmp_path):
    def convolution(seed, layout):
        model = make(lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)), seed=seed)
        return model.to(memory_format=layout)

    last = convolution(0, torch.channels_last)

    def save(comm):
        mine, optimizer = shard(comm, last, zero.Config())
        zero.save(tmp_path, mine, optimizer)

    def load(comm):
        mine, optimizer = shard(comm, convolution(1, torch.contiguous_format), zero.Config())
        zero.load(tmp_path, mine, optimizer)
        return whole(mine)

    on("1x2", save)
    expected = {name: p.detach().contiguous() for name, p in last.named_parameters()}
    for found in on("2x2", load):
        assert_same_bits(found, expected)
    zero.export(tmp_path, tmp_path / "m.safetensors")
    assert_same_bits(load_file(tmp_path / "m.safetensors"), dict(last.state_dict()))


def test_buffers_that_differ_between_ranks(tmp_path):
    """Running statistics are those of each rank."""
    model = make(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))

    def program(comm):
        mine, optimizer = shard(comm, model, zero.Config())
        for step in range(2):
            mine(torch.full((3, 4), float(comm.rank + step))).sum().backward()
            optimizer.step()
        zero.save(tmp_path, mine, optimizer)
        expected = {n: t.clone() for n, t in mine.named_buffers()}
        other, optimizer = shard(comm, model, zero.Config())
        zero.load(tmp_path, other, optimizer, random_state=False)
        assert_same_bits(dict(other.named_buffers()), expected)
        return expected["1.running_mean"]

    means = on("1x2", program)
    assert not torch.equal(means[0], means[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def two_groups(model):
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def saved_tower(path):
    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config())
        one_step(mine, optimizer, comm.rank, 0)
        zero.save(path, mine, optimizer)

    on("1x2", program)


def test_rank_0_need_not_wait_for_what_others_do_in_the_folder(tmp_path, monkeypatch):
    """It renames the folder once all parts are there, also where another's disk is slow."""

    def write_later(path, *rest):
        time.sleep(0.1 if "00001" in path.name else 0)  # rank 0 waits by then
        return write_tensors(path, *rest)

    sync = files.sync_directory

    def sync_slowly(path):
        time.sleep(0.05 if path.name.startswith(".tmp") else 0)
        sync(path)

    monkeypatch.setattr(zero.checkpoint.save, "write_tensors", write_later)
    monkeypatch.setattr(files, "sync_directory", sync_slowly)
    saved_tower(tmp_path)
    assert (tmp_path / "index.json").exists()


@pytest.mark.parametrize("full", ["a rank's file", "the index"])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_disk_that_is_full_is_said_by_all_ranks_and_leaves_nothing(
    full, async_op, tmp_path, monkeypatch
):
    """The one before loads, and the next save has the room that there was."""
    room = threading.Event()

    def no_room(path, *rest):
        if not room.is_set() and (full == "the index" or "00001" in path.name):
            path.with_name(f"{path.name}.tmp").write_bytes(b"some of it")
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    name = "write_index" if full == "the index" else "write_tensors"
    real = getattr(zero.checkpoint.save, name)

    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config())
        for step in range(3):
            one_step(mine, optimizer, comm.rank, step)
            if step != 1:
                zero.save(tmp_path, mine, optimizer, step=step, async_op=async_op).wait()
                continue
            before = sorted(tmp_path.glob("data-*/*"))
            comm.barrier()
            monkeypatch.setattr(zero.checkpoint.save, name, no_room)
            with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
                zero.save(tmp_path, mine, optimizer, step=step, async_op=async_op).wait()
            comm.barrier()
            assert not list(tmp_path.glob(".tmp-*"))
            assert set(before) <= set(tmp_path.glob("data-*/*"))
            assert zero.load(tmp_path, mine, optimizer).step == 0
            room.set()
            comm.barrier()
        assert zero.load(tmp_path, mine, optimizer).step == 2

    on("1x2", program)
    assert len(list(tmp_path.glob("data-*"))) == 1


def data_file(path, rank):
    index = json.loads((path / "index.json").read_text())["content"]
    return path / index["folder"] / index["ranks"][rank]["file"]


def remove(file):
    file.unlink()


def flip(file):
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "index", "message"),
    [
        (remove, False, r"rank-00001.safetensors is missing; the index lists it"),
        (flip, False, r"rank-00001.safetensors was changed"),
        (truncate, False, r"rank-00001.safetensors has \d+ bytes, the index says \d+"),
        (remove, True, r"index.json is missing: .* is not a checkpoint"),
        (flip, True, r"index.json (was changed|cannot be read)"),
        (truncate, True, r"index.json cannot be read"),
    ],
)
@pytest.mark.parametrize("topology", ["1", "1x2", "2x2"])
def test_a_damaged_file_is_named_on_all_ranks_and_nothing_changes(
    damage, index, message, topology, tmp_path
):
    saved_tower(tmp_path)
    damage(tmp_path / "index.json" if index else data_file(tmp_path, 1))

    def program(comm):
        mine, optimizer = shard(comm, make(Tower, seed=1), zero.Config())
        before = states(mine, optimizer)
        with pytest.raises(CheckpointError, match=message):
            zero.load(tmp_path, mine, optimizer)
        assert_same_bits(states(mine, optimizer), before)

    on(topology, program)
    with pytest.raises(CheckpointError, match=message):
        zero.export(tmp_path, tmp_path / "m.safetensors")


def frozen_tower():
    model = make(Tower)
    model.head.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: make(Tower, num_blocks=3), None, "less than the model: blocks.2.norm.weight"),
        (lambda: make(Tower, num_blocks=1), None, "that the model has not: blocks.1.norm.weight"),
        (
            lambda: make(Tower, 32),
            None,
            r"has shape \[33\] in .*, and \[32\] in the",
        ),
        (lambda: make(Tower, dtype=torch.float16), None, "dtype float32 in .* and float16"),
        (frozen_tower, None, "parameter head.weight has trainable True in"),
        (lambda: make(Tower), sgd, "holds states of AdamW, the optimizer is SGD"),
        (lambda: make(Tower), two_groups, "has 1 parameter groups, the optimizer 2"),
    ],
)
def test_another_model_or_optimizer_is_refused(model, optimizer, message, tmp_path):
    saved_tower(tmp_path)
    built = model()

    def program(comm):
        mine = differing_copy(built, comm.rank)
        trained = [p for p in mine.parameters() if p.requires_grad]
        if optimizer is two_groups:
            made = two_groups(mine)
        else:
            made = (optimizer or torch.optim.AdamW)(trained)
        zero.shard(mine, made, zero.Config(), comm=comm)
        with pytest.raises(CheckpointError, match=message):
            zero.load(tmp_path, mine, made)

    on("1x2", program)


def test_what_cannot_be_saved_is_named(tmp_path):
    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config())
        one_step(mine, optimizer, comm.rank, 0)
        with pytest.raises(TypeError, match=r"extra\['a'\] is a object"):
            zero.save(tmp_path, mine, optimizer, extra={"a": object()})
        with pytest.raises(ValueError, match="inside full_params"), zero.full_params(mine):
            zero.save(tmp_path, mine, optimizer)
        other, _ = shard(comm, make(Tower), zero.Config())
        with pytest.raises(ValueError, match="not sharded together"):
            zero.save(tmp_path, other, optimizer)
        (tmp_path / "file").write_text("")
        with pytest.raises((CheckpointError, OSError), match="file"):
            zero.save(tmp_path / "file", mine, optimizer)

    on("1x2", program)
    assert not (tmp_path / "index.json").exists()
    with pytest.raises(ValueError, match=r"ending in \.safetensors"):
        zero.export(tmp_path, tmp_path / "model.bin")
