"""``python -m torch_webgpu_compile doctor``: lists the GPUs and checks whether they work."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from ..errors import WebGPUCompileError, human_bytes
from ..options import AUTO, PROVIDERS, from_environment
from ..target import MATRIX_KERNELS

if TYPE_CHECKING:
    from ..runtime.adapters import AdapterInfo

LIMITS = (
    ("max-buffer-size", "largest buffer", True),
    ("max-storage-buffer-binding-size", "largest binding", True),
    ("max-storage-buffers-per-shader-stage", "bindings per kernel", False),
    ("max-compute-workgroup-storage-size", "workgroup memory", True),
    ("max-compute-invocations-per-workgroup", "invocations per workgroup", False),
    ("max-compute-workgroups-per-dimension", "workgroups per dimension", False),
)

# What is measured: a name, a unit, that unit in those of `Machine`, and its field.
MEASURED = (
    ("a copy, read and written", "GB/s", 1e9, "bytes_per_second"),
    ("f32 multiply-adds", "TFLOP/s", 1e12, "flops_per_second"),
    ("a dispatch", "µs", 1e-6, "dispatch_seconds"),
    ("multiprocessors (a guess)", "", 1, "multiprocessors"),
)

INSTALL = """\
No WebGPU adapter was found. What usually helps:
  Linux with a GPU     the vendor's driver with Vulkan (NVIDIA: the driver package's Vulkan part;
                       in a container, NVIDIA_DRIVER_CAPABILITIES=all)
  Linux without a GPU  the software driver: apt-get install mesa-vulkan-drivers
  Windows              the vendor's graphics driver (Direct3D 12 or Vulkan)
  macOS                nothing: Metal is built in; a virtual machine may not expose it
