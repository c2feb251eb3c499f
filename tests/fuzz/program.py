"""A random attention prologue as data, and as the Python that is compiled.

A :class:`Program` is one or two :class:`Layer` of the same tokens. ``Program.source()`` is the
whole function: what a finding shows is what ran.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
#: Caches that one index over blocks * block_size can address through a view.
FLAT = ("nhd", "kv_first", "stack", "halves", "pool")


@dataclass(frozen=True)
class Layer:
    """One prologue. ``odd`` names the single change that makes it a look-alike."""

    heads: int = 8
    kv_heads: int = 4
    dim: int = 16
    v_dim: int = 16
    rotary: int = 16
    qkv: str = "split"
    norm: str = "late"
    q_eps: float = 1e-6
    k_eps: float = 1e-6
    weight_dtype: str = "bf16"
    rope: str = "half"
    table: str = "gather"
    table_dtype: str = "bf16"
    cache: str = "nhd"
    cache_dtype: str = "bf16"
    blocks: int = 4
    block_size: int = 8
    write: str = "op"
    slots: str = "random"
    odd: str = ""
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Layers over ``[T]`` tokens (batch 0) or ``[batch, tokens]``; ``order`` of q, k and v.

    ``order``: ``bshd``, or ``bhsd`` with the transpose before (``early``) or after the norm.
    ``again`` is a second token count to call the compiled function with.
    """

    layers: tuple[Layer, ...] = (Layer(),)
    tokens: int = 5
    batch: int = 0
    order: str = "bshd"
    dtype: str = "bf16"
    dynamic: str = "static"
    again: int | None = None
    validate: bool = True
    inner: str = "aot_eager"
    seed: int = 0

    def source(self) -> str:
        """The function that is compiled; needs ``norms``, ``ropes``, ``torch`` and ``fusion``."""
        return _Writer(self).text()


