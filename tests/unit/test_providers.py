"""Which provider ``auto`` means, and what the two tables of differences say."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_webgpu_compile.errors import AdapterError
from torch_webgpu_compile.runtime import adapters, dawn
from torch_webgpu_compile.runtime.adapters import AdapterInfo, choose_provider
from torch_webgpu_compile.runtime.dawn import with_extensions
from torch_webgpu_compile.target import MatrixConfig, Target

ROOT = Path(__file__).parents[2]
UNITS: MatrixConfig = ("f16", "f32", 16, 16, 16)
LIMITS = {
    "max-storage-buffer-binding-size": 1 << 30,
    "max-buffer-size": 1 << 30,
    "max-storage-buffers-per-shader-stage": 10,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-storage-size": 1 << 15,
    "max-compute-workgroups-per-dimension": 65535,
}
PLAIN = AdapterInfo(0, "A GPU", "", "Vulkan", "discrete", "", frozenset(), LIMITS)
WITH_UNITS = replace(PLAIN, subgroup_matrix_configs=(UNITS,))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[AdapterInfo]]:
    lists = {"wgpu": [PLAIN], "wgpudawn": [WITH_UNITS]}
    monkeypatch.setattr(
        adapters, "_adapters", lambda provider: [(info, None) for info in lists[provider]]
    )
    monkeypatch.setattr(adapters, "is_installed", lists.__contains__)
    return lists


def test_matrix_units_with_kernels_decide(found: dict[str, list[AdapterInfo]]) -> None:
    assert choose_provider("auto", "") == "wgpudawn"
    assert choose_provider("auto", "a gpu") == "wgpudawn"
    assert choose_provider("wgpu", "") == "wgpu"
    assert choose_provider("wgpudawn", "") == "wgpudawn"
    assert choose_provider("auto", "0") == "wgpu"  # a place in wgpu's list
    found["wgpudawn"] = [replace(WITH_UNITS, name="another GPU")]
    assert choose_provider("auto", "") == "wgpu"
    with pytest.raises(AdapterError, match="no adapter matches"):
        choose_provider("auto", "no such GPU")
    del found["wgpudawn"]
    assert choose_provider("auto", "") == "wgpu"  # not installed


@pytest.mark.parametrize("done_after", [0, 3, 10])
def test_a_wait_on_dawn_is_awake_before_it_sleeps(done_after: int) -> None:
    """Awake, it asks with a timeout of 0; asleep, it comes back now and then, for Ctrl-C."""
    info = SimpleNamespace(future=None, completed=False)
    timeouts: list[int] = []

    def wait_any(_instance: object, _count: int, _info: object, nanoseconds: int) -> int:
        time.sleep(1e-3)
        timeouts.append(nanoseconds)
        info.completed = len(timeouts) > done_after
        return 1

    lib = SimpleNamespace(wgpuInstanceWaitAny=wait_any, WGPUWaitStatus_Error=3)
    ffi = SimpleNamespace(new=lambda _: info)
    assert dawn._wait_any(ffi, lib, None, None, awake_seconds=4.5e-3)
    assert len(timeouts) == done_after + 1
    awake = timeouts.count(0)
    assert timeouts == [0] * awake + [dawn._SLICE] * (done_after + 1 - awake)
    assert awake == 1 if done_after == 0 else 1 <= awake <= 5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others have no Mesa")
def test_triton_is_loaded_before_any_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After Mesa's OpenGL driver, loading it ends the process."""
    (tmp_path / "triton.py").write_text("raise ImportError('broken, which is nobody's concern')")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    order = []
    original = adapters.import_module

    def import_module(name: str) -> object:
        order.append(name)
        return original(name)

    def list_adapters() -> list[object]:
        order.append("drivers")
        return []

    monkeypatch.setattr(adapters, "_found", {})
    monkeypatch.setattr(adapters, "import_module", import_module)
    monkeypatch.setattr(adapters._LIBRARIES["wgpu"], "list_adapters", list_adapters)
    assert adapters.list_adapters("wgpu") == []
    assert order == ["wgpu", "triton", "drivers"]


def test_a_missing_provider_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpudawn", None)
    monkeypatch.setattr(adapters, "_found", {})
    with pytest.raises(AdapterError, match=r"pip install wgpudawn==[\d.]+`") as raised:
        adapters.list_adapters("wgpudawn")
    pinned = re.findall(r"wgpudawn==[\d.]+", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(pinned) == 2
    assert all(requirement in str(raised.value) for requirement in pinned)


def test_matrix_units_are_a_part_of_the_target() -> None:
    assert WITH_UNITS.target().subgroup_matrix_configs == (UNITS,)
    assert WITH_UNITS.target().text != PLAIN.target().text
    assert Target().subgroup_matrix_configs == ()


@pytest.mark.parametrize(
    ("wgsl", "declared"),
    [
        ("let subgroup = 1;", ""),
        ("let x = subgroupAdd(y);", "enable subgroups; "),
        ("fn main(@builtin(subgroup_size) n: u32) {}", "enable subgroups; "),
        (
            "var m: subgroup_matrix_left<f16, 8, 8>;",
            "enable chromium_experimental_subgroup_matrix; "
            "diagnostic(off, chromium.subgroup_matrix_uniformity); ",
        ),
    ],
)
def test_dawn_wants_extensions_declared(wgsl: str, declared: str) -> None:
    assert with_extensions(wgsl) == declared + wgsl
