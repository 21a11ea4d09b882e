"""zero: ZeRO stages 0-3 with ZeRO++, for any torch model and any elementwise torch optimizer.

``zero.shard`` is the entry point; the loop around it stays ordinary torch.
"""

from zero.checkpoint.export import export
from zero.checkpoint.load import Loaded, load
from zero.checkpoint.save import Saving, save
from zero.config import Config
from zero.contexts import (
    clip_grad_norm_,
    full_grads,
    full_params,
    loss_scale,
    no_sync,
    num_skipped_steps,
    scale_loss,
    step_was_skipped,
)
from zero.exact import full_state_dict
from zero.memory import ModelStates, expected_nbytes, model_state_nbytes
from zero.parameters import ShardedParameterError
from zero.pretrained import load_pretrained
from zero.scaling import DynamicLossScale
from zero.shard import shard
from zero.tiled import TiledLinear, merge_tiles

__all__ = [
    "Config",
    "DynamicLossScale",
    "Loaded",
    "ModelStates",
    "Saving",
    "ShardedParameterError",
    "TiledLinear",
    "clip_grad_norm_",
    "expected_nbytes",
    "export",
    "full_grads",
    "full_params",
    "full_state_dict",
    "load",
    "load_pretrained",
    "merge_tiles",
    "model_state_nbytes",
    "loss_scale",
    "no_sync",
    "num_skipped_steps",
    "save",
    "scale_loss",
    "shard",
    "step_was_skipped",
]
