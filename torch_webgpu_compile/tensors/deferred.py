"""Work on tensors that is deferred until their memory is accessed.

`device.eager.lists` gathers calls in this way. Whoever finds the memory of a tensor, or tells how
much there is or whether it is ready, settles that first.
"""

from __future__ import annotations

from collections.abc import Callable

_work: Callable[[], None] | None = None


def defer(work: Callable[[], None] | None) -> None:
    """Has `settle` call ``work``, which calls this with None when it is done; in any thread."""
    global _work
    _work = work


def settle() -> None:
    """Does the deferred work.

    Raises:
        DeviceError: the GPU refused it.
    """
    if _work is not None:
        _work()
