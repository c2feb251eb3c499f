"""Build the call of an operation: plain, or functional around one that writes a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fusion.graph import functional
from fusion.graph.emit import EmitError, Emitter, SurgeryError
from fusion.graph.operands import PlaneLike
from fusion.graph.values import all_equal, known, plain
from fusion.reason import Reason


class Caller:
    """Emits one call of ``op``; ``bases`` is None for an operation that writes nothing."""

    def __init__(self, emit: Emitter, op: Any, bases: tuple[Node, ...] | None) -> None:
        self.emit = emit
        self.op = op
        self.bases = bases

    def call(
        self, values: dict[str, Any], planes: Mapping[str, PlaneLike], before: Node
    ) -> tuple[Node, int, tuple[torch.Tensor, ...]]:
        """The call node, how many outputs come before the new contents, and their metadata.

        ``values`` are nodes and constants by argument name, ``planes`` the cache arguments.
        """
        kwargs = dict(values)
        for name, value in kwargs.items():
            if isinstance(value, torch.SymInt):
                kwargs[name] = self.emit.size(value, before)
        kwargs = self._with_defaults(kwargs, planes)
        returns = self._returns(kwargs, planes)
        if self.bases is None:
            args, rest = self._positional(kwargs)
            call = self.emit.call(self.op, args, rest, before=before, value=returns)
            return call, len(self.op._schema.returns), ()
        bases = list(self.bases)
        for name, plane in planes.items():
            kwargs |= self._view_arguments(name, plane, bases, before)
        kwargs["_all_bases"] = bases
        contents = tuple(self._like(b) for b in bases)
        outs = returns if isinstance(returns, tuple) else (returns,)
        call = self.emit.call(
            functional.AUTO_FUNCTIONALIZED_V2,
            (self.op,),
            kwargs,
            before=before,
            value=(*outs, *contents),
        )
        return call, functional.returns_count(self.op), contents

    def _with_defaults(self, kwargs: dict[str, Any], planes: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments in schema order, each given explicitly, as torch writes its wrappers."""
        out: dict[str, Any] = {}
        known_names = set()
        for argument in self.op._schema.arguments:
            known_names.add(argument.name)
            if argument.name in planes:
                continue
            if argument.name in kwargs:
                out[argument.name] = kwargs[argument.name]
            elif argument.has_default_value():
                out[argument.name] = argument.default_value
            else:
                raise EmitError(f"{self.op} needs {argument.name}")
        unknown = set(kwargs) - known_names
        if unknown:
            raise EmitError(f"{self.op} has no argument {', '.join(sorted(unknown))}")
        return out

    def _positional(self, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, rest = [], {}
        for argument in self.op._schema.arguments:
            if argument.kwarg_only:
                rest[argument.name] = kwargs[argument.name]
            else:
                args.append(kwargs[argument.name])
        return tuple(args), rest

    def _returns(self, kwargs: dict[str, Any], planes: Mapping[str, PlaneLike]) -> Any:
        """Metadata of the returns: the op's own fake implementation, on caches of that shape."""
        given = dict(kwargs)
        with self.emit.fake(), torch.no_grad():
            for name, plane in planes.items():
                device = plane.base.meta["val"].device
                given[name] = torch.empty_strided(
                    plain(plane.size), plain(plane.stride), dtype=plane.dtype, device=device
                )
        if not any(a.alias_info is not None for a in self.op._schema.arguments) or planes:
            return self.emit.evaluate(self.op, (), given)
        raise EmitError(f"{self.op} writes an argument that is not a cache")

    def _view_arguments(
        self, name: str, plane: PlaneLike, bases: list[Node], before: Node
    ) -> dict[str, Any]:
        base = plane.base.meta["val"]
        if base.dtype != plane.dtype:
            raise SurgeryError(
                Reason(
                    "match.cache-view",
                    "the cache is written as another dtype than its buffer has",
                    have=str(base.dtype), need=str(plane.dtype), node=plane.base.name,
                )
            )  # fmt: skip
        view: dict[str, Any] = {f"_{name}_base_index": bases.index(plane.base)}
        same = all_equal(plane.size, base.shape) and all_equal(plane.stride, base.stride())
        if same and known(plane.storage_offset == base.storage_offset()):
            return view
        view[f"_{name}_size"] = tuple(self.emit.size(s, before) for s in plane.size)
        view[f"_{name}_stride"] = tuple(self.emit.size(s, before) for s in plane.stride)
        view[f"_{name}_storage_offset"] = self.emit.size(plane.storage_offset, before)
        return view

    def _like(self, base: Node) -> torch.Tensor:
        """Metadata of a new content: same geometry, a storage of its own."""
        value = base.meta["val"]
        with self.emit.fake(), torch.no_grad():
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
