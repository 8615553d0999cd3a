"""`DividedGraph`: runs a graph in parts, with what is called between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from ...captured import saved_tensors_have_hooks
from ...symbolic.sizes import may_overlap, storage_span
from ...torch_private import (
    _unsafe_preserve_version_counter,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from . import loops
from .numbers import Number
from .parts import Call, Check, Divided, Part, Pick, Slot

BoxedFunction = Callable[[list[Any]], Sequence[Any]]


class Place(Protocol):
    """Where the parts of a graph work whose tensors are elsewhere.

    What it is asked about are parameters and buffers: often the same again, with the same contents.

    Attributes:
        device: that of its tensors.
    """

    device: torch.device

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Tensors there of equal contents, which are only read; None for what it does not keep."""

    def changing(
        self, tensors: Sequence[Tensor], counted: Sequence[bool]
    ) -> AbstractContextManager[list[Tensor | None]]:
        """The same, to be written; when it ends without an error, ``tensors`` have been given what
        these hold.

        ``counted``: whether each one's version counter is incremented before each call.
        """

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU tensors of the contents and strides of tensors there."""


class DividedGraph:
    """A function of a list of arguments, which it empties, to a list of results.

    Args:
        divided: the graph.
        parts: what each of its `Part`s was compiled to, in order.
        functions: what the functions of its `Call`s were compiled to, by slot.
        place: where the parts work, if that is not where the caller's tensors are.
        counted: positions of the changed arguments whose version counters somebody else increments.
        saved: positions of the results that only the backward graph will see. They stay where the
            parts work, unless hooks will read them.
    """

    _boxed_call = True

    def __init__(
        self,
        divided: Divided,
        parts: Sequence[BoxedFunction],
        functions: Mapping[int, BoxedFunction],
        place: Place | None,
        counted: frozenset[int],
        saved: frozenset[int] = frozenset(),
    ) -> None:
        self._divided = divided
        self._parts = list(parts)
        self._functions = {slot: loops.Function(f) for slot, f in functions.items()}
        self._place = place
        self._device = None if place is None else place.device
        self._counted = counted
        self._saved = saved

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values = arguments[:]
        arguments.clear()
        with torch.no_grad():
            place, divided = self._place, self._divided
            if place is None:
                return self._run(values, {})
            static = place.of([values[position] for position in divided.static])
            copies = dict(zip(divided.static, static, strict=True))
            if not divided.states:
                return self._run(values, copies)
            states = [values[position] for position in divided.states]
            counted = [position in self._counted for position in divided.states]
            with place.changing(states, counted) as found:
                copies.update(zip(divided.states, found, strict=True))
                return self._run(values, copies)

    def _run(self, arguments: list[Any], copies: Mapping[int, Tensor | None]) -> list[Any]:
        """``copies``: of the arguments at these positions, where the parts work."""
        divided = self._divided
        symbols = {name: read(arguments) for name, read in divided.symbols.items()}
        values: dict[int, Any] = dict(self._functions)
        originals: dict[int, tuple[int, Tensor]] = {}  # those that are returned or written
        for position, slot in enumerate(divided.arguments):
            if slot is not None:
                given = arguments[position]
                if slot in divided.kept:
                    originals[slot] = position, given
                copy = copies.get(position)
                values[slot] = self._moved(given) if copy is None else copy
        arguments.clear()
        parts = iter(self._parts)
        for number, step in enumerate(divided.steps):
            match step:
                case Part():
                    self._run_part(step, next(parts), values, symbols)
                case Call():
                    self._call(step, values, symbols)
                case Pick():
                    values[step.gives] = values[step.source][step.position]
                case Check():
                    if not _value(step.condition, values, symbols):
                        raise RuntimeError(step.message)
                case _:
                    assert_never(step)
            for slot in divided.last_uses[number]:
                values.pop(slot, None)
        self._write_back(values, originals)
        return self._results(values, originals, symbols)

    def _moved(self, value: Any) -> Any:
        if self._device is None or not isinstance(value, Tensor):
            return value
        sizes, strides = value.shape, value.stride()
        if may_overlap(sizes, strides):  # the parts expect it as it is, and `to` would expand it
            values = value.as_strided((storage_span(sizes, strides),), (1,))
            return values.to(self._device).as_strided(sizes, strides)
        return value.to(self._device)

    def _run_part(
        self, part: Part, run: BoxedFunction, values: dict[int, Any], symbols: Mapping[str, Any]
    ) -> None:
        given = [values[slot] for slot in part.takes]
        given += [symbols[name] for name in part.symbols]
        if part.floats:
            floats = [symbols[name] for name in part.floats]
            given.append(torch.tensor(floats, dtype=torch.float32, device=self._device))
        given += [number.of(symbols) for number in part.numbers]
        for slot, result in zip(part.gives, run(given), strict=True):
            values[slot] = result

    def _call(self, call: Call, values: dict[int, Any], symbols: dict[str, Any]) -> None:
        args, kwargs = _value((call.arguments, call.keywords), values, symbols)
        result = loops.run(call.target, args, kwargs)
        if call.has_token:
            result = (None, *(result if isinstance(result, (tuple, list)) else (result,)))
        values[call.gives] = result = _as_promised(result, call.dtypes)
        for name, get in call.symbols.items():
            symbols[name] = get(result)

    def _write_back(self, values: Mapping[int, Any], originals: Mapping[int, Any]) -> None:
        """Gives arguments on another device what was written to their copies, with one wait."""
        if self._place is None:
            return
        written = [(*originals[slot], values[slot]) for slot in self._divided.written]
        made = self._place.on_host([copy for _, _, copy in written])
        for (position, original, _), value in zip(written, made, strict=True):
            if position in self._counted and not original.is_inference():
                with _unsafe_preserve_version_counter(original):
                    original.copy_(value)
            else:
                original.copy_(value)

    def _results(
        self, values: Mapping[int, Any], originals: Mapping[int, Any], symbols: Mapping[str, Any]
    ) -> list[Any]:
        results: list[Any] = []
        away: dict[int, Tensor] = {}  # by position, those that are wanted on the CPU
        staying = self._saved if not saved_tensors_have_hooks() else ()
        pairs = zip(self._divided.returns, self._divided.devices, strict=True)
        for k, (item, device) in enumerate(pairs):
            if isinstance(item, Slot) and item.index in originals:
                results.append(originals[item.index][1])
                continue
            value = _value(item, values, symbols)
            is_here = isinstance(value, Tensor) and value.device == self._device
            if is_here and device is not None and k not in staying:
                away[k] = value
            results.append(value)
        if away and self._place is not None:
            for k, value in _moved(away, self._place.on_host).items():
                results[k] = value
        return results


def _moved(
    tensors: Mapping[int, Tensor], move: Callable[[Sequence[Tensor]], list[Tensor]]
) -> dict[int, Tensor]:
    """Tensors that ``move`` takes elsewhere; those that share memory do so there, too."""
    places = {
        k: (t.untyped_storage().data_ptr(), t.dtype) if t.numel() else k for k, t in tensors.items()
    }
    counts = Counter(places.values())
    memory: dict[Any, Tensor] = {}
    for k, tensor in tensors.items():
        if counts[places[k]] == 1:
            memory[places[k]] = tensor
        elif places[k] not in memory:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            memory[places[k]] = tensor.as_strided((size,), (1,), 0)
    copies = dict(zip(memory, move(list(memory.values())), strict=True))
    found = {}
    for k, tensor in tensors.items():
        copy = copies[places[k]]
        if counts[places[k]] > 1:
            copy = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        found[k] = copy
    return found


def _as_promised(result: Any, dtypes: Sequence[torch.dtype | None]) -> Any:
    """A result in the dtypes that the parts after it are compiled for.

    PyTorch 2.11 says of the counts of ``unique`` that they are int32, if its argument is.
    """
    leaves, spec = tree_flatten(result)
    if len(leaves) != len(dtypes):
        return result
    pairs = zip(leaves, dtypes, strict=True)
    return tree_unflatten([v if d is None else v.to(d) for v, d in pairs], spec)


def _value(template: Any, values: Mapping[int, Any], symbols: Mapping[str, Any]) -> Any:
    """Arguments as a call takes them, of what `parts` made of them."""
    if isinstance(template, Slot):
        return values[template.index]
    if isinstance(template, Number):
        return template.of(symbols)
    return tree_map_only((Slot, Number), lambda leaf: _value(leaf, values, symbols), template)
