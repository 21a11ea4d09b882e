"""How masters are cut into blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.offload.blocks import cut_blocks


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3000), max_size=9), st.integers(1, 4000))
def test_blocks_hold_every_element_once_in_order(numels, most):
    blocks = cut_blocks(numels, most)
    elements = [(master, place) for master, numel in enumerate(numels) for place in range(numel)]
    found = []
    for block in blocks:
        assert block.first == len(found)
        start = 0
        for piece in block.pieces:
            assert piece.start == start
            assert piece.offset % 256 == 0
            found += [(piece.master, piece.offset + i) for i in range(piece.numel)]
            start += piece.numel
        assert 0 < block.numel == start <= most + 255
    assert found == elements


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_cuts_on_the_grid_change_no_bit_of_a_fused_step(kind):
    """The fact on which blocks rely, with tails that do not fill a register."""
    numels = [1, 33, 4099]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    whole = stepped(kind, numels, [[(0, numel)] for numel in numels], options)
    blocks = cut_blocks(numels, 700)
    pieces = [
        [(p.offset, p.numel) for b in blocks for p in b.pieces if p.master == m] for m in range(3)
    ]
    assert len(pieces[2]) > 4
    assert torch.equal(
        whole.view(torch.int32), stepped(kind, numels, pieces, options).view(torch.int32)
    )


def stepped(kind, numels, pieces, options):
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(numel, generator=generator) for numel in numels]
    cut = [m[o : o + n].clone() for m, part in zip(masters, pieces, strict=True) for o, n in part]
    optimizer = getattr(torch.optim, kind)(cut, lr=0.1, weight_decay=0.3, fused=True, **options)
    for _ in range(3):
        grads = [torch.randn(numel, generator=generator) for numel in numels]
        given = [g[o : o + n] for g, part in zip(grads, pieces, strict=True) for o, n in part]
        for tensor, grad in zip(cut, given, strict=True):
            tensor.grad = grad.clone()
        optimizer.step()
    return torch.cat(cut)
