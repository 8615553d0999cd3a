"""Dawn, as the package wgpudawn brings it: see `library.Library`.

wgpudawn has wgpu-py's API, of which only the listing of adapters is used: devices are opened, and
used, through ``webgpu.h``.

With the toggle ``enable_immediate_error_handling`` an error is reported inside the failing call,
as wgpu-native does; without it, at some later call of any thread. With the feature
``implicit-device-synchronization`` a device may be used by several threads; waiting is done
without its lock.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..errors import DeviceError
from ..target import MatrixConfig
from .dawn_blobs import DAWN_VERSION, BlobCache, descriptor
from .failures import cause_of
from .interface import Handle
from .library import AWAKE_SECONDS, Report
from .process_life import process
from .signals import Signal

_BACKEND = "wgpudawn.backends.dawn"
_SLICE = 100_000_000  # ns; a wait goes back to Python so often, for Ctrl-C

# Of all adapters: subgroup matrices are not safe in Dawn's eyes, and f16 is off on NVIDIA's GPUs
# as some of Chrome's users had trouble with it.
_INSTANCE_TOGGLES = ("allow_unsafe_apis", "vulkan_enable_f16_on_nvidia")
# Toggles of a device: whether each is on.
_TOGGLES = {
    "enable_immediate_error_handling": True,
    "timestamp_quantization": False,  # to 0.1 ms
    # Memory would be filled with zeros before its first use, or looked at whether it was used: no
    # kernel relies on that, as memory is lent again with whatever is in it.
    "lazy_clear_resource_on_first_use": False,
    # Not `skip_validation`: of 1.2 µs per dispatch it saves 0.15, and a dispatch that is too large
    # or a kernel whose bindings do not fit its layout would be a wrong result instead of an error.
}
# Of one whose kernels are not checked: what is proved by this package's compiler, or costs time at
# every compilation.
_UNCHECKED_TOGGLES = {
    "disable_robustness": True,
    "disable_workgroup_init": True,
    "enable_spirv_validation": False,
    "blob_cache_hash_validation": False,
}

_COMPONENTS = ("f32", "f16", "u32", "i32", "u8", "i8")  # webgpu.h, WGPUSubgroupMatrixComponentType

_EXTENSIONS = {
    "subgroups": re.compile(r"\bsubgroup(?:[A-Z]\w*|_size|_invocation_id)\b"),
    "chromium_experimental_subgroup_matrix": re.compile(r"\bsubgroup_matrix_|\bsubgroupMatrix"),
}
# Which subgroup an invocation is in is not uniform in the eyes of Tint, where it is counted.
_DIAGNOSTICS = {
    "chromium_experimental_subgroup_matrix": (
        "diagnostic(off, chromium.subgroup_matrix_uniformity); "
    )
}

_kept: list[Any] = []  # callbacks, which C may call until the process ends


def _instance() -> Any:
    return import_module(f"{_BACKEND}._helpers").get_wgpu_instance()


def list_adapters() -> list[Any]:
    """All adapters, as objects of wgpudawn."""
    extras = import_module(f"{_BACKEND}.extras")
    # Where the program has opened Dawn's instance before, its toggles hold, and features may lack.
    with suppress(RuntimeError):
        extras.set_instance_extras(enable_toggles=_INSTANCE_TOGGLES)
    found: list[Any] = import_module("wgpudawn").gpu.enumerate_adapters_sync()
    return found


def _fresh(adapter: Any) -> Any:
    """The same adapter again: one gives only one device, as the WebGPU spec says."""
    for found in import_module("wgpudawn").gpu.enumerate_adapters_sync():
        if dict(found.info) == dict(adapter.info):
            return found
    return adapter


def bindings() -> tuple[Any, Any]:
    """(ffi, lib)."""
    module = import_module("wgpudawn._lib")
    return module.ffi, module.lib


def subgroup_matrix_configs(adapter: Any) -> tuple[MatrixConfig, ...]:
    """The matrices that the adapter's subgroups multiply."""
    ffi, lib = bindings()
    if not lib.wgpuAdapterHasFeature(
        adapter._internal, lib.WGPUFeatureName_ChromiumExperimentalSubgroupMatrix
    ):
        return ()
    found = ffi.new("WGPUAdapterPropertiesSubgroupMatrixConfigs *")
    found.chain.sType = lib.WGPUSType_AdapterPropertiesSubgroupMatrixConfigs
    info = ffi.new("WGPUAdapterInfo *")
    info.nextInChain = ffi.cast("WGPUChainedStruct *", found)
    if lib.wgpuAdapterGetInfo(adapter._internal, info) != lib.WGPUStatus_Success:
        return ()
    lib.wgpuAdapterInfoFreeMembers(info[0])
    names = dict(enumerate(_COMPONENTS, 1))
    configs = [
        (names[c.componentType], names[c.resultComponentType], int(c.M), int(c.N), int(c.K))
        for c in (found.configs[i] for i in range(found.configCount))
        if c.componentType in names and c.resultComponentType in names
    ]
    lib.wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers(found[0])
    return tuple(sorted(set(configs)))


