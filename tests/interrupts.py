"""Ctrl-C at every place where Python looks for it, one after the other.

CPython runs signal handlers after a call returns, at the start of a function and at the end of a
loop's body. A trace function counts instructions and makes SIGINT pending at one of them, without
running any bytecode of its own in between: Python then raises KeyboardInterrupt where a real Ctrl-C
would have been noticed. So what is tested is each place that a user can hit, and no other.
"""

from __future__ import annotations

import ctypes
import dis
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_make_pending: Any = ctypes.PyDLL(None).PyErr_SetInterrupt if sys.platform != "win32" else None
if _make_pending is not None:  # it is called as a trace function: (frame, event, argument)
    _make_pending.argtypes = [ctypes.py_object] * 3
    _make_pending.restype = None

# Python cannot look for signals in these, nor in what they call: the next instruction is as good.
_QUIET = frozenset(
    dis.opmap[name]
    for name in (
        *("CACHE", "NOP", "COPY", "SWAP", "PUSH_NULL", "LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL"),
        *("LOAD_DEREF", "BUILD_TUPLE", "BUILD_LIST", "EXTENDED_ARG", "PRECALL", "KW_NAMES"),
        *("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "JUMP_FORWARD", "IS_OP"),
        *("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"),
    )
    if name in dis.opmap
)


def is_traced(name: str) -> bool:
    """Whether a file is one whose instructions are counted: this package's and wgpu-py's."""
    return "/torch_webgpu_compile/" in name or "/wgpu/" in name


class _Shot:
    """Makes Ctrl-C pending at instruction ``at``; counts them if it is never reached."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.place = ""
        self.is_early = False  # noticed by `trace` itself

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not is_traced(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if self.is_early:
            self.is_early = False
            return _make_pending
        if event != "opcode" or frame.f_code.co_code[frame.f_lasti] in _QUIET:
            return self.trace
        self.count += 1
        # From the frame's next instruction on, C code is its trace function, until the handler.
        return self.trace if self.count != self.at else _make_pending

    def handle(self, _: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is _Shot.trace.__code__:
            self.is_early = True
            return
        sys.settrace(None)
        if frame is not None:
            code = frame.f_code
            self.place = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
        raise KeyboardInterrupt


@contextmanager
def _tracing(shot: _Shot) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, shot.handle)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 sends instructions if one asked before
    sys.settrace(shot.trace)
    try:
        yield
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)


def count_places(call: Callable[[], Any]) -> int:
    """Instructions of a call at which `interrupt` may interrupt it."""
    shot = _Shot(-1)
    with _tracing(shot):
        call()
    return shot.count


def interrupt(call: Callable[[], Any], at: int) -> str:
    """Where a call was interrupted at its instruction ``at`` (from 1); "" if it was not."""
    shot = _Shot(at)
    try:
        with _tracing(shot):
            call()
    except KeyboardInterrupt:
        return shot.place
    if shot.place:  # somebody swallowed it
        raise AssertionError(f"the interrupt at {shot.place} was swallowed")
    return ""
