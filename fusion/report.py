"""What fusion did to a compile, as data: sites, graphs, and the report that holds them.

A *site* is one place that a pass looked at: every KV-cache write and every attention call is
one, fused or not. Everything here is plain data (JSON in, JSON out); rendering lives in
:mod:`fusion.render`, the JSON Schema in ``fusion/schema/report.schema.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fusion.reason import Reason

SCHEMA = 1
STATUSES = ("fused", "partial", "missed", "refused", "off")
"""``fused``: the whole chain that is there was taken; ``partial``: a smaller fusion of the
ladder; ``missed``: no pattern was recognised; ``refused``: recognised, but a gate, a safety rule
or validation forbade it; ``off``: the options (or a training graph) switched the pass off."""


class CandidateLike(Protocol):
    """What selection says about one kernel (structural, so that floors stay apart)."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""

    @property
    def accepted(self) -> bool:
        """Whether every requirement was met."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The unmet requirements."""


@dataclass(frozen=True)
class Candidate:
    """A kernel that was looked at, as read back from a stored report."""

    kernel: str
    accepted: bool
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Site:
    """One place in a graph and what became of it.

    ``pass_name`` is the pass that looked (``"pass"`` in JSON); ``layer`` the module path and
    ``source`` the ``file:line`` of the model; ``operation`` the canonical operation that the
    chain was (or would have been) replaced by; ``kernel`` the chosen kernel. ``reasons`` are in
    order of importance: the first one is what the table shows. ``facts`` is JSON-ready
    knowledge read from the graph; ``nodes`` maps ``name``, ``target``, ``fact`` and ``source``
    of each node of the site; ``validation`` holds at least ``status`` and ``max_abs_error``.
    ``depth`` tells how far matching got (larger: a nearer miss); ``hint`` the single change
    that would have made it match; ``before`` and ``after`` are listings of the nodes that
    changed. ``applicable`` is False for a site that the pass leaves alone by design (a causal
    attention call under ``non_causal_attention``): listed, but no miss.
    """

    pass_name: str
    status: str
    operation: str | None = None
    kernel: str | None = None
    layer: str | None = None
    source: str | None = None
    reasons: tuple[Reason, ...] = ()
    candidates: tuple[CandidateLike, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    nodes: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    validation: Mapping[str, Any] | None = field(default=None, hash=False)
    depth: int = 0
    hint: str | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    applicable: bool = True

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {', '.join(STATUSES)}")

    @property
    def near_miss(self) -> bool:
        """Something was wanted here and not done completely."""
        return self.applicable and self.status != "fused"

    @property
    def node(self) -> str | None:
        """The name of a node of it, or that stands in its way."""
        names = [str(n["name"]) for n in self.nodes] + [r.node for r in self.reasons if r.node]
        return names[0] if names else None

    def place(self) -> str:
        """``layer at file:line``, one of the two, else ``node NAME``, else a dash."""
        known = [p for p in (self.layer, self.source) if p]
        return " at ".join(known) or (f"node {self.node}" if self.node else "-")

    def outcome(self) -> tuple[Any, ...]:
        """What sites must share to be shown as one group."""
        reasons = tuple((r.code, r.message, r.have, r.need) for r in self.reasons)
        return (self.pass_name, self.status, self.operation, self.kernel, self.applicable, reasons)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "pass": self.pass_name,
            "layer": self.layer,
            "source": self.source,
            "status": self.status,
            "applicable": self.applicable,
            "operation": self.operation,
            "kernel": self.kernel,
            "reasons": [r.to_dict() for r in self.reasons],
            "candidates": [
                {
                    "kernel": c.kernel,
                    "accepted": c.accepted,
                    "reasons": [r.to_dict() for r in c.reasons],
                }
                for c in self.candidates
            ],
            "facts": plain(self.facts),
            "nodes": [plain(n) for n in self.nodes],
            "validation": None if self.validation is None else plain(self.validation),
            "depth": self.depth,
            "hint": self.hint,
            "before": list(self.before),
            "after": list(self.after),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Site:
        """The inverse of :meth:`to_dict`."""
        return cls(
            pass_name=data["pass"],
            status=data["status"],
            operation=data["operation"],
            kernel=data["kernel"],
            layer=data["layer"],
            source=data["source"],
            reasons=_reasons(data["reasons"]),
            candidates=tuple(
                Candidate(c["kernel"], c["accepted"], _reasons(c["reasons"]))
                for c in data["candidates"]
            ),
            facts=data["facts"],
            nodes=tuple(data["nodes"]),
            validation=data["validation"],
            depth=data.get("depth", 0),
            hint=data.get("hint"),
            before=tuple(data.get("before", ())),
            after=tuple(data.get("after", ())),
            applicable=data.get("applicable", True),
        )


@dataclass(frozen=True)
class PassStatus:
    """One pass of the pipeline: ``built``, or ``not-built`` and why."""

    name: str
    status: str
    reasons: tuple[Reason, ...] = ()
    mode: str = "auto"
    origin: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "name": self.name,
            "status": self.status,
            "reasons": [r.to_dict() for r in self.reasons],
            "mode": self.mode,
            "origin": self.origin,
            "options": plain(self.options),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PassStatus:
        """The inverse of :meth:`to_dict`."""
        return cls(
            data["name"],
            data["status"],
            _reasons(data["reasons"]),
            data.get("mode", "auto"),
            data.get("origin", ""),
            data.get("options", {}),
        )


@dataclass(frozen=True)
class GraphReport:
    """One compiled (or captured) graph.

    ``id`` is unique within the process; ``phase`` says where the graph was seen
    (``post_grad``, ``aot_eager``, ``explain``, ``export``); ``cached`` that the compiled code
    came from a compile cache and the sites from the report stored with it. ``reasons`` concern
    the graph as a whole; ``times`` are seconds; ``nodes`` the number of nodes before and after.
    ``stored`` (not in JSON) says that this was read back, from a file or a cache: files may have
    changed since, so no line of code is shown with it.
    """

    id: str
    sites: tuple[Site, ...] = ()
    cached: bool = False
    phase: str = ""
    reasons: tuple[Reason, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict, hash=False)
    nodes: tuple[int, int] = (0, 0)
    stored: bool = field(default=False, compare=False, repr=False)

    def groups(self) -> list[Group]:
        """The sites, put together by identical outcome."""
        return group(self.sites)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "id": self.id,
            "cached": self.cached,
            "phase": self.phase,
            "reasons": [r.to_dict() for r in self.reasons],
            "sites": [s.to_dict() for s in self.sites],
            "times": dict(self.times),
            "nodes": list(self.nodes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphReport:
        """The inverse of :meth:`to_dict`."""
        before, after = data.get("nodes", (0, 0))
        return cls(
            data["id"],
            tuple(Site.from_dict(s) for s in data["sites"]),
            data["cached"],
            data.get("phase", ""),
            _reasons(data.get("reasons", ())),
            data.get("times", {}),
            (before, after),
            stored=True,
        )


@dataclass(frozen=True)
class Report:
    """Everything that is known about what fusion did, for one configuration and target."""

    graphs: tuple[GraphReport, ...] = ()
    passes: tuple[PassStatus, ...] = ()
    target: Mapping[str, Any] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    times: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all graphs, in order."""
        return tuple(s for g in self.graphs for s in g.sites)

    def count(self, pass_name: str, status: str = "fused") -> int:
        """How many sites of a pass have a status."""
        return sum(s.pass_name == pass_name and s.status == status for s in self.sites)

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report with the graphs of several (the first one's target, versions, passes)."""
        found = list(reports)
        if not found:
            return cls()
        passes: dict[str, PassStatus] = {}
        times: dict[str, float] = {}
        for report in found:
            for p in report.passes:
                passes.setdefault(p.name, p)
            for name, seconds in report.times.items():
                times[name] = times.get(name, 0.0) + seconds
        graphs = tuple(g for r in found for g in r.graphs)
        return replace(found[0], graphs=graphs, passes=tuple(passes.values()), times=times)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping (see ``fusion/schema/report.schema.json``)."""
        return {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "target": dict(self.target),
            "config": plain(self.config),
            "passes": [p.to_dict() for p in self.passes],
            "graphs": [g.to_dict() for g in self.graphs],
            "times": dict(self.times),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of :meth:`to_dict`. Raises ``ValueError`` for another schema number."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"report schema {data.get('schema')!r}; this version reads {SCHEMA}")
        return cls(
            tuple(GraphReport.from_dict(g) for g in data["graphs"]),
            tuple(PassStatus.from_dict(p) for p in data["passes"]),
            data["target"],
            data["versions"],
            data.get("config", {}),
            data["times"],
        )

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def to_text(self, *, all_sites: bool = False) -> str:
        """Plain text: a table grouped by identical outcome, then every miss with its reasons.

        Lines of model code are shown where their files are here, as they are now.
        """
        from fusion.codeline import code_line
        from fusion.render import to_text

        return to_text(self, all_sites=all_sites, code=code_line)

    def to_html(self) -> str:
        """One self-contained HTML page (no network, light and dark)."""
        from fusion.codeline import code_line
        from fusion.render import to_html

        return to_html(self, code=code_line)

    def __str__(self) -> str:
        return self.to_text()


@dataclass(frozen=True)
class Group:
    """Sites of one graph with the same outcome."""

    sites: tuple[Site, ...]

    @property
    def first(self) -> Site:
        """A site that stands for all."""
        return self.sites[0]


def group(sites: Sequence[Site]) -> list[Group]:
    """Sites with equal outcome together, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Site]] = {}
    for site in sites:
        found.setdefault(site.outcome(), []).append(site)
    return [Group(tuple(s)) for s in found.values()]


def plain(value: Any) -> Any:
    """Turn any value into what JSON can hold; what it cannot becomes its text.

    Non-finite floats become text too, since JSON has none.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=str)
    return str(value)


def _reasons(data: Iterable[Mapping[str, Any]]) -> tuple[Reason, ...]:
    return tuple(Reason.from_dict(dict(r)) for r in data)
