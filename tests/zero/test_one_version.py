"""hpZ: whoever reads a version of the weights, and whenever, reads the same bits."""

import hashlib

import pytest
import torch

import zero
from tests.marks import one_in
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import on, shard, whole
from tests.zero.test_codecs import round_trip

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def digest(tensors):
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def watch(block, seen):
    """Note (where, hash of the weights) in forward, recomputation and backward of a block."""

    def look(where):
        seen.append((where, digest(block.parameters())))

    block.up.register_forward_hook(
        lambda *_: look("recompute" if torch._C._current_graph_task_id() != -1 else "forward")
    )
    block.up.register_full_backward_hook(lambda *_: look("backward"))


@pytest.mark.parametrize(
    ("weights", "codes", "secondary", "dtype"),
    one_in(3, [None, "int8"], [None, "int8"], [1, "node", 4, "persistent"], DTYPES),
)
def test_hashes(weights, codes, secondary, dtype):
    if codes is not None and (weights is None or secondary == "persistent"):
        pytest.skip("codes need a codec, and differences are not held as codes")
    config = zero.Config(
        secondary=secondary, weights=weights, secondary_codec=codes, min_numel=0, loss_scale=256.0
    )

    def program(comm):
        model = make(Tower, dtype=dtype)
        for block in model.blocks:
            block.recompute = "plain"
        sharded, optimizer = shard(comm, model, config)
        versions = []
        for step in range(3):
            seen = {k: [] for k in range(2)}
            for k, block in enumerate(sharded.blocks):
                watch(block, seen[k])
            for part in range(2):
                loss = loss_of(sharded, tokens(comm.rank, 2 * step + part))
                zero.scale_loss(optimizer, loss).backward()
            with torch.no_grad():
                sharded(tokens(0, 0))
            held = whole(sharded)
            for block in sharded.blocks:
                block.up._forward_hooks.clear()
                block.up._backward_hooks.clear()
            names = [n for n in held if n.startswith("blocks.")]
            wanted = {k: digest(held[n] for n in names if n[7] == str(k)) for k in range(2)}
            for k in range(2):
                places = [where for where, _ in seen[k]]
                assert places == ["forward", "recompute", "backward"] * 2 + ["forward"]
                assert {found for _, found in seen[k]} == {wanted[k]}
            versions.append(wanted)
            optimizer.step()
            optimizer.zero_grad()
        assert zero.num_skipped_steps(optimizer) == 0
        return versions

    found = on("2x2", program)
    for versions in found:
        assert versions == found[0]
        assert len({version[0] for version in versions}) == 3
    if secondary != "persistent":
        first = make(Tower, dtype=dtype).blocks
        decoded = [p if weights is None else round_trip(weights, p) for p in first[0].parameters()]
        assert found[0][0][0] == digest(decoded)
