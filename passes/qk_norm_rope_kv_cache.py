"""QK-Norm -> RoPE -> KV-cache write becomes one operation.

Matches, per layer, whatever the spelling (see :mod:`fusion.match`)::

    q = rope(rms_norm(q, w_q), cos, sin)
    k = rope(rms_norm(k, w_k), cos, sin)
    cache[slots] = k, v

Replaces it by::

    q, k = fusion.qk_norm_rope_kv_cache(q, k, v, w_q, w_k, cos, sin, cache, slots, kernel=...)

and, where that is not all there, by the next smaller fusion of the ladder: rope and write
(``rope_kv_cache``), norm and rope (``qk_norm_rope``). Five steps, each of which can say no:

1. read     recognisers raise the nodes to facts; facts compose to a chain
2. gate     a kernel that may run this call on this target is selected
3. check    the replaced nodes and the operation give the same bits on small inputs
4. rewrite  the call is emitted in one transaction, later readers move to the new cache
5. report   what was done, or the first reason why not, with the node in the way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from fusion.graph.shapes import NoHintError, hint
from fusion.graph.surgery import SurgeryError
from fusion.match.cache_write import find_cache_writes
from fusion.match.facts import CacheWrite, Miss, Rope
from fusion.match.forms import forms_behind, forms_of
from fusion.match.rope import RopeFinder
from fusion.passes.prologue import describe
from fusion.passes.prologue.chain import Chain, read_chain, read_loose, written_key
from fusion.passes.prologue.check import Checked, check
from fusion.passes.prologue.emit import emit
from fusion.passes.prologue.loose import find_loose_keys, is_told, merge_loose, near_key
from fusion.passes.prologue.operation import kernel_call, operation_of
from fusion.passes.prologue.rounding import unlike_rounding
from fusion.pipeline import Context
from fusion.reason import Reason
from fusion.report import Site
from fusion.selection import Selection, select


@dataclass(frozen=True)
class QKNormRopeKVCache:
    """The pass. ``max_tokens``: fuse only graphs of at most this many tokens (None: any)."""

    name: ClassVar[str] = "qk_norm_rope_kv_cache"
    order: ClassVar[int] = 100

    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, it must be at least 1, or None")

    def run(self, graph: Graph, context: Context) -> list[Site]:
        """Fuse every prologue that is proved right; one site per cache write or loose key."""
        # Read everything before anything is rewritten: facts speak of the graph as it is.
        return [
            self._site(graph, chain, context)
            if isinstance(chain, Chain)
            else describe.missed(context, chain, write)
            for write, chain in read_sites(graph)
        ]

    def _site(self, graph: Graph, chain: Chain, context: Context) -> Site:
        """One chain; an unexpected error stays with its own site (nothing was changed by it)."""
        try:
            return self._fuse(graph, chain, context)
        except Exception as error:
            node = describe.anchor_of(chain)
            text = f"{type(error).__name__}: {error}"
            reason = Reason("internal.error", text, node=node.name)
            return context.site("refused", node, operation=chain.operation, reasons=(reason,))

    def _fuse(self, graph: Graph, chain: Chain, context: Context) -> Site:
        """Gate, check and rewrite one chain."""
        if not context.rewrite:
            return describe.off(context, chain)
        operation = operation_of(chain, return_key=describe.key_is_read(chain))
        if (reason := self._too_many_tokens(chain)) is not None:
            return describe.refused(context, chain, operation, (reason,))
        call = kernel_call(operation, context.target, context.config)
        selection = select(call)
        kernel = selection.kernel
        if kernel is None or (kernel.name == "reference" and call.target.device_type != "cpu"):
            return describe.refused(
                context, chain, operation, _why_no_kernel(selection), selection=selection
            )
        reason = unlike_rounding(chain, context.config, call.target.device_type)
        if reason is not None:
            return describe.refused(context, chain, operation, (reason,), selection)
        checked = Checked("off")
        if context.config.validate:
            checked = check(chain, operation, context)
            if checked.reason is not None:
                return describe.refused(
                    context, chain, operation, (checked.reason,), selection, checked
                )
        try:
            before = describe.listing(chain)
            new = emit(graph, chain, operation, kernel.name, context.config)
        except SurgeryError as error:
            return describe.refused(context, chain, operation, (error.reason,), selection, checked)
        return describe.done(context, chain, operation, selection, checked, before, new)

    def _too_many_tokens(self, chain: Chain) -> Reason | None:
        if self.max_tokens is None:
            return None
        try:
            tokens = hint(chain.key.tokens)
        except NoHintError:
            return None
        if tokens <= self.max_tokens:
            return None
        return Reason(
            "profit.token-range",
            "the pass is limited to fewer tokens",
            have=str(tokens),
            need=f"at most {self.max_tokens}",
        )


def read_sites(graph: Graph) -> list[tuple[CacheWrite | None, Chain | Miss]]:
    """What the recognisers say about every cache write and every loose key, in that order."""
    finder = RopeFinder(graph)
    taken: set[Node] = set()
    fused: set[Node] = set()  # the written keys of the chains that were found, in every form
    sites: list[tuple[CacheWrite | None, Chain | Miss]] = []
    writes_and_misses = find_cache_writes(graph)
    # A key that is written is nobody's query: layers of a block drafter write keys of the context,
    # all rotated alike, that have no queries.
    keys = [written_key(w) if isinstance(w, CacheWrite) else frozenset() for w in writes_and_misses]
    written = frozenset().union(*keys)
    for found, key_forms in zip(writes_and_misses, keys, strict=True):
        if isinstance(found, Miss):
            sites.append((None, found))
            continue
        chain = read_chain(found, finder, (written - key_forms) | taken)
        if isinstance(chain, Chain):
            taken |= {chain.q_rope.out.node, chain.k_rope.out.node}
            fused |= key_forms
        sites.append((found, chain))
    writes = [w for w, chain in sites if w is not None and isinstance(chain, Miss)]
    for key in find_loose_keys(graph, frozenset(taken), writes):
        if isinstance(key, Miss):
            if not is_told(near_key(key).node, written | taken):
                sites.append((None, key))
            continue
        if key.out.node in fused or forms_behind(key.out.node) & taken:
            continue  # a fused q or k that is also used in another dtype is no other key
        loose = read_loose(key, finder, written | taken)
        taken.add(key.out.node)
        if isinstance(loose, Chain):
            taken |= {loose.q_rope.out.node, loose.k_rope.out.node}
        else:  # a query beside the key is no key of its own
            taken |= {fact.out.node for fact in loose.facts if isinstance(fact, Rope)}
            if written & forms_of(key.out.node):
                continue  # it is written, in another form: that write has a site
        merge_loose(sites, key, loose)
    return sites


def _why_no_kernel(selection: Selection) -> Sequence[Reason]:
    """The refusals of the candidates; on a GPU the reference alone is no reason to fuse."""
    reasons = list(selection.refusals)
    if selection.kernel is not None or not reasons:
        reasons.insert(
            0,
            Reason(
                "profit.no-kernel",
                "no kernel but the reference accepts this call",
                have=", ".join(c.kernel for c in selection.candidates) or "none",
                need="aiter or triton",
            ),
        )
    return reasons


PASS = QKNormRopeKVCache