def with_extensions(wgsl: str) -> str:
    """WGSL that declares the extensions that it uses, on its first line."""
    used = [name for name, pattern in _EXTENSIONS.items() if pattern.search(wgsl)]
    enabled = "".join(f"enable {name}; " for name in used)
    return enabled + "".join(_DIAGNOSTICS.get(name, "") for name in used) + wgsl


class _Reports:
    """Errors and losses of one device, as Dawn reports them."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi
        self.of_threads: dict[int, Report | BaseException] = {}
        self.losses: list[str] = []

    def on_error(self, _device: Any, kind: int, message: Any, *_: Any) -> None:
        """Dawn's callback for an error, in the thread of the failing call."""
        kinds = {2: "Validation", 3: "OutOfMemory", 4: "Internal"}  # webgpu.h, WGPUErrorType
        text = _text(self._ffi, message)
        self.of_threads[threading.get_ident()] = kinds.get(kind, "Unknown"), text

    def on_interrupt(self, _kind: Any, error: BaseException, _traceback: Any) -> None:
        """Keeps what a signal's handler raised in a callback: C cannot raise it, `release` does."""
        self.of_threads[threading.get_ident()] = error

    def on_loss(self, _device: Any, _reason: int, message: Any, *_: Any) -> None:
        """Dawn's callback for the loss or the end of the device."""
        self.losses.append(_text(self._ffi, message))


def open_library(
    adapter: Any,
    features: Sequence[str],
    limits: Mapping[str, int],
    checked: bool,
    cache: str | None = None,
) -> Dawn:
    """A new device, see `adapters.open_library`."""
    ffi, lib = bindings()
    adapter = _fresh(adapter)
    reports = _Reports(ffi)
    desc = ffi.new("WGPUDeviceDescriptor *")
    wanted = [*features, "implicit-device-synchronization"]
    names = ffi.new("WGPUFeatureName []", [getattr(lib, _feature(name)) for name in wanted])
    desc.requiredFeatureCount, desc.requiredFeatures = len(wanted), names
    all_limits = ffi.new("WGPULimits *")
    lib.wgpuAdapterGetLimits(adapter._internal, all_limits)
    desc.requiredLimits = all_limits
    toggles, keep = _toggles(ffi, lib, checked)
    desc.nextInChain = ffi.cast("WGPUChainedStruct *", toggles)
    blobs = None
    if cache is not None and import_module("wgpudawn._lib").dawn_version == DAWN_VERSION:
        blobs, callbacks = descriptor(ffi, BlobCache(ffi, cache), reports.on_interrupt)
        toggles.chain.next = ffi.cast("WGPUChainedStruct *", blobs)
        _kept.extend(callbacks)
    on_error = ffi.callback(
        "WGPUUncapturedErrorCallback", reports.on_error, onerror=reports.on_interrupt
    )
    on_loss = ffi.callback("WGPUDeviceLostCallback", reports.on_loss)
    desc.uncapturedErrorCallbackInfo.callback = on_error
    desc.deviceLostCallbackInfo.callback = on_loss
    desc.deviceLostCallbackInfo.mode = lib.WGPUCallbackMode_AllowSpontaneous
    _kept.extend((on_error, on_loss))
    device = _request_device(ffi, lib, adapter, desc)
    del keep, blobs
    return Dawn(device, reports)


