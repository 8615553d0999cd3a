"""`verify_plan`: whether the parts of a plan agree.

It is for plans just made, where a failure is a bug of the planner, and for plans from files, which
may be anything: an executor then meets no name that is missing, no memory that is too small, no
value that was never written, no two values in one place. Two things it cannot see: whether kernels
compute what they should, and sizes that only a call decides, which executors check when they
evaluate them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from ..errors import VerificationError
from ..symbolic.nested import HostView, leaves
from ..symbolic.sizes import ZERO, Expr, Symbol, as_expr, is_nonnegative, symbols_of
from ..target import BINDING_ALIGNMENT
from .model import (
    FIRST_CHECK,
    STATUS,
    STATUS_BUFFER,
    VERSION,
    Branch,
    Check,
    Compute,
    Dispatch,
    Floats,
    HostStep,
    Kernel,
    Loop,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    ReadNumber,
    Run,
    Seeds,
    SizeOf,
    Step,
    layout_nbytes,
    names_of,
)
from .size_sources import places_of

_WRITTEN_ROLES = frozenset({"input", "intermediate", "output", "status"})
_MAX_GRID = 65_535
_MAX_INVOCATIONS = 2_048
_MAX_NAME = 1_000

_COMMENT = re.compile(r"//[^\n]*|/\*[\s\S]*?\*/")
_BINDING = re.compile(r"@group\(0\) @binding\((\d+)\) var<(storage, read(?:_write)?|uniform)>")
_WORKGROUP = re.compile(r"@compute @workgroup_size\((\d+)(?:, (\d+), (\d+))?\)")


def verify_plan(plan: Plan) -> None:
    """Raises VerificationError when the parts of a plan do not agree."""
    _verify(plan)


def _verify(plan: Plan) -> list[bool]:
    """Verifies a plan; of each of its outputs whether it is a number, or nothing."""
    verifier = _Verifier(plan) if plan.plans is None else _ComposedVerifier(plan)
    verifier.verify()
    return [verifier.is_number(output) for output in plan.outputs]


class _Verifier:
    """Checks one plan, part by part, for `verify_plan`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._buffers = plan.buffers
        self._written_in_place = {
            o.buffer for o in plan.outputs if o.mutates is not None and o.buffer is not None
        }

    def verify(self) -> None:
        plan = self._plan
        self._outline()
        for kernel in plan.kernels:
            self._kernel(kernel)
        self._symbols()
        defined = {n for n, b in self._buffers.items() if b.role not in ("intermediate", "output")}
        for step in plan.steps:
            defined |= self._step(step, defined)
        for output in plan.outputs:
            self._output(output, defined)
        shown = {output.buffer for output in plan.outputs}
        for name, buffer in self._buffers.items():
            fits = {"output": name in shown, "intermediate": name not in shown}
            self._require(fits.get(buffer.role, True), f"{name} has the role {buffer.role}")
        self._slots()
        self._preparation()

    def is_number(self, output: PlanOutput) -> bool:
        """Whether an output is no tensor."""
        return output.buffer is None

    def _outline(self) -> None:
        """What plans of kernels and composed ones have alike."""
        plan = self._plan
        self._require(plan.version == VERSION, f"version {plan.version}")
        self._name(plan.name)
        for name, buffer in self._buffers.items():
            self._buffer(name, buffer)
        self._inputs()
        self._constants()

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {self._plan.name[:_MAX_NAME]}: {what}")

    def _name(self, name: str) -> None:
        self._require(0 < len(name) <= _MAX_NAME and "\0" not in name, f"the name {name[:40]!r}")

    # ---- what there is

    def _buffer(self, name: str, buffer: PlanBuffer) -> None:
        self._name(name)
        self._require(name == buffer.name, f"{name} is a buffer named {buffer.name}")
        self._require((name == STATUS) == (buffer.role == "status"), f"{name} is not the status")
        self._require(name != STATUS or buffer == STATUS_BUFFER, "the status has another layout")
        self._layout(name, buffer.sizes, buffer.strides, buffer.offset)
        self._require(
            buffer.nbytes
            is layout_nbytes(buffer.dtype, buffer.sizes, buffer.strides, buffer.offset),
            f"{name} has {buffer.nbytes} bytes",
        )
        self._require(
            buffer.slot is None or (buffer.role == "intermediate" and buffer.slot >= 0),
            f"{name} cannot be in slot {buffer.slot}",
        )

    def _layout(
        self, name: str, sizes: Sequence[Expr], strides: Sequence[Expr], offset: Expr
    ) -> None:
        numbers = (expr for expr in (*sizes, *strides, offset) if expr.is_constant)
        is_layout = len(sizes) == len(strides) and all(expr.constant >= 0 for expr in numbers)
        self._require(is_layout, f"{name} has a layout that is none")

    def _kernel(self, kernel: Kernel) -> None:
        """A kernel against its text, as far as this package's own kernels are written alike."""
        self._name(kernel.name)
        wgsl = _COMMENT.sub("", kernel.wgsl)
        found = [(int(number), what) for number, what in _BINDING.findall(wgsl)]
        declared = [f"storage, read{'_write' * b.writable}" for b in kernel.bindings]
        declared += ["uniform"] * (kernel.parameter_count > 0)
        self._require(
            sorted(found) == list(enumerate(declared)), f"{kernel.name} has other bindings"
        )
        sizes = _WORKGROUP.findall(wgsl)
        invocations = [prod(int(number or 1) for number in numbers) for numbers in sizes]
        self._require(
            invocations == [prod(kernel.workgroup_size)]
            and min(kernel.workgroup_size) > 0
            and invocations[0] <= _MAX_INVOCATIONS,
            f"{kernel.name} has another workgroup",
        )
        numbers = (kernel.parameter_count, kernel.workgroup_nbytes)
        self._require(all(0 <= number < 1 << 31 for number in numbers), f"{kernel.name}: {numbers}")

    def _inputs(self) -> None:
        names = [entry.buffer for entry in self._plan.inputs if entry.buffer is not None]
        self._require(len(set(names)) == len(names), "one buffer is two inputs")
        for name in names:
            self._known(name)
        given = {name for name, buffer in self._buffers.items() if buffer.role == "input"}
        self._require(set(names) == given, f"inputs {sorted(given ^ set(names))} do not fit")
        for entry in self._plan.inputs:
            self._require(entry.buffer is None or entry.size is None, "an input is two things")

    def _constants(self) -> None:
        constants = {name for name, buffer in self._buffers.items() if buffer.role == "constant"}
        self._require(constants == set(self._plan.constants), "constants do not fit their buffers")
        for name, data in self._plan.constants.items():
            nbytes = self._buffers[name].nbytes
            self._require(
                nbytes.is_constant and len(data) == max(0, nbytes.constant),
                f"constant {name} has {len(data)} bytes, its buffer {nbytes}",
            )

    def _symbols(self) -> None:
        """Every size follows from the arguments."""
        plan, given = self._plan, self._given()
        names = {found.name for found in given}
        self._require(len(names) == len(given), "a size symbol has several lower bounds")
        for name, buffer in self._buffers.items():
            used = _symbols((*buffer.sizes, *buffer.strides, buffer.offset))
            self._require(used <= given, f"the sizes of {name} do not follow from the arguments")
        for step in plan.steps:
            used = _symbols(step.sizes)
            if isinstance(step, Dispatch) and step.checks:  # a runtime gives parameters its number
                used = used - {FIRST_CHECK} | _symbols(replace(step, parameters=()).sizes)
            self._require(used <= given, "sizes of a step do not follow from the arguments")
        for output in plan.outputs:
            used = _symbols((*output.sizes, *output.strides, output.offset, output.size))
            self._require(used <= given, "sizes of an output do not follow from the arguments")

    def _given(self) -> set[Symbol]:
        """The size symbols of the arguments."""
        return _symbols(expr for *_, expr in places_of(self._plan))

    # ---- what is done

    def _known(self, name: str) -> PlanBuffer:
        found = self._buffers.get(name)
        if found is None:
            raise VerificationError(f"plan {self._plan.name}: no buffer {name[:_MAX_NAME]}")
        return found

    def _reads(self, name: str, defined: set[str]) -> None:
        nbytes = self._known(name).nbytes
        is_empty = nbytes.is_constant and nbytes.constant <= 0
        self._require(name in defined or is_empty, f"{name} is read before it is written")

    def _writes(self, name: str) -> None:
        role = self._known(name).role
        allowed = role in _WRITTEN_ROLES and (role != "input" or name in self._written_in_place)
        self._require(allowed, f"{name} is written, which is of the role {role}")

    def _step(self, step: Step, defined: set[str]) -> set[str]:
        """Verifies a step after which also the buffers that it returns hold something."""
        match step:
            case Dispatch():
                return self._dispatch(step, defined)
            case HostStep():
                for name in step.reads:
                    self._reads(name, defined)
                given = leaves((step.arguments, step.keywords))
                views = [leaf.changed for leaf in given if isinstance(leaf, HostView)]
                known = range(len(step.changed))
                is_known = len(step.outputs) >= len(known) and all(k in known for k in views)
                self._require(is_known, f"{step.target} changes what is not its own")
                made = {name for name in step.outputs if name}
                for name in made:
                    self._writes(name)
                return made
            case _:
                raise VerificationError(f"plan {self._plan.name}: a step of a composed plan")

    def _dispatch(self, step: Dispatch, defined: set[str]) -> set[str]:
        self._require(0 <= step.kernel < len(self._plan.kernels), f"no kernel {step.kernel}")
        kernel = self._plan.kernels[step.kernel]
        self._require(
            len(kernel.bindings) == len(step.bindings)
            and kernel.parameter_count == len(step.parameters),
            f"{kernel.name} is called with the wrong number of bindings or parameters",
        )
        known = len(step.traffic) in (0, len(step.bindings))
        self._require(known, f"{kernel.name} has traffic of other bindings")
        read, written = set[str](), set[str]()
        for binding, declared in zip(step.bindings, kernel.bindings, strict=True):
            buffer = self._known(binding.buffer)
            (written if declared.writable else read).add(binding.buffer)
            start = binding.offset_nbytes
            inside = start >= 0 and start % BINDING_ALIGNMENT == 0
            if buffer.nbytes.is_constant:
                end = as_expr(start) if binding.nbytes is None else binding.nbytes + start
                whole = max(0, buffer.nbytes.constant) + 15  # of the last 16 bytes
                inside &= not end.is_constant or start <= end.constant <= whole
            self._require(inside, f"{kernel.name} is bound beyond {binding.buffer}")
        for name in read:
            self._reads(name, defined)
        for name in written:
            self._writes(name)
        self._require(read.isdisjoint(written), f"{kernel.name} reads what it writes")
        checks = STATUS in written
        self._require(checks == bool(step.checks), f"{kernel.name}: checks without the status")
        self._require(
            not checks or step.bindings[-1].buffer == STATUS, f"{kernel.name}: status not last"
        )
        self._require(
            all(_is_within(size, 0, _MAX_GRID) for size in step.grid), f"{kernel.name}: {step.grid}"
        )
        self._require(
            all(
                _is_within(p, -(1 << 31), (1 << 31) - 1)
                for p in (*step.parameters, *step.narrow)
                if isinstance(p, Expr)
            ),
            f"{kernel.name}: parameters {step.parameters}, {step.narrow}",
        )
        return written

    def _output(self, output: PlanOutput, defined: set[str]) -> None:
        self._changed(output)
        if output.buffer is None:
            return
        self._require(output.size is None and output.constant is None, "an output is two things")
        self._reads(output.buffer, defined)
        buffer = self._buffers[output.buffer]
        if output.mutates is not None:
            own = self._plan.inputs[output.mutates].buffer == output.buffer
            self._require(
                buffer.role != "input" or own, f"{output.buffer} is another argument's memory"
            )
        self._view(output, buffer)

    def _changed(self, output: PlanOutput) -> None:
        """Checks the argument that an output changes, if it changes one."""
        if output.mutates is not None:
            inputs = self._plan.inputs
            self._require(
                0 <= output.mutates < len(inputs) and inputs[output.mutates].buffer is not None,
                f"it changes argument {output.mutates}, which is no tensor",
            )
            self._require(output.buffer is not None, "it changes an argument to nothing")

    def _view(self, output: PlanOutput, buffer: PlanBuffer) -> None:
        """Checks that an output shows nothing outside of its buffer, as far as sizes are known."""
        offset = ZERO if output.offset is None else output.offset
        seen = (output.sizes, output.strides, offset)
        if seen == (buffer.sizes, buffer.strides, buffer.offset):
            return
        self._layout(f"a view of {buffer.name}", *seen)
        left = buffer.nbytes - layout_nbytes(buffer.dtype, *seen)
        inside = is_nonnegative(left) or not left.is_constant
        self._require(inside, f"an output shows more than {buffer.name} has")

    # ---- memory

    def _slots(self) -> None:
        """Buffers of one slot hold their values at different times."""
        lives: dict[str, list[int]] = defaultdict(list)
        for number, step in enumerate(self._plan.steps):
            for name in step.buffers:
                lives[name].append(number)
        slots: dict[int, list[str]] = defaultdict(list)
        for name, buffer in self._buffers.items():
            if buffer.slot is not None:
                self._require(name in lives, f"nothing touches {name}")
                slots[buffer.slot].append(name)
        for names in slots.values():
            names.sort(key=lambda name: lives[name][0])
            for before, after in pairwise(names):
                apart = lives[before][-1] < lives[after][0]
                self._require(apart, f"{before} and {after} are in one place at one time")

    def _preparation(self) -> None:
        inner = self._plan.preparation
        wanted = self._plan.prepared
        if inner is None:
            self._require(not wanted, f"{', '.join(wanted)}: nothing prepares this")
            return
        self._require(inner.preparation is None, "its preparation has one of its own")
        verify_plan(inner)
        given = {entry.buffer for entry in self._plan.inputs if entry.buffer is not None}
        for entry in inner.inputs:
            name = entry.buffer
            if name is None or name not in given:
                raise VerificationError(f"plan {self._plan.name}: no input {name} to prepare from")
            self._same(self._buffers[name], inner.buffers[name])
        made = [output.buffer for output in inner.outputs]
        self._require(
            len(set(made)) == len(made) and set(made) == set(wanted),
            f"its preparation makes {made}, it needs {list(wanted)}",
        )
        for output in inner.outputs:
            whole = inner.buffers.get(output.buffer or "")
            is_whole = whole is not None and output == PlanOutput(
                whole.name, whole.sizes, whole.strides, whole.offset
            )
            self._require(is_whole, f"its preparation gives {output}, which is no whole buffer")
        for name in wanted:
            self._same(self._buffers[name], inner.buffers[name])

    def _same(self, outer: PlanBuffer, inner: PlanBuffer) -> None:
        same = outer == replace(inner, role=outer.role, slot=outer.slot)
        self._require(same, f"{outer.name} is another tensor in the preparation")


