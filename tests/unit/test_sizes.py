"""Expressions mean exactly what they are written as, however they are simplified."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_webgpu_compile.symbolic.sizes import (
    ONE,
    ZERO,
    as_expr,
    as_symbol,
    ceildiv,
    contiguous_strides,
    delinearize,
    evaluate,
    floordiv,
    is_less,
    is_nonnegative,
    iteration,
    linearize,
    maximum,
    minimum,
    mod,
    product,
    substitute,
    symbol,
    upper_bound,
)

# Two size symbols (≥ 0 and ≥ 2) and iteration symbols with constant and symbolic extents.
S, T = symbol("s", 0), symbol("t", 2)
ATOMS = {"s": S, "t": T, "i": iteration("i", 6), "j": iteration("j", 35), "k": iteration("k", T)}
EXTENTS = {"i": 6, "j": 35}

Tree = int | str | tuple


def trees() -> st.SearchStrategy[Tree]:
    """Nests of +, -, *, // and %, over numbers and symbols; divisors are positive."""
    leaves = st.one_of(st.integers(-12, 40), st.sampled_from(sorted(ATOMS)))
    divisors = st.one_of(st.integers(1, 36), st.just("t"))

    def extend(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.tuples(st.sampled_from("+-"), inner, inner),
            st.tuples(st.just("*"), inner, st.one_of(st.integers(-6, 36), st.just("t"))),
            st.tuples(st.sampled_from("/%"), inner, divisors),
        )

    return st.recursive(leaves, extend, max_leaves=10)


OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}


def build(tree, leaf):
    """The tree with ``leaf`` for its leaves."""
    if isinstance(tree, tuple):
        name, left, right = tree
        return OPERATORS[name](build(left, leaf), build(right, leaf))
    return leaf(tree)


def expression(tree):
    return build(tree, lambda x: as_expr(x) if isinstance(x, int) else ATOMS[x])


def value(tree, values):
    return build(tree, lambda x: x if isinstance(x, int) else values[x])


@st.composite
def assignments(draw):
    """Values of all symbols within their ranges."""
    values = {"s": draw(st.integers(0, 9)), "t": draw(st.integers(2, 9))}
    values |= {name: draw(st.integers(0, extent - 1)) for name, extent in EXTENTS.items()}
    values["k"] = draw(st.integers(0, values["t"] - 1))
    return values


SETTINGS = settings(deadline=None, max_examples=400, derandomize=True, database=None)


@SETTINGS
@given(trees(), assignments())
def test_values_are_exact(tree, values):
    assert evaluate(expression(tree), values) == value(tree, values)


@SETTINGS
@given(trees(), trees(), assignments())
def test_proofs_hold(left, right, values):
    a, b = expression(left), expression(right)
    x, y = value(left, values), value(right, values)
    if is_nonnegative(a):
        assert x >= 0
    if is_less(a, b):
        assert x < y
    high = upper_bound(a)
    if high is not None:
        assert x <= high


@SETTINGS
@given(trees(), trees(), assignments())
def test_substitution_commutes_with_evaluation(tree, replacement, values):
    key = as_symbol(S)
    assert key is not None
    inner = value(replacement, values)
    if inner < 0:
        return  # s stands for a size, which proofs about the tree have used
    new = substitute(expression(tree), {key: expression(replacement)})
    assert evaluate(new, values) == value(tree, {**values, "s": inner})


@SETTINGS
@given(st.lists(st.integers(1, 9), max_size=4), st.data())
def test_delinearize_is_the_inverse_of_linearize(sizes, data):
    shape = [as_expr(n) for n in sizes]
    numel = product(shape)
    flat = iteration("flat", numel)
    index = delinearize(flat, shape)
    if numel is not ONE:
        assert linearize(index, contiguous_strides(shape)) is flat
    position = data.draw(st.integers(0, int(numel) - 1))
    at = [evaluate(i, {"flat": position}) for i in index]
    assert all(0 <= x < n for x, n in zip(at, sizes, strict=True))
    strides = [int(s) for s in contiguous_strides(shape)]
    assert sum(x * s for x, s in zip(at, strides, strict=True)) == position


def test_symbolic_shapes_round_trip():
    shape = (S + 1, T, as_expr(4))
    flat = iteration("flat", product(shape))
    assert linearize(delinearize(flat, shape), contiguous_strides(shape)) is flat


def test_a_remainder_times_a_size_is_merged():
    row = iteration("m", S * T)
    width = symbol("w", 1)
    assert row // T * (T * width) + row % T * width is row * width


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda: (ATOMS["j"] // 7) * 7 + ATOMS["j"] % 7, lambda: ATOMS["j"]),
        (lambda: ATOMS["i"] // 6, lambda: ZERO),
        (lambda: (ATOMS["i"] * 4 + 3) // 4, lambda: ATOMS["i"]),
        (lambda: (ATOMS["i"] * T) % T, lambda: ZERO),
        (lambda: (ATOMS["j"] // 5) % 7, lambda: ATOMS["j"] // 5),
        (lambda: ceildiv(S * 4, 4), lambda: S),
        (lambda: (ATOMS["j"] // 2 + 1) // 3, lambda: (ATOMS["j"] + 2) // 6),
    ],
)
def test_simplifications(made, wanted):
    assert made() is wanted()


def test_equal_expressions_are_one_object():
    assert S + T is T + S
    assert (S + 1) * (T - 1) is S * T - S + T - 1


@pytest.mark.parametrize(("a", "b"), [(3, 7), (7, 3), (5, 5), (0, 4)])
def test_minimum_and_maximum(a: int, b: int) -> None:
    left, right = symbol("a"), symbol("b")
    values = {"a": a, "b": b}
    assert evaluate(minimum(left, right), values) == min(a, b)
    assert evaluate(maximum(left, right), values) == max(a, b)
    assert evaluate(minimum(left, b), values) == min(a, b)
    assert minimum(a, b) is as_expr(min(a, b))
    assert maximum(a, b) is as_expr(max(a, b))


def test_extremes_of_sizes():
    m, n = symbol("m"), symbol("n")
    smaller, larger = minimum(m, n + 2), maximum(m, n + 2)
    for at_m in range(6):
        for at_n in range(6):
            values = {"m": at_m, "n": at_n}
            assert evaluate(smaller, values) == min(at_m, at_n + 2)
            assert evaluate(larger, values) == max(at_m, at_n + 2)
    assert minimum(m, m + 1) is m
    assert maximum(m, m + 1) is m + 1


def test_divisions_by_multiples_of_symbols() -> None:
    a, b = symbol("a", 1), symbol("b", 1)
    q = iteration("q", a * b)
    for lane in range(4):
        assert floordiv(4 * q + lane, 4 * a) is floordiv(q, a)
        assert mod(4 * q + lane, 4 * a + 8 * b) is 4 * mod(q, a + 2 * b) + lane
    assert mod(6 * q + 3, 4 * a) is not mod(6 * q + 2, 4 * a)
