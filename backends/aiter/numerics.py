"""Where AITER's kernels round, compared with the graph: what ``numerics`` decides about.

The pts operation computes the norm in float32, multiplies by the weight, rounds once to the input
dtype, rotates in float32 and rounds again. A graph may round at more points
(``numerics="tolerant"`` accepts that and the report names them, ``"exact"`` refuses with
``gate.rounding``) or at fewer (refused in both: the fused result would be worse than the graph's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fusion.backends.aiter.gate import is_fp8
from fusion.kernel import KernelCall
from fusion.requires import Check, Outcome, outcome

_LOW = (torch.float16, torch.bfloat16)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def prologue_differences(call: KernelCall) -> list[str]:
    """Where the graph of a norm+rope+write rounds otherwise than the pts operation."""
    dtype = call.need("query").dtype
    get = call.attributes.get
    rope_dtype, low = get("rope_dtype"), dtype in _LOW
    weighted = [n for n in ("q_weight", "k_weight") if call.tensor(n) is not None]
    found = []
    if low and get("norm_cast") == "late" and weighted:
        found.append(
            f"norm: one rounding to {_name(dtype)} after the weight; "
            "the graph rounds before the weight and after it"
        )
    if get("inv_rms") != "rsqrt":
        found.append(f"norm: the inverse root is rsqrt; the graph spells it {get('inv_rms')}")
    if rope_dtype in _LOW:
        found.append(
            f"rope: in float32, one rounding; the graph rounds products and sums to "
            f"{_name(rope_dtype)}"
        )
    for name in ("cos", "sin"):
        table = call.tensor(name)
        if table is not None and table.dtype != dtype and rope_dtype != dtype and low:
            found.append(f"{name}: rounded from {_name(table.dtype)} to {_name(dtype)}")
    if is_fp8(call):
        scaled = [n for n in ("k_scale", "v_scale") if call.tensor(n) is not None]
        if scaled:
            found.append(
                "cache: newer releases multiply by 1 / scale where the graph divides by the scale"
            )
    return found


def prologue_losses(call: KernelCall) -> list[str]:
    """Where the pts operation rounds and the graph does not."""
    dtype = call.need("query").dtype
    get = call.attributes.get
    found: list[str] = []
    if dtype not in _LOW:
        return found
    if get("norm_cast") == "none":
        found.append(f"the graph keeps the normed value in float32, AITER rounds to {_name(dtype)}")
    weights = [n for n in ("q_weight", "k_weight") if call.tensor(n) is not None]
    if get("weight_mode") == "1+w" and get("norm_cast") != "late" and weights:
        found.append(f"the graph adds 1 to the weight in float32, AITER wants it in {_name(dtype)}")
    return found


def attention_differences(call: KernelCall) -> list[str]:
    """Where AITER's attention kernels round otherwise than a float32 softmax does."""
    found = [f"softmax weights are rounded to {_name(call.need('query').dtype)} before V"]
    if not call.attributes.get("causal"):
        found.append("the scaled query is rounded to its dtype before K")
    if call.attributes.get("causal") and (call.attributes.get("window_left") or -1) >= 0:
        found.append(
            "rows whose first tile is all masked take 0 for their maximum: logits below -87 in the "
            "whole window underflow"
        )
    return found


@dataclass(frozen=True)
class Rounding:
    """``numerics="exact"`` accepts no difference; ``"tolerant"`` accepts and reports them."""

    differences: Callable[[KernelCall], list[str]] = field(compare=False)

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        found = self.differences(call)
        exact = call.config.numerics == "exact"
        have = "; ".join(found) or "the graph's own rounding points"
        need = "the graph's own rounding points" if exact else "anything not worse than the graph"
        return outcome(
            "rounding", not (exact and found), have, need, f"numerics={call.config.numerics}",
            "gate.rounding", "AITER rounds at other points than the graph",
        )  # fmt: skip


def no_losses() -> Check:
    """The kernel does not round where the graph keeps float32."""

    def look(call: KernelCall) -> tuple[bool, object, str]:
        found = prologue_losses(call)
        return not found, "; ".join(found) or "none", "; ".join(found)

    return Check("rounding that the graph does not have", "none", "gate.argument", look)
