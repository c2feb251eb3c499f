"""What the fuzzer found, each as a plain test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusion
from fusion.passes.prologue import check
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.operation import Operation
from fusion.pipeline import Context
from tests.fuzz.program import Layer, Program
from tests.fuzz.run import compiled_function, make_inputs, run_program


def fused(program: Program) -> None:
    """The program fuses, with equal bits everywhere."""
    result = run_program(program)
    assert result.finding is None, result.detail
    assert {s[0] for s in result.statuses} == {"fused"}, result.statuses


@pytest.mark.parametrize("write", ["index", "scatter", "op"])
def test_views_that_need_the_strides_of_the_graph(write):
    """``[B,H,S,D]`` keys viewed as rows: the small inputs of the check have other strides."""
    layer = Layer(norm="early", write=write, cache="kv_first", blocks=20)
    fused(Program((layer,), tokens=33, batch=3, order="bhsd-early"))


@pytest.mark.parametrize("order", ["bshd", "bhsd-late"])
@pytest.mark.parametrize("write", ["index", "block_offset"])
def test_a_batch_of_more_tokens_than_the_check_runs_at_full_size(write, order):
    """V's rows are one dimension of B * S: its small size is that of q's two dimensions."""
    fused(Program((Layer(write=write, blocks=20),), tokens=33, batch=3, order=order))


def test_the_empty_rest_of_a_head_is_no_dependence():
    """``split([D, 0])``: what is cut off and put back has no elements."""
    layer = Layer(rope="in_halves", odd="something between norm and rope")
    result = run_program(Program((layer,)))
    assert result.finding is None, result.detail
    assert result.statuses == [("partial", "rope_kv_cache", "match.q-k-differ")]


@pytest.mark.parametrize("rotary", [4, 8, 16, 64])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_complex_products_that_torch_fuses(rotary, dtype):
    """Narrow complex products are fused multiply-adds: rarely a bit of a 16-bit result.

    The trials are far too small to meet that bit, thousands of tokens are not.
    """
    layer = Layer(
        heads=8,
        dim=64,
        v_dim=64,
        rotary=rotary,
        rope="complex_pairs",
        weight_dtype=dtype,
        table_dtype="f32",
        cache_dtype=dtype,
        cache="packed",
        blocks=300,
        block_size=16,
    )
    for validate in (True, False):
        program = Program((layer,), tokens=4096, dtype=dtype, validate=validate)
        result = run_program(program)
        assert result.finding is None, result.detail
        ((status, _, code),) = result.statuses
        narrow = _fuses_products(rotary // 2)
        assert (status, code) == (("refused", "gate.rounding") if narrow else ("fused", ""))


def test_exact_numerics_leave_complex_products_alone():
    """Nothing in the graph says how they round: not even validation would settle it."""
    layer = Layer(dim=32, v_dim=32, rotary=32, rope="complex_pairs", table_dtype="f32")
    program = Program((layer,))
    fn, inputs = compiled_function(program), make_inputs(program)
    report = fusion.explain(fn, inputs.x, options={"numerics": "exact"})
    (site,) = [s for s in report.sites if s.pass_name == "qk_norm_rope_kv_cache"]
    assert (site.status, site.reasons[0].code) == ("refused", "gate.rounding")
    assert site.facts["rope"]["product"] == "complex"
    (site,) = [
        s for s in fusion.explain(fn, inputs.x).sites if s.pass_name == "qk_norm_rope_kv_cache"
    ]
    assert site.status == "fused"


@pytest.mark.parametrize("numerics", ["exact", "tolerant"])
def test_products_of_16_bit_numbers_are_exact(numerics):
    """Whether torch rounds them first makes no difference: even a narrow one fuses."""
    layer = Layer(dim=16, rotary=8, rope="complex_pairs")
    program = Program((layer,))
    report = fusion.explain(
        compiled_function(program), make_inputs(program).x, options={"numerics": numerics}
    )
    (site,) = [s for s in report.sites if s.pass_name == "qk_norm_rope_kv_cache"]
    assert (site.status, site.facts["rope"]["product"]) == ("fused", "complex"), site.reasons


def _fuses_products(width: int) -> bool:
    """Whether torch multiplies complex rows of this width with fused multiply-adds."""
    a, b = (torch.randn(64, 4, width, dtype=torch.complex64) for _ in "ab")
    b = b[:, :1]
    return not torch.equal((a * b).real, a.real * b.real - a.imag * b.imag)


@pytest.mark.parametrize(
    ("layer", "tokens"),
    [
        (Layer(cache="pool", blocks=1), 5),
        (Layer(cache="pool", blocks=4, block_size=1), 3),
        (Layer(cache="packed", blocks=1, block_size=100), 14),
    ],
)
def test_caches_of_one_block_or_of_few_large_ones(layer, tokens):
    """The stride of a dimension of one element is anything; a few blocks hold all tokens."""
    fused(Program((layer,), tokens=tokens))


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_static_caches_of_any_batch(batch):
    """``index_copy_`` along S of a ``[B,H,S,D]`` cache: the emitted slots count the real batch."""
    layer = Layer(cache="hnd", blocks=batch, block_size=100, write="hf")
    fused(Program((layer,), tokens=7, batch=batch, order="bhsd-late"))


@pytest.mark.parametrize("rope", ["in_halves", "complex_pairs"])
def test_a_cast_behind_a_cat_with_the_empty_rest(rope):
    """q's rope ends where k's does: behind the cat with nothing and the cast."""
    layer = Layer(
        dim=32,
        v_dim=32,
        rotary=32,
        rope=rope,
        weight_dtype="f32",
        table="two tables",
        table_dtype="f32",
    )
    fused(Program((layer,)))


@pytest.mark.parametrize("batch", [0, 2])
def test_a_table_width_that_only_guards_make_a_number(batch):
    """``dynamic=True``: half a table's width is ``(s + 1) // 2``, known to be 4 by broadcasting."""
    order = "bhsd-late" if batch else "bshd"
    layer = Layer(rotary=8, rope="rotate_half" if batch else "half")
    fused(Program((layer,), batch=batch, order=order, dynamic="dynamic", again=9))


