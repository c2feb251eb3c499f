"""``fusion.verify``: run a model fused and unfused and compare, outputs and cache bytes.

Both runs go through AOTAutograd without a code generator (``inner="aot_eager"``), so that a
difference is fusion's and not Inductor's. Each run has copies of every tensor that it may
write; parameters are shared; each begins at the same state of the random number generators. A
third run keeps the values that leave each site.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from fusion.backend import decompositions, header, in_place
from fusion.build import make_config, make_manager
from fusion.config import Config
from fusion.discovery import pass_names
from fusion.graph import compat
from fusion.graph.capture import nested_graphs, own_code, plain_function
from fusion.pipeline import PassEvent, PassManager
from fusion.report import GraphReport, Report, Site


class VerifyError(RuntimeError):
    """The model cannot be run twice (its state cannot be copied)."""


@dataclass(frozen=True)
class Difference:
    """One tensor of the fused run against the unfused one.

    ``equal`` means equal bytes (NaNs of the same bits included); ``max_abs_error`` is taken in
    float64 over finite entries, None where the shapes or dtypes differ.
    """

    name: str
    equal: bool
    max_abs_error: float | None
    mismatched: int
    shape: tuple[int, ...]
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {**vars(self), "shape": list(self.shape)}

    def __str__(self) -> str:
        if self.equal:
            return f"{self.name}: equal"
        return f"{self.name}: {self.mismatched} elements differ, at most by {self.max_abs_error}"


INNOCENT = (
    "nothing was fused, so fusion cannot be the cause: the model itself differs from run to run"
)
"""Said of runs that differ without a rewrite."""


@dataclass(frozen=True)
class Verification:
    """The outcome: ``report`` is that of the fused run, each site with its own differences.

    ``outputs`` are the tensors that the model returned, ``mutated`` those that the model wrote
    (buffers, caches among the arguments); ``sites`` pairs every fused site with the values that
    leave it, in graph order. ``rewritten`` tells whether any pass changed a graph at all (one of a
    plug-in may without a site).
    """

    report: Report
    outputs: tuple[Difference, ...]
    mutated: tuple[Difference, ...]
    sites: tuple[tuple[Site, tuple[Difference, ...]], ...] = field(default=())
    rewritten: bool = True

    @property
    def equal(self) -> bool:
        """Every output and every written byte is the same."""
        return all(d.equal for d in (*self.outputs, *self.mutated))

    @property
    def max_abs_error(self) -> float:
        """The largest error of an output or a written tensor (infinite where shapes differ)."""
        errors = [
            float("inf") if d.max_abs_error is None else d.max_abs_error
            for d in (*self.outputs, *self.mutated)
        ]
        return max(errors, default=0.0)

    @property
    def first_bad_site(self) -> Site | None:
        """The first site, in graph order, that passes on a different value."""
        for site, differences in self.sites:
            if not all(d.equal for d in differences):
                return site
        return None

    @property
    def innocent(self) -> bool:
        """The runs differ and fusion cannot be why: it changed nothing."""
        return not (self.equal or self.sites or self.rewritten)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "equal": self.equal,
            "max_abs_error": self.max_abs_error if self.max_abs_error < float("inf") else None,
            "outputs": [d.to_dict() for d in self.outputs],
            "mutated": [d.to_dict() for d in self.mutated],
            "sites": [
                {"layer": s.layer, "source": s.source, "differences": [d.to_dict() for d in ds]}
                for s, ds in self.sites
            ],
            "report": self.report.to_dict(),
        }

    def to_text(self) -> str:
        """Plain text: the verdict, every difference, the first bad site."""
        head = "equal, bit by bit" if self.equal else "NOT equal"
        count = len(self.sites)
        sites = f"{count} fused site{'' if count == 1 else 's'}" if count else "nothing was fused"
        lines = [f"fused against unfused: {head} ({sites})"]
        lines += [f"  {d}" for d in (*self.outputs, *self.mutated) if not d.equal]
        if self.innocent:
            lines.append(f"  {INNOCENT}")
        bad = self.first_bad_site
        if bad is not None:
            lines.append(f"  first site that differs: {bad.place()}")
        return "\n".join(lines) + "\n\n" + self.report.to_text()

    def __str__(self) -> str:
        return self.to_text()


def verify(
    model: Any, *args: Any, options: Mapping[str, Any] | Config | None = None, **kwargs: Any
) -> Verification:
    """Compare ``model(*args, **kwargs)`` fused and unfused, without gradients.

    The model, its buffers, the arguments and the random number generators (Python's, torch's on the
    CPU and on CUDA or ROCm devices) are left as they were; every run begins at their state.
    ``options`` are those of ``torch.compile(options=...)``; ``inner`` is ignored. Raises
    :class:`VerifyError` where the model or an argument cannot be copied.
    """
    config = make_config(options).replace(inner="aot_eager")
    off = config.replace(passes=tuple((name, "off") for name in sorted(pass_names())))
    call = (model, args, kwargs)
    with torch.no_grad(), compat.quiet_dynamo():
        taps = _Taps()
        graphs: list[GraphReport] = []
        manager = make_manager(config, collector=graphs.append, observer=taps.observe)
        with _same_chance():
            fused = _run(call, manager, _direct)
        with _same_chance():
            _run(call, make_manager(config), taps.tap(taps.fused))
        with _same_chance():
            unfused = _run(call, make_manager(off), taps.tap(taps.unfused))
    sites = tuple(taps.differences())
    shown = {id(site): found for site, found in sites}
    joined = GraphReport("verify", tuple(_noted(s, shown) for g in graphs for s in g.sites))
    return Verification(
        replace(header(manager), graphs=(replace(joined, phase="aot_eager"),)),
        tuple(_pairs(fused.outputs, unfused.outputs)),
        tuple(_pairs(fused.written(), unfused.written())),
        sites,
        taps.rewritten,
    )


@contextmanager
def _same_chance() -> Iterator[None]:
    """Puts the random number generators back at the end, so that the next run begins alike."""
    state = random.getstate()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if started else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)


def _noted(site: Site, shown: Mapping[int, tuple[Difference, ...]]) -> Site:
    found = shown.get(id(site))
    if found is None:
        return site
    errors = [d.max_abs_error for d in found if d.max_abs_error is not None]
    note = {"equal": all(d.equal for d in found), "max_abs_error": max(errors, default=None)}
    return replace(site, validation={**(site.validation or {"status": "none"}), "verify": note})


@dataclass
class _Run:
    """What one run left behind: outputs by name, and every tensor that it could have written."""

    outputs: dict[str, Any]
    state: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def written(self) -> dict[str, Any]:
        """The tensors of the state; both runs name them alike."""
        return {name: after for name, (_, after) in self.state.items()}


Finish = Callable[[GraphModule, int], Callable[..., Any]]


def _run(call: tuple[Any, Any, Any], manager: PassManager, finish: Finish) -> _Run:
    (model, args, kwargs), state = _copied(call)
    count = 0

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal count
        index, count = count, count + 1

        def compiler(fx: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            for graph in nested_graphs(fx):
                graph.eliminate_dead_code()
                manager.run(graph, phase="aot_eager", name=str(index))
            return finish(fx, index)

        table = decompositions("aot_eager")
        return compat.compile_functional(
            gm, inputs, inference=compiler, forward=compiler, decompositions=table
        )

    result = torch.compile(own_code(plain_function(model)), backend=backend)(*args, **kwargs)
    leaves = torch.utils._pytree.tree_flatten_with_path(result)[0]
    outputs = {f"output{torch.utils._pytree.keystr(path)}": value for path, value in leaves}
    return _Run(outputs, state)


def _direct(gm: GraphModule, index: int) -> Callable[..., Any]:
    """The graph as ``inner="aot_eager"`` runs it."""
    del index
    for graph in nested_graphs(gm):
        in_place(graph)
        if graph.owning_module is not None:
            graph.owning_module.recompile()
    return compat.boxed(gm.forward)


_Place = tuple[int, str, int]
"""Graph, reader, and place among the reader's inputs."""


