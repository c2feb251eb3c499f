"""Rotary position embedding (Su et al. 2021): half-split or interleaved, partial or full."""

from __future__ import annotations

import torch
from torch import Tensor

ROPE_STYLES = ("half", "interleaved")


def token_tables(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin for each token.

    With ``positions`` (``[T]``, int32 or int64) ``cos`` and ``sin`` are tables ``[max_pos, W]``
    and row ``positions[t]`` belongs to token t. Positions are clamped into the table, so that
    padding rows, which carry anything, never read outside it. Without positions the tensors are
    per token already and come back as they are.

    Returns:
        Two tensors ``[T, W]``.
    """
    if positions is None:
        return cos, sin
    if cos.shape[0] == 0:  # an empty table: nothing can be looked up, and with T == 0 nothing is
        return cos[: positions.shape[0]], sin[: positions.shape[0]]
    cos_rows = positions.clamp(0, cos.shape[0] - 1)
    sin_rows = positions.clamp(0, sin.shape[0] - 1)
    return cos[cos_rows], sin[sin_rows]


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rope_style: str,
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rotates the first ``rotary_dim`` elements of every head, leaves the rest.

    With R = rotary_dim and p(d) the partner of element d:

    * ``"half"``: p(d) = d ± R/2; ``out[d] = x[d]*cos[d] - x[d+R/2]*sin[d]`` for d < R/2 and
      ``out[d] = x[d]*cos[d] + x[d-R/2]*sin[d]`` for R/2 <= d < R (GPT-NeoX, Llama).
    * ``"interleaved"``: p(d) = d ^ 1; ``out[2i] = x[2i]*cos[2i] - x[2i+1]*sin[2i]`` and
      ``out[2i+1] = x[2i+1]*cos[2i+1] + x[2i]*sin[2i+1]`` (GPT-J).

    Tables of width R are used entry by entry; tables of width R/2 give entry ``d mod R/2``
    (``"half"``) or ``d // 2`` (``"interleaved"``). Products and sums are each rounded in
    ``rope_dtype``; the result is then cast to ``out_dtype``. Elements d >= R are only cast.

    Args:
        x: ``[T, H, D]``.
        cos, sin: ``[T, R]`` or ``[T, R/2]``.

    Returns:
        ``[T, H, D]`` in ``out_dtype``.

    Raises:
        ValueError: ``rope_style`` is neither of the two.
    """
    if rope_style not in ROPE_STYLES:
        raise ValueError(
            f"rope_style is {rope_style!r}; it must be one of {', '.join(ROPE_STYLES)}"
        )
    if rotary_dim == 0:
        return x.to(out_dtype)
    half = rotary_dim // 2
    head = x[..., :rotary_dim].to(rope_dtype)
    c = cos.to(rope_dtype).unsqueeze(1)
    s = sin.to(rope_dtype).unsqueeze(1)
    full_c, full_s = cos.shape[-1] == rotary_dim, sin.shape[-1] == rotary_dim
    if rope_style == "half":
        x1, x2 = head[..., :half], head[..., half:]
        c1, c2 = (c[..., :half], c[..., half:]) if full_c else (c, c)
        s1, s2 = (s[..., :half], s[..., half:]) if full_s else (s, s)
    else:
        x1, x2 = head[..., ::2], head[..., 1::2]
        c1, c2 = (c[..., ::2], c[..., 1::2]) if full_c else (c, c)
        s1, s2 = (s[..., ::2], s[..., 1::2]) if full_s else (s, s)
    out1 = (x1 * c1 - x2 * s1).to(out_dtype)
    out2 = (x2 * c2 + x1 * s2).to(out_dtype)
    if rope_style == "half":
        parts = [out1, out2]
    else:
        parts = [torch.stack((out1, out2), dim=-1).flatten(-2)]
    if rotary_dim < x.shape[-1]:
        parts.append(x[..., rotary_dim:].to(out_dtype))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
