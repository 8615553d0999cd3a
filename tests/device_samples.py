"""PyTorch's operator samples (OpInfo) on the device, against the CPU.

A `Check` is one sample of one kind (the keys of `RUN`); running it raises AssertionError for a
wrong answer. Samples that PyTorch itself refuses must be refused on the device with the same type
of error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.device_exceptions import (
    ERRORS_NOT_RAISED,
    EXCEPTIONS,
    NOT_COMPILED,
    OUT_OF_CPU,
    name_of,
)
from tests.device_kinds import RUN
from tests.opinfo import op_db

OPERATORS = {name_of(info): info for info in op_db if name_of(info) not in EXCEPTIONS}


@dataclass(frozen=True)
class Check:
    """One sample in one way; ``run`` raises when the device is wrong."""

    label: str
    run: Callable[[], None]


def checks(info: Any, kind: str, dtype: torch.dtype, limit: int | None) -> Iterator[Check]:
    """The checks of an operator's first samples."""
    if not _applies(info, kind, dtype):
        return
    torch.manual_seed(0)  # samples are the same in every run
    if kind == "errors":
        made: Any = info.error_inputs("cpu") if info.error_inputs_func else ()
    else:
        made = info.sample_inputs("cpu", dtype, requires_grad=kind == "backward")
    run = RUN[kind]
    for number, sample in enumerate(itertools.islice(made, limit)):
        if kind == "errors" or not _is_elsewhere(sample):
            yield Check(f"sample {number}", lambda sample=sample: run(info, sample))


def _is_elsewhere(sample: Any) -> bool:
    """Whether a sample asks for results on CUDA, as some do where it is there."""
    leaves = tree_leaves((sample.args, sample.kwargs))
    return any(isinstance(x, (str, torch.device)) and str(x).startswith("cuda") for x in leaves)


def _applies(info: Any, kind: str, dtype: torch.dtype) -> bool:
    if dtype not in info.supported_dtypes("cpu"):
        return False
    match kind:
        case "backward":
            return bool(info.supports_autograd) and dtype in info.supported_backward_dtypes("cpu")
        case "inplace":
            return info.get_inplace() is not None
        case "out" | "odd out":
            return bool(info.supports_out) and info.name not in OUT_OF_CPU
        case "compiled":
            return name_of(info) not in NOT_COMPILED
        case "errors":
            return dtype is torch.float32 and info.name not in ERRORS_NOT_RAISED
    return True
