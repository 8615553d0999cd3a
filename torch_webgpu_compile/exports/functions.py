"""The functions that a recorded call gives to higher-order operators: plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from ..capture.control_flow.rules import Function, traced_alone
from ..capture.tracing import Rules, Traced
from ..torch_private import FakeTensorMode, tree_flatten, tree_unflatten


class PythonFunctions:
    """See `rules.Functions`.

    Args:
        mode: of the call's tensors.
        lift: gives the fake tensor that stands for a real one.
        rules: as for `tracing.trace`.
    """

    def __init__(
        self, mode: FakeTensorMode, lift: Callable[[Tensor], Tensor], rules: Rules
    ) -> None:
        self._mode, self._lift, self._rules = mode, lift, rules
        self._structure = tree_flatten(())[1]

    def evaluate(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function in the trace that is going on."""
        return self._flat(function(*arguments))

    def traced(self, function: Function, arguments: Sequence[Any]) -> Traced:
        """A function's own graph; tensors that it has from elsewhere are inputs."""
        return traced_alone(
            lambda *given: tuple(self._flat(function(*given))),
            arguments,
            self._mode,
            self._rules,
            self._lift,
        )

    def nested(self, results: Sequence[Any]) -> Any:
        """Results as the function that was called last has them."""
        return tree_unflatten(results, self._structure)

    def _flat(self, results: Any) -> list[Any]:
        leaves, self._structure = tree_flatten(results)
        return leaves

    def nodes(self, function: Function, arguments: Sequence[Any]) -> list[Node]:
        """The calls in a function."""
        graph = self.traced(function, arguments).module.graph
        return [node for node in graph.nodes if node.op == "call_function"]
