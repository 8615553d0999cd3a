"""The equation of an ``einsum`` of two tensors in Dynamo's graph."""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node


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
