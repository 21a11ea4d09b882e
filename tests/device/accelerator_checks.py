"""The accelerator of the tests: it computes as the CPU does, and refuses what CUDA refuses.

The collectives on its tensors are those of ``test_collectives``, with real tensors for fake arrays.
Run by test_accelerator.py in a process of its own: torch, and whoever asks it for an accelerator,
would use this one from then on.
"""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zcomm
from tests.collectives import checks
from tests.collectives.dtypes import as_array, assert_bits, drawn, filled, stored_in
from tests.collectives.worlds import algorithms, on
from tests.device import accelerator
from tests.device.test_collectives import results
from zcomm import Codec, kinds
from zcomm.layout import Layout, Segment

CODECS = ("int8", "int4:rounding=stochastic", "bf16")
NUM_STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def library():
    return accelerator.load()


def test_host_arrays_stay_on_the_host_whatever_the_default_device_is():
    def program(comm):
        x = torch.full((5,), 1.0 + comm.rank)
        with torch.device(accelerator.use(comm.rank)):
            gathered = [comm.all_gather(x) for _ in range(3)]
            large = [comm.all_gather(x.repeat(50_000)) for _ in range(3)]
            decoded = Codec.parse("int8").decode(Codec.parse("int8").encode(x), 5, torch.float32)
        assert {y.device.type for y in (*gathered, *large, decoded)} == {"cpu"}
        assert all(torch.equal(y, gathered[0]) for y in gathered)
        assert all(torch.equal(y, large[0]) for y in large)

    zcomm.run_local(program, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.inside(x).chunk(3, -1)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.SiLU(),
        nn.Linear(16, 5),
    )


def transformer():
    return nn.Sequential(nn.Embedding(7, 8), Attention(), nn.Dropout(0.1), nn.Linear(8, 5))


def convolutions():
    first = nn.Conv1d(1, 4, 3, padding=1)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), first, nn.Flatten(), nn.Linear(32, 5))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed():
    inside = Checkpointed(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3))
    return nn.Sequential(nn.Linear(8, 8), inside, nn.Linear(8, 5))


INPUTS = {
    checkpointed: lambda: torch.randn(6, 8),
    mlp: lambda: torch.randn(6, 8),
    transformer: lambda: torch.randint(7, (2, 3)),
    convolutions: lambda: torch.randn(6, 8),
}


def train(make, optimizer, device):
    """Return all that training computes, and the threads in which hooks ran."""
    torch.manual_seed(1)
    model = make()
    given = list(model.parameters())
    model.to(device)
    assert all(a is b for a, b in zip(given, model.parameters(), strict=True))
    stepper = optimizer(model.parameters())
    threads, found = set(), []
    for parameter in given:
        parameter.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
    for _ in range(NUM_STEPS):
        x, target = INPUTS[make]().to(device), torch.randint(5, (6,)).to(device)
        loss = functional.cross_entropy(model(x).reshape(6, 5), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [loss, norm, *(parameter.grad for parameter in given)]
        stepper.step()
        stepper.zero_grad()
    states = [value for state in stepper.state.values() for value in state.values()]
    found += [*given, *(value for value in states if isinstance(value, torch.Tensor))]
    assert all(x.device.type == device for x in found if x.dim() > 0)
    return [x.detach().cpu() for x in found], threads


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    ],
    ids=["AdamW", "fused", "SGD"],
)
def test_training_computes_the_bits_of_the_cpu_in_another_thread(make, optimizer):
    expected, threads = train(make, optimizer, "cpu")
    assert threads == {threading.get_ident()}
    found, threads = train(make, optimizer, "accel")
    assert threads
    assert threading.get_ident() not in threads
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)


