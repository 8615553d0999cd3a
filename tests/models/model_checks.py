"""Compiles a model for WebGPU and compares it with eager PyTorch.

`MODEL_TEST_BACKEND=aot_eager` runs the tests on another backend of torch.compile: it tells a broken
test from a broken compiler.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import torch_webgpu_compile

BACKEND = os.environ.get("MODEL_TEST_BACKEND", "webgpu")

DTYPES = [
    pytest.param(torch.float32, id="f32"),
    pytest.param(torch.float16, id="f16"),
    pytest.param(torch.bfloat16, id="bf16"),
]


def compiled(model: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """``torch.compile`` for WebGPU in which a graph break is an error."""
    return torch.compile(model, backend=BACKEND, fullgraph=True, **keywords)


@contextmanager
def no_fallbacks() -> Any:
    """Fails when an operator ran on the host, or when nothing ran on the GPU."""
    counters = getattr(torch_webgpu_compile, "counters", None)
    if BACKEND != "webgpu":
        yield
        return
    counters.reset()
    yield
    assert not counters.fallbacks, f"ran on the host: {dict(counters.fallbacks)}"
    assert counters.dispatches > 0, "nothing ran on the GPU"


def plans_compiled() -> int:
    """Plans compiled in this process so far (0 on other backends)."""
    return torch_webgpu_compile.counters.plans_compiled if BACKEND == "webgpu" else 0


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nested value, in order."""
    if hasattr(value, "to_tuple"):  # ModelOutput
        value = value.to_tuple()
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of a nested value, converted."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(dtype)
        return leaf

    return tree_map(convert, value)


def _root_mean_square(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt()) if value.numel() else 0.0


def assert_as_accurate(actual: Tensor, eager: Tensor, reference: Tensor, what: str) -> None:
    """Within PyTorch's tolerances of eager, or as close to an f64 reference as eager is.

    Two correct implementations of a deep model differ by more than the tolerances of one operator,
    because they round at different places. PyTorch's own compiler tests therefore compare both with
    f64 (`torch._dynamo.utils.same`): the error may be at most 3 times eager's (10 times in the
    worst element, where eager's own error may be small by luck).
    """
    assert actual.dtype == eager.dtype, f"{what}: {actual.dtype}, eager {eager.dtype}"
    assert actual.shape == eager.shape, f"{what}: {actual.shape}, eager {eager.shape}"
    assert actual.device == eager.device, f"{what}: {actual.device}, eager {eager.device}"
    try:
        torch.testing.assert_close(actual, eager, equal_nan=True)
        return
    except AssertionError as error:
        if not actual.is_floating_point():
            raise AssertionError(f"{what}: {error}") from None
    reference = reference.double()
    assert torch.isfinite(actual).all() == torch.isfinite(eager).all(), f"{what}: not finite"
    unit = torch.finfo(eager.dtype).eps * max(_root_mean_square(reference), 1e-3)
    ours, theirs = actual.double() - reference, eager.double() - reference
    error, bound = _root_mean_square(ours), 3 * _root_mean_square(theirs) + unit
    assert error <= bound, f"{what}: RMS error against f64 {error:.3e}, allowed {bound:.3e}"
    worst, allowed = float(ours.abs().max()), 10 * float(theirs.abs().max()) + 4 * unit
    assert worst <= allowed, f"{what}: largest error against f64 {worst:.3e}, allowed {allowed:.3e}"


def reference_run(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The outputs of the same model in f64."""
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).double()
    with torch.no_grad():
        return tensors_of(model(*to_dtype(args, torch.float64), **to_dtype(kwargs, torch.float64)))


def check_forward(
    model: nn.Module,
    *args: Any,
    context: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    dynamic: bool | None = None,
    calls: int = 2,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Compares a forward with eager: no graph break, no fallback; returns the compiled model.

    Later calls must repeat the first one exactly. A software adapter computes about 1 GFLOP/s:
    large models make one call.
    """
    with torch.no_grad():
        eager = tensors_of(model(*args, **kwargs))
    function = compiled(model, dynamic=dynamic)
    with context(), no_fallbacks():
        first = tensors_of(function(*args, **kwargs))
        later = [tensors_of(function(*args, **kwargs)) for _ in range(calls - 1)]
    assert len(first) == len(eager)
    reference = reference_run(model, args, kwargs)
    for index, (actual, expected, exact) in enumerate(zip(first, eager, reference, strict=True)):
        assert_as_accurate(actual, expected, exact, f"output {index}")
    for again in later:
        for index, (actual, repeated) in enumerate(zip(first, again, strict=True)):
            assert torch.equal(actual, repeated), f"output {index} changed in a later call"
    return function


def gradients(
    model: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]
) -> dict[str, Tensor]:
    """The loss (mean of squares) and the gradient of each parameter and floating-point input."""
    model.zero_grad(set_to_none=True)
    inputs = tuple(
        x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in args
    )
    loss = tensors_of(function(*inputs))[0].square().mean()
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    for index, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.grad is not None:
            found[f"input {index}"] = x.grad.clone()
    return found


def check_training_step(model: nn.Module, *args: Any) -> None:
    """Compares loss, gradients and buffers after one forward and backward with eager's."""
    ours, theirs, exact = (copy.deepcopy(model) for _ in range(3))
    exact.double()
    eager = gradients(theirs, theirs, args)
    reference = gradients(exact, exact, to_dtype(args, torch.float64))
    with no_fallbacks():
        actual = gradients(ours, compiled(ours), args)
    assert actual.keys() == eager.keys()
    for name in eager:
        assert_as_accurate(actual[name], eager[name], reference[name], f"gradient of {name}")
    buffers = dict(theirs.named_buffers())
    doubles = dict(exact.named_buffers())
    for name, buffer in ours.named_buffers():
        assert_as_accurate(buffer, buffers[name], doubles[name], f"buffer {name}")
