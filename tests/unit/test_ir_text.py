"""The text of the IR: stable, readable, and another one for another graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import capture, lower_checked
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.ir.graph import AnchorGroup, Member, RowGroup, Schedule
from torch_webgpu_compile.ir.nodes import Pointwise, Reduction
from torch_webgpu_compile.ir.scalar import (
    Index,
    Load,
    Masked,
    Op,
    Scalar,
    apply,
    cast,
    const,
    index,
)
from torch_webgpu_compile.ir.spaces import iteration_symbols
from torch_webgpu_compile.ir.text import format_graph, format_scalar, format_schedule
from torch_webgpu_compile.symbolic.sizes import Expr, as_expr, symbol

F = torch.nn.functional
F32 = dtypes.float32
I0, I1 = iteration_symbols("i", (24, 10))
S0 = symbol("s0", 2)
SYMBOLS = {"i0": I0, "i1": I1, "s0": S0}


@pytest.mark.parametrize(
    "expr",
    [
        I0 * 0,
        I0 * 0 - 3,
        I0,
        -I0,
        3 * I0 - 2 * I1 + 7,
        I0 // 5,
        (I0 + 3) // 5 * 2 + I1 % 3,
        (I0 * 10 + I1) % 7,
        (I0 * 10 + I1 - 3) // 7 % 4,
        S0 * S0 * I0 + S0 * 2,
        (I0 * S0 + I1) // (S0 * 2 + 1),
        (I0 // 5 - 1) % (S0 + 1),
    ],
)
def test_the_text_of_an_expression_is_python_for_it(expr: Expr) -> None:
    assert as_expr(eval(repr(expr), {}, SYMBOLS)) is expr


def x(*at: Expr) -> Scalar:
    return Load("x", tuple(map(Index, at)), dtypes.float32)


SCALARS: list[Scalar] = [
    const(1, dtypes.int8),
    const(-0.0, dtypes.float32),
    const(float("nan"), dtypes.float32),
    const(float("-inf"), dtypes.float16),
    const(True, dtypes.bool_),
    const(1e-30, dtypes.float32),
    const(-(2**63), dtypes.int64),
    index(I0 * 2 - I1 // 3),
    x(),
    x(I0, I1 * 0),
    apply("add", x(I0), x(I0)),
    apply("where", apply("isnan", x(I0)), const(0, dtypes.float32), x(I1)),
    cast(x(I0), dtypes.bfloat16),
    apply("bitcast", x(I0), dtype=dtypes.int32),
    Masked(apply("lt", index(I0), index(S0)), x(I0), const(0, dtypes.float32)),
    Load("x", (Load("idx", (Index(I0),), dtypes.int64), Index(I1)), dtypes.float32),
    Load(
        "x",
        (apply("add", Load("idx", (Index(I0),), dtypes.int64), index(I1)),),
        dtypes.float32,
    ),
    Op("cast", (Load("t", (Index(I0),), dtypes.bfloat16),), dtypes.float32),
]


def test_other_scalars_have_other_texts() -> None:
    assert len({format_scalar(scalar) for scalar in SCALARS}) == len(SCALARS)


def test_shared_subexpressions_are_written_once() -> None:
    scalar = x(I0)
    for _ in range(40):  # as a tree, 2^40 loads
        scalar = apply("mul", scalar, scalar)
    text = format_scalar(scalar)
    assert len(text) < 2000
    assert text.startswith("let(mul(t39, t39), t0=x[i0], t1=mul(t0, t0), ")


def model(image: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> Any:
    torch._assert_async((rows < 4).all(), "too large")
    y = F.gelu(F.conv2d(image, weight, padding=1))
    y = torch.cat([y, y.flip(1)], 1)[:, rows]
    inverse = torch.linalg.inv_ex(y[0, 0])[0]
    values = torch.linalg.eigvalsh(y[0, 0])
    put = y.index_put((rows,), torch.tensor(1.0), accumulate=True)
    solved = torch.linalg.solve_triangular(image, image[:1], upper=True)
    return (
        y.softmax(-1).mean((1, 2)).bfloat16(),
        inverse,
        values,
        put,
        solved,
        3,
        None,
        float("-inf"),
        y.shape[0],
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_same_in_every_run(dynamic: bool) -> None:
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5)

    def text() -> str:
        captured = capture(model, image, weight, torch.tensor([1, -1]), dynamic=dynamic)
        graph = lower_checked(captured, allow_host=True)
        return format_graph(replace(graph, name="graph"))  # names are numbered

    assert text() == text()
    assert "-> " not in text()


def test_text_is_readable() -> None:
    graph = lower_checked(capture(lambda x: (x * 2).sum(-1), torch.randn(3, 4)))
    lines = format_graph(graph).splitlines()[1:]
    assert lines == [
        "in0: f32[3, 4] = input()",
        "mul: f32[3, 4] = buffer()",
        "sum_1: f32[3] = buffer()",
        "argument(in0)",
        'mul = pointwise([3, 4], mul(in0[i0, i1], f32(2.0)))  # aten.mul.Tensor ""',
        "sum_1 = reduction('sum', [3], [4], mul[i0, r0])  # aten.sum.dim_IntList \"\"",
        "result(sum_1, sizes=[3], strides=[1], offset=0)",
    ]


def test_schedules_are_readable() -> None:
    graph = lower_checked(capture(lambda x: (x @ x.t()).exp().sum(-1), torch.randn(3, 4)))
    product, exp, total = graph.nodes
    assert isinstance(exp, Pointwise)
    assert isinstance(total, Reduction)
    m, n = (iteration_symbols(prefix, (3,))[0] for prefix in "mn")
    row = iteration_symbols("i", (3,))
    epilogue = Member("exp", apply("exp", Load("mm", (Index(m), Index(n)), F32)), (m, n), True)
    reduced = Member("sum_1", total.body, row, True, "sum", total.origins)
    groups = (
        AnchorGroup(product, (epilogue,), store_anchor=False),
        RowGroup(total.ranges, total.reduce_ranges, (reduced,)),
    )
    text = format_schedule(Schedule(graph, groups))
    assert "group 0: anchor kept in registers: mm = contraction([], [3], [3], [4]" in text
    assert "  exp(mm[m0, n0]) => exp[m0, n0]\n" in text
    assert "group 1: rows [3] of elements [3]\n  sum of exp[i0, r0] => sum_1[i0]  # aten" in text


def test_ranges_of_symbols_in_offsets_alone_are_shown() -> None:
    graph = lower_checked(capture(lambda x: x + 1, torch.ones(2, 3)))
    name = graph.inputs[0].buffer or ""

    def text(*bounds: int) -> str:
        buffer = replace(graph.buffers[name], offset=symbol("o", *bounds))
        return format_graph(replace(graph, buffers={**graph.buffers, name: buffer}))

    assert len({text(0), text(2), text(0, 100)}) == 3
