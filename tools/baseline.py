"""What changed between two reports of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fusion.tools.console import CommandError

if TYPE_CHECKING:
    from fusion import Report, Site

_RANK = {"fused": 3, "partial": 2, "refused": 1, "missed": 1, "off": 0}
Place: TypeAlias = "tuple[str, str, int]"


@dataclass(frozen=True)
class Change:
    """Places of one pass that changed in the same way; ``verdict``: worse, better, changed, ..."""

    verdict: str
    pass_name: str
    before: str
    after: str
    places: tuple[str, ...]
    layers: bool = True  # the places are layers, each its own

    @property
    def worse(self) -> bool:
        """Whether a fusion was lost."""
        return self.verdict in ("worse", "gone")


def read_report(path: str) -> Report:
    """A report from a file. Raises :class:`CommandError` where there is none."""
    from fusion import Report

    try:
        return Report.from_json(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise CommandError(f"--baseline: there is no file {path}") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{path} is no fusion report: {error}") from error


def changes(old: Report, new: Report) -> list[Change]:
    """The places whose outcome differs, equal changes together, worst first.

    A place is a layer and a pass (counted, where a layer has several); source lines may move.
    Reasons matter by code only, so that another wording is no change. Places without a layer are
    shown by their line, as it is now.
    """
    from fusion.render import summary, where

    before, after = _places(old), _places(new)
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for place in (*before, *(p for p in after if p not in before)):
        a, b = before.get(place), after.get(place)
        words = tuple("none" if s is None else summary(s) for s in (a, b))
        if words[0] == words[1]:
            continue
        key = (_verdict(a, b), place[0], words[0], words[1])
        site = b or a
        assert site is not None
        found.setdefault(key, []).append(where(site))
    order = ("worse", "gone", "changed", "new", "better")
    layers = {s.layer for s in (*before.values(), *after.values())}
    made = [
        Change(*key, tuple(places), layers.issuperset(places) and len({*places}) == len(places))
        for key, places in found.items()
    ]
    return sorted(made, key=lambda c: order.index(c.verdict))


def _verdict(old: Site | None, new: Site | None) -> str:
    if new is None:
        return "gone" if old is not None and old.applicable and _RANK[old.status] > 1 else "changed"
    if old is None:
        return "new"
    ranks = [_RANK[s.status] if s.applicable else 3 for s in (old, new)]
    if ranks[0] == ranks[1]:
        return "changed"
    return "worse" if ranks[1] < ranks[0] else "better"


def _places(report: Report) -> Mapping[Place, Site]:
    """One site a place: the worst where several graphs hold it."""
    found: dict[Place, Site] = {}
    for graph in report.graphs:
        seen: dict[tuple[str, str], int] = {}
        for site in graph.sites:
            key = (site.pass_name, site.layer or "-")
            number = seen[key] = seen.get(key, 0) + 1
            place = (*key, number)
            other = found.get(place)
            if other is None or _RANK[site.status] < _RANK[other.status]:
                found[place] = site
    return found


def to_text(found: list[Change], name: str) -> str:
    """One line a change, and the layers below."""
    if not found:
        return f"nothing changed since {name}\n"
    lines = [f"changes since {name}:"]
    for change in found:
        places = tuple(dict.fromkeys(change.places))
        count = f"{len(change.places)} {'layers' if change.layers else 'sites'}"
        count = places[0] if len(change.places) == 1 else count
        lines.append(f"  {change.verdict}: {count}: {change.pass_name}")
        lines.append(f"    from {change.before}")
        lines.append(f"    to   {change.after}")
        if len(change.places) > 1:
            shown = ", ".join(places[:4]) + (", ..." if len(places) > 4 else "")
            lines.append(f"    at   {shown}")
    return "\n".join(lines) + "\n"
