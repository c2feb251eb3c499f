"""Per-head RMSNorm, spelled the way models spell it, one rounding at a time."""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_MODES = ("w", "1+w")
NORM_CASTS = ("late", "early", "none")
INV_RMS = ("rsqrt", "pow", "div", "recip")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the norm is computed: float64 stays float64, everything else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | Tensor,
    *,
    weight_mode: str = "w",
    norm_cast: str = "late",
    inv_rms: str = "rsqrt",
) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019, ``x / rms(x) * w``).

    Args:
        x: ``[..., D]``, any floating dtype and any strides.
        weight: ``[D]`` (or anything that broadcasts against ``x``), or None for no weight.
        eps: added to the mean square; a number or a 0-dim tensor of any float dtype.
        weight_mode: ``"w"`` multiplies by the weight, ``"1+w"`` by one plus the weight (Gemma).
        norm_cast: where the result goes back to ``x.dtype``. ``"late"``: the normed value is cast
            down first, then multiplied under ordinary type promotion (Llama, Qwen3). ``"early"``:
            multiplied in the working dtype, then cast down (``F.rms_norm``, Gemma). ``"none"``:
            multiplied in the working dtype and not cast down.
        inv_rms: how one over the root is spelled: ``"rsqrt"``, ``"pow"`` (``v ** -0.5``),
            ``"div"`` (``n / sqrt(v)``) or ``"recip"`` (``n * (1 / sqrt(v))``). These differ in
            the last bit.

    Returns:
        ``[..., D]``; dtype as ``norm_cast`` says.

    Raises:
        ValueError: an attribute has a value that is not listed above.
    """
    work = working_dtype(x.dtype)
    n = x.to(work)
    if isinstance(eps, Tensor):
        eps = eps.to(work)
    variance = n.pow(2).mean(-1, keepdim=True) + eps
    if inv_rms == "rsqrt":
        n = n * torch.rsqrt(variance)
    elif inv_rms == "pow":
        n = n * torch.pow(variance, -0.5)
    elif inv_rms == "div":
        n = n / torch.sqrt(variance)
    elif inv_rms == "recip":
        n = n * (1.0 / torch.sqrt(variance))
    else:
        raise ValueError(f"inv_rms is {inv_rms!r}; it must be one of {', '.join(INV_RMS)}")
    if weight_mode not in WEIGHT_MODES:
        raise ValueError(
            f"weight_mode is {weight_mode!r}; it must be one of {', '.join(WEIGHT_MODES)}"
        )
    plus_one = weight_mode == "1+w"
    if norm_cast == "late":
        n = n.to(x.dtype)
        if weight is None:
            return n
        return (1.0 + weight if plus_one else weight) * n
    if norm_cast not in NORM_CASTS:
        raise ValueError(f"norm_cast is {norm_cast!r}; it must be one of {', '.join(NORM_CASTS)}")
    if weight is not None:
        w = weight.to(work)
        n = n * (1.0 + w if plus_one else w)
    return n.to(x.dtype) if norm_cast == "early" else n
