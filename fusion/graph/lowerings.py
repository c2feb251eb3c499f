"""How a canonical operation becomes Inductor code: the one named place.

:func:`install` gives an operation a lowering that asks for the kernel of the call at hand. A kernel
with a lowering of its own is compiled into the graph; any other call stays a call of the
operation.

A kernel's lowering is called like its ``fn``, all arguments given, with Inductor's IR in the place
of tensors. It returns IR or, before it has touched the graph, raises :class:`Decline`.
:func:`examples` gives it the fake tensors of the call, :func:`inline` runs plain torch code as
Inductor lowerings, and :func:`put_rows` copies rows into a cache in place.

Private names of ``torch._inductor`` are used throughout. Run on torch 2.13.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Lowering = Callable[..., Any]

log = logging.getLogger(__name__)


class Decline(Exception):
    """A kernel's lowering has no native code for this call. Raised before any IR is made."""


Choose = Callable[[tuple[Any, ...], Mapping[str, Any]], "Lowering | None"]

_pending: dict[Any, tuple[Any, Choose]] = {}
_installed: set[Any] = set()
_traces: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def offer(overload: Any, opaque_overload: Any, choose: Choose) -> None:
    """Registers an operation's choice of lowering, to be installed when Inductor is there.

    Args:
        overload: the operation.
        opaque_overload: the same with all arguments positional; stands in the compiled code where
            the call stays a call.
        choose: given the fake arguments of a call, the lowering of its kernel, or None.
    """
    _pending[overload] = (opaque_overload, choose)


def install(force: bool = False) -> None:
    """Installs all offered lowerings; without ``force`` only if Inductor is imported already.

    Importing ``torch._inductor`` takes a second, and tracing happens before lowering: the fake
    implementations call this, so that whoever compiles with Inductor gets the lowerings, and
    whoever does not pays nothing.
    """
    if not force and "torch._inductor.lowering" not in sys.modules:
        return
    missing = [op for op in _pending if op not in _installed]
    if not missing:
        return
    from torch._inductor import lowering

    table: dict[Any, Any] = lowering.lowerings
    for overload in missing:
        table[overload] = _dispatcher(overload, *_pending[overload])
        _installed.add(overload)


def stamp_caches(fingerprint: str) -> None:
    """Makes Inductor's and AOTAutograd's compile caches tell states of fusion apart.

    Compiled code contains what the lowerings made, but a cache key only the operation's name.
    Inductor has a table for that, whose values are part of every key. Does nothing where Inductor's
    configuration is not imported: then nothing is being compiled.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    table = getattr(config, "unsafe_marked_cacheable_functions", None)
    if table is not None and table.get(_STAMP) != fingerprint:
        config.unsafe_marked_cacheable_functions = {**table, _STAMP: fingerprint}


_STAMP = "torch.ops.fusion"


def _dispatcher(overload: Any, opaque_overload: Any, choose: Choose) -> Lowering:
    def lower(*args: Any, **kwargs: Any) -> Any:
        fake_args, fake_kwargs = examples()
        try:
            native = choose(fake_args, fake_kwargs)
        except Exception:
            log.warning("no kernel chosen for %s; it stays a call", overload, exc_info=True)
            native = None
        full_args, full_kwargs = _complete(overload, args, kwargs)
        full_args, full_kwargs = _read_first(overload, full_args, full_kwargs)
        if native is not None:
            try:
                return native(*full_args, **{k: v for k, v in full_kwargs.items() if k != "kernel"})
            except Decline as why:
                log.info("%s stays a call: %s", overload, why)
            except Exception:
                # What was emitted so far is either unused or writes what the call writes again.
                log.warning("the lowering of %s failed; it stays a call", overload, exc_info=True)
        return _opaque(
            opaque_overload,
            (*full_args, *full_kwargs.values()),
            (*fake_args, *fake_kwargs.values()),
        )

    return lower


def _complete(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with the defaults that the graph leaves out."""
    arguments = overload._schema.arguments
    positional = list(args)
    for a in [a for a in arguments if not a.kwarg_only][len(args) :]:
        positional.append(kwargs.get(a.name, a.default_value))
    keyword = {a.name: kwargs.get(a.name, a.default_value) for a in arguments if a.kwarg_only}
    return tuple(positional), keyword