class _ComposedVerifier(_Verifier):
    """Checks one composed plan: that its names are there, and of the kind that they are used as."""

    def verify(self) -> None:
        plan = self._plan
        self._outline()
        self._require(not plan.kernels and plan.preparation is None, "a composed plan has kernels")
        roles = {buffer.role for buffer in self._buffers.values()}
        self._require(roles <= {"input"}, "a composed plan has memory of its own")
        self._gives = [_verify(inner) for inner in plan.plans or ()]
        self._tensors = set(self._buffers)
        self._numbers = {symbol.name for symbol in self._given()}
        self._require(self._tensors.isdisjoint(self._numbers), "a tensor has a number's name")
        for step in plan.steps:
            reads, made = names_of(step)
            self._named(reads)
            before, kinds = self._names, self._composed(step)
            for name, is_number in zip(made, kinds, strict=True):
                if name:
                    self._name(name)
                    self._require(name not in before, f"two values are named {name}")
                    (self._numbers if is_number else self._tensors).add(name)
        for output in plan.outputs:
            bare = PlanOutput(output.buffer, constant=output.constant, mutates=output.mutates)
            self._require(output == bare, "a composed plan lays out a result")
            self._named(filter(None, (output.buffer,)))
            self._changed(output)
            is_number = output.mutates is not None and output.buffer in self._numbers
            self._require(not is_number, f"it changes argument {output.mutates} to a number")

    def is_number(self, output: PlanOutput) -> bool:
        return output.buffer not in self._tensors

    @property
    def _names(self) -> set[str]:
        return self._tensors | self._numbers

    def _named(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._names]
        self._require(not missing, f"{missing[:1]} is used before it is there")

    def _composed(self, step: Step) -> Sequence[bool]:
        """Checks what a step asks of the values that it reads; of its results, which are numbers"""
        match step:
            case Run():
                self._call(step.plan, step.arguments, len(step.results))
                return self._gives[step.plan]
            case Branch():
                self._require(bool(step.plans), "a choice of nothing")
                for plan in step.plans:
                    self._call(plan, step.arguments, len(step.results))
                first, *others = (self._gives[plan] for plan in step.plans)
                same = all(other == first for other in others)
                self._require(same, "branches have results of other kinds")
                return first
            case Loop():
                given = (*step.carried, *step.others)
                self._call(step.body, given, len(step.carried))
                self._require(len(step.results) == len(step.carried), "a loop with other results")
                known = range(len(step.carried))
                self._require(all(k in known for k in step.stacked), "a loop stacks what is none")
                self._require((step.condition is None) != (step.count is None), "an endless loop")
                if step.condition is not None:
                    self._call(step.condition, given, 1)
                kinds = [name in self._numbers for name in step.carried]
                self._require(kinds == self._gives[step.body], "turns give other kinds of values")
                return kinds
            case ReadNumber() | SizeOf():
                self._require(step.buffer in self._tensors, f"{step.buffer} is no tensor")
                return [True]
            case HostStep():
                found = set(step.reads) - self._tensors
                self._require(not found, f"{step.target} takes {found} for a tensor")
                return [name in step.numbers for name in step.outputs]
            case Compute():
                return [True]
            case Floats() | Seeds():
                return [False]
            case Check():
                return []
            case Dispatch():
                raise VerificationError(f"plan {self._plan.name}: a composed plan has a dispatch")

    def _call(self, number: int, arguments: Sequence[str], results: int) -> None:
        plans = self._plan.plans or ()
        self._require(0 <= number < len(plans), f"no plan {number}")
        plan = plans[number]
        self._require(
            len(arguments) == len(plan.inputs) and len(plan.outputs) == results,
            f"{plan.name} is run with other arguments or results",
        )
        for name, entry in zip(arguments, plan.inputs, strict=True):
            fits = name in self._numbers if entry.buffer is None else name in self._tensors
            is_free = entry == PlanInput()
            self._require(fits or is_free, f"{plan.name} is given {name} of another kind")


def _is_within(expr: Expr, low: int, high: int) -> bool:
    """Whether a number is in a range; what a call decides, executors check."""
    return not expr.is_constant or low <= expr.constant <= high


def _symbols(exprs: Iterable[Expr | None]) -> set[Symbol]:
    symbolic = (expr for expr in exprs if expr is not None and expr.terms)
    return {symbol for expr in symbolic for symbol in symbols_of(expr)}
