"""The process that measures: imports everything once, then takes cases from standard input.

A request is a line of JSON, ``{"case": …, "systems": […]}``. Answers are lines too: which system is
being measured, its result, and that the case is done; so a crash loses only the system at hand.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from . import limits, onnxruntime_webgpu, pytorch, tinygrad_webgpu
from .cases import CASES
from .pytorch import Workload
from .runner import BUILD, LIMITS, MACHINE, Settings

if TYPE_CHECKING:
    from torch_webgpu_compile.runtime.device import Device


Measured = Callable[[str, Callable[[], dict[str, Any]]], bool]
"""(system, what measures it) → whether something can still be measured in this process."""

RunCase = Callable[[str, list[str], Settings, Measured], bool]
"""(case, systems, settings, measured) → the same."""


class Unusable(Exception):
    """A system that is not installed here."""


def main() -> None:
    """Serves the cases of `cases`."""
    serve(_run_case, prepare)


def serve(run_case: RunCase, prepare: Callable[[], None]) -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    settings = Settings(**json.loads(sys.argv[1]))

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    prepare()
    send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if not run(request["case"], request["systems"], settings, send, run_case):
            return  # the GPU is gone for this process


def prepare() -> None:
    """Loads what the first case would have to pay for alone."""
    limits.use_full_f32()
    # Dynamo and AOTAutograd.
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2))
    if torch.cuda.is_available():
        # cuBLAS keeps a workspace for the process: it belongs to no case's peak of memory.
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")


def run(
    name: str,
    systems: list[str],
    settings: Settings,
    send: Callable[[dict[str, Any]], None],
    run_case: RunCase,
) -> bool:
    """Measures a case by every system; False when no further case can be measured here."""

    def measured(system: str, measure: Callable[[], dict[str, Any]]) -> bool:
        send({"starting": system})
        try:
            result = measure()
        except Unusable as error:
            result = {"error": str(error), "missing": True}
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {str(error)[:500]}"
            send({"system": system, "result": {"error": text}})
            return not _is_fatal(error)
        send({"system": system, "result": result})
        return True

    if name in (LIMITS, MACHINE):
        usable = measured(
            name, machine if name == MACHINE else lambda: limits.measure(settings.small)
        )
    else:
        usable = run_case(name, systems, settings, measured)
    send({"done": name, "usable": usable})
    return usable


def _run_case(name: str, systems: list[str], settings: Settings, measured: Measured) -> bool:
    usable = _measure_case(name, systems, settings, measured)
    release()
    return usable


def _measure_case(name: str, systems: list[str], settings: Settings, measured: Measured) -> bool:
    work: list[Workload] = []

    def build() -> dict[str, Any]:
        case, small = CASES.get(name), settings.small
        if case is None:
            raise Unusable(f"there is no case {name!r}")
        work.append(pytorch.build(case, small, settings.budget_s, settings.thorough))
        return {"nbytes": case.nbytes(small), "flops": case.flops(small)}

    if not measured(BUILD, build):
        return False
    if not work:
        return True
    for system, measure in measurements(work[0], settings).items():
        if system in systems and not measured(system, measure):
            return False
    return True


def measurements(work: Workload, settings: Settings) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to call for each system, in the order of measuring."""

    def webgpu(mode: str | None = None) -> dict[str, Any]:
        from . import webgpu

        return webgpu.measure(work, mode)

    def onnxruntime() -> dict[str, Any]:
        missing = onnxruntime_webgpu.missing()
        if missing:
            raise Unusable(missing)
        return onnxruntime_webgpu.measure(*work.on_cpu(), settings.budget_s)

    def tinygrad() -> dict[str, Any]:
        missing = tinygrad_webgpu.missing()
        if missing:
            raise Unusable(missing)
        return tinygrad_webgpu.measure(work.case.name, settings.small, settings.budget_s)

    return {
        "eager": lambda: pytorch.measure_eager(work),
        "webgpu": webgpu,
        "autotuned": lambda: webgpu("max-autotune"),
        "inductor": lambda: pytorch.measure_compiled(work),
        "cudagraphs": lambda: pytorch.measure_compiled(work, mode="reduce-overhead"),
        "onnxruntime_webgpu": onnxruntime,
        "tinygrad_webgpu": tinygrad,
    }


def _is_fatal(error: Exception) -> bool:
    """Whether a device is lost: nothing works after that in this process."""
    from torch_webgpu_compile.errors import DeviceLostError

    return isinstance(error, DeviceLostError) or "CUDA error" in str(error)


def release() -> None:
    """Gives the memory of a case back, on both sides."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(Exception):  # no adapter: the case has said so
        _device().empty_cache()


def _device() -> Device:
    from torch_webgpu_compile.options import resolve
    from torch_webgpu_compile.runtime.device import device_for

    return device_for(resolve())


def machine() -> dict[str, Any]:
    """What is measured on."""
    import platform

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    try:
        info = _device().info
        found["adapter"] = f"{info.name} ({info.backend})"
        found["driver"] = info.driver
    except Exception as error:
        found["adapter"] = f"none: {error}"
    return found


if __name__ == "__main__":
    main()
