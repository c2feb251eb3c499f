"""What may stand in the way of a rewrite. Each check raises :class:`SurgeryError` with its node."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch.fx import Node

from fusion.graph import functional
from fusion.graph.emit import SurgeryError
from fusion.graph.values import behind, copies_to, is_size, is_view
from fusion.reason import Reason


def refuse_cycle(sources: Iterable[Node], replaced: Iterable[Node]) -> None:
    """No operand may need a value that the new call will give."""
    targets = set(replaced)
    if not targets:
        return
    first = min(targets)
    for node in behind(sources, follow=lambda node: first < node):
        if node in targets:
            text = "an operand of the fused operation depends on its result"
            raise SurgeryError(Reason("safety.cycle", text, node=node.name))


def refuse_side_effects(replaced: Iterable[Node], before: Node) -> None:
    """Nothing with a side effect may stand where values are moved."""
    node = min(replaced, default=before)
    while node is not before and node < before:
        if node.op == "call_function" and not functional.is_auto_functionalized(node):
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                text = "a buffer is changed in place inside the chain"
                raise SurgeryError(
                    Reason("safety.mutation", text, have=str(node.target), node=node.name)
                )
        node = node.next


def refuse_old_readers(call: Node, bases: Iterable[Node], dying: Set[Node]) -> None:
    """Nobody may read an old content behind the call: it would cost a copy of the cache."""
    for base in bases:
        work = [base]
        while work:
            for user in work.pop().users:
                if user is call or user in dying:
                    continue
                if is_view(user):
                    work.append(user)
                elif call < user and not (copies_to(user, base) or is_size(user)):
                    text = "the content before the write is read after it"
                    raise SurgeryError(Reason("safety.cache-read-between", text, node=user.name))


def refuse_aliases(inputs: Iterable[Node], bases: Iterable[Node]) -> None:
    """No operand may be a view of a buffer that the call writes: it would read what it writes.

    ``inputs`` are what the call reads besides the caches. (Graph inputs that alias each other
    are no concern: AOTAutograd turns a written group of them into one input with views.)
    """
    written = set(bases)
    for given in inputs:
        node = given
        while node not in written and is_view(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        if node in written:
            text = "an operand of the fused operation is a view of the cache that it writes"
            raise SurgeryError(Reason("safety.aliased-input", text, node=given.name))
