"""16-bit floats that a kernel of rows stores and computes on with: as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import dtypes
from ...ir.buffers import Buffer
from ...ir.graph import Member
from ...ir.scalar import loads_of
from ..values import Text
from ..wgsl.casts import Let, rounded

_HALVES = (dtypes.float16, dtypes.bfloat16)


class Rounding:
    """Rounds members that are stored in 16 bits where other members of the kernel read them.

    Values are computed in 32 bits. What other kernels read is rounded, and so has to be what
    statistics of rows are computed of: the mean of numbers that are not rounded is not the mean of
    those that are. Kernels without statistics go on with 32 bits, as fused optimizers do.
    """

    def __init__(self, members: Sequence[Member], buffers: Mapping[str, Buffer]) -> None:
        stored = {m.output for m in members if m.store and buffers[m.output].dtype in _HALVES}
        self._outputs = frozenset(
            load.buffer
            for m in members
            for load in loads_of(m.body)
            if load.buffer in stored and load.buffer != m.output
        )

    def __call__(self, output: str, value: Text, let: Let) -> Text:
        """The value of a member as other members read it, rounded if it is stored in 16 bits."""
        return rounded(value, let) if output in self._outputs else value
