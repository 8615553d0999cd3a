"""Runs every case in a process of its own, so that a crash or a lost device ends only that case."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEMS = ("webgpu", "autotuned", "eager", "inductor", "cudagraphs", "onnxruntime_webgpu")
LIMITS = "limits"


def available_systems() -> tuple[str, ...]:
    """The systems that this machine has."""
    import torch

    missing = set()
    if not torch.cuda.is_available():
        missing.add("cudagraphs")
    wanted = ("onnxruntime", "onnx", "onnxruntime_ep_webgpu")
    if any(importlib.util.find_spec(name) is None for name in wanted):
        missing.add("onnxruntime_webgpu")
    return tuple(name for name in SYSTEMS if name not in missing)


def run_in_child(
    case: str, systems: tuple[str, ...], small: bool, budget_s: float, timeout_s: float
) -> dict[str, Any]:
    """Results by system; a system that failed has ``{"error": …}``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", "--child", case, "--output", str(output)]
        command += ["--systems", ",".join(systems), "--budget", str(budget_s)]
        command += ["--small"] if small else []
        # Cold means cold: no kernels of an earlier run from a cache of the driver or of Inductor.
        environment = os.environ | {
            "__GL_SHADER_DISK_CACHE": "0",
            "MESA_SHADER_CACHE_DISABLE": "true",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "HF_HUB_OFFLINE": "1",
        }
        problem = ""
        try:
            done = subprocess.run(command, env=environment, timeout=timeout_s, check=False)
            if done.returncode:
                problem = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"no result after {timeout_s:.0f} s"
        results = json.loads(output.read_text()) if output.exists() else {}
    for system in systems:
        if problem and system not in results:
            results[system] = {"error": problem}
    return results


def child(case: str, systems: tuple[str, ...], small: bool, budget_s: float, output: Path) -> None:
    """Measures and writes after every system, so that a crash loses only what follows."""
    results: dict[str, Any] = {}

    def record(system: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            results[system] = measure()
        except Exception as error:
            traceback.print_exc()
            results[system] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        output.write_text(json.dumps(results))

    if case == LIMITS:
        from . import limits

        record(LIMITS, lambda: limits.measure(small))
        return
    for system, measure in measurements(case, small, budget_s).items():
        if system in systems:
            record(system, measure)


def measurements(
    case_name: str, small: bool, budget_s: float
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to call for each system, in the order of measuring."""
    import torch

    from . import onnxruntime_webgpu, pytorch
    from .cases import CASES
    from .limits import use_full_f32

    torch.manual_seed(0)
    use_full_f32()
    # Loads Dynamo and AOTAutograd, which no system should have to pay for alone.
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2))
    case = CASES[case_name]
    function, inputs = case.build(small)

    def measure_webgpu(mode: str | None = None) -> dict[str, Any]:
        from . import webgpu

        on_device, moved = pytorch.on_device(function, inputs)
        with torch.no_grad():
            expected = on_device(*moved).cpu()
        del on_device, moved
        return webgpu.measure(function, inputs, budget_s, expected, case.extra, mode)

    return {
        "eager": lambda: pytorch.measure_eager(function, inputs, budget_s),
        "webgpu": measure_webgpu,
        "autotuned": lambda: measure_webgpu("max-autotune"),
        "inductor": lambda: pytorch.measure_compiled(function, inputs, budget_s),
        "cudagraphs": lambda: pytorch.measure_compiled(
            function, inputs, budget_s, mode="reduce-overhead"
        ),
        "onnxruntime_webgpu": lambda: onnxruntime_webgpu.measure(function, inputs, budget_s),
    }


def machine() -> dict[str, Any]:
    """What was measured on."""
    import platform

    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    try:
        from torch_webgpu_compile.runtime.device import open_device

        info = open_device().info
        found["adapter"] = f"{info.name} ({info.backend})"
    except Exception as error:
        found["adapter"] = f"none: {error}"
    return found
