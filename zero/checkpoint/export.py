"""``zero.export``: a checkpoint as one file with a plain state dict, made by one process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from zero.checkpoint.files import Reader, write_tensors
from zero.checkpoint.index import Index
from zero.checkpoint.save import FORMAT


def export(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the state dict of the model in a checkpoint to a safetensors file.

    No collective; needs no model, and memory for the whole one. The names are those of
    ``model.state_dict()``, and the dtypes those of the parameters. A parameter with several names
    (tied weights) is written under each, so that ``load_state_dict(load_file(file))`` is strict,
    and ``from_pretrained`` of transformers finds what it asks for.

    Args:
        path: of the checkpoint.
        file: to write, ``model.safetensors``; it is there when it is complete.

    Raises:
        CheckpointError: naming the file of the checkpoint, and what is wrong.
        ValueError: another suffix than ``.safetensors``.
    """
    file = Path(file)
    if file.suffix != ".safetensors":
        raise ValueError(f"{file}: export writes safetensors, give a name ending in .safetensors")
    index = Index.read(Path(path), FORMAT)
    index.verify(range(index.num_ranks))
    with Reader() as reader:
        tensors = _state_dict(index, reader)
    write_tensors(file, tensors, {"format": "pt"})


def _state_dict(index: Index, reader: Reader) -> dict[str, Tensor]:
    owners = {name: first for first, entry in index.parameters.items() for name in entry["names"]}
    tensors = {}
    for name in index.content["state_names"]:
        if name in owners:
            dtype = getattr(torch, index.parameters[owners[name]]["dtype"])
            whole = index.whole(reader, owners[name], "value")
            tensors[name] = whole.to(dtype).clone(memory_format=torch.contiguous_format)
        else:
            tensors[name] = index.buffer(reader, name, 0).clone()
    return tensors
