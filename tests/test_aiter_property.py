"""Either the gate refuses, or the strict stand-in accepts and the numbers are right."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.config import Config
from fusion.reason import CODES
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build, check_prologue, refusals, standin
from tests.prologue_cases import Case
from tests.test_aiter_numbers import attention_args, check_attention

VERSIONS = ("0.1.10", "0.1.11", "0.1.12", "0.1.15", "0.1.16", "0.1.19", "0.1.19.post1", "0.1.20",
            "0.1.20.dev3", "0.1.26", "0.2.0")  # fmt: skip
ARCHS = ("gfx942", "gfx942", "gfx950", "gfx90a")


def near(rng: random.Random) -> Case:
    """A case that differs from the accepted one in a few places, so that both answers occur."""
    wild = dataclasses.asdict(prologue_cases.random_case(rng))
    names = rng.sample(sorted(wild), rng.choice([0, 1, 1, 2, 3]))
    case = dataclasses.asdict(G0) | {n: wild[n] for n in names}
    case["op"] = rng.choice([G0.op, G0.op, "rope_kv_cache", "kv_cache_write"])
    case["seed"], case["tokens"] = wild["seed"], rng.choice([1, 2, 5, 9])
    case["blocks"] = 16
    case["dim"] = rng.choice([64, 128, 128, 256, wild["dim"]])
    case["layout"] = rng.choice(["packed", "nhd", "block_first", case["layout"]])
    case["cache"] = rng.choice(["bf16", "bf16", "fnuz", "fn", case["cache"]])
    case["rotary_dim"] = rng.choice([None, None, case["dim"] // 2, wild["rotary_dim"]])
    if case["layout"] in ("kv_first", "block_first"):
        case["dim_v"] = None
    if case["layout"] == "shuffle":
        case["block"] = 16
    if case["rotary_dim"] is not None:
        case["rotary_dim"] = min(case["rotary_dim"], case["dim"])
    return Case(**case)


answers: dict[str, int] = {"accepted": 0, "refused": 0}


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32), version=st.sampled_from(VERSIONS), arch=st.sampled_from(ARCHS),
       exact=st.booleans())  # fmt: skip
def test_prologue(seed: int, version: str, arch: str, exact: bool) -> None:
    case = near(random.Random(seed))
    if case.op == "kv_cache_write":
        args, _ = prologue_cases.build(case)
    else:
        args, _ = build(case)
    config = Config(numerics="exact" if exact else "tolerant")
    reasons = refusals(case.op, args, version=version, arch=arch, config=config)
    assert all(r.code in CODES and r.code != "internal.error" for r in reasons)
    answers["refused" if reasons else "accepted"] += 1
    if reasons:
        assert all(r.have is not None and r.need is not None for r in reasons)
        return
    with standin(version, arch):
        if case.op == "kv_cache_write":
            prologue_cases.check(case, KERNELS[case.op].fn)
        else:
            check_prologue(case)


def test_both_answers_occurred() -> None:
    """The property would hold for a gate that refuses all, too; this one does not."""
    if not sum(answers.values()):  # run by itself
        test_prologue()
    assert answers["accepted"] >= 20, answers
    assert answers["refused"] >= 20, answers


@settings(max_examples=40)
@given(data=st.data())
def test_attention(data: st.DataObject) -> None:
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    causal, page = pick(True, False), pick(1, 8, 16, 32, 64, 128)
    batch = pick(1, 3)
    top = pick(1, 4)
    rows = tuple(top if not causal or pick(True, False) else pick(0, 1, top) for _ in range(batch))
    lens = tuple(r + pick(0, 1, 15, 16, 17, 40) for r in rows)
    args = attention_args(
        seed=pick(0, 1, 2), lens=lens, rows=rows, page=page, causal=causal,
        dim=pick(32, 64, 80, 256), window=(pick(-1, 0, 5, 30), pick(-1, 0, 3)),
        softcap=pick(0.0, 0.0, 7.0), tail=pick(0, 0, 2) if causal else 0,
    )  # fmt: skip
    args["max_query_len"] = max(*rows, 1)
    if refusals("paged_attention", args):
        return
    with standin():
        check_attention(args)
