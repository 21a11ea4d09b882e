"""The two 8-bit floating point formats: E4M3 and E5M2.

OCP 8-bit Floating Point Specification (OFP8), revision 1.0. Encoding rounds half to even, keeps
the sign of every zero and saturates: NaN and infinity have no codes here. Decoding knows all 256
codes. Do not assume that E4M3 has an infinity: it has one NaN for each sign instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .floats import Floats, magnitudes


@dataclass(frozen=True)
class Float8:
    """``mantissa`` bits, the exponent of the smallest normal number, and the largest one."""

    mantissa: int
    smallest_exponent: int
    largest: float

    def encode(self, values: Floats) -> npt.NDArray[np.uint8]:
        """Return the codes of values, none of them NaN."""
        size = np.minimum(magnitudes(values).view(np.float32), np.float32(self.largest))
        exponent = (size.view(np.uint32) >> 23).astype(np.int32) - 127
        exponent = np.maximum(exponent, self.smallest_exponent)
        quantum = ((exponent - self.mantissa + 127) << 23).view(np.float32)
        # A mantissa that rounds up to the next power of two carries into the exponent.
        steps = np.rint(size / quantum).astype(np.int32)
        codes = ((exponent - self.smallest_exponent) << self.mantissa) + steps
        sign = (values.view(np.uint32) >> 24) & np.uint32(0x80)
        return (codes.astype(np.uint32) | sign).astype(np.uint8)

    def decode(self, codes: npt.NDArray[np.uint8]) -> Floats:
        """Return the values of codes, special ones included."""
        values: Floats = self._values()[codes]
        return values

    def _values(self) -> Floats:
        """Return the value of each of the 256 codes."""
        codes = np.arange(128)
        exponent, fraction = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        steps = np.where(exponent > 0, fraction + (1 << self.mantissa), fraction)
        power = np.maximum(exponent, 1) - 1 + self.smallest_exponent - self.mantissa
        values = np.ldexp(steps, power).astype(np.float32)
        beyond = values > self.largest
        infinity = beyond & (fraction == 0)  # E5M2 only: E4M3 has numbers in that row
        values[beyond] = np.nan
        values[infinity] = np.inf
        return np.concatenate([values, -values])


E4M3 = Float8(mantissa=3, smallest_exponent=-6, largest=448.0)
E5M2 = Float8(mantissa=2, smallest_exponent=-14, largest=57344.0)
