"""``_foreach`` operators with a number per tensor.

Optimizers give such lists although all numbers are equal, as long as all parameters have made the
same steps. The overload with one number then does the same with one kernel per shape of a tensor,
where the list would be as many kernels as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .dispatch import run


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by operator name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        if not short.startswith("_foreach_") or not short.endswith(".ScalarList"):
            continue
        packet = getattr(torch.ops.aten, short.split(".")[0])
        if "Scalar" in packet.overloads():
            found[short] = partial(_number_per_tensor, packet.ScalarList, packet.Scalar)
    return found


def _number_per_tensor(
    op: torch._ops.OpOverload, with_one: torch._ops.OpOverload, *arguments: Any
) -> Any:
    *tensors, numbers = arguments
    if not numbers or len(numbers) != len(tensors[0]):
        return run(op, *arguments)
    first = numbers[0]
    same = all(type(number) is type(first) and number == first for number in numbers)
    return run(with_one, *tensors, first) if same else run(op, *arguments)
