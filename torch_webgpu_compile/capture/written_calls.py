"""Finds attention written out in plain operators in Dynamo's graph.

From the second product back to softmax, and from there through what is done to scores to the first
product. Scores and weights that something else reads too are left as they are: they are needed in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .call_kinds import (
    arguments,
    either,
    fits,
    is_factor,
    is_mask,
    is_number,
    is_tensor,
    kind_of,
    name_of_call,
    rank_of,
    reads_metadata,
    same,
    tensor_of,
)
from .effects import has_effect
from .written_attention import Permutation, ScoreStep, attend_as_written
from .written_operands import Factor, first_product, grouped, second_product

MAX_HEAD_SIZE = 256
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
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


def rewrite(graph: Graph) -> int:
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
                _read_after(changed, node, position)


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


def _read_after(changed: Node, write: Node, position: dict[Node, int]) -> None:
    def is_later(user: Node) -> bool:
        return position[user] > position[write]

    changed.replace_all_uses_with(write, is_later)


_Match = tuple[_Found, tuple[Factor, Factor, Factor], Permutation]


def _match(node: Node) -> _Match | None:
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
    of_products = [tensor_of(product).dtype for product in (first, node)]
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
    if not isinstance(inner, Node) or not is_tensor(inner) or tensor_of(inner).dtype not in _FLOATS:
        return None
    if kind_of(node) == "view" and tensor_of(inner).dtype != tensor_of(node).dtype:
        return None
    if tensor_of(inner).device != tensor_of(node).device:
        return None
    before, after = tensor_of(inner).shape, tensor_of(node).shape
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
    if not is_tensor(node) or tensor_of(node).dtype not in _FLOATS:
        return False
    after = found.chain[-1]
    keeps_sizes = kind_of(after) not in ("product", "einsum", "view")
    if keeps_sizes and not same(tensor_of(node).shape, tensor_of(after).shape):
        return False
    return all(user is after or reads_metadata(user, node) for user in node.users)


# -- whether there is a kernel for it --------------------------------------------------------------


def _is_supported(
    node: Node, last: Node, first: tuple[Factor, Factor], value: Factor, found: _Found
) -> bool:
    """Whether the operator has kernels for this, and nothing happens meanwhile."""
    operands = [operand.node for operand in (*first, value)]
    if not all(is_tensor(o) and tensor_of(o).dtype in _FLOATS for o in operands):
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
    joined = [tensor_of(o).shape[0] for o in operands if rank_of(o) == 3]
    if any(rank_of(o) == 2 for o in operands) or not all(same(joined[:1], [n]) for n in joined):
        return False
    if found.leading is None:  # the first product has them apart
        found.leading = ()
    return True
