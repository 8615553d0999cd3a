from __future__ import annotations

import json
import math

import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import (
    Binding,
    CopyBuffer,
    Dispatch,
    HostBuffer,
    HostConstant,
    HostStep,
    Kernel,
    KernelBinding,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
)
from torch_webgpu_compile.sizes import as_expr, ceildiv, symbol

S, T = symbol("s0", 2), symbol("s1", 0)


def buffer(name, role, sizes, dtype=dtypes.float32, slot=None):
    sizes = tuple(as_expr(size) for size in sizes)
    nbytes = as_expr(dtype.itemsize)
    for size in sizes:
        nbytes = nbytes * size
    return PlanBuffer(
        name, role, dtype, sizes, (as_expr(1),) * len(sizes), as_expr(0), nbytes, slot
    )


def make_plan():
    kernel = Kernel(
        "add_0", "pointwise", "@compute fn main() {} // ×",
        (KernelBinding(False), KernelBinding(True)),
        (64, 1, 1), 2, 128, ("aten.add.Tensor",), ("model.py:3: x + 1",),
    )  # fmt: skip
    one = as_expr(1)
    steps = (
        Dispatch(
            0,
            (Binding("x"), Binding("y", 256, S * T * 4)),
            (ceildiv(S * T + 3, as_expr(64)), one, one),
            (S * S - 2 * T + 1, (S * 7) % 5),
            S * 4,
            T * 4,
            S + T,
        ),
        CopyBuffer("y", "z"),
        HostStep(
            "aten.sort.stable",
            ("z", "w"),
            (HostBuffer("x"), (S, None, True, 3, 1.0, -0.0, math.inf), "text"),
            (("dtype", HostConstant("dtype", "float32")), ("nan", math.nan)),
            "model.py:4",
        ),
    )
    return Plan(
        name="graph0_inference",
        kernels=(kernel,),
        buffers={
            b.name: b
            for b in (
                buffer("x", "input", (S, T)),
                buffer("y", "intermediate", (S, T), dtypes.bfloat16, slot=0),
                buffer("z", "output", (S,), dtypes.int64),
                buffer("w", "output", ()),
                buffer("c", "constant", (3,), dtypes.uint8),
            )
        },
        steps=steps,
        inputs=(PlanInput(size=S), PlanInput("x"), PlanInput()),
        outputs=(
            PlanOutput("z", (S,), (as_expr(1),), as_expr(0)),
            PlanOutput(size=S * 2 + T // 3),
            PlanOutput(constant=2.5),
            PlanOutput("w", (), (), as_expr(0), mutates=1),
        ),
        constants={"c": bytes([1, 2, 255])},
    )


def test_round_trip():
    plan = make_plan()
    text = json.dumps(serialize.to_json(plan))
    again = serialize.from_json(json.loads(text))
    # NaN is not equal to itself: compare it by hand, and the rest as it is.
    assert math.isnan(dict(again.steps[2].keywords)["nan"])
    assert repr(again) == repr(plan)
    assert again.buffers == plan.buffers
    assert again.steps[0] == plan.steps[0]
    assert again.steps[2].arguments == plan.steps[2].arguments
    assert math.copysign(1, again.steps[2].arguments[1][5]) == -1
    assert isinstance(again.steps[2].arguments[1][4], float)
    assert again.outputs == plan.outputs
    assert json.dumps(serialize.to_json(again)) == text


def test_symbols_keep_their_bounds():
    again = serialize.from_json(serialize.to_json(make_plan()))
    assert again.inputs[0].size is S


def test_it_is_strict_json():
    json.dumps(serialize.to_json(make_plan()), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a plan"),
        ({"version": 999}, "version 999"),
        ({"steps": [{"step": "launch"}]}, "damaged"),
        ({"symbols": {}}, "damaged"),
        ({"constants": {"c": "***"}}, "damaged"),
    ],
)
def test_bad_data_is_refused(change, message):
    data = serialize.to_json(make_plan()) | change
    with pytest.raises(serialize.PlanFormatError, match=message):
        serialize.from_json(data)


def test_not_a_dictionary():
    with pytest.raises(serialize.PlanFormatError):
        serialize.from_json([])
