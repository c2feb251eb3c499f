"""A Triton launch as an Inductor node: the same node that a user-defined Triton kernel becomes.

Inductor copies the kernel's source into the code that it generates, compiles it with its own
kernels, and launches it like one of them: no operator dispatch and no Python of ours at run time.

Private names of ``torch._inductor`` and ``torch._higher_order_ops`` are used throughout. Run on
torch 2.11 (H200) and 2.13 (CPU, generated code only).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_patching = threading.Lock()


def empty(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """IR of an uninitialised contiguous buffer; Inductor plans its memory."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(list(size), None, dtype=dtype, device=device)


def readable(x: Any) -> Any:
    """IR of an input as a buffer or a strided view of one, elements of its last dimension side by
    side. Nothing is computed or copied where that already holds."""
    from torch._inductor import ir

    data = ir.ExternKernel.realize_input(x)
    data.freeze_layout()
    stride = data.get_stride()
    if stride and not _equals(data.get_size()[-1], 1) and not _equals(stride[-1], 1):
        data = ir.ExternKernel.require_contiguous(data)
    return data if isinstance(data, ir.TensorBox) else ir.TensorBox(data)


def writable(x: Any) -> Any | None:
    """IR of an argument that the kernel writes, as a strided view of its buffer; None if it is
    not one (a copy would be written instead of the argument)."""
    from torch._inductor import ir

    data = x.data if isinstance(x, ir.TensorBox) else x
    if isinstance(data, ir.BaseView) and not isinstance(data, ir.ReinterpretView):
        data.realize()
        try:
            data = ir.ExternKernel.convert_to_reinterpret_view(data)
        except NotImplementedError:
            return None
    if isinstance(data, ir.StorageBox):
        data.realize()
    elif not isinstance(data, ir.ReinterpretView):
        return None
    data.freeze_layout()
    return ir.TensorBox(data)


def base(x: Any) -> tuple[Any, Any]:
    """(IR of the buffer that a strided view lies in, offset of the view in elements)."""
    from torch._inductor import ir

    data = x.data
    if isinstance(data, ir.ReinterpretView) and data.get_dtype() == data.data.get_dtype():
        inner = data.data
        offset = plain(data.layout.offset) - plain(inner.get_layout().offset)
        return ir.TensorBox(inner), plain(offset)
    return x, 0


def same(x: Any, y: Any) -> bool:
    """Whether two pieces of IR (or None) are one whole buffer, so that one pointer serves both."""
    from torch._inductor import ir

    if x is None or y is None or isinstance(x.data, ir.BaseView) or isinstance(y.data, ir.BaseView):
        return False
    return bool(x.get_name() == y.get_name() and x.get_dtype() == y.get_dtype())


def sizes(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(size, stride) of IR: ints where they are static, sympy expressions elsewhere."""
    return tuple(map(plain, x.get_size())), tuple(map(plain, x.get_stride()))


def static(size: Any) -> int:
    """The size as an int; a symbolic one is specialised (a guard) on its example value."""
    if isinstance(size, int):
        return size
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(size))


def hint(size: Any) -> int:
    """The example value of a size (8192 where there is none)."""
    if isinstance(size, int):
        return size
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=8192))


def ceil_div(a: Any, b: int) -> Any:
    """``ceil(a / b)`` of an int or a sympy expression."""
    if isinstance(a, int):
        return -(-a // b)
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(a + b - 1, b)


def launch(
    kernel: Any,
    arguments: Mapping[str, Any],
    written: Sequence[str],
    grid: Any,
    *,
    warps: int,
    stages: int = 3,
) -> None:
    """Put one launch of a jitted Triton kernel into the graph being lowered.

    Args:
        kernel: the ``triton.jit`` function.
        arguments: every parameter by name: IR (`readable`, `writable`, `empty`), numbers, sympy
            expressions, None; for ``tl.constexpr`` parameters ints and bools.
        written: names of the tensor parameters that it writes.
        grid: number of programs (int or sympy expression), one-dimensional.
        warps, stages: launch options.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    index = kernel_side_table.add_kernel(_with_options(kernel, warps, stages))
    with _known_accesses(arguments, written):
        _node_class()(
            kernel_idx=index,
            grid=[(grid, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args=dict(arguments),
        )


@functools.lru_cache(maxsize=1)
def _node_class() -> Any:
    """Inductor's node of a user's Triton kernel, with the decorator of its own kernels.

    A kernel under ``user_autotune`` is launched through Triton's launcher, which takes every
    constant again at each launch; one under ``fixed_config`` through Inductor's static launcher,
    which takes pointers and numbers only.
    """
    from torch._inductor import ir

    class FixedTritonKernel(ir.UserDefinedTritonKernel):
        def codegen(self, wrapper: Any) -> None:
            define = wrapper.define_kernel

            def define_fixed(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
                return define(name, fixed_config(body), *args, **kwargs)

            wrapper.define_kernel = define_fixed
            try:
                super().codegen(wrapper)
            finally:
                wrapper.define_kernel = define

    return FixedTritonKernel


_USER_AUTOTUNE = re.compile(
    r"@triton_heuristics\.user_autotune\(\s*configs=\[(\{[^{}]*\})\],(.*?)custom_kernel=True,\s*\)"
    r"(?=\s*@triton\.jit)",
    re.DOTALL,
)


def fixed_config(body: str) -> str:
    """Generated source of one kernel with its one configuration fixed; where the text is not what
    is expected, it is left as it is (slower to launch, no less right)."""
    return _USER_AUTOTUNE.sub(r"@triton_heuristics.fixed_config(config=\1,\2)", body, count=1)


@functools.lru_cache(maxsize=64)
def _with_options(kernel: Any, warps: int, stages: int) -> Any:
    """The kernel with its launch options. One configuration: nothing is tuned at run time."""
    import triton

    config = triton.Config({}, num_warps=warps, num_stages=stages)
    return triton.autotune(configs=[config], key=[])(kernel)


@contextlib.contextmanager
def _known_accesses(arguments: Mapping[str, Any], written: Sequence[str]) -> Iterator[None]:
    """Inductor compiles a user's kernel to TTIR to find out which tensors it writes, at each
    launch anew. We know it; what is told here replaces that analysis for the launch at hand."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._inductor.ir import TensorBox

    def listed(*_: Any, **__: Any) -> list[str]:
        return list(written)

    def accesses(*_: Any, **__: Any) -> Any:
        from torch._inductor.dependencies import ReadWrites, StarDep
        from torch.utils._ordered_set import OrderedSet

        tensors = [n for n, x in arguments.items() if isinstance(x, TensorBox)]
        reads: Any = OrderedSet(StarDep(n) for n in tensors)
        writes: Any = OrderedSet(StarDep(n) for n in written)
        return wrap.TensorAccesses(
            ReadWrites(reads=reads, writes=writes, index_exprs=OrderedSet()),
            can_fuse_epilogue=False,
        )

    replacements = {"identify_mutated_tensors": listed, "identify_accessed_tensors": accesses}
    with _patching:
        known = {n: getattr(wrap, n) for n in replacements if hasattr(wrap, n)}
        for name in known:
            setattr(wrap, name, replacements[name])
        try:
            yield
        finally:
            for name, original in known.items():
                setattr(wrap, name, original)


def plain(size: Any) -> Any:
    """An int where the size is known, if only by a guard made since it was written down."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(size, int | float):
        return size
    from torch._inductor.virtualized import V

    size = V.graph.sizevars.simplify(size)
    return int(size) if isinstance(size, sympy.Integer) else size


def _equals(size: Any, number: int) -> bool:
    return bool(plain(size) == number)
