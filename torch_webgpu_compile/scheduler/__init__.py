"""Loop graphs to kernel groups: legality first, then profit."""

from __future__ import annotations

from ..ir.graph import LoopGraph, Schedule
from ..target import Target
from .fusion import fuse
from .inline import inline_producers
from .layouts import choose_layouts
from .order import order_groups
from .pairs import join_pairs
from .siblings import join_siblings
from .split import split_contractions, split_reductions
from .units import drop_unit_symbols

__all__ = ["schedule"]


def schedule(graph: LoopGraph, target: Target) -> Schedule:
    """Kernel groups in execution order."""
    laid_out = choose_layouts(inline_producers(drop_unit_symbols(graph), target))
    divided = split_reductions(split_contractions(laid_out, target))
    fused = order_groups(divided, fuse(divided, target))
    return join_siblings(join_pairs(fused, target), target)
