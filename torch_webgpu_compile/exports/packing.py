"""`Packing`: weights of linear layers and embeddings, in four or eight bits of an element.

A call is recorded as it is. In its graph a weight then becomes state in a format of
`torch_ops.gguf`, and each use dequantizes it, so that a kernel does where it reads it. What modules
hold stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from ..bundle.manifest import PackedState, Weights
from ..errors import UnsupportedOp
from ..torch_ops import gguf, gguf_blocks
from ..torch_private import HigherOrderOperator, tree_map_only
from .names import Key, Named, key_of
from .recorded import Recorded

aten = torch.ops.aten

FORMATS: Mapping[str, tuple[str, ...]] = {"int8": ("Q8_0",), "int4": ("Q4_1", "Q4_K")}
"""Those of GGUF that a weight may have, of which it gets the one of the fewest bytes.

Of four bits, all have a minimum for each group of 32. Of normally distributed weights they lose
7.5 % (as a norm of the matrix), of Student's with five degrees 8.7 %, with 4.6 bits of an element
in Q4_K. Symmetric levels with a scale for 32 (Q4_0, 4.5 bits) lose 8.5 and 10.6 %, groups of 64 or
128 with minimums more than these.
"""

_LARGEST_ERROR = 0.3
"""More than any group loses whose scale a half float is: 4-bit levels are 1/15 of a range apart."""

_ROWS = 256  # of which the error is computed at a time

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_ON_THE_WAY = (
    *(aten.t.default, aten._to_copy.default),
    *(aten.expand.default, aten.view.default, aten._unsafe_view.default),
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem),
)
"""What may be between a weight and a product: attention divides its weight for other keys."""


@dataclass(frozen=True)
class _Packed:
    """A weight in a format.

    Attributes:
        words: int32 (rows, words of one).
        dtype, nbytes: as it was.
        square: of its norm.
    """

    words: Tensor
    state: PackedState
    dtype: torch.dtype
    nbytes: int
    square: float

    @property
    def form(self) -> gguf.Format:
        return gguf.FORMATS[self.state.blocks]

    def whole(self, words: Tensor) -> Tensor:
        """Rows of it, (rows, columns)."""
        return _dequantized(words, self.form, self.state.sizes[1]).to(self.dtype)

    def rows(self, words: Tensor, indices: Tensor) -> Tensor:
        """``embedding``: only the rows that are read are dequantized."""
        columns = self.state.sizes[1]
        given = indices, words, self.form.number, self.form.filled(columns), torch.float32
        return gguf.embedding_of_parts(*given)[..., :columns].to(self.dtype)


class Packing:
    """Packs the weights of the entries of a bundle.

    Args:
        format: of `FORMATS`.
    """

    def __init__(self, format: str) -> None:
        self._format = format
        self._found: dict[Key, Tensor] = {}
        self._packed: dict[Key, _Packed] = {}

    def find(self, recorded: Recorded) -> Recorded:
        """Notes the weights of a call, which is returned as it is."""
        for node, state in _states(recorded):
            if state.dim() == 2 and state.is_floating_point() and _is_weight(node):
                self._found[key_of(state)] = state
        return recorded

    def pack(self, changed: Collection[Key], known: Mapping[Key, Named]) -> None:
        """Packs what was found, but for what entries change, and what would not be smaller.

        Raises:
            UnsupportedOp: nothing is left; it names what was found.
        """
        reasons = []
        for key, weight in self._found.items():
            made = None if key in changed else _packed(weight, FORMATS[self._format])
            if made is not None:
                self._packed[key] = made
                continue
            kept = "it would not be smaller, or half floats cannot be its scales"
            why = "an entry changes it" if key in changed else kept
            name = known[key].name if key in known else f"one of {tuple(weight.shape)}"
            reasons.append(f"{name}: {why}")
        if not self._packed:
            raise UnsupportedOp(
                f"export with weights={self._format!r}",
                "no weight of a linear layer or an embedding can be packed "
                f"({'; '.join(reasons[:4]) or 'the entries have none'})",
                "leave weights out, or export entries that do not train them",
            )

    def applied(self, recorded: Recorded) -> Recorded:
        """A call of which the weights that were packed are state as they are packed."""
        states = dict(recorded.states)
        found: dict[Node, _Packed] = {}
        for node, state in _states(recorded):
            packed = self._packed.get(key_of(state))
            if packed is not None:
                found[node] = packed
                states[str(node.target)] = packed.words
                for user in list(node.users):
                    _dequantize(node, user, packed)

        def returned(node: Node) -> Node:
            """A weight that is a result, or becomes the value of other state."""
            packed = found.get(node)
            return node if packed is None else node.graph.call_function(packed.whole, (node,))

        ends = tree_map_only(Node, returned, (recorded.results, recorded.replaced))
        return replace(recorded, states=states, results=ends[0], replaced=ends[1])

    def named(self, known: Mapping[Key, Named]) -> dict[Key, Named]:
        """The names of tensors, and of packed weights: those of what they are made of."""
        own = {
            key_of(packed.words): replace(known[key], tensor=packed.words)
            for key, packed in self._packed.items()
            if key in known
        }
        return {**known, **own}

    def described(self, names: Mapping[Key, str]) -> Weights:
        """What a manifest says of them; ``names`` are those of states."""
        packed = [each for each in self._packed.values() if key_of(each.words) in names]
        lost = sum(each.state.error**2 * each.square for each in packed)
        return Weights(
            self._format,
            gguf_blocks.GROUP,
            sum(each.words.nbytes for each in packed),
            sum(each.nbytes for each in packed),
            _relative(lost, sum(each.square for each in packed)),
            {names[key_of(each.words)]: each.state for each in packed},
        )


def _states(recorded: Recorded) -> list[tuple[Node, Tensor]]:
    nodes = recorded.module.graph.find_nodes(op="get_attr")
    return [
        (node, recorded.states[str(node.target)])
        for node in nodes
        if str(node.target) in recorded.states
    ]


def _is_weight(node: Node) -> bool:
    """Whether a state is used as ``linear`` and ``embedding`` use their weights.

    Not where a loop or a branch takes it, which would have all of it dequantized in memory.
    """
    if any(isinstance(user.target, HigherOrderOperator) for user in node.users):
        return False
    return _is_multiplied(node) or any(
        user.target is aten.embedding.default and user.args[0] is node for user in node.users
    )


def _is_multiplied(node: Node, is_transposed: bool = False) -> bool:
    """Whether a product has a weight transposed on its right, in its own dtype or autocast's."""
    for user in node.users:
        turned = is_transposed or user.target is aten.t.default
        if user.target in _ON_THE_WAY and _is_multiplied(user, turned):
            return True
        if user.target in _PRODUCTS and is_transposed and user.args[-1] is node:
            return True
    return False


