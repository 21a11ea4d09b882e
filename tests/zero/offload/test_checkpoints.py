"""Checkpoints of what is on disk: same files, same bits, and no more than a column in memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import zero
import zero.checkpoint.files
from tests.marks import slow
from tests.zero.models import Tower, make
from tests.zero.offload.runs import offloaded
from tests.zero.runs import adamw, assert_same_bits, on, shard, whole
from tests.zero.test_checkpoint import CONFIGS, one_step, schedule
from tests.zero.test_meta import Model
from zero.checkpoint.deferred import Deferred
from zero.offload.engine import Offload


@pytest.mark.parametrize(
    ("name", "places", "dtype"),
    [
        ("stage 3", ("nvme both", None), torch.bfloat16),
        slow("stage 3", (None, "nvme both"), torch.float32),
        slow("stage 3", ("cpu", "cpu nvme"), torch.bfloat16),
        slow("stage 3", ("nvme params", "nvme"), torch.bfloat16),
        slow("stage 2", ("nvme", None), torch.float32),
        slow("stage 2", ("cpu", "nvme"), torch.bfloat16),
        slow("stage 1 int8", ("nvme", "nvme"), torch.bfloat16),
        slow("stage 1 int8", (None, "nvme"), torch.float32),
        slow("codes", ("nvme both", "nvme both"), torch.bfloat16),
        slow("persistent", ("nvme both", None), torch.bfloat16),
        slow("persistent", (None, "nvme both"), torch.float32),
    ],
)
def test_resumed_with_another_offload(name, places, dtype, tmp_path):
    """The oracle is the run that was not interrupted, without offload."""
    model, other = make(Tower, dtype=dtype), make(Tower, dtype=dtype, seed=1)
    config = CONFIGS[name]

    def first(comm, config):
        mine, optimizer = shard(comm, model, config)
        scheduler = schedule(optimizer)
        for step in range(3):
            one_step(mine, optimizer, comm.rank, step, scheduler)
        one_step(mine, optimizer, comm.rank, 3, micro=2)
        zero.save(tmp_path / "saved", mine, optimizer, scheduler=scheduler, step=4)
        return [one_step(mine, optimizer, comm.rank, s, scheduler) for s in (4, 5)], whole(mine)

    def second(comm, config):
        mine, optimizer = shard(comm, other, config)
        one_step(mine, optimizer, comm.rank, 0)
        scheduler = schedule(optimizer)
        loaded = zero.load(
            tmp_path / "saved", mine, optimizer, scheduler=scheduler, random_state=False
        )
        assert loaded == zero.Loaded(4, None, same_plan=True)
        zero.save(tmp_path / "again", mine, optimizer, async_op=True).wait()
        return [one_step(mine, optimizer, comm.rank, s, scheduler) for s in (4, 5)], whole(mine)

    configs = [config if place is None else offloaded(config, place, tmp_path) for place in places]
    wanted = on("2x2", first, config)
    files = saved(tmp_path / "saved")
    found = on("2x2", first, configs[0])
    assert_same_bits(saved(tmp_path / "saved"), files)
    resumed = on("2x2", second, configs[1])
    assert_same_bits(saved(tmp_path / "again"), files)
    for a, b, c in zip(wanted, found, resumed, strict=True):
        assert a[0] == b[0] == c[0]
        assert_same_bits(b[1], a[1])
        assert_same_bits(c[1], a[1])


def saved(path):
    """Return all tensors of a checkpoint."""
    return {
        f"{file.name} {key}": tensor
        for file in sorted(path.glob("data-*/*.safetensors"))
        for key, tensor in load_file(file).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1", "2x2"])
def test_other_ranks_export_and_pretrained(topology, tmp_path):
    model, other = make(Tower, dtype=torch.bfloat16), make(Tower, dtype=torch.bfloat16, seed=1)
    config = offloaded(zero.Config(), "nvme both", tmp_path)

    def first(comm):
        mine, optimizer = shard(comm, model, config)
        one_step(mine, optimizer, comm.rank, 0)
        zero.save(tmp_path / "saved", mine, optimizer)
        return zero.full_state_dict(mine)

    (state, _) = on("2", first)
    zero.export(tmp_path / "saved", tmp_path / "model.safetensors")
    assert_same_bits(load_file(tmp_path / "model.safetensors"), state)
    save_file(state, tmp_path / "given.safetensors")

    def second(comm):
        mine, optimizer = shard(comm, other, config)
        zero.load(tmp_path / "saved", mine, optimizer)
        assert_same_bits(zero.full_state_dict(mine), state)
        third, optimizer = shard(comm, other, config)
        one_step(third, optimizer, comm.rank, 0)
        assert zero.load_pretrained(third, tmp_path / "given.safetensors") == []
        assert_same_bits(zero.full_state_dict(third), state)
        losses = one_step(third, optimizer, comm.rank, 1)
        return losses, whole(third)

    def without(comm):
        third, optimizer = shard(comm, other, zero.Config())
        one_step(third, optimizer, comm.rank, 0)
        zero.load_pretrained(third, tmp_path / "given.safetensors")
        return one_step(third, optimizer, comm.rank, 1), whole(third)

    for found, wanted in zip(on(topology, second), on(topology, without), strict=True):
        assert found[0] == wanted[0]
        assert_same_bits(found[1], wanted[1])


@pytest.mark.slow
def test_a_save_holds_one_column_at_a_time(tmp_path, monkeypatch):
    """Nothing of what is on disk is read before the file is written, and then source by source."""
    model = make(Tower, dtype=torch.bfloat16)
    write, largest = zero.checkpoint.files._stream, []

    def watched(path, tensors, metadata):
        deferred = [t for t in tensors.values() if isinstance(t, Deferred)]
        assert {k for k, t in tensors.items() if not isinstance(t, Deferred)} <= {"buffer|offset|0"}
        sizes = {}
        for tensor in deferred:
            nbytes = tensor.numel * tensor.dtype.itemsize
            sizes[tensor.source] = sizes.get(tensor.source, 0) + nbytes
        largest.append(max(sizes.values()) / sum(sizes.values()))
        write(path, tensors, metadata)

    monkeypatch.setattr(zero.checkpoint.files, "_stream", watched)

    def program(comm):
        config = offloaded(zero.Config(), "nvme both", tmp_path)
        mine, optimizer = shard(comm, model, config)
        one_step(mine, optimizer, comm.rank, 0)
        zero.save(tmp_path / "saved", mine, optimizer)

    on("2", program)
    # Of three units and four columns, some are larger than others.
    assert len(largest) == 2
    assert max(largest) < 0.2


def test_meta_models(tmp_path, monkeypatch):
    """Unit by unit to the disk, with the weights of an ordinary model."""
    ordinary = make(Model, False, seed=3)
    held = []
    adopt = Offload.adopt

    def counted(offload, buffer, name):
        before = bytes_of(buffer)
        adopt(offload, buffer, name)
        held.append((before, bytes_of(buffer)))

    monkeypatch.setattr(Offload, "adopt", counted)

    def program(comm):
        with torch.device("meta"):
            model = Model(False)
        config = offloaded(zero.Config(), "nvme both", tmp_path)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            mine, _ = zero.shard(model, adamw(model.parameters()), config, comm=comm)
        assert_same_bits(zero.full_state_dict(mine), ordinary.state_dict())

    on("1", program)
    numel = sum(p.numel() for p in ordinary.parameters())
    assert sum(before for before, _ in held) == 8 * numel  # a shard and masters, float32
    assert all(after == 0 for _, after in held)


def bytes_of(buffer):
    """Bytes of the shard and of masters that have memory."""
    tensors = [] if buffer.shard is None else [buffer.shard]
    tensors += [master.tensor for master in buffer.masters]
    return sum(t.nbytes for t in tensors if t.untyped_storage().nbytes() > t.itemsize)
