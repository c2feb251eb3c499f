"""Where a model comes from: a function, a Hugging Face configuration, an exported program."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion.tools.console import CommandError

#: How a pickled Python object is called inside a .pt2 archive (torch 2.11 to 2.13).
_PICKLED = "opaque_obj"


@dataclass(frozen=True)
class Request:
    """What the user asked of the source. Only Hugging Face models look at all of it.

    ``real`` asks for tensors with (random) values instead of tensors of the meta device.
    """

    phase: str = "decode"
    batch: int = 1
    tokens: int = 16
    cache: str = "paged"
    layout: str = "packed"
    block_size: int = 16
    dtype: Any = None
    cache_dtype: Any = None
    all_layers: bool = False
    pack_qkv: bool = False
    real: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model with its arguments.

    ``twins`` maps the index of each captured layer to the layers that it stands for, below the
    module path ``prefix``; it is empty where every layer is captured. ``phase`` names the
    forward of a Hugging Face model. ``notes`` are for stderr.
    """

    name: str
    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    twins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    prefix: str = ""
    phase: str = ""


def load(source: str, request: Request) -> Loaded:
    """The model that ``source`` names.

    Raises :class:`CommandError` where there is none, naming what was looked for.
    """
    path = Path(source)
    if source.endswith(".pt2"):
        return _exported(path)
    if path.is_dir() or source.endswith(".json"):
        from fusion.tools.huggingface import load_config

        return load_config(path, request)
    head, colon, name = source.rpartition(":")
    if colon and head and name.isidentifier():
        return _from_function(source, head, name)
    raise CommandError(
        f"{source!r} is no SOURCE: not an existing folder or config.json, not a .pt2 file, and "
        "not module:function or file.py:function. Names on a model hub are not looked up; "
        "download the model's config.json and pass its path."
    )


def _from_function(source: str, head: str, name: str) -> Loaded:
    module = _module(head)
    function = getattr(module, name, None)
    if function is None:
        raise CommandError(f"{head} has no {name!r}")
    import torch

    try:
        with torch.no_grad():
            made = function()
    except Exception as error:
        raise CommandError(f"{source} raised {_short(error)}") from error
    if not isinstance(made, tuple):
        made = (made, (), {})
    model, args, kwargs = (*made, *((), {})[len(made) - 1 :]) if len(made) < 3 else made[:3]
    if len(made) > 3 or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise CommandError(
            f"{source} must return (model, args, kwargs): a callable, a tuple and a mapping"
        )
    if not callable(model) and not isinstance(model, torch.export.ExportedProgram):
        raise CommandError(f"{source} returned a {type(model).__name__}, which cannot be called")
    return Loaded(source, model, tuple(args), dict(kwargs))


def _module(head: str) -> Any:
    """Import a module by name, or a file by path, as ``python`` itself would find it.

    What it imports is looked for in the work folder and, first, in the folder of the file. They
    stay on the import path, because a model may import when it is called; the command line takes
    them off when the command ends.
    """
    _import_from(os.getcwd())
    try:
        if not head.endswith(".py"):
            return importlib.import_module(head)
        path = Path(head)
        if not path.is_file():
            raise CommandError(f"there is no file {head}")
        _import_from(str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{head} could not be imported: {_short(error)}") from error


def _import_from(folder: str) -> None:
    """Look in ``folder`` first. An import path of before is not touched (it is put back later)."""
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _exported(path: Path) -> Loaded:
    """Load an exported program without running code that the file brings along."""
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = [n for n in archive.namelist() if _PICKLED in n.rsplit("/", 1)[-1]]
    except zipfile.BadZipFile as error:
        raise CommandError(f"{path} is no .pt2 archive") from error
    if pickled:
        raise CommandError(
            f"{path} holds pickled Python objects ({pickled[0]}): loading them would run code "
            "of that file. Load it yourself and use module:function."
        )
    import torch

    # torch falls back to full unpickling for example inputs; this forbids it.
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise CommandError(f"{path} could not be loaded: {_short(error)}") from error
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before
    return Loaded(str(path), program)


def _short(error: BaseException) -> str:
    """The last line of a traceback and the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
