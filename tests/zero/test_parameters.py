"""Parameters keep what they are, refuse to be read while sharded, and take edits."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, gradients, on, shard, whole

STAGES = pytest.mark.parametrize("stage", range(4))


@STAGES
def test_both_objects_and_all_parameters_keep_their_identity(stage):
    def program(comm):
        model = make(Tower, tied=True)
        model.blocks[0].requires_grad_(False)
        before = [(n, id(p), p.shape, p.dtype, p.requires_grad) for n, p in facts(model)]
        optimizer = adamw(model.parameters())
        group = optimizer.param_groups[0]
        found = zero.shard(model, optimizer, zero.Config(stage=stage), comm=comm)
        assert found[0] is model
        assert found[1] is optimizer
        assert optimizer.param_groups[0] is group
        assert [(n, id(p), p.shape, p.dtype, p.requires_grad) for n, p in facts(model)] == before
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert model.head.weight is model.embedding.weight

    on("2", program)


def facts(model):
    return list(model.named_parameters(remove_duplicate=False))


READS = {
    "arithmetic": lambda model: model.embedding.weight + 1,
    "function": lambda model: torch.stack([model.scale, model.scale]),
    "detach": lambda model: model.scale.detach(),
    "data": lambda model: model.scale.data,
    "item": lambda model: model.scale.item(),
    "numpy": lambda model: model.scale.numpy(),
    "view": lambda model: model.embedding.weight[0],
    "linear": lambda model: nn.functional.linear(torch.ones(33), model.head.weight),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(make(Tower).state_dict()),
    "deepcopy": lambda model: copy.deepcopy(model.scale),
    "pickle": lambda model: pickle.dumps(model.scale),
    "to": lambda model: model.to(torch.float64),
    "init": lambda model: nn.init.zeros_(model.scale),
    "vector": lambda model: parameters_to_vector(model.parameters()),
    "part": lambda model: model.head(torch.ones(33)),
    "write": lambda model: model.scale.data.fill_(1),
    "float": lambda model: float(model.scale),
}


@pytest.mark.parametrize("read", READS)
def test_reading_a_sharded_parameter_names_it(read):
    def program(comm):
        model, _ = shard(comm, make(Tower), zero.Config())
        with pytest.raises((zero.ShardedParameterError, RuntimeError)) as caught:
            READS[read](model)
        return str(caught.value)

    for message in on("2", program):
        assert "zero.full_params(model)" in message
        assert any(name in message for name, _ in make(Tower).named_parameters())


def test_a_sharded_parameter_answers_for_its_shape():
    def program(comm):
        model, _ = shard(comm, make(Tower), zero.Config())
        weight = model.embedding.weight
        assert repr(weight) == "ShardedParameter(embedding.weight, (17, 33), torch.float32)"
        assert (weight.size(0), weight.ndim, weight.numel(), len(weight)) == (17, 2, 561, 17)
        assert weight.is_leaf
        assert weight.is_floating_point()
        assert weight in set(model.parameters())
        model.requires_grad_(False)
        assert not weight.requires_grad
        str(model)

    on("2", program)


def test_memory_between_gathers_shows_nan_not_zeros():
    def program(comm):
        model, _ = shard(comm, make(Tower), zero.Config())
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(model.embedding.weight.detach().isnan().all())

    on("2", program)


@STAGES
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_evaluation(stage, mode):
    model = make(Tower)
    x = tokens(0, 0)
    wanted = model(x).detach()

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        if mode == "eval":
            outputs = [sharded.eval()(x) for _ in range(2)]
        else:
            with getattr(torch, mode)():
                outputs = [sharded(x) for _ in range(2)]
        loss_of(sharded.train(), tokens(comm.rank, 0)).backward()
        assert sum(g.abs().sum() for g in gradients(sharded).values()) > 0
        return [output.detach().clone() for output in outputs]

    for outputs in on("2", program):
        assert all(torch.equal(output, wanted) for output in outputs)


def of_blocks(model, recompute):
    model.recompute = recompute


def of_insides(model, recompute):
    for block in model.blocks:
        block.recompute = recompute


@pytest.mark.parametrize("recompute", ["reentrant", "plain"])
@pytest.mark.parametrize("where", [of_blocks, of_insides])
@pytest.mark.parametrize("stage", [2, 3])
def test_recompute_changes_no_bit(stage, where, recompute):
    model = make(Tower)

    def program(comm, recompute):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        where(sharded, recompute)
        comm.traffic.reset()
        loss = loss_of(sharded, tokens(comm.rank, 0))
        loss.backward()
        sent = comm.traffic.wire_nbytes(operation="all_gather")
        return loss.item(), gradients(sharded), sent

    for found, wanted in zip(on("2", program, recompute), on("2", program, None), strict=True):
        assert found[0] == wanted[0]
        assert_same_bits(found[1], wanted[1])
        assert found[2] == wanted[2]  # recomputing gathers nothing more


class Parts(nn.Module):
    """Uses of weights that no output of a module shows; ``kind`` says which."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x):
        if self.kind == "two in one checkpoint":
            pair = lambda y: self.blocks[1](self.blocks[0](y)[0])[0]  # noqa: E731
            x = checkpoint(pair, x, use_reentrant=False)
            return self.blocks[2](x)[0].square().mean()
        if self.kind == "called twice":
            return self.blocks[1](self.blocks[0](self.blocks[0](x)[0])[0])[0].square().mean()
        if self.kind == "gradient inside":
            x.requires_grad_()
            energy = self.blocks[0](x)[0].square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return self.blocks[1](force)[0].square().mean()
        total = 0
        for block in self.blocks:
            x, hidden = block(x)
            total = total + (block.aside if self.kind == "attribute" else 0)
            total = total + (hidden.value if self.kind == "object" else 0)
            total = total + (block.weight_view.sum() if self.kind == "view" else 0)
        return x.square().mean() + total


