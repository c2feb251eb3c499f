"""Take a model's graphs without compiling and without running a kernel.

Dynamo traces the model under an active ``FakeTensorMode``; each graph goes through AOTAutograd
with Inductor's decompositions, which gives the functional ATen graph that Inductor's passes
would see (before Inductor's own clean-up). The model's parameters may be real, fake or on the
meta device; whatever runs between two graphs runs on fake tensors. Run with torch 2.13.0.

What is traced is a copy of the function with its own code object, because Dynamo keeps compiled
code, recompile counts and automatic dynamic sizes by code object: looking at a model must not
change how it is compiled later. The same holds for Python state: modules and arguments are
copied (tensors are shared, not copied).
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode

from fusion.graph import compat
from fusion.reason import Reason

log = logging.getLogger("fusion")
_serial = itertools.count()


@dataclass
class Captured:
    """One graph: a functional ATen graph with fake-tensor metadata.

    ``training`` tells that gradients are computed; ``reasons`` what went wrong afterwards (the
    model could not be followed further).
    """

    id: str
    gm: GraphModule
    training: bool = False
    reasons: list[Reason] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        """The graph itself."""
        return self.gm.graph


class CaptureError(RuntimeError):
    """The model could not be traced at all; the message says where."""


def capture(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = None,
    device: str | None = None,
    decompose: bool = True,
) -> list[Captured]:
    """The graphs of ``model(*args, **kwargs)``, in order; several where there are graph breaks.

    Tensors on the meta device are taken to live on the CPU. ``device="cuda"`` relabels the
    finished graphs, so that gates of another machine see tensors of its own kind.
    Raises :class:`CaptureError` where tracing failed before the first graph.
    """
    if isinstance(model, torch.export.ExportedProgram):
        captured = from_export(model, decompose=decompose)
        if device is not None:
            relabel(captured.gm, device)
        return [captured]
    found: list[Captured] = []
    table = compat.inductor_decompositions() if decompose else None
    kwargs = dict(kwargs or {})
    with _fake_mode((model, args, kwargs)), compat.quiet_dynamo():
        model, args, kwargs = _isolated((model, tuple(args), kwargs))
        backend = functools.partial(_take, found=found, table=table)
        function = torch.compile(own_code(plain_function(model)), backend=backend, dynamic=dynamic)
        try:
            function(*args, **kwargs)
        except Exception as error:
            log.debug("capture stopped", exc_info=True)
            text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            if not found:
                raise CaptureError(f"the model could not be traced: {text}") from error
            first = text.splitlines()[0]
            found[-1].reasons.append(
                Reason("match.capture", f"the model could not be followed further: {first}")
            )
    if device is not None:
        for captured in found:
            relabel(captured.gm, device)
    return found


def _take(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    found: list[Captured],
    table: dict[Any, Any] | None,
) -> Callable[..., Any]:
    """The Dynamo backend: keep the functional graph, answer with fake results."""
    results = _results(gm)
    taken: list[tuple[GraphModule, bool]] = []

    def keep(fx: GraphModule, _: Sequence[Any], *, inference: bool) -> Callable[..., Any]:
        fx.graph.eliminate_dead_code()
        taken.append((fx, inference))
        return compat.boxed(fx.forward)

    compat.compile_functional(
        gm,
        inputs,
        inference=functools.partial(keep, inference=True),
        forward=functools.partial(keep, inference=False),
        decompositions=table,
    )
    number = next(_serial)
    for index, (fx, inference) in enumerate(taken):
        name = f"explain/{number}" + (f".{index}" if index else "")
        found.append(Captured(name, fx, not inference))
    return results


def _results(gm: GraphModule) -> Callable[..., Any]:
    """A function that gives fake results of the shapes that Dynamo recorded."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    values = [getattr(n, "meta", {}).get("example_value") for n in output.args[0]]
    if all(type(v) is not torch.nn.Parameter and isinstance(v, torch.Tensor) for v in values):
        specs = [
            (_ints(v.shape), _ints(v.stride()), v.dtype, v.device) for v in values if v is not None
        ]
        if all(None not in (*shape, *stride) for shape, stride, _, _ in specs):

            def empty(*_: Any) -> tuple[torch.Tensor, ...]:
                return tuple(
                    torch.empty_strided(shape, stride, dtype=dtype, device=device)
                    for shape, stride, dtype, device in specs
                )

            return empty
    run: Callable[..., Any] = copy.deepcopy(gm).forward
    return run


def _ints(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, int) else getattr(s.node, "hint", None) for s in sizes)


