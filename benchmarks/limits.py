"""What the machine can do at best, measured with the vendor's own software."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .timing import seconds_per_call


def torch_device() -> str:
    """Where PyTorch itself is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Waits for PyTorch's device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wait_of(device: str) -> Callable[[], None]:
    """What waits for a device; nothing has to wait for the CPU."""
    if device == "cpu":
        return lambda: None
    found: Callable[[], None] = getattr(torch, device).synchronize
    return found


def use_full_f32() -> None:
    """f32 means f32: no TF32, in products and in convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def copy_bytes_per_second(nbytes: int) -> float:
    """Bytes read plus written by a device-to-device copy of ``nbytes`` bytes."""
    source = torch.ones(nbytes // 4, device=torch_device())
    destination = torch.empty_like(source)
    return 2 * nbytes / seconds_per_call(lambda: destination.copy_(source), synchronize)


def matmul_flops_per_second(n: int) -> float:
    """The vendor library's f32 matrix product of n×n by n×n."""
    use_full_f32()
    a, b = (torch.randn(n, n, device=torch_device()) for _ in range(2))
    return 2 * n**3 / seconds_per_call(lambda: torch.matmul(a, b), synchronize)


def measure(small: bool) -> dict[str, float]:
    """Limits by name, in bytes and operations per second."""
    return {
        "copy_bytes_per_second": copy_bytes_per_second((4 if small else 1024) << 20),
        "matmul_flops_per_second": matmul_flops_per_second(512 if small else 4096),
    }
