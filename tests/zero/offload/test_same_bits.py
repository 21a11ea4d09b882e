"""Offload changes no bit, whatever is offloaded, in every stage, with every optimizer."""

import dataclasses

import pytest
import torch

import zero
from tests.marks import slow
from tests.zero.models import Reordered, make, tokens
from tests.zero.offload.runs import OPTIMIZERS, PLACES, compare, compare_training, offloaded
from tests.zero.runs import adamw, assert_same_bits, gradients, on, shard, whole
from tests.zero.test_checkpoint import CONFIGS
from tests.zero.test_same_bits import normal

DTYPES = [torch.float32, torch.bfloat16]
STAGES = [zero.Config(stage=stage) for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("place", "stage", "topology", "dtype", "name"),
    [
        ("nvme both", 3, "2x2", torch.bfloat16, "adamw"),
        ("nvme", 1, "2", torch.float32, "momentum"),
        ("nvme", 2, "2", torch.bfloat16, "amsgrad"),
        ("cpu", 3, "2", torch.bfloat16, "adamw"),
        ("cpu nvme", 3, "1", torch.float32, "rmsprop"),
    ],
)
def test_some_of_everything(place, stage, topology, dtype, name, tmp_path):
    config, optimizer = zero.Config(stage=stage), OPTIMIZERS[name]
    compare_training(topology, config, place, tmp_path, dtype=dtype, optimizer=optimizer, clip=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topology", ["1", "2", "2x2"])
@pytest.mark.parametrize("config", STAGES, ids=["1", "2", "3"])
@pytest.mark.parametrize("place", PLACES)
def test_places_and_stages(place, config, topology, dtype, tmp_path):
    compare_training(topology, config, place, tmp_path, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1", "2", "2x2"])
@pytest.mark.parametrize(
    ("place", "config"), [("cpu", STAGES[2]), *(("nvme both", c) for c in STAGES)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, place, config, topology, tmp_path):
    compare_training(topology, config, place, tmp_path, optimizer=OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["nvme both", "nvme", "cpu nvme", "cpu"])
@pytest.mark.parametrize("name", list(CONFIGS)[4:])
def test_codecs_and_secondaries(name, place, dtype, tmp_path):
    compare_training("2x2", CONFIGS[name], place, tmp_path, dtype=dtype, micro=2, clip=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro": 4}, {"micro": 3, "no_sync": True}])
@pytest.mark.parametrize("place", ["nvme both", "cpu"])
def test_accumulation(place, options, tmp_path):
    """O1: the norm, too."""
    found = compare_training("2x2", STAGES[2], place, tmp_path, clip=0.5, **options)
    assert all(norm > 0 for outcome in found for norm in outcome.norms)


@pytest.mark.slow
@pytest.mark.parametrize("secondary", ["node", 2, 1, "persistent"])
def test_secondary_is_refreshed(secondary, tmp_path):
    """H5: the loss falls."""
    config = zero.Config(secondary=secondary, min_numel=0)
    optimizer = torch.optim.SGD
    found = compare_training(
        "2x2",
        config,
        "nvme both",
        tmp_path,
        steps=8,
        clip=10.0,
        data=lambda rank, step, batch: tokens(rank, 0, batch),
        optimizer=lambda parameters: optimizer(parameters, lr=0.5),
    )
    assert all(norm > 0 for norm in found[0].norms)
    assert found[0].losses[-1] < 0.8 * found[0].losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nvme both", "cpu"])
@pytest.mark.parametrize("stage", [1, 3])
def test_float16_with_steps_that_are_skipped(place, stage, tmp_path):
    scale = zero.DynamicLossScale(initial=2.0**24, interval=2)
    config = zero.Config(stage=stage, loss_scale=scale)
    model = make(Reordered).half()

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        skipped = []
        for step in range(16):
            loss = sharded(normal(comm.rank, step).half(), (0, 1, 2)).float().square().mean()
            zero.scale_loss(optimizer, loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(zero.step_was_skipped(optimizer))
        return skipped, zero.loss_scale(optimizer), whole(sharded)

    ((skipped, _, _), *_) = compare("2x2", program, config, place, tmp_path)
    assert 0 < sum(skipped) < len(skipped)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nvme both", "nvme", "cpu"])
@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_used_late_frozen_or_never(place, codec, stage, tmp_path):
    """Z6, Z7: states appear one after the other; what has no gradient is left alone."""
    model = make(Reordered, dtype=torch.bfloat16)
    model.parts[0].up.requires_grad_(False)

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        for step, order in enumerate([(0,), (0, 2), (0, 2), (0,)]):
            sharded(normal(comm.rank, step).bfloat16(), order).sum().backward()
            found = gradients(sharded)
            optimizer.step()
            optimizer.zero_grad()
        return found, whole(sharded)

    config = zero.Config(stage=stage, weights=codec, min_numel=0)
    compare("2x2", program, config, place, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nvme both", "nvme", "nvme params"])
@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_edits_between_steps(place, codec, stage, tmp_path):
    """In place, by ``p.data`` and inside full_params; the rest keeps its float32 master."""
    model = make(Reordered, dtype=torch.bfloat16)

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        for step in range(4):
            order = (0, 1, 2) if step % 2 else (0, 2)
            sharded(normal(comm.rank, step).bfloat16(), order).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with zero.full_params(sharded), torch.no_grad():
                    sharded.parts[1].up.weight[3:5].mul_(2)
            if step == 2 and stage < 3:
                with torch.no_grad():
                    sharded.parts[1].down.weight[2].add_(1)
                    if codec is None:
                        sharded.norm.weight.data[4:] = 3
        return whole(sharded), zero.full_state_dict(sharded)

    config = zero.Config(stage=stage, weights=codec, min_numel=0)
    compare("2x2", program, config, place, tmp_path)


@pytest.mark.parametrize("stage", [1, slow(2)])
@pytest.mark.parametrize("place", [None, "nvme", slow("cpu")])
@pytest.mark.parametrize("skipped", [False, True])
def test_edits_outlive_full_params(skipped, place, stage, tmp_path):
    """What was edited before, and has not reached the masters yet, also as a step was skipped."""
    model = make(Reordered, dtype=torch.bfloat16)
    config = zero.Config(stage=stage, weights="int8", min_numel=0)
    if place is not None:
        config = offloaded(config, place, tmp_path)

    def program(comm, *, enter):
        sharded, optimizer = shard(comm, model, config)
        for step in range(3):
            loss = sharded(normal(comm.rank, step).bfloat16(), (0, 1, 2)).float().square().mean()
            (loss * (float("inf") if skipped and step == 1 else 1)).backward()
            if enter and step == (2 if skipped else 1):
                with zero.full_params(sharded):
                    pass
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with torch.no_grad():
                    sharded.parts[1].down.weight.mul_(2)
        return whole(sharded)

    for found, wanted in zip(
        on("2", program, enter=True), on("2", program, enter=False), strict=True
    ):
        assert_same_bits(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nvme both", "cpu"])
def test_states_that_exist_before(place, tmp_path):
    model = make(Reordered)
    before = adamw(model.parameters())
    model(normal(9), (0, 2)).sum().backward()
    before.step()
    before.zero_grad()
    saved = before.state_dict()

    def program(comm, config):
        optimizer = None

        def resumed(parameters):
            nonlocal optimizer
            optimizer = adamw(parameters)
            optimizer.load_state_dict(saved)
            return optimizer

        sharded, optimizer = shard(comm, model, config, resumed)
        sharded(normal(comm.rank), (0, 1, 2)).square().mean().backward()
        optimizer.step()
        return whole(sharded)

    compare("2x2", program, zero.Config(), place, tmp_path)


@pytest.mark.slow
def test_groups_keep_their_settings(tmp_path):
    model = make(Reordered)

    def program(comm, config):
        def grouped(parameters):
            parameters = list(parameters)
            small = [p for p in parameters if p.dim() < 2]
            large = [p for p in parameters if p.dim() >= 2]
            groups = [{"params": small, "weight_decay": 0}, {"params": large, "lr": 0.1}]
            return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)

        sharded, optimizer = shard(comm, model, config, grouped)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            sharded(normal(comm.rank, step), (0, 1, 2)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return whole(sharded), [group["lr"] for group in optimizer.param_groups]

    compare("2", program, zero.Config(), "nvme both", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch(prefetch, tmp_path):
    config = dataclasses.replace(STAGES[2], prefetch=prefetch)
    compare_training("2", config, "nvme both", tmp_path)
