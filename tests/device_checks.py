"""Runs a function on the CPU and on the device, and compares everything that can be seen of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_webgpu_compile import counters
from torch_webgpu_compile.fallbacks import FallbackWarning

DEVICE = "webgpu"


def compare(
    function: Callable[[str], Any],
    *,
    host: Iterable[str] | None = (),
    strides: bool = True,
    **tolerance: Any,
) -> Any:
    """``function(device)`` gives the same values, layouts, dtypes and errors on both devices.

    Args:
        host: ATen operators that are expected to run on the host; None for any.
        tolerance: for `torch.testing.assert_close`.
    """
    torch.manual_seed(0)
    wanted, error = _outcome(function, "cpu")
    torch.manual_seed(0)
    counters.reset()
    with warnings.catch_warnings():
        if host is None or host:
            warnings.simplefilter("ignore", FallbackWarning)
            warnings.filterwarnings("error", ".*please report this", FallbackWarning)
        got, other = _outcome(function, DEVICE)
    hosted = set(counters.fallbacks)
    if error is not None:
        assert type(other) is type(error), f"{other!r} instead of {error!r}"
        assert _first_line(other) == _first_line(error)
    else:
        if other is not None:
            raise other
        _same(got, wanted, strides, tolerance)
    if host is not None:
        assert hosted == set(host), f"on the host: {sorted(hosted)}"
    return got


def compare_eager_and_compiled(
    function: Callable[..., Any], *inputs: Tensor, **tolerance: Any
) -> None:
    """``function(*inputs)``, eagerly on the device and compiled as one graph, is as on the CPU."""
    compare(lambda device: function(*(t.to(device) for t in inputs)), **tolerance)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        got = torch.compile(function, backend="webgpu", fullgraph=True)(*inputs)
    torch.testing.assert_close(got, function(*inputs), equal_nan=True, **tolerance)


def numbers(*shape: int, device: str, seed: int = 0, grad: bool = True) -> Tensor:
    """Normally distributed numbers, a leaf that asks for gradients: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).to(device)
    return x.requires_grad_() if grad else x


def network(device: str) -> nn.Module:
    """A small network with the same parameters on every device."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)


def _outcome(function: Callable[[str], Any], device: str) -> tuple[Any, Exception | None]:
    try:
        return function(device), None
    except Exception as error:
        return None, error


def _first_line(error: Exception | None) -> str:
    text = str(error).replace(f"{DEVICE}:0", "cpu").replace("WEBGPU", "CPU")
    text = text.replace("torch.FloatTensor", "webgpuFloatType")
    return text.splitlines()[0] if text else ""


def _same(got: Any, wanted: Any, strides: bool, tolerance: dict[str, Any]) -> None:
    left, right = tree_leaves(got), tree_leaves(wanted)
    assert len(left) == len(right)
    for g, w in zip(left, right, strict=True):
        if not isinstance(w, Tensor):
            assert g == w or (g != g and w != w), (g, w)
            continue
        assert g.device.type == DEVICE, g.device
        torch.testing.assert_close(g.detach().cpu(), w.detach(), equal_nan=True, **tolerance)
        assert g.requires_grad == w.requires_grad
        assert not strides or w.numel() < 2 or g.stride() == w.stride(), (g.stride(), w.stride())