@pytest.mark.parametrize(
    ("write", "dtype", "cache_dtype", "extra"),
    [
        ("index", "bf16", "f32", ""),
        ("scatter", "f32", "bf16", ""),
        ("index_copy", "f16", "bf16", "return k"),
        ("block_offset", "bf16", "f16", "k read"),
        ("hf", "f32", "f16", ""),
    ],
)
def test_rows_cast_to_another_cache_dtype(write, dtype, cache_dtype, extra):
    """The cast before the write is the write's own; q has none, and need not."""
    layer = Layer(write=write, cache_dtype=cache_dtype, weight_dtype=dtype, table_dtype=dtype)
    if write == "hf":
        layer = replace(layer, cache="hnd", blocks=2, block_size=16)
    layer = replace(layer, extras=(extra,) if extra else ())
    batch, order = (2, "bhsd-late") if write == "hf" else (0, "bshd")
    fused(Program((layer,), dtype=dtype, batch=batch, order=order))


@pytest.mark.parametrize(
    ("layer", "program"),
    [
        # B * T == D, T == D: a scatter's index is expanded over the head, not over tokens.
        (Layer(dim=100, v_dim=100, rotary=100, write="scatter", blocks=16), {"tokens": 50}),
        (Layer(dim=20, v_dim=20, rotary=20, write="scatter", blocks=8), {"tokens": 20}),
        # B == Hk, and positions that are really expanded over the batch.
        (Layer(kv_heads=2, write="scatter", table="one row"), {"tokens": 4}),
        # More sequences than the small cache holds: emitted operands at the graph's own sizes.
        (Layer(cache="block_first", blocks=2, block_size=2, write="hf"), {"tokens": 2}),
    ],
)
def test_sizes_that_equal_a_token_count(layer, program):
    fused(Program((layer,), batch=2, order="bhsd-late", **program))


