"""What a steady eager call costs the host, by the functions that it calls: not by a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_webgpu_compile.callables.device_graph import DeviceGraph
from torch_webgpu_compile.callables.signature import Signature
from torch_webgpu_compile.capture import refusals
from torch_webgpu_compile.tensors import storages

Call = Callable[[Tensor], Any]

# The call, and the most calls of functions in Python and in all. They are a few more than it makes:
# a new one per call of an operator shows, and does so before it is on every user's path.
CALLS: dict[str, tuple[Call, int, int]] = {
    "add": (lambda x: x + x, 17, 50),
    "in place": (lambda x: x.add_(1), 23, 58),
    "a conversion": (lambda x: x.half(), 22, 52),
    "sum": (lambda x: x.sum(), 17, 42),
    "softmax": (lambda x: F.softmax(x, -1), 19, 50),
    "dropout": (lambda x: F.dropout(x), 59, 135),
    "empty": (lambda x: torch.empty(8, 8, device="webgpu"), 10, 26),
    "an upload": (lambda x: torch.zeros(8).to("webgpu"), 36, 62),
    "random numbers": (lambda x: torch.randn(64, device="webgpu"), 50, 108),
    "a view": (lambda x: x.view(-1), 2, 3),
    "a slice": (lambda x: x[3:6], 2, 3),
}


def calls_of(call: Call, x: Tensor) -> tuple[int, int]:
    """How many functions in Python, and in all, a call that has been made before calls."""
    with torch.no_grad():
        for _ in range(4):
            call(x)
        torch.webgpu.synchronize()  # type: ignore[attr-defined]
        call(x)  # the batch of commands is not full after the next one
        events: list[str] = []
        gc.disable()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            call(x)
        finally:
            sys.setprofile(None)
            gc.enable()
    # The last is that of `setprofile`.
    return events.count("call"), events.count("call") + events.count("c_call") - 1


@pytest.mark.parametrize("name", CALLS)
def test_a_steady_call_calls_few_functions(name: str) -> None:
    call, most_python, most = CALLS[name]
    python, every = calls_of(call, torch.ones(8, 8, device="webgpu"))
    assert python <= most_python
    assert every <= most


def test_a_known_call_is_found_in_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are read and memory is resolved for the first call with a signature alone."""
    x = torch.arange(12.0, device="webgpu")
    wanted = (x[4:] * x[:8]).cpu()

    def refuse(*_: Any) -> Any:
        raise AssertionError("what the look-up has found was looked up again")

    monkeypatch.setattr(Signature, "variant", refuse)
    monkeypatch.setattr(DeviceGraph, "_find", refuse)
    assert torch.equal((x[4:] * x[:8]).cpu(), wanted)


def test_a_known_call_makes_again_what_was_let_go() -> None:
    x = torch.arange(12.0, device="webgpu")
    for _ in range(3):
        assert (x * x).sum().item() == 506
        torch.webgpu.empty_cache()  # type: ignore[attr-defined]


def test_a_known_call_on_parts_of_memory() -> None:
    """Of one alignment, at other places: the same signature."""
    host = torch.arange(1024.0)
    x = host.to("webgpu")
    for start in (0, 64, 512, 1, 65):
        assert torch.equal((x[start : start + 8] + 1).cpu(), host[start : start + 8] + 1)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3, 4), (2, 0, 3), (1, 5, 1)])
def test_row_major_strides_go_without_saying(sizes: tuple[int, ...]) -> None:
    like = torch.empty(sizes)
    assert storages.given_strides(sizes, like.stride()) == ()
    storage = storages.new_storage(4 * like.numel(), 0)
    made = storages.new_tensor(storage, torch.float32, sizes, ())
    assert (made.shape, made.stride()) == (like.shape, like.stride())


def test_a_cache_that_grows_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled graph has assumed of sizes tells that other sizes fit: no call on "meta"."""
    row, query = torch.ones(1, 2, 1, 8, device="webgpu"), torch.ones(1, 4, 1, 8, device="webgpu")

    def grow(first: int, last: int) -> None:
        cache = torch.zeros(1, 2, first, 8, device="webgpu")
        for _ in range(first, last):
            cache = torch.cat([cache, row], -2)
            F.scaled_dot_product_attention(query, cache, cache, enable_gqa=True)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a call of a kind that is known was made without contents")

    grow(65, 80)
    with monkeypatch.context() as patched:
        patched.setattr(refusals._Call, "_without_contents", refuse)
        grow(80, 96)
    with pytest.raises(RuntimeError, match=r"[Ss]izes of tensors must match"):
        torch.cat([torch.zeros(1, 2, 90, 8, device="webgpu"), row[..., 1:]], -2)
