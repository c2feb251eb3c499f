"""The DFlash example: speculation does not change the answer, and the report shows why it may not.

The drafter is checked against its formula with a mask (`DenseAttend`), the loop against plain
greedy decoding, and both checks against what breaks them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion

pytest.importorskip("transformers")

from fusion.integrations.transformers import PagedKVCache
from tests import models

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch._dynamo.reset()
    fusion.reports(clear=True)
    yield
    torch._dynamo.reset()


def load(name: str) -> Any:
    return importlib.import_module(name)


def drafter_for(target: Any, **changes: Any) -> Any:
    """A random drafter whose norms are not all ones; `changes` go over its config."""
    library = load("dflash_drafter")
    torch.manual_seed(1)
    drafter = library.random_drafter(target, 4)
    config = drafter.config
    for name, value in changes.items():
        setattr(config, name, value)
    drafter = library.DFlashDrafter(config).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return drafter


SMALL = ["--layers=2", "--max-new-tokens=12", "--device=cpu", "--block-size=4", "--page-size=4"]


def test_compiled_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example, pairs = load("dflash"), []

    def keep(*args: Any, **kwargs: Any) -> Any:
        pairs.append(load("dflash_decoding").Speculator(*args, **kwargs))
        return pairs[-1]

    monkeypatch.setattr(example, "Speculator", keep)
    assert example.main([*SMALL, "--inner", "aot_eager"]) == 0
    out = capsys.readouterr().out
    assert "tokens equal to plain greedy decoding of the target" in out
    assert out.count("equal: ") == 4
    # Drafts were accepted, whole and in part, and rejected.
    given = out.split("tokens a round: ")[1].splitlines()[0]
    assert float(given.split()[0]) > 1
    assert all(f" x {n}" in given for n in (1, 4))
    # Three graphs, no recompilation in the second run.
    assert len(re.findall(r"(?m)^graph \d", out)) == 3
    (report,) = pairs[0].draft.reports
    sites = [s for s in report.sites if s.pass_name == "qk_norm_rope_kv_cache"]
    # Three blocks of 4 prompts and 4 tokens; the rest is the context's keys, without queries.
    blocks = [s for s in sites if str(s.facts.get("tokens")) == "16"]
    assert [s.layer for s in blocks] == [f"layers.{i}.self_attn" for i in range(3)]
    assert {(s.status, s.operation) for s in blocks} == {("fused", "qk_norm_rope_kv_cache")}
    assert len(sites) == 6
    table = out.split("target, reading the prompts ")[-1]
    left, _, drafter = table.partition("drafter, adding context and drafting a block")
    drafter, _, verify = drafter.partition("target, verifying a block")
    for target in (left, verify):
        assert "attention  2 causal: left alone\n" in target
        assert "prologue   2 fused, reference" in target
    assert "2 non-causal: fused as paged_attention, reference" in drafter
    # A window of 8 positions reaches 7 to either side.
    assert "1 non-causal, window 7/7: fused as paged_attention, reference" in drafter
    assert " causal" not in drafter


def test_a_wrong_acceptance_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = load("dflash_decoding")
    monkeypatch.setattr(decoding, "accept", lambda drafted, said: [*drafted, said[-1]])
    arguments = [*SMALL, "--no-compile", "--train-steps", "0"]
    for dtype in ("float32", "bfloat16"):
        assert load("dflash").main([*arguments, "--dtype", dtype]) == 1
        out = capsys.readouterr().out
        assert "differs from token 1 on (logits " in out
        assert "tokens not equal to plain greedy decoding of the target" in out
        assert "near tie" not in out


def test_in_bfloat16_a_near_tie_may_turn(capsys: pytest.CaptureFixture[str]) -> None:
    example, result = load("dflash"), load("dflash_decoding").Result
    target = models.build("qwen3", layers=2)
    (prompt,), (plain,) = models.prompts((5,)), [[3, 4]]
    with torch.no_grad():
        # Two tokens of the same logit.
        target.lm_head.weight[7] = target.lm_head.weight[3]
    parted = result([[7, 4]], [[1]])
    assert not example._print_tokens([prompt], parted, [plain], target, None)  # not in f32
    assert "differs from token 0 on (logits" in capsys.readouterr().out
    target.to(torch.bfloat16)
    assert example._print_tokens([prompt], parted, [plain], target, None)
    far = result([[int(target.lm_head.weight.float().norm(dim=1).argmax()), 4]], [[1]])
    assert not example._print_tokens([prompt], far, [plain], target, None)


def test_rejected_tokens_must_leave_the_target_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees a cache that keeps what was rejected."""
    decoding = load("dflash_decoding")
    target = models.build("qwen3", layers=2)
    drafter = drafter_for(target)
    target.set_attn_implementation("fusion_paged")
    prompts = models.prompts((5, 2))
    want = models.eager_greedy(target, prompts, 6)
    pair = decoding.Speculator(target, drafter, 2, 40, page_size=4)
    assert pair.generate(prompts, 6).tokens == want
    monkeypatch.setattr(pair.target_cache, "truncate", lambda sequence, length: None)
    assert pair.generate(prompts, 6).tokens != want


