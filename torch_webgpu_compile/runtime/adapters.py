"""Adapters: listing them, describing them as data, choosing one."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import AdapterError, OptionError
from ..options import AUTO
from ..target import MATRIX_KERNELS, MatrixConfig, Target
from . import dawn, wgpu_native
from .library import Library

_LIBRARIES: dict[str, Any] = {"wgpu": wgpu_native, "wgpudawn": dawn}
REQUIREMENTS = {"wgpu": "'wgpu>=0.32'", "wgpudawn": "wgpudawn==0.32.0.4"}  # as in pyproject.toml

WANTED_FEATURES = (
    "shader-f16",
    "shader-int64",
    "shader-f64",
    "shader-float32-atomic",
    "subgroup",
    "subgroups",  # the standard's name, which Dawn uses
    "subgroup-barrier",
    "immediates",
    "timestamp-query",
    "timestamp-query-inside-passes",
    "timestamp-query-inside-encoders",
    "chromium-experimental-subgroup-matrix",
)

_VENDORS = {
    0x1002: "amd",
    0x1010: "imagination",
    0x106B: "apple",
    0x10DE: "nvidia",
    0x13B5: "arm",
    0x1414: "microsoft",
    0x5143: "qualcomm",
    0x8086: "intel",
    0x10005: "mesa",
}
_SUBGROUP_SIZES = {0x10DE: (32, 32), 0x106B: (32, 32)}  # NVIDIA, Apple: the same on all GPUs
_BACKEND_ORDER = {"Vulkan": 0, "Metal": 0, "D3D12": 0, "OpenGL": 2, "OpenGLES": 2}
_TYPE_ORDER = {"discrete": 0, "integrated": 1, "unknown": 2, "cpu": 3}

INSTALL_HINT = (
    "install a Vulkan driver: on Debian or Ubuntu `apt-get install mesa-vulkan-drivers` (software "
    "and Intel/AMD GPUs), otherwise the Vulkan package of the GPU's driver; "
    "`python -m torch_webgpu_compile doctor` shows what is found"
)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter as data.

    Attributes:
        index: position in `list_adapters`, best first.
        name: the GPU's name.
        vendor: lower-case vendor name, "" when unknown.
        backend: ``Vulkan``, ``Metal``, ``D3D12`` or ``OpenGL``.
        type: ``discrete``, ``integrated``, ``cpu`` or ``unknown``.
        driver: the driver's description.
        features: WebGPU feature names.
        limits: WebGPU limits by name with dashes, e.g. ``max-buffer-size``.
        subgroup_sizes: smallest and largest subgroup size, (0, 0) without subgroups.
        subgroup_matrix_configs: of its matrix units, as far as the provider offers them.
    """

    index: int
    name: str
    vendor: str
    backend: str
    type: str
    driver: str
    features: frozenset[str]
    limits: Mapping[str, int] = field(repr=False)
    subgroup_sizes: tuple[int, int] = (0, 0)
    subgroup_matrix_configs: tuple[MatrixConfig, ...] = ()

    @property
    def requested_features(self) -> tuple[str, ...]:
        """The features that a device is created with."""
        return tuple(name for name in WANTED_FEATURES if name in self.features)

    def target(self) -> Target:
        """The limits and features that the compiler sees."""
        limits = self.limits
        features = set(self.requested_features)
        if "subgroups" in features:
            features.add("subgroup")
        return Target(
            name=self.name,
            vendor=self.vendor,
            software=self.type == "cpu",
            backend=self.backend,
            features=frozenset(features),
            max_binding_nbytes=limits["max-storage-buffer-binding-size"] & ~3,
            max_buffer_nbytes=limits["max-buffer-size"] & ~15,
            max_storage_buffers=min(
                limits["max-storage-buffers-per-shader-stage"],
                limits.get("max-bindings-per-bind-group", _BINDINGS) - 1,  # and the parameters
                _BINDINGS - 1,
            ),
            max_workgroup_invocations=limits["max-compute-invocations-per-workgroup"],
            max_workgroup_nbytes=limits["max-compute-workgroup-storage-size"],
            max_grid=limits["max-compute-workgroups-per-dimension"],
            subgroup_sizes=self.subgroup_sizes if "subgroup" in features else (0, 0),
            subgroup_matrix_configs=self.subgroup_matrix_configs,
            max_loop_iterations=_LOOP_ITERATIONS if "llvmpipe" in self.name else 0,
            exp_keeps_nan="SwiftShader" not in self.name,
            keeps_subnormal_halves="NVIDIA" in self.name,  # an H100 and an H200 did
        )


# Mesa's llvmpipe and lavapipe count the iterations of all loops of an invocation, nested ones too,
# and end each loop after one more when so many are done. Source: LP_MAX_TGSI_LOOP_ITERATIONS.
_LOOP_ITERATIONS = 65535

# Of a bind group, where the adapter does not say: the default of WebGPU.
_BINDINGS = 1000

_lock = threading.RLock()
_found: dict[str, list[tuple[AdapterInfo, Any]]] = {}


def provider_module(provider: str) -> Any:
    """The module with wgpu-py's API. Raises OptionError or AdapterError (not installed)."""
    if provider not in _LIBRARIES:
        raise OptionError(f"provider {provider!r} is unknown; use one of {', '.join(_LIBRARIES)}")
    try:
        return import_module(provider)
    except ImportError as error:
        raise AdapterError(
            f"provider {provider!r} cannot be imported ({error}); run "
            f"`pip install {REQUIREMENTS[provider]}`"
        ) from error


def is_installed(provider: str) -> bool:
    """Whether a provider's package is there; it is not imported."""
    return find_spec(provider) is not None


def choose_provider(provider: str, adapter: str = "") -> str:
    """The provider that is meant by ``auto``; any other is itself.

    That is wgpu, unless Dawn is installed and reaches matrix units of the same GPU, which wgpu does
    not, in a configuration for which there are kernels.

    Args:
        adapter: what `find_adapter` is asked for. A number is a place in wgpu's list.

    Raises:
        AdapterError: no adapter of wgpu matches.
    """
    if provider != AUTO:
        return provider
    if adapter.isdecimal() or not is_installed("wgpudawn"):
        return "wgpu"
    found = find_adapter("wgpu", adapter)[0]
    if found.type == "cpu":  # which has none; Dawn may warn of it
        return "wgpu"
    useful = set().union(*MATRIX_KERNELS.values())
    for info in list_adapters("wgpudawn"):
        if info.name == found.name and useful & set(info.subgroup_matrix_configs):
            return "wgpudawn"
    return "wgpu"


def list_adapters(provider: str = "wgpu") -> list[AdapterInfo]:
    """All adapters, best first: Vulkan, Metal and D3D12 before OpenGL; discrete before integrated
    before software.

    Raises:
        OptionError: the provider has an unknown name.
        AdapterError: the provider is not installed.
    """
    return [info for info, _ in _adapters(provider)]


def find_adapter(provider: str, wanted: int | str | None) -> tuple[AdapterInfo, Any]:
    """The adapter for an index, a part of a name, or None (the best), with the provider's object.

    Raises:
        AdapterError: there is none; the message says what to install, or what there is.
    """
    found = _adapters(provider)
    if not found:
        raise AdapterError(f"no WebGPU adapter was found by {provider}: {INSTALL_HINT}")
    if wanted is None or wanted == "":
        return found[0]
    if isinstance(wanted, str) and not wanted.isdigit():
        for entry in found:
            if wanted.lower() in entry[0].name.lower():
                return entry
    elif 0 <= int(wanted) < len(found):
        return found[int(wanted)]
    names = "; ".join(f"{info.index}: {info.name} ({info.backend})" for info, _ in found)
    raise AdapterError(f"no adapter matches {wanted!r}; there are {names}")


def open_library(
    provider: str,
    adapter: Any,
    features: Sequence[str],
    limits: Mapping[str, int],
    checked: bool,
    cache: str | None = None,
) -> Library:
    """A new device of a provider's adapter.

    Args:
        adapter: the object of wgpu-py's API.
        features: their names, of those that the adapter has.
        limits: all that the adapter has.
        checked: shaders will be compiled with bounds checks.
        cache: folder that a library may keep compiled shaders in.

    Raises:
        Exception: the library's own, if the adapter gives no device.
    """
    library: Library = _LIBRARIES[provider].open_library(adapter, features, limits, checked, cache)
    return library


def _adapters(provider: str) -> list[tuple[AdapterInfo, Any]]:
    with _lock:
        if provider not in _found:
            provider_module(provider)
            _load_triton()
            with _quiet_display():
                objects = _LIBRARIES[provider].list_adapters()
            described = sorted(
                ((_describe(provider, adapter), adapter) for adapter in objects),
                key=lambda pair: _rank(pair[0]),
            )
            listed = [(replace(info, index=i), a) for i, (info, a) in enumerate(described)]
            if not listed:
                return []  # look again next time: a driver may be installed meanwhile
            _found[provider] = listed
        return _found[provider]


def _load_triton() -> None:
    """Loads Triton's compiler before any driver, where there is PyTorch, which may load it later.

    Mesa 22's OpenGL driver, which a provider loads while it looks for adapters, makes the symbols
    of its LLVM global. Triton's library (3.7) exports those of its own LLVM: loaded later, it binds
    to Mesa's, and the process ends with a segmentation fault. The other order is harmless.
    """
    if "torch" in sys.modules and sys.platform.startswith("linux") and find_spec("triton"):
        with contextlib.suppress(Exception):  # one that is broken is not this package's concern
            import_module("triton")


def _rank(info: AdapterInfo) -> tuple[int, int]:
    return _BACKEND_ORDER.get(info.backend, 1), _TYPE_ORDER.get(info.type, 2)


def _describe(provider: str, adapter: Any) -> AdapterInfo:
    info = adapter.info
    kind = str(info["adapter_type"]).lower()
    vendor = _VENDORS.get(int(info["vendor_id"]), str(info["vendor"]).lower())
    features = frozenset(adapter.features)
    sizes = (0, 0)
    if features & {"subgroup", "subgroups"}:
        sizes = _subgroup_sizes(provider, adapter)
    return AdapterInfo(
        index=-1,
        name=str(info["device"]),
        vendor=vendor,
        backend=str(info["backend_type"]),
        type=next((name for name in _TYPE_ORDER if name in kind), "unknown"),
        driver=str(info["description"]),
        features=features,
        limits=dict(adapter.limits),
        subgroup_sizes=sizes,
        subgroup_matrix_configs=_LIBRARIES[provider].subgroup_matrix_configs(adapter),
    )


def _subgroup_sizes(provider: str, adapter: Any) -> tuple[int, int]:
    ffi, lib = _LIBRARIES[provider].bindings()
    info = ffi.new("WGPUAdapterInfo *")  # wgpu-py 0.32 reads a misspelt field: always (4, 128)
    lib.wgpuAdapterGetInfo(adapter._internal, info)
    smallest, largest = int(info.subgroupMinSize), int(info.subgroupMaxSize)
    lib.wgpuAdapterInfoFreeMembers(info[0])
    # wgpu-native 29 leaves both 0. The WebGPU spec (GPUAdapterInfo) then says 4 and 128.
    known = _SUBGROUP_SIZES.get(int(adapter.info["vendor_id"]), (4, 128))
    return smallest or known[0], largest or known[1]


@contextlib.contextmanager
def _quiet_display() -> Iterator[None]:
    """Stops the OpenGL driver from printing that XDG_RUNTIME_DIR is not set."""
    if not sys.platform.startswith("linux") or "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        os.environ.pop("XDG_RUNTIME_DIR", None)
