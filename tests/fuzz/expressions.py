"""Random expressions on NaN, infinities and zeros, which drivers simplify as on real numbers.

    python -m tests.fuzz.expressions --batches 1000 --seed 0

What is NaN, infinite or finite must be so in eager PyTorch, where it does not hang on the last bits
of the operands. One batch of expressions is one compilation, on all combinations of three of nine
numbers; batch k of a seed is the same everywhere. Prints each wrong expression with operands and
the command that runs its batch alone. Exit status: 0 without wrong ones, otherwise 1.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import torch_webgpu_compile  # noqa: F401  (its backend, where the package is not installed)

from .choosers import Chooser, RandomChooser

NUMBERS = (math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 2.5, -3.0, 0.5)
_EXACT = (
    *("neg", "abs", "sign", "floor", "ceil", "trunc", "relu", "clamp", "maximum", "minimum"),
    *("where", "masked_fill", "nan_to_num", "to"),
)
_ROUNDINGS = 4
_BATCH = 16
_DEPTH = 4
_LONGEST = 400  # characters
_LEAVES = ("x", "y", "z", "2.5*x", "b.to(dtype)", "(k%3).to(dtype)")
_UNARY = (
    *("-{}", "({}+1)", "(1-{})", "({}*2)", "({}*0)", "({}/4)", "({}-{})", "({}/{})"),
    *("{}.abs()", "{}.square()", "{}.reciprocal()", "{}.sqrt()", "{}.rsqrt()", "{}.sign()"),
    *("{}.exp()", "{}.log()", "{}.log1p()", "{}.sin()", "{}.tanh()", "{}.erf()", "{}.sigmoid()"),
    *("{}.relu()", "{}.clamp(0,1)", "{}.clamp(min=0)", "{}.floor()", "{}.frac()"),
    *("{}.isnan().to(dtype)", "({}<0).to(dtype)", "({}>=1).to(dtype)", "(({}==0)*1.0).to(dtype)"),
    *(
        "{}.masked_fill({}>1,-math.inf)",
        "{}.nan_to_num(0.0,1e4,-1e4)",
        "F.silu({})",
        "F.softplus({})",
    ),
    *("F.leaky_relu({})", "F.hardswish({})"),
)
_BINARY = (
    *("({}+{})", "({}-{})", "({}*{})", "({}/{})", "torch.atan2({},{})", "torch.hypot({},{})"),
    *("torch.maximum({},{})", "torch.minimum({},{})"),
    *("torch.where({}>{},1.0,0.0).to(dtype)", "torch.where({}<0,{},0.5)"),
)
_TERNARY = (
    *("torch.addcmul({},{},{})", "torch.addcdiv({},{},{})", "torch.lerp({},{},{})"),
    "torch.where({}>{},{},0.0)",
)


def draw_expression(chooser: Chooser, depth: int = _DEPTH) -> str:
    """An expression of x, y, z (floats), b (bool) and k (int64)."""
    if depth == 0 or (depth < _DEPTH - 1 and chooser.integer(0, 4) == 0):
        return chooser.choose(_LEAVES)
    first = draw_expression(chooser, depth - 1)
    if chooser.integer(0, 9) < 4:
        return chooser.choose(_UNARY).replace("{}", first)
    second = chooser.choose((first, *_LEAVES))
    if chooser.flag():
        second = draw_expression(chooser, chooser.integer(0, depth - 1))
    if chooser.integer(0, 5):
        return chooser.choose(_BINARY).format(first, second)
    return chooser.choose(_TERNARY).format(first, second, chooser.choose((first, second, "z")))


def draw_batch(seed: int, batch: int) -> list[str]:
    """Expressions to compile together."""
    drawn = (draw_expression(RandomChooser(f"{seed}/{batch}/{n}")) for n in range(_BATCH))
    return [text for text in dict.fromkeys(drawn) if len(text) <= _LONGEST]


def wrong_of(texts: list[str]) -> list[str]:
    """A description of each expression whose results are of another kind than in eager."""
    numbers = torch.tensor(NUMBERS)
    operands = [t.flatten() for t in torch.meshgrid(numbers, numbers, numbers, indexing="ij")]
    x, y, z = operands
    integers = (z > 0, torch.arange(x.numel()))
    wanted = _function(texts, torch.float32)(x, y, z, *integers)
    precise = _function(texts, torch.float64)
    wide = [t.double() for t in operands]
    others = [precise(*wide, *integers)]
    for seed in range(_ROUNDINGS):
        with _Rounding(seed):
            others.append(precise(*(t.mul(1) for t in wide), *integers))
    torch._dynamo.reset()
    compiled = torch.compile(_function(texts, torch.float32), backend="webgpu", fullgraph=True)
    found = compiled(x, y, z, *integers)
    wrong = []
    for n, text in enumerate(texts):
        kind = _kind(wanted[n])
        is_certain = torch.stack([_kind(other[n]) == kind for other in others]).all(0)
        bad = (is_certain & (_kind(found[n]) != kind)).nonzero().flatten().tolist()
        if bad:
            at = ", ".join(f"{name} = {t[bad[0]]}" for name, t in zip("xyz", operands, strict=True))
            values = f"{found[n][bad[0]]} instead of {wanted[n][bad[0]]}"
            wrong.append(f"{text}: {values} for {at} ({len(bad)} wrong)")
    return wrong


class _Rounding(TorchFunctionMode):
    """Functions that round do so otherwise: the same function of the same numbers the same way."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_function__(  # type: ignore[no-untyped-def]  # as the base's
        self, function, types, args=(), kwargs=None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in _EXACT or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        operands = [a.tolist() if isinstance(a, torch.Tensor) else a for a in args]
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{self.seed}{name}{operands}".encode())
        )
        noise = torch.randn(result.shape, generator=generator, dtype=result.dtype)
        return result * (1 + 2e-7 * noise)


def _function(texts: list[str], dtype: torch.dtype) -> Callable[..., list[torch.Tensor]]:
    names: dict[str, Any] = {"torch": torch, "math": math, "F": torch.nn.functional, "dtype": dtype}
    head = "def function(x, y, z, b, k): "
    exec(f"{head}return [t.to(dtype) for t in ({', '.join(texts)},)]", names)
    function: Callable[..., list[torch.Tensor]] = names["function"]
    return function


def _kind(tensor: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 1 for infinities, 0 for numbers."""
    return 2 * tensor.isnan().int() + tensor.isinf().int()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.expressions")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first batch")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    start, checked, wrong = time.perf_counter(), 0, 0
    for batch in range(arguments.first, arguments.first + arguments.batches):
        texts = draw_batch(arguments.seed, batch)
        checked += len(texts)
        for text in wrong_of(texts):
            wrong += 1
            again = f"--seed {arguments.seed} --first {batch} --batches 1"
            print(f"{text}\nagain: python -m tests.fuzz.expressions {again}\n", flush=True)
    print(f"{checked} expressions, {wrong} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
