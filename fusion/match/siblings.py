"""Finding the query chain that is rotated with the same cos and sin as a written key.

All layers of a model usually share one cos and one sin. The chains of one layer are told from
those of other layers by their *level*: how many rotations lie one behind the other on the way
there. q and k of one layer come from the same hidden state, so their levels are equal; the next
layer's are one higher.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fusion.graph.elements import (
    Unreadable,
    cast_source,
    dtype_of,
    op_name,
    same_size,
    shape_of,
    value_of,
)
from fusion.graph.foreign import is_registered
from fusion.graph.moves import is_move
from fusion.graph.shapes import pinned
from fusion.match.facts import Miss, Rope, RopeTable, TokenView
from fusion.match.forms import forms_of
from fusion.match.rotation import read_rope
from fusion.match.same_tables import same_tables
from fusion.match.trail import holders, keeps_elements
from fusion.match.views import dim_view, product
from fusion.reason import Reason

_PRODUCTS = ("aten.mul.Tensor", "aten.addcmul.default")
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.addcmul.default")
_GATHERS = ("aten.index.Tensor", "aten.embedding.default", "aten.index_select.default",
            "aten.gather.default")  # fmt: skip
_GEMMS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.linear.", "aten.matmul.", "aten.baddbmm.",
          "aten.convolution.", "aten._scaled_mm.", "aten._int_mm.")  # fmt: skip
_REACH = 48
"""Nodes that are followed from one product to the end of its rope."""


def find_query_ropes(
    graph: Graph,
    rope_of_k: Rope,
    finder: RopeFinder | None = None,
    taken: frozenset[Node] = frozenset(),
) -> list[Rope | Miss]:
    """The ropes beside ``rope_of_k``: same cos and sin, same tokens, same layer.

    Neither the key itself in another form nor a rope whose result is in ``taken`` (queries of
    other keys, and other written keys) is one. Near misses (a chain that multiplies by the same
    cos and sin but is not such a rope) are answered as :class:`Miss`. A graph with many layers
    should share one ``finder``, made for the graph as it is.
    """
    return (finder or RopeFinder(graph)).siblings(rope_of_k, taken)


class RopeFinder:
    """Ropes of one graph, by the tables they use. The graph must not change meanwhile."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._order: dict[Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._levels: dict[frozenset[Node], tuple[dict[Node, int], dict[int, list[Node]]]] = {}
        self._results: dict[Node, list[Node]] = {}
        self._views: dict[tuple[object, ...], list[TokenView]] = {}
        self._ropes: dict[tuple[object, ...], Rope | Miss] = {}

    def siblings(self, key: Rope, taken: frozenset[Node] = frozenset()) -> list[Rope | Miss]:
        """See :func:`find_query_ropes`."""
        levels, products = self._tables(key)
        level = levels.get(key.out.node)
        own = key.nodes | forms_of(key.out.node)
        found: list[Rope | Miss] = []
        seen: set[Node] = set()
        for node in products.get(level or 0, []):
            if node in seen or (node in key.nodes and not self._shared(node, key)):
                continue
            for fact in self._chain(node, key, own, taken):
                if isinstance(fact, Miss) and any(
                    isinstance(f, Miss) and f.node is fact.node for f in found
                ):
                    continue  # another product of the same chain
                found.append(fact)
                if isinstance(fact, Rope):
                    seen |= fact.nodes
        key_inputs = activations(key.x.node)
        near = [f for f in found if isinstance(f, Rope) and activations(f.x.node) & key_inputs]
        misses = [f for f in found if isinstance(f, Miss)]
        ropes = near or [f for f in found if isinstance(f, Rope)]
        here = self._order.get(key.out.node, 0)
        ropes.sort(key=lambda r: abs(self._order.get(r.out.node, 0) - here))
        return [*ropes, *misses]

    def _shared(self, node: Node, key: Rope) -> bool:
        """Whether a product of the key's own rope also has results beside the key.

        So where one call, or one rope over q and k joined, rotates both.
        """
        if is_registered(node):
            return True
        behind = holders(frozenset({key.out.node}))
        return any(n not in behind and n not in key.nodes for n in self._ends_of(node))

    def _tables(self, key: Rope) -> tuple[dict[Node, int], dict[int, list[Node]]]:
        """``(level of each node, products with these tables by level)``."""
        ends = frozenset().union(*(_ends(t) for t in (key.cos, key.sin)))
        known = self._levels.get(ends)
        if known is None:
            held = holders(ends)
            given = held | holders(frozenset({key.cos.node, key.sin.node}))
            levels: dict[Node, int] = {}
            products: dict[int, list[Node]] = {}
            for node in self.graph.nodes:
                level = max((levels[n] for n in node.all_input_nodes), default=0)
                sources = node.all_input_nodes
                is_product = op_name(node) in _PRODUCTS and any(n in held for n in sources)
                if is_product or (is_registered(node) and any(n in given for n in sources)):
                    level += 1
                    products.setdefault(level, []).append(node)
                levels[node] = level
            known = self._levels[ends] = (levels, products)
        return known

    def _chain(
        self, node: Node, key: Rope, own: frozenset[Node], taken: frozenset[Node]
    ) -> list[Rope | Miss]:
        """The rope that a product belongs to, or the nearest miss; nothing for a taken one."""
        best: Miss | None = None
        joined = node in key.nodes  # with other ropes, of which one may be the query
        for end in self._ends_of(node):
            if end in own:
                continue
            if end in taken:  # before anything is read: a model has many keys that look alike
                if joined:
                    continue
                return []
            for view in self._views_of(end, key.out):
                fact = self._rope(view)
                if isinstance(fact, Rope):
                    if node not in fact.nodes or fact.out.node in own:
                        continue
                    if fact.out.node in taken:
                        if joined:
                            continue
                        return []
                    if (differ := _other_form(key, fact)) is not None:
                        fact = differ
                    elif same_tables(key, fact):
                        return [fact]
                    else:
                        message = "rotated with other rows of cos and sin than the key"
                        name = fact.out.node.name
                        reason = Reason("match.token-order", message, node=name)
                        fact = Miss(reason, fact.out.node, 4)
                if best is None or fact.depth > best.depth:
                    best = fact
        return [best] if best is not None else []

    # Every key asks for the same products: what does not depend on the key is kept.

    def _ends_of(self, node: Node) -> list[Node]:
        if node not in self._results:
            self._results[node] = _results(node, self._order)
        return self._results[node]

    def _views_of(self, end: Node, key: TokenView) -> list[TokenView]:
        # Symbolic sizes have no hash; their text is their expression.
        sizes = tuple(map(str, key.token_sizes))
        asked = (end, key.order, sizes, str(key.tokens), key.dim)
        if asked not in self._views:
            self._views[asked] = list(_views(end, key))
        return self._views[asked]

    def _rope(self, view: TokenView) -> Rope | Miss:
        """The rope whose result is ``view``, with the cast that all readers share."""
        asked = (view.node, view.order, view.token_dims)
        if asked not in self._ropes:
            fact = read_rope(view, complex_tables=True)
            self._ropes[asked] = _past_casts(fact) if isinstance(fact, Rope) else fact
        return self._ropes[asked]


