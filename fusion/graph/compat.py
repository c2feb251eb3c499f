"""Differences between torch versions and the private names that fusion leans on, in one place.

Run with torch 2.13.0; the fallbacks for 2.11, 2.12 and 2.15 follow their published sources.
Importing ``torch._inductor`` costs a second and imports Triton where it is installed, so every
import of it stands inside a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node


def register_graph_pass(cls: type) -> None:
    """Make a class count as an Inductor custom graph pass that is told ``is_inference``.

    Registering it as a virtual subclass keeps ``import fusion`` free of ``torch._inductor``.
    """
    from torch._inductor import custom_graph_pass as inductor

    base = getattr(inductor, "CustomInferenceAwareGraphPass", inductor.CustomGraphPass)
    base.register(cls)


def is_graph_pass(value: object) -> bool:
    """Whether Inductor can ask this pass for a cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return isinstance(value, CustomGraphPass)


def fake_mode_of(graph: Graph) -> Any | None:
    """The ``FakeTensorMode`` of a graph's metadata, or None where there is none."""
    for node in graph.nodes:
        for value in _values(node):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                return mode
    return None


def shape_env_of(graph: Graph) -> Any | None:
    """The ``ShapeEnv`` behind a graph's symbolic sizes, or None where there is none."""
    env = getattr(fake_mode_of(graph), "shape_env", None)
    if env is not None:
        return env
    for node in graph.nodes:
        for value in _values(node):
            if isinstance(value, torch.SymInt):
                return value.node.shape_env
    return None


def _values(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val", node.meta.get("example_value"))
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def looks_like_training(graph: Graph) -> bool:
    """Whether AOTAutograd's names say that the graph belongs to a joint or backward graph.

    Used only where Inductor does not say ``is_inference`` itself.
    """
    return any(
        n.op == "placeholder" and n.name.startswith(("primals_", "tangents_")) for n in graph.nodes
    )
