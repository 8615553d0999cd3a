"""`AutogradFunction`: what AOTAutograd has around a forward and a backward graph, as data.

Tracing a graph with its gradients and dividing it takes AOTAutograd seconds. What comes of it are
two graphs, which this package compiles and stores, and an autograd function that calls them: which
of its results are views or not differentiable, what it saves, which gradients it takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import unwrap
from typing import Any

import torch

from ...captured import saved_tensors_have_hooks
from ...torch_private import (
    AOTDispatchAutograd,
    AOTDispatchAutogradCompileSpec,
    CachedAutogradLazyBackwardCompileInfo,
    TracingContext,
    dynamo_config,
    functorch_config,
)
from .wrappers import BoxedFunction

_NOT_IN_HASH = (  # of the settings of AOTAutograd, as they may be functions
    "joint_custom_pass",
    "activation_memory_budget_runtime_estimator",
    "activation_memory_budget_solver",
)
_OF_COMPILER = ("fw_compiler", "bw_compiler", "inference_compiler", "partition_fn")


@dataclass(frozen=True)
class AutogradFunction:
    """What ``AOTDispatchAutograd.post_compile`` makes a function of, but for compiled graphs.

    Attributes:
        given: its arguments by name; None for graphs and what compiles them.
        may_run_again: whether second derivatives are to be had by running Dynamo's graph again.
    """

    given: Mapping[str, Any]
    may_run_again: bool

    @staticmethod
    def of(
        given: Mapping[str, Any], forward: BoxedFunction, may_run_again: bool
    ) -> AutogradFunction | None:
        """As data; None if calls need more than is in ``given``.

        That is a forward graph that is called as it is, without tokens of effects, parts of
        subclasses, or states of generators among its arguments.
        """
        metadata = given["fw_metadata"]
        needs_more = (
            unwrap(given["compiled_fw_func"]) is not forward
            or given["compiled_bw_func"] is not None
            or given["maybe_subclass_meta"] is not None
            or given["backward_state_indices"]
            or metadata.tokens
            or metadata.num_backward_tokens
            or metadata.is_rng_op_functionalized
            or metadata.num_graphsafe_rng_states
        )
        if needs_more:
            return None
        config = replace(
            given["aot_config"],
            **dict.fromkeys(_OF_COMPILER),
            decompositions=None,
            aot_autograd_arg_pos_to_source=None,
            cache_info=None,
        )
        others = dict.fromkeys(_around(None, None).keys() & given.keys())
        return AutogradFunction({**given, **others, "aot_config": config}, may_run_again)

    @property
    def result_count(self) -> int:
        """How many results of the forward graph are not for the backward graph only."""
        return int(self.given["fw_metadata"].num_forward)

    def around(self, forward: BoxedFunction, backward: BoxedFunction) -> Callable[..., Any]:
        """The function of the arguments of Dynamo's graph.

        Args:
            forward, backward: the compiled graphs.
        """
        graphs = _around(forward, backward)
        given = {**self.given, **{name: graphs[name] for name in graphs if name in self.given}}
        if AOTDispatchAutogradCompileSpec is None:
            made = AOTDispatchAutograd.post_compile(**given)
        else:
            made = AOTDispatchAutograd.post_compile(AOTDispatchAutogradCompileSpec(**given))

        def call(*arguments: Any) -> Any:
            return made(list(arguments))

        return call


def settings() -> str | None:
    """What decides, besides a graph of Dynamo's, what AOTAutograd makes of it with gradients.

    None where its function has to be made by tracing: where compiled autograd wants the graph of
    the gradients, hooks read what is saved, functions of the user's divide graphs, or DDP counts
    the backward graphs of its buckets.
    """
    buckets = getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None)
    if dynamo_config.compiled_autograd or saved_tensors_have_hooks() or buckets is not None:
        return None
    left_out = [getattr(functorch_config, name, None) for name in _NOT_IN_HASH]
    if any(map(callable, left_out)):
        return None
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{functorch_config.get_hash().hex()} {left_out} {is_deterministic}"


def _around(forward: BoxedFunction | None, backward: BoxedFunction | None) -> dict[str, Any]:
    """Arguments of ``post_compile`` that are not data."""
    return {
        "compiled_fw_func": forward,
        "compiled_bw_func": backward,
        "lazy_backward_info": CachedAutogradLazyBackwardCompileInfo(_no_graph),
        "bw_compiler": None,
        "try_save_cache_entry": None,
    }


def _no_graph() -> Any:
    raise RuntimeError(
        "compiled autograd was turned on after this function was compiled, and the graph of its "
        "gradients was not traced as a compiled one was in the cache: turn it on before the "
        "function is first called, or set TORCH_WEBGPU_CACHE=0"
    )
