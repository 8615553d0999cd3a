"""The table of what drivers do: each row has a test and does what it says; the rest is left."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.codegen.hardening import harden, harden_body
from torch_webgpu_compile.codegen.hardening.quirks import QUIRKS, Quirk
from torch_webgpu_compile.ir.graph import LoopGraph, MapGroup, Member, Schedule
from torch_webgpu_compile.ir.numeric import convert, numpy_dtype, scalar_op
from torch_webgpu_compile.ir.scalar import (
    Const,
    Index,
    Load,
    Masked,
    Op,
    Scalar,
    apply,
    cast,
    children,
    const,
    index,
    walk,
)
from torch_webgpu_compile.ir.text import format_scalar
from torch_webgpu_compile.symbolic.sizes import iteration, symbol

ROOT = Path(__file__).parents[2]


def of(name: str, *args: Scalar | float) -> Scalar:
    operands = (const(a, dtypes.float32) if isinstance(a, int | float) else a for a in args)
    return apply(name, *operands)


def hidden(body: Scalar) -> Scalar:
    return apply("opaque", body)


X, Y, Z = (Load(name, (), dtypes.float32) for name in "xyz")
N = Load("n", (), dtypes.int32)
ZERO, ONE, BIG, NAN = (const(value, dtypes.float32) for value in (0, 1, 1e30, float("nan")))
POSITION = cast(Index(iteration("i0", 8)), dtypes.float32)
# By the name of a row that the pass applies: an expression, and what the pass makes of it.
EXAMPLES = {
    "the remainder by a constant 0": (of("fmod", X, ZERO), NAN),
    "inexact quotients of positions": (of("div", POSITION, BIG), of("exact_div", POSITION, BIG)),
    "0 as a factor or divisor": (of("mul", X, ZERO), of("mul", X, hidden(ZERO))),
    "divisors beyond 2^126": (of("div", X, Y), of("wide_div", X, Y)),
    "an operand twice": (of("sub", X, X), of("sub", X, hidden(X))),
    "integers that are known to be 0": (of("bitwise_xor", N, N), const(0, dtypes.int32)),
    "a function of its inverse": (
        of("exp", of("log", X)),
        of("where", of("ge", X, ZERO), of("abs", X), NAN),
    ),
    "a choice of a constant": (
        Masked(of("gt", X, ONE), Y, ZERO),
        Masked(of("gt", X, ONE), Y, hidden(ZERO)),
    ),
    "a sum of terms with a common factor": (
        of("sub", of("add", X, Y), X),
        of("sub", of("add", X, Y), hidden(X)),
    ),
    "a product or quotient that a factor is in twice": (
        of("mul", of("mul", X, Y), Y),
        of("mul", of("mul", X, Y), hidden(Y)),
    ),
    "two constant factors": (
        of("mul", of("mul", X, BIG), BIG),
        of("mul", hidden(of("mul", X, BIG)), BIG),
    ),
    "a multiple of one more": (
        of("mul", X, of("add", Y, ONE)),
        of("mul", X, hidden(of("add", Y, ONE))),
    ),
    "the root of a reciprocal": (
        of("sqrt", of("reciprocal", X)),
        of("sqrt", hidden(of("reciprocal", X))),
    ),
    "a comparison with what is computed": (
        of("eq", of("sub", X, Y), ZERO),
        of("eq", hidden(of("sub", X, Y)), ZERO),
    ),
    "whether what is computed is finite": (
        of("isinf", of("exp", X)),
        of("isinf", hidden(of("exp", X))),
    ),
    "the larger by a comparison": (
        of("where", of("gt", X, Y), X, Y),
        of("where", of("gt", X, Y), X, hidden(Y)),
    ),
}


# ---- the table


def named(quirk: Quirk) -> str:
    return quirk.name


@pytest.mark.parametrize("quirk", QUIRKS, ids=named)
def test_a_row_is_complete(quirk: Quirk) -> None:
    assert quirk.does
    assert quirk.seen_on
    assert all(quirk.seen_on)
    ways = [quirk.rewrite is not None, quirk.hides is not None, bool(quirk.where)]
    assert sum(ways) == 1
    assert (quirk.name in EXAMPLES) == (not quirk.where)


def test_names_tell_rows_apart() -> None:
    names = {quirk.name for quirk in QUIRKS}
    assert len(names) == len(QUIRKS)
    assert names >= EXAMPLES.keys()


@pytest.mark.parametrize("quirk", QUIRKS, ids=named)
def test_the_test_of_a_row_exists(quirk: Quirk) -> None:
    path, name = quirk.test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("quirk", [quirk for quirk in QUIRKS if quirk.where], ids=named)
def test_what_avoids_it_is_where_the_row_says(quirk: Quirk) -> None:
    path, name = quirk.where.split(": ")
    source = (ROOT / "torch_webgpu_compile" / path).read_text(encoding="utf-8")
    for part in name.split("."):
        assert part in source


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_does_what_it_says(name: str) -> None:
    body, wanted = EXAMPLES[name]
    assert harden_body(body) is wanted, format_scalar(harden_body(body))


def value(node: Scalar, loaded: dict[str, np.ndarray]) -> np.ndarray:
    """What NumPy makes of a scalar."""
    match node:
        case Const(number, dtype):
            return np.asarray(number, numpy_dtype(dtype))
        case Index():
            return np.asarray(3)
        case Load(buffer):
            return loaded[buffer]
        case Op("cast", (inner,), dtype):
            return convert("cast", value(inner, loaded), inner.dtype, dtype)
        case Op(name, args, dtype):
            return scalar_op(name, [value(a, loaded) for a in args], dtype)
        case Masked():
            return np.where(*(value(part, loaded) for part in children(node)))
    raise AssertionError(node)


@pytest.mark.parametrize("name", EXAMPLES)
def test_on_the_host_a_row_changes_nothing(name: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -2, 3e38, 1e-30], np.float32)
    x, y = (grid.ravel() for grid in np.meshgrid(special, special))
    loaded = {"x": x, "y": y, "n": np.arange(x.size, dtype=np.int32)}
    with np.errstate(all="ignore"):
        before, after = (value(body, loaded) for body in EXAMPLES[name])
    np.testing.assert_allclose(*np.broadcast_arrays(after, before), rtol=1e-5, equal_nan=True)


# ---- which operands are hidden: what drivers rewrite, and what they may


def count_opaque(body: Scalar) -> int:
    return sum(isinstance(n, Op) and n.name == "opaque" for n in walk(harden_body(body)))


REWRITTEN = {
    "a sum less a term": of("sub", of("add", X, Y), X),
    "a difference and a term": of("add", of("sub", X, Y), Y),
    "two differences from one number": of("sub", of("sub", X, Z), of("sub", Y, Z)),
    "multiples of both signs": of("sub", of("mul", X, 2), of("wide_div", X, 3)),
    "a common factor": of("add", of("mul", X, Y), of("mul", Z, X)),
    "a square and its root": of("add", of("square", X), of("mul", X, 2)),
    "the same product twice": of("sub", of("mul", X, Y), of("mul", Y, X)),
    "a quotient times its divisor": of("mul", of("wide_div", X, Y), X),
    "a term and its part in a quotient": of("add", X, of("wide_div", X, of("mul", X, 2))),
    "the root of a reciprocal": of("sqrt", of("reciprocal", X)),
    "a square that may overflow": of("mul", of("mul", X, Y), Y),
    "the reciprocal of a quotient": of("reciprocal", of("div", 1, X)),
    "what may be its absolute value": of("sub", X, of("abs", X)),
    "what may be a bound, or not": of("add", of("minimum", X, 2), of("neg", X)),
    "what may be chosen": of("sub", of("where", of("gt", Z, 1), X, Y), Y),
    "a difference that may be 0": of("eq", of("sub", of("mul", X, 2), Y), 0),
    "a quotient that may be 0": of("eq", of("reciprocal", X), 0),
    "the larger": of("where", of("gt", X, Y), X, Y),
    "the smaller": of("where", of("le", Y, X), Y, X),
    "at least a number": of("where", of("lt", X, 1), 1, X),
    "one more, multiplied": of("mul", of("add", Y, 1), X),
    "one less a number, multiplied": of("mul", X, of("sub", 1, Y)),
    "the square of one less": of("square", of("sub", X, 1)),
    "a test of what is computed": of("isinf", of("mul", X, Y)),
}
KEPT = {
    "a sum of its own": of("add", of("mul", X, Y), Z),
    "a multiple of a sum": of("add", of("mul", of("sub", X, Y), Z), Y),
    "multiples of one sign": of("add", of("mul", X, 2), X),
    "odd powers": of("add", X, of("mul", of("mul", of("mul", X, X), X), 0.044715)),
    "a product of powers": of("mul", of("mul", X, X), X),
    "a multiple of one more": of("mul", of("add", Y, 1), 3),
    "normalization": of("mul", of("sub", X, Y), of("rsqrt", of("add", Z, 1e-5))),
    "the sign of one more": of("lt", of("add", X, 1), 0),
    "another choice": of("where", of("gt", X, Y), X, Z),
    "a test of what is loaded": of("isnan", X),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_one_operand_is_opaque(name: str) -> None:
    assert count_opaque(REWRITTEN[name]) == 1


@pytest.mark.parametrize("name", KEPT)
def test_all_operands_are_seen(name: str) -> None:
    assert count_opaque(KEPT[name]) == 0


def test_two_sums_with_one_are_opaque() -> None:
    left, right = of("add", X, 1), of("sub", 1, Y)
    assert harden_body(of("mul", left, right)) is of("mul", hidden(left), hidden(right))


def test_what_is_opaque_twice_is_not_the_same() -> None:
    # What is opaque once in two places is one value, which a driver may compare with itself.
    value = of("exp", X)
    tests = of("bitwise_or", of("isinf", value), of("isnan", value))
    once = hidden(value)
    wanted = of("bitwise_or", of("isinf", once), of("isnan", hidden(once)))
    assert harden_body(tests) is wanted


def test_which_operand_is_hidden_is_chosen_by_how_often_it_was() -> None:
    # An explicit x / o(x) hides x already: of x / o(x) · x the quotient is hidden.
    quotient = of("wide_div", X, X)
    assert harden_body(of("mul", quotient, X)) is of("mul", hidden(quotient), X)


def test_members_of_a_kernel_see_each_other() -> None:
    sums = Member("s", of("add", X, Y), (), True)
    group = MapGroup((), (sums, Member("d", of("sub", Load("s", (), dtypes.float32), X), (), True)))
    (hardened,) = harden(Schedule(LoopGraph("g", {}, (), (), ()), (group,))).groups
    assert isinstance(hardened, MapGroup)
    assert hardened.members[0] == sums
    assert hardened.members[1].body is of("sub", Load("s", (), dtypes.float32), hidden(X))


def test_what_the_host_computes_is_left_alone() -> None:
    size = cast(index(symbol("s", 1)), dtypes.float64)
    number = cast(apply("div", size, const(0, dtypes.float64)), dtypes.float32)
    assert harden_body(number) is number