class Hidden:
    def __init__(self, value):
        self.value = value


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.router = nn.Linear(7, 3)
        self.aside = self.weight_view = None

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        self.aside = self.router(y).square().mean()
        self.weight_view = self.inner.weight.t()
        return y, Hidden(self.router(y).logsumexp(-1).mean())


@pytest.mark.parametrize(
    "kind",
    ["attribute", "object", "view", "two in one checkpoint", "called twice", "gradient inside"],
)
def test_uses_that_no_output_shows(kind):
    model = make(Parts, kind)

    def program(comm, stage):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(comm.rank))
        sharded(x).backward()
        assert stage < 3 or zero.model_state_nbytes(sharded, _).gathered == 0
        return gradients(sharded)

    for stage in (2, 3):
        for found, wanted in zip(on("2", program, stage), on("2", program, 0), strict=True):
            found = {k: v for k, v in found.items() if v is not None}
            wanted = {k: v for k, v in wanted.items() if v is not None}
            assert_same_bits(found, wanted)


def test_autocast():
    model = make(Tower)

    def program(comm, stage):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(sharded, tokens(comm.rank, 0))
        loss.backward()
        return gradients(sharded)

    for found, wanted in zip(on("2", program, 3), on("2", program, 0), strict=True):
        assert_same_bits(found, wanted)


def test_an_exception_in_forward_leaves_nothing_whole():
    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), zero.Config())
        with pytest.raises(IndexError):
            sharded(torch.full((1, 3), 99))
        assert zero.model_state_nbytes(sharded, optimizer).gathered == 0
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        return gradients(sharded)

    def clean(comm):
        sharded, _ = shard(comm, make(Tower), zero.Config())
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        return gradients(sharded)

    assert_same_bits(on("2", program)[0], on("2", clean)[0])


@STAGES
def test_backward_after_a_step_is_refused(stage):
    """As torch does: the weights that the graph needs are gone."""

    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), zero.Config(stage=stage))
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        late = loss_of(sharded, tokens(comm.rank, 1))
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed since the forward"):
            late.backward()

    on("2", program)


def test_an_activation_changed_in_place_is_refused():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.linear(x).exp()
            z = y.sum()
            y.add_(1)
            return z

    def program(comm):
        sharded, _ = shard(comm, make(InPlace), zero.Config())
        with pytest.raises(RuntimeError, match="changed in place"):
            sharded(torch.ones(1, 3)).backward()

    on("1", program)


