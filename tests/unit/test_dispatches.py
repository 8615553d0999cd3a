"""What a schedule says is what is dispatched: group by group, on five adapters, without any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.targets import TARGETS
from tests.compilations import OPTIONS, TARGET, compile_function
from tests.decoding import Sizes, decode, layers_of
from tests.golden.graphs import GRAPHS
from torch_webgpu_compile.compiler import Kernels, compile_graph
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.graph import (
    ForeachGroup,
    JointGroup,
    KernelGroup,
    MapGroup,
    RowGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
    buffers_of,
    dispatch_count,
)
from torch_webgpu_compile.ir.nodes import HostCall, Scatter
from torch_webgpu_compile.ir.verify_schedule import verify_schedule
from torch_webgpu_compile.plan.model import STATUS, KernelCall
from torch_webgpu_compile.target import Target, Window

pytestmark = pytest.mark.rotates(2)

randn = torch.randn
AT = torch.tensor([1])


def one_token(x, position):
    sizes = Sizes(layers=1)
    return decode(sizes, x, position, layers_of(sizes, torch.float32))


PROGRAMS = {
    **{name: (function, arguments) for name, (function, arguments, _) in GRAPHS.items()},
    "one_token": (one_token, [randn(1, 1, Sizes().hidden), torch.tensor([7])]),
    "a scatter that copies first": (
        lambda x, at, new: x.index_copy(1, at, new) + 1,
        [randn(2, 4, 8), AT, randn(2, 1, 8)],
    ),
    "a scatter without updates": (
        lambda x, at, new: x.index_copy(1, at, new) * 2,
        [randn(2, 4, 8), AT[:0], randn(2, 0, 8)],
    ),
    "nothing": (lambda x, y: (x @ y, x.sin(), x.sum(1)), [randn(0, 8), randn(8, 4)]),
    "a host call": (lambda x: torch.linalg.eigvalsh(x @ x.T).sin(), [randn(6, 6)]),
    "casts of transposed weights": (
        lambda *weights: tuple(w.t().contiguous() * 2 for w in weights),
        [randn(256, 256), randn(256, 192), randn(64, 256)],
    ),
    "products of unlike operands": (
        lambda x, y, w: (x @ w, x @ y, x.t() @ x),
        [randn(32, 32), randn(32, 31), randn(32, 64)],
    ),
}


def dispatched(kernels: Kernels) -> Iterator[tuple[KernelGroup, list[KernelCall]]]:
    """The groups of a schedule, each with as many kernels as it says."""
    calls = list(kernels.calls)
    for group in kernels.schedule.groups:
        if isinstance(group, SingleGroup) and isinstance(group.node, HostCall):
            assert calls.pop(0) == group.node
        count = dispatch_count(group, kernels.schedule.graph.buffers)
        own, calls = calls[:count], calls[count:]
        yield group, [call for call in own if isinstance(call, KernelCall)]
    assert not calls


def written(call: KernelCall) -> set[str]:
    pairs = zip(call.step.bindings, call.kernel.bindings, strict=True)
    return {binding.buffer for binding, declared in pairs if declared.writable} - {STATUS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_group_is_its_kernels(name):
    function, arguments = PROGRAMS[name]
    options = replace(OPTIONS, fallback="silent")
    first = compile_function(function, *arguments, options=options)
    for target in TARGETS.values():
        state = compile_graph(first.captured, first.phase, target, options, use_cache=False)
        plans = [plan for plan in (state.plan.preparation, state.plan) if plan is not None]
        for part, plan in zip(state.results["wgsl"].parts, plans, strict=True):
            graph = part.schedule.graph
            assert plan.dispatch_count == sum(
                dispatch_count(group, graph.buffers) for group in part.schedule.groups
            )
            for group, calls in dispatched(part):
                stored = set(map(graph.memory_of, buffers_of(group).stored)) if calls else set()
                assert set().union(*map(written, calls)) == stored
                assert len(calls) <= 1 or isinstance(group.node, Scatter)


def schedule_of(function, *arguments, target=TARGET) -> Schedule:
    return compile_function(function, *arguments, target=target).schedule


def test_maps_that_go_through_tiles_stay_alone():
    function, arguments = PROGRAMS["casts of transposed weights"]
    groups = schedule_of(function, *arguments).groups
    assert [type(group) for group in groups] == [MapGroup] * 3
    software = schedule_of(function, *arguments, target=TARGETS["lavapipe"])
    assert [type(group) for group in software.groups] == [ForeachGroup]  # it has no tiles
    with pytest.raises(VerificationError, match="maps that do not go through tiles"):
        verify_schedule(software, TARGET)


def test_products_that_are_loaded_unlike_are_no_siblings():
    function, arguments = PROGRAMS["products of unlike operands"]
    groups = schedule_of(function, *arguments).groups
    assert not any(isinstance(group, SiblingGroup) for group in groups)
    alike = schedule_of(lambda x, y: (x @ y, y @ x), randn(32, 32), randn(32, 32))
    wrong = replace(alike, groups=(SiblingGroup(alike.groups),))
    verify_schedule(wrong, TARGET)


LARGE = replace(TARGET, max_storage_buffers=32)


def columns(*arguments):
    """Rows whose elements lie apart: every one has its part of a workgroup's memory."""
    return tuple(x.argmax(1) for x in arguments)


def test_parts_fit_in_workgroup_memory():
    # Of two types, which together need more than either.
    arguments = [randn(2, 1 << 12), torch.ones(2, 1 << 12, dtype=torch.int32)]
    (group,) = schedule_of(columns, *arguments, target=LARGE).groups
    assert isinstance(group, JointGroup)
    kernel = compile_function(columns, *arguments, target=LARGE).plan.kernels[0]
    small = replace(LARGE, max_workgroup_nbytes=kernel.workgroup_nbytes - 1)
    groups = schedule_of(columns, *arguments, target=small).groups
    assert all(isinstance(group, RowGroup) for group in groups)
    with pytest.raises(VerificationError, match="bytes of workgroup memory at most, not"):
        verify_schedule(schedule_of(columns, *arguments, target=LARGE), small)


def test_the_verifier_counts_bindings():
    schedule = schedule_of(lambda x, y: (x + y, x - y), randn(5), randn(5))
    verify_schedule(schedule, replace(TARGET, max_storage_buffers=4))
    with pytest.raises(VerificationError, match="group 0 needs at most 3 bindings, not 4"):
        verify_schedule(schedule, replace(TARGET, max_storage_buffers=3))
    half = replace(TARGET, max_binding_nbytes=256)
    large = schedule_of(lambda x, y: (x + y, x - y), randn(65), randn(65), target=half)
    with pytest.raises(VerificationError, match="at most 7 bindings, not 8"):
        verify_schedule(large, replace(half, max_storage_buffers=7))


def test_windows_of_a_buffer():
    target = Target(max_binding_nbytes=1000)
    assert target.windows(0) == target.windows(768) == (Window(),)
    assert target.windows(769) == (Window(0, 768), Window(768, 16))
    assert target.windows(1537) == (Window(0, 768), Window(768, 768), Window(1536, 16))
