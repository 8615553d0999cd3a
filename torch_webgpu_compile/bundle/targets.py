"""The devices that bundles are compiled for, none of which is here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from ..errors import OptionError
from ..plan.model import Dispatch, Plan, bound_nbytes
from ..symbolic.sizes import ZERO, Expr, symbols_of
from ..target import Machine, Target
from .target_file import load_target

BROWSER = Target(
    name="browser",
    backend="",
    features=frozenset(),
    exp_keeps_nan=False,
    waits_for_compiler=True,
    machine=Machine(
        bytes_per_second=68e9,
        flops_per_second=2.6e12,
        dispatch_seconds=5e-6,
        multiprocessors=8,
        workgroup_nbytes=32 << 10,
    ),
)
"""The limits that every implementation of WebGPU has, and no optional feature.

As fast as a laptop's GPU (Apple's M1, by its data sheet): pages run on these, and on phones. With
the H200's 132 multiprocessors, products are cut into parts that nothing small can run side by side:
MiniLM took three times as long on a CPU. Of products' kernels there are short ones, as a page
compiles all of them before its first result.
"""

DESKTOP = Target(
    name="desktop",
    backend="",
    features=frozenset(),
    exp_keeps_nan=False,
    max_binding_nbytes=(1 << 30) - 4,
    max_buffer_nbytes=1 << 30,
    max_storage_buffers=10,
    max_workgroup_nbytes=32 << 10,
    machine=Machine(
        bytes_per_second=300e9,
        flops_per_second=13e12,
        dispatch_seconds=3e-6,
        multiprocessors=28,
    ),
)
"""What browsers offer on GPUs of desktops; as fast as one of the middle (NVIDIA's RTX 3060)."""

TARGETS: Mapping[str, Target] = {target.name: target for target in (BROWSER, DESKTOP)}

_FIELDS = {
    "maxBufferSize": "max_buffer_nbytes",
    "maxStorageBufferBindingSize": "max_binding_nbytes",
    "maxStorageBuffersPerShaderStage": "max_storage_buffers",
    "maxComputeInvocationsPerWorkgroup": "max_workgroup_invocations",
    "maxComputeWorkgroupSizeX": "max_workgroup_invocations",
    "maxComputeWorkgroupStorageSize": "max_workgroup_nbytes",
}
"""Of `Target`, by WebGPU's names of the limits that bundles can depend on."""

LIMITS: Mapping[str, int] = {name: getattr(BROWSER, field) for name, field in _FIELDS.items()}
"""The same limits with what every device has."""


def target_of(target: str | os.PathLike[str] | Target) -> Target:
    """A target by name or by the path of its file, or itself. Raises OptionError as `load_target`.

    A name without a dot or a slash is no path.
    """
    if isinstance(target, Target):
        return target
    name = os.fspath(target)
    if name in TARGETS:
        return TARGETS[name]
    if not re.search(r"[./\\]", name):
        known = ", ".join(TARGETS)
        raise OptionError(f"target={name!r} is not valid; use one of {known}, or a file's path")
    return load_target(name)


def lacking(features: Iterable[str], limits: Mapping[str, int], target: Target) -> list[str]:
    """The features and limits that an adapter lacks, for a person."""
    found = [name for name in features if name not in target.features]
    for name, needed in limits.items():
        has = getattr(target, _FIELDS[name])
        if has < needed:
            found.append(f"{name} {needed} (it has {has})")
    return found


_IN_CODE = frozenset({"shader-f16", "shader-int64", "shader-f64", "shader-float32-atomic"})
_OF_SUBGROUPS = frozenset(
    {"subgroup", "subgroups", "cooperative-matrix", "chromium-experimental-subgroup-matrix"}
)
_RELIED_ON = ("exp_keeps_nan", "keeps_subnormal_halves")


def lacks_for(plan: Plan, made_for: Target, target: Target) -> list[str]:
    """What a GPU lacks to run a plan that was made for another one, for a person.

    Features that kernels can have count whether or not the plan's have them; limits as far as they
    do not depend on sizes.
    """
    in_code = _IN_CODE | (_OF_SUBGROUPS if made_for.subgroup_size else frozenset())
    found = lacking(sorted(made_for.features & in_code), needed_limits([(plan, {})]), target)
    if made_for.subgroup_size not in (0, target.subgroup_size):
        found.append(f"subgroups of {made_for.subgroup_size}")
    if not set(made_for.subgroup_matrix_configs) <= set(target.subgroup_matrix_configs):
        found.append("the same matrix units")
    found += [name for name in _RELIED_ON if getattr(made_for, name) > getattr(target, name)]
    most = target.max_loop_iterations
    if most and not 0 < made_for.max_loop_iterations <= most:
        found.append(f"loops of more than {most:,} iterations")
    return found


def needed_limits(plans: Iterable[tuple[Plan, Mapping[str, int]]]) -> dict[str, int]:
    """The limits that plans need at these sizes, where every device does not have them."""
    needed = dict.fromkeys(LIMITS, 0)
    for plan, sizes in plans:
        for part in plan.all_plans:
            for name, value in _limits(part, sizes):
                needed[name] = max(needed[name], value)
    return {name: value for name, value in needed.items() if value > LIMITS[name]}


def _limits(plan: Plan, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    for kernel in plan.kernels:
        x, y, z = kernel.workgroup_size
        yield "maxStorageBuffersPerShaderStage", len(kernel.bindings)
        yield "maxComputeInvocationsPerWorkgroup", x * y * z
        yield "maxComputeWorkgroupSizeX", x * y * z
        yield "maxComputeWorkgroupStorageSize", kernel.workgroup_nbytes
    yield from (("maxBufferSize", nbytes) for nbytes in allocated(plan, sizes))
    yield from (("maxStorageBufferBindingSize", nbytes) for _, nbytes in bound(plan, sizes))


def allocated(plan: Plan, sizes: Mapping[str, int]) -> Iterator[int]:
    """Bytes of each buffer that these sizes decide."""
    for buffer in plan.buffers.values():
        if knows(buffer.nbytes, sizes):
            yield buffer.nbytes_for(sizes)


def bound(plan: Plan, sizes: Mapping[str, int]) -> Iterator[tuple[Dispatch, int]]:
    """Dispatches, with the bytes that each of their bindings reaches, where these sizes decide."""
    for step in plan.steps:
        if isinstance(step, Dispatch):
            for binding in step.bindings:
                buffer = plan.buffers[binding.buffer]
                if knows(buffer.nbytes, sizes) and knows(binding.nbytes or ZERO, sizes):
                    yield step, bound_nbytes(binding, buffer, sizes)


def knows(expr: Expr, sizes: Mapping[str, int]) -> bool:
    """Whether these sizes decide a number; of a nested plan, data may."""
    return all(symbol.name in sizes for symbol in symbols_of(expr))
