"""One packed weight for q_proj, k_proj and v_proj of an unmodified transformers model.

Kernels that take packed qkv want one GEMM; transformers models call three projections.
:func:`pack_qkv` lets the three share one weight, each returning its slice of the *same* linear, and
the pass :mod:`fusion.passes.merge_linears` merges the three equal GEMMs of the compiled graph into
one. In eager mode each projection multiplies with its own rows only, as before.

Names: `named_parameters()` now has `<attention>.qkv_packed.weight` and `.bias`, while
`state_dict()` and `load_state_dict()` go on speaking of `q_proj.weight`, `k_proj.weight` and
`v_proj.weight`, so that checkpoints load before and after packing. The entries of `state_dict()`
are views of the packed weight. :func:`unpack_qkv` gives the three separate linears back.

Numbers: the same rows are multiplied with the same input, but a GEMM of another width may add in
another order. Slices of the packed GEMM are therefore equal to the separate ones up to rounding,
not to the bit. Biases of which only some projections have one are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_PACKED = "qkv_packed"


@dataclass(frozen=True)
class PackResult:
    """Which attention modules were packed, and why the others were not (by module path)."""

    packed: tuple[str, ...]
    skipped: dict[str, str]


class PackedLinear(nn.Module):
    """Holds `weight [sum(sizes), in_features]` and `bias [sum(sizes)]` or None of the projections
    `names`; `biased` says which of them had a bias of their own."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.names = tuple(linears)
        parts = tuple(linears.values())
        self.sizes = tuple(part.out_features for part in parts)
        self.in_features = parts[0].in_features
        self.biased = tuple(part.bias is not None for part in parts)
        grad = any(part.weight.requires_grad for part in parts)
        weight = torch.cat([part.weight.detach() for part in parts])
        self.weight = nn.Parameter(weight, requires_grad=grad)
        if any(self.biased):
            biases = [
                part.weight.new_zeros(part.out_features)
                if part.bias is None
                else part.bias.detach()
                for part in parts
            ]
            self.bias: nn.Parameter | None = nn.Parameter(torch.cat(biases), requires_grad=grad)
        else:
            self.register_parameter("bias", None)

    def rows(self, index: int) -> slice:
        """The rows of projection `index` in the packed weight."""
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        parts = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
        return f"in_features={self.in_features}, {parts}, bias={any(self.biased)}"


class PackedSlice(nn.Module):
    """Stands where one projection was: `[..., in_features] -> [..., out_features]`."""

    def __init__(self, packed: PackedLinear, index: int) -> None:
        super().__init__()
        # In a tuple, so that the weight is not registered a second time under this module.
        self._holder = (packed,)
        rows = packed.rows(index)
        self.start, self.stop = rows.start, rows.stop
        self.in_features, self.out_features = packed.in_features, rows.stop - rows.start

    def forward(self, x: Tensor) -> Tensor:
        """The slice of the packed linear; compiled code computes all of it, to be merged."""
        packed = self._holder[0]
        if torch.compiler.is_compiling():
            return F.linear(x, packed.weight, packed.bias)[..., self.start : self.stop]
        bias = None if packed.bias is None else packed.bias[self.start : self.stop]
        return F.linear(x, packed.weight[self.start : self.stop], bias)

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return f"{_PACKED}[{self.start}:{self.stop}]"


def pack_qkv(model: nn.Module) -> PackResult:
    """Pack the q, k and v projections of every attention layer of `model`, in place.

    A layer is packed where q_proj, k_proj and v_proj are plain `nn.Linear` modules of one input
    width, dtype and device, without hooks. Layers with a fused qkv projection have nothing to
    pack and are not mentioned; others are returned with the reason. Packing twice changes
    nothing. Peak memory: one layer's weights more than before.
    """
    packed: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        children = {p: getattr(module, p, None) for p in PROJECTIONS}
        if any(child is None for child in children.values()) or hasattr(module, _PACKED):
            continue
        why = _unpackable(children)
        if why is not None:
            skipped[name] = why
            continue
        _pack(module, {p: children[p] for p in PROJECTIONS})  # type: ignore[misc]
        packed.append(name)
    return PackResult(tuple(packed), skipped)


