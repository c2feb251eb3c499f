"""The machine that a graph is compiled for: probed once, or described in words.

A :class:`Target` is data. Asking whether a kernel may run compares its requirements with a
target, so a laptop can answer for an MI300X: ``Target.parse("gfx942", aiter="0.1.20")``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass, field

import torch
from packaging.version import InvalidVersion, Version

_FNUZ_ARCHS = ("gfx940", "gfx941", "gfx942")


@dataclass(frozen=True)
class Target:
    """A device kind and the versions around it.

    ``vendor`` is ``cpu``, ``nvidia``, ``amd`` or ``other``; ``arch`` is ``cpu``, ``sm_90``,
    ``gfx942``, ...; ``origin`` says where the knowledge came from (``probed`` or ``parsed``);
    ``versions`` maps package names to version texts (sorted pairs, so that targets hash).
    """

    vendor: str
    arch: str
    origin: str = "parsed"
    versions: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def current(cls) -> Target:
        """The machine this process runs on; probed at the first call, never raises."""
        return _probe()

    @classmethod
    def parse(cls, text: str | None, **versions: str) -> Target:
        """Describe a machine: ``cpu``, ``sm_90`` or a gfx name, with package versions.

        ``gfx942:sramecc+:xnack-`` (what ROCm prints) is understood; anything that is not
        recognised becomes vendor ``other`` and is refused by every gate with ``gate.arch``.
        """
        arch = (text or "").strip().lower().split(":")[0]
        if arch == "cpu":
            vendor = "cpu"
        elif re.fullmatch(r"sm_?\d{2,3}[a-z]?", arch):
            vendor, arch = "nvidia", "sm_" + arch.removeprefix("sm").removeprefix("_")
        elif re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
            vendor = "amd"
        else:
            vendor, arch = "other", arch or "unknown"
        return cls(vendor, arch, "parsed", tuple(sorted(versions.items())))

    def with_versions(self, **versions: str) -> Target:
        """The same machine with other package versions."""
        merged = {**dict(self.versions), **versions}
        return Target(self.vendor, self.arch, self.origin, tuple(sorted(merged.items())))

    def version_text(self, package: str) -> str | None:
        """The version of a package as written, or None where it is not installed."""
        return dict(self.versions).get(package)

    def version(self, package: str) -> Version | None:
        """The version of a package, or None where it is absent or not a PEP 440 version."""
        text = self.version_text(package)
        try:
            return Version(text) if text else None
        except InvalidVersion:
            return None

    @property
    def device_type(self) -> str:
        """The torch device type (``cpu`` or ``cuda``; ROCm builds call themselves cuda)."""
        return "cuda" if self.vendor in ("nvidia", "amd") else "cpu"

    def for_device(self, device_type: str) -> Target:
        """This machine as tensors on a torch device see it: a GPU's CPU is a CPU.

        A machine that was only described (origin "parsed") is what somebody wants to know about,
        wherever the tensors of the question are, and stays itself.
        """
        if self.origin != "probed" or device_type in (self.device_type, "meta"):
            return self
        vendor = "cpu" if device_type == "cpu" else "other"
        return Target(vendor, device_type, self.origin, self.versions)

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The chip's own 8-bit float: e4m3fnuz on gfx940 to gfx942, e4m3fn everywhere else."""
        if self.arch in _FNUZ_ARCHS:
            return torch.float8_e4m3fnuz
        return torch.float8_e4m3fn

    @property
    def capability(self) -> int | None:
        """NVIDIA compute capability as an integer (90 for sm_90); None elsewhere."""
        match = re.fullmatch(r"sm_(\d+)[a-z]?", self.arch)
        return int(match.group(1)) if match else None

    def __str__(self) -> str:
        return self.arch if self.vendor == "cpu" else f"{self.arch} ({self.vendor})"


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # a broken dist-info must not break `import fusion`
        return None


@functools.lru_cache(maxsize=1)
def _probe() -> Target:
    versions = {"torch": str(torch.__version__)}
    for name, distributions in {
        "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm"),
        "aiter": ("amd-aiter",),  # the package called "aiter" on PyPI is an unrelated library
        "transformers": ("transformers",),
    }.items():
        for distribution in distributions:
            if (found := _installed(distribution)) is not None:
                versions[name] = found
                break
    vendor, arch = "cpu", "cpu"
    try:
        if torch.version.hip:
            versions["rocm"] = str(torch.version.hip)
        if torch.version.cuda:
            versions["cuda"] = str(torch.version.cuda)
        if torch.cuda.is_available():
            if torch.version.hip:
                vendor = "amd"
                name = torch.cuda.get_device_properties(0).gcnArchName
                arch = str(name).split(":")[0] or "unknown"
            else:
                major, minor = torch.cuda.get_device_capability(0)
                vendor, arch = "nvidia", f"sm_{major}{minor}"
    except Exception as error:  # driver trouble: say so in the arch, run on the CPU
        versions["probe-error"] = f"{type(error).__name__}: {error}"
    return Target(vendor, arch, "probed", tuple(sorted(versions.items())))
