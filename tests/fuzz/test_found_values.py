"""Counterexamples of random graphs, of arithmetic: special values, rounding, wide integers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .pipelines import check
from .programs import make_input

pytestmark = [pytest.mark.rotates(3), pytest.mark.filterwarnings("ignore")]


def test_variance_of_one_element_is_nan():
    # The kernel computes 0 / 0 from x - x; drivers may fold both.
    check(lambda x: (x.var(), x.std()), torch.tensor(2.0))
    check(lambda x: (x.var(0), x.var(0, correction=2)), torch.randn(2, 5))
    check(lambda x: x.var(1, correction=3), torch.tensor([[1.0, 1.0], [1.0, 2.0]]))


def test_means_of_nothing_are_nan():
    # 0.0 / 0.0 is not a WGSL constant.
    check(lambda x: (x.mean(), x.var(), x.std(), x.sum(), x.prod()), torch.zeros(0))
    check(lambda x: (x.mean(1), x.var(1), x.std(1)), torch.zeros(3, 0))


def test_division_by_a_constant_zero():
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), float("-inf")])
    check(lambda x: (x / 0.0, x / -0.0, x // 0.0, x % 0.0, torch.fmod(x, 0.0)), x)


def test_wide_integers_beside_bools():
    def function(x, y):
        both = torch.stack([x, x, y], 1)
        return both, both > 1

    check(function, torch.arange(3, dtype=torch.int32), torch.arange(3) - 1)


def test_bits_of_a_widened_position_compared_with_a_constant():
    # Mesa 22.3 compares a widened i32 with a constant wrongly.
    def function(x):
        y = torch.arange(33)
        z = y | y
        return torch.where(z > 1, x, 0), z, (z & x) > 2, torch.maximum(z, z) < 5

    check(function, torch.arange(33))


def test_angles_on_the_axes():
    # |y| / 0 with a constant 0 was not infinity.
    y = torch.tensor([2.0, -2.0, 0.0, -0.0, float("inf"), float("-inf"), 1e-30, float("nan")])

    def function(y):
        zero = torch.arange(1, dtype=torch.float32) * 0.5
        return torch.atan2(y, zero), torch.atan2(y, -zero), torch.atan2(zero, y), torch.atan2(y, y)

    check(function, y)
    grid = torch.tensor([0.0, -0.0, 1.0, -3.0, 1e30, -1e-30, float("inf"), float("-inf")])
    check(lambda x: torch.atan2(x[:, None], x), grid)


def test_the_position_of_an_extreme_compared_with_a_constant():
    # The same defect of Mesa as above, behind a reduction.
    def function(x):
        at = x.argmax(-2, keepdim=True)
        return at > 1, at < 1, torch.where(at >= 0, at, 7)

    check(function, torch.tensor([[0, 3, 2, 1, 7]], dtype=torch.uint8))
    check(function, torch.randn(5, 6))


def test_one_number_less_its_mean_is_nan_if_it_is_infinite():
    # Drivers make 0 of x - x and 1 of x / x, and nothing of what a 0 multiplies.
    x = torch.tensor([[1.5], [float("inf")], [float("nan")], [-2.0]])
    check(lambda x: (x - x.mean(1, keepdim=True), x.softmax(1), x.logsumexp(1)), x)
    check(lambda x: x - x.mean(1, keepdim=True), x.bfloat16())
    check(lambda x: (x - x.mean()) * torch.rsqrt(x.var() + 1), torch.tensor([0.75]))


@pytest.mark.parametrize("divisor", [17, -5, 3, 1000000007])
def test_constants_added_to_quotients_of_wide_integers(divisor):
    # NVIDIA's driver added them to the quotient of the last of four lanes.
    def function(x):
        rest = torch.fmod(x, divisor)
        quotient = torch.div(x, divisor, rounding_mode="trunc")
        return x % divisor, rest + divisor, rest - 1, quotient + 1, x // divisor * divisor + divisor

    small = torch.randint(-12, 13, (64,), generator=torch.Generator().manual_seed(0))
    check(function, small)
    check(function, small << 40)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("divisor", [12, -7])
def test_remainders_of_what_is_known_to_be_even(divisor, dynamic):
    def function(x):
        many = (x + x, 4 * x, (x << 9)[..., ::3], x * 65536)
        return [y % divisor for y in many], [y // divisor for y in many]

    x = torch.randint(-12, 13, (5, 12, 7), generator=torch.Generator().manual_seed(0))
    check(function, x, dynamic=dynamic)


def test_distances_over_what_is_not_a_number():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[nan, 1.0], [inf, 2.0], [-inf, 0.0], [nan, inf]])
    y = torch.tensor([[0.0, 1.0], [inf, 0.0]])
    check(lambda x, y: (torch.cdist(x, y, inf), torch.cdist(x, y, 0), torch.cdist(x, y, 1)), x, y)


def test_polygamma_halfway_between_poles():
    x = torch.tensor([-8.5, -7.5, -4.5, -20.5, -0.5, 0.5])
    check(lambda x: (torch.polygamma(4, x), torch.polygamma(2, x)), x)


def test_infinity_times_positions_and_multiples_of_itself():
    # Drivers see 0 · x in one lane of four, and (1 - 2) · x.
    x = torch.tensor([[1.5], [float("inf")], [float("nan")], [-float("inf")]])
    check(lambda x: torch.arange(4) * x, x)
    check(lambda x: (x - 2 * x, torch.rsub(x, x, alpha=2), 0.5 * x - 3 * x, -x + x * 0.25), x)


def test_positions_among_what_is_known_to_be_zero_are_compared():
    def function(x):
        best = x.cummax(-1).indices
        return x, best, torch.searchsorted(x.sort().values, best)

    check(function, torch.tensor([-2], dtype=torch.int8))


def test_division_and_powers_by_widened_integers():
    def function(x):
        below = -(x * x) - 1
        return x // below, x % below, torch.div(x, below, rounding_mode="trunc"), below // (x - 7)

    check(lambda: function(torch.arange(7)))
    check(lambda x: function(x.long()), torch.arange(-3, 4, dtype=torch.int32))
    check(lambda x: x.long() ** x.abs().long(), torch.arange(-3, 4, dtype=torch.int32))
    check(
        lambda x, y: x ** y.long(), torch.tensor([1, -1, 2, 1]), torch.tensor([-1, -2, -3, 3]).int()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_stored_in_16_bits_is_what_its_kernel_goes_on_with(dtype):
    # The factor of the first norm is stored, and is what the mean of the second is computed with.
    def function(x, places):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        steps, is_large = torch.div(x, x.abs() + 1, rounding_mode="floor"), x > 1
        centred = torch.where(is_large, F.layer_norm(normed, (8,), eps=0.1), x)
        chosen = steps.index_select(0, places % 8), torch.take(x, places % 8)
        return centred, steps, *chosen, is_large

    check(function, torch.tensor([1.75], dtype=dtype).expand(8), torch.tensor([2, 6, 1]))

    # NVIDIA leaves f32(f16(v)) out, so that numbers are rounded by their bits.
    bits = torch.randint(-(2**31), 2**31, (1 << 16,)).int()
    exponents = (bits & 0x807FFFFF) | ((bits >> 4 & 31) + 102 << 23)  # what float16 has, and more
    ties = exponents & ~0xFFF
    x = torch.cat([bits, exponents, ties]).view(torch.float32).reshape(-1, 2)
    check(lambda x: (x.to(dtype), x.to(dtype).float().amax(-1)), x)


def test_sums_of_narrow_integers_wrap():
    # Their kernel divided what the sum was before it was stored.
    x = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 1, 8)
    places = torch.zeros(128, dtype=torch.int64)

    def function(x, places):
        rows = x.index_select(1, places)
        return x.index_reduce(1, places, rows, "mean", include_self=False)

    check(lambda x, places: (function(x, places), function(x + 1, places)), x, places)


def test_wide_divisions_beside_small_kernels():
    # NVIDIA's compiler died of one such kernel, and took the NaN out of another.
    def function(x, y, k):
        places = F.adaptive_max_pool3d(x, (2, 3, 4), return_indices=True)[1]
        rows = torch.softmax(F.rms_norm(y, (1,), eps=0.1), 2)
        return torch.gather(k, 0, k % 3), places, rows, torch.fmod(k, 9), k[:2] // 5

    y = torch.tensor([1.5, float("nan"), -2.0, 0.0, float("inf"), 1.0]).reshape(1, 6, 1)
    check(function, make_input(5, (1, 2, 7, 4, 4), torch.float32, "expanded"), y, torch.arange(3))


def test_the_smaller_of_a_number_and_itself():
    x = torch.tensor([[float("inf")]])
    check(lambda x: F.l1_loss(torch.minimum(x.roll(4, -1), x), x, reduction="sum"), x)
    check(lambda x: torch.maximum(x, x) - x, torch.tensor([float("nan"), float("-inf"), 2.0]))


def test_bools_and_constants_times_what_is_not_finite():
    # NVIDIA's compiler makes c ? x : 0 of c · x, and knows what i - i is.
    def function(c, x):
        return (~c * x).masked_fill(c, 0), c * x, c.half() * x, x * c.to(torch.int32) * 2

    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0, -2.0, -0.0, float("nan")])
    c = torch.tensor([True, False, False, False, False, True, False])
    check(function, c, x)
    check(function, ~c, x)
    check(lambda x, k: (x * k.bool().float(), x * (k.bool() * 1)), x, torch.arange(7) % 2)

    def of_one(x):
        t = torch.arange(1, dtype=torch.float32) * 0.5
        return x + ((t - t.mean()) * torch.rsqrt(t.var() + 1)).select(-1, 0)

    check(of_one, torch.tensor([[True, False, True]]))


def test_what_is_known_to_be_zero_times_what_is_not_finite():
    # NVIDIA's compiler knows what i ^ i is, and what is computed from a stored constant.
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0, -2.0, -0.0])
    k = torch.arange(6, dtype=torch.int32)
    check(lambda x, k: (x * (k ^ k), x * (k - k), x * (k & 0), x * (k % 1), x * (k * 0)), x, k)

    def of_one(x):
        t = torch.softmax(torch.eye(1), -2)
        return t, (t - t.mean()) * torch.rsqrt(t.var() + 1) + x

    check(of_one, x)


def test_statistics_of_the_same_number_several_times():
    # NVIDIA's compiler made 3 x of a row's sum, and 0 of the distance from the mean.
    x = torch.tensor([[1.75], [float("nan")], [float("inf")], [-2.0], [float("-inf")]])
    places = torch.zeros(3, dtype=torch.int64)
    check(
        lambda x, k: (torch.std(x[:, k], 1, correction=0), x[:, k].sum(1) / 3 - x[:, 0]), x, places
    )
    check(lambda x, k: x[:, k].prod(1) / x[:, 0], x, places)


def test_the_largest_of_negated_integers():
    # NVIDIA's compiler took one of the seven without its sign.
    def function(k, x):
        return (-k).amax(), (-k).amin(), F.max_pool1d(x, 3, 2), (-k.reshape(1, 7)).amax(1)

    check(function, torch.tensor([2, 12, 6, 1, 1, 4, 4], dtype=torch.int32), torch.randn(2, 3, 12))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_not_finite_minus_itself_scaled(dynamic):
    # NVIDIA's compiler made 0 of `c (x - x)`, a choice between 0 and one NaN by bits.
    x = torch.randn(33, 45)
    x[torch.arange(33), torch.arange(33)] = torch.tensor([float("inf"), float("nan"), -1.0] * 11)

    def function(x):
        t = torch.lerp(x, x, 0.25)
        return t.sum(1), t.sum(0), t.mean(1), ((x - x) * 0.5).amax(1), torch.softmax(t, 1)

    check(function, x, dynamic=dynamic)


def test_choices_that_are_known_times_what_is_not_finite():
    # Compilers know that x > x never holds, and that 0 is multiplied.
    x = torch.tensor([float("inf"), float("nan"), -1.0, 0.0])
    k = torch.arange(4)

    def function(x, k):
        nothing = torch.where(x > x, x, 2.0) - 2
        contradiction = torch.where((k > 2) & (k < 1), 1.0, 0.0)
        choice = torch.where(k > 1, 3.0, 0.0) * x, x * (k != k).to(torch.int8)
        return nothing * x, contradiction * x, torch.where(k < k, x, 0.0) * x.exp(), *choice

    check(function, x, k)
    one = torch.tensor([1.75], dtype=torch.bfloat16)
    check(lambda x: (x - x.mean()) * torch.rsqrt(torch.where(x > x, x, 2).var() + 1), one)


def test_infinity_times_one_more():
    # NVIDIA's compiler made NaN of it.
    def function(x, y):
        t = x.masked_fill(x >= x, float("-inf"))
        return t * (t + 1), y * (x - 1), y * (1 - x), (t - 1) * (y + 1), (1 - t) * (1 - t)

    infinite = torch.tensor([float("inf"), float("-inf"), 0.5]).repeat(4)
    check(function, torch.randn(7, 12), infinite)


def test_choices_of_constants_that_are_not_finite_scaled():
    # NVIDIA's compiler made the other constant of `c ? NaN : 0`, where that was scaled.
    x = torch.tensor([-1.0, 0.0, 2.0, float("nan")])

    def function(x):
        masks = [torch.where(x > 0, special, 0.5) for special in (torch.inf, -torch.inf, torch.nan)]
        return [value for m in masks for value in (m * 0.25, m + 1, 2 - m, m.square(), m.exp())]

    check(function, x)
    check(lambda x: [(x / x) * 0.25, (x * 0) * 3 + 1, (x / 0) * 0.5 - 1], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_times_what_is_not_finite(dtype):
    # NVIDIA's compiler knows which places of an unrolled row are padding, and made 0 of their NaN.
    def function(x, places):
        t = F.pad(x, [0, 3])
        scaled = t * torch.rsqrt(t.pow(2).mean(0, keepdim=True) + 1e-5)
        chosen = torch.where(places < 7, F.pad(x, [0, 3], value=1), 0.0) * x.amax()
        return scaled, scaled.amin(0, keepdim=True), chosen, chosen.sum(), (t * -2) * x.amax()

    for special in (float("nan"), float("inf")):
        x = torch.tensor([1.5, 3.0, special, 0.25, 0.25, 1.0, 1.0], dtype=dtype)
        check(function, x, torch.arange(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_are_finite_minus_themselves(dtype):
    # NVIDIA's compiler knows that a bool is finite as a number, and made 0 of 0 times NaN.
    def function(b, k):
        t = b.to(dtype)
        scaled = (t - t.mean()) * torch.rsqrt(t.var() + 1)
        wide = k.to(dtype)
        nan = (b & ~b) / (b & ~b)
        return scaled, (t - t) * nan, (wide - wide) * nan, (t * 0) * nan, (0 / (t + 1)) * nan

    check(function, torch.tensor([True]), torch.tensor([3]))
    check(function, torch.tensor([False]), torch.tensor([3], dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divisors_beyond_what_gpus_divide_by(dtype):
    # NVIDIA's driver multiplies by 1 / b, which it takes for 0 from 2^126 on.
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([3.3e38, 3.7e31, -1.0, 0.0, inf, nan, -3e38, 1e-30], dtype=dtype)
    b = torch.tensor([3.3e38, -1e38, 8.6e37, 2.0, inf, 0.0, 1e-30], dtype=dtype)

    def function(a, b):
        a = a[:, None]
        whole = [a.div(b, rounding_mode=mode) for mode in ("floor", "trunc")]
        return a / b, *whole, torch.atan2(a, b), torch.logit(a), torch.atanh(a), a / 3e38

    check(function, a, b)


def test_products_that_are_finite_though_a_square_is_not():
    # NVIDIA's driver made x y² of (x y) y.
    x, y = torch.tensor([1e-30, -1e-30, 2.0]), torch.tensor([1e25, 3e24, 1.5])
    check(lambda x, y: ((x * y) * y, (y * x) * y, (x / (1 / y)) * y, (1 / x / y) / y), x, y)


def test_functions_of_a_number_and_its_negative():
    # Mesa made 0 of the sum by which they hand on NaN, and took a root for positive.
    x = torch.tensor([float("nan"), 2.0, -0.0, 0.0, float("inf")])

    def function(x):
        whole = torch.fmod(x, -x), torch.remainder(-x, x), torch.nextafter(x, -x)
        return torch.atan2(x, -x), torch.pow(x, -x), x.rsqrt().abs(), x.sqrt().abs(), *whole

    check(function, x)
