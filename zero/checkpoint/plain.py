"""Plain values as JSON and back, exactly: what a checkpoint holds beside tensors, without pickle.

Plain are None, booleans, integers, floats, texts, tuples, lists, sets, dictionaries, ``Counter``,
tensors of no dimension, torch dtypes, and NumPy scalars and arrays, nested as one likes. What JSON
has no form for is an object with one key that starts with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DICTIONARIES: dict[type, str] = {
    dict: "$dict",
    Counter: "$counter",
    OrderedDict: "$ordered",
    defaultdict: "$dict",
}


def encode(value: object, where: str) -> Any:
    """Return what ``json`` writes of a plain value.

    Args:
        value: the value.
        where: what it is, for the error.

    Raises:
        TypeError: for what is not plain, naming where.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if type(value) in (tuple, set, frozenset):
        entries = [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]  # type: ignore[var-annotated, arg-type]
        return {"$tuple" if type(value) is tuple else "$set": entries}
    kind = _DICTIONARIES.get(type(value))
    if kind is not None:
        assert isinstance(value, dict)
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {kind: pairs}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.dim() == 0:
        name = str(value.dtype).removeprefix("torch.")
        data = value.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [name, data.hex()]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        return {"$array": [array.dtype.str, list(array.shape), array.tobytes().hex()]}
    raise TypeError(
        f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain values"
    )


def decode(value: Any) -> Any:
    """Return the value of which :func:`encode` made this."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return _DECODERS[kind](content)
    return value


def _decode_pairs(pairs: list[Any]) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(entry)) for key, entry in pairs]


def _decode_tensor(content: list[str]) -> Tensor:
    name, data = content
    return torch.frombuffer(bytearray.fromhex(data), dtype=getattr(torch, name)).reshape(())


def _decode_array(content: list[Any]) -> np.ndarray[Any, Any]:
    kind, shape, data = content
    return np.frombuffer(bytearray.fromhex(data), kind).reshape(shape)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda content: tuple(decode(entry) for entry in content),
    "$set": lambda content: {decode(entry) for entry in content},
    "$dict": lambda content: dict(_decode_pairs(content)),
    "$counter": lambda content: Counter(dict(_decode_pairs(content))),
    "$ordered": lambda content: OrderedDict(_decode_pairs(content)),
    "$dtype": lambda content: getattr(torch, content),
    "$tensor": _decode_tensor,
    "$array": _decode_array,
}
