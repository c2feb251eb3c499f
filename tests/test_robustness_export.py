"""``torch.export`` and AOTInductor: fusion takes part, both ways.

An exported program may call the operations (they are ``torch.library`` citizens and survive
``save`` and ``load``), or be plain torch and fused when AOTInductor compiles it: Inductor's
configuration patches of :func:`fusion.inductor_passes` work there as they do in ``torch.compile``.
docs/extending.md tells users what this file tests.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
import fusion.ops as ops
from fusion.pipeline import FusionRequiredError
from fusion.registry import REGISTRY
from tests.ops_cases import BLOCK, DV, HK, NORM, ROPE, D, arguments
from tests.prologue_block import Block, Inputs, inputs, same_bits, variant
from tests.toy_passes import DropBias, use_passes

FUSED = "qk_norm_rope_kv_cache"


@pytest.fixture(autouse=True)
def _empty_registry() -> Any:
    REGISTRY.clear()
    yield
    REGISTRY.clear()


class Prologue(torch.nn.Module):
    """The reference block with its cache, weights and tables as the module's own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        x = inputs(block)
        self.block = block
        self.register_buffer("cache", x.cache)
        self.register_buffer("table", x.cos_sin)
        self.q_weight = torch.nn.Parameter(x.q_weight)
        self.k_weight = torch.nn.Parameter(x.k_weight)

    def forward(self, qkv: Tensor, positions: Tensor, slots: Tensor, readable: Tensor) -> Any:
        return self.block(
            Inputs(
                qkv, self.q_weight, self.k_weight, self.table, positions, slots, self.cache,
                None, None, readable,
            )
        )  # fmt: skip


class Canonical(torch.nn.Module):
    """A model that calls the operations itself."""

    def __init__(self) -> None:
        super().__init__()
        a = arguments(FUSED)
        self.register_buffer("cache", torch.randn(3, HK, BLOCK, D + DV))
        self.q_weight = torch.nn.Parameter(a["q_weight"])
        self.k_weight = torch.nn.Parameter(a["k_weight"])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        cos, sin, slots, *table = rest
        key, value = fusion.split_kv_cache(self.cache, "packed", D, DV)
        q, _ = ops.qk_norm_rope_kv_cache(
            q, k, v, self.q_weight, self.k_weight, cos, sin, None, key, value, slots,
            **NORM, **ROPE,
        )  # fmt: skip
        return ops.paged_attention(q, key, value, *table, 5, 8, 0.2, False, window_left=4)


def canonical() -> tuple[Canonical, tuple[Tensor, ...]]:
    a, b = arguments(FUSED), arguments("paged_attention")
    names = ("query", "key", "value", "cos", "sin", "slot_mapping")
    table = [b[n] for n in ("block_table", "seq_lens", "query_start_loc")]
    return Canonical(), (*(a[n].contiguous() for n in names), *table)


def plain(**changes: Any) -> tuple[Prologue, tuple[Any, ...]]:
    block = variant(dtype=torch.float32, **changes)
    x = inputs(block)
    return Prologue(block), (x.qkv, x.positions, x.slots, x.readable)


def tokens_are_dynamic(args: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    tokens = torch.export.Dim("tokens", min=2, max=64)
    return ({0: tokens}, {0: tokens}, {0: tokens}, {0: tokens})


def same(module: Callable[..., Any], model: Any, args: tuple[Any, ...]) -> None:
    """Outputs of two calls, so that the second reads what the first wrote."""
    eager = copy.deepcopy(model)
    for _ in range(2):
        got, want = module(*args), eager(*args)
        pairs = [(got, want)] if isinstance(got, Tensor) else zip(got, want, strict=True)
        assert all(same_bits(g.detach(), w.detach()) for g, w in pairs)


# --- exported programs -----------------------------------------------------------------------


def test_an_exported_program_keeps_the_operations_through_save_and_load(tmp_path: Path) -> None:
    model, args = canonical()
    program = torch.export.export(model, args)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for each in (program, loaded, loaded.run_decompositions({})):
        text = str(each.graph)
        assert text.count("fusion.qk_norm_rope_kv_cache") >= 1
        assert text.count("fusion.paged_attention") >= 1
    same(loaded.module(), model, args)
    report = fusion.explain(loaded)
    assert [(s.pass_name, s.status) for s in report.sites] == [("non_causal_attention", "fused")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program_is_explained_and_compiled(dynamic: bool) -> None:
    model, args = plain()
    shapes = tokens_are_dynamic(args) if dynamic else None
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    (site,) = [s for s in fusion.explain(program).sites if s.pass_name == FUSED]
    assert (site.status, site.operation) == ("fused", FUSED)
    module = program.module()
    options = {"inner": "aot_eager", FUSED: "required"}
    same(torch.compile(module, backend="fusion", options=options), model, args)
    assert [s.status for s in fusion.reports()[-1].sites if s.pass_name == FUSED] == ["fused"]


# --- AOTInductor -----------------------------------------------------------------------------

SOURCES_ONLY = {"aot_inductor.package_cpp_only": True}


def package(program: Any, folder: Path, **patches: Any) -> Path:
    return Path(
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=patches
        )
    )


def sources(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith(".cpp")]
        return "\n".join(archive.read(n).decode() for n in names)


def test_aot_inductor_fuses_an_exported_program(tmp_path: Path) -> None:
    model, args = plain()
    program = torch.export.export(model, args, dynamic_shapes=tokens_are_dynamic(args))
    path = package(program, tmp_path, **fusion.inductor_passes({FUSED: "required"}), **SOURCES_ONLY)
    (report,) = fusion.reports()
    (site,) = [s for s in report.sites if s.pass_name == FUSED]
    assert (site.status, site.kernel) == ("fused", "reference")
    assert not report.graphs[0].cached
    # Compiled into the code: no call back into Python, and no copy of the cache.
    text = sources(path)
    assert "fusion" not in text
    assert f"aoti_torch_empty_strided(4, {list(model.cache.shape)}" not in text


def test_aot_inductor_says_what_required_misses(tmp_path: Path) -> None:
    model, args = plain(hook=lambda name, q, k: (q, k.clamp(-1, 1)) if name == "rope" else (q, k))
    program = torch.export.export(model, args)
    with pytest.raises(Exception, match="is required") as error:
        package(program, tmp_path, **fusion.inductor_passes({FUSED: "required"}), **SOURCES_ONLY)
    chain: list[BaseException | None] = [error.value]
    while chain[-1] is not None:
        inner = getattr(chain[-1], "inner_exception", None)
        chain.append(inner or chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(e, FusionRequiredError) for e in chain)


def test_aot_inductor_keeps_the_pass_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_passes(monkeypatch, DropBias)
    calls = []
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    patches = fusion.inductor_passes(existing=calls.append)
    package(program, tmp_path, **patches, **SOURCES_ONLY)
    assert len(calls) == 1
    assert [s.status for r in fusion.reports() for s in r.sites] == ["fused"]


@pytest.mark.slow  # a C++ compiler runs for half a minute
def test_the_package_of_a_fused_program_runs(tmp_path: Path) -> None:
    model, args = plain()
    program = torch.export.export(model, args, dynamic_shapes=tokens_are_dynamic(args))
    path = package(program, tmp_path, **fusion.inductor_passes({FUSED: "required"}))
    run = torch._inductor.aoti_load_package(str(path))
    eager = copy.deepcopy(model)
    for seed, tokens in enumerate((5, 5, 9)):
        x = inputs(variant(dtype=torch.float32, tokens=tokens), seed)
        given = (x.qkv, x.positions, x.slots, x.readable)
        # The second output reads the cache, with what earlier calls wrote.
        for got, want in zip(run(*given), eager(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # a C++ compiler runs for half a minute
def test_the_package_of_a_program_that_calls_operations_runs(tmp_path: Path) -> None:
    """What has no lowering (attention) stays a call into Python: fusion must be imported there."""
    model, args = canonical()
    path = package(
        torch.export.export(model, args), tmp_path,
        **{"aot_inductor.compile_wrapper_opt_level": "O0"},
    )  # fmt: skip
    run = torch._inductor.aoti_load_package(str(path))
    eager = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(run(*args), eager(*args), rtol=1e-5, atol=1e-5)
    code = f"import torch; torch._inductor.aoti_load_package({str(path)!r})"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failed.returncode != 0
    assert "fusion::paged_attention" in failed.stderr
    loaded = subprocess.run(
        [sys.executable, "-c", "import fusion.ops; " + code], capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr


def fused_package_on_a_gpu(folder: Path) -> None:
    """Package the fused program, load it and run it twice; in a process of its own."""
    torch.set_grad_enabled(False)
    block = variant(dtype=torch.bfloat16, dim=64)
    x = inputs(block)
    model = Prologue(block).cuda()
    args = tuple(t.cuda() for t in (x.qkv, x.positions, x.slots, x.readable))
    program = torch.export.export(model, args)
    path = package(program, folder, **fusion.inductor_passes({FUSED: "required"}))
    (site,) = [s for r in fusion.reports() for s in r.sites if s.pass_name == FUSED]
    assert (site.status, site.kernel) == ("fused", "triton")
    assert "prologue_kernel" in sources(path)
    print("packaged", flush=True)
    run = torch._inductor.aoti_load_package(str(path))
    eager = copy.deepcopy(model)
    for _ in range(2):
        for got, want in zip(run(*args), eager(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def any_package_on_a_gpu(folder: Path) -> None:
    """The smallest package there is, without fusion."""

    class AddOne(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    x = torch.zeros(4, device="cuda")
    path = package(torch.export.export(AddOne(), (x,)), folder)
    torch._inductor.aoti_load_package(str(path))(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_package_of_a_fused_program_runs_on_a_gpu(tmp_path: Path) -> None:
    """The Triton kernel is compiled into the package."""

    def child(function: Callable[[Path], None]) -> subprocess.CompletedProcess[str]:
        text = (
            f"import pathlib; from {__name__} import {function.__name__} as f; "
            f"f(pathlib.Path({str(tmp_path)!r}))"
        )
        return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)

    ran = child(fused_package_on_a_gpu)
    assert "packaged" in ran.stdout, ran.stderr
    if ran.returncode < 0 and child(any_package_on_a_gpu).returncode < 0:
        pytest.skip("this torch's own loader crashes on every GPU package, fused or not")
    assert ran.returncode == 0, ran.stderr
