"""``fusion.explain``: what would fuse, what would not and why, without running a kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion.build import describe_config, describe_target, make_config, make_manager, versions
from fusion.config import Config
from fusion.graph.capture import Captured, CaptureError, nested_graphs
from fusion.graph.capture import capture as _capture
from fusion.pipeline import FusionRequiredError, Observer, PassManager
from fusion.report import GraphReport, Report
from fusion.target import Target

__all__ = ["CaptureError", "Captured", "capture", "explain", "resolve_target"]


def capture(
    model: Any,
    *args: Any,
    dynamic: bool | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> list[Captured]:
    """The functional ATen graphs of ``model(*args, **kwargs)``, without running a kernel.

    ``model`` is a module, a function or a ``torch.export.ExportedProgram`` (then ``args`` are
    not needed); its tensors may be real, fake or on the meta device. Gradients are off.
    ``dynamic`` means what it means for ``torch.compile``. Raises :class:`CaptureError`.
    """
    with torch.no_grad():
        return _capture(model, args, kwargs, dynamic=dynamic, device=device)


def explain(
    model: Any,
    *args: Any,
    target: str | Target | None = None,
    options: Mapping[str, Any] | Config | None = None,
    dynamic: bool | None = None,
    observer: Observer | None = None,
    **kwargs: Any,
) -> Report:
    """Run the pipeline on the model's graphs and report; no kernel runs, nothing is allocated.

    The same passes and gates as in a compile, on graphs taken without Inductor, for inference
    (gradients off). ``target`` names another machine (``"gfx942"``, ``"sm_90"``, or a
    :class:`~fusion.target.Target` with package versions). ``options`` are those of
    ``torch.compile(options=...)``; a pass in mode ``required`` is only reported here.
    The model is neither changed nor compiled: later compiles of it are as if nothing had been
    asked. Raises :class:`CaptureError` where the model cannot be traced at all.
    """
    started = time.perf_counter()
    config = make_config(options)
    machine = resolve_target(target)
    device = None if target is None else machine.device_type
    manager = make_manager(config, machine, phase="explain", observer=observer)
    graphs = capture(model, *args, dynamic=dynamic, device=device, **kwargs)
    traced = time.perf_counter() - started
    reports = tuple(run_on(manager, g) for g in graphs)
    total = time.perf_counter() - started
    return Report(
        reports,
        manager.statuses(),
        describe_target(machine),
        versions(),
        describe_config(config),
        {"capture": traced, "fusion": total - traced, "total": total},
    )


def run_on(manager: PassManager, captured: Captured) -> GraphReport:
    """The pipeline's report on one captured graph (which it may rewrite)."""
    phase = "export" if captured.id.startswith("export") else "explain"
    parts: list[GraphReport] = []
    collector, manager.collector = manager.collector, parts.append
    try:
        for graph in nested_graphs(captured.gm):
            # explaining never fails; the sites say what a required pass would have failed for
            with contextlib.suppress(FusionRequiredError):
                manager.run(graph, phase=phase, training=captured.training)
    finally:
        manager.collector = collector
    return replace(_joined(captured.id, parts), phase=phase, reasons=tuple(captured.reasons))


def _joined(name: str, parts: Sequence[GraphReport]) -> GraphReport:
    times: dict[str, float] = {}
    for part in parts:
        for label, seconds in part.times.items():
            times[label] = times.get(label, 0.0) + seconds
    return GraphReport(
        name,
        tuple(s for p in parts for s in p.sites),
        times=times,
        nodes=(sum(p.nodes[0] for p in parts), sum(p.nodes[1] for p in parts)),
    )


def resolve_target(target: str | Target | None) -> Target:
    """A target from what a user gives.

    A bare chip name is taken to have the versions of torch, Triton and transformers that are
    installed here; AITER's version must be said: ``Target.parse("gfx942", aiter="0.1.20")``.
    """
    if isinstance(target, Target):
        return target
    here = Target.current()
    if target is None or target.strip().lower() == here.arch:
        return here
    known = {k: v for k, v in here.versions if k in ("torch", "triton", "transformers")}
    return Target.parse(target, **known)