@contextmanager
def _fake_mode(values: Any) -> Iterator[Any]:
    """A fake mode that takes real tensors too: the one of the caller's fake tensors, or a new."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
    for module in _modules(values):
        tensors += [*module.parameters(), *module.buffers()]
    theirs = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    mode = theirs or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode:
            yield mode
    finally:
        mode.allow_non_fake_inputs = before


class _Tensors(TorchFunctionMode):
    """Within it, deep copies share tensors; those on the meta device become fake CPU tensors.

    Tensors that share a meta storage still share one afterwards (K and V of a packed cache).
    """

    def __init__(self) -> None:
        super().__init__()
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self.convert(tensor))
        return func(*args, **(kwargs or {}))

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or its fake double where it is on the meta device."""
        from torch._subclasses.fake_tensor import FakeTensor

        if tensor.device.type != "meta" or isinstance(tensor, FakeTensor):
            return tensor
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        if count == tensor.numel() and tensor.storage_offset() == 0:
            made = torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        else:
            key = (storage._cdata, tensor.dtype)
            if key not in self._bases:
                self._kept.append(tensor)  # the key is an address: keep its owner alive
                self._bases[key] = torch.empty(count, dtype=tensor.dtype, device="cpu")
            made = self._bases[key].as_strided(
                tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _isolated(values: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Copies of everything but the tensors; what cannot be copied is used as it is."""
    tensors = _Tensors()
    memo: dict[int, Any] = {}
    for module in _modules(values):
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = tensors.convert(tensor)
    try:
        with tensors:
            made: tuple[Any, Any, Any] = copy.deepcopy(values, memo)
        return made
    except Exception:
        log.debug("the model cannot be copied; capturing it in place", exc_info=True)
        return values


def _modules(values: Any) -> Iterator[torch.nn.Module]:
    for value in torch.utils._pytree.tree_leaves(values):
        owner = getattr(value, "__self__", value)
        if isinstance(owner, torch.nn.Module):
            yield owner


def relabel(gm: GraphModule, device: str) -> None:
    """Say of every tensor of a captured graph that it lives on ``device`` (``cpu``, ``cuda``).

    Only metadata and ``device`` arguments change; the graph is for looking at, not for running.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    there = torch.device(device) if device == "cpu" else torch.device(device, 0)
    for graph in nested_graphs(gm):
        for node in graph.nodes:
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, FakeTensor):
                    tensor.fake_device = there
            if isinstance(node.kwargs.get("device"), torch.device):
                node.kwargs = {**node.kwargs, "device": there}


def nested_graphs(gm: GraphModule) -> list[Graph]:
    """The graphs of a module and of the submodules that its higher-order operators call."""
    return [m.graph for m in gm.modules() if isinstance(m, GraphModule)]


def plain_function(model: Any) -> Callable[..., Any]:
    """The Python function behind a module, a compiled function or a bound method."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.Module):
        hooked = model._forward_hooks or model._forward_pre_hooks
        function = model.__call__ if hooked else model.forward
    else:
        function = model
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    if not callable(function):
        raise CaptureError(f"{type(model).__name__} is not something that can be called")
    result: Callable[..., Any] = function
    return result


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own (see the module's docstring)."""
    raw = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    if not isinstance(raw, types.FunctionType):

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        raw, owner = call, None
    name = f"{raw.__code__.co_name}_explained_{next(_serial)}"
    made = types.FunctionType(
        raw.__code__.replace(co_name=name),
        raw.__globals__,
        raw.__name__,
        raw.__defaults__,
        raw.__closure__,
    )
    made.__kwdefaults__ = raw.__kwdefaults__
    made.__dict__.update(raw.__dict__)
    made.__module__ = raw.__module__
    return made if owner is None else types.MethodType(made, owner)


def from_export(program: Any, *, decompose: bool = True) -> Captured:
    """The graph of an exported program in the form that AOTAutograd gives.

    Exported programs return the new values of mutated buffers and inputs; here they become
    ``copy_`` at the end of the graph, as in every other capture.
    """
    if decompose:
        program = program.run_decompositions(compat.inductor_decompositions())
    else:
        program = program.run_decompositions({})
    graph, signature = Graph(), program.graph_signature
    graph.output(graph.graph_copy(program.graph_module.graph, {}))
    gm = GraphModule(program.graph_module, graph)
    graph = gm.graph
    inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    targets: dict[str, str] = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    placeholder = {buffer: name for name, buffer in targets.items()}
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    kept: list[Any] = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        kind = spec.kind.name
        if kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION"):
            name = spec.target if kind == "USER_INPUT_MUTATION" else placeholder[spec.target]
            with graph.inserting_before(output):
                node = graph.call_function(torch.ops.aten.copy_.default, (inputs[name], value))
            node.meta["val"] = inputs[name].meta.get("val")
        else:
            kept.append(value)
    output.args = (tuple(kept),)
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()
    return Captured(f"export/{next(_serial)}", gm)
