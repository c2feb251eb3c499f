"""What the rewrites of one graph share: sizes, and nodes that are built once."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from fusion.graph.compat import fake_mode_of, shape_env_of
from fusion.graph.sizes import Sizes


class Shared:
    """State that the sites of one graph share. Pickled or copied with a graph it becomes None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __init__(self, graph: Graph) -> None:
        self.sizes = Sizes(graph)
        self.shared: dict[Any, Node] = {}
        self.fake_mode = fake_mode_of(graph)
        self.shape_env = shape_env_of(graph)


def shared_of(graph: Graph) -> Shared:
    """Kept on the graph, so that it goes when the graph goes."""
    site: Shared | None = graph.__dict__.get("_fusion_site")
    if site is None:
        site = graph.__dict__["_fusion_site"] = Shared(graph)
    return site
