"""transformers on a paged KV cache: an unmodified decoder, compiled into one graph.

    model.set_attn_implementation("fusion_paged")
    cache = PagedKVCache.for_model(model, num_blocks=64, block_size=16, layout="packed")
    tokens = generate(model, prompts, 32, cache, compile={"backend": "fusion"})

Importing this package registers the attention implementation `fusion_paged`. Needs
transformers 5.17 or later.
"""

from fusion.integrations.transformers.allocator import Append, BlockAllocator, OutOfBlocks
from fusion.integrations.transformers.attention import PagedAttentionError, register, write_kv
from fusion.integrations.transformers.cache import PagedKVCache
from fusion.integrations.transformers.generation import forward_arguments, generate
from fusion.integrations.transformers.inputs import PagedInputs
from fusion.integrations.transformers.layers import KVLayer, kv_layers
from fusion.integrations.transformers.packing import PackResult, pack_qkv, unpack_qkv

__all__ = [
    "Append",
    "BlockAllocator",
    "KVLayer",
    "OutOfBlocks",
    "PackResult",
    "PagedAttentionError",
    "PagedInputs",
    "PagedKVCache",
    "forward_arguments",
    "generate",
    "kv_layers",
    "pack_qkv",
    "register",
    "unpack_qkv",
    "write_kv",
]
