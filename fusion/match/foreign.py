"""Registering operators of other libraries with the recognisers.

``register_op(torch.ops.lib.rotary, function)`` says in plain torch what a custom operator
computes; recognisers then read its calls like the plain form. See
:mod:`fusion.graph.foreign` for the rules.
"""

from fusion.graph.foreign import register_op

__all__ = ["register_op"]
