"""``torch.compile(model, backend="fusion", mode=..., options=...)``.

The Dynamo graph goes to Inductor with the pipeline as one more custom pass (behind those that
are installed already), or through AOTAutograd alone (``inner="aot_eager"``), which is what tests
and ``fusion.verify`` compare bit by bit. Private names of torch used here
(``compile_fx``, ``aot_autograd``, and those in :mod:`fusion.graph.compat`) were run with
torch 2.13.0.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from fusion import store
from fusion.build import describe_config, describe_target, make_config, make_manager, versions
from fusion.config import Config, ConfigError
from fusion.graph import compat
from fusion.graph.capture import nested_graphs
from fusion.graph.provenance import frames_of
from fusion.graph.snapshot import Snapshot
from fusion.pipeline import FusionRequiredError, PassManager
from fusion.reason import Reason
from fusion.registry import REGISTRY, Entry
from fusion.report import GraphReport, Report
from fusion.target import Target

log = logging.getLogger("fusion")
HOOK = "post_grad_custom_pre_pass"
Compiled = Callable[..., Any]


def fusion(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Config | None = None,
) -> Compiled:
    """Compile a Dynamo graph; this is the entry point of the group ``torch_dynamo_backends``.

    ``mode`` means what it means for Inductor. Raises :class:`~fusion.config.ConfigError` for
    unknown options and :class:`~fusion.pipeline.FusionRequiredError` where a required pass left
    a site unfused; anything else that goes wrong inside fusion is a reason in the report.
    """
    config = make_config(options)
    target = Target.current()
    entry = REGISTRY.begin(compat.compile_context(), Report(), example_inputs)
    entry.roots = frozenset(f[0] for n in gm.graph.nodes if (f := frames_of(n)))
    manager = make_manager(config, target, collector=entry.graphs.append)
    entry.header = header(manager)
    started = time.perf_counter()
    try:
        if config.inner == "inductor":
            compiled = _inductor(gm, example_inputs, config, mode, manager, entry)
        else:
            _patches(mode, config)  # an unknown mode is an error here too
            manager.phase = config.inner
            compiled = _aot_eager(gm, example_inputs, manager)
    except Exception as error:
        ours = _own_error(error)
        if ours is None:
            raise
        raise ours from None
    entry.seconds = time.perf_counter() - started
    REGISTRY.commit(entry)
    _trace(entry)
    return compiled


def _reset() -> None:
    """What ``torch.compiler.reset`` asks of a backend: drop Inductor's CUDA-graph trees."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


# Dynamo looks for the attribute on the backend function.
fusion.reset = _reset  # type: ignore[attr-defined]


def header(manager: PassManager) -> Report:
    """A report of a pipeline that has not seen a graph yet."""
    return Report(
        (),
        manager.statuses(),
        describe_target(manager.target),
        versions(),
        describe_config(manager.config),
    )


def inductor_passes(
    config: Mapping[str, Any] | Config | None = None, *, existing: Any = None
) -> dict[str, Any]:
    """Inductor config patches that add the pipeline to somebody else's compile.

    Use them with ``torch.compile(model, options=fusion.inductor_passes(config))`` or
    ``torch._inductor.config.patch(...)``. The passes that are installed when this is called
    stay and run first; nothing is set globally. ``existing`` names them where they are not in
    ``torch._inductor.config`` but in patches of your own. Graphs show up in
    :func:`fusion.reports` when they are compiled. On a hit of Inductor's cache no pass runs, and
    nor does one where the compile fails before it or there is nothing to compile: a graph whose
    key was asked for is then listed with ``cached=True`` and the reason ``cache.no-report``
    (only ``backend="fusion"`` knows the sites of a hit). For AOTInductor see docs/extending.md.
    """
    from torch._inductor import config as inductor_config

    collected = _Unattended()
    manager = make_manager(make_config(config), collector=collected)
    collected.header = header(manager)
    manager.asked = collected.asked
    if existing is None:
        existing = getattr(inductor_config, HOOK)
    patches = dict(manager.config.inductor)
    patches[HOOK] = compat.chain(patches.get(HOOK, existing), manager.for_inductor())
    return patches


