"""Codecs: how numbers look on the wire, and the kernels that write and read them.

A *codec* (``Codec``) is a description: a format and its options. The *kernels* are four functions,
``encode``, ``decode``, ``decode_reduce`` and ``decode_reduce_encode``, that exist as NumPy
(``reference``), as C++ (``native``) and as CUDA (``cuda``) with the same bits in every result.
docs/numerics.md says which bits. Do not assume that a codec holds state: every message is complete
in itself.
"""

from .backend import Kernels, kernels
from .codec import Codec

__all__ = ["Codec", "Kernels", "kernels"]
