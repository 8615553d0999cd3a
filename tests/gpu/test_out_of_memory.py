"""Allocations that fail. `tests.trust.out_of_memory` fails every one of whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.providers import device_in_use
from torch_webgpu_compile.errors import OutOfMemoryError
from torch_webgpu_compile.runtime.device import Device


@pytest.fixture
def device() -> Device:
    torch.ones(1, device="webgpu")
    return device_in_use()


@pytest.fixture
def fail(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes so many of the next allocations fail."""
    backend: Any = device.backend
    create = backend.create_buffer
    left = 0

    def create_buffer(nbytes: int, usage: int) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise OutOfMemoryError("injected")
        return create(nbytes, usage)

    def arm(count: int) -> None:
        nonlocal left
        device.empty_cache()
        left = count

    monkeypatch.setattr(backend, "create_buffer", create_buffer)
    yield arm
    left = 0


def test_every_path_raises_pytorchs_error(fail: Callable[[int], None]) -> None:
    x = torch.ones(4, 4, device="webgpu", requires_grad=True)
    on_device = torch.compile(lambda t: t.sin().sum() + 2, backend="webgpu")
    on_host = torch.compile(lambda t: t.cos() * 3, backend="webgpu")
    calls: list[Callable[[], Any]] = [
        lambda: x.exp(),
        lambda: on_device(x),
        lambda: on_host(torch.ones(4)),
        lambda: on_device(x).backward(),
        lambda: torch.ones(4).to("webgpu"),
        lambda: x.detach().cpu(),
    ]
    for call in calls:
        call()
        fail(1 << 30)
        with pytest.raises(torch.OutOfMemoryError, match="in use") as caught:
            call()
        assert call is not calls[0] or str(caught.value).startswith("aten.exp.default: ")
        fail(0)
        call()


def test_a_failure_in_a_call_does_not_take_its_parameters_away(
    fail: Callable[[int], None],
) -> None:
    # The failing allocation makes every graph give up what it can, the one that runs included.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="webgpu")
    x = torch.randn(3, 8)
    compiled(x).sum().backward()
    fail(1)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_the_error_says_what_holds_memory(device: Device) -> None:
    x = torch.zeros(3 << 20, device="webgpu")
    device.empty_cache()
    device.pool.limit_nbytes = device.pool.stats()["reserved"] + (1 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(2 << 20, device="webgpu")
    finally:
        device.pool.limit_nbytes = None
    for part in ("8.0 MiB were asked for", "tensors and running calls", "the largest: 12.0 MiB"):
        assert part in str(caught.value), caught.value
    assert x.sum().item() == 0
