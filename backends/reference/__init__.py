"""The reference backend: every canonical operation in plain torch. It *is* the semantics.

Readable first; on the CPU each result has the bits of the eager spelling that its attributes
describe. No function synchronises with the device. Arguments are taken as valid: shapes and
dtypes are checked in :mod:`fusion.ops`.
"""

from __future__ import annotations

from fusion.backends.reference.attention import paged_attention
from fusion.backends.reference.cache import kv_cache_write
from fusion.backends.reference.kernels import KERNELS
from fusion.backends.reference.norm import rms_norm
from fusion.backends.reference.prologue import (
    qk_norm_rope,
    qk_norm_rope_kv_cache,
    rope_kv_cache,
    rope_qk,
)
from fusion.backends.reference.rotary import rope, token_tables

__all__ = [
    "KERNELS",
    "kv_cache_write",
    "paged_attention",
    "qk_norm_rope",
    "qk_norm_rope_kv_cache",
    "rms_norm",
    "rope",
    "rope_kv_cache",
    "rope_qk",
    "token_tables",
]
