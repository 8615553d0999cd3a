"""What passes over nodes asks the nodes: a kind that this file defines goes through all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir import attention_nodes, depthwise_nodes, nodes, sorting_nodes
from torch_webgpu_compile.ir import interpret as interpreter
from torch_webgpu_compile.ir.at_sizes import at_sizes
from torch_webgpu_compile.ir.buffers import Buffer, BufferOrigin
from torch_webgpu_compile.ir.graph import GraphInput, GraphOutput, LoopGraph
from torch_webgpu_compile.ir.interpret import Array, Run, interpret, interprets
from torch_webgpu_compile.ir.nodes import Pointwise, inputs_of, outputs_of, taken_whole
from torch_webgpu_compile.ir.renaming import rename_node
from torch_webgpu_compile.ir.scalar import Index, Load, Scalar, apply
from torch_webgpu_compile.ir.spaces import (
    Anchor,
    Node,
    Origin,
    Rule,
    Space,
    iteration_symbols,
    operands_of,
    shape_rule,
)
from torch_webgpu_compile.ir.text import format_graph, format_node
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler.rewrites.common_nodes import drop_unit_symbols
from torch_webgpu_compile.scheduler.rewrites.inline import inline_producers
from torch_webgpu_compile.symbolic.sizes import ZERO, Expr, as_expr, contiguous_strides, symbol
from torch_webgpu_compile.target import Target

F32 = dtypes.float32


@dataclass(frozen=True, slots=True)
class LinearRecurrence(Node):
    """output[index(i…, t)] = state(i…, t) = decay(i…) · state(i…, t - 1) + body(i…, t).

    Before the first step, state(i…) is initial[i…]; ``last`` takes the last one, if it is given.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("output", "last")
    INPUTS: ClassVar[tuple[str, ...]] = ("initial",)

    output: str
    initial: str
    rows: tuple[Expr, ...]
    steps: Expr
    index: tuple[Expr, ...]
    decay: Scalar
    body: Scalar
    last: str | None = None

    @property
    def spaces(self) -> dict[str, Space]:
        rows: Space = (("i", self.rows),)
        points: Space = (*rows, ("t", (self.steps,)))
        return {"index": points, "decay": rows, "body": points}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield len(self.index) == len(buffers[self.output].sizes), "an index per dimension"
        yield shape_rule(buffers[self.initial], self.rows)


@interprets(LinearRecurrence)
def _run(run: Run, node: LinearRecurrence) -> list[Array]:
    values = run.computed(node)
    state = run.arrays[node.initial]
    states = []
    for t in range(values["body"].shape[-1]):
        state = values["decay"] * state + values["body"][..., t]
        states.append(state)
    out = np.zeros(run.shape(run.graph.buffers[node.output].sizes), np.float32)
    out[tuple(values["index"])] = np.stack(states, -1)
    return [out] if node.last is None else [out, state]


def buffer(name: str, *sizes: Expr | int, origin: BufferOrigin = BufferOrigin.INPUT) -> Buffer:
    exprs = tuple(map(as_expr, sizes))
    return Buffer(name, F32, exprs, contiguous_strides(exprs), ZERO, origin)


def load(name: str, *index: Expr) -> Load:
    return Load(name, tuple(map(Index, index)), F32)


def whole(found: Buffer) -> GraphOutput:
    return GraphOutput(found.name, found.sizes, found.strides, found.offset)


def graph(rows: int = 2, steps: Expr | int = 4, **changes: object) -> LoopGraph:
    """x · x, and a recurrence over it that is stored with the steps first."""
    made = BufferOrigin.INTERMEDIATE
    buffers = [
        buffer("x", rows, steps),
        buffer("decay", rows),
        buffer("initial", rows),
        buffer("square", rows, steps, origin=made),
        buffer("y", steps, rows, origin=made),
        buffer("last", rows, origin=made),
    ]
    size = as_expr(steps)
    (i,), (t,) = iteration_symbols("i", [rows]), iteration_symbols("t", [size])
    at = iteration_symbols("i", [rows, size])
    square = Pointwise(
        "square", (as_expr(rows), size), apply("mul", load("x", *at), load("x", *at))
    )
    recurrence = LinearRecurrence(
        "y",
        "initial",
        (as_expr(rows),),
        size,
        (t, i),
        load("decay", i),
        load("square", i, t),
        last="last",
        origins=(Origin("test.recurrence"),),
    )
    node = replace(recurrence, **changes)
    return LoopGraph(
        "graph",
        {b.name: b for b in buffers},
        (square, node),
        tuple(GraphInput(name) for name in ("x", "decay", "initial")),
        (whole(buffers[4]), whole(buffers[5])),
    )


