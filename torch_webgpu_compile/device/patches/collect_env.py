"""``python -m torch.utils.collect_env`` names the adapters of the device.

Patched: ``get_pretty_env_info`` of ``torch.utils.collect_env``, when that is imported or run.

Why: it describes the GPUs of CUDA, ROCm and XPU, and nothing of others, so that a report of a
problem with this device would lack its GPU, driver and provider.

Until: it asks the module of the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from ...tensors import devices
from ..import_hooks import around


@around("torch.utils.collect_env:get_pretty_env_info")
def get_pretty_env_info(describe: Callable[[], str]) -> str:
    return f"{describe()}\n\n{_adapters()}"


def _adapters() -> str:
    """What the device ``webgpu`` is, a line for each adapter."""
    from ...runtime import adapters  # not at the top: `import torch` imports this

    lines = ["WebGPU adapters:"]
    try:
        for index in range(devices.device_count()):
            info = devices.adapter_of(index)
            driver = f", {info.driver}" if info.driver else ""
            lines.append(
                f"{devices.NAME}:{index}: {info.name} ({info.backend}, {info.type}{driver})"
            )
    except Exception as error:  # the rest of the report is of use, too
        lines.append(f"{type(error).__name__}: {error}")
    if len(lines) == 1:
        lines.append(f"none: {adapters.INSTALL_HINT}")
    for package in ("torch-webgpu-compile", *adapters.REQUIREMENTS):
        try:
            lines.append(f"[pip3] {package}=={version(package)}")
        except PackageNotFoundError:
            continue
    return "\n".join(lines)
