"""Random programs: straight-line functions of torch calls, as source text.

A program is drawn while it is run: every value's shape, dtype and magnitude is known when the next
call is drawn, so that only valid calls are made. ``repr(program)`` is text to paste into a test.

A value is *exact* when every order of evaluation in its dtype gives the same bits (small multiples
of 1/4 through additions, products, maxima, views). Discontinuous calls (comparisons, argmax, floor,
conversions to integers) are only made on exact values: on others the last bit of an `exp` would
decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .choosers import Chooser

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
# f32 is what most kernels compute in; the others are drawn less often.
_DTYPE_CHOICES = (torch.float32, *DTYPES, torch.float32)

DIMS = (3, 1, 2, 4, 5, 7, 8, 0, 12, 16, 17, 33)
MAX_NUMEL = 6000
MAX_MAGNITUDE = 1 << 16
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset")


@dataclass
class Value:
    """A variable of the program, its value in eager PyTorch, and whether that is exact."""

    name: str
    tensor: torch.Tensor
    exact: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def rank(self) -> int:
        return self.tensor.dim()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def magnitude(self) -> float:
        """The largest finite absolute value."""
        if not self.tensor.numel():
            return 0.0
        values = self.tensor.double()
        return float(torch.where(values.isfinite(), values, 0).abs().max())

    @property
    def finite(self) -> bool:
        return bool(self.tensor.isfinite().all())


@dataclass
class Program:
    """Inputs, ``(name, expression)`` steps and the names of the results.

    ``rounded`` are the steps whose values are not exact in 16 bits, with their dtypes.
    """

    inputs: list[Value] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    rounded: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The function ``run``."""
        head = f"def run({', '.join(v.name for v in self.inputs)}):"
        body = [f"    {name} = {code}" for name, code in self.steps]
        return "\n".join([head, *body, f"    return ({', '.join(self.results)},)"])

    @property
    def function(self) -> Callable[..., Any]:
        """The program as a function."""
        return _compile(self.source)

    @property
    def arguments(self) -> list[torch.Tensor]:
        """The input tensors."""
        return [v.tensor for v in self.inputs]

    def precise(self, disturbance: int = 0) -> list[torch.Tensor]:
        """The results when all floats are float64.

        With a ``disturbance``, each value that 16 bits round is moved by up to half a unit in their
        last place, at random, another way for each number. No call after it is discontinuous.
        """
        source = self.source
        for name, dtype in self.rounded.items() if disturbance else ():
            moved = f"disturb({name}, {_UNITS[dtype]}, {disturbance})"
            source = re.sub(rf"(?m)^    {name} = .*$", rf"\g<0>; {name} = {moved}", source)
        source = re.sub(r"torch\.(b?float16|float32)", "torch.float64", source)
        wide = [t.double() if t.dtype.is_floating_point else t for t in self.arguments]
        with _default_dtype(torch.float64):
            return list(_compile(source)(*wide))

    def __repr__(self) -> str:
        inputs = [f"    {v.name} = {code}" for v, code in zip(self.inputs, self.made, strict=True)]
        return "\n" + self.source + "\n\n# inputs:\n" + "\n".join(inputs) + "\n"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What integers become when they meet a Python float."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def _disturb(value: torch.Tensor, unit: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
    return value * (1 + unit * signs)


def _compile(source: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "disturb": _disturb}
    exec(source, namespace)
    function: Callable[..., Any] = namespace["run"]
    return function


_EXTREMES = (float("nan"), float("inf"), float("-inf"), -0.0)


