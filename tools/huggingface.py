"""A Hugging Face model from its ``config.json`` alone: no weights, no memory, no foreign code.

The model is built on the meta device and called with the inputs of one forward of serving. A
model folder is data here: nothing in it is imported (``trust_remote_code`` stays off), and what
a config could use to have code fetched (attention implementations on a hub) is dropped.

By default one layer of each distinct kind is kept and stands for its twins. Layers are of one
kind where their modules, the shapes of their parameters, and every plain attribute are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fusion.tools.console import CommandError, said_by
from fusion.tools.options import layout_of
from fusion.tools.sources import Loaded, Request

# Keys that tell transformers to fetch or run code, or to wrap layers in packages of their own.
_DROPPED = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "quantization_config",
    "custom_pipelines",
)
_INDEX = "layer_idx"
_SPARE_BLOCKS = 64


def load_config(path: Path, request: Request) -> Loaded:
    """The model of a ``config.json`` or of the folder that holds one.

    Raises :class:`CommandError` for a file that is no configuration, for a model that only its
    own code could build, and for models without a decoder that keeps a KV cache.
    """
    data = _read(path)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "a Hugging Face model needs transformers: pip install 'torch-fusion-passes"
            "[transformers]'"
        ) from error
    notes: list[str] = []
    config = _config(data, path, notes)
    model = _build(config, request, path)
    twins: dict[int, tuple[int, ...]] = {}
    prefix = ""
    if request.pack_qkv:
        from fusion.integrations.transformers import pack_qkv

        pack_qkv(model)
    if not request.all_layers and (found := _decoder_layers(model)) is not None:
        prefix, layers = found
        twins = _keep_one_of_each_kind(model, layers)
        count = sum(map(len, twins.values()))
        if len(twins) < count:
            kinds = f"{len(twins)} layer" + ("s stand" if len(twins) > 1 else " stands")
            notes.append(f"{kinds} for {count}; --all-layers captures them all")
    try:
        model, kwargs = _inputs(model, request)
    except (NotImplementedError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error
    return Loaded(str(path), model, (), kwargs, tuple(notes), twins, prefix, request.phase)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CommandError(f"there is no file {file}")
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} is no JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise CommandError(f"{file} is no model configuration: it has no model_type")
    return data


def _config(data: dict[str, Any], path: Path, notes: list[str]) -> Any:
    """The configuration of the text decoder, as transformers' own class."""
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        own = "auto_map" in data
        reason = (
            "it wants to run code of its own (auto_map), which fusion never does with a file "
            "that it is given (trust_remote_code is off)"
            if own
            else "the installed transformers does not know it"
        )
        raise CommandError(
            f"{path}: model type {kind!r} cannot be built: {reason}. Build the model yourself "
            "and pass module:function."
        )
    if "auto_map" in data:
        notes.append(f"{path} brings code of its own (auto_map): not run, transformers' is used")
    if "quantization_config" in data:
        notes.append(f"{path} is quantised: explained as if it were not")
    clean = _without(data)
    try:
        config = CONFIG_MAPPING[kind].from_dict(clean)
        text = config.get_text_config(decoder=True)
    except Exception as error:
        raise CommandError(f"{path}: {said_by(error)}") from error
    if text is not config:
        notes.append(f"{path} has several parts; its text decoder is explained")
    return text


def _without(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without(value) if isinstance(value, Mapping) else value
        for key, value in data.items()
        if key not in _DROPPED
    }


def _build(config: Any, request: Request, path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = request.dtype or getattr(config, "dtype", None) or torch.bfloat16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, torch.bfloat16)
    try:
        torch.manual_seed(0)
        with torch.device("cpu" if request.real else "meta"):
            builder: Any = AutoModelForCausalLM
            model = builder.from_config(
                config, dtype=dtype, trust_remote_code=False, attn_implementation="sdpa"
            )
    except Exception as error:
        raise CommandError(
            f"{path}: a causal language model cannot be built: {said_by(error)}"
        ) from error
    return model.eval().requires_grad_(False)


def _decoder_layers(model: Any) -> tuple[str, torch.nn.ModuleList] | None:
    """The list of decoder layers and its path; None where it cannot be told."""
    count = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == count
            and all(_has_index(layer) for layer in module)
        ):
            return name, module
    return None


def _has_index(layer: torch.nn.Module) -> bool:
    return any(isinstance(getattr(m, _INDEX, None), int) for m in layer.modules())


