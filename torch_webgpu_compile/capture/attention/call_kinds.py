"""Calls of Dynamo's graph by what they mean, and what is known of their results.

What a call means is a row of `_KINDS`; the names of its arguments, a row of `_PARAMETERS`.
"""

from __future__ import annotations

import inspect
import operator
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...torch_private import HigherOrderOperator, OpOverload, statically_known_true

aten = torch.ops.aten

# Functions of PyTorch and of Python's operators, methods of tensors, and ATen's operators by name.
_KINDS = {
    "product": ("matmul", "bmm", "mm", "__matmul__"),
    "einsum": ("einsum",),
    "baddbmm": ("baddbmm",),
    "softmax": ("softmax", "_softmax", "special_softmax"),
    "dropout": ("dropout",),
    "multiply": ("mul", "mul_", "imul", "multiply"),
    "divide": ("div", "div_", "truediv", "itruediv", "true_divide", "divide"),
    "add": ("add", "add_", "iadd"),
    "subtract": ("sub", "sub_", "isub", "subtract"),
    "fill": ("masked_fill", "masked_fill_"),
    "choose": ("where",),
    "cast": ("to", "float", "half", "bfloat16", "type", "type_as"),
    "view": ("view", "reshape", "contiguous"),
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names}
# Where functions are that have these names.
_MODULES = frozenset(
    {"torch", "torch.functional", "torch.nn.functional", "torch._C._special", "torch._ops.aten"}
    | {"_operator"}
)

