"""Sequences of calls on lists of tensors, compiled: `compile_lists`.

What is compiled is a lane (`capture.eager.sequence`), for as many lanes as a dispatch has room for:
a `_Form`. It serves lists of any length and parameters of any shape, and so every sequence of the
same calls. A sequence's own plan only says on which tensors its forms run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ... import progress
from ...callables.device_graph import DeviceGraph
from ...callables.signature import Signature
from ...capture.eager.arguments import number_dtype
from ...capture.eager.calls import CallInterface, CapturedCall, Constant, Output, TensorSpec
from ...capture.eager.numbers import LeafNumber, LeafNumbers
from ...capture.eager.sequence import (
    Lane,
    LaneLayout,
    Local,
    SequenceCall,
    capture_lane,
    divide,
    layout_of,
)
from ...captured import Phase
from ...compiler import compile_graph, native_operators
from ...counters import counters
from ...errors import UnsupportedOp, VerificationError
from ...ir.lanes import Lanes
from ...node_text import argument_text
from ...plan import cache as plan_cache
from ...plan.cache_folder import digest_of
from ...plan.lru_cache import LruCache
from ...plan.model import Plan, PlanBuffer, PlanOutput
from ...plan.placing import Placed, place
from ...plan.verify import verify_plan
from ...runtime.device import Device
from ...symbolic.sizes import as_expr, storage_span
from ...tensors import devices
from ...tensors.determinism import switched
from ...torch_ops.dtypes import dtype_of
from ...torch_private import tree_map_only, tree_structure
from .compiled_op import CompiledOp, eager_options
from .stored_calls import call_key, read_call, write_call

_MOST_FORMS = 256
_MOST_LANES = 1 << 10  # more than a dispatch has room for


class _Form:
    """The compiled graphs of lanes of one kind.

    Args:
        call: what is known of them: of a captured lane, or stored.
        captured: captures the lane.
        lane: the one that is captured.
        leaves: of its sequence.
        device: what it is compiled for.
        key: of what is stored of it; "" if nothing is.

    Attributes:
        numbers: what a lane reads of numbers, those that all lanes share first.
        shared_numbers: how many of them all lanes share.
        fixed: the lane's leaves whose values are part of the code, and these.
        room: lanes of a plan, at most.
    """

    def __init__(
        self,
        call: CallInterface,
        captured: Callable[[], CapturedCall],
        lane: Lane,
        leaves: Sequence[Any],
        device: Device,
        key: str,
    ) -> None:
        self.call = call
        self._captured = captured
        self._key = key
        self.device = device
        self._own = len(lane.own)
        first = self._own + len(lane.shared)
        self.numbers = () if call.numbers is None else call.numbers.entries
        self._shared = len(lane.shared) + bool(self.numbers)
        end = first + len(lane.shared_numbers)
        self.shared_numbers = sum(number.last_leaf < end for number in self.numbers)
        self._lanes = Lanes(_MOST_LANES, self._own, bool(self.numbers), self.shared_numbers)
        floats = range(first, len(lane.leaves))
        fixed = [k for k in floats if k not in call.free_numbers]
        self.fixed = [(k, leaves[lane.leaves[k]].hex()) for k in fixed]
        self._plans: dict[int, Plan] = {}
        self.room = _MOST_LANES

    def holds(self, lane: Lane, leaves: Sequence[Any]) -> bool:
        """Whether it computes another lane of the same kind, with that lane's numbers."""
        return _holds(self.fixed, lane, leaves)

    def plan(self, count: int) -> Plan:
        """The plan of ``count`` lanes, or of as many as there is room for."""
        found = self._plans.get(min(count, self.room))
        if found is None:
            found = self._compiled(count)
            made = (len(found.inputs) - self._shared) // self._own
            if made < count:
                self.room = made
            self._plans[made] = found
        return found

    def _compiled(self, count: int) -> Plan:
        options = switched(eager_options())
        key = self._key and digest_of([f"{self._key} {self.fixed} {count}".encode()])
        found = plan_cache.load(key, options.cache, self._verify) if key else None
        if found is not None:
            counters.add(plan_cache_hits=1, plans_compiled=1)
            return found
        call, device = self._captured(), self.device
        lanes = replace(self._lanes, count=count)
        with progress.shown(
            call.captured.name, lambda: device.pipelines.progress, options.progress
        ):
            state = compile_graph(call.captured, call.phase, device.target, options, lanes=lanes)
        if key:
            plan_cache.store(key, state.plan, options.cache)
        return state.plan

    def _verify(self, plan: Plan) -> None:
        lanes, rest = divmod(len(plan.inputs) - self._shared, self._own)
        if rest or lanes < 1:
            raise VerificationError(f"plan {plan.name}: inputs are not those of lanes")


