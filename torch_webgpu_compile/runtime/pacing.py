"""How long dispatches may take, so that no submission keeps a GPU busy for too long.

Some systems reset a GPU whose work takes longer than two seconds (Windows' TDR, and browsers), and
a display that it also draws stands still meanwhile. The prediction is a rate by the kind of
adapter, well below what such adapters reach: what it costs is a submit now and then. A dispatch
that is predicted to take longer than a submission may is divided within its grid (`slicing`).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SECONDS = 0.5
"""Predicted work after which a submission ends: it holds at most twice that. No dispatch takes
longer either, unless a single one of its workgroups does."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What kernels reach at least: bytes read and written, and operations, per second."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: int, flops: int) -> float:
        """The prediction for a dispatch."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


_PACES = {
    "discrete": Pace(100e9, 1e12),
    "integrated": Pace(10e9, 100e9),
    "cpu": Pace(1e9, 5e9),
}


def pace_of(adapter_type: str) -> Pace:
    """The pace of a kind of adapter (`AdapterInfo.type`); that of an integrated one if unknown."""
    return _PACES.get(adapter_type, _PACES["integrated"])
