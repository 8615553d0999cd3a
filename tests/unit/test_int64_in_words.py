"""Kernels for GPUs without 64-bit integers. `tests/gpu/test_missing_features.py` runs them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.compilations import compile_function
from tests.gpu.test_missing_features import INTEGERS
from tests.tint import tint
from torch_webgpu_compile.bundle.targets import BROWSER


@pytest.mark.parametrize("name", INTEGERS)
def test_kernels_have_no_such_types(name: str) -> None:
    function, arguments = INTEGERS[name]
    kernels = compile_function(function, *arguments, target=BROWSER).plan.kernels
    texts = [re.sub(r"//[^\n]*", "", kernel.wgsl) for kernel in kernels]
    assert any("vec2<u32>" in text for text in texts)
    for text in texts:
        assert not re.search(r"\b[iu]64\b|\dl[iu]\b", text)
        assert not tint().error(text)


def four_lanes(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = i.long() * 3 + torch.arange(64).view(8, 8) * 2**33
    chosen = torch.where(x > 0, wide // 5, -wide)
    return (chosen > 7) & (chosen != i), chosen.float(), torch.nn.functional.pad(i.long(), [4, 0])


def test_four_values_are_an_array() -> None:
    arguments = torch.ones(8, 8, dtype=torch.int32), torch.ones(8, 8)
    kernels = compile_function(four_lanes, *arguments, target=BROWSER).plan.kernels
    texts = [kernel.wgsl for kernel in kernels if "array<vec2<u32>, 4>" in kernel.wgsl]
    assert any(re.search(r"= tw_words_where_x4\(\w+, \w+, \w+\);", text) for text in texts)
    assert not any(map(tint().error, texts))


def test_constants_and_positions_are_two_words() -> None:
    compiled = compile_function(lambda x: x * -2 + 2**40, torch.ones(5).long(), target=BROWSER)
    main = compiled.plan.kernels[0].wgsl.split("fn main(")[1]
    assert "tw_words_mul(t0, vec2<u32>(4294967294u, 4294967295u))" in main
    assert "vec2<u32>(0u, 256u)" in main
    compiled = compile_function(lambda: torch.arange(7) * 2**33, target=BROWSER)
    main = compiled.plan.kernels[0].wgsl.split("fn main(")[1]
    assert "tw_words_mul(vec2<u32>(0u, 2u), tw_words_of_i32(" in main


@pytest.mark.parametrize("sizes", [(5, 3), (5, 3, 4)])
def test_positions_are_divided_in_32_bits(sizes: tuple[int, ...]) -> None:
    """Those of a sort in a flattened tensor, as of ``torch.unique``, by sizes and products."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        return x.flatten().sort().values

    plan = compile_function(ordered, torch.ones(sizes), dynamic=True, target=BROWSER).plan
    text = "".join(kernel.wgsl for kernel in plan.kernels)
    assert "= tw_floor_divide_i32(" in text
    assert not divisions_in_words(text)


def divisions_in_words(text: str) -> list[str]:
    return re.findall(r"= tw_words_(\w+_divide|remainder|fmod)\(", text)


def test_what_32_bits_may_not_hold_is_divided_in_words() -> None:
    """-2³¹ // -1 is 2³¹; and what a caller's int64 is, or n³, nothing says."""
    numbers, wide = torch.ones(8, dtype=torch.int32), torch.ones(6, 8).long()

    def divisions(function: Callable[..., torch.Tensor]) -> list[str]:
        plan = compile_function(function, numbers, wide, dynamic=True, target=BROWSER).plan
        return divisions_in_words(plan.kernels[0].wgsl)

    assert not divisions(lambda i, a: i.long() // 7 % i.shape[0])
    assert divisions(lambda i, a: i.long() // -1)
    assert divisions(lambda i, a: i.long() % 2**31)
    assert divisions(lambda i, a: i.long() // i.shape[0] ** 3)
    assert divisions(lambda i, a: i.long() // a)
    assert divisions(lambda i, a: a // 7)
    assert divisions(lambda i, a: (i.long() + 1) // 7)
