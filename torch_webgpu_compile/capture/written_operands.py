"""The tensors of written-out attention's two products, and how to permute them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .call_kinds import arguments, is_tensor, kind_of, name_of_call, rank_of, same, tensor_of
from .einsum import Letters, letters_of
from .written_attention import Permutation


@dataclass(frozen=True)
class Factor:
    """A factor of a matrix product.

    Attributes:
        node: the tensor.
        order: the permutation of its dimensions to (…, rows, columns); None if that is their order.
    """

    node: Node
    order: Permutation = None

    @property
    def size(self) -> Any:
        """The number of columns."""
        return tensor_of(self.node).shape[-1 if self.order is None else self.order[-1]]


def second_product(node: Node) -> tuple[Node, Factor, Permutation] | None:
    """Weights, values (…, keys, size), and how to permute (…, queries, size) to the result."""
    match kind_of(node):
        case "product":
            weights, value = arguments(node, "input", "other")
            if isinstance(weights, Node) and isinstance(value, Node):
                return weights, Factor(value), None
        case "einsum":
            letters = letters_of(node)
            if letters is None:
                return None
            for (weights, w), (value, v) in (letters.inputs, letters.inputs[::-1]):
                if len(w) < 2:
                    continue
                *outer, row, column = list(w)
                size = _only(set(v) - set(w))
                if size and len(v) == len(w) and column not in letters.result:
                    value_order = _order(v, [*outer, column, size])
                    order = _order([*outer, row, size], letters.result)
                    if value_order is not None and order is not None:
                        return weights, Factor(value, value_order), order
    return None


def first_product(node: Node) -> tuple[Factor, Factor] | None:
    """The operands (queries, keys) of a product that gives scores, or None for other nodes.

    Queries are (…, queries, size), keys (…, keys, size).
    """
    match kind_of(node):
        case "product":
            query, other = arguments(node, "input", "other")
        case "baddbmm":
            query, other = arguments(node, "batch1", "batch2")
        case "einsum":
            letters = letters_of(node)
            return None if letters is None else _product_of_letters(letters)
        case _:
            return None
    if not isinstance(query, Node) or not isinstance(other, Node) or not is_tensor(other):
        return None
    inner = _transposed(other)
    if inner is not None:
        return Factor(query), Factor(inner)
    rank = tensor_of(other).dim()
    return Factor(query), Factor(other, (*range(rank - 2), rank - 1, rank - 2))


def _product_of_letters(letters: Letters) -> tuple[Factor, Factor] | None:
    if len(letters.result) < 2:
        return None
    *outer, row, column = list(letters.result)
    for (query, q), (key, k) in (letters.inputs, letters.inputs[::-1]):
        size = _only(set(q) - set(letters.result))
        if size and len(q) == len(k) == len(letters.result):
            orders = _order(q, [*outer, row, size]), _order(k, [*outer, column, size])
            if orders[0] is not None and orders[1] is not None:
                return Factor(query, orders[0]), Factor(key, orders[1])
    return None


def _order(have: Any, want: Any) -> tuple[int, ...] | None:
    """The permutation that takes letters to other letters."""
    if sorted(have) != sorted(want):
        return None
    return tuple(list(have).index(letter) for letter in want)


def _only(letters: set[str]) -> str:
    """The letter of a set of one, else ""."""
    return letters.pop() if len(letters) == 1 else ""


# -- keys and values of grouped heads --------------------------------------------------------------


def grouped(key: Factor, value: Factor) -> tuple[Factor, Factor]:
    """The keys and values before their heads were repeated to as many as there are queries'.

    The operands as they are unless both are repeated, in the same way.
    """
    inner = tuple(_repeated(o.node) if o.order is None else None for o in (key, value))
    if inner[0] is None or inner[1] is None:
        return key, value
    if not same(tensor_of(inner[0]).shape[:2], tensor_of(inner[1]).shape[:2]):
        return key, value
    return Factor(inner[0]), Factor(inner[1])


def _repeated(node: Node) -> Node | None:
    """x where a node is x[:, :, None].expand(…, n, …).reshape(…) or x.repeat_interleave(n, 1)."""
    if name_of_call(node) == "repeat_interleave":
        inner, repeats, *rest = node.args
        dim = rest[0] if rest else node.kwargs.get("dim")
        if not isinstance(inner, Node) or not isinstance(repeats, int) or dim != 1:
            return None
        return inner if rank_of(inner) == 4 else None
    if name_of_call(node) != "reshape" or not isinstance(node.args[0], Node):
        return None
    wide = node.args[0]
    if name_of_call(wide) != "expand" or not isinstance(wide.args[0], Node):
        return None
    single = wide.args[0]
    inner = single.args[0] if single.args else None
    if not isinstance(inner, Node) or not is_tensor(inner) or rank_of(inner) != 4:
        return None
    if not _is_new_dimension(single):
        return None
    shape = tensor_of(inner).shape
    parted = tensor_of(wide).shape
    if len(parted) != 5 or not same(tensor_of(single).shape, (*shape[:2], 1, *shape[2:])):
        return None
    if not same(tensor_of(node).shape, (parted[0], parted[1] * parted[2], *parted[3:])):
        return None
    return inner


def _is_new_dimension(node: Node) -> bool:
    if node.target is operator.getitem:
        items = node.args[1]
        every = slice(None, None, None)
        return isinstance(items, tuple) and all(i is None or i == every for i in items)
    return name_of_call(node) == "unsqueeze"


def _transposed(node: Node) -> Node | None:
    """What a node is the transpose of, in its last two dimensions."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, Node) or not is_tensor(inner):
        return None
    rank = rank_of(inner)
    last = {rank - 1, rank - 2}
    match name_of_call(node), node.args[1:]:
        case (("transpose" | "swapaxes" | "swapdims"), (int(one), int(other))):
            return inner if {one % rank, other % rank} == last else None
        case "permute", sizes:
            order = sizes[0] if len(sizes) == 1 else sizes
            assert isinstance(order, tuple | list)
            wanted = [*range(rank - 2), rank - 1, rank - 2]
            return inner if [int(str(k)) % rank for k in order] == wanted else None
        case "getattr", (name,):
            return inner if name == "mT" or (name == "T" and rank == 2) else None
        case "t", ():
            return inner
    return None
