"""Which calls of Dynamo's graph do more than give a result."""

from __future__ import annotations

import inspect
import operator

import torch
from torch.fx import Node

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
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    if random and any(word in name for word in _RANDOM):
        return True
    if isinstance(target, torch._ops.OpOverload):
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
