"""Work distribution of the gradients of attention, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..symbolic.sizes import Expr
from ..target import Target


@dataclass(frozen=True, slots=True)
class AttentionGradientTiling:
    """How a workgroup covers the rows that it owns, and those that it walks over.

    It owns keys and walks over queries for the gradients of keys and values, and the other way
    round for the gradient of queries. Every pair of rows has a score. An invocation computes scores
    of 4 of the rows that the workgroup owns, and later sums for 4 of them.

    Attributes:
        owned: rows whose gradients a workgroup computes (a power of two, at least 4).
        walked: rows per step (a power of two, at least 4).
        thread_walked: an invocation computes the scores of 4 rows with this many.
        workgroup: invocations; not all of them have scores to compute.
    """

    owned: int
    walked: int
    thread_walked: int
    workgroup: int

    @property
    def scoring(self) -> int:
        """Invocations that compute scores."""
        return self.owned * self.walked // (4 * self.thread_walked)

    @property
    def columns(self) -> int:
        """Invocations that share the sums of the same 4 rows, each for other elements of heads."""
        return self.workgroup * 4 // self.owned

    def walked_size(self, width: int) -> int:
        """vec4s of a tile of walked rows ``width`` vec4s wide: scores take its place later."""
        return self.walked * max(width, self.owned // 4)

    def workgroup_nbytes(self, width: int, value_width: int) -> int:
        """Workgroup memory in bytes, of heads that are so many vec4s wide."""
        walked = self.walked_size(width) + self.walked_size(value_width)
        return 16 * (self.owned * (width + value_width) + walked)


# From the most arithmetic per load to the least memory. The first of them for heads of 64 takes 48
# KiB, the third for heads of 128; the last one fits the 16 KiB of every adapter with heads of 256.
_TILINGS = (
    AttentionGradientTiling(64, 32, 4, 128),
    AttentionGradientTiling(32, 32, 4, 64),
    AttentionGradientTiling(32, 16, 2, 64),
    AttentionGradientTiling(16, 16, 2, 32),
    AttentionGradientTiling(16, 8, 1, 64),
    AttentionGradientTiling(8, 8, 1, 32),
    AttentionGradientTiling(4, 4, 1, 32),
)
# Below this many rows per workgroup, smaller tiles load more than parallelism gains.
_FEWEST_OWNED = 32


def choose_attention_gradient_tiling(
    rows: Expr, batch: Expr, width: int, value_width: int, target: Target
) -> AttentionGradientTiling | None:
    """The first tiling that fits, wastes few rows and makes enough workgroups; None if none fits.

    Args:
        rows: that a head owns.
        batch: heads that own rows, of the whole batch.
        width, value_width: vec4s of a row of the query or key, and of the value.
    """
    fitting = [
        tiling
        for tiling in _TILINGS
        if tiling.workgroup_nbytes(width, value_width) <= target.max_workgroup_nbytes
        and tiling.workgroup <= target.max_workgroup_invocations
    ]
    # A second workgroup's arithmetic hides the waiting of a multiprocessor's first one.
    wanted = 2 * target.machine.multiprocessors
    count = int(rows) if rows.is_constant else max(t.owned for t in _TILINGS)
    heads = int(batch) if batch.is_constant else wanted
    for tiling, smaller in pairwise(fitting):
        wasteful = tiling.owned >= 2 * count
        few = heads * -(-count // tiling.owned) < wanted
        if not wasteful and not (few and tiling.owned > smaller.owned >= _FEWEST_OWNED):
            return tiling
    return fitting[-1] if fitting else None
