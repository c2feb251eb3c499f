"""Triton's CPU interpreter, made to round like the hardware.

The interpreter cuts f32 -> bf16 off instead of rounding to nearest even (seen with 3.6.0 and
3.9.0). Kernels here keep all arithmetic in f32 and round at marked places, so one right
conversion is enough to make the interpreter exact. Import this module first, in a process of its
own: TRITON_INTERPRET has to be set before triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_original = interpreter._convert_float


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    """f32 (as any array of 4-byte items) to the bits of bf16, to nearest even, NaN kept."""
    bits = np.frombuffer(x.tobytes(), dtype=np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(x.shape)


def _convert_float(input, input_dtype, output_dtype, rounding_mode):
    if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
        return _bf16_bits(input)
    return _original(input, input_dtype, output_dtype, rounding_mode)


interpreter._convert_float = _convert_float
