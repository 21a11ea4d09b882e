"""A configuration that would not be honoured is refused, in words."""

import pytest
import torch

import zero
from topology import Level, Topology, parse
from zcomm import Codec
from zero.secondary import groups_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage 4: possible are 0, 1, 2 and 3"),
        ({"stage": 0, "weights": "int8"}, "stage 0 sends no parameters"),
        ({"stage": 2, "secondary": "node"}, "stage 2 does not shard parameters"),
        ({"secondary": "rack"}, "possible are 'node', 'persistent', a number of ranks and"),
        ({"secondary": 0}, "possible are 'node', 'persistent', a number of ranks and"),
        ({"secondary": True}, "possible are 'node', 'persistent', a number of ranks and"),
        ({"secondary_codec": "int8"}, "there is no secondary"),
        ({"weights": "int8", "secondary": 2, "secondary_codec": "int4"}, "use the same codec"),
        ({"weights": ("int8", None)}, "give one codec"),
        ({"weights": "int9"}, "int9"),
        ({"grads": ()}, "one per level"),
        ({"grads": "int4:blocks=3"}, "blocks"),
        ({"grad_dtype": torch.float16}, "'param' and torch.float32"),
        ({"reduce_dtype": "float32"}, "'param' and torch.float32"),
        ({"min_numel": -1}, "min_numel -1: expected 0 or more"),
        ({"offload_numel": 2.5e6}, "offload_numel 2500000.0: expected an integer"),
        ({"prefetch": True}, "prefetch True: expected an integer"),
        ({"offload_params": "nvme", "nvme_path": ""}, "nvme_path '': .* needs nvme_path"),
        ({"prefetch": -1}, "prefetch -1: expected 0 or more"),
        ({"units": "blocks"}, "a sequence of module names"),
        ({"offload_optimizer": "disk"}, "offload_optimizer 'disk': possible are"),
        ({"offload_optimizer": "cpu", "stage": 0}, "stage 0 .* possible in stage 1-3"),
        ({"offload_params": "cpu", "stage": 2}, "stage 2 .* possible in stage 3"),
        ({"offload_params": "nvme"}, "needs nvme_path"),
        ({"offload_optimizer": "cpu", "nvme_path": "x"}, "nvme_path x: .* put nothing there"),
        ({"offload_numel": 0}, "offload_numel 0"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero.Config(**options)


def test_gradient_codecs_per_level():
    int8, int4 = Codec.parse("int8"), Codec.parse("int4")
    assert zero.Config().grads_codecs(2) == (None, None)
    assert zero.Config(grads="int8").grads_codecs(3) == (int8,) * 3
    assert zero.Config(grads=("int8", "none", "int4")).grads_codecs(3) == (int8, None, int4)
    assert zero.Config(grads=("int8", "int4")).grads_codecs(3) == (int8, int8, int4)
    assert zero.Config(grads=("int8", "int4")).grads_codecs(1) == (int4,)
    with pytest.raises(ValueError, match="3 codecs, the topology has 2 levels"):
        zero.Config(grads=("int8", None, "int4")).grads_codecs(2)


def test_the_grid_of_the_cut_holds_whole_blocks():
    assert zero.Config().piece_numel == 256
    assert zero.Config(weights="int8", grads=("int4:block=32", None)).piece_numel == 256
    assert zero.Config(weights="int8", grads=("int4:block=1024", None)).piece_numel == 1024


def test_zeropp_is_the_paper():
    int8, int4 = Codec.parse("int8"), Codec.parse("int4")
    config = zero.Config.zeropp()
    assert (config.stage, config.weights, config.secondary) == (3, int8, "node")
    assert config.grads == (int4, int4)


def test_secondary_groups():
    assert groups_of(parse("2x4", 8), "node") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_of(parse("2x4", 8), 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_of(parse("2x2x2", 8), "node") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_of(parse("4", 4), "node") == [(0, 1, 2, 3)]
    round_robin = Topology((Level("node", ((0, 2), (1, 3))), Level("network", ((0, 1, 2, 3),))))
    assert groups_of(round_robin, "node") == [(0, 2), (1, 3)]
    assert groups_of(round_robin, 1) == [(0,), (2,), (1,), (3,)]
    with pytest.raises(ValueError, match="secondary 3 does not divide 8 ranks"):
        groups_of(parse("2x4", 8), 3)
    uneven = Topology((Level("node", ((0,), (1, 2))), Level("network", ((0, 1, 2),))))
    with pytest.raises(ValueError, match="these have 1, 2 ranks"):
        groups_of(uneven, "node")
