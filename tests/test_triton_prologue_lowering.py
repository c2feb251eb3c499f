"""The launch that Inductor generates for the Triton prologue. Nothing runs: the text is read.

The graph is lowered on the CPU, where Inductor treats a user's Triton kernel as on a GPU up to the
point where it would compile it. That the text runs is checked on a GPU (benchmarks/prologue_gpu.py,
section ``compiled``).
"""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

import fusion.ops as ops
from fusion.backends.triton import lowering, prologue_kernels
from fusion.graph import triton_lowering
from fusion.graph.lowerings import Decline

pytest.importorskip("triton", reason="the kernel's source is copied into generated code")

HQ, HK, D = 8, 4, 64
ROPE = {"rope_style": "half", "rotary_dim": D, "rope_dtype": torch.float32,
        "out_dtype": torch.bfloat16}  # fmt: skip


def stack(qkv, qw, kw, table, positions, cache, slots, layers=1, return_key=False):
    """`layers` fused calls on one packed qkv, each writing the cache, and a reader of q."""
    for _ in range(layers):
        q, k, v = qkv.split([HQ * D, HK * D, HK * D], 1)
        nhd = cache.transpose(1, 2)
        q, k = ops.qk_norm_rope_kv_cache(
            q.unflatten(1, (HQ, D)), k.unflatten(1, (HK, D)), v.unflatten(1, (HK, D)), qw, kw,
            table[:, : D // 2], table[:, D // 2 :], positions, nhd[..., :D], nhd[..., D:], slots,
            q_eps=1e-6, k_eps=1e-6, return_key=return_key, **ROPE,
        )  # fmt: skip
        qkv = torch.cat([q.flatten(1), qkv[:, HQ * D :]], 1) * 2
    return qkv, k


def prologue(qkv, qw, kw, table, positions, cache, slots):
    return stack(qkv, qw, kw, table, positions, cache, slots)


def tensors(tokens=7):
    return [
        torch.randn(tokens, (HQ + 2 * HK) * D).bfloat16(),
        torch.ones(D).bfloat16(),
        torch.ones(D).bfloat16(),
        torch.randn(40, D),
        torch.arange(tokens),
        torch.zeros(8, HK, 16, 2 * D, dtype=torch.bfloat16),
        torch.arange(tokens),
    ]


def generated(function, inputs, *, dynamic=False) -> str:
    """Inductor's wrapper code for the function, with the Triton lowerings in place."""
    import torch._inductor.lowering as inductor
    import torch.utils._triton as probe
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = "symbolic" if dynamic else "fake"
    graph = make_fx(function, select_decomp_table(), tracing_mode=mode)(*inputs)
    graph.graph.eliminate_dead_code()
    fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]

    def native(op):
        made = lowering.LOWERINGS[op]
        return lambda *a, **k: made(*a, **{n: x for n, x in k.items() if n != "kernel"})

    table = {ops.OVERLOADS[op]: native(op) for op in lowering.LOWERINGS}
    with (
        mock.patch.dict(inductor.lowerings, table),
        # No GPU: nothing that could be asked for the hash of its compiler.
        mock.patch.object(probe, "triton_hash_with_backend", mock.Mock(return_value="none")),
    ):
        lowered = GraphLowering(
            graph, example_inputs=fakes, shape_env=detect_fake_mode(fakes).shape_env
        )
        with (
            V.set_graph_handler(lowered),
            V.set_fake_mode(detect_fake_mode(fakes)),
            V.set_debug_handler(DebugContext()),
        ):
            lowered.run(*fakes)
            code = lowered.codegen()[0]
    return code if isinstance(code, str) else code.value


def launches(code: str) -> list[list[str]]:
    """Arguments of each launch of the prologue kernel."""
    found = re.findall(r"prologue_kernel(?:_static)?_\d+\.run\((.*)\)", code)
    return [re.split(r", (?![^(]*\))", x) for x in found]


def test_one_launch_without_views_or_dispatch():
    code = generated(prologue, tensors())
    (arguments,) = launches(code)
    # One pointer for each buffer; where k, v, sin and V's cache begin in it is a constant.
    assert arguments[:3] == ["qkv_1", "-1", "-1"]
    assert arguments[10:12] == ["cache_1", "-1"]
    named = [a for a in arguments if re.match(r"[a-z]+_1$|buf", a)]
    assert len(named) == len(set(named)) == 8
    assert not any("reinterpret_tensor" in a for a in arguments)
    assert len(arguments) < 30
    assert "torch.ops.fusion" not in code.split("def call")[-1]
    for constant in ("'q_off': 0", "'k_off': 512", "'v_off': 768", "'vc_off': 64", "'q_st': 1024"):
        assert constant in code
    assert "num_warps': 4" in code
    # Under user_autotune each launch would hand all constants over again.
    assert "triton_heuristics.fixed_config(" in code
    assert "triton_heuristics.user_autotune(" not in code


