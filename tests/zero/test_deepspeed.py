"""Configurations as they are found in DeepSpeed's and transformers' documentation."""

import json
import logging
import random

import pytest
import torch

import zero
from zero.scaling import LossScaler

# DeepSpeed's tutorial on ZeRO++ and its example of stage 3 have these sections.
ZEROPP = {
    "train_batch_size": 16,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}
# The form of transformers' documentation.
TRAINER = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_zeropp(tmp_path, caplog):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZEROPP))
    expected = zero.Config(stage=3, weights="int8", grads=("int4", "int4"), secondary=16)
    with caplog.at_level(logging.WARNING, "zcomm"):
        assert zero.Config.from_deepspeed(file) == expected
    (record,) = caplog.records
    for name in ("train_batch_size", "steps_per_print", "zero_optimization.overlap_comm"):
        assert name in record.getMessage()
    assert zero.Config.from_deepspeed(ZEROPP) == expected


def test_every_refused_key_is_named_and_can_be_handled():
    with pytest.raises(ValueError, match="cannot honour") as caught:
        zero.Config.from_deepspeed(TRAINER)
    text = str(caught.value)
    refused = ('fp16.enabled = "auto"', "optimizer = ", "scheduler = ", "gradient_clipping = 1.0")
    for name in refused:
        assert name in text
    assert "zero.clip_grad_norm_(optimizer, 1.0)" in text
    assert "bucket" not in text
    assert "fp16.loss_scale" not in text
    handled = ("fp16", "optimizer", "scheduler", "gradient_clipping")
    assert zero.Config.from_deepspeed(TRAINER, handled=handled) == zero.Config(stage=2)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, "device = .disk"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.3},
                }
            },
            "offload_optimizer.ratio = 0.3 .all states are offloaded, or none",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "possible in stage 1-3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "needs nvme_path",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/one"},
                    "offload_param": {"device": "nvme", "nvme_path": "/two"},
                }
            },
            "offload_optimizer.nvme_path = ./one. .there is one nvme_path",
        ),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size"),
        ({"zero_optimization": {"stages": 3}}, "zero_optimization.stages"),
        ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}, "zeropp_loco_param"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"communication_data_type": "bf16"}, "communication_data_type"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp"),
        ({"pipeline": {"stages": 4}}, "pipeline"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast"),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads",
        ),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis = 0"),
        ({"fp16": {"enabled": True, "loss_scale": -1.0}}, "fp16.loss_scale = -1.0"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale = 0"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window = 0"),
        ({"fp16": {"enabled": True, "loss_scale_windows": 9}}, "fp16.loss_scale_windows = 9"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1.5}}, "initial_scale_power = 1.5"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    ],
)
def test_a_key_that_cannot_be_honoured(given, name):
    with pytest.raises(ValueError, match=name):
        zero.Config.from_deepspeed(given)


def test_offload(caplog):
    both = {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
            "ratio": 1.0,
        },
        "offload_param": {"device": "cpu", "nvme_path": "/other", "max_in_cpu": 1e9},
    }
    with caplog.at_level(logging.WARNING, "zcomm"):
        found = zero.Config.from_deepspeed({"zero_optimization": both})
    assert found == zero.Config(offload_optimizer="nvme", offload_params="cpu", nvme_path="/local")
    assert "offload_optimizer.buffer_count" in caplog.text
    nothing = {"stage": 3, "offload_optimizer": None, "offload_param": None}
    found = zero.Config.from_deepspeed({"zero_optimization": nothing, "fp16": None})
    assert found == zero.Config()
    old = {"stage": 2, "cpu_offload": True}
    found = zero.Config.from_deepspeed({"zero_optimization": old})
    assert found == zero.Config(stage=2, offload_optimizer="cpu")


def test_values_that_mean_what_zero_does():
    given = {
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "prescale_gradients": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "amp": {"enabled": False},
        "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 1},
    }
    expected = zero.Config(stage=1, reduce_dtype=torch.float32)
    assert zero.Config.from_deepspeed(given) == expected
    assert zero.Config.from_deepspeed({}) == zero.Config(stage=0)


def test_mistakes(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{'stage': 3}")
    with pytest.raises(ValueError, match=r"ds\.json is not JSON"):
        zero.Config.from_deepspeed(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        zero.Config.from_deepspeed(file)
    with pytest.raises(ValueError, match="handled: optimiser: no such key"):
        zero.Config.from_deepspeed(TRAINER, handled=("optimiser",))


# The section of DeepSpeed's documentation, of Megatron-DeepSpeed's example of a GPT, and of
# transformers' with the values filled in; and what they mean.
@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {
                "enabled": True,
                "auto_cast": False,
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            },
            zero.DynamicLossScale(initial=65536.0, interval=1000, hysteresis=2),
        ),
        (
            {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 3,
                "min_loss_scale": 8,
                "initial_scale_power": 11,
                "consecutive_hysteresis": True,
            },
            zero.DynamicLossScale(
                initial=2048.0,
                interval=500,
                minimum=8.0,
                hysteresis=3,
                consecutive_hysteresis=True,
            ),
        ),
        ({"enabled": True}, zero.DynamicLossScale(interval=1000, hysteresis=2)),
        ({"enabled": True, "loss_scale": 128}, 128.0),
        ({"enabled": True, "loss_scale": 0.5, "hysteresis": 2}, 0.5),
        ({"enabled": False, "loss_scale": 128}, None),
        ({"loss_scale": 128}, None),
    ],
)
def test_loss_scaling(section, expected):
    found = zero.Config.from_deepspeed({"fp16": section, "zero_optimization": {"stage": 2}})
    assert found == zero.Config(stage=2, loss_scale=expected)


def test_what_to_do_with_float16_is_said_and_what_a_static_scale_leaves_without_meaning(caplog):
    with caplog.at_level(logging.WARNING, "zcomm"):
        zero.Config.from_deepspeed({"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 2}})
    said, ignored = (record.getMessage() for record in caplog.records)
    assert "zero.scale_loss(optimizer, loss).backward()" in said
    assert ignored.endswith("without meaning here: fp16.hysteresis")


def deepspeed_scales(overflows, *, initial, window, least, hysteresis, consecutive):
    """Return the scales before each step by the rules of DeepSpeed: it counts iterations."""
    scale, left, last, scales = initial, hysteresis, -1, []
    for iteration, overflow in enumerate(overflows):
        scales.append(scale)
        if overflow:
            last = iteration
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, least)
            continue
        if consecutive:
            left = hysteresis
        if (iteration - last) % window == 0:
            scale *= 2
            left = hysteresis
    return scales


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_moves_as_that_of_deepspeed(hysteresis, consecutive):
    section = {
        "enabled": True,
        "initial_scale_power": 4,
        "loss_scale_window": 3,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "min_loss_scale": 2,
    }
    config = zero.Config.from_deepspeed({"fp16": section})
    rules = {"initial": 16, "window": 3, "least": 2}
    rules |= {"hysteresis": hysteresis, "consecutive": consecutive}
    rng = random.Random(5)
    for part in (0.1, 0.3, 0.6):
        overflows = [rng.random() < part for _ in range(200)]
        scaler, scales = LossScaler(config.loss_scaling), []
        for number, overflow in enumerate(overflows):
            scales.append(scaler.scale)
            scaler.update(skipped=overflow)
            if number == 100:  # as a checkpoint does
                state, scaler = scaler.save_state(), LossScaler(config.loss_scaling)
                scaler.load_state(state)
        assert scales == deepspeed_scales(overflows, **rules)
