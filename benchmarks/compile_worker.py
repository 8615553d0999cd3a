"""The process that measures first calls: see `worker` for what it is asked.

It imports PyTorch and the model's library, and makes the model on the CPU. Every call that is
measured has a process of its own, forked off this one before it has opened a GPU or compiled
anything (where there is no fork, one that does all that itself). ``cold`` is a process with empty
caches, those of drivers included; ``second`` one that finds what the first has left, as a program
does that is started again. Model and inputs are on the device before the clock starts.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Else looking for CUDA opens it, and no forked process may use it then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

from .compile_cases import CASES
from .eager_worker import fingerprint
from .limits import torch_device, use_full_f32, wait_of
from .random_weights import with_cheap_weights
from .runner import BUILD, Settings
from .training import Built
from .worker import Measured, Unusable, serve

PROVIDERS = ("wgpu", "wgpudawn")
SYSTEMS = ("inductor", *PROVIDERS)
"""In the order of measuring: this package is not loaded before a process for Inductor is forked."""

_THREADS = torch.get_num_threads()
_FORKS = hasattr(os, "fork")
# What PyTorch's compilers import when they first compile.
_INDUCTOR = ("compile_fx", "async_compile", "codegen.wrapper", "codegen.triton", "codegen.cpp")


@cache
def built(name: str, small: bool) -> Built:
    """A case's module and inputs, the same in every process."""
    torch.manual_seed(0)
    return with_cheap_weights(partial(CASES[name].build, small))


def prepare() -> None:
    """Loads what every case needs; opens no GPU."""
    importlib.import_module("torch._dynamo")


def run_case(name: str, systems: list[str], settings: Settings, measured: Measured) -> bool:
    """Measures a case by every system."""

    def build() -> dict[str, Any]:
        if _FORKS:
            torch.set_num_threads(1)  # others would not be there in a child
            try:
                # diffusers asks for it as it is imported, which would open the GPU in this process.
                with patch.object(torch.accelerator, "is_available", lambda: False):
                    built(name, settings.small)
            except ImportError as error:
                raise Unusable(f"{error.name} is not installed") from error
        return {"nbytes": 0, "flops": 0}

    found: dict[str, dict[str, Any]] = {}

    def measure(system: str) -> dict[str, Any]:
        found[system] = cold_and_second(name, system, settings.small)
        return compared(found, system)

    if not measured(BUILD, build):
        return False
    return all(measured(s, partial(measure, s)) for s in SYSTEMS if s in systems)


def compared(found: dict[str, dict[str, Any]], system: str) -> dict[str, Any]:
    """A system's figures, with what its result differs by from Inductor's."""
    ours, theirs = (found.get(s, {}).get("cold", {}).get("checks") for s in (system, "inductor"))
    if not theirs or system == "inductor":
        return found[system]
    pairs = zip(ours or (), theirs, strict=True)
    difference = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return {**found[system], "relative_difference": difference}