def _dequantize(node: Node, user: Node, packed: _Packed) -> None:
    """Gives a user of a weight what it needs of it: each its own, which its kernel computes."""
    if user.target is aten.embedding.default and user.args[1] is not node:
        user.target, user.args, user.kwargs = packed.rows, (node, user.args[1]), {}
        return
    with node.graph.inserting_before(user):
        whole = node.graph.call_function(packed.whole, (node,))
    whole.meta["stack_trace"] = user.meta.get("stack_trace")
    user.replace_input_with(node, whole)


def _packed(weight: Tensor, formats: Sequence[str]) -> _Packed | None:
    """A weight in the smallest of these formats; None where it had better stay as it is."""
    device, weight = weight.device, weight.detach().cpu()
    rows, columns = weight.shape
    name = min(formats, key=lambda name: gguf.FORMATS[name].row_words(columns))
    if 4 * rows * gguf.FORMATS[name].row_words(columns) >= weight.nbytes:
        return None
    words = gguf_blocks.quantized(weight, name)
    square = lost = 0.0
    for part, packed in zip(torch.split(weight, _ROWS), torch.split(words, _ROWS), strict=True):
        whole = _dequantized(packed, gguf.FORMATS[name], columns).to(weight.dtype)
        left = part.double() - whole
        square += float(part.double().square().sum())
        lost += float(left.square().sum())
    error = _relative(lost, square)
    if not error < _LARGEST_ERROR:
        return None
    state = PackedState(name, (rows, columns), error)
    return _Packed(words.to(device), state, weight.dtype, weight.nbytes, square)


def _dequantized(words: Tensor, form: gguf.Format, columns: int) -> Tensor:
    """float32 (rows, columns)."""
    return gguf.dequantized(words, form.number, form.filled(columns))[..., :columns]


def _relative(lost: float, square: float) -> float:
    return float((lost / square) ** 0.5) if square else 0.0
