"""FX graphs as data: written down as JSON on one machine, read back on another.

Graphs traced for a GPU cannot be made where there is none. :func:`dump` writes one down (ops,
arguments, fake-tensor metadata, provenance) as plain JSON values; :func:`load` makes a
``GraphModule`` of it whose ``meta['val']`` are fake tensors, on the recorded devices, although
no such device may be here. :func:`post_grad` takes the graphs of a compile at the hook where
the passes run. What comes out can be handed to ``PassManager.run``::

    from tests.listing import post_grad                     # on the machine with the GPU
    json.dump(post_grad(model, *args), open("graphs.json", "w"))

This file imports nothing but torch, so that it can be copied anywhere. Only metadata is kept:
the values of weights and inputs are not (small tensor constants of the graph are). Run with
torch 2.13.0 (symbolic shapes, ``fake_device``: ``torch._subclasses``, ``torch.fx.experimental``).
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.immutable_collections import immutable_dict, immutable_list

FORMAT = 1
SMALL = 64
"""Constants of the graph with at most so many elements keep their values."""
Listing = dict[str, Any]


class ListingError(ValueError):
    """A listing that cannot be read here; the message names the node or operator."""


# --- writing --------------------------------------------------------------------------------------


def dump(gm: GraphModule, *, provenance: bool = True) -> Listing:
    """A graph as JSON values; ``provenance`` keeps module paths and stack traces."""
    writer = _Writer(gm, provenance)
    nodes = [writer.node(n) for n in gm.graph.nodes]
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "symbols": writer.symbols,
        "schemas": writer.schemas,
        "constants": writer.constants,
        "modules": writer.modules,
        "traces": list(writer.traces),
        "nodes": nodes,
    }


class _Writer:
    def __init__(self, gm: GraphModule, provenance: bool) -> None:
        self.gm, self.provenance = gm, provenance
        self.symbols: dict[str, Listing] = {}
        self.schemas: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self.traces: dict[str, int] = {}
        self.storages: dict[int, int] = {}

    def node(self, n: Node) -> Listing:
        made: Listing = {"name": n.name, "op": n.op, "target": self.target(n)}
        made["args"] = [self.value(a) for a in n.args]
        if n.kwargs:
            made["kwargs"] = {k: self.value(v) for k, v in n.kwargs.items()}
        value = n.meta.get("val", n.meta.get("example_value"))
        if value is not None:
            made["val"] = self.meta(value)
        if self.provenance:
            trace = n.meta.get("stack_trace")
            if isinstance(trace, str):
                made["trace"] = self.traces.setdefault(trace, len(self.traces))
            stack = n.meta.get("nn_module_stack")
            if isinstance(stack, Mapping) and stack:
                made["modules"] = [[k, *map(_kind, v)] for k, v in stack.items()]
        return made

    def target(self, n: Node) -> Any:
        if n.op == "call_function":
            return self.operator(n.target)
        if n.op in ("get_attr", "call_module"):
            self.attribute(str(n.target))
        return str(n.target)

    def operator(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace not in ("aten", "prims"):
                self.schemas[str(target)] = str(target._schema)
            return f"op:{target}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            return f"hop:{target}"
        return f"py:{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"

    def attribute(self, path: str) -> None:
        value: Any = self.gm
        for part in path.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            self.modules[path] = dump(value, provenance=self.provenance)
        elif isinstance(value, torch.Tensor):
            made = self.meta(value)
            if value.numel() <= SMALL and type(value) in (torch.Tensor, torch.nn.Parameter):
                plain = value.detach().cpu()
                wide = plain.float() if plain.is_floating_point() else plain
                made["values"] = _plain(wide.reshape(-1).tolist())
            self.constants[path] = made
        else:
            raise ListingError(f"{path} is a {type(value).__name__}")

    def value(self, a: Any) -> Any:
        """An argument; everything but plain values becomes a dict with one telling key."""
        if isinstance(a, Node):
            return {"node": a.name}
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbolic(a)
        if a is None or isinstance(a, (bool, int, str)):
            return a
        if isinstance(a, float):
            return _plain(a)
        if isinstance(a, (tuple, list)):
            kind = "tuple" if isinstance(a, tuple) else "list"
            return {kind: [self.value(x) for x in a]}
        if isinstance(a, Mapping):
            return {"dict": {k: self.value(v) for k, v in a.items()}}
        if isinstance(a, slice):
            return {"slice": [self.value(x) for x in (a.start, a.stop, a.step)]}
        for kind in ("dtype", "layout", "memory_format"):
            if isinstance(a, getattr(torch, kind)):
                return {kind: str(a).removeprefix("torch.")}
        if isinstance(a, torch.device):
            return {"device": str(a)}
        if callable(a):
            return {"target": self.operator(a)}
        return {"opaque": f"{type(a).__name__}: {a}"}

    def symbolic(self, a: Any) -> Listing:
        expr = a.node.expr
        env = a.node.shape_env
        for symbol in sorted(expr.free_symbols, key=str):
            known = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
            number = known.get(symbol)
            if number is not None:
                number = int(number) if number.is_Integer else float(number)
            within = env.var_to_range.get(symbol)
            ends = () if within is None else (within.lower, within.upper)
            bounds = [int(end) if end.is_Integer else None for end in ends]
            self.symbols[str(symbol)] = {"hint": number, "range": bounds}
            self.symbols[str(symbol)]["positive"] = symbol.is_positive
        return {type(a).__name__: _tree(expr)}

    def meta(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (tuple, list)):
                return {"tuple": [self.meta(v) for v in value]}
            return self.value(value)
        storage = value.untyped_storage()
        made: Listing = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [self.value(s) for s in value.shape],
            "stride": [self.value(s) for s in value.stride()],
            "device": str(value.device),
        }
        if not (isinstance(value.storage_offset(), int) and value.storage_offset() == 0):
            made["offset"] = self.value(value.storage_offset())
        geometry = (*value.shape, *value.stride(), value.storage_offset(), storage.nbytes())
        if all(isinstance(n, int) for n in geometry):
            made["storage"] = self.storages.setdefault(storage._cdata, len(self.storages))
            made["bytes"] = storage.nbytes()
        if isinstance(value, torch.nn.Parameter):
            made["parameter"] = True
        return made


def _tree(expr: Any) -> Any:
    """A sympy expression: a number, a symbol's name, or ``[function, argument, ...]``."""
    if expr.is_Symbol:
        return str(expr)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Float:
        return float(expr)
    if expr.is_Rational:
        return ["Rational", int(expr.p), int(expr.q)]
    return [type(expr).__name__, *map(_tree, expr.args)]