def _toggles(ffi: Any, lib: Any, checked: bool) -> tuple[Any, Any]:
    """(the toggles of a device, for its descriptor; memory that they need until it is used)."""
    chosen = _TOGGLES if checked else _TOGGLES | _UNCHECKED_TOGGLES
    enabled = [name for name, is_on in chosen.items() if is_on]
    disabled = [name for name, is_on in chosen.items() if not is_on]
    texts = [[ffi.new("char []", name.encode()) for name in part] for part in (enabled, disabled)]
    arrays = [ffi.new("char const * []", part) for part in texts]
    toggles = ffi.new("WGPUDawnTogglesDescriptor *")
    toggles.chain.sType = lib.WGPUSType_DawnTogglesDescriptor
    toggles.enabledToggleCount, toggles.enabledToggles = len(enabled), arrays[0]
    toggles.disabledToggleCount, toggles.disabledToggles = len(disabled), arrays[1]
    return toggles, (texts, arrays)


def _request_device(ffi: Any, lib: Any, adapter: Any, desc: Any) -> Handle:
    """``wgpuAdapterRequestDevice``, waited for. Raises RuntimeError."""
    made: list[Handle] = []
    errors: list[str] = []

    @ffi.callback("WGPURequestDeviceCallback")  # type: ignore[untyped-decorator]
    def on_device(status: int, device: Handle, message: Any, *_: Any) -> None:
        if status == lib.WGPURequestDeviceStatus_Success:
            made.append(device)
        else:
            errors.append(_text(ffi, message))

    callback = ffi.new("WGPURequestDeviceCallbackInfo *")
    callback.mode = lib.WGPUCallbackMode_WaitAnyOnly
    callback.callback = on_device
    _kept.append(on_device)
    future = lib.wgpuAdapterRequestDevice(adapter._internal, desc, callback[0])
    _wait_any(ffi, lib, _instance(), future)
    if not made:
        raise RuntimeError("; ".join(errors))
    return made[0]


def _text(ffi: Any, view: Any) -> str:
    """The text of a WGPUStringView."""
    if not view.data:
        return ""
    is_terminated = view.length == (1 << 8 * ffi.sizeof("size_t")) - 1  # webgpu.h, WGPU_STRLEN
    data = ffi.string(view.data) if is_terminated else ffi.buffer(view.data, view.length)[:]
    return bytes(data).decode(errors="replace")


def _feature(name: str) -> str:
    """The constant of ``webgpu.h`` for a feature's name with dashes."""
    words = "".join(word[:1].upper() + word[1:] for word in name.split("-"))
    return f"WGPUFeatureName_{words}"


def _wait_any(
    ffi: Any,
    lib: Any,
    instance: Any,
    future: Any,
    seconds: float = math.inf,
    awake_seconds: float = 0.0,
) -> bool:
    """Waits for a future, without the device's lock; False if that takes longer.

    Its callback has been called then. For ``awake_seconds`` the thread does not sleep.
    """
    info = ffi.new("WGPUFutureWaitInfo *")
    info.future = future
    start = time.perf_counter()
    passed = 0.0
    while True:
        is_awake = passed < awake_seconds
        nanoseconds = 0 if is_awake else int(min(_SLICE, 1e9 * max(0.0, seconds - passed)))
        if lib.wgpuInstanceWaitAny(instance, 1, info, nanoseconds) == lib.WGPUWaitStatus_Error:
            raise DeviceError("waiting for the GPU: wgpuInstanceWaitAny failed")
        passed = time.perf_counter() - start
        if info.completed or passed >= seconds:
            return bool(info.completed)


