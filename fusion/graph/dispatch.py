"""Going on below autograd: the one place that touches the dispatcher's private guards.

Run on torch 2.13.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def below_autograd() -> AbstractContextManager[None]:
    """Within it, operator calls skip the Autograd keys."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard
