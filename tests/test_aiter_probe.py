"""Whatever happens when AITER is imported is a reason, and the next kernel is taken."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion.backends.aiter import contract, probe, runtime
from fusion.config import Config
from fusion.kernel import KernelCall
from fusion.reason import Reason
from fusion.selection import NoKernelError, select
from fusion.target import Target
from tests.aiter_cases import G0, KERNELS, STANDIN, build, described, forget_aiter

PTS = "qk_norm_rope_kv_cache"
GOOD = (
    "def fused_qk_norm_rope_cache_pts_quant_shuffle(" + ", ".join(contract.PTS.passes) + "=0): ..."
)
OLD = GOOD.replace(", rotary_dim=0", "")
REORDERED = GOOD.replace("k_out, v_out", "v_out, k_out")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    forget_aiter()
    yield
    forget_aiter()


def package(root: Path, body: str, init: str = "") -> Path:
    """A package called aiter whose pts module holds ``body``."""
    ops = root / "aiter" / "ops"
    ops.mkdir(parents=True)
    (root / "aiter" / "__init__.py").write_text(textwrap.dedent(init))
    (ops / "__init__.py").write_text("")
    (ops / "fused_qk_norm_rope_cache_quant.py").write_text(textwrap.dedent(body))
    return root


def present(call: KernelCall, **changes: object) -> KernelCall:
    """The same call on the machine that this process runs on, were that an MI300X."""
    import dataclasses

    target = Target("amd", "gfx942", "probed", (("aiter", "0.1.20"),))
    return dataclasses.replace(call, **{"target": target, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("init", "body", "code", "words"), [
    ("raise RuntimeError('no rocminfo')", GOOD, "gate.aiter-probe", "RuntimeError: no rocminfo"),
    ("assert False, 'GPU_ARCHS'", GOOD, "gate.aiter-probe", "AssertionError: GPU_ARCHS"),
    ("raise OSError('libamdhip64.so')", GOOD, "gate.aiter-probe", "OSError: libamdhip64.so"),
    ("import sys; sys.exit(1)", GOOD, "gate.aiter-probe", "SystemExit: 1"),
    ("", "raise ImportError('cannot import name x')", "gate.aiter-probe", "cannot import name x"),
    ("", "syntax error", "gate.aiter-probe", "SyntaxError"),
    ("", "x = 1", "gate.aiter-callable", "no function"),
    ("", "fused_qk_norm_rope_cache_pts_quant_shuffle = 3", "gate.aiter-callable", "no function"),
    ("", OLD, "gate.aiter-callable", "known order"),
    ("", REORDERED, "gate.aiter-callable", "known order"),
    ("", GOOD.replace("rotary_dim=0", "rotary_dim=0, *, must"), "gate.aiter-callable", "must"),
])  # fmt: skip
def test_each_failure_is_a_reason(
    init: str, body: str, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, body, init)))
    call = present(described(PTS, build(G0)[0]))
    chosen = select(call)
    assert chosen.kernel is not None
    assert chosen.kernel.name != "aiter"
    aiter = chosen.candidates[0]
    assert aiter.kernel == "aiter"
    assert [r.code for r in aiter.reasons] == [code]
    assert words in str(aiter.reasons[0])
    assert "aiter" in chosen.table()


def test_a_good_package_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, GOOD)))
    chosen = select(present(described(PTS, build(G0)[0])))
    assert chosen.kernel is KERNELS[PTS]
    assert "aiter.ops.fused_qk_norm_rope_cache_quant" in sys.modules


def test_the_real_stand_in_fits_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    for function in contract.FUNCTIONS.values():
        assert callable(probe.function(function)), function.name


def test_the_async_package_of_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recognised by what it lacks, without being imported."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "aiter" / "azip.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = probe.function(contract.PTS)
    assert isinstance(reason, Reason)
    assert reason.code == "gate.aiter-probe"
    assert "async" in reason.message
    assert "aiter" not in sys.modules
    # Its distribution is not amd-aiter, so a target sees no version; the reason names the mix-up.
    import dataclasses

    call = present(described(PTS, build(G0)[0]))
    call = dataclasses.replace(call, target=Target("amd", "gfx942", "probed", ()))
    unmet = KERNELS[PTS].requires.unmet(call)
    assert {r.code for r in unmet} == {"gate.aiter-probe"}
    assert any("async" in r.message for r in unmet)


def test_a_module_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    reason = probe.locate()
    assert reason is not None
    assert reason.code == "gate.aiter-probe"


def test_nothing_is_imported_where_it_could_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    monkeypatch.syspath_prepend(str(package(tmp_path, GOOD)))
    call = present(described(PTS, build(G0)[0]))
    others = [
        Target("cpu", "cpu", "probed", (("aiter", "0.1.20"),)),
        Target("nvidia", "sm_90", "probed", (("aiter", "0.1.20"),)),
        Target("amd", "gfx1100", "probed", (("aiter", "0.1.20"),)),
        Target("amd", "gfx942", "probed", (("aiter", "0.1.11"),)),
        Target("amd", "gfx942", "probed", ()),
        Target.parse("gfx942", aiter="0.1.20"),
    ]
    for target in others:
        KERNELS[PTS].requires.evaluate(dataclasses.replace(call, target=target))
        assert "aiter" not in sys.modules, target
    off = dataclasses.replace(call, config=Config(aiter=False))
    KERNELS[PTS].requires.evaluate(off)
    monkeypatch.setenv("FUSION_AITER", "0")
    KERNELS[PTS].requires.evaluate(call)
    assert "aiter" not in sys.modules
    monkeypatch.delenv("FUSION_AITER")
    KERNELS[PTS].requires.evaluate(call)
    assert "aiter" in sys.modules


def test_an_adapter_past_the_gate_raises_plainly() -> None:
    args, storage = build(G0)
    before = storage.clone()
    with (
        runtime.assume(Target.parse("gfx942", aiter="0.1.20")),
        pytest.raises(NoKernelError, match="not installed"),
    ):
        KERNELS[PTS].fn(**args)
    assert storage.equal(before)


def test_importing_the_backend_imports_neither_aiter_nor_triton(tmp_path: Path) -> None:
    """In a process where both would fail loudly."""
    for name in ("aiter", "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    program = """
        import sys
        import fusion.backends.aiter as aiter
        from fusion.selection import kernels
        assert [k for k in kernels("qk_norm_rope_kv_cache") if k.name == "aiter"]
        assert len(aiter.kernels()) == 4
        assert "aiter" not in sys.modules, "aiter imported"
        print("fine")
    """
    path = f"{tmp_path}:{Path(__file__).parent.parent}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr
