"""Devices of both providers, for tests of the runtime.

Dawn takes no driver that Debian 12 has for machines without a GPU. Where that is needed,
`scripts/setup` puts one that it takes, SwiftShader, beside the environment's packages; only Dawn
gets to see it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.codegen.tilings.units import InUnits
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime.device import Device, device_for, list_adapters, open_device
from torch_webgpu_compile.target import Target

PROVIDERS = ("wgpu", "wgpudawn")
_SWIFTSHADER = Path(sys.prefix) / "swiftshader" / "vk_swiftshader_icd.json"


def environment(provider: str) -> Mapping[str, str]:
    """The variables of a program that is to run on a provider."""
    variables = {**os.environ, "TORCH_WEBGPU_PROVIDER": provider}
    if provider == "wgpudawn" and _SWIFTSHADER.exists():
        variables["VK_DRIVER_FILES"] = str(_SWIFTSHADER)
    return variables


@contextmanager
def _driver(provider: str) -> Iterator[None]:
    before = os.environ.get("VK_DRIVER_FILES")
    os.environ.update({k: v for k, v in environment(provider).items() if k == "VK_DRIVER_FILES"})
    try:
        yield
    finally:
        os.environ.pop("VK_DRIVER_FILES", None)
        if before is not None:
            os.environ["VK_DRIVER_FILES"] = before


@cache
def has_provider(provider: str) -> bool:
    """Whether it is installed and has an adapter."""
    if find_spec(provider) is None:
        return False
    with _driver(provider):
        return bool(list_adapters(provider))


def require(provider: str) -> str:
    """The provider; skips the test where there is none."""
    if not has_provider(provider):
        pytest.skip(f"{provider} is not installed or accepts no adapter of this machine")
    return provider


def device_of(provider: str) -> Device:
    """The device that every test of a provider has; skips the test where there is none."""
    return open_device(require(provider))


def device_in_use() -> Device:
    """The device that models have, of the provider that the environment names."""
    return device_for(from_environment())


def lose(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels are made for a GPU without a feature."""
    device = device_in_use()
    target = replace(device.target, features=device.target.features - {feature})
    monkeypatch.setattr(device, "target", target)


def target_for_units(tiling: InUnits, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The GPU's target; where it has no such matrix units, invocations compute their parts."""
    target = device_in_use().target
    has_units = tiling.config in target.subgroup_matrix_configs
    if not has_units or tiling.lanes != target.subgroup_size:
        lose("chromium-experimental-subgroup-matrix", monkeypatch)
    return device_in_use().target


def has_float64() -> bool:
    """Whether float64 is computed on the device; elsewhere it runs on the host, as it has to."""
    return device_in_use().target.supports(dtypes.float64)


def require_float64() -> None:
    """Skips a test of what runs on the host, instead of on the device, without float64."""
    if not has_float64():
        pytest.skip("this adapter has no shader-f64")


def require_float16() -> None:
    """Skips a test of kernels that compute in float16, not only store it."""
    if not device_in_use().target.has_float16:
        pytest.skip("this adapter has no shader-f16")


def require_quick_compiler() -> None:
    """Skips a test of unusual tilings whose many branches SwiftShader compiles for minutes."""
    if "SwiftShader" in device_in_use().target.name:
        pytest.skip("SwiftShader needs minutes and gigabytes to compile many branches")


def require_bindings(count: int) -> None:
    """Skips the test where a kernel may not have so many buffers: there would be more of them."""
    if device_in_use().target.max_storage_buffers < count:
        pytest.skip(f"kernels of this adapter have less than {count} bindings")
