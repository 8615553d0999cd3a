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

import torch._tensor_str
from torch import Tensor

from ..tensors.copying import is_here


def install() -> None:
    """Puts a copy to the CPU before PyTorch's formatting of a tensor's elements.

    PyTorch formats under a guard that it keeps in a local variable, so an error's traceback would
    keep it, and the thread without functorch (then `torch.compile` traces wrongly). A copy may
    raise: of a wrong index that the GPU has found, of a lost device.
    """
    module: Any = torch._tensor_str
    original, of_contents = module._str, module._tensor_str

    def tensor_str(self: Tensor, indent: int) -> Any:
        return of_contents(self.cpu() if is_here(self) else self, indent)

    def whole_str(self: Tensor, **arguments: Any) -> Any:
        try:
            return original(self, **arguments)
        except BaseException as error:
            place = error.__traceback__
            while place is not None:
                if place.tb_frame.f_code is original.__code__:
                    place.tb_frame.clear()
                place = place.tb_next
            raise

    module._tensor_str, module._str = tensor_str, whole_str
