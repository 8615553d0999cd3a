"""``torch.UntypedStorage`` and ``torch.TypedStorage`` on the device: none of it crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_webgpu_compile.errors import DeviceError

# A warning of PyTorch's, given once per process by whatever comes first.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

Storage: Any = torch.UntypedStorage
BYTES = [0, 0, 128, 63, 0, 0, 0, 64]  # float32 1 and 2


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.tensor([1.0, 2.0], device="webgpu")


WORKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "tolist": (lambda s: s.tolist(), BYTES),
    "clone": (lambda s: s.clone().tolist(), BYTES),
    "copy": (lambda s: copy.copy(s).tolist(), BYTES),
    "deepcopy": (lambda s: copy.deepcopy([s, s])[1].tolist(), BYTES),
    "cpu": (lambda s: s.cpu().tolist(), BYTES),
    "to cpu": (lambda s: s.to(device="cpu").tolist(), BYTES),
    "to webgpu:1": (lambda s: s.to(device="webgpu:1").cpu().tolist(), BYTES),
    "webgpu": (lambda s: s.webgpu() is s, True),
    "upload": (lambda s: s.cpu().webgpu(1).tolist(), BYTES),
    "copy_ to the host": (lambda s: Storage(8).copy_(s).tolist(), BYTES),
    "copy_ from the host": (lambda s: s.copy_(Storage([7] * 8)).tolist(), [7] * 8),
    "fill_": (lambda s: s.fill_(3).tolist(), [3] * 8),
    "index": (lambda s: s[3], 63),
    "slice": (lambda s: s[2:4].tolist(), [128, 63]),
    "slice of a slice": (lambda s: s[2:8][4:6].clone().tolist(), [0, 64]),
    "set an item": (lambda s: (s.__setitem__(0, 9), s[0])[1], 9),
    "set a slice": (lambda s: (s.__setitem__(slice(0, 4), 5), s.tolist())[1], [5] * 4 + BYTES[4:]),
    "sizes": (lambda s: (s.nbytes(), s.size(), len(s), s.element_size()), (8, 8, 8, 1)),
    "device": (lambda s: (s.device, s.get_device()), (torch.device("webgpu:0"), 0)),
    "kinds": (lambda s: (s.is_webgpu, s.is_cuda, s.is_sparse), (True, False, False)),
    "sharing": (lambda s: (s.share_memory_() is s, s.is_shared()), (True, False)),
    "pinning": (lambda s: s.is_pinned(), False),
    "resizable": (lambda s: s.resizable(), False),
    "new": (lambda s: (s.new().nbytes(), s.new().device.type), (0, "webgpu")),
    "byteswap": (lambda s: (s.byteswap(torch.float32), s.tolist()[:4])[1], [63, 128, 0, 0]),
    "repr": (lambda s: "device=webgpu:0) of size 8" in repr(s), True),
    "cast": (lambda s: s.short().tolist(), BYTES),
    "of a sequence": (lambda s: Storage([1, 2], device="webgpu:1").tolist(), [1, 2]),
    "of a size": (lambda s: Storage(3, device="webgpu").nbytes(), 3),
    "empty": (lambda s: Storage(device="webgpu").tolist(), []),
    "shared": (lambda s: Storage._new_shared(3, device="webgpu").nbytes(), 3),
}
RAISES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "resize_": (lambda s: s.resize_(16), NotImplementedError, r"use tensor\.resize_\(\)"),
    "pin_memory": (lambda s: s.pin_memory(), TypeError, "only CPU memory can be pinned"),
    "file descriptor": (lambda s: s._share_fd_cpu_(), RuntimeError, r"send tensor\.cpu\(\)"),
    "file name": (lambda s: s._share_filename_cpu_(), RuntimeError, r"send tensor\.cpu\(\)"),
    "copy_ of another size": (lambda s: s.copy_(Storage(4)), RuntimeError, "size does not match"),
    "of no device": (lambda s: Storage(4, device="webgpu:9"), RuntimeError, "does not exist"),
}


def test_slices_at_many_offsets() -> None:
    """The copy's graph becomes symbolic; its offsets are those of slices of slices, too."""
    values = torch.arange(64, dtype=torch.uint8)
    storage = values.to("webgpu").untyped_storage()
    for start, first, count in ((0, 0, 8), (2, 4, 2), (3, 5, 7), (1, 9, 12), (7, 2, 3), (5, 4, 2)):
        found = storage[start:60][first : first + count].clone().tolist()
        assert found == values[start + first :][:count].tolist()


