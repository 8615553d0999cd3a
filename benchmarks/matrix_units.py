"""Products in matrix units, in every tiling: whether they are right, and TFLOP/s.

    TORCH_WEBGPU_PROVIDER=wgpudawn python -m benchmarks.matrix_units [--seconds 200] [MxKxN …]

Factors are f16, sums f32, the result f16; by default the sizes that goals name. After ``MxKxNt``
the right one lies as a linear layer's weight does. ``--unit 16x8x16`` chooses among the sizes of
matrices that the GPU has. Where CUDA is, its rate comes first. Without matrix units, as on a
software adapter, ``--small`` shows that it runs: small sizes, computed by invocations.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from torch_webgpu_compile.codegen.kernels import contraction
from torch_webgpu_compile.codegen.tilings.matmul import MatmulProblem
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling, units_fit
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.errors import DeviceError
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.runtime.device import device_for
from torch_webgpu_compile.target import MatrixConfig, Target

from .timing import seconds_per_call

_SIZES = ("4096x4096x4096", "512x2048x8192", "512x8192x2048", "1000x1000x1000")
_TILES = (
    *((128, 128), (64, 128), (128, 64), (64, 64), (128, 256), (256, 128)),
    *((32, 128), (32, 64), (64, 256), (64, 32), (32, 32)),
)
_SUBGROUPS = ((2, 2), (1, 4), (2, 4), (4, 2), (1, 2), (4, 4), (4, 1), (1, 8), (2, 1))
_MOST_UNITS = 16  # of a subgroup, whose sums it has registers for


def tilings(config: MatrixConfig, lanes: int) -> Iterator[UnitsTiling]:
    """All that may be worth measuring, the likely ones first."""
    factor, _, m, n, k = config
    for buffers, inner, parts, tile in product((1, 2), (32, 64, 16), _SUBGROUPS, _TILES):
        tiling = UnitsTiling(Unit(m, n, k), factor, lanes, *tile, inner, *parts, buffers)
        if tiling.is_whole and 4 <= tiling.units_m * tiling.units_n <= _MOST_UNITS:
            yield tiling


def measure(
    a: Tensor, b: Tensor, wanted: Tensor, tiling: UnitsTiling | None
) -> tuple[float, float]:
    """(seconds of a product on the device, its largest error relative to the largest result).

    ``tiling``: None for the one that is chosen.
    """
    plan_cache.clear()
    torch._dynamo.reset()
    chosen = contraction.units_tiling
    if tiling is not None:
        contraction.units_tiling = lambda *_: tiling
    try:
        x, y = a.to("webgpu"), b.to("webgpu")
        call = torch.compile(torch.mm, backend="webgpu", dynamic=False)
        got = call(x, y).cpu()
    finally:
        contraction.units_tiling = chosen
    error = ((got.float() - wanted).abs().max() / wanted.abs().max()).item()
    memory = torch.webgpu  # type: ignore[attr-defined]
    return seconds_per_call(lambda: call(x, y), memory.synchronize, 0.1), error


def cuda_seconds(a: Tensor, b: Tensor) -> float:
    """Seconds of PyTorch's own product, with its sums in f32."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    x, y = a.cuda(), b.cuda()
    return seconds_per_call(lambda: x @ y, torch.cuda.synchronize, 0.2)


def text_of(tiling: UnitsTiling) -> str:
    """A tiling, briefly."""
    tile = f"{tiling.rows}x{tiling.columns}x{tiling.inner}"
    parts = f"{tiling.subgroups_m}x{tiling.subgroups_n}"
    return f"{tile} in {parts} subgroups, {tiling.buffers} buffers, {tiling.drained} drained"


def config_of(target: Target, unit: str, small: bool) -> tuple[MatrixConfig, int]:
    """(what is measured, invocations of a subgroup). Raises SystemExit without matrix units.

    ``unit``: sizes that are wanted, or "" for the largest ones.
    """
    offered = [c for c in target.subgroup_matrix_configs if c[:2] == ("f16", "f32")]
    if unit:
        offered = [c for c in offered if c[2:] == tuple(map(int, unit.split("x")))]
    if offered and target.subgroup_size:
        return max(offered, key=lambda c: c[2] * c[3] * c[4]), target.subgroup_size
    if small:
        return ("f16", "f32", 16, 16, 16), 32
    raise SystemExit(f"{target.name} offers no matrix units for f16; see `doctor`")


def main() -> None:
    """Prints each size's tilings, fastest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=list(_SIZES))
    parser.add_argument("--seconds", type=float, default=200, help="for all sizes together")
    parser.add_argument("--unit", default="", help="MxNxK of matrices, such as 16x8x16")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    register()
    device = device_for(from_environment())
    target = device.target
    config, lanes = config_of(target, arguments.unit, arguments.small)
    print(f"{target.name}: {config} of {target.subgroup_matrix_configs}", flush=True)
    sizes = ["70x50x90"] if arguments.small else arguments.sizes
    for done, size in enumerate(sizes):
        m, k, n = map(int, size.removesuffix("t").split("x"))
        until = time.monotonic() + arguments.seconds / len(sizes)
        torch.manual_seed(done)
        a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
        if size.endswith("t"):
            b = torch.randn(n, k).half().t()
        wanted = a.float() @ b.float()
        flops = 2 * m * k * n
        cuda = ""
        if torch.cuda.is_available():
            cuda = f", CUDA {flops / cuda_seconds(a, b) / 1e12:.1f} TFLOP/s"
        seconds, error = measure(a, b, wanted, None)
        print(f"{size}: chosen {flops / seconds / 1e12:.1f} TFLOP/s (error {error:.1e}){cuda}")
        found: list[tuple[float, float, str]] = []
        axes = "inner", "inner" if size.endswith("t") else "outer"
        problem = MatmulProblem(1, ((m, n),), k, 4, *axes)
        for tiling in tilings(config, lanes):
            if time.monotonic() > until:
                print("  (not all)")
                break
            if not units_fit(tiling, problem, target):
                continue
            try:
                found.append((*measure(a, b, wanted, tiling), text_of(tiling)))
            except DeviceError as failure:
                print(f"  {text_of(tiling)}: {str(failure).splitlines()[0]}")
        for seconds, error, text in sorted(found)[:12]:
            print(f"  {flops / seconds / 1e12:6.1f} TFLOP/s  error {error:.1e}  {text}", flush=True)
        wrong = [text for _, error, text in found if error > 1e-3]
        print(f"  {len(found)} measured, {len(wrong)} wrong {wrong[:3]}", flush=True)


if __name__ == "__main__":
    main()
