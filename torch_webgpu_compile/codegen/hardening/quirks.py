"""A table of what drivers' compilers were found to do to arithmetic, and how it is avoided.

One row per quirk. The pass of this package applies `rewrite` and `hides`; what no scalar expression
can say is in `spelling` or in a template, and which kernels there are at all is decided by other
stages.

Documented only, as no user of PyTorch can meet them: the sign and the payload of a NaN that a
kernel stores, and which one of several NaNs it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...ir.scalar import Op, Scalar
from . import real_numbers, special_values
from .real_numbers import Values


@dataclass(frozen=True, slots=True)
class Quirk:
    """A row of `QUIRKS`. One of ``rewrite``, ``hides`` and ``where`` says how it is avoided.

    Attributes:
        name: what it is about, in a few words.
        does: what drivers make of what.
        seen_on: those that were found to do it.
        test: the pytest id of a test that fails on one of them without the row.
        rewrite: another scalar in the place of one whose operands are simplified, or None.
        hides: the operands of an operation on float32, by position, that become opaque.
        where: the module, under the package's folder, whose code or text avoids it.
    """

    name: str
    does: str
    seen_on: tuple[str, ...]
    test: str
    rewrite: Callable[[Scalar], Scalar | None] | None = None
    hides: Callable[[Op, Values], Iterable[int]] | None = None
    where: str = ""


_NVIDIA, _MESA, _BOTH = ("NVIDIA",), ("Mesa",), ("NVIDIA", "Mesa")
_OLD_MESA = ("Mesa 22.3",)
_FOUND, _VALUES = "tests/fuzz/test_found.py::", "tests/fuzz/test_found_values.py::"
_EXPRESSIONS = "tests/fuzz/test_expressions.py::test_expressions_that_were_wrong"
_COMPOSED = "tests/gpu/test_composed_special_values.py::test_as_eager"
_SPECIAL = "tests/gpu/test_compiled_special_values.py::"
_FLOAT64 = "tests/gpu/test_compiled_float64.py::"
_SPELLING = "codegen/hardening/spelling.py"

QUIRKS: tuple[Quirk, ...] = (
    # ---- written otherwise, see `special_values`; the first row that applies does
    Quirk(
        "the remainder by a constant 0",
        "a number of the NaN of x % 0",
        _MESA,
        _VALUES + "test_division_by_a_constant_zero",
        rewrite=special_values.remainder_by_zero,
    ),
    Quirk(
        "inexact quotients of positions",
        "33 / 16.5 is below 2, as WGSL allows an error of 2.5 ULP",
        _NVIDIA,
        _FOUND + "test_positions_from_quotients_of_sizes",
        rewrite=special_values.exact_quotient,
    ),
    Quirk(
        "0 as a factor or divisor",
        "0 of 0 x and 0 / x, although x may be infinite, NaN or 0; also where NaN is a constant",
        _BOTH,
        _SPECIAL + "test_special_values",
        rewrite=special_values.times_zero,
    ),
    Quirk(
        "divisors beyond 2^126",
        "a / b is a (1 / b), which is 0 there, as WGSL allows",
        _NVIDIA,
        _VALUES + "test_divisors_beyond_what_gpus_divide_by",
        rewrite=special_values.vast_divisor,
    ),
    Quirk(
        "an operand twice",
        "0 of x - x, 1 of x / x, true of x = x; also where it knows that x is finite, as of a bool",
        _BOTH,
        _SPECIAL + "test_special_values",
        rewrite=special_values.of_itself,
    ),
    Quirk(
        "integers that are known to be 0",
        "0 of i ^ i, i - i, i % 1, and then 0 of x times that, although x may be infinite",
        _NVIDIA,
        _VALUES + "test_what_is_known_to_be_zero_times_what_is_not_finite",
        rewrite=special_values.known_zero,
    ),
    Quirk(
        "a function of its inverse",
        "x of exp(log x) and of √x √x, which are NaN where x is negative",
        _BOTH,
        _SPECIAL + "test_special_values",
        rewrite=special_values.inverse,
    ),
    Quirk(
        "a choice of a constant",
        "c ? x : 0 of (c ? 1 : 0) x, 0 of (c ? 0 : NaN) y; also in the padding of an unrolled row",
        _BOTH,
        _VALUES + "test_choices_that_are_known_times_what_is_not_finite",
        rewrite=special_values.chosen_number,
    ),
    # ---- operands that are hidden, see `real_numbers`
    Quirk(
        "a sum of terms with a common factor",
        "b of (a + b) - a, a (b + c) of a b + a c, 0 of a + b for b = -a",
        _BOTH,
        _EXPRESSIONS,
        hides=real_numbers.of_sums,
    ),
    Quirk(
        "a product or quotient that a factor is in twice",
        "a of a b / b, x (y y) of (x y) y, which may overflow, a b of a / (1 / b)",
        _BOTH,
        _VALUES + "test_products_that_are_finite_though_a_square_is_not",
        hides=real_numbers.of_products,
    ),
    Quirk(
        "two constant factors",
        "(c d) x of c (d x), also where c d is infinite or 0",
        _NVIDIA,
        _EXPRESSIONS,
        hides=real_numbers.of_constant_factors,
    ),
    Quirk(
        "a multiple of one more",
        "a b + a of a (b + 1) by a fused multiply-add, which is NaN where b is -inf",
        _NVIDIA,
        _VALUES + "test_infinity_times_one_more",
        hides=real_numbers.of_one_more,
    ),
    Quirk(
        "the root of a reciprocal",
        "1 / √x of √(1 / x), x of 1 / (1 / x)",
        _BOTH,
        _COMPOSED,
        hides=real_numbers.of_roots,
    ),
    Quirk(
        "a comparison with what is computed",
        "a = b of a - b = 0, which infinities are; a < b c of a / b < c",
        _NVIDIA,
        _EXPRESSIONS,
        hides=real_numbers.of_comparisons,
    ),
    Quirk(
        "whether what is computed is finite",
        "beside 64-bit integers takes floats for finite: no computed one is infinite or NaN",
        _NVIDIA,
        _COMPOSED,
        hides=real_numbers.of_tests,
    ),
    Quirk(
        "the larger by a comparison",
        "max(a, b) of a > b ? a : b, which loses the NaN of b",
        _BOTH,
        _COMPOSED,
        hides=real_numbers.of_extremes,
    ),
    # ---- spelled otherwise in WGSL
    Quirk(
        "variables that are never written",
        "knows what they hold: 0 of x (c ? 0 : NaN), and x of x > 1 ? -inf : x beside i64",
        _NVIDIA,
        _VALUES + "test_choices_of_constants_that_are_not_finite_scaled",
        where=f"{_SPELLING}: changed_bits",
    ),
    Quirk(
        "a bool as a number",
        "c ? x : 0 of f32(c) x",
        _BOTH,
        _VALUES + "test_bools_and_constants_times_what_is_not_finite",
        where=f"{_SPELLING}: known_number",
    ),
    Quirk(
        "a position that is 0 in a lane",
        "0 of 0 x in one lane of four, although x may be infinite",
        _BOTH,
        _VALUES + "test_infinity_times_positions_and_multiples_of_itself",
        where=f"{_SPELLING}: position_as_float",
    ),
    Quirk(
        "the signs of roots, sigmoids and signs",
        "takes √x and 1 / √x for positive, though √-0 is -0; a sigmoid for not 0; multiplies"
        " with a sign by choosing",
        _MESA,
        _VALUES + "test_functions_of_a_number_and_its_negative",
        where=f"{_SPELLING}: HIDDEN_RESULTS",
    ),
    Quirk(
        "sums of equal numbers",
        "3 x of x + x + x in a row that one invocation sums, and 0 of 3 x / 3 - x",
        _NVIDIA,
        _VALUES + "test_statistics_of_the_same_number_several_times",
        where=f"{_SPELLING}: is_known_sum",
    ),
    Quirk(
        "the maximum of negated integers",
        "loses the sign of one of several beside the lowest integer (once)",
        _NVIDIA,
        _VALUES + "test_the_largest_of_negated_integers",
        where=f"{_SPELLING}: avoids_neutral",
    ),
    Quirk(
        "the largest element less itself",
        "0 of m - m in the sum of exponentials, also where the maximum m is infinite",
        _MESA,
        _VALUES + "test_one_number_less_its_mean_is_nan_if_it_is_infinite",
        where="codegen/kernels/accumulate.py: ExpSum.total",
    ),
    Quirk(
        "booleans in workgroup memory",
        "loses them",
        _NVIDIA,
        "tests/gpu/test_transpose.py::test_dtypes",
        where="ir/access.py: workgroup_type",
    ),
    Quirk(
        "widened 32-bit integers",
        "takes 2^31 for -2^31 as a factor of an i64 that it knows to be an i32, and such an i64 for"
        " its own remainder by more than 2^32",
        _NVIDIA,
        "tests/fuzz/test_integers.py::test_factors_and_divisors_that_only_64_bits_hold",
        where=f"{_SPELLING}: int64_of",
    ),
    Quirk(
        "positions that are clamped twice",
        "loses them",
        _NVIDIA,
        _FOUND + "test_positions_of_cubic_interpolation_in_packed_rows",
        where="codegen/wgsl/scalars.py: Renderer._inside",
    ),
    Quirk(
        "a widened i32 beside a constant",
        "decides i64(i) > constant as it is compiled, wrongly",
        _OLD_MESA,
        _FOUND + "test_counts_are_compared_with_numbers",
        where="codegen/wgsl/scalars.py: Renderer._narrow",
    ),
    Quirk(
        "the exponential of NaN",
        "infinity, so that a sigmoid of NaN is 0",
        ("SwiftShader",),
        _COMPOSED,
        where=f"{_SPELLING}: fast_exp",
    ),
    Quirk(
        "many branches",
        "compiles a kernel for minutes that checks bounds by && in what is loaded often",
        ("SwiftShader",),
        "tests/gpu/test_written_attention.py::test_masks_that_replace",
        where=f"{_SPELLING}: all_of",
    ),
    # ---- in the functions of templates
    Quirk(
        "a comparison with a select",
        "min(a, b) of it, which drops one operand's NaN",
        _BOTH,
        "tests/gpu/test_compiled_special_values.py::test_special_values",
        where="templates/math.wgsl.jinja: tw_minimum",
    ),
    Quirk(
        "the sum of a number and its negative",
        "0, although it hands on NaN",
        _MESA,
        _VALUES + "test_functions_of_a_number_and_its_negative",
        where="templates/math.wgsl.jinja: tw_atan2",
    ),
    Quirk(
        "compensated sums",
        "(b + a) - s of b - (s - a), so that their second part is lost",
        _NVIDIA,
        _FLOAT64 + "test_functions",
        where="templates/math_f64.wgsl.jinja: tw_opaque_f64",
    ),
    Quirk(
        "edges of logarithms",
        "knows that a sigmoid is not 0, and computes 0",
        _MESA,
        _COMPOSED,
        where="templates/math_f32.wgsl.jinja: tw_log_edges",
    ),
    Quirk(
        "f32(f16(x))",
        "leaves it out, so that x is not rounded",
        _NVIDIA,
        _VALUES + "test_what_is_stored_in_16_bits_is_what_its_kernel_goes_on_with",
        where="templates/math.wgsl.jinja: tw_f16_rounded",
    ),
    Quirk(
        "a constant behind a vector of 64-bit quotients",
        "adds it to the last lane's, for all lanes",
        _NVIDIA,
        _VALUES + "test_constants_added_to_quotients_of_wide_integers",
        where="templates/math.wgsl.jinja: tw_trunc_divide_",
    ),
    Quirk(
        "remainders of negative integers",
        "wrong ones of %, which SPIR-V leaves open",
        _NVIDIA,
        _VALUES + "test_remainders_of_what_is_known_to_be_even",
        where="templates/math.wgsl.jinja: tw_fmod_",
    ),
    Quirk(
        "shifts by an index",
        "0 of a shift behind two comparisons",
        _MESA,
        "tests/gpu/device_ops/test_integers.py::test_shifts_by_positions",
        where="templates/math.wgsl.jinja: tw_shift_left_",
    ),
    Quirk(
        "several returns behind a barrier",
        "loses what the function returned",
        _OLD_MESA,
        _FOUND + "test_what_a_loop_has_computed_is_kept_behind_a_barrier",
        where="templates/math_f32_angle.wgsl.jinja: tw_fmod",
    ),
    # ---- in stages that decide which kernels there are
    Quirk(
        "64-bit divisions beside something else",
        "dies of some kernels, and takes floats in others for finite",
        _NVIDIA,
        _VALUES + "test_wide_divisions_beside_small_kernels",
        where="scheduler/grouping/joint.py: _has_wide_division",
    ),
    Quirk(
        "64-bit divisions of positions in windows",
        "dies of some kernels",
        _NVIDIA,
        _VALUES + "test_wide_divisions_beside_small_kernels",
        where="lowering/pooling.py: unravel",
    ),
    Quirk(
        "comparisons of widened integers that it finds to be constant",
        "decides them wrongly, for sizes that a dynamic graph is compiled again for",
        _OLD_MESA,
        "tests/unit/test_at_sizes.py::test_decisions",
        where="ir/ranges.py: Decisions",
    ),
    Quirk(
        "the constant -0.0",
        "0.0, also of the cast of its bits",
        ("Dawn",),
        _SPECIAL + "test_special_values",
        where="codegen/wgsl/literals.py: tw_nzero_bits",
    ),
    Quirk(
        "long loops",
        "counts the iterations of all loops of an invocation, nested ones too, and ends every loop"
        " after 65,535 of them, without an error",
        ("Mesa (llvmpipe)",),
        "tests/gpu/test_loop_limit.py::test_the_driver_makes_as_many_iterations_as_its_target_says",
        where="target.py: max_loop_iterations",
    ),
)

REWRITES = tuple(quirk.rewrite for quirk in QUIRKS if quirk.rewrite is not None)
HIDES = tuple(quirk.hides for quirk in QUIRKS if quirk.hides is not None)
