"""`compose`: the plans of a divided graph's parts, and the steps between them, as one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...captured import Phase
from ...plan.model import Branch, Loop, Plan, PlanOutput, Run, Seeds, Step
from .parts import Divided


@dataclass(frozen=True)
class Planned:
    """A captured graph's plan, and what it is for."""

    plan: Plan
    phase: Phase


def compose(divided: Divided, planned: Sequence[Planned]) -> Plan:
    """The composed plan.

    Args:
        planned: of the parts, in order.
    """
    plans: list[Plan] = []
    numbers: list[int] = []
    for part in planned:
        plan = _with_forwarded(part)
        same = [k for k, known in enumerate(plans) if replace(known, name=plan.name) == plan]
        numbers.append(same[0] if same else len(plans))
        if not same:
            plans.append(plan)
    steps: list[Step] = []
    made: set[str] = set()
    for step in divided.plan.steps:
        if isinstance(step, Run) and not divided.parts[step.plan].is_function:
            part = planned[step.plan]
            arguments, outputs = step.arguments, part.plan.outputs
            if part.phase.seeds:
                seeds = Seeds(f"%seeds{len(steps)}", part.phase.seeds)
                steps.append(seeds)
                arguments = (*arguments, seeds.name)
            changed = [o.mutates for o in outputs if o.mutates is not None]
            results = step.results[: len(outputs) - len(changed)]
            results += tuple(f"{arguments[k]}'" for k in changed)
            step = Run(step.plan, arguments, results)
            made.update(results)
        steps.append(_renumbered(step, numbers))
    outputs = tuple(o for o in divided.plan.outputs if o.mutates is None or o.buffer in made)
    return replace(divided.plan, steps=tuple(steps), outputs=outputs, plans=tuple(plans))


def _with_forwarded(part: Planned) -> Plan:
    """A plan that also returns those of its arguments that are results."""
    plan = part.plan
    outputs = list(plan.outputs)
    for result, argument in part.phase.forwarded:
        entry = plan.inputs[argument]
        if entry.buffer is None:
            outputs[result] = PlanOutput(size=entry.size)
        else:
            buffer = plan.buffers[entry.buffer]
            outputs[result] = PlanOutput(buffer.name, buffer.sizes, buffer.strides, buffer.offset)
    return replace(plan, outputs=tuple(outputs))


def _renumbered(step: Step, numbers: Sequence[int]) -> Step:
    """A step with the numbers of nested plans in place of those of parts."""
    match step:
        case Run():
            return replace(step, plan=numbers[step.plan])
        case Branch():
            return replace(step, plans=tuple(numbers[k] for k in step.plans))
        case Loop():
            condition = None if step.condition is None else numbers[step.condition]
            return replace(step, body=numbers[step.body], condition=condition)
        case _:
            return step


def format_divided(divided: Divided) -> str:
    """The steps, for a person to read."""
    return "\n".join([*map(str, divided.plan.steps), f"return {divided.plan.outputs}"])
