"""`record`: a function, as it is, becomes a graph of the operators that a call of it runs.

The call is made on fake tensors, with autograd: the gradients that it computes and the in-place
writes of its optimizer are recorded as anything else. Every real tensor that it meets is state.
What Python decides, and numbers that it computes, are part of the graph: those that would be others
in the next call are refused.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..capture.graph.patterns import REWRITES
from ..capture.patches import compiling_flag
from ..capture.refusals import refusal
from ..capture.tracing import Rules
from ..errors import UnsupportedOp
from ..node_text import line_of_user
from ..torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    HigherOrderOperator,
    _disable_current_modes,
    _get_mkldnn_enabled,
    _get_nnpack_enabled,
    _set_mkldnn_enabled,
    _set_nnpack_enabled,
    enable_python_dispatcher,
    tree_map_only,
)
from ..torch_private import shapes_config as symbolic_config
from .indexing import Copies, get_item, set_item
from .inputs import ExportInputs, fake_like
from .names import Key, Names, key_of
from .python_state import Change, PythonState
from .recorded import Difference, Recorded, difference
from .steps import StepRecorder, Steps, is_own

aten = torch.ops.aten

_VALUES_NEEDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
_LITERALS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})


class _Everything(frozenset[Any]):
    """Of operators: decompositions come later."""

    def __contains__(self, item: object) -> bool:
        return True


class _CallRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Records a call; the fake tensors that stand for real ones are those of their states."""

    def __init__(self, mode: FakeTensorMode, rules: Rules) -> None:
        super().__init__(Rules({}, _Everything()), Steps(mode, rules, self.stand_in))
        self.states: dict[str, Tensor] = {}
        self.copies = Copies(self.stand_in)
        self._mode = mode
        self._stand_ins: dict[Key, FakeTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stack_trace = _user_frame()
        if isinstance(func, HigherOrderOperator):
            return self.higher_order(func, args, kwargs or {})
        if func not in _LITERALS:
            args, kwargs = tree_map_only(Tensor, self.stand_in, (args, kwargs or {}))
        error = refusal(func, args, kwargs or {})
        if error is not None:
            raise error
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except _VALUES_NEEDED as error:
            raise _values_needed(str(func), self.stack_trace) from error
        self.copies.change(func, args, kwargs or {})
        return result

    def higher_order(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """The results of a loop, a branch, or another operator that calls functions."""
        self.stack_trace = _user_frame()
        try:
            args, kwargs = tree_map_only(Tensor, self.stand_in, (args, kwargs))
            return self.steps.higher_order(self, func, args, dict(kwargs))
        except UnsupportedOp as error:
            if error.source:
                raise
            place = line_of_user(self.stack_trace or "")
            raise UnsupportedOp(error.op, error.cause, error.next_step, place) from error

    def stand_in(self, value: Tensor) -> Tensor:
        """A fake tensor for a real one, which is state from then on; or ``value``."""
        if isinstance(value, FakeTensor):
            return value
        key = key_of(value)
        fake = self._stand_ins.get(key)
        if fake is None:
            name = f"state{len(self.states)}"
            self.states[name] = value
            fake = fake_like(value, self._mode)
            self._stand_ins[key] = fake
            self.constant(name, value, fake)
        return fake

    def node_of(self, value: Tensor) -> Node:
        """The node of a tensor. Raises UnsupportedOp for one of another capture."""
        known = not isinstance(value, FakeTensor) or id(value) in self._nodes
        if not known and value.constant is None:  # type: ignore[attr-defined]
            raise UnsupportedOp(
                "export",
                "a tensor that was made while a function was captured is used after that",
                "make what the functions keep before the export: call them once",
                line_of_user(self.stack_trace or ""),
            )
        self.copies.check(value, self.stack_trace)
        return super().node_of(value)


class _Rewrites(TorchFunctionMode):
    """Puts this package's functions in the place of some of PyTorch's.

    Higher-order operators are taken apart here, where autograd has not yet seen them.
    """

    def __init__(self, recorder: _CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._recorder.higher_order(func, args, kwargs or {})
        if func is Tensor.__getitem__:
            return self._get_item(*args)
        if func is Tensor.__setitem__:
            return self._set_item(*args)
        return REWRITES.get(func, func)(*args, **(kwargs or {}))

    def _get_item(self, tensor: Tensor, index: Any) -> Any:
        found = get_item(tensor, index)
        if found is None:
            return tensor[index]
        self._recorder.copies.add(found, tensor, index)
        return found

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        with self._recorder.copies.written(tensor, index, value):
            if not set_item(tensor, index, value):
                tensor[index] = value


def record(
    inputs: ExportInputs,
    names: Names,
    rules: Rules,
    autocast: torch.dtype | None = None,
) -> Recorded:
    """Records one call.

    Args:
        rules: as for `tracing.trace`, of the functions of loops and branches.
        autocast: of autocast around the call, if any.

    Raises:
        UnsupportedOp: Python depends on the values of tensors, or on what calls change; or an
            optimizer makes its state from gradients.
    """
    before = _Snapshot(names)
    python = PythonState(inputs.function, inputs.by_name)
    try:
        recorded = _record(_CallRecorder(inputs.mode, rules), inputs, autocast, before, python)
        changes = _changes(python)
        kept = before.new_gradients()
        before.restore()
        if kept:
            # The next call starts with them: they are state, unless it drops them.
            for parameter in kept:
                parameter.grad = torch.zeros_like(parameter)
            python.restore_tensors()
            before, between = _Snapshot(names), PythonState(inputs.function, inputs.by_name)
            recorder = _CallRecorder(inputs.mode, rules)
            again = _record(recorder, inputs, autocast, before, between)
            gradients = {key_of(p.grad) for p in kept if isinstance(p.grad, Tensor)}
            if any(key_of(state) in gradients for state in again.states.values()):
                recorded, changes = again, _changes(between)
            else:
                before.restore()
                for parameter in kept:
                    parameter.grad = None
        if changes:
            before.restore()
            _require_constant(recorded, changes, inputs, names, rules, autocast)
        return recorded
    finally:
        before.restore()
        python.restore_tensors()


def _record(
    recorder: _CallRecorder,
    inputs: ExportInputs,
    autocast: torch.dtype | None,
    before: _Snapshot,
    python: PythonState,
) -> Recorded:
    fakes = inputs.fakes()
    for number, fake in enumerate(fakes):
        recorder.input(f"input{number}", fake)
    with ExitStack() as stack:
        stack.enter_context(_optimizers())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(any_sizes())
        stack.enter_context(enable_python_dispatcher())
        if autocast is not None:
            stack.enter_context(torch.autocast("cpu", autocast))
        stack.enter_context(inputs.mode)
        stack.enter_context(recorder)
        stack.enter_context(_Rewrites(recorder))
        try:
            results = inputs.call(fakes)
        except _VALUES_NEEDED as error:  # Python's own ``if`` and ``for``
            place = _raised_at(error)
            raise _values_needed("a condition, or a number, in Python", place) from error

    def node_of(value: Tensor) -> Node:
        return recorder.node_of(recorder.stand_in(value))

    nodes = tree_map_only(Tensor, node_of, results)
    recorder.copies.check()
    replaced: dict[str, Node] = {}
    for real, fake in (*before.replaced_buffers(), *_replaced(python, recorder)):
        node = node_of(real)
        if fake.shape != real.shape or fake.dtype != real.dtype:
            raise UnsupportedOp(
                "export",
                f"a tensor of {tuple(real.shape)} that is kept is replaced by one of "
                f"{tuple(fake.shape)}",
                "keep state in a tensor of one size and change it in place",
            )
        if replaced.setdefault(str(node.target), node_of(fake)) is not node_of(fake):
            raise UnsupportedOp(
                "export",
                f"a tensor of {tuple(real.shape)} is kept in two places, which the function gives "
                "different ones",
                "start with a tensor for each: zeros.clone()",
            )
    for optimizer in before.optimizers:
        if any(isinstance(v, FakeTensor) for s in optimizer.state.values() for v in s.values()):
            raise UnsupportedOp(
                f"{type(optimizer).__name__}.step",
                "it makes its state from the first gradients",
                "take one step in PyTorch before the export",
            )
    recorder.end()
    return Recorded(
        recorder.module(), recorder.states, nodes, tuple(replaced.items()), recorder.steps
    )


def _replaced(python: PythonState, recorder: _CallRecorder) -> Iterator[tuple[Tensor, FakeTensor]]:
    """Tensors that the call has read, and replaced: the next one would read the others."""
    read = {id(state) for state in recorder.states.values()}
    return ((old, new) for old, new in python.replaced_tensors() if id(old) in read)


# ---- numbers that change


def _changes(python: PythonState) -> list[Change]:
    """What a call has changed, but for what a capture changes."""
    return [c for c in python.changes() if not (c.key in _CAPTURABLE and "params" in c.container)]


def _require_constant(
    recorded: Recorded,
    changes: Sequence[Change],
    inputs: ExportInputs,
    names: Names,
    rules: Rules,
    autocast: torch.dtype | None,
) -> None:
    """Raises UnsupportedOp where a call computes with numbers that calls change.

    The next call is recorded, too, and one for which counters are at a round number, as Python may
    do something every hundredth time; both are to be the same. Where they cannot be recorded, as
    they use tensors which the first one has made, nothing is known, and nothing is refused.

    Args:
        recorded: the first call.
        changes: what it has changed.
    """
    _refuse_schedules(changes)
    after = PythonState(inputs.function, inputs.by_name)
    more: list[Change] = []

    def next_call() -> Difference | None:
        before = _Snapshot(names)
        python = PythonState(inputs.function, inputs.by_name)
        again = replace(inputs)  # the ranges of sizes are those of the first call alone
        try:
            recorder = _CallRecorder(again.mode, rules)
            found = difference(recorded, _record(recorder, again, autocast, before, python))
            more.extend(_changes(python))
        except Exception:  # whatever the user's code raises
            return None
        finally:
            before.restore()
            after.restore()
        return found

    for change in changes:
        change.repeat()
    found = next_call()
    counters = [change for change in changes if found is None and change.is_count(more)]
    if counters:
        for change in changes:
            change.repeat()
        for change in counters:
            change.count_to(_ROUND)
        found = next_call()
    if found is not None:
        trace = found.node.meta.get("stack_trace") if found.node is not None else None
        shown = [c.text for c in changes[:4]] + ["…"] * (len(changes) > 4)
        raise UnsupportedOp(
            "export",
            f"Python computes with what a call of the function changes ({', '.join(shown)}): a "
            "bundle would compute every call as the first one",
            "keep such numbers in tensors that are changed in place (self.step.add_(1), "
            "lr=torch.tensor(…)), take them as inputs, or draw them with torch.rand; if only the "
            "first call is unlike the others, call the function once before the export",
            line_of_user(trace or ""),
        )


def _refuse_schedules(changes: Sequence[Change]) -> None:
    """Raises UnsupportedOp for a schedule: two calls in a row may have the same rate."""
    for change in changes:
        schedule = change.owner
        if change.key != "last_epoch" or not isinstance(schedule, LRScheduler):
            continue
        groups = schedule.optimizer.param_groups
        if type(schedule) is ExponentialLR and all(isinstance(g["lr"], Tensor) for g in groups):
            continue  # a product of tensors
        raise UnsupportedOp(
            f"{type(schedule).__name__}.step",
            "Python computes the learning rate: a bundle would keep that of the first call",
            "take the rate as an input (optimizer.param_groups[0]['lr'].copy_(lr), with an "
            "optimizer of lr=torch.tensor(…)), and call the schedule where the bundle is run",
        )


_ROUND = 2**7 * 3**2 * 5**4 * 7
"""A multiple of what is counted to: of 100, 1000, 64, 7 …; but one to which a loop could run."""

_CAPTURABLE = ("capturable", "foreach")
"""What a capture changes of a group of parameters."""

_SET = (*_CAPTURABLE, "lr")
"""What a capture, or a schedule of the user's, may change of a group of parameters."""


class _Snapshot:
    """What a call on fake tensors must leave as it was: gradients, buffers, optimizers' state."""

    def __init__(self, names: Names) -> None:
        self.optimizers = names.optimizers.values()
        self._gradients = [(p, p.grad) for _, p in names.parameters()]
        self._buffers = [
            (owner, name, value)
            for module in names.modules.values()
            for owner in module.modules()
            for name, value in owner._buffers.items()
        ]
        self._groups = [(group, dict(group)) for o in self.optimizers for group in o.param_groups]

    def new_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters with a gradient that the call made and left."""
        return [p for p, old in self._gradients if old is None and isinstance(p.grad, FakeTensor)]

    def replaced_buffers(self) -> Iterator[tuple[Tensor, FakeTensor]]:
        for owner, name, value in self._buffers:
            now = owner._buffers.get(name)
            if isinstance(now, FakeTensor) and value is not None:
                yield value, now

    def restore(self) -> None:
        for holder, gradient in self._gradients:
            if holder.grad is not gradient:
                holder.grad = gradient
        for owner, name, value in self._buffers:
            owner._buffers[name] = value
        for group, old in self._groups:
            group.update({k: v for k, v in old.items() if k in _SET})
        for optimizer in self.optimizers:
            for parameter, state in list(optimizer.state.items()):
                if any(isinstance(value, FakeTensor) for value in state.values()):
                    del optimizer.state[parameter]


# ---- optimizers


@contextmanager
def any_sizes() -> Iterator[None]:
    """Keeps PyTorch from asking whether sizes are 0 or 1, or good for one of its own kernels."""
    # `torch.backends.mkldnn.flags` also sets unrelated flags, which warns on some CPUs.
    enabled = _get_mkldnn_enabled(), _get_nnpack_enabled()
    _set_mkldnn_enabled(False)
    _set_nnpack_enabled(False)
    try:
        with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield
    finally:
        _set_mkldnn_enabled(enabled[0])
        _set_nnpack_enabled(enabled[1])


@contextmanager
def _optimizers() -> Iterator[None]:
    """Optimizers make their state before their first step, and keep numbers of steps in tensors."""

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():
            prepare(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with compiling_flag.install():
            yield
    finally:
        handle.remove()


def prepare(optimizer: Optimizer) -> None:
    """Gives an optimizer its first state, as its first step would, and makes it capturable.

    Raises:
        UnsupportedOp: only a step can make it.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True  # some of the others take numbers out of tensors
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if p.grad is not None and not optimizer.state.get(p)]
    make = getattr(optimizer, "_init_group", None)
    if not missing:
        return
    if make is None:
        raise UnsupportedOp(
            f"{type(optimizer).__name__}.step",
            "it has no state yet, and only a step can make it",
            "take one step in PyTorch before the export",
        )
    gradients = [(p, p.grad) for p in parameters]
    lists = len(inspect.signature(make).parameters) - 1
    try:
        for new in missing:
            new.grad = torch.zeros_like(new)
        for group in optimizer.param_groups:
            make(group, *([] for _ in range(lists)))
            if group.get("momentum") and isinstance(optimizer, torch.optim.SGD):
                _prepare_momentum(optimizer, group)
    finally:
        for owner, gradient in gradients:
            owner.grad = gradient


def _prepare_momentum(optimizer: torch.optim.SGD, group: dict[str, Any]) -> None:
    """SGD's first step takes the gradient itself, which is what zeros give without dampening."""
    for parameter in group["params"]:
        if parameter.grad is None or optimizer.state[parameter].get("momentum_buffer") is not None:
            continue
        if group["dampening"]:
            raise UnsupportedOp(
                "SGD.step",
                "with dampening its first step is unlike the others",
                "take one step in PyTorch before the export",
            )
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


# ---- the user's lines


def _values_needed(op: str, stack_trace: str | None) -> UnsupportedOp:
    return UnsupportedOp(
        op,
        "Python needs the values of a tensor, or a size that depends on them, while the function "
        "is captured",
        "choose with torch.where and masks, or torch.cond; loop with torch.while_loop; or compute "
        "it outside of the exported function",
        line_of_user(stack_trace or ""),
    )


def _user_frame() -> str | None:
    """The innermost frame outside of PyTorch and this package, as in a traceback."""
    return _users(traceback.walk_stack(sys._getframe(2)))


def _raised_at(error: Exception) -> str | None:
    """The same of where an error was raised."""
    return _users(reversed([*traceback.walk_tb(error.__traceback__)]))


def _users(frames: Iterable[tuple[Any, int]]) -> str | None:
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not is_own(file):
            code = linecache.getline(file, line).strip()
            return f'File "{file}", line {line}, in {frame.f_code.co_name}\n  {code}'
    return None
