"""Remember a graph exactly, so that a pass that fails can be undone in place.

The snapshot keeps the nodes with their own arguments and metadata; restoring uses only public
``torch.fx`` calls plus assigning ``Node.name`` (run with torch 2.13).
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import Argument, Target, map_arg

from fusion.graph.provenance import target_text


class Snapshot:
    """The state of a graph at one moment; cheap (one tuple a node)."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: list[
            tuple[
                Node,
                str,
                str,
                Target,
                tuple[Argument, ...],
                dict[str, Argument],
                Any,
                dict[str, Any],
            ]
        ] = [
            (n, n.op, n.name, n.target, n.args, dict(n.kwargs), n.type, dict(n.meta))
            for n in graph.nodes
        ]

    def changed(self) -> bool:
        """Whether any node was added, removed, moved or given other arguments since."""
        now = list(self._graph.nodes)
        if len(now) != len(self._nodes):
            return True
        return any(
            a is not b
            or a.target is not t
            or not _same(a.args, args)
            or not _same(dict(a.kwargs), kwargs)
            for a, (b, _, _, t, args, kwargs, _, _) in zip(now, self._nodes, strict=True)
        )

    def names(self) -> set[str]:
        """The names that the graph's nodes had."""
        return {entry[2] for entry in self._nodes}

    def reads_of(self, names: set[str]) -> list[tuple[str, int]]:
        """Who, outside ``names``, reads a value of ``names``: node and place among its inputs.

        Places count the node arguments, positional before keyword, repeated ones each time.
        """
        found: list[tuple[str, int]] = []
        for _, _, name, _, args, kwargs, _, _ in self._nodes:
            read: list[Node] = []
            map_arg((args, kwargs), read.append)
            if name not in names:
                found += [(name, i) for i, n in enumerate(read) if n.name in names]
        return found

    def listing(self) -> dict[str, str]:
        """Name -> text of each node, as it was."""
        found: dict[str, str] = {}
        for _, op, name, target, args, kwargs, _, _ in self._nodes:
            text = f"{name} = {target_text(op, target)}{args}"
            found[name] = f"{text} {kwargs}" if kwargs else text
        return found

    def restore(self) -> None:
        """Put the graph back: same nodes (erased ones are made anew), order, names, metadata."""
        graph = self._graph
        alive = set(graph.nodes)
        made: dict[Node, Node] = {}
        previous = graph._root
        for node, op, name, target, _, _, kind, meta in self._nodes:
            if node not in alive:
                with graph.inserting_before(None):
                    new = graph.create_node(op, target, (), {}, name, kind)
                made[node] = new
            current = made.get(node, node)
            previous.append(current)
            previous = current
            if current.target is not target:
                current.target = target
            current.meta = dict(meta)
        keep = {made.get(entry[0], entry[0]) for entry in self._nodes}
        for node, _, _, _, args, kwargs, _, _ in self._nodes:
            current = made.get(node, node)
            current.args = map_arg(args, lambda n: made.get(n, n))
            current.kwargs = map_arg(kwargs, lambda n: made.get(n, n))
        for extra in reversed([n for n in graph.nodes if n not in keep]):
            extra.args, extra.kwargs = (), {}
            graph.erase_node(extra)
        for node, _, name, *_ in self._nodes:
            made.get(node, node).name = name
        if made:
            self.__init__(graph)  # type: ignore[misc]  # remember the new nodes from now on


def _same(a: Any, b: Any) -> bool:
    """Equal structure with identical nodes; never calls a SymInt's ``==`` (it would guard)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (int, float, str, bool)):
        return bool(a == b)
    return bool(a is b)
