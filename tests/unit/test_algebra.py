"""Which operands drivers must not see through: what NVIDIA's rewrites, and what it may."""

from __future__ import annotations

import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.codegen.algebra import Algebra
from torch_webgpu_compile.codegen.wgsl.values import Text


class Kernel:
    """Float statements, as the renderer makes them."""

    def __init__(self) -> None:
        self.algebra = Algebra()
        self.opaque = 0
        self.count = 0

    def __call__(self, op: str, *args: Text | float) -> Text:
        texts = [a if isinstance(a, Text) else value(f"{float(a)}f") for a in args]
        guarded = self.algebra.guard(op, texts)
        self.opaque += sum(text.code.startswith("tw_opaque(") for text in guarded)
        found = value(f"t{self.count}")
        self.count += 1
        self.algebra.define(found.code, f"{op}({', '.join(text.code for text in guarded)})")
        self.algebra.note(op, guarded, found)
        return found


def value(code: str) -> Text:
    return Text(code, 1, dtypes.float32)


X, Y, Z = map(value, "xyz")
REWRITTEN = {
    "a sum less a term": lambda k: k("sub", k("add", X, Y), X),
    "a difference and a term": lambda k: k("add", k("sub", X, Y), Y),
    "two differences from one number": lambda k: k("sub", k("sub", X, Z), k("sub", Y, Z)),
    "multiples of both signs": lambda k: k("sub", k("mul", X, 2), k("div", X, 3)),
    "a common factor": lambda k: k("add", k("mul", X, Y), k("mul", Z, X)),
    "a square and its root": lambda k: k("add", k("square", X), k("mul", X, 2)),
    "the same product twice": lambda k: k("sub", k("mul", X, Y), k("mul", Y, X)),
    "a product over a factor": lambda k: k("div", k("mul", X, Y), Y),
    "a quotient times its divisor": lambda k: k("mul", k("div", X, Y), Y),
    "a sum over itself": lambda k: k("div", k("add", X, Y), k("add", Y, X)),
    "a term and its part in a quotient": lambda k: k("add", X, k("wide_div", X, k("mul", X, 2))),
    "the root of a reciprocal": lambda k: k("sqrt", k("reciprocal", X)),
    "a square that may overflow": lambda k: k("mul", k("mul", X, Y), Y),
    "a quotient by a square that may": lambda k: k("div", k("div", X, Y), Y),
    "a quotient by a reciprocal": lambda k: k("div", k("add", X, 1), k("reciprocal", X)),
    "the reciprocal of a quotient": lambda k: k("reciprocal", k("div", 1, X)),
    "what may be its absolute value": lambda k: k("sub", X, k("abs", X)),
    "what may be a bound, or not": lambda k: k("add", k("minimum", X, 2), k("neg", X)),
    "what may be chosen": lambda k: k("sub", k("where", k("gt", Z, 1), X, Y), Y),
    "a difference that may be 0": lambda k: k("eq", k("sub", k("mul", X, 2), Y), 0),
    "a quotient that may be 0": lambda k: k("eq", k("reciprocal", X), 0),
    "the larger": lambda k: k("where", k("gt", X, Y), X, Y),
    "the smaller": lambda k: k("where", k("le", Y, X), Y, X),
    "at least a number": lambda k: k("where", k("lt", X, 1), 1, X),
    "one more, multiplied": lambda k: k("mul", k("add", Y, 1), X),
    "one less a number, multiplied": lambda k: k("mul", X, k("sub", 1, Y)),
    "the square of one less": lambda k: k("square", k("sub", X, 1)),
    "a test of what is computed": lambda k: k("isinf", k("mul", X, Y)),
}
KEPT = {
    "a sum of its own": lambda k: k("add", k("mul", X, Y), Z),
    "a multiple of a sum": lambda k: k("add", k("mul", k("sub", X, Y), Z), Y),
    "multiples of one sign": lambda k: k("add", k("mul", X, 2), X),
    "odd powers": lambda k: k("add", X, k("mul", k("mul", k("mul", X, X), X), 0.044715)),
    "a product of powers": lambda k: k("mul", k("mul", X, X), X),
    "a multiple of one more": lambda k: k("mul", k("add", Y, 1), 3),
    "normalization": lambda k: k("mul", k("sub", X, Y), k("rsqrt", k("add", Z, 1e-5))),
    "a sum of choices": lambda k: k("add", k("where", k("gt", Z, 1), X, 0), Y),
    "the sign of one more": lambda k: k("lt", k("add", X, 1), 0),
    "relu": lambda k: k("where", k("gt", X, 0), X, 0),
    "another choice": lambda k: k("where", k("gt", X, Y), X, Z),
    "a test of what is loaded": lambda k: k("isnan", X),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_one_operand_is_opaque(name: str) -> None:
    kernel = Kernel()
    REWRITTEN[name](kernel)
    assert kernel.opaque == 1


@pytest.mark.parametrize("name", KEPT)
def test_all_operands_are_seen(name: str) -> None:
    kernel = Kernel()
    KEPT[name](kernel)
    assert kernel.opaque == 0


def test_two_sums_with_one_are_opaque() -> None:
    kernel = Kernel()
    kernel("mul", kernel("add", X, 1), kernel("sub", 1, Y))
    assert kernel.opaque == 2


def test_equal_code_is_one_value() -> None:
    kernel = Kernel()
    left, right = (kernel("sub", X, value(name)) for name in "yy")
    assert left.code != right.code
    kernel("sub", left, right)
    assert kernel.opaque == 1


def test_what_is_opaque_twice_is_not_the_same() -> None:
    kernel = Kernel()
    quotient = kernel("div", X, kernel("opaque", X))
    kernel("mul", quotient, X)  # x / o(x) · o(x) would be x: the quotient is opaque
    codes = [text.code for text in kernel.algebra.guard("sub", [quotient, quotient])]
    assert codes == ["t1", "tw_opaque(tw_opaque(t1))"]
