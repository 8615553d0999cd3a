"""Loop graphs to kernel groups: legality first, then profit."""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import LoopGraph, Schedule
from ..target import Target
from .causal import find_causal
from .connected_maps import join_connected_maps
from .equal_nodes import share_equal_nodes
from .foreach import join_foreach
from .fusion import fuse
from .in_place import share_memory
from .inline import inline_producers
from .joint import join_small_kernels
from .layouts import choose_layouts
from .new_rows import read_new_rows
from .order import order_groups
from .pairs import join_pairs
from .preparation import separate
from .siblings import join_siblings
from .small_maps import join_small_maps
from .split import split_contractions, split_reductions
from .split_attention import split_attention
from .statistics import recompute_statistics
from .units import drop_unit_symbols

__all__ = ["schedule"]


def schedule(graph: LoopGraph, target: Target) -> Schedule:
    """Kernel groups in execution order."""
    distinct = share_equal_nodes(drop_unit_symbols(split_attention(graph, target)))
    moved = read_new_rows(recompute_statistics(find_causal(distinct)), target)
    laid_out = choose_layouts(inline_producers(moved, target), target)
    divided = split_reductions(split_contractions(laid_out, target), target)
    called, preparation = separate(divided, target)
    made = _grouped(called, target)
    return made if preparation is None else replace(made, preparation=_grouped(preparation, target))


def _grouped(graph: LoopGraph, target: Target) -> Schedule:
    groups = fuse(graph, target)
    shared = share_memory(graph, groups)  # first: it needs old and new contents apart
    fused = join_connected_maps(order_groups(shared, groups), target)
    maps = join_small_maps(join_foreach(fused, target), target)
    products = join_siblings(join_pairs(maps, target), target)
    return join_small_kernels(products, target)
