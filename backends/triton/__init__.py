"""Portable kernels in Triton. Importing this package does not import Triton."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.backends.triton import paged_attention, prologue_kernels
from fusion.kernel import Kernel


def kernels() -> Sequence[Kernel]:
    """Every kernel of this backend."""
    return (*prologue_kernels.KERNELS, paged_attention.KERNEL)