class _Writer:
    def __init__(self, program: Program) -> None:
        self.p = program
        self.lines: list[str] = []
        self.results: list[str] = []

    def text(self) -> str:
        for i, layer in enumerate(self.p.layers):
            self.layer(i, layer)
        body = "\n".join(f"    {line}" for line in self.lines)
        returns = ", ".join(self.results)
        return f"def program(x):\n{body}\n    return ({returns},)\n"

    def add(self, *lines: str) -> None:
        self.lines += lines

    def layer(self, i: int, m: Layer) -> None:
        q, k, v = f"q{i}", f"k{i}", f"v{i}"
        self.cut(i, m, q, k, v)
        if m.odd == "q and k from swapped slices":
            self.add(f"{q} = torch.cat(({q}, {k}), -2)[..., {m.kv_heads}:, :]")
        elif m.odd == "v is the raw key" and m.dim == m.v_dim:
            self.add(f"{v} = {k}")
        elif m.odd == "heads of k reversed":
            self.add(f"{k} = {k}.flip(-2)")
        if "return raw k" in m.extras:
            self.results.append(k)
        if self.p.order == "bhsd-early":
            self.add(*(f"{n} = {n}.transpose(1, 2)" for n in (q, k, v)))
        cos, sin = self.tables(i, m)
        after_rope_norm = m.odd == "rope before norm"
        if not after_rope_norm:
            self.norms(i, m, q, k)
        if self.p.order == "bhsd-late":
            self.add(*(f"{n} = {n}.transpose(1, 2)" for n in (q, k, v)))
        self.ropes(i, m, q, k, cos, sin)
        if after_rope_norm:
            self.norms(i, m, q, k)
        if m.odd == "k times 1.2 after rope":
            self.add(f"{k} = {k} * 1.2")
        elif m.odd == "q times 1.2 after rope":
            self.add(f"{q} = {q} * 1.2")
        elif m.odd == "k clamped":
            self.add(f"{k} = {k}.clamp(-1, 1)")
        elif m.odd == "k rounded through f16":
            self.add(f"{k} = {k}.half().to({DTYPES[self.p.dtype]})")
        elif m.odd == "k rounded through bf16":
            self.add(f"{k} = {k}.bfloat16().to({DTYPES[self.p.dtype]})")
        elif m.odd == "k rolled":
            self.add(f"{k} = {k}.roll(1, -1)")
        self.writes(i, m, q, k, v)

    # --- parts -----------------------------------------------------------------------------

    def cut(self, i: int, m: Layer, q: str, k: str, v: str) -> None:
        """q, k and v as ``[..., heads, dim]``."""
        a, b, c = m.heads * m.dim, m.kv_heads * m.dim, m.kv_heads * m.v_dim
        x = f"x['qkv{i}']"
        if m.qkv == "split":
            self.add(f"{q}, {k}, {v} = {x}.split([{a}, {b}, {c}], dim=-1)")
        elif m.qkv == "slices":
            self.add(f"{q} = {x}[..., :{a}]", f"{k} = {x}[..., {a}:{a + b}]")
            self.add(f"{v} = {x}[..., {a + b}:]")
        elif m.qkv == "three":
            self.add(*(f"{n} = x['{n}']" for n in (q, k, v)))
        if m.qkv == "heads":  # one view of all heads, then slices of heads (dim == v_dim)
            total = m.heads + 2 * m.kv_heads
            self.add(f"y{i} = {x}.unflatten(-1, ({total}, {m.dim}))")
            self.add(f"{q}, {k} = y{i}[..., :{m.heads}, :], y{i}[..., {m.heads}:{-m.kv_heads}, :]")
            self.add(f"{v} = y{i}[..., {-m.kv_heads}:, :]")
        elif m.qkv == "groups":  # [..., group of one kv head, q heads + k + v, D]
            per = m.heads // m.kv_heads
            self.add(f"y{i} = {x}.view(*{x}.shape[:-1], {m.kv_heads}, {per + 2}, {m.dim})")
            self.add(f"{q} = y{i}[..., :{per}, :].flatten(-3, -2)")
            self.add(f"{k}, {v} = y{i}[..., {per}, :], y{i}[..., {per + 1}, :]")
        else:
            for n, h, d in (
                (q, m.heads, m.dim),
                (k, m.kv_heads, m.dim),
                (v, m.kv_heads, m.v_dim),
            ):
                self.add(f"{n} = {n}.view(*{n}.shape[:-1], {h}, {d})")

    def tables(self, i: int, m: Layer) -> tuple[str, str]:
        cos, sin = f"cos{i}", f"sin{i}"
        if m.table == "gather":
            self.add(f"{cos}, {sin} = x['table{i}'][x['positions']].chunk(2, -1)")
        elif m.table == "two tables":
            self.add(f"{cos} = x['cos{i}'][x['positions']]")
            self.add(f"{sin} = x['sin{i}'][x['positions']]")
        elif m.table == "angles":
            self.add(f"angle{i} = x['positions'][..., None].float() * x['freq{i}']")
            dtype = DTYPES[m.table_dtype]
            self.add(f"{cos}, {sin} = angle{i}.cos().to({dtype}), angle{i}.sin().to({dtype})")
        else:
            self.add(f"{cos}, {sin} = x['cos{i}'], x['sin{i}']")
        if m.rope == "rotate_half" and m.table != "full":
            self.add(f"{cos}, {sin} = (torch.cat((t, t), -1) for t in ({cos}, {sin}))")
        at = -2 if self.p.order == "bshd" else 1
        self.add(f"{cos}, {sin} = {cos}.unsqueeze({at}), {sin}.unsqueeze({at})")
        return cos, sin

    def norms(self, i: int, m: Layer, q: str, k: str) -> None:
        odd_q = m.odd.removeprefix("q norm ") if m.odd.startswith("q norm ") else m.norm
        odd_k = m.odd.removeprefix("k norm ") if m.odd.startswith("k norm ") else m.norm
        kw = f"x['qw{i}']" if m.odd == "k uses q's weight" else f"x['kw{i}']"
        self.add(f"{q} = norms['{odd_q}']({q}, x['qw{i}'], {m.q_eps})")
        if "weight changed between" in m.extras:
            self.add(f"x['kw{i}'].add_(1)")
        self.add(f"{k} = norms['{odd_k}']({k}, {kw}, {m.k_eps})")
        if m.odd == "something between norm and rope":
            self.add(f"{k} = {k} + 0.25")
        if "return normed q" in m.extras:
            self.results.append(f"{q} * 2")
        if "return normed k" in m.extras:
            self.add(f"nk{i} = {k}")
            self.results.append(f"nk{i}")

    def ropes(self, i: int, m: Layer, q: str, k: str, cos: str, sin: str) -> None:
        odd_q = m.odd.removeprefix("q rope ") if m.odd.startswith("q rope ") else m.rope
        odd_k = m.odd.removeprefix("k rope ") if m.odd.startswith("k rope ") else m.rope
        kc, ks = cos, sin
        if m.odd == "other cos for k":
            kc = f"{cos}.neg()"
        elif m.odd == "k positions shifted":
            kc, ks = f"{cos}.roll(1, 0)", f"{sin}.roll(1, 0)"
        elif m.odd == "table times 1.2":
            self.add(f"{cos}, {sin} = {cos} * 1.2, {sin} * 1.2")
        dtype = DTYPES[self.p.dtype]
        self.add(f"{q} = ropes['{odd_q}']({q}, {cos}, {sin}, {m.rotary}).to({dtype})")
        if "qkv zeroed between" in m.extras and m.qkv != "three":
            self.add(f"x['qkv{i}'].zero_()")
        self.add(f"{k} = ropes['{odd_k}']({k}, {kc}, {ks}, {m.rotary}).to({dtype})")

    def writes(self, i: int, m: Layer, q: str, k: str, v: str) -> None:
        key, value = self.planes(i, m)
        self.add(f"kc{i}, vc{i} = {key}, {value}")
        slots = f"x['slots{i}']"
        if "cache read before" in m.extras:
            self.add(f"old{i} = seen(kc{i}).sum()")
            self.results.append(f"old{i}")
        if m.odd == "slots shifted":
            self.add(f"s{i} = {slots}.flip(0)")
            slots = f"s{i}"
        if m.odd == "k and v exchanged" and m.dim == m.v_dim:
            self.add(f"{k}, {v} = {v}, {k}")
        if m.odd == "k written to both" and m.dim == m.v_dim:
            self.add(f"{v} = {k}")
        if m.write == "hf" or self.p.batch == 0:
            kt, vt = k, v
        elif self.p.order == "bshd":
            kt, vt = f"{k}.flatten(0, 1)", f"{v}.flatten(0, 1)"
        else:
            kt, vt = (
                f"{n}.transpose(1, 2).reshape(-1, {m.kv_heads}, {d})"
                for n, d in ((k, m.dim), (v, m.v_dim))
            )
        if m.odd == "tokens of k reversed":
            kt = f"({kt}).flip(0)"
        self.add(f"kt{i}, vt{i} = {kt}, {vt}")
        if m.odd == "one token fewer" and m.write not in ("op", "hf"):
            slots = f"{slots}[:-1]"
            self.add(f"kt{i}, vt{i} = kt{i}[:-1], vt{i}[:-1]")
        elif m.slots == "short" and m.write != "op":
            self.add(f"kt{i}, vt{i} = (t[: {slots}.shape[0]] for t in (kt{i}, vt{i}))")
        between = []
        if m.odd == "cache read between":
            between = [f"{v} = {v} + seen(kc{i}).sum().to({v}.dtype)", f"vt{i} = vt{i} + 1"]
            self.results.append(v)
        elif m.odd == "slots changed between":
            between = [f"x['slots{i}'].copy_(x['slots{i}'].flip(0))"]
        elif m.odd == "v has other slots":
            between = [f"s{i} = {slots}.flip(0)"]
        vslots = f"s{i}" if m.odd == "v has other slots" else slots
        self.write(i, m, slots, vslots, between)
        if m.odd == "written twice":
            self.write(i, m, slots, vslots, [])
        self.reads(i, m, q, k, v)

    def write(self, i: int, m: Layer, slots: str, vslots: str, between: list[str]) -> None:
        kt, vt, kc, vc = f"kt{i}", f"vt{i}", f"kc{i}", f"vc{i}"
        if m.write == "op":
            scales = f", x['ks{i}'], x['vs{i}']" if m.cache_dtype.startswith("e4") else ""
            self.add(*between)
            self.add(f"fusion.ops.kv_cache_write({kt}, {vt}, {kc}, {vc}, {slots}{scales})")
            return
        if m.cache_dtype.startswith("e4") or m.cache_dtype != self.p.dtype:
            self.add(f"{kt}, {vt} = {kt}.to({kc}.dtype), {vt}.to({vc}.dtype)")
        n = m.block_size
        for token, plane, s, size in ((kt, kc, slots, m.dim), (vt, vc, vslots, m.v_dim)):
            flat = f"{plane}.view(-1, {m.kv_heads}, {size})"
            self.add(
                {
                    "index": f"{flat}[{s}] = {token}",
                    "index_put_": f"{flat}.index_put_(({s},), {token})",
                    "index_copy": f"{flat}.index_copy_(0, {s}, {token})",
                    "block_offset": f"{plane}[{s} // {n}, {s} % {n}] = {token}",
                    "block_heads_offset": (
                        f"{plane}.transpose(1, 2)[{s} // {n}, :, {s} % {n}] = {token}"
                    ),
                    "scatter": (
                        f"{flat}.scatter_(0, {s}[:, None, None].expand_as({token}), {token})"
                    ),
                    "hf": f"{plane}.transpose(1, 2).index_copy_(2, {s}, {token})",
                }[m.write]
            )
            if token == kt:
                self.add(*between)

    def planes(self, i: int, m: Layer) -> tuple[str, str]:
        """K and V as NHD views."""
        c = f"x['cache{i}']"
        if m.cache == "stack":
            c = f"x['cache0'][{i}]"
        if m.cache in ("nhd", "halves", "pool"):
            return f"x['key{i}']", f"x['value{i}']"
        if m.cache == "hnd":
            return f"x['key{i}'].transpose(1, 2)", f"x['value{i}'].transpose(1, 2)"
        if m.cache == "packed":
            self.add(f"c{i} = {c}.transpose(1, 2)")
            return f"c{i}[..., :{m.dim}]", f"c{i}[..., {m.dim}:]"
        if m.cache == "block_first":
            self.add(f"c{i} = {c}.unbind(1)")
            return f"c{i}[0]", f"c{i}[1]"
        return f"{c}[0]", f"{c}[1]"

    def reads(self, i: int, m: Layer, q: str, k: str, v: str) -> None:
        extras = m.extras
        self.results.append(q)
        self.add(f"seen{i} = seen(kc{i}).sum(0) + 1")
        self.results += [f"seen{i}", f"seen(vc{i}).sum((0, 1))"]
        if "return k" in extras:
            self.results.append(k)
        if "k read" in extras:
            self.results.append(f"{k} * 2")
        if "return v" in extras:
            self.results.append(v)
        if "return qkv" in extras and m.qkv != "three":
            self.results.append(f"x['qkv{i}']")
        if "return cache view" in extras:
            self.results.append(f"kc{i}")
        if "q copied back" in extras and m.qkv == "split":
            self.add(
                f"x['qkv{i}'][..., :{m.heads * m.dim}].copy_("
                f"{q}{'.transpose(1, 2)' if self.p.order != 'bshd' else ''}.flatten(-2))"
            )
        if "qkv zeroed" in extras and m.qkv != "three":
            self.add(f"x['qkv{i}'].zero_()")
        if "slots changed after" in extras:
            self.add(f"x['slots{i}'].add_(1)")
        if "positions changed after" in extras:
            self.add("x['positions'].add_(1)")
        if "cache scaled after" in extras and not m.cache_dtype.startswith("e4"):
            self.add(f"kc{i}.mul_(0.5)")
