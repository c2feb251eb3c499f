"""Changes to an FX graph that can be taken back to the letter.

Every change goes through a :class:`Transaction`, which remembers what was there: node names,
order, arguments, the order of ``users`` and the names the graph has handed out. Erasing comes
last (:meth:`Transaction.commit`), when nothing can fail any more, because an erased node cannot
be brought back.

Private names, run on torch 2.13: ``Graph._graph_namespace`` and its three tables,
``Node._rename``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


class Transaction:
    """An undo log over one graph. ``watch`` is called before every change (for tests)."""

    def __init__(self, graph: Graph, watch: Callable[[str], None] | None = None) -> None:
        self.graph = graph
        self.created: list[Node] = []
        self._watch = watch
        self._undo: list[Callable[[], None]] = []
        self._users: dict[Node, list[Node]] = {}
        self._namespace = graph._graph_namespace
        self._counts = dict(self._namespace._base_count)
        self._used: set[str] = set()

    def _step(self, what: str) -> None:
        if self._watch is not None:
            self._watch(what)

    def _remember_users(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node not in self._users:
                self._users[node] = list(node.users)

    def create(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Node
    ) -> Node:
        """A new ``call_function`` node right before another node."""
        self._step(f"create {target}")
        inputs: list[Node] = []
        map_arg((args, kwargs), inputs.append)
        self._remember_users(inputs)
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs)
        self._used.add(node.name)
        self.created.append(node)
        self._undo.append(lambda: self.graph.erase_node(node))
        return node

    def set_call(self, node: Node, target: Any, args: tuple[Any, ...], name: str) -> None:
        """Turn an existing call into another one; users, identity and metadata stay."""
        self._step(f"set {node.name}")
        old = node.target, node.args, dict(node.kwargs), node.name
        inputs: list[Node] = list(node.all_input_nodes)
        map_arg(args, inputs.append)
        self._remember_users(inputs)

        def back() -> None:
            node.target, node.args, node.kwargs = old[0], old[1], old[2]
            node.name = old[3]
            self._namespace._obj_to_name[node] = old[3]

        self._undo.append(back)
        node.target, node.args, node.kwargs = target, args, {}
        if not node.name.startswith(name):
            fresh = self._namespace.create_name(name, None)
            node.name = fresh
            self._namespace._obj_to_name[node] = fresh
            self._used.add(fresh)

    def replace_input(self, user: Node, old: Node, new: Node) -> None:
        """``user`` reads ``new`` where it read ``old``."""
        self._step(f"redirect {user.name}")
        args, kwargs = user.args, dict(user.kwargs)
        self._remember_users((*user.all_input_nodes, new))

        def back() -> None:
            user.args, user.kwargs = args, kwargs

        self._undo.append(back)
        user.args = map_arg(args, lambda n: new if n is old else n)
        user.kwargs = map_arg(kwargs, lambda n: new if n is old else n)

    def replace_uses(self, old: Node, new: Node, keep: Iterable[Node] = ()) -> None:
        """Every user of ``old`` except ``keep`` reads ``new``."""
        kept = set(keep)
        for user in list(old.users):
            if user is not new and user not in kept:
                self.replace_input(user, old, new)

    def move(self, node: Node, after: Node) -> None:
        """Put a node right behind another one."""
        if after.next is node:
            return
        self._step(f"move {node.name}")
        previous = node.prev
        self._undo.append(lambda: previous.append(node))
        after.append(node)

    def set_meta(self, node: Node, meta: dict[str, Any]) -> None:
        """Exchange a node's metadata."""
        self._step(f"meta {node.name}")
        old = node.meta
        self._undo.append(lambda: setattr(node, "meta", old))
        node.meta = meta

    def rollback(self) -> None:
        """Take everything back."""
        for undo in reversed(self._undo):
            undo()
        for node, users in self._users.items():
            if node.graph is self.graph and not node._erased:
                kept = dict.fromkeys(users)
                node.users.clear()
                node.users.update(kept)
        for name in self._used:
            self._namespace._used_names.discard(name)
        for node in self.created:
            self._namespace._obj_to_name.pop(node, None)
        self._namespace._base_count.clear()
        self._namespace._base_count.update(self._counts)
        self._clear()

    def commit(self, dead: Iterable[Node]) -> tuple[str, ...]:
        """Erase what nobody reads any more, starting from ``dead``; the change is final.

        Returns the names of the erased nodes.
        """
        self._step("commit")
        work = list(dead)
        erased: list[str] = []
        while work:
            node = work.pop()
            if node._erased or node.users or node.op != "call_function" or _impure(node):
                continue
            inputs = node.all_input_nodes
            erased.append(node.name)
            self.graph.erase_node(node)
            work += inputs
        self._clear()
        return tuple(erased)

    def _clear(self) -> None:
        self._undo, self._users, self.created = [], {}, []
        self._used, self._counts = set(), dict(self._namespace._base_count)


def _impure(node: Node) -> bool:
    """Whether a node must stay although nobody reads it (wrappers of mutating ops need not)."""
    from fusion.graph import functional

    return not functional.is_auto_functionalized(node) and node.is_impure()
