from __future__ import annotations

import json
import math

import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.errors import IndexCheck
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import (
    STATUS_BUFFER,
    Binding,
    Branch,
    Check,
    Compute,
    Dispatch,
    Floats,
    HostStep,
    Kernel,
    KernelBinding,
    Loop,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    ReadNumber,
    Run,
    Seeds,
    SizeOf,
)
from torch_webgpu_compile.plan.numbers import HostNumber
from torch_webgpu_compile.symbolic.nested import HostBuffer, HostView
from torch_webgpu_compile.symbolic.sizes import as_expr, ceildiv, symbol

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
    """A plan in which every field of every dataclass is set, and every kind of step occurs."""
    kernel = Kernel(
        "add_0", "pointwise", "@compute fn main() {} // ×",
        (KernelBinding(False), KernelBinding(True)),
        (64, 1, 1), 2, 128, ("aten.add.Tensor",), ("model.py:3: x + 1",),
    )  # fmt: skip
    one = as_expr(1)
    root = HostNumber("sqrt", (HostNumber("float", (S * T,)),))
    steps = (
        Dispatch(
            kernel=0,
            bindings=(Binding("x"), Binding("y", 256, S * T * 4)),
            grid=(ceildiv(S * T + 3, as_expr(64)), one, one),
            parameters=(
                S * S - 2 * T + 1,
                (S * 7) % 5,
                HostNumber("div", (root, -0.0)),
                HostNumber("pow", (math.inf, S)),
            ),
            bytes_read=S * 4,
            bytes_written=T * 4,
            flops=S + T,
            checks=(IndexCheck("aten.gather.default", "m.py:1", 1), IndexCheck("x", "", None)),
            iterations=S // 2,
            narrow=(S * 3, one),
            traffic=((S * 4, as_expr(0)), (as_expr(0), T * 4)),
        ),
        HostStep(
            "aten.sort.stable",
            ("z", "w"),
            (HostBuffer("x"), (S, None, True, 3, 1.0, -0.0, math.inf, ((),)), "text"),
            (("view", HostView(0, (S,), (one,), one)), ("nan", math.nan)),
            "model.py:4",
            (HostBuffer("x", (one,)),),
            on_device=True,
            numbers=("w",),
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
                buffer("p", "prepared", (3,), dtypes.float16),
                STATUS_BUFFER,
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
        preparation=Plan("inner", (), {}, (_copy("x", "p"),), (), ()),
        plans=(make_composed(),),
    )


def _copy(source, destination):
    return HostStep("aten.clone.default", (destination,), (HostBuffer(source),), ())


def make_composed():
    """A plan of other plans, with every kind of step."""
    x = buffer("x", "input", (S,))
    square = Plan(
        "square", (), {"x": x, "y": buffer("y", "output", (S,))}, (_copy("x", "y"),),
        (PlanInput("x"),), (PlanOutput("y", (S,), (as_expr(1),)),),
    )  # fmt: skip
    pair = Plan(
        "pair", (), {**square.buffers, "z": buffer("z", "input", (S,))}, square.steps,
        (PlanInput("x"), PlanInput("z")), square.outputs,
    )  # fmt: skip
    n, half = symbol("n", 0), HostNumber("trunc", (HostNumber("div", (symbol("n"), 2.5)),))
    steps = (
        Run(0, ("x",), ("a",)),
        ReadNumber("a", "n"),
        Check("n", "n is 0"),
        Compute("half", half),
        Branch("n", (0, 0), ("a",), ("b",)),
        Loop(1, None, "half", ("b",), ("a",), ("c",), (0,)),
        Loop(0, 0, None, ("c",), (), ("d",)),
        HostStep("aten.nonzero.default", ("e",), (HostBuffer("d"), n, half), (), "", (), True),
        SizeOf("e", "size", 0, "count"),
        Floats("f", ("half", "count")),
        Seeds("g", 2),
    )
    return Plan(
        "composed", (), {"x": x}, steps, (PlanInput("x"),),
        (PlanOutput("e"), PlanOutput("half"), PlanOutput("f"), PlanOutput("g", mutates=0)),
        plans=(square, pair),
    )  # fmt: skip


def test_round_trip():
    plan = make_plan()
    text = json.dumps(serialize.to_json(plan))
    again = serialize.from_json(json.loads(text))
    # NaN is not equal to itself: compare it by hand, and the rest as it is.
    assert math.isnan(dict(again.steps[1].keywords)["nan"])
    assert repr(again) == repr(plan)
    assert again.buffers == plan.buffers
    assert again.steps[0] == plan.steps[0]
    assert again.steps[1].arguments == plan.steps[1].arguments
    assert math.copysign(1, again.steps[1].arguments[1][5]) == -1
    assert isinstance(again.steps[1].arguments[1][4], float)
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
        ({"version": True}, "version True"),
        ({"name": None}, r"damaged \(Plan.name: str expected, not None"),
        ({"steps": [{"Launch": {}}]}, "Plan.steps: Dispatch or HostStep or .* expected"),
        ({"steps": [{"Seeds": {"name": "x"}}]}, "Seeds.count is missing"),
        ({"steps": [{"Seeds": {"name": "x", "count": "1"}}]}, "Seeds.count:"),
        ({"more": 1}, r"Plan has no \['more'\]"),
        ({"inputs": [{"buffer": None, "size": "s0"}]}, "Plan.inputs: PlanInput.size: .* no size"),
        ({"constants": {"c": "***"}}, "Plan.constants"),
    ],
)
def test_bad_data_is_refused(change, message):
    data = serialize.to_json(make_plan()) | change
    with pytest.raises(serialize.PlanFormatError, match=message):
        serialize.from_json(data)


def holders(data):
    """Every list and dictionary in it."""
    if isinstance(data, dict | list):
        yield data
        for value in data.values() if isinstance(data, dict) else data:
            yield from holders(value)


WRONG = (None, True, 7, 1 << 63, -1.5, "x", [], [1, 2, 3], {}, {"x": 1}, {"Plan": {}})


@pytest.mark.rotates(4)
def test_each_value_of_a_wrong_type_is_refused():
    """Every value of a plan is replaced by others: each is refused, or has its annotated type."""
    data = serialize.to_json(make_plan())
    refused = 0
    for holder in holders(data):
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            value = holder[key]
            for wrong in WRONG:
                holder[key] = wrong
                try:
                    found = serialize.from_json(data)
                except serialize.PlanFormatError:
                    refused += 1
                else:
                    assert serialize.from_json(serialize.to_json(found)) is not found
            holder[key] = value
    assert refused > 2_000
    assert repr(serialize.from_json(data)) == repr(make_plan())


@pytest.mark.parametrize(
    ("field", "start", "outer"),
    [
        ("arguments", None, lambda inner: [inner]),
        ("parameters", {"Expr": 1}, lambda x: {"HostNumber": {"op": "neg", "args": [x]}}),
        ("narrow", 1, lambda inner: {"c": 0, "t": [[1, ["//", inner, 7]]]}),
    ],
)
def test_nesting_is_bounded(field, start, outer):
    data = serialize.to_json(make_plan())
    steps = {key: value for step in data["steps"] for value in step.values() for key in value}
    nested = start
    for _ in range(20):
        nested = outer(nested)
    steps[field][field] = [nested]
    serialize.from_json(data)
    for _ in range(80):
        nested = outer(nested)
    steps[field][field] = [nested]
    with pytest.raises(serialize.PlanFormatError, match="nested too deeply"):
        serialize.from_json(data)


def test_not_a_dictionary():
    with pytest.raises(serialize.PlanFormatError):
        serialize.from_json([])
