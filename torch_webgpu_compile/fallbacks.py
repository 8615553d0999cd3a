"""An operator that has no kernel runs on the CPU, with a warning, or is an error."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from .errors import UnsupportedOp

_warned: set[str] = set()
_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """An operator runs on the CPU because it has no WebGPU kernel. Given once per operator."""


OnFallback = Callable[[str, str, str, str], None]


def on_fallback(policy: str) -> OnFallback:
    """What lowering calls with (op, dtype, source, cause) for each operator without a kernel.

    Args:
        policy: ``warn``, ``error`` or ``silent``.

    Raises (when called):
        UnsupportedOp: the policy is ``error``.
    """

    def report(op: str, dtype: str, source: str, cause: str) -> None:
        reason = f"has no WebGPU kernel for {dtype} ({cause})"
        if policy == "error":
            next_step = (
                "let it run on the CPU with TORCH_WEBGPU_FALLBACK=warn or "
                'options={"fallback": "warn"}, or rewrite that line'
            )
            raise UnsupportedOp(op, reason, next_step, source)
        if policy == "warn" and _is_first(op):
            at = f", at {source}" if source else ""
            message = f"{op} {reason}: it runs on the CPU at every call{at}"
            warnings.warn(message, FallbackWarning, stacklevel=2)

    return report


def _is_first(op: str) -> bool:
    with _lock:
        if op in _warned:
            return False
        _warned.add(op)
        return True


def reset_warnings() -> None:
    """Lets every operator warn once again."""
    with _lock:
        _warned.clear()
