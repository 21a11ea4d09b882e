"""What the user chooses: the stage of ZeRO, its codecs, the secondary partition.

A field exists only for what works. ``Config`` is checked where it is made, except for what needs
the ranks: the number of entries of ``grads`` and the size of the secondary group.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zcomm.codecs import Codec
from zcomm.seeds import check_seed
from zero.deepspeed import fields_of
from zero.scaling import DynamicLossScale, check_scale

CodecText = str | Codec | None
DtypeChoice = torch.dtype | Literal["param"]
Place = Literal["cpu", "nvme"]
PLACES: tuple[Place, ...] = ("cpu", "nvme")


@dataclass(frozen=True)
class Config:
    """How a model is sharded.

    Attributes:
        stage: 0 keeps everything on every rank, 1 shards optimizer states, 2 gradients too, 3
            parameters too.
        weights: codec of the parameters on the wire, stages 1-3: ``"int8"``, a ``Codec``, or None.
        grads: codec of the gradients on the wire, any stage: one for all levels of the topology, or
            one per level, innermost first. Two on a topology with another number of levels: the
            first holds inside the node, the second between nodes.
        secondary: stage 3: keep a second copy of the parameters, sharded over a group of ranks, and
            gather from it (hpZ). ``"node"``, or the number of ranks of a group, which divides all.
            ``"persistent"``: nodes, whose copies survive the step; owners send how far parameters
            moved, once a step, with the codec of ``weights``, by default int4.
        secondary_codec: None holds decoded values in the secondary; the codec of ``weights`` holds
            the received codes, and the gathers inside the group send them.
        grad_dtype: ``"param"`` rounds the float32 mean once to the dtype of the parameter;
            ``torch.float32`` does not.
        reduce_dtype: ``"param"`` rounds partial sums of bfloat16 between levels; ``torch.float32``
            does not.
        min_numel: units of fewer elements travel without codecs.
        units: ``"auto"`` gathers each child of an outermost ModuleList or Sequential together;
            otherwise the names of the modules to gather together. The rest is one more unit.
        prefetch: operations under way while a unit computes: in stage 3 so many units are gathered
            before they are asked for, in the order of the last step; in all stages gradients are
            reduced behind the backward. 0 does one thing after the other. No bit depends on it.
        accumulate: ``"rank"`` reduces gradients to their owners after each backward; ``"node"``
            only inside the node, and between nodes once a step: 4 bytes a parameter, shared by the
            ranks of a node, wait for it.
        grads_feedback: add what the codec between nodes lost of gradients to the next ones: a byte
            a parameter, shared by the ranks of a node.
        loss_scale: a number, ``"dynamic"`` or a :class:`DynamicLossScale`: what
            :func:`zero.scale_loss` multiplies a loss by, and the step divides gradients by.
        offload_optimizer: stages 1-3: where masters and the optimizer's states are between steps,
            which run block by block. ``"cpu"``: in host memory; ``"nvme"``: in files.
        offload_params: stage 3: where the shard of the parameters is between gathers, likewise.
        nvme_path: a folder on the disk of ``"nvme"``; it may differ from rank to rank.
        offload_numel: elements of a block on disk, of which a step has three in memory; in memory
            blocks are four times as large. No bit depends on it, nor on any offload.
        max_skipped_steps: consecutive steps with non-finite gradients before step() raises.
        seed: base seed of codecs with ``rounding=stochastic``. Draws depend on it, the unit, the
            shard and the version of the parameters, so every gather of a version gives one result.

    Raises:
        ValueError: a value that is not possible, or a combination that would not be honoured.
        CodecError: a text that is not a codec (a ValueError too).
    """

    stage: int = 3
    weights: CodecText = None
    grads: CodecText | Sequence[CodecText] = None
    secondary: int | Literal["node", "persistent"] | None = None
    secondary_codec: CodecText = None
    grad_dtype: DtypeChoice = "param"
    reduce_dtype: DtypeChoice = "param"
    min_numel: int = 65536
    units: Literal["auto"] | Sequence[str] = "auto"
    prefetch: int = 1
    accumulate: Literal["rank", "node"] = "rank"
    grads_feedback: bool = False
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None
    offload_optimizer: Place | None = None
    offload_params: Place | None = None
    nvme_path: str | os.PathLike[str] | None = None
    offload_numel: int = 1 << 21
    max_skipped_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage {self.stage!r}: possible are 0, 1, 2 and 3")
        for name in ("grad_dtype", "reduce_dtype"):
            if getattr(self, name) not in ("param", torch.float32):
                raise ValueError(
                    f"{name} {getattr(self, name)!r}: possible are 'param' and torch.float32"
                )
        for name, least in (
            ("min_numel", 0),
            ("prefetch", 0),
            ("max_skipped_steps", 0),
            ("offload_numel", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} {value!r}: expected an integer")
            if value < least:
                raise ValueError(f"{name} {value}: expected {least} or more")
        check_seed(self.seed)
        if self.loss_scale == "dynamic":
            self._freeze("loss_scale", DynamicLossScale())
        elif isinstance(self.loss_scale, str):
            raise ValueError(
                f"loss_scale {self.loss_scale!r}: possible are 'dynamic', a number and None"
            )
        elif not isinstance(self.loss_scale, DynamicLossScale | None):
            check_scale("loss_scale", self.loss_scale)
        self._freeze("weights", _single("weights", self.weights))
        if self.secondary == "persistent" and self.weights is None:
            self._freeze("weights", Codec.parse("int4"))
        self._freeze("grads", _per_level(self.grads))
        self._freeze("secondary_codec", _single("secondary_codec", self.secondary_codec))
        if isinstance(self.units, str):
            if self.units != "auto":
                raise ValueError(
                    f"units {self.units!r}: possible are 'auto' and a sequence of module names"
                )
        else:
            self._freeze("units", tuple(self.units))
        self._check_combinations()

    def _freeze(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        if self.weights is not None and self.stage == 0:
            raise ValueError(
                f"weights {self.weights}: stage 0 sends no parameters; possible in stages 1-3"
            )
        if self.secondary is not None:
            if self.stage != 3:
                raise ValueError(
                    f"secondary {self.secondary!r}: stage {self.stage} does not shard"
                    " parameters; possible in stage 3"
                )
            is_number = isinstance(self.secondary, int) and not isinstance(self.secondary, bool)
            if self.secondary not in ("node", "persistent") and not (
                is_number and int(self.secondary) > 0
            ):
                raise ValueError(
                    f"secondary {self.secondary!r}: possible are 'node', 'persistent', a number of"
                    " ranks and None"
                )
        if self.secondary_codec is not None:
            if self.secondary == "persistent":
                raise ValueError(
                    f"secondary_codec {self.secondary_codec}: differences are added to what the"
                    " persistent secondary holds, which has to be values"
                )
            if self.secondary is None:
                raise ValueError(f"secondary_codec {self.secondary_codec}: there is no secondary")
            if self.secondary_codec != self.weights:
                raise ValueError(
                    f"secondary_codec {self.secondary_codec}: the secondary holds what arrives,"
                    f" encoded once by its owner with weights {self.weights}; use the same codec"
                )

        self._check_offload()
        if self.accumulate not in ("rank", "node"):
            raise ValueError(f"accumulate {self.accumulate!r}: possible are 'rank' and 'node'")
        if self.grads_feedback:
            outer = self.grads[-1] if isinstance(self.grads, tuple) else self.grads
            if not isinstance(outer, Codec) or outer.rounding == "stochastic":
                raise ValueError(
                    f"grads_feedback with grads {self.grads}: between nodes there has to be a codec"
                    " that rounds to nearest"
                )

    def _check_offload(self) -> None:
        for name, lowest, what in (
            ("offload_optimizer", 1, "keeps the states of all parameters on every rank"),
            ("offload_params", 3, "keeps whole parameters on every rank"),
        ):
            place = getattr(self, name)
            if place not in (None, *PLACES):
                raise ValueError(f"{name} {place!r}: possible are 'cpu', 'nvme' and None")
            if place is not None and self.stage < lowest:
                possible = "1-3" if lowest == 1 else "3"
                raise ValueError(
                    f"{name} {place!r}: stage {self.stage} {what}; possible in stage {possible}"
                )
        if self.on_disk and not self.nvme_path:
            raise ValueError(
                f"nvme_path {self.nvme_path!r}: offload to 'nvme' needs nvme_path, a folder on that"
                " disk"
            )
        if self.nvme_path is not None:
            if not self.on_disk:
                raise ValueError(
                    f"nvme_path {self.nvme_path}: offload_optimizer={self.offload_optimizer!r} and"
                    f" offload_params={self.offload_params!r} put nothing there"
                )
            self._freeze("nvme_path", os.fspath(self.nvme_path))

    @property
    def on_disk(self) -> bool:
        """Whether anything is offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_params)

    @property
    def weights_codec(self) -> Codec | None:
        """The codec of the parameters."""
        return None if self.weights is None else Codec.parse(self.weights)

    @property
    def loss_scaling(self) -> float | DynamicLossScale | None:
        """How losses are scaled."""
        assert not isinstance(self.loss_scale, str)
        return self.loss_scale

    @property
    def piece_numel(self) -> int:
        """Elements of the grid on which parameters are cut: 256 and all blocks divide it."""
        grads = self.grads if isinstance(self.grads, tuple) else (self.grads,)
        codecs = [codec for codec in (self.weights, *grads) if isinstance(codec, Codec)]
        # Blocks and 256 are powers of two, so the largest is their least common multiple.
        return max([256, *(codec.block for codec in codecs)])

    def grads_codecs(self, num_levels: int) -> tuple[Codec | None, ...]:
        """Return the codec of the gradients at each level of a topology, innermost first.

        Raises:
            ValueError: when the number of entries is neither 1, 2 nor ``num_levels``.
        """
        if self.grads is None or isinstance(self.grads, str | Codec):
            return (_single("grads", self.grads),) * num_levels
        codecs = tuple(_single("grads", codec) for codec in self.grads)
        if len(codecs) == num_levels:
            return codecs
        if len(codecs) == 2:
            return (codecs[0],) * (num_levels - 1) + (codecs[1],)
        raise ValueError(
            f"grads has {len(codecs)} codecs, the topology has {num_levels} levels: give one for"
            " all, one per level, or two (inside the node, between nodes)"
        )

    @classmethod
    def zeropp(cls) -> Config:
        """Return the configuration of the ZeRO++ paper (arXiv 2306.10209).

        Stage 3 with int8 weights (qwZ), a secondary partition in the node (hpZ) and int4 gradients
        on every hop (qgZ).
        """
        return cls(stage=3, weights="int8", secondary="node", grads=("int4", "int4"))

    @classmethod
    def safe4(cls) -> Config:
        """Return the recommended configuration: as few bytes between nodes as :meth:`zeropp`.

        Gradients are int8 inside the node; between nodes int4 after a Hadamard transform, with
        what is lost fed back.
        """
        return cls(
            stage=3,
            weights="int8",
            secondary="node",
            grads=("int8:block=256", "int4:block=128,transform=hadamard"),
            grads_feedback=True,
        )

    @classmethod
    def from_deepspeed(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], *, handled: Collection[str] = ()
    ) -> Config:
        """Return what a DeepSpeed configuration says about sharding.

        Stage, ``zero_quantized_weights``, ``zero_quantized_gradients``, ``fp16`` (loss scaling),
        ``zero_hpz_partition_size``, ``communication_data_type`` and where ``offload_optimizer`` and
        ``offload_param`` go are honoured. Keys without meaning here are named in one warning.

        Args:
            source: the path of the JSON file, or what it holds.
            handled: full names of keys that your own program takes care of, as in
                ``("optimizer", "gradient_clipping")``.

        Raises:
            ValueError: naming every key that cannot be honoured.
        """
        return cls(**fields_of(source, handled))


def _single(name: str, value: object) -> Codec | None:
    if value is None:
        return None
    if not isinstance(value, str | Codec):
        raise ValueError(f"{name} {value!r}: parameters are encoded once, give one codec")
    codec = Codec.parse(value)
    return None if codec.format == "none" else codec


def _per_level(value: object) -> Codec | tuple[Codec | None, ...] | None:
    if value is None or isinstance(value, str | Codec):
        return _single("grads", value)
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"grads {value!r}: give a codec, or one per level of the topology")
    return tuple(_single("grads", entry) for entry in value)
