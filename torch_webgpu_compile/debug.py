"""Readable text of every compilation stage, printed or written to files on request."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .ir.nodes import HostCall
from .ir.text import format_node
from .options import DEBUG_STAGES, CompileOptions
from .plan import serialize
from .plan.model import (
    Branch,
    Dispatch,
    HostStep,
    Kernel,
    KernelCall,
    Loop,
    Plan,
    Run,
    Step,
)

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
    for inner in (plan.preparation, *(plan.plans or ())):
        if inner is not None:
            lines += ["", plan_text(inner)]
    return "\n".join(lines)


def step_text(plan: Plan, step: Step) -> str:
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
        case HostStep():
            return f"host {step.target}{step.arguments} → {', '.join(step.outputs)}"
        case _:
            return " of ".join([str(step), *_nested(plan, step)])


def _nested(plan: Plan, step: Step) -> list[str]:
    """Names of the plans that a step of a composed plan runs."""
    match step:
        case Run(number):
            numbers = [number]
        case Branch():
            numbers = [*step.plans]
        case Loop():
            numbers = [step.body, *(() if step.condition is None else (step.condition,))]
        case _:
            numbers = []
    return [(plan.plans or ())[number].name for number in numbers]


# ---- showing


class Shower:
    """Prints and writes the stages that the options ask for."""

    def __init__(self, name: str, options: CompileOptions) -> None:
        self._name = name
        self._stages = options.debug
        self._written = 0
        self._folder = None if options.dump is None else Path(options.dump) / name
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def needs_every_stage(self) -> bool:
        """Whether a plan from the cache would leave something unshown."""
        later = DEBUG_STAGES[DEBUG_STAGES.index("ir") + 1 :]
        return self._folder is not None or not self._stages.isdisjoint(later)

    def __call__(self, stage: str, text: Callable[[], str]) -> None:
        """Shows a stage; ``text`` is only called when somebody wants it.

        Files are numbered in the order of the stages. Kernels have files of their own
        (`write_kernels`), and the stage ``schedule`` is that of the pass before it.
        """
        if stage in self._stages:
            print(f"==== {self._name}: {stage}\n{text()}\n", file=sys.stderr, flush=True)
        if self._folder is not None and stage not in ("wgsl", "schedule"):
            file = self._folder / f"{self._written:02}_{stage}.txt"
            file.write_text(text() + "\n", encoding="utf-8")
            self._written += 1

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
