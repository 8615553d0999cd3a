"""A second derivative through a compiled graph, which AOTAutograd refuses: eager PyTorch gives it.

``backward(create_graph=True)`` runs the compiled backward graph like any other, but what it gives
has no derivative. So a hook replaces it, then only, by what autograd gives for Dynamo's graph run
as it is on the same arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...fallbacks import warn_once
from ...torch_private import (
    _FrameAction,
    _FrameExecStrategy,
    dynamo_config,
    set_code_exec_strategy,
    tree_leaves,
)

_NODE = "CompiledFunctionBackward"  # of AOTAutograd's autograd function
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def differentiable_twice(compiled: Callable[..., Any], module: GraphModule) -> Callable[..., Any]:
    """``compiled`` with results that have second derivatives.

    Args:
        compiled: a function of a graph's arguments, made by AOTAutograd.
        module: the graph. It changes none of its arguments, and draws no random numbers.
    """

    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        if dynamo_config.compiled_autograd:  # it compiles hooks, and has derivatives itself
            return results
        for result in results:
            node = result.grad_fn if isinstance(result, Tensor) else None
            if node is not None and node.name() == _NODE:
                places = [_place(other, node) for other in results]
                node.register_hook(_Hook(module, arguments, places))
                break
        return results

    return call


def _place(result: Any, node: Any) -> int | None:
    """Which output of a node a result is."""
    return result.output_nr if isinstance(result, Tensor) and result.grad_fn is node else None


class _Hook:
    """What runs after the compiled backward graph.

    It keeps the arguments until the first backward pass; after that they may be freed.
    """

    def __init__(
        self,
        module: GraphModule,
        arguments: Sequence[Any],
        places: Sequence[int | None],
    ) -> None:
        self._module = module
        self._versions = [a._version for a in arguments if isinstance(a, Tensor)]
        self._places = places
        self._arguments: list[Any] = list(arguments)

    def __call__(
        self, gradients: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            self._arguments = [
                weakref.ref(a) if isinstance(a, Tensor) else a for a in self._arguments
            ]
            return None
        arguments = [a() if isinstance(a, weakref.ref) else a for a in self._arguments]
        return self._again(arguments, gradients, given)

    def _again(
        self,
        arguments: Sequence[Any],
        gradients: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients with derivatives; None leaves AOTAutograd's, and its error."""
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        # Freed, or changed since: only AOTAutograd's own gradients are right, and it says so.
        if [tensor._version for tensor in tensors] != self._versions:
            return None
        if len(tensors) != len(gradients):
            return None
        warn_once(
            "backward(create_graph=True)",
            "runs the compiled function again in eager PyTorch: AOTAutograd has no second "
            "derivatives of compiled graphs",
        )
        results = tree_leaves(self._module(*arguments))
        outputs, weights = [], []
        for result, place in zip(results, self._places, strict=True):
            weight = None if place is None else given[place]
            if weight is not None and result.requires_grad:
                outputs.append(result)
                weights.append(weight)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        made = iter(
            torch.autograd.grad(outputs, wanted, weights, create_graph=True, allow_unused=True)
        )
        return tuple(next(made) if tensor.requires_grad else None for tensor in tensors)


# Where a compiled function asks for gradients, Dynamo looks at every frame that starts meanwhile.
# What it would compile of the hook has hooks of its own, and so on.
set_code_exec_strategy(_Hook.__call__.__code__, _SKIP)
