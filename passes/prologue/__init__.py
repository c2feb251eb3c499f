"""What :mod:`fusion.passes.qk_norm_rope_kv_cache` is made of.

``chain`` composes facts into one prologue, ``operation`` turns a chain into a call of a
canonical operation, ``check`` proves the two equal on small inputs.
"""
