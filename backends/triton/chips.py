"""The chips that the Triton kernels are for; what the gates of all of them say."""

from __future__ import annotations

from fusion.requires import Arch, Condition, MinCapability, PackageVersion, Vendor

# Those for which both the oldest and the newest Triton that we support compile. For another one the
# compiler fails at the first call, where it is too late to use another kernel.
AMD = (
    *("gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    *("gfx1200", "gfx1201", "gfx1250"),
)

CHIPS: tuple[Condition, ...] = (
    Vendor(("nvidia", "amd")),
    MinCapability(80),
    Arch(AMD, vendor="amd"),
    PackageVersion("triton", ">=3.6,<3.10"),
)
