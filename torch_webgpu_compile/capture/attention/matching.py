"""Finds attention written out in plain operators in Dynamo's graph.

From the second product back to softmax, and from there through what is done to scores to the first
product. Scores and weights that something else reads too are left as they are: they are needed in
memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .call_kinds import (
    Letters,
    arguments,
    either,
    example_tensor,
    fits,
    has_effect,
    is_factor,
    is_mask,
    is_number,
    is_tensor,
    kind_of,
    letters_of,
    name_of_call,
    rank_of,
    reads_metadata,
    same,
)
from .operators import FLOATS, MAX_HEAD_SIZE
from .written import Permutation, ScoreStep, attend_as_written

_MOST_STEPS = 16


@dataclass
class _Found:
    """Written-out attention, as far as it is followed, from its end.

    Attributes:
        chain: its calls, the last first.
        steps: what is done to scores, the last first.
        leading: the (batch, heads) that a view takes apart.
        sizes: those of scores of four dimensions.
    """

    chain: list[Node] = field(default_factory=list)
    steps: list[ScoreStep] = field(default_factory=list)
    dropout: float = 0.0
    leading: tuple[Any, ...] | None = None
    sizes: list[torch.Size] = field(default_factory=list)

    def followed(self, node: Node, *steps: ScoreStep) -> _Found:
        """What is found with ``node`` too, the call that comes before those of the chain.

        ``steps`` are what that call does to scores.
        """
        chain, found = [*self.chain, node], [*self.steps, *steps]
        return _Found(chain, found, self.dropout, self.leading, self.sizes)


def replace_written_attention(graph: Graph) -> int:
    """Puts calls of `attend_as_written` for all written-out attention; how many there were."""
    _continue_after_writes(graph)
    count = 0
    for node in list(graph.nodes):
        found = _match(node)
        if found is not None:
            _replace(graph, node, *found)
            count += 1
    return count


def _continue_after_writes(graph: Graph) -> None:
    """Lets what reads a tensor after ``tensor.masked_fill_(…)`` read that call's result."""
    position = {node: k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        kind = kind_of(node)
        if kind in ("multiply", "divide", "add", "subtract", "fill") and has_effect(node):
            changed = node.args[0] if node.args else None
            if isinstance(changed, Node) and _is_of_product(changed):
                later = [user for user in changed.users if position[user] > position[node]]
                changed.replace_all_uses_with(node, later.__contains__)


def _is_of_product(node: Node) -> bool:
    """Whether a tensor is a product, or made of one by the steps of attention."""
    for _ in range(_MOST_STEPS):
        kind = kind_of(node)
        if kind in ("product", "einsum", "baddbmm"):
            return True
        inner = node.args[0] if node.args else None
        if kind is None or not isinstance(inner, Node):
            return False
        node = inner
    return False


def _match(node: Node) -> tuple[_Found, tuple[Factor, Factor, Factor], Permutation] | None:
    second = second_product(node)
    if second is None:
        return None
    weights, value, order = second
    for found in _weights(weights, _Found([node])):
        last = found.chain[-1]
        first = first_product(last)
        if first is None or not _is_supported(node, last, first, value, found):
            continue
        query, key = first
        key, value = grouped(key, value)
        return found, (query, key, value), order
    return None


def _replace(graph: Graph, node: Node, found: _Found, operands: Any, order: Permutation) -> None:
    query, key, value = operands
    first = found.chain[-1]
    of_products = [example_tensor(product).dtype for product in (first, node)]
    dtypes = torch.promote_types(*of_products), of_products[1]
    # What is done with products is done in the reverse order of the way back to them.
    inputs = (
        *(query.node, key.node, value.node, tuple(reversed(found.steps))),
        *((query.order, key.order, value.order, order), found.leading, found.dropout),
        *(dtypes, not all(_takes_any_strides(user) for user in node.users)),
    )
    with graph.inserting_before(node):
        call = graph.call_function(attend_as_written, inputs)
    call.meta = {k: v for k, v in node.meta.items() if k != "source_fn_stack"}
    node.replace_all_uses_with(call)
    for part in found.chain:
        if not part.users:
            graph.erase_node(part)


def _takes_any_strides(node: Node) -> bool:
    names = ("transpose", "permute", "swapaxes", "reshape", "contiguous")
    return name_of_call(node) in names


# -- from the second product to the first ----------------------------------------------------------


def _weights(node: Node, found: _Found) -> Iterator[_Found]:
    """What ends in a first product, from weights on."""
    if not _is_link(node, found):
        return
    match kind_of(node):
        case "softmax":
            scores, dim = arguments(node, "input", "dim")
            if isinstance(scores, Node) and is_tensor(scores) and dim in (-1, rank_of(node) - 1):
                yield from _scores(scores, found.followed(node))
        case "dropout" if found.dropout == 0.0:
            weights, p, training = arguments(node, "input", "p", "training")
            p, training = 0.5 if p is None else p, True if training is None else training
            if isinstance(weights, Node) and isinstance(p, int | float):
                found = found.followed(node)
                found.dropout = float(p) if training else 0.0
                yield from _weights(weights, found)
        case "cast" | "view":
            inner = _through(node, found)
            if inner is not None:
                yield from _weights(*inner)


def _scores(node: Node, found: _Found) -> Iterator[_Found]:
    """What ends in a first product, from scores on: several ways, where two terms are products."""
    if not _is_link(node, found) or len(found.chain) > _MOST_STEPS:
        return
    rank = rank_of(node)
    match kind_of(node):
        case "product" | "einsum":
            yield found.followed(node)
        case "baddbmm":
            term, beta, alpha = arguments(node, "input", "beta", "alpha")
            beta, alpha = 1 if beta is None else beta, 1 if alpha is None else alpha
            if is_number(beta) and is_factor(alpha) and fits(term, node):
                added = () if beta == 0 else (("add", rank, term, beta),)
                yield found.followed(node, *added, ("multiply", rank, alpha))
        case "multiply":
            for one, other in either(node, "input", "other"):
                if is_factor(other):
                    yield from _scores(one, found.followed(node, ("multiply", rank, other)))
        case "divide":
            scores, divisor, rounding = arguments(node, "input", "other", "rounding_mode")
            if isinstance(scores, Node) and is_factor(divisor) and rounding is None:
                yield from _scores(scores, found.followed(node, ("divide", rank, divisor)))
        case "add" | "subtract" as kind:
            sign = 1 if kind == "add" else -1
            ways = list(either(node, "input", "other"))
            (alpha,) = arguments(node, "alpha")
            for one, other in ways if kind == "add" else ways[:1]:
                if alpha in (None, 1) and fits(other, node):
                    step = ("add", rank, other, sign)
                    yield from _scores(one, found.followed(node, step))
        case "fill":
            scores, mask, value = arguments(node, "input", "mask", "value")
            if isinstance(scores, Node) and is_mask(mask, node) and fits(value, node):
                yield from _scores(scores, found.followed(node, ("fill", rank, mask, value)))
        case "choose" | "choose_self":
            yield from _choices(node, found)
        case "cast" | "view":
            inner = _through(node, found)
            if inner is not None:
                yield from _scores(*inner)


def _choices(node: Node, found: _Found) -> Iterator[_Found]:
    """``torch.where(condition, scores, value)`` and ``torch.where(condition, value, scores)``."""
    condition, kept, other = arguments(node, "condition", "input", "other")
    if not is_mask(condition, node):
        return
    if isinstance(kept, Node) and is_tensor(kept) and fits(other, node):
        step = ("choose", rank_of(node), condition, other)
        yield from _scores(kept, found.followed(node, step))
    if isinstance(other, Node) and is_tensor(other) and fits(kept, node):
        step = ("fill", rank_of(node), condition, kept)
        yield from _scores(other, found.followed(node, step))


def _through(node: Node, found: _Found) -> tuple[Node, _Found] | None:
    """What a cast, or a view that joins or parts batch and heads, is of."""
    inner = node.args[0] if node.args else None
    if (
        not isinstance(inner, Node)
        or not is_tensor(inner)
        or example_tensor(inner).dtype not in FLOATS
    ):
        return None
    if kind_of(node) == "view" and example_tensor(inner).dtype != example_tensor(node).dtype:
        return None
    if example_tensor(inner).device != example_tensor(node).device:
        return None
    before, after = example_tensor(inner).shape, example_tensor(node).shape
    found = found.followed(node)
    if len(before) == len(after):
        return (inner, found) if same(before, after) else None
    if {len(before), len(after)} != {3, 4} or not same(before[-2:], after[-2:]):
        return None
    if len(after) == 4 and kind_of(node) == "view":
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        if len(sizes) != 4:
            return None
        found.leading = sizes[:2]
    found.sizes = [*found.sizes, before if len(before) == 4 else after]
    return inner, found


def _is_link(node: Node, found: _Found) -> bool:
    """Whether a call's result is floating, and read by the call after it only.

    A step that makes it larger is none.
    """
    if not is_tensor(node) or example_tensor(node).dtype not in FLOATS:
        return False
    after = found.chain[-1]
    keeps_sizes = kind_of(after) not in ("product", "einsum", "view")
    if keeps_sizes and not same(example_tensor(node).shape, example_tensor(after).shape):
        return False
    return all(user is after or reads_metadata(user, node) for user in node.users)


# -- whether there is a kernel for it --------------------------------------------------------------


def _is_supported(
    node: Node, last: Node, first: tuple[Factor, Factor], value: Factor, found: _Found
) -> bool:
    """Whether the operator has kernels for this, and nothing happens meanwhile."""
    operands = [operand.node for operand in (*first, value)]
    if not all(is_tensor(o) and example_tensor(o).dtype in FLOATS for o in operands):
        return False
    ranks = [rank_of(o) for o in operands]
    if not ranks[0] == ranks[1] == rank_of(last) or ranks[2] != rank_of(node):
        return False
    if any(not 2 <= rank <= 4 for rank in ranks) or not _has_known_heads(operands, found):
        return False
    inside = set(found.chain)
    between = last.next
    while between is not node:
        if between not in inside and has_effect(between, random=found.dropout > 0.0):
            return False
        between = between.next
    return all(0 < int(operand.size) <= MAX_HEAD_SIZE for operand in (*first, value))


def _has_known_heads(operands: list[Node], found: _Found) -> bool:
    """Whether where batch and heads are one dimension, they are taken apart in one way only."""
    if not found.sizes:
        return rank_of(operands[0]) == rank_of(operands[2])
    if not all(same(found.sizes[0], sizes) for sizes in found.sizes[1:]):
        return False
    joined = [example_tensor(o).shape[0] for o in operands if rank_of(o) == 3]
    if any(rank_of(o) == 2 for o in operands) or not all(same(joined[:1], [n]) for n in joined):
        return False
    if found.leading is None:  # the first product has them apart
        found.leading = ()
    return True


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
        return example_tensor(self.node).shape[-1 if self.order is None else self.order[-1]]


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
    rank = example_tensor(other).dim()
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
    if not same(example_tensor(inner[0]).shape[:2], example_tensor(inner[1]).shape[:2]):
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
    shape = example_tensor(inner).shape
    parted = example_tensor(wide).shape
    if len(parted) != 5 or not same(example_tensor(single).shape, (*shape[:2], 1, *shape[2:])):
        return None
    if not same(example_tensor(node).shape, (parted[0], parted[1] * parted[2], *parted[3:])):
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
