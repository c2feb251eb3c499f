"""What the reference backend offers to selection: every operation, on every device."""

from __future__ import annotations

from fusion.backends.reference.attention import paged_attention
from fusion.backends.reference.cache import kv_cache_write
from fusion.backends.reference.lowering import lowering
from fusion.backends.reference.prologue import (
    qk_norm_rope,
    qk_norm_rope_kv_cache,
    rope_kv_cache,
)
from fusion.kernel import Function, Kernel
from fusion.requires import KVLayout, Requires

_FUNCTIONS: dict[str, Function] = {
    "kv_cache_write": kv_cache_write,
    "paged_attention": paged_attention,
    "qk_norm_rope_kv_cache": qk_norm_rope_kv_cache,
    "rope_kv_cache": rope_kv_cache,
    "qk_norm_rope": qk_norm_rope,
}

KERNELS = tuple(
    Kernel(
        name="reference",
        op=op,
        fn=fn,
        requires=Requires((KVLayout(("NHD", "SHUFFLE")),)),
        backend="reference",
        lowering=None if op == "paged_attention" else lowering(op),
    )
    for op, fn in _FUNCTIONS.items()
)
