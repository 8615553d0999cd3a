"""Calls of operators on lists of tensors; those of an optimizer's step run as one sequence.

An optimizer's step is a dozen calls of ``_foreach`` operators, each on all parameters. One by one,
each reads and writes whole lists; together they are one kernel, which reads parameters, gradients
and states once and never stores what lies between. So within a step (`steps`) `run` does not run
such a call. It remembers it, and gives tensors that have no memory yet for its results. At the end
of the step, or as soon as it looks at memory of any tensor (`tensors.deferred`) or calls something
else, all that was remembered runs: compiled as a whole, or, where that is not possible, one call
after the other. Everywhere else a sequence is one call.

What a sequence is compiled for is found call by call in a tree (`_Node`): an edge is a call with
all that matters to the compiler of its arguments. Tensors are told by their addresses, and
described when the sequence meets them first, in a list that has nothing to do with the others: one
that has only some of another's tensors begins a new sequence. What is the same in every step is
looked at once: a list that lies where that of the last sequence lay.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...capture.eager.calls import TensorSpec
from ...capture.eager.sequence import Leaf, Made, SequenceCall
from ...errors import UnsupportedOp
from ...tensors import storages
from ...tensors.aliasing import overlaps_itself, written_by
from ...tensors.deferred import defer, settle
from ...torch_private import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    _DisableAutocast,
    _ExcludeDispatchKeyGuard,
    _unsafe_preserve_version_counter,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from . import dispatch, outputs, steps
from .compiled_lists import compile_lists
from .compiled_op import CompiledOp, KnownCall, specs_of
from .list_layouts import EXACT, Description, KnownList, Layouts, Places
from .list_results import Results, give, without_memory

_MOST_CALLS = 1 << 12
_MOST_NODES = 1 << 14
_MOST_PROGRAMS = 16  # of one sequence, by the numbers that are part of the code

_lock = threading.RLock()

# `storages.Likeness` knows tensors by their keys of dispatch as well, of which those that PyTorch
# has gone through are not left: more of an operator that changes its arguments than of others.
_below_autograd = partial(
    _ExcludeDispatchKeyGuard,
    DispatchKeySet(DispatchKey.ADInplaceOrView),
)


class _DifferentError(Exception):
    """A call cannot be a part of the sequence."""


def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that returns nothing, or a list of tensors: perhaps later, with others.

    Raises:
        Exception: as `dispatch.run`; what the GPU refuses is raised by whoever settles it.
    """
    global _current
    # What autograd saves would be needed, and unseen here.
    is_gathered = steps.is_within() and not torch.is_grad_enabled()
    if not is_gathered:
        settle()
    with _lock, _below_autograd():
        for _ in range(2):
            try:
                sequence = _begin(args) if _current is None else _current
                if not is_gathered:
                    return sequence.run_alone(op, args, kwargs)
                results = sequence.add(op, args, kwargs)
            except BaseException as error:
                settle()  # a sequence that knows tensors of another call cannot go on
                if not isinstance(error, _DifferentError):
                    raise
                continue
            _current = sequence
            defer(_run_current)
            if len(sequence) >= _MOST_CALLS:
                settle()
            return results
    settle()
    return dispatch.run(op, *args, **kwargs)


def _run_current() -> None:
    """Runs the calls that were recorded."""
    global _current
    with _lock, _below_autograd():
        sequence, _current = _current, None
        try:
            if sequence is not None:
                sequence.run()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, perhaps long after the calls: they are not lost by it
            if sequence is not None and not sequence.has_begun:
                _current = sequence
            raise
        finally:
            if _current is None:
                defer(None)


