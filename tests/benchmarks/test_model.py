"""The model against a second one, written from torch's own modules in float64."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.training.model import GPT, Shape, linear

SMALL = Shape(context=12, width=32, depth=2, heads=4)


def reference_loss(model, shape, inputs, targets):
    """Compute the loss in float64 with modules that share no code with the model."""
    weights = {name: value.double() for name, value in model.named_parameters()}
    x = weights["token"][inputs] + weights["position"][: inputs.shape[1]]
    mask = torch.full((inputs.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
    for index in range(shape.depth):
        own = {
            name.removeprefix(f"blocks.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{index}.")
        }
        y = _normalised(x, own["norm_attention.weight"], own["norm_attention.bias"])
        q, k, v = (y @ own["query_key_value.weight"].T).chunk(3, dim=-1)
        heads = []
        for part in range(shape.heads):
            size = shape.width // shape.heads
            span = slice(part * size, (part + 1) * size)
            scores = q[..., span] @ k[..., span].mT / size**0.5 + mask
            heads.append(scores.softmax(-1) @ v[..., span])
        x = x + torch.cat(heads, -1) @ own["attention_out.weight"].T
        y = _normalised(x, own["norm_perceptron.weight"], own["norm_perceptron.bias"])
        hidden = nn.GELU()(y @ own["perceptron_in.weight"].T)
        x = x + hidden @ own["perceptron_out.weight"].T
    y = _normalised(x, weights["norm.weight"], weights["norm.bias"])
    logits = y @ weights["token"].T
    picked = logits.log_softmax(-1).gather(-1, targets[..., None])
    return -picked.mean()


def _normalised(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def tokens(shape, num_sequences=3):
    random = torch.Generator().manual_seed(3)
    drawn = torch.randint(256, (num_sequences, shape.context + 1), generator=random)
    return drawn[:, :-1], drawn[:, 1:]


def test_the_model_of_the_demo_has_about_three_million_parameters():
    blocks = 4 * (12 * 256**2 + 4 * 256)
    rest = 256 * 256 + 128 * 256 + 2 * 256
    assert sum(parameter.numel() for parameter in GPT(Shape()).parameters()) == blocks + rest
    assert 3.0e6 < blocks + rest < 3.5e6


def test_loss_and_gradients_are_those_of_the_reference():
    model = GPT(SMALL, seed=1).double()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    inputs, targets = tokens(SMALL)
    loss = model(inputs, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    exact = reference_loss(model, SMALL, inputs, targets)
    exact.backward()
    # Both are float64, with some hundred operations of error 2^-53 between a weight and the loss.
    assert abs(loss.item() - exact.item()) < 1000 * 2**-53 * exact.item()
    for name, parameter in model.named_parameters():
        distance = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert distance < 1000 * 2**-53, name


def test_a_product_with_a_narrow_weight_is_that_with_the_widened_one():
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=random).bfloat16().requires_grad_()
    x = torch.randn(2, 3, 7, generator=random, dtype=torch.float64).requires_grad_()
    wide = weight.detach().double().requires_grad_()
    grad = torch.randn(2, 3, 5, generator=random, dtype=torch.float64)
    linear(x, weight).backward(grad)
    found = x.grad
    x.grad = None
    (x @ wide.T).backward(grad)
    assert torch.allclose(found, x.grad, rtol=1e-14, atol=0)
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, wide.grad.bfloat16())


def test_the_product_passes_torchs_check_of_gradients():
    random = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
        for shape in [(2, 3, 4), (5, 4)]
    )
    assert torch.autograd.gradcheck(linear, (x, weight))


def test_no_widened_weight_lives_from_forward_to_backward():
    model = GPT(SMALL).bfloat16()
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2 and p is not model.token}
    shapes |= {shape[::-1] for shape in shapes}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(*tokens(SMALL))
    weights = [t for t in kept if tuple(t.shape) in shapes]
    assert len(weights) == 4 * SMALL.depth
    assert all(t.dtype == torch.bfloat16 for t in weights)


def test_what_comes_later_does_not_change_what_came_before():
    model = GPT(SMALL, seed=1)
    inputs, targets = tokens(SMALL)
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    shorter = slice(None), slice(0, SMALL.context - 1)
    # The loss of all but the last position, as a sum: the mean of each times its count.
    before = model(inputs[shorter], targets[shorter])
    both = [model(x, targets) * SMALL.context for x in (inputs, changed)]
    assert not torch.equal(*both)
    assert torch.allclose(before, model(changed[shorter], targets[shorter]), rtol=0, atol=0)


def test_a_seed_gives_the_same_weights_each_time():
    states = [GPT(SMALL, seed).state_dict() for seed in (0, 0, 1)]
    for name in ("token", "position", "blocks.1.perceptron_out.weight"):
        assert torch.equal(states[0][name], states[1][name])
        assert not torch.equal(states[0][name], states[2][name])


def test_arithmetic_is_narrow_where_the_shape_says_so():
    dtypes = {}
    inputs, targets = tokens(SMALL)
    for widen in (True, False):
        shape = replace(SMALL, widen=widen)
        model = GPT(shape, seed=1).bfloat16()
        seen = dtypes[widen] = set()
        model.blocks[1].register_forward_hook(lambda *call, seen=seen: seen.add(call[-1].dtype))
        loss = model(inputs, targets)
        assert loss.dtype == torch.float32
        exact = reference_loss(model, shape, inputs, targets).item()
        # Logits of initial weights are below 1, and an activation has a relative error of 2^-9.
        assert abs(loss.item() - exact) < (2**-7 if not widen else 1e-6) * exact
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}


def test_a_meta_model_is_drawn_with_the_same_spread():
    ordinary = GPT(SMALL)
    with torch.device("meta"):
        model = GPT(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for (name, drawn), wanted in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert drawn.shape == wanted.shape
        if wanted.unique().numel() == 1:
            assert torch.equal(drawn, wanted), name
        else:
            # Of two normal samples of n values the spreads differ by 1 / sqrt(n), one sigma.
            near = pytest.approx(wanted.std().item(), rel=6 / wanted.numel() ** 0.5)
            assert drawn.std().item() == near, name