def _holds(fixed: Iterable[tuple[int, str]], lane: Lane, leaves: Sequence[Any]) -> bool:
    return all(leaves[lane.leaves[k]].hex() == value for k, value in fixed)


def _text(lane: Lane, layout: LaneLayout, wanted: Sequence[int], held_in: torch.dtype) -> str:
    """All that decides what becomes of a lane but numbers; raises `Unreadable`."""
    calls = [
        f"{op}{argument_text(tree_map_only(Local, repr, [args, kwargs]))}"
        for op, args, kwargs in lane.calls
    ]
    numbers = len(lane.shared_numbers), len(lane.own_numbers)
    return "\n".join((*calls, f"{layout} {tuple(wanted)} {held_in} {numbers}"))


_forms: LruCache[Any, list[_Form]] = LruCache(_MOST_FORMS)


def compile_lists(
    calls: Sequence[SequenceCall],
    leaves: Sequence[Any],
    made: Sequence[TensorSpec],
    wanted: Sequence[int] | None,
    index: int,
) -> CompiledOp:
    """Compiles a sequence of calls on lists.

    The versions of what they change are the caller's to count.

    Args:
        leaves: a `TensorSpec` for each tensor, which shares memory with no other, and floats.
        made: what the tensors are like that the calls return.
        wanted: which of these are results; None: all, of which those with one element are in one
            buffer, side by side.
        index: the device.

    Raises:
        UnsupportedOp: they cannot be traced, or a part of them has no kernel.
    """
    return _Placing(leaves, made, wanted, index).compiled(calls)


