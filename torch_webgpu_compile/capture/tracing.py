"""`trace`: a call on fake tensors becomes a functional FX graph.

A dispatch mode records every operator that is kept and runs the decompositions of the others. It
does what ``make_fx`` does under functionalization, in a tenth of the time: eager calls are traced
one by one, while a user waits.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..errors import UnsupportedOp
from ..torch_ops.assertions import ASSERTIONS
from ..torch_private import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    _AutoDispatchBelowADInplaceOrView,
    _disable_current_modes,
    _disable_functionalization,
    _DisableAutocast,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _enable_functionalization,
    _ExcludeDispatchKeyGuard,
    _ForceDispatchKeyGuard,
    _from_functional_tensor,
    _is_functional_tensor,
    _LazyGraphModule,
    _pop_mode_temporarily,
    _sync,
    _to_functional_tensor,
    enable_python_dispatcher,
    suggest_memory_format,
    tree_leaves,
    tree_map_only,
)
from .decompositions.table import is_composite
from .fx_graphs import add_argument

aten = torch.ops.aten

_COMPOSITE = DispatchKey.CompositeExplicitAutograd


@dataclass(frozen=True)
class Rules:
    """What is recorded.

    Attributes:
        decompositions: rules for operators that are not.
        native: operators that are although they are composite.
    """

    decompositions: Mapping[Any, Callable[..., Any]]
    native: frozenset[OpOverload]


AS_THEY_ARE = Rules({}, frozenset())
"""What is recorded as it is called, but for what is only a name of others."""


@dataclass(frozen=True)
class Traced:
    """A call as a graph without an output node.

    Attributes:
        module: placeholders are the call's inputs, in order; trailing ``aten.copy_(placeholder,
            value)`` nodes are the mutations of them.
        results: what the function returned, with FX nodes in place of tensors; an input that the
            call returns is its placeholder.
        mutated: positions of the inputs that the call changes.
        resized: those of them that take sizes and strides of the value (``out=`` arguments).
        captured: tensors that the function has from elsewhere, whose placeholders come last.
    """

    module: GraphModule
    results: Any
    mutated: tuple[int, ...] = ()
    resized: tuple[int, ...] = ()
    captured: tuple[Tensor, ...] = ()


def trace(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    rules: Rules,
    *,
    mutates: bool,
    lift: Callable[[Tensor], Tensor] | None = None,
) -> Traced:
    """Records ``function(*inputs)``, inside of `clean_dispatch`.

    Args:
        function: may change its tensors in place if ``mutates``.
        inputs: fake tensors of ``mode``, one per placeholder; anything else is a constant.
        lift: gives a fake tensor of ``mode`` for a tensor that the function has from elsewhere:
            these are inputs, too, behind the others. Without it they are constants.

    Raises:
        UnsupportedOp: the call cannot be made functional.
    """
    recorder = Recorder(rules, lift)
    with mode:
        for number, value in enumerate(inputs):
            recorder.input(f"arg{number}", value)
        traced = run(recorder, function, inputs, mutates=mutates)
        if recorder.is_functional:
            return traced
        return functional(traced, inputs, Recorder(rules))


def functional(traced: Traced, inputs: Sequence[Any], recorder: Recorder) -> Traced:
    """A graph recorded once more, without the in-place operators that decompositions brought."""
    module = traced.module

    def replay(*values: Any) -> Any:
        known = recorder.replay(module, values, lambda name: getattr(module, name))
        return tree_map_only(Node, known.__getitem__, traced.results)

    again = run_functional(recorder, replay, [*inputs, *traced.captured])
    return replace(again, captured=traced.captured)


def run_functional(
    recorder: Recorder, function: Callable[..., Any], inputs: Sequence[Any]
) -> Traced:
    """Records ``function(*inputs)``, whose inputs the recorder does not know; see `trace`."""
    for number, value in enumerate(inputs):
        recorder.input(f"arg{number}", value)
    found = run(recorder, function, inputs, mutates=True)
    if not recorder.is_functional:
        raise UnsupportedOp(
            "trace", "it changes a tensor in a way that cannot be captured", "report this"
        )
    return found


@cache
def _plain_keys() -> tuple[Any, Any]:
    """The dispatch keys that PyTorch includes and excludes in a kernel, outside of any transform.

    A new thread is outside of them all.
    """
    found: list[Any] = []

    def look() -> None:
        with _AutoDispatchBelowADInplaceOrView():
            found.append(_dispatch_tls_local_include_set())
            found.append(_dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0], found[1]


@contextmanager
def clean_dispatch(*, symbolic: bool) -> Iterator[None]:
    """Hides the modes that the caller is under. ``symbolic``: there will be symbolic sizes."""
    with _ForceDispatchKeyGuard(*_plain_keys()):
        # Some C++ kernels take no symbols; PyTorch's Python ones do.
        python_kernels = enable_python_dispatcher() if symbolic else nullcontext()
        with (
            _disable_current_modes(),
            DisableTorchFunction(),
            _DisableAutocast(),
            torch.no_grad(),
            python_kernels,
            _quiet(),
        ):
            yield


class _Quiet(logging.Filter):
    """Drops records while a call is traced in the same thread: its errors are raised as well."""

    def __init__(self) -> None:
        super().__init__()
        self.state = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.state, "depth", 0)


_quiet_filter = _Quiet()
logging.getLogger(FakeTensor.__module__).addFilter(_quiet_filter)


@contextmanager
def _quiet() -> Iterator[None]:
    state = _quiet_filter.state
    state.depth = getattr(state, "depth", 0) + 1
    try:
        yield
    finally:
        state.depth -= 1


def run(
    recorder: Recorder, function: Callable[..., Any], inputs: Sequence[Any], *, mutates: bool
) -> Traced:
    """Records ``function(*inputs)``, whose inputs the recorder knows; see `trace`."""
    if not mutates:
        with recorder:
            results = function(*inputs)
        return recorder.finish(results)
    wrapped = [
        _to_functional_tensor(value) if isinstance(value, Tensor) else value for value in inputs
    ]
    with recorder:
        _enable_functionalization(reapply_views=True)
        try:
            results = function(*wrapped)
        finally:
            _disable_functionalization()  # type: ignore[no-untyped-call]
        changes = _write_back(recorder, inputs, wrapped)
        originals = {id(w): value for w, value in zip(wrapped, inputs, strict=True)}

        def unwrapped(value: Tensor) -> Any:
            return originals.get(id(value)) if id(value) in originals else inner(value)

        return recorder.finish(tree_map_only(Tensor, unwrapped, results), *changes)


def inner(value: Tensor) -> Tensor:
    if not _is_functional_tensor(value):
        return value
    _sync(value)
    return _from_functional_tensor(value)


def _write_back(
    recorder: Recorder, inputs: Sequence[Any], wrapped: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of changed inputs, and those of them whose sizes change."""
    changed, resized = [], []
    for position, (before, wrapper) in enumerate(zip(inputs, wrapped, strict=True)):
        if not isinstance(before, Tensor):
            continue
        after = inner(wrapper)
        if after is before:
            continue
        if len(after.shape) != len(before.shape) or after.shape != before.shape:
            recorder.resize(before, after)
            resized.append(position)
        recorder.mutate(before, after)
        changed.append(position)
    return tuple(changed), tuple(resized)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators as FX nodes; see the module. It goes on top of a `FakeTensorMode`."""

    def __init__(self, rules: Rules, lift: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lift = lift
        self._captured: list[Tensor] = []
        self.graph = Graph()
        self.is_functional = True
        self._decompositions, self._native = rules.decompositions, rules.native
        self._nodes: dict[int, Node] = {}
        self.stack_trace: str | None = None  # of the user's code that is being recorded
        self._kept: list[Any] = []  # keeps the keys of `_nodes` from being reused
        self._constants: dict[str, Any] = {}

    def replay(
        self, module: GraphModule, inputs: Sequence[Any], attribute: Callable[[str], Any]
    ) -> Mapping[Node, Any]:
        """Calls what a graph calls, while it records; what its nodes give."""
        known: dict[Node, Any] = {}
        placeholders = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(placeholders)
            elif node.op == "get_attr":
                known[node] = attribute(str(node.target))
            else:
                self.stack_trace = node.meta.get("stack_trace")
                args, kwargs = tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
                known[node] = self.call_again(node, args, kwargs)
        return known

    def call_again(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Calls what the node of another graph calls."""
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def input(self, name: str, value: Any) -> None:
        """Makes a placeholder."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.know(value, node)

    def mutate(self, target: Tensor, value: Tensor) -> None:
        """Ends the graph with a write of ``value`` into an input."""
        node = self.graph.call_function(
            aten.copy_.default, (self.node_of(target), self.node_of(value))
        )
        node.meta["val"] = target

    def resize(self, target: Tensor, value: Tensor) -> None:
        """Gives an ``out=`` argument the sizes and strides of ``value``.

        Raises UnsupportedOp: if the argument is read before.
        """
        node = self.node_of(target)
        if node.users:
            raise UnsupportedOp("out=", "its old contents are read", "resize it first")
        layout = value.shape, value.stride()
        node.meta["val"] = torch.empty_strided(*layout, dtype=target.dtype, device=target.device)

    def finish(
        self, results: Any, mutated: tuple[int, ...] = (), resized: tuple[int, ...] = ()
    ) -> Traced:
        """The graph, with the nodes of the results."""
        nodes = tree_map_only(Tensor, self.node_of, results)
        return Traced(self.module(), nodes, mutated, resized, tuple(self._captured))

    def module(self) -> GraphModule:
        """The graph with its constants."""
        return _LazyGraphModule(self._constants, self.graph)

    @property
    def constants(self) -> Mapping[str, Any]:
        """What ``get_attr`` nodes give, by name."""
        return self._constants

    def attribute(self, name: str, value: Any) -> None:
        """Notes ``value`` as the constant that ``get_attr`` nodes with this name give."""
        self._constants[name] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        if self._lift is not None:
            args, kwargs = tree_map_only(Tensor, self._lifted, (args, kwargs))
        rule = self._decompositions.get(func)
        if rule is not None:
            with self:
                result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func not in self._native:
            with self:
                result = _decompose(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._record(func, args, kwargs)

    def _record(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        result = _made(func, *_with_hints(func, args, kwargs))
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self.is_functional = False
        elif not found and func not in ASSERTIONS:
            return result
        node_args, node_kwargs = tree_map_only(Tensor, self.node_of, (args, kwargs))
        node = self.graph.call_function(func)
        node.args, node.kwargs = node_args, node_kwargs  # FX warns of symbols when given these
        node.meta["val"] = result
        if self.stack_trace is not None:
            node.meta["stack_trace"] = self.stack_trace
        if isinstance(result, Tensor):
            self.know(result, node)
        elif found:
            self._know_items(result, node)
        return result

    def _know_items(self, results: Sequence[Any], node: Node) -> None:
        for index, value in enumerate(results):
            if not isinstance(value, (Tensor, list, tuple)):
                continue
            item = self.graph.call_function(operator.getitem, (node, index))
            item.meta["val"] = value
            if isinstance(value, Tensor):
                self.know(value, item)
            else:
                self._know_items(value, item)

    def know(self, value: Any, node: Node) -> None:
        """Notes that ``value`` is computed by ``node``."""
        self._nodes[id(value)] = node
        self._kept.append(value)

    def node_of(self, value: Tensor) -> Node:
        """The node that made a tensor; a tensor from elsewhere is a constant."""
        found = self._nodes.get(id(value))
        if found is not None:
            return found
        if isinstance(value, FakeTensor):
            if value.constant is None:
                raise UnsupportedOp("trace", "a tensor of unknown origin", "report this")
            constant = value.constant
        else:
            constant = value
        return self.constant(f"constant{len(self._constants)}", constant, value)

    def _lifted(self, value: Tensor) -> Tensor:
        """A tensor that is known, or an input from now on."""
        if id(value) in self._nodes or (
            isinstance(value, FakeTensor) and value.constant is not None
        ):
            return value
        assert self._lift is not None
        found = self._lift(value)
        if id(found) not in self._nodes:
            self.input(f"captured{len(self._captured)}", found)
            self._captured.append(found)
        return found

    def constant(self, name: str, constant: Tensor, value: Tensor) -> Node:
        """Makes the node of a constant; ``value`` stands for it in the trace."""
        self._constants[name] = constant
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        self.know(value, node)
        return node


def call_with_symbols(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator inside of a trace, with any numbers as symbols.

    PyTorch's dispatcher takes symbols for sizes and scalars. Of one in the place of a ``float`` or
    ``int`` it makes a constant, so that what is traced holds for this number only: such a call goes
    past it, to the recorder.
    """
    if not _plain_symbols(op, args, kwargs, ("float", "int")):
        return op(*args, **kwargs)
    if not op._schema.is_mutable:
        return _dispatched(op, args, kwargs)
    functional = _functional_form(op)
    if functional is None:
        return op(*args, **kwargs)
    if op._schema.name.endswith("_"):
        return args[0].copy_(_dispatched(functional, args, kwargs))
    outs = [kwargs.pop(a.name) for a in op._schema.arguments if a.is_out]
    values = _dispatched(functional, args, kwargs)
    for out, value in zip(outs, [values] if len(outs) == 1 else values, strict=True):
        if out.shape != value.shape:
            out.resize_(value.shape)
        out.copy_(value)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _plain_symbols(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kinds: Collection[str]
) -> set[str]:
    """The arguments that are symbols for which the operator's schema has no place."""
    arguments = op._schema.arguments
    given = {**{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
    return {
        a.name
        for a in arguments
        if isinstance(given.get(a.name), (torch.SymInt, torch.SymFloat))
        and str(a.real_type).removeprefix("Optional[").rstrip("]") in kinds
    }


def _with_hints(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arguments with floats in place of symbols, where the schema has no place for these.

    The sizes of results do not depend on them.
    """
    plain = _plain_symbols(op, args, kwargs, ("float",))
    named = zip(op._schema.arguments, args, strict=False)
    return (
        [value.node.hint if a.name in plain else value for a, value in named],
        {name: v.node.hint if name in plain else v for name, v in kwargs.items()},
    )


def _made(func: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
    """What an operator gives, as fake tensors.

    The C++ code that would say it of the gradients of interpolation takes no symbols.
    """
    name = func._schema.name
    if "upsample_" in name and name.endswith("_backward"):
        grad, _, input_size, *_ = args
        layout = suggest_memory_format(grad)
        return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=layout)
    return func(*args, **kwargs)


def _dispatched(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """What the recorder makes of a call, as functional tensors if the caller has such."""
    is_functional = any(
        isinstance(leaf, Tensor) and _is_functional_tensor(leaf)
        for leaf in tree_leaves((args, kwargs))
    )
    args, kwargs = tree_map_only(Tensor, inner, (args, kwargs))
    keys = DispatchKeySet(DispatchKey.Functionalize)
    with _ExcludeDispatchKeyGuard(keys), _pop_mode_temporarily() as recorder:
        result = recorder.__torch_dispatch__(op, (), args, kwargs)
    return tree_map_only(Tensor, _to_functional_tensor, result) if is_functional else result


@cache
def _functional_form(op: OpOverload) -> OpOverload | None:
    """The operator that gives what an in-place or ``out=`` one writes, if there is one."""
    name = op._schema.name.split("::")[1]
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for form in (name.rstrip("_"), f"{name.rstrip('_')}_functional"):
        packet = getattr(aten, form, None)
        for overload in packet.overloads() if packet is not None else ():
            found: OpOverload = getattr(packet, overload)
            schema = found._schema
            if not schema.is_mutable and wanted == [
                (a.name, str(a.type)) for a in schema.arguments
            ]:
                return found
    return None


def _decompose(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """A composite operator in terms of others; NotImplemented when it is not one."""
    result = func.decompose(*args, **kwargs)
    of_lists = func._schema.name.startswith("aten::_foreach_")
    if result is not NotImplemented or not (of_lists and is_composite(func)):
        return result
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, or a seed of some."""
    tags = getattr(node.target, "tags", ())
    return node.target is torch.ops.webgpu.seed.default or (
        torch.Tag.nondeterministic_seeded in tags
    )


def take_seeds(graph: GraphModule) -> int:
    """Turns a graph's seeds into one more argument, int32 (number of seeds, 2); the number."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default)
    if not nodes:
        return 0
    like = nodes[0].meta["val"]
    with like.fake_mode:
        rows = torch.empty((len(nodes), 2), dtype=torch.int32)
        row = torch.empty((2,), dtype=torch.int32)
    seeds = add_argument(graph.graph, "seeds", rows)
    for index, node in enumerate(nodes):
        with graph.graph.inserting_before(node):
            taken = graph.graph.call_function(aten.select.int, (seeds, 0, index))
        taken.meta = {**node.meta, "val": row}
        node.replace_all_uses_with(taken)
        graph.graph.erase_node(node)
    graph.recompile()
    return len(nodes)