class Dawn:
    """`library.Library` on Dawn."""

    def __init__(self, device: Handle, reports: _Reports) -> None:
        self.ffi, self.lib = bindings()
        self.awake_seconds = AWAKE_SECONDS
        self._instance = _instance()
        self._reports = reports
        self.device = device
        self.queue: Handle = self.lib.wgpuDeviceGetQueue(device)
        self.submit = self.lib.wgpuQueueSubmit
        self.refuses_submits = True
        self.callback_mode: int = self.lib.WGPUCallbackMode_WaitAnyOnly
        # A future's wait says that it is completed; its callback has nothing to add. It is C code:
        # Ctrl-C would be swallowed in Python code.
        self._ignore = self.ffi.callback("void(int)", deque[int](maxlen=1).append)
        self._work_done = self.ffi.new("WGPUQueueWorkDoneCallbackInfo *")
        self._work_done.mode = self.lib.WGPUCallbackMode_WaitAnyOnly
        self._work_done.callback = self.ffi.cast("WGPUQueueWorkDoneCallback", self._ignore)
        _kept.append(self._ignore)

    def __del__(self) -> None:
        if not process.restricted:
            self.lib.wgpuQueueRelease(self.queue)
            self.lib.wgpuDeviceRelease(self.device)

    def capture(self) -> None:
        """Forgets errors of calls that nobody asked about."""
        if self._reports.of_threads:
            self._reports.of_threads.pop(threading.get_ident(), None)

    def release(self) -> Report | None:
        """The last error since `capture`. On a lost device calls succeed and do nothing.

        Raises:
            BaseException: a signal's handler raised it in a callback.
        """
        if self._reports.losses:
            return "Internal", f"device is lost\n{self.find_loss()}"
        if not self._reports.of_threads:
            return None
        report = self._reports.of_threads.pop(threading.get_ident(), None)
        if isinstance(report, BaseException):
            raise report
        return report

    def find_loss(self) -> str:
        """The loss that Dawn has reported; without a report, a lost device ends no process."""
        losses = self._reports.losses
        return (cause_of(losses[0]) or "no cause given") if losses else ""

    def mark(self, submission: int = 0) -> Handle:
        """A future for everything submitted so far."""
        return self.lib.wgpuQueueOnSubmittedWorkDone(self.queue, self._work_done[0])

    def wait(self, mark: Handle | None) -> None:
        """Waits for a future, which is made now unless it was marked."""
        self._wait_awake(self.mark() if mark is None else mark)
        self.lib.wgpuInstanceProcessEvents(self._instance)  # frees what was released

    def wait_at_most(self, seconds: float) -> bool:
        """Waits for a future that is made now."""
        return _wait_any(self.ffi, self.lib, self._instance, self.mark(), seconds)

    def wait_for_map(self, future: Handle, mapped: Signal, submission: int | None) -> None:
        """Waits for the mapping itself, which waits for what uses the buffer."""
        self._wait_awake(future)

    def _wait_awake(self, future: Handle) -> None:
        _wait_any(self.ffi, self.lib, self._instance, future, awake_seconds=self.awake_seconds)

    def create_module(self, descriptor: Handle, checked: bool) -> Handle:
        """A shader module; toggles of the device leave checks out."""
        return self.lib.wgpuDeviceCreateShaderModule(self.device, descriptor)

    def prepare_wgsl(self, wgsl: str) -> str:
        """Declares the extensions that Tint wants declared and naga does not know by name."""
        return with_extensions(wgsl)

    def tick_seconds(self) -> float:
        """Dawn gives nanoseconds."""
        return 1e-9
