"""What the timed rows of paged attention come to: a summary, and the tables of the page in docs/.

python benchmarks/paged_attention_tables.py results/paged_attention.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paged_attention_cases import Case

PEERS = ("gather", "cudnn", "folded")
Pair = tuple[Case, dict[str, Any]]


def paired(rows: Sequence[dict[str, Any]]) -> list[Pair]:
    """Each row of a result with the case that it is about."""
    return [(Case(**{k: row[k] for k in Case.__dataclass_fields__}), row) for row in rows]


def spread(values: Sequence[float]) -> str:
    """Mean, least, most and number of values."""
    if not values:
        return "none"
    mean = statistics.fmean(values)
    return f"{mean:.3f} ({min(values):.3f}-{max(values):.3f}, {len(values)})"


def tflops(case: Case, row: dict[str, Any]) -> float:
    """Both matrix products, TFLOP/s."""
    return case.flops / row["us"] / 1e6


def of_ceiling(case: Case, row: dict[str, Any], read_tbs: float) -> float:
    """K and V over the time, as a fraction of the read ceiling."""
    return case.kv_bytes / row["us"] / 1e6 / read_tbs


def peers(pairs: Sequence[Pair]) -> list[str]:
    """How our kernel stands to each peer, with every case where the peer is ahead."""
    lines = []
    for peer in PEERS:
        both = [(case, row) for case, row in pairs if row.get(peer)]
        if not both:
            continue
        ratios = [row[peer] / row["us"] for _, row in both]
        lines.append(
            f"{peer} / ours: geometric mean {statistics.geometric_mean(ratios):.2f}, "
            f"worst {min(ratios):.2f}, {len(ratios)} cases"
        )
        lines += [
            f"  slower than {peer}: {case} {row['us']:.1f} against {row[peer]:.1f}"
            for case, row in both
            if row[peer] < row["us"]
        ]
    best = [
        min(row[p] for p in PEERS[:2] if row.get(p)) / row["us"]
        for _, row in pairs
        if any(row.get(p) for p in PEERS[:2])
    ]
    if best:
        lines.append(f"best peer / ours: geometric mean {statistics.geometric_mean(best):.2f}")
    errors = [row[f"{p}_error"] for p in PEERS for _, row in pairs if f"{p}_error" in row]
    if errors:
        lines.append(f"largest relative error of a peer: {max(errors):.2e}")
    lines += [f"  cuDNN, {c}: {row['cudnn_note']}" for c, row in pairs if "cudnn_note" in row]
    return lines


def summary(rows: Sequence[dict[str, Any]], read_tbs: float) -> list[str]:
    """The figures that the page's summary states, as lines of text."""
    pairs = paired(rows)

    def of(figure: Callable[..., float], rows_of: range, least: float, most: float) -> str:
        return spread([figure(c, r) for c, r in pairs
                       if c.group_rows in rows_of and least < c.kv_bytes <= most])  # fmt: skip

    thin = range(65)
    big, middle = (1e9, float("inf")), (1e8, 1e9)
    lines = [
        "M <= 64 over 1 GB, of the read ceiling: "
        + of(lambda c, r: of_ceiling(c, r, read_tbs), thin, *big),
        "M <= 64, 100 MB to 1 GB, of the paged-read floor: "
        + of(lambda c, r: r["floor"] / r["us"], thin, *middle),
        "M <= 64 under 100 MB, us over the floor: "
        + of(lambda c, r: r["us"] - r["floor"], thin, 0, 1e8),
    ]
    for m in (128, 256):
        exactly = range(m, m + 1)
        lines.append(f"M = {m} over 1 GB, TFLOP/s: {of(tflops, exactly, *big)}")
        lines.append(f"M = {m}, 100 MB to 1 GB, TFLOP/s: {of(tflops, exactly, *middle)}")
    lines += peers(pairs)
    lines.append(f"largest relative error: {max(row['error'] for row in rows):.2e}")
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(header: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; ``header``: names separated by " | "."""
    names = header.split(" | ")
    return "\n".join([_line(names), _line(["---"] * len(names)), *map(_line, rows)])


def _common(case: Case, row: dict[str, Any], read_tbs: float) -> list[str]:
    size = case.kv_bytes / 1e6
    return [
        f"{case}".removesuffix(", causal"), str(case.group_rows),
        f"{size:.1f}" if size < 10 else f"{size:.0f}",
        f"{row['us']:.1f}", f"{row['floor']:.1f}", f"{row['floor'] / row['us']:.2f}",
        f"{of_ceiling(case, row, read_tbs):.2f}",
    ]  # fmt: skip


def _tiles(row: dict[str, Any]) -> str:
    """``rows``x``keys``, row blocks, splits, from the geometry's own text."""
    numbers = [word for word in row["tiles"].replace(",", "").split() if word.isdigit()]
    rows, keys, _, _, blocks, splits = numbers
    return f"{rows}x{keys}, {blocks}, {splits}"


def markdown(result: dict[str, Any]) -> str:
    """The three tables of the page."""
    read = result["rates"]["read"]
    groups = {name: paired(rows) for name, rows in result["groups"].items()}
    first = "heads, S, B, context | M | KV MB | ours | floor | floor / ours | of read ceiling"
    draft = [
        [*_common(case, row, read), f"{tflops(case, row):.0f}",
         *(f"{row[p]:.1f}" if row.get(p) else "-" for p in PEERS), _tiles(row)]
        for case, row in groups["draft"]
    ]  # fmt: skip
    others = [
        [str(case), f"{row['us']:.1f}", f"{row['floor']:.1f}", f"{row['error']:.1e}"]
        for case, row in groups["others"]
    ]
    peers_of = "TFLOP/s | gather + SDPA | cuDNN | cuDNN folded | tile, row blocks, splits"
    return "\n\n".join([
        _table("other shapes | ours | floor | relative error", others),
        _table(f"{first} | {peers_of}", draft),
        _table(first, [_common(case, row, read) for case, row in groups["decode"]]),
    ])  # fmt: skip


def main() -> None:
    """Print the summaries and tables of a result file."""
    result = json.loads(Path(sys.argv[1]).read_text())
    for name in ("draft", "decode"):
        print(f"== {name}", *summary(result["groups"][name], result["rates"]["read"]), sep="\n")
    print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
