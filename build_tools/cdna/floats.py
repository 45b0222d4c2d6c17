"""Number formats: float8 in both families, float4, bfloat16, exact float32 multiply-add, denormal
flushing.

Formats: OCP "8-bit Floating Point Specification (OFP8)" for e4m3fn/e5m2 (gfx950), AMD CDNA3 ISA
section 7 for the "FNUZ" ones (gfx942): exponent bias one higher, no infinities, no negative zero,
one NaN (0x80).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TINY = np.float32(2.0**-126)  # smallest normal float32


@dataclass(frozen=True)
class Float8:
    """An 8-bit float format; `decode` and `encode` work on whole arrays."""

    name: str
    mantissa: int
    bias: int
    fnuz: bool
    infinity: bool  # has infinities (e5m2): exponent all ones is inf/NaN as in IEEE

    @functools.cached_property
    def values(self) -> Array:
        """float32 value of each of the 256 codes."""
        code = np.arange(256)
        exponent, fraction = (code & 0x7F) >> self.mantissa, code & (1 << self.mantissa) - 1
        magnitude = np.where(
            exponent > 0,
            (1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias),
            fraction * 2.0 ** (1 - self.bias - self.mantissa),
        )
        value = np.where(code & 0x80, -magnitude, magnitude)
        if self.fnuz:
            value[0x80] = np.nan
        elif self.infinity:
            top = (0x7F >> self.mantissa) == exponent
            value[top] = np.where(fraction == 0, np.copysign(np.inf, value), np.nan)[top]
        else:
            value[[0x7F, 0xFF]] = np.nan
        return value.astype(np.float32)

    @functools.cached_property
    def largest(self) -> int:
        """Code of the largest finite value."""
        return 0x7F if self.fnuz else 0x7B if self.infinity else 0x7E

    @property
    def nan(self) -> int:
        return 0x80 if self.fnuz else 0x7F

    def decode(self, code: Array) -> Array:
        """float32 of uint8 codes."""
        return self.values.take(code)

    def encode(self, value: Array, saturate: bool = False) -> Array:
        """uint32 codes of float32 values: round to nearest even, denormals included.

        Overflow gives NaN (infinity in e5m2), or the largest finite value when MODE.FP16_OVFL asks
        to saturate.
        """
        # The upper half of a float32 and whether anything lies below it decide the code: 7 fraction
        # bits hold the result's and the rounding bit, the rest is sticky.
        bits = np.ascontiguousarray(value).view(np.uint32)
        sticky = (bits & np.uint32(0xFFFF)) != 0
        return self._codes[saturate].take(bits >> np.uint32(16) << np.uint32(1) | sticky)

    @functools.cached_property
    def _codes(self) -> tuple[Array, Array]:
        key = np.arange(1 << 17, dtype=np.uint32)
        value = (key >> np.uint32(1) << np.uint32(16) | key & np.uint32(1)).view(np.float32)
        return self._round(value, False), self._round(value, True)

    def _round(self, value: Array, saturate: bool) -> Array:
        nan, infinite = np.isnan(value), np.isinf(value)
        magnitude = np.where(nan | infinite, np.float32(2.0**20), np.abs(value)).astype(np.float64)
        # Spacing of the format at this magnitude; np.rint rounds halves to even.
        exponent = np.where(
            magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - self.bias), 1 - self.bias
        )
        steps = np.rint(np.ldexp(magnitude, self.mantissa - exponent)).astype(np.int64)
        code = steps + (exponent + self.bias - 1 << self.mantissa)
        # Saturating, an infinity stays one where the format has it.
        overflow = np.where(
            infinite | np.bool_(not saturate), 0x7C if self.infinity else self.nan, self.largest
        )
        if saturate and not self.infinity:
            overflow = np.full_like(overflow, self.largest)
        code = np.where(nan, self.nan, np.where(code > self.largest, overflow, code))
        sign = np.signbit(value) * 0x80
        if self.fnuz:
            sign = np.where(code == 0, 0, sign)  # no negative zero: 0x80 is the NaN
        return (code | sign).astype(np.uint32)


E4M3 = {
    "gfx942": Float8("e4m3fnuz", 3, 8, True, False),
    "gfx950": Float8("e4m3fn", 3, 7, False, False),
}
E5M2 = {
    "gfx942": Float8("e5m2fnuz", 2, 16, True, False),
    "gfx950": Float8("e5m2", 2, 15, False, True),
}
E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # OCP MX float4


def widen_bf16(bits: Array) -> Array:
    """float32 of bfloat16 patterns (uint16)."""
    wide = np.zeros(bits.shape + (2,), np.uint16)
    wide[..., 1] = bits
    return wide.view(np.float32)[..., 0]


def round_bf16(value: Array) -> Array:
    """uint32 bfloat16 patterns of float32 values: nearest even, NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), bits >> np.uint32(16) | np.uint32(0x40), rounded)


def flush(value: Array) -> Array:
    """float32 denormals to zero of the same sign."""
    return value * (np.abs(value) >= TINY)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 fused multiply-add with one rounding; the arguments may be float64 of 24 bits.

    The product of two float32 is exact in float64, the sum is not; rounding it again to float32 is
    wrong only where the float64 sum is inexact and looks like a tie, that is, where its low 28 bits
    are zero. There the sum is first rounded to odd (Boldo & Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008).
    """
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.uint64)
    suspect = (bits & np.uint64(0x0FFFFFFF)) == 0
    if 1 in suspect.tobytes():
        back = total - product
        error = (product - (total - back)) + (c - back)
        inexact = suspect & (error != 0) & np.isfinite(total)
        toward = np.where((error > 0) == (total > 0), np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF))
        total = np.where(inexact, bits + toward, bits).view(np.float64)
    return total.astype(np.float32)
