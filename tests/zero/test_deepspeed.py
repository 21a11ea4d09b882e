"""Configurations as they are found in DeepSpeed's and transformers' documentation."""

import json
import logging

import pytest
import torch

import zero

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
    for name in ("fp16 = ", "optimizer = ", "scheduler = ", "gradient_clipping = 1.0"):
        assert name in text
    assert "zero.clip_grad_norm_(optimizer, 1.0)" in text
    assert "bucket" not in text
    handled = ("fp16", "optimizer", "scheduler", "gradient_clipping")
    assert zero.Config.from_deepspeed(TRAINER, handled=handled) == zero.Config(stage=2)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size"),
        ({"zero_optimization": {"stages": 3}}, "zero_optimization.stages"),
        ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}, "zeropp_loco_param"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"communication_data_type": "bf16"}, "communication_data_type"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp"),
        ({"pipeline": {"stages": 4}}, "pipeline"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
    ],
)
def test_a_key_that_cannot_be_honoured(given, name):
    with pytest.raises(ValueError, match=name):
        zero.Config.from_deepspeed(given)


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
