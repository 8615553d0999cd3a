"""`inline_operators`: higher-order operators whose function is better a part of the graph.

So their operators fuse with each other and with what is around them; see `rules`. The others stay:
see `parts`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...torch_private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    tree_leaves,
    tree_map_only,
)
from ..fx_graphs import attribute_of, fake_mode_of, memory_like
from ..tracing import Recorder, Rules, Traced, clean_dispatch
from .rules import RULES, Function, traced_alone
from .scans import NotInlined

aten = torch.ops.aten


def inline_operators(module: GraphModule, rules: Rules) -> bool:
    """Replaces the higher-order operators of a graph that have a rule, where it applies.

    Returns:
        Whether there are such operators.

    Args:
        module: a functional ATen graph with fake tensors; changed in place.
        rules: as for `tracing.trace`.
    """
    if not any(node.target in RULES for node in module.graph.nodes):
        return False
    mode = fake_mode_of(module.graph)
    if mode is None:
        return False
    with clean_dispatch(symbolic=mode.shape_env is not None), mode:
        made = Inlining(module, mode, rules).run()
    for name, constant in made.items():
        setattr(module, name, constant)
    module.recompile()
    return True


class Inlining:
    """A graph copied node by node, but for the operators that have a rule."""

    def __init__(self, module: GraphModule, mode: FakeTensorMode, rules: Rules) -> None:
        self._module, self._mode, self._rules = module, mode, rules
        self._recorder = Recorder(rules)
        self._copies: dict[Node, Node] = {}
        self._results: dict[Node, Any] = {}  # of inlined operators, and the elements of those

    def run(self) -> Mapping[str, Any]:
        """Makes it the module's graph; gives the constants that it has besides the module's."""
        for node in list(self._module.graph.nodes):
            if node.target is operator.getitem and node.args[0] in self._results:
                value = self._results[node.args[0]][node.args[1]]
                if isinstance(value, Tensor):
                    self._copies[node] = self._recorder.node_of(value)
                    self._results[node] = value
                    continue
            if node.target not in RULES or not self._inline(node):
                self._copy(node)
        self._module.graph = self._recorder.graph
        return self._recorder.constants

    def _copy(self, node: Node) -> None:
        made = self._recorder.graph.node_copy(node, self._copies.__getitem__)
        self._copies[node] = made
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.target is not aten.copy_.default:
            self._recorder.know(value, made)

    def _inline(self, node: Node) -> bool:
        if node.meta.get("unbacked_bindings"):
            return False
        wanted = node.meta["val"]
        recorded = len(self._recorder.graph.nodes)
        self._recorder.stack_trace = node.meta.get("stack_trace")
        try:
            args, kwargs = tree_map_only(Node, self._value, (node.args, node.kwargs))
            with self._recorder:
                made = RULES[node.target](self, *args, **kwargs)
                laid_out = [
                    _in_layout(m, w) for m, w in zip(made, tree_leaves(wanted), strict=True)
                ]
        except NotInlined:
            return False
        finally:
            self._recorder.stack_trace = None
        # The partitioner and `checkpoint` leave notes on nodes that hold for what replaces them.
        notes = {
            name: note
            for name, note in node.meta.items()
            if name not in ("val", "tensor_meta", "stack_trace", "unbacked_bindings")
        }
        for made_node in list(self._recorder.graph.nodes)[recorded:]:
            made_node.meta = {**notes, **made_node.meta}
        self._results[node] = tuple(laid_out)
        return True

    def _value(self, node: Node) -> Any:
        if node in self._results:
            return self._results[node]
        return attribute_of(self._module, node) if node.op == "get_attr" else node.meta.get("val")

    def evaluate(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function of the graph on what a rule gives; its results.

        Raises:
            NotInlined: it has an operator that cannot be a part of the graph.
        """
        if not isinstance(function, GraphModule):
            return list(function(*arguments))
        values: dict[Node, Any] = {}
        given = iter(arguments)
        for node in function.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._attribute(function, node)
            elif node.op == "output":
                results = tree_map_only(Node, values.__getitem__, node.args[0])
                return list(results) if isinstance(results, (tuple, list)) else [results]
            else:
                args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                if node.meta.get("unbacked_bindings"):
                    raise NotInlined(f"{node.target} has a size that depends on data")
                if node.target in RULES:
                    values[node] = RULES[node.target](self, *args, **kwargs)
                elif isinstance(node.target, HigherOrderOperator):
                    raise NotInlined(f"{node.target} is not a part of a plan")
                else:
                    values[node] = node.target(*args, **kwargs)
        raise ValueError("a graph without an output")

    def traced(self, function: Function, arguments: Sequence[Any]) -> Traced:
        """A function's graph, for arguments of these sizes and dtypes.

        Raises:
            NotInlined: as `evaluate`, or it cannot be traced by itself.
        """
        return traced_alone(
            lambda *given: tuple(self.evaluate(function, given)),
            arguments,
            self._mode,
            self._rules,
            lambda value: value,
        )

    def nodes(self, function: Function, arguments: Sequence[Any]) -> list[Node]:
        """The calls in a function of the graph."""
        assert isinstance(function, GraphModule)
        return [node for node in function.graph.nodes if node.op == "call_function"]

    def _attribute(self, function: GraphModule, node: Node) -> Any:
        value = attribute_of(function, node)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._mode.from_tensor(value)
        self._recorder.constant(f"inlined{len(self._recorder.constants)}", value, fake)
        return fake


def _in_layout(value: Any, wanted: Any) -> Any:
    """A result with the strides that PyTorch says the operator's has."""
    if not isinstance(value, Tensor) or value.stride() == wanted.stride():
        return value
    laid_out: Tensor = aten.copy.default(memory_like(wanted), value)
    return laid_out
