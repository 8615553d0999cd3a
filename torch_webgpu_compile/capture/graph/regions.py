"""What PyTorch does for every call of a repeated region, done once for each region.

A region is a function under ``torch.compiler.nested_compile_region``: ``invoke_subgraph`` in the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def schemas_made_once() -> Iterator[None]:
    """A region's schema is made at its first call, as long as the context.

    ``gen_schema`` traces the region to see which of its arguments it changes. The autograd rule of
    every higher-order operator asks for it at each call (``HigherOrderOperator.py_autograd_impl``;
    PyTorch 2.11: the functional rule, too): half of the time that AOTAutograd needs for a training
    step of 24 equal blocks. The key is that by which PyTorch's functional rule keeps schemas.
    """
    operator = type(torch.ops.higher_order.invoke_subgraph)
    original: Callable[..., Any] = operator.gen_schema
    known: dict[tuple[object, ...], tuple[object, Any]] = {}

    def gen_schema(self: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, *map(type, operands))
        if key not in known:
            # With the graph: its id is not another's as long as it lives.
            known[key] = subgraph, original(self, subgraph, identifier, *operands)
        return known[key][1]

    with patch.object(operator, "gen_schema", gen_schema):
        yield
