"""Models built without memory: the same weights as ordinary ones, and one unit at a time."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero
import zero.shard
from tests.zero.models import make
from tests.zero.pretrained import MODELS
from tests.zero.runs import adamw, assert_same_bits, on
from zero.unit import Buffer

WIDTH = 48


class Scaled(nn.Module):
    """A bare parameter and a computed buffer, with an initialiser for both."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.register_buffer("count", torch.empty(2, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.scale)
        self.table.copy_(torch.arange(WIDTH))
        self.count.zero_()

    def forward(self, x):
        return x * self.scale + self.table


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 70), nn.GELU(), nn.Linear(70, WIDTH))

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.scaled = Scaled()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 31, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.scaled(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gpt_init(module):
    """Initialise as GPTs do: after construction, some of the parameters, by ``apply``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def built(kind, *arguments, init=None):
    model = kind(*arguments)
    if init is not None:
        model.apply(init)
    return model


def sharded(model, config, comm, init):
    return zero.shard(model, adamw(model.parameters()), config, comm=comm, init=init)


@pytest.mark.parametrize("config", [zero.Config(s) for s in range(4)], ids=lambda c: str(c.stage))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("init", [None, gpt_init])
def test_the_weights_of_an_ordinary_construction(init, tied, config):
    """One rank here: ranks that are threads would draw from one generator. MPI below."""
    ordinary = make(built, Model, tied, init=init, seed=3)
    with torch.device("meta"):
        model = Model(tied)
    parameters = list(model.parameters())

    def program(comm):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            mine, optimizer = sharded(model, config, comm, init)
            drawn = torch.rand(3)
        found = zero.full_state_dict(mine)
        assert_same_bits(found, ordinary.state_dict())
        assert_same_bits(dict(mine.named_buffers()), dict(ordinary.named_buffers()))
        assert [id(p) for p in mine.parameters()] == [id(p) for p in parameters]
        expected = copy.deepcopy(ordinary)
        tokens = torch.arange(12).view(2, 6)
        loss = mine(tokens).square().mean()
        assert loss.item() == expected(tokens).square().mean().item()
        loss.backward()
        optimizer.step()
        return drawn

    on("1", program)


@pytest.mark.mpi
@pytest.mark.parametrize("init", [None, gpt_init])
def test_all_ranks(comm, init):
    """Every rank draws what rank 0 draws, and goes on from the same state of the generator."""
    ordinary = make(built, Model, False, init=init, seed=3)
    with torch.device("meta"):
        model = Model(False)
    torch.manual_seed(3)
    ordinary_state = make_state(init)
    torch.manual_seed(3)
    mine, _ = sharded(model, zero.Config(), comm, init)
    assert torch.equal(torch.get_rng_state(), ordinary_state)
    assert_same_bits(zero.full_state_dict(mine), ordinary.state_dict())


def make_state(init):
    built(Model, False, init=init)
    return torch.get_rng_state()


def test_memory_of_one_unit(monkeypatch):
    """While units are made, at most one unit beside the root has memory."""
    with torch.device("meta"):
        model = Model(False)
    whole = []
    hide = Buffer.hide

    def counted(buffer):
        live = [p for p in model.parameters() if not p.is_meta and type(p) is nn.Parameter]
        whole.append(sum(p.numel() for p in live))
        hide(buffer)

    monkeypatch.setattr(Buffer, "hide", counted)
    on("1", lambda comm: sharded(model, zero.Config(), comm, None) and None)
    layer = sum(p.numel() for p in model.layers[0].parameters())
    root = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("layers"))
    assert len(whole) == 4
    assert max(whole) <= layer + root
    assert 3 * layer > 2 * (layer + root) - root  # else the bound says little


@pytest.mark.parametrize("stage", [2, 3])
def test_loaded_instead(stage, tmp_path):
    ordinary = make(Model, False, seed=3)
    save_file(ordinary.state_dict(), tmp_path / "m.safetensors")

    def program(comm):
        with torch.device("meta"):
            model = Model(False)
        model.scaled = Scaled()  # its buffer is not in the file
        mine, _ = sharded(model, zero.Config(stage), comm, "empty")
        zero.load_pretrained(mine, tmp_path / "m.safetensors")
        assert_same_bits(zero.full_state_dict(mine), ordinary.state_dict())

    on("1x2", program)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "vit"])
def test_transformers_with_their_own_initialiser(name):
    """Computed buffers and constants are equal, drawn weights of the same spread."""
    ordinary = make(MODELS[name], seed=3)
    with torch.device("meta"):
        model = MODELS[name]()

    def program(comm):
        mine, _ = sharded(model, zero.Config(), comm, model._init_weights)
        return zero.full_state_dict(mine), dict(mine.named_buffers())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ((state, buffers),) = on("1", program)
    assert_same_bits(buffers, dict(ordinary.named_buffers()))
    for key, wanted in ordinary.state_dict().items():
        if wanted.unique().numel() <= 1:
            assert torch.equal(state[key], wanted), key
        elif wanted.numel() >= 1000:
            # Of two normal samples of n values the spreads differ by 1 / sqrt(n), one sigma.
            near = pytest.approx(wanted.std().item(), rel=6 / wanted.numel() ** 0.5)
            assert state[key].std().item() == near, key


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [None, "nvme"])
def test_states_that_a_constructor_makes(place, dtype, tmp_path):
    """Adagrad's, of which a meta model's have no values."""
    config = zero.Config(offload_optimizer=place, nvme_path=place and tmp_path, offload_numel=700)
    ordinary = make(nn.Linear, WIDTH, 70, dtype=dtype)

    def program(comm, meta):
        if meta:
            with torch.device("meta"):
                model = nn.Linear(WIDTH, 70, dtype=dtype)
        else:
            model = copy.deepcopy(ordinary)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)

        def init(module):
            for name, parameter in module.named_parameters():
                parameter.copy_(getattr(ordinary, name))

        zero.shard(model, optimizer, config, comm=comm, init=init if meta else None)
        for _ in range(2):
            model(torch.ones(2, WIDTH, dtype=dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero.full_state_dict(model)

    found, wanted = on("2", program, True), on("2", program, False)
    assert_same_bits(found[0], wanted[0])


def test_a_state_without_values_is_named():
    def program(comm):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        optimizer = adamw(model.parameters())
        optimizer.state[model.weight]["exp_avg"] = torch.empty_like(model.weight)
        with pytest.raises(ValueError, match="state exp_avg of weight is on the meta device"):
            zero.shard(model, optimizer, zero.Config(), comm=comm)

    on("1", program)


def test_what_nobody_initialises_is_named():
    def program(comm):
        with torch.device("meta"):
            bare, model = Bare(), Model(False)
        with pytest.raises(ValueError, match=r"^bias of the meta model .* Bare needs reset_param"):
            sharded(bare, zero.Config(), comm, None)
        with pytest.raises(ValueError, match=r"^scaled\.table of the meta model"):
            sharded(model, zero.Config(), comm, "empty")
        with pytest.raises(ValueError, match="this one has memory"):
            sharded(nn.Linear(2, 2), zero.Config(), comm, gpt_init)

    on("1", program)
