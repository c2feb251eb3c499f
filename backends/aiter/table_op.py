"""``torch.ops.fusion_aiter.rope_table``: cos and sin as the one table that AITER reads.

The pass :mod:`fusion.passes.shared_rope_table` puts one such call into a graph for all layers that
share cos and sin; their halves of the result are then used without a copy. It is an operation of
its own, and not ``cat``, so that its result is one buffer whatever a compiler fuses.
Importing this module registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.backends.aiter import operands

_library: Any = torch.library.Library("fusion_aiter", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "rope_table(Tensor cos, Tensor sin, Tensor? positions, ScalarType dtype, int slack) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def rope_table(
    cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype, slack: int
) -> Tensor:
    """Rows of cos and sin for each token, side by side.

    Args:
        cos, sin: ``[T, R/2]``, or with ``positions`` ``[T]`` tables ``[rows, R/2]`` that are looked
            up (positions are clamped into the table).
        dtype: of the result.
        slack: elements of memory behind the last row, as the interleaved kernel wants.

    Returns:
        ``[T, R]``, new memory, contiguous.
    """
    return operands.joined_rows(cos, sin, positions, dtype, slack)


def _fake(
    cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype, slack: int
) -> Tensor:
    rows = cos.shape[0] if positions is None else positions.shape[0]
    return cos.new_empty((rows, 2 * cos.shape[1]), dtype=dtype)


_library.impl("rope_table", rope_table, "CompositeExplicitAutograd")
torch.library.register_fake("fusion_aiter::rope_table", _fake, lib=_library)

OP = torch.ops.fusion_aiter.rope_table.default