ONE_OF_EACH = {
    "add": lambda x, host: x + host,
    "in place": lambda x, host: x.mul_(host),
    "to the host": lambda x, host: host.add_(x),
    "matmul": lambda x, host: x @ host,
    "linear": lambda x, host: functional.linear(x, x, host[0]),
    "embedding": lambda x, host: functional.embedding(host.long(), x),
    "layer_norm": lambda x, host: functional.layer_norm(x, (3,), host[0]),
    "list": lambda x, host: torch.cat([x, host]),
    "foreach": lambda x, host: torch._foreach_add_([x], [host]),
    "out": lambda x, host: torch.add(host, host, out=x),
}


@pytest.mark.parametrize("operation", ONE_OF_EACH)
def test_a_host_tensor_among_those_of_the_device_is_refused(operation):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ONE_OF_EACH[operation](torch.ones(3, 3, device="accel"), torch.ones(3, 3))


def test_tensors_of_two_devices_are_refused_and_copied():
    x, y = (torch.ones(3, device=f"accel:{index}") for index in (1, 2))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.dot(x, y)
    assert y.copy_(x * 2).tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="there is no"):
        torch.ones(3, device="accel:8")
    with torch.accel.device(3):
        assert torch.ones(3, device="accel").device.index == 3
        assert x.new_empty(2).device.index == 1
        assert x.resize_(1000).untyped_storage().device.index == 1
    assert torch.accel.current_device() == 0


def test_hooks_of_ranks_on_devices_of_their_own_wait_for_each_other():
    def program(comm):
        def reduce(parameter):
            comm.all_reduce(parameter.grad)

        layer = nn.Linear(3, 3).to(accelerator.use(comm.rank))
        assert layer.weight.device.index == comm.rank
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        layer(torch.full((1, 3), comm.rank + 1.0, device="accel")).sum().backward()
        return [parameter.grad.cpu() for parameter in layer.parameters()]

    for weight, bias in on("2x2", program):
        assert weight.eq(1 + 2 + 3 + 4).all().item()
        assert bias.eq(4).all().item()


def test_what_cuda_takes_of_the_host_is_taken():
    x = torch.arange(3.0, device="accel")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    assert x.copy_(torch.ones(3)).tolist() == [1, 1, 1]
    assert torch.ones(3).pin_memory().is_pinned()
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        x.numpy()


def test_memory_is_counted_and_new_memory_is_no_number():
    before = torch.accel.memory_allocated()
    torch.accel.reset_peak_memory_stats()
    x = torch.empty(1000, device="accel")
    assert x.isnan().all().item()
    assert torch.accel.memory_allocated() == before + 4000
    y = x + 1
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().device.type == "accel"
    assert torch.accel.memory_allocated() == before + 4000
    del x, y
    assert torch.accel.memory_allocated() == before
    assert torch.accel.max_memory_allocated() >= before + 8000


def test_the_device_refuses_memory_that_is_not_its_own():
    x = torch.ones(4, device="accel")
    device = kinds.kind_of(x).devices[0]
    memory, host = device.memory(x), np.zeros(16, np.uint8)
    with pytest.raises(AssertionError, match="not pinned"):
        device.copy(memory, host)
    with pytest.raises(AssertionError, match="host memory where"):
        device.kernels().encode(Codec.parse("int8"), host, "float32", None, None, memory)
    staged = device.pinned(16)
    device.copy(staged, memory)
    assert staged.view(np.float32).tolist() == [1] * 4
    x.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="was freed"):
        device.copy(staged, memory)


