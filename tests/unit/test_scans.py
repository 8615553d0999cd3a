"""Loops in kernels: what becomes one, and ``webgpu::scan`` on the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from tests.compilations import compile_function
from tests.harness import check
from torch_webgpu_compile.ir.nodes import Scan
from torch_webgpu_compile.target import Target
from torch_webgpu_compile.torch_ops.elementwise import Reference, Step
from torch_webgpu_compile.torch_ops.scans import ScanFunction, parsed

STEPS = 70


def call(op: str, *arguments: Any, dtype: str = "float32", **keywords: Any) -> Step:
    return Step(op, arguments, dtype, tuple(keywords.items()))


def carry(number: int) -> Reference:
    return Reference("carry", number)


def operand(number: int) -> Reference:
    return Reference("operand", number)


def step(number: int) -> Reference:
    return Reference("step", number)


LINEAR = ScanFunction(
    (call("mul.Tensor", operand(1), carry(0)), call("add.Tensor", step(0), operand(0))),
    (step(1),),
    (step(1), carry(0)),
)
SWAP = ScanFunction(
    (call("add.Tensor", carry(0), operand(0), alpha=2),), (carry(1), carry(0)), (step(0),)
)
PARITY = ScanFunction(
    (
        call("gt.Scalar", operand(0), 0.5, dtype="bool"),
        call("logical_xor.default", carry(0), step(0), dtype="bool"),
        call("add.Tensor", carry(1), 1, dtype="int64"),
    ),
    (step(1), step(2)),
    (step(1), carry(1)),
)
WIDER = ScanFunction(
    (
        call("_to_copy.default", operand(0)),
        call("add.Tensor", carry(0), step(0)),
        call("_to_copy.default", step(1), dtype="float16"),
    ),
    (step(1),),
    (step(2),),
)


@pytest.mark.parametrize(
    ("function", "init", "xs", "constants"),
    [
        (LINEAR, [torch.rand(2, 3)], [torch.rand(9, 2, 3)], [torch.rand(3)]),
        (LINEAR, [torch.rand(2, 3)], [torch.rand(9, 1)], [torch.rand(2, 1)]),
        (LINEAR, [torch.rand(())], [torch.rand(9)], [torch.rand(())]),
        (LINEAR, [torch.rand(0, 3)], [torch.rand(9, 0, 3)], [torch.rand(3)]),
        (SWAP, [torch.rand(3), torch.rand(3)], [torch.rand(5, 3)], []),
        (PARITY, [torch.tensor([True, False]), torch.zeros(2).long()], [torch.rand(6, 2)], []),
        (WIDER, [torch.rand(3)], [torch.rand(6, 3).half()], []),
    ],
)
def test_the_operator(function, init, xs, constants):
    assert parsed(function.text) == function

    def run(*tensors: Tensor) -> Any:
        first, rest = tensors[: len(init)], tensors[len(init) :]
        length = xs[0].shape[0]
        return torch.ops.webgpu.scan(first, rest[: len(xs)], rest[len(xs) :], length, function.text)

    graph = check(run, *init, *xs, *constants)
    scans = [node for node in graph.nodes if isinstance(node, Scan)]
    assert len(scans) == (init[0].numel() > 0)


def test_special_values_go_on():
    xs = torch.rand(6, 3)
    xs[2, 0], xs[1, 1], xs[3, 2] = float("nan"), float("inf"), -float("inf")
    function = LINEAR.text
    check(
        lambda h, x, w: torch.ops.webgpu.scan([h], [x], [w], 6, function),
        torch.zeros(3),
        xs,
        torch.rand(3),
    )


def gated(a: Tensor, b: Tensor, h: Tensor) -> Any:
    def turn(h: Tensor, ab: Any) -> Any:
        h = torch.tanh(ab[0] * h + ab[1])
        return h, h * 2

    return scan(turn, h, (a, b))


def selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    """A selective state-space model's loop: sums over states are no part of it."""

    def turn(h: Tensor, now: Any) -> Any:
        x, dt, b, c = now
        h = torch.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b[None]
        return h, (h * c[None]).sum(-1)

    return scan(turn, x.new_zeros(a.shape), (x, dt, b, c))


def totals(x: Tensor) -> Any:
    """A sum over all steps, a maximum, and a carry that stays."""

    def turn(carried: Any, x: Tensor) -> Any:
        total, highest, same = carried
        return (total + x.exp(), torch.maximum(highest, x), same.clone()), highest.clone()

    init = (torch.zeros_like(x[0]), x[0] - 1, torch.ones_like(x[0]))
    return scan(turn, init, x)


R = torch.rand


@pytest.mark.parametrize(
    ("function", "arguments", "kernels"),
    [
        (gated, [R(STEPS, 2, 3), R(STEPS, 2, 3), R(2, 3)], 1),
        (selective, [R(STEPS, 4), R(STEPS, 4), R(4, 3), R(STEPS, 3), R(STEPS, 3)], 2),
        (totals, [R(STEPS, 3)], 4),
    ],
)
def test_kernels(function, arguments, kernels):
    compiled = compile_function(function, *arguments)
    assert sum(isinstance(node, Scan) for node in compiled.graph.nodes) == 1
    assert compiled.plan.dispatch_count <= kernels


def test_what_is_read_has_bindings_enough():
    """Eleven tensors, and a kernel that binds eight."""

    def many(h: Tensor, *xs: Tensor) -> Any:
        def turn(h: Tensor, now: Any) -> Any:
            for k, x in enumerate(now):
                h = torch.sin(h * x) if k % 2 else torch.cos(h + x)
            return h, h.clone()

        return scan(turn, h, xs)

    target = Target(max_storage_buffers=8)
    compiled = compile_function(many, R(3), *(R(STEPS, 3) for _ in range(10)), target=target)
    assert sum(isinstance(node, Scan) for node in compiled.graph.nodes) == 1
    assert max(len(kernel.bindings) for kernel in compiled.plan.kernels) <= 8
