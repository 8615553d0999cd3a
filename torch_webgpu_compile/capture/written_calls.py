"""Finds attention written out in plain operators in Dynamo's graph.

From the second product back to softmax, and from there through what is done to scores to the first
product. What a call means is a row of `_KINDS`; which of its arguments matter, one of `_PARAMETERS`.
Scores and weights that something else reads too are left as they are: they are needed in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .effects import has_effect
from .einsum import Letters, letters_of
from .written_attention import Permutation, Step, attend

MAX_HEAD_SIZE = 256
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST_STEPS = 16

aten = torch.ops.aten

# Functions by object, methods of tensors by name.
_KINDS: dict[str, tuple[Any, ...]] = {
    "product": (
        *(torch.matmul, torch.bmm, torch.mm, operator.matmul, "matmul", "bmm", "mm"),
        *("__matmul__", aten.matmul.default, aten.bmm.default, aten.mm.default),
    ),
    "einsum": (torch.einsum, torch.functional.einsum),
    "baddbmm": (torch.baddbmm, "baddbmm", aten.baddbmm.default),
    "softmax": (
        *(F.softmax, torch.softmax, "softmax", aten.softmax.int, aten._softmax.default),
        *(torch.special.softmax,),
    ),
    "dropout": (F.dropout, torch.dropout, aten.dropout.default),
    "multiply": (
        *(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"),
        *(aten.mul.Tensor, aten.mul.Scalar),
    ),
    "divide": (
        *(operator.truediv, operator.itruediv, torch.div, torch.true_divide, torch.divide),
        *("div", "div_", "true_divide", "divide", aten.div.Tensor, aten.div.Scalar),
    ),
    "add": (
        *(operator.add, operator.iadd, torch.add, "add", "add_", aten.add.Tensor),
        *(aten.add.Scalar,),
    ),
    "subtract": (
        *(operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_", "subtract"),
        *(aten.sub.Tensor, aten.sub.Scalar),
    ),
    "fill": (
        *(torch.masked_fill, "masked_fill", "masked_fill_", aten.masked_fill.Scalar),
        *(aten.masked_fill.Tensor,),
    ),
    "choose": (torch.where, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),
    "choose_self": ("where",),
    "cast": ("to", "float", "half", "bfloat16", "type", "type_as", aten.to.dtype),
    "view": (
        *("view", "reshape", torch.reshape, "contiguous", aten.view.default),
        *(aten.reshape.default,),
    ),
}
_KIND = {target: kind for kind, targets in _KINDS.items() for target in targets}

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
    steps: list[Step] = field(default_factory=list)
    dropout: float = 0.0
    leading: tuple[Any, ...] | None = None
    sizes: list[torch.Size] = field(default_factory=list)

    def followed(self, node: Node, *steps: Step) -> _Found:
        """With one more call, before those that are there."""
        chain, found = [*self.chain, node], [*self.steps, *steps]
        return _Found(chain, found, self.dropout, self.leading, self.sizes)


@dataclass(frozen=True)
class _Operand:
    """A tensor of a product, and how to permute it to (…, rows, columns)."""

    node: Node
    order: Permutation = None


def rewrite(graph: Graph) -> int:
    """Replaces all that is found by calls of `attend`, in place; their number."""
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
        kind = _kind(node)
        if kind in ("multiply", "divide", "add", "subtract", "fill") and has_effect(node):
            changed = node.args[0] if node.args else None
            if isinstance(changed, Node):
                at = position[node]
                changed.replace_all_uses_with(node, lambda user, at=at: position[user] > at)


_Match = tuple[_Found, tuple[_Operand, _Operand, _Operand], Permutation]


def _match(node: Node) -> _Match | None:
    second = _second_product(node)
    if second is None:
        return None
    weights, value, order = second
    for found in _weights(weights, _Found([node])):
        last = found.chain[-1]
        first = _first_product(last)
        if first is None or not _is_supported(node, last, first, value, found):
            continue
        query, key = first
        key, value = _grouped(key, value)
        return found, (query, key, value), order
    return None


def _replace(graph: Graph, node: Node, found: _Found, operands: Any, order: Permutation) -> None:
    query, key, value = operands
    first = found.chain[-1]
    dtypes = torch.promote_types(_tensor(first).dtype, _tensor(node).dtype), _tensor(node).dtype
    # What is done with products is done in the reverse order of the way back to them.
    arguments = (
        *(query.node, key.node, value.node, tuple(reversed(found.steps))),
        *((query.order, key.order, value.order, order), found.leading, found.dropout),
        *(dtypes, not all(_takes_any_strides(user) for user in node.users)),
    )
    with graph.inserting_before(node):
        call = graph.call_function(attend, arguments)
    call.meta = {k: v for k, v in node.meta.items() if k != "source_fn_stack"}
    node.replace_all_uses_with(call)
    for part in found.chain:
        if not part.users:
            graph.erase_node(part)


def _takes_any_strides(node: Node) -> bool:
    names = ("transpose", "permute", "swapaxes", "reshape", "contiguous")
    return (node.target if node.op == "call_method" else _name(node.target)) in names


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", ""))


# -- from the second product to the first ----------------------------------------------------------


def _second_product(node: Node) -> tuple[Node, _Operand, Permutation] | None:
    """Weights, values (…, keys, size), and how to permute (…, queries, size) to the result."""
    match _kind(node):
        case "product":
            weights, value = _arguments(node, "input", "other")
            if isinstance(weights, Node) and isinstance(value, Node):
                return weights, _Operand(value), None
        case "einsum":
            letters = letters_of(node)
            if letters is None:
                return None
            for (weights, w), (value, v) in (letters.inputs, letters.inputs[::-1]):
                *outer, row, column = w
                size = _only(set(v) - set(w))
                if size and len(v) == len(w) and column not in letters.result:
                    value_order = _order(v, [*outer, column, size])
                    order = _order([*outer, row, size], letters.result)
                    if value_order is not None and order is not None:
                        return weights, _Operand(value, value_order), order
    return None


def _first_product(node: Node) -> tuple[_Operand, _Operand] | None:
    """Queries (…, queries, size) and keys (…, keys, size)."""
    match _kind(node):
        case "product":
            query, other = _arguments(node, "input", "other")
        case "baddbmm":
            query, other = _arguments(node, "batch1", "batch2")
        case "einsum":
            letters = letters_of(node)
            return None if letters is None else _product_of_letters(letters)
        case _:
            return None
    if not isinstance(query, Node) or not isinstance(other, Node) or not _is_tensor(other):
        return None
    inner = _transposed(other)
    if inner is not None:
        return _Operand(query), _Operand(inner)
    rank = _tensor(other).dim()
    return _Operand(query), _Operand(other, (*range(rank - 2), rank - 1, rank - 2))


def _product_of_letters(letters: Letters) -> tuple[_Operand, _Operand] | None:
    *outer, row, column = letters.result
    for (query, q), (key, k) in (letters.inputs, letters.inputs[::-1]):
        size = _only(set(q) - set(letters.result))
        if size and len(q) == len(k) == len(letters.result):
            orders = _order(q, [*outer, row, size]), _order(k, [*outer, column, size])
            if orders[0] is not None and orders[1] is not None:
                return _Operand(query, orders[0]), _Operand(key, orders[1])
    return None


def _only(letters: set[str]) -> str:
    """The letter of a set of one, else ""."""
    return letters.pop() if len(letters) == 1 else ""


def _order(have: Any, want: Any) -> tuple[int, ...] | None:
    """The permutation that takes letters to other letters."""
    if sorted(have) != sorted(want):
        return None
    return tuple(list(have).index(letter) for letter in want)


def _weights(node: Node, found: _Found) -> Iterator[_Found]:
    """What ends in a first product, from weights on."""
    if not _is_link(node, found):
        return
    match _kind(node):
        case "softmax":
            scores, dim = _arguments(node, "input", "dim")
            if isinstance(scores, Node) and _is_tensor(scores) and dim in (-1, _rank(node) - 1):
                yield from _scores(scores, found.followed(node))
        case "dropout" if found.dropout == 0.0:
            weights, p, training = _arguments(node, "input", "p", "training")
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
    rank = _rank(node)
    match _kind(node):
        case "product" | "einsum":
            yield found.followed(node)
        case "baddbmm":
            term, beta, alpha = _arguments(node, "input", "beta", "alpha")
            beta, alpha = 1 if beta is None else beta, 1 if alpha is None else alpha
            if _is_number(beta) and _is_number(alpha) and _fits(term, node):
                added = () if beta == 0 else (("add", rank, term, beta),)
                yield found.followed(node, *added, ("multiply", rank, alpha))
        case "multiply":
            for one, other in _either(node, "input", "other"):
                if _is_factor(other):
                    yield from _scores(one, found.followed(node, ("multiply", rank, other)))
        case "divide":
            scores, divisor, rounding = _arguments(node, "input", "other", "rounding_mode")
            if isinstance(scores, Node) and _is_factor(divisor) and rounding is None:
                yield from _scores(scores, found.followed(node, ("divide", rank, divisor)))
        case "add" | "subtract" as kind:
            sign = 1 if kind == "add" else -1
            ways = list(_either(node, "input", "other"))
            (alpha,) = _arguments(node, "alpha")
            for one, other in ways if kind == "add" else ways[:1]:
                if alpha in (None, 1) and _fits(other, node):
                    step = ("add", rank, other, sign)
                    yield from _scores(one, found.followed(node, step))
        case "fill":
            scores, mask, value = _arguments(node, "input", "mask", "value")
            if isinstance(scores, Node) and _is_mask(mask, node) and _fits(value, node):
                yield from _scores(scores, found.followed(node, ("fill", rank, mask, value)))
        case "choose" | "choose_self":
            yield from _choices(node, found)
        case "cast" | "view":
            inner = _through(node, found)
            if inner is not None:
                yield from _scores(*inner)


def _choices(node: Node, found: _Found) -> Iterator[_Found]:
    """``torch.where(condition, scores, value)`` and ``torch.where(condition, value, scores)``."""
    condition, kept, other = _arguments(node, "condition", "input", "other")
    if not _is_mask(condition, node):
        return
    if isinstance(kept, Node) and _is_tensor(kept) and _fits(other, node):
        step = ("choose", _rank(node), condition, other)
        yield from _scores(kept, found.followed(node, step))
    if isinstance(other, Node) and _is_tensor(other) and _fits(kept, node):
        step = ("fill", _rank(node), condition, kept)
        yield from _scores(other, found.followed(node, step))


def _through(node: Node, found: _Found) -> tuple[Node, _Found] | None:
    """What a cast, or a view that joins or parts batch and heads, is of."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, Node) or not _is_tensor(inner) or _tensor(inner).dtype not in _FLOATS:
        return None
    if _kind(node) == "view" and _tensor(inner).dtype != _tensor(node).dtype:
        return None
    if _tensor(inner).device != _tensor(node).device:
        return None
    before, after = _tensor(inner).shape, _tensor(node).shape
    found = found.followed(node)
    if len(before) == len(after):
        return (inner, found) if _same(before, after) else None
    if {len(before), len(after)} != {3, 4} or not _same(before[-2:], after[-2:]):
        return None
    if len(after) == 4 and _kind(node) == "view":
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
    if not _is_tensor(node) or _tensor(node).dtype not in _FLOATS:
        return False
    after = found.chain[-1]
    keeps_sizes = _kind(after) not in ("product", "einsum", "view")
    if keeps_sizes and not _same(_tensor(node).shape, _tensor(after).shape):
        return False
    return all(user is after or _reads_metadata(user, node) for user in node.users)