Check with `vulkaninfo --summary` (apt-get install vulkan-tools)."""


def doctor(measure: bool = False, save_target: str | None = None) -> int:
    """Prints versions, adapters and a self-test; 0 if compiled models work, else 1.

    Args:
        measure: also how fast the adapter in use is, which is stored in the cache folder, if there
            is one, for every later process that has it (see `machines`).
        save_target: a file for the adapter in use, with what was measured (`save_target`).
    """
    _print_versions()
    try:
        options = from_environment()
        from ..runtime.adapters import choose_provider, is_installed
        from ..runtime.device import list_adapters

        asked = options.provider
        providers = [p for p in PROVIDERS if p != AUTO and (p == asked or is_installed(p))]
        found = {provider: list_adapters(provider) for provider in providers}
        used = choose_provider(asked, options.first_adapter) if found.get("wgpu") else asked
    except WebGPUCompileError as error:
        print(f"\n{error}\n\n{INSTALL}")
        return 1
    if not found.get(used):
        print(f"\n{INSTALL}")
        return 1
    print("\nAdapters (choose with TORCH_WEBGPU_ADAPTER=number or part of the name):")
    for provider, adapters in found.items():
        print(f"  {provider}{'' if adapters else ': none'}")
        for adapter in adapters:
            _print_adapter(adapter)
    _print_recommendation(found, used, asked)
    failed = _self_test() or (_measure() if measure else 0)
    return failed or (_save_target(save_target) if save_target else 0)


def _print_adapter(adapter: AdapterInfo) -> None:
    driver = f", {adapter.driver}" if adapter.driver else ""
    print(f"    [{adapter.index}] {adapter.name} ({adapter.backend}, {adapter.type}{driver})")
    for name, meaning, is_bytes in LIMITS:
        value = adapter.limits.get(name)
        if value is not None:
            print(f"      {meaning:27}{human_bytes(value) if is_bytes else value}")
    print(f"      {'features':27}{', '.join(sorted(adapter.requested_features)) or 'none'}")
    configs = ", ".join(
        f"{m}x{n}x{k} {factor} to {total}"
        for factor, total, m, n, k in adapter.subgroup_matrix_configs
    )
    print(f"      {'matrix units':27}{configs or 'not offered'}")


def _print_recommendation(found: dict[str, list[AdapterInfo]], used: str, asked: str) -> None:
    """Prints which provider is used, which would be better, and why."""
    print(f"\nProvider in use: {used} (TORCH_WEBGPU_PROVIDER={asked})")
    with_units = [p for p, adapters in found.items() if _usable(adapters)]
    if with_units and used not in with_units:
        print(f"Recommended: {with_units[0]}, which reaches this GPU's matrix units")
    elif "wgpudawn" not in found:
        from ..runtime.adapters import REQUIREMENTS

        wanted = REQUIREMENTS["wgpudawn"]
        print(f"On GPUs with matrix units Dawn may reach them: pip install {wanted}")
    else:
        print(f"Recommended: {used}")


def _usable(adapters: list[AdapterInfo]) -> bool:
    """Whether the best adapter has matrix units for which there are kernels."""
    return bool(adapters) and any(
        kernels & set(adapters[0].subgroup_matrix_configs) for kernels in MATRIX_KERNELS.values()
    )


def _print_versions() -> None:
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for package in ("torch-webgpu-compile", "torch", "wgpu", "wgpudawn"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed")


def _self_test() -> int:
    """Compares a small model, forward and backward, and a product of f16 with eager PyTorch.

    The latter is computed in matrix units, where kernels use them.
    """
    import torch

    from ..backend import webgpu
    from ..runtime.device import device_for

    what = "a small model, forward and backward, and a product of f16"
    print(f"\nSelf-test: {what} … ", end="", flush=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    )
    x = torch.randn(16, 32)
    try:
        device = device_for(from_environment())
        result = torch.compile(model, backend=webgpu, fullgraph=True)(x)
        got = torch.autograd.grad(result.square().sum(), list(model.parameters()))
        eager = model(x)
        wanted = torch.autograd.grad(eager.square().sum(), list(model.parameters()))
        torch.testing.assert_close(result, eager, atol=1e-4, rtol=1e-4)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        factors = torch.randn(200, 100).half(), torch.randn(100, 150).half()
        product = torch.compile(torch.mm, backend=webgpu, fullgraph=True)(*factors)
        exact = torch.mm(*(factor.double() for factor in factors))
        torch.testing.assert_close(product.double(), exact, atol=1e-2, rtol=1e-3)
    except Exception as error:
        print("FAILED", file=sys.stdout)
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"passed on {device.info.name}")
    return 0


def _save_target(path: str) -> int:
    """Writes the adapter in use to a file."""
    from ..bundle.target_file import save_target
    from ..runtime.device import device_for
    from ..tuning import machines

    options = from_environment()
    target = machines.measured_target(device_for(options).target, options)
    try:
        save_target(target, path)
    except OSError as error:
        print(f"\n{target.name} was not saved: {path}: {error.strerror or error}")
        return 1
    print(f'\n{target.name} saved: compile for it elsewhere with options={{"target": {path!r}}}')
    return 0


def _measure() -> int:
    """Measures the adapter's rates; prints them beside the assumed ones, and stores them."""
    from ..runtime.device import device_for
    from ..runtime.limits import measure_machine
    from ..tuning import machines

    options = from_environment()
    try:
        device = device_for(options)
        used = machines.measured_target(device.target, options).machine
        found = measure_machine(device)
    except WebGPUCompileError as error:
        print(f"\nNothing was measured. {type(error).__name__}: {error}")
        return 1
    print(f"\n{device.info.name:31}{'measured':>12}{'in use':>12}")
    for name, unit, scale, field in MEASURED:
        row = (getattr(machine, field) / scale for machine in (found, used))
        print(f"  {name:29}" + "".join(f"{value:>12.4g}" for value in row) + f"  {unit}")
    if options.cache is None or not machines.store(device.target, found, options.cache):
        print("Not stored: TORCH_WEBGPU_CACHE=folder is where later processes would find it.")
        return 0
    print(f"Stored in {options.cache}: kernels are chosen by it from now on.")
    return 0
