"""Rotary embedding: reading one chain, and finding the query chains beside a key's.

The reading itself is in :mod:`fusion.match.rotation`, the search in :mod:`fusion.match.siblings`.
"""

from __future__ import annotations

from fusion.match.rotation import read_rope
from fusion.match.siblings import RopeFinder, find_query_ropes

__all__ = ["RopeFinder", "find_query_ropes", "read_rope"]
