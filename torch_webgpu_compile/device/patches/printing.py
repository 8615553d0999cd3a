"""Prints device tensors from CPU copies, as PyTorch does for devices without float64.

Patched: ``torch._tensor_str._tensor_str``, which gets a copy on the CPU, and ``_str``, which frees
its frame when that raises: of a wrong index that the GPU has found, of a lost device.

Why: PyTorch makes that copy for a list of devices only, among them those without float64, in which
it else formats. It does so under a guard that it keeps in a local variable: an error's traceback
would keep it, and the thread without functorch (then `torch.compile` traces wrongly).

Until: PyTorch copies tensors of all PrivateUse1 devices, and leaves that guard when formatting
raises.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...tensors.copying import is_here
from ..import_hooks import around


@around("torch._tensor_str:_tensor_str")
def tensor_str(original: Any, self: Tensor, indent: int) -> Any:
    return original(self.cpu() if is_here(self) else self, indent)


@around("torch._tensor_str:_str")
def whole_str(original: Any, self: Tensor, **arguments: Any) -> Any:
    try:
        return original(self, **arguments)
    except BaseException as error:
        place = error.__traceback__
        while place is not None:
            if place.tb_frame.f_code is original.__code__:
                place.tb_frame.clear()
            place = place.tb_next
        raise
