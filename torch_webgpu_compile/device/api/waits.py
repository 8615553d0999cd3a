"""``torch.webgpu.set_sync_debug_mode``: a warning or an error where the host waits for the GPU."""

from __future__ import annotations

import warnings

from ...tensors import devices

__all__ = [
    "get_sync_debug_mode",
    "set_sync_debug_mode",
]

_MODES = ("default", "warn", "error")
_MESSAGE = (
    "an operation waits for the GPU, as the host needs a value of it: keep values on the device, "
    "or read several at once"
)
_mode = 0


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Sets whether operations that have the host wait for the GPU pass, warn or raise.

    Those are ``item()``, ``cpu()``, results whose size depends on data, and operators that run on
    the host. `synchronize` and waits for streams and events are meant to wait, and are not.

    Args:
        debug_mode: "default" or 0, nothing; "warn" or 1, a warning; "error" or 2, a RuntimeError.
    """
    global _mode
    if isinstance(debug_mode, str) and debug_mode not in _MODES:
        raise RuntimeError(
            f"invalid value of debug_mode {debug_mode!r}, expected one of {', '.join(_MODES)}"
        )
    mode = _MODES.index(debug_mode) if isinstance(debug_mode, str) else int(debug_mode)
    if mode not in range(len(_MODES)):
        raise RuntimeError(f"invalid value of debug_mode {mode}, expected one of 0, 1 and 2")
    _mode = mode
    devices.set_up("waits", lambda _, device: setattr(device, "on_wait", _tell if mode else None))


def get_sync_debug_mode() -> int:
    """0, 1 or 2: see `set_sync_debug_mode`."""
    return _mode


def _tell() -> None:
    if _mode == 2:
        raise RuntimeError(_MESSAGE)
    if _mode:
        warnings.warn(_MESSAGE, UserWarning, stacklevel=2)
