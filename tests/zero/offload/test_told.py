"""One rank's disk fails: all ranks raise OffloadError with its place, and none computes on."""

import pytest
import torch

import zero
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.offload.runs import offloaded
from tests.zero.runs import on, shard
from zcomm.errors import OffloadError
from zero.engine import engine_of

GARBAGE = 0x7F  # as bfloat16 3.4e38: a loss that it gets into is not finite

CONFIGS = {
    "params": ("2", zero.Config(prefetch=2), "nvme params"),
    "both": ("2", zero.Config(prefetch=2), "nvme both"),
    "no prefetch": ("2", zero.Config(prefetch=0), "nvme both"),
    "stage 2": ("2", zero.Config(2), "nvme"),
    "stage 1, codec": ("2", zero.Config(1, weights="int8", min_numel=0), "nvme"),
    "hpZ": ("2x2", zero.Config(secondary="node", prefetch=2), "nvme both"),
    "hpZ, sync": ("2x2", zero.Config(secondary="node", prefetch=0), "nvme both"),
    "hpZ, codes": (
        "2x2",
        zero.Config(
            secondary="node", weights="int8", secondary_codec="int8", min_numel=0, prefetch=2
        ),
        "nvme both",
    ),
}


def break_disk(model, method, at):
    """Let one read or write from now on fail, the read with other bytes in the memory."""
    file = engine_of(model).offload.drive.swap._file
    real, left = getattr(file, method), [at]

    def broken(memory, offset):
        left[0] -= 1
        if left[0] == 0:
            if method == "read":
                memory[:] = GARBAGE
            raise OffloadError(f"broken at {offset}", path="/nvme", offset=offset)
        real(memory, offset)

    setattr(file, method, broken)


def train(model, optimizer, rank, steps):
    for step in steps:
        loss = loss_of(model, tokens(rank, step))
        assert bool(loss.isfinite())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model, optimizer, folder):
    zero.save(folder / "saved", model, optimizer)


def save_behind(model, optimizer, folder):
    zero.save(folder / "saved", model, optimizer, async_op=True).wait()


def state(model, optimizer, folder):
    zero.full_state_dict(model)


def edit(model, optimizer, folder):
    with zero.full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def load(model, optimizer, folder):
    zero.load(folder / "before", model, optimizer)


def go_on(model, optimizer, folder):
    train(model, optimizer, engine_of(model).comm.rank, range(2, 6))


def fails_on_all(name, use, method, at, folder, victim=1):
    topology, config, place = CONFIGS[name]
    whole = make(Tower, width=64, hidden=128, num_blocks=3, dtype=torch.bfloat16)

    def program(comm):
        model, optimizer = shard(comm, whole, offloaded(config, place, folder))
        if use is load:
            zero.save(folder / "before", model, optimizer)
        train(model, optimizer, comm.rank, range(2))
        if comm.rank == victim:
            break_disk(model, method, at)
        with pytest.raises(OffloadError) as caught:
            use(model, optimizer, folder)
        assert caught.value.path == "/nvme"
        assert f"broken at {caught.value.offset}" in str(caught.value)
        assert (f"rank {victim}: " in str(caught.value)) == (comm.rank != victim)
        # All of them: an owner must not go on, or save, while another one cannot.
        for call in (lambda: model(tokens(0, 0)), lambda: save(model, optimizer, folder)):
            with pytest.raises(OffloadError, match=r"any more.*broken at"):
                call()
        comm.barrier()

    on(topology, program)


@pytest.mark.parametrize(
    ("name", "method", "at"),
    [
        ("params", "read", 1),
        ("both", "read", 7),
        slow("both", "write", 1),
        slow("both", "write", 9),
        slow("no prefetch", "read", 1),
        slow("no prefetch", "read", 12),
        ("stage 2", "read", 2),
        slow("stage 2", "write", 5),
        slow("stage 1, codec", "read", 5),
        slow("hpZ", "read", 5),
        slow("hpZ, sync", "read", 1),
        slow("hpZ, codes", "read", 9),
    ],
)
def test_in_training(name, method, at, tmp_path):
    fails_on_all(name, go_on, method, at, tmp_path)


@pytest.mark.parametrize(
    ("name", "use", "method"),
    [
        ("both", save, "read"),
        slow("both", save_behind, "read"),
        ("both", load, "write"),
        slow("both", state, "read"),
        slow("both", edit, "read"),
        slow("stage 2", save, "read"),
        slow("stage 2", load, "write"),
        slow("stage 2", edit, "write"),
    ],
)
def test_elsewhere(name, use, method, tmp_path):
    fails_on_all(name, use, method, 2, tmp_path)


def test_while_a_model_is_sharded(tmp_path):
    """Rank 1 has a folder that is not there; the others wait for its part of the first unit."""

    def program(comm):
        folder = tmp_path / "none" if comm.rank == 1 else tmp_path
        with pytest.raises(OffloadError, match="none: No such file") as caught:
            shard(comm, make(Tower), offloaded(zero.Config(), "nvme both", folder))
        assert caught.value.path == str(tmp_path / "none")
        comm.barrier()

    on("2", program)


def test_a_master_of_one_element_is_no_place_to_write(tmp_path):
    """Torch refuses to write to the larger ones, which read as one NaN everywhere."""

    def program(comm):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        config = zero.Config(offload_optimizer="nvme", nvme_path=tmp_path)
        zero.shard(model, optimizer, config, comm=comm)
        model(torch.ones(1, 1)).sum().backward()
        (master,) = optimizer.param_groups[0]["params"]
        before = zero.full_state_dict(model)["weight"]
        with torch.no_grad():
            master.fill_(3)
        with pytest.raises(ValueError, match=r"of weight, one element, was written to.*full_param"):
            optimizer.step()
        optimizer.step()
        assert torch.equal(zero.full_state_dict(model)["weight"], before - 1)

    on("1", program)
