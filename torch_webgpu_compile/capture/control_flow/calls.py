"""What divides a graph, and what else is asked of the nodes of one that is divided."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...errors import UnsupportedOp
from ...node_text import user_source
from ...torch_ops.assertions import ASSERTIONS
from ...torch_private import HigherOrderOperator, OpOverload, free_unbacked_symbols
from .numbers import expressions_in

aten = torch.ops.aten
higher_order = torch.ops.higher_order
with_effects = higher_order.with_effects

# They are steps of a plan of kernels: operators of others that change their arguments.
_IN_PLANS = (higher_order.auto_functionalized, higher_order.auto_functionalized_v2)
READS = (aten._local_scalar_dense.default, aten.item.default)


def calls_between(graph: Graph) -> frozenset[Node]:
    """What divides a graph. Nothing does if one plan of kernels may hold it.

    Raises:
        UnsupportedOp: there is a Triton kernel, which PyTorch has no other implementation of.
    """
    known: set[str] = set()
    found: set[Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            known.update(unbacked_in(value))
        elif node.op == "call_function" and node.target is not operator.getitem:
            target = node.args[1] if node.target is with_effects else node.target
            if getattr(target, "__name__", "").startswith("triton_kernel_wrapper"):
                raise UnsupportedOp(
                    "a Triton kernel",
                    "Triton has no WebGPU backend",
                    "write it with PyTorch's operators, or leave it out of the graph",
                    user_source(node),
                )
            new = [] if _is_arithmetic(node) else unbacked_in(value) - known
            in_plan = not isinstance(target, HigherOrderOperator) or target in _IN_PLANS
            if new or not in_plan:
                found.add(node)
                known.update(new)
    return frozenset(found)


def unbacked_in(value: Any) -> set[str]:
    """The symbols in a value that no argument's size gives."""
    return {str(s) for _, number in expressions_in(value) for s in free_unbacked_symbols(number)}


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number of numbers, or of a tensor's sizes."""
    if not is_number(node.meta.get("val")):
        return False
    return not isinstance(node.target, OpOverload) or node.target.overloadpacket in _OF_SIZES


_OF_SIZES = (aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset)


def tokens_of(graph: Graph) -> set[Node]:
    """What says in which order operators with effects run: nothing that is computed."""
    found: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=with_effects):
        found.add(node.args[0])
        found.update(n for n in node.users if n.target is operator.getitem and n.args[1] == 0)
    return found


def written_to(item: Any) -> Any:
    """The argument that a result is after it has been written; any other one as it is."""
    is_write = isinstance(item, Node) and item.target is aten.copy_.default
    return item.args[0] if is_write else item


def is_complex(item: Any) -> bool:
    """Whether it is a node that gives a complex tensor."""
    value = item.meta.get("val") if isinstance(item, Node) else None
    return isinstance(value, Tensor) and value.is_complex()


def is_tensor(node: Node) -> bool:
    """Whether a node gives a tensor, or a constant."""
    return node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)


def is_number(value: Any) -> bool:
    """Whether it is a number, symbolic or not."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def acts(node: Node) -> bool:
    """Whether a node does more than give results."""
    return node.target in (*ASSERTIONS, with_effects)


def needed_for(ends: Iterable[Node], inside: set[Node]) -> set[Node]:
    """Of the nodes inside, those that the ends are computed from."""
    found: set[Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in inside and node not in found:
            found.add(node)
            stack.extend(n for n in node.all_input_nodes if not is_number(n.meta.get("val")))
    return found
