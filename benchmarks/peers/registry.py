"""The peers by name: what each is, how its ranks are started, and whether it can run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peer:
    """One way to do the training.

    Attributes:
        name: on the command line and in the results.
        title: in the table.
        module: of this package; its ``prepare`` makes the training of a rank.
        torch: whether its ranks start as torchrun does, else by MPI.
        package: what has to be installed beside zcomm, if anything.
        exact: whether its communication loses nothing beyond rounding to bfloat16.
        ours: whether zcomm carries its messages.
    """

    name: str
    title: str
    module: str
    torch: bool = True
    package: str | None = None
    exact: bool = True
    ours: bool = False

    def absent(self) -> str | None:
        """Return why the peer cannot run here, None if it can."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            install = f"pip install --no-build-isolation {self.package}"
            return f"{self.package} is not installed: {install}"
        if self.torch and not torch.distributed.is_gloo_available():
            return f"torch {torch.__version__} is built without gloo"
        return None

    def version(self) -> str:
        """Return the version of what does the work."""
        package = self.package or ("torch" if self.torch else "zcomm")
        return f"{package} {importlib.metadata.version(package)}"


ALONE = Peer("alone", "no communication", "gloo")
FSDP2 = Peer("fsdp2", "FSDP2, gloo", "gloo")
DEEPSPEED = Peer("deepspeed", "DeepSpeed ZeRO-3, gloo", "deep_speed", package="deepspeed")
DDP = Peer("ddp", "DDP, gloo", "gloo")
ONE_LINE = Peer("fsdp2+codecs", "FSDP2, gloo + codecs", "gloo", exact=False, ours=True)
RECIPE = Peer("fsdp2+zcomm", "FSDP2, gloo + zcomm", "gloo", exact=False, ours=True)
STAGE_3 = Peer("zero3", "zero stage 3", "sharded", torch=False, ours=True)
ZEROPP = Peer("zeropp", "zero ZeRO++", "sharded", torch=False, exact=False, ours=True)

PEERS = {p.name: p for p in (FSDP2, DEEPSPEED, DDP, ONE_LINE, RECIPE, STAGE_3, ZEROPP)}
"""In the order of the table; ``ALONE`` is measured before them."""

BASELINES = (FSDP2, DEEPSPEED)
"""What speeds and bytes are compared with."""
