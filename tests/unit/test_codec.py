"""What the annotations of dataclasses say is what is written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal

import pytest

from tests.unit.test_serialize import make_plan
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.dtypes import DType
from torch_webgpu_compile.plan import model, numbers
from torch_webgpu_compile.plan.codec import LEFT_OUT, codec_of
from torch_webgpu_compile.plan.model import Plan
from torch_webgpu_compile.plan.numbers import HostNumber
from torch_webgpu_compile.symbolic import nested
from torch_webgpu_compile.symbolic.nested import HostBuffer
from torch_webgpu_compile.symbolic.sizes import Expr, as_expr, iteration, symbol

S = symbol("s", 2)


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True)
class Tree:
    children: tuple[Tree, ...]
    mark: Color | None = None


@dataclass(frozen=True)
class Later:
    x: int
    added: Point | None = field(default=None, metadata=LEFT_OUT)


def through_json(hint: Any, value: Any) -> Any:
    text = json.dumps(codec_of(hint).encode(value), allow_nan=False)
    return codec_of(hint).decode(json.loads(text))


def records(value: Any) -> list[Any]:
    """A dataclass and those in it."""
    if isinstance(value, tuple | dict):
        inner = value.values() if isinstance(value, dict) else value
        return [found for item in inner for found in records(item)]
    if not is_dataclass(value) or isinstance(value, DType):
        return []
    return [value, *(found for f in fields(value) for found in records(getattr(value, f.name)))]


RECORDS = {type(record): record for record in records(make_plan())}


def test_every_dataclass_of_a_plan_is_tried_with_every_field_set() -> None:
    known = {
        kind
        for module in (model, numbers, nested)
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind)
        if kind not in (DType, model.KernelCall)
    }
    assert set(RECORDS) == known
    found = records(make_plan())
    for kind in known:
        for each in fields(kind):
            values = [getattr(record, each.name) for record in found if type(record) is kind]
            assert any(value is False or value not in (None, (), {}) for value in values), each


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_records(kind: type) -> None:
    for record in records(make_plan()):
        if type(record) is kind:
            assert repr(through_json(kind, record)) == repr(record)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_records_have_exactly_their_fields(kind: type) -> None:
    codec = codec_of(kind)
    data = codec.encode(RECORDS[kind])
    assert [*data] == [field.name for field in fields(kind)]
    for name in data:
        rest = {key: value for key, value in data.items() if key != name}
        with pytest.raises(ValueError, match=f"{kind.__name__}.{name} is missing"):
            codec.decode(rest)
        with pytest.raises(ValueError, match="is missing"):
            codec.decode(rest | {"another": None})
    with pytest.raises(ValueError, match=r"has no \['another'\]"):
        codec.decode(data | {"another": None})
    for other in (None, [], [*data.values()], kind.__name__, 1):
        with pytest.raises(ValueError, match=kind.__name__):
            codec.decode(other)


def test_a_field_that_is_left_out() -> None:
    codec = codec_of(Later)
    assert codec.encode(Later(1)) == {"x": 1}
    for value in (Later(1), Later(1, Point(2, 3))):
        assert through_json(Later, value) == value
    for data in ({}, {"x": 1, "other": 2}, {"x": 1, "added": 2}, {"added": {"x": 2, "y": 3}}):
        with pytest.raises(ValueError, match="Later"):
            codec.decode(data)


# Annotation, values, and JSON that is refused.
TYPES: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [0, -1, -(1 << 63), (1 << 63) - 1], [None, True, 1.0, "1", 1 << 63, [1]]),
    (str, ["", "ä\0"], [None, 1, ["x"], {}]),
    (bool, [True, False], [None, 0, 1, "true"]),
    (type(None), [None], [False, 0, ""]),
    (
        float,
        [0.5, -0.0, 1.0, math.inf, -math.inf],
        [None, 1, True, "1.0", "infinity", "NaN", [1.0]],
    ),
    (bytes, [b"", b"\0\xff"], [None, 1, "***", "QQ", "ä", []]),
    (DType, [dtypes.bfloat16, dtypes.bool_], [None, "f32", "float33", 1, ["float32"]]),
    (Literal["a", "b"], ["a", "b"], [None, "c", ["a"], 0]),
    (Color, [Color.RED, Color.BLUE], [None, 1, "GREEN", "red", ["RED"]]),
    (tuple[int, ...], [(), (1,), (1, 2, 3)], [None, 1, "12", {}, ["1"], [[1]]]),
    (tuple[int, str], [(1, "x")], [None, [], [1], [1, "x", 2], ["x", 1], {"0": 1}]),
    (frozenset[int], [frozenset(), frozenset({2, 1})], [None, ["1"], {}]),
    (dict[str, int], [{}, {"a": 1}], [None, [], {"a": "1"}, {"a": None}]),
    (Mapping[str, Point], [{"a": Point(1)}], [None, [], {"a": 1}, {"a": {"Point": {}}}]),
    (int | None, [None, 5], [True, "5", {"int": 5}]),
    (Point | Tree, [Point(1, 2), Tree(())], [None, {}, {"x": 1, "y": 2}, {"Other": {}}, ["Point"]]),
    (int | str | tuple[int, ...], [1, "x", (1, 2)], [None, True, 1.0, ["x"], {"int": 1}]),
    (float | Expr, [1.0, S], [1.0, 1, "inf", {"float": 1}, {"Expr": 1.0}, {"int": 1}]),
    (Expr | None, [None, S * 3 + 1, S // 5, as_expr(7)], [True, 1.5, "s", {"Expr": 1}]),
    (Tree, [Tree((Tree((), Color.RED), Tree((), None)))], [{"children": [], "mark": 1}]),
    (
        Any,
        [(None, True, 1, 1.0, "x", S, (), ((2,),), HostBuffer("b"))],
        [1 << 63, {}, {"Plan": {}}, {"tuple": []}, {"HostBuffer": "b"}, {"a": 1, "b": 2}],
    ),
]


@pytest.mark.parametrize(("hint", "values", "wrong"), TYPES, ids=lambda hint: str(hint)[:20])
def test_types(hint: Any, values: list[Any], wrong: list[Any]) -> None:
    for value in values:
        found = through_json(hint, value)
        assert (found, repr(found)) == (value, repr(value))
    for data in wrong:
        with pytest.raises(ValueError, match=r"."):
            codec_of(hint).decode(data)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (int, 1 << 63),
        (float, 1),
        (bytes, "x"),
        (Color, "RED"),
        (Literal["a"], "b"),
        (tuple[int, ...], [1]),
        (tuple[int, int], (1,)),
        (frozenset[int], {1}),
        (dict[str, int], {1: 1}),
        (Point, Tree(())),
        (int | str, 1.0),
        (Expr, 1),
        (Expr, iteration("i", 4)),
        (Any, object()),
        (Any, (object(),)),
        (Plan, replace(make_plan(), name=1)),
    ],
)
def test_values_of_another_type_are_not_written(hint: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec_of(hint).encode(value)


@pytest.mark.parametrize(
    "hint", [complex, list[int], dict[int, int], Literal[1], Literal["a"] | int, object]
)
def test_annotations_without_a_codec(hint: Any) -> None:
    with pytest.raises(NotImplementedError):
        codec_of(hint)


def test_nan_is_a_float() -> None:
    assert math.isnan(through_json(float, math.nan))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"c": 1}, "no size"),
        ({"c": 1, "t": [], "x": 0}, "no size"),
        ({"c": 1, "t": [[]]}, "no term"),
        ({"c": 1, "t": [[1, "s"]]}, "no symbol"),
        ({"c": 1, "t": [[1, ["*", 1, 2]]]}, "no symbol"),
        ({"c": 1, "t": [[1, ["%", 1, 0]]]}, "not positive"),
        ({"c": 1, "t": [[1, ["s", 1 << 63]]]}, "64-bit"),
        ({"c": 1, "t": [[1, ["s", None]]]}, "64-bit"),
        ({"c": 1, "t": [[True, ["s", 0]]]}, "64-bit"),
        ({"c": 1, "t": [[1 << 62, ["s", 0]], [1 << 62, ["s", 0]]]}, "64-bit"),
        ({"c": 1, "t": [[1, *[["s", 0]] * 32]]}, "degree"),
    ],
)
def test_sizes_are_checked(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec_of(Expr).decode(data)


@pytest.mark.parametrize(("op", "count"), [("sqrt", 2), ("add", 1), ("eval", 1), ("", 0)])
def test_numbers_are_checked(op: str, count: int) -> None:
    data = {"op": op, "args": [{"float": 1.0}] * count}
    with pytest.raises(ValueError, match="no function"):
        codec_of(HostNumber).decode(data)
