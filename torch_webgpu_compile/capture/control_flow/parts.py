"""`divide`: a captured graph in parts, for what no plan can hold.

A plan runs on sizes that are known before it, and its steps are always the same. Operators whose
results have sizes that depend on data, loops and branches are `Call`s; what is between two of them
is a `Part`, compiled as a graph of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...captured import user_source
from ...errors import UnsupportedOp, VerificationError
from ...torch_ops.assertions import ASSERTIONS
from ...torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    free_unbacked_symbols,
    in_kernel_invocation_manager,
    resolve_unbacked_bindings,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from ..fx_graphs import attribute_of, fake_mode_of
from .numbers import Number, expressions_in, number_of, readers_of, symbols_of, take_numbers

aten = torch.ops.aten
higher_order = torch.ops.higher_order
with_effects = higher_order.with_effects

# They are steps of a plan: operators of others that change their arguments.
_IN_PLANS = (higher_order.auto_functionalized, higher_order.auto_functionalized_v2)


@dataclass(frozen=True)
class Slot:
    """The result of a node: a tensor, a tuple of them, or the function that a node names."""

    index: int


@dataclass(frozen=True)
class Part:
    """Nodes that are compiled as one graph.

    Attributes:
        module: the graph. Its arguments are ``takes``, then the values of ``symbols``, then, if
            there are any, the ``floats`` in a float32 tensor, then the ``numbers``.
        takes, gives: slots of its tensors.
        static: positions of the arguments that are parameters or buffers.
    """

    module: GraphModule = field(repr=False)
    takes: tuple[int, ...]
    symbols: tuple[str, ...]
    floats: tuple[str, ...]
    numbers: tuple[Number, ...]
    gives: tuple[int, ...]
    static: frozenset[int]

    @property
    def float_places(self) -> Mapping[str, tuple[int, int]]:
        """By name, (argument, element) of each of the ``floats``."""
        position = len(self.takes) + len(self.symbols)
        return {name: (position, k) for k, name in enumerate(self.floats)}


@dataclass(frozen=True)
class Call:
    """An operator that is called between parts.

    Attributes:
        target: the operator.
        arguments, keywords: nested, with `Slot`s and `Number`s.
        functions: by the slot of each function among the arguments, its graph.
        gives: the slot of the result.
        symbols: by name, what gives the value of each symbol that the result decides.
        dtypes: of the tensors in the result; None in place of other values.
        has_token: whether the result, and the first argument, have an effect token first.
    """

    target: Any
    arguments: Any
    keywords: Any
    functions: Mapping[int, GraphModule]
    gives: int
    symbols: Mapping[str, Callable[[Any], Any]] = field(repr=False)
    dtypes: tuple[torch.dtype | None, ...]
    has_token: bool


@dataclass(frozen=True)
class Pick:
    """An element of a call's result."""

    source: int
    position: int
    gives: int


@dataclass(frozen=True)
class Check:
    """An assertion about sizes."""

    condition: Any
    message: str


Step = Part | Call | Pick | Check


@dataclass(frozen=True)
class Divided:
    """A graph in parts.

    Attributes:
        steps: in order.
        arguments: the slot of each argument that is a tensor; None of the others.
        symbols: by name, how each symbol is read from the arguments.
        returns: nested, with `Slot`s and `Number`s.
        last_uses: of each step, the slots that nobody needs after it.
        written: slots of the arguments that some part writes.
        kept: slots of the arguments that are written or returned.
        static: positions of the arguments that are parameters or buffers and are only read.
        states: of those that some part writes.
        devices: of the tensors among the results, in order; None for the others, and for those that
            may stay where the parts work.
    """

    steps: tuple[Step, ...]
    arguments: tuple[int | None, ...]
    symbols: Mapping[str, Callable[[Sequence[Any]], Any]]
    returns: tuple[Any, ...]
    last_uses: tuple[tuple[int, ...], ...]
    written: frozenset[int]
    kept: frozenset[int]
    static: tuple[int, ...]
    states: tuple[int, ...]
    devices: tuple[torch.device | None, ...]


Getter = Callable[[Any], Any]

Calls = Mapping[Node, Mapping[str, Getter]]
"""The nodes of a graph that cannot be steps of a plan; how the symbols that each decides are read
from its result."""


