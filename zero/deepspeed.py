"""DeepSpeed's configuration, as far as it says how to shard: ``zero.Config.from_deepspeed``.

Every key is one of: honoured; without meaning here, whatever it says (buckets, logging); accepted
at the value that means what zero does; or refused by its full name, also when it is unknown. A
section with ``"enabled": false`` or null, and the value "auto", count as absent.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zero.scaling import DynamicLossScale

logger = logging.getLogger("zcomm")

PLACES = ("cpu", "nvme")

# Speed, memory and reports of an engine that is not here.
_WITHOUT_MEANING = frozenset(
    [
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "activation_checkpointing",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "comms_logger",
        "autotuning",
        "checkpoint",
        "aio",
        "disable_allgather",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
        *(
            f"zero_optimization.{name}"
            for name in (
                "allgather_partitions",
                "allgather_bucket_size",
                "overlap_comm",
                "reduce_scatter",
                "reduce_bucket_size",
                "use_multi_rank_bucket_allreduce",
                "contiguous_gradients",
                "round_robin_gradients",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "ignore_unused_parameters",
                "legacy_stage1",
                "memory_efficient_linear",
                "sub_group_size",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_module_granularity_threshold",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
                "stage3_use_all_reduce_for_fetch_params",
                "zero_quantized_nontrainable_weights",
                "cpu_offload_use_pin_memory",
                *(
                    f"{section}.{name}"
                    for section in ("offload_optimizer", "offload_param")
                    for name in (
                        "buffer_count",
                        "buffer_size",
                        "fast_init",
                        "max_in_cpu",
                        "pin_memory",
                        "pipeline",
                        "pipeline_read",
                        "pipeline_write",
                    )
                ),
            )
        ),
    ]
)

# Keys that mean what zero does anyway at these values, and what to do about others.
_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "gradient_clipping": (
        (0, None),
        "call zero.clip_grad_norm_(optimizer, {value}) before step()",
    ),
    "gradient_accumulation_steps": ((1,), "call optimizer.step() after every {value} backwards"),
    "prescale_gradients": ((False,), "gradients are averaged in float32"),
    "gradient_predivide_factor": ((1,), "gradients are averaged in float32"),
    "sparse_gradients": ((False,), "gradients travel dense"),
    "seq_parallel_communication_data_type": (("fp32", None), "there is no sequence parallelism"),
    "data_types.grad_accum_dtype": (("fp32", None), "gradients accumulate in float32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are float32"),
    "bf16.bf16_optimizer_states": ((False,), "states are float32"),
    "fp16.auto_cast": ((False,), "cast the inputs, or use torch.autocast in the loop"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are float32"),
    "zero_optimization.offload_optimizer.device": ((), "possible are cpu, nvme and none"),
    "zero_optimization.offload_param.device": ((), "possible are cpu, nvme and none"),
    "zero_optimization.offload_optimizer.ratio": ((1,), "all states are offloaded, or none"),
    "zero_optimization.offload_optimizer.nvme_path": ((), "there is one nvme_path for both"),
    "zero_optimization.offload_param.nvme_path": ((), "there is one nvme_path for both"),
    "zero_optimization.mics_shard_size": ((-1, 0, None), "use a secondary partition"),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "use a secondary partition"),
    "zero_optimization.override_module_apply": ((True,), "modules are left as they are"),
}
_HINTS = {
    "optimizer": "make the torch optimizer yourself, and pass it to zero.shard",
    "scheduler": "make the torch scheduler yourself, and call its step()",
    "fp16.enabled": "true or false here: 'auto' is for a program that fills it in",
    "amp": "use torch.autocast in the loop",
}
_SECTIONS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "fp16",
    "data_types",
)
_FP16_DEFAULTS = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
_DYNAMIC = frozenset(_FP16_DEFAULTS) - {"loss_scale"}


def fields_of(
    source: str | os.PathLike[str] | Mapping[str, Any], handled: Collection[str]
) -> dict[str, Any]:
    """Return the fields of ``zero.Config`` that a DeepSpeed configuration sets.

    Raises:
        ValueError: naming every key that cannot be honoured, and a file that is not JSON.
    """
    given = _read(source)
    found = {
        name: value
        for name, value in _flatten(given, "")
        # What loss scaling is wanted cannot be left open: gradients would silently become zero.
        if value != "auto" or name == "fp16.enabled"
    }
    fields = {"stage": found.pop("zero_optimization.stage", 0)}
    _take_quantisation(found, fields)
    _take_offload(found, fields)
    _take_dtypes(found, fields)
    present = {*given, *found}
    ignored = _take_loss_scale(found, fields, handled)
    ignored += [name for name in found if name in _WITHOUT_MEANING]
    refused = [
        f"{name} = {_short(value)}{_hint(name, value)}"
        for name, value in found.items()
        if name not in ignored and name not in handled and not _means_the_same(name, value)
    ]
    unused = sorted(set(handled) - present)
    if unused:
        raise ValueError(f"handled: {', '.join(unused)}: no such key in the configuration")
    if refused:
        raise ValueError(
            "zero cannot honour these keys of the DeepSpeed configuration: "
            + "; ".join(refused)
            + ". Remove them, or name those that your program takes care of in handled="
        )
    if ignored:
        logger.warning(
            "keys of the DeepSpeed configuration without meaning here: %s", ", ".join(ignored)
        )
    return fields


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} holds a {type(given).__name__}: expected a JSON object")
    return given


def _flatten(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield full names and values; sections that are not looked into are values."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value.get("enabled") is False:
            continue
        if value is None and name in _SECTIONS:
            continue
        if isinstance(value, Mapping) and name in _SECTIONS:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _take_quantisation(found: dict[str, Any], fields: dict[str, Any]) -> None:
    if found.pop("zero_optimization.zero_quantized_weights", False):
        fields["weights"] = "int8"
    if found.pop("zero_optimization.zero_quantized_gradients", False):
        fields["grads"] = ("int4", "int4")
    group = found.pop("zero_optimization.zero_hpz_partition_size", 1)
    if group > 1:
        fields["secondary"] = group


def _take_offload(found: dict[str, Any], fields: dict[str, Any]) -> None:
    """Read where states go; what is to be refused stays in ``found``."""
    paths = {}
    for section, legacy, field in (
        ("offload_optimizer", "cpu_offload", "offload_optimizer"),
        ("offload_param", "cpu_offload_params", "offload_params"),
    ):
        prefix = f"zero_optimization.{section}."
        place = "cpu" if found.pop(f"zero_optimization.{legacy}", False) else None
        place = found.get(f"{prefix}device") or place
        if place in ("none", None):
            for name in [name for name in found if name.startswith(prefix)]:
                del found[name]
        elif place in PLACES:
            found.pop(f"{prefix}device", None)
            fields[field] = place
            path = found.pop(f"{prefix}nvme_path", None)
            if place == "nvme" and path is not None:
                paths[f"{prefix}nvme_path"] = path
    if len(set(paths.values())) > 1:
        found.update(paths)
    elif paths:
        fields["nvme_path"] = next(iter(paths.values()))


def _take_dtypes(found: dict[str, Any], fields: dict[str, Any]) -> None:
    if found.pop("bf16.enabled", False):
        logger.info("bf16: zero takes the dtype of the parameters; make the model with bfloat16()")
    if found.get("communication_data_type") == "fp32":
        del found["communication_data_type"]
        fields["reduce_dtype"] = torch.float32


def _take_loss_scale(
    found: dict[str, Any], fields: dict[str, Any], handled: Collection[str]
) -> list[str]:
    """Read the section fp16; return names that its other values leave without meaning.

    A ``loss_scale`` above 0 is static; else the scale moves as DeepSpeed's: it doubles, and halves
    at the skipped step that ``hysteresis`` counts to. What is to be refused stays in ``found``.
    """
    section = {name: found.pop(name) for name in list(found) if name.startswith("fp16.")}
    enabled = section.pop("fp16.enabled", False)
    if "fp16" in handled:
        return []
    if enabled is not True:
        if enabled:
            found["fp16.enabled"] = enabled
        return list(section)
    given = list(section)
    scaling = {key: section.pop(f"fp16.{key}", value) for key, value in _FP16_DEFAULTS.items()}
    found.update(section)
    wrong = [key for key, value in scaling.items() if not _possible(key, value)]
    found.update({f"fp16.{key}": scaling[key] for key in wrong})
    if wrong:
        return []
    logger.warning(
        "fp16: make the model with half(), and scale the loss:"
        " zero.scale_loss(optimizer, loss).backward()"
    )
    if scaling["loss_scale"]:
        fields["loss_scale"] = float(scaling["loss_scale"])
        return [name for name in given if name.removeprefix("fp16.") in _DYNAMIC]
    fields["loss_scale"] = DynamicLossScale(
        initial=2.0 ** scaling["initial_scale_power"],
        interval=scaling["loss_scale_window"],
        minimum=float(scaling["min_loss_scale"]),
        hysteresis=scaling["hysteresis"],
        consecutive_hysteresis=scaling["consecutive_hysteresis"],
    )
    return []


def _possible(key: str, value: object) -> bool:
    """Tell whether a key of the section fp16 has a value that DeepSpeed gives a sense to."""
    if key == "consecutive_hysteresis":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if key in ("initial_scale_power", "loss_scale_window", "hysteresis"):
        least, most = (-126, 127) if key == "initial_scale_power" else (1, math.inf)
        return isinstance(value, int) and least <= value <= most
    return value >= 0 if key == "loss_scale" else value > 0


def _means_the_same(name: str, value: object) -> bool:
    return name in _ONLY and value in _ONLY[name][0]


def _hint(name: str, value: object) -> str:
    hint = _ONLY[name][1] if name in _ONLY else _HINTS.get(name)
    return "" if hint is None else f" ({hint.format(value=value)})"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
