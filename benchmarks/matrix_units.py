"""Products in matrix units, in many tilings: whether they are right, and TFLOP/s.

    TORCH_WEBGPU_PROVIDER=wgpudawn python -m benchmarks.matrix_units [--seconds 200]
        [--dtype bf16] [--few] [--linear] [MxKxN …]

Sums are f32, the result is of the factors' dtype; by default the sizes that goals name. Where CUDA
is, its rate comes first. With bfloat16, the rates of the best tilings for f16 stand beside their
own, and rates of factors that are more work: zeros among them, and numbers of too many exponents.
``--few``: the tilings that may win; ``--linear``: also with the other factor transposed, as weights
are. Without matrix units, as on a software adapter, ``--small`` shows that it runs: small sizes,
computed by invocations.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
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
_TILES = ((128, 128), (128, 64), (64, 128), (256, 128), (128, 256), (64, 64), (32, 64))
_SUBGROUPS = ((2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (4, 4), (1, 2))
_MOST_UNITS = 16  # of a subgroup, whose sums it has registers for
# (rows, columns, inner, subgroups along each): the likely ones.
_FEW = (
    (128, 128, 32, 2, 2),
    (64, 64, 32, 2, 2),
    (64, 128, 32, 1, 4),
    (128, 256, 32, 2, 4),
    (256, 128, 32, 4, 2),
    (128, 128, 32, 2, 4),
    (128, 128, 32, 4, 2),
    (64, 64, 64, 2, 2),
    (64, 128, 32, 2, 2),
    (128, 64, 32, 2, 2),
    (64, 64, 32, 1, 2),
    (128, 128, 64, 2, 2),
    (64, 128, 64, 1, 4),
    (128, 128, 32, 4, 4),
    (128, 256, 32, 4, 4),
    (32, 64, 32, 1, 2),
)
_BESIDE = 5  # tilings whose rate for f16 is shown beside that for bfloat16
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
_TOLERANCES = {"f16": 1e-3, "bf16": 8e-3}  # largest errors relative to the largest result


def tilings(config: MatrixConfig, factor: str, lanes: int, few: bool) -> Iterator[UnitsTiling]:
    """All that may be worth measuring, or few of them, the likely ones first."""
    unit = Unit(*config[2:])
    if few:
        for each in _FEW:
            yield UnitsTiling(unit, factor, lanes, *each, buffers=1)
        return
    for inner, parts, tile, buffers in product((32, 64, 16), _SUBGROUPS, _TILES, (2, 1)):
        tiling = UnitsTiling(unit, factor, lanes, *tile, inner, *parts, buffers)
        if tiling.is_whole and 2 <= tiling.units_m * tiling.units_n <= _MOST_UNITS:
            for drained in sorted({1, tiling.units_n}):
                yield replace(tiling, drained=drained)


@dataclass(frozen=True, slots=True)
class Case:
    """A product: of ``a``, m × k, and ``b``, k × n or, of a linear layer, n × k."""

    a: Tensor
    b: Tensor
    linear: bool

    @property
    def call(self) -> Callable[[Tensor, Tensor], Tensor]:
        """What is compiled."""
        return F.linear if self.linear else torch.mm

    @property
    def flops(self) -> int:
        """Operations."""
        return 2 * self.a.shape[0] * self.b.numel()

    def of(self, dtype: torch.dtype) -> Case:
        """The same factors in another dtype."""
        return Case(self.a.to(dtype), self.b.to(dtype), self.linear)


def measure(case: Case, wanted: Tensor | None, tiling: UnitsTiling | None) -> tuple[float, float]:
    """(seconds of a product on the device, its largest error relative to the largest result).

    ``wanted``: None where the error does not matter; ``tiling``: None for the one that is chosen.
    """
    plan_cache.clear()
    torch._dynamo.reset()
    chosen = contraction.units_tiling
    if tiling is not None:
        contraction.units_tiling = lambda *_: tiling
    try:
        x, y = case.a.to("webgpu"), case.b.to("webgpu")
        call = torch.compile(case.call, backend="webgpu", dynamic=False)
        result = call(x, y)
        error = 0.0
        if wanted is not None:
            found = result.cpu().float()
            error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    finally:
        contraction.units_tiling = chosen
    memory = torch.webgpu  # type: ignore[attr-defined]
    return seconds_per_call(lambda: call(x, y), memory.synchronize, 0.1), error


def cuda_seconds(case: Case) -> float:
    """Seconds of PyTorch's own product, with its sums in f32."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    x, y = case.a.cuda(), case.b.cuda()
    return seconds_per_call(lambda: case.call(x, y), torch.cuda.synchronize, 0.2)


