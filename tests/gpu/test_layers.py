"""A steady call goes down through the layers: on its way to the GPU it enters no folder twice.

import-linter says the same of imports. Functions that one layer gives to another one below it, as
`backend` gives capture what compiles, are no imports, and so are watched here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_webgpu_compile

PACKAGE = f"{torch_webgpu_compile.__name__}."


def folder_of(frame: FrameType) -> str:
    """The folder, or file outside of one, that a function of the package is in; "" of others."""
    name = frame.f_globals.get("__name__") or ""
    return name.removeprefix(PACKAGE).partition(".")[0] if name.startswith(PACKAGE) else ""


def ways(call: Callable[[], Any]) -> set[tuple[str, ...]]:
    """The folders in which the callers of each function that a call enters are, outermost first."""
    found = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not folder_of(frame):
            return
        way: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            folder = folder_of(caller)
            if (folder, *way[-1:]) == ("host_steps", "device"):  # an eager call of its own
                break
            if folder and folder not in way[-1:]:
                way.append(folder)
            caller = caller.f_back
        found.add(tuple(reversed(way)))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1))


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    options = {"fallback": "silent"}
    made: Callable[[Tensor], Tensor] = torch.compile(function, backend="webgpu", options=options)
    return made


def trained(device: str) -> Callable[[Tensor], Any]:
    run = compiled(network().to(device))
    return lambda x: run(x).sum().backward()


CASES: dict[str, tuple[str, Callable[[str], Callable[[Tensor], Any]]]] = {
    "inference-cpu": ("cpu", lambda device: compiled(network().eval().to(device))),
    "inference-webgpu": ("webgpu", lambda device: compiled(network().eval().to(device))),
    "training-cpu": ("cpu", trained),
    "training-webgpu": ("webgpu", trained),
    "sizes-of-data-cpu": ("cpu", lambda device: compiled(lambda x: x[x > 0] * 2)),
    "sizes-of-data-webgpu": ("webgpu", lambda device: compiled(lambda x: x[x > 0] * 2)),
    "host-step-cpu": ("cpu", lambda device: compiled(lambda x: torch.linalg.qr(x)[1] + 1)),
    "host-step-webgpu": ("webgpu", lambda device: compiled(lambda x: torch.linalg.qr(x)[1] + 1)),
    "eager": ("webgpu", lambda device: lambda x: (x + x).relu_()),
    "list": ("webgpu", lambda device: lambda x: torch._foreach_add([x, x], 1.0)),
    "copies": ("webgpu", lambda device: lambda x: x.cpu().to("webgpu").t().contiguous()),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_enter_no_folder_twice(case: str) -> None:
    device, make = CASES[case]
    run, x = make(device), torch.randn(4, 16).to(device)
    with torch.set_grad_enabled("training" in case):
        run(x)
        run(x)
        found = ways(lambda: run(x))
    assert any("runtime" in way for way in found), found
    assert not [" > ".join(way) for way in found if len(set(way)) < len(way)]
