"""`wgsl_op`: WGSL to an operator."""

from __future__ import annotations

import os
from typing import overload

from ..errors import OptionError
from ..user_wgsl.modules import is_kernel, parse_function, parse_kernel
from ..user_wgsl.source import find_source, remember
from .elementwise import ElementwiseOperator
from .kernels import KernelOperator, OfArguments

Wgsl = str | os.PathLike[str]
"""WGSL, or the path of a file with it."""


@overload
def wgsl_op(name: str, source: Wgsl, *, entry: str | None = None) -> ElementwiseOperator: ...


@overload
def wgsl_op(
    name: str,
    source: Wgsl,
    *,
    outputs: OfArguments,
    grid: OfArguments,
    uniforms: OfArguments | None = None,
) -> KernelOperator: ...


def wgsl_op(
    name: str,
    source: Wgsl,
    *,
    entry: str | None = None,
    outputs: OfArguments | None = None,
    grid: OfArguments | None = None,
    uniforms: OfArguments | None = None,
) -> ElementwiseOperator | KernelOperator:
    """An operator of PyTorch that is written in WGSL.

    A function of scalars becomes an elementwise operator, which is computed in one kernel with what
    is before and after it in a compiled graph (`ElementwiseOperator` says of which dtypes):

        swish = wgsl_op("mylib::swish", "fn swish(x: f32, b: f32) -> f32 { return … }")
        y = swish(x, 1.5)

    A module with a ``@compute`` function becomes an operator that runs it, as a kernel of its own:

        double = wgsl_op(
            "mylib::double",
            '''
            @group(0) @binding(0) var<storage, read> x: array<f32>;
            @group(0) @binding(1) var<storage, read_write> y: array<f32>;
            @group(0) @binding(2) var<uniform> count: u32;
            @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) at: vec3u) {
              if (at.x < count) { y[at.x] = 2 * x[at.x]; }
            }
            ''',
            outputs=lambda x: x.shape,
            grid=lambda x: -(-x.numel() // 64),
            uniforms=lambda x: {"count": x.numel()},
        )

    Its tensors are what it declares: arguments are ``var<storage, read>``, results
    ``var<storage, read_write>``, of ``f32``, ``f16``, ``i32`` or ``u32``, in row-major order.
    Arguments are not to be changed, and results hold anything before the kernel writes them. Its
    numbers are members of the struct of a ``var<uniform>``, or one such variable. One that takes
    seconds should be several calls: unlike this package's own kernels, it is not divided if it has
    numbers or uses ``global_invocation_id``.

    It works on tensors of the device and, as it is computed on a GPU, on CPU tensors with copies;
    in compiled functions, exported and cached graphs it is a kernel like any other.

    Args:
        name: ``namespace::name``, as for ``torch.library.custom_op``. An operator that has this
            name is replaced.
        source: WGSL, or the path of a file with it.
        entry: which of several functions of scalars is the operator; by default the one with its
            name.
        outputs: of the operator's arguments, the shape of the result, or a list of shapes if there
            are several. The parameters of this function are the operator's arguments, with their
            defaults: all tensors that the kernel reads, and those of its numbers that a caller
            gives. It may be called with symbolic sizes, as may the next two.
        grid: of the same arguments, the workgroups in one to three dimensions.
        uniforms: of the same arguments, the kernel's other numbers by name.

    Raises:
        WgslError: the WGSL is no such function or kernel; says where, in the file that has it.
        OptionError: ``outputs`` and ``grid`` do not fit the kind of source.
        TypeError: ``outputs`` has other parameters than tensors and numbers of the kernel.
    """
    found = find_source(name, source)
    kernel = is_kernel(found)
    if kernel and (outputs is None or grid is None):
        raise OptionError(f"{name}: it is a kernel; say outputs= and grid=")
    if not kernel and not (outputs is None and grid is None and uniforms is None):
        raise OptionError(
            f"{name}: outputs=, grid= and uniforms= are for kernels; no function is @compute"
        )
    made: ElementwiseOperator | KernelOperator
    if kernel:
        assert outputs is not None
        assert grid is not None
        made = KernelOperator(name, parse_kernel(found, name), outputs, grid, uniforms)
    else:
        wanted = entry or name.rpartition("::")[2]
        made = ElementwiseOperator(name, parse_function(found, name, wanted))
    remember(found)
    return made