def make_input(
    seed: int, shape: Sequence[int], dtype: torch.dtype, layout: str, extremes: bool = False
) -> torch.Tensor:
    """A tensor of small numbers in the given layout, always the same for the same arguments.

    With ``extremes``, an eighth of a float tensor is NaN, infinite or the negative zero.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = list(shape)
    match layout:
        case "transposed":
            stored.reverse()
        case "sliced" if stored:
            stored[-1] = 2 * stored[-1] + 1
        case "expanded" if stored:
            stored[0] = 1
        case "offset" if stored:
            stored[0] += 1
    numbers = torch.randint(-12, 13, stored, generator=generator)
    if dtype.is_floating_point:
        tensor = (numbers / 4).to(dtype)
        if extremes:
            which = torch.randint(0, 8 * len(_EXTREMES), stored, generator=generator)
            for k, extreme in enumerate(_EXTREMES):
                tensor[which == k] = extreme
    elif dtype is torch.bool:
        tensor = numbers > 0
    else:
        tensor = numbers.abs().to(dtype) if dtype is torch.uint8 else numbers.to(dtype)
    match layout:
        case "transposed":
            return tensor.permute(*reversed(range(len(shape)))) if shape else tensor
        case "sliced" if stored:
            return tensor[..., 1::2]
        case "expanded" if stored:
            return tensor.expand(*shape)
        case "offset" if stored:
            return tensor[1:]
    return tensor


def _equals(result: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether a result and its float64 twin are the same numbers."""
    return torch.equal(wide.to(result.dtype), result) and torch.equal(wide, result.double())


def _overflows(result: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether a result is infinite where its float64 twin is not."""
    return bool((result.isinf() & wide.isfinite()).any())


class Drawing:
    """A program while it is drawn."""

    def __init__(self, chooser: Chooser) -> None:
        self.program = Program()
        self.pool: list[Value] = []
        self.choose = chooser.choose
        self.integer = chooser.integer
        self.flag = chooser.flag
        self.draw_permutation = chooser.permutation

    # -- choices ---------------------------------------------------------------------------------

    def value(self, accept: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A value of the pool, the newest first; None when none is acceptable."""
        fitting = [v for v in reversed(self.pool) if accept(v)]
        return self.choose(fitting) if fitting else None

    def dim(self, value: Value) -> int:
        """A dimension of a value of rank ≥ 1, sometimes counted from the end."""
        dim = self.integer(0, value.rank - 1)
        return dim - value.rank if self.flag() else dim

    # -- inputs and steps ------------------------------------------------------------------------

    def add_input(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, extremes: bool = False
    ) -> Value:
        """A new argument."""
        dtype = dtype or self.choose(_DTYPE_CHOICES)
        layout = self.choose(LAYOUTS)
        seed = len(self.program.inputs)
        value = Value(f"x{seed}", make_input(seed, shape, dtype, layout, extremes), True)
        self.program.inputs.append(value)
        more = ", True" if extremes else ""
        made = f"make_input({seed}, {tuple(shape)}, {dtype}, {layout!r}{more})"
        self.program.made.append(made)
        self.pool.append(value)
        return value

    def step(self, code: str, *operands: Value, keeps_exact: bool = False) -> Value | None:
        """Appends ``tN = code``, if it can be run; None when it is too large or PyTorch refuses.

        In float64 as well: some calls are refused in one dtype and not in another. What overflows
        is too large: kernels go on in 32 bits with what they store in 16.
        """
        names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        names.update({v.name: v.tensor for v in self.pool})
        try:
            result, wide = eval(code, names), self._in_float64(code)
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return None
        if not isinstance(result, torch.Tensor) or result.numel() > MAX_NUMEL:
            return None
        if result.dtype not in DTYPES or _overflows(result, wide):
            return None
        exact = keeps_exact and all(v.exact for v in operands)
        if result.dtype.is_floating_point:
            exact = exact and _equals(result, wide)
        elif not exact:
            return None  # an integer that depends on rounding
        made = Value(f"t{len(self.program.steps)}", result, exact)
        if made.magnitude > MAX_MAGNITUDE:
            return None
        self.program.steps.append((made.name, code))
        if result.dtype in _UNITS and not exact:
            self.program.rounded[made.name] = result.dtype
        self.pool.append(made)
        return made

    def _in_float64(self, code: str) -> Any:
        names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        for v in self.pool:
            names[v.name] = v.tensor.double() if v.is_float else v.tensor
        with _default_dtype(torch.float64):
            return eval(re.sub(r"torch\.(b?float16|float32)", "torch.float64", code), names)

    def finish(self) -> Program:
        """Chooses the results: the last value, and perhaps earlier ones."""
        made = [v.name for v in self.pool if v.name.startswith("t")]
        results = [made[-1]]
        for name in made[:-1][-6:]:
            if self.integer(0, 3) == 3:
                results.append(name)
        self.program.results = results
        return self.program
