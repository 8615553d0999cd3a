"""`separate_graph`: a captured graph on complex tensors becomes one on real tensors.

A complex argument is taken as its real view, (…, 2), which is what its memory holds, and a complex
output is given as one. In between every complex value is a `Pair` of real tensors, so that
lowering, fusion and kernels know nothing of complex numbers. Nodes without any are copied.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...errors import UnsupportedOp
from ...torch_ops.assertions import ASSERTIONS
from ...torch_private import (
    FakeTensorMode,
    OpOverload,
    _disable_current_modes,
    tree_any,
    tree_leaves,
    tree_map_only,
)
from ..fx_graphs import attribute_of, fake_mode_of, values_of
from ..tracing import Recorder, Rules, clean_dispatch
from . import creation, functions, linear, products, reductions
from .pair import COMPONENTS, Pair, as_pair, join, separate
from .registry import RULES, ComplexCall

aten = torch.ops.aten

FAMILIES = (creation, functions, linear, products, reductions)  # whose import fills `RULES`


@dataclass(frozen=True)
class RealGraph:
    """A graph without complex tensors.

    Attributes:
        module: the graph.
        inputs, outputs: positions of arguments and results that are (…, 2) in place of complex.
    """

    module: GraphModule
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


def separate_graph(module: GraphModule, rules: Rules) -> RealGraph:
    """The graph on real tensors; the same one if it has no complex numbers.

    Args:
        module: a functional ATen graph with fake tensors.
        rules: as for `tracing.trace`.

    Raises:
        UnsupportedOp: an operator on complex tensors has no rule.
    """
    if not any(map(_is_complex, values_of(module.graph))):
        return RealGraph(module)
    mode = fake_mode_of(module.graph)
    assert mode is not None
    with clean_dispatch(symbolic=mode.shape_env is not None), mode:
        return _Separation(module, mode, Recorder(rules)).run()


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())


class _Separation:
    def __init__(self, module: GraphModule, mode: FakeTensorMode, recorder: Recorder) -> None:
        self._module = module
        self._mode = mode
        self._recorder = recorder
        self._values: dict[Node, Any] = {}  # tensors, pairs, or what a copied node gives
        self._copies: dict[Node, Node] = {}

    def run(self) -> RealGraph:
        graph = self._module.graph
        inputs = self._placeholders(graph)
        needed = _needed(graph)
        outputs: frozenset[int] = frozenset()
        for node in graph.nodes:
            if node.op == "output":
                outputs = self._outputs(node)
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op != "placeholder" and node in needed:
                self._call(node)
        return RealGraph(self._recorder.module(), inputs, outputs)

    def _placeholders(self, graph: Graph) -> frozenset[int]:
        nodes = graph.find_nodes(op="placeholder")
        found = {}
        for position, node in enumerate(nodes):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.is_complex():
                found[position] = joined = _joined(value)
                self._recorder.input(str(node.target), joined)
            else:
                self._copy(node)
        with self._recorder:
            for position, joined in found.items():
                self._values[nodes[position]] = separate(joined)
        return frozenset(found)

    def _attribute(self, node: Node) -> None:
        value = attribute_of(self._module, node)
        if isinstance(value, Tensor) and value.is_complex():
            with _disable_current_modes():
                value = torch.view_as_real(value.resolve_conj())
            fake = self._mode.from_tensor(value)
            self._recorder.constant(str(node.target), value, fake)
            with self._recorder:
                self._values[node] = separate(fake)
        else:
            self._recorder.attribute(str(node.target), value)
            self._copy(node)

    def _copy(self, node: Node) -> None:
        """A node that complex numbers do not touch."""
        made = self._recorder.graph.node_copy(node, self._node)
        value = node.meta.get("val")
        self._copies[node] = made
        self._values[node] = value
        if isinstance(value, Tensor) and node.target is not aten.copy_.default:
            self._recorder.know(value, made)

    def _node(self, node: Node) -> Node:
        """The node in the new graph for a real one in the old."""
        found = self._copies.get(node)
        return self._recorder.node_of(self._values[node]) if found is None else found

    def _call(self, node: Node) -> None:
        args, kwargs = tree_map_only(Node, self._values.__getitem__, (node.args, node.kwargs))
        if node.target is operator.getitem and node.args[0] not in self._copies:
            self._values[node] = args[0][args[1]]
        elif node.target is aten.copy_.default and isinstance(args[0], Pair):
            assert isinstance(node.args[0], Node)
            target = args[0].joined
            assert target is not None
            with self._recorder:
                value = as_pair(args[1], target.dtype)
                written = join(_expanded(value, args[0].shape))
            self._recorder.mutate(target, written)
            self._values[node] = value
        elif node.target is aten.sym_size.int and isinstance(args[0], Pair):
            part, dim = args[0].re, args[1]
            made = self._recorder.node_of(part), dim % part.dim()
            self._copies[node] = self._recorder.graph.call_function(node.target, made)
            self._copies[node].meta.update(node.meta)
            self._values[node] = node.meta["val"]
        elif tree_any(_touches, (args, kwargs, node.meta.get("val"))):
            self._values[node] = self._apply(node, args, kwargs)
        else:
            self._copy(node)

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        op = node.target
        found = RULES.get(op) if isinstance(op, OpOverload) else None
        if found is None:
            raise UnsupportedOp(
                str(op), "it has no kernel for complex numbers", "run it on the host"
            )
        assert isinstance(op, OpOverload)
        value = node.meta["val"]
        results = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        described = tree_map_only(Node, lambda n: n.meta.get("val"), tuple(node.args))
        call = ComplexCall(op, _compute_dtype(results, described), results, described)
        self._recorder.stack_trace = node.meta.get("stack_trace")
        with self._recorder:
            made = found(call, *args, **kwargs)
            many = isinstance(made, (tuple, list))
            pieces = made if many else (made,)
            checked = [_result(op, p, r) for p, r in zip(pieces, results, strict=True)]
        return checked if many else checked[0]

    def _outputs(self, node: Node) -> frozenset[int]:
        (items,) = node.args
        assert isinstance(items, (tuple, list))
        complex_outputs = {
            position
            for position, item in enumerate(items)
            if isinstance(item, Node) and isinstance(self._values[item], Pair)
        }
        made: dict[Node, Node] = {}
        for item in items:
            if isinstance(item, Node) and item not in made:
                made[item] = self._output(item)
        returned = tuple(made[item] if isinstance(item, Node) else item for item in items)
        self._recorder.graph.output(()).args = (returned,)
        return frozenset(complex_outputs)

    def _output(self, node: Node) -> Node:
        """The node of an output, with the strides that PyTorch gives it."""
        value, wanted = self._values[node], node.meta.get("val")
        if not isinstance(value, Pair) and node in self._copies:
            return self._copies[node]
        if not isinstance(value, (Pair, Tensor)):
            return value  # type: ignore[no-any-return]  # a size
        assert isinstance(wanted, Tensor)
        if isinstance(value, Pair):
            layout = _joined(wanted)
            with self._recorder:
                value = join(value)
        else:
            layout = torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype)
        made = self._recorder.graph.call_function(
            aten.clone.default, (self._recorder.node_of(value),)
        )
        made.meta["val"] = layout
        return made


def _joined(value: Tensor) -> Tensor:
    """A fake tensor for the real view of a complex one."""
    strides = [2 * stride for stride in value.stride()]
    return torch.empty_strided(
        (*value.shape, 2), (*strides, 1), dtype=COMPONENTS[value.dtype], device=value.device
    )


def _touches(value: Any) -> bool:
    return isinstance(value, Pair) or _is_complex(value)


def _needed(graph: Graph) -> set[Node]:
    """The nodes that an output or a change of an argument depends on."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        mutates = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        acts = node.target in ASSERTIONS or (node.op == "call_function" and node.is_impure())
        kept = node.op == "output" or mutates or acts
        if kept or node in found:
            found.add(node)
            found.update(node.all_input_nodes)
    return found


