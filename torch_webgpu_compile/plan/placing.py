"""Plans one after the other, each on tensors of a larger call: `place`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import DType
from ..symbolic.nested import Record, map_fields
from ..symbolic.sizes import ONE, ZERO, Expr, as_expr, as_symbol, evaluate
from ..target import BINDING_ALIGNMENT
from .model import (
    Binding,
    Dispatch,
    Kernel,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    Step,
)
from .numbers import HostNumber


@dataclass(frozen=True)
class Placed:
    """A plan, and which tensors it is for.

    Attributes:
        plan: of dispatches only.
        inputs: for each input of the plan, the position of the call's.
        layouts: of these, as the plan has them: (sizes, offset), in elements.
    """

    plan: Plan
    inputs: tuple[int, ...]
    layouts: tuple[tuple[tuple[int, ...], int], ...]


def place(
    name: str, parts: Sequence[Placed], inputs: Sequence[PlanBuffer], together: bool = False
) -> Plan:
    """The plan that runs the parts in order.

    Args:
        inputs: the call's. None is changed by one part and used by another one.
        together: whether results of a few bytes are in one buffer, which is quicker to allocate
            than hundreds; each is bound alone.

    Returns:
        A plan without size symbols. Its outputs are those of the parts, in their order.
    """
    kernels: dict[tuple[Any, ...], int] = {}
    table: list[Kernel] = []
    buffers = {buffer.name: buffer for buffer in inputs}
    steps: list[Step] = []
    outputs: list[PlanOutput] = []
    for number, part in enumerate(parts):
        at = _At(part, number, inputs)
        for kernel in part.plan.kernels:
            key = kernel.wgsl, kernel.bindings
            if key not in kernels:
                kernels[key] = len(table)
                table.append(replace(kernel, name=f"{kernel.name}_{len(table)}"))
        found = [kernels[kernel.wgsl, kernel.bindings] for kernel in part.plan.kernels]
        buffers |= at.buffers()
        steps += [at.dispatch(s, found) for s in part.plan.steps if isinstance(s, Dispatch)]
        outputs += map(at.output, part.plan.outputs)
    if together:
        _put_together(buffers, steps, outputs)
    return Plan(
        name,
        tuple(table),
        buffers,
        tuple(steps),
        tuple(PlanInput(buffer.name) for buffer in inputs),
        tuple(outputs),
        {
            f"{number}.{name}": data
            for number, part in enumerate(parts)
            for name, data in part.plan.constants.items()
        },
    )


def _put_together(
    buffers: dict[str, PlanBuffer], steps: list[Step], outputs: list[PlanOutput]
) -> None:
    """Puts outputs that fit where a binding may start into one buffer for each dtype."""
    found: dict[DType, list[str]] = {}
    for buffer in buffers.values():
        nbytes = buffer.nbytes
        if buffer.role == "output" and 0 < nbytes.constant <= BINDING_ALIGNMENT:
            found.setdefault(buffer.dtype, []).append(buffer.name)
    places: dict[str, tuple[str, int]] = {}
    for dtype, names in found.items():
        whole = f"results_{dtype}"
        places |= {name: (whole, k * BINDING_ALIGNMENT) for k, name in enumerate(names)}
        size = as_expr(len(names) * BINDING_ALIGNMENT // dtype.itemsize)
        nbytes = as_expr(len(names) * BINDING_ALIGNMENT)
        buffers[whole] = PlanBuffer(whole, "output", dtype, (size,), (ONE,), ZERO, nbytes)

    def moved(binding: Binding) -> Binding:
        whole, start = places.get(binding.buffer, ("", 0))
        return Binding(whole, start, as_expr(BINDING_ALIGNMENT)) if whole else binding

    for k, step in enumerate(steps):
        assert isinstance(step, Dispatch)
        steps[k] = replace(step, bindings=tuple(map(moved, step.bindings)))
    for k, output in enumerate(outputs):
        if output.buffer in places:
            whole, start = places[output.buffer]
            offset = (output.offset or ZERO) + start // buffers[whole].dtype.itemsize
            outputs[k] = replace(output, buffer=whole, offset=offset)
    for name in places:
        del buffers[name]


class _At:
    """A part in its place.

    Args:
        number: of the part.
        inputs: the call's.
    """

    def __init__(self, part: Placed, number: int, inputs: Sequence[PlanBuffer]) -> None:
        self._part = part
        self._inputs = inputs
        plan = part.plan
        self._names = {name: f"{number}.{name}" for name in plan.buffers}
        self._given: dict[str, PlanBuffer] = {}
        self._sizes: dict[str, int] = {}
        for entry, position, (sizes, offset) in zip(
            plan.inputs, part.inputs, part.layouts, strict=True
        ):
            assert entry.buffer is not None
            own = plan.buffers[entry.buffer]
            self._names[entry.buffer] = inputs[position].name
            self._given[entry.buffer] = inputs[position]
            for expr, value in zip((*own.sizes, own.offset), (*sizes, offset), strict=True):
                symbol = as_symbol(expr)
                if symbol is not None:
                    self._sizes[symbol.name] = value

    def _known(self, record: Record) -> Record:
        """The same at the part's sizes, on the call's buffers."""
        return map_fields(self._leaf, record)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Expr):
            return leaf if leaf.is_constant else as_expr(evaluate(leaf, self._sizes))
        if isinstance(leaf, Binding):
            return self._known(replace(leaf, buffer=self._names[leaf.buffer]))
        assert not isinstance(leaf, HostNumber)
        return leaf

    def buffers(self) -> dict[str, PlanBuffer]:
        """The buffers that are not the call's."""
        made = {}
        for name, buffer in self._part.plan.buffers.items():
            if name not in self._given:
                own = self._names[name]
                made[own] = self._known(replace(buffer, name=own))
        return made

    def dispatch(self, step: Dispatch, kernels: Sequence[int]) -> Dispatch:
        """A step, whose kernels have these numbers."""
        return self._known(replace(step, kernel=kernels[step.kernel]))

    def output(self, output: PlanOutput) -> PlanOutput:
        """The call's output for an output of the part."""
        assert output.buffer is not None
        made = self._known(replace(output, buffer=self._names[output.buffer]))
        if output.mutates is None:
            return made
        # A change of an input, whose layout may have other dimensions.
        position = self._part.inputs[output.mutates]
        layout = self._inputs[position]
        offset = layout.offset if made.buffer == layout.name else made.offset or ZERO
        return PlanOutput(made.buffer, layout.sizes, layout.strides, offset, mutates=position)
