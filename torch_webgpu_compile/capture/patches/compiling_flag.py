"""``torch.compiler.is_compiling()`` holds while this package traces.

Patched: ``torch.compiler._is_compiling_flag``, which is True meanwhile.

Why: FX keeps one flag per process for "a trace is under way", and AOTAutograd traces with FX. In
any other thread a call of a compiled function, even one that has nothing to compile, fails
meanwhile ("using FX to symbolically trace a dynamo-optimized function"), unless the trace is known
to be a compiler's. And optimizers ask it whether their steps may stay tensors.

Until: torch 2.13 is the oldest version that is supported, for what Dynamo compiles: from then on it
says so itself. For recorded calls, until ``torch.compiler`` has a public context for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ...patches import replaced


def install() -> AbstractContextManager[None]:
    """Sets the flag as long as the context."""
    return replaced(__name__, lambda: torch.compiler, "_is_compiling_flag", lambda _: True)