def unpack_qkv(model: nn.Module) -> tuple[str, ...]:
    """The inverse of :func:`pack_qkv`; returns the paths of the attention modules restored."""
    restored = []
    for name, module in list(model.named_modules()):
        packed = getattr(module, _PACKED, None)
        if not isinstance(packed, PackedLinear):
            continue
        for index, projection in enumerate(packed.names):
            setattr(module, projection, _linear(packed, index))
        for handle in module.__dict__.pop("_fusion_pack_hooks"):
            handle.remove()
        delattr(module, _PACKED)
        restored.append(name)
    return tuple(restored)


def _unpackable(children: dict[str, Any]) -> str | None:
    kinds = {name: type(child) for name, child in children.items()}
    for name, kind in kinds.items():
        if kind is not nn.Linear:
            return f"{name} is a {kind.__name__}, not a plain nn.Linear"
    parts = list(children.values())
    for name, child in children.items():
        if any((child._forward_hooks, child._forward_pre_hooks, child._backward_hooks)) or hasattr(
            child, "_hf_hook"
        ):
            return f"{name} has hooks"
    if len({part.in_features for part in parts}) > 1:
        return "the projections differ in in_features"
    if len({(part.weight.dtype, part.weight.device) for part in parts}) > 1:
        return "the projections differ in dtype or device"
    return None


def _pack(module: nn.Module, linears: dict[str, nn.Linear]) -> None:
    packed = PackedLinear(linears)
    packed.train(module.training)
    for index, name in enumerate(linears):
        setattr(module, name, PackedSlice(packed, index).train(module.training))
    module.add_module(_PACKED, packed)
    hooks = (
        module.register_state_dict_post_hook(_split_state),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_join_state),  # type: ignore[no-untyped-call]
    )
    module.__dict__["_fusion_pack_hooks"] = hooks


def _linear(packed: PackedLinear, index: int) -> nn.Linear:
    rows = packed.rows(index)
    size, biased = packed.sizes[index], packed.biased[index]
    # On the meta device first: the weights are there already.
    linear = nn.Linear(packed.in_features, size, bias=biased, device="meta")
    grad = packed.weight.requires_grad
    linear.weight = nn.Parameter(packed.weight.detach()[rows].clone(), requires_grad=grad)
    if biased and packed.bias is not None:
        linear.bias = nn.Parameter(packed.bias.detach()[rows].clone(), requires_grad=grad)
    return linear.train(packed.training)


def _split_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    packed = getattr(module, _PACKED)
    weight = state.pop(f"{prefix}{_PACKED}.weight")
    bias = state.pop(f"{prefix}{_PACKED}.bias", None)
    for index, name in enumerate(packed.names):
        rows = packed.rows(index)
        state[f"{prefix}{name}.weight"] = weight[rows]
        if bias is not None and packed.biased[index]:
            state[f"{prefix}{name}.bias"] = bias[rows]


def _join_state(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    packed = getattr(module, _PACKED)
    for kind in ("weight", "bias"):
        keys = [f"{prefix}{name}.{kind}" for name in packed.names]
        if not any(key in state for key in keys):
            continue
        mine = getattr(packed, kind)
        if mine is None:
            continue  # a bias that the model does not have stays behind as an unexpected key
        parts = []
        for index, key in enumerate(keys):
            # What the checkpoint does not have keeps its present value.
            old = mine.detach()[packed.rows(index)]
            parts.append(state.pop(key, old).to(device=old.device, dtype=old.dtype))
        state[f"{prefix}{_PACKED}.{kind}"] = torch.cat(parts)
