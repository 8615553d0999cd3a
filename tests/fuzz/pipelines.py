"""Runs a program through eager PyTorch, the interpreter and the kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from tests import harness
from tests.fuzz.programs import Program
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.callables.signature import Signature
from torch_webgpu_compile.captured import CapturedGraph, Phase
from torch_webgpu_compile.compiler import compile_graph
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.runtime.device import Device, device_for

OPTIONS = CompileOptions(fallback="error")


class PyTorchFault(Exception):
    """PyTorch cannot trace the program, or its answer is not the one float64 gives and ours is."""


@cache
def device() -> Device:
    """The adapter under test."""
    return device_for(OPTIONS)


def run_interpreted(captured: CapturedGraph, arguments: list[torch.Tensor]) -> list[Any]:
    """Lowering and the interpreter."""
    graph = harness.lower_checked(captured)
    return harness.run_graph(graph, arguments)


def run_kernels(captured: CapturedGraph, arguments: list[torch.Tensor]) -> list[Any]:
    """The whole path, on the adapter."""
    state = compile_graph(captured, Phase("inference"), device().target, OPTIONS, use_cache=False)
    signature = Signature(state.plan, static_inputs=captured.static_inputs)
    compiled = HostGraph(signature, device())
    return compiled(list(arguments))


# What only static sizes have a kernel for, in the words of the package.
_STATIC_ONLY = (
    "sorting rows of",
    "the mode of",
    "scatter_reduce over",
    "the maximum over bags of",
    "the head size is symbolic",
    "attention of a symbolic head size",
)


def check_program(program: Program, *, dynamic: bool = False, kernels: bool = True) -> None:
    """Compares the three; raises AssertionError with the program's text, or PyTorchFault.

    With ``dynamic``, sizes are symbolic, unless the program has a call that refuses them.
    """
    try:
        _check(program, dynamic, kernels)
    except (AssertionError, UnsupportedOp) as error:
        if not dynamic or not any(limit in str(error) for limit in _STATIC_ONLY):
            raise
        _check(program, False, kernels)


def _check(program: Program, dynamic: bool, kernels: bool) -> None:
    function, arguments = program.function, program.arguments
    if dynamic:  # tracing would make symbols of the strides of slices, which plans do not take
        arguments = [_plain(a) for a in arguments]
    with torch.no_grad():
        expected = [t.clone() for t in function(*arguments)]
        precise = program.precise()
        disturbed = [program.precise(k) for k in range(1, 5)] if program.rounded else []
    captured = _capture(function, arguments, dynamic)
    wanted = (expected, precise, disturbed)
    compare("interpreter", run_interpreted(captured, arguments), *wanted, program)
    if kernels:
        compare("kernels", run_kernels(captured, arguments), *wanted, program)


def _capture(
    function: Callable[..., Any], arguments: list[torch.Tensor], dynamic: bool
) -> CapturedGraph:
    try:
        return harness.capture(function, *arguments, dynamic=dynamic)
    except Exception as error:
        try:  # without anything of this package
            harness.capture(function, *arguments, dynamic=dynamic, decompose=False)
        except Exception as of_pytorch:
            raise PyTorchFault(f"{type(of_pytorch).__name__}: {of_pytorch}") from error
        raise


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values; a transposed tensor stays transposed."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    unit = tensor.numel() == 0 or 1 in tensor.shape  # strides of such dimensions may be anything
    if tensor.permute(order).is_contiguous() and not unit:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def compare(
    who: str,
    actual: list[torch.Tensor],
    expected: list[torch.Tensor],
    precise: list[torch.Tensor],
    disturbed: list[list[torch.Tensor]],
    program: Program,
) -> None:
    """PyTorch's tolerances, widened by eager's own distance from float64.

    The distance says how much a program amplifies rounding (a difference of nearly equal numbers,
    …); a wrong kernel is off by far more. Roundings may also cancel: how far other roundings to 16
    bits move float64's results counts as well.
    """
    assert len(actual) == len(expected)
    values = zip(program.results, actual, expected, precise, strict=True)
    for k, (name, got, wanted, ideal) in enumerate(values):
        atol = rtol = None
        if wanted.dtype.is_floating_point and wanted.numel():
            rounded = [wanted.double(), *(results[k] for results in disturbed)]
            noise = torch.stack([(result - ideal).abs() for result in rounded])
            largest = float(torch.where(noise.isfinite(), noise, 0).max())
            half = wanted.dtype is not torch.float32
            rtol = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(wanted.dtype, 1.3e-6)
            rtol = 2 * rtol if half else 10 * rtol
            atol = 1e-5 + 8 * largest
        close = partial(torch.testing.assert_close, atol=atol, rtol=rtol, equal_nan=True)
        try:
            close(got, wanted)
        except AssertionError as error:
            text = f"{who} of {name}: {error}\n{program!r}"
            if _is_of_float64(got, wanted, ideal, program, close):
                raise PyTorchFault(text) from None
            raise AssertionError(text) from None


def _is_of_float64(
    got: torch.Tensor,
    wanted: torch.Tensor,
    ideal: torch.Tensor,
    program: Program,
    close: Callable[..., None],
) -> bool:
    """Whether ``got`` is what float64 computes.

    Where eager alone says that an element is NaN, or is not, it is wrong (bfloat16 products of an
    odd inner size are, on CPUs with AMX, and now and then gelu of an infinity). No other error of
    eager's can be told from rounding in programs that round to 16 bits.
    """
    halves = {v.dtype for v in program.inputs} & {torch.float16, torch.bfloat16}
    halves |= {getattr(torch, name) for name in re.findall(r"torch\.(b?float16)", program.source)}
    odd = wanted.isnan() != ideal.isnan()
    try:
        if odd.any():
            close(got[~odd], wanted[~odd])
            close(got[odd].double(), ideal[odd])
        elif not halves:
            torch.testing.assert_close(got, ideal, check_dtype=False, equal_nan=True)
    except AssertionError:
        return False
    return bool(odd.any()) or not halves


def check(function: Callable[..., Any], *arguments: torch.Tensor, dynamic: bool = False) -> None:
    """Eager, interpreter and kernels agree."""
    expected = list(torch.utils._pytree.tree_leaves(function(*arguments)))
    captured = harness.capture(function, *arguments, dynamic=dynamic)
    for run in (run_interpreted, run_kernels):
        torch.testing.assert_close(run(captured, list(arguments)), expected, equal_nan=True)
