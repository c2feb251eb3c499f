"""AMD's AITER kernels behind a gate.

AITER's entry points end the process, or read memory as something it is not, when they are called
outside their contract. So every condition of the contract, the ones AITER checks and the ones it
does not, is stated as data (``Requires``) and evaluated without calling or importing AITER.
Nothing of AITER is imported unless the target is AMD, AITER is enabled and the version fits;
:mod:`fusion.backends.aiter.probe` is the only place that imports it.

See ``docs/aiter.md`` for what is called, under which conditions, and what has never been run.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.backends.aiter import attention, cache_write, prologue, rope
from fusion.kernel import Kernel

NAME = "aiter"


def kernels() -> Sequence[Kernel]:
    """Every kernel of this backend (no AITER is imported by asking)."""
    return (prologue.KERNEL, rope.KERNEL, attention.KERNEL, cache_write.KERNEL)