class _Placing:
    """Puts together the plan of a sequence; see `compile_lists`."""

    def __init__(
        self,
        leaves: Sequence[Any],
        made: Sequence[TensorSpec],
        wanted: Sequence[int] | None,
        index: int,
    ) -> None:
        self._is_alone = wanted is None
        if wanted is None:
            wanted = range(len(made))
        self._leaves = leaves
        self._made = made
        self._wanted = frozenset(wanted)
        self._order = wanted
        self._index = index
        self._held_in = number_dtype(leaves)
        self._device = devices.get_device(index)
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, TensorSpec)]
        self._inputs = [_input(k, leaves[k]) for k in tensors]
        self._parts: list[Placed] = []
        self._numbers: list[LeafNumber] = []  # in the order in which plans have them
        self._given: list[int] = []  # which made tensors the parts give, in their order
        self._free = {k for k, leaf in enumerate(leaves) if type(leaf) is float}

    def compiled(self, calls: Sequence[SequenceCall]) -> CompiledOp:
        """The operator that runs the calls."""
        together: dict[Any, tuple[_Form, tuple[int, ...], list[tuple[Lane, LaneLayout]]]] = {}
        for key, lanes in divide(calls, self._leaves).items():
            for lane in lanes:
                layout = self._layout(lane)
                if layout is None:
                    continue
                wanted = tuple(k for k, place in enumerate(lane.made) if place in self._wanted)
                form = self._form((key, layout.key, wanted), lane, layout)
                same = id(form), lane.shared, lane.shared_numbers
                together.setdefault(same, (form, wanted, []))[2].append((lane, layout))
        for form, wanted, found in together.values():
            while found:
                plan = form.plan(len(found))
                self._place(form, plan, wanted, found[: form.room])
                del found[: form.room]
        return self._finished(str(calls[0].op))

    def _layout(self, lane: Lane) -> LaneLayout | None:
        """The layout of a lane's tensors; None where it has nothing to compute."""
        specs = [self._leaves[k] for k in (*lane.own, *lane.shared)]
        made = [self._made[k] for k in lane.made]
        if any(0 in spec.sizes for spec in specs):
            return None
        return layout_of(specs, made, self._device.target.max_binding_nbytes)

    def _form(self, key: Any, lane: Lane, layout: LaneLayout) -> _Form:
        switches = torch.get_default_dtype(), switched(eager_options())
        whole = id(self._device), switches, self._held_in, key
        known = _forms.find(whole)
        if known is None:
            known = _forms.keep(whole, [])
        for form in known:
            if form.device is self._device and form.holds(lane, self._leaves):
                return form
        form = self._stored_form(lane, layout, key[-1])
        known.append(form)
        return form

    def _stored_form(self, lane: Lane, layout: LaneLayout, wanted: Sequence[int]) -> _Form:
        """A form that is stored, or else of the lane, which is captured."""
        leaves, options = self._leaves, switched(eager_options())
        text = partial(_text, lane, layout, wanted, self._held_in)
        key = call_key((op for op, _, _ in lane.calls), text, self._device.target, options)

        @cache
        def captured() -> CapturedCall:
            native = native_operators()
            try:
                return capture_lane(lane, layout, leaves, wanted, native)
            except UnsupportedOp:
                if not layout.length:
                    raise
                return capture_lane(lane, replace(layout, length=0), leaves, wanted, native)

        stored = read_call(key, options)
        is_known = stored is not None and _holds(stored[1], lane, leaves)
        call: CallInterface = stored[0] if is_known else captured().interface
        form = _Form(call, captured, lane, leaves, self._device, key)
        if not is_known:
            write_call(key, (call, form.fixed), options)
        return form

    def _place(
        self,
        form: _Form,
        plan: Plan,
        wanted: Sequence[int],
        lanes: Sequence[tuple[Lane, LaneLayout]],
    ) -> None:
        """Adds one part: a plan for these lanes."""
        inputs: list[int] = []
        layouts: list[tuple[tuple[int, ...], int]] = []
        first = lanes[0][0]
        for lane, layout in lanes:
            inputs += lane.own
            layouts += [(s.sizes, s.offset) for s in layout.specs[: len(lane.own)]]
            self._given += [lane.made[k] for k in wanted]
        inputs += first.shared
        layouts += [(s.sizes, s.offset) for s in lanes[0][1].specs[len(first.own) :]]
        if form.numbers:
            common = form.shared_numbers
            start = len(self._numbers)
            self._numbers += [n.with_leaves(first.leaves) for n in form.numbers[:common]]
            for lane, _ in lanes:
                self._numbers += [n.with_leaves(lane.leaves) for n in form.numbers[common:]]
            inputs.append(len(self._inputs))
            layouts.append(((len(self._numbers) - start,), start))
        fixed = {k for k in range(len(first.leaves)) if k not in form.call.free_numbers}
        self._free -= {lane.leaves[k] for lane, _ in lanes for k in fixed}
        self._parts.append(Placed(plan, tuple(inputs), tuple(layouts)))

    def _finished(self, name: str) -> CompiledOp:
        inputs = self._inputs
        if self._numbers:
            spec = TensorSpec(self._held_in, (len(self._numbers),), (1,))
            inputs = [*inputs, _input(len(inputs), spec)]
        plan = place(f"lists_{name}", self._parts, inputs, self._is_alone)
        given = (self._made[position] for position in self._given)
        outputs = (o if o.mutates is not None else _laid_out(o, next(given)) for o in plan.outputs)
        plan = replace(plan, outputs=tuple(outputs))
        verify_plan(plan)
        changed = (o.mutates for o in plan.outputs if o.mutates is not None)
        signature = Signature(plan, Phase("inference", counted=frozenset(changed)))
        graph = DeviceGraph(signature, self._device, self._index)
        at = {place: k for k, place in enumerate(self._given)}
        floats = [(k, leaf) for k, leaf in enumerate(self._leaves) if type(leaf) is float]
        fixed = [(k, leaf.hex()) for k, leaf in floats if k not in self._free]
        return CompiledOp(
            CallInterface(
                signature.phase,
                tuple(range(len(self._inputs))),
                LeafNumbers(self._numbers, self._held_in) if self._numbers else None,
                frozenset(self._free),
                tuple(Output(at[k]) if k in at else Constant(None) for k in self._order),
                tree_structure([0] * len(self._order)),
                (),
                (),
                lambda leaves: all(leaves[k].hex() == number for k, number in fixed),
            ),
            graph,
            len(self._leaves),
        )


def _laid_out(output: PlanOutput, spec: TensorSpec) -> PlanOutput:
    """A result of a lane, which may be flat, as the call returns it."""
    sizes, strides = tuple(map(as_expr, spec.sizes)), tuple(map(as_expr, spec.strides))
    return replace(output, sizes=sizes, strides=strides)


def _input(position: int, spec: TensorSpec) -> PlanBuffer:
    """A tensor as an input of a plan."""
    dtype = dtype_of(spec.dtype)
    assert dtype is not None
    span = spec.offset + storage_span(spec.sizes, spec.strides)
    return PlanBuffer(
        f"in{position}",
        "input",
        dtype,
        tuple(map(as_expr, spec.sizes)),
        tuple(map(as_expr, spec.strides)),
        as_expr(spec.offset),
        as_expr(span * dtype.itemsize),
    )
