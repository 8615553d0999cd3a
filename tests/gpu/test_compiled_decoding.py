"""Tokens one after another, over caches that every call changes in place, against eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_webgpu_compile
from tests.decoding import Layer, Sizes, decode, layers_of
from tests.providers import require_bindings
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.scheduler import cost

pytestmark = [pytest.mark.rotates(12), pytest.mark.usefixtures("fresh")]

autoload.register()

DEVICES = ("cpu", "webgpu")


def on_device(layer: Layer, device: str) -> Layer:
    moved = {name: getattr(layer, name).clone().to(device) for name in Layer.__annotations__}
    return Layer(**moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sizes", "dtype", "atol"),
    [
        (Sizes(), torch.float32, 1e-4),
        (Sizes(batch=2), torch.float32, 1e-4),
        (Sizes(heads=3, kv_heads=3, head=24, positions=130, layers=1), torch.float32, 1e-4),
        (Sizes(), torch.float16, 2e-2),
        (Sizes(), torch.bfloat16, 1e-1),
    ],
)
def test_steps(sizes: Sizes, dtype: torch.dtype, atol: float, device: str) -> None:
    layers = layers_of(sizes, dtype)
    own = [on_device(layer, device) for layer in layers]
    step = torch.compile(decode, backend="webgpu", fullgraph=True)
    with torch.no_grad():
        for position in (0, 1, 2, 63, 64, sizes.positions - 1):
            x, at = torch.randn(sizes.batch, 1, sizes.hidden).to(dtype), torch.tensor([position])
            expected = decode(sizes, x, at, layers)
            result = step(sizes, x.to(device), at.to(device), own)
            torch.testing.assert_close(result.cpu(), expected, atol=atol, rtol=atol)
    for layer, other in zip(own, layers, strict=True):
        torch.testing.assert_close(layer.keys.cpu(), other.keys, atol=atol, rtol=atol)
        torch.testing.assert_close(layer.values.cpu(), other.values, atol=atol, rtol=atol)


Step = Callable[[Tensor, Tensor, Tensor, Tensor, int], object]


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values)


def by_number(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    keys[:, :, at] = new[:, :, 0]
    values.index_copy_(2, torch.full((1,), at, device=q.device), new * 2)
    return attend(q, keys, values)


def in_one_batch(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    position = torch.full((1,), at, device=q.device)
    keys[1:].index_copy_(2, position, new[:1])
    values[:, :1].index_copy_(2, position, new[:, 1:])
    return attend(q, keys, values)


def in_half_a_row(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    position = torch.full((1,), at, device=q.device)
    keys[..., 8:].index_copy_(2, position, new[..., :8])
    return attend(q, keys, values)


def and_the_old_contents(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    before = keys.sum(2)
    keys.index_copy_(2, torch.full((1,), at, device=q.device), new)
    return before, attend(q, keys, values)


def and_the_new_contents(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    position = torch.full((1,), at, device=q.device)
    keys.index_copy_(2, position, new)
    values.index_copy_(2, position, new.exp())
    return values.sum(2), attend(q, keys, values)


def two_rows(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    keys.index_copy_(2, torch.full((1,), at, device=q.device), new)
    keys.index_copy_(2, torch.full((1,), at + 1, device=q.device), new * 2)
    return attend(q, keys, values)


def from_the_other(keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int) -> object:
    position = torch.full((1,), at, device=q.device)
    keys.index_copy_(2, position, values[:, :, :1] + new)
    values.index_copy_(2, position, keys[:, :, :1] + new)
    return attend(q, keys, values)


def from_what_attention_gives(
    keys: Tensor, values: Tensor, q: Tensor, new: Tensor, at: int
) -> object:
    first = attend(q, keys, values)
    keys.index_copy_(2, torch.full((1,), at, device=q.device), first)
    return attend(q, keys, values)


FUNCTIONS: list[Step] = [
    by_number,
    in_one_batch,
    in_half_a_row,
    and_the_old_contents,
    and_the_new_contents,
    two_rows,
    from_the_other,
    from_what_attention_gives,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_a_cache(function: Step, device: str) -> None:
    keys, values = torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16)
    own = keys.clone().to(device), values.clone().to(device)
    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    with torch.no_grad():
        for at in (3, 70, 71, 98):  # the second number makes it symbolic
            q, new = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
            expected = function(keys, values, q, new, at)
            result = compiled(*own, q.to(device), new.to(device), at)
            torch.testing.assert_close(
                torch.utils._pytree.tree_map(Tensor.cpu, result), expected, atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(own[0].cpu(), keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(own[1].cpu(), values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_no_numbers(device: str) -> None:
    """What is overwritten counts no more, whatever it was."""
    sizes = replace(Sizes(), layers=1)
    layers = layers_of(sizes)
    for layer in layers:
        layer.keys[:, :, 5] = float("nan")
        layer.values[:, :, 5] = float("inf")
    own = [on_device(layer, device) for layer in layers]
    x, at = torch.randn(1, 1, sizes.hidden), torch.tensor([5])
    with torch.no_grad():
        result = torch.compile(decode, backend="webgpu")(sizes, x.to(device), at.to(device), own)
        torch.testing.assert_close(result.cpu(), decode(sizes, x, at, layers), atol=1e-4, rtol=1e-4)
        assert result.isfinite().all()


def test_a_profile_shows_every_op() -> None:
    require_bindings(16)  # of joint kernels
    sizes = replace(Sizes(), layers=1)
    own = [on_device(layer, "webgpu") for layer in layers_of(sizes)]
    x, at = torch.randn(1, 1, sizes.hidden).to("webgpu"), torch.tensor([5]).to("webgpu")
    step = torch.compile(decode, backend="webgpu", fullgraph=True)
    with torch.no_grad():
        step(sizes, x, at, own)
        with torch_webgpu_compile.profile() as profile:
            step(sizes, x, at, own)
    assert len(profile.runs) <= 7
    shown = {op for run in profile.runs for op in run.ops}
    assert {"aten.index_copy.default", "aten.mm.default", "aten.addmm.default"} <= shown
    assert sum(run.kind == "joint" for run in profile.runs) == 2


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_read_up_to_the_position(
    queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken from what comes after the step of keys in which the mask ends."""
    monkeypatch.setattr(cost, "waits_for_key_end", lambda nbytes, target: True)
    positions = 1500

    def step(q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        rows = torch.arange(queries, device=q.device)[:, None] + at
        mask = (torch.arange(positions, device=q.device) <= rows)[None, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    compiled = torch.compile(step, backend="webgpu", fullgraph=True)
    q = torch.randn(2, 3, queries, 16).to(dtype)
    keys, values = (torch.randn(2, 3, positions, 16).to(dtype) for _ in range(2))
    for at in (0, 63, 64, 700, positions - queries, positions + 9, -1, -queries, -9999):
        own = [x.clone() for x in (keys, values)]
        for x in own:
            x[:, :, max(0, at + queries + 600) :] = torch.nan
        expected = step(q, keys, values, torch.tensor(at))
        result = compiled(q, *own, torch.tensor(at))
        # Eager adds in another order, and rounds probabilities to the dtype.
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