def _other_form(key: Rope, query: Rope) -> Miss | None:
    """Where two ropes rotate differently, their tables cannot be compared: say that instead."""
    for what, k, q in (
        ("rope style", key.style, query.style),
        ("rotary width", key.rotary_dim, query.rotary_dim),
    ):
        if k != q:
            reason = Reason(
                "match.q-k-differ",
                f"q and k differ in their {what}",
                have=f"q {q}, k {k}",
                need="the same for both",
                node=query.out.node.name,
            )
            return Miss(reason, query.out.node, 4, (query,))
    return None


def activations(node: Node) -> set[Node]:
    """What the projection before a rope multiplies: the GEMM's own inputs, or the inputs met."""
    met: set[Node] = set()
    seen = {node}
    todo = [node]
    while todo and len(seen) < 2 * _REACH:
        at = todo.pop()
        if op_name(at).startswith(_GEMMS):
            met.update(_still(n) for n in at.all_input_nodes)
            continue
        if at.op != "call_function":
            met.add(at)
            continue
        for source in at.all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    # Weights are inputs of the graph; the hidden state is not, or is shared all the more.
    return met


def _still(node: Node) -> Node:
    while is_move(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _ends(table: RopeTable) -> frozenset[Node]:
    """Where a table's elements are computed (the gathers, for a table with positions)."""
    if table.positions is not None:
        users = holders(frozenset({table.node}))
        return frozenset(u for n in users for u in n.users if op_name(u) in _GATHERS)
    ends: set[Node] = set()
    seen = {table.node}
    todo = [table.node]
    while todo:
        node = todo.pop()
        if is_move(node) or keeps_elements(node):
            for source in node.all_input_nodes:
                if source not in seen and isinstance(value_of(source), (torch.Tensor, tuple, list)):
                    seen.add(source)
                    todo.append(source)
        else:
            ends.add(node)
    return frozenset(ends)


def _results(node: Node, order: dict[Node, int]) -> list[Node]:
    """What may be the result of the rope that a product belongs to, nearest first."""
    found: set[Node] = {node}
    todo = [node]
    called = is_registered(node)
    summed: set[Node] = {node} if called else set()
    while todo and len(found) < _REACH:
        at = todo.pop(0)
        for user in at.users:
            name = op_name(user)
            is_sum = name in _SUMS
            if user in found and not (at in summed and user not in summed):
                continue
            if not (
                is_sum
                or is_move(user)
                or cast_source(user) is not None
                or name == "aten.neg.default"
                or (called and at is node and name == "getitem")
            ):
                continue
            if is_sum and at in summed and name != "aten.addcmul.default":
                # A second sum is no longer the rope (complex ropes have their sum in the product).
                continue
            found.add(user)
            if is_sum or at in summed:
                summed.add(user)
            todo.append(user)
    if not called and dtype_of(node).is_complex:
        summed = found
    return sorted((n for n in summed if n in order), key=lambda n: order[n])


def _views(node: Node, key: TokenView) -> Iterator[TokenView]:
    """The ways to see a node as ``[tokens, heads, dim]`` with the key's tokens and dim."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return
    try:
        shape = shape_of(node)
    except Unreadable:
        return
    rank = len(shape)
    natural = key.order if len(key.order) == rank else tuple(range(rank))
    orders = sorted(itertools.permutations(range(rank)), key=lambda o: o != natural)
    for heads in (True, False):
        lead = rank - (2 if heads else 1)
        if lead < 1 or rank > 5:
            continue
        for order in orders:
            if shape[order[-1]] != key.dim:
                continue
            sizes = tuple(value.shape[d] for d in order[:lead])
            if lead == key.token_dims:
                fits = all(map(same_size, sizes, key.token_sizes))
            else:
                fits = order == tuple(range(rank)) and same_size(product(sizes), key.tokens)
            if fits and pinned(value.shape[order[-1]]) is not None:
                yield dim_view(node, order, heads)


def _past_casts(rope: Rope) -> Rope:
    """Take in a cast of the result that all its readers share, also behind a cat with nothing."""
    node, best = rope.out.node, rope
    while len(users := list(node.users)) == 1:
        node, before = users[0], node
        is_cast = cast_source(node) is before
        if not is_cast and not (op_name(node) == "aten.cat.default" and _same_shape(node, before)):
            break
        v = rope.out
        view = TokenView(
            node, v.order, v.token_dims, v.token_sizes, v.tokens, v.heads, v.dim, v.merged_heads
        )
        wider = read_rope(view, complex_tables=True)
        if not isinstance(wider, Rope):
            break
        best = wider
    return best


def _same_shape(a: Node, b: Node) -> bool:
    try:
        return shape_of(a) == shape_of(b)
    except Unreadable:
        return False
