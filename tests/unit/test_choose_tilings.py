"""Tilings are data: chosen by a pass, checked, and all that rendering needs beside the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile.codegen import Kernels, render, verify_kernels
from torch_webgpu_compile.codegen.tilings.attention_tilings import AttentionTiling
from torch_webgpu_compile.codegen.tilings.choose import (
    TiledSchedule,
    Tilings,
    choose_tilings,
    format_tilings,
    verify_tilings,
)
from torch_webgpu_compile.codegen.tilings.contraction import problem_of
from torch_webgpu_compile.codegen.tilings.matmul import MatmulTiling
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.plan.model import STATUS, Binding, Kernel, KernelCall

OTHER = MatmulTiling(64, 64, 16, 4, 4, False, 8)
IN_UNITS = UnitsTiling(Unit(16, 16, 16), "f16", 32, 64, 64, 32, 2, 1)


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(0, (2, 32))
    return F.scaled_dot_product_attention(q, q, q).exp().sum(0)


@pytest.fixture(scope="module")
def tiled() -> TiledSchedule:
    state = compile_function(function, torch.ones(64, 32), torch.ones(32, 48))
    found = state.results["choose_tilings"].called
    assert isinstance(found, TiledSchedule)
    return found


def test_they_are_data(tiled: TiledSchedule) -> None:
    """Chosen again they are the same, others in their place give other kernels, and all print."""
    product, attention, rest = tiled.tilings
    assert isinstance(product[0], MatmulTiling)
    assert isinstance(attention[0], AttentionTiling)
    assert rest == ()
    group, *_ = tiled.schedule.groups
    assert tiled.problems == (problem_of(group, tiled.schedule.graph.buffers), None, None)
    assert format_tilings(tiled) == (
        f"tilings({tiled.schedule.graph.name!r})\ngroup 0: {product[0]}\ngroup 1: {attention[0]}\n"
    )
    assert choose_tilings(tiled.schedule, TARGET, {}) == tiled
    told: list[Kernel] = []
    before = render(tiled, TARGET, told.append)
    assert told == [call.kernel for call in before.calls if isinstance(call, KernelCall)]
    assert render(tiled, TARGET) == before
    other = replace(tiled, tilings=((OTHER,), attention, rest))
    verify_tilings(other, TARGET)
    calls = render(other, TARGET).calls
    changed = [old != new for old, new in zip(before.calls, calls, strict=True)]
    assert changed == [True, False, False]
    found = calls[0]
    assert isinstance(found, KernelCall)
    assert found.kernel.workgroup_size == (OTHER.workgroup, 1, 1)


WRONG: dict[str, Callable[[Tilings, Tilings], Tilings]] = {
    "group 0 has 0 tilings": (lambda product, attention: ()),
    "group 0 has 2 tilings": (lambda product, attention: 2 * product),
    "group 0 cannot have AttentionTiling": (lambda product, attention: attention),
    "has 512 invocations, and .* allows 256": (
        lambda product, attention: (replace(OTHER, rows=128, columns=64),)
    ),
    "has no units for": (lambda product, attention: (IN_UNITS,)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tilings(message: str, tiled: TiledSchedule) -> None:
    product, attention, rest = tiled.tilings
    wrong = replace(tiled, tilings=(WRONG[message](product, attention), attention, rest))
    units = replace(TARGET, features=frozenset({"cooperative-matrix"}))
    with pytest.raises(VerificationError, match=message):
        verify_tilings(wrong, units)


def changed(call: Any, **fields: Any) -> Any:
    return replace(call, kernel=replace(call.kernel, **fields))


def bound(call: Any, k: int, name: str) -> Any:
    bindings = [*call.step.bindings]
    bindings[k] = Binding(name)
    return replace(call, step=replace(call.step, bindings=tuple(bindings)))


WRONG_KERNELS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "0 kernels of 1": lambda call: (),
    "2 kernels of 1": lambda call: (call, call),
    "binds sum_1, which is not its": lambda call: (bound(call, 0, "sum_1"),),
    "binds in0, which is not its": lambda call: (bound(call, 2, "in0"),),
    "binds device status, which is not its": lambda call: (bound(call, 2, STATUS),),
    "has 512 invocations of 256": lambda call: (changed(call, workgroup_size=(256, 2, 1)),),
    "bytes of workgroup memory of": lambda call: (changed(call, workgroup_nbytes=1 << 20),),
}


@pytest.mark.parametrize("message", WRONG_KERNELS)
def test_wrong_kernels(message: str, tiled: TiledSchedule) -> None:
    kernels = render(tiled, TARGET)
    verify_kernels(kernels, TARGET)
    (call,), *others = kernels.of_groups
    first = WRONG_KERNELS[message](call)
    wrong = Kernels(tiled.schedule, (first, *others))
    with pytest.raises(VerificationError, match=message):
        verify_kernels(wrong, TARGET)