def test_caches_are_empty_afterwards_and_rows_end_at_their_own_pace() -> None:
    decoding = load("dflash_decoding")
    target = models.build("qwen3", layers=2)
    drafter = drafter_for(target)
    target.set_attn_implementation("fusion_paged")
    prompts = models.prompts((5, 17, 1))
    pair = decoding.Speculator(target, drafter, 3, 17 + 9, page_size=4)
    for new in (9, 1):
        result = pair.generate(prompts, new)
        assert [len(t) for t in result.tokens] == [new] * 3
        # The first token comes with the prompt.
        assert [sum(rounds) for rounds in result.rounds] == [new - 1] * 3
        for cache in (pair.target_cache, pair.drafter_cache):
            assert cache.free_blocks == cache.num_blocks


@pytest.mark.parametrize(
    ("drafted", "said", "new"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 9, 4], [1, 2, 9]),
        ([1, 2, 3], [9, 2, 3, 4], [9]),
        ([], [7], [7]),
    ],
)
def test_accept(drafted: list[int], said: list[int], new: list[int]) -> None:
    assert load("dflash_decoding").accept(drafted, said) == new


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": None},  # then windows look back only
        {"is_causal": True},
        {"sliding_window": 3},  # shorter than a block
    ],
    ids=str,
)
@torch.no_grad()
def test_paged_drafter_equals_its_formula(changes: dict[str, Any]) -> None:
    """Two texts as one ragged batch; context comes in two portions, with rejected tokens."""
    library = load("dflash_drafter")
    drafter = drafter_for(models.build("qwen3", layers=3), **changes)
    size, hidden = drafter.block_size, drafter.config.hidden_size
    contexts, rejected = (11, 2), 3
    width = len(drafter.target_layers) * hidden
    features = [torch.randn(1, n, width) for n in contexts]
    blocks = [torch.randn(1, size, hidden) for _ in contexts]
    want = []
    for n, feature, block in zip(contexts, features, blocks, strict=True):
        attend = library.DenseAttend(torch.tensor([n]), size, n)
        at = torch.arange(n)[None]
        want.append(drafter(block, attend.positions[None], feature, at, attend))

    cache = PagedKVCache.for_model(drafter, 16, 4)
    sequences = [cache.allocate() for _ in contexts]
    got = None
    # First all but the last token of each context; then that one, before tokens without a slot.
    for parts in ([slice(0, n - 1) for n in contexts], [slice(n - 1, n) for n in contexts]):
        portion, positions, slots = [], [], []
        for sequence, feature, part in zip(sequences, features, parts, strict=True):
            kept = feature[:, part]
            portion += [kept, torch.full((1, rejected, width), 5.0)]
            positions += [*range(part.start, part.stop), *range(part.stop, part.stop + rejected)]
            slots += [*cache.append(sequence, kept.shape[1]), *[-1] * rejected]
        inputs = cache.inputs(sequences, size)
        attend = library.PagedAttend(inputs, torch.tensor(slots))
        got = drafter(
            torch.cat(blocks, 1),
            inputs.positions,
            torch.cat(portion, 1),
            torch.tensor([positions]),
            attend,
        )
        for sequence in sequences:
            cache.truncate(sequence, cache.allocator.length(sequence) - size)
    assert got is not None
    torch.testing.assert_close(got, torch.cat(want, 1), atol=2e-5, rtol=1e-5)


