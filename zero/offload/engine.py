"""Offload of one engine: what goes where, put there unit by unit, and the step in blocks.

``"cpu"`` has the states of a model on a device in host memory, where those of a model on the CPU
are anyway; the step runs in blocks, so that float32 gradients exist of one block at a time.
``"nvme"`` moves them to files of this rank under ``Config.nvme_path``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from zcomm import Communicator
from zero.config import Config
from zero.elementwise import states_to_come
from zero.offload.blocks import cut_blocks
from zero.offload.disk import STATE, VALUE, Columns, StoredShard
from zero.offload.drive import Drive, Faults
from zero.offload.opened import per_element
from zero.offload.step import BlockStep
from zero.offload.swap import Swap
from zero.publish import Publisher
from zero.unit import Buffer, Unit, hidden


class Offload:
    """The disk of an engine on one rank, and what it was asked to hold.

    Attributes:
        faults: what made the engine unusable.
        drive: the disk; None where nothing goes there.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self.faults = Faults()
        self.drive: Drive | None = None
        if config.nvme_path is not None:
            self.drive = Drive(Swap(config.nvme_path, rank=rank), self.faults)

    def adopt(self, buffer: Buffer, name: str) -> None:
        """Move the masters and the shard of a new buffer to where they belong."""
        if self.drive is None:
            return
        name = f"{name or 'root'}.{buffer.layout.dtype}"
        if self._config.offload_optimizer == "nvme" and buffer.masters:
            numels = [master.run.numel for master in buffer.masters]
            blocks = cut_blocks(numels, self._config.offload_numel)
            columns = Columns(self.drive, name, numels, blocks)
            columns.store(VALUE, [master.tensor for master in buffer.masters])
            buffer.columns = columns
            for master in buffer.masters:
                master.tensor.data = hidden(master.tensor)
        if self._config.offload_params == "nvme":
            assert buffer.shard is not None
            buffer.stored = StoredShard(self.drive, f"{name}.shard", buffer.shard)
            buffer.shard = None
            for master in buffer.masters:
                master.held = hidden(master.held)

    @property
    def transfers_nbytes(self) -> int:
        """Bytes of memory that what goes to and from the disk has now."""
        return 0 if self.drive is None else self.drive.buffers_nbytes

    def take_states(self, optimizer: Optimizer, buffers: Sequence[Buffer]) -> None:
        """Move states that an optimizer has in memory to the disk, but for those that are kept."""
        for buffer in buffers:
            if buffer.columns is not None:
                _take_states(optimizer, buffer, buffer.columns)

    def reserve_states(self, optimizer: Optimizer, units: Sequence[Unit]) -> None:
        """Take the disk space that the first step needs: a full disk is an error before training.

        Raises:
            OffloadError: the disk is full.
        """
        if self.drive is None:
            return
        coming = {
            id(tensor): states
            for group in optimizer.param_groups
            for states in [states_to_come(optimizer, group)]
            for tensor in group["params"]
        }
        nbytes = 0
        for unit in units:
            for buffer in unit.trainable:
                if buffer.columns is not None:
                    masters = [master.tensor for master in buffer.masters]
                    nbytes += buffer.columns.nbytes_to_come([coming[id(m)] for m in masters])
        if nbytes:
            # What is freed stays the file's.
            self.drive.free(self.drive.allocate("states", nbytes))

    def block_step(
        self, comm: Communicator, units: Sequence[Unit], publisher: Publisher
    ) -> BlockStep | None:
        """Return the step in blocks, where the optimizer is offloaded."""
        if self._config.offload_optimizer is None:
            return None
        return BlockStep(
            comm,
            units,
            publisher,
            self.faults,
            stage=self._config.stage,
            block_numel=self._config.offload_numel,
        )


def _take_states(optimizer: Optimizer, buffer: Buffer, columns: Columns) -> None:
    columns.forget_states()
    found: dict[str, list[Tensor | None]] = {}
    for index, master in enumerate(buffer.masters):
        states = optimizer.state.get(master.tensor, {})
        names = [key for key, v in states.items() if per_element(v, master.run.numel)]
        for key in names:
            parts = found.setdefault(STATE + key, [None] * len(buffer.masters))
            parts[index] = states.pop(key)
        columns.states[index] = tuple(STATE + key for key in names)
    for name, parts in found.items():
        columns.store(name, parts)