def _read_first(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with copies of those that are read from a buffer which the call writes.

    The user may have copied them himself: Inductor takes the copy out where functionalisation made
    it look needless. What is copied are rows, never a cache.
    """
    from torch._inductor import ir

    from fusion.graph.functional import mutated_names

    mutated = set(mutated_names(overload))
    names = [a.name for a in overload._schema.arguments]
    flat = list(zip(names, (*args, *kwargs.values()), strict=True))
    written: set[str] = set()
    for name, x in flat:
        if name in mutated and isinstance(x, ir.IRNode):
            written |= set(x.get_read_names())
    given = [
        _copied(x)
        if name not in mutated and isinstance(x, ir.IRNode) and written & set(x.get_read_names())
        else x
        for name, x in flat
    ]
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))


def _copied(x: Any) -> Any:
    from torch._inductor import lowering

    private: Any = lowering
    made = private.clone(x)
    made.realize()
    return made


def _opaque(overload: Any, args: Sequence[Any], fakes: Sequence[Any]) -> Any:
    """A call of the operation itself, with exactly the strides that the gate saw.

    Arguments that are written are handed over as they are: a copy of a cache would be written
    instead of the cache.
    """
    from torch._inductor import lowering

    from fusion.graph.functional import mutated_names

    private: Any = lowering  # its functions have no type annotations
    constrained, _ = private.constrain_to_fake_tensors(tuple(args), {}, tuple(fakes), {})
    mutated = set(mutated_names(overload))
    final = [
        old if a.name in mutated else new
        for a, old, new in zip(overload._schema.arguments, args, constrained, strict=True)
    ]
    return private.fallback_handler(overload, add_to_fallback_set=False)(*final)


def examples() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The fake arguments of the call that is being lowered, defaults included."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return _complete(node.target, args, kwargs)


def inline(
    function: Callable[..., Any],
    values: Sequence[Any],
    fakes: Sequence[torch.Tensor],
    key: Hashable = None,
) -> Any:
    """Runs ``function(*tensors)`` as Inductor lowerings, as if it stood in the graph.

    Args:
        function: functional torch code. Traced with ``fakes``, decomposed as Inductor does.
        values: IR of the tensors.
        fakes: the same tensors as fake tensors; sizes may be symbolic.
        key: equal keys in one graph share a trace; must cover whatever ``function`` closes over
            (shapes, strides and dtypes of ``fakes`` are added here). None = no sharing.

    Returns:
        What ``function`` returns, with IR in the place of tensors.

    Raises:
        Decline: it cannot be traced.
    """
    from torch._inductor.virtualized import V

    graph = V.graph
    shared = _traces.setdefault(graph, {})
    full_key = (key, tuple(_meta_key(f) for f in fakes))
    traced = shared.get(full_key) if key is not None else None
    if traced is None:
        traced = _trace(function, fakes)
        if key is not None:
            shared[full_key] = traced
    module, result = traced
    inputs = iter(values)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            graph.env[node] = next(inputs)
        else:
            graph.env[node] = graph.run_node(node)
    return pytree.tree_map_only(Node, lambda n: graph.env[n], result)


def _meta_key(fake: torch.Tensor) -> Hashable:
    return (
        tuple(str(s) for s in fake.shape),
        tuple(str(s) for s in fake.stride()),
        fake.dtype,
        fake.device,
    )


def _trace(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> tuple[GraphModule, Any]:
    """The function's ATen nodes without an output node, and its result as nodes of that graph.

    Without output node because Inductor would give each output a buffer with eager's strides, and
    these are not outputs of anything.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    spec: Any = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal spec
        leaves, spec = pytree.tree_flatten(function(*tensors))
        return leaves

    try:
        with torch.no_grad(), enable_python_dispatcher(), V.fake_mode:
            module = make_fx(flat, select_decomp_table(), tracing_mode="real")(*fakes)
    except Exception as error:  # whatever stands in the way, the opaque call is right
        raise Decline(f"cannot trace: {type(error).__name__}: {error}") from error
    graph = module.graph
    graph.eliminate_dead_code()
    for node in graph.nodes:
        known = node.op in ("placeholder", "output") or (
            node.op == "call_function"
            and (node.target in lowerings or not isinstance(node.target, torch._ops.OpOverload))
        )
        if not known:
            raise Decline(f"Inductor has no lowering for {node.format_node()}")
    output = graph.output_node()
    leaves = list(output.args[0])  # type: ignore[arg-type]
    graph.erase_node(output)
    return module, pytree.tree_unflatten(leaves, spec)


def once(tensor: Any, key: Hashable, make: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """``make(tensor)`` as buffers, computed once a graph for all calls with the same tensor.

    Layers share their slot mapping; what follows from it alone need not be computed in each.

    Args:
        tensor: IR; realized by this.
        key: names the computation.
        make: gives IR that depends on nothing but ``tensor``.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    tensor.realize()
    if not ir.is_storage_and_layout(tensor):  # a view without strides of its own: not comparable
        return make(tensor)
    name = tensor.get_name()
    shared = _traces.setdefault(V.graph, {})
    layout = tensor.get_layout()
    full_key = ("once", key, name, str(layout.size), str(layout.stride), str(layout.offset))
    # Written to in the graph: what was computed before may be out of date.
    if name in V.graph.mutated_buffers or full_key not in shared:
        results = make(tensor)
        for result in results:
            result.realize()
        shared[full_key] = results
    return tuple(shared[full_key])


def put_rows(view: Any, index: Sequence[Any], rows: Any, source: Any, any_valid: Any) -> None:
    """``view[index] = where(any_valid, rows[source], view[index[0]])`` in place.

    No buffer of the view's size is made, and what is already there keeps its bits.

    Args:
        view: IR of a cache, any view of a buffer.
        index: int64 IR ``[N]`` each, indices into the leading dimensions of ``view``.
        rows: IR ``[T, ...]`` in the view's dtype.
        source: int64 IR ``[N]``, 0 to T - 1.
        any_valid: bool IR, 0-dim.
    """
    from torch._inductor import lowering

    private: Any = lowering
    lowerings, aten = private.lowerings, torch.ops.aten
    dtype = view.get_dtype()
    first = [lowerings[aten.slice.Tensor](i, 0, 0, 1) for i in index]
    held = lowerings[aten.index.Tensor](view, first)
    picked = lowerings[aten._unsafe_index.Tensor](rows, [source])
    if dtype.itemsize >= 4:
        values = lowerings[aten.where.self](any_valid, picked, held)
    elif _expected(source.get_size()[0]) < _MANY_ROWS:
        # Inductor computes in float32 whatever is narrower, which changes NaNs: choose among
        # integers. That loop is not vectorised.
        integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        bits = [lowerings[aten.view.dtype](x, integer) for x in (picked, held)]
        chosen = lowerings[aten.where.self](any_valid, *bits)
        values = lowerings[aten.view.dtype](chosen, dtype)
    else:
        # Copy rows and what is held into one buffer and choose by index: vectorised copies.
        tokens = rows.get_size()[0]
        table = _one_buffer([rows, held])
        last = lowerings[aten.full.default]([], tokens, dtype=torch.int64, device=view.get_device())
        chosen = lowerings[aten.where.self](any_valid, source, last)
        values = lowerings[aten._unsafe_index.Tensor](table, [chosen])
    private.index_put_impl_(view, list(index), values, False, check=True, may_realize=False)


def _one_buffer(parts: Sequence[Any]) -> Any:
    """IR of one buffer that holds pieces of IR, one after another along their first dimension."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    node = graph.current_node
    # torch 2.11 looks up the pieces' memory format in the arguments of the node that is lowered;
    # these pieces are not its arguments.
    graph.current_node = types.SimpleNamespace(
        args=([],), kwargs={}, meta=node.meta, target=node.target, name=node.name
    )
    try:
        return ir.TensorBox(ir.ConcatKernel.create(list(parts), 0))
    finally:
        graph.current_node = node


_MANY_ROWS = 16
"""From so many rows on, a further buffer costs less than a loop that is not vectorised."""


def _expected(size: Any) -> int:
    """The size, or the example size where it is symbolic; adds no guard."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(hint(size, fallback=_MANY_ROWS))