class _Taps:
    """Values that leave the fused sites, by graph and reader, from two runs."""

    def __init__(self) -> None:
        self.fused: dict[_Place, Any] = {}
        self.unfused: dict[_Place, Any] = {}
        self.rewritten = False
        self._sites: list[tuple[Site, int, list[tuple[str, int]]]] = []
        self._wanted: dict[tuple[int, str], set[int]] = {}

    def observe(self, event: PassEvent) -> None:
        """Note, for each fused site, the surviving nodes that read what it made."""
        self.rewritten |= event.changed
        alive = {n.name for n in event.graph.nodes}
        index = int(event.name or 0)
        for site in event.sites:
            if site.status not in ("fused", "partial"):
                continue
            inside = {str(n["name"]) for n in site.nodes} - alive
            reads = [(n, i) for n, i in event.before.reads_of(inside) if n in alive]
            self._sites.append((site, index, reads))
            for name, place in reads:
                self._wanted.setdefault((index, name), set()).add(place)

    def tap(self, into: dict[_Place, Any]) -> Finish:
        """A finisher that interprets the functional graph and keeps the wanted values."""
        wanted = self._wanted

        class Keeping(Interpreter):
            index = 0

            def run_node(self, n: Node) -> Any:
                if places := wanted.get((self.index, n.name)):
                    read: list[Node] = []
                    map_arg((n.args, n.kwargs), read.append)
                    for place in places:
                        value = self.env[read[place]]
                        kept = value.clone() if isinstance(value, torch.Tensor) else value
                        into[self.index, n.name, place] = kept
                return super().run_node(n)

        def finish(gm: GraphModule, index: int) -> Callable[..., Any]:
            def run(*values: Any) -> Any:
                interpreter = Keeping(gm)
                interpreter.index = index
                return interpreter.run(*values)

            return compat.boxed(run)

        return finish

    def differences(self) -> list[tuple[Site, tuple[Difference, ...]]]:
        """Every fused site with the differences of its readers."""
        found = []
        for site, index, reads in self._sites:
            keys = [(index, name, place) for name, place in reads]
            pairs = [(k[1], self.fused.get(k), self.unfused.get(k)) for k in keys]
            compared = tuple(
                compare(f"read by {name}", a, b)
                for name, a, b in pairs
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            )
            found.append((site, compared))
        return found