@pytest.mark.parametrize("write", ["index", "block_offset", "block_heads_offset"])
def test_one_head_of_one_token_is_written_as_a_vector(write):
    """torch drops leading dimensions of size one from what is assigned."""
    fused(Program((Layer(heads=1, kv_heads=1, write=write),), tokens=1))


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_two_sizes_may_be_equal(data):
    """Tokens, sequences, heads, head size, table width and block size in any coincidence."""
    pick = data.draw
    kv, group, half = (pick(st.integers(1, 4)) for _ in range(3))
    dim = 4 * half
    rotary = pick(st.sampled_from([dim, 2 * half]))
    batch = pick(st.integers(0, 3))
    sizes = [kv, kv * group, dim, rotary, rotary // 2, kv * dim, kv * group * dim]
    tokens = pick(st.sampled_from(sizes))
    if batch and tokens % batch == 0 and pick(st.booleans()):
        tokens //= batch
    total = tokens * max(batch, 1)
    write = pick(st.sampled_from(["op", "index", "scatter", "block_offset"]))
    page = pick(st.sampled_from([*sizes, tokens, total]))
    layer = Layer(
        heads=kv * group,
        kv_heads=kv,
        dim=dim,
        v_dim=dim,
        rotary=rotary,
        write=write,
        cache=pick(st.sampled_from(["nhd", "kv_first", "halves"])),
        block_size=page,
        blocks=-(-total // page) + pick(st.integers(0, 2)),
        table=pick(st.sampled_from(["gather", "per token", "one row", "angles"])),
        rope=pick(st.sampled_from(["half", "rotate_half", "interleaved"])),
    )
    order = pick(st.sampled_from(["bshd", "bhsd-late", "bhsd-early"])) if batch else "bshd"
    fused(Program((layer,), tokens, batch, order))


def test_a_stack_of_caches_read_between_its_layers():
    """Eight tokens, eight heads: the scatter's index is as wide as there are tokens."""
    layer = Layer(
        kv_heads=8, dim=8, v_dim=8, rotary=8, write="scatter", cache="stack",
        cache_dtype="f32", weight_dtype="f32", table_dtype="f32", extras=("cache read before",),
    )  # fmt: skip
    fused(Program((layer, layer), tokens=8, batch=1, order="bhsd-late", dtype="f32"))


def test_a_miss_of_a_graph_with_symbolic_sizes_is_told():
    """The facts of q and k hold symbolic sizes, which have no hash."""
    for odd, code in (
        ("q rope next_head", "match.rope-style"),
        ("q rope interleaved", "match.q-k-differ"),
    ):
        result = run_program(Program((Layer(odd=odd),), dynamic="mark"))
        assert result.finding is None, result.detail
        assert code in {s[2] for s in result.statuses}, result.statuses


@pytest.mark.parametrize("validate", [True, False])
def test_a_cast_to_a_third_dtype_is_a_rounding_of_its_own(validate):
    """k through float16 into a bfloat16 cache: the write's own cast is to the cache's dtype."""
    text = "kt0, vt0 = k0, v0\n"

    class Rounded(Program):
        def source(self) -> str:
            said = super().source()
            assert text in said
            return said.replace(text, "kt0, vt0 = k0.half(), v0.half()\n")

    result = run_program(Rounded((Layer(),), validate=validate))
    assert result.finding is None, result.detail
    assert result.statuses[0][0] != "fused" and result.statuses[0][2] == "match.q-k-differ"


def test_a_complex_product_of_awkward_width_is_a_matter_of_rounding() -> None:
    """Its rounding depends on its width: that is the reason, not that the chain is none."""
    layer = Layer(
        heads=8, kv_heads=4, dim=24, v_dim=24, rotary=18, qkv="split", rope="complex_pairs",
        weight_dtype="f32", table="gather", table_dtype="bf16", cache="nhd", cache_dtype="bf16",
        blocks=4, block_size=8,
    )  # fmt: skip
    result = run_program(Program((layer,), tokens=5, batch=3, order="bhsd-late", dtype="bf16"))
    assert result.statuses == [("refused", "qk_norm_rope_kv_cache", "gate.rounding")]


class SharedKV(Program):
    """A program whose V is made from K; ``k0n`` is the normed key before its rope."""

    made_from = "k0"

    def source(self) -> str:
        said = super().source()
        rope = "    k0 = ropes["
        assert said.count(rope) == 1 and "    v0 = k0\n" in said
        said = said.replace(rope, f"    k0n = k0\n{rope}")
        return said.replace("    v0 = k0\n", f"    v0 = {self.made_from}\n")


@pytest.mark.parametrize("order", ["bshd", "bhsd-late"])
@pytest.mark.parametrize("write", ["op", "index"])
@pytest.mark.parametrize("value", ["k0", "k0n", "k0 * 2"])
def test_a_value_that_is_made_from_the_key(value, write, order, monkeypatch):
    """The check must compute such a value: a random one would be written as K too."""
    monkeypatch.setattr(SharedKV, "made_from", value)
    layer = Layer(kv_heads=4, odd="k written to both", write=write, blocks=20)
    result = run_program(SharedKV((layer,), batch=2 * (order != "bshd"), order=order))
    assert result.finding is None, result.detail
    if value == "k0 * 2":  # needs the rotated key as a value: the operation cannot come before it
        assert result.statuses == [("refused", "qk_norm_rope_kv_cache", "safety.cycle")]
    else:
        assert {s[0] for s in result.statuses} == {"fused"}, result.statuses


def test_a_proof_is_not_reused_for_another_value(monkeypatch) -> None:
    """V is the normed key; the same chain with another node on that way as V is proved anew."""
    told: list[str] = []

    def checked(chain: Chain, operation: Operation, context: Context) -> check.Checked:
        result = check.check(chain, operation, context)
        node = chain.write.value.node
        roles = operation.tensors
        for other in node.graph.nodes:
            value = other.meta.get("val")
            same = isinstance(value, torch.Tensor) and other is not node
            if not same or (value.shape, value.dtype) != (node.meta["val"].shape, torch.bfloat16):
                continue
            claimed = replace(chain.write.value, node=other)
            false = replace(chain, write=replace(chain.write, value=claimed))
            tensors = {**roles, "value": claimed}
            seen = check.check(false, replace(operation, tensors=tensors), context)
            told.append(f"{seen.status} {seen.reused}")
        return result

    monkeypatch.setattr("fusion.passes.qk_norm_rope_kv_cache.check", checked)
    monkeypatch.setattr(SharedKV, "made_from", "k0n")
    layer = Layer(kv_heads=4, odd="k written to both", blocks=20)
    fused(SharedKV((layer,)))
    assert told and "passed True" not in told, told


def test_half_a_complex_table() -> None:
    """sin's width is known by two guards together only, so it cannot be cut out; cos's can."""
    layer = Layer(
        heads=8, kv_heads=4, qkv="split", norm="unweighted", rope="complex_pairs", table="gather",
        table_dtype="bf16", cache="nhd", write="op",
    )  # fmt: skip
    result = run_program(Program((layer,), dynamic="dynamic"))
    assert result.finding is None, result.detail
    assert {s[2] for s in result.statuses} == {"match.rope-table"}, result.statuses


@pytest.mark.parametrize("write", ["scatter", "index"])
def test_a_graph_that_fills_its_cache(write: str) -> None:
    """Twelve tokens for twelve slots: a trial of fifteen needs a larger cache than the graph's."""
    layer = Layer(
        heads=8, kv_heads=6, qkv="split", norm="late", table="gather", cache="nhd", blocks=4,
        block_size=3, write=write, odd="slots shifted",
    )  # fmt: skip
    fused(Program((layer,), tokens=4, batch=3))
