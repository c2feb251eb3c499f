"""The pipeline: passes in a row over one graph, verified after each, never fatal.

A pass is a frozen dataclass whose fields are its options. It reads the graph, may rewrite it,
and answers with a :class:`~fusion.report.Site` for every place that it looked at::

    @dataclass(frozen=True)
    class MyPass:
        name: ClassVar[str] = "my_pass"
        max_tokens: int | None = None          # an option

        def run(self, graph: Graph, context: Context) -> list[Site]: ...

Plug-ins offer passes through the entry-point group ``fusion.passes`` (see
:mod:`fusion.discovery`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.fx import Graph, Node

from fusion.config import Config
from fusion.fingerprint import (
    digest_of,
    environment,
    function_source,
    module_source,
    package_sources,
)
from fusion.graph import compat, foreign
from fusion.graph.check import Interface
from fusion.graph.provenance import layer_of, source_of
from fusion.graph.snapshot import Snapshot
from fusion.match import attention, cache_write
from fusion.reason import Reason
from fusion.report import CandidateLike, GraphReport, PassStatus, Site
from fusion.target import Target

log = logging.getLogger("fusion")
MOST_VALIDATIONS = 2048
"""Results of checks that one configuration keeps (a few hundred bytes each)."""


class Pass(Protocol):
    """What the pipeline needs of a pass (a frozen dataclass; see the module's docstring).

    Two further members are optional: ``unavailable(config, target) -> tuple[Reason, ...]`` says
    why the pass cannot even be built here, and ``order: ClassVar[int]`` (default 100) sorts the
    pipeline (smaller first).
    """

    @property
    def name(self) -> str:
        """The name under which options and reports know the pass."""

    def run(self, graph: Graph, context: Context) -> list[Site]:
        """Rewrite the graph where it is proved right; return every site that was looked at."""


@dataclass
class Context:
    """What a pass is told about the compile.

    ``mode`` is this pass's own mode (``auto`` or ``required``; an ``off`` pass is called too,
    with ``mode == "off"``, and must then only *list* its sites as ``off``, rewriting nothing).
    ``phase`` is ``post_grad`` (Inductor), ``aot_eager``, ``explain`` or ``export``.
    ``training`` tells that the graph belongs to a computation with gradients: as for ``off``,
    sites are listed, nothing is rewritten. ``validations`` holds the results of earlier checks
    by what was checked; every manager of an equal configuration shares it, also across threads:
    read it with ``get`` and add to it with :meth:`remember`, which keeps it bounded (``lock`` is
    taken there; two threads may still check the same thing at once, which only costs time).
    ``times`` collects seconds by label.
    """

    config: Config
    target: Target
    mode: str
    phase: str
    graph: Graph
    pass_name: str = ""
    training: bool = False
    validations: dict[Any, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock, repr=False)
    times: dict[str, float] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)

    @property
    def rewrite(self) -> bool:
        """Whether the pass may change the graph at all."""
        return self.mode != "off" and not self.training

    def remember(self, key: Any, result: Any) -> None:
        """Keep the result of a check; the oldest one goes where there are too many."""
        with self.lock:
            while len(self.validations) >= MOST_VALIDATIONS and key not in self.validations:
                del self.validations[next(iter(self.validations))]
            self.validations[key] = result

    @property
    def required(self) -> bool:
        """Whether a site that is not fused fails the compile."""
        return self.mode == "required"

    @property
    def fake_mode(self) -> Any | None:
        """The graph's ``FakeTensorMode``, or None."""
        return compat.fake_mode_of(self.graph)

    @property
    def shape_env(self) -> Any | None:
        """The graph's ``ShapeEnv``, or None where all sizes are numbers."""
        return compat.shape_env_of(self.graph)

    def site(
        self,
        status: str,
        node: Node | None = None,
        *,
        operation: str | None = None,
        kernel: str | None = None,
        reasons: Iterable[Reason] = (),
        candidates: Iterable[CandidateLike] = (),
        facts: Mapping[str, Any] | None = None,
        nodes: Iterable[Mapping[str, Any]] = (),
        validation: Mapping[str, Any] | None = None,
        layer: str | None = None,
        source: str | None = None,
        **more: Any,
    ) -> Site:
        """Make a site; layer and source are read from ``node`` where they are not given."""
        if node is not None:
            layer = layer or layer_of(node)
            source = source or source_of(node)
        return Site(
            self.pass_name,
            status,
            operation,
            kernel,
            layer,
            source,
            tuple(reasons),
            tuple(candidates),
            dict(facts or {}),
            tuple(nodes),
            validation,
            **more,
        )

    def report_site(self, status: str, node: Node | None = None, **fields: Any) -> Site:
        """Make a site and put it into the report (besides those that ``run`` returns)."""
        site = self.site(status, node, **fields)
        self.sites.append(site)
        return site


