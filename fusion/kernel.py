"""A kernel, and a call described in words: what selection compares.

Nothing here runs a kernel. A :class:`KernelCall` is built from fake or real tensors alike, so
the same question can be asked at compile time, at run time and for a machine that is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fusion.config import Config
from fusion.graph.shapes import example
from fusion.target import Target

if TYPE_CHECKING:
    from fusion.requires import Requires

Dim: TypeAlias = "int | None"
"""A size or stride: an ``int``, or None where it is symbolic."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, strides (in elements) and place of one tensor argument.

    A symbolic size is None; ``hints`` holds the example sizes that the compiler saw. A
    ``base`` names the storage that the tensor is a view of, where that is known (packed qkv
    and packed caches show as equal bases), with ``storage_offset`` in elements.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    stride: tuple[Dim, ...]
    device: str = "cpu"
    storage_offset: Dim = 0
    base: object | None = None
    hints: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, base: object | None = None) -> TensorSpec:
        """Describe a real, fake or meta tensor without adding guards."""
        return cls(
            shape=tuple(_dim(s) for s in tensor.shape),
            dtype=tensor.dtype,
            stride=tuple(_dim(s) for s in tensor.stride()),
            device=tensor.device.type,
            storage_offset=_dim(tensor.storage_offset()),
            base=base,
            hints=tuple(example(s) for s in tensor.shape),
        )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def contiguous(self) -> bool:
        """Dense in row-major order, as far as the known sizes and strides say."""
        expected: int | None = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected = None if size is None or expected is None else expected * size
        return True

    def hint(self, dim: int) -> int | None:
        """The size of a dimension, or the example size where it is symbolic."""
        size = self.shape[dim]
        if size is not None:
            return size
        return self.hints[dim] if self.hints else None

    def __str__(self) -> str:
        dims = ", ".join("?" if s is None else str(s) for s in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"


def _dim(size: Any) -> Dim:
    return size if isinstance(size, int) else None


@dataclass(frozen=True)
class KernelCall:
    """A call of a canonical operation, described: nothing of it has to exist.

    ``tensors`` holds the tensor arguments by name (None where an optional one is absent),
    ``attributes`` everything else (numbers, strings, dtypes; sizes that are symbolic are None).
    ``kv_layout`` is ``NHD`` (any strided view) or ``SHUFFLE``.
    """

    op: str
    tensors: Mapping[str, TensorSpec | None]
    attributes: Mapping[str, Any]
    target: Target
    config: Config = field(default_factory=Config)
    kv_layout: str = "NHD"

    def tensor(self, name: str) -> TensorSpec | None:
        """A tensor argument, or None where it is absent."""
        return self.tensors.get(name)

    def need(self, name: str) -> TensorSpec:
        """A tensor argument that must be there (KeyError names it)."""
        spec = self.tensors.get(name)
        if spec is None:
            raise KeyError(f"{self.op} has no tensor {name!r}")
        return spec


Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """One implementation of one canonical operation.

    ``fn`` takes the operation's arguments without ``kernel``; ``lowering`` (optional) is an
    Inductor lowering for calls that name this kernel; ``describe`` says what it would do for a
    call (tile choice, launches), for the report.
    """

    name: str
    op: str
    fn: Function = field(compare=False)
    requires: Requires
    backend: str = ""
    lowering: Function | None = field(default=None, compare=False)
    describe: Callable[[KernelCall], Mapping[str, Any]] | None = field(default=None, compare=False)