EDITS = {
    "copy_": lambda p: p.copy_(p.flip(0)),
    "data": lambda p: p.data.mul_(3),
    "one element": lambda p: p.view(-1)[0].fill_(7),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [*(zero.Config(stage=stage) for stage in range(4)), zero.Config(secondary="node")],
    ids=lambda c: f"{c.stage}-{c.secondary}",
)
def test_edits_inside_full_params(config, dtype, edit):
    """They are in the next forward and the next step; elements left alone keep their master."""
    model = make(Tower, dtype=dtype)

    def program(comm):
        sharded, optimizer = shard(comm, model, config)
        x = tokens(0, 0)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        masters = {t: t.clone() for g in optimizer.param_groups for t in g["params"]}
        with zero.full_params(sharded), torch.no_grad():
            EDITS[edit](sharded.embedding.weight)
            edited = copy.deepcopy(sharded.state_dict())
        with torch.no_grad():
            seen = sharded(x)
        for tensor, before in masters.items():
            kept = tensor.to(dtype) == before.to(dtype)
            assert torch.equal(tensor[kept], before[kept])
        optimizer.step()  # no gradients: nothing moves, nothing is undone
        assert_same_bits(whole(sharded), {n: edited[n] for n, _ in sharded.named_parameters()})
        alone = make(Tower, dtype=dtype)
        alone.load_state_dict(edited)
        return torch.equal(seen, alone(x).detach())

    assert on("2x2", program) == [True] * 4


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_whole_parameters_outside_full_params(stage, dtype):
    model = make(Tower, dtype=dtype)

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        with torch.no_grad():
            sharded.scale.fill_(2)
        sharded.head.bias.data.fill_(3)
        optimizer.step()
        found = whole(sharded)
        return found["scale"].item(), *found["head.bias"].unique().tolist()

    assert on("2", program) == [(2.0, 3.0)] * 2


def test_edits_inside_a_forward_of_stage_3():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(300, 3)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.linear.weight.mul_(2)
            return y

    model = make(Drifting)

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config(secondary="node"))
        with torch.no_grad():
            sharded(torch.ones(300))
            sharded(torch.ones(300))
        return whole(sharded)["linear.weight"]

    for found in on("2x2", program):
        assert torch.equal(found, 4 * model.linear.weight)


def test_loading_inside_full_params():
    other = make(Tower, seed=1)

    def program(comm):
        sharded, _ = shard(comm, make(Tower), zero.Config(secondary="node"))
        with zero.full_params(sharded):
            sharded.load_state_dict(other.state_dict())
        return sharded(tokens(0, 0)).detach()

    for found in on("2x2", program):
        assert torch.equal(found, other(tokens(0, 0)).detach())


def test_training_inside_full_params():
    def program(comm, inside):
        sharded, _ = shard(comm, make(Tower), zero.Config())
        if inside:
            with zero.full_params(sharded):
                loss_of(sharded, tokens(comm.rank, 0)).backward()
        else:
            loss_of(sharded, tokens(comm.rank, 0)).backward()
        return gradients(sharded)

    assert_same_bits(on("2", program, inside=True)[0], on("2", program, inside=False)[0])


DIFFERENCES = {
    "parameters": lambda: (make(Tower, width=34), adamw, zero.Config()),
    "optimizers or groups": lambda: (make(Tower), torch.optim.Adam, zero.Config()),
    "configurations": lambda: (make(Tower), adamw, zero.Config(stage=2)),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_differs_between_ranks_is_refused(what):
    def program(comm):
        model, make_optimizer, config = make(Tower), adamw, zero.Config()
        if comm.rank == 3:
            model, make_optimizer, config = DIFFERENCES[what]()
        with pytest.raises(ValueError, match=rf"ranks \[3\] differ from rank 0 in their {what}"):
            zero.shard(model, make_optimizer(model.parameters()), config, comm=comm)

    on("2x2", program)


def test_a_sharded_model_is_not_copied():
    def program(comm):
        sharded, _ = shard(comm, make(Tower), zero.Config(stage=0))
        with pytest.raises(TypeError, match=r"copy it before zero\.shard"):
            copy.deepcopy(sharded)

    on("1", program)


def test_what_was_not_sharded_is_refused():
    model = make(Tower)
    with (
        pytest.raises(ValueError, match=r"Tower was not returned by zero\.shard"),
        zero.no_sync(model),
    ):
        pass

    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), zero.Config())
        with pytest.raises(ValueError, match="already sharded"):
            zero.shard(sharded, optimizer, zero.Config(), comm=comm)
        with pytest.raises(ValueError, match="max_norm -1"):
            zero.clip_grad_norm_(optimizer, -1)

    on("1", program)