def _reads_metadata(user: Node, node: Node) -> bool:
    if user.target == "type_as":
        return user.args[0] is not node
    return user.target in _METADATA


# -- keys and values of grouped heads --------------------------------------------------------------


def _grouped(key: _Operand, value: _Operand) -> tuple[_Operand, _Operand]:
    """Keys and values before each head of theirs is repeated, if both are."""
    inner = tuple(_repeated(o.node) if o.order is None else None for o in (key, value))
    if inner[0] is None or inner[1] is None:
        return key, value
    if not _same(_tensor(inner[0]).shape[:2], _tensor(inner[1]).shape[:2]):
        return key, value
    return _Operand(inner[0]), _Operand(inner[1])


def _repeated(node: Node) -> Node | None:
    """x where a node is x[:, :, None].expand(…, n, …).reshape(…) or x.repeat_interleave(n, 1)."""
    if _name_of_call(node) == "repeat_interleave":
        inner, repeats, *rest = node.args
        dim = rest[0] if rest else node.kwargs.get("dim")
        if isinstance(inner, Node) and isinstance(repeats, int) and _rank(inner) == 4 and dim == 1:
            return inner
        return None
    if _name_of_call(node) != "reshape" or not isinstance(node.args[0], Node):
        return None
    wide = node.args[0]
    if _name_of_call(wide) != "expand" or not isinstance(wide.args[0], Node):
        return None
    single = wide.args[0]
    inner = single.args[0] if single.args else None
    if not isinstance(inner, Node) or not _is_tensor(inner) or _rank(inner) != 4:
        return None
    if not _is_new_dimension(single):
        return None
    shape = _tensor(inner).shape
    parted = _tensor(wide).shape
    if len(parted) != 5 or not _same(_tensor(single).shape, (*shape[:2], 1, *shape[2:])):
        return None
    if not _same(_tensor(node).shape, (parted[0], parted[1] * parted[2], *parted[3:])):
        return None
    return inner


