"""Between the device and the host: numpy, DLPack, numbers, pinned memory, data loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_webgpu_compile.tensors import devices

# PyTorch's own calls give it that argument where there is CUDA.
pytestmark = [
    pytest.mark.rotates(3),
    pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.is_pinned"),
]
NUMPY = r"can't convert webgpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"


@pytest.fixture
def x() -> Tensor:
    return torch.arange(3.0, device="webgpu")


RAISES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "numpy": (lambda x: x.numpy(), TypeError, NUMPY),
    "asarray": (np.asarray, TypeError, NUMPY),
    "ufunc": (lambda x: np.add(x, 1), TypeError, NUMPY),
    "with a gradient": (lambda x: x.requires_grad_().numpy(), TypeError, NUMPY),
    "numpy from_dlpack": (np.from_dlpack, (RuntimeError, BufferError), "Unsupported device"),
    "memoryview": (memoryview, TypeError, "bytes-like object is required"),
    "item": (lambda x: x.item(), RuntimeError, "cannot be converted to Scalar"),
    "bool": (bool, RuntimeError, "more than one value is ambiguous"),
    "apply_": (lambda x: x.apply_(abs), TypeError, "only implemented on CPU"),
    "pin_memory": (lambda x: x.pin_memory(), RuntimeError, "only dense CPU tensors can be pinned"),
    "host + device": (
        lambda x: torch.ones(3) + x,
        RuntimeError,
        "tensors to be on the same device",
    ),
    "two devices": (lambda x: x * x.to("webgpu:1"), RuntimeError, "webgpu:1 and webgpu:0"),
    "module elsewhere": (torch.nn.Linear(3, 3), RuntimeError, "to be on the same device"),
}
WORKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "cpu().numpy()": (lambda x: x.cpu().numpy().tolist(), [0, 1, 2]),
    "numpy(force=True)": (lambda x: x.numpy(force=True).tolist(), [0, 1, 2]),
    "tolist": (lambda x: x.tolist(), [0, 1, 2]),
    "item": (lambda x: x[2].item(), 2),
    "number": (lambda x: (bool(x[1]), float(x[2]), int(x[2])), (True, 2.0, 2)),
    "list": (lambda x: [value.item() for value in x], [0, 1, 2]),
    "format": (lambda x: f"{x[1]:.2f}", "1.00"),
    "in": (lambda x: 2 in x, True),
    "scalar on the host": (lambda x: (x + torch.tensor(1.0)).tolist(), [1, 2, 3]),
    "indices on the host": (lambda x: x[torch.tensor([2, 0])].tolist(), [2, 0]),
    "copy_ to the host": (lambda x: torch.empty(3).copy_(x).tolist(), [0, 1, 2]),
    "copy_ from the host": (lambda x: x.copy_(torch.ones(3)).tolist(), [1, 1, 1]),
    "copy_ across": (lambda x: torch.empty(3, device="webgpu:1").copy_(x).tolist(), [0, 1, 2]),
    "to and fro": (lambda x: x.to("webgpu:1").to("webgpu:0").tolist(), [0, 1, 2]),
    "non_blocking": (lambda x: x.to("cpu", non_blocking=True).tolist(), [0, 1, 2]),
    "from_dlpack to the host": (lambda x: torch.from_dlpack(x, device="cpu").tolist(), [0, 1, 2]),
    "dlpack device": (lambda x: tuple(map(int, x.to("webgpu:1").__dlpack_device__())), (12, 1)),
    "pinned": (lambda x: x.is_pinned(), False),
    "type": (lambda x: (x.type(), x.type("torch.FloatTensor").device.type), None),
}


@pytest.mark.parametrize("name", RAISES)
def test_refusals(name: str, x: Tensor) -> None:
    call, error, message = RAISES[name]
    with pytest.raises(error, match=message):
        call(x)


@pytest.mark.parametrize("name", WORKS)
def test_access(name: str, x: Tensor) -> None:
    call, expected = WORKS[name]
    if expected is None:
        expected = "torch.webgpu.FloatTensor", "cpu"
    assert call(x) == expected


SMALL_COPIES: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "item": (lambda here, _: here.item(), 67),
    "number": (lambda here, _: float(here), 67),
    "cpu": (lambda here, _: here.cpu(), 67),
    "tolist": (lambda here, _: here.tolist(), 67),
    "copy_": (lambda here, host: here.copy_(host), 31),
    "to": (lambda _, host: host.to("webgpu"), 50),
}


@pytest.mark.parametrize("name", SMALL_COPIES)
def test_small_copies_take_few_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts functions of this package. Each time there is one submit at most, no new buffer."""
    call, most = SMALL_COPIES[name]
    host, here = torch.ones(1), torch.ones(1, device="webgpu")
    call(here, host)
    torch.webgpu.synchronize()
    backend = devices.get_device(0).backend
    create, made = backend.create_buffer, []

    def count_buffers(nbytes: int, usage: int) -> Any:
        made.append(nbytes)
        return create(nbytes, usage)

    monkeypatch.setattr(backend, "create_buffer", count_buffers)
    before = backend.submissions
    for _ in range(100):
        call(here, host)
    assert not made
    assert backend.submissions - before <= 100
    count = 0

    def count_steps(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "torch_webgpu_compile" in frame.f_code.co_filename

    sys.setprofile(count_steps)
    try:
        call(here, host)
    finally:
        sys.setprofile(None)
    assert 0 < count <= most


def test_addresses_tell_tensors_apart(x: Tensor) -> None:
    assert x.data_ptr() != x.clone().data_ptr()
    assert x[1:].data_ptr() - x.data_ptr() == 4
    assert x.untyped_storage().data_ptr() == x.data_ptr()


def test_capsules_keep_the_memory(x: Tensor) -> None:
    capsule = torch.utils.dlpack.to_dlpack(x.clone())
    assert torch.from_dlpack(capsule).tolist() == [0, 1, 2]


def test_dlpack_shares_the_memory() -> None:
    """Also where an operation in place computes into other memory."""
    x = torch.arange(6.0, device="webgpu").reshape(2, 3)
    part = torch.from_dlpack(x.t()[1:])
    assert (part.device, part.stride()) == (x.device, (1, 3))
    part.mul_(10)
    x.add_(1)
    assert x.tolist() == [[1, 11, 21], [4, 41, 51]]
    assert part.tolist() == [[11, 41], [21, 51]]
    whole = torch.from_dlpack(x)
    del x
    assert whole.exp_().shape == (2, 3)
    assert torch.from_dlpack(whole[:0]).shape == (0, 3)


def test_from_numpy() -> None:
    array = np.arange(3, dtype=np.float32)
    assert torch.from_numpy(array).to("webgpu").tolist() == [0, 1, 2]
    assert torch.as_tensor(array, device="webgpu:1").device == torch.device("webgpu:1")


def test_gradients_cross_devices() -> None:
    x = torch.ones(2, device="webgpu:1", requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    z = (x * 2).to("webgpu:0") + y.to("webgpu:0") * 3
    z.cpu().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.device == x.device
    assert x.grad.tolist() == [2, 2]
    assert y.grad.tolist() == [3, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is pinned for CUDA there")
def test_pinning_costs_nothing() -> None:
    x = torch.ones(3)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.data_ptr() == x.data_ptr()
    assert pinned.pin_memory() is pinned
    assert x.requires_grad_().pin_memory().requires_grad


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(workers: int) -> None:
    torch.webgpu.init()  # type: ignore[attr-defined]
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = DataLoader(
        data,
        batch_size=4,
        pin_memory=True,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    batches = list(loader)
    assert all(part.is_pinned() for batch in batches for part in batch)
    here = [batch[0].to("webgpu", non_blocking=True).sum().item() for batch in batches]
    assert here == [6, 22]