class FusionRequiredError(RuntimeError):
    """A pass in mode ``required`` did not fuse every site; the message holds the table."""


@dataclass(frozen=True)
class PassEvent:
    """What the observer is told after each pass."""

    pass_name: str
    graph: Graph
    before: Snapshot
    changed: bool
    sites: tuple[Site, ...]
    seconds: float
    phase: str
    name: str = ""


Observer = Callable[[PassEvent], None]
Collector = Callable[[GraphReport], None]


class PassManager:
    """Runs a tuple of passes over a graph and reports; also an Inductor custom graph pass.

    ``not_built`` lists passes that could not be built, with their reasons. ``fingerprint``
    contributes what lower floors cannot know (kernel availability) to :meth:`uuid`.
    ``collector`` is given the report of every graph that went through; ``asked`` (an attribute)
    is called where a compile cache asks for :meth:`uuid`, which it does before it looks.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        config: Config | None = None,
        target: Target | None = None,
        *,
        observer: Observer | None = None,
        collector: Collector | None = None,
        not_built: Sequence[PassStatus] = (),
        origins: Mapping[str, str] | None = None,
        fingerprint: Callable[[], object] | None = None,
        phase: str = "post_grad",
    ) -> None:
        self.passes = tuple(passes)
        self.config = config or Config()
        self.target = target or Target.current()
        self.observer = observer
        self.collector = collector
        self.not_built = tuple(not_built)
        self.origins = dict(origins or {})
        self.phase = phase
        self.asked: Callable[[], None] | None = None
        self._fingerprint = fingerprint
        self._validations: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def statuses(self) -> tuple[PassStatus, ...]:
        """Every pass, built or not."""
        built = tuple(
            PassStatus(
                p.name,
                "built",
                mode=self.config.mode(p.name),
                origin=self.origins.get(p.name, type(p).__module__),
                options=options_of(p),
            )
            for p in self.passes
        )
        return built + self.not_built

    def share_validations(self, cache: dict[Any, Any], lock: threading.RLock) -> None:
        """Use a cache of validations (and its lock) together with other managers."""
        self._validations, self._lock = cache, lock

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Inductor's hook. Raises :class:`FusionRequiredError` and nothing else."""
        training = compat.looks_like_training(graph) if is_inference is None else not is_inference
        self.run(graph, training=training)

    def run(
        self, graph: Graph, *, phase: str | None = None, training: bool = False, name: str = ""
    ) -> GraphReport:
        """Run every pass on ``graph`` in place and return what they saw.

        Raises :class:`FusionRequiredError` where a required pass left a site unfused.
        """
        started = time.perf_counter()
        phase = phase or self.phase
        times: dict[str, float] = {}
        sites: list[Site] = []
        size = len(graph.nodes)
        for p in self.passes:
            sites += self._run_one(p, graph, phase, training, times, name)
        times["total"] = time.perf_counter() - started
        report = GraphReport(name, tuple(sites), False, phase, (), times, (size, len(graph.nodes)))
        if self.collector is not None:
            self.collector(report)
        self.check_required(report.sites)
        return report

    def _run_one(
        self, p: Pass, graph: Graph, phase: str, training: bool, times: dict[str, float], name: str
    ) -> list[Site]:
        started = time.perf_counter()
        mode = self.config.mode(p.name)
        try:
            before, interface = Snapshot(graph), Interface.of(graph)
        except Exception as error:  # an odd graph: the pass cannot be undone, so it does not run
            log.warning("fusion: the graph cannot be remembered", exc_info=True)
            text = f"the graph cannot be remembered: {type(error).__name__}: {error}"
            return [Site(p.name, "refused", reasons=(Reason("internal.error", text),))]
        context = Context(
            self.config, self.target, mode, phase, graph, p.name, training,
            self._validations, self._lock, times,
        )  # fmt: skip
        changed = False
        try:
            sites = [*p.run(graph, context), *context.sites]
            for site in sites:
                if not isinstance(site, Site):
                    raise TypeError(f"pass {p.name} answered with {site!r}, not a Site")
            if changed := before.changed():
                interface.check(graph, before)
                if not context.rewrite:
                    why = "of training" if training else f"although it is {mode}"
                    raise RuntimeError(f"pass {p.name} changed a graph {why}")
        except (Exception, SystemExit) as error:
            log.debug("pass %s failed", p.name, exc_info=True)
            sites = self._failed(p, error, before, context)
            changed = False
        seconds = time.perf_counter() - started
        times[p.name] = times.get(p.name, 0.0) + seconds
        if self.observer is not None:
            event = PassEvent(p.name, graph, before, changed, tuple(sites), seconds, phase, name)
            try:
                self.observer(event)
            except Exception:
                log.warning("fusion: the observer failed after pass %s", p.name, exc_info=True)
        return sites

    def _failed(
        self, p: Pass, error: BaseException, before: Snapshot, context: Context
    ) -> list[Site]:
        """Undo the pass, and list what it would have rewritten, each with the error."""
        text = f"{type(error).__name__}: {error}"
        if before.changed():
            before.restore()
        log.warning("fusion: pass %s failed and was undone: %s", p.name, text)
        reason = Reason("internal.error", text)
        lost = [
            dataclasses.replace(s, status="refused", reasons=(reason,)) if s.status == "off" else s
            for s in self._listed(p, context, before)
        ]
        if any(reason in s.reasons for s in lost):
            return lost
        return [Site(p.name, "refused", reasons=(reason,)), *lost]

    def _listed(self, p: Pass, context: Context, before: Snapshot) -> list[Site]:
        """What a pass that failed sees with rewriting off; nothing where that fails too."""
        if not context.rewrite:
            return []
        again = dataclasses.replace(context, mode="off", sites=[])
        try:
            sites = [*p.run(context.graph, again), *again.sites]
            if not before.changed() and all(isinstance(s, Site) for s in sites):
                return sites
        except (Exception, SystemExit):
            log.debug("pass %s failed again", p.name, exc_info=True)
        if before.changed():
            before.restore()
        return []

    def check_required(self, sites: Iterable[Site]) -> None:
        """Raise :class:`FusionRequiredError` where a required pass left a site unfused."""
        missed = [s for s in sites if s.near_miss and self.config.mode(s.pass_name) == "required"]
        if missed:
            raise FusionRequiredError(required_text(missed))

    def uuid(self) -> str:
        """What a compile cache must tell apart, as a hexadecimal text.

        Covers the sources of fusion and of plug-ins, every pass with its fields, config, target
        with versions, kernel availability, registered foreign operators, and the ``FUSION_*``
        environment switches.
        """
        if self.asked is not None:
            self.asked()
        parts: list[object] = [package_sources(), environment(), repr(self.config)]
        parts += [repr(self.target), self.phase]
        for p in self.passes:
            cls = type(p)
            sources = (module_source(cls.__module__), function_source(cls.run))
            parts.append((p.name, cls.__qualname__, sources, repr(p)))
        parts += [(s.name, s.status) for s in self.not_built]
        # What users taught the recognisers decides what is rewritten.
        parts += [foreign.registered(), attention.registered(), cache_write.registered()]
        if self._fingerprint is not None:
            parts.append(self._fingerprint())
        return digest_of(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> PassManager:
        """Itself: Inductor copies its whole config, custom passes included, to compare it."""
        return self

    def for_inductor(self) -> PassManager:
        """The same object, registered as an Inductor custom graph pass."""
        compat.register_graph_pass(PassManager)
        return self


def options_of(p: Pass) -> dict[str, Any]:
    """The fields of a pass, by name."""
    if not dataclasses.is_dataclass(p):
        return {}
    return {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}


def required_text(missed: Sequence[Site]) -> str:
    """The message of :class:`FusionRequiredError`: every unfused site with its reasons."""
    names = ", ".join(sorted({s.pass_name for s in missed}))
    lines = [f"{names} is required, but {len(missed)} site(s) are not fused:"]
    for site in missed:
        lines.append(f"  {site.place()}: {site.status}")
        lines += [f"    {r}" for r in site.reasons]
        for candidate in site.candidates:
            if not candidate.accepted:
                lines.append(f"    kernel {candidate.kernel} refused:")
                lines += [f"      {r}" for r in candidate.reasons]
        if site.reasons:
            lines.append(f"    remedy: {site.reasons[0].remedy}")
    lines.append("Set the pass to 'auto' to compile without them.")
    return "\n".join(lines)