def calls_between(graph: Graph) -> Calls:
    """What divides a graph. Nothing does if one plan may hold it."""
    known: set[str] = set()
    found: dict[Node, dict[str, Getter]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            known.update(_unbacked(value))
        elif node.op == "call_function" and node.target is not operator.getitem:
            target = node.args[1] if node.target is with_effects else node.target
            new = [] if _is_arithmetic(node) else _unbacked(value) - known
            in_plan = not isinstance(target, HigherOrderOperator) or target in _IN_PLANS
            if new or not in_plan:
                found[node] = decided = _decided(node)
                known.update(new, decided)
    return found


def _unbacked(value: Any) -> set[str]:
    """The symbols in a value that no argument's size gives."""
    return {str(s) for _, number in expressions_in(value) for s in free_unbacked_symbols(number)}


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number of numbers, or of a tensor's sizes."""
    if not _is_number(node.meta.get("val")):
        return False
    return not isinstance(node.target, OpOverload) or node.target.overloadpacket in _OF_SIZES


_OF_SIZES = (aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset)


def _decided(node: Node) -> dict[str, Getter]:
    """How the symbols in a call's result are read from it."""
    bindings = node.meta.get("unbacked_bindings") or {}
    for _, number in expressions_in(node.meta.get("val")):
        # A graph that is traced again keeps the symbols of the first time in its values only.
        bindings = resolve_unbacked_bindings(number.node.shape_env, bindings)
        break
    found: dict[str, Getter] = {str(symbol): _getter(path) for symbol, path in bindings.items()}
    for k, leaf in enumerate(tree_leaves(node.meta.get("val"))):
        if isinstance(leaf, Tensor):
            for dim, size in enumerate(leaf.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(str(size.node.expr), _size_getter(k, dim))
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat)) and leaf.node.expr.is_Symbol:
            found.setdefault(str(leaf.node.expr), _leaf_getter(k))
    return found


HostNumbers = Callable[[GraphModule], Sequence[torch.SymInt]]
"""The integers in a graph that no plan computes of its arguments."""


def divide(
    module: GraphModule,
    calls: Calls,
    static: frozenset[int],
    device: torch.device | None,
    host_numbers: HostNumbers,
) -> Divided:
    """Divides a graph.

    Args:
        module: a functional ATen graph with fake tensors.
        calls: what divides it.
        static: positions of the arguments that are parameters or buffers.
        device: where the parts work, if it is not where the graph's tensors are.
        host_numbers: finds the integers that parts are given.
    """
    return _Division(module, calls, static, device, host_numbers).run()


class _Division:
    def __init__(
        self,
        module: GraphModule,
        calls: Calls,
        static: frozenset[int],
        device: torch.device | None,
        host_numbers: HostNumbers,
    ) -> None:
        self._module, self._calls = module, calls
        self._device, self._host_numbers = device, host_numbers
        self._placeholders = module.graph.find_nodes(op="placeholder")
        self._static = {node for k, node in enumerate(self._placeholders) if k in static}
        self._slots: dict[Node, int] = {}
        self._steps: list[Step] = []
        self._pending: list[Node] = []
        self._mode = fake_mode_of(module.graph)

    def run(self) -> Divided:
        outputs: tuple[Any, ...] = ()
        arguments = [self._argument(node) for node in self._placeholders]
        for node in self._module.graph.nodes:
            if node.op == "output":
                self._close()
                (returned,) = node.args  # one value of a function that returns no tuple
                outputs = (returned,) if isinstance(returned, Node) else tuple(returned)
            elif node.op == "call_function":
                self._node(node)
        returns = tuple(self._template(item) for item in outputs)
        devices = tuple(
            item.meta["val"].device
            if isinstance(item, Node) and isinstance(item.meta.get("val"), Tensor)
            else None
            for item in outputs
        )
        written = frozenset(self._written())
        returned_slots = {leaf.index for leaf in tree_leaves(returns) if isinstance(leaf, Slot)}
        static = [
            position
            for position, node in enumerate(self._placeholders)
            if node in self._static and arguments[position] is not None
        ]
        return Divided(
            tuple(self._steps),
            tuple(arguments),
            readers_of(self._placeholders),
            returns,
            self._last_uses(written | returned_slots),
            written,
            written | (returned_slots & set(arguments)),
            tuple(position for position in static if arguments[position] not in written),
            tuple(position for position in static if arguments[position] in written),
            devices,
        )

    def _argument(self, node: Node) -> int | None:
        return self._slot(node) if isinstance(node.meta.get("val"), Tensor) else None

    def _slot(self, node: Node) -> int:
        return self._slots.setdefault(node, len(self._slots))

    def _node(self, node: Node) -> None:
        source = node.args[0] if node.target is operator.getitem else None
        if node in self._calls:
            self._close()
            self._call(node)
        elif isinstance(source, Node) and source in self._slots and not _is_tensor(source):
            if _is_tensor(node):
                position = node.args[1]
                assert isinstance(position, int)
                self._steps.append(Pick(self._slots[source], position, self._slot(node)))
        elif node.target is aten._assert_scalar.default:
            condition, message = node.args
            self._steps.append(Check(self._template(condition), str(message)))
        else:
            self._pending.append(node)

    # ---- calls

    def _call(self, node: Node) -> None:
        target: Any = node.target
        args = node.args
        has_token = target is with_effects
        if has_token:
            _, target, *rest = args
            args = tuple(rest)
        if getattr(target, "__name__", "").startswith("triton_kernel_wrapper"):
            raise UnsupportedOp(
                "a Triton kernel",
                "Triton has no WebGPU backend",
                "write it with PyTorch's operators, or leave it out of the graph",
                user_source(node),
            )
        functions: dict[int, GraphModule] = {}
        for inner in node.all_input_nodes:
            if inner.op == "get_attr":
                value = attribute_of(self._module, inner)
                if isinstance(value, GraphModule):
                    functions[self._slot(inner)] = value
        self._steps.append(
            Call(
                target,
                self._template(args),
                self._template(dict(node.kwargs)),
                functions,
                self._slot(node),
                self._calls[node],
                tuple(
                    leaf.dtype if isinstance(leaf, Tensor) else None
                    for leaf in tree_leaves(node.meta.get("val"))
                ),
                has_token,
            )
        )

    def _template(self, value: Any) -> Any:
        """Arguments or results with `Slot`s for tensors and `Number`s for numbers."""
        if isinstance(value, Node):
            if value.op == "get_attr":
                constant = attribute_of(self._module, value)
                if not isinstance(constant, GraphModule):
                    return self._moved_constant(constant)
                return Slot(self._slot(value))
            known = value.meta.get("val")
            if value in self._slots or not _is_number(known):
                return Slot(self._slot(value))
            return self._template(known)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return number_of(value)
        if isinstance(value, torch.device):
            return value if self._device is None else self._device
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._template, value))
        if isinstance(value, dict):
            return {name: self._template(item) for name, item in value.items()}
        return value

    def _moved_constant(self, constant: Any) -> Any:
        if isinstance(constant, Tensor) and self._device is not None:
            return constant.to(self._device)
        return constant

    # ---- parts

    def _close(self) -> None:
        """Makes a part of the nodes since the last call."""
        nodes, self._pending = self._pending, []
        if not nodes:
            return
        inside = set(nodes)
        wanted = [
            node
            for node in nodes
            if not _is_number(node.meta.get("val"))
            and any(user not in inside for user in node.users)
        ]
        effects = [node for node in nodes if node.target is aten.copy_.default or _acts(node)]
        if not wanted and not effects:
            return
        self._steps.append(self._part(nodes, wanted, effects))

    def _part(self, nodes: Sequence[Node], wanted: Sequence[Node], effects: Sequence[Node]) -> Part:
        needed = _needed((*wanted, *effects), set(nodes))
        nodes = [node for node in nodes if node in needed]
        inside = set(nodes)
        outside = {
            source: None
            for node in nodes
            for source in node.all_input_nodes
            if source not in inside and _is_tensor(source) and source.op != "get_attr"
        }
        takes = list(outside)
        symbols = symbols_of([*nodes, *takes])
        floats = [name for name, value in symbols.items() if isinstance(value, torch.SymFloat)]
        integers = [name for name in symbols if name not in floats]
        graph = Graph()
        copies: dict[Node, Any] = {}
        for node in takes:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {**node.meta, "val": self._moved(node.meta["val"])}
        for name in integers:
            graph.placeholder(name).meta["val"] = symbols[name]
        if floats:
            numbers = graph.placeholder("floats")
            numbers.meta["val"] = self._fake((len(floats),), torch.float32)

        def inner(source: Node) -> Any:
            if source in copies:
                return copies[source]
            if source.op == "get_attr":
                copies[source] = graph.node_copy(source)
                copies[source].meta["val"] = self._moved(source.meta.get("val"))
                return copies[source]
            return source.meta["val"]  # a number, of symbols

        for node in nodes:
            args, kwargs = tree_map_only(Node, inner, (node.args, node.kwargs))
            made = graph.call_function(node.target)  # type: ignore[arg-type]
            made.args, made.kwargs = self._placed(args), self._placed(kwargs)
            made.meta = {**node.meta, "val": tree_map(self._moved, node.meta.get("val"))}
            copies[node] = made
        graph.output(()).args = (tuple(copies[node] for node in wanted),)
        module = GraphModule(self._module, graph)
        computed = self._host_numbers(module)
        take_numbers(module, computed)
        return Part(
            module,
            tuple(self._slot(node) for node in takes),
            tuple(integers),
            tuple(floats),
            tuple(map(number_of, computed)),
            tuple(self._slot(node) for node in wanted),
            frozenset(k for k, node in enumerate(takes) if node in self._static),
        )

    def _placed(self, value: Any) -> Any:
        """Arguments with the device that the part works on."""
        if self._device is None:
            return value
        return tree_map_only(torch.device, lambda _: self._device, value)

    def _moved(self, value: Any) -> Any:
        """A fake tensor on the part's device, which shares memory with the same ones as before."""
        if not isinstance(value, Tensor) or self._device is None:
            return value
        if not isinstance(value, FakeTensor):  # a constant
            with self._mode or nullcontext():
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=self._device
                )
        with in_kernel_invocation_manager(value.fake_mode):
            alias = aten.alias.default(value)
        return FakeTensor(value.fake_mode, alias, self._device)

    def _fake(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._mode or nullcontext():
            return torch.empty(sizes, dtype=dtype, device=self._device)

    # ---- the life of values

    def _last_uses(self, kept: Collection[int]) -> tuple[tuple[int, ...], ...]:
        last = {
            slot: k
            for k, step in enumerate(self._steps)
            for slot in (*_needs(step)[0], *_gives(step))
        }
        found: list[list[int]] = [[] for _ in self._steps]
        for slot, k in last.items():
            if slot not in kept:
                found[k].append(slot)
        return tuple(map(tuple, found))

    def _written(self) -> Iterable[int]:
        for copy in self._module.graph.find_nodes(op="call_function", target=aten.copy_.default):
            if copy.args[0] in self._slots:
                yield self._slots[copy.args[0]]


def _needs(step: Step) -> tuple[list[int], set[str]]:
    """The slots and the symbols that a step reads."""
    match step:
        case Part():
            return list(step.takes), {*step.symbols, *step.floats, *_in_template(step.numbers)[1]}
        case Call():
            return _in_template((step.arguments, step.keywords))
        case Pick():
            return [step.source], set()
        case Check():
            return _in_template(step.condition)


def _gives(step: Step) -> tuple[int, ...]:
    """The slots of a step's results."""
    match step:
        case Part():
            return step.gives
        case Call() | Pick():
            return (step.gives,)
        case Check():
            return ()


def _in_template(value: Any) -> tuple[list[int], set[str]]:
    leaves = tree_leaves(value)
    names = (name for leaf in leaves if isinstance(leaf, Number) for name in leaf.names)
    return [leaf.index for leaf in leaves if isinstance(leaf, Slot)], set(names)


def verify_divided(divided: Divided) -> None:
    """Raises VerificationError where something is read before it is there, or after its end."""
    calls = [step for step in divided.steps if isinstance(step, Call)]
    slots = {slot for slot in divided.arguments if slot is not None}
    slots.update(slot for call in calls for slot in call.functions)
    names = set(divided.symbols)

    def require(what: str, needed: tuple[list[int], set[str]]) -> None:
        missing = [*sorted(set(needed[0]) - slots), *sorted(needed[1] - names)]
        if missing:
            raise VerificationError(f"{what} of a graph in parts: {missing} is not there")

    for k, step in enumerate(divided.steps):
        require(f"step {k}", _needs(step))
        slots.update(_gives(step))
        slots.difference_update(divided.last_uses[k])
        if isinstance(step, Call):
            names.update(step.symbols)
    require("the results", _in_template(divided.returns))


def format_divided(divided: Divided) -> str:
    """The steps, for a person to read."""
    return "\n".join([*map(str, divided.steps), f"return {divided.returns}"])


def _is_tensor(node: Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _acts(node: Node) -> bool:
    """Whether a node does more than give results."""
    return node.target in (*ASSERTIONS, with_effects)


def _needed(ends: Iterable[Node], inside: set[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in inside and node not in found:
            found.add(node)
            stack.extend(n for n in node.all_input_nodes if not _is_number(n.meta.get("val")))
    return found


def _getter(path: Any) -> Callable[[Any], Any]:
    def get(result: Any) -> Any:
        for key in path:
            result = key.get(result)
        return result

    return get


def _leaf_getter(leaf: int) -> Callable[[Any], Any]:
    return lambda result: tree_leaves(result)[leaf]


def _size_getter(leaf: int, dim: int) -> Callable[[Any], int]:
    return lambda result: int(tree_leaves(result)[leaf].shape[dim])
