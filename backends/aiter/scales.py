"""Copies of the fp8 scales in host memory, made without waiting for the device in the hot path.

AITER's pts operation dereferences its two scale tensors on the host. Reading a device tensor from
the host waits for the device, so it happens once per tensor and content: the copy is kept with the
tensor's identity and version, and every later step takes it from there. Under graph capture no
copy can be made; the one of the warm-up is used, and its value is frozen into the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class ScaleNotOnHostError(RuntimeError):
    """A scale is needed on the host while a graph is captured, and no copy was made before."""


def capturing() -> bool:
    """Whether the current stream is capturing a CUDA or HIP graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _read(scale: Tensor) -> Tensor:
    return scale.detach().to("cpu", torch.float32).reshape(1).clone()


@dataclass
class _Entry:
    tensor: weakref.ref[Tensor]
    version: int | None
    copy: Tensor


class HostScales:
    """A cache of host copies, by tensor identity and version.

    ``read`` copies one element to the host, ``is_capturing`` tells whether a graph is captured,
    ``on_host`` whether a tensor is there already (all three are replaced in tests only).
    """

    def __init__(
        self,
        read: Callable[[Tensor], Tensor] = _read,
        is_capturing: Callable[[], bool] = capturing,
        on_host: Callable[[Tensor], bool] = lambda t: t.device.type == "cpu",
    ) -> None:
        self._read, self._capturing, self._on_host = read, is_capturing, on_host
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._one: Tensor | None = None

    def get(self, scale: Tensor | None) -> Tensor:
        """One float32 element in host memory with the scale's value (None: 1).

        Raises:
            ScaleNotOnHostError: under graph capture, where the scale has no copy of its present
                version.
        """
        if scale is None:
            if self._one is None:
                self._one = torch.ones(1, dtype=torch.float32)
            return self._one
        if self._on_host(scale):
            return scale.detach().to(torch.float32).reshape(1).contiguous()
        version = None if scale.is_inference() else scale._version
        key = id(scale)
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and entry.tensor() is scale:
            # An inference tensor has no version: it is read anew wherever that is possible.
            current = entry.version == version and version is not None
            if current or (self._capturing() and entry.version == version):
                return entry.copy
        if self._capturing():
            raise ScaleNotOnHostError(
                "AITER wants the fp8 scales in host memory, and a device scale cannot be read "
                "while a graph is captured; run the model once before the capture, or pass the "
                "scales as CPU tensors"
            )
        copy = self._read(scale)
        made = _Entry(weakref.ref(scale, self._forget(key)), version, copy)
        with self._lock:
            self._entries[key] = made
        return copy

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(gone: object) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.tensor is gone:
                self._entries.pop(key, None)

        return forget

    def __len__(self) -> int:
        return len(self._entries)


HOST = HostScales()
"""The copies of this process."""
