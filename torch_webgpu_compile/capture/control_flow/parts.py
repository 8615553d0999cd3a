"""`Division`: a captured graph in parts, with the steps of a composed plan between them.

A plan of kernels runs on sizes that are known before it, and its steps are always the same. Loops,
branches, numbers that are read from tensors, and operators whose results have sizes that depend on
data, are steps of a composed plan. What is between two of them is a part, compiled as a graph of
its own; and so is, once, the function of a loop or a branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...errors import UnsupportedOp
from ...node_text import user_source
from ...plan.model import (
    Check,
    Compute,
    Floats,
    HostStep,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    ReadNumber,
    Run,
    SizeOf,
    Step,
    layout_nbytes,
)
from ...plan.numbers import HostNumber
from ...symbolic.nested import HostBuffer
from ...symbolic.sizes import ONE, ZERO, Expr, as_expr, symbol
from ...torch_ops.dtypes import dtype_of
from ...torch_private import (
    OpOverload,
    _dispatch_has_kernel_for_dispatch_key,
    tree_leaves,
    tree_map_only,
)
from ..fx_graphs import attribute_of, fake_mode_of, memory_like
from ..tracing import AS_THEY_ARE, Recorder, clean_dispatch
from .calls import (
    READS,
    acts,
    is_complex,
    is_number,
    is_tensor,
    needed_for,
    tokens_of,
    unbacked_in,
    written_to,
)
from .choices import CHOICES, Choice
from .numbers import expressions_in, number_of, size_of, symbols_of, take_numbers
from .steps import STEPS

aten = torch.ops.aten
with_effects = torch.ops.higher_order.with_effects


@dataclass(frozen=True)
class Part:
    """A graph that is compiled to a nested plan.

    Attributes:
        module: the graph.
        static: positions of the arguments that are parameters or buffers.
        floats: see `CapturedGraph.numbers`.
        is_function: it is a loop's or a branch's, and may have to be divided itself.
    """

    module: GraphModule = field(repr=False)
    static: frozenset[int] = frozenset()
    floats: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    is_function: bool = False


@dataclass(frozen=True)
class Divided:
    """A graph in parts.

    Attributes:
        plan: the composed plan, without nested ones: these are the parts. A part gives what its
            graph returns, and then, by the name of what it changes and a prime, what it has
            changed; see `compose`.
        complex_inputs, complex_outputs: see `captured.Phase`.
    """

    parts: tuple[Part, ...]
    plan: Plan
    complex_inputs: frozenset[int]
    complex_outputs: frozenset[int]


HostNumbers = Callable[[GraphModule], Sequence[torch.SymInt]]
"""The integers in a graph that no plan computes of its arguments."""


class Division:
    """Divides a graph.

    Args:
        module: a functional ATen graph with fake tensors; nodes may be added to it.
        name: the plan's.
        calls: what divides it.
        static: positions of the arguments that are parameters or buffers.
        host_numbers: finds the integers that parts are given.
    """

    def __init__(
        self,
        module: GraphModule,
        name: str,
        calls: Collection[Node],
        static: frozenset[int],
        host_numbers: HostNumbers,
    ) -> None:
        self._module, self._name, self._calls = module, name, calls
        self._host_numbers = host_numbers
        self._arguments = module.graph.find_nodes(op="placeholder")
        self._static = {node for k, node in enumerate(self._arguments) if k in static}
        self._mode = fake_mode_of(module.graph)
        self._tokens = tokens_of(module.graph)
        self._recorder = Recorder(AS_THEY_ARE)
        self._recorder.graph = module.graph
        self._names: dict[Node, str] = {}
        self._numbers: dict[Any, str] = {}  # that `Compute` names, by value
        self._known: set[str] = set()  # symbols
        self._steps: list[Step] = []
        self._parts: list[Part] = []
        # A repeated block is one function of many calls.
        self._functions: dict[GraphModule, int] = {}
        self._pending: list[Node] = []
        self._asked: set[Node] = set()  # by steps between parts
        self._written: dict[str, int] = {}  # what parts change: the argument's position

    def run(self) -> Divided:
        """Raises UnsupportedOp: a step of another kind would be needed."""
        inputs, buffers = [], {}
        for node in self._arguments:
            value = node.meta.get("val")
            self._known.update(str(s) for e, _ in expressions_in(value) for s in e.free_symbols)
            if isinstance(value, Tensor):
                buffer = self._names[node] = f"%{node.name}"
                buffers[buffer] = _input(buffer, value)
                inputs.append(PlanInput(buffer))
            elif isinstance(value, torch.SymInt):
                inputs.append(PlanInput(size=size_of(value)))
            else:
                inputs.append(PlanInput())
        outputs: tuple[Any, ...] = ()
        for node in list(self._module.graph.nodes):
            if node.op == "output":
                self._close()
                (returned,) = node.args  # one value of a function that returns no tuple
                outputs = (returned,) if isinstance(returned, Node) else tuple(returned)
            elif node.op == "call_function":
                self._node(node)
        plan = Plan(
            self._name,
            (),
            buffers,
            (),
            tuple(inputs),
            (
                *map(self._output, outputs),
                *(PlanOutput(f"{b}'", mutates=k) for b, k in self._written.items()),
            ),
            plans=(),
        )
        return Divided(
            tuple(self._parts),
            replace(plan, steps=tuple(self._steps)),  # after those that compute results
            frozenset(k for k, node in enumerate(self._arguments) if is_complex(node)),
            frozenset(k for k, item in enumerate(outputs) if is_complex(item)),
        )

    def _output(self, item: Any) -> PlanOutput:
        if isinstance(item, Node) and item in self._tokens:
            return PlanOutput()
        item = written_to(item)
        value = item.meta.get("val") if isinstance(item, Node) and not is_tensor(item) else item
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, Node)):
            return PlanOutput(self._value(value))
        return PlanOutput(constant=value)

    def _node(self, node: Node) -> None:
        source = node.args[0] if node.target is operator.getitem else None
        if node in self._calls:
            self._call(node)
        elif isinstance(source, Node) and source in self._calls:
            if is_tensor(node) and node not in self._tokens:
                self._names[node] = _element(source, node.args[1])
        elif node.target is aten._assert_scalar.default:
            condition, message = node.args
            if not isinstance(condition, bool):
                self._steps.append(Check(self._value(condition), str(message)))
        else:
            self._pending.append(node)

    # ---- names of values

    def _value(self, value: Any) -> str:
        """The name of a tensor or a number, for a step that comes next."""
        if isinstance(value, Node):
            if value.op == "get_attr":
                value = self.emit(aten.clone.default, value)  # a constant of a part
            if is_tensor(value):
                self._asked.add(value)
                return self._names.setdefault(value, f"%{value.name}")
            value = value.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = value.node.expr
            if expression.is_Symbol and str(expression) in self._known:
                return str(expression)
            value = number_of(value)
        if isinstance(value, (bool, int)) or value is None:
            value = as_expr(int(value or 0))
        if not isinstance(value, (Expr, HostNumber, float)):
            raise UnsupportedOp(
                "an argument of a loop or a branch",
                f"it is of type {type(value).__name__}",
                "give it tensors and numbers",
            )
        if value not in self._numbers:
            self._numbers[value] = name = f"n{len(self._numbers)}"
            self._steps.append(Compute(name, value))
        return self._numbers[value]

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of tensors; what it calls are nodes of the part that is closed next.

        Args:
            args: with nodes in place of tensors. So is what it gives.
        """
        return tree_map_only(Tensor, self._recorder.node_of, self._made(function, *args, **kwargs))

    def _made(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, but for the tensors that it gives, which are fake ones."""
        graph, output = self._module.graph, self._module.graph.output_node()
        last, given = output.prev, tree_map_only(Node, self._taken, args)
        is_symbolic = self._mode is not None and self._mode.shape_env is not None
        with (
            clean_dispatch(symbolic=is_symbolic),
            self._mode or nullcontext(),
            graph.inserting_before(output),
            self._recorder,
        ):
            made = function(*given, **kwargs)
        while (last := last.next) is not output:
            self._pending.append(last)
        return made

    def _taken(self, node: Node) -> Any:
        """What the recorder has in the place of a node."""
        value = self._fake(node)
        if isinstance(value, Tensor):
            self._recorder.know(value, node)
        return value

    def _fake(self, node: Node) -> Any:
        if node.op != "get_attr":
            return node.meta["val"]
        with self._mode or nullcontext():
            return memory_like(attribute_of(self._module, node))

    # ---- what is between parts

    def _call(self, node: Node) -> None:
        target: Any = node.target
        args = node.args
        if target is with_effects:
            _, target, *rest = args
            args = tuple(rest)
        choose = CHOICES.get(target)
        choice = None if choose is None else self._made(choose, *args, **node.kwargs)
        is_seen = _is_view(node) and _is_returned(node)  # whose memory it has
        if choice is not None and not is_seen and self._choose(node, choice):
            return
        build = STEPS.get(target)
        if build is not None:
            step = build(self, node, *args)
        elif target in READS:
            (unknown,) = unbacked_in(node.meta["val"])
            step = ReadNumber(self._value(args[0]), unknown)
        else:
            step = self._host_step(node, target, args)
        self._close()
        self._steps.append(step)
        self._take_sizes(node)
        if choice is not None:
            self._take_offset(node, choice)

    def _choose(self, node: Node, choice: Choice) -> bool:
        """Puts a choice in the place of a call; not if more than one size is unknown."""
        (unknown, *others) = unbacked_in(node.meta["val"])
        if others:
            return False
        sizes = [n for leaf in tree_leaves(node.meta["val"]) for n in leaf.shape]
        size = next(n for n in sizes if str(n) == unknown)
        before, self._pending = self._pending, []
        first = self.emit(lambda: [table[:size] for table in choice.tables])
        made = [*first, *self.emit(choice.finish, size)]
        after, self._pending = self._pending, before
        is_one = isinstance(node.meta["val"], Tensor)
        for old in [node] if is_one else list(node.users):
            new = made[0 if is_one else old.args[1]]  # type: ignore[index]
            new.meta = {**node.meta, "val": self._at_start(old), "unbacked_bindings": None}
            old.replace_all_uses_with(new)
        if isinstance(choice.count, Tensor):
            step: Step = ReadNumber(self._value(self._recorder.node_of(choice.count)), unknown)
        else:
            step = Compute(unknown, symbol(self._value(choice.count)))
        self._close()
        self._steps.append(step)
        self._known.add(unknown)
        self._take_offset(node, choice)
        if choice.refusal:
            self._steps.append(Check(self._value(size >= 0), choice.refusal))
        self._pending = after
        return True

    def _take_offset(self, node: Node, choice: Choice) -> None:
        """Names where a view is in its memory."""
        offset = None if choice.offset is None else node.meta["val"].storage_offset()
        if isinstance(offset, torch.SymInt):
            self._steps.append(Compute(str(offset), symbol(self._value(choice.offset))))
            self._known.add(str(offset))

    def _at_start(self, node: Node) -> Any:
        """A call's fake result where it begins in its memory if it is not a view."""
        value = self._fake(node)
        if not isinstance(value.storage_offset(), torch.SymInt):
            return value
        with self._mode or nullcontext():
            return memory_like(value)

    def results(self, node: Node) -> tuple[str, ...]:
        """Names for the results of a call."""
        values: Any = node.meta.get("val")
        if node.target is with_effects:
            values = values[1:]
        if isinstance(values, (tuple, list)):
            first = int(node.target is with_effects)
            return tuple(
                _result_name(_element(node, first + k), value)
                for k, value in enumerate(tree_leaves(list(values)))
            )
        if isinstance(values, Tensor):
            self._names[node] = f"%{node.name}"
        return (_result_name(f"%{node.name}", values),) if values is not None else ()

    def _take_sizes(self, node: Node) -> None:
        """Names the sizes that a call's results decide."""
        value = node.meta.get("val")
        leaves = tree_leaves(value)
        self._known.update(
            str(leaf.node.expr)
            for leaf in leaves
            if isinstance(leaf, (torch.SymInt, torch.SymFloat)) and leaf.node.expr.is_Symbol
        )
        if node.target in READS:
            self._known.update(unbacked_in(value))
        is_one = isinstance(value, Tensor)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                buffer = f"%{node.name}" if is_one else _element(node, k)
                for field_name, numbers in (("size", leaf.shape), ("stride", leaf.stride())):
                    for dim, number in enumerate(numbers):
                        self._take_size(buffer, field_name, dim, number)

    def _take_size(self, buffer: str, field_name: Any, dim: int, number: Any) -> None:
        """Names a symbol that is a number in a layout, or of which it is a multiple."""
        expression = number.node.expr if isinstance(number, torch.SymInt) else None
        free = [] if expression is None else list(expression.free_symbols)
        if len(free) != 1 or str(free[0]) in self._known:
            return
        (unknown,) = free
        factor = expression / unknown
        if factor == 1:
            self._steps.append(SizeOf(buffer, field_name, dim, str(unknown)))
        elif factor.is_Integer:
            whole = f"{buffer}.{field_name}{dim}"
            quotient = HostNumber("floordiv", (symbol(whole), as_expr(int(factor))))
            self._steps += [SizeOf(buffer, field_name, dim, whole), Compute(str(unknown), quotient)]
        else:
            return
        self._known.add(str(unknown))

    def part_of(self, module: GraphModule) -> int:
        """The number of a function's plan; a function of several calls has one."""
        if module not in self._functions:
            self._functions[module] = len(self._parts)
            self._parts.append(Part(module, is_function=True))
        return self._functions[module]

    def module_of(self, node: Any) -> GraphModule:
        """The graph of a function among a call's arguments."""
        module = attribute_of(self._module, node)
        assert isinstance(module, GraphModule)
        return module

    def values(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The names of several tensors and numbers."""
        return tuple(map(self._value, values))

    def _host_step(self, node: Node, target: Any, args: Sequence[Any]) -> Step:
        found = [leaf for leaf in tree_leaves(node.meta.get("val")) if leaf is not None]
        inputs = [n.meta.get("val") for n in node.all_input_nodes]
        tensors = [v for v in (*found, *tree_leaves(inputs)) if isinstance(v, Tensor)]
        if not isinstance(target, OpOverload) or any(tensor.is_complex() for tensor in tensors):
            raise UnsupportedOp(
                str(target),
                "it is no step of a plan",
                "leave it out of the compiled function",
                user_source(node),
            )
        # The device has an implementation of each of PyTorch's operators, and of some others.
        name: str = target.name()  # type: ignore[no-untyped-call]
        on_device = (
            target.namespace == "aten"
            or _dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")
            or any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
        )
        names = self.results(node)
        leaves = tree_leaves(node.meta.get("val"))[int(node.target is with_effects) :]
        return HostStep(
            str(target),
            names,
            tuple(self._argument(value, on_device) for value in args),
            tuple((key, self._argument(v, on_device)) for key, v in node.kwargs.items()),
            user_source(node),
            on_device=on_device,
            numbers=tuple(n for n, v in zip(names, leaves, strict=True) if n and is_number(v)),
        )

    def _argument(self, value: Any, on_device: bool) -> Any:
        """An argument of an operator as `lowering.fallback` encodes them."""
        match value:
            case Node() if is_tensor(value):
                return HostBuffer(self._value(value))
            case Node():
                return self._argument(value.meta.get("val"), on_device)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return number_of(value)
            case torch.device():
                return value.type if value.type == "cpu" or not on_device else "webgpu"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value)
            case tuple() | list():
                return tuple(self._argument(item, on_device) for item in value)
            case str():
                return f"'{value}"
            case None | bool() | int() | float():
                return value
        raise UnsupportedOp(
            "an operator between plans",
            f"it takes an argument of type {type(value).__name__}",
            "move the call out of the compiled function",
        )

    # ---- parts

    def _close(self) -> None:
        """Makes a part of the nodes since the last call."""
        nodes, self._pending = self._pending, []
        inside = set(nodes)
        wanted = [
            node
            for node in nodes
            if not is_number(node.meta.get("val"))
            and node not in self._tokens
            and (node in self._asked or any(user not in inside for user in node.users))
            and node.target is not aten.copy_.default
        ]
        effects = [node for node in nodes if node.target is aten.copy_.default or acts(node)]
        if wanted or effects:
            self._part(nodes, wanted, effects)

    def _part(self, nodes: Sequence[Node], wanted: Sequence[Node], effects: Sequence[Node]) -> None:
        needed = needed_for((*wanted, *effects), set(nodes))
        nodes = [node for node in nodes if node in needed]
        inside = set(nodes)
        outside = {
            source: None
            for node in nodes
            for source in node.all_input_nodes
            if source not in inside and is_tensor(source) and source.op != "get_attr"
            if source not in self._tokens
        }
        takes = list(outside)
        symbols = symbols_of([*nodes, *takes])
        floats = [name for name, value in symbols.items() if isinstance(value, torch.SymFloat)]
        integers = [name for name in symbols if name not in floats]
        graph = Graph()
        copies: dict[Node, Any] = {}
        for node in takes:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for name in integers:
            graph.placeholder(name).meta["val"] = symbols[name]
        if floats:
            device = next((n.meta["val"].device for n in takes), None)
            with self._mode or nullcontext():
                fake = torch.empty((len(floats),), dtype=torch.float32, device=device)
            graph.placeholder("floats").meta["val"] = fake

        def inner(source: Node) -> Any:
            if source in copies:
                return copies[source]
            if source.op == "get_attr":
                copies[source] = graph.node_copy(source)
                return copies[source]
            if source in self._tokens:
                return None
            return source.meta["val"]  # a number, of symbols

        for node in nodes:
            args, kwargs = tree_map_only(Node, inner, (node.args, node.kwargs))
            copies[node] = made = graph.call_function(node.target)  # type: ignore[arg-type]
            made.args, made.kwargs = args, kwargs
            made.meta = dict(node.meta)
        graph.output(()).args = (tuple(copies[node] for node in wanted),)
        module = GraphModule(self._module, graph)
        computed = self._host_numbers(module)
        take_numbers(module, computed)
        arguments = [*self.values(takes), *integers]
        if floats:
            arguments.append(f"%floats{len(self._steps)}")
            self._steps.append(Floats(arguments[-1], tuple(floats)))
        arguments += self.values(computed)
        results = list(self.values(wanted))
        for node in effects:
            if node.target is aten.copy_.default and isinstance(node.args[0], Node):
                changed = self._names[node.args[0]]
                self._written[changed] = self._arguments.index(node.args[0])
                results += [f"{changed}'"] * (f"{changed}'" not in results)
        static = frozenset(k for k, node in enumerate(takes) if node in self._static)
        places = {name: (len(takes) + len(integers), k) for k, name in enumerate(floats)}
        self._steps.append(Run(len(self._parts), tuple(arguments), tuple(results)))
        self._parts.append(Part(module, static, places))


def _is_view(node: Node) -> bool:
    """Whether an operator's result shares memory with its argument."""
    target = node.target
    return isinstance(target, OpOverload) and target.is_view


def _is_returned(node: Node) -> bool:
    """Whether a graph returns a result, or a view of it: then callers see whose memory it has."""
    return any(
        user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users
    )


def _input(name: str, value: Tensor) -> PlanBuffer:
    """An argument; a complex one as a real one (…, 2)."""
    sizes, strides = tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride()))
    if value.is_complex():
        value = torch.view_as_real(value)
        sizes, strides = (*sizes, as_expr(2)), (*(2 * stride for stride in strides), ONE)
    dtype = dtype_of(value.dtype)
    if dtype is None:
        raise UnsupportedOp(
            name, f"{value.dtype} tensors cannot be stored", "convert it before the call"
        )
    return PlanBuffer(
        name, "input", dtype, sizes, strides, ZERO, layout_nbytes(dtype, sizes, strides)
    )


def _element(node: Node, position: Any) -> str:
    return f"%{node.name}.{position}"


def _result_name(name: str, value: Any) -> str:
    """The name of a result: that of a symbol, if it is one; "" for what nobody can need."""
    if isinstance(value, Tensor):
        return name
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr) if value.node.expr.is_Symbol else name
    return ""