class _Unattended:
    """Takes in graphs of compiles that fusion does not drive itself."""

    def __init__(self) -> None:
        self.header = Report()
        self._lock = threading.Lock()
        self._last: tuple[weakref.ref[Any], int, Entry] | None = None

    def __call__(self, graph: GraphReport) -> None:
        """List the graph; nested graphs of one compile share an entry."""
        context = compat.compile_context()
        with self._lock:
            entry = self._entry(context)
            if entry.cached:  # a cache was asked, and did not have it
                entry.cached = False
                entry.graphs.clear()
            entry.graphs.append(graph)

    def asked(self) -> None:
        """A compile cache is about to look. If no pass runs then (it finds the code, the compile
        fails earlier, there is nothing to compile), this is all that is ever seen of it."""
        context = compat.compile_context()
        if context is None:  # somebody reads the key out of curiosity
            return
        with self._lock:
            entry = self._entry(context)
            if not entry.graphs:
                entry.cached = True
                entry.graphs.append(_no_report())

    def _entry(self, context: Any) -> Entry:
        attempt = getattr(context, "attempt", 0)
        last = self._last
        if last is not None and context is not None:
            known, number, entry = last
            if known() is context and number == attempt:
                return entry
        entry = REGISTRY.begin(context, self.header, ())
        if context is not None:
            self._last = (weakref.ref(context), attempt, entry)
        REGISTRY.commit(entry)
        return entry


def _inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    mode: str | None,
    manager: PassManager,
    entry: Entry,
) -> Compiled:
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    patches = _patches(mode, config)
    existing = patches.get(HOOK, getattr(inductor_config, HOOK))
    salt = (manager.uuid(), mode, sorted((k, repr(v)) for k, v in patches.items() if k != HOOK))
    key = _key(gm, inputs, salt)
    patches[HOOK] = compat.chain(existing, manager.for_inductor())
    compile_graph: Any = compile_fx
    compiled: Compiled = compile_graph(gm, list(inputs), config_patches=patches)
    if entry.graphs:
        if key is not None:
            store.save(key, entry.graphs)
    else:
        entry.cached = True
        entry.graphs.extend(_from_store(key))
        manager.check_required(s for g in entry.graphs for s in g.sites)
    return compiled


def _key(gm: GraphModule, inputs: Sequence[Any], salt: tuple[object, ...]) -> store.Key | None:
    try:
        return store.Key(gm, inputs, *salt)
    except Exception:  # a graph that cannot be described loses its stored report, no more
        log.debug("no key for this graph", exc_info=True)
        return None


def _from_store(key: store.Key | None) -> list[GraphReport]:
    found = None if key is None else store.load(key)
    return [_no_report()] if found is None else found


def _no_report() -> GraphReport:
    reason = Reason(
        "cache.no-report",
        "no pass of fusion ran after the compile cache asked for the key: "
        "a hit, a failed compile, or nothing to compile",
    )
    return GraphReport("", phase="post_grad", reasons=(reason,))


def _patches(mode: str | None, config: Config) -> dict[str, Any]:
    """Mode and user patches, checked by the very class that checks them for Inductor."""
    try:
        return compat.inductor_patches(mode, dict(config.inductor))
    except RuntimeError as error:
        raise ConfigError(f"options['inductor'] or mode: {error}") from error


def _aot_eager(gm: GraphModule, inputs: Sequence[Any], manager: PassManager) -> Compiled:
    return compat.compile_functional(
        gm,
        inputs,
        inference=functools.partial(_eager, manager=manager, inference=True),
        forward=functools.partial(_eager, manager=manager, inference=False),
        decompositions=decompositions(manager.config.inner),
    )


def decompositions(inner: str) -> dict[Any, Any] | None:
    """The decomposition table: Inductor's own for ``inductor`` and ``aot_eager_decomp``."""
    if inner == "aot_eager":
        return None
    return compat.inductor_decompositions()


def _eager(
    gm: GraphModule, inputs: Sequence[Any], manager: PassManager, inference: bool
) -> Compiled:
    del inputs
    for graph in nested_graphs(gm):
        graph.eliminate_dead_code()
        manager(graph, inference)
        if inference:
            in_place(graph)
        if graph.owning_module is not None:
            graph.owning_module.recompile()
    return compat.boxed(gm.forward)


def in_place(graph: Graph) -> None:
    """Undo functionalisation where it is safe, so that the eager graph clones no cache.

    Where torch cannot (its decomposition knows no tensors on the meta device) the graph stays
    functional, which is slower and as right.
    """
    from fusion.graph.surgery import decompose_mutations

    before = Snapshot(graph)
    try:
        decompose_mutations(graph)
    except Exception:
        log.debug("the graph stays functional", exc_info=True)
        before.restore()


def _own_error(error: BaseException) -> BaseException | None:
    """A fusion error out of the wrappers that Inductor puts around what a pass raises."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, (FusionRequiredError, ConfigError)):
            return current.with_traceback(None)
        seen.add(id(current))
        inner = getattr(current, "inner_exception", None)
        current = inner or current.__cause__ or current.__context__
    return None


def _trace(entry: Entry) -> None:
    """The report as an artefact of torch's structured trace, where ``tlparse`` shows it."""
    try:
        compat.trace_artifact("fusion_report", lambda: entry.report().to_json())
    except Exception:
        log.debug("the report could not be traced", exc_info=True)
