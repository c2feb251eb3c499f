"""Options that several commands take, and what they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.tools.console import CommandError

if TYPE_CHECKING:
    from fusion import Target


class Phase(str, Enum):
    """Which forward of a served model."""

    prefill = "prefill"
    decode = "decode"


class Cache(str, Enum):
    """Which KV cache a Hugging Face model is given."""

    paged = "paged"
    static = "static"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="module:function or file.py:function returning (model, args, kwargs); a Hugging "
        "Face model directory or config.json (no weights are read); or a .pt2 file.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CHIP[,PKG=VERSION...]",
        help="The machine to answer for: cpu, sm_90, gfx942, ... (default: this one). Versions "
        "may follow: gfx942,aiter=0.1.20,rocm=7.1.",
    ),
]
KernelsOption = Annotated[
    str | None,
    typer.Option("--kernels", metavar="A,B", help="Kernels in order of preference."),
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of torch.compile(options=...), such as numerics=exact or "
        "qk_norm_rope_kv_cache=off. May be repeated.",
    ),
]
PhaseOption = Annotated[
    Phase, typer.Option("--phase", help="For a Hugging Face model: which forward.")
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, help="For a Hugging Face model: sequences.")
]
TokensOption = Annotated[
    int, typer.Option("--tokens", min=2, help="New tokens of each sequence in a prefill.")
]
CacheOption = Annotated[
    Cache, typer.Option("--cache", help="For a Hugging Face model: its KV cache.")
]
LayoutOption = Annotated[
    str, typer.Option("--layout", metavar="NAME", help="Layout of the paged cache.")
]
BlockOption = Annotated[
    int, typer.Option("--block-size", min=1, help="Tokens in a block of the paged cache.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="NAME", help="Dtype of a Hugging Face model (default: its config's)."
    ),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option("--cache-dtype", metavar="NAME", help="Dtype of the cache, such as fp8."),
]
AllLayersOption = Annotated[
    bool,
    typer.Option(
        "--all-layers", help="Capture every layer instead of one layer of each distinct kind."
    ),
]
PackOption = Annotated[
    bool,
    typer.Option("--pack-qkv", help="For a Hugging Face model: pack q, k and v projections first."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace output files that exist.")
]


def target_of(text: str | None) -> Target | None:
    """``gfx942,aiter=0.1.20`` as a target; None for this machine.

    Raises :class:`CommandError` for a chip that nobody knows, a version without a name and a
    version that is none (PEP 440).
    """
    if text is None:
        return None
    from packaging.version import InvalidVersion, Version

    from fusion.explaining import resolve_target

    chip, *pairs = (part.strip() for part in text.split(","))
    versions: dict[str, str] = {}
    for pair in pairs:
        name, equals, version = pair.partition("=")
        if not (name and equals and version):
            raise CommandError(f"--target: {pair!r} is not PACKAGE=VERSION")
        try:
            Version(version)
        except InvalidVersion:
            raise CommandError(f"--target: {version.strip()!r} in {pair!r} is no version") from None
        versions[name.strip()] = version.strip()
    target = resolve_target(chip)
    if target.vendor == "other":
        raise CommandError(
            f"--target: {chip!r} is no chip that fusion knows; "
            "use cpu, an NVIDIA name such as sm_90, or an AMD name such as gfx942"
        )
    return target.with_versions(**versions) if versions else target


def config_of(kernels: str | None, options: Sequence[str] | None) -> dict[str, Any]:
    """The options of ``torch.compile`` out of ``--kernels`` and ``--option``.

    Values are read as JSON where they are JSON (true, 8, {"max_tokens": 8}), else as text.
    """
    found: dict[str, Any] = {}
    for option in options or ():
        key, equals, value = option.partition("=")
        if not (key and equals):
            raise CommandError(f"--option: {option!r} is not KEY=VALUE")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value
    if kernels is not None:
        found["kernels"] = [name.strip() for name in kernels.split(",") if name.strip()]
    return found


def dtype_of(name: str | None, option: str = "--dtype") -> Any:
    """A torch dtype by name (``bf16``, ``bfloat16``, ``fp8``, ``float8_e4m3fn``), or None."""
    if name is None:
        return None
    import torch

    short = {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e4m3fnuz": "float8_e4m3fnuz",
    }
    found = getattr(torch, short.get(name.lower(), name.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype):
        raise CommandError(f"{option}: {name!r} is no dtype; use bf16, fp16, fp32, fp8, ...")
    return found


def layout_of(name: str) -> Any:
    """A cache layout by name. Raises :class:`CommandError` naming the valid ones."""
    from fusion import KVCacheLayout

    try:
        return KVCacheLayout.parse(name)
    except (ValueError, KeyError) as error:
        raise CommandError(f"--layout: {error}") from error
