"""Whether channels are neighbours in memory, where depthwise convolutions load and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..symbolic.sizes import ONE, Expr, Symbol, linearize, typical
from .access import address_of, load_index, step_of
from .buffers import Buffer
from .depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from .graph import Member
from .scalar import Scalar, loads_of
from .spaces import numbered


def channels_are_neighbours(
    body: Scalar,
    node: DepthwiseConvolution | DepthwiseWeightGradient,
    buffers: Mapping[str, Buffer],
) -> bool:
    """Whether channels, not elements of a line, are neighbours in an operand's largest buffer."""
    loads = [load for load in loads_of(body) if load_index(load) is not None]
    if not loads:
        return False
    largest = max(loads, key=lambda load: typical(buffers[load.buffer].numel))
    address = address_of(largest, buffers[largest.buffer].strides)
    if isinstance(node, DepthwiseConvolution):
        channel, last = numbered("b", node.batch)[1], numbered("n", node.image_sizes)[-1]
    else:
        (channel,) = numbered("c", (node.channels,))
        image = body is node.image
        sizes = node.image_sizes if image else node.positions
        last = numbered("n" if image else "m", sizes)[-1]
    return _is_nearer(address, channel, last)


def gradient_has_neighbours(node: DepthwiseWeightGradient, buffers: Mapping[str, Buffer]) -> bool:
    """Whether channels are neighbours in memory in either operand of a weight's gradient."""
    return any(channels_are_neighbours(body, node, buffers) for body in (node.image, node.moved))


def stores_neighbours(
    members: Sequence[Member], node: DepthwiseConvolution, buffers: Mapping[str, Buffer]
) -> bool:
    """Whether channels, not elements of a line, are neighbours in a result that is stored."""
    channel, last = numbered("b", node.batch)[1], numbered("m", node.positions)[-1]
    return any(
        _is_nearer(linearize(m.index, buffers[m.output].strides), channel, last)
        for m in members
        if m.store
    )


def _is_nearer(address: Expr, channel: Symbol, last: Symbol) -> bool:
    """Whether neighbouring channels are neighbours in memory, and elements of a line are not.

    Several channels may share an element.
    """
    if channel.extent is ONE or last.extent is ONE:
        return channel.extent is not ONE and step_of(address, channel) == 1
    return step_of(address, channel) <= 1 < step_of(address, last)
