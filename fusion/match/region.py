"""Run a piece of a graph on small inputs: the net under the recognisers.

A compiled graph bakes sizes into its nodes (token count, number of blocks). To check a rewrite
at a cost that does not grow with them, a :class:`Region` is *shrunk*: every dimension of every
value is a product of factors ``(size in the graph, size in the check)``, seeded at the region's
inputs, and carried through the nodes. Only the arguments that spell sizes (views, expands) are
rewritten; everything else runs as it stands in the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fusion.graph.shapes import hint, hints
from fusion.match.region_dims import (
    Dims,
    Factor,
    RegionError,
    changed,
    dims_of,
    infer_dims,
    small_shape,
)

__all__ = ["Constant", "Dims", "Factor", "Input", "Region", "RegionError", "dims_of", "small_shape"]

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SIZED = {aten.expand.default, *_VIEWS}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
_FACTORIES = {aten.full.default, aten.empty.memory_format, aten.zeros.default, aten.ones.default}


Constant: TypeAlias = Callable[[Node, Any], bool]
"""Whether a size that an expand makes is no token count, although it equals one."""


def _never(node: Node, size: Any) -> bool:
    return False


@dataclass(frozen=True)
class Input:
    """A value that the region takes from outside: its factors and its small tensor."""

    dims: Dims
    value: torch.Tensor


@dataclass(frozen=True)
class Region:
    """The nodes between ``inputs`` and ``outputs``, in graph order."""

    inputs: frozenset[Node]
    outputs: tuple[Node, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def between(cls, inputs: Iterable[Node], outputs: Sequence[Node]) -> Region:
        """Slice backwards from the outputs to the inputs.

        Raises :class:`RegionError` where the slice reaches a value that is neither computed
        from the inputs nor a constant: then the outputs depend on something that was not read.
        """
        stop = frozenset(inputs)
        seen: set[Node] = set()
        stack = [n for n in outputs if n not in stop]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            if node.op in ("placeholder", "get_attr"):
                if isinstance(node.meta.get("val"), torch.Tensor):
                    text = f"also depends on {node.name}"
                    raise RegionError(text, node, "match.validation")
                continue  # a size: views take theirs from the factors
            seen.add(node)
            if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                continue  # a size computed in the graph
            stack.extend(a for a in node.all_input_nodes if a not in stop and not _nothing(node, a))
        # Nodes compare by their place in the graph: no walk over the whole graph for each site.
        nodes = tuple(sorted(seen))
        return cls(stop, tuple(outputs), nodes)

    def fingerprint(self, names: Mapping[Node, str]) -> str:
        """A text that is equal for regions of equal structure (input roles given by name)."""
        label: dict[Node, str] = {n: f"<{names.get(n, 'in')}>" for n in self.inputs}
        lines = [f"{label[n]}:{_describe(n)}" for n in sorted(self.inputs, key=lambda n: label[n])]
        for i, node in enumerate(self.nodes):
            label[node] = f"%{i}"
            for n in node.all_input_nodes:
                if n not in label:  # a size, or a constant
                    label[n] = f"<{n.op} {len(label)}: {n.meta.get('val')}>"
            args = torch.fx.node.map_arg((node.args, node.kwargs), label.__getitem__)
            lines.append(f"%{i}={node.target}{args}:{_describe(node)}")
        lines.append(",".join(label.get(n, n.name) for n in self.outputs))
        return "\n".join(lines)

    def run(
        self,
        inputs: Mapping[Node, Input],
        special: Callable[[Node, dict[Node, Any], dict[Node, Dims]], Any] | None = None,
        widen: Mapping[int, int] | None = None,
        tick: Callable[[Node, int], None] | None = None,
        constant: Constant = _never,
    ) -> tuple[dict[Node, Any], dict[Node, Dims]]:
        """Run every node small; returns the values and factors of all nodes.

        ``special`` may run a node itself (return ``NotImplemented`` to decline); ``widen`` maps
        the sizes that an expand may make out of nothing to their small ones, except where
        ``constant(node, size)`` says that the size only happens to be equal; ``tick`` is called
        before each node with the bytes held so far and may raise to stop.
        """
        values: dict[Node, Any] = {n: i.value for n, i in inputs.items()}
        dims: dict[Node, Dims] = {n: i.dims for n, i in inputs.items()}
        held = 0
        for node in self.nodes:
            if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                continue
            if tick is not None:
                tick(node, held)
            done = special(node, values, dims) if special is not None else NotImplemented
            if done is NotImplemented:
                done = _run_node(node, values, dims, widen or {}, constant)
            values[node] = done
            if node not in dims and isinstance(done, torch.Tensor):
                dims[node] = infer_dims(node, done, dims)
            if isinstance(done, torch.Tensor):
                held += done.numel() * done.element_size()
        return values, dims

    def guesses(self, widen: Mapping[int, int], constant: Constant) -> tuple[Node, ...]:
        """The expands that make a size which may be a token count, or a number equal to one."""

        def unsure(node: Node) -> bool:
            return node.target is aten.expand.default and any(
                isinstance(size, int) and widen.get(size, size) != size and not constant(node, size)
                for size in _made(node)
            )

        return tuple(n for n in self.nodes if unsure(n))


def _made(node: Node) -> list[Any]:
    """The sizes that an expand makes out of nothing."""
    source = node.args[0]
    assert isinstance(source, Node)
    out, inner = node.meta["val"].shape, hints(source.meta["val"].shape)
    lead = len(out) - len(inner)
    return [n for i, n in enumerate(out) if i < lead or (inner[i - lead] == 1 and hint(n) != 1)]


def _nothing(node: Node, operand: Node) -> bool:
    """Whether an operand adds nothing to a cat (the empty rest of a head that is all rotated)."""
    value = operand.meta.get("val")
    return (
        node.target is aten.cat.default
        and isinstance(value, torch.Tensor)
        and any(isinstance(s, int) and s == 0 for s in value.shape)
    )


def _describe(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        place = (hints(value.shape), hints(value.stride()), hint(value.storage_offset()))
        return f"{value.dtype}{place}"
    return type(value).__name__


def _run_node(
    node: Node,
    values: dict[Node, Any],
    dims: dict[Node, Dims],
    widen: Mapping[int, int],
    constant: Constant,
) -> Any:
    """Run one node with small values, rewriting the arguments that spell sizes."""
    if node.op != "call_function":
        raise RegionError(f"{node.op} inside the region", node)
    target = node.target
    if target is operator.getitem:
        made, which = node.args
        assert isinstance(made, Node)
        source = made.args[0]
        if made.target in _SPLITS and isinstance(source, Node):
            at = _split_dim(made) % len(dims[source])
            if made.target is aten.unbind.int:
                dims[node] = (*dims[source][:at], *dims[source][at + 1 :])
            else:
                dims[node] = _resized(dims[source], at, node)
        return values[made][which]
    args: Any
    kwargs: Any
    args, kwargs = list(node.args), dict(node.kwargs)
    if target in _SIZED:
        source = node.args[0]
        assert isinstance(source, Node)
        out_shape = hints(node.meta["val"].shape)
        if target in _VIEWS:
            dims[node] = regroup(dims[source], out_shape, node)
        else:
            dims[node] = _expand(dims[source], node, widen, constant)
        args[1] = list(small_shape(dims[node]))
    elif target is aten.slice.Tensor:
        _slice_args(node, args, dims)
    elif target is aten.select.int:
        _whole_only(node, dims, int(args[1]))
    elif target in _FACTORIES and math.prod(hints(node.meta["val"].shape)) != 1:
        raise RegionError("a tensor of a fixed size is made inside the chain", node)
    elif target in _SPLITS:
        _whole_only(node, dims, _split_dim(node))

    def load(n: Node) -> Any:
        if n in values:
            return values[n]
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and _nothing(node, n):
            return torch.empty(0, dtype=value.dtype)
        if isinstance(value, (torch.SymInt, torch.SymFloat, int, float)):
            return hint(value)
        raise RegionError(f"{n.name} has no value", n)

    args, kwargs = torch.fx.node.map_arg((args, kwargs), load)
    if target in _VIEWS:  # the small tensors need not have the strides that allowed a view
        target = aten.reshape.default
    try:
        done = target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise RegionError(f"{target}: {type(error).__name__}: {error}", node) from error
    if target is aten.mul.Tensor and done.is_complex():
        _plain_product(args[0], args[1], done, node)
    return done


def _plain_product(a: Any, b: Any, done: torch.Tensor, node: Node) -> None:
    """Refuse a complex product that does not round each product and the sum.

    Where a row does not fill its vector registers, torch's CPU kernel fuses multiply and add. A
    result in 16 bits hides that from almost every comparison, but not from every one, so it is
    looked for here, before the result is rounded.
    """
    if not all(isinstance(t, torch.Tensor) and t.is_complex() for t in (a, b)):
        return
    real = a.real * b.real - a.imag * b.imag
    imag = a.real * b.imag + a.imag * b.real
    if not (torch.equal(done.real, real) and torch.equal(done.imag, imag)):
        # The graph is understood; nothing fixes how it rounds.
        text = "the rounding of a complex product depends on its width here"
        raise RegionError(text, node, "gate.rounding")


def regroup(source: Dims, shape: Sequence[int], node: Node | None = None) -> Dims:
    """Factors after a view to ``shape``: walk both from the left, splitting fixed factors only."""
    todo: list[Factor] = [f for factors in source for f in factors]
    out: list[tuple[Factor, ...]] = []
    for size in shape:
        taken: list[Factor] = []
        have = 1
        while have != size:
            if not todo:
                raise RegionError("a view whose sizes cannot be followed", node)
            big, small = todo.pop(0)
            if size % (have * big) == 0:
                taken.append((big, small))
                have *= big
                continue
            part = size // have
            if big != small or size % have or part == 0 or big % part:
                raise RegionError("a view that cuts a token or block dimension", node)
            taken.append((part, part))
            todo.insert(0, (big // part, big // part))
            have *= part
        out.append(tuple(taken))
    if any(big != 1 or small != 1 for big, small in todo):
        raise RegionError("a view whose sizes cannot be followed", node)
    return tuple(out)


def _expand(source: Dims, node: Node, widen: Mapping[int, int], constant: Constant) -> Dims:
    """Factors after an expand: kept dimensions keep theirs, made ones follow ``widen``."""
    shape = node.meta["val"].shape
    lead = len(shape) - len(source)
    out: list[tuple[Factor, ...]] = []
    for i, (given, size) in enumerate(zip(shape, hints(shape), strict=True)):
        old = source[i - lead] if i >= lead else ()
        little = size if constant(node, given) else widen.get(size, size)
        out.append(old or (((size, little),) if size != 1 else ()))
    return tuple(out)


def _slice_args(node: Node, args: list[Any], dims: dict[Node, Dims]) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    dim = int(args[1]) if len(args) > 1 else 0
    factors = dims[source][dim]
    if not changed(factors):
        dims[node] = _resized(dims[source], dim, node)
        return
    full = math.prod(b for b, _ in factors)
    if hints(node.meta["val"].shape)[dim] != full:
        raise RegionError("a slice of the token or block dimension", node)
    args[1:] = [dim, 0, 2**63 - 1]
    dims[node] = dims[source]


def _split_dim(node: Node) -> int:
    at = 1 if node.target is aten.unbind.int else 2
    return int(node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0))  # type: ignore[arg-type]


def _whole_only(node: Node, dims: dict[Node, Dims], dim: int) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    if changed(dims[source][dim]):
        raise RegionError("an index into the token or block dimension", node)


def _resized(source: Dims, dim: int, node: Node) -> Dims:
    size = hints(node.meta["val"].shape)[dim]
    out = list(source)
    out[dim % len(out)] = ((size, size),) if size != 1 else ()
    return tuple(out)