@pytest.mark.parametrize("name", WORKS)
def test_untyped(name: str, tensor: torch.Tensor) -> None:
    call, expected = WORKS[name]
    assert call(tensor.untyped_storage()) == expected


@pytest.mark.parametrize("name", RAISES)
def test_refusals(name: str, tensor: torch.Tensor) -> None:
    call, error, message = RAISES[name]
    with pytest.raises(error, match=message):
        call(tensor.untyped_storage())


def test_slices_outlive_their_storage(tensor: torch.Tensor) -> None:
    part = tensor.clone().untyped_storage()[2:4]
    assert part.tolist() == [128, 63]


def test_storages_are_shared_with_tensors(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    assert tensor.untyped_storage() is storage
    storage.fill_(0)
    assert tensor.tolist() == [0, 0]
    other = torch.empty(0, device="webgpu").set_(storage, 1, (1,), (1,))  # type: ignore[call-overload]
    other.fill_(5)
    assert tensor.tolist() == [0, 5]


def test_set_refuses_storages_elsewhere(tensor: torch.Tensor) -> None:
    for device in ("cpu", "webgpu:1"):
        with pytest.raises(RuntimeError, match="different device"):
            tensor.set_(Storage(8, device=device))


def test_resize_of_tensors(tensor: torch.Tensor) -> None:
    tensor.resize_(3)
    assert tensor[:2].tolist() == [1, 2]
    assert tensor.untyped_storage().nbytes() == 12


def test_a_storage_is_emptied_and_filled_again() -> None:
    """As FSDP does with gathered weights: views and what autograd saved see the new contents."""
    values = torch.arange(1 << 16, dtype=torch.float32, device="webgpu")
    part, storage = values[4:8], values.untyped_storage()
    nbytes, before = storage.nbytes(), torch.webgpu.memory_allocated()
    assert storage.resize_(0) is storage
    assert len(storage) == storage.nbytes() == storage.size() == 0
    assert torch.webgpu.memory_allocated() <= before - nbytes
    for use in (part.clone, lambda: part.fill_(1), lambda: values.copy_(torch.ones(1 << 16))):
        with pytest.raises(DeviceError, match=r"given back by resize_\(0\)"):
            use()
    storage.resize_(nbytes)
    assert storage.size() == nbytes
    values.fill_(3)
    assert part.tolist() == [3] * 4


def test_a_smaller_storage_keeps_its_contents() -> None:
    values = torch.arange(4, dtype=torch.float32, device="webgpu")
    storage = values.untyped_storage()
    assert storage.resize_(8).size() == 8
    assert storage.resize_(16).size() == 16
    assert values.tolist() == [0, 1, 2, 3]


def test_typed(tensor: torch.Tensor) -> None:
    storage: Any = tensor.storage()
    assert storage.tolist() == [1, 2]
    assert storage[1] == 2
    assert storage.is_webgpu
    assert storage.clone().tolist() == storage.cpu().tolist() == [1, 2]
    assert storage.webgpu(1).device == torch.device("webgpu:1")
    typed: Any = torch.TypedStorage
    assert typed(3, dtype=torch.float16, device="webgpu").nbytes() == 6
    assert typed([1.0, 2.0], dtype=torch.float32, device="webgpu").tolist() == [1, 2]
    with pytest.raises(NotImplementedError, match="resize_"):
        storage.resize_(4)


def test_other_devices_are_left_alone() -> None:
    storage = Storage(4)
    assert storage.fill_(1).resize_(2).tolist() == [1, 1]
    assert storage.new().device.type == "cpu"
    assert Storage(4, device="meta").device.type == "meta"
    assert Storage(4).share_memory_().is_shared()


def test_types_of_storages_are_named_by_device_and_dtype(tensor):
    kind = tensor.storage_type()
    assert kind is torch.webgpu.FloatStorage
    assert tensor.storage().type() == "torch.webgpu.FloatStorage"
    assert isinstance(tensor.storage(), kind)
    assert not isinstance(tensor.cpu().storage(), kind)
    assert not isinstance(tensor.storage(), torch.webgpu.LongStorage)
    made = kind([1, 2])
    assert made.device.type == "webgpu"
    assert made.tolist() == [1, 2]
    with pytest.raises(AttributeError, match="NoStorage"):
        _ = torch.webgpu.NoStorage
