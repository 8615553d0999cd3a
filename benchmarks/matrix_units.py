"""Products in matrix units, in every tiling: whether they are right, and TFLOP/s.

    TORCH_WEBGPU_PROVIDER=wgpudawn python -m benchmarks.matrix_units [--seconds 200] [MxKxN …]

Factors are f16, or with ``--dtype bf16`` bfloat16, and so is the result; sums are f32. By default
the sizes are those that goals name. After ``MxKxNt`` the right one lies as a linear layer's weight
does, and after ``MxKxNp`` so do two, those of a gated layer, with half of the columns each.
``--unit 16x8x16`` chooses among the sizes of matrices that the GPU has. Where CUDA is, its rate
comes first. Without matrix units, as on a software adapter, ``--small`` shows that it runs: small
sizes, computed by invocations.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_webgpu_compile import backend
from torch_webgpu_compile.codegen.kernels.contraction import generate_contraction
from torch_webgpu_compile.codegen.tilings import contraction
from torch_webgpu_compile.codegen.tilings.contraction import TilingTable
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling, units_fit
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.errors import DeviceError
from torch_webgpu_compile.ir.anchors import contraction_groups
from torch_webgpu_compile.ir.graph import Schedule
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.runtime.device import Device, device_for
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.target import MatrixConfig, Target

from .timing import seconds_per_call
from .webgpu import given_memory, recorded_plans

_SIZES = ("4096x4096x4096", "512x2048x8192", "512x8192x2048", "1000x1000x1000")
_TILES = (
    *((128, 128), (64, 128), (128, 64), (64, 64), (128, 256), (256, 128)),
    *((32, 64), (64, 32), (32, 128)),
)
_SUBGROUPS = ((2, 2), (1, 4), (2, 4), (4, 2), (4, 1), (1, 2))
_DISPATCHES = 8  # of a submission, that its cost does not count
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
_MOST_UNITS = 16  # of a subgroup, whose sums it has registers for


def tilings(config: MatrixConfig, factor: str, lanes: int) -> Iterator[UnitsTiling]:
    """All that may be worth measuring, the likely ones first."""
    _, _, m, n, k = config
    for inner, parts, tile in product((32, 64, 16), _SUBGROUPS, _TILES):
        tiling = UnitsTiling(Unit(m, n, k), factor, lanes, *tile, inner, *parts)
        if tiling.is_whole and 4 <= tiling.units_m * tiling.units_n <= _MOST_UNITS:
            yield tiling


Inputs = tuple[Tensor, ...]


class Product:
    """A product on the device, whose kernel can be made in any tiling."""

    def __init__(self, function: Callable[..., Tensor], inputs: Inputs, device: Device) -> None:
        self.function, self.inputs, self.device = function, inputs, device
        self.wanted = function(*(x.float() for x in inputs))
        schedules: list[Schedule] = []

        def tune(schedule: Schedule) -> TilingTable:
            schedules.append(schedule)
            return {}

        tuner = backend.tuner  # type: ignore[attr-defined]
        backend.tuner = lambda device, folder: tune  # type: ignore[attr-defined]
        try:
            with recorded_plans() as plans:
                self.error(None, mode="max-autotune")
        finally:
            backend.tuner = tuner  # type: ignore[attr-defined]
        self.bound, self.schedule = plans[-1], schedules[-1]
        (self.group,) = contraction_groups(self.schedule)
        self.problem = contraction.problem_of(self.group, self.schedule.graph.buffers)

    def fits(self, tiling: UnitsTiling) -> bool:
        """Whether the device can run a tiling."""
        return units_fit(tiling, self.problem, self.device.target)

    def chosen(self) -> UnitsTiling | None:
        """The tiling that the compiler takes."""
        return contraction.units_tiling(self.group, self.problem, self.device.target)

    def seconds(self, tiling: UnitsTiling) -> float:
        """Of a dispatch, in a stream of them. Raises DeviceError."""
        buffers = self.schedule.graph.buffers
        call = generate_contraction(self.group, self.problem, buffers, self.device.target, tiling)
        steps = (call.step,) * _DISPATCHES
        plan = replace(self.bound.executor.plan, kernels=(call.kernel,), steps=steps)
        executor = Executor(plan, self.device)
        replay = executor.bind(self.bound.sizes, given_memory(self.bound)).replay
        return seconds_per_call(replay, self.device.synchronize, 0.05) / _DISPATCHES

    def error(self, tiling: UnitsTiling | None, mode: str = "default") -> float:
        """The largest error relative to the largest result. ``tiling``: None for the chosen one."""
        plan_cache.clear()
        torch._dynamo.reset()
        chosen = contraction.units_tiling
        if tiling is not None:
            contraction.units_tiling = lambda *_: tiling
        try:
            call = torch.compile(self.function, backend="webgpu", dynamic=False, mode=mode)
            got = call(*self.inputs).float()
        finally:
            contraction.units_tiling = chosen
        return ((got - self.wanted).abs().max() / self.wanted.abs().max()).item()


def cuda_seconds(function: Callable[..., Tensor], inputs: Inputs) -> float:
    """Seconds of PyTorch's own product, with its sums in f32."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    moved = [x.cuda() for x in inputs]
    return seconds_per_call(lambda: function(*moved), torch.cuda.synchronize, 0.2)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The gated layer of a Llama, before its second product."""
    return F.silu(x @ gate) * (x @ up)


def work(size: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Inputs, float]:
    """(function, its inputs, 10¹² operations of a call) of a size on the command line."""
    m, k, n = map(int, size.rstrip("tp").split("x"))
    flops = 2e-12 * m * k * n
    x = torch.randn(m, k).to(dtype)
    if size.endswith("p"):
        scale = k**-0.5
        gate, up = ((torch.randn(n // 2, k) * scale).to(dtype).t() for _ in range(2))
        return gated, (x, gate, up), flops
    y = torch.randn(n, k).t() if size.endswith("t") else torch.randn(k, n)
    return torch.mm, (x, y.to(dtype)), flops


def text_of(tiling: UnitsTiling) -> str:
    """A tiling, briefly."""
    tile = f"{tiling.rows}x{tiling.columns}x{tiling.inner}"
    parts = f"{tiling.subgroups_m}x{tiling.subgroups_n}"
    return f"{tile} in {parts} subgroups"


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
    parser.add_argument("--best", type=int, default=12, help="how many are shown and checked")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="f16")
    parser.add_argument("--unit", default="", help="MxNxK of matrices, such as 16x8x16")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    register()
    device = device_for(from_environment())
    target = device.target
    config, lanes = config_of(target, arguments.unit, arguments.small)
    print(f"{target.name}: {config} of {target.subgroup_matrix_configs}", flush=True)
    sizes = ["70x50x90", "70x50x80p"] if arguments.small else arguments.sizes
    for done, size in enumerate(sizes):
        until = time.monotonic() + arguments.seconds / len(sizes)
        torch.manual_seed(done)
        function, inputs, tflops = work(size, _DTYPES[arguments.dtype])
        made = Product(function, inputs, device)
        cuda = ""
        if torch.cuda.is_available():
            cuda = f", CUDA {tflops / cuda_seconds(function, inputs):.1f} TFLOP/s"
        chosen = made.chosen()
        found: dict[UnitsTiling, float] = {}
        for tiling in filter(
            made.fits, (*filter(None, [chosen]), *tilings(config, arguments.dtype, lanes))
        ):
            if time.monotonic() > until:
                break
            try:
                found[tiling] = tflops / made.seconds(tiling)
            except DeviceError as failure:
                print(f"  {text_of(tiling)}: {str(failure).splitlines()[0]}")
        print(f"{size}: {len(found)} measured{cuda}")
        if chosen in found:
            print(f"  {found[chosen]:6.1f} TFLOP/s  is the rate of the chosen one")
        for tiling in sorted(found, key=found.__getitem__, reverse=True)[: arguments.best]:
            error = f"error {made.error(tiling):.1e}"
            print(f"  {found[tiling]:6.1f} TFLOP/s  {error}  {text_of(tiling)}", flush=True)


if __name__ == "__main__":
    main()
