"""Readable text of every compilation stage, printed or written to files on request."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .captured import CapturedGraph
from .errors import VerificationError
from .ir.nodes import HostCall
from .ir.text import format_node
from .options import CompileOptions
from .plan import serialize
from .plan.model import CopyBuffer, Dispatch, HostBuffer, HostStep, Kernel, KernelCall, Plan


def fx_text(captured: CapturedGraph) -> str:
    """The FX graph as Python code with shapes and user lines."""
    text = captured.module.print_readable(print_output=False)
    static = ", ".join(map(str, sorted(captured.static_inputs)))
    return f"# {captured.name}; parameters and buffers: arguments {static or 'none'}\n{text}"


# ---- kernels and plans


def kernel_text(kernel: Kernel) -> str:
    """The WGSL with a header of what it computes and for which lines of code."""
    header = [
        f"// {kernel.name}: {kernel.kind}, workgroup {'×'.join(map(str, kernel.workgroup_size))}",
        f"// computes {', '.join(kernel.ops) or 'nothing of ATen'}",
        *(f"// from {source}" for source in kernel.sources),
    ]
    return "\n".join(header) + "\n" + kernel.wgsl


def calls_text(calls: Sequence[KernelCall | HostCall]) -> str:
    """All generated kernels in order."""
    return "\n\n".join(
        kernel_text(call.kernel) if isinstance(call, KernelCall) else f"// {format_node(call)}"
        for call in calls
    )


def plan_text(plan: Plan) -> str:
    """Buffers, steps, inputs and outputs of a plan."""
    lines = [f"plan {plan.name}: {plan.dispatch_count} dispatches of {len(plan.kernels)} kernels"]
    if plan.preparation is not None:
        lines[0] += f", {plan.preparation.dispatch_count} in its preparation"
    lines += ["", "buffers:"]
    for buffer in plan.buffers.values():
        slot = "" if buffer.slot is None else f" slot {buffer.slot}"
        shape = f"{buffer.dtype}{list(buffer.sizes)} strides {list(buffer.strides)}"
        lines.append(f"  {buffer.name}: {shape}, {buffer.nbytes} bytes, {buffer.role}{slot}")
    lines += ["", "steps:", *(f"  {step_text(plan, step)}" for step in plan.steps)]
    lines += ["", "inputs:", *(f"  {entry}" for entry in plan.inputs)]
    lines += ["", "outputs:", *(f"  {entry}" for entry in plan.outputs)]
    return "\n".join(lines)


def step_text(plan: Plan, step: Any) -> str:
    """A step in one line."""
    match step:
        case Dispatch():
            kernel = plan.kernels[step.kernel]
            bound = ", ".join(
                f"{'→' if binding.writable else ''}{where.buffer}"
                for binding, where in zip(kernel.bindings, step.bindings, strict=True)
            )
            grid = "×".join(str(size) for size in step.grid)
            return f"dispatch {kernel.name} grid {grid} on {bound}"
        case CopyBuffer():
            return f"copy {step.source} → {step.destination}"
        case HostStep():
            return f"host {step.target}{step.arguments} → {', '.join(step.outputs)}"
        case _:
            raise TypeError(f"not a step: {step!r}")


def host_step_buffers(step: HostStep) -> list[str]:
    """Names of the plan buffers that a host step reads."""

    def visit(value: Any) -> list[str]:
        if isinstance(value, tuple):
            return [name for item in value for name in visit(item)]
        return [value.buffer] if isinstance(value, HostBuffer) else []

    return visit((step.arguments, step.keywords))


def verify_plan(plan: Plan) -> None:
    """Raises VerificationError when a plan names what it does not have."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {plan.name}: {what}")

    for step in plan.steps:
        if isinstance(step, Dispatch):
            require(0 <= step.kernel < len(plan.kernels), f"no kernel {step.kernel}")
            kernel = plan.kernels[step.kernel]
            require(
                len(kernel.bindings) == len(step.bindings)
                and kernel.parameter_count == len(step.parameters),
                f"{kernel.name} is called with the wrong number of bindings or parameters",
            )
            for binding in step.bindings:
                require(binding.buffer in plan.buffers, f"no buffer {binding.buffer}")
    _verify_other_steps(plan, require)
    _verify_contents(plan, require)
    prepared = [name for name, buffer in plan.buffers.items() if buffer.role == "prepared"]
    made: list[str | None] = []
    if plan.preparation is not None:
        verify_plan(plan.preparation)
        made = [output.buffer for output in plan.preparation.outputs]
        given = {entry.buffer for entry in plan.inputs}
        for needed in plan.preparation.inputs:
            require(needed.buffer in given, f"no input {needed.buffer} for its preparation")
    for buffer in prepared:
        require(buffer in made, f"{buffer} is not prepared")
    names = [entry.buffer for entry in plan.inputs] + [entry.buffer for entry in plan.outputs]
    for name in (*names, *plan.constants):
        require(name is None or name in plan.buffers, f"no buffer {name}")
    for output in plan.outputs:
        if output.mutates is not None and output.buffer is not None:
            role = plan.buffers[output.buffer].role
            own = plan.inputs[output.mutates].buffer == output.buffer
            require(role != "input" or own, f"{output.buffer} is another argument's memory")