def test_causality_and_window_are_read_per_layer() -> None:
    target = models.build("qwen3", layers=3)
    kinds = ["sliding_attention", "full_attention", "full_attention"]

    def read(**changes: Any) -> list[tuple[bool, int | None]]:
        drafter = drafter_for(target, layer_types=kinds, sliding_window=6, **changes)
        return [(a.is_causal, a.sliding_window) for a in (x.self_attn for x in drafter.layers)]

    assert read() == [(False, 6), (False, None), (False, None)]
    assert read(is_causal=None) == [(True, 6), (False, None), (False, None)]
    settings = {"mask_token_id": 0, "target_layer_ids": [0], "causal": True}
    assert read(is_causal=None, dflash_config=settings) == [(True, 6), (True, None), (True, None)]


def test_training_makes_drafts_that_are_accepted() -> None:
    library = load("dflash_drafter")
    target = models.build("qwen3", layers=2)
    prompts = models.prompts((5, 3))
    texts = [
        (prompt + new, len(prompt))
        for prompt, new in zip(prompts, models.eager_greedy(target, prompts, 8), strict=True)
    ]
    torch.manual_seed(0)
    drafter = library.random_drafter(target, 4)
    first, last = library.distil(drafter, target, texts, 12)
    assert last < first / 2
    assert not any(p.requires_grad for p in drafter.parameters())


# --- folders ----------------------------------------------------------------------------------


def save(folder: Path) -> tuple[Path, Path]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    target = models.build("qwen3", layers=3)
    target.save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(models.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")
    drafter_for(target).save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_from_folders(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = save(tmp_path)
    arguments = ["--target", str(target), "--drafter", str(drafter), "--dtype", dtype]
    arguments += ["--prompt", "w1 w2 w3", "--prompt", "w7", "--max-new-tokens", "5"]
    assert load("dflash").main([*arguments, "--no-compile", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "blocks of 4, reads target layers 0, 1" in out
    assert "prompt of   3 tokens" in out
    assert "w" in out.split("rounds, ")[1]


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    library = load("dflash_drafter")
    target, folder = save(tmp_path)
    with pytest.raises(ValueError, match="no target_layer_ids, mask_token_id"):
        library.load_drafter(target, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        library.load_drafter(tmp_path, torch.float32, "cpu")
    models.config("llama", 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model_type qwen3 \(it is llama\), target_layer_ids"):
        library.load_drafter(tmp_path, torch.float32, "cpu")
    config = json.loads((folder / "config.json").read_text())
    for layers, width, message in (
        (2, 512, r"unexpected_keys.*layers\.2"),
        (4, 512, r"missing_keys.*layers\.3"),
        (3, 384, r"mismatched_keys.*down_proj"),
    ):
        kinds = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        changed = {**config, **kinds, "intermediate_size": width}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            library.load_drafter(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "x"], "--drafter needs --target"),
        (["--prompt", "x"], "--prompt needs --target"),
        (["--block-size", "1"], "--block-size must be at least 2"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("dflash").main(arguments)
    assert message in capsys.readouterr().err


def test_models_that_do_not_belong_together(tmp_path: Path) -> None:
    target, drafter = save(tmp_path)
    models.build("qwen3", layers=1).save_pretrained(target)
    arguments = ["--target", str(target), "--drafter", str(drafter), "--device", "cpu"]
    with pytest.raises(SystemExit, match="reads layers"):
        load("dflash").main([*arguments, "--max-new-tokens", "1"])
