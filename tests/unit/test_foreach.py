"""Which maps share a dispatch because they do the same on different buffers, without an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compilations import OPTIONS, TARGET, compile_function
from tests.eager_calls import describe
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import Compilation, compile_graph, native_operators
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.graph import ForeachGroup, MapGroup
from torch_webgpu_compile.ir.verify_schedule import verify_schedule

pytestmark = pytest.mark.rotates(9)

aten = torch.ops.aten
WIDE = replace(TARGET, max_storage_buffers=999)
MIDDLE = replace(TARGET, max_storage_buffers=32)
randn = torch.randn

# The shapes of GPT-2's 148 parameters, with a small width.
WIDTH = 8
LAYER = [
    *[(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
    *[(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)],
]
GPT2 = [(50, WIDTH), (16, WIDTH), *LAYER * 12, (WIDTH,), (WIDTH,)]


def tensors(shapes=GPT2) -> list[torch.Tensor]:
    return [randn(shape) for shape in shapes]


def steps(shapes=GPT2) -> list[torch.Tensor]:
    return [torch.ones(()) for _ in shapes]


def compiled_call(op: Any, *args: Any, target=WIDE, **kwargs: Any) -> Compilation:
    """The plan of one eager operator."""
    call = capture_call(op, *describe((args, kwargs)), native_operators())
    return compile_graph(call.captured, call.phase, target, OPTIONS, use_cache=False)


ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
CALLS = {
    # name: (operator, arguments, keywords, bindings of a parameter, dispatches at most)
    "sqrt": (aten._foreach_sqrt.default, lambda: (tensors(),), {}, 2, 1),
    "add": (aten._foreach_add_.List, lambda: (tensors(), tensors()), {}, 2, 1),
    "mul": (aten._foreach_mul_.Scalar, lambda: (tensors(), 0.5), {}, 1, 1),
    "addcmul": (
        aten._foreach_addcmul_.Scalar,
        lambda: (tensors(), tensors(), tensors(), 0.5),
        {},
        3,
        1,
    ),
    "steps": (aten._foreach_add_.Scalar, lambda: (steps(), 1), {}, 1, 1),
    "adamw": (
        aten._fused_adamw_.default,
        lambda: (*(tensors() for _ in range(4)), [], steps()),
        {**ADAM, "amsgrad": False, "maximize": False},
        None,
        3,
    ),
    "amsgrad": (
        aten._fused_adam_.default,
        lambda: (*(tensors() for _ in range(5)), steps()),
        {**ADAM, "amsgrad": True, "maximize": True},
        None,
        4,
    ),
    "sgd": (
        aten._fused_sgd_.default,
        lambda: tuple(tensors() for _ in range(3)),
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": True}
        | {"maximize": False, "is_first_step": False},
        3,
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_on_all_parameters_are_few_dispatches(name):
    op, arguments, keywords, bound, most = CALLS[name]
    given = arguments()
    plan = compiled_call(op, *given, **keywords).plan
    assert plan.dispatch_count <= most
    assert all(len(kernel.bindings) <= 999 for kernel in plan.kernels)
    if bound is None:
        return
    for target in (TARGET, MIDDLE):
        limit = target.max_storage_buffers
        plan = compiled_call(op, *given, target=target, **keywords).plan
        assert plan.dispatch_count == -(-len(GPT2) // (limit // bound))
        assert all(len(kernel.bindings) <= limit for kernel in plan.kernels)


def test_the_common_body_is_in_the_kernel_once():
    (kernel,) = compiled_call(aten._foreach_sqrt.default, tensors()).plan.kernels
    assert kernel.wgsl.count("sqrt(") == 1
    (kernel,) = compiled_call(aten._foreach_sqrt.default, [randn(3), randn(130)]).plan.kernels
    assert kernel.wgsl.count("sqrt(") == 1


def test_no_kernel_holds_more_maps_than_drivers_compile_fast():
    state = compiled_call(aten._foreach_neg_.default, tensors([(8,)] * 600))
    assert [len(g.groups) for g in state.schedule.groups] == [256, 256, 88]


def parts(state: Compilation) -> list[int]:
    """Maps of each kernel."""
    return [
        len(group.groups) if isinstance(group, ForeachGroup) else 1
        for group in state.schedule.groups
    ]


def compiled(function, *arguments, target=WIDE, **options) -> Compilation:
    return compile_function(function, *arguments, target=target, **options)


BIG, OTHER = randn(70, 100), randn(90, 100)


def test_equal_maps_of_different_sizes_and_layouts():
    def function(x, y, z):
        return x.exp() + 1, y.exp() + 1, z.exp() + 1

    assert parts(compiled(function, BIG, OTHER[:, ::2], randn(5, 1500))) == [3]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x.exp(), y.sin()),
        lambda x, y: (x + 1.0, y + 2.0),
        lambda x, y: (x.exp(), y.to(torch.bfloat16).exp()),
        lambda x, y: (x.exp(), y.exp() + x.exp().exp()[:1]),
        lambda x, y: (x + torch.arange(100), y + torch.arange(100)),  # by place
        lambda x, y: (torch.nn.functional.pad(x, (1, 1)), torch.nn.functional.pad(y, (1, 1))),
    ],
    ids=["ops", "constants", "dtypes", "operands", "places", "conditions"],
)
def test_different_maps_stay_apart(function):
    assert max(parts(compiled(function, BIG, OTHER))) == 1


def test_a_map_that_needs_another_one_stays_apart():
    def function(x):
        y = x.exp()
        return y, (y.flip(0).sum(0) + 1).exp()

    assert max(parts(compiled(function, BIG))) == 1


def test_sizes_that_are_not_known_stay_apart():
    state = compiled(lambda x, y: (x.exp(), y.exp()), BIG, OTHER, dynamic=True)
    assert max(parts(state)) == 1


def test_large_intermediates_stay_near_their_readers():
    """All casts at once would keep all results alive."""

    def function(x, *weights):
        for w in weights:
            x = x @ torch.nn.functional.gelu(w).t()
        return x

    weights = [randn(200, 200) for _ in range(3)]
    assert max(parts(compiled(function, randn(200, 200), *weights))) == 1


def test_connected_maps_are_one():
    """Both averages and the step: every tensor is read once."""

    def function(p, g, m, v):
        m.lerp_(g, 0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        p.addcdiv_(m, v.sqrt() + 1e-8, value=-0.1)

    for target in (TARGET, WIDE):
        state = compiled(function, *(BIG.abs() for _ in range(4)), target=target)
        (kernel,) = state.plan.kernels
        assert [binding.writable for binding in kernel.bindings].count(True) == 3
        assert len(kernel.bindings) == 4
        (step,) = state.plan.steps
        assert int(step.bytes_read) == 4 * BIG.nbytes
        assert int(step.bytes_written) == 3 * BIG.nbytes


# ---- in place


def in_place(state: Compilation) -> list[bool]:
    plan = state.plan
    return [
        o.buffer == plan.inputs[o.mutates].buffer for o in plan.outputs if o.mutates is not None
    ]


def test_maps_write_over_what_they_read_at_the_same_place():
    def function(x, y):
        x.mul_(2)
        y.copy_(y.exp() + x)

    assert in_place(compiled(function, BIG, BIG.clone())) == [True, True]


def test_a_map_does_not_write_over_what_other_points_read():
    def function(x, y):
        x.copy_(x.flip(0))
        y.copy_(y.t().contiguous().view(y.shape) + 1)

    assert in_place(compiled(function, BIG, BIG.clone())) == [False, False]


def test_readers_come_before_a_map_that_overwrites():
    def function(x, y):
        total = x.sum(0)
        x.add_(1)
        y.sub_(1)
        return total, x.cumsum(0)

    state = compiled(function, BIG, BIG.clone())
    assert in_place(state) == [True, True]


def test_two_that_read_each_other_are_not_both_overwritten():
    def function(x, y):
        a, b = x + y, x - y.flip(0)
        x.copy_(a)
        y.copy_(b)

    assert sum(in_place(compiled(function, BIG, BIG.clone()))) < 2


def test_words_are_not_shared_with_what_follows():
    """The memory after a bfloat16 tensor of odd size may be another tensor's half of a word."""

    def function(x, y):
        x.mul_(2)
        y.mul_(2)

    odd, even = torch.ones(5, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert in_place(compiled(function, odd, even)) == [False, True]


def test_a_single_argument_gets_new_memory():
    assert in_place(compiled(lambda x: x.mul_(2), BIG)) == [False]


def test_wrong_schedules_are_refused():
    schedule = compiled(lambda x, y, z: (x.exp(), y.exp(), z.sin()), BIG, OTHER, BIG[1:]).schedule
    equal, other = schedule.groups
    assert isinstance(equal, ForeachGroup)
    assert isinstance(other, MapGroup)
    wrong = replace(schedule, groups=(ForeachGroup((*equal.groups, other)),))
    with pytest.raises(VerificationError, match="compute the same"):
        verify_schedule(wrong, TARGET)
