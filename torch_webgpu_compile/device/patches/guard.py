"""PyTorch's device guard for the device, and the exceptions that it has to set aside.

Patched: ``torch.autograd.graph._engine_run_backward``, by which all backward passes run.

Why: C++ asks a Python guard for its device type in functions that must not throw, also while it
unwinds with a Python exception that is still pending: one raised by a hook of a backward pass, or
while a checkpoint is computed again. Python lets no function return then, and the process would
abort. So the guard takes the pending exception away, and the call of the backward pass raises it.

Until: PyTorch asks a guard for its device type once, when it is registered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..registration import skip_frame, untraced

_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_pending: list[BaseException] = []

# Calling it raises SystemError if an exception is pending. (Calls of built-in functions may be
# specialised by the interpreter, which does without this check then.)
_check: Any = functools.partial(int)


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The guard that PyTorch's C++ calls for the device.

    C++ knows a single device: which of several GPUs is current is kept in Python.
    """

    @untraced
    def type_(self) -> Any:
        """The device type that PyTorch's C++ registers the guard for.

        C++ also asks while an exception is pending; that one is set aside, for `install` to raise.
        """
        try:
            _check()
        except SystemError as error:
            if error.__cause__ is None:
                raise
            _pending.append(error.__cause__)
        return _DEVICE_TYPE


def install() -> None:
    """Has ``backward()`` raise the exceptions that `DeviceGuard.type_` set aside."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*arguments: Any, **keywords: Any) -> Any:
        try:
            return original(*arguments, **keywords)
        except SystemError:
            if not _pending:
                raise
            cause = _pending.pop()
            _pending.clear()
        raise cause

    # Dynamo looks at it where compiled functions ask for gradients; hooks are traced as ever.
    skip_frame(run_backward)
    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