def _keep_one_of_each_kind(model: Any, layers: torch.nn.ModuleList) -> dict[int, tuple[int, ...]]:
    """Drop every layer that equals an earlier one; new index -> the layers that it stands for."""
    kinds: dict[str, list[int]] = {}
    typed = getattr(model.config, "layer_types", None) or [None] * len(layers)
    for index, layer in enumerate(layers):
        kinds.setdefault(f"{typed[index]} {signature(layer)}", []).append(index)
    groups = list(kinds.values())
    kept = [group[0] for group in groups]
    if len(kept) == len(layers):
        return {i: (i,) for i in range(len(layers))}
    count = len(layers)
    chosen = [layers[i] for i in kept]
    for new, layer in enumerate(chosen):
        for module in layer.modules():
            if isinstance(getattr(module, _INDEX, None), int):
                setattr(module, _INDEX, new)
    del layers[:]
    layers.extend(chosen)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    owners = [*configs.values(), *model.modules()]
    for owner in owners:
        for key, value in vars(owner).items():
            if isinstance(value, (list, tuple)) and len(value) == count and not key.startswith("_"):
                vars(owner)[key] = type(value)(value[i] for i in kept)
            elif key == "num_hidden_layers" and value == count:
                vars(owner)[key] = len(kept)
    return {new: tuple(group) for new, group in enumerate(groups)}


def signature(layer: torch.nn.Module) -> str:
    """Everything that can make a layer's graph differ, as text: types, shapes, plain attributes."""
    lines: list[str] = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if key not in (_INDEX, "training") and not key.startswith("_") and _is_plain(value)
        }
        lines.append(f"{name} {type(module).__qualname__} {sorted(plain.items())}")
    lines += [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in layer.named_parameters()]
    lines += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in layer.named_buffers()]
    return "\n".join(lines)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _inputs(model: Any, request: Request) -> tuple[Any, dict[str, Any]]:
    """The arguments of one forward: a prefill, or a decode step after some tokens."""
    tokens = request.tokens if request.phase == "prefill" else 1
    past = 0 if request.phase == "prefill" else request.tokens - 1
    if request.cache == "static":
        return _static_inputs(model, request, tokens, past)
    import fusion.integrations.transformers as paged

    model.set_attn_implementation("fusion_paged")
    per_sequence = -(-(tokens + past) // request.block_size)
    cache = paged.PagedKVCache.for_model(
        model,
        num_blocks=max(_SPARE_BLOCKS, request.batch * per_sequence),
        block_size=request.block_size,
        layout=layout_of(request.layout),
        dtype=request.cache_dtype,
        device="cpu" if request.real else "meta",
        **_scales(request.cache_dtype),
    )
    if cache.recurrent:
        raise NotImplementedError(
            "layers with a recurrent state are not run on a paged cache by this command; "
            "use --cache static or module:function"
        )
    sequences = [cache.allocate(past) for _ in range(request.batch)]
    inputs = cache.inputs(sequences, tokens)
    inputs.token_ids.zero_()
    return model, paged.forward_arguments(inputs)


def _scales(dtype: torch.dtype | None) -> dict[str, Any]:
    narrow = dtype is not None and dtype.is_floating_point and dtype.itemsize == 1
    return {"k_scale": 1.0, "v_scale": 1.0} if narrow else {}


def _static_inputs(
    model: Any, request: Request, tokens: int, past: int
) -> tuple[Any, dict[str, Any]]:
    from transformers import StaticCache

    from fusion.integrations.transformers import kv_layers
    from fusion.integrations.transformers.layers import cache_argument

    device = "cpu" if request.real else "meta"
    dtype = request.cache_dtype or model.dtype
    length = max(_SPARE_BLOCKS * request.block_size, tokens + past)
    cache = StaticCache(config=model.config, max_cache_len=length)
    layers: Any = cache.layers
    for layer, kv in zip(layers, kv_layers(model), strict=False):
        if kv is None:
            continue
        shape = (request.batch, kv.heads, 0)
        layer.lazy_initialization(
            torch.empty(*shape, kv.head_dim, dtype=dtype, device=device),
            torch.empty(*shape, kv.head_dim_v, dtype=dtype, device=device),
        )
        layer.device = torch.device("cpu")  # where tensors of the meta device are taken to live
    ids = torch.zeros(request.batch, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(past, past + tokens, device=device).expand(request.batch, -1)
    name = cache_argument(model.forward)
    return model, {
        "input_ids": ids,
        "position_ids": positions,
        name: cache,
        "use_cache": True,
        "return_dict": True,
    }
