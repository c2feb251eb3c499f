"""Ten kinds of fault that this kind of software really had, as small edits of the source.

An edit that no longer fits is an error (:func:`apply`): a fault that is not planted proves
nothing. Which tests look is decided by :data:`ROOMS`, from the changed file alone, so that no
fault is met by tests that were told about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "wrong split axis",
    "32-bit wrap",
    "slot -1 wraps",
    "cache reader left on the old value",
    "scale swapped",
    "style defaulted",
    "eps baked",
    "rotary tail missing in cache",
    "padded key leaks",
    "reader moved before write",
)


@dataclass(frozen=True)
class Fault:
    """``edits``: (old text, new text) in ``path``; each old text stands there exactly once."""

    kind: str
    what: str
    path: str
    edits: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """A short name, unique."""
        return f"{self.kind}: {self.what}"


class StaleFaultError(AssertionError):
    """The text that an edit replaces is gone, or stands there more than once."""


def apply(fault: Fault, root: Path) -> None:
    """Plant a fault in a copy of the tree. Raises :class:`StaleFaultError`."""
    file = root / fault.path
    text = file.read_text()
    for old, new in fault.edits:
        if (count := text.count(old)) != 1:
            raise StaleFaultError(
                f"{fault.name}: {count} times in {fault.path}, not once:\n{old}\n"
                "write the edit anew for the code as it is now"
            )
        text = text.replace(old, new)
    file.write_text(text)


ROOMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fusion/layout.py", ("tests/test_layout.py", "tests/layout/test_properties.py")),
    (
        "backends/reference/attention.py",
        ("tests/test_reference_attention.py", "tests/layout/test_properties.py"),
    ),
    (
        "backends/reference/",
        (
            "tests/test_reference_cache.py",
            "tests/test_reference_prologue.py",
            "tests/layout/test_properties.py",
        ),
    ),
    (
        "backends/triton/paged_attention",
        ("tests/test_triton_paged_attention.py", "tests/layout/test_interpreted.py"),
    ),
    (
        "backends/triton/",
        ("tests/test_triton_prologue.py", "tests/layout/test_interpreted.py"),
    ),
    (
        "fusion/match/norm",
        (
            "tests/test_match_norm.py",
            "tests/test_match_norm_refused.py",
            "tests/test_match_mutants.py",
        ),
    ),
    (
        "fusion/match/cache",
        ("tests/test_match_cache_write.py", "tests/test_surgery.py"),
    ),
    (
        "fusion/match/",
        (
            "tests/test_match_rope.py",
            "tests/test_match_rope_refused.py",
            "tests/test_match_rope_tables.py",
        ),
    ),
    ("fusion/graph/", ("tests/test_surgery.py",)),
    ("passes/", ("tests/test_pass_qk_norm_rope_kv_cache.py",)),
    ("fusion/integrations/transformers/", ("tests/test_transformers_cache.py",)),
)
"""Path prefix, and the ordinary test files of that room, quick ones first. The first fits."""


def room_of(path: str) -> tuple[str, ...]:
    """The test files that look at a changed file."""
    return next(tests for prefix, tests in ROOMS if path.startswith(prefix))


_LAYOUT = "fusion/layout.py"
_CACHE = "backends/reference/cache.py"
_PROLOGUE = "backends/reference/prologue.py"
_ROTARY = "backends/reference/rotary.py"
_ATTENTION = "backends/reference/attention.py"
_KERNEL = "backends/triton/prologue_kernel.py"
_PARTS = "backends/triton/prologue_parts.py"
_PLAN = "backends/triton/prologue_plan.py"
_PAGED = "backends/triton/paged_attention_kernel.py"
_SURGERY = "fusion/graph/surgery.py"
_OPERATION = "passes/prologue/operation.py"

FAULTS: tuple[Fault, ...] = (
    # --- wrong split axis
    Fault(
        "wrong split axis", "guessed from the shape", _LAYOUT,
        ((
            "axis = 0 if layout is KVCacheLayout.KV_FIRST else 1",
            "axis = 0 if kv_cache.shape[0] == 2 else 1",
        ),),
    ),
    Fault(
        "wrong split axis", "V before K in a packed row", _LAYOUT,
        ((
            "key, value = nhd[..., :head_dim], nhd[..., head_dim:]",
            "key, value = nhd[..., head_dim_v:], nhd[..., :head_dim_v]",
        ),),
    ),
    Fault(
        "wrong split axis", "blocks and heads of HND", _LAYOUT,
        ((
            "key, value = key.transpose(1, 2), value.transpose(1, 2)",
            "key, value = key.transpose(1, 2), value.transpose(0, 1)",
        ),),
    ),
    Fault(
        "wrong split axis", "shuffled V", _CACHE,
        (("cache.permute(0, 2, 4, 1, 3)", "cache.permute(0, 4, 2, 1, 3)"),),
    ),
    Fault(
        "wrong split axis", "a split in a graph is always along the last",
        "fusion/match/cache_view.py",
        ((
            'd = int(a["dim"]) % len(region.size)\n    values',
            'd = len(region.size) - 1\n    values',
        ),),
    ),
    # --- 32-bit wrap
    Fault(
        "32-bit wrap", "slots of the reference", _CACHE,
        (("slot_mapping[source].to(torch.int64)", "slot_mapping[source].to(torch.int32)"),),
    ),
    Fault(
        "32-bit wrap", "slots from a block table", _LAYOUT,
        (("block_table.to(torch.int64)[rows", "block_table.to(torch.int32)[rows"),),
    ),
    Fault(
        "32-bit wrap", "cache addresses of the prologue kernel", _PARTS,
        ((
            "p = ptr + (block * s0 + offset * s1 + h.to(tl.int64) * s2) + d",
            "p = ptr + (block * s0 + offset * s1 + h.to(tl.int64) * s2).to(tl.int32) + d",
        ),),
    ),
    Fault(
        "32-bit wrap", "rows of the prologue kernel", _KERNEL,
        ((
            "rows = x_ptr + t.to(tl.int64) * st + h.to(tl.int64) * sh",
            "rows = x_ptr + (t * st + h * sh).to(tl.int32)",
        ),),
    ),
    Fault(
        "32-bit wrap", "pages of the attention kernel", _PAGED,
        (("block = pages.to(tl.int64) * s_block", "block = (pages * s_block).to(tl.int32)"),),
    ),
    # --- slot -1 wraps
    Fault(
        "slot -1 wraps", "to the last slot", _CACHE,
        (
            ("valid = slot_mapping >= 0", "valid = slot_mapping >= -(1 << 40)"),
            (".to(torch.int64).clamp(min=0)", ".to(torch.int64)"),
        ),
    ),
    Fault(
        "slot -1 wraps", "to slot 0 in the kernel", _PARTS,
        (("written = slot >= 0", "written = slot >= -(1 << 40)"),),
    ),
    Fault(
        "slot -1 wraps", "of a page that is not allocated", _LAYOUT,
        ((" | (block < 0)", ""),),
    ),
    Fault(
        "slot -1 wraps", "an index from the end becomes padding", "fusion/graph/emit.py",
        (("        if non_negative(node):\n            return node\n        low",
          "        if node is not None:\n            return node\n        low"),),
    ),
    # --- cache reader left on the old value
    Fault(
        "cache reader left on the old value", "no use is moved", _SURGERY,
        (
            ("            if old is not new:\n                self.change.replace_uses",
             "            if False:\n                self.change.replace_uses"),
            ("left = [u for u in old.users if old is not new and u not in dying]", "left = []"),
        ),
    ),
    Fault(
        "cache reader left on the old value", "reads of the old content are not seen",
        "fusion/match/cache_write.py",
        (("if trace.position[node] > end:", "if trace.position[node] < 0:"),),
    ),
    Fault(
        "cache reader left on the old value", "the surgeon does not look behind",
        "fusion/graph/refusals.py",
        (("elif call < user and not (", "elif user is None and not ("),),
    ),
    Fault(
        "cache reader left on the old value", "views of the new content", _SURGERY,
        (("keep[node] = self._strided(main, index, region, call, returns, before, contents)",
          "keep[node] = node"),),
    ),
    # --- scale swapped
    Fault(
        "scale swapped", "V's scale for K", _CACHE,
        (("key_rows = stored(key, key_cache.dtype, k_scale)",
          "key_rows = stored(key, key_cache.dtype, v_scale)"),),
    ),
    Fault(
        "scale swapped", "times for divided by", _CACHE,
        (("y = y / scale.to(torch.float32)", "y = y * scale.to(torch.float32)"),),
    ),
    Fault(
        "scale swapped", "pointers of the kernel", _PLAN,
        (('"k_scale_ptr": "k_scale"', '"k_scale_ptr": "v_scale"'),),
    ),
    Fault(
        "scale swapped", "K's scale for V in attention", _ATTENTION,
        (('which="value", dtype=work, scale=v_scale', 'which="value", dtype=work, scale=k_scale'),),
    ),
    Fault(
        "scale swapped", "K's scale for V in the attention kernel",
        "backends/triton/paged_attention_launch.py",
        (("sinks, k_scale, v_scale, first,", "sinks, k_scale, k_scale, first,"),),
    ),
    Fault(
        "scale swapped", "scales of an operation in a graph", "fusion/match/cache_write.py",
        (("for r in (roles.k_scale, roles.v_scale)]", "for r in (roles.v_scale, roles.k_scale)]"),),
    ),
    Fault(
        "scale swapped", "scales of the emitted call", _OPERATION,
        (('"k_scale": write.k_scale,', '"k_scale": write.v_scale,'),),
    ),
    # --- style defaulted
    Fault(
        "style defaulted", "of the reference", _ROTARY,
        (('    if rope_style == "half":\n        x1, x2', "    if True:\n        x1, x2"),),
    ),
    Fault(
        "style defaulted", "of the kernel", _PLAN,
        (('"INTERLEAVED": ROPE_STYLES[a.rope_style]', '"INTERLEAVED": False'),),
    ),
    Fault(
        "style defaulted", "of the recogniser", "fusion/match/rotation.py",
        (('return "interleaved", rotary', 'return "half", rotary'),),
    ),
    Fault(
        "style defaulted", "an odd pairing is taken for the usual one", "fusion/match/rotation.py",
        (("        if np.array_equal(partner, (dims + rotary // 2) % rotary):\n",
          "        if not np.array_equal(partner, dims ^ 1):\n"),),
    ),
    Fault(
        "style defaulted", "of the emitted call", _OPERATION,
        (('"rope_style": rope.style', '"rope_style": "half"'),),
    ),
    # --- eps baked
    Fault(
        "eps baked", "of the recogniser", "fusion/match/norm_mean.py",
        (("return self.of(variance, mean), number", "return self.of(variance, mean), 1e-6"),),
    ),
    Fault(
        "eps baked", "of the emitted call", _OPERATION,
        (("0.0 if isinstance(eps, Node) else float(eps)",
          "0.0 if isinstance(eps, Node) else 1e-6"),),
    ),
    Fault(
        "eps baked", "a tensor is ignored", _PROLOGUE,
        (("k_eps if k_eps_tensor is None else k_eps_tensor", "k_eps"),),
    ),
    Fault(
        "eps baked", "K takes that of Q in the kernel", _KERNEL,
        (("eps = tl.cast(k_eps, tl.float32)", "eps = tl.cast(q_eps, tl.float32)"),),
    ),
    Fault(
        "eps baked", "a tensor is ignored by the kernel", _PLAN,
        (('"HAS_K_EPS": get("k_eps_tensor") is not None', '"HAS_K_EPS": False'),),
    ),
    # --- rotary tail missing in cache
    Fault(
        "rotary tail missing in cache", "of the reference", _ROTARY,
        (("parts.append(x[..., rotary_dim:].to(out_dtype))",
          "parts.append(torch.zeros_like(x[..., rotary_dim:], dtype=out_dtype))"),),
    ),
    Fault(
        "rotary tail missing in cache", "the kernel stores it for q only", _KERNEL,
        (("_store_cache(cache_ptr, xt, block, offset, h, n + R, s0, s1, s2, s3, m, FP8,",
          "_store_cache(cache_ptr, xt, block, offset, h, n + R, s0, s1, s2, s3, m & (t < 0), FP8,"),
        ),
    ),
    Fault(
        "rotary tail missing in cache", "the kernel's is not normed", _KERNEL,
        (("xt = _scale_by_weight(xt * inv,", "xt = _scale_by_weight(xt,"),),
    ),
    Fault(
        "rotary tail missing in cache", "every head is taken to rotate as a whole",
        "fusion/match/rotation.py",
        (("rotary = len(dims)\n", "rotary = frame.dim\n        dims = np.arange(rotary)\n"),),
    ),
    # --- padded key leaks
    Fault(
        "padded key leaks", "one past the sequence", _ATTENTION,
        (("visible = (j < seq_len[:, None])", "visible = (j <= seq_len[:, None])"),),
    ),
    Fault(
        "padded key leaks", "one past the sequence in the kernel", _PAGED,
        (("hi = tl.minimum(seq_len, table_width * PAGE)",
          "hi = tl.minimum(seq_len + 1, table_width * PAGE)"),),
    ),
    Fault(
        "padded key leaks", "a masked tile is loaded whole", _PAGED,
        (("mask=inside[:, None] & (d < D)[None, :], other=0.0)",
          "mask=(inside[:, None] | True) & (d < D)[None, :], other=0.0)"),),
    ),
    Fault(
        "padded key leaks", "rows past the slot mapping", _PARTS,
        (("mask=(t < tokens) & (t < num_slots), other=-1)",
          "mask=(t < tokens) & (t < num_slots), other=0)"),),
    ),
    Fault(
        "padded key leaks", "left padding gets a slot",
        "fusion/integrations/transformers/inputs.py",
        (("self.slots += [*[-1] * pad, *slots]", "self.slots += [*[0] * pad, *slots]"),),
    ),
    # --- reader moved before write
    Fault(
        "reader moved before write", "nothing is moved behind the call", _SURGERY,
        (("        for node in moving:\n", "        for node in moving[:0]:\n"),
         ("                if not node < user and user not in dying:\n",
          "                if user is None:\n"),),
    ),
    Fault(
        "reader moved before write", "a read between two writes", "fusion/match/cache_write.py",
        (("if not all(w.region.disjoint(state.region) for w in missing):", "if not missing:"),),
    ),
    Fault(
        "reader moved before write", "a mutation stands in the chain", "fusion/graph/refusals.py",
        (("if schema is not None and schema.is_mutable:", "if node is None:"),),
    ),
    Fault(
        "reader moved before write", "an operand that needs the result",
        "fusion/graph/refusals.py",
        (("        if node in targets:\n", "        if node is None:\n"),),
    ),
)  # fmt: skip