_WRITABLE = ("input", "intermediate", "output")


def _verify_other_steps(plan: Plan, require: Callable[[bool, str], None]) -> None:
    """Host steps and copies name buffers of the plan, and write none whose contents are given."""
    for step in plan.steps:
        match step:
            case HostStep():
                shown, read = step.target, host_step_buffers(step)
                written = [name for name in step.outputs if name]
            case CopyBuffer():
                shown, read, written = "a copy", [step.source], [step.destination]
            case _:
                continue
        for name in (*read, *written):
            require(name in plan.buffers, f"no buffer {name} for {shown}")
        for name in written:
            role = plan.buffers[name].role
            require(role in _WRITABLE, f"{shown} writes {name}, which is {role}")


def _verify_contents(plan: Plan, require: Callable[[bool, str], None]) -> None:
    """Constants have their bytes, and inputs are arguments: an executor has memory for each."""
    given = {entry.buffer for entry in plan.inputs}
    for name, buffer in plan.buffers.items():
        require(buffer.role != "input" or name in given, f"input {name} is not an argument")
        data = plan.constants.get(name)
        require((buffer.role == "constant") == (data is not None), f"{name} is not a constant")
        if data is not None:
            nbytes = buffer.nbytes_for({})
            require(len(data) >= nbytes, f"constant {name} has {len(data)} of {nbytes} bytes")


# ---- showing


class Shower:
    """Prints and writes the stages that the options ask for."""

    def __init__(self, name: str, options: CompileOptions) -> None:
        self._name = name
        self._stages = options.debug
        self._folder = None if options.dump is None else Path(options.dump) / name
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def needs_every_stage(self) -> bool:
        """Whether a plan from the cache would leave something unshown."""
        return self._folder is not None or not self._stages <= {"fx", "ir"}

    def __call__(self, stage: str, text: Callable[[], str]) -> None:
        """Shows a stage; ``text`` is only called when somebody wants it."""
        if stage in self._stages:
            print(f"==== {self._name}: {stage}\n{text()}\n", file=sys.stderr, flush=True)
        if self._folder is not None and stage != "wgsl":
            (self._folder / f"{stage}.txt").write_text(text() + "\n", encoding="utf-8")

    def write_kernels(self, plan: Plan) -> None:
        """One ``.wgsl`` per kernel, and the plan as JSON."""
        if self._folder is None:
            return
        for part, start in ((plan, ""), (plan.preparation, "preparation_")):
            for number, kernel in enumerate(() if part is None else part.kernels):
                name = re.sub(r"\W", "_", kernel.name)
                path = self._folder / f"{start}{number:03}_{name}.wgsl"
                path.write_text(kernel_text(kernel) + "\n", encoding="utf-8")
        text = json.dumps(serialize.to_json(plan), indent=1)
        (self._folder / "plan.json").write_text(text, encoding="utf-8")
