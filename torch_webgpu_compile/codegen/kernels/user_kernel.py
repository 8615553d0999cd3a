"""Kernels that users have written: their own text, bound and launched as plans want it."""

from __future__ import annotations

from ...errors import UnsupportedOp
from ...ir.buffers import Buffer
from ...ir.folding import as_index
from ...ir.nodes import UserKernel
from ...ir.scalar import Const, Scalar
from ...ir.spaces import Origin
from ...plan.model import (
    USER_KERNEL,
    Binding,
    Dispatch,
    Kernel,
    KernelBinding,
    KernelCall,
    Parameter,
)
from ...plan.numbers import HostNumber
from ...symbolic.sizes import ZERO, as_expr
from ...target import Target
from ..wgsl.indices import host_number
from .builder import kernel_name


def generate_user_kernel(
    node: UserKernel, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The call of one node's kernel.

    Raises:
        UnsupportedOp: it needs more of a GPU than this one has.
    """
    written = node.kernel
    inputs = [found.buffer for found in node.inputs]
    names = (*inputs, *node.outputs)
    _check_limits(node, buffers, target)
    parameters = tuple(map(_parameter, node.numbers))
    traffic = (
        *((buffers[name].nbytes, ZERO) for name in inputs),
        *((ZERO, buffers[name].nbytes) for name in node.outputs),
    )
    ops = tuple(dict.fromkeys(origin.op for origin in node.origins))
    kernel = Kernel(
        name=kernel_name(USER_KERNEL, ops),
        kind=USER_KERNEL,
        wgsl=written.wgsl,
        bindings=tuple(KernelBinding(k >= len(inputs)) for k in range(len(names))),
        workgroup_size=written.workgroup_size,
        parameter_count=len(parameters),
        ops=ops,
        sources=tuple(dict.fromkeys(o.source for o in node.origins if o.source)),
    )
    step = Dispatch(
        0,
        tuple(map(Binding, names)),
        node.grid,
        parameters,
        sum((read for read, _ in traffic), ZERO),
        sum((stored for _, stored in traffic), ZERO),
        ZERO,
        iterations=node.iterations if target.max_loop_iterations else ZERO,
        traffic=traffic,
    )
    return KernelCall(kernel, step)


def _check_limits(node: UserKernel, buffers: dict[str, Buffer], target: Target) -> None:
    written = node.kernel
    cause = step = ""
    x, y, z = written.workgroup_size
    names = (*(found.buffer for found in node.inputs), *node.outputs)
    if x * y * z > target.max_workgroup_invocations:
        cause = f"its workgroups have {x * y * z} invocations, this GPU allows "
        cause += f"{target.max_workgroup_invocations}"
        step = "write it for smaller ones"
    elif len(names) > target.max_storage_buffers:
        cause = f"it has {len(names)} tensors, this GPU allows {target.max_storage_buffers}"
        step = "join some of them"
    elif any(size.is_constant and size.constant > target.max_grid for size in node.grid):
        cause = f"its grid {node.grid} has more than {target.max_grid:,} workgroups in a dimension"
        step = "divide them among the dimensions"
    for name in names:
        if len(buffers[name].windows(target)) > 1:
            cause = f"a tensor of {buffers[name].nbytes} bytes needs several bindings of "
            cause += f"{target.window_nbytes:,} bytes"
            step = "split the tensor"
    if cause:
        origin = next(iter(node.origins), Origin(written.name))
        raise UnsupportedOp(written.name, cause, step, origin.source)


def _parameter(number: Scalar) -> Parameter:
    """A number as a kernel's parameter: an i32, or a float32's bits; u32 are i32 of their bits."""
    expr = as_index(number)
    if expr is not None:
        if expr.is_constant:
            return as_expr((expr.constant + (1 << 31)) % (1 << 32) - (1 << 31))
        return expr
    if isinstance(number, Const):
        return HostNumber("float", (float(number.value),))
    found = host_number(number)
    assert found is not None, number
    return found
