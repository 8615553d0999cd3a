"""Loop graphs to kernel groups: legality first, then profit."""

from __future__ import annotations

from ..ir.graph import LoopGraph, Schedule
from ..target import Target
from .fusion import fuse
from .in_place import share_memory
from .inline import inline_producers
from .order import order_groups
from .small_maps import join_small_maps
from .split import split_reductions
from .split_attention import split_attention
from .statistics import recompute_statistics
from .units import drop_unit_symbols

__all__ = ["schedule"]


def schedule(graph: LoopGraph, target: Target) -> Schedule:
    """Kernel groups in execution order."""
    divided = split_reductions(
        recompute_statistics(drop_unit_symbols(split_attention(graph, target)))
    )
    inlined = inline_producers(divided, target)
    groups = fuse(inlined, target)
    shared = share_memory(inlined, groups)  # first: it needs old and new contents apart
    return order_groups(shared, join_small_maps(shared, groups, target))