@pytest.mark.parametrize("world", ["1x1", "2x2", "3+5"])
@pytest.mark.parametrize("shared", [False, True])
def test_exact_collectives(world, shared):
    def program(comm):
        accelerator.use(0 if shared else comm.rank)
        for dtype in ("float32", "bfloat16", "float64"):
            for shape in ((), (5,), (0,), (2, 3, 5)):
                checks.every_algorithm(comm, checks.all_gather, "accel", dtype, shape)
            for op in ("sum", "avg", "max"):
                checks.every_algorithm(comm, checks.all_reduce, "accel", dtype, op, (4099,))
            checks.every_algorithm(comm, checks.reduce_scatter, "accel", dtype, "avg", (37,))
            checks.all_to_all(comm, "accel", dtype, (3, 2))
            checks.broadcast(comm, "accel", dtype, (5,), comm.size - 1)
            checks.send_and_recv(comm, "accel", dtype, (7,))

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_the_bits_of_collectives_are_those_of_the_host_path(world, codec):
    def program(comm, kind, dtype, async_op):
        accelerator.use(comm.rank)
        return [
            results(comm, kind, dtype, codec, algorithm, async_op)
            for algorithm in algorithms(comm.topology)
        ]

    for dtype in ("float32", "bfloat16"):
        expected = on(world, lambda c, d=dtype: program(c, "torch", d, False), min_numel=0)
        for async_op in (False, True):
            found = on(world, lambda c, d=dtype, a=async_op: program(c, "accel", d, a), min_numel=0)
            assert found == expected


@pytest.mark.parametrize("codecs", [(None, None), ("int8", "int4")])
@pytest.mark.parametrize("async_op", [False, True])
def test_layouts(codecs, async_op):
    segments = ((Segment(300, 70), Segment(0, 257)), (Segment(257, 43),), (), (Segment(370, 1),))

    def program(comm):
        accelerator.use(comm.rank)
        layout = Layout("bfloat16", segments)
        numel = layout.shard_numel(comm.rank)
        shards = [drawn((layout.shard_numel(r),), "bfloat16", 63, r) for r in range(comm.size)]
        bits = []
        for kind in ("accel", "torch"):
            full = filled((layout.extent,), "bfloat16", kind)
            shard = as_array(shards[comm.rank], "bfloat16", kind)
            options = {"async_op": async_op}
            work = comm.gather_layout([shard], [full], [layout], codec=codecs[0], **options)
            if async_op:
                work.wait()
            out = filled((numel,), "float32", kind)
            work = comm.reduce_layout([full], [out], [layout], codec=codecs[1], **options)
            if async_op:
                work.wait()
            assert full.device.type == out.device.type == ("cpu" if kind == "torch" else kind)
            bits.append([stored_in(full)[0], stored_in(out)[0]])
        for one, other in zip(*bits, strict=True):
            assert (one == other).all()

    on("2x2", program, min_numel=0)


def test_strides_and_outputs():
    def program(comm):
        shards = [drawn((4, 3), "bfloat16", 62, rank) for rank in range(comm.size)]
        mine = as_array(shards[comm.rank].T, "bfloat16", "accel").T
        assert_bits(comm.all_gather(mine), np.concatenate(shards), "bfloat16", "accel")
        out = filled((3, 4 * comm.size), "bfloat16", "accel").T
        assert comm.all_gather(mine, out, async_op=True).wait() is out
        assert_bits(out, np.concatenate(shards), "bfloat16", "accel")
        with pytest.raises(TypeError, match="accel:0 and the host: possible are"):
            comm.all_reduce([mine, torch.ones(3)])
        assert comm.all_reduce(torch.ones(3, requires_grad=False)).tolist() == [comm.size] * 3

    on("2x2", program)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs(codec):
    chosen = Codec.parse(codec)
    stored = drawn((10_001,), "bfloat16", 64, 0)
    expected = chosen.encode(as_array(stored, "bfloat16", "torch"), seed=5, segments=[10_000, 1])
    wire = chosen.encode(as_array(stored, "bfloat16", "accel"), seed=5, segments=[10_000, 1])
    assert_bits(wire, stored_in(expected)[0], "uint8", "accel")
    decoded = chosen.decode(expected, 10_001, torch.bfloat16, segments=[10_000, 1])
    found = chosen.decode(wire, 10_001, torch.bfloat16, segments=[10_000, 1])
    assert_bits(found, stored_in(decoded)[0], "bfloat16", "accel")