def _compute_dtype(results: tuple[Any, ...], arguments: tuple[Any, ...]) -> torch.dtype:
    """The dtype of the parts to compute with."""
    kinds = [r.dtype for r in results if isinstance(r, Tensor) and r.is_complex()]
    if not kinds:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        with_sizes = [tensor for tensor in tensors if tensor.dim()]
        found = {tensor.dtype for tensor in with_sizes or tensors}
        # Integers leave it open; PyTorch promotes none of the unsigned ones.
        kinds = [torch.complex64, *(d for d in found if d.is_complex or d.is_floating_point)]
    dtype = COMPONENTS[reduce(torch.promote_types, kinds)]
    return torch.float32 if dtype == torch.float16 else dtype


def _result(op: OpOverload, made: Any, wanted: Any) -> Any:
    """What a rule gave, in the dtype and sizes of the operator's result."""
    if not isinstance(wanted, Tensor):
        return made
    if wanted.is_complex():
        return _expanded(as_pair(made, COMPONENTS[wanted.dtype]), wanted.shape)
    assert isinstance(made, Tensor), f"the rule for {op} gives a complex tensor"
    made = made.to(wanted.dtype)
    return made if made.dim() == wanted.dim() else made.expand(wanted.shape)


def _expanded(pair: Pair, sizes: torch.Size) -> Pair:
    if len(pair.shape) == len(sizes) and all(map(_is_same, pair.shape, sizes)):
        return pair
    return pair.map(lambda part: part.expand(sizes))


def _is_same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal; comparing symbols would add an assumption."""
    return a is b or (type(a) is int and type(b) is int and a == b)
