"""Lines of listings as a reader would write them, in both spellings."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph.snapshot import Snapshot
from fusion.nodetext import name_of, readable, split

FX = "%n_1 : [num_users=1] = call_function[target=torch.ops.{}](args = ({}), kwargs = {{{}}})"
WRITE = "fusion.kv_cache_write"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (FX.format("aten.mul.Tensor", "%a, %b", ""), "n_1 = aten.mul(a, b)"),
        (FX.format("aten.rsqrt.default", "%a,", ""), "n_1 = aten.rsqrt(a)"),
        (FX.format("aten.pow.Tensor_Scalar", "%a, 2", ""), "n_1 = aten.pow.Tensor_Scalar(a, 2)"),
        (
            FX.format("aten.cat.default", "[%a, %b], -1", "x: (1, %c), y: None"),
            "n_1 = aten.cat([a, b], -1, x=(1, c))",
        ),
        ("n = aten.slice.Tensor(a, 1, 0, 9223372036854775807)", "n = aten.slice(a, 1, 0, end)"),
        ("n = getitem(split, 1)", "n = split[1]"),
        ("n = aten.add.Tensor(a, b) {'alpha': 2}", "n = aten.add(a, b, alpha=2)"),
        (
            FX.format(
                "higher_order.auto_functionalized_v2",
                f"{WRITE}.default,",
                "key: %k, k_scale: None, _x_size: (1, 2), _all_bases: [%c, %d]",
            ),
            f"n_1 = {WRITE}(key=k, writes=[c, d])",
        ),
        (
            f"n = auto_functionalized_v2(<OpOverload(op='{WRITE}', overload='default')>,) "
            "{'key': k, 'k_scale': None, 'kv_layout': 'A, B', '_x': 3, '_all_bases': [c]}",
            f"n = {WRITE}(key=k, kv_layout='A, B', writes=[c])",
        ),
        ("%x : [num_users=2] = placeholder[target=x]", "x = placeholder x"),
        ("return (%a, %b)", "return (%a, %b)"),
        ("whatever a pass of somebody else says", "whatever a pass of somebody else says"),
        ("", ""),
    ],
)
def test_a_line_is_an_assignment(line: str, text: str) -> None:
    assert readable(line) == text


def test_names() -> None:
    assert name_of("%mul_4 : [num_users=1] = call_function[...]") == "mul_4"
    assert name_of("mul_4 = aten.mul.Tensor(a, b)") == "mul_4"
    assert name_of("return (%a)") == name_of("") == ""


def test_commas_in_brackets_and_strings_do_not_split() -> None:
    assert split("a, f(b, [c, d]), 'e, (', {g: 1, h: 2}") == [
        "a", "f(b, [c, d])", "'e, ('", "{g: 1, h: 2}",
    ]  # fmt: skip


def test_both_spellings_of_real_nodes_say_the_same() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[:, 1:].float().split(2, -1)
        return torch.cat([a.pow(2).mean(-1, keepdim=True), b.rsqrt()], -1).sum(0, dtype=torch.half)

    graph = make_fx(fn)(torch.ones(3, 5, dtype=torch.half)).graph
    plain = Snapshot(graph).listing()
    checked = 0
    for node in graph.nodes:
        if node.op == "call_function":
            assert readable(str(node.format_node())) == readable(plain[node.name])
            assert readable(plain[node.name]).startswith(f"{node.name} = ")
            checked += 1
    assert checked > 8