def _is_new_dimension(node: Node) -> bool:
    if node.target is operator.getitem:
        items = node.args[1]
        every = slice(None, None, None)
        return isinstance(items, tuple) and all(i is None or i == every for i in items)
    return _name_of_call(node) == "unsqueeze"


def _transposed(node: Node) -> Node | None:
    """What a node is the transpose of, in its last two dimensions."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, Node) or not _is_tensor(inner):
        return None
    rank = _rank(inner)
    last = {rank - 1, rank - 2}
    match _name_of_call(node), node.args[1:]:
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


# -- questions about nodes -------------------------------------------------------------------------


def _is_supported(
    node: Node, last: Node, first: tuple[_Operand, _Operand], value: _Operand, found: _Found
) -> bool:
    """Whether the operator has kernels for this, and nothing happens meanwhile."""
    operands = [operand.node for operand in (*first, value)]
    if not all(_is_tensor(o) and _tensor(o).dtype in _FLOATS for o in operands):
        return False
    ranks = [_rank(o) for o in operands]
    if not ranks[0] == ranks[1] == _rank(last) or ranks[2] != _rank(node):
        return False
    if any(not 2 <= rank <= 4 for rank in ranks) or not _has_known_heads(operands, found):
        return False
    inside = set(found.chain)
    between = last.next
    while between is not node:
        if between not in inside and has_effect(between, random=found.dropout > 0.0):
            return False
        between = between.next
    sizes = [_tensor(o.node).shape[-1 if o.order is None else o.order[-1]] for o in (*first, value)]
    return all(0 < int(size) <= MAX_HEAD_SIZE for size in sizes)


def _has_known_heads(operands: list[Node], found: _Found) -> bool:
    """Whether where batch and heads are one dimension, they are taken apart in one way only."""
    if not found.sizes:
        return _rank(operands[0]) == _rank(operands[2])
    if not all(_same(found.sizes[0], sizes) for sizes in found.sizes[1:]):
        return False
    joined = [_tensor(o).shape[0] for o in operands if _rank(o) == 3]
    if any(_rank(o) == 2 for o in operands) or not all(_same(joined[:1], [n]) for n in joined):
        return False
    if found.leading is None:  # the first product has them apart
        found.leading = ()
    return True


def _kind(node: Node) -> str | None:
    return _KIND.get(node.target) if node.op in ("call_function", "call_method") else None


def _name_of_call(node: Node) -> str:
    return node.target if isinstance(node.target, str) else _name(node.target)


def _arguments(node: Node, *names: str) -> list[Any]:
    """Arguments by name; None for what is not given."""
    found = dict(zip(_PARAMETERS[_KIND[node.target]], node.args, strict=False))
    found |= {_ALIASES.get(name, name): value for name, value in node.kwargs.items()}
    return [found.get(name) for name in names]


def _either(node: Node, *names: str) -> Iterator[tuple[Node, Any]]:
    """A node among two arguments, and the other argument: both ways."""
    one, other = _arguments(node, *names)
    for scores, rest in ((one, other), (other, one)):
        if isinstance(scores, Node) and _is_tensor(scores) and rest is not scores:
            yield scores, rest


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(_example(node), Tensor)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _tensor(node: Node) -> Tensor:
    found = _example(node)
    assert isinstance(found, Tensor)
    return found


def _rank(node: Node) -> int:
    return _tensor(node).dim()


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(_example(value), torch.SymInt | torch.SymFloat | int | float)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_factor(value: Any) -> bool:
    """A number, or a tensor of one element."""
    if _is_tensor(value):
        found = _tensor(value)
        return not found.is_complex() and statically_known_true(found.numel() == 1)
    return _is_number(value)


def _fits(value: Any, scores: Node) -> bool:
    """Whether a number or tensor can be broadcast to scores, not they to it."""
    if not _is_tensor(value):
        return _is_number(value)
    found, shape = _tensor(value), _tensor(scores).shape
    if found.is_complex() or found.dtype == torch.float64 or found.dim() > len(shape):
        return False
    sizes = zip(reversed(found.shape), reversed(shape), strict=False)
    return all(statically_known_true(a == 1) or statically_known_true(a == b) for a, b in sizes)


def _is_mask(value: Any, scores: Node) -> bool:
    return _is_tensor(value) and _tensor(value).dtype == torch.bool and _fits(value, scores)