class _Node:
    """A node of the tree of sequences: all that begin with the same calls.

    Attributes:
        before: the node of the calls before the last one; None at the root.
        call: the last one, with `Leaf`s and `Made`s in place of tensors and numbers.
        count: how many calls there are.
        results: what the last call gives: (dtype, sizes, strides) of each tensor; None if nothing.
        spare: such results of an earlier sequence that nobody has any more.
        children: the sequences with one call more.
        met: the next call's lists that were met first, of the last sequence: by operator, place
            and length.
        programs: what was compiled, by the positions of the made tensors that are needed later;
            None: by a call that is not gathered. The calls of what cannot be compiled run singly.
    """

    __slots__ = (
        *("_made", "before", "call", "children", "count"),
        *("met", "programs", "results", "spare"),
    )

    def __init__(
        self,
        before: _Node | None = None,
        call: SequenceCall | None = None,
        results: Sequence[tuple[Any, ...]] | None = None,
    ) -> None:
        self.before = before
        self.call = call
        self.count: int = 0 if before is None else before.count + 1
        self.results = results
        self.spare: list[Results] = []
        self.children: dict[tuple[Any, ...], _Node] = {}
        self.met: dict[tuple[Any, ...], KnownList] = {}
        self.programs: dict[tuple[int, ...] | None, list[KnownCall]] = {}
        self._made: KnownList | None = None

    @property
    def _way(self) -> list[_Node]:
        """The nodes of the calls, in order."""
        found = []
        node: _Node = self
        while node.before is not None:
            found.append(node)
            node = node.before
        return found[::-1]

    @property
    def calls(self) -> list[SequenceCall]:
        """All calls, in order."""
        return [node.call for node in self._way if node.call is not None]

    @property
    def layouts(self) -> list[tuple[Any, ...]]:
        """The ``results`` of all calls."""
        return list(chain(*(node.results or () for node in self._way)))

    def made(self, index: int) -> Results:
        """The results of the last call, on a device."""
        assert self.results is not None
        if self.spare:
            return self.spare.pop()
        made = Results(self.results, index, self._made)
        self._made = self._made or made.known
        return made


_current: _Sequence | None = None
_roots: dict[tuple[int, torch.dtype], _Node] = {}
_nodes = 0


def _begin(args: Sequence[Any]) -> _Sequence:
    """A sequence on the device of the first list of tensors among arguments.

    Raises:
        _DifferentError: there is none.
    """
    for value in args:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            index = value[0].get_device()
            return _Sequence(_roots.setdefault((index, torch.get_default_dtype()), _Node()), index)
    raise _DifferentError


