"""Lowered Fourier transforms, interpreted, against the operators; stages, text and kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.compilations import compile_function
from tests.harness import capture, check, lower_checked, run_graph
from torch_webgpu_compile.codegen.tilings.fourier import choose_fourier_tiling
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir import fourier
from torch_webgpu_compile.ir.nodes import Fourier
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.symbolic.sizes import as_expr, symbol
from torch_webgpu_compile.target import Target

ops = torch.ops.webgpu
SMALL = Target(max_workgroup_invocations=128)
LARGE = Target(
    max_workgroup_nbytes=48 << 10, max_workgroup_invocations=1024, max_buffer_nbytes=1 << 30
)
LENGTHS = [*range(1, 20), 31, 37, 64, 97, 243, 1000, 1009, 2047, 2048, 2049, 4096, 6000, 65537]


def nodes_of(graph):
    return [node for node in graph.nodes if isinstance(node, Fourier)]


@pytest.mark.parametrize("n", LENGTHS)
def test_lowered_lengths(n):
    x = torch.randn(2, n, 2, 2)
    close = {"atol": 3e-6 * math.sqrt(n), "rtol": 1e-4}
    for forward in (True, False):
        graph = check(lambda x, f=forward: ops.fft(x, [1], f, 0.5), x, **close)
    check(lambda x: ops.rfft(x[..., 0], [1], 0.5), x, **close)
    half = x[:, : n // 2 + 1]
    graph = check(lambda x: ops.irfft(x, [1], n, 0.5), half, **close)
    if n % 2 == 0 and 2 < n <= 64:
        assert [node.length for node in nodes_of(graph)] == [n // 2]


@pytest.mark.parametrize("dims", [(0,), (0, 2), (2, 0, 1), (-1, -2)])
@pytest.mark.parametrize("shape", [(4, 5, 6), (3, 1, 8), (3, 4, 1)])
def test_lowered_dimensions(shape, dims):
    x = torch.randn(*shape, 2)
    n = shape[dims[-1]]
    real_dims = tuple(dim % 3 for dim in dims)
    check(lambda x: ops.fft(x, dims, True, 0.5), x)
    check(lambda x: ops.rfft(x[..., 0], real_dims, 0.5), x)
    half = x.narrow(real_dims[-1], 0, n // 2 + 1)
    check(lambda x: ops.irfft(x, real_dims, n, 0.5), half)


def test_what_has_no_meaning_is_not_looked_at():
    """The imaginary parts of the first number, and of the last for an even length."""
    for n in (2, 7, 8):
        spectrum = torch.randn(3, n // 2 + 1, 2)
        graph = check(lambda x, n=n: ops.irfft(x, [1], n, 1.0), spectrum)
        assert len(nodes_of(graph)) == 1


def test_no_rows_and_no_dimensions():
    check(lambda x: ops.fft(x, [1], True, 1.0), torch.randn(0, 4, 2))
    check(lambda x: ops.rfft(x, [1], 1.0), torch.randn(0, 4))
    check(lambda x: ops.irfft(x, [1], 5, 1.0), torch.randn(0, 3, 2))
    graph = check(lambda x: ops.fft(x, [], True, 2.0), torch.randn(3, 4, 2))
    assert not nodes_of(graph)


def test_symbolic_rows():
    def run(x):
        for k in (1, -1):
            int(x.shape[k])  # a kernel is made for lengths that are numbers
        return ops.fft(x, [1], True, 1.0)

    check(run, torch.randn(3, 12, 2), dynamic=True)


def test_stages_with_their_roots():
    """The order of results and of the table, in NumPy as kernels do it."""
    for n in (2, 12, 30, 64, 210, 1000, 1024):
        for forward in (True, False):
            radices = fourier.choose_radices(n)
            x = np.random.default_rng(0).standard_normal((n, 2)) @ [1, 1j]
            wanted = np.fft.fft(x) if forward else np.fft.ifft(x) * n
            table = None
            if len(radices) > 1:
                table = fourier.stage_roots(radices, forward) @ [1, 1j]
                assert len(table) == n - radices[0]
            at, before = -radices[0] + 1, 1
            for radix in radices:
                b = np.arange(n // radix)
                taken = x.reshape(radix, n // radix).astype(np.complex128)
                for q in range(1, radix):
                    if before > 1:
                        taken[q] *= table[at + (q - 1) * before + b % before]
                result = (
                    np.fft.fft(taken, axis=0) if forward else np.fft.ifft(taken, axis=0) * radix
                )
                x = np.empty(n, np.complex128)
                for q in range(radix):
                    x[(b - b % before) * radix + b % before + q * before] = result[q]
                at += before * (radix - 1)
                before *= radix
            np.testing.assert_allclose(x, wanted, atol=1e-5 * math.sqrt(n))


def test_radices():
    for n in range(2, 3000):
        if not fourier.has_radices(n):
            continue
        radices = fourier.choose_radices(n)
        assert math.prod(radices) == n
        assert all(r <= 16 or r in (17, 19, 23, 29, 31) for r in radices)
    assert fourier.choose_radices(1024) == (16, 8, 8)
    assert fourier.choose_radices(1000) == (10, 10, 10)
    assert fourier.choose_radices(4096) == (16, 16, 16)


@pytest.mark.parametrize("target", [SMALL, Target(), LARGE])
def test_every_row_that_is_lowered_to_one_node_fits(target):
    for rows_fast, rows in ((False, 1), (True, 2), (True, 4)):
        longest = fourier.longest_row(target, rows)
        for n in [m for m in range(2, longest + 1) if fourier.has_radices(m)]:
            radices = fourier.choose_radices(n)
            for count in (as_expr(1), as_expr(1000), symbol("s")):
                tiling = choose_fourier_tiling(radices, count, rows_fast, rows_fast, target)
                assert tiling is not None
                assert tiling.nbytes <= target.max_workgroup_nbytes
                assert tiling.workgroup <= target.max_workgroup_invocations
                assert tiling.rows >= (rows if count is not as_expr(1) else 1)


@pytest.mark.parametrize("target", [SMALL, Target(), LARGE])
@pytest.mark.parametrize("n", [2049, 6000, 65536, 1 << 20, 1 << 24, 31**4, 3**12])
def test_passes_fit(n, target):
    longest = fourier.longest_row(target, 4)
    while n > fourier.longest_row(target):
        first = fourier.divide(n, longest)
        assert n % first == 0
        assert 1 < first <= longest
        n //= first
    assert fourier.padded_length(10007, longest) >= 2 * 10007 - 1


def lengths(function, x, target=LARGE):
    compilation = compile_function(function, x, target=target)
    assert all(kernel.kind == "fourier" for kernel in compilation.plan.kernels)
    return [node.length for node in compilation.graph.nodes if isinstance(node, Fourier)]


def test_kernel_counts():
    x = torch.randn(2, 1 << 14, 2)
    assert lengths(lambda x: ops.fft(x, [1], True, 1.0), x[:, :4096]) == [4096]
    assert lengths(lambda x: ops.fft(x, [1], True, 1.0), x) == [128, 128]
    assert lengths(lambda x: ops.fft(x, [1], True, 1.0), x[:, :1009]) == [2048, 2048]
    assert lengths(lambda x: ops.rfft(x[..., 0] * 2, [1], 1.0), x[:, :1000]) == [1000]
    assert lengths(lambda x: ops.irfft(x, [1], 4000, 1.0), x[:, :2001]) == [2000]
    image = torch.randn(2, 64, 48)
    assert lengths(lambda x: ops.rfft(x, [1, 2], 1.0), image) == [48, 64]


def test_half_of_the_numbers_between_passes_of_real_ones():
    for n in (6000, 8192):  # the passes of one begin with an odd length
        graph = check(lambda x: ops.rfft(x, [1], 1.0), torch.randn(2, n), atol=1e-3, rtol=1e-4)
        first, second = nodes_of(graph)
        kept = first.length // 2 + 1
        assert graph.buffers[first.output].sizes[1] is as_expr(kept)
        assert second.ranges[-1] is as_expr(kept)
        assert second.mirror is not None
    wrong = replace(second, mirror=second.index)
    with pytest.raises(VerificationError, match="exactly once"):
        run_graph(graph.with_nodes((first, wrong), graph.buffers), [torch.randn(2, n)])


def test_workgroups_that_fold_past_the_last_row_store_nothing():
    x = torch.randn(18, 1024, 2)
    for grid, guarded in ((65535, False), (18, False), (7, True)):
        target = Target(max_grid=grid)
        state = compile_function(lambda x: ops.fft(x, [1], True, 1.0), x, target=target)
        (kernel,) = state.plan.kernels
        assert ("if (row_ok)" in kernel.wgsl) == guarded


def test_wrong_nodes_are_found():
    graph = lower_checked(capture(lambda x: ops.fft(x, [1], True, 1.0), torch.randn(3, 12, 2)))
    (node,) = nodes_of(graph)
    wrong = [
        replace(node, radices=(12,)),
        replace(node, factor_real=node.root_real),
        replace(node, index=node.index[:1]),
        replace(node, imaginary=node.root_imaginary),
    ]
    for other in wrong:
        changed = graph.with_nodes((other,), graph.buffers)
        with pytest.raises(VerificationError):
            verify_loop_graph(changed)
