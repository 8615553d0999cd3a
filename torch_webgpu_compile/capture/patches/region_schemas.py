"""What PyTorch does for every call of a repeated region, done once for each region.

A region is a function under ``torch.compiler.nested_compile_region``: ``invoke_subgraph`` in the
graph.

Patched: ``gen_schema`` of ``torch.ops.higher_order.invoke_subgraph``, which then makes a region's
schema at its first call.

Why: ``gen_schema`` traces the region to see which of its arguments it changes. The autograd rule of
every higher-order operator asks for it at each call (``HigherOrderOperator.py_autograd_impl``;
PyTorch 2.11: the functional rule, too): half of the time that AOTAutograd needs for a training step
of 24 equal blocks.

Until: PyTorch keeps the schemas. The key here is that by which its functional rule does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...patches import replaced


def install() -> AbstractContextManager[None]:
    """Keeps the schemas as long as the context."""
    return replaced(
        __name__, lambda: type(torch.ops.higher_order.invoke_subgraph), "gen_schema", _once
    )


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[object, ...], tuple[object, Any]] = {}

    def gen_schema(self: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, *map(type, operands))
        if key not in known:
            # With the graph: its id is not another's as long as it lives.
            known[key] = subgraph, original(self, subgraph, identifier, *operands)
        return known[key][1]

    return gen_schema
