"""The first call of a compiled model, in processes of their own.

The first one has nothing in any cache: neither plans nor the driver's kernels. The second finds
what the first has left, as a program does that is started again. The last finds what PyTorch's
precompile cache (``TORCH_CACHING_PRECOMPILE=1``) has kept from one before it, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMEOUT_S = 200


def measure(case: str, small: bool) -> dict[str, Any]:
    """``cold``, ``cached`` and ``precompiled`` with their parts, see `first_call`; their sums."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "TORCH_WEBGPU_CACHE": str(folder / "plans"),
            "__GL_SHADER_DISK_CACHE": "1",
            "__GL_SHADER_DISK_CACHE_PATH": str(folder),
            "MESA_SHADER_CACHE_DISABLE": "false",
            "MESA_SHADER_CACHE_DIR": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        }
        (folder / "plans").mkdir()
        found = {kind: _in_process(case, small, environment) for kind in ("cold", "cached")}
        environment["TORCH_CACHING_PRECOMPILE"] = "1"
        for _ in range(2):  # the first one compiles, and saves
            found["precompiled"] = _in_process(case, small, environment)
    return {f"{kind}_s": parts["first_call_s"] for kind, parts in found.items()} | found


def _in_process(case: str, small: bool, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_time", case, *(["--small"] * small)]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process for {case} ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def first_call(case: str, small: bool) -> dict[str, Any]:
    """Seconds, in this process, which must not have compiled anything.

    ``import_s`` is not part of ``first_call_s``: importing PyTorch, its compiler and the model's
    library. ``torch.compile`` is, as it loads what is precompiled. ``backend_s`` is what this
    package's backend takes of it, with opening the GPU and ``capture_s``, AOTAutograd's part. The
    rest is Dynamo's, the upload of the weights and the call.
    """
    start = time.perf_counter()
    import torch

    import torch_webgpu_compile
    from torch_webgpu_compile import backend

    from .cases import CASES

    # Dynamo and AOTAutograd are imported by it.
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2))
    torch.manual_seed(0)
    function, inputs = CASES[case].build(small)
    import_s = time.perf_counter() - start

    parts = {"compile_module": 0.0, "compile_graph": 0.0, "device_for": 0.0, "HostGraph": 0.0}
    for name in parts:
        setattr(backend, name, _timed(getattr(backend, name), name, parts))
    with torch.no_grad():
        start = time.perf_counter()
        compiled = torch.compile(function, backend="webgpu")
        load_s = time.perf_counter() - start
        compiled(*inputs)
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        compiled(*inputs)
        second_s = time.perf_counter() - start
    inside = parts["compile_graph"] + parts["device_for"] + parts["HostGraph"]
    return {
        "import_and_build_s": import_s,
        "first_call_s": first_s,
        "torch_compile_s": load_s,
        "backend_s": parts["compile_module"],
        "passes_s": parts["compile_graph"],
        "open_device_s": parts["device_for"],
        "pipelines_s": parts["HostGraph"],
        "capture_s": parts["compile_module"] - inside,
        "dynamo_and_call_s": first_s - load_s - parts["compile_module"],
        "second_call_s": second_s,
        "plan_cache_hits": torch_webgpu_compile.counters.plan_cache_hits,
        "kernels": torch_webgpu_compile.counters.kernels_compiled,
    }


def _timed(function: Callable[..., Any], name: str, parts: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - start

    return call


if __name__ == "__main__":
    found = first_call(sys.argv[1], "--small" in sys.argv)
    if os.environ.get("TORCH_CACHING_PRECOMPILE") == "1":
        import torch

        torch.compiler.save_cache_artifacts()
    print(json.dumps(found))