class _Sequence:
    """Calls that are remembered.

    Args:
        root: of the tree.
        index: the device that all tensors are on.

    Attributes:
        has_begun: whether some of it may have run.
    """

    def __init__(self, root: _Node, index: int) -> None:
        self._index = index
        self.has_begun = False
        self._node = root
        self._tensors: list[Tensor] = []  # each argument once
        self._layouts = Layouts()  # of these
        self._numbers: list[float] = []
        self._made: list[tuple[_Node, Results]] = []
        self._lists: dict[tuple[int, ...], tuple[int, KnownList]] = {}  # numbered, by addresses
        self._last: KnownList | None = None  # of the lists of arguments
        self._made_addresses: list[int] = []
        self._places = Places()
        self._is_alone = False  # whether no call may follow

    def __len__(self) -> int:
        return self._node.count

    # ---- calls

    def add(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remembers a call.

        Returns:
            Its results.

        Raises:
            _DifferentError: it cannot be a part of this sequence, to which nothing may be added
                any more.
        """
        node = self._enter(op, args, kwargs)
        _count_changes(op, args)
        if node.results is None:
            return None
        made = node.made(self._index)
        self._lists[made.known.addresses] = len(self._lists), made.known
        self._made.append((node, made))
        self._made_addresses += made.known.addresses
        return list(made.tensors)

    def run_alone(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that is not gathered, the first one and the last.

        Raises:
            _DifferentError: it cannot be a part of a sequence.
            DeviceError: the GPU refused.
        """
        node = self._enter(op, args, kwargs)
        results = self._computed(None)
        if results is None:
            return dispatch.run(op, *args, **kwargs)
        _count_changes(op, args)
        if node.results is None:
            return None
        made = zip(results, node.results, strict=True)
        index = self._index
        return [without_memory(x, index) if result is None else result for result, x in made]

    def _enter(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Node:
        """Goes on to the node of a call with its tensors and numbers; raises as `add`."""
        if self._is_alone:
            raise _DifferentError
        key: list[Any] = [op]
        new: list[Tensor] = []
        numbers: list[float] = []
        # What a call adds that is then refused does no harm: no other call follows.
        for value in args:
            self._describe(value, key, new, numbers)
        for name, value in kwargs.items():
            key.append(name)
            self._describe(value, key, new, numbers)
        edge = tuple(key)
        node = self._node.children.get(edge)
        if node is None:
            node = self._node.children[edge] = self._grown(op, args, kwargs)
        self._node = node
        self._tensors += new
        self._numbers += numbers
        return node

    def _describe(
        self, value: Any, key: list[Any], new: list[Tensor], numbers: list[float]
    ) -> None:
        """Appends to the key the properties of an argument that calls are compared by."""
        kind = type(value)
        if kind is list or kind is tuple:
            if value and isinstance(value[0], Tensor):
                self._describe_tensors(value, key, new)
            elif set(map(type, value)) == {float} and all(map(isfinite, value)):
                key += (list, len(value))
                numbers += value
            else:
                key.append(len(value))
                for entry in value:
                    self._describe(entry, key, new, numbers)
        elif kind is float:
            if value - value != 0:  # infinite, or not a number
                raise _DifferentError
            numbers.append(value)
            key.append(kind)
        elif kind is bool or kind is int or value is None:
            key += (kind, value)
        elif isinstance(value, Tensor):
            self._describe_tensors([value], key, new)
        else:
            raise _DifferentError

    def _describe_tensors(
        self, tensors: Sequence[Tensor], key: list[Any], new: list[Tensor]
    ) -> None:
        addresses = storages.addresses_of(tensors)
        numbered = self._lists.get(addresses)
        if numbered is not None:
            number, known = numbered
            is_like = known.likeness is not None and known.likeness.holds(tensors)
            if not is_like and self._description(tensors) is not known.description:
                raise _DifferentError
            key.append(~number)  # a list of numbers has its length there
            return
        place = key[0], len(key), len(tensors)
        met = self._node.met.get(place)
        is_first = met is None
        if met is not None and not (met.likeness is not None and met.likeness.holds(tensors)):
            met = None
        if met is None or met.before is not self._last or met.addresses != addresses:
            likeness = met.likeness if met else storages.Likeness(tensors) if is_first else None
            description = met.description if met else self._description(tensors)
            met = KnownList(addresses, description, likeness, self._last)
            self._places.find(self._layouts.addresses, self._made_addresses)
            if not self._places.are_apart(met.slots):
                raise _DifferentError
            if likeness is not None:
                self._node.met[place] = met
        if not met.description.is_exact:
            if len(self):
                raise _DifferentError
            self._is_alone = True
        self._last = met
        self._lists[addresses] = len(self._lists), met
        self._layouts.add(met)
        key += met.description, met.residues
        new += tensors

    def _description(self, tensors: Sequence[Tensor]) -> Description:
        """The description of tensors.

        Raises:
            _DifferentError: they cannot be a part of this sequence.
        """
        dtypes = tuple(map(_dtype, tensors))
        if not (EXACT | _ROUNDED).issuperset(dtypes):
            raise _DifferentError
        if not dispatch.PLAIN_TENSORS.issuperset(map(type, tensors)):
            raise _DifferentError
        if {*map(Tensor.get_device, tensors)} - {self._index} or any(map(Tensor.is_neg, tensors)):
            raise _DifferentError
        return Description.of(tensors)

    def _grown(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Node:
        """The node of a call that no sequence has had here; raises as `add`, or RuntimeError."""
        global _nodes
        if overlaps_itself(op, written_by(op, args, kwargs)):
            raise _DifferentError
        if _nodes >= _MOST_NODES:
            _roots.clear()
            _nodes = 0
        _nodes += 1
        results = _results(op, args, kwargs)
        numbers = len(self._numbers)
        self._places.find(self._layouts.addresses, self._made_addresses)

        def place(value: Any) -> Any:
            nonlocal numbers
            if isinstance(value, Tensor):
                place = self._places.get(*storages.addresses_of([value]))
                assert place is not None
                return Leaf(place) if place >= 0 else Made(~place)
            if type(value) is not float:
                return value
            numbers += 1
            return _Number(numbers - 1)

        placed, named = tree_map(place, (args, kwargs))
        made = 0 if results is None else len(results)
        return _Node(self._node, SequenceCall(op, placed, named, made), results)

    # ---- their end

    def run(self) -> None:
        """Runs all calls that were remembered, and lets go of the tensors.

        Raises:
            DeviceError: the GPU refused.
        """
        needed = [made.are_needed() for _, made in self._made]
        wanted = tuple(k for k, is_needed in enumerate(chain(*needed)) if is_needed)
        results = self._computed(wanted)
        if results is None:
            self._run_singly()
        else:
            made = self._all_made()
            for position, result in zip(wanted, results, strict=True):
                give(made[position], result)
            del made
        for (node, spare), are_needed in zip(self._made, needed, strict=True):
            if len(node.spare) < 2 and not any(are_needed) and spare.lie_as_made():
                node.spare.append(spare)

    def _computed(self, wanted: tuple[int, ...] | None) -> Sequence[Tensor | None] | None:
        """Runs all calls as a whole.

        Args:
            wanted: positions of made tensors; None: the results of the only call.

        Returns:
            What is wanted, without what is empty. None: they cannot be compiled, and have not run.
        """
        leaves = [*self._tensors, *self._numbers]
        program = self._program(wanted, leaves)
        if program.compiled is None:
            self._tensors = self._layouts.restored(self._tensors, self._index)
            return None
        if not program.is_in_place:
            leaves = [*self._layouts.restored(self._tensors, self._index), *self._numbers]
        memory = self._layouts.buffers(len(self._tensors))
        self.has_begun = True
        results: Sequence[Tensor | None] = program.compiled.run(leaves, program, memory)
        return results

    def _all_made(self) -> list[Tensor]:
        return [tensor for _, made in self._made for tensor in made.tensors]

    def _program(self, wanted: tuple[int, ...] | None, leaves: Sequence[Any]) -> KnownCall:
        """The call of what runs the sequence as a whole.

        Raises:
            UnsupportedOp, AdapterError: there is no kernel for tensors as large as these.
        """
        known = self._node.programs.setdefault(wanted, [])
        for program in known:
            if program.compiled is None or program.compiled.accepts(leaves):
                return program
        op = self._node.calls[0].op
        if len(known) >= _MOST_PROGRAMS:  # numbers that choose the code, other ones every time
            return KnownCall(op)
        leaves = [*self._layouts.restored(self._tensors, self._index), *self._numbers]
        compiled = self._compiled(wanted, leaves)
        known.append(KnownCall(op) if compiled is None else compiled.known_call(op, leaves))
        return known[-1]

    def _compiled(self, wanted: tuple[int, ...] | None, leaves: Sequence[Any]) -> CompiledOp | None:
        first = len(self._tensors)

        def as_leaf(number: _Number) -> Leaf:
            return Leaf(first + number.position)

        def with_leaves(call: SequenceCall) -> SequenceCall:
            args, kwargs = tree_map_only(_Number, as_leaf, (call.args, call.kwargs))
            return replace(call, args=args, kwargs=kwargs)

        calls = list(map(with_leaves, self._node.calls))
        made = [TensorSpec(*layout) for layout in self._node.layouts]
        with _DisableAutocast():
            try:
                return compile_lists(calls, specs_of(leaves), made, wanted, self._index)
            except UnsupportedOp:
                return None

    def _run_singly(self) -> None:
        """Runs one call after the other."""
        made = self._all_made()

        def value_of(place: Leaf | Made | _Number) -> Any:
            if isinstance(place, _Number):
                return self._numbers[place.position]
            return (made if isinstance(place, Made) else self._tensors)[place.position]

        later = iter(made)
        places = (Leaf, Made, _Number)
        for call in self._node.calls:
            args, kwargs = tree_map_only(places, value_of, (call.args, call.kwargs))
            changed = tuple(chain(*(args[position] for position in _written(call.op))))
            with _unsafe_preserve_version_counter(changed):  # they are counted
                results = dispatch.run(call.op, *args, **kwargs)
            for result in results or ():
                give(next(later), result)


class _Number:
    """Number ``position`` of a sequence, whose tensors may become more."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


# Operators round their results to 16 bits, but the kernel of a sequence does not what lies between.
_ROUNDED = {torch.float16, torch.bfloat16, torch.int16, torch.int8}

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]


def _count_changes(op: OpOverload, args: Sequence[Any]) -> None:
    """Increments the versions of the tensors that a call changes."""
    if not torch.is_inference_mode_enabled():  # there are no versions
        for position in _written(op):
            torch.autograd.graph.increment_version(args[position])


@cache
def _written(op: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the operator changes."""
    infos = [argument.alias_info for argument in op._schema.arguments]
    return tuple(k for k, info in enumerate(infos) if info is not None and info.is_write)


def _results(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Any, ...]] | None:
    """(dtype, sizes, strides) of a call's results; None for an operator without results.

    Raises:
        _DifferentError: PyTorch refuses the call, or cannot tell.
    """
    described, named = tree_map(outputs.to_meta, (args, kwargs))
    with _DisableAutocast():
        try:
            found = op(*described, **named)
        except Exception:  # of wrong arguments, or of operators that PyTorch cannot describe
            raise _DifferentError from None
    if not op._schema.returns:
        return None
    return [(t.dtype, tuple(t.shape), t.stride()) for t in tree_leaves(found)]
