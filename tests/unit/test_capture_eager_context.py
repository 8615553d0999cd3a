"""A capture gives the same graph whatever modes and transforms its caller is under."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.eager_calls import describe
from torch_webgpu_compile.backend import native_operators
from torch_webgpu_compile.capture.eager.capture import capture_call

aten = torch.ops.aten
R = torch.randn
CALLS: list[tuple[Any, Any, Any]] = [
    (aten.add.out, (R(3, 4), R(4)), {"alpha": 2, "out": R(3, 4)}),
    (aten.linspace.default, (0, 1, 5), {}),
    (aten.linear.default, (R(3, 4), R(5, 4), R(5)), {}),
    (aten.native_batch_norm.default, (R(3, 4), R(4), R(4), R(4), R(4), True, 0.1, 1e-5), {}),
    (aten._foreach_addcdiv_.Scalar, ([R(3)], [R(3)], [R(3)], 2.0), {}),
    (aten._scaled_dot_product_fused_attention_overrideable.default, (R(2, 3, 4, 8),) * 3, {}),
]


def graphs() -> list[str]:
    """The operators of each call's graph, without and with symbols."""
    found = []
    for dynamic in (False, True):
        for op, args, kwargs in CALLS:
            described = describe((args, kwargs))
            call = capture_call(op, *described, native_operators(), dynamic=dynamic)
            found.append(" ".join(str(node.target) for node in call.captured.module.graph.nodes))
    return found


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return graphs()


class _Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the caller's mode sees {func}")


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.enable_grad,
        torch._C._AutoDispatchBelowAutograd,
        _Strict,
        FakeTensorMode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference", "grad", "below autograd", "mode", "fake", "device", "autocast"],
)
def test_contexts(context: Callable[[], Any], plain: list[str]) -> None:
    with context():
        assert graphs() == plain


def test_in_the_backward_of_a_function(plain: list[str]) -> None:
    class Clone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert graphs() == plain
            return grad

    Clone.apply(torch.ones(3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: torch.func.functionalize(f),
        lambda f: torch.func.grad(lambda x: (f(x).detach() * x).sum()),
    ],
    ids=["plain", "functionalize", "grad"],
)
def test_in_a_kernel(transform: Any, plain: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("test_capture", "DEF"))
        library.define("clone(Tensor x) -> Tensor")

        def kernel(x: torch.Tensor) -> torch.Tensor:
            assert graphs() == plain
            return x.clone()

        library.impl("clone", kernel, "CPU")
        transform(torch.ops.test_capture.clone)(torch.ones(3))


def test_in_two_threads(plain: list[str]) -> None:
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(graphs())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain, plain]


def test_errors_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe(((R(3), R(4)), {}))
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda self, record: logged.append(record))
    with pytest.raises(RuntimeError):
        capture_call(aten.add.Tensor, *described, native_operators())
    assert not [record for record in logged if record.levelname == "ERROR"]
