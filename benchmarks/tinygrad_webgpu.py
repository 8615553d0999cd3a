"""tinygrad on WebGPU: ``pip install tinygrad`` and a Dawn library that it finds.

The library is ``libwebgpu_dawn.so`` on the loader's path, or what ``WEBGPU_PATH`` names (the wheel
dawn-python has one). tinygrad has a process of its own, as it reads ``DEV`` when it is imported.

python -m benchmarks.tinygrad_webgpu matmul [--small] [--budget 0.5] [--device CPU]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .timing import seconds, seconds_per_call

_TIMEOUT_S = 100


def missing() -> str:
    """Why it cannot be measured; empty when it can be tried."""
    return "" if importlib.util.find_spec("tinygrad") else "tinygrad is not installed"


def measure(case: str, small: bool, budget_s: float, device: str = "WEBGPU") -> dict[str, Any]:
    """``seconds`` of a steady stream of jitted calls. Raises RuntimeError with tinygrad's error."""
    command = [sys.executable, "-m", "benchmarks.tinygrad_webgpu", case, "--device", device]
    command += ["--budget", str(budget_s), *(["--small"] * small)]
    done = subprocess.run(
        command,
        env=os.environ | {"DEV": device},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"tinygrad: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _call(case: str, small: bool) -> tuple[Callable[..., Any], list[Any]]:
    """The function of a case of the same name in `cases`, and its inputs."""
    from tinygrad import Tensor

    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return Tensor(rng.standard_normal(shape, np.float32)).realize()

    if case == "matmul":
        n = 512 if small else 4096
        return lambda a, b: a @ b, [random(n, n), random(n, n)]
    if case == "layer_norm_softmax":
        rows = 512 if small else 32768
        inputs = [random(rows, 1024), random(1024), random(1024)]
        return lambda x, weight, bias: (x.layernorm() * weight + bias).softmax(-1), inputs
    if case == "mlp":
        sizes = (784, 1024, 1024, 10)
        layers = [(random(i, o) / np.sqrt(i), random(o)) for i, o in itertools.pairwise(sizes)]
        layers = [(weight.realize(), bias) for weight, bias in layers]

        def forward(x: Any) -> Any:
            for index, (weight, bias) in enumerate(layers):
                x = x.linear(weight, bias)
                x = x.relu() if index + 1 < len(layers) else x
            return x

        return forward, [random(8 if small else 64, 784)]
    raise ValueError(f"tinygrad has no case {case!r}")


def main() -> None:
    """Prints the figures as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--device", default="WEBGPU")
    options = parser.parse_args()
    os.environ["DEV"] = options.device  # read when tinygrad is imported
    from tinygrad import Device, TinyJit
    from tinygrad import __name__ as package

    start = time.perf_counter()
    function, inputs = _call(options.case, options.small)
    jitted = TinyJit(lambda *values: function(*values).realize())

    def synchronize() -> None:
        Device[options.device].synchronize()

    first_s = seconds(lambda: (jitted(*inputs), synchronize()))
    jitted(*inputs)  # the second call is the one that is captured
    found = {
        "seconds": seconds_per_call(lambda: jitted(*inputs), synchronize, options.budget),
        "first_call_s": first_s,
        "device": options.device,
        "system": package,
        "whole_s": time.perf_counter() - start,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