def _kind(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}" if isinstance(part, type) else str(part)


def _plain(value: Any) -> Any:
    """Numbers that JSON has no spelling for are written as text."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


# --- reading --------------------------------------------------------------------------------------


def load(listing: Listing) -> GraphModule:
    """The graph of a listing, with fake tensors as metadata.

    Operators of other libraries that are not registered here are declared with their recorded
    schema (and have no kernel). Raises :class:`ListingError` for what cannot be read.
    """
    if listing.get("format") != FORMAT:
        raise ListingError(f"format {listing.get('format')}, need {FORMAT}")
    return _Reader().module(listing)


class _Reader:
    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.env: Any = symbolic_shapes.ShapeEnv()
        self.mode: Any = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.symbols: dict[str, Any] = {}

    def module(self, listing: Listing) -> GraphModule:
        for name, known in listing["symbols"].items():
            self.symbol(name, **known)
        for name, schema in listing["schemas"].items():
            _declare(name, schema)
        root = torch.nn.Module()
        for path, made in listing["modules"].items():
            _set(root, path, self.module(made))
        storages: dict[int, torch.Tensor] = {}
        for path, made in listing["constants"].items():
            _set(root, path, self.constant(made, storages))
        graph, nodes = Graph(), dict[str, Node]()
        for made in listing["nodes"]:
            node = self.node(graph, made, nodes, storages, listing["traces"])
            nodes[made["name"]] = node
        gm = GraphModule(root, graph)
        graph.lint()
        return gm

    def symbol(
        self, name: str, hint: float | None, range: list[int | None], positive: bool | None
    ) -> None:
        if name in self.symbols:
            return
        from torch._dynamo.source import ConstantSource
        from torch.utils._sympy.value_ranges import ValueRanges

        if hint is None:
            made = self.env.create_unbacked_symint().node.expr
        else:
            # Symbols are numbered by their source; keep the numbers, for texts and their order.
            self.env._generate_unique_id = lambda _: int(name.lstrip("szf"))
            dynamic = symbolic_shapes.DimDynamic.DYNAMIC
            made = self.env.create_symbol(
                hint,
                ConstantSource(f"listing_{name}"),
                dynamic,
                positive=positive,
                do_not_specialize_zero_one=True,
            )
            if len(range) == 2:
                old = self.env.var_to_range[made]
                ends = (
                    b if a is None else a
                    for a, b in zip(range, (old.lower, old.upper), strict=True)
                )
                self.env.var_to_range[made] = ValueRanges(*ends)
        self.symbols[name] = made

    def node(
        self,
        graph: Graph,
        made: Listing,
        nodes: dict[str, Node],
        storages: dict[int, torch.Tensor],
        traces: list[str],
    ) -> Node:
        target = made["target"]
        if made["op"] == "call_function":
            target = _operator(target)
        args = tuple(self.value(a, nodes) for a in made["args"])
        kwargs = {k: self.value(v, nodes) for k, v in made.get("kwargs", {}).items()}
        node = graph.create_node(made["op"], target, args, kwargs, made["name"])
        if node.name != made["name"]:
            node.name = made["name"]
        if "val" in made:
            node.meta["val"] = self.meta(made["val"], storages)
        if "trace" in made:
            node.meta["stack_trace"] = traces[made["trace"]]
        if "modules" in made:
            node.meta["nn_module_stack"] = {k: tuple(rest) for k, *rest in made["modules"]}
        return node

    def value(self, a: Any, nodes: Mapping[str, Node]) -> Any:
        if not isinstance(a, dict):
            return a
        ((kind, inner),) = a.items()
        if kind == "node":
            return nodes[inner]
        if kind in ("tuple", "list"):
            parts = [self.value(x, nodes) for x in inner]
            return tuple(parts) if kind == "tuple" else immutable_list(parts)
        if kind == "dict":
            return immutable_dict({k: self.value(v, nodes) for k, v in inner.items()})
        if kind == "slice":
            return slice(*(self.value(x, nodes) for x in inner))
        if kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, inner)
        if kind == "device":
            return torch.device(inner)
        if kind == "float":
            return float(inner)
        if kind == "target":
            return _operator(inner)
        if kind == "opaque":
            return inner
        return self.symbolic(kind, inner)

    def symbolic(self, kind: str, tree: Any) -> Any:
        expr = self.expression(tree)
        numbers = {s: self.env.backed_var_to_val.get(s) for s in expr.free_symbols}
        hint = None if None in numbers.values() else expr.xreplace(numbers)
        if kind == "SymInt":
            return self.env.create_symintnode(expr, hint=None if hint is None else int(hint))
        if kind == "SymFloat":
            return self.env.create_symfloatnode(expr, hint=None if hint is None else float(hint))
        return self.env.create_symboolnode(expr)

    def expression(self, tree: Any) -> Any:
        import sympy
        from torch.utils._sympy import functions

        if isinstance(tree, str):
            return self.symbols[tree]
        if not isinstance(tree, list):
            return sympy.sympify(tree)
        name, *parts = tree
        made = getattr(functions, name, None) or getattr(sympy, name)
        return made(*(self.expression(p) for p in parts))

    def meta(self, made: Any, storages: dict[int, torch.Tensor]) -> Any:
        if isinstance(made, dict) and "shape" in made:
            return self.tensor(made, storages)
        if isinstance(made, dict) and "tuple" in made:
            return tuple(self.meta(v, storages) for v in made["tuple"])
        return self.value(made, {})

    def tensor(self, made: Listing, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """A fake tensor; those of one recorded storage share one here."""
        dtype = getattr(torch, made["dtype"])
        shape, stride = ([self.value(s, {}) for s in made[k]] for k in ("shape", "stride"))
        offset = self.value(made.get("offset", 0), {})
        with self.mode, torch.no_grad():
            if "storage" in made:
                # Bytes, because one storage may be seen in several dtypes.
                whole = storages.get(made["storage"])
                if whole is None:
                    whole = torch.empty(made["bytes"], dtype=torch.uint8)
                    storages[made["storage"]] = whole
                owner = whole.view(dtype)
                value = owner.as_strided(shape, stride, offset)
            else:
                value = torch.empty_strided(shape, stride, dtype=dtype)
                if not (isinstance(offset, int) and offset == 0):
                    # An owner that is large enough, whatever the symbols are.
                    room = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
                    flat = torch.empty_strided([room + 1], [1], dtype=dtype)
                    value = flat.as_strided(shape, stride, offset)
        value.fake_device = torch.device(made["device"])  # type: ignore[attr-defined]
        return value

    def constant(self, made: Listing, storages: dict[int, torch.Tensor]) -> Any:
        if "values" not in made:
            value: torch.Tensor = self.tensor(made, storages)
        else:
            numbers = [float(v["float"]) if isinstance(v, dict) else v for v in made["values"]]
            value = torch.tensor(numbers, dtype=getattr(torch, made["dtype"]))
            value = value.reshape(made["shape"])
        return torch.nn.Parameter(value, requires_grad=False) if "parameter" in made else value


def _set(root: torch.nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, torch.nn.Module())
        root = getattr(root, name)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


_LIBRARIES: list[Any] = []
"""Declared operators live as long as their library object."""


def _declare(name: str, schema: str) -> None:
    try:
        _operator(f"op:{name}")
    except ListingError:
        namespace = name.split(".")[0]
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema.removeprefix(f"{namespace}::"))
        _LIBRARIES.append(library)


def _operator(text: str) -> Callable[..., Any]:
    kind, _, name = text.partition(":")
    found: Any = None
    if kind == "op":
        namespace, packet, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    elif kind == "hop":
        found = getattr(torch.ops.higher_order, name, None)
    else:
        module, _, last = name.rpartition(".")
        homes: dict[str, Any] = {"_operator": operator, "builtins": builtins, "math": math}
        homes["torch"] = torch
        found = getattr(homes.get(module) or homes.get(module.lstrip("_")), last, None)
        found = found or getattr(torch, last, None) or getattr(operator, last, None)
    if found is None:
        raise ListingError(f"no operator {text} here")
    operation: Callable[..., Any] = found
    return operation


# --- taking graphs out of a compile ---------------------------------------------------------------


class _Enough(Exception):
    """Raised by :func:`post_grad` to end a compile whose code nobody needs."""


def post_grad(
    function: Callable[..., Any], *args: Any, run: bool = True, **how: Any
) -> list[Listing]:
    """The graphs of ``torch.compile(function, **how)(*args)`` at the hook where passes run.

    That is Inductor's ``post_grad_custom_pre_pass``, inference only, caches off. With
    ``run=False`` the compile ends behind the first graph, and no code is made of it.
    """
    from torch._inductor import config

    found: list[Listing] = []

    def take(graph: Graph) -> None:
        assert graph.owning_module is not None
        found.append(dump(graph.owning_module))
        if not run:
            raise _Enough

    torch._dynamo.reset()
    with (
        torch.no_grad(),
        config.patch(post_grad_custom_pre_pass=take, force_disable_caches=True),
    ):
        try:
            torch.compile(function, **how)(*args)
        except Exception:
            if run or not found:
                raise
    return found