_PARAMETERS = {
    "product": ("input", "other"),
    "baddbmm": ("input", "batch1", "batch2", "beta", "alpha"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "dropout": ("input", "p", "training", "inplace"),
    "multiply": ("input", "other"),
    "divide": ("input", "other", "rounding_mode"),
    "add": ("input", "other", "alpha"),
    "subtract": ("input", "other", "alpha"),
    "fill": ("input", "mask", "value"),
    "choose": ("condition", "input", "other"),
    "choose_self": ("input", "condition", "other"),
}
_ALIASES = {"self": "input", "mat2": "other", "train": "training", "tensor2": "other"}

# What reads of a tensor only what is known without it.
_METADATA = ("size", "dim", "stride", "numel", aten.sym_size.int)


def kind_of(node: Node) -> str | None:
    """The name in `_KINDS` of what a call computes, None for a node that is none of these calls."""
    if node.op == "call_method":
        return "choose_self" if node.target == "where" else _KIND.get(name_of_call(node))
    if node.op != "call_function" or getattr(node.target, "__module__", None) not in _MODULES:
        return None
    return _KIND.get(name_of_call(node).partition(".")[0])


def name_of_call(node: Node) -> str:
    """The name of the method or function that a node calls, "" if it has none."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def arguments(node: Node, *names: str) -> list[Any]:
    """Arguments by name; None for what is not given."""
    kind = kind_of(node)
    assert kind is not None
    found = dict(zip(_PARAMETERS[kind], node.args, strict=False))
    found |= {_ALIASES.get(name, name): value for name, value in node.kwargs.items()}
    return [found.get(name) for name in names]


def either(node: Node, *names: str) -> Iterator[tuple[Node, Any]]:
    """Every argument of the two that is a tensor's node, together with the other argument."""
    one, other = arguments(node, *names)
    for scores, rest in ((one, other), (other, one)):
        if isinstance(scores, Node) and is_tensor(scores) and rest is not scores:
            yield scores, rest


def reads_metadata(user: Node, node: Node) -> bool:
    """Whether ``user`` reads sizes, strides or the dtype of ``node``, but no element."""
    if user.target == "type_as":
        return user.args[0] is not node
    return user.target in _METADATA


# -- tensors and numbers ------------------------------------------------------------------------


def is_tensor(node: Any) -> bool:
    """Whether this is an FX node whose example value is a tensor."""
    return isinstance(node, Node) and isinstance(_example(node), Tensor)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def example_tensor(node: Node) -> Tensor:
    """The example (fake) tensor of a node, which is one of a tensor."""
    found = _example(node)
    assert isinstance(found, Tensor)
    return found


def rank_of(node: Node) -> int:
    """The number of dimensions of a node's tensor."""
    return example_tensor(node).dim()


def same(one: Any, other: Any) -> bool:
    """Whether two shapes are equal, for sure: symbolic sizes as far as that can be proven."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def is_number(value: Any) -> bool:
    """Whether this is a Python number but no bool, or an FX node whose value is a number."""
    if isinstance(value, Node):
        return isinstance(_example(value), torch.SymInt | torch.SymFloat | int | float)
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_factor(value: Any) -> bool:
    """A number that a kernel can have in its text, or a tensor of one element."""
    if isinstance(value, int | float) and not 1e-9 < abs(value) < 1e9:
        return False
    if is_tensor(value):
        found = example_tensor(value)
        return not found.is_complex() and statically_known_true(found.numel() == 1)
    return is_number(value)


def fits(value: Any, scores: Node) -> bool:
    """Whether a number or tensor can be broadcast to scores, not they to it."""
    if not is_tensor(value):
        return is_number(value)
    found, shape = example_tensor(value), example_tensor(scores).shape
    if found.is_complex() or found.dtype == torch.float64 or found.dim() > len(shape):
        return False
    sizes = zip(reversed(found.shape), reversed(shape), strict=False)
    return all(statically_known_true(a == 1) or statically_known_true(a == b) for a, b in sizes)


def is_mask(value: Any, scores: Node) -> bool:
    """Whether this is a bool tensor that broadcasts to the scores."""
    return is_tensor(value) and example_tensor(value).dtype == torch.bool and fits(value, scores)


_WRITING_OPERATORS = (
    *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul),
    *(operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
# Modes that a graph enters and leaves: autocast, gradients, devices.
_STATE = ("_enter_", "_exit_", "_set_", "set_")
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "seed")


def has_effect(node: Node, random: bool = False) -> bool:
    """Whether a call may change a tensor or a mode; or, if asked, draw random numbers.

    What is not known counts as an effect.
    """
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    target = node.target
    if node.op == "call_module" or isinstance(target, HigherOrderOperator):
        return True
    name = name_of_call(node)
    if random and any(word in name for word in _RANDOM):
        return True
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    # There a last "_" tells names from keywords: `operator.or_`.
    if getattr(target, "__module__", "") == "_operator":
        return target in _WRITING_OPERATORS
    writes = name.endswith("_") and not name.endswith("__")
    if writes or name == "__setitem__" or name.startswith(_STATE):
        return True
    return node.kwargs.get("out") is not None or _is_in_place(node)


def _is_in_place(node: Node) -> bool:
    """Whether a function is told to work in place: ``F.relu(x, inplace=True)``."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    try:
        arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return True
    return bool(arguments.get("inplace"))


@dataclass(frozen=True)
class Letters:
    """``inputs``: each tensor with a letter per dimension; ``result``: the result's letters."""

    inputs: tuple[tuple[Node, str], tuple[Node, str]]
    result: str


def letters_of(node: Node) -> Letters | None:
    """None for what is not a product of two tensors, each without a diagonal.

    An ellipsis is letters, too.
    """
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or equation.count("->") != 1 or len(operands) != 2:
        return None
    terms, result = equation.replace(" ", "").split("->")
    inputs: list[tuple[Node, str]] = []
    unnamed = {""}
    for operand, term in zip(operands, terms.split(","), strict=False):
        tensor = operand.meta.get("example_value") if isinstance(operand, Node) else None
        if not isinstance(operand, Node) or not isinstance(tensor, Tensor):
            return None
        unused = [c for c in string.ascii_letters if c not in equation]
        dots = "".join(unused[: tensor.dim() - len(term.replace("...", ""))])
        unnamed.add(dots if "..." in term else "")
        inputs.append((operand, term.replace("...", dots)))
    if len(inputs) != 2 or len(unnamed) > 2:
        return None
    result = result.replace("...", max(unnamed))
    if any(len({*letters}) != len(letters) for letters in (result, *(i[1] for i in inputs))):
        return None
    return Letters((inputs[0], inputs[1]), result)
