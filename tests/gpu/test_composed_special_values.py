"""Two operations on NaN, infinities and zeros, which drivers would simplify as on real numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.rotation import picked

NUMBERS = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 2.5, -3.0, 0.5])
ONE = ("-{}", "({}*2)", "({}/3)", "({}+1)", "(1-{})", "(2-{})", "{}.square()", "{}.sqrt()")
ONE += ("{}.rsqrt()", "{}.reciprocal()", "{}.exp()")
ONE += ("{}.masked_fill({}>1,-math.inf)", "torch.where({}>1,1.0,{})")
ARITHMETIC = ("({0}+{1})", "({0}-{1})", "({0}*{1})", "({0}/{1})")
TWO = (*ARITHMETIC, "torch.where({0}>{1},{0},{1})", "torch.where({0}<={1},{1},{0})")
# Of which drivers know that they are finite, or their signs, or bounds.
KNOWN = ("b.float()", "(k%2).float()", "x.isnan().float()", "torch.where(x>1,2.0,0.0)", "x.exp()")
KNOWN += ("x.abs()", "x.square()", "x.sigmoid()", "x.clamp(0,1)", "x.relu()", "x.sin()", "x.tanh()")
# Of which a number would be made that is known, or the value itself.
VAIN = ("{}", "({}-{})", "({}*0)", "({}/{})", "({}-{}.abs())", "({}.clamp(min=0)-{})")
VAIN += (
    "({}-{}.clamp(-1,1))",
    "{}.square().sqrt()",
    "{}.sqrt().square()",
    "({}+2-{})",
    "({}/2-{}/2)",
)
VAIN += ("torch.where({}<0,y,{})", "torch.where({}<=1,0.0,{})", "({}*({}<0))", "(({}<0)*1.0)")
TESTS = ("torch.isfinite({})", "torch.isnan({})", "torch.isinf({})", "({}==math.inf)")


def of_one(form: str, value: str) -> str:
    return form.replace("{}", value)


def same_operand() -> Iterator[str]:
    """f(g(x), x), f(x, g(x)) and f(g(x), h(x))."""
    values = ["x", *(of_one(form, "x") for form in ONE)]
    for form, (a, b) in itertools.product(TWO, itertools.product(values, values)):
        yield form.format(a, b)


def nested() -> Iterator[str]:
    """f(g(x, y), z), f(z, g(x, y)) and f(g(x, y), h(…)) for two of x, y and z."""
    for outer, inner in itertools.product(TWO, TWO):
        value = inner.format("x", "y")
        for last in "xyz":
            yield outer.format(value, last)
            yield outer.format(last, value)
        for other, pair in itertools.product(ARITHMETIC, ("yx", "zy", "xz")):
            yield outer.format(value, other.format(*pair))


def chains() -> Iterator[str]:
    """f(g(x)), and whether that is finite."""
    for outer, inner in itertools.product((*ONE, *TESTS), ONE):
        yield of_one(outer, of_one(inner, "x"))


def known() -> Iterator[str]:
    """f(g(h), y), f(y, g(h)) and tests of g(h), where much is known of h."""
    for source, form in itertools.product(KNOWN, VAIN):
        value = of_one(form, source)
        for outer in ARITHMETIC:
            yield outer.format(value, "y")
            yield outer.format("y", value)
        for test in TESTS[:2]:
            yield of_one(test, value)


def beside_wide_integers() -> Iterator[str]:
    """NVIDIA's driver takes floats for finite where 64-bit integers are."""
    for form in TESTS:
        yield f"torch.where({of_one(form, 'x.exp()')}, k + k, k % 7)"
        yield f"torch.where((k + k) > 3, {of_one(form, '(x*y)')}, False)"
    yield "torch.where(k % 2 > 0, x.masked_fill(x>1,-math.inf) - x, y)"
    yield "(x.masked_fill(x>1,-math.inf) - x).abs() * (k + k)"


@pytest.mark.parametrize("expressions", [same_operand, nested, chains, known, beside_wide_integers])
def test_as_eager(expressions: Callable[[], Iterator[str]], every_case: bool) -> None:
    """One in eight of them in each run."""
    x, y, z = (t.flatten() for t in torch.meshgrid(NUMBERS, NUMBERS, NUMBERS, indexing="ij"))
    k = torch.arange(x.numel())
    b = z > 0
    wrong = []
    texts = [
        text for text in dict.fromkeys(expressions()) if every_case or picked(text, range(8)) == 0
    ]
    for first in range(0, len(texts), 32):
        chunk = texts[first : first + 32]
        torch._dynamo.reset()
        names = {"torch": torch, "math": math}
        exec(f"def function(x, y, z, k, b): return [{', '.join(chunk)}]", names)
        function = names["function"]
        wanted = function(x, y, z, k, b)
        found = torch.compile(function, backend="webgpu", fullgraph=True)(x, y, z, k, b)
        for text, got, want in zip(chunk, found, wanted, strict=True):
            try:  # what is finite may be off by what GPUs divide and take roots with
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{text}: {error}")
    assert not wrong, f"{len(wrong)} are wrong, the first ones:\n" + "\n".join(wrong[:5])