class _Copier(TorchFunctionMode):
    """Notes which tensors a deep copy copied, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__deepcopy__ and isinstance(result, torch.Tensor):
            self.pairs.append((args[0], result))
        return result


def _copied(call: tuple[Any, Any, Any]) -> tuple[Any, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A copy of a call in which only parameters are shared, and its tensors by name."""
    model = call[0]
    owner = getattr(model, "__self__", getattr(model, "_orig_mod", model))
    names: dict[int, str] = {}
    memo: dict[int, Any] = {}
    if isinstance(owner, torch.nn.Module):
        memo = {id(p): p for p in owner.parameters()}
        names = {id(b): f"buffer {name}" for name, b in owner.named_buffers()}
    copier = _Copier()
    try:
        with copier:
            made = copy.deepcopy(call, memo)
    except Exception as error:
        raise VerifyError(f"the model or its arguments cannot be copied: {error}") from error
    state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, (old, new) in enumerate(copier.pairs):
        state[names.get(id(old), f"tensor {number} {tuple(old.shape)}")] = (old, new)
    return made, state


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    found = [
        compare(name, a[name], b[name])
        for name in a
        if isinstance(a[name], torch.Tensor) and isinstance(b.get(name), torch.Tensor)
    ]
    for name in sorted({*a} ^ {*b}):
        found.append(Difference(f"{name} (in one run only)", False, None, 0, (), "-"))
    return found


def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare two tensors by bytes and by value."""
    shape, dtype = tuple(a.shape), str(a.dtype).removeprefix("torch.")
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(name, False, None, a.numel(), shape, dtype)
    differ = _bits(a) != _bits(b)
    count = int(differ.sum())
    if not count:
        return Difference(name, True, 0.0, 0, shape, dtype)
    x, y = (_wide(t) for t in (a, b))
    error = (x - y).abs()
    error = error[torch.isfinite(error)]
    return Difference(
        name, False, float(error.max()) if error.numel() else 0.0, count, shape, dtype
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor).to(torch.float64)
    narrow = tensor.element_size() == 1 and tensor.is_floating_point()  # fp8 converts by float32
    return (tensor.to(torch.float32) if narrow else tensor).to(torch.float64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dense = tensor.detach().contiguous()
    if dense.dtype == torch.bool or dense.is_complex():
        return torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.view(kinds[dense.element_size()])
