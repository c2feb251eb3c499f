"""Block sizes: what Triton kernels of any kind need to know of numbers."""

from __future__ import annotations


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()
