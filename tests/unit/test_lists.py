"""Calls on lists as lanes, and the plans of many lanes, without an adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import OPTIONS, TARGET
from torch_webgpu_compile.capture.eager.calls import TensorSpec
from torch_webgpu_compile.capture.eager.sequence import (
    Leaf,
    Made,
    SequenceCall,
    capture_lane,
    divide,
    layout_of,
)
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.ir.lanes import Lanes
from torch_webgpu_compile.plan.model import PlanBuffer
from torch_webgpu_compile.plan.placing import Placed, place
from torch_webgpu_compile.plan.verify import verify_plan
from torch_webgpu_compile.symbolic.sizes import ONE, ZERO, as_expr

aten = torch.ops.aten
MOST = 1 << 20


def spec(*sizes):
    return TensorSpec(torch.float32, sizes, torch.empty(sizes).stride())


def leaves(*positions):
    return [Leaf(k) for k in positions]


def test_entries_at_one_place_are_a_lane():
    """0 and 1 are changed, 2 and 3 read, 4 is a number of all; 5 and 6 are one each."""
    calls = [
        SequenceCall(aten._foreach_mul_.Scalar, (leaves(0, 1), Leaf(4)), {}, 0),
        SequenceCall(aten._foreach_add.List, (leaves(2, 3), leaves(0, 1)), {}, 2),
        SequenceCall(aten._foreach_add_.ScalarList, (leaves(0, 1), leaves(5, 6)), {}, 0),
        SequenceCall(aten._foreach_sub_.List, ([Leaf(1)], [Made(1)]), {}, 0),
    ]
    one, other = divide(calls, [spec(3)] * 4 + [0.5, 1.0, 2.0]).values()
    (first,), (second,) = one, other  # only the second has the last call
    assert (first.own, first.made) == ((0, 2), (0,))
    assert (second.own, second.made) == ((1, 3), (1,))
    assert first.shared_numbers == second.shared_numbers == (4,)
    assert (first.own_numbers, second.own_numbers) == ((5,), (6,))
    (same,) = divide(calls[:3], [spec(3)] * 4 + [0.5, 1.0, 2.0]).values()
    assert len(same) == 2


def test_entries_that_meet_are_one_lane():
    calls = [
        SequenceCall(aten._foreach_add_.List, (leaves(0, 1), leaves(2, 3)), {}, 0),
        SequenceCall(aten._foreach_add_.List, (leaves(4), leaves(0)), {}, 0),
        SequenceCall(aten._foreach_add_.List, (leaves(4), leaves(1)), {}, 0),
    ]
    ((lane,),) = divide(calls, [spec(3)] * 5).values()
    assert sorted(lane.own) == [0, 1, 2, 3, 4]
    assert len(lane.calls) == 4


def test_a_tensor_of_all_entries_may_not_be_changed():
    calls = [
        SequenceCall(aten._foreach_mul_.Tensor, (leaves(0, 1), Leaf(2)), {}, 0),
        SequenceCall(aten._foreach_add_.Scalar, (leaves(2), 1), {}, 0),
    ]
    assert len(divide(calls[:1], [spec(3), spec(3), spec()])) == 1
    with pytest.raises(UnsupportedOp, match="of all entries"):
        divide(calls, [spec(3), spec(3), spec()])


@pytest.mark.parametrize(
    ("shapes", "flat", "length"),
    [
        (((6, 4), (6, 4)), ((6, 4), (6, 4)), 6),
        (((40,), ()), ((10, 4), ()), 10),
        (((3, 5), (1, 1)), ((15,), (1,)), 15),
        (((6, 4), (4,)), ((6, 4), (4,)), 0),
        (((1, 1), ()), ((1,), ()), 0),
    ],
)
def test_shapes_do_not_matter(shapes, flat, length):
    layout = layout_of([spec(*shape) for shape in shapes], (), MOST)
    assert tuple(s.sizes for s in layout.specs) == flat
    assert layout.length == length
    assert layout_of([spec(MOST)], (), MOST).length == 0  # beyond one binding


def test_a_plan_of_many_lanes_knows_no_sizes():
    """One kernel for all of them, whose body is there once, and the numbers of each lane."""
    count, given = 5, [spec(5, 8), spec(5, 8), 2.0, 0.5]
    calls = [
        SequenceCall(aten._foreach_mul_.Scalar, ([Leaf(0)], Leaf(2)), {}, 0),
        SequenceCall(aten._foreach_sub_.ScalarList, ([Leaf(0)], [Leaf(3)]), {}, 0),
        SequenceCall(aten._foreach_add_.List, ([Leaf(0)], [Leaf(1)]), {}, 0),
        SequenceCall(aten._foreach_sqrt_.default, ([Leaf(0)],), {}, 0),
    ]
    ((lane,),) = divide(calls, given).values()
    layout = layout_of(given[:2], (), MOST)
    call = capture_lane(lane, layout, given, (), native_operators())
    assert call.free_numbers == {2, 3}
    target = replace(TARGET, max_storage_buffers=2 * count + 1)
    lanes = Lanes(100, 2, True, 1)
    state = compile_graph(call.captured, call.phase, target, OPTIONS, lanes=lanes)
    (kernel,) = state.plan.kernels
    assert kernel.wgsl.count("sqrt(") == 1
    assert len(state.plan.inputs) == 2 * count + 1

    def tensor(name, *sizes):
        strides = map(as_expr, torch.empty(sizes).stride())
        nbytes = as_expr(torch.empty(sizes).nbytes)
        dtype = state.plan.buffers[state.plan.inputs[0].buffer].dtype
        sizes = tuple(map(as_expr, sizes))
        return PlanBuffer(name, "input", dtype, sizes, tuple(strides), ZERO, nbytes)

    parts, inputs = [], []
    for rows in (range(3, 3 + count), range(20, 20 + count)):
        start = len(inputs)
        inputs += [tensor(f"x{start + k}", rows[k // 2], 8) for k in range(2 * count)]
        layouts = [((2 * rows[k // 2], 4), 0) for k in range(2 * count)]
        places = (*range(start, start + 2 * count), 4 * count)
        numbers = ((1 + count,), start // (2 * count) * (1 + count))
        parts.append(Placed(state.plan, places, (*layouts, numbers)))
    plan = place("both", parts, [*inputs, tensor("numbers", 2 * (1 + count))])
    verify_plan(plan)
    assert plan.kernels[0].wgsl == kernel.wgsl
    assert len(plan.kernels) == 1
    first, second = plan.steps
    assert first.grid == (as_expr(count), ONE, ONE)  # a workgroup each
    assert {b.buffer for b in second.bindings} == {
        f"x{2 * count + k}" for k in range(2 * count)
    } | {"numbers"}
    assert all(size.is_constant for step in plan.steps for size in step.sizes)
