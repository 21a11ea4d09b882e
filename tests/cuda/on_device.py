"""The kernels of a device as kernels of host memory, so that one table of cases serves both.

Memory is copied to the device and back, to an address with the same remainder by 16, between
margins that must not change. For an address sanitizer there are none: allocations end with memory.
"""

import numpy as np

from zcomm.codecs import cuda
from zcomm.device import from_host, on_host

FILL = 0xA5


class OnDevice:
    """What ``zcomm.codecs.reference`` is, by way of a device.

    ``margin``: a multiple of 16. ``aligned``: all memory of the device starts at one.
    """

    def __init__(self, device, margin=48, aligned=False):
        self.device = device
        self.margin = margin
        self.aligned = aligned

    def encode(self, codec, x, dtype, starts, lengths, out, seed=0):
        with self._writing(out) as target:
            cuda.encode(codec, self.put(x), dtype, starts, lengths, target, seed)

    def decode(self, codec, wire, starts, lengths, out, dtype):
        with self._writing(out) as target:
            cuda.decode(codec, self.put(wire), starts, lengths, target, dtype)

    def decode_reduce(self, codec, wires, starts, lengths, out, dtype, divisor):
        wires = list(map(self.put, wires))
        with self._writing(out) as target:
            cuda.decode_reduce(codec, wires, starts, lengths, target, dtype, divisor)

    def decode_reduce_encode(self, codec_in, wires, codec_out, lengths, out, seed=0):
        wires = list(map(self.put, wires))
        with self._writing(out) as target:
            cuda.decode_reduce_encode(codec_in, wires, codec_out, lengths, target, seed)

    def put(self, memory):
        """Copy host memory to the device."""
        return self._framed(memory)[1]

    def _framed(self, memory):
        offset = 0 if self.aligned else memory.ctypes.data % 16
        whole = self.device.empty(self.margin + offset + memory.nbytes + self.margin)
        assert whole.pointer % 16 == 0
        content = np.full(whole.size, FILL, np.uint8)
        inside = slice(self.margin + offset, self.margin + offset + memory.nbytes)
        content[inside] = memory
        from_host(whole, content)
        return whole, whole[inside]

    def _writing(self, out):
        return _Writing(self, out)


class _Writing:
    """Lends memory of the device for the time of a call, then copies what was written."""

    def __init__(self, owner, out):
        self.out = out
        self.whole, self.inside = owner._framed(out)

    def __enter__(self):
        return self.inside

    def __exit__(self, kind, error, trace):
        if error is None:
            before = self.inside.pointer - self.whole.pointer
            content = on_host(self.whole)
            after = before + self.inside.size
            self.out[:] = content[before:after]
            assert (content[:before] == FILL).all()
            assert (content[after:] == FILL).all()