def cold_and_second(name: str, system: str, small: bool) -> dict[str, Any]:
    """``cold_s`` and ``second_s`` of the first calls, and their parts: see `first_call`."""
    if system in PROVIDERS and _FORKS:
        load_backend()
    folder = Path(tempfile.mkdtemp())  # no `TemporaryDirectory`: forked processes would delete it
    try:
        cold, second = (in_new_process(name, system, small, folder) for _ in range(2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = {"cold_s": cold["first_s"], "second_s": second["first_s"]}
    if "own_s" in second:
        found["second_own_s"] = second["own_s"]
        found["least_s"] = min(cold["first_s"], cold["cpu_s"])
    return {**found, "cold": cold, "second": second}


def in_new_process(*arguments: Any) -> dict[str, Any]:
    """What `first_call` gives of them. Raises RuntimeError where it fails."""
    context: Any = get_context("fork" if _FORKS else "spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(writer, *arguments))
    process.start()
    writer.close()
    try:
        answer: dict[str, Any] = reader.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with {process.exitcode}") from None
    process.join()
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _answer(writer: Any, *arguments: Any) -> None:
    """The process."""
    try:
        answer = first_call(*arguments)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    writer.send(answer)
    writer.close()
    if _FORKS:  # such processes end without what programs do at their end, as to write a cache
        sys.stderr.flush()
        atexit._run_exitfuncs()


def caches_in(folder: Path) -> dict[str, str | None]:
    """The environment in which everything is cached in a folder, and nowhere else."""
    places = {
        "XDG_CACHE_HOME": "user",  # of this package, Dawn and others
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "CUDA_CACHE_PATH": "cuda",
        "__GL_SHADER_DISK_CACHE_PATH": "nvidia",
        "MESA_SHADER_CACHE_DIR": "mesa",
        "MESA_GLSL_CACHE_DIR": "mesa",
    }
    for place in places.values():
        (folder / place).mkdir(exist_ok=True)
    return {
        **{name: str(folder / place) for name, place in places.items()},
        "__GL_SHADER_DISK_CACHE": "1",
        "CUDA_CACHE_DISABLE": "0",
        "MESA_SHADER_CACHE_DISABLE": "false",
        "TORCH_WEBGPU_CACHE": None,  # as it is by default: in the user's cache folder
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": None,
    }


def load_backend() -> None:
    """The backend and the device, with its operators; opens no GPU."""
    from torch_webgpu_compile.device.autoload import register

    register()
    importlib.import_module("torch_webgpu_compile.backend")
    from torch_webgpu_compile.device.eager import kernels

    kernels.register()


def first_call(name: str, system: str, small: bool, folder: Path) -> dict[str, Any]:
    """The first call in this process, which has compiled nothing.

    ``first_s`` of the call, until its result is there, and ``cpu_s`` of this process in it;
    ``again_s`` of another one. Not part of these: ``import_s`` of importing a compiler,
    ``upload_s`` of opening the GPU and moving model and inputs there. ``checks`` of the result.
    With this package the parts of the call, too: see `call_split.Split`.
    """
    for variable, value in caches_in(folder).items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    torch.set_num_threads(_THREADS)
    use_full_f32()
    is_ours = system in PROVIDERS
    start = time.perf_counter()
    if is_ours:
        os.environ["TORCH_WEBGPU_PROVIDER"] = system
        load_backend()
    else:
        for module in _INDUCTOR:
            importlib.import_module(f"torch._inductor.{module}")
    # What Dynamo and AOTAutograd import when they first compile.
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2))
    imported = time.perf_counter()
    case, (module, inputs) = CASES[name], built(name, small)
    if is_ours:
        opened()
    if not (is_ours and case.on_cpu):
        device = "webgpu" if is_ours else torch_device()
        module, inputs = module.to(device), tuple(x.to(device) for x in inputs)
        wait_of(device)()
    uploaded = time.perf_counter()
    found = {"import_s": imported - start, "upload_s": uploaded - imported}
    backend = "webgpu" if is_ours else system
    if not is_ours:
        return found | _timed(lambda: case.run(module, inputs, backend), torch_device())
    from .call_split import split

    with split() as parts:
        found |= _timed(lambda: case.run(module, inputs, backend), "webgpu")
    return found | parts.figures(found["first_s"])


def _timed(make: Callable[[], Callable[[], Any]], device: str) -> dict[str, Any]:
    wait = wait_of(device)
    gc.collect()
    torch.manual_seed(0)
    cpu, start = time.process_time(), time.perf_counter()
    call = make()
    result = call()
    wait()
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    found["cpu_s"] = time.process_time() - cpu
    found["checks"] = fingerprint(result)["checks"]
    if not all(map(math.isfinite, found["checks"])):
        raise ArithmeticError("the result is not finite")
    start = time.perf_counter()
    call()
    wait()
    return found | {"again_s": time.perf_counter() - start}


def opened() -> Any:
    """The GPU, opened if need be."""
    from torch_webgpu_compile.options import resolve
    from torch_webgpu_compile.runtime.device import device_for

    return device_for(resolve())


def main() -> None:
    """Serves the cases of `compile_cases`."""
    with suppress(KeyboardInterrupt):
        serve(run_case, prepare)


if __name__ == "__main__":
    main()
