"""Ctrl-C at a sample of the places where Python looks for it (all of them: `tests.trust`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.interrupts import count_places, interrupt
from tests.trust.faults import Tally
from tests.trust.interrupts import WORK, check_places
from torch_webgpu_compile.tensors import devices

pytestmark = [
    pytest.mark.rotates(3),
    pytest.mark.skipif(sys.platform == "win32", reason="interrupts through ctypes"),
]


@pytest.mark.parametrize("make", WORK, ids=lambda make: make.__name__)
def test_the_call_after_an_interrupt_is_right(make: Callable[[], Callable[[], Any]]) -> None:
    tally = Tally()
    check_places(tally, make, 13, 5)
    assert tally.tried > 50
    assert tally.survived == tally.tried, tally.details


def test_an_interrupted_download_lets_go_of_its_memory() -> None:
    """Its copy used to be submitted later, into memory that had been freed, which aborts."""
    x = torch.ones(1000, device="webgpu")
    x.cpu()
    backend = devices.get_device(0).backend
    submit = backend.submit_encoded

    def interrupted(*_: Any) -> int:
        backend.submit_encoded = submit
        raise KeyboardInterrupt

    backend.submit_encoded = interrupted
    with pytest.raises(KeyboardInterrupt):
        x.cpu()
    torch.webgpu.empty_cache()
    assert (x + 1).cpu().tolist() == [2.0] * 1000


def test_places_are_found() -> None:
    x = torch.ones(16, device="webgpu")
    found = {interrupt(x.cpu, at) for at in range(1, count_places(x.cpu), 7)}
    assert any("transfer.py" in place for place in found)
    assert any("native.py" in place for place in found)