def test_tensors_of_two_buffers_have_two_pointers():
    """K and V in caches of their own, cos and sin in tables of their own."""

    def function(q, k, v, cos, sin, key_cache, value_cache, slots):
        return ops.rope_kv_cache(
            q, k, v, cos, sin, None, key_cache[..., :D], value_cache[..., D:], slots, **ROPE
        )[0]

    rows = [torch.randn(7, h, D).bfloat16() for h in (HQ, HK, HK)]
    tables = [torch.randn(7, D // 2) for _ in range(2)]
    caches = [torch.zeros(8, 16, HK, 2 * D, dtype=torch.bfloat16) for _ in range(2)]
    (arguments,) = launches(generated(function, [*rows, *tables, *caches, torch.arange(7)]))
    assert arguments[:3] == ["q_1", "k_1", "v_1"]
    assert arguments[5:7] == ["cos_1", "sin_1"]
    assert arguments[10:12] == ["key_cache_1", "value_cache_1"]


def test_tokens_stay_symbolic():
    code = generated(prologue, tensors(), dynamic=True)
    (arguments,) = launches(code)
    grid = arguments[-4]
    assert re.search(r"s\d+", grid), arguments
    assert "'HQ': 8" in code
    assert "prologue_kernel_static" in code


def test_layers_share_one_kernel_and_keep_their_order():
    code = generated(lambda a, b, c, d, e, f, g: stack(a, b, c, d, e, f, g, layers=3), tensors())
    body = code.split("def call")[-1]
    assert len(launches(code)) == 3
    # The first layer reads a graph input, of which Inductor knows less (alignment) than of a
    # buffer of its own; all further layers share one kernel.
    assert len(set(re.findall(r"prologue_kernel_static_\d+", body))) == 2
    assert code.count("async_compile.triton('prologue_kernel") == 2


def test_key_is_returned_when_asked():
    code = generated(
        lambda a, b, c, d, e, f, g: stack(a, b, c, d, e, f, g, return_key=True), tensors()
    )
    (arguments,) = launches(code)
    assert arguments[9].startswith("buf")
    (arguments,) = launches(generated(prologue, tensors()))
    assert arguments[9] == "-1"


def test_inputs_that_are_computed_in_the_graph():
    """cos and sin made in the graph, q, k and v from three projections, k not contiguous."""

    def function(x, wq, wk, wv, angle, cache, slots):
        q, k, v = x @ wq, x @ wk, x @ wv
        nhd = cache.transpose(1, 2)
        q, _ = ops.rope_kv_cache(
            q.unflatten(1, (HQ, D)) * 2, k.view(7, D, HK).transpose(1, 2),
            v.unflatten(1, (HK, D)), angle.cos(), angle.sin(), None, nhd[..., :D], nhd[..., D:],
            slots, **ROPE,
        )  # fmt: skip
        return q

    inputs = [torch.randn(7, 32).bfloat16(), *(torch.randn(32, h * D).bfloat16()
              for h in (HQ, HK, HK)), torch.randn(7, D // 2), *tensors()[-2:]]  # fmt: skip
    (arguments,) = launches(generated(function, inputs))
    assert arguments[10:12] == ["cache_1", "-1"]
    assert all(a.startswith("buf") for a in arguments[:3])


def test_every_operation_has_a_lowering_and_it_writes_the_cache_in_place():
    def write(key, value, cache, slots):
        nhd = cache.transpose(1, 2)
        ops.kv_cache_write(key, value, nhd[..., :D], nhd[..., D:], slots)

    rows = torch.randn(7, HK, D).bfloat16()
    (arguments,) = launches(generated(write, [rows, rows + 1, *tensors()[-2:]]))
    assert arguments[10:12] == ["cache_1", "-1"]
    assert {k.op for k in prologue_kernels.KERNELS if k.lowering} == set(lowering.LOWERINGS)


def test_what_cannot_be_expressed_is_declined():
    class Elsewhere:
        def get_device(self):
            return torch.device("meta")

    class Here(Elsewhere):
        def get_device(self):
            return torch.device("cpu")

    with pytest.raises(Decline, match="q_eps_tensor is on meta"):
        lowering._check({"key": Here(), "q_eps_tensor": Elsewhere()}, torch.device("cpu"))


def test_text_of_another_shape_is_left_alone():
    text = "@triton_heuristics.user_autotune(configs=make(), custom_kernel=True)\n@triton.jit\n"
    assert triton_lowering.fixed_config(text) == text


def test_known_accesses_replace_the_analysis_only_meanwhile():
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    names = [
        n for n in ("identify_mutated_tensors", "identify_accessed_tensors") if hasattr(wrap, n)
    ]
    before = [getattr(wrap, n) for n in names]
    assert names
    with triton_lowering._known_accesses({}, ["q_out_ptr"]):
        inside = [getattr(wrap, n) for n in names]
    assert all(a is not b for a, b in zip(inside, before, strict=True))
    assert [getattr(wrap, n) for n in names] == before