def arguments(rows: int = 2, steps: int = 4) -> list[npt.NDArray[np.float32]]:
    draw = np.random.default_rng(0)
    shapes = ((rows, steps), (rows,), (rows,))
    return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def check(made: LoopGraph, rows: int = 2) -> None:
    """The graph's results, of 4 steps, after those that verify it."""
    verify_loop_graph(made)
    x, decay, state = given = arguments(rows)
    y, last = interpret(made, given)
    for t in range(4):
        state = decay * state + x[:, t] ** 2
        np.testing.assert_allclose(y[t], state, rtol=1e-6)
    np.testing.assert_allclose(last, state, rtol=1e-6)


def test_results() -> None:
    check(graph())


def test_names() -> None:
    node = graph().nodes[1]
    assert outputs_of(node) == ("y", "last")
    assert inputs_of(node) == ("decay", "square", "initial")
    assert taken_whole(node) == ("initial",)
    names = {name: name.upper() for name in (*outputs_of(node), *inputs_of(node))}
    renamed = rename_node(node, names)
    assert outputs_of(renamed) == ("Y", "LAST")
    assert inputs_of(renamed) == ("DECAY", "SQUARE", "INITIAL")
    alone = graph(last=None)
    assert outputs_of(alone.nodes[1]) == ("y",)
    assert rename_node(alone.nodes[1], names).mnemonic == "linear_recurrence"


def test_text() -> None:
    assert format_node(graph().nodes[1]) == (
        "y, last = linear_recurrence(initial, [2], index(4), [t0, i0], decay[i0], square[i0, t0])"
        '  # test.recurrence ""'
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": load("decay", *iteration_symbols("t", [4]))}, "symbols of its ranges"),
        ({"index": iteration_symbols("j", [4, 2])}, "symbols of its ranges"),
        ({"body": load("nothing", ZERO)}, "nothing"),
        ({"initial": "nothing"}, "nothing"),
        ({"initial": "y"}, "y written before it is read"),
        ({"last": "x"}, "x written once only"),
        ({"index": iteration_symbols("t", [4])}, "an index per dimension"),
        ({"initial": "x"}, r"ranges .* of its output"),
    ],
)
def test_verification(changes: dict[str, object], message: str) -> None:
    with pytest.raises(VerificationError, match=message) as raised:
        verify_loop_graph(graph(**changes))
    assert "LinearRecurrence" in str(raised.value)


def test_dimensions_of_one_point() -> None:
    dropped = drop_unit_symbols(graph(rows=1))
    assert "[1], index(4), [t0, 0], decay[0], square[0, t0])" in format_graph(dropped)
    check(dropped, rows=1)


def test_known_sizes() -> None:
    s = symbol("s0", 2)
    symbolic = graph(steps=s)
    check(symbolic)
    known = at_sizes(symbolic, {"s0": 4})
    assert known.nodes == graph().nodes
    check(known)


def test_producers_are_inlined() -> None:
    inlined = inline_producers(graph(), Target())
    (node,) = inlined.nodes
    assert inputs_of(node) == ("decay", "x", "initial")
    assert node.extents == (as_expr(2), as_expr(4))
    check(inlined)


def test_unused_nodes_are_dropped() -> None:
    made = graph()
    assert replace(made, outputs=made.outputs[1:]).live().nodes == made.nodes
    assert replace(made, outputs=()).live().nodes == ()


KINDS = [
    kind
    for module in (nodes, attention_nodes, depthwise_nodes, sorting_nodes)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Node) and kind not in (Node, Anchor)
]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: type[Node]) -> None:
    """The interpreter runs them, and their texts, a part of the plan cache's key, show all."""
    assert kind in interpreter._RULES
    shown = {field.name for field in fields(kind) if field.repr}
    hidden = {"safe"} if kind is attention_nodes.Attention else set()  # another mnemonic
    assert shown | hidden == {field.name for field in fields(kind)}
    assert {*kind.INPUTS, *kind.OUTPUTS} <= shown


def test_kinds_without_a_rule_and_with_two() -> None:
    class Unknown(LinearRecurrence):
        pass

    node = graph().nodes[1]
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    made = graph()
    unknown = Unknown(**values)
    assert operands_of(unknown) == operands_of(node)
    with pytest.raises(VerificationError, match="no rule of the interpreter for Unknown"):
        interpret(made.with_nodes((made.nodes[0], unknown), made.buffers), arguments())
    with pytest.raises(ValueError, match="two rules"):
        interprets(LinearRecurrence)(_run)
