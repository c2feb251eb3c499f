"""What the stand-in plays, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

NAN = float("nan")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class Abort(RuntimeError):
    """The real library would end the process here (AITER_CHECK, a fault on host or device)."""


@dataclass
class State:
    """Release and chip that are played; ``device_pointers`` are scales that live on the device."""

    version: Version = field(default_factory=lambda: Version("0.1.20"))
    arch: str = "gfx942"
    device_pointers: set[int] = field(default_factory=set)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def fp8(self) -> torch.dtype:
        return torch.float8_e4m3fnuz if self.arch == "gfx942" else torch.float8_e4m3fn

    def at_least(self, text: str) -> bool:
        return self.version >= Version(text)


STATE = State()


def need(ok: bool, message: str) -> None:
    """A check of the real library; up to 0.1.15 an exception, then the end of the process."""
    if not ok:
        raise Abort(message) if STATE.at_least("0.1.16") else RuntimeError(message)


def fault(ok: bool, message: str) -> None:
    """An access that the real library does not check and that may fault."""
    if not ok:
        raise Abort(f"memory fault: {message}")


def poison(*tensors: Tensor | None) -> None:
    """What comes of memory read as something that it is not."""
    for t in tensors:
        if t is None:
            continue
        if t.dtype in FP8:
            t.view(torch.uint8).fill_(0x7F if t.dtype == torch.float8_e4m3fn else 0x80)
        else:
            t.fill_(NAN)


def behind(x: Tensor) -> int:
    """Elements of the storage behind the last element of a tensor."""
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() // x.element_size() - last - 1


def to_fp8(x: Tensor, dtype: torch.dtype, *, saturate: bool) -> Tensor:
    limit = torch.finfo(dtype).max
    if saturate:
        return x.clamp(-limit, limit).to(dtype)
    out = x.clamp(-limit, limit).to(dtype)
    bits = out.view(torch.uint8).clone()
    bits[x.abs() > limit] = 0x7F if dtype == torch.float8_e4m3fn else 0x80
    return bits.view(dtype)


def strict_contiguous(x: Tensor, first: int) -> bool:
    """Dense from dimension ``first`` on, sizes of one not excepted."""
    expected = 1
    for size, stride in list(zip(x.shape, x.stride(), strict=True))[:first:-1]:
        if stride != expected:
            return False
        expected *= size
    return first > 0 or x.stride(0) == expected
