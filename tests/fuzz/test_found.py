"""Counterexamples of random graphs, shrunk; each was a wrong answer or a rejected kernel once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import harness

from .pipelines import run_interpreted, run_kernels
from .programs import make_input

pytestmark = pytest.mark.filterwarnings("ignore")


def check(function: Callable[..., Any], *arguments: torch.Tensor, dynamic: bool = False) -> None:
    """Eager, interpreter and kernels agree."""
    expected = list(torch.utils._pytree.tree_leaves(function(*arguments)))
    captured = harness.capture(function, *arguments, dynamic=dynamic)
    for run in (run_interpreted, run_kernels):
        torch.testing.assert_close(run(captured, list(arguments)), expected, equal_nan=True)


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


def test_scalar_and_vector_stores_of_one_buffer():
    def function(x, w):
        y = F.conv2d(x, w, padding=1, dilation=2)
        z = (y - y.mean()) * torch.rsqrt(y.var() + 1)
        return z.reshape(6, 28, 3), y

    check(function, make_input(1, (2, 4, 5, 7), torch.float32, "sliced"), torch.randn(4, 4, 1, 1))


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


def test_index_fill_keeps_strides():
    check(lambda x, i: x.index_fill(1, i, 1), torch.randn(17, 17).t(), torch.tensor([1, 2]))


def test_positions_that_turn_out_to_be_constants():
    def function(x):
        i = torch.bitwise_not(torch.full((17, 1), 3)) % 33
        return torch.gather(x, 2, i.reshape(1, 1, -1).expand(8, 1, 17))

    check(function, torch.randn(8, 1, 33))
    check(lambda x: x.index_fill(0, ~torch.full((2,), 3) % 5, 7), torch.randn(5, 3))


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


def test_an_order_of_constants_is_prepared():
    # The preparation's result was written where its initial contents were, under their name.
    def function(x):
        order = torch.arange(2).argsort(stable=True)
        return x.index_copy(0, order, x.narrow(0, 0, 2) * 2)

    check(function, torch.randn(5))


def test_sizes_from_a_scale_factor():
    for factor in (1.5, 0.5, 2.25):
        check(
            lambda x, f=factor: F.interpolate(x, scale_factor=f), torch.randn(2, 3, 9), dynamic=True
        )


def test_the_diagonal_of_symbolic_sizes():
    def function(x):
        return x.diagonal() * 2, torch.diagonal_scatter(x, x.diagonal() + 1)

    check(function, torch.randn(5, 3), dynamic=True)
    check(function, torch.randn(4, 6), dynamic=True)


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


def test_areas_of_no_size():
    check(lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), torch.randn(3, 2, 1))


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


def test_scattering_into_an_expanded_tensor():
    # PyTorch 2.11 says that the result is expanded, too.
    x = torch.tensor([[3.0]]).expand(12, 2)
    check(lambda x: torch.slice_scatter(x, x.narrow(0, 0, 6) * 2, 0, 0, 6), x)
    check(lambda x: torch.diagonal_scatter(x, x.diagonal() * 2), x)
    check(lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 0), x)


def test_sizes_that_turn_out_to_be_one_are_broadcast():
    x, weight = torch.randn(5, 1, 1), torch.randn(1, 1, 3)
    check(lambda x, w: w - F.conv1d(x, w, padding="same"), x, weight, dynamic=True)
    chunked = torch.randn(33, 12), torch.randn(3)
    check(lambda x, y: torch.minimum(x, torch.chunk(y, 2)[-1]), *chunked, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_counts_are_compared_with_numbers(dynamic):
    # Mesa 22.3 decides i64(count) > 1 as it is compiled.
    def function(x):
        places = torch.bucketize(x, torch.sort(x.reshape(-1)).values)
        return x.masked_fill(places > 1, float("-inf")), places

    check(function, torch.tensor([[1.75, 0.5, -1.0, -0.5, 0.25]]), dynamic=dynamic)
    check(lambda x: (x.long(), x.long() > 3), torch.arange(9, dtype=torch.int32), dynamic=dynamic)


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


def test_a_computed_size_that_turns_out_to_be_zero():
    # A grid is folded by a number of rows of workgroups, which was 0.
    x = torch.arange(28, dtype=torch.int16).reshape(4, 7)
    check(lambda x: (x[4:] + 1, x.t()[:, 4:], torch.logical_not(x)), x, dynamic=True)


def test_sums_of_narrow_integers_wrap():
    # Their kernel divided what the sum was before it was stored.
    x = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 1, 8)
    places = torch.zeros(128, dtype=torch.int64)

    def function(x, places):
        rows = x.index_select(1, places)
        return x.index_reduce(1, places, rows, "mean", include_self=False)

    check(lambda x, places: (function(x, places), function(x + 1, places)), x, places)


def test_what_a_loop_has_computed_is_kept_behind_a_barrier():
    # Positions are reflected by fmod, once for each row; lavapipe lost them.
    def function(x, grid):
        found = F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)
        return found * torch.rsqrt(found.pow(2).mean(-3, keepdim=True) + 1e-5)

    grid = torch.randint(-12, 13, (1, 5, 6, 2)) / 8
    check(function, torch.randn(1, 4, 5, 5), grid, dynamic=True)


def test_a_view_of_symbolic_sizes_that_turns_out_to_be_empty():
    # The strides of nothing reach back before its start: -1 elements.
    x = torch.arange(12.0).reshape(3, 4)
    check(lambda x: (torch.diagonal(x, 3, 1, 0), torch.diagonal(x, 3, 1, 0) + 1), x, dynamic=True)


def test_positions_of_cubic_interpolation_in_packed_rows():
    # NVIDIA's compiler got lost in positions that were clamped twice.
    x = torch.arange(112.0).reshape(1, 4, 4, 7).sin().bfloat16()
    check(lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic"), x, dynamic=True)


def test_wide_divisions_beside_small_kernels():
    # NVIDIA's compiler died of one such kernel, and took the NaN out of another.
    def function(x, y, k):
        places = F.adaptive_max_pool3d(x, (2, 3, 4), return_indices=True)[1]
        rows = torch.softmax(F.rms_norm(y, (1,), eps=0.1), 2)
        return torch.gather(k, 0, k % 3), places, rows, torch.fmod(k, 9), k[:2] // 5

    y = torch.tensor([1.5, float("nan"), -2.0, 0.0, float("inf"), 1.0]).reshape(1, 6, 1)
    check(function, make_input(5, (1, 2, 7, 4, 4), torch.float32, "expanded"), y, torch.arange(3))


def test_positions_from_quotients_of_sizes():
    # 33 / 16.5 was not 2 on an NVIDIA GPU.
    x = torch.arange(264.0).reshape(2, 4, 33)
    check(lambda x: F.interpolate(x, scale_factor=0.5)[:, :, 1:] * 2, x, dynamic=True)
    check(lambda x: (torch.arange(33) / 16.5, torch.arange(x.shape[2]) / 3), x, dynamic=True)
    check(lambda: (torch.arange(3) / 0.0, torch.arange(3) / 2e-38, 1e38 * torch.arange(3.0) / 0.1))


def test_as_many_elements_as_a_reduction_reads_but_others():
    # 2 · 5 · 9 elements are as many as 2 · 5 · 3 sums of 3 read: cat was computed with the sums.
    def function(x, places):
        counted = x.scatter(1, places.reshape(1, 3, 1).expand(2, 3, 3), 2, reduce="add")
        return torch.cat([counted, x * 2, (x * 2).cumsum(2)], 2), x * 2

    x = make_input(0, (2, 5, 3), torch.int32, "contiguous")
    check(function, x, torch.tensor([3, 0, 4]))


def test_the_smaller_of_a_number_and_itself():
    x = torch.tensor([[float("inf")]])
    check(lambda x: F.l1_loss(torch.minimum(x.roll(4, -1), x), x, reduction="sum"), x)
    check(lambda x: torch.maximum(x, x) - x, torch.tensor([float("nan"), float("-inf"), 2.0]))


def test_padding_crops_what_a_convolution_gives_and_has_as_many_elements():
    # 5 by 4 elements are read as 4 by 4, and written as 5 by 4: the kernel of the convolution wrote
    # what it had too much into the rows of zeros.
    def function(x, w):
        y = F.conv2d(x, w, padding=1)
        return F.pad(y, [0, -1, 0, 1]), y.abs().amax((1, 2))

    check(function, torch.randn(2, 3, 4, 5), torch.randn(3, 3, 3, 3))
    check(lambda x: F.pad(x.cumsum(-1), [0, -1, 0, 1]), torch.randn(3, 4, 5))
    check(lambda x: (F.pad(x * 2, [0, -1, 0, 1]).sum(-1), x * 2), torch.randn(3, 4, 5))


def test_an_index_that_is_not_needed_once_its_producer_is_inlined():
    # Rows that are all the same are read at computed positions: those were computed for nobody.
    def function(x, places):
        same = x.index_copy(0, torch.arange(2).flip(0), x).expand(5, 2, 3)
        return torch.take_along_dim(same, (places % 5).reshape(-1, 1, 1).expand(4, 2, 3), 0)

    check(function, torch.randn(2, 3), torch.tensor([7, 0, 4, 9]))


def test_sorting_along_a_computed_size():
    # Each step of each search repeated its positions in sizes of the input: a million characters.
    def function(x, w):
        y = F.conv3d(x, w, stride=2, padding=2)
        return torch.sort(y, -3, descending=True).values

    x, w = torch.randn(1, 2, 4, 4, 7).bfloat16(), torch.randn(6, 2, 3, 3, 3).bfloat16()
    expected = function(x, w)
    captured = harness.capture(function, x, w, dynamic=True)
    actual = run_kernels(captured, [x, w])[0]
    torch.testing.assert_close(actual, expected)


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


def test_a_checked_position_that_is_known():
    # Its check compared, and converted, a literal that WGSL takes for a 64-bit one.
    x = torch.arange(28, dtype=torch.int32).reshape(7, 4)
    k = torch.tensor([3])
    check(lambda x, k: x.index_put((k % 7, k % 4), x[0, 0], accumulate=True), x, k)
    check(lambda x, k: (x[k % 1, k * 0], x[torch.arange(1) % 5]), x, k)


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
def test_copies_of_views(dynamic):
    # Functionalizing leaves them where views may not alias.
    x = torch.randn(6, 4)
    check(lambda x: (*torch.split_copy(x, 4), *torch.unbind_copy(x)), x, dynamic=dynamic)
    check(lambda x: (torch.t_copy(x), torch.split_with_sizes_copy(x, [2, 4])), x, dynamic=dynamic)


def test_checks_past_the_end_of_what_is_computed():
    # Lanes of a last group of four that is not whole reported their positions.
    def function(x):
        k = torch.arange(17)
        return k.to(torch.float16)[(k % 34) - 17], F.one_hot(x % 17, 17)[:, 0]

    check(function, torch.arange(5) * 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_prepared_buffer_that_no_kernel_reads_in_the_end(dynamic):
    # What is computed once is given to the plan, though a remainder by 1 is 0 without it.
    def function(x):
        k = torch.arange(8, dtype=torch.float32).cummax(-1).indices
        return x.reshape(-1).index_put((k[k % 8] % 1,), torch.ones(())), x + 1

    check(function, torch.randn(()), dynamic=dynamic)
