"""`StepRecorder`: records what plans cannot hold, as nodes that divide a graph.

These are numbers that Python reads from tensors, and loops and branches that are no kernels; see
`control_flow.parts`. The functions of loops are graphs of their own, which take what they have from
elsewhere as arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..capture.control_flow.numbers import expressions_in
from ..capture.control_flow.rules import RULES, Function, traced_alone
from ..capture.control_flow.scans import NotInlined
from ..capture.tracing import Recorder, Rules, Traced, clean_dispatch, functional, inner
from ..errors import UnsupportedOp
from ..node_text import LIBRARIES
from ..torch_ops.assertions import ASSERTIONS
from ..torch_private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    _is_functional_tensor,
    _to_functional_tensor,
    free_unbacked_symbols,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from .inputs import fake_like
from .sized_by_data import SIZED_BY_DATA

aten = torch.ops.aten
higher_order = torch.ops.higher_order

READ = aten._local_scalar_dense.default
CHECK = aten._assert_scalar.default

Lift = Callable[[Tensor], Tensor]


def is_own(file: str) -> bool:
    """Whether a file is PyTorch's, this package's, or none."""
    return file.startswith((*LIBRARIES, "<"))


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]
    """See the module.

    Args:
        rules: as for `tracing.trace`.
        steps: of the capture.
        lift: as for `tracing.trace`.
    """

    supports_higher_order_operators = True

    def __init__(self, rules: Rules, steps: Steps, lift: Lift | None = None) -> None:
        super().__init__(rules, lift)
        self.steps = steps
        self._is_sure = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.end()
        if isinstance(func, HigherOrderOperator):
            return self.steps.higher_order(self, func, args, dict(kwargs))
        if func in (READ, aten.item.default):
            return self._read(self.lifted(args[0]))
        if func is CHECK:
            self._check_node(args)
            return None
        rule = SIZED_BY_DATA.get(func)
        if rule is not None:
            made = self._sized(rule, args, kwargs)
            if made is not NotImplemented:
                return made
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _sized(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a rule gives, whose own checks hold."""
        self._is_sure = True
        try:
            with self:
                return rule(*args, **kwargs)
        finally:
            self._is_sure = False
            self.steps.new_checks()

    def finish(
        self, results: Any, mutated: tuple[int, ...] = (), resized: tuple[int, ...] = ()
    ) -> Traced:
        """See `Recorder`."""
        self.end()
        return super().finish(results, mutated, resized)

    def end(self) -> None:
        """Records what was said of numbers since the last time (``torch._check``)."""
        for check in () if self._is_sure else self.steps.new_checks():
            self._check_node(check)

    def _check_node(self, check: Sequence[Any]) -> Node:
        node = self.graph.call_function(CHECK)
        node.args = tuple(check)  # FX warns of symbols when it is given these
        return node

    def lifted(self, value: Any) -> Any:
        """A value with tensors from elsewhere as inputs."""
        return value if self._lift is None else tree_map_only(Tensor, self._lifted, value)

    def _read(self, tensor: Tensor) -> Any:
        number = READ(tensor)
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._read_node(tensor, number)
        return number

    def _read_node(self, tensor: Tensor, number: Any) -> None:
        self.steps.read.update(number.node._expr.free_symbols)
        node = self.graph.call_function(READ, (self.node_of(tensor),))
        node.meta["val"] = number
        if self.stack_trace is not None:
            node.meta["stack_trace"] = self.stack_trace

    def step(
        self, func: HigherOrderOperator, args: Sequence[Any], results: Sequence[FakeTensor]
    ) -> None:
        """Makes the node of a loop or a branch, whose functions are graphs."""

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.node_of(leaf)
            if not isinstance(leaf, GraphModule):
                return leaf
            name = f"function{len(self.constants)}"
            self.attribute(name, leaf)
            return self.graph.get_attr(name)

        node = self.graph.call_function(func, tree_map(argument, tuple(args)))
        node.meta["val"] = tuple(results)
        if self.stack_trace is not None:
            node.meta["stack_trace"] = self.stack_trace
        self._know_items(results, node)

    def call_again(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The same on other tensors; numbers that are read keep their names."""
        if node.target is READ:
            self._read_node(inner(args[0]), node.meta["val"])
            return node.meta["val"]
        if node.target is CHECK:
            return self._check_node(args)
        if not isinstance(node.target, HigherOrderOperator):
            return super().call_again(node, args, kwargs)
        is_functional = any(
            _is_functional_tensor(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
        )
        results = node.meta["val"]
        self.step(node.target, tree_map_only(Tensor, inner, args), results)
        return tuple(map(_to_functional_tensor, results)) if is_functional else results


class _Refused(torch.autograd.Function):
    """Results without gradients, of which nobody knows."""

    @staticmethod
    def forward(ctx: Any, name: str, results: Sequence[Tensor], *_: Any) -> Any:
        ctx.name = name
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedOp(
            ctx.name,
            "a bundle has no gradients through a loop or a branch that is no kernel",
            "train without it, or choose with torch.where",
        )


class Steps:
    """The loops and branches of a capture, and the functions they are given: `rules.Functions`.

    Args:
        mode: of its tensors.
        rules: as for `tracing.trace`, of functions.
        stand_in: gives the fake tensor that stands for a real one.

    Attributes:
        read: the symbols of numbers that are read.
    """

    def __init__(self, mode: FakeTensorMode, rules: Rules, stand_in: Lift) -> None:
        self._mode, self._rules, self._stand_in = mode, rules, stand_in
        self._trained: set[int] = set()  # of tensors that functions have from elsewhere
        self._structure = tree_flatten(())[1]
        self._known_checks: dict[int, Any] = {}
        self.read: set[Any] = set()

    def evaluate(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function in the trace that is going on."""
        leaves, self._structure = tree_flatten(function(*arguments))
        return leaves

    def traced(self, function: Function, arguments: Sequence[Any]) -> Traced:
        """A function's own graph; tensors that it has from elsewhere are inputs."""
        return traced_alone(
            lambda *given: tuple(self.evaluate(function, given)),
            arguments,
            self._mode,
            self._rules,
            self._stand_in,
        )

    def nodes(self, function: Function, arguments: Sequence[Any]) -> list[Node]:
        """The calls in a function."""
        graph = self.traced(function, arguments).module.graph
        return [node for node in graph.nodes if node.op == "call_function"]

    def new_checks(self) -> list[tuple[torch.SymBool, str]]:
        """Conditions on numbers that are read, and what is wrong where they do not hold."""
        env = self._mode.shape_env
        assert env is not None
        found = [check for checks in env.deferred_runtime_asserts.values() for check in checks]
        known = self._known_checks
        new = [check for check in found if id(check) not in known]
        known.update((id(check), check) for check in new)
        # Others are of numbers that only PyTorch's own rules of shapes know.
        return [
            (env.create_symboolnode(check.expr), f"{check.expr} does not hold{_place(check)}")
            for check in new
            if free_unbacked_symbols(check.expr) <= self.read
        ]

    def higher_order(
        self, recorder: StepRecorder, func: HigherOrderOperator, args: Any, kwargs: Any
    ) -> Any:
        """The results of an operator, as others where that can be, or as a step."""
        rule = RULES.get(func)
        cause = "a bundle cannot hold it"
        if kwargs.pop("mutated_arg_indices", ""):  # PyTorch 2.14
            cause, next_step = "its function changes what it is given", "return the new value"
            raise UnsupportedOp(str(func), cause, next_step)
        if rule is not None:
            try:
                results = rule(self, *args, **kwargs)
                return tree_unflatten(results, self._structure)  # of the function called last
            except NotInlined as error:
                cause = str(error)
        layout = _LAYOUTS.get(func)
        if layout is None:
            raise UnsupportedOp(str(func), cause, "leave it out of the exported function")
        bound = inspect.signature(layout.given).bind(*args, **kwargs)
        bound.apply_defaults()
        return self._step(recorder, func, bound.args, layout)

    def _step(
        self, recorder: StepRecorder, func: HigherOrderOperator, args: Any, layout: _Layout
    ) -> Any:
        arguments = list(recorder.lifted(layout.given(*args)))
        functions = [leaf for leaf in tree_leaves(args) if callable(leaf)]
        traced = [self._traced(function, arguments) for function in functions]
        captured = list({id(t): t for found, _ in traced for t in found.captured}.values())
        captured = recorder.lifted(captured)
        is_condition = [func is higher_order.while_loop and k == 0 for k in range(len(functions))]
        modules = iter(
            _module(found, len(arguments), captured, not is_single)
            for (found, _), is_single in zip(traced, is_condition, strict=True)
        )
        found, spec = traced[-1]
        leaves = tree_leaves(tree_map_only(Node, _value, found.results))
        if len(functions) > 1 and not any(is_condition):
            first, *others = (tree_map_only(Node, _value, t.results) for t, _ in traced)
            for other in others:
                _require_alike(func, first, other)
        results = [self._fake(func, like, size) for like, size in layout.results(leaves, *args)]
        *before, last = tree_map_only(callable, lambda _: next(modules), args)
        recorder.step(func, (*before, (*last, *captured)), results)
        operands = [v for v in (*arguments, *captured) if isinstance(v, Tensor)]
        is_trained = any(v.requires_grad or id(v) in self._trained for v in operands)
        if torch.is_grad_enabled() and is_trained:
            like = self._fake(None, results[0], ()).float().requires_grad_()
            refused = _Refused.apply(str(func), results, like)  # type: ignore[no-untyped-call]
            results = list(refused)
        return tree_unflatten(results, spec)

    def _lift(self, value: Tensor) -> Tensor:
        found = self._stand_in(value)
        if value.requires_grad:
            self._trained.add(id(found))
        return found

    def _traced(self, function: Any, arguments: Sequence[Any]) -> tuple[Traced, Any]:
        """A function's own graph, and the structure of its results."""
        spec: list[Any] = []
        recorder = StepRecorder(self._rules, self, self._lift)

        def flat(*given: Any) -> list[Any]:
            leaves, structure = tree_flatten(function(*given))
            spec.append(structure)
            return [recorder.lifted(leaf) for leaf in leaves]

        with clean_dispatch(symbolic=True):
            fakes = [self._fake(None, a) if isinstance(a, Tensor) else a for a in arguments]
            with self._mode:
                for number, value in enumerate(fakes):
                    recorder.input(f"arg{number}", value)
                with recorder:
                    results = flat(*fakes)
                traced = recorder.finish(results)
                if recorder.is_functional:
                    return traced, spec[0]
                again = functional(traced, fakes, StepRecorder(self._rules, self))
        return again, spec[0]

    def _fake(self, func: Any, like: Any, sizes: Sequence[Any] | None = None) -> FakeTensor:
        """A new tensor like another one; in rows, if sizes are given."""
        if not isinstance(like, Tensor):
            raise UnsupportedOp(
                str(func), f"a result is {like!r}, no tensor", "return tensors (torch.tensor)"
            )
        return fake_like(like, self._mode, sizes)


def _place(check: Any) -> str:
    """The user's line of a check."""
    for frame in reversed(check.stack.summary()):
        if not is_own(frame.filename):
            return f", at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


def _value(node: Node) -> Any:
    return node.meta["val"]


def _require_alike(func: Any, one: Sequence[Any], other: Sequence[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) and (a.shape != b.shape or a.dtype is not b.dtype):
            raise UnsupportedOp(
                str(func),
                f"its branches give {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}",
                "give both the same shape and dtype",
            )


def _module(traced: Traced, count: int, captured: Sequence[Tensor], many: bool) -> GraphModule:
    """A function's graph with all ``captured`` tensors among its arguments, and an output."""
    graph = traced.module.graph
    keep_equal(graph)
    results = tuple(tree_leaves(traced.results))
    graph.output(results if many else results[0])
    placeholders = graph.find_nodes(op="placeholder")
    own = dict(zip(map(id, traced.captured), placeholders[count:], strict=True))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for k, value in enumerate(captured):
        node = own.get(id(value))
        if node is None:
            node = graph.placeholder(f"unused{k}")
            node.meta["val"] = value
        first.prepend(node)
    drop_unused(graph)
    traced.module.recompile()
    return traced.module


def keep_equal(graph: Graph) -> None:
    """Checks what tracing has put in the place of numbers that are read.

    Where two have to be equal, as those of rows that are added, PyTorch has one name for both.
    """
    known: set[Any] = set()
    for node in [node for node in graph.nodes if node.target is READ]:
        number = node.meta["val"]
        env = number.node.shape_env
        (symbol,) = number.node._expr.free_symbols
        instead = env.replace(symbol)
        if instead == symbol:  # sympy makes another one once its cache has dropped the first
            known.add(symbol)
            continue
        node.meta["val"] = fresh = env.create_unbacked_symint()
        condition = env.create_symboolnode(sympy.Eq(fresh.node.expr, instead))
        is_known = free_unbacked_symbols(instead) <= known
        with graph.inserting_after(node if is_known else next(iter(reversed(graph.nodes)))):
            check = graph.call_function(CHECK)
        check.args = condition, f"a number that data decide is not {instead}"


def drop_unused(graph: Graph) -> None:
    """Removes what is not needed, also numbers that nobody uses."""
    kept = ("placeholder", "output", READ, CHECK, aten.copy_.default, *ASSERTIONS)
    while True:
        graph.eliminate_dead_code(lambda node: node.op in kept or node.target in kept)
        unused = [n for n in graph.nodes if n.target is READ and not _symbols(n) & _used(graph)]
        if not unused:
            return
        for node in unused:
            graph.erase_node(node)


def _symbols(value: Any) -> set[Any]:
    return {s for e, _ in expressions_in(_value(value)) for s in e.free_symbols}


def _used(graph: Graph) -> set[Any]:
    """The symbols in all that is computed, but for numbers that are read."""
    nodes = [node for node in graph.nodes if node.target is not READ]
    parts = [(node.args, node.kwargs, node.meta.get("val")) for node in nodes]
    return {s for e, _ in expressions_in(parts) for s in e.free_symbols}


# ---- what loops and branches give their functions


def _as_they_are(leaves: Sequence[Any], *_: Any) -> list[tuple[Any, Any]]:
    return [(leaf, None) for leaf in leaves]


def _stacked(leaves: Sequence[Any], init: Sequence[Any], xs: Sequence[Tensor]) -> Any:
    rows = leaves[len(init) :]
    return [*_as_they_are(init), *((row, (xs[0].shape[0], *row.shape)) for row in rows)]


def _first_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [fake_like(x, x.fake_mode, x.shape[1:]) for x in tensors]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Layout:
    """What the arguments of a higher-order operator are to its functions; its operands come last.

    Attributes:
        given: of the operator's arguments, examples of what each function is called with.
        results: of the leaves that the last function gives and the operator's arguments, what the
            operator gives: (a tensor like it, its sizes, if others).
    """

    given: Callable[..., Sequence[Any]]
    results: Callable[..., Sequence[tuple[Any, Any]]] = _as_they_are


_LAYOUTS: Mapping[Any, _Layout] = {
    higher_order.cond: _Layout(lambda predicate, then, otherwise, operands=(): operands),
    getattr(higher_order, "switch", None): _Layout(  # PyTorch 2.14
        lambda index, branches, operands=(): operands
    ),
    higher_order.while_loop: _Layout(
        lambda condition, body, carried, others=(): (*carried, *others),
        lambda leaves, condition, body, carried, others: _as_they_are(carried),
    ),
    higher_order.scan: _Layout(
        lambda step, init, xs, others=(): (*init, *_first_rows(xs), *others),
        lambda leaves, step, init, xs, others: _stacked(leaves, init, xs),
    ),
    higher_order.map_impl: _Layout(
        lambda function, xs, others=(): (*_first_rows(xs), *others),
        lambda leaves, function, xs, others: _stacked(leaves, (), xs),
    ),
    higher_order.associative_scan: _Layout(
        lambda combine, xs, others=(): (*_first_rows(xs), *_first_rows(xs), *others),
        lambda leaves, combine, xs, others: _as_they_are(xs),
    ),
}
