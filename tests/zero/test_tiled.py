"""TiledLinear beside nn.Linear: weights, values within a computed bound, bits, and the memory."""

import copy
import functools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero
from tests.marks import one_in
from tests.zero.runs import adamw, assert_same_bits, on, relative_difference
from zcomm.errors import CheckpointError
from zero.layout import find_units
from zero.memory import report

SPLITS = [(1, 1), (1, 3), (3, 1), (2, 4)]
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def seeded(function, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return function()


class Block(nn.Module):
    """A residual perceptron of tiled layers, or not; ``recompute`` checkpoints its inside."""

    def __init__(self, width, hidden, splits=None, recompute=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        linear = nn.Linear
        if splits is not None:
            linear = functools.partial(zero.TiledLinear, **splits)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width, bias=False)
        self.recompute = recompute

    def inside(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.recompute is None:
            return x + self.inside(x)
        return x + checkpoint(self.inside, x, use_reentrant=self.recompute == "reentrant")


class Model(nn.Module):
    def __init__(self, width=32, hidden=96, splits=None, recompute=None, num_blocks=2):
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            Block(width, hidden, splits, recompute) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def batch(rank, step, width=32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, width, generator=generator)


def train(comm, model, config, *, steps=2, autocast=False):
    mine = copy.deepcopy(model)
    mine, optimizer = zero.shard(mine, adamw(mine.parameters()), config, comm=comm)
    losses, norms = [], []
    for step in range(steps):
        x = batch(comm.rank, step).to(mine.norm.weight.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (mine(x).float() - x.roll(1, -1).float()).square().mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(zero.clip_grad_norm_(optimizer, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, zero.full_state_dict(mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_draws_of_an_ordinary_layer(bias, num_in, num_out, dtype, monkeypatch):
    """The same weights, and the same draws after them; also where a tile takes several bands."""
    monkeypatch.setattr("zero.tiled._SCRATCH_NUMEL", 5 * 23)
    splits = {"in_splits": num_in, "out_splits": num_out}
    linear, after = seeded(lambda: (nn.Linear(23, 37, bias, dtype=dtype), torch.rand(3)))
    tiled, then = seeded(
        lambda: (zero.TiledLinear(23, 37, bias, dtype=dtype, **splits), torch.rand(3))
    )
    assert_same_bits(dict(tiled.to_linear().state_dict()), dict(linear.state_dict()))
    assert torch.equal(after, then)
    assert [len(t.weight) for t in tiled.tiles[::num_in]] == tiled.out_sizes
    assert max(tiled.out_sizes) - min(tiled.out_sizes) <= 1


@pytest.mark.parametrize("init", [None, lambda m: hasattr(m, "weight") and nn.init.ones_(m.weight)])
@pytest.mark.parametrize(("num_in", "num_out"), SPLITS)
def test_meta(num_in, num_out, init):
    splits = {"in_splits": num_in, "out_splits": num_out}
    ordinary = seeded(Model)
    if init is not None:
        ordinary.apply(init)

    def program(comm):
        with torch.device("meta"):
            model = Model(splits=splits)
        optimizer = adamw(model.parameters())
        seeded(lambda: zero.shard(model, optimizer, zero.Config(), comm=comm, init=init))
        return zero.merge_tiles(model, zero.full_state_dict(model))

    ((state),) = on("1", program)
    assert_same_bits(state, dict(ordinary.state_dict()))


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize(("num_in", "num_out"), SPLITS)
def test_values_against_float64(num_in, num_out, dtype):
    """Forward and gradients, each sum of K products within γ(K)·Σ|a||b| and its roundings."""
    linear = seeded(lambda: nn.Linear(90, 70, dtype=dtype))
    tiled = zero.TiledLinear.from_linear(linear, in_splits=num_in, out_splits=num_out)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, 90, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 4, 70, generator=generator).to(dtype)
    y = tiled(x)
    y.backward(grad)
    rows, grads = x.detach().double().flatten(0, 1), grad.double().flatten(0, 1)
    weight = linear.weight.detach().double()
    bias = linear.bias.detach().double()
    near(y.flatten(0, 1), rows @ weight.T + bias, rows.abs() @ weight.abs().T + bias.abs(), 90)
    near(x.grad.flatten(0, 1), grads @ weight, grads.abs() @ weight.abs(), 70, num_out)
    merged = zero.tiled._merge([tile.weight.grad for tile in tiled.tiles], num_in)
    near(merged, grads.T @ rows, grads.abs().T @ rows.abs(), 20)
    near(tiled.bias.grad, grads.sum(0), grads.abs().sum(0), 20)


def near(found, wanted, size, products, additions=1):
    """Compare with the bound: float32 sums, and every addition of partial sums in the dtype."""
    wide = (products + 8) * UNIT_ROUNDOFF[torch.float32]
    narrow = (1 + additions) * UNIT_ROUNDOFF[found.dtype]
    assert ((found.double() - wanted).abs() <= (wide + narrow) * 1.01 * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_outputs_have_the_bits_of_an_ordinary_layer(dtype):
    """Tiles of 16 rows and more, of a power of two: what docs/zero.md says of this BLAS."""
    linear = seeded(lambda: nn.Linear(64, 256, dtype=dtype))
    for splits in (2, 4, 8, 16):
        tiled = zero.TiledLinear.from_linear(linear, out_splits=splits)
        x = seeded(lambda: torch.randn(6, 64, dtype=dtype), splits)
        assert_same_bits({"y": tiled(x).detach()}, {"y": linear(x).detach()})


def test_partial_sums_of_sixteen_bits_are_added_in_float32():
    tiled = zero.TiledLinear(3, 1, False, dtype=torch.bfloat16, in_splits=3)
    for tile, value in zip(tiled.tiles, (256.0, 1.0, 1.0), strict=True):
        nn.init.constant_(tile.weight, value)
    # In bfloat16 256 + 1 is 256.
    assert tiled(torch.ones(1, 3, dtype=torch.bfloat16)).item() == 258


def test_state_dicts():
    linear = seeded(lambda: nn.Linear(10, 7))
    holder = nn.ModuleDict({"a": zero.TiledLinear(10, 7, in_splits=2, out_splits=3)})
    assert set(holder.state_dict()) == {"a.bias", *(f"a.tiles.{i}.weight" for i in range(6))}
    holder.load_state_dict({f"a.{k}": v for k, v in linear.state_dict().items()})
    merged = zero.merge_tiles(holder, holder.state_dict())
    assert_same_bits(merged, {f"a.{k}": v for k, v in linear.state_dict().items()})
    again = copy.deepcopy(holder)
    again.load_state_dict(holder.state_dict())
    assert_same_bits(dict(again.state_dict()), dict(holder.state_dict()))
    with pytest.raises(RuntimeError, match=r"a\.weight has shape \[7, 9\], expected \[7, 10\]"):
        holder.load_state_dict({"a.weight": torch.zeros(7, 9), "a.bias": torch.zeros(7)})
    merged.pop("a.weight")
    with pytest.raises(ValueError, match="6 of 6 tiles of a are missing"):
        zero.merge_tiles(holder, merged)
    linear.weight.requires_grad_(False)
    tiled = zero.TiledLinear.from_linear(linear.eval(), out_splits=2)
    assert not any(tile.weight.requires_grad for tile in tiled.tiles)
    assert tiled.bias.requires_grad
    assert not tiled.training


@pytest.mark.parametrize(("num_in", "num_out"), [(0, 1), (1, 0), (11, 1), (1, 8)])
def test_impossible_splits(num_in, num_out):
    with pytest.raises(ValueError, match=r"(in|out)_splits \d+ of (10|7) .*: possible are 1 to"):
        zero.TiledLinear(10, 7, in_splits=num_in, out_splits=num_out)


ROOT = ["first.weight", "first.bias", "norm.weight", "norm.bias"]


def test_units():
    """Each tile is a unit behind its block, which keeps the rest; also where units are named."""
    model = Model(splits={"out_splits": 2})
    wanted = [
        *("blocks.0", "blocks.0.up.tiles.0", "blocks.0.up.tiles.1", "blocks.0.down.tiles.0"),
        *("blocks.0.down.tiles.1", "blocks.1", "blocks.1.up.tiles.0", "blocks.1.up.tiles.1"),
        *("blocks.1.down.tiles.0", "blocks.1.down.tiles.1", ""),
    ]
    for units in ("auto", ("blocks.1", "blocks.0")):
        found = {u.name: [n for n, _ in u.parameters] for u in find_units(model, units)}
        assert list(found) == wanted
        assert found["blocks.0"] == [
            "blocks.0.norm.weight",
            "blocks.0.norm.bias",
            "blocks.0.up.bias",
        ]
        assert found["blocks.1.up.tiles.1"] == ["blocks.1.up.tiles.1.weight"]
        assert found[""] == ROOT
    model.blocks[0].down.tiles[0].weight = model.blocks[0].down.tiles[1].weight
    found = {u.name: [n for n, _ in u.parameters] for u in find_units(model, "auto")}
    assert found[""] == [*ROOT[:2], "blocks.0.down.tiles.0.weight", *ROOT[2:]]


TRAINED = [
    *(zero.Config(stage=stage) for stage in range(4)),
    zero.Config(prefetch=0),
    zero.Config(secondary=1),
    zero.Config(units=()),
]


@functools.cache
def reference(autocast):
    model = seeded(lambda: Model(splits={"in_splits": 2, "out_splits": 3}))
    return on("1x2", train, model, zero.Config(stage=0), autocast=autocast)


@pytest.mark.parametrize(
    ("config", "autocast", "recompute"),
    one_in(6, TRAINED, [False, True], [None, "plain", "reentrant"]),
)
def test_all_stages_have_the_same_bits(config, autocast, recompute):
    splits = {"in_splits": 2, "out_splits": 3}
    model = seeded(lambda: Model(splits=splits, recompute=recompute))
    outcomes = on("1x2", train, model, config, autocast=autocast)
    for outcome, wanted in zip(outcomes, reference(autocast), strict=True):
        assert outcome[:2] == wanted[:2]
        assert_same_bits(outcome[2], wanted[2])


def test_tiles_on_disk_have_the_same_bits(tmp_path):
    model = seeded(lambda: Model(splits={"in_splits": 2, "out_splits": 3}, recompute="plain"))
    places = {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": tmp_path}
    config = zero.Config(**places, offload_numel=256)
    for outcome, wanted in zip(on("1x2", train, model, config), reference(False), strict=True):
        assert outcome[:2] == wanted[:2]
        assert_same_bits(outcome[2], wanted[2])


@pytest.mark.parametrize("autocast", [False, True])
def test_training_follows_ordinary_layers(autocast):
    model = seeded(Model)
    tiled = seeded(lambda: Model(splits={"in_splits": 2, "out_splits": 3}))
    ordinary = on("1x2", train, model, zero.Config(), steps=3, autocast=autocast)
    found = on("1x2", train, tiled, zero.Config(), steps=3, autocast=autocast)
    merged = zero.merge_tiles(tiled, found[0][2])
    tolerance = 2e-2 if autocast else 1e-5
    assert found[0][0] == pytest.approx(ordinary[0][0], rel=tolerance)
    assert relative_difference(merged, ordinary[0][2]) <= tolerance


WIDTH, HIDDEN = 64, 512
TILE = 4 * WIDTH * HIDDEN


@pytest.mark.parametrize(
    ("prefetch", "autocast", "recompute"),
    one_in(4, [0, 1], [False, True], [None, "plain", "reentrant"]),
)
def test_the_peak_falls_with_the_number_of_tiles(prefetch, autocast, recompute):
    """Whole are 1 + prefetch tiles, gradients wait of as many, and the rest is twice there.

    One tile more while the backward of the last one, which is whole, computes its inputs again.
    """
    for splits in (1, 8):
        model = seeded(
            lambda splits=splits: Model(WIDTH, HIDDEN, {"out_splits": splits}, recompute)
        )

        def program(comm, model=model):
            mine = copy.deepcopy(model)
            config = zero.Config(prefetch=prefetch)
            mine, optimizer = zero.shard(mine, adamw(mine.parameters()), config, comm=comm)
            for step in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = mine(batch(comm.rank, step, WIDTH)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found = report(mine, optimizer)
            assert found.lent == 0
            return found.peak

        rest = 4 * sum(p.numel() for n, p in model.named_parameters() if "tiles" not in n)
        tiles = 2 * (1 + prefetch) + (recompute == "plain")
        for peak in on("1x2", program):
            assert TILE / splits < peak <= tiles * TILE / splits + 2 * rest + 8192


def test_no_cast_copy_of_a_weight_waits_for_backward():
    """Under autocast nn.Linear saves one of every weight; here only the input is saved beside."""
    tiled = seeded(lambda: zero.TiledLinear(64, 256, out_splits=4))
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    x = torch.randn(2, 64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = tiled(x)
    weights = {tile.weight.untyped_storage().data_ptr() for tile in tiled.tiles}
    assert len(set(saved) - weights) == 1
    assert weights <= set(saved)
    assert y.dtype == torch.bfloat16
    assert_same_bits({"y": y.detach()}, {"y": autocast_linear(tiled, x)})


def autocast_linear(tiled, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return tiled.to_linear()(x)


def test_compiled():
    model = seeded(lambda: Model(splits={"out_splits": 2}))

    def program(comm):
        mine = copy.deepcopy(model)
        for block in mine.blocks:
            block.compile(backend="aot_eager")
        return train(comm, mine, zero.Config(), steps=2)

    def plain(comm):
        return train(comm, model, zero.Config(), steps=2)

    (found,), (wanted,) = on("1", program), on("1", plain)
    assert found[:2] == wanted[:2]
    assert_same_bits(found[2], wanted[2])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_in", "num_out"), SPLITS[1:])
def test_pretrained_weights_of_ordinary_layers(num_in, num_out, stage, tmp_path):
    """Each tile finds its rows and columns in the file; so it does in a file of tiles."""
    splits = {"in_splits": num_in, "out_splits": num_out}
    ordinary = dict(seeded(Model, seed=1).state_dict())
    save_file(ordinary, tmp_path / "ordinary.safetensors")
    wrong = ordinary | {"blocks.0.up.weight": torch.zeros(96, 33)}
    save_file(wrong, tmp_path / "wrong.safetensors")
    both = ordinary | {"blocks.0.up.other": torch.zeros(1)}
    save_file(both, tmp_path / "both.safetensors")

    def program(comm):
        model = Model(splits=splits)
        zero.shard(model, adamw(model.parameters()), zero.Config(stage=stage), comm=comm)
        assert zero.load_pretrained(model, tmp_path / "ordinary.safetensors") == []
        state = zero.full_state_dict(model)
        if comm.rank == 0:
            save_file(state, tmp_path / "tiles.safetensors")
        comm.barrier()
        assert zero.load_pretrained(model, tmp_path / "tiles.safetensors") == []
        for name, what in (("wrong", r"up.weight has shape \[96, 33\]"), ("both", "up.other")):
            with pytest.raises(CheckpointError, match=what):
                zero.load_pretrained(model, tmp_path / f"{name}.safetensors")
        return zero.merge_tiles(model, zero.full_state_dict(model))

    state, *_ = on("2", program)
    assert_same_bits(state, ordinary)
