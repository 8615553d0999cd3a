"""Counterexamples of random graphs, shrunk; each was a wrong answer or a rejected kernel once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import harness

from .pipelines import check, run_kernels
from .programs import make_input

pytestmark = [pytest.mark.rotates(6), pytest.mark.filterwarnings("ignore")]


def test_scalar_and_vector_stores_of_one_buffer():
    def function(x, w):
        y = F.conv2d(x, w, padding=1, dilation=2)
        z = (y - y.mean()) * torch.rsqrt(y.var() + 1)
        return z.reshape(6, 28, 3), y

    check(function, make_input(1, (2, 4, 5, 7), torch.float32, "sliced"), torch.randn(4, 4, 1, 1))


def test_index_fill_keeps_strides():
    check(lambda x, i: x.index_fill(1, i, 1), torch.randn(17, 17).t(), torch.tensor([1, 2]))


def test_positions_that_turn_out_to_be_constants():
    def function(x):
        i = torch.bitwise_not(torch.full((17, 1), 3)) % 33
        return torch.gather(x, 2, i.reshape(1, 1, -1).expand(8, 1, 17))

    check(function, torch.randn(8, 1, 33))
    check(lambda x: x.index_fill(0, ~torch.full((2,), 3) % 5, 7), torch.randn(5, 3))


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


def test_areas_of_no_size():
    check(lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), torch.randn(3, 2, 1))


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


def test_a_computed_size_that_turns_out_to_be_zero():
    # A grid is folded by a number of rows of workgroups, which was 0.
    x = torch.arange(28, dtype=torch.int16).reshape(4, 7)
    check(lambda x: (x[4:] + 1, x.t()[:, 4:], torch.logical_not(x)), x, dynamic=True)


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


def test_a_checked_position_that_is_known():
    # Its check compared, and converted, a literal that WGSL takes for a 64-bit one.
    x = torch.arange(28, dtype=torch.int32).reshape(7, 4)
    k = torch.tensor([3])
    check(lambda x, k: x.index_put((k % 7, k % 4), x[0, 0], accumulate=True), x, k)
    check(lambda x, k: (x[k % 1, k * 0], x[torch.arange(1) % 5]), x, k)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_masks_that_are_known_around_constants(dtype):
    # WGSL has no conversion of a 64-bit constant.
    def function(x):
        k = torch.full((33, 1), 3)
        taken = torch.take(torch.stack([k, k], 2), k % 66)
        return taken.index_select(0, (taken % 33).reshape(-1)) + x

    check(function, torch.ones((), dtype=dtype))
    check(function, torch.ones(3, dtype=dtype))
