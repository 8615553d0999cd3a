"""An operator that has no kernel runs on the CPU, with a warning, or is an error."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType

from .errors import UnsupportedOp

_PACKAGE = __name__.partition(".")[0]
_REASON = "has no WebGPU kernel"
_GRAPH, _BACKWARD = "torch.autograd.graph", "_engine_run_backward"  # in which threads wait for it
_PLACE = re.compile(r"(.+?):(\d+)(?:: |$)")

_warned: set[str] = set()
_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """An operator runs on the CPU because it has no WebGPU kernel. Given once per operator."""


OnFallback = Callable[[str, str, str, str], None]
"""Called with (op, dtype, source, cause) for each operator that goes to the host; it may raise."""


def on_fallback(policy: str) -> OnFallback:
    """The callback (op, dtype, source, cause) of lowering for an operator without a kernel.

    Args:
        policy: ``warn``, ``error`` or ``silent``.

    Raises (when called):
        UnsupportedOp: the policy is ``error``.
    """

    def report(op: str, dtype: str, source: str, cause: str) -> None:
        # An eager operator's cause is often that of the graph that was made of it.
        reason = cause if cause.startswith(_REASON) else f"{_REASON} for {dtype} ({cause})"
        if policy == "error":
            next_step = (
                "let it run on the CPU with TORCH_WEBGPU_FALLBACK=warn or "
                'options={"fallback": "warn"}, or rewrite that line'
            )
            raise UnsupportedOp(op, reason, next_step, source)
        if policy == "warn" and _is_first(op):
            file, line = _place(source)
            source = source or f"{file}:{line}"
            message = f"{op} {reason}: it runs on the CPU at every call, at {source}"
            warnings.warn_explicit(message, FallbackWarning, file, line)

    return report


def warn_once(what: str, message: str) -> None:
    """Warns of something that runs otherwise than asked for, once, at the user's line.

    Args:
        what: what it is, as it is told apart from others.
        message: what happens to it, and why.
    """
    if _is_first(what):
        file, line = _place("")
        warnings.warn_explicit(f"{what} {message}", FallbackWarning, file, line)


def _place(source: str) -> tuple[str, int]:
    """File and line of a ``file:line: code``; without one, of the user's code that is running."""
    found = _PLACE.match(source)
    if found is not None:
        return found[1], int(found[2])
    frame = _of_user(sys._getframe()) or _that_waits() or sys._getframe()
    return frame.f_code.co_filename, frame.f_lineno


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a stack that is a user's."""
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _that_waits() -> FrameType | None:
    """The user's frame that runs a backward pass, for one of autograd's threads."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_name == _BACKWARD and frame.f_globals.get("__name__") == _GRAPH:
                return _of_user(frame)
            frame = frame.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return module is None or module.partition(".")[0] in ("torch", _PACKAGE)  # None: generated


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
