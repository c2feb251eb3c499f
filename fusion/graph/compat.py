"""Differences between torch versions and the private names that fusion leans on, in one place.

Run with torch 2.13.0; the fallbacks for 2.11, 2.12 and 2.15 follow their published sources.
Importing ``torch._inductor`` costs a second and imports Triton where it is installed, so every
import of it stands inside a function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


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


class PassChain:
    """Several custom graph passes in a row, as one.

    Inductor holds one pass in each hook (a list of them only in recent versions), so whoever
    installs a pass must keep what is there. ``uuid`` is None, which turns caching off, where a
    member has none: its effect cannot be told apart.
    """

    def __init__(self, *passes: Any) -> None:
        self.passes = passes

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Run every member on the graph."""
        from torch._inductor import custom_graph_pass as inductor

        aware = getattr(inductor, "CustomInferenceAwareGraphPass", ())
        for member in self.passes:
            if is_inference is not None and isinstance(member, aware):
                member(graph, is_inference)
            else:
                member(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> PassChain:
        """Itself: Inductor copies its whole config to compare it."""
        return self

    def uuid(self) -> object | None:
        """The members' keys together, or None."""
        keys = [m.uuid() if is_graph_pass(m) else None for m in self.passes]
        return None if any(k is None for k in keys) else tuple(keys)


def chain(existing: Any, new: Any) -> Any:
    """``new`` after everything that is installed already (None, a pass, or several).

    Members of ``new``'s own class that are there already are replaced by it, since two fusion
    pipelines in one hook would report every site twice.
    """
    members: list[Any] = []

    def add(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, PassChain):
            add(value.passes)
        elif value is not None and not isinstance(value, type(new)):
            members.append(value)

    add(existing)
    if not members:
        return new
    register_graph_pass(PassChain)
    return PassChain(*members, new)


def compile_context() -> Any | None:
    """Dynamo's current ``CompileContext`` (it carries ``compile_id`` and ``attempt``), or None."""
    from torch._guards import CompileContext

    return CompileContext.try_get()


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


def inductor_cache_dir() -> str:
    """The folder of Inductor's compile cache (created where it is missing)."""
    from torch._inductor.runtime import runtime_utils

    return str(vars(runtime_utils)["cache_dir"]())


def inductor_patches(mode: str | None, patches: dict[str, Any]) -> dict[str, Any]:
    """What ``torch.compile(mode=..., options=...)`` would patch into Inductor's config.

    Uses the class that ``torch.compile`` itself uses, so that names, types and modes are
    checked and meant as there. Raises ``RuntimeError`` as it does.
    """
    make: Any = vars(torch)["_TorchCompileInductorWrapper"]
    return dict(make(mode, patches, None).config)


def inductor_options() -> list[str]:
    """The names of all options of Inductor's configuration."""
    from torch._inductor import list_options

    return list(list_options())


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's decomposition table."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one list of arguments, which it empties (AOTAutograd's convention)."""

    def call(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a JSON text into torch's structured trace (``TORCH_TRACE``); free when it is off."""
    import torch._logging as torch_logging

    vars(torch_logging)["trace_structured"](
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
    )


def quiet_dynamo() -> AbstractContextManager[Any]:
    """Dynamo settings for looking at a model: no recompile limit, errors are not swallowed."""
    from torch._dynamo import config

    names = vars(config).get("_config", {})
    wanted: dict[str, Any] = {"suppress_errors": False}
    for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if name in names:
            wanted[name] = 1 << 16
    patched: AbstractContextManager[Any] = config.patch(wanted)
    return patched


def compile_functional(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    inference: Callable[..., Any],
    forward: Callable[..., Any],
    decompositions: dict[Any, Any] | None,
) -> Callable[..., Any]:
    """Run AOTAutograd on a Dynamo graph and return what it makes of the compilers' results.

    ``inference`` is given the functional graph of a computation without gradients, ``forward``
    that of one with gradients; each returns a boxed function. Backward graphs run as they are.
    """
    from torch._dynamo.backends.common import aot_autograd

    def backward(fx: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return boxed(fx.forward)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )(gm, list(inputs))
    return compiled


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Run on real CPU tensors although a compiler may be tracing around us.

    Compilers keep fake and proxy modes active while they call passes; under them a comparison of
    bits would compare nothing. Run on torch 2.11 and 2.13 (``torch._subclasses.fake_tensor``,
    ``torch.utils._python_dispatch``).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        yield