def text_of(tiling: UnitsTiling) -> str:
    """A tiling, briefly."""
    tile = f"{tiling.rows}x{tiling.columns}x{tiling.inner}"
    parts = f"{tiling.subgroups_m}x{tiling.subgroups_n}"
    return f"{tile} in {parts} subgroups, {tiling.buffers} buffers, {tiling.drained} drained"


def config_of(target: Target, small: bool) -> tuple[MatrixConfig, int]:
    """(what is measured, invocations of a subgroup). Raises SystemExit without matrix units."""
    offered = [c for c in target.subgroup_matrix_configs if c[:2] == ("f16", "f32")]
    if offered and target.subgroup_size:
        return max(offered, key=lambda c: c[2] * c[3] * c[4]), target.subgroup_size
    if small:
        return ("f16", "f32", 16, 16, 16), 32
    raise SystemExit(f"{target.name} offers no matrix units for f16; see `doctor`")


def harder(case: Case) -> dict[str, Case]:
    """Factors of bfloat16 that are more work."""
    scales = torch.exp2(torch.arange(case.a.shape[0]) % 40.0).unsqueeze(1)
    one_small = case.a.clone()
    one_small[0, 0] = 1e-20
    return {
        "zeros": replace(case, a=case.a.relu()),
        "a small number": replace(case, a=one_small),
        "many exponents": replace(case, a=(case.a * scales).to(case.a.dtype)),
    }


def main() -> None:
    """Prints each size's tilings, fastest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=list(_SIZES))
    parser.add_argument("--seconds", type=float, default=200, help="for all sizes together")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="f16")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    register()
    target = device_for(from_environment()).target
    config, lanes = config_of(target, arguments.small)
    print(f"{target.name}: {config} of {target.subgroup_matrix_configs}", flush=True)
    sizes = ["70x50x90"] if arguments.small else arguments.sizes
    cases = list(product(sizes, (False, True) if arguments.linear else (False,)))
    for done, (size, linear) in enumerate(cases):
        m, k, n = map(int, size.split("x"))
        torch.manual_seed(done)
        a, b = torch.randn(m, k), torch.randn(n, k) if linear else torch.randn(k, n)
        case = Case(a, b, linear).of(_DTYPES[arguments.dtype])
        problem = MatmulProblem(1, ((m, n),), k, 4, "inner", "inner" if linear else "outer")
        fitting = [
            tiling
            for tiling in tilings(config, arguments.dtype, lanes, arguments.few)
            if units_fit(tiling, problem, target)
        ]
        print(f"{size}{' transposed' if linear else ''}: ", end="")
        report(case, fitting, arguments.dtype, time.monotonic() + arguments.seconds / len(cases))


def report(case: Case, fitting: list[UnitsTiling], dtype: str, until: float) -> None:
    """Measures and prints one product."""
    wanted = case.call(case.a.float(), case.b.float())

    def rate(seconds: float) -> str:
        return f"{case.flops / seconds / 1e12:6.1f}"

    cuda = f", CUDA {rate(cuda_seconds(case))} TFLOP/s" if torch.cuda.is_available() else ""
    seconds, error = measure(case, wanted, None)
    print(f"chosen {rate(seconds)} TFLOP/s (error {error:.1e}){cuda}", flush=True)
    found: list[tuple[float, float, UnitsTiling]] = []
    for tiling in fitting:
        if time.monotonic() > until:
            print("  (not all)")
            break
        try:
            found.append((*measure(case, wanted, tiling), tiling))
        except DeviceError as failure:
            print(f"  {text_of(tiling)}: {str(failure).splitlines()[0]}")
    found.sort(key=lambda each: each[:2])
    for place, (seconds, error, tiling) in enumerate(found[:16]):
        beside = ""
        if dtype == "bf16" and place < _BESIDE:
            half, _ = measure(case.of(torch.float16), None, replace(tiling, factor="f16"))
            beside = f", f16 {rate(half)}"
        text = text_of(tiling) + beside
        print(f"  {rate(seconds)} TFLOP/s  error {error:.1e}  {text}", flush=True)
    wrong = [text_of(tiling) for _, error, tiling in found if not error <= _TOLERANCES[dtype]]
    print(f"  {len(found)} measured, {len(wrong)} wrong {wrong[:3]}", flush=True)
    if dtype == "bf16" and found:
        best = found[0][2]
        for name, hard in harder(case).items():
            exact = hard.call(hard.a.float(), hard.b.float())
            seconds, error = measure(hard, exact, best)
            print(f"  {rate(seconds)} TFLOP/s  error {error:.1e}  {name}", flush=True)


if __name__ == "__main__":
    main()
