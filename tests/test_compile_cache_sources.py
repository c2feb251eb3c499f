"""Sources and kernels in the keys of compile caches (see test_compile_cache.py)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import fusion
from fusion import fingerprint, requires, selection
from fusion.config import Config
from fusion.kernel import Kernel
from fusion.ops import dispatch
from fusion.pipeline import PassManager
from fusion.requires import Requires
from fusion.target import Target
from tests.test_compile_cache import CPU, ROOT, fields, key
from tests.toy_passes import SinToCos, use_passes

# --- sources ---------------------------------------------------------------------------------


def test_every_file_of_fusion_is_in_the_key(tmp_path: Path) -> None:
    """One byte in any file of any folder, seen by a copy of the tree."""
    script = "from fusion.fingerprint import package_sources as p; print(p())"

    def seen() -> str:
        done = subprocess.run(
            [sys.executable, "-S", "-c", script],
            cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)},
            check=True,
        )  # fmt: skip
        return done.stdout

    for folder in ("fusion", "passes", "backends", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            if ROOT / "fusion" / folder not in file.parents:
                copy = tmp_path / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if not copy.exists():
                    copy.write_bytes(file.read_bytes())
    for folder in ("passes", "backends", "tools"):
        link = tmp_path / "fusion" / folder
        if not link.exists():
            link.symlink_to(Path("..") / folder)
    base = seen()
    assert base == seen()
    for name in (
        "fusion/match/norm.py",
        "fusion/graph/surgery.py",
        "passes/prologue/emit.py",
        "backends/triton/prologue_kernel.py",
        "backends/reference/rotary.py",
    ):
        file = tmp_path / name
        text = file.read_text()
        file.write_text(text + "\n")
        assert seen() != base, name
        file.write_text(text)
    (tmp_path / "fusion" / "notes.txt").write_text("no source")
    assert seen() == base


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package ``extra_kernels`` with a kernel in one file and its body in another."""
    home = tmp_path / "extra_kernels"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "body.py").write_text("BLOCK = 64\n")
    (home / "kernels.py").write_text("def write(*a, **k): ...\ndef lower(*a, **k): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("extra_kernels.kernels", fromlist=["kernels"])
    yield module
    for name in [n for n in sys.modules if n.split(".")[0] == "extra_kernels"]:
        del sys.modules[name]
    fingerprint.module_source.cache_clear()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Offer kernels beside the built-in ones."""

    def install(*kernels: Kernel) -> None:
        module = types.ModuleType("standin_backend")
        module.KERNELS = kernels  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(selection.BUILTIN, "standin", module.__name__)
        clear()

    def clear() -> None:
        selection._load.cache_clear()
        dispatch._fingerprint.cache_clear()

    yield install
    monkeypatch.undo()
    clear()


def other_function(*args: Any, **kwargs: Any) -> None:
    """A kernel's function that stands in another file than the plug-in's."""


def kernel_cases(module: Any) -> dict[str, Any]:
    return {
        "name": "another",
        "op": "rope_kv_cache",
        "fn": other_function,
        "requires": Requires((requires.Vendor(("cpu",)),)),
        "backend": "another",
        "lowering": other_function,
        "describe": lambda call: {},
    }


def test_every_field_of_a_kernel_has_a_case() -> None:
    assert set(kernel_cases(None)) == fields(Kernel)


@pytest.mark.parametrize("name", sorted(kernel_cases(None)))
def test_every_field_of_a_kernel_changes_both_keys(name: str, plugin: Any, backend: Any) -> None:
    base = Kernel("extra", "kv_cache_write", plugin.write, Requires(), "extra")
    without = key()
    backend(base)
    before = key(), dispatch.fingerprint()
    assert before[0] != without
    backend(dataclasses.replace(base, **{name: kernel_cases(plugin)[name]}))
    after = key(), dispatch.fingerprint()
    if name == "describe":  # it only talks
        assert after == before
    else:
        assert after[0] != before[0]
        assert after[1] != before[1]


@pytest.mark.parametrize("file", ["kernels.py", "body.py"])
def test_the_source_of_a_plugins_kernel_is_in_both_keys(
    file: str, plugin: Any, backend: Any
) -> None:
    backend(Kernel("extra", "kv_cache_write", functools.partial(plugin.write), Requires(), "extra"))
    before = key(), dispatch.fingerprint()
    path = Path(plugin.__file__).parent / file
    path.write_text(path.read_text().replace("64", "128") + "# edited\n")
    fingerprint.module_source.cache_clear()  # a new process
    dispatch._fingerprint.cache_clear()
    assert key() != before[0]
    assert dispatch.fingerprint() != before[1]


def test_code_without_a_file_is_told_apart_by_what_it_does() -> None:
    """A notebook's cell, or ``exec``: the same text is the same key, another is another."""

    def made(text: str) -> Any:
        space: dict[str, Any] = {"__name__": "no_such_file"}
        exec(text, space)
        return space["f"]

    one = "def f(x):\n    return (lambda y: y + 1)(x) if x in {'a', 'b', 'c'} else x"
    prints = [fingerprint.function_source(made(t)) for t in (one, one, one.replace("+ 1", "+ 2"))]
    assert prints[0] == prints[1] != prints[2]
    wrapped = functools.wraps(made(one))(lambda *a: None)
    assert fingerprint.function_source(wrapped) not in (
        "",
        *prints,
    )  # the wrapper does something, too
    assert fingerprint.function_source(None) == fingerprint.function_source(len) == ""


def run_text(text: str, name: str = "no_such_file") -> dict[str, Any]:
    """The names that a cell of a notebook makes."""
    space: dict[str, Any] = {"__name__": name}
    exec(text, space)
    return space


def lower(call: Any, block: int = 0, *, warps: int = 0) -> int:
    """A lowering in a file."""
    return block


def factory(value: Any) -> Any:
    def made(call: Any) -> Any:
        return value

    return made


class Callable_:
    def __init__(self, block: Any) -> None:
        self.block = block

    def __call__(self, call: Any) -> Any:
        return self.block

    def method(self, call: Any) -> Any:
        return self.block


def dressed(block: int) -> Any:
    wrapper = functools.wraps(lower)(factory(block))
    return functools.partial(wrapper)


BOUND: dict[str, Any] = {
    "an argument of a partial": lambda b: functools.partial(lower, 0, b),
    "a keyword of a partial": lambda b: functools.partial(lower, block=b),
    "a partial of a partial": lambda b: functools.partial(functools.partial(lower, block=b), 0),
    "a closure": factory,
    "a function in a closure": lambda b: factory(factory(b)),
    "a table in a closure": lambda b: factory({"x": [b, {b}]}),
    "a wrapper": dressed,
    "an attribute of an object": Callable_,
    "an object behind a method": lambda b: Callable_(b).method,
    "a default": lambda b: run_text(f"def f(call, block={b}): ...")["f"],
    "a keyword's default": lambda b: run_text(f"def f(call, *, block={b}): ...")["f"],
    "a closure of a cell": lambda b: run_text("def o(b):\n  return lambda call: b")["o"](b),
    "a class of a cell": lambda b: run_text(f"class C:\n  def __call__(s, c): return {b}")["C"](),
    "a helper of a cell": lambda b: run_text(f"def g(): return {b}\ndef f(c): return g()")["f"],
    "a number of a cell": lambda b: run_text(f"B = {b}\ndef f(c): return [B for _ in c]")["f"],
    "behind a cache": lambda b: functools.lru_cache(run_text(f"def f(c): return {b}")["f"]),
}


@pytest.mark.parametrize("make", BOUND.values(), ids=BOUND.keys())
def test_what_is_bound_to_a_function_is_in_its_hash(make: Any) -> None:
    one, same, other = (fingerprint.function_source(make(b)) for b in (64, 64, 128))
    assert one == same != other
    assert one


@pytest.mark.parametrize("name", ["fn", "lowering"])
def test_what_is_bound_to_a_kernel_is_in_both_keys(name: str, backend: Any) -> None:
    def keys(block: int) -> tuple[str, str]:
        kernel = Kernel("extra", "kv_cache_write", lower, Requires(), "extra")
        bound = functools.partial(lower, block=block)
        backend(dataclasses.replace(kernel, **{name: bound}))
        return key(), dispatch.fingerprint()

    one, same, other = keys(64), keys(64), keys(128)
    assert one == same
    assert one[0] != other[0] and one[1] != other[1]


def test_functions_that_only_look_different_are_equal() -> None:
    """Addresses, the order of sets and the values of tensors do not count."""
    import torch

    def tensor(n: float) -> torch.Tensor:
        return torch.full((3,), n)

    for a, b in (
        (factory(object()), factory(object())),
        (factory({"a", "b", "c"}), factory({"c", "b", "a"})),
        (factory({"a": 1, "b": 2}), factory({"b": 2, "a": 1})),
        (factory(tensor(1)), factory(tensor(2))),
        (factory(sys), factory(sys)),
    ):
        assert fingerprint.function_source(a) == fingerprint.function_source(b)
    long = fingerprint.function_source(factory(torch.zeros(4)))
    assert long != fingerprint.function_source(factory(tensor(1)))


def test_chains_without_an_end_end() -> None:
    class Itself:
        @property
        def func(self) -> Any:
            return self

        def __call__(self) -> None: ...

    class Ever(Itself):
        @property
        def func(self) -> Any:
            return Ever()

    class Angry(Itself):
        @property
        def func(self) -> Any:
            raise OSError("no")

        def __repr__(self) -> str:
            raise OSError("no text")

    def recursive() -> Any:
        return recursive

    loop: list[Any] = []
    loop.append(loop)
    empty = (lambda: (lambda: later, 0))()[0]  # the cell is never filled
    if False:
        later = 0
    for odd in (Itself(), Ever(), Angry(), recursive, factory(loop), factory(Angry()), empty):
        assert fingerprint.function_source(odd)


def test_the_conditions_of_a_kernel_show_everything_that_they_compare() -> None:
    """The key has a condition's text: a field that the text leaves out would not be in the key."""
    conditions = [
        cls
        for _, cls in inspect.getmembers(requires, inspect.isclass)
        if cls.__module__ == requires.__name__ and hasattr(cls, "look") and fields_of(cls)
    ]
    assert len(conditions) > 8
    for cls in conditions:
        assert all(f.repr for f in dataclasses.fields(cls)), cls


def fields_of(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls)


def test_a_broken_backend_changes_the_key(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    before = key()
    monkeypatch.setitem(selection.BUILTIN, "lost", "no_such_module_anywhere")
    selection._load.cache_clear()
    assert key() != before


def test_a_pass_that_could_not_be_built_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Picky(SinToCos):
        def unavailable(self, config: Config, target: Target) -> tuple[fusion.Reason, ...]:
            return (fusion.Reason("gate.arch", "not here"),)

    use_passes(monkeypatch, Picky)
    without = key()
    use_passes(monkeypatch)
    assert key() != without


def test_the_class_of_a_pass_is_in_the_key() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(SinToCos):
        pass

    one, other = (PassManager((p,), Config(), CPU).uuid() for p in (SinToCos(), Other()))
    assert one != other


def test_hashes_are_those_of_the_text_without_addresses() -> None:
    text = "<function f at 0x7f00aa>"
    assert fingerprint.digest_of(text) == fingerprint.digest_of(text.replace("7f00aa", "11"))
    assert fingerprint.digest_of("a") == hashlib.sha256(b"'a'").hexdigest()
