"""`lower`: a captured FX graph becomes a `LoopGraph`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from .. import dtypes
from ..captured import CapturedGraph
from ..dtypes import DType
from ..errors import UnsupportedOp, VerificationError
from ..fallbacks import OnFallback
from ..ir.buffers import Buffer, BufferOrigin
from ..ir.graph import GraphInput, GraphOutput, LoopGraph
from ..ir.scalar import Index, Load, const, loads_of
from ..ir.spaces import Origin
from ..node_text import storage_of, user_source
from ..symbolic.sizes import ONE, Expr, SymbolicError, as_expr, contiguous_strides
from ..target import Target
from ..torch_ops.assertions import ASSERTIONS
from ..torch_ops.dtypes import dtype_of
from ..torch_ops.foreign import NO_IMPLEMENTATION
from ..torch_private import (
    OpOverload,
    tree_any,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    unset_fake_temporarily,
)
from .builder import Builder, ResultType, as_value, whole_buffer
from .custom_calls import (
    CustomCall,
    custom_call,
    is_custom,
    lower_custom,
    runs_on_device,
)
from .fallback import host_call
from .fx_nodes import (
    argument_updates,
    bytes_of,
    identifier,
    needed_nodes,
    shared_storages,
    used_results,
)
from .outputs import OutputLayouts, is_dense_layout
from .promotion import result_dtype
from .registry import LOWERINGS, NotLowered, register_all
from .value import Value, positions, view

aten = torch.ops.aten
with_effects = torch.ops.higher_order.with_effects

# Checks of sizes and metadata without results, decided when the graph was traced.
_NO_EFFECT = frozenset(
    {
        aten._assert_scalar.default,
        aten._assert_tensor_metadata.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_NO_FALLBACK_STEP = "write it with operators that PyTorch decomposes, or leave it out of the graph"


def lower(
    captured: CapturedGraph,
    target: Target,
    on_fallback: OnFallback | None = None,
    unchanging: Collection[int] = (),
    *,
    deterministic: bool = False,
    fill_empty: bool = False,
    on_deterministic: Callable[[], None] = lambda: None,
) -> LoopGraph:
    """Lowers a graph for a GPU.

    ``on_fallback(op, dtype, source, cause)`` is called for every operator that goes to the host.
    ``unchanging``: positions of arguments that mostly stay as they are from call to call.
    ``deterministic``, ``fill_empty``, ``on_deterministic``: see `Builder`.
    Raises UnsupportedOp for what the host cannot run either, or whatever ``on_fallback`` raises.
    """
    register_all()
    builder = Builder(
        target,
        deterministic=deterministic,
        fill_empty=fill_empty,
        on_deterministic=on_deterministic,
    )
    updates = argument_updates(captured.module.graph)
    return _GraphLowering(captured, builder, on_fallback, unchanging, updates).run()


@dataclass
class _GraphLowering:
    """The state of `lower`: the values of FX nodes, and the arguments and their new values."""

    captured: CapturedGraph
    builder: Builder
    on_fallback: OnFallback | None
    unchanging: Collection[int]
    updates: frozenset[FxNode]
    values: dict[FxNode, Any] = field(default_factory=dict)
    inputs: list[GraphInput] = field(default_factory=list)
    positions: dict[FxNode, int] = field(default_factory=dict)
    mutations: dict[FxNode, Value] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)  # storages of several outputs
    holders: dict[str, int] = field(default_factory=dict)  # by buffer, whose storage it is

    def run(self) -> LoopGraph:
        graph = self.captured.module.graph
        needed = needed_nodes(graph)
        outputs: tuple[GraphOutput, ...] = ()
        arguments = graph.find_nodes(op="placeholder")
        self.builder.reader.take([node.meta.get("val") for node in arguments])
        for node in arguments:
            self._placeholder(node)
        self.builder.reader.know_all()
        self.shared = shared_storages(graph)
        for node in graph.nodes:
            if node.op == "get_attr" and node in needed:
                self.values[node] = self._attribute(node)
            elif node.op == "call_function" and node in needed:
                self._call(node)
                self._share(node)
            elif node.op == "output":
                outputs = self._outputs(node)
        return LoopGraph(
            self.captured.name,
            self.builder.buffers,
            tuple(self.builder.nodes),
            tuple(self.inputs),
            outputs,
            self.builder.constants,
        ).live()

    def _placeholder(self, node: FxNode) -> None:
        value = node.meta.get("val")
        position = len(self.inputs)
        self.positions[node] = position
        if isinstance(value, torch.Tensor):
            signature = self._signature(value, node)
            buffer = self.builder.new_buffer(
                signature.dtype,
                signature.sizes,
                f"in{position}",
                BufferOrigin.INPUT,
                self.builder.reader.strides(value.stride()),
                self.builder.reader.size(self.captured.offsets.get(position, 0)),
            )
            static = position in self.unchanging
            self.inputs.append(GraphInput(buffer=buffer.name, static=static))
            self._numbers(position, buffer)
            loaded = self.builder.load(buffer)
            if not self._is_usable(loaded) and not loaded.sizes and node.users:
                self.builder.hint = buffer.name
                loaded = self.builder.number_of_input(loaded)
            self.values[node] = loaded
        elif isinstance(value, torch.SymInt) or type(value) is int:
            size = self.builder.reader.size(value)
            self.inputs.append(GraphInput(size=size))
            self.values[node] = size
        else:
            self.inputs.append(GraphInput())
            self.values[node] = value

    def _numbers(self, position: int, buffer: Buffer) -> None:
        """Tells the reader of the symbolic numbers that an argument holds."""
        for name, (argument, element) in self.captured.numbers.items():
            if argument == position:
                index = (Index(as_expr(element)),)
                self.builder.reader.numbers[name] = Load(buffer.name, index, buffer.dtype)

    def _signature(self, tensor: torch.Tensor, node: FxNode) -> ResultType:
        dtype = dtype_of(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided:
            what = tensor.dtype if dtype is None else tensor.layout
            raise UnsupportedOp(
                str(node.target),
                f"{what} tensors cannot be stored",
                _NO_FALLBACK_STEP,
                user_source(node),
            )
        return ResultType(dtype, self.builder.reader.sizes(tensor.shape))

    def _attribute(self, node: FxNode) -> Any:
        value: Any = self.captured.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        signature = self._signature(value, node)
        with unset_fake_temporarily():  # a constant is a real tensor, also while compiling
            tensor = value.detach().cpu()
            if tensor.dim() == 0:
                return Value(signature.dtype, (), const(tensor.item(), signature.dtype))
            array = bytes_of(tensor)
        return self.builder.constant(array, signature.dtype, signature.sizes, "const")

    def _call(self, node: FxNode) -> None:
        target = node.target
        if target is operator.getitem:
            container, index = node.args
            self.values[node] = self._argument(container)[index]
        elif target is aten.copy_.default and node.args[0] in self.positions:
            self._mutation(node)
        elif target in _NO_EFFECT:
            self.values[node] = None
        elif target is with_effects:
            self._effect(node)
        elif target in ASSERTIONS:
            self._results(node, target, node.args, [None])
        elif is_custom(target):
            call = custom_call(node, self._argument, self.builder)
            self.values[node] = self._custom(node, call, node.meta.get("val"))
        elif node.meta.get("val") is not None and not tree_any(_is_tensor, node.meta["val"]):
            self.values[node] = self._number(node)
        elif isinstance(target, OpOverload):
            self.values[node] = self._operator(node, target)
        else:
            name = getattr(target, "__name__", str(target))
            cause = "not an ATen operator that can be lowered"
            raise UnsupportedOp(name, cause, _NO_FALLBACK_STEP, user_source(node))

    def _share(self, node: FxNode) -> None:
        """Gives a tensor memory of its own, of which several outputs will be views."""
        fake, value = node.meta.get("val"), self.values.get(node)
        if not isinstance(fake, torch.Tensor) or not isinstance(value, Value):
            return
        storage = storage_of(fake)
        buffer = whole_buffer(value, self.builder.buffers)
        if storage in self.shared:
            self.shared.remove(storage)  # all others are views of this one
            own = buffer is not None and buffer.origin is BufferOrigin.INTERMEDIATE
            if not own or (buffer and self.holders.get(buffer.name, storage) != storage):
                value = self.values[node] = self._copied(value, fake)
                buffer = whole_buffer(value, self.builder.buffers)
        if buffer is not None:
            self.holders.setdefault(buffer.name, storage)

    def _copied(self, value: Value, fake: torch.Tensor) -> Value:
        if value.is_empty or not self.builder.target.supports(value.dtype):
            return value
        self.builder.origin = Origin("output")
        strides = self.builder.reader.strides(fake.stride())
        if not is_dense_layout(value.sizes, strides):
            strides = contiguous_strides(value.sizes)
        return self.builder.pointwise(value.body, value.sizes, strides=strides)

    def _effect(self, node: FxNode) -> None:
        """An operator that does more than give results: with_effects(token, operator, …).

        The first result is a token, which says in which order such operators run. They do so here
        as they are written; tokens are None.
        """
        _, target, *arguments = node.args
        assert isinstance(target, OpOverload)
        _, *results = node.meta["val"]
        if is_custom(target):
            call = CustomCall(target, tuple(arguments), dict(node.kwargs))
            self.values[node] = (None, *self._custom(node, call, results))
        else:
            self.values[node] = (None, *self._results(node, target, arguments, results))

    def _custom(self, node: FxNode, call: CustomCall, results: Any) -> Any:
        """The results of an operator that others define."""
        flat, nesting = tree_flatten(results)
        self._begin(node, call.overload, flat)
        on_device = runs_on_device(call.overload, node)
        if not on_device:
            self._report(call.overload, NO_IMPLEMENTATION, None)
        values = lower_custom(self.builder, call, flat, self._argument, on_device=on_device)
        made = [
            self._symbolic(fake) if signature is None else _with_ones(value, signature)
            for fake, value, signature in zip(flat, values, self.builder.results, strict=True)
        ]
        return tree_unflatten(made, nesting)

    def _mutation(self, node: FxNode) -> None:
        placeholder = node.args[0]
        assert isinstance(placeholder, FxNode)
        old = self.values[placeholder]
        if node.args[1] is placeholder:  # an operator left it as it is
            self.values[node] = old
            return
        new = as_value(self._argument(node.args[1]), old.sizes, old.dtype)
        self.mutations[placeholder] = new
        self.values[node] = new

    def _number(self, node: FxNode) -> Any:
        if node.target in (aten._local_scalar_dense.default, aten.item.default):
            cause = "it reads a number from the GPU while the graph runs"
            step = "use the tensor itself, or move .item() out of the compiled function"
            raise UnsupportedOp(str(node.target), cause, step, user_source(node))
        return self._symbolic(node.meta["val"])

    def _symbolic(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self.builder.reader.size(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            body = self.builder.reader.symbolic_scalar(value)
            return Value(body.dtype, (), body, number=True)
        return value

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, FxNode):
            return self.values[argument]
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._argument(item) for item in argument)
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._symbolic(argument)
        return argument

    def _operator(self, node: FxNode, overload: OpOverload) -> Any:
        result = node.meta.get("val")
        if not isinstance(result, (tuple, list)):
            return self._results(node, overload, node.args, [result])[0]
        return self._results(node, overload, node.args, result, used_results(node))

    def _results(
        self,
        node: FxNode,
        overload: OpOverload,
        arguments: Sequence[Any],
        results: Sequence[Any],
        used: frozenset[int] | None = None,
    ) -> tuple[Value | None, ...]:
        """The results of a node's operator; results that are not ``used`` may be left out."""
        builder = self.builder
        self._begin(node, overload, results)
        builder.used = used
        builder.traced = map_arg((tuple(arguments), node.kwargs), lambda n: n.meta.get("val"))
        given, keywords = self._bind(overload, arguments, node.kwargs)
        values = self._lower_operator(overload, given, keywords)
        for value, signature in zip(values, builder.results, strict=True):
            _check_result(str(overload), value, signature)
        return tuple(map(_with_ones, values, builder.results))

    def _begin(self, node: FxNode, overload: OpOverload, results: Sequence[Any]) -> None:
        """Tells the builder of the operator that is lowered next."""
        builder = self.builder
        builder.origin = Origin(str(overload), user_source(node))
        builder.hint = identifier(node.name)
        builder.updates_argument = node in self.updates
        builder.used = None
        builder.results = tuple(
            self._signature(r, node) if isinstance(r, torch.Tensor) else None for r in results
        )
        builder.arguments = tuple(n.meta.get("val") for n in node.all_input_nodes)

    def _bind(
        self, overload: OpOverload, given: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional arguments by position, keyword-only ones by name, as values."""
        arguments = [self._argument(argument) for argument in given]
        keywords = {name: self._argument(argument) for name, argument in named.items()}
        positional = [a for a in overload._schema.arguments if not a.kwarg_only]
        for schema in positional[len(arguments) :]:
            if schema.name not in keywords:
                break
            arguments.append(keywords.pop(schema.name))
        return arguments, keywords

    def _lower_operator(
        self, overload: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Value | None, ...]:
        builder = self.builder
        dtype = self._unsupported_dtype(arguments, keywords)
        function = LOWERINGS.get(overload)
        if dtype is not None:
            cause = _no_kernels(dtype)
        elif function is None:
            cause = "no GPU kernel for this operator yet"
        else:
            try:
                lowered = function(builder, *arguments, **keywords)
                values = lowered if isinstance(lowered, tuple) else (lowered,)
                if all(self._is_usable(value) for value in values):
                    self._remember_exact(values, overload, arguments, keywords)
                    return values
                cause = "a dtype without kernels on this GPU"
            except (NotLowered, SymbolicError) as error:
                cause = str(error)
        return self._on_host(overload, arguments, keywords, cause, dtype)

    def _on_host(
        self,
        overload: OpOverload,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        cause: str,
        dtype: DType | None,
    ) -> tuple[Value | None, ...]:
        """The current operator on the host, because of ``cause``, where ``dtype`` is one."""
        if overload not in ASSERTIONS:
            self._report(overload, cause, dtype)
        return host_call(self.builder, overload, arguments, keywords)

    def _report(self, overload: OpOverload, cause: str, dtype: DType | None) -> None:
        """Reports that the current operator goes to the host."""
        builder = self.builder
        shown = dtype or next((s.dtype for s in builder.results if s is not None), dtypes.float32)
        if self.on_fallback is not None:
            self.on_fallback(str(overload), shown.name, builder.origin.source, cause)

    def _remember_exact(
        self,
        values: Sequence[Value | None],
        overload: OpOverload,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> None:
        """How the host computes those of the current operator's results that kernels have no dtype
        for, should they be needed in it; see `Builder.exact`.
        """
        builder = self.builder
        context = builder.origin, builder.hint, builder.results
        made: list[Value | None] = []

        def buffer_of(result: int) -> Buffer:
            before = builder.origin, builder.hint, builder.results
            builder.origin, builder.hint, builder.results = context
            if not made:
                dtype = next(v.dtype for v in values if v and not builder.target.supports(v.dtype))
                cause = _no_kernels(dtype)
                made.extend(self._on_host(overload, arguments, keywords, cause, dtype))
            value = made[result]
            assert value is not None
            buffer = builder.materialize(value)
            builder.origin, builder.hint, builder.results = before
            return buffer

        for number, value in enumerate(values):
            if value is None or value.number or builder.target.supports(value.dtype):
                continue
            if loads_of(value.body):
                builder.exact.setdefault(value.body, partial(buffer_of, number))

    def _is_usable(self, value: Value | None) -> bool:
        if value is None or self.builder.target.supports(value.dtype):
            return True
        loads = loads_of(value.body)
        return not value.sizes and all(self.builder.target.supports(x.dtype) for x in loads)

    def _unsupported_dtype(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> DType | None:
        """A dtype among tensors in and out that has no kernels; numbers are always usable."""
        supports = self.builder.target.supports
        found = tree_leaves((arguments, tuple(keywords.values())))
        values = [value for value in found if isinstance(value, Value)]
        for value in values:
            if not self._is_usable(value):
                return value.dtype
        for signature in self.builder.results:
            if signature is not None and not supports(signature.dtype) and signature.sizes:
                return signature.dtype
        return self._decided_in_float64(values)

    def _decided_in_float64(self, values: Sequence[Value]) -> DType | None:
        """float64, if that has no kernels and PyTorch compares or truncates in it; else None.

        float32, in which a kernel has numbers of it, would make 2e200 infinite, and 1 + 1e-9 be 1.
        """
        f64 = dtypes.float64
        if self.builder.target.supports(f64) or all(value.dtype is not f64 for value in values):
            return None
        whole = any(
            found is not None and not found.dtype.is_float for found in self.builder.results
        )
        return f64 if whole and result_dtype(values) is f64 else None

    def _outputs(self, node: FxNode) -> tuple[GraphOutput, ...]:
        layouts = OutputLayouts(self.builder)
        returned: list[GraphOutput] = []
        done: dict[FxNode, GraphOutput] = {}
        (items,) = node.args
        for item in items if isinstance(items, (tuple, list)) else (items,):
            if isinstance(item, FxNode):
                if item not in done:
                    self.builder.origin = Origin("output", user_source(item))
                    done[item] = self._output(item, layouts)
                returned.append(done[item])
            elif isinstance(item, torch.SymInt):
                returned.append(GraphOutput(size=self.builder.reader.size(item)))
            else:
                returned.append(GraphOutput(constant=item))
        self.builder.origin = Origin("output")
        for placeholder, value in self.mutations.items():
            position = self.positions[placeholder]
            buffer = self.builder.buffers[self.inputs[position].buffer or ""]
            returned.append(layouts.output(value, buffer.strides, -1 - position, position))
        return tuple(returned)

    def _output(self, item: FxNode, layouts: OutputLayouts) -> GraphOutput:
        value = self.values[item]
        if isinstance(value, Value) and not value.number:
            fake = item.meta["val"]
            strides = self.builder.reader.strides(fake.stride())
            return layouts.output(value, strides, storage_of(fake))
        if isinstance(value, Expr):
            return GraphOutput(size=value)
        if value is None or isinstance(value, (bool, int, float)):
            return GraphOutput(constant=value)
        raise UnsupportedOp(
            str(item.target),
            "a graph cannot return this value",
            _NO_FALLBACK_STEP,
            user_source(item),
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _no_kernels(dtype: DType) -> str:
    return f"{dtype.name} has no kernels on this GPU (it needs {dtype.feature})"


def _with_ones(value: Value | None, signature: ResultType | None) -> Value | None:
    """``value`` with the sizes that PyTorch knows to be 1, so that it is broadcast along them."""
    if value is None or signature is None or value.number:
        return value
    pairs = list(zip(value.sizes, signature.sizes, strict=True))
    if not any(known is ONE and size is not ONE for size, known in pairs):
        return value
    sizes = tuple(ONE if known is ONE else size for size, known in pairs)
    return view(value, sizes, positions(sizes))


def _check_result(op: str, value: Value | None, signature: ResultType | None) -> None:
    if value is None or signature is None:
        return
    same_sizes = len(value.sizes) == len(signature.sizes) and all(
        a is b or not (a.is_constant and b.is_constant)
        for a, b in zip(value.sizes, signature.sizes, strict=True)
    )
    if value.dtype is not signature.dtype or not same_sizes:
        raise VerificationError(
            f"the lowering of {op} gives {value.dtype}{list(value.sizes)}, "
            f"PyTorch {signature.dtype}{list(signature.sizes)}"
        )
