"""Where a graph leaves it to a kernel how it rounds, and what then may be replaced.

A rope spelled as one complex multiplication (``view_as_complex(x) * freqs``) computes
``x*cos - y*sin`` inside a kernel of torch. That kernel may round the products and the sum apart,
as the canonical operation does, or once (a fused multiply-add). On the CPU it does both: the
vectorised loop rounds apart, what does not fill a vector register is fused by the compiler. The
measurement here is of this machine's torch; no source says it.
"""

from __future__ import annotations

import functools

import torch

from fusion.config import Config
from fusion.graph import compat
from fusion.graph.elements import dtype_of
from fusion.match.facts import Rope
from fusion.passes.prologue.chain import Chain
from fusion.reason import Reason

_ROWS = 64


def unlike_rounding(chain: Chain, config: Config, device: str) -> Reason | None:
    """The refusal of a chain whose rounding points the operation would not keep.

    ``numerics="exact"`` refuses every complex product, because nothing in the graph fixes its
    rounding. Otherwise one is refused where torch's kernel is seen to round less often than the
    operation, whose result would then be the worse one. Does not depend on validation.
    """
    ropes = [
        r for r in (chain.k_rope, chain.q_rope) if r.product == "complex" and not exact_products(r)
    ]
    if not ropes:
        return None
    rope = ropes[0]
    width = rope.rotary_dim // 2
    if config.numerics == "exact":
        have = "a complex product, rounded as its kernel likes"
    elif device == "cpu" and fuses_products(width, rope.rope_dtype):
        have = f"one rounding in torch's complex product of width {width}"
    else:
        return None
    return Reason(
        "gate.rounding",
        "the rope is a complex product that need not round products and sum apart",
        have=have,
        need="products and sum rounded apart",
        node=rope.out.node.name,
    )


def exact_products(rope: Rope) -> bool:
    """Whether every product is a number of the rope's dtype: then only the sum is rounded.

    Two 16-bit floats have at most 2 * 11 significant bits, of which float32 holds 24.
    """
    nodes = (rope.x.node, rope.cos.node, rope.sin.node)
    narrow = (torch.bfloat16, torch.float16)
    return rope.rope_dtype.itemsize >= 4 and all(dtype_of(n) in narrow for n in nodes)


@functools.lru_cache(maxsize=256)
def fuses_products(width: int, real: torch.dtype) -> bool:
    """Whether torch's CPU kernel multiplies rows of ``width`` complex numbers of ``real`` parts
    with fused multiply-adds (measured on ``[64, width]`` random numbers)."""
    with compat.real_tensors():
        generator = torch.Generator().manual_seed(width)
        # One column more than is used: the rows must not be joined to one long one.
        shape = (_ROWS, width + 1, 2)
        a, b = (
            torch.view_as_complex(torch.randn(shape, generator=generator, dtype=real))[:, :width]
            for _ in "ab"
        )
        done = a * b
        apart = torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
        return not torch.equal(done, apart)
